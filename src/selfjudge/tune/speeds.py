"""Expected speeds of rules at every γ, on prompts set aside, and timed speeds of certified rules against `exact`. The
expected ones choose the pairs that are tested (`families.py`): tokens per cycle, counted on answers, over the seconds
of a cycle by the table of costs. The others are timed by turns. No certificate rests on either."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from selfjudge.bench.turns import Turns
from selfjudge.evaluate.compare import Interval
from selfjudge.evaluate.config import RuleRun
from selfjudge.evaluate.execute import Answerer
from selfjudge.tasks import Prompt, Row
from selfjudge.tune.families import BASELINES, LEAST_GAIN, NAMED, Families, find_best, find_rate
from selfjudge.types import Notify, Origin, ignore, prefix_stages

# Tokens of an answer that is counted or timed, by device: fewer would time prefill and what guards verify exactly.
TIMED_TOKENS = {"cpu": 64, "cuda": 256}
COUNTED_PROMPTS = 64  # the most prompts set aside that rules answer
FEWEST_ROWS = 4  # the fewest prompts of a turn, however few are answered at a time
FEWEST_TURNS = 4  # turns of the rules that are compared; from fewer no interval is given
_QUANTILE = 3.1824463  # of Student's t at 0.975, with FEWEST_TURNS − 1 degrees of freedom


def count_cycle_tokens(origins: Sequence[Origin]) -> list[int]:
    """Tokens of each cycle after the prompt's first token; a cycle ends with a target token or with the answer."""
    ends = [place for place, origin in enumerate(origins) if origin == "target" or place == len(origins) - 1]
    return np.diff(ends).tolist() if origins else []


def estimate_cycle_tokens(tokens: Sequence[int], gamma: int) -> float:
    """Tokens per cycle of γ drafts, from those of cycles with as many or more: long ones become several."""
    made = np.asarray(tokens, int)
    return float(made.sum() / np.ceil(made / (gamma + 1)).sum()) if len(made) else 1.0


@dataclass
class PairSearch:
    """Expected speeds of rules at every γ and load."""

    answerer: Answerer
    plan: Callable[[str, int], RuleRun]  # a rule's text and γ → its run; refused if the two do not fit
    prompts: Sequence[Prompt]
    gammas: Sequence[int]  # the γ to choose from, rising
    costs: Mapping[int, Sequence[float]]  # load → seconds of a cycle by drafts
    tokens: int  # maximum new tokens of an answer
    notify: Notify = ignore
    deadline: float = math.inf  # after it the figures of a looser rule stand in for those of a stricter one
    speeds: list[Row] = field(default_factory=list)
    _tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    _looser: dict[str, str] = field(default_factory=dict)  # the next rule of a rule's family

    def search(self, families: Families) -> list[Row]:
        """Rows of plain decoding, `exact`, all named rules, families from the loosest rule until one is too slow."""
        for rule, gamma in (("plain", 0), *(("exact", gamma) for gamma in self.gammas)):
            self._look(rule, gamma)
        bars = {load: (1 + LEAST_GAIN) * find_rate(self.speeds, load, BASELINES) for load in self.costs}
        for name, rules in families.items():
            self._looser |= dict(pairwise(rules))
            start = {load: int((find_best(self.speeds, load, ("exact",)) or {})["gamma"]) for load in self.costs}
            for rule in reversed(rules):
                self.notify(f"counting the tokens of cycles, {rule}", 0.0)
                for load in self.costs:
                    start[load] = self._climb(rule, load, start[load])
                if name != NAMED and all(find_rate(self.speeds, load, (rule,)) <= bar for load, bar in bars.items()):
                    break
        return self.speeds

    def _climb(self, rule: str, load: int, start: int) -> int:
        """Look at γ from `start` upwards while a rule gets faster, and downwards if it did not; returns its best."""
        window = self.plan(rule, self.gammas[-1]).rule.matches_needed
        gammas = [gamma for gamma in self.gammas if gamma > window]
        first = place = min(range(len(gammas)), key=lambda i: abs(gammas[i] - start))
        rate = self._look(rule, gammas[place])[load]
        for step, end in ((1, len(gammas) - 1), (-1, 0)):
            while place != end and (step > 0 or place <= first):
                if (other := self._look(rule, gammas[place + step])[load]) <= rate:
                    break
                place, rate = place + step, other
        return gammas[place]

    def _look(self, rule: str, gamma: int) -> dict[int, float]:
        """Expected tokens/s of a rule by load; its rows are added unless they are there."""
        rows = [row for row in self.speeds if (row["rule"], row["gamma"]) == (rule, gamma)]
        if not rows:
            tokens = self._count_tokens(rule, gamma) if gamma else 1.0
            own = {"rule": rule, "gamma": gamma, "mean_accepted_length": tokens}
            rows = [{"load": n, **own, "tokens_per_second": n * tokens / cost[gamma]} for n, cost in self.costs.items()]
            self.speeds += rows
        return {row["load"]: row["tokens_per_second"] for row in rows}

    def _count_tokens(self, rule: str, gamma: int) -> float:
        """Tokens per cycle. Rules that look ahead answer at every γ, others at the largest, which tells all."""
        planned = self.plan(rule, gamma).rule
        asked = gamma if planned.price is not None or planned.matches_needed > 0 else self.gammas[-1]
        looser = self._tokens.get((self._looser.get(rule, ""), asked))
        if (rule, asked) not in self._tokens and looser is not None and time.monotonic() >= self.deadline:
            self._tokens[rule, asked] = looser
        if (rule, asked) not in self._tokens:
            run, seeds = self.plan(rule, asked), range(len(self.prompts))
            answers, _ = self.answerer.answer(self.prompts, run, self.tokens, seeds)
            self._tokens[rule, asked] = [n for answer in answers for n in count_cycle_tokens(answer.origins)]
        return estimate_cycle_tokens(self._tokens[rule, asked], gamma)


