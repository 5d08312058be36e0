"""γ = auto: chosen by measured cycle times and by how many drafts are accepted.

All figures come from cycles that decode anyway; only a few cycles run with another γ in order to measure it.
`PairStatistics` outlives batches: seconds by rows and drafts, and acceptance under each rule. A `GammaController`
chooses for one batch: before each cycle the maximum number of drafts (0: plain decoding), and during it, on engines
that run from Python, whether one more draft is worth its time. Choices depend on the clock, on earlier cycles and on
the draft's own probabilities, never on what the target says of this block: lossless rules stay lossless.
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

MAX_AUTO_GAMMA = 10  # maximum drafts of a cycle on engines that can stop drafting after each one
STATIC_CHOICES = (1, 2, 3, 5, 8)  # static engines capture one graph for each γ, so there are few
DECAY = 0.97  # weight of the counts so far when the next cycle is counted
SHORT_DECAY = 0.94  # the same for speed: drafting ends soon after it begins to lose
LONG_DECAY = 0.995  # the same for the records that the next batches begin with
MARGIN = 1.02  # a choice replaces another if it is faster by this factor
PROBE_BUDGET = 0.02  # share of the time that probes may lose
PROBE_CYCLES = 4  # cycles of a probe: drafting although plain decoding seems faster
MAX_CREDIT_CYCLES = 3 * PROBE_CYCLES  # maximum credit for probes, in plain cycles
PLAIN_INTERVAL = 96  # maximum cycles with drafts before plain decoding is timed again
MAX_CAPTURE_SECONDS = 0.5  # longer captures count as this: the first ones compile kernels, too
SLOPE = 0.1  # initial guess, as a share of a pass: the cost of one more token, and of a draft step


class Costs:
    """Seconds of cycles by rows and drafts: medians of the latest, interpolated where nothing was timed."""

    def __init__(self) -> None:
        self._latest: dict[tuple[int, int | None], deque[float]] = defaultdict(lambda: deque(maxlen=7))
        self._draft_seconds: dict[int, float] = {}  # rows → one draft step; in `_latest` under (rows, None)
        self._pass_seconds: dict[tuple[int, int], float] = {}  # rows, drafts → all other phases of a cycle

    def observe(self, rows: int, drafts: int, seconds: Mapping[str, float], *, behind: bool = False) -> None:
        """Count a cycle. If the draft model had to catch up (`behind`), its time is not counted."""
        if drafts and not behind:
            self._draft_seconds[rows] = self._median((rows, None), seconds["draft"] / drafts)
        rest = sum(spent for phase, spent in seconds.items() if phase != "draft")
        self._pass_seconds[rows, drafts] = self._median((rows, drafts), rest)

    def _median(self, key: tuple[int, int | None], value: float) -> float:
        """The median of the latest values: it ignores single ones that other load on the machine made slow."""
        self._latest[key].append(value)
        return median_low(self._latest[key])  # of two values, the faster

    def knows_plain(self, rows: int) -> bool:
        """Whether plain decoding was timed at least twice with about as many rows."""
        return any(d == 0 and _is_near(b, rows) and len(self._latest[b, d]) > 1 for b, d in self._pass_seconds)

    def table(self, rows: int, most: int) -> list[float]:
        """Seconds of cycles of 0 … `most` drafts, rising: where a pass took longer than one over more tokens, the
        machine was busy, and the shorter time counts."""
        step, passes = self._estimate_draft(rows), [self._estimate_pass(rows, drafts) for drafts in range(most + 1)]
        least = [*accumulate(reversed(passes), min)][::-1]
        return [seconds + drafts * step for drafts, seconds in enumerate(least)]

    def plain_seconds(self, rows: int) -> float:
        """Seconds of a cycle without drafts."""
        return min([self._estimate_pass(rows, 0), *(s for (b, _), s in self._pass_seconds.items() if b == rows)])

    def _estimate_draft(self, rows: int) -> float:
        if not self._draft_seconds:
            return SLOPE * self._estimate_pass(rows, 0)
        return self._draft_seconds[rows] if rows in self._draft_seconds else _interpolate(self._draft_seconds, rows)

    def _estimate_pass(self, rows: int, drafts: int) -> float:
        """The measured seconds; else an estimate from about as many rows, from other γ, or from as many tokens."""
        known = self._pass_seconds
        if (rows, drafts) in known:
            return known[rows, drafts]
        if not known:
            return 1.0 + SLOPE * drafts
        if near := [b for b, d in known if d == drafts and _is_near(b, rows)]:
            other = min(near, key=lambda b: abs(b - rows))
            ratios = [known[rows, d] / known[other, d] for b, d in known if b == rows and (other, d) in known]
            return known[other, drafts] * (median(ratios) if ratios else 1 + SLOPE * (rows / other - 1))
        same = {d + 1: s for (b, d), s in known.items() if b == rows}
        if len(same) > 1 or len(same) == len(known):
            return _interpolate(same, drafts + 1)
        return _interpolate({b * (d + 1): s for (b, d), s in known.items()}, rows * (drafts + 1))


def _is_near(a: int, b: int) -> bool:
    """Whether the larger of two numbers is at most 3/2 of the smaller."""
    return 2 * max(a, b) <= 3 * min(a, b)


def _interpolate(points: Mapping[int, float], x: int) -> float:
    """Interpolate between the two points around x, or extrapolate from the nearest two; from one point, by `SLOPE`."""
    known = sorted(points.items())
    if len(known) == 1:
        ((x0, y0),) = known
        return y0 * (1 + SLOPE * (x / x0 - 1))
    right = min(max(1, sum(x0 < x for x0, _ in known)), len(known) - 1)
    (x0, y0), (x1, y1) = known[right - 1 : right + 1]
    slope = max(0.0, (y1 - y0) / (x1 - x0))
    return max(y0 + slope * (x - x0), 0.2 * min(y0, y1))


class Acceptance:
    """How often draft i is accepted once those before it are: decaying counts, the share of draft i − 1 as prior."""

    FIRST = 0.7  # prior of the first draft
    STRENGTH = 2.0  # weight of a prior, in cycles

    def __init__(self) -> None:
        self.reached = np.zeros(MAX_GAMMA)
        self.accepted = np.zeros(MAX_GAMMA)

    def observe(self, accepted: NDArray[np.int64], drafts: int, decay: float = DECAY) -> None:
        """Count a cycle of `drafts` drafts, of which row b accepted accepted[b]."""
        self.fade(decay)
        for n, rows in Counter(accepted.tolist()).items():
            self.reached[: min(n + 1, drafts)] += rows / len(accepted)
            self.accepted[:n] += rows / len(accepted)

    def fade(self, share: float) -> None:
        self.reached *= share
        self.accepted *= share

    def begin_with(self, other: Acceptance, weight: float) -> None:
        """Start from another's counts, weighted as at most `weight` cycles."""
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
    STRENGTH = 4.0  # weight of the guess, in drafts
    MAX_COUNT = 2000.0  # counts of a bin before they are halved

    def __init__(self) -> None:
        self.count = np.zeros(len(self.GUESS))
        self.accepted = np.zeros(len(self.GUESS))

    def observe(self, q: NDArray[np.float64], accepted: NDArray[np.int64]) -> None:
        """Count drafts of probability q [B, γ], of which `accepted` [B]; those after a rejection do not count."""
        at = np.arange(q.shape[1])
        bins, reached = np.searchsorted(self.EDGES, q), accepted[:, None] >= at
        np.add.at(self.count, bins[reached], 1.0)
        np.add.at(self.accepted, bins[reached & (accepted[:, None] > at)], 1.0)
        full = self.count > self.MAX_COUNT
        self.count[full] /= 2
        self.accepted[full] /= 2

    def shares(self) -> NDArray[np.float64]:
        """The share of accepted drafts in each bin."""
        shares: NDArray[np.float64] = (self.accepted + self.STRENGTH * self.GUESS) / (self.count + self.STRENGTH)
        return shares

    def __call__(self, q: NDArray[np.float64]) -> NDArray[np.float64]:
        """The share of accepted drafts among those of probability q."""
        return self.shares()[np.searchsorted(self.EDGES, q)]


