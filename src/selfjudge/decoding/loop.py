"""The loop: batched speculative decoding over any engines and any acceptance rule.

One cycle: the draft proposes d_1 … d_γ, one target pass verifies them, the rule says how many are accepted, both caches
are rewound, and each row gets its accepted drafts plus one token of the target. γ = 0 is plain decoding.
The loop yields one `Step` per target pass; text, streaming and statistics are layers above (`text.py`).
Between steps rows leave that have finished or were cancelled. With an `AdmissionQueue`, new rows enter once their
prompts have been read, a chunk at a time (`prefill.py`)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selfjudge.decoding.acceptance import RowBlocks
from selfjudge.decoding.admission import AdmissionQueue, BatchRows, Request, check_requests
from selfjudge.decoding.capture import capture_cycles, time_cycle
from selfjudge.decoding.costs import CostTable, say_measuring
from selfjudge.decoding.cycle import (
    GUARDS,
    ROW_STATE,
    Cycle,
    CycleSize,
    Packed,
    PhaseTimer,
    SharedLimits,
    find_cycle,
    is_captured,
)
from selfjudge.decoding.edits import apply_edits
from selfjudge.decoding.gamma import (
    MAX_AUTO_GAMMA,
    GammaController,
    GammaPolicy,
    LiveRows,
    PairStatistics,
    RequestGamma,
)
from selfjudge.decoding.guards import GuardedBlock
from selfjudge.decoding.prefill import Prefill, PrefillGroup
from selfjudge.decoding.rules import EXACT, AcceptanceRule
from selfjudge.decoding.sampling import RandomNumbers
from selfjudge.engine.draft import BatchEngines
from selfjudge.store.load import SHORTEST, LoadWatch
from selfjudge.types import PHASES, Block, Gamma, Step

MEASURE_SECONDS = 4.0  # after so many seconds a model is not measured a second time
MOST_ROUNDS = 6  # of cycles that are timed


def decode(
    engines: BatchEngines,
    requests: Sequence[Request],
    rule: AcceptanceRule,
    *,
    gamma: Gamma = "auto",
    eos_ids: Collection[int] = (),
    trace: bool = False,
    queue: AdmissionQueue | None = None,
    cancelled: set[int] | None = None,
) -> Iterator[Step]:
    """Decode all requests together; rows that finish leave the batch.

    With `trace`, emissions say what the target wanted at judged tokens.

    With γ = `auto` (`gamma.py`) the loop chooses γ for every cycle, by what cycles cost on this machine and by how many
    drafts were accepted. Under relaxed rules and sampling, whose answers depend on γ, it chooses once for every row,
    when the row enters, and emissions say what.

    The caller may add rows to `cancelled` between steps: they leave before the next step and are removed from the set.
    It may also put requests in the `queue`: they enter while there is room, numbered after the first requests.
    With a queue, all prompts are read in chunks: one chunk, then one cycle of the live rows. A chunk is a step of
    cycle 0 without emissions, unless it ends a prompt; that step has the row's first token and the seconds of all its
    chunks. The loop ends once no row is left and none waits.

    With a sampling rule, a row's random numbers depend on its own seed alone, not on its neighbours."""
    controller: GammaController | RequestGamma | None = None
    if gamma == "auto":
        statistics = find_statistics(engines)
        if rule.depends_on_gamma:
            controller = RequestGamma(statistics, rule)
        else:
            controller = GammaController(statistics, rule, static=engines.target.static, steady=queue is not None)
        gamma = controller.max_gamma
    requests = check_requests(engines, requests, rule, gamma)
    if controller is not None:
        measure_costs(engines, len(requests))
    if not gamma:
        engines = replace(engines, draft=None)
    batch = _LiveBatch(engines, rule, gamma, eos_ids, trace, controller)
    if queue is None:
        yield batch.start(requests)
    else:
        batch.enqueue(requests, queue)
    yield from _steps(batch, queue or AdmissionQueue(0, 0), set() if cancelled is None else cancelled)


def measure_costs(engines: BatchEngines, rows: int) -> None:
    """Measure what cycles of so many rows cost on this machine, unless it is known.

    Only engines that run from Python: a static one is measured once a batch has begun, on cycles that it captures."""
    costs = find_statistics(engines).costs
    if not engines.target.static and engines.draft is not None and not costs.covers(rows):
        _measure(engines, costs, rows)


