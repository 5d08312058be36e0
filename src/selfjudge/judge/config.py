"""Folders of judges (shipped, local, of the hub): `config.json` and the prompts of the training. Imports no torch."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from selfjudge.errors import SelfJudgeError, expect, first_line
from selfjudge.store import hub_options, read_json, unreachable, write_json
from selfjudge.store.schema import Count, Range, Share
from selfjudge.types import DEFAULT_THETA

FEATURES = ("hidden", "hidden+margin", "hidden+margin+previous")
SCORES = ("likelihood", "confidence")
LOWEST = -50.0  # log-probabilities below say nothing more
PROMPTS_FILE = "prompts.json"
KEY_DIGITS = 16  # of a prompt's key that are kept


def feature_width(features: str, hidden_size: int) -> int:
    """Number of columns: the state at the token, then the margin, then the state at the token before."""
    return hidden_size * (1 + ("previous" in features)) + ("margin" in features)


@dataclass(frozen=True)
class JudgeConfig:
    """Where a judge comes from and what it reads; the types are the file's schema. A file must name the target, which
    is checked; the draft is for information: another draft for the same target is fine."""

    hidden_size: Annotated[int, Range(1, 1 << 20)]
    target: str = ""
    draft: str = ""
    target_sha256: str = ""
    draft_sha256: str = ""
    layer: Literal["final"] = "final"
    norm: Literal["post_final_norm"] = "post_final_norm"
    features: Annotated[str, Literal[FEATURES]] = "hidden"
    model: Literal["linear"] = "linear"
    label_method: str = ""
    suffix_length: Count | None = None
    suffix_gap: Count = 0
    score: Annotated[str, Literal[SCORES]] = "likelihood"
    tau: float | None = None
    acceptable: Share | None = None  # share of the mismatches that τ was chosen to call acceptable, if it was
    margin_limit: Annotated[float, Range(0, -LOWEST)] | None = None
    """The judge has no say where the target prefers its own token by more than so many nats."""
    sources: tuple[str, ...] = ()  # sources of the prompts that it was labelled with, where they are known
    labels_sha256: str = ""  # SHA-256 over the checksums of all files of its label folders
    quality_curve: tuple[tuple[Share, Share], ...] = ()
    """(share of unacceptable tokens that is rejected, the most permissive θ that does so), ascending."""
    thresholds: Mapping[str, Share] = field(default_factory=dict)
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    format_version: Literal[1] = 1

    @classmethod
    def from_pretrained(cls, source: str | Path) -> JudgeConfig:
        """The config of a judge by embedded name, folder or hub id; what this version cannot read is refused."""
        folder = find_judge(source)
        if not (folder / "config.json").is_file():
            raise SelfJudgeError(f"{folder} is not a judge folder: it has no config.json")
        raw = read_json(folder / "config.json", cls)
        if not (raw.get("target") or raw.get("target_sha256")):
            raise SelfJudgeError(f"{folder / 'config.json'} names no target: a judge works for its own target alone")
        values: dict[str, Any] = {f.name: raw[f.name] for f in fields(cls) if f.name in raw}
        return cls(**values | {"sources": tuple(raw.get("sources", ()))})

    @property
    def width(self) -> int:
        """Columns that the judge reads."""
        return feature_width(self.features, self.hidden_size)

    def threshold(self, theta: float | str | None) -> float:
        """θ from a number in [0, 1], a stored name (`F`, `R`) or a quality (`q0.9`); None is R, or else one half."""
        if theta is None:
            return self.thresholds.get(DEFAULT_THETA, 0.5)
        if isinstance(theta, str):
            if theta.startswith("q"):
                with suppress(ValueError):
                    return self.quality(float(theta[1:]))
            if theta not in self.thresholds:
                known = ", ".join(sorted(self.thresholds)) or "none"
                raise SelfJudgeError(f"this judge has no threshold {theta!r} (known: {known}); give a number in [0, 1]")
            theta = self.thresholds[theta]
        if not 0.0 <= theta <= 1.0:
            raise SelfJudgeError(f"`theta` must lie in [0, 1], not {theta}")
        return float(theta)

    def quality(self, share: float) -> float:
        """The most permissive θ that rejected at least this share of the unacceptable tokens it was measured on."""
        if not 0 <= share <= 1:
            raise SelfJudgeError(f"`quality` must lie in [0, 1], not {share}")
        if not self.quality_curve:
            raise SelfJudgeError("this judge has no quality curve: give `theta` instead of `quality`")
        return next((theta for rejected, theta in self.quality_curve if rejected >= share), 1.0)

    def check_target(self, name: str, sha256: str, hidden_size: int) -> None:
        """Refuse a target this judge was not trained for."""
        if self.hidden_size != hidden_size:
            sizes = f"{self.hidden_size}, the target {name} has {hidden_size}"
            raise SelfJudgeError(f"this judge reads hidden states of width {sizes}: use one trained for this target")
        hashed = bool(self.target_sha256 and sha256)
        if self.target_sha256 != sha256 if hashed else self.target not in ("", name):
            raise SelfJudgeError(
                f"this judge was trained for {self.target or 'another model'}"
                f" (sha256 {self.target_sha256[:12] or 'unknown'}),"
                f" not for {name} ({sha256[:12] or 'unknown'}): use a judge trained for this target"
            )


def shipped_judge(name: str) -> Path | None:
    """The folder of the judge that ships for an embedded target, if there is one."""
    folder = Path(str(resources.files("selfjudge"))) / "models" / "judges" / name
    return folder if "/" not in name and (folder / "config.json").is_file() else None


def find_judge(source: str | Path) -> Path:
    """The folder of a judge: a local one, that of an embedded name, or the local copy of a hub repository."""
    expect(isinstance(source, str | Path), "judge", "a folder, hub id or embedded name", source)
    folder, text = Path(source).expanduser(), str(source)
    if isinstance(source, Path) or folder.exists():
        return folder
    if (shipped := shipped_judge(text)) is not None:
        return shipped
    if text.count("/") != 1 or text.startswith((".", "~", "/")):
        return folder
    try:
        from huggingface_hub import snapshot_download

        wanted = ["config.json", "model.safetensors", PROMPTS_FILE, "README.md"]
        return Path(snapshot_download(text, allow_patterns=wanted, **hub_options()))
    except Exception as error:  # the hub client raises many kinds
        reason = unreachable() or first_line(error)
        raise SelfJudgeError(f"{text} is not a folder, and the hub did not give it ({reason})") from None


def prompt_key(ids: Sequence[int]) -> str:
    """The name of a prompt, by its token ids: the same in all label folders."""
    return hashlib.sha256(array("q", ids).tobytes()).hexdigest()


def write_training_prompts(folder: Path, keys: Iterable[str]) -> None:
    """Keep the keys of the prompts that a judge or draft was trained, selected or measured with."""
    write_json(folder / PROMPTS_FILE, {"prompts": sorted({key[:KEY_DIGITS] for key in keys})})
