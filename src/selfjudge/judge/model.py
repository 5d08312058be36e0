"""The judge: a tiny classifier that says whether a draft token keeps the target's meaning.

It reads what the verification pass computed anyway, so it costs one small matrix product and no forward pass.
It outputs P(acceptable); a draft is accepted when that is *greater than* θ, so θ = 1 accepts nothing.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfjudge.errors import SelfJudgeError, first_line
from selfjudge.ops.argmax import has_triton
from selfjudge.store import read_json, write_json, write_tensors
from selfjudge.types import JUDGE_FEATURES, JUDGE_MODELS, Block

if TYPE_CHECKING:
    from selfjudge.ops.judge_score_triton import Weights

FORMAT_VERSION = 1
MARGINS = 1  # columns of the group: log p(d) − log p(most likely)
LOOKAHEAD = 4  # draft tokens after the judged one whose log-probabilities are read
LOWEST = -50.0  # log-probabilities below say nothing more


def columns(features: str) -> int:
    """How many columns `features` has beside the hidden state."""
    return MARGINS * ("margin" in features) + 2 * LOOKAHEAD * ("lookahead" in features)


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
    suffix_gap: int = 0
    tau: float | None = None
    acceptable: float | None = None
    """The share of the mismatches that τ was chosen to call acceptable, where it was chosen so."""
    sources: tuple[str, ...] = ()
    """Of the prompts it was labelled with, where that is known."""
    quality_curve: tuple[tuple[float, float], ...] = ()
    """(share of unacceptable tokens that is rejected, the most permissive θ that does so), ascending."""
    thresholds: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    @property
    def width(self) -> int:
        """Columns that the judge reads."""
        return self.hidden_size + columns(self.features)


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
        for key, known in (("features", JUDGE_FEATURES), ("model", JUDGE_MODELS)):
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
        self.register_buffer("weight", weight)
        self.register_buffer("bias", torch.as_tensor(bias, dtype=torch.float32).reshape(()))
        self.register_buffer("inner_weight", inner_weight)
        self.register_buffer("inner_bias", inner_bias)

    @classmethod
    def constant(cls, probability: float, hidden_size: int) -> Judge:
        """A judge that gives every draft the same P(acceptable): 1 always accepts (θ < 1), 0 never does."""
        if probability in (0.0, 1.0):
            bias = math.copysign(math.inf, probability - 0.5)
        else:
            bias = math.log(probability / (1 - probability))
        return cls(JudgeConfig(hidden_size=hidden_size, label_method="constant"), bias=bias)

    def forward(self, block: Block) -> Tensor:
        """[B, γ] P(acceptable) of each draft, from the hidden state at that draft; NaN where that is broken."""
        if block.hidden is None:
            raise SelfJudgeError("the judge needs the target's hidden states and this backend returned none")
        if block.argmax is not None and block.hidden.is_cuda and (fused := self.fused()) is not None:
            from selfjudge.ops.judge_score_triton import scores

            with torch.cuda.device(block.hidden.device):  # kernels are launched on the current device
                return scores(fused, block.hidden, block.target_logits, block.argmax[0], block.draft_tokens)
        said = self.score(block_features(block, self.config.features))
        return torch.where(block.hidden[:, 1:].isfinite().all(-1), said, math.nan)

    def fused(self) -> Weights | None:
        """What the judge as one kernel reads; None where there is no Triton for this platform, or no kernel for this judge."""
        if type(self) is not Judge or "lookahead" in self.config.features or not has_triton():
            return None
        from selfjudge.ops.judge_score_triton import Weights

        margin = "margin" in self.config.features
        return Weights(self.weight, self.bias, self.inner_weight, self.inner_bias, margin, LOWEST)

    def score(self, x: Tensor) -> Tensor:
        """[..., hidden size + columns] → [...]"""
        x = x.float()
        if self.inner_weight is not None:
            x = F.gelu(F.linear(x, self.inner_weight, self.inner_bias))
        return torch.sigmoid(x @ self.weight + self.bias)

    def threshold(self, theta: float | str) -> float:
        """A number in [0, 1], one of the stored thresholds by name (`F`, `R`), or `q0.9`: the one of quality 0.9."""
        if isinstance(theta, str) and theta.startswith("q"):
            try:
                return self.quality(float(theta[1:]))
            except ValueError:
                raise SelfJudgeError(
                    f"{theta!r} names no quality: write q and a share in [0, 1], such as q0.9"
                ) from None
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

    def quality(self, share: float) -> float:
        """The most permissive θ that rejected at least this share of the unacceptable tokens it was measured on."""
        if not 0 <= share <= 1:
            raise SelfJudgeError(f"quality is a share in [0, 1], not {share}")
        if not self.config.quality_curve:
            raise SelfJudgeError("this judge stores no quality curve: give --theta")
        return next((theta for rejected, theta in self.config.quality_curve if rejected >= share), 1.0)

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
        """Load a judge folder or a repository of the hub; anything this version does not understand is refused."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        folder = _folder(source)
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
        _checked(folder, raw)
        given: dict[str, Any] = {k: v for k, v in raw.items() if k in known}
        config = JudgeConfig(**given | {"sources": tuple(given.get("sources", ()))})
        readable: dict[str, tuple[str, ...]] = {
            "layer": ("final",), "norm": ("post_final_norm",), "features": JUDGE_FEATURES, "model": JUDGE_MODELS,
        }  # fmt: skip
        for key, values in readable.items():
            if getattr(config, key) not in values:
                raise SelfJudgeError(
                    f"{folder} has {key} {getattr(config, key)!r}, this version reads {' and '.join(map(repr, values))}"
                )
        expected = {"weight", "bias", *(("inner_weight", "inner_bias") if config.model == "mlp" else ())}
        try:
            tensors = load_file(folder / "model.safetensors")
        except (OSError, SafetensorError) as error:
            raise SelfJudgeError(f"cannot read {folder / 'model.safetensors'}: {error}") from None
        if tensors.keys() != expected:
            raise SelfJudgeError(
                f"{folder / 'model.safetensors'} holds {', '.join(sorted(tensors)) or 'nothing'}, a judge of model {config.model} has"
                f" {', '.join(sorted(expected))}"
            )
        return cls(config, **tensors)


