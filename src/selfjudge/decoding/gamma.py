"""γ chosen by the machine: what cycles cost here, how many drafts are accepted, and how many are worth drafting.

All figures come from cycles that decode anyway; nothing is run for the sake of measuring but a few cycles of another
γ. `PairStatistics` outlives batches: seconds by rows and drafts, and how drafts fared under each rule. A
`GammaController` chooses for one batch: before each cycle the most drafts it may have (0: plain decoding), and during
it, where the engine runs from Python, whether one more draft is worth its time. Choices look at the clock, at earlier
cycles and at the draft's own probabilities, never at what the target says of this block: lossless rules stay lossless.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median, median_low

import numpy as np
from numpy.typing import NDArray

from selfjudge.decoding.rules import AcceptanceRule
from selfjudge.engine.draft import BACKLOG
from selfjudge.types import MAX_GAMMA

MOST = 10  # drafts of a cycle, where every one of them may be the last
STATIC_CHOICES = (1, 2, 3, 5, 8)  # where each γ is a graph capture of its own
MEMORY = 0.97  # share of its weight that a cycle keeps when the next one is counted
SHORT_MEMORY = 0.94  # the same for whether drafting pays: where it begins to lose, it ends soon
LONG_MEMORY = 0.995  # and for what the next batches begin with
MARGIN = 1.02  # a choice is changed for one that is better by this factor
BUDGET = 0.02  # share of the time that may be lost to find out whether drafting pays by now
PROBE = 4  # cycles that find it out
MOST_CREDIT = 3 * PROBE  # plain cycles whose time may be lost at once
REFRESH = 96  # the most cycles with drafts after which plain decoding is timed again
MOST_CAPTURE_SECONDS = 0.5  # that a graph capture is taken to cost: the first ones compile kernels, too
SLOPE = 0.1  # before anything is known: what a second token adds to a pass, and what a draft step costs


class Costs:
    """Seconds of cycles by rows and drafts: medians of the latest, and what lies between them."""

    def __init__(self) -> None:
        self._latest: dict[object, deque[float]] = defaultdict(lambda: deque(maxlen=7))
        self._steps: dict[int, float] = {}  # rows → one draft step
        self._passes: dict[tuple[int, int], float] = {}  # rows, drafts → everything else of a cycle

    def observe(self, rows: int, drafts: int, seconds: Mapping[str, float], *, behind: bool = False) -> None:
        """Count a cycle; `behind` says that the draft had more to read than usual, so its time means nothing."""
        if drafts and not behind:
            self._steps[rows] = self._median(rows, seconds["draft"] / drafts)
        rest = sum(spent for phase, spent in seconds.items() if phase != "draft")
        self._passes[rows, drafts] = self._median((rows, drafts), rest)

    def _median(self, key: object, value: float) -> float:
        """The median of the latest few: it ignores the one that something else on the machine made slow."""
        self._latest[key].append(value)
        return median_low(self._latest[key])  # of two, the one that nothing slowed down

    def knows_plain(self, rows: int) -> bool:
        """Whether plain decoding of so many rows, or nearly so many, was timed at least twice."""
        return any(d == 0 and _near(b, rows) and len(self._latest[b, d]) > 1 for b, d in self._passes)

    def table(self, rows: int, most: int) -> list[float]:
        """Seconds of cycles of 0 … `most` drafts, rising: a pass that seems to take longer than one over more tokens
        was timed while something else kept the machine busy."""
        step, passes = self._step(rows), [self._pass(rows, drafts) for drafts in range(most + 1)]
        least = [*accumulate(reversed(passes), min)][::-1]
        return [seconds + drafts * step for drafts, seconds in enumerate(least)]

    def plain(self, rows: int) -> float:
        """Seconds of a cycle without drafts."""
        return min([self._pass(rows, 0), *(seconds for (b, _), seconds in self._passes.items() if b == rows)])

    def _step(self, rows: int) -> float:
        if not self._steps:
            return SLOPE * self._pass(rows, 0)
        return self._steps[rows] if rows in self._steps else _between(self._steps, rows)

    def _pass(self, rows: int, drafts: int) -> float:
        """As it was timed; else as with nearly as many rows, as with other drafts, as with as many tokens."""
        known = self._passes
        if (rows, drafts) in known:
            return known[rows, drafts]
        if not known:
            return 1.0 + SLOPE * drafts
        if near := [b for b, d in known if d == drafts and _near(b, rows)]:
            other = min(near, key=lambda b: abs(b - rows))
            ratios = [known[rows, d] / known[other, d] for b, d in known if b == rows and (other, d) in known]
            return known[other, drafts] * (median(ratios) if ratios else 1 + SLOPE * (rows / other - 1))
        same = {d + 1: s for (b, d), s in known.items() if b == rows}
        if len(same) > 1 or len(same) == len(known):
            return _between(same, drafts + 1)
        return _between({b * (d + 1): s for (b, d), s in known.items()}, rows * (drafts + 1))


def _near(one: int, other: int) -> bool:
    """Whether the larger of two numbers is at most 3/2 of the smaller."""
    return 2 * max(one, other) <= 3 * min(one, other)


def _between(points: Mapping[int, float], x: int) -> float:
    """The line through the two points around x, or through the last two; through one, a guess at how steep it is."""
    known = sorted(points.items())
    if len(known) == 1:
        ((x0, y0),) = known
        return y0 * (1 + SLOPE * (x / x0 - 1))
    right = min(max(1, sum(x0 < x for x0, _ in known)), len(known) - 1)
    (x0, y0), (x1, y1) = known[right - 1 : right + 1]
    slope = max(0.0, (y1 - y0) / (x1 - x0))
    return max(y0 + slope * (x - x0), 0.2 * min(y0, y1))


class Acceptance:
    """How often draft i is accepted where those before it are: fading counts; position i begins with i − 1's share."""

    FIRST = 0.7  # before anything is known
    STRENGTH = 2.0

    def __init__(self) -> None:
        self.reached = np.zeros(MAX_GAMMA)
        self.accepted = np.zeros(MAX_GAMMA)

    def observe(self, accepted: NDArray[np.int64], drafts: int, memory: float = MEMORY) -> None:
        """Count what `accepted` [B] rows took of so many drafts."""
        self.fade(memory)
        for taken, rows in Counter(accepted.tolist()).items():
            self.reached[: min(taken + 1, drafts)] += rows / len(accepted)
            self.accepted[:taken] += rows / len(accepted)

    def fade(self, share: float) -> None:
        self.reached *= share
        self.accepted *= share

    def begin_with(self, other: Acceptance, weight: float) -> None:
        """Start from another's counts, worth at most so many cycles."""
        share = min(1.0, weight / max(other.reached[0], 1e-9))
        self.reached, self.accepted = share * other.reached, share * other.accepted

    def shares(self, most: int) -> list[float]:
        """P(draft i is accepted | those before it are) for i = 1 … `most`."""
        shares, before = [], self.FIRST
        for reached, accepted in zip(self.reached[:most].tolist(), self.accepted[:most].tolist(), strict=True):
            before = (accepted + self.STRENGTH * before) / (reached + self.STRENGTH)
            shares.append(before)
        return shares


