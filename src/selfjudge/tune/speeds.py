"""Speeds on prompts set aside, and the γ that they recommend.

Plain decoding and `exact` are timed at every γ. A relaxed rule is timed once, at the largest: its speed at a smaller γ
follows from how many of its drafts were accepted there, and from the seconds of a cycle of `exact` at both. No
certificate rests on these figures, and the speed that it states is measured on all prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from selfjudge.decoding.rules import AcceptanceRule
from selfjudge.errors import SelfJudgeError
from selfjudge.evaluate.config import RuleRun
from selfjudge.evaluate.execute import Answerer
from selfjudge.tasks import Prompt, Row
from selfjudge.types import Origin

TIMED_TOKENS = {"cpu": 48, "cuda": 256}
"""Tokens of an answer that is timed, by device: 48 of a fast one would time the prefill."""


@dataclass(frozen=True)
class Timing:
    """Answers at one γ: their tokens/s, and how many drafts each cycle accepted."""

    gamma: int
    tokens_per_second: float
    accepted: Sequence[int]

    def cycle_tokens(self, gamma: int) -> float:
        """Tokens of a cycle with so many drafts, γ at most: the accepted ones, and the target's own."""
        return 1 + float(np.minimum(self.accepted, gamma).mean()) if self.accepted else 1.0

    @property
    def cycle_seconds(self) -> float:
        """Seconds of a cycle, but for a factor that is the same for all γ."""
        return self.cycle_tokens(self.gamma) / self.tokens_per_second

    def estimate(self, gamma: int, exact: Mapping[int, Timing]) -> float:
        """Tokens/s at a smaller γ than the rule was timed at."""
        tokens = self.cycle_tokens(gamma) / self.cycle_tokens(self.gamma)
        seconds = exact[gamma].cycle_seconds / exact[self.gamma].cycle_seconds
        return self.tokens_per_second * tokens / seconds


def count_accepted_drafts(origins: Sequence[Origin]) -> list[int]:
    """The accepted drafts of each cycle of an answer. Its first token is the prompt's; a cycle cut off is left out."""
    counts, drafts = [], 0
    for origin in origins[1:]:
        if origin == "target":
            counts.append(drafts)
        drafts = 0 if origin == "target" else drafts + 1
    return counts


@dataclass(frozen=True)
class Clock:
    """Times rules on some prompts."""

    answerer: Answerer
    prompts: Sequence[Prompt]
    plan: Callable[[str, int], RuleRun]
    """A rule's text and γ → its run; refused if the two do not fit."""
    max_new_tokens: int

    def measure(self, rules: Sequence[str], gammas: Sequence[int]) -> list[Row]:
        """Rows of plain decoding (if the answerer takes any γ), `exact` and these rules.

        With one γ there is none to choose, and no rule is timed.
        """
        self.time_rule("exact", gammas[0], 8)  # warms up
        rows = []
        if not self.answerer.one_gamma and (plain := self.time_rule("exact", 0)) is not None:
            rows.append(_make_row("plain", 0, plain.tokens_per_second))
        exact = {gamma: timing for gamma in gammas if (timing := self.time_rule("exact", gamma)) is not None}
        rows += [_make_row("exact", gamma, timing.tokens_per_second) for gamma, timing in exact.items()]
        for rule in rules if len(gammas) > 1 else ():
            if (timing := self.time_rule(rule, max(gammas))) is not None:
                smaller = [gamma for gamma in gammas if gamma < timing.gamma and self._resolve(rule, gamma) is not None]
                rows += [_make_row(rule, gamma, timing.estimate(gamma, exact), estimated=True) for gamma in smaller]
                rows.append(_make_row(rule, timing.gamma, timing.tokens_per_second))
        return rows

    def time_rule(self, text: str, gamma: int, most: int | None = None) -> Timing | None:
        """None if the rule does not work with this γ. On CUDA the second of two runs: the first captures graphs."""
        if (rule := self._resolve(text, gamma)) is None:
            return None
        most = most or TIMED_TOKENS.get(self.answerer.device, TIMED_TOKENS["cpu"])
        for _ in range(2 if self.answerer.device == "cuda" else 1):
            answers, seconds = self.answerer.answer(
                self.prompts, rule, gamma, min(most, self.max_new_tokens), range(len(self.prompts))
            )
        accepted = [count for answer in answers for count in count_accepted_drafts(answer.origins)]
        return Timing(gamma, sum(len(answer.tokens) for answer in answers) / seconds["total"], accepted)

    def _resolve(self, text: str, gamma: int) -> AcceptanceRule | None:
        """The rule; None if it does not work with this γ."""
        try:
            return self.plan(text, gamma).rule
        except SelfJudgeError:
            return None


def _make_row(rule: str, gamma: int, rate: float, **more: bool) -> Row:
    return {"rule": rule, "gamma": gamma, "tokens_per_second": rate, **more}


def choose_gamma(speeds: Sequence[Row], gamma: int) -> tuple[int, float]:
    """γ at which the relaxed rules are fastest on the whole, and how much faster than there `exact` is at its own best,
    which may be 0: plain decoding.

    Each rule's speed counts relative to its best. A rule that does not work with every γ has no say, unless all are
    such. `gamma` is the result if nothing was measured.
    """
    by_rule: dict[str, dict[int, float]] = {}
    for row in speeds:
        by_rule.setdefault(row["rule"], {})[row["gamma"]] = row["tokens_per_second"]
    plain, exact = by_rule.pop("plain", {}), by_rule.pop("exact", {})
    if not exact:
        return gamma, 1.0
    relaxed = list(by_rule.values())
    counted = [rates for rates in relaxed if rates.keys() >= exact.keys()] or relaxed
    shares = {g: float(np.mean([by.get(g, 0.0) / max(by.values()) for by in counted] or [0])) for g in exact}
    best = max(shares, key=lambda g: shares[g])
    return best, max([*plain.values(), *exact.values()]) / exact[best]
