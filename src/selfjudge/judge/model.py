"""The judge: a tiny classifier that says whether a draft token keeps the target's meaning.
It costs one small matrix product and no forward pass. P(acceptable) must be *greater than* θ: θ = 1 accepts nothing."""

from __future__ import annotations

import hashlib
import math
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from selfjudge.errors import SelfJudgeError
from selfjudge.judge.config import LOWEST, JudgeConfig, find_judge
from selfjudge.ops import has_triton
from selfjudge.store import read_tensors, write_json, write_tensors
from selfjudge.types import Block

if TYPE_CHECKING:
    from selfjudge.ops.kernels_triton import JudgeWeights


def margins(logits: Tensor, drafts: Tensor, choice: Tensor | None = None) -> Tensor:
    """[...] log p(d) − log p(most likely token) of the drafts [...], from the rows [..., V] that predict them."""
    at = logits.gather(-1, drafts[..., None]).squeeze(-1).float()
    best = logits.amax(-1) if choice is None else logits.gather(-1, choice[..., None]).squeeze(-1)
    return at - best.float()  # Δ log p = Δ logit


def join_features(features: str, hidden: Tensor, margin: Tensor | None, before: Tensor | None) -> Tensor:
    """The columns [..., D] that `features` names, from states [..., H] and margins [...]; others may be None."""
    parts = [hidden.float()]
    if "margin" in features:
        assert margin is not None
        parts.append(margin.float().clamp_min(LOWEST)[..., None])
    if "previous" in features:
        assert before is not None
        parts.append(before.float())
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


class Judge(nn.Module):
    """P(acceptable) = σ(w·x + b): x is the target's state at the draft and, by `config.features`, log-probabilities."""

    weight: Tensor
    bias: Tensor
    folder: Path | None = None  # that it was loaded from

    def __init__(self, config: JudgeConfig, weight: Tensor | None = None, bias: float | Tensor = 0.0) -> None:
        super().__init__()
        self.config = config
        self._copies: dict[torch.device, Judge] = {}  # on other devices
        weight, bias = torch.zeros(config.width) if weight is None else weight, torch.as_tensor(bias)
        for name, tensor, shape in (("weight", weight, (config.width,)), ("bias", bias, ())):
            if tensor.shape != shape:
                raise SelfJudgeError(
                    f"judge {name} has {tensor.numel()} entries ({list(tensor.shape)}), its config says hidden_size"
                    f" {config.hidden_size} and features {config.features}: {list(shape)}"
                )
            self.register_buffer(name, tensor.detach().float())

    def forward(self, block: Block) -> Tensor:
        """[B, γ] P(acceptable) of each draft, from the hidden state at that draft; NaN where that is non-finite."""
        if block.hidden is None:
            raise SelfJudgeError("the judge needs the target's hidden states and this backend returned none")
        if block.argmax is not None and block.hidden.is_cuda and (fused := self.kernel_weights()) is not None:
            from selfjudge.ops.kernels_triton import draft_scores

            with torch.cuda.device(block.hidden.device):  # kernels are launched on the current device
                return draft_scores(fused, block.hidden, block.target_logits, block.argmax[0], block.draft_tokens)
        choice = None if block.argmax is None else block.argmax[0][:, :-1]
        hidden, before = block.hidden[:, 1:], block.hidden[:, :-1]
        return self.score_drafts(hidden, before, block.target_logits[:, :-1], block.draft_tokens, choice)

    def score_drafts(
        self, hidden: Tensor, before: Tensor, logits: Tensor, drafts: Tensor, choice: Tensor | None = None
    ) -> Tensor:
        """[...] P(acceptable) of drafts [...]: 0 beyond the margin limit, NaN where a state that is read is non-finite.
        States at the drafts and `before` them are [..., H], the rows that predict the drafts [..., V]; `choice` [...]
        are the target's most likely tokens, if known."""
        features, limit = self.config.features, self.config.margin_limit
        margin = None if limit is None and "margin" not in features else margins(logits, drafts, choice)
        scores = self.score(join_features(features, hidden, margin, before))
        if margin is not None and limit is not None:
            scores = torch.where(margin < -limit, 0.0, scores)
        finite = hidden.isfinite().all(-1)
        if "previous" in features:
            finite = finite & before.isfinite().all(-1)
        return torch.where(finite, scores, math.nan)

    def on(self, device: torch.device) -> Judge:
        """The judge on a device: itself, or a copy, the same every time: pairs on other devices may use it, too."""
        if device == self.weight.device:
            return self
        if device not in self._copies:
            self._copies[device] = deepcopy(self).to(device)
        return self._copies[device]

    def kernel_weights(self) -> JudgeWeights | None:
        """What the kernel reads; None without Triton, or where there is no kernel for this judge."""
        if type(self) is not Judge or not has_triton():
            return None
        from selfjudge.ops.kernels_triton import JudgeWeights

        return JudgeWeights.of(self.weight, self.bias, self.config.features, LOWEST, self.config.margin_limit)

    def score(self, x: Tensor) -> Tensor:
        """[..., D] → [...]"""
        return torch.sigmoid(x.float() @ self.weight + self.bias)

    def digest(self) -> str:
        """SHA-256 of all that the judge's scores depend on: its weights, features and margin limit."""
        digest = hashlib.sha256(repr((self.config.features, self.config.margin_limit)).encode())
        for tensor in self.buffers():
            digest.update(tensor.float().cpu().numpy().tobytes())  # a copy: captured graphs hold the buffers themselves
        return digest.hexdigest()

    def threshold(self, theta: float | str | None) -> float:
        """θ by number or by name: `JudgeConfig.threshold`."""
        return self.config.threshold(theta)

    def quality(self, share: float) -> float:
        """θ that rejects this share of bad substitutions: `JudgeConfig.quality`."""
        return self.config.quality(share)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `model.safetensors`, then `config.json` (its existence means the folder is whole)."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").unlink(missing_ok=True)
        write_tensors(folder / "model.safetensors", {name: t.cpu().numpy() for name, t in self.named_buffers()})
        write_json(folder / "config.json", asdict(self.config))

    @classmethod
    def from_pretrained(cls, source: str | Path) -> Judge:
        """Load a judge by embedded name, folder or hub id; anything this version does not understand is refused."""
        folder = find_judge(source)
        config, file = JudgeConfig.from_pretrained(folder), folder / "model.safetensors"
        tensors = {name: torch.from_numpy(array) for name, array in read_tensors(file)[0].items()}
        if tensors.keys() != {"weight", "bias"}:
            raise SelfJudgeError(f"{file} holds {', '.join(sorted(tensors)) or 'nothing'}, a judge has bias, weight")
        for name, tensor in tensors.items():
            if not (tensor.is_floating_point() and bool(tensor.float().isfinite().all())):
                raise SelfJudgeError(f"{file} has weights that are not finite numbers ({name})")
        judge = cls(config, **tensors)
        judge.folder = folder
        return judge