class Calibration:
    """How often a draft is accepted, by the probability that the draft model gave it."""

    EDGES = np.array([0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97])
    GUESS = np.array([0.05, 0.1, 0.15, 0.2, 0.35, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95])
    STRENGTH = 4.0
    MOST = 2000.0  # counts of a bin before they are halved

    def __init__(self) -> None:
        self.count = np.zeros(len(self.GUESS))
        self.accepted = np.zeros(len(self.GUESS))

    def observe(self, q: NDArray[np.float64], accepted: NDArray[np.int64]) -> None:
        """Count drafts [B, γ] of probability q, of which `accepted` [B]; those after a rejection say nothing."""
        at = np.arange(q.shape[1])
        bins, reached = np.searchsorted(self.EDGES, q), accepted[:, None] >= at
        np.add.at(self.count, bins[reached], 1.0)
        np.add.at(self.accepted, bins[reached & (accepted[:, None] > at)], 1.0)
        full = self.count > self.MOST
        self.count[full] /= 2
        self.accepted[full] /= 2

    def shares(self) -> NDArray[np.float64]:
        """The share of drafts that is accepted, by bin."""
        shares: NDArray[np.float64] = (self.accepted + self.STRENGTH * self.GUESS) / (self.count + self.STRENGTH)
        return shares

    def __call__(self, q: NDArray[np.float64]) -> NDArray[np.float64]:
        """The share that is accepted of drafts of probability q."""
        return self.shares()[np.searchsorted(self.EDGES, q)]


@dataclass
class DraftRecord:
    """How drafting fared under one rule with about so many rows: what the next batch begins with."""

    tokens: float = 0.0
    """Tokens of cycles with drafts, the latest counting most."""
    plain: float = 0.0
    """Tokens that plain decoding would have made in the same time."""
    acceptance: Acceptance = field(default_factory=Acceptance)
    credit: float = float("nan")
    """Seconds that may be lost to find out whether drafting pays; not a number before the first batch."""
    since_plain: int = 0
    """Cycles with drafts since plain decoding was timed."""
    spent: float = 0.0
    """Seconds of cycles since a static engine captured plain decoding: when they are many, it is captured again. These
    outlive batches: short answers, one at a time, lose little each and much together."""
    lost: float = 0.0
    """Seconds that cycles took longer because a graph was not captured: they pay for the next capture."""