@dataclass
class DraftRecord:
    """Results of drafting under one rule and about as many rows; the next batch begins with them."""

    tokens: float = 0.0
    """Tokens of cycles with drafts, with decay."""
    plain_tokens: float = 0.0
    """Tokens that plain decoding would have produced in the same time."""
    acceptance: Acceptance = field(default_factory=Acceptance)
    credit: float = float("nan")
    """Seconds that probes may lose; NaN before the first batch."""
    since_plain: int = 0
    """Cycles with drafts since plain decoding was timed."""
    uncaptured_seconds: float = 0.0
    """Seconds of cycles without a captured plain cycle: once they are many, a static engine captures it. They outlive
    batches, so that many short answers together pay for a capture."""
    lost_seconds: float = 0.0
    """Seconds lost because the best γ was not captured; once they exceed the cost of a capture, it is."""


@dataclass
class PairStatistics:
    """What all batches of two engines and their models have measured."""

    costs: Costs = field(default_factory=Costs)
    capture_seconds: float = 0.0
    """Seconds that the latest graph capture took."""
    calibrations: dict[str, Calibration] = field(default_factory=dict)
    """Calibration of the draft's probabilities under each rule."""
    records: dict[tuple[str, int], DraftRecord] = field(default_factory=dict)
    """Records by rule and by rows, within a factor of two."""