def find_statistics(engines: BatchEngines) -> PairStatistics:
    """What earlier batches of these engines, or an earlier process, have measured."""
    if (statistics := engines.kept.get("gamma")) is None:
        statistics = engines.kept["gamma"] = PairStatistics(CostTable(engines.shape))
        statistics.costs.load()
    return statistics


class _Schedule:
    """Chooses given numbers of drafts, one after the other, and notes the seconds of each cycle in a table."""

    def __init__(self, costs: CostTable, rows: int) -> None:
        self.costs, self.max_gamma = costs, MAX_AUTO_GAMMA
        grid = (1, 2, 3, 4, 6, MAX_AUTO_GAMMA) if rows == 1 else (1, 2, 4)
        self.round = (0, 0, 1, *grid)  # after plain cycles the draft catches up: the first 1 is void
        self.left: deque[int] = deque()
        self.rounds, self.begun = 0, time.perf_counter()

    def choose(self, rows: int, behind: int, live: LiveRows) -> int:
        return self.left.popleft()

    def draft_on(self, q: Callable[[], Iterable[float]]) -> bool:
        q()  # as it costs in every cycle
        return True

    def size(self, rows: int, drafts: int) -> CycleSize:
        return CycleSize(drafts)

    def observe(
        self,
        accepted: Any,
        alive: Any,
        drafts: int,
        seconds: Mapping[str, float],
        blocks: RowBlocks,
        *,
        behind: bool,
        shared: SharedLimits | None = None,
    ) -> None:
        if behind and drafts:
            return
        rows, spent = len(accepted), (seconds["draft"], sum(seconds.values()) - seconds["draft"])
        before = self.costs.cycles.get(rows, {}).get(drafts, spent)
        self.costs.add(rows, drafts, (min(spent[0], before[0]), min(spent[1], before[1])))

    def goes_on(self) -> bool:
        """Whether there is another cycle: two rounds, one of a slow model, more until a busy machine can be told."""
        spent = time.perf_counter() - self.begun
        rounds = 1 if spent > MEASURE_SECONDS else MOST_ROUNDS if spent < SHORTEST else 2
        if not self.left and self.rounds < rounds:
            self.rounds += 1
            self.left.extend(self.round)
        return bool(self.left)