@dataclass
class PairStatistics:
    """What is known of two engines and their models, for every batch that they decode."""

    costs: Costs = field(default_factory=Costs)
    capture_seconds: float = 0.0
    """Seconds that the latest graph capture took."""
    calibrations: dict[str, Calibration] = field(default_factory=dict)
    """Calibration of the draft's probabilities under each rule."""
    records: dict[tuple[str, int], DraftRecord] = field(default_factory=dict)
    """How drafting fared, by rule and, within a factor of two, rows."""


class GammaController:
    """Chooses γ for the cycles of one batch."""

    def __init__(self, statistics: PairStatistics, rule: AcceptanceRule, *, static: bool = False) -> None:
        """On `static` engines a cycle that was begun has all its drafts."""
        self.statistics, self.static = statistics, static
        self.is_captured: Callable[[int], bool] = lambda gamma: True
        """Whether a static engine has captured a cycle of so many drafts for the rows at hand."""
        self.least = min(rule.matches_needed + 1, MAX_GAMMA)
        self.choices = [g for g in STATIC_CHOICES if g >= self.least] or [self.least]
        self.most = max(self.choices) if static else max(MOST, self.least)
        self.acceptance = Acceptance()
        self.calibration = statistics.calibrations.setdefault(rule.name, Calibration())
        self._rule = rule.name
        self._rows = 0
        self._record = DraftRecord()
        self._tokens = self._seconds = 0.0  # sums over cycles with drafts, the latest counting most
        self._plain = False  # whether plain decoding is believed to be faster
        self._needed = 0.0  # credit without which nobody looks whether it still is
        self._probing = 0
        self._table: list[float] = []  # seconds of cycles by drafts
        self._shares: list[float] = []
        self._sure: NDArray[np.float64] = np.ones(1)
        self._q: list[NDArray[np.float64]] = []

    def choose(self, rows: int, behind: int = 0) -> int:
        """The most drafts of the next cycle of so many rows; the draft model is `behind` by so many plain cycles."""
        self._enter(rows)
        self._q = []
        if self._plain and not self._probing and self._record.credit < self._needed:
            return 0  # since drafting was given up nothing has changed but the credit
        self._table = self.statistics.costs.table(rows, self.most)
        self._shares = self.acceptance.shares(self.most)
        self._sure = np.ones(rows)
        if self._probing:
            self._probing -= 1
            return self._drafts()
        if self._time_plain():
            return 0
        speed = self._speed(self._drafts()) * self._table[0]  # in units of plain decoding
        self._plain = speed * MARGIN < 1 if not self._plain else speed < MARGIN
        if not self._plain:
            return self._drafts(patient=False)
        self._needed = self._probe_seconds(speed, behind)
        if self._record.credit < self._needed:
            return 0
        self._probing = PROBE - 1
        self.acceptance.fade(0.25)  # what was known led here; let the next few cycles speak
        self._tokens, self._seconds = 0.25 * self._tokens, 0.25 * self._seconds
        return self._drafts()

    def more(self, q: Callable[[], Iterable[float]]) -> bool:
        """Whether to go on after a draft that the draft model gave the probability q [B]: whether some number of
        further drafts is expected to win more tokens than their time is worth. q costs a reading of all logits, so it
        is asked for only where it matters: not where even the surest draft would be the last."""
        drafts = len(self._q) + 1
        if drafts >= self.least and not self._pays(drafts, self._sure * self.calibration.shares().max()):
            return False
        self._q.append(np.array(list(q())))
        self._sure = self._sure * self.calibration(self._q[-1])
        return drafts < self.least or self._pays(drafts, self._sure)

    def _pays(self, drafts: int, sure: NDArray[np.float64]) -> bool:
        """Whether to draft on after so many, which are all accepted in row b with probability sure[b]."""
        rate = max(self._speed(self.most), 1 / self._table[0])
        p, won = sum(sure.tolist()) / len(sure), 0.0
        for i in range(drafts, self.most):
            p *= self._shares[i]
            won += p
            if won > rate * (self._table[i + 1] - self._table[drafts]):
                return True
        return False

    def observe(
        self,
        accepted: NDArray[np.int64],
        alive: NDArray[np.bool_],
        drafts: int,
        seconds: Mapping[str, float],
        *,
        behind: bool = False,
    ) -> None:
        """What came of a cycle: `accepted` [B] drafts out of `drafts`, of rows of which some are `alive`; `behind` says
        that the draft model had to catch up."""
        rows, total = len(accepted), sum(seconds.values())
        self.statistics.costs.observe(rows, drafts, seconds, behind=behind)
        if not alive.any():
            return
        if self._q:
            self.calibration.observe(np.stack(self._q, 1)[alive], accepted[alive])
        accepted = accepted[alive]
        record, plain = self._record, self.statistics.costs.plain(rows)
        record.spent += total
        record.credit = min(record.credit + BUDGET * total, MOST_CREDIT * plain)
        if record.credit == MOST_CREDIT * plain:
            self._needed = 0.0  # it will not be more: look again, what was needed may have been timed on a busy machine
        if not drafts:
            record.since_plain = 0
            return
        record.since_plain += 1
        tokens = 1.0 + float(accepted.mean())
        if self._plain:
            record.credit -= max(0.0, total - tokens * plain)
        self.acceptance.observe(accepted, drafts)
        record.acceptance.observe(accepted, drafts, LONG_MEMORY)
        self._tokens = SHORT_MEMORY * self._tokens + tokens
        self._seconds = SHORT_MEMORY * self._seconds + total
        record.tokens = LONG_MEMORY * record.tokens + tokens
        record.plain = LONG_MEMORY * record.plain + total / plain

    def _enter(self, rows: int) -> None:
        """Another number of rows: another cost of everything, another record of the past."""
        if rows == self._rows:
            return
        record = self.statistics.records.setdefault((self._rule, rows.bit_length()), DraftRecord())
        if record is not self._record:
            if not self._rows:
                self.acceptance.begin_with(record.acceptance, weight=4.0)
            self._record, self._tokens, self._seconds = record, 0.0, 0.0
            if np.isnan(record.credit):
                record.credit = MOST_CREDIT * self.statistics.costs.plain(rows)
        self._rows, self._needed = rows, 0.0

    def _time_plain(self) -> bool:
        """Whether plain decoding has to be timed: it never was with so many rows, or not for long. The less drafting
        wins, the more the choice depends on that time, and the less a plain cycle loses."""
        if self.static:
            if not self.is_captured(0):
                return self._record.spent > 4 * min(self.statistics.capture_seconds, MOST_CAPTURE_SECONDS)
            self._record.spent = 0.0  # an engine may drop its graphs: the next capture has to be earned again
        if self.statistics.costs.knows_plain(self._rows):
            gain = self._speed(self.most) * self._table[0] - 1
            often = REFRESH if self.static else min(REFRESH, max(2 * PROBE, 100 * gain))
            return self._record.since_plain >= often
        return self._record.spent > 0

    def _speed(self, drafts: int) -> float:
        """Tokens per second and row: of a fixed number of drafts by expectation; where drafting ends early, as
        measured, with what earlier batches had for the first few cycles."""
        if self.static:
            expected = 1.0 + float(np.cumprod(self._shares[:drafts]).sum())  # tokens of a cycle
            return expected / self._table[drafts]
        plain, weight = self._table[0], 3.0
        past = self._record.tokens / self._record.plain if self._record.plain > weight else 1.2
        return (self._tokens + weight * past) / (self._seconds + weight * plain)

    def _drafts(self, patient: bool = True) -> int:
        """The most drafts of a cycle that has some. A static engine changes them for a clear gain: at once to a
        number that it has captured, else once the time lost without it would have paid for the capture."""
        if not self.static:
            return self.most
        speeds = {g: self._speed(g) for g in self.choices}
        best = max(speeds, key=lambda g: speeds[g])
        current = max((g for g in self.choices if self.is_captured(g)), key=lambda g: speeds[g], default=best)
        if speeds[best] <= MARGIN * speeds[current] or patient:
            return current
        self._record.lost += self._table[current] * (1 - speeds[current] / speeds[best])
        if self._record.lost < min(self.statistics.capture_seconds, MOST_CAPTURE_SECONDS):
            return current
        self._record.lost = 0.0
        return best

    def _probe_seconds(self, speed: float, behind: int) -> float:
        """What it may cost to look whether drafting pays by now: some slow cycles, and what the draft must read."""
        few = self._table[max(self.least, 2)]
        step = self._table[1] - self._table[0]
        reading = step * (1 + SLOPE * min(behind, BACKLOG)) if behind else 0.0
        return PROBE * few * max(0.05, 1 - speed) + reading