def _checked(folder: Path, raw: Mapping[str, Any]) -> None:
    """Refuse values that no judge of this version has: a folder may come from anywhere."""

    def share(value: Any) -> bool:
        return isinstance(value, (int, float)) and 0 <= value <= 1

    good = {
        "hidden_size": lambda v: isinstance(v, int) and v > 0,
        "thresholds": lambda v: isinstance(v, dict) and all(share(theta) for theta in v.values()),
        "quality_curve": lambda v: isinstance(v, list) and all(isinstance(p, list) and len(p) == 2 and all(map(share, p)) for p in v),
        "metrics": lambda v: isinstance(v, dict),
        "sources": lambda v: isinstance(v, list) and all(isinstance(name, str) for name in v),
    }  # fmt: skip
    for key, holds in good.items():
        if key in raw and not holds(raw[key]):
            raise SelfJudgeError(f"{folder}/config.json has a {key} that no judge has: {str(raw[key])[:60]}")


def block_features(block: Block, features: str) -> Tensor:
    """[B, γ, H + columns] what a judge reads of a Block; row i is the state at d_i and what was said of d_i."""
    assert block.hidden is not None
    choice = None if block.argmax is None else block.argmax[0][:, :-1]
    return token_features(block.hidden[:, 1:], block.target_logits[:, :-1], block.draft_tokens, features, choice=choice)


def token_features(
    hidden: Tensor, logits: Tensor, drafts: Tensor, features: str, owner: Tensor | None = None,
    choice: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """States at drafts [..., H], the rows that predict them [..., V] and the drafts [...] → [..., H + columns].

    The last axis of `drafts` is a block, or several one after another: `owner` [...] then says which. `choice` [...] are the
    most likely tokens, if they are known.
    """
    hidden = hidden.float()
    if features == "hidden":
        return hidden
    at = logits.gather(-1, drafts[..., None]).squeeze(-1).float()
    best = logits.amax(-1) if choice is None else logits.gather(-1, choice[..., None]).squeeze(-1)
    parts = [(at - best.float())[..., None]]  # Δ log p = Δ logit
    if "lookahead" in features:
        parts.append(lookahead_columns(at - logits.float().logsumexp(-1), owner))
    return torch.cat([hidden, *(part.clamp_min(LOWEST) for part in parts)], -1)


def lookahead_columns(log_p: Tensor, owner: Tensor | None = None) -> Tensor:
    """[..., γ] log-probabilities of the drafts → [..., γ, 2K]: those of the K drafts after each, 0 past the end of its block,
    and which there are."""
    block = torch.zeros_like(log_p, dtype=torch.long) if owner is None else owner

    def after(x: Tensor, fill: int) -> Tensor:
        return F.pad(x, (0, LOOKAHEAD), value=fill).unfold(-1, LOOKAHEAD, 1)[..., 1:, :]

    there = after(block, -1) == block[..., None]
    return torch.cat([torch.where(there, after(log_p, 0), 0), there.to(log_p.dtype)], -1)


def push_folder(folder: Path, repository: str, api: Any, **options: Any) -> str:
    """Upload a whole folder, card and figures included."""
    try:
        api.create_repo(repository, exist_ok=True, **options)
        return str(api.upload_folder(folder_path=folder, repo_id=repository, commit_message="Judge made by selfjudge"))
    except Exception as error:  # the hub client raises many kinds
        raise SelfJudgeError(f"cannot upload to {repository}: {first_line(error)}") from None


def _folder(source: str | Path) -> Path:
    """A local folder, or the local copy of a hub repository `owner/name`."""
    folder = Path(source).expanduser()
    text = str(source)
    if isinstance(source, Path) or folder.exists() or text.count("/") != 1 or text.startswith((".", "~", "/")):
        return folder
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(text, allow_patterns=["config.json", "model.safetensors", "README.md"]))
    except Exception as error:  # the hub client raises many kinds
        raise SelfJudgeError(f"{text} is no folder, and the hub did not give it ({first_line(error)})") from None
