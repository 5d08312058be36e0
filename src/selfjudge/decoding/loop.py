"""THE loop: batched speculative decoding over any engine, any draft and any acceptance rule.

One cycle: the draft proposes d_1 … d_γ, one target pass verifies them, the rule says how many stand, both caches
are rewound, and the rows get their accepted drafts plus one token of the target. γ = 0 is plain decoding.
The loop yields one `Step` per target pass; text, streaming and statistics are layers above (`text.py`).
Between steps rows leave: those that finished, and those the caller cancels. Where the caller keeps an `AdmissionQueue`,
others enter, once their prompts have been read, a chunk at a time (`prefill.py`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from selfjudge.decoding.admission import AdmissionQueue, BatchRows, Request, check_request
from selfjudge.decoding.cycle import Cycle, PhaseTimer, cycle_key, find_cycle
from selfjudge.decoding.gamma import GammaController, PairStatistics
from selfjudge.decoding.packed import Packed
from selfjudge.decoding.prefill import Group, Prefill
from selfjudge.decoding.rules import AcceptanceRule
from selfjudge.decoding.sampling import RandomNumbers
from selfjudge.engine.base import Engine, RowCache
from selfjudge.engine.draft import Drafter
from selfjudge.types import PHASES, Block, Gamma, Step, default_gamma


def decode(
    target: Engine,
    draft: Drafter | None,
    prompts: Sequence[Sequence[int]],
    rule: AcceptanceRule,
    *,
    gamma: Gamma | None = None,
    statistics: PairStatistics | None = None,
    max_new_tokens: int | Sequence[int] = 256,
    eos_ids: Collection[int] = (),
    seeds: Sequence[int] | None = None,
    cancelled: set[int] | None = None,
    queue: AdmissionQueue | None = None,
    trace: bool = False,
) -> Iterator[Step]:
    """Decode all prompts together; rows that finish leave the batch. `max_new_tokens` is one limit, or one for each.

    `draft` may be None only with γ = 0. With `trace`, emissions say what the target wanted at judged tokens.

    With γ = `auto` (`gamma.py`) the loop chooses γ for every cycle, by the clock and by how earlier drafts fared;
    `statistics` is what earlier batches of these engines learned, and learns from this one. Lossless rules stay so.
    With others, and when sampling, what an answer says depends on γ, and so on the clock.

    The caller may fill `cancelled` between steps: those rows leave before the next one, and are taken out of the set.
    So may it fill the `queue`: its requests enter while there is room; rows are numbered on from the prompts. With a
    queue, all prompts are read in chunks: one chunk, then one cycle of the live rows. A chunk is a step of cycle 0
    without emissions, unless it ends a prompt; that step has the row's first token and the seconds of all its chunks.
    The loop ends once no row is left and none waits.

    With a sampling rule, a row's random numbers depend on its own seed alone, not on its neighbours (with γ =
    `auto`, how many of them are used depends on the neighbours too).
    """
    gamma = default_gamma(target.device.type) if gamma is None else gamma
    controller = None
    if gamma == "auto":
        controller = GammaController(statistics or PairStatistics(), rule, static=target.static)
        gamma = controller.most
    limits = check_request(target, draft, prompts, rule, gamma, max_new_tokens)
    requests = list(map(Request, prompts, limits, range(len(prompts)) if seeds is None else seeds))
    batch = _Batch(target, draft if gamma else None, rule, gamma, eos_ids, trace, controller)
    if queue is None:
        yield batch.start(requests)
    else:
        batch.wait(requests, queue)
    yield from _steps(batch, queue, set() if cancelled is None else cancelled)


def _steps(batch: _Batch, queue: AdmissionQueue | None, cancelled: set[int]) -> Iterator[Step]:
    """Chunks of prompts and cycles of the live rows by turns, until no row is left and none waits."""
    target, number, chunk_read = batch.target, 0, False
    in_flight: deque[_Sent] = deque()
    while True:
        batch.rows.cancel(cancelled)
        alive = batch.rows.alive
        if queue is not None:
            batch.prefill.cancel(cancelled)
            batch.prefill.admit(queue, len(alive), cancelled)
        if not alive:
            if not batch.prefill.groups:
                return
            in_flight.clear()  # nobody reads them
        if batch.prefill.ready:  # rows enter, once nothing is in flight
            if not in_flight:
                assert queue is not None
                yield batch.join(alive, queue.rows)
                continue
        elif alive and target.bucket(len(alive), len(batch.rows)) < len(batch.rows):  # rows leave, likewise
            if not in_flight:
                batch.shrink(alive)
        elif batch.prefill.groups and not (alive and chunk_read):
            batch.prefill.read(len(alive), queue is not None and queue.crowded)
            chunk_read = True
            if not batch.prefill.ready:
                yield Step(0, (), dict.fromkeys(PHASES, 0.0))
            continue
        elif len(in_flight) < 2:
            number, chunk_read = number + 1, False
            in_flight.append(batch.run(number))
            if target.static and len(in_flight) < 2:
                continue  # the device works on the next cycle while the host reads this one
        if in_flight:
            yield batch.emit(in_flight.popleft())


class _Sent(NamedTuple):
    """A cycle that was started."""

    number: int
    packed: Packed
    timer: PhaseTimer
    behind: bool = False
    """Whether the draft had to catch up."""


@dataclass
class _Batch:
    """What rows share: the engines, the cycle, the random numbers. All change together when rows come and go."""

    target: Engine
    draft: Drafter | None
    rule: AcceptanceRule
    gamma: int
    """The most drafts of a cycle."""
    eos_ids: Collection[int]
    trace: bool
    controller: GammaController | None = None
    """Chooses γ for every cycle, where it is not fixed."""
    rows: BatchRows = field(default_factory=lambda: BatchRows.new((), ()))
    cycle: Cycle | None = None

    def __post_init__(self) -> None:
        self.caches: list[RowCache] = [self.target] if self.draft is None else [self.target, self.draft]
        self.random = RandomNumbers(self.rule.sampling is not None, self.gamma, self.target.device)
        self.prefill = Prefill(self.target, self.draft, step=self.gamma + 1)
        self.plain_cycles = 0  # since the last drafts
        if self.controller is not None and self.target.static:
            self.controller.recorded = self._recorded

    def start(self, requests: Sequence[Request]) -> Step:
        """The first rows and their prefill, all at once."""
        self._reserve(len(requests), requests)
        group = Group(list(enumerate(requests)), self.target.device)
        group.target, group.draft = self.target, self.draft
        group.read_all()
        return self._enter(group, [], 0)

    def wait(self, requests: Sequence[Request], queue: AdmissionQueue) -> None:
        """Room in the caches for those who may come; the first of them wait like all others."""
        self._reserve(queue.rows, requests, queue.length)
        for cache in self.caches:
            cache.reserve(0, 0)
        queue.waiting.extendleft(reversed(requests))

    def _reserve(self, rows: int, requests: Sequence[Request], length: int = 0) -> None:
        longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
        for cache in self.caches:
            cache.reserve(rows, max(longest, length) + self.gamma + 1)

    def join(self, alive: list[int], most: int) -> Step:
        """Let a group whose prompts have been read enter beside the live rows; `most` is the most rows at a time."""
        group = self.prefill.take()
        if len(alive) < len(self.rows):
            self._select(alive)
        total = len(alive) + len(group)
        idle = min(self.target.bucket(total), most) - total
        for cache, other in zip(self.caches, group.caches, strict=True):
            cache.join(other, idle)
        return self._enter(group, alive, idle)

    def _enter(self, group: Group, alive: list[int], idle: int) -> Step:
        """BatchRows that the engines have, after the live ones, and idle ones last: their first tokens, of no cycle."""
        uniforms = self.random.enter([*(request.seed for request in group.requests), *[0] * idle])
        output, none = group.output, torch.empty(len(group), 0, dtype=torch.long, device=group.device)
        with group.timer("rule"), torch.no_grad():
            given = None if uniforms is None else uniforms[: len(group)]
            block = Block(none, output.logits, output.hidden, uniforms=given)
            verdict = self.rule(block)
        first = torch.cat([verdict.next_token, verdict.next_token.new_zeros(idle)])
        if self.draft is not None:
            self.draft.enter(first)
        if self.cycle is None:
            self._begin_cycle(self.gamma, first)
        else:
            self._begin_cycle(self.cycle.gamma, torch.cat([self.cycle.last[alive, 0], first]))
        arrived = BatchRows.new(group.numbers, [request.max_new_tokens for request in group.requests])
        step = self._step(_Sent(0, Packed.pack(block, verdict), group.timer), arrived)
        self.rows = self.rows.take(alive).extended(arrived).extended(BatchRows.new([-1] * idle, [1] * idle))
        return step

    def shrink(self, alive: list[int]) -> None:
        """Let finished rows leave; a static engine keeps some idle ones, up to a size that it has recorded."""
        idle = [i for i in range(len(self.rows)) if self.rows.finished[i]]
        kept = alive + idle[: self.target.bucket(len(alive), len(self.rows)) - len(alive)]
        self._select(kept)
        self.rows = self.rows.take(kept)
        assert self.cycle is not None
        self._begin_cycle(self.cycle.gamma, self.cycle.last[kept, 0])

    def _begin_cycle(self, gamma: int, last: Tensor) -> None:
        """Go on with cycles of γ drafts over rows, which the engines have, whose newest tokens are `last` [B]."""
        self.cycle = find_cycle(self.target, self.draft, self.rule, gamma, trace=self.trace, first=last)
        self.cycle.more = None if self.controller is None else self.controller.more

    def _recorded(self, gamma: int) -> bool:
        """Whether a cycle of γ drafts was recorded for as many rows."""
        key = cycle_key(self.draft, self.rule, gamma, self.trace, len(self.rows))
        return key in self.target.captured_cycles and self.target.captured_cycles[key].captured is not None

    def run(self, number: int) -> _Sent:
        """Start a cycle."""
        assert self.cycle is not None
        behind = self.plain_cycles > 0
        if self.controller is not None:
            gamma = self.controller.choose(len(self.rows), self.plain_cycles)
            self.plain_cycles = 0 if gamma else self.plain_cycles + 1
            if gamma != self.cycle.gamma:
                self._begin_cycle(gamma, self.cycle.last[:, 0])
        cycle, start = self.cycle, time.perf_counter()
        recording = self.target.static and cycle.captured is None
        packed, timer = cycle.run(self.random.next(cycle.gamma))
        if recording and self.controller is not None:
            self.controller.statistics.recording = time.perf_counter() - start
        return _Sent(number, packed, timer, behind)

    def emit(self, sent: _Sent) -> Step:
        return self._step(sent, self.rows)

    def _select(self, rows: list[int]) -> None:
        for cache in self.caches:
            cache.select(rows)
        self.random.select(rows)

    def _step(self, sent: _Sent, rows: BatchRows) -> Step:
        """Wait for a cycle (its one synchronisation) and hand its tokens to the rows."""
        seconds = sent.timer.seconds()
        outcome, drafted, live = sent.packed.unpack(), sent.packed.drafted, ~rows.finished
        non_finite = bool(outcome.non_finite[live].any())
        if self.controller is not None and sent.number:
            self.controller.observe(outcome.accepted, live, drafted, seconds, behind=sent.behind)
        return Step(sent.number, rows.emit(outcome, self.eos_ids), seconds, non_finite, drafted)
