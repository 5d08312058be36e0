"""Speeds by turns: those that choose γ, on prompts set aside, and those of the certified rules against `exact`.

To choose γ, plain decoding and `exact` are timed at every γ. A relaxed rule is timed at the largest: its speed at a
smaller γ follows from how many of its drafts were accepted there, and from the seconds of a cycle of `exact` at both.
No certificate rests on any of these figures.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from selfjudge.errors import SelfJudgeError
from selfjudge.evaluate.compare import Interval, compare_rates
from selfjudge.evaluate.config import RuleRun
from selfjudge.evaluate.execute import Answerer, Answers
from selfjudge.store.load import LoadWatch
from selfjudge.tasks import Prompt, Row
from selfjudge.types import Notify, Origin, ignore

TIMED_TOKENS = {"cpu": 32, "cuda": 256}
"""Tokens of an answer that is timed, by device: 32 of a fast one would time the prefill."""
TURNS = 2
"""Turns that choose γ: forwards and backwards, so that a machine that slows down slows down all of them."""
FEWEST_TURNS = 4
"""Turns of the rules that are compared. From fewer no interval is given."""


@dataclass(eq=False)
class Timing:
    """A rule at one γ: tokens and seconds of each turn, and how many drafts each cycle accepted."""

    rule: str
    """The rule as text; plain decoding is `plain`."""
    run: RuleRun
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def gamma(self) -> int:
        return self.run.gamma

    @property
    def tokens_per_second(self) -> float:
        return sum(self.tokens) / sum(self.seconds)

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

    def row(self) -> Row:
        return {"rule": self.rule, "gamma": self.gamma, "tokens_per_second": self.tokens_per_second}


def count_accepted_drafts(origins: Sequence[Origin]) -> list[int]:
    """The accepted drafts of each cycle of an answer. Its first token is the prompt's; a cycle cut off is left out."""
    counts, drafts = [], 0
    for origin in origins[1:]:
        if origin == "target":
            counts.append(drafts)
        drafts = 0 if origin == "target" else drafts + 1
    return counts


@dataclass(frozen=True)
class Comparison:
    """Certified rules, `exact` and plain decoding, timed by turns."""

    timings: Mapping[str, Timing]
    busy: str = ""
    """Why the times are not reliable; empty where they are."""

    @property
    def doubt(self) -> str:
        """Why no speed follows from the times; empty where one does."""
        turns = min(len(timing.seconds) for timing in self.timings.values())
        if self.busy or turns >= FEWEST_TURNS:
            return self.busy
        return f"the time was up after {turns} of {FEWEST_TURNS} turns: too few to compare speeds"

    def compare(self, rule: str) -> tuple[float, Interval] | None:
        """A rule's speed over that of `exact` or plain decoding, the faster one; None if it was not timed."""
        if self.doubt or (timing := self.timings.get(rule)) is None:
            return None
        others = [self.timings[name] for name in ("exact", "plain") if name in self.timings]
        best = max(others, key=lambda other: other.tokens_per_second)
        return compare_rates(np.asarray([timing.tokens, timing.seconds, best.tokens, best.seconds], float).T)


