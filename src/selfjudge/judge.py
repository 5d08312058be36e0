"""The judge: a tiny classifier that says whether a draft token keeps the target's meaning.

It reads what the verification pass computed anyway, so it costs one small matrix product and no forward pass.
It outputs P(acceptable); a draft is accepted when that is *greater than* θ, so θ = 1 accepts nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from selfjudge.errors import SelfJudgeError
from selfjudge.store import read_json, write_json
from selfjudge.types import Block

FORMAT_VERSION = 1


@dataclass(frozen=True)
class JudgeConfig:
    """Where a judge comes from and what it reads. The target must be the one named (an empty name or hash matches any);
    the draft is recorded, not required: another draft for the same target is fine."""

    hidden_size: int
    target: str = ""
    draft: str = ""
    target_sha256: str = ""
    draft_sha256: str = ""
    layer: str = "final"
    norm: str = "post_final_norm"
    features: str = "hidden"
    model: str = "linear"
    label_method: str = ""
    suffix_length: int | None = None
    tau: float | None = None
    quality_curve: tuple[tuple[float, float], ...] = ()
    thresholds: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION


class Judge(nn.Module):
    """P(acceptable) = σ(w·h + b) of the target's hidden state h at the draft token."""

    def __init__(self, config: JudgeConfig, weight: Tensor | None = None, bias: float | Tensor = 0.0) -> None:
        super().__init__()
        self.config = config
        self.weight: Tensor
        self.bias: Tensor
        weight = torch.zeros(config.hidden_size) if weight is None else weight.detach().float().reshape(-1)
        if weight.numel() != config.hidden_size:
            raise SelfJudgeError(
                f"judge weight has {weight.numel()} entries, its config says hidden_size {config.hidden_size}"
            )
        self.register_buffer("weight", weight)
        self.register_buffer("bias", torch.as_tensor(bias, dtype=torch.float32).reshape(()))

    @classmethod
    def constant(cls, probability: float, hidden_size: int) -> Judge:
        """A judge that gives every draft the same P(acceptable): 1 always accepts (θ < 1), 0 never does."""
        if probability in (0.0, 1.0):
            bias = math.copysign(math.inf, probability - 0.5)
        else:
            bias = math.log(probability / (1 - probability))
        return cls(JudgeConfig(hidden_size=hidden_size, label_method="constant"), bias=bias)

    def forward(self, block: Block) -> Tensor:
        """[B, γ] P(acceptable) of each draft, from the hidden state at that draft."""
        if block.hidden is None:
            raise SelfJudgeError("the judge needs the target's hidden states and this backend returned none")
        return self.score(block.hidden[:, 1:])  # row i is the state at d_i

    def score(self, hidden: Tensor) -> Tensor:
        """[..., H] → [...]"""
        return torch.sigmoid(hidden.float() @ self.weight + self.bias)

    def threshold(self, theta: float | str) -> float:
        """A number in [0, 1], or one of the stored thresholds by name (`F`, `R`)."""
        if isinstance(theta, str):
            if theta not in self.config.thresholds:
                known = ", ".join(sorted(self.config.thresholds)) or "none"
                raise SelfJudgeError(
                    f"this judge stores no threshold {theta!r} (it has: {known}); give a number in [0, 1]"
                )
            theta = self.config.thresholds[theta]
        if not 0.0 <= theta <= 1.0:
            raise SelfJudgeError(f"threshold θ must lie in [0, 1], not {theta}")
        return float(theta)

    def check_target(self, name: str, sha256: str, hidden_size: int) -> None:
        """Refuse a target this judge was not trained for."""
        config = self.config
        if config.hidden_size != hidden_size:
            raise SelfJudgeError(
                f"this judge reads hidden states of width {config.hidden_size}, the target {name} has {hidden_size}:"
                " use a judge trained for this target"
            )
        if config.target_sha256 and sha256:
            same = config.target_sha256 == sha256
        else:
            same = not config.target or config.target == name
        if not same:
            raise SelfJudgeError(
                f"this judge was trained for {config.target or 'another model'} (sha256 {config.target_sha256[:12] or 'unknown'}),"
                f" not for {name} ({sha256[:12] or 'unknown'}): use a judge trained for this target"
            )

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `model.safetensors`, then `config.json` (its existence means the folder is whole)."""
        from safetensors.torch import save_file

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").unlink(missing_ok=True)
        save_file({"weight": self.weight.cpu().contiguous(), "bias": self.bias.cpu()}, folder / "model.safetensors")
        write_json(folder / "config.json", asdict(self.config))

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Judge:
        """Load a judge folder; anything this version does not understand is refused."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        folder = Path(folder)
        if not (folder / "config.json").is_file():
            raise SelfJudgeError(f"{folder} is no judge folder: it has no config.json")
        raw: dict[str, Any] = read_json(folder / "config.json")
        if not isinstance(raw, dict):
            raise SelfJudgeError(f"{folder}/config.json is no JSON object")
        if raw.get("format_version") != FORMAT_VERSION:
            raise SelfJudgeError(
                f"{folder} has judge format {raw.get('format_version')}, this version reads {FORMAT_VERSION}"
            )
        known = {f.name for f in fields(JudgeConfig)}
        if "hidden_size" not in raw:
            raise SelfJudgeError(f"{folder}/config.json names no hidden_size")
        config = JudgeConfig(**{k: v for k, v in raw.items() if k in known})
        for key, only in (("layer", "final"), ("norm", "post_final_norm"), ("features", "hidden"), ("model", "linear")):
            if getattr(config, key) != only:
                raise SelfJudgeError(f"{folder} has {key} {getattr(config, key)!r}, this version reads {only!r}")
        try:
            tensors = load_file(folder / "model.safetensors")
            return cls(config, tensors["weight"], tensors["bias"])
        except (OSError, KeyError, SafetensorError) as error:
            raise SelfJudgeError(f"cannot read {folder / 'model.safetensors'}: {error}") from None
