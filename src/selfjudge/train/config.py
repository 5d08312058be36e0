"""Settings of training. Imports no torch: the command line makes its options from this."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from selfjudge.errors import SelfJudgeError, expect
from selfjudge.judge.config import FEATURES, LOWEST, SCORES
from selfjudge.types import check_settings, setting

RELEASED: Mapping[str, Any] = {
    "features": "hidden",
    "originals": True,
    "score": "confidence",
    "threshold_f": "youden",
    "reject": 0.8,
}
RELEASED_ACCEPTABLE = 0.209  # the share of the mismatches that the released labels call acceptable

LEFT_BY_A_KILL = ("README.md", "roc.png", "run.json", "prompts.json", "model.safetensors")  # config.json comes last


@dataclass(frozen=True)
class TrainConfig:
    """Settings that decide a judge."""

    features: str = setting("hidden+margin", "What the judge reads; the paper's reads hidden alone.", choices=FEATURES)
    originals: bool = setting(False, "Learn from the target's own tokens, too, as acceptable rows.")
    score: str = setting("likelihood", "What labels by likelihood compare: see docs/train.md.", choices=SCORES)
    suffix_length: int | None = setting(None, "Label again with this N; τ from the evidence.", minimum=0)
    suffix_gap: int = setting(0, "Label again without this many tokens right after the substitution.", minimum=0)
    tau: float | None = setting(None, "Label again from the stored scores with this τ.")
    acceptable: float | None = setting(None, "Label again: the share of mismatches to call acceptable.", above=0)
    margin_limit: float | None = setting(None, "Nats beyond which the target alone decides.", above=0, maximum=-LOWEST)
    sources: tuple[str, ...] = setting((), "Learn only from these sources of prompts; from all if none is named.")
    reject: float = setting(0.9, "Share of bad substitutions that threshold R rejects.", above=0, maximum=1)
    threshold_f: str = setting("f1", "Threshold F: best F1, or largest Youden's J.", choices=("f1", "youden"))
    as_released: bool = setting(False, "Label and train as the authors' code does: see docs/train.md.")
    seed: int = setting(0, "Seed of the split by prompts.")

    def check(self) -> None:
        """Refuse values out of range, and settings that contradict each other."""
        check_settings(self)
        for name, value in RELEASED.items() if self.as_released else ():
            if getattr(self, name) not in (getattr(TrainConfig, name), value):
                raise SelfJudgeError(f"`as_released` sets `{name}` to {value}: leave out one of them")
        expect(self.acceptable is None or self.acceptable < 1, "acceptable", "less than 1", self.acceptable)
        if self.acceptable is not None and self.tau is not None:
            raise SelfJudgeError("`tau` and `acceptable` say the same thing twice: give one of them")

    def resolve(self) -> Self:
        """These settings, with those that `as_released` stands for."""
        if not self.as_released:
            return self
        stated = self.tau is not None or self.acceptable is not None
        return replace(self, **RELEASED, acceptable=self.acceptable if stated else RELEASED_ACCEPTABLE)

    @property
    def relabels(self) -> bool:
        """Whether labels are made again from the stored scores."""
        given = (self.suffix_length, self.tau, self.acceptable)
        return bool(self.suffix_gap) or self.score != "likelihood" or any(x is not None for x in given)
