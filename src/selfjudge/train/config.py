"""What decides a judge, and what a study of judges holds fixed. No torch: the command line makes its options here."""

from __future__ import annotations

from dataclasses import dataclass

from selfjudge.errors import SelfJudgeError
from selfjudge.judge.config import FEATURES, LOWEST, MODELS
from selfjudge.types import check_settings, setting


@dataclass(frozen=True)
class TrainConfig:
    """What decides a judge."""

    features: str = setting(
        "hidden+margin",
        "What the judge reads: hidden (as in the paper), hidden+margin or hidden+margin+lookahead.",
        choices=FEATURES,
    )
    model: str = setting(
        "auto",
        "linear, mlp, or auto: both are fitted, the one with the better ROC-AUC on the prompts that select is taken.",
        choices=(*MODELS, "auto"),
    )
    originals: bool = setting(
        False, "Learn from the target's own tokens as well, as acceptable rows, as public code does."
    )
    suffix_length: int | None = setting(
        None, "Label again from the stored scores with this N; τ comes from the stored evidence.", minimum=0
    )
    suffix_gap: int = setting(
        0,
        "Label again without this many tokens right after the substitution; τ comes from the stored evidence.",
        minimum=0,
    )
    tau: float | None = setting(None, "Label again from the stored scores with this τ.")
    acceptable: float | None = setting(
        None, "Label again with the τ that calls this share of the mismatches acceptable, such as 0.3.", above=0
    )
    margin_limit: float | None = setting(
        None,
        "The judge has no say, and learns nothing, where the target prefers its own token by more nats than this.",
        above=0,
        maximum=-LOWEST,
    )
    sources: tuple[str, ...] = setting(
        (), "Learn only from these sources of prompts, such as self or gsm8k,dolly; from all if none is named."
    )
    reject: float = setting(
        0.9, "Threshold R rejects at least this share of the bad substitutions.", above=0, maximum=1
    )
    seed: int = setting(0, "Seed of the split by prompts and of the MLP.")

    def check(self) -> None:
        """Refuse values out of range, and τ given twice."""
        check_settings(self)
        if self.acceptable is not None and self.acceptable >= 1:
            raise SelfJudgeError(f"`acceptable` must be less than 1, not {self.acceptable}")
        if self.acceptable is not None and self.tau is not None:
            raise SelfJudgeError("`tau` and `acceptable` say the same thing twice: give one of them")

    @property
    def relabels(self) -> bool:
        """Are labels made again from the stored scores?"""
        return bool(self.suffix_gap) or any(x is not None for x in (self.suffix_length, self.tau, self.acceptable))


@dataclass(frozen=True)
class StudyConfig:
    """What a study holds fixed."""

    features: str = setting(
        "hidden+margin", "What the judge reads in all studies but that of features.", choices=FEATURES
    )
    seed: int = setting(0, "Seed of the split by prompts and of the MLP.")

    def check(self) -> None:
        """Refuse values out of range."""
        check_settings(self)