def _measure(engines: BatchEngines, costs: CostTable, rows: int) -> None:
    """Time cycles of a made-up prompt in caches of their own, and keep the table unless the machine is busy."""
    say_measuring()
    costs.begin(rows)
    schedule, watch = _Schedule(costs, rows), LoadWatch()
    most = MOST_ROUNDS * (sum(schedule.round) + len(schedule.round))
    length = min(engines.window - 2, 8 + most)
    prompt = [engines.target.vocab_size // 2] * min(8, max(1, length // 2))
    requests = [Request(prompt, max(1, length - len(prompt)))] * rows
    batch = _LiveBatch(engines.aside(), EXACT, schedule.max_gamma, (), False, schedule)
    try:
        batch.start(requests)
        while len(batch.rows.alive) == rows and schedule.goes_on():
            batch.finish(batch.run(1), batch.rows)
    except BaseException:
        costs.drop(rows)
        raise
    if len(costs.cycles.get(rows, ())) < 3:  # the context window is too short
        costs.drop(rows)
        costs.unmeasurable = True
    elif watch.describe():
        costs.smooth(rows)
    else:
        costs.save(rows)


def _steps(batch: _LiveBatch, queue: AdmissionQueue, cancelled: set[int]) -> Iterator[Step]:
    """Alternate chunks of prompts with cycles of the live rows, until no row is left and none waits."""
    target, number, chunk_read = batch.engines.target, 0, False
    in_flight: deque[_StartedCycle] = deque()
    while True:
        batch.rows.cancel(cancelled)
        alive = batch.rows.alive
        batch.prefill.cancel(cancelled)
        batch.prefill.admit(queue, len(alive), cancelled)
        if given_up := batch.prefill.given_up:
            batch.prefill.given_up = []
            yield Step(0, (), dict.fromkeys(PHASES, 0.0), out_of_memory=tuple(given_up))
            continue
        if not alive:
            if not batch.prefill.groups:
                return
            in_flight.clear()  # all their rows have ended
        if batch.prefill.ready or batch.is_too_wide(alive):  # finish what is in flight; then rows enter or leave
            if not in_flight:
                if batch.prefill.ready:
                    yield batch.join(alive)
                else:
                    batch.shrink(alive)
                continue
        elif not batch.prefill.waits(len(alive)) and not (alive and chunk_read):
            chunk_read = True
            try:
                batch.prefill.read(len(alive), queue.crowded)
            except torch.OutOfMemoryError:
                batch.prefill.begin_again(len(alive))
                continue
            if not batch.prefill.ready:
                yield Step(0, (), dict.fromkeys(PHASES, 0.0))
            continue
        else:
            number, chunk_read = number + 1, False
            in_flight.append(batch.run(number))
            if target.static and len(in_flight) < 2 and not batch.rows.live_edits:
                continue  # the device works on the next cycle while the host reads this one
        yield batch.finish(in_flight.popleft(), batch.rows)


class _StartedCycle(NamedTuple):
    """A cycle that was started and not yet waited for."""

    number: int
    packed: Packed
    timer: PhaseTimer
    behind: bool = False  # whether the draft had to catch up
    gammas: NDArray[np.int64] | None = None  # drafts of each row, where rows have a γ of their own


@dataclass
class _LiveBatch:
    """The engines, the cycle and the random numbers of a batch; all change together when rows enter or leave."""

    engines: BatchEngines
    rule: AcceptanceRule
    gamma: int  # maximum drafts of a cycle
    eos_ids: Collection[int]
    trace: bool
    controller: GammaController | RequestGamma | _Schedule | None = None
    """Chooses γ for every cycle, or for every row that enters; None where γ is fixed."""
    rows: BatchRows = field(default_factory=lambda: BatchRows.new((), ()))
    cycle: Cycle | None = None
    plain_cycles: int = 0  # cycles since the last drafts
    changed: bool = False  # whether rows have entered or left since the last cycle

    def __post_init__(self) -> None:
        self.random = RandomNumbers(self.rule.sampling is not None, self.engines.target.device)
        self.prefill = Prefill(self.engines, step_tokens=self.gamma + 1)
        if isinstance(self.controller, GammaPolicy) and self.engines.target.static:
            size = self.controller.size
            self.controller.is_captured = lambda rows, gamma: is_captured(
                self.engines, self.rule, size(rows, gamma), trace=self.trace, rows=rows
            )

    def start(self, requests: Sequence[Request]) -> Step:
        """Prefill all requests at once and let them enter."""
        group = PrefillGroup(list(enumerate(requests)), self.engines.target.device)
        self.engines.reserve(len(group), group.longest + self.gamma + 1)
        group.engines = self.engines
        group.read_all()
        return self._enter(group, [], 0)

    def enqueue(self, requests: Sequence[Request], queue: AdmissionQueue) -> None:
        """Queue the first requests before all others, and reserve the caches."""
        queue.waiting.extendleft(reversed(requests))
        longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
        self.prefill.make_room(queue, longest)  # where there is no memory, `admit` gives requests up

    def join(self, alive: list[int]) -> Step:
        """Let a group whose prompts have been read enter after the live rows."""
        group = self.prefill.pop_ready()
        if len(alive) < len(self.rows):
            self._select(alive)
        total = len(alive) + len(group)
        idle = min(self.engines.target.bucket(total), self.prefill.rows) - total
        assert group.engines is not None
        self.engines.join(group.engines, idle)
        return self._enter(group, alive, idle)

    def _enter(self, group: PrefillGroup, alive: list[int], idle: int) -> Step:
        """Emit the first tokens of a group. The engines hold its rows after the live ones and before the idle ones."""
        uniforms = self.random.enter([*(request.seed for request in group.requests), *[0] * idle])
        output, none = group.output, torch.empty(len(group), 0, dtype=torch.long, device=group.device)
        edits = [request.edits for request in group.requests]
        with group.timer("rule"), torch.no_grad():
            if any(edits):
                apply_edits(edits, output.logits)
            row_uniforms = None if uniforms is None else uniforms[: len(group)]
            block = Block(none, output.logits, output.hidden, uniforms=row_uniforms)
            verdict = self.rule(block)
        first = torch.cat([verdict.next_token, verdict.next_token.new_zeros(idle)])
        state = first.new_zeros((len(first), ROW_STATE), dtype=torch.float32)
        if (guards := self.rule.guards) is not None:
            begun = guards.begin((request.structured for request in group.requests), group.device)
            entering = GuardedBlock(guards, begun, none)
            state[: len(group), GUARDS] = entering.advance(verdict.n_accepted, verdict.next_token)
        if self.engines.draft is not None:
            self.engines.draft.enter(first)
        if self.cycle is None:
            self._begin_cycle(CycleSize(self.gamma), first, state)
        else:
            last, before = self.cycle.last[alive, 0], self.cycle.row_state[alive]
            self._begin_cycle(CycleSize(self.cycle.gamma), torch.cat([last, first]), torch.cat([before, state]))
        limits, gamma = [request.max_new_tokens for request in group.requests], -1 if self.controller else self.gamma
        arrived = BatchRows.new(group.numbers, limits, gamma, edits)
        arrived.endless[:] = [request.ignore_eos for request in group.requests]
        step = self.finish(_StartedCycle(0, Packed.pack(block, verdict), group.timer), arrived)
        self.rows = self.rows.select(alive).extended(arrived).extended(BatchRows.new([-1] * idle, [1] * idle))
        self.changed = True
        return step

    def is_too_wide(self, alive: list[int]) -> bool:
        """Whether the live rows fit in a smaller batch."""
        return bool(alive) and self.engines.target.bucket(len(alive), len(self.rows)) < len(self.rows)

    def shrink(self, alive: list[int]) -> None:
        """Let finished rows leave; a static engine keeps some as idle rows, to fill a size that it captures."""
        idle = [i for i in range(len(self.rows)) if self.rows.finished[i]]
        kept = alive + idle[: self.engines.target.bucket(len(alive), len(self.rows)) - len(alive)]
        self._select(kept)
        self.rows = self.rows.select(kept)
        assert self.cycle is not None
        self._begin_cycle(CycleSize(self.cycle.gamma), self.cycle.last[kept, 0], self.cycle.row_state[kept])
        self.changed = True

    def _begin_cycle(self, size: CycleSize, last: Tensor, state: Tensor) -> None:
        """Continue with cycles of this size over the rows of the engines; `last` [B] are their newest tokens, `state`
        is their `Cycle.row_state`."""
        self.cycle = find_cycle(self.engines, self.rule, size, trace=self.trace, first=last, row_state=state)
        self.cycle.draft_on = None if self.controller is None else self.controller.draft_on

    def run(self, number: int) -> _StartedCycle:
        """Start a cycle, of the γ that the controller chooses if there is one."""
        assert self.cycle is not None
        behind = self.plain_cycles > 0
        if self.changed and isinstance(self.controller, GammaPolicy) and self.engines.target.static:
            self._capture_choices(self.controller)
        gammas: NDArray[np.int64] | None = None
        size, drafts = self.cycle.size, self.cycle.gamma
        if isinstance(self.controller, RequestGamma):
            size, gammas = self._choose_for_rows(self.controller)
            drafts = size.gamma
        elif self.controller is not None:
            drafts = self.controller.choose(len(self.rows), self.plain_cycles, self.rows.live)
            size = self.controller.size(len(self.rows), drafts)
        if (edits := self.rows.live_edits) and size.shared:
            size = CycleSize(drafts)
        self.changed = False
        self.plain_cycles = 0 if drafts else self.plain_cycles + 1
        if size != self.cycle.size:
            self._begin_cycle(size, self.cycle.last[:, 0], self.cycle.row_state)
        cycle, start = self.cycle, time.perf_counter()
        captures = self.engines.target.static and cycle.captured is None
        limits = np.where(self.rows.finished, 0, size.gamma) if size.shared else gammas
        packed, timer = cycle.run(self.random.next(cycle.gamma), None if size.tokens is None else limits, edits)
        if captures and isinstance(self.controller, GammaPolicy):
            self.controller.statistics.capture_seconds = time.perf_counter() - start
        return _StartedCycle(number, packed, timer, behind, gammas)

    def _choose_for_rows(self, controller: RequestGamma) -> tuple[CycleSize, NDArray[np.int64]]:
        """Give γ to the rows that have entered. Returns the size of the next cycle and the drafts of each row."""
        rows, live = self.rows, ~self.rows.finished
        if self.changed:
            new = live & (rows.gamma < 0)
            most = int(rows.gamma[live & ~new].max(initial=0))
            if new.any():
                rows.gamma[new] = controller.choose(len(rows), most)
        gammas = np.where(live, rows.gamma, 0)
        return controller.size(len(rows), int(gammas.max())), gammas

    def _capture_choices(self, controller: GammaController | RequestGamma) -> None:
        """Before the first cycle of another number of rows: capture every γ that they may soon use; where the table
        does not know so many rows, capture and time all of them."""
        rows, statistics = len(self.rows), controller.statistics
        costs, usual = statistics.costs, rows & (rows - 1) == 0  # what batches shrink to is measured, others estimated
        known = (rows in costs.cycles or not usual) and costs.covers(rows)
        if usual and isinstance(controller, GammaController):
            self._measure_sharing(controller)
        start, captured = time.perf_counter(), len(self.engines.target.captured_cycles)
        try:
            if not known:
                say_measuring()
                gammas = [0, *controller.choices_for(rows)]
                cycles = capture_cycles(self.engines, self.rule, rows, map(CycleSize, gammas), trace=self.trace)
                seconds = [time_cycle(cycle) for cycle in cycles]
                costs.begin(rows)
                for gamma, spent in zip(gammas, seconds, strict=True):
                    costs.add(rows, gamma, spent)
                costs.save(rows)
            sizes = [controller.size(rows, gamma) for gamma in controller.candidates(rows)]
            capture_cycles(self.engines, self.rule, rows, sizes, trace=self.trace)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return  # γ is chosen by estimates, and captured one at a time
        if known and (new := len(self.engines.target.captured_cycles) - captured) > 0:
            statistics.capture_seconds = (time.perf_counter() - start) / new

    def _measure_sharing(self, controller: GammaController) -> None:
        """Measure once how much longer a cycle takes in which rows share what a pass verifies."""
        rows, drafts, costs = len(self.rows), 3, controller.statistics.costs
        if not controller.may_share(rows) or rows in costs.sharing:
            return
        sizes = [CycleSize(drafts), CycleSize(drafts + 1, rows * (drafts + 1), shared=True)]
        try:
            cycles = capture_cycles(self.engines, self.rule, rows, sizes, trace=self.trace)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return
        each, shared = (sum(time_cycle(cycle)) for cycle in cycles)
        costs.sharing[rows] = shared / each
        if rows in costs.cycles:
            costs.save(rows)

    def _select(self, rows: list[int]) -> None:
        self.engines.select(rows)
        self.random.select(rows)

    def finish(self, started: _StartedCycle, rows: BatchRows) -> Step:
        """Wait for a cycle (its one synchronisation) and hand its tokens to the rows."""
        seconds = started.timer.seconds()
        outcome, drafted, live = started.packed.unpack(), started.packed.drafted, ~rows.finished
        verified = drafted if outcome.shared is None else drafted - 1
        non_finite, left = bool(outcome.non_finite[live].any()), rows.left.copy()
        emissions = rows.emit(outcome, self.eos_ids)
        used = np.minimum(outcome.accepted, left - rows.left)  # drafts after the end of an answer are worth nothing
        if isinstance(self.controller, RequestGamma):
            if started.gammas is not None:
                gammas = np.where(live, started.gammas, 0)
                self.controller.observe(used, gammas, drafted, seconds, rows.blocks, behind=started.behind)
        elif self.controller is not None and started.number:
            self.controller.observe(
                used, live, verified, seconds, rows.blocks, behind=started.behind, shared=outcome.shared
            )
        cost = plain = 0.0
        if isinstance(self.controller, GammaPolicy) and started.number:
            plain, cost = self.controller.costs_of(len(rows), verified)
        return Step(started.number, emissions, seconds, non_finite, drafted, cost, plain)
