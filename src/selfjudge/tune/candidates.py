"""The rules that `tune` tries: families, each ordered from strict to loose before any of them is looked at.

All are guarded: at end-of-sequence and other special tokens the target alone decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from selfjudge.decoding.rule_parser import RuleRequest
from selfjudge.errors import SelfJudgeError
from selfjudge.judge.config import JudgeConfig

FAMILIES = ("margin", "priced", "judged", "fly", "topk")
_MARGINS = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0)  # nats
_PRICES = (0.02, 0.05, 0.1, 0.2, 0.4)  # of a token, in nats of the margin
_QUALITIES = (0.98, 0.95, 0.9, 0.8, 0.6)  # shares of bad substitutions that the judge rejects
_THETAS = (0.95, 0.9, 0.8, 0.65, 0.5)  # of a judge that does not know its qualities
_ENTROPIES = (0.3, 0.2, 0.1, 0.05)  # of the target, normalised
_WINDOW = 2  # drafts that must match after a mismatch; longer ones find hardly any at usual γ
_KS = (2, 3, 5)
GAMMAS = {"cpu": (2, 3, 5), "cuda": (3, 5, 8)}
"""Draft lengths to measure, by device."""


@dataclass(frozen=True)
class Family:
    """Rules of one kind as text, from strict to loose."""

    name: str
    rules: tuple[str, ...]

    @property
    def middle(self) -> str:
        """The rule that stands for the family where γ is chosen."""
        return self.rules[len(self.rules) // 2]


def candidates(families: Sequence[str], judge: JudgeConfig | None) -> list[Family]:
    """The families of these names; `judge` is the one of the judged rules.

    Where there is none, judged is left out of all families; named among others it is refused.
    """
    if judge is None and tuple(families) == FAMILIES:
        families = [name for name in families if name != "judged"]
    return [Family(name, _rules(name, judge)) for name in families]


@dataclass(frozen=True)
class Refused:
    """A rule that does not work with the γ of a run, and why."""

    family: str
    rule: str
    why: str


def fitting(families: Sequence[Family], gamma: int, judge: JudgeConfig | None) -> tuple[list[Family], list[Refused]]:
    """The families with those of their rules that work with this γ, and the other rules. One without any falls away."""
    kept, refused = [], []
    for family in families:
        works = []
        for rule in family.rules:
            try:
                RuleRequest(rule, gamma=gamma).resolve((), judge)
                works.append(rule)
            except SelfJudgeError as error:
                refused.append(Refused(family.name, rule, str(error)))
        if works:
            kept.append(Family(family.name, tuple(works)))
    if not kept:
        raise SelfJudgeError(refused[-1].why)
    return kept, refused


def _rules(family: str, judge: JudgeConfig | None) -> tuple[str, ...]:
    if family == "judged":
        if judge is None:
            raise SelfJudgeError("the family judged needs a judge: give `judge`, or leave it out of `families`")
        thresholds = [f"q{share:g}" for share in _QUALITIES] if judge.quality_curve else [f"{t:g}" for t in _THETAS]
        distinct = {judge.threshold(text if text[0] == "q" else float(text)): text for text in reversed(thresholds)}
        return tuple(f"judged:{text}" for theta, text in sorted(distinct.items(), reverse=True) if theta < 1)
    texts = {
        "margin": [f"margin:{margin:g}" for margin in _MARGINS],
        "priced": [f"margin:price={price:g}" for price in _PRICES],
        "fly": [f"fly:{entropy:g},{_WINDOW}" for entropy in _ENTROPIES],
        "topk": [f"topk:{k}" for k in _KS],
    }[family]
    return tuple(f"{text},guard=on" for text in texts)


def levels(families: Sequence[Family], delta: float) -> dict[str, float]:
    """δ of each family: equal shares, so that all certificates together are wrong with probability δ at most.

    Inside a family no share is needed: its rules are tested in their order, each at its level, until one fails.
    """
    return {family.name: delta / len(families) for family in families}
