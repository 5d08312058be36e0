"""Tokens/s before anything is tested, on prompts set aside, and the γ that they recommend.

Plain decoding and `exact` are timed at every γ. A relaxed rule is timed once, at the largest: what it would do at a
smaller γ follows from how many of its drafts stood there, and from what cycles of `exact` take at both. No certificate
rests on these figures, and the speed that it states is measured on all prompts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from selfjudge.decoding.rules import AcceptanceRule
from selfjudge.errors import SelfJudgeError
from selfjudge.evaluate.answerer import Answerer, AnswerOptions
from selfjudge.evaluate.runs import Judges, plan_runs
from selfjudge.tasks.base import Prompt, Row
from selfjudge.types import Generation, Origin

TIMED_TOKENS = {"cpu": 48, "cuda": 256}
"""Of an answer that is timed, by device: 48 of a fast one would time the reading of prompts."""


@dataclass(frozen=True)
class Timing:
    """Answers at one γ: their tokens/s, and how many drafts each cycle accepted."""

    gamma: int
    tokens_per_second: float
    accepted: Sequence[int]

    @classmethod
    def of(cls, answers: Sequence[Generation], gamma: int, seconds: float) -> Timing:
        accepted = [count for answer in answers for count in accepted_drafts(answer.origins)]
        return cls(gamma, sum(len(answer.tokens) for answer in answers) / seconds, accepted)

    def tokens(self, gamma: int) -> float:
        """Of a cycle with so many drafts, γ at most: as many of them as stood, and the target's own."""
        return 1 + float(np.minimum(self.accepted, gamma).mean()) if self.accepted else 1.0

    @property
    def cycle(self) -> float:
        """What a cycle takes: seconds, but for a factor that is the same for all γ."""
        return self.tokens(self.gamma) / self.tokens_per_second


def accepted_drafts(origins: Sequence[Origin]) -> list[int]:
    """The accepted drafts of each cycle of an answer. Its first token is the prompt's; a cycle cut off is left out."""
    counts, drafts = [], 0
    for origin in origins[1:]:
        if origin == "target":
            counts.append(drafts)
        drafts = 0 if origin == "target" else drafts + 1
    return counts


def estimated(rule: Timing, exact: Mapping[int, Timing], gamma: int) -> float:
    """Tokens/s of a rule at a smaller γ than it was timed at."""
    tokens = rule.tokens(gamma) / rule.tokens(rule.gamma)
    seconds = exact[gamma].cycle / exact[rule.gamma].cycle
    return rule.tokens_per_second * tokens / seconds


@dataclass(frozen=True)
class Clock:
    """Times rules on some prompts."""

    answerer: Answerer
    prompts: Sequence[Prompt]
    judges: Judges
    special: tuple[int, ...]
    max_new_tokens: int

    def speeds(self, rules: Sequence[str], gammas: Sequence[int]) -> list[Row]:
        """Rows of plain decoding (where the answerer takes any γ), `exact` and these rules.

        Where there is one γ there is none to choose, and no rule is timed.
        """
        self.timed("exact", gammas[0], 8)  # warms up
        rows = []
        if not self.answerer.one_gamma and (plain := self.timed("exact", 0)) is not None:
            rows.append(_row("plain", 0, plain.tokens_per_second))
        exact = {gamma: timing for gamma in gammas if (timing := self.timed("exact", gamma)) is not None}
        rows += [_row("exact", gamma, timing.tokens_per_second) for gamma, timing in exact.items()]
        for rule in rules if len(gammas) > 1 else ():
            if (timing := self.timed(rule, max(gammas))) is not None:
                smaller = [gamma for gamma in gammas if gamma < timing.gamma and self.rule(rule, gamma) is not None]
                rows += [_row(rule, gamma, estimated(timing, exact, gamma), estimated=True) for gamma in smaller]
                rows.append(_row(rule, timing.gamma, timing.tokens_per_second))
        return rows

    def timed(self, text: str, gamma: int, most: int | None = None) -> Timing | None:
        """None where the rule does not work with this γ. On CUDA the second of two runs: the first records."""
        if (rule := self.rule(text, gamma)) is None:
            return None
        most = most or TIMED_TOKENS.get(self.answerer.device, TIMED_TOKENS["cpu"])
        for _ in range(2 if self.answerer.device == "cuda" else 1):
            options = AnswerOptions(gamma, min(most, self.max_new_tokens))
            answers, seconds = self.answerer.answer(self.prompts, rule, options)
        return Timing.of(answers, gamma, seconds["total"])

    def rule(self, text: str, gamma: int) -> AcceptanceRule | None:
        """The rule; None where it does not work with this γ."""
        try:
            return plan_runs([text], [gamma], self.judges, self.special)[0].rule
        except SelfJudgeError:
            return None


def _row(rule: str, gamma: int, rate: float, **more: bool) -> Row:
    return {"rule": rule, "gamma": gamma, "tokens_per_second": rate, **more}


def fitting_prompts(speeds: Sequence[Row], gamma: int, seconds: float, tokens: int) -> float:
    """How many prompts `exact` and one rule of its speed answer in so many seconds, with so many tokens an answer."""
    rates = [row["tokens_per_second"] for row in speeds if (row["rule"], row["gamma"]) == ("exact", gamma)]
    return seconds * rates[0] / (2 * tokens) if rates else math.inf


def chosen_gamma(speeds: Sequence[Row], gamma: int) -> tuple[int, float]:
    """γ at which the relaxed rules are fastest on the whole, and how much faster than there `exact` is at its own best,
    which may be 0: plain decoding.

    Each rule's speed counts relative to its best. A rule that does not work with every γ has no say, unless all are
    such. `gamma` stands where nothing was measured.
    """
    relaxed: dict[str, dict[int, float]] = {}
    exact: dict[int, float] = {}
    plain = max((row["tokens_per_second"] for row in speeds if row["rule"] == "plain"), default=0.0)
    for row in speeds:
        if row["rule"] == "exact":
            exact[row["gamma"]] = row["tokens_per_second"]
        elif row["rule"] != "plain":
            relaxed.setdefault(row["rule"], {})[row["gamma"]] = row["tokens_per_second"]
    if not exact:
        return gamma, 1.0
    everywhere = [by for by in relaxed.values() if by.keys() >= exact.keys()]
    counted = everywhere or list(relaxed.values())
    shares = {g: float(np.mean([by.get(g, 0.0) / max(by.values()) for by in counted] or [0])) for g in exact}
    best = max(shares, key=lambda g: shares[g])
    return best, max(plain, *exact.values()) / exact[best]