@dataclass(eq=False)
class Timing:
    """A rule at one γ, and its turns."""

    rule: str  # the rule as text; plain decoding is `plain`
    run: RuleRun
    turns: list[tuple[int, float]] = field(default_factory=list)  # tokens and seconds of each

    def __str__(self) -> str:
        return self.rule

    @property
    def tokens_per_second(self) -> float:
        return sum(tokens for tokens, _ in self.turns) / sum(seconds for _, seconds in self.turns)


@dataclass(frozen=True)
class Comparison:
    """Certified rules, `exact` and plain decoding, timed by turns."""

    timings: Mapping[str, Timing]
    busy: str = ""  # why the times are not reliable; empty where they are

    @property
    def doubt(self) -> str:
        """Why no speed follows from the times; empty where one does."""
        turns = min(len(timing.turns) for timing in self.timings.values())
        if self.busy or turns >= FEWEST_TURNS:
            return self.busy
        return f"the time was up after {turns} of {FEWEST_TURNS} turns: too few to compare speeds"

    def list_ratios(self, rule: str) -> list[float]:
        """A rule's speed over that of `exact` or plain decoding, the faster one, by turn; none if it was not timed."""
        if self.doubt or (timing := self.timings.get(rule)) is None:
            return []
        others = [self.timings[name] for name in BASELINES if name in self.timings]
        best = max(others, key=lambda other: other.tokens_per_second)
        (made, spent), (tokens, seconds) = np.transpose(timing.turns), np.transpose(best.turns)
        return list(map(float, made / spent * seconds / tokens))

    def compare(self, rule: str) -> tuple[float, Interval] | None:
        """The geometric mean of these ratios, and its 95 % interval by Student's t; None if it was not timed."""
        if not (ratios := self.list_ratios(rule)):
            return None
        logs = np.log(ratios)
        margin = _QUANTILE * logs.std(ddof=1) / math.sqrt(FEWEST_TURNS)
        low, ratio, high = np.exp(logs.mean() + np.array([-margin, 0.0, margin])).tolist()
        return ratio, (low, high)


@dataclass(frozen=True)
class Clock:
    """Times rules by turns, so many rows at a time."""

    answerer: Answerer
    plan: Callable[[str, int], RuleRun]
    load: int
    max_new_tokens: int
    notify: Notify = ignore

    def choose_length(self, rules: int, rate: float | None, seconds: float) -> int:
        """Tokens of an answer, so that a comparison ends in time; `rate` is the expected speed, if it is known."""
        if rate is None:
            return TIMED_TOKENS.get(self.answerer.device, TIMED_TOKENS["cpu"])
        affordable = rate * seconds / (FEWEST_TURNS * (rules + 2) * max(self.load, FEWEST_ROWS))
        return int(max(TIMED_TOKENS["cpu"], min(affordable, TIMED_TOKENS["cuda"])))

    def compare(
        self, prompts: Sequence[Prompt], rules: Sequence[tuple[str, int]], tokens: int, deadline: float
    ) -> Comparison:
        """Time rules, of which the first is `exact`, and plain decoding, with answers of so many tokens. In a turn all
        answer the same prompts, in every second one backwards; none begins after the deadline. `exact` is also the last
        of a turn, and both its times must agree. All warm up before they are timed: on CUDA each captures graphs."""
        first, *others = (Timing(rule, self.plan(rule, gamma)) for rule, gamma in rules)
        last = Timing(first.rule, first.run)
        if not self.answerer.one_gamma:
            others = [Timing("plain", self.plan("exact", 0)), *others]
        timings, size, cuda = [first, *others, last], max(self.load, FEWEST_ROWS), self.answerer.device == "cuda"
        parts = [prompts[start : start + size] for start in range(0, len(prompts) - size + 1, size)] or [prompts]
        say = prefix_stages(f"comparing speeds, {self.load} at a time", self.notify)
        turns = Turns(timings, FEWEST_TURNS, say, deadline, both_ways=True)

        def answer(turn: int, timing: Timing) -> float:
            timing.turns.append(self._answer(timing, parts[turn % len(parts)], tokens))
            return timing.turns[-1][1]

        short, cold = (tokens, timings) if cuda else (8, timings[:1])
        for _ in turns.run(answer, lambda cold: self._answer(cold, parts[0][: self.load], short), cold):
            pass
        busy = turns.load.describe(list(zip(turns.seconds[first], turns.seconds[last], strict=True)))
        first.turns = np.add(first.turns, last.turns).tolist()
        return Comparison({timing.rule: timing for timing in (first, *others)}, busy)

    def _answer(self, timing: Timing, prompts: Sequence[Prompt], tokens: int) -> tuple[int, float]:
        """The tokens of the answers, `load` prompts at a time, and their seconds. Few prompts are repeated."""
        asked = [*prompts] * math.ceil(self.load / len(prompts))
        made, spent, most = 0, 0.0, min(tokens, self.max_new_tokens)
        for start in range(0, len(asked) - self.load + 1, self.load):
            part = asked[start : start + self.load]
            answers, seconds = self.answerer.answer(part, timing.run, most, range(len(part)))
            made += sum(len(answer.tokens) for answer in answers)
            spent += seconds["total"]
        return made, spent