@dataclass(frozen=True)
class Clock:
    """Times rules by turns."""

    answerer: Answerer
    plan: Callable[[str, int], RuleRun]
    """A rule's text and γ → its run; refused if the two do not fit."""
    max_new_tokens: int
    notify: Notify = ignore

    def measure(self, prompts: Sequence[Prompt], rules: Sequence[str], gammas: Sequence[int]) -> tuple[list[Row], str]:
        """Rows of plain decoding (if the answerer takes any γ), `exact` and these rules, and why they are not reliable.

        With one γ there is none to choose, and no rule is timed.
        """
        exact = self._timings([("exact", gamma) for gamma in gammas])
        relaxed = self._timings([(rule, max(gammas)) for rule in rules]) if len(gammas) > 1 else []
        timings = [*self._plain(), *exact, *relaxed]
        tokens = TIMED_TOKENS.get(self.answerer.device, TIMED_TOKENS["cpu"])
        load = self._take_turns(timings, [prompts], TURNS, tokens)
        rows = [timing.row() for timing in timings if timing not in relaxed]
        by_gamma = {timing.gamma: timing for timing in exact}
        for timing in relaxed:
            smaller = [g for g in gammas if g < timing.gamma and self._timings([(timing.rule, g)])]
            estimates = {gamma: timing.estimate(gamma, by_gamma) for gamma in smaller}
            rows += [
                {"rule": timing.rule, "gamma": gamma, "tokens_per_second": rate, "estimated": True}
                for gamma, rate in estimates.items()
            ]
            rows.append(timing.row())
        return rows, load.describe(timing.seconds for timing in timings)

    def compare(
        self, batches: Sequence[Sequence[Prompt]], rules: Sequence[tuple[str, int]], tokens: int, deadline: float
    ) -> Comparison:
        """Time rules, of which the first is `exact`, and plain decoding: a batch a turn, answers of so many tokens.

        The first is also the last of each turn: the same work, whose times must agree.
        """
        (first, *others), (last,) = self._timings(rules), self._timings(rules[:1])
        others = [*self._plain(), *others]
        load = self._take_turns([first, *others, last], batches, FEWEST_TURNS, tokens, deadline)
        busy = load.describe(list(zip(first.seconds, last.seconds, strict=True)))
        first.tokens = [sum(turn) for turn in zip(first.tokens, last.tokens, strict=True)]
        first.seconds = [sum(turn) for turn in zip(first.seconds, last.seconds, strict=True)]
        return Comparison({timing.rule: timing for timing in (first, *others)}, busy)

    def _plain(self) -> list[Timing]:
        return [] if self.answerer.one_gamma else [Timing("plain", self.plan("exact", 0))]

    def _timings(self, rules: Sequence[tuple[str, int]]) -> list[Timing]:
        """Those of these rules that work with their γ."""
        timings = []
        for rule, gamma in rules:
            try:
                timings.append(Timing(rule, self.plan(rule, gamma)))
            except SelfJudgeError:
                continue
        return timings

    def _take_turns(
        self,
        timings: Sequence[Timing],
        batches: Sequence[Sequence[Prompt]],
        turns: int,
        tokens: int,
        deadline: float = math.inf,
    ) -> LoadWatch:
        """Let all answer the same batch in each turn, in every second turn backwards. None begins after the deadline.

        Nothing is timed before it has warmed up: on CUDA each captures its graphs.
        """
        cuda = self.answerer.device == "cuda"
        for timing in timings if cuda else timings[:1]:
            self._answer(timing, batches[0], tokens if cuda else 8)
        load = LoadWatch()
        for turn in range(turns):
            if time.monotonic() >= deadline:
                break
            for number, timing in enumerate(timings[:: -1 if turn % 2 else 1]):
                self.notify(f"comparing speeds, turn {turn + 1} of {turns}", (turn + number / len(timings)) / turns)
                answers, seconds = self._answer(timing, batches[turn % len(batches)], tokens)
                timing.tokens.append(sum(len(answer.tokens) for answer in answers))
                timing.seconds.append(seconds["total"])
                timing.accepted += [n for answer in answers for n in count_accepted_drafts(answer.origins)]
        return load

    def _answer(self, timing: Timing, prompts: Sequence[Prompt], tokens: int) -> Answers:
        rule, most = timing.run.rule, min(tokens, self.max_new_tokens)
        return self.answerer.answer(prompts, rule, timing.gamma, most, range(len(prompts)))


def choose_gamma(speeds: Sequence[Row], gamma: int) -> int:
    """γ at which the relaxed rules are fastest on the whole.

    Each rule's speed counts relative to its best. A rule that does not work with every γ has no say, unless all are
    such. `gamma` is the result if nothing was measured.
    """
    by_rule: dict[str, dict[int, float]] = {}
    for row in speeds:
        by_rule.setdefault(row["rule"], {})[row["gamma"]] = row["tokens_per_second"]
    by_rule.pop("plain", None)
    exact = by_rule.pop("exact", {})
    if not exact:
        return gamma
    relaxed = list(by_rule.values())
    counted = [rates for rates in relaxed if rates.keys() >= exact.keys()] or relaxed
    shares = {g: float(np.mean([by.get(g, 0.0) / max(by.values()) for by in counted] or [0])) for g in exact}
    return max(shares, key=lambda g: shares[g])
