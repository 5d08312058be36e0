"""The judge: a tiny classifier that says whether a draft token keeps the target's meaning.

It reads what the verification pass computed anyway, so it costs one small matrix product and no forward pass.
It outputs P(acceptable); a draft is accepted when that is *greater than* θ, so θ = 1 accepts nothing.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfjudge.errors import SelfJudgeError
from selfjudge.judge.config import FEATURES, LOWEST, MODELS, JudgeConfig
from selfjudge.judge.features import block_features, margins
from selfjudge.judge.hub import find_judge, push_folder
from selfjudge.ops.argmax import has_triton
from selfjudge.store import write_json, write_tensors
from selfjudge.types import Block

if TYPE_CHECKING:
    from selfjudge.ops.judge_score_triton import JudgeWeights


class Judge(nn.Module):
    """P(acceptable) = σ(w·x + b), or σ(w·gelu(Ax + a) + b) for an MLP.

    x is the target's hidden state h at the draft token and, by `config.features`, log-probabilities of the same pass.
    """

    weight: Tensor
    bias: Tensor
    inner_weight: Tensor | None
    inner_bias: Tensor | None

    def __init__(
        self, config: JudgeConfig, weight: Tensor | None = None, bias: float | Tensor = 0.0,
        inner_weight: Tensor | None = None, inner_bias: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.config = config
        for key, known in (("features", FEATURES), ("model", MODELS)):
            if getattr(config, key) not in known:
                raise SelfJudgeError(
                    f"unknown {key} {getattr(config, key)!r} of a judge; there are: {', '.join(known)}"
                )
        if (inner_weight is None) != (inner_bias is None) or (inner_weight is None) != (config.model == "linear"):
            raise SelfJudgeError(f"a judge of model {config.model} has other tensors")
        if inner_weight is not None and inner_bias is not None:
            inner_weight, inner_bias = inner_weight.detach().float(), inner_bias.detach().float().reshape(-1)
            if inner_weight.shape != (inner_bias.numel(), config.width):
                raise SelfJudgeError(
                    f"judge layer is {tuple(inner_weight.shape)}, its config says {config.width} columns"
                )
        inputs = config.width if inner_bias is None else inner_bias.numel()
        weight = torch.zeros(inputs) if weight is None else weight.detach().float().reshape(-1)
        if weight.numel() != inputs:
            raise SelfJudgeError(
                f"judge weight has {weight.numel()} entries, its config says hidden_size {config.hidden_size}"
                f" and features {config.features}: {inputs}"
            )
        bias = torch.as_tensor(bias, dtype=torch.float32)
        if bias.numel() != 1:
            raise SelfJudgeError(f"judge bias has {bias.numel()} entries, not one")
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias.reshape(()))
        self.register_buffer("inner_weight", inner_weight)
        self.register_buffer("inner_bias", inner_bias)

    @classmethod
    def constant(cls, probability: float, hidden_size: int) -> Judge:
        """A judge that gives every draft the same P(acceptable): 1 always accepts (θ < 1), 0 never does."""
        if probability in (0.0, 1.0):
            bias = math.copysign(200.0, probability - 0.5)  # its σ is 0 or 1 in float32
        else:
            bias = math.log(probability / (1 - probability))
        return cls(JudgeConfig(hidden_size=hidden_size, label_method="constant"), bias=bias)

    def forward(self, block: Block) -> Tensor:
        """[B, γ] P(acceptable) of each draft, from the hidden state at that draft; NaN where that is non-finite."""
        if block.hidden is None:
            raise SelfJudgeError("the judge needs the target's hidden states and this backend returned none")
        if block.argmax is not None and block.hidden.is_cuda and (fused := self.kernel_weights()) is not None:
            from selfjudge.ops.judge_score_triton import draft_scores

            with torch.cuda.device(block.hidden.device):  # kernels are launched on the current device
                return draft_scores(fused, block.hidden, block.target_logits, block.argmax[0], block.draft_tokens)
        choice = None if block.argmax is None else block.argmax[0][:, :-1]
        scores = self.score(block_features(block, self.config.features))
        scores = self.apply_margin_limit(scores, block.target_logits[:, :-1], block.draft_tokens, choice)
        return self.mask_non_finite(scores, block.hidden[:, 1:], block.hidden[:, :-1])

    def mask_non_finite(self, scores: Tensor, hidden: Tensor, before: Tensor) -> Tensor:
        """Scores [...] of drafts, but NaN where a state [..., H] that the judge reads is non-finite."""
        finite = hidden.isfinite().all(-1)
        if "previous" in self.config.features:
            finite = finite & before.isfinite().all(-1)
        return torch.where(finite, scores, math.nan)

    def apply_margin_limit(
        self, scores: Tensor, logits: Tensor, drafts: Tensor, choice: Tensor | None = None
    ) -> Tensor:
        """Scores [...] of drafts [...], but 0 beyond `config.margin_limit`; arguments as of `features.margins`."""
        if self.config.margin_limit is None:
            return scores
        return torch.where(margins(logits, drafts, choice) < -self.config.margin_limit, 0.0, scores)

    def kernel_weights(self) -> JudgeWeights | None:
        """What the kernel reads; None without Triton, or where there is no kernel for this judge."""
        if type(self) is not Judge or not has_triton():
            return None
        from selfjudge.ops.judge_score_triton import JudgeWeights

        margin, previous = ("margin" in self.config.features, "previous" in self.config.features)
        limit = math.inf if self.config.margin_limit is None else self.config.margin_limit
        return JudgeWeights(self.weight, self.bias, self.inner_weight, self.inner_bias, margin, previous, LOWEST, limit)

    def score(self, x: Tensor) -> Tensor:
        """[..., D] → [...]"""
        x = x.float()
        if self.inner_weight is not None:
            x = F.gelu(F.linear(x, self.inner_weight, self.inner_bias))
        return torch.sigmoid(x @ self.weight + self.bias)

    def digest(self) -> str:
        """SHA-256 of all that the judge's scores depend on: its weights, features and margin limit."""
        digest = hashlib.sha256(repr((self.config.features, self.config.margin_limit)).encode())
        for tensor in self.buffers():
            digest.update(tensor.float().cpu().numpy().tobytes())  # a copy: captured graphs hold the buffers themselves
        return digest.hexdigest()

    def threshold(self, theta: float | str) -> float:
        """θ by number or by name: `JudgeConfig.threshold`."""
        return self.config.threshold(theta)

    @property
    def default_threshold(self) -> float:
        return self.config.default_threshold

    def quality(self, share: float) -> float:
        """θ that rejects this share of bad substitutions: `JudgeConfig.quality`."""
        return self.config.quality(share)

    def check_target(self, name: str, sha256: str, hidden_size: int) -> None:
        """Refuse a target this judge was not trained for."""
        self.config.check_target(name, sha256, hidden_size)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `model.safetensors`, then `config.json` (its existence means the folder is whole)."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").unlink(missing_ok=True)
        write_tensors(folder / "model.safetensors", {name: t.cpu().numpy() for name, t in self.named_buffers()})
        write_json(folder / "config.json", asdict(self.config))

    def push_to_hub(self, repository: str, **options: Any) -> str:
        """Upload as a model repository of the hub (`private=True` and the like go to `create_repo`); its address."""
        from huggingface_hub import HfApi

        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return push_folder(Path(folder), repository, HfApi(), **options)

    @classmethod
    def from_pretrained(cls, source: str | Path) -> Judge:
        """Load a judge by embedded name, folder or hub id; anything this version does not understand is refused."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        folder = find_judge(source)
        config, file = JudgeConfig.from_pretrained(folder), folder / "model.safetensors"
        expected = {"weight", "bias", *(("inner_weight", "inner_bias") if config.model == "mlp" else ())}
        try:
            tensors = load_file(file)
        except (OSError, SafetensorError) as error:
            raise SelfJudgeError(f"cannot read {file}: {error}") from None
        if tensors.keys() != expected:
            raise SelfJudgeError(
                f"{file} holds {', '.join(sorted(tensors)) or 'nothing'}, a judge of model {config.model} has"
                f" {', '.join(sorted(expected))}"
            )
        for name, tensor in tensors.items():
            if not (tensor.is_floating_point() and bool(tensor.float().isfinite().all())):
                raise SelfJudgeError(f"{file} has weights that are not finite numbers ({name})")
        return cls(config, **tensors)