class GammaController:
    """Chooses γ for the cycles of one batch."""

    def __init__(self, statistics: PairStatistics, rule: AcceptanceRule, *, static: bool = False) -> None:
        """On `static` engines a cycle cannot stop drafting early."""
        self.statistics, self.static = statistics, static
        self.is_captured: Callable[[int], bool] = lambda gamma: True
        """Whether a static engine has captured a cycle of this γ for the current rows."""
        self.min_gamma = min(rule.matches_needed + 1, MAX_GAMMA)
        self.choices = [g for g in STATIC_CHOICES if g >= self.min_gamma] or [self.min_gamma]
        self.max_gamma = max(self.choices) if static else max(MAX_AUTO_GAMMA, self.min_gamma)
        self.acceptance = Acceptance()
        self.calibration = statistics.calibrations.setdefault(rule.name, Calibration())
        self._rule = rule.name
        self._rows = 0
        self._record = DraftRecord()
        self._tokens = self._seconds = 0.0  # sums over cycles with drafts, with decay
        self._prefers_plain = False  # whether plain decoding is believed to be faster
        self._credit_needed = 0.0  # while plain decoding is preferred: the credit that a probe needs
        self._probes_left = 0
        self._table: list[float] = []  # seconds of cycles by drafts
        self._shares: list[float] = []
        self._p_accepted: NDArray[np.float64] = np.ones(1)  # [B] that all drafts of this cycle are accepted
        self._draft_probabilities: list[NDArray[np.float64]] = []  # [B] for each draft of this cycle

    def choose(self, rows: int, behind: int = 0) -> int:
        """Maximum drafts of the next cycle; the draft model has not read the tokens of `behind` plain cycles."""
        self._select_record(rows)
        self._draft_probabilities = []
        if self._prefers_plain and not self._probes_left and self._record.credit < self._credit_needed:
            return 0  # nothing but the credit has changed since the last decision
        self._table = self.statistics.costs.table(rows, self.max_gamma)
        self._shares = self.acceptance.shares(self.max_gamma)
        self._p_accepted = np.ones(rows)
        if self._probes_left:
            self._probes_left -= 1
            return self._choose_drafts()
        if self._must_time_plain():
            return 0
        speed = self._speed(self._choose_drafts()) * self._table[0]  # in units of plain decoding
        self._prefers_plain = speed * MARGIN < 1 if not self._prefers_plain else speed < MARGIN
        if not self._prefers_plain:
            return self._choose_drafts(may_capture=True)
        self._credit_needed = self._probe_seconds(speed, behind)
        if self._record.credit < self._credit_needed:
            return 0
        self._probes_left = PROBE_CYCLES - 1
        self.acceptance.fade(0.25)  # old counts led to plain decoding: let the probe weigh more
        self._tokens, self._seconds = 0.25 * self._tokens, 0.25 * self._seconds
        return self._choose_drafts()

    def draft_on(self, q: Callable[[], Iterable[float]]) -> bool:
        """Whether to draft on after a draft to which the draft model gave the probability q [B]. q is expensive: it is
        not computed where drafting would end here even at the highest acceptance."""
        drafts = len(self._draft_probabilities) + 1
        if drafts >= self.min_gamma and not self._pays(drafts, self._p_accepted * self.calibration.shares().max()):
            return False
        self._draft_probabilities.append(np.array(list(q())))
        self._p_accepted = self._p_accepted * self.calibration(self._draft_probabilities[-1])
        return drafts < self.min_gamma or self._pays(drafts, self._p_accepted)

    def _pays(self, drafts: int, p_accepted: NDArray[np.float64]) -> bool:
        """Whether further drafts are expected to win more tokens than their time is worth; p_accepted[b] is the
        probability that row b accepts all `drafts` so far."""
        rate = max(self._speed(self.max_gamma), 1 / self._table[0])
        p, won = sum(p_accepted.tolist()) / len(p_accepted), 0.0
        for i in range(drafts, self.max_gamma):
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
        """Count a cycle of `drafts` drafts: [B] how many were `accepted`, and which rows are `alive`; if `behind`,
        the draft model had to catch up."""
        rows, total = len(accepted), sum(seconds.values())
        self.statistics.costs.observe(rows, drafts, seconds, behind=behind)
        if not alive.any():
            return
        if self._draft_probabilities:
            self.calibration.observe(np.stack(self._draft_probabilities, 1)[alive], accepted[alive])
        accepted = accepted[alive]
        record, plain = self._record, self.statistics.costs.plain_seconds(rows)
        record.uncaptured_seconds += total
        record.credit = min(record.credit + PROBE_BUDGET * total, MAX_CREDIT_CYCLES * plain)
        if record.credit == MAX_CREDIT_CYCLES * plain:
            self._credit_needed = 0.0  # the credit cannot grow: decide again, the machine may have been busy
        if not drafts:
            record.since_plain = 0
            return
        record.since_plain += 1
        tokens = 1.0 + float(accepted.mean())
        if self._prefers_plain:
            record.credit -= max(0.0, total - tokens * plain)
        self.acceptance.observe(accepted, drafts)
        record.acceptance.observe(accepted, drafts, LONG_DECAY)
        self._tokens = SHORT_DECAY * self._tokens + tokens
        self._seconds = SHORT_DECAY * self._seconds + total
        record.tokens = LONG_DECAY * record.tokens + tokens
        record.plain_tokens = LONG_DECAY * record.plain_tokens + total / plain

    def _select_record(self, rows: int) -> None:
        """Take the record that belongs to this number of rows."""
        if rows == self._rows:
            return
        record = self.statistics.records.setdefault((self._rule, rows.bit_length()), DraftRecord())
        if record is not self._record:
            if not self._rows:
                self.acceptance.begin_with(record.acceptance, weight=4.0)
            self._record, self._tokens, self._seconds = record, 0.0, 0.0
            if np.isnan(record.credit):
                record.credit = MAX_CREDIT_CYCLES * self.statistics.costs.plain_seconds(rows)
        self._rows, self._credit_needed = rows, 0.0

    def _must_time_plain(self) -> bool:
        """Whether plain decoding must be timed now: it never was with about as many rows, or not recently. The less
        drafting wins, the more often: the choice depends more on that time, and a plain cycle loses less."""
        if self.static:
            if not self.is_captured(0):
                return self._record.uncaptured_seconds > 4 * min(self.statistics.capture_seconds, MAX_CAPTURE_SECONDS)
            self._record.uncaptured_seconds = 0.0  # counted anew if the engine drops this graph
        if self.statistics.costs.knows_plain(self._rows):
            gain = self._speed(self.max_gamma) * self._table[0] - 1
            interval = PLAIN_INTERVAL if self.static else min(PLAIN_INTERVAL, max(2 * PROBE_CYCLES, 100 * gain))
            return self._record.since_plain >= interval
        return self._record.uncaptured_seconds > 0

    def _speed(self, drafts: int) -> float:
        """Tokens per second and row. On static engines the expected speed of γ = `drafts`; on others, which may stop
        drafting early, the measured speed, with that of earlier batches as prior."""
        if self.static:
            expected = 1.0 + float(np.cumprod(self._shares[:drafts]).sum())  # tokens of a cycle
            return expected / self._table[drafts]
        plain, weight = self._table[0], 3.0  # of the prior, in plain cycles
        past = self._record.tokens / self._record.plain_tokens if self._record.plain_tokens > weight else 1.2
        return (self._tokens + weight * past) / (self._seconds + weight * plain)

    def _choose_drafts(self, may_capture: bool = False) -> int:
        """Maximum drafts of a cycle with drafts. A static engine uses the best γ that it has captured; a clearly better
        one, if it `may_capture`, once the time lost without it exceeds the cost of the capture."""
        if not self.static:
            return self.max_gamma
        speeds = {g: self._speed(g) for g in self.choices}
        best = max(speeds, key=lambda g: speeds[g])
        current = max((g for g in self.choices if self.is_captured(g)), key=lambda g: speeds[g], default=best)
        if not may_capture or speeds[best] <= MARGIN * speeds[current]:
            return current
        self._record.lost_seconds += self._table[current] * (1 - speeds[current] / speeds[best])
        if self._record.lost_seconds < min(self.statistics.capture_seconds, MAX_CAPTURE_SECONDS):
            return current
        self._record.lost_seconds = 0.0
        return best

    def _probe_seconds(self, speed: float, behind: int) -> float:
        """Expected loss of a probe in seconds: some slow cycles, and the tokens that the draft must catch up on."""
        cycle = self._table[max(self.min_gamma, 2)]
        step = self._table[1] - self._table[0]
        catch_up = step * (1 + SLOPE * min(behind, BACKLOG)) if behind else 0.0
        return PROBE_CYCLES * cycle * max(0.05, 1 - speed) + catch_up
