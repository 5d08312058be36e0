"""The loop: batched speculative decoding over any engines and any acceptance rule, one `Step` per target pass.
In a cycle the draft proposes d_1 … d_γ, one target pass verifies them, the rule says how many are accepted, both caches
are rewound, and each row gets its accepted drafts plus one token of the target. γ = 0 is plain decoding.
Between steps rows leave that have finished or were cancelled. With an `AdmissionQueue`, new rows enter once their
prompts have been read, a chunk at a time (`prefill.py`). Requests that there is no memory for at a time wait in one."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from selfjudge.decoding.admission import AdmissionQueue, BatchRows, Request, check_requests, count_longest, settle
from selfjudge.decoding.batch_gamma import BatchGamma, CyclePlan
from selfjudge.decoding.costs import CostTable, say_measuring
from selfjudge.decoding.cycle import GUARDS, ROW_STATE, Cycle, CycleSize, Packed, PhaseTimer, find_cycle
from selfjudge.decoding.edits import apply_edits
from selfjudge.decoding.gamma import MAX_AUTO_GAMMA, GammaController, PairStatistics, RequestGamma
from selfjudge.decoding.guards import NEVER, GuardedBlock, Guards
from selfjudge.decoding.prefill import Prefill, PrefillGroup
from selfjudge.decoding.rules import EXACT, AcceptanceRule
from selfjudge.decoding.rules_by_row import SETTINGS, RowRules, find_level, list_settings
from selfjudge.decoding.sampling import RandomNumbers
from selfjudge.engine.draft import BACKLOG, BatchEngines
from selfjudge.models.device import empty_cache, make_current, send
from selfjudge.store.run_folder import SHORTEST, LoadWatch
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
    """Decode all requests together; rows that finish leave. With `trace`, emissions say what the target wanted at
    judged tokens. With γ = `auto` (`gamma.py`) the loop chooses γ for every cycle. Under relaxed rules and sampling,
    whose answers depend on γ, it chooses once for every row, when the row enters, and emissions say what.
    The caller may add rows to `cancelled` between steps: they leave before the next step and are removed from the set.
    It may also put requests in the `queue`: they enter while there is room, numbered after the first requests. Prompts
    are then read in chunks, one before each cycle of the live rows: a step of cycle 0 without emissions. The last chunk
    has the row's first token and the seconds of all. The loop ends once no row is left and none waits.
    When sampling, a row's random numbers depend on its own seed alone. Under `RowRules` every request has its own rule
    and γ, by default `exact` and `auto`, and `gamma` is the most that one may have. Its answer is what it would be
    alone with this γ, where the engine computes a row alike in every batch. Cycles cost what rows need."""
    controller: GammaController | None = None
    statistics: PairStatistics | None = None
    by_row, measured = isinstance(rule, RowRules), gamma == "auto"
    if gamma == "auto" or (by_row and gamma):
        statistics, lossless = find_statistics(engines), EXACT if by_row else rule
        if not lossless.depends_on_gamma:
            controller = GammaController(statistics, lossless, static=engines.target.static, steady=queue is not None)
        most = (controller or RequestGamma(statistics, rule)).max_gamma
        gamma = most if gamma == "auto" else max(gamma, most)
        measured = measured or any(request.gamma in (None, "auto") for request in requests)
    requests = check_requests(engines, requests, rule, gamma)
    if measured:
        measure_costs(engines, len(requests), queue)
    if not gamma:
        engines = replace(engines, draft=None)
    served = queue is not None and not queue.patient
    chooser = BatchGamma(engines, rule, int(gamma), trace, controller, statistics, served)
    batch = _LiveBatch(engines, rule, int(gamma), eos_ids, trace, chooser)
    queue, first = batch.begin(requests, queue)
    yield from first
    yield from _steps(batch, queue, set() if cancelled is None else cancelled)


def measure_costs(engines: BatchEngines, rows: int, queue: AdmissionQueue | None = None) -> None:
    """Measure what cycles of so many rows cost, unless it is known. Static engines are measured in a batch instead."""
    costs, rows = find_statistics(engines).costs, rows if queue is None else min(rows, queue.rows)
    if not engines.target.static and engines.draft is not None and not costs.covers(rows):
        _measure(engines, costs, rows)


def find_statistics(engines: BatchEngines) -> PairStatistics:
    """What earlier batches of these engines, or an earlier process, have measured."""
    if (statistics := engines.kept.get("gamma")) is None:
        statistics = engines.kept["gamma"] = PairStatistics(CostTable(engines.shape))
    return statistics


def _measure(engines: BatchEngines, costs: CostTable, rows: int) -> None:
    """Time cycles of a made-up prompt in caches of their own, and keep the table unless the machine is busy."""
    say_measuring()
    costs.begin(rows)
    watch = LoadWatch()
    try:
        _time_cycles(engines.aside(), costs, rows)
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


def _time_cycles(engines: BatchEngines, costs: CostTable, rows: int) -> None:
    """Note the shortest seconds of cycles by drafts: two rounds if slow, more until a busy machine can be told."""
    begun, grid = time.perf_counter(), (1, 2, 3, 4, 6, MAX_AUTO_GAMMA) if rows == 1 else (1, 2, 4)
    cycles_of_round = (0, 0, 1, *grid)  # after plain cycles the draft catches up: the first 1 is void
    length = min(engines.window - 2, 8 + MOST_ROUNDS * (sum(cycles_of_round) + len(cycles_of_round)))
    prompt = [engines.target.vocab_size // 2] * min(8, max(1, length // 2))
    requests = [Request(prompt, max(1, length - len(prompt)))] * rows
    group = PrefillGroup(list(enumerate(requests)), engines.target.device)
    group.begin(engines, MAX_AUTO_GAMMA + 1)
    group.read_all()
    last, left = group.output.logits[:, -1].argmax(-1), length - len(prompt) - 1
    assert engines.draft is not None
    engines.draft.enter(last)
    rounds, spent, behind = 0, 0.0, False
    while rounds < (1 if spent > MEASURE_SECONDS else MOST_ROUNDS if spent < SHORTEST else 2):
        for drafts in cycles_of_round:
            if left <= 0:
                return
            cycle = Cycle(engines, EXACT, CycleSize(drafts), trace=False, first=last)
            cycle.draft_on = lambda q: bool(q())  # always, at the cost that asking has in every cycle
            packed, timer = cycle.run(None)
            seconds, last = timer.seconds(), cycle.last[:, 0]
            left -= 1 + int(packed.unpack().accepted.max())
            if not (behind and drafts):
                new = seconds["draft"], sum(seconds.values()) - seconds["draft"]
                old = costs.cycles.get(rows, {}).get(drafts, new)
                costs.add(rows, drafts, (min(new[0], old[0]), min(new[1], old[1])))
            behind = not drafts
        rounds, spent = rounds + 1, time.perf_counter() - begun


def _steps(batch: _LiveBatch, queue: AdmissionQueue, cancelled: set[int]) -> Iterator[Step]:
    """Alternate chunks of prompts with cycles of the live rows, until no row is left and none waits."""
    number = 0
    chunk_read = False  # since the last cycle
    in_flight: deque[_StartedCycle] = deque()
    while True:
        make_current(batch.engines.target.device)  # the thread may have decoded on another one meanwhile
        batch.rows.cancel(cancelled)
        batch.prefill.store(batch.rows)
        alive = batch.rows.alive
        batch.prefill.cancel(cancelled)
        batch.prefill.admit(queue, batch.rows, cancelled)
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
        elif not batch.prefill.waits(len(alive), chunk_read):
            chunk_read = not queue.patient  # nobody waits for a first token: full batches cost less
            if batch.prefill.read(len(alive), queue.crowded) and not batch.prefill.ready:
                yield Step(0, (), dict.fromkeys(PHASES, 0.0))
            continue
        else:
            chunk_read = False
            if (started := batch.run(number + 1)) is not None:
                number += 1
                in_flight.append(started)
                if len(in_flight) < batch.most_in_flight:
                    continue
            elif not in_flight:
                batch.free_memory(alive)
                continue
        yield batch.finish(in_flight.popleft(), batch.rows)


class _StartedCycle(NamedTuple):
    """A cycle that was started and not yet waited for."""

    number: int
    packed: Packed
    timer: PhaseTimer
    plan: CyclePlan | None = None  # None of a prefill


@dataclass
class _LiveBatch:
    """The engines, the cycle and the random numbers of a batch; all change together when rows enter or leave."""

    engines: BatchEngines
    rule: AcceptanceRule
    gamma: int  # maximum drafts of a cycle
    eos_ids: Collection[int]
    trace: bool
    chooser: BatchGamma
    rows: BatchRows = field(default_factory=lambda: BatchRows.new((), ()))
    cycle: Cycle | None = None
    plain_cycles: int = 0  # cycles since the last drafts
    changed: bool = False  # whether rows have entered or left since the last cycle
    released: int = 0  # how often memory has been freed for the next cycle

    def __post_init__(self) -> None:
        self.random = RandomNumbers(self.engines.target.device)
        chooses = self.chooser.statistics is not None
        self.prefill = Prefill(self.engines, self.gamma + 1, may_postpone=chooses)
        self.by_row = self.rule if isinstance(self.rule, RowRules) else None

    def begin(self, requests: Sequence[Request], queue: AdmissionQueue | None) -> tuple[AdmissionQueue, list[Step]]:
        """Let all requests enter at once, unless there is a queue or no memory for all; these go before those in it."""
        n, tokens, longest = len(requests), self.gamma + 1, max(map(count_longest, requests))
        if queue is None and self.engines.limit_rows(n, longest + tokens, step_tokens=tokens) == n:
            group = PrefillGroup(list(enumerate(requests)), self.engines.target.device)
            with suppress(torch.OutOfMemoryError):
                group.begin(self.engines, tokens)
                group.postpones = self.prefill.postpones(0)
                group.read_all()
                return AdmissionQueue(0, 0), [self._enter(group, [], 0)]
            del group
            self.random.select([])
            self.engines.release_spare()
        queue = queue or AdmissionQueue(n, longest, patient=True)
        queue.waiting.extendleft(reversed(requests))
        self.prefill.make_room(queue, longest)  # if there is none, `admit` gives requests up
        return queue, []

    def join(self, alive: list[int]) -> Step:
        """Let a group whose prompts have been read enter after the live rows. Where a static engine has no memory for
        that, the live rows go on, and the group is read again."""
        group, alive = self.prefill.pop_ready(), settle(alive)
        if len(alive) < len(self.rows):
            self._select(alive)
        total = len(alive) + len(group)
        idle = min(self.engines.target.bucket(total), self.prefill.rows) - total
        try:
            self.engines.join(group.engines, idle)
            return self._enter(group, alive, idle)
        except torch.OutOfMemoryError:
            if not self.engines.target.static:
                raise  # some layers may have joined
        self.prefill.begin_again(len(alive), group)
        kept = self._filled(alive)
        self.engines.select(list(range(len(kept))))
        self.random.select(list(range(len(alive))))
        self.random.enter([None] * (len(kept) - len(alive)))
        self._go_on_with(kept)
        return Step(0, (), dict.fromkeys(PHASES, 0.0))

    def _enter(self, group: PrefillGroup, alive: list[int], idle: int) -> Step:
        """Emit the first tokens of a group. The engines hold its rows after the live ones and before the idle ones."""
        rules, output = [self.chooser.rule_of(request) for request in group.requests], group.output
        seeds = [None if r.sampling is None else q.seed for r, q in zip(rules, group.requests, strict=True)]
        uniforms = self.random.enter([*seeds, *[None] * idle])
        none = torch.empty(len(group), 0, dtype=torch.long, device=group.device)
        state = none.new_zeros((len(group) + idle, ROW_STATE), dtype=torch.float32)
        edits = [request.edits for request in group.requests]
        rule = self.rule
        if self.by_row is not None:
            state[: len(group), -SETTINGS:] = send(list_settings(rules), group.device)
            rule = self.by_row.at(find_level(rules))
        with group.timer("rule"), torch.no_grad():
            if any(edits):
                apply_edits(edits, output.logits)
            row_uniforms = None if uniforms is None else uniforms[: len(group)]
            settings = state[: len(group), -SETTINGS:]
            block = Block(none, output.logits, output.hidden, uniforms=row_uniforms, settings=settings)
            verdict = rule(block)
            packed = Packed.pack(block, verdict)
        first = torch.cat([verdict.next_token, verdict.next_token.new_zeros(idle)])
        state[:, GUARDS][:, 0] = NEVER
        if (guards := self.rule.guards) is not None and any(rule.guards for rule in rules):
            both = zip(rules, group.requests, strict=True)
            begun = [(r.guards or Guards()).begin([request.structured], group.device) for r, request in both]
            entering = GuardedBlock(guards, torch.cat(begun), none)
            state[: len(group), GUARDS] = entering.advance(verdict.n_accepted, verdict.next_token)
        if self.engines.draft is not None:
            self.engines.draft.enter(first)
        size = CycleSize(self.gamma if self.cycle is None else self.cycle.gamma)
        if self.cycle is not None:
            kept = send(alive, first.device, torch.long)
            first = torch.cat([self.cycle.last[kept, 0], first])
            state = torch.cat([self.cycle.row_state[kept], state])
        self.cycle = find_cycle(self.engines, rule, size, trace=self.trace, first=first, row_state=state)
        arrived = BatchRows.new(group.numbers, group.requests, self.chooser.fixed)
        step = self.finish(_StartedCycle(0, packed, group.timer), arrived)
        self.rows = self.rows.select(alive).extended(arrived).extended(BatchRows.new([-1] * idle, [None] * idle))
        self.changed = True
        return replace(step, cached=dict(zip(group.numbers, group.cached[0], strict=True)))

    @property
    def most_in_flight(self) -> int:
        """Cycles that may have been started: a static engine works on one while the host reads another."""
        return 2 if self.engines.target.static and not self.rows.live_edits else 1

    def is_too_wide(self, alive: list[int]) -> bool:
        """Whether the live rows fit in a smaller batch."""
        return bool(alive) and self.engines.target.bucket(len(alive), len(self.rows)) < len(self.rows)

    def shrink(self, alive: list[int]) -> None:
        """Let finished rows leave; a static engine keeps some as idle rows, to fill a size that it captures."""
        self._keep(self._filled(alive))

    def _filled(self, alive: list[int]) -> list[int]:
        """The live rows, and as many ended ones as fill a size that is captured."""
        ended = np.flatnonzero(self.rows.finished).tolist()
        return alive + ended[: self.engines.target.bucket(len(alive), len(self.rows)) - len(alive)] if alive else []

    def free_memory(self, alive: list[int]) -> None:
        """Free memory for the next cycle: first what torch keeps, which no capture can take, then all that is spare.
        At last, give up the newest row, which loses least work."""
        if self.released > 1:
            *others, newest = sorted(alive, key=self.rows.index.__getitem__)
            self.prefill.given_up.append(number := int(self.rows.index[newest]))
            self.prefill.histories.pop(number, None)
            self.rows.finished[newest] = True
            if others:
                self._keep(others)
        if self.released:
            self.engines.release_spare(cycles=True)
        empty_cache()
        self.released += 1

    def _keep(self, kept: list[int]) -> None:
        kept = settle(kept)
        self._select(kept)
        self._go_on_with(kept)

    def _select(self, kept: list[int]) -> None:
        """Keep settled rows: those that move take places of ended ones, so a static engine may move them twice."""
        try:
            self.engines.select(kept)
        except torch.OutOfMemoryError:
            if not self.engines.target.static:
                raise
            self.engines.release_spare(cycles=True)
            self.engines.select(kept)
        self.random.select(kept)

    def _go_on_with(self, kept: list[int]) -> None:
        """Make rows and cycle those of these rows, which the engines have in this order."""
        self.rows = self.rows.select(kept)
        self.changed = True
        if self.cycle is not None and kept:
            index = send(kept, self.cycle.last.device, torch.long)
            rule, size, last = self.cycle.rule, CycleSize(self.cycle.gamma), self.cycle.last[index, 0]
            state = self.cycle.row_state[index]
            self.cycle = find_cycle(self.engines, rule, size, trace=self.trace, first=last, row_state=state)

    def run(self, number: int) -> _StartedCycle | None:
        """Start a cycle of the rows' γ, or of the best one where it is open. None: a static engine has no memory."""
        assert self.cycle is not None
        level, traced, edited = self.rows.live_needs
        rule, chooser = self.by_row.at(level) if self.by_row else self.rule, self.chooser
        plan = chooser.choose(self.rows, self.behind, changed=self.changed, by_gamma=rule.depends_on_gamma)
        trace = self.trace and traced and plan.size.gamma > 0 and not rule.lossless
        self.changed = False
        if (rule, plan.size, trace) != (self.cycle.rule, self.cycle.size, self.cycle.trace):
            last, state = self.cycle.last[:, 0], self.cycle.row_state
            self.cycle = find_cycle(self.engines, rule, plan.size, trace=trace, first=last, row_state=state)
        cycle, start = self.cycle, time.perf_counter()
        cycle.draft_on = chooser.controller.draft_on if chooser.controller and plan.gammas is None else None
        captures = self.engines.target.static and cycle.captured is None
        try:
            cycle.prepare()
        except torch.OutOfMemoryError:
            return None
        packed, timer = cycle.run(self.random.next(cycle.gamma), plan.limits, self.rows.live_edits if edited else ())
        self.plain_cycles, self.released = 0 if plan.size.gamma else self.plain_cycles + 1, 0
        self.prefill.cycles += 1
        if captures and chooser.statistics is not None:
            chooser.statistics.capture_seconds = time.perf_counter() - start
        return _StartedCycle(number, packed, timer, plan)

    @property
    def behind(self) -> int:
        """Tokens of a row that the draft has to read before it drafts again."""
        draft = self.engines.draft
        unread = 0 if draft is None else max((len(tokens) for tokens, _ in draft.postponed), default=0)
        return min(self.plain_cycles, BACKLOG) + unread

    def finish(self, started: _StartedCycle, rows: BatchRows) -> Step:
        """Wait for a cycle (its one synchronisation) and hand its tokens to the rows."""
        seconds = started.timer.seconds()
        outcome, drafted, live = started.packed.unpack(), started.packed.drafted, ~rows.finished
        non_finite, left = bool(outcome.non_finite[live].any()), rows.left.copy()
        emissions = rows.emit(outcome, self.eos_ids)
        self.prefill.note(emissions)
        used = np.minimum(outcome.accepted, left - rows.left)  # drafts after the end of an answer are worth nothing
        plain, cost = 0.0, 0.0
        if started.plan is not None:
            plain, cost = self.chooser.observe(started.plan, drafted, used, live, rows, seconds)
        return Step(started.number, emissions, seconds, non_finite, drafted, cost, plain)
