"""The rules that `tune` tries: families, each ordered from strict to loose before any of them is looked at.

All are guarded: at end-of-sequence and other special tokens the target alone decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from selfjudge.decoding.rule_parser import RuleRequest
from selfjudge.errors import SelfJudgeError
from selfjudge.judge.config import JudgeConfig

_RULES: dict[str, list[str]] = {
    "margin": [f"margin:{margin:g},guard=on" for margin in (0.1, 0.25, 0.5, 1.0, 2.0, 3.0)],  # nats
    "priced": [f"margin:price={price:g},guard=on" for price in (0.02, 0.05, 0.1, 0.2, 0.4)],  # nats a token
    "judged": [],  # the judge's own thresholds
    # normalised entropy of the target; drafts that must match after a mismatch: more find hardly any at usual γ
    "fly": [f"fly:{entropy:g},2,guard=on" for entropy in (0.3, 0.2, 0.1, 0.05)],
    "topk": [f"topk:{k},guard=on" for k in (2, 3, 5)],
}
FAMILIES = tuple(_RULES)
_QUALITIES = (0.98, 0.95, 0.9, 0.8, 0.6)  # shares of bad substitutions that the judge rejects
_THETAS = (0.95, 0.9, 0.8, 0.65, 0.5)  # thresholds of a judge without a quality curve
GAMMAS = {"cpu": (2, 3, 5), "cuda": (3, 5, 8)}
"""Draft lengths to measure, by device."""


@dataclass(frozen=True)
class Family:
    """Rules of one kind as text, from strict to loose."""

    name: str
    rules: tuple[str, ...]

    @property
    def middle(self) -> str:
        """The rule that stands for the family when γ is chosen."""
        return self.rules[len(self.rules) // 2]


@dataclass(frozen=True)
class RefusedRule:
    """A rule that does not work with the γ of a run, and why."""

    family: str
    rule: str
    why: str


def list_families(names: Sequence[str], judge: JudgeConfig | None) -> list[Family]:
    """The families of these names; `judge` is the one of the judged rules.

    Without a judge, judged is left out if all families are named, and refused if it is one of several.
    """
    if judge is None and tuple(names) == FAMILIES:
        names = [name for name in names if name != "judged"]
    return [Family(name, _list_judged(judge) if name == "judged" else tuple(_RULES[name])) for name in names]


def _list_judged(judge: JudgeConfig | None) -> tuple[str, ...]:
    """The judged rules with distinct thresholds below 1, the largest first."""
    if judge is None:
        raise SelfJudgeError("the family judged needs a judge: give `judge`, or leave it out of `families`")
    thresholds = [f"q{share:g}" for share in _QUALITIES] if judge.quality_curve else [f"{t:g}" for t in _THETAS]
    distinct = {judge.threshold(text if text[0] == "q" else float(text)): text for text in reversed(thresholds)}
    return tuple(f"judged:{text}" for theta, text in sorted(distinct.items(), reverse=True) if theta < 1)


def split_by_gamma(
    families: Sequence[Family], gamma: int, judge: JudgeConfig | None
) -> tuple[list[Family], list[RefusedRule]]:
    """The families with those of their rules that work with this γ, and the other rules. One without any is left out.

    Rules are only looked at: the judge's config stands in for the judge.
    """
    kept, refused = [], []
    for family in families:
        fitting = []
        for rule in family.rules:
            try:
                RuleRequest(rule, gamma=gamma).resolve((), judge)
                fitting.append(rule)
            except SelfJudgeError as error:
                refused.append(RefusedRule(family.name, rule, str(error)))
        if fitting:
            kept.append(Family(family.name, tuple(fitting)))
    if not kept:
        raise SelfJudgeError(refused[-1].why)
    return kept, refused
