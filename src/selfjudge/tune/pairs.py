"""Which pairs of a rule and γ are tested. They are chosen on prompts set aside, which test nothing.

A rule's speed with γ drafts and so many rows at a time is its tokens per cycle over the seconds of such a cycle. At
each load a rule has its own best γ, and a pair is worth testing if it may beat `exact` and plain decoding at theirs.
All this follows from the speeds that a certificate keeps, so whoever verifies one finds the same pairs. Loads no
torch."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from selfjudge.tune.config import Families

BASELINES = ("exact", "plain")
Speeds = Sequence[dict[str, Any]]  # rows of load, rule, γ, tokens per cycle and expected tokens/s


@dataclass(frozen=True)
class RulePair:
    """A rule at a γ, and the loads at which it is the rule's best one."""

    rule: str
    gamma: int
    loads: tuple[int, ...]


Pairs = dict[str, list[RulePair]]  # the pairs of each family, in the order in which they are tested


def find_best(speeds: Speeds, load: int, rules: Collection[str]) -> dict[str, Any] | None:
    """The fastest row of these rules at a load."""
    rows = (row for row in speeds if row["load"] == load and row["rule"] in rules)
    return max(rows, key=lambda row: row["tokens_per_second"], default=None)


def is_promising(speeds: Speeds, load: int, rule: str) -> bool:
    """Whether a rule at its best γ may be faster than `exact` and plain decoding at theirs."""
    own, other = find_best(speeds, load, (rule,)), find_best(speeds, load, BASELINES)
    return own is not None and (other is None or own["tokens_per_second"] > other["tokens_per_second"])


def plan_pairs(families: Families, speeds: Speeds, loads: Sequence[int], gamma: int) -> Pairs:
    """The pairs of each family from strict to loose: by rule, then by γ. Without speeds all rules have this `gamma`.

    Families without a pair that is worth testing are left out."""
    if not speeds:
        return {name: [RulePair(rule, gamma, tuple(loads)) for rule in rules] for name, rules in families.items()}
    pairs: Pairs = {}
    for name, rules in families.items():
        for rule in rules:
            by_gamma: dict[int, list[int]] = {}
            for load in loads:
                best = find_best(speeds, load, (rule,))
                if best is not None and is_promising(speeds, load, rule):
                    by_gamma.setdefault(int(best["gamma"]), []).append(load)
            if by_gamma:
                own = [RulePair(rule, chosen, tuple(at)) for chosen, at in sorted(by_gamma.items())]
                pairs.setdefault(name, []).extend(own)
    return pairs
