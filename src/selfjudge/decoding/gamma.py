"""γ = auto: chosen by what cycles cost on this machine (`costs.py`) and by how many drafts are accepted.
Where answers do not depend on γ, a `GammaController` chooses the maximum number of drafts before each cycle (0: plain
decoding). On engines that run from Python it may also stop drafting within a cycle. Choices depend on costs, on earlier
cycles and on the draft's own probabilities, never on what the target says of this block: lossless rules stay lossless.
Under relaxed rules and sampling answers depend on γ: a `RequestGamma` chooses it once for each request.
`PairStatistics` outlives batches."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from selfjudge.decoding.acceptance import BLOCK_COUNTS, DECAY, Acceptance, Calibration, RowBlocks, tokens_by_gamma
from selfjudge.decoding.costs import SLOPE, CostTable
from selfjudge.decoding.rules import AcceptanceRule
from selfjudge.types import MAX_GAMMA

MAX_AUTO_GAMMA = 10  # maximum drafts of a cycle on engines that can stop drafting after each one
STATIC_CHOICES = (1, 2, 3, 4, 5, 6, 8)  # static engines capture one graph for each γ, so there are few
SHORT_DECAY = 0.94  # the same for speed: drafting ends soon after it begins to lose
LONG_DECAY = 0.995  # the same for the records that the next batches begin with
MARGIN = 1.02  # plain decoding and drafts replace each other if they are faster by this factor
SWITCH = 1.02  # another γ must be faster by this factor: the draft then reads what the new cycle has no room for
ALIKE = 0.99  # of γ that are this close to the best the smallest is taken: the end of an answer cuts long blocks
PROBE_BUDGET = 0.02  # share of the time that probes may lose
PROBE_CYCLES = 4  # cycles of a probe: drafting although plain decoding seems faster
MAX_CREDIT_CYCLES = 3 * PROBE_CYCLES  # maximum credit for probes, in plain cycles
SLOWEST = 4.0  # power of the mean over rows: with a large one only the row counts that takes longest
RECORD_TOKENS = 20.0  # weight of earlier batches when a batch begins, in tokens of a row


@dataclass
class DraftRecord:
    """Results of drafting under one rule and about as many rows; the next batch begins with them."""

    tokens: float = 0.0  # tokens of cycles with drafts, with decay
    plain_tokens: float = 0.0  # tokens that plain decoding would have produced in the same time
    acceptance: Acceptance = field(default_factory=Acceptance)
    blocks: NDArray[np.float64] = field(default_factory=lambda: np.zeros(BLOCK_COUNTS))
    """Tokens and the cycles of each γ that make them (`RowBlocks`), of all rows."""
    credit: float = float("nan")  # seconds that probes may lose; NaN before the first batch
    lost_seconds: float = 0.0  # lost because the best γ was not captured; beyond the cost of a capture, it is
    entry_gamma: int = 0  # γ that requests got last when they entered with drafts; 0 before
    plain_entries: int = 0  # how often requests entered with γ = 0 since drafts were last tried


@dataclass
class PairStatistics:
    """What all batches of two engines and their models know."""

    costs: CostTable = field(default_factory=CostTable)
    capture_seconds: float = 0.05  # seconds that the latest graph capture took
    calibrations: dict[str, Calibration] = field(default_factory=dict)  # of the draft's probabilities, by rule
    records: dict[tuple[str, int], DraftRecord] = field(default_factory=dict)  # by rule, and rows within a factor of 2


class LiveRows(NamedTuple):
    """The rows of a batch that have not ended."""

    blocks: RowBlocks
    left: NDArray[np.int64]  # [B] tokens that each row may still emit


class GammaPolicy:
    """What both ways of choosing γ know. Times are those of the table, never of the clock."""

    def __init__(self, statistics: PairStatistics, rule: AcceptanceRule) -> None:
        self.statistics = statistics
        self.is_captured: Callable[[int, int], bool] = lambda rows, gamma: True
        """Whether a static engine has captured a cycle of so many rows and this γ."""
        self.min_gamma = min(rule.matches_needed + 1, MAX_GAMMA)
        self.choices = [g for g in STATIC_CHOICES if g >= self.min_gamma] or [self.min_gamma]
        self.max_gamma = max(self.choices)
        self._rule = rule.name

    def costs_of(self, rows: int, drafts: int) -> tuple[float, float]:
        """Seconds of a plain cycle and of one of so many drafts; zeros where nothing reliable was measured."""
        if not self.statistics.costs.cycles or self.statistics.costs.rough:
            return 0.0, 0.0
        seconds = self.statistics.costs.seconds(rows, self.max_gamma)
        return seconds[0], seconds[min(drafts, self.max_gamma)]

    def _find_record(self, rows: int) -> DraftRecord:
        return self.statistics.records.setdefault((self._rule, rows.bit_length()), DraftRecord())


class RequestGamma(GammaPolicy):
    """Chooses a request's γ once, when it enters: its answer must not depend on neighbours or on the clock."""

    KNOWN = 50.0  # tokens after which the counts of a record are believed
    CLEARLY = 1.03  # another γ must be faster by this factor: the same request then gives the same answer

    def choose(self, rows: int, most: int = 0, *, for_good: bool = False) -> int:
        """γ of requests in a batch of so many rows; its others have at most `most`, and cycles draft as much. It is 0
        where drafts do not pay; they are retried so seldom that this loses no more than `PROBE_BUDGET`. `for_good` it
        is what would be best if all had it: else a large γ of rows that entered early would be free for all who enter
        beside them, and those who come after these, and never end."""
        table, beside = self.statistics.costs.seconds(rows, max(self.max_gamma, most)), 0 if for_good else most
        tokens = tokens_by_gamma(self._find_blocks(rows)).tolist()
        speeds = {gamma: tokens[gamma] / table[max(gamma, beside)] for gamma in self.choices}
        best, record = max(speeds, key=lambda gamma: speeds[gamma]), self._find_record(rows)
        loss = 1 - speeds[best] * table[beside]
        record.plain_entries += 1
        if loss > 0 and record.plain_entries * PROBE_BUDGET < loss:
            return 0
        record.plain_entries = 0
        if speeds.get(record.entry_gamma, 0.0) * self.CLEARLY < speeds[best]:
            record.entry_gamma = best
        return record.entry_gamma

    def observe(self, accepted: NDArray[np.int64], gammas: NDArray[np.int64], blocks: RowBlocks) -> None:
        """Count a cycle in which row b accepted accepted[b] of gammas[b] drafts; rows without drafts say nothing."""
        drafted = gammas > 0
        if drafted.any():
            record = self._find_record(len(gammas))
            record.blocks = LONG_DECAY * record.blocks + blocks.observe(accepted, gammas, drafted, record.blocks)

    def _find_blocks(self, rows: int) -> NDArray[np.float64]:
        """What is known best: of this rule and about as many rows, of this rule, of `exact`, or nothing."""
        same = self._find_record(rows).blocks
        if same[2] >= self.KNOWN:
            return same
        known = [
            (rule == self._rule, record.blocks[2], record.blocks)
            for (rule, _), record in self.statistics.records.items()
            if rule in (self._rule, "exact") and record.blocks[2] >= self.KNOWN
        ]
        return max(known, key=lambda entry: entry[:2])[2] if known else same


class GammaController(GammaPolicy):
    """Chooses γ for the cycles of one batch, where answers do not depend on it."""

    def __init__(
        self, statistics: PairStatistics, rule: AcceptanceRule, *, static: bool = False, steady: bool = False
    ) -> None:
        """`static` cycles cannot stop early. A `steady` batch takes new rows; in others the slowest decide the end."""
        super().__init__(statistics, rule)
        self.static, self.steady = static, steady
        if not static:
            self.max_gamma = max(MAX_AUTO_GAMMA, self.min_gamma)
        self.acceptance = Acceptance()
        self.blocks: NDArray[np.float64] = np.zeros(BLOCK_COUNTS)
        self.calibration = statistics.calibrations.setdefault(rule.name, Calibration())
        self._rows = 0
        self._latest = 0  # γ of the latest cycle with drafts
        self._record = DraftRecord()
        self._tokens = self._seconds = 0.0  # sums over cycles with drafts, with decay
        self._prefers_plain = False  # whether plain decoding is believed to be faster
        self._credit_needed = 0.0  # while plain decoding is preferred: the credit that a probe needs
        self._probes_left = 0
        self._table: list[float] = []  # seconds of cycles by drafts
        self._shares: list[float] = []
        self._tokens_by_gamma: list[float] = []
        self._p_accepted: NDArray[np.float64] = np.ones(1)  # [B] that all drafts of this cycle are accepted
        self._draft_probabilities: list[NDArray[np.float64]] = []  # [B] for each draft of this cycle

    def choose(self, rows: int, behind: int = 0, live: LiveRows | None = None) -> int:
        """Maximum drafts of a row in the next cycle. The draft has not read the latest `behind` tokens of a row."""
        self._select_record(rows)
        self._draft_probabilities = []
        if self._prefers_plain and not self._probes_left and self._record.credit < self._credit_needed:
            return 0  # nothing but the credit has changed since the last decision
        self._estimate(live)
        if self._probes_left:
            self._probes_left -= 1
            return self._choose_drafts()
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
        """Whether to draft on after a draft of probability q [B]. q is expensive: computed only where it may matter."""
        drafts = len(self._draft_probabilities) + 1
        if drafts >= self.min_gamma and not self._pays(drafts, self._p_accepted * self.calibration.shares().max()):
            return False
        self._draft_probabilities.append(np.array(list(q())))
        self._p_accepted = self._p_accepted * self.calibration(self._draft_probabilities[-1])
        return drafts < self.min_gamma or self._pays(drafts, self._p_accepted)

    def _pays(self, drafts: int, p_accepted: NDArray[np.float64]) -> bool:
        """Whether further drafts are worth their time; row b accepts all `drafts` with probability p_accepted[b]."""
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
        blocks: RowBlocks,
        *,
        behind: bool = False,
    ) -> None:
        """Count a cycle of `drafts` drafts: [B] how many were `accepted`, and which rows are `alive`. Its `seconds` by
        phase show whether the table holds, unless the draft had to catch up (`behind`)."""
        if not (behind and drafts):
            self.statistics.costs.watch(len(accepted), drafts, sum(seconds.values()))
        if not alive.any():
            return
        if self._draft_probabilities:
            self.calibration.observe(np.stack(self._draft_probabilities, 1)[alive], accepted[alive])
        record = self._record
        if drafts:
            new = blocks.observe(accepted, np.full_like(accepted, drafts), alive, self.blocks)
            self.blocks, record.blocks = DECAY * self.blocks + new, LONG_DECAY * record.blocks + new
        else:
            blocks.run[alive] = 0
        accepted = accepted[alive]
        plain, cost = (self.statistics.costs.seconds(self._rows, self.max_gamma)[n] for n in (0, drafts))
        record.credit = min(record.credit + PROBE_BUDGET * cost, MAX_CREDIT_CYCLES * plain)
        if record.credit == MAX_CREDIT_CYCLES * plain:
            self._credit_needed = 0.0  # the credit cannot grow: decide again
        if not drafts:
            return
        tokens = 1.0 + float(accepted.mean())
        if self._prefers_plain:
            record.credit -= max(0.0, cost - tokens * plain)
        if self.static:
            return  # chosen by the blocks alone
        self.acceptance.observe(accepted, drafts)
        record.acceptance.observe(accepted, drafts, LONG_DECAY)
        self._tokens = SHORT_DECAY * self._tokens + tokens
        self._seconds = SHORT_DECAY * self._seconds + cost
        record.tokens = LONG_DECAY * record.tokens + tokens
        record.plain_tokens = LONG_DECAY * record.plain_tokens + cost / plain

    def _select_record(self, rows: int) -> None:
        if rows == self._rows:
            return
        record = self._find_record(rows)
        if record is not self._record:
            if not self._rows:
                self.acceptance.begin_with(record.acceptance, weight=4.0)
                self.blocks = min(1.0, RECORD_TOKENS / max(record.blocks[2], 1e-9)) * record.blocks
            self._record, self._tokens, self._seconds = record, 0.0, 0.0
            if np.isnan(record.credit):
                record.credit = PROBE_CYCLES * self.statistics.costs.seconds(rows, self.max_gamma)[0]
        self._rows, self._credit_needed = rows, 0.0

    def _estimate(self, live: LiveRows | None = None) -> None:
        """Take the present costs and acceptance."""
        self._table = self.statistics.costs.seconds(self._rows, self.max_gamma)
        self._p_accepted = np.ones(self._rows)
        if not self.static:
            self._shares = self.acceptance.shares(self.max_gamma)
            return
        tokens = tokens_by_gamma(self.blocks)[: self.max_gamma + 1]
        if live is not None:
            own = live.blocks.tokens(tokens)
            if self.steady:
                tokens = own.mean(0)
            else:  # how long the slowest rows take, relative to plain decoding
                left = ((live.left[:, None] / own) ** SLOWEST).mean(0) ** (1 / SLOWEST)
                tokens = left[0] / left
        self._tokens_by_gamma = tokens.tolist()

    def _speed(self, drafts: int) -> float:
        """Tokens per second and row: on static engines expected, else measured, with earlier batches as prior."""
        if self.static:
            return self._tokens_by_gamma[drafts] / self._table[drafts]
        plain, weight = self._table[0], 3.0  # of the prior, in plain cycles
        past = self._record.tokens / self._record.plain_tokens if self._record.plain_tokens > weight else 1.2
        return (self._tokens + weight * past) / (self._seconds + weight * plain)

    def _choose_drafts(self, may_capture: bool = False) -> int:
        """Maximum drafts: of a static engine the best captured γ, or a better one if it `may_capture` and that pays."""
        if not self.static:
            return self.max_gamma
        speeds = {gamma: self._speed(gamma) for gamma in self.choices}
        best = _smallest_of_the_best(speeds)
        captured = {gamma: speed for gamma, speed in speeds.items() if self.is_captured(self._rows, gamma)}
        current = _smallest_of_the_best(captured) if captured else best
        if speeds[current] <= SWITCH * captured.get(self._latest, 0.0):
            current = self._latest
        if may_capture and speeds[best] > SWITCH * speeds[current]:
            self._record.lost_seconds += self._table[current] * (1 - speeds[current] / speeds[best])
            if self._record.lost_seconds >= self.statistics.capture_seconds:
                self._record.lost_seconds, current = 0.0, best
        self._latest = current
        return current

    def _probe_seconds(self, speed: float, behind: int) -> float:
        """Expected loss of a probe in seconds: some slow cycles, and the tokens that the draft must catch up on."""
        cycle = self._table[max(self.min_gamma, 2)]
        step = self._table[1] - self._table[0]
        catch_up = step * (1 + SLOPE * behind) if behind else 0.0
        needed = PROBE_CYCLES * cycle * max(0.05, 1 - speed) + catch_up
        return min(needed, MAX_CREDIT_CYCLES * self._table[0])  # long prompts are tried, too, when the credit is full


def _smallest_of_the_best(speeds: Mapping[int, float]) -> int:
    """The smallest γ of those that are about as fast as the fastest."""
    return min(gamma for gamma, speed in speeds.items() if speed >= ALIKE * max(speeds.values()))
