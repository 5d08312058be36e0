"""THE loop: batched speculative decoding over any engine, any draft and any acceptance rule.

One cycle: the draft proposes d_1 … d_γ, one target pass verifies them, the rule says how many stand, both caches
are rewound, and the rows get their accepted drafts plus one token of the target. γ = 0 is plain decoding.
The loop yields one `Step` per target pass; text, streaming and statistics are layers above (`text.py`).
Between steps rows leave: those that finished, and those the caller cancels. Where the caller keeps an `AdmissionQueue`,
others enter, once their prompts have been read, a chunk at a time (`prefill.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from selfjudge.decoding.admission import AdmissionQueue, Request, Rows, check_request
from selfjudge.decoding.cycle import Cycle, PhaseTimer, find_cycle, pack
from selfjudge.decoding.prefill import Group, Prefill
from selfjudge.decoding.rules import AcceptanceRule
from selfjudge.decoding.sampling import RandomNumbers
from selfjudge.engine.base import Engine, RowCache
from selfjudge.engine.draft import Draft
from selfjudge.types import PHASES, Block, Step, default_gamma


def decode(
    target: Engine,
    draft: Draft | None,
    prompts: Sequence[Sequence[int]],
    rule: AcceptanceRule,
    *,
    gamma: int | None = None,
    max_new_tokens: int | Sequence[int] = 256,
    eos_ids: Collection[int] = (),
    seeds: Sequence[int] | None = None,
    confidence: float = 0.0,
    cancelled: set[int] | None = None,
    queue: AdmissionQueue | None = None,
    trace: bool = False,
) -> Iterator[Step]:
    """Decode all prompts together; rows that finish leave the batch. `max_new_tokens` is one limit, or one for each.

    `draft` may be None only with γ = 0. With `trace`, emissions say what the target wanted at judged tokens.

    Drafting ends before γ once the draft gives what it has proposed so far a probability below `confidence`, in every
    row. That looks at the draft alone, so lossless rules stay lossless; static engines always draft γ.

    The caller may fill `cancelled` between steps: those rows leave before the next one, and are taken out of the set.
    So may it fill the `queue`: its requests enter while there is room; rows are numbered on from the prompts. With a
    queue, all prompts are read in chunks: one chunk, then one cycle of the live rows. A chunk is a step of cycle 0
    without emissions, unless it ends a prompt; that step has the row's first token and the seconds of all its chunks.
    The loop ends once no row is left and none waits.

    With a sampling rule, a row's random numbers depend on its own seed alone, not on its neighbours (with `confidence`,
    how many of them are used depends on the neighbours too).
    """
    gamma = default_gamma(target.device.type) if gamma is None else gamma
    limits = check_request(target, draft, prompts, rule, gamma, max_new_tokens, confidence)
    requests = list(map(Request, prompts, limits, range(len(prompts)) if seeds is None else seeds))
    batch = _Batch(target, draft if gamma else None, rule, gamma, eos_ids, confidence, trace)
    if queue is None:
        yield batch.start(requests)
    else:
        batch.wait(requests, queue)
    yield from _steps(batch, queue, set() if cancelled is None else cancelled)


def _steps(batch: _Batch, queue: AdmissionQueue | None, cancelled: set[int]) -> Iterator[Step]:
    """Chunks of prompts and cycles of the live rows by turns, until no row is left and none waits."""
    target, number, chunk_read = batch.target, 0, False
    in_flight: deque[tuple[int, Tensor, PhaseTimer]] = deque()
    while True:
        batch.rows.cancel(cancelled)
        alive = batch.rows.alive()
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
            in_flight.append((number, *batch.run()))
            if target.static and len(in_flight) < 2:
                continue  # the device works on the next cycle while the host reads this one
        if in_flight:
            yield batch.emit(*in_flight.popleft())


@dataclass
class _Batch:
    """What rows share: the engines, the cycle, the random numbers. All change together when rows come and go."""

    target: Engine
    draft: Draft | None
    rule: AcceptanceRule
    gamma: int
    eos_ids: Collection[int]
    confidence: float
    trace: bool
    rows: Rows = field(default_factory=lambda: Rows.new((), ()))
    cycle: Cycle | None = None

    def __post_init__(self) -> None:
        self.caches: list[RowCache] = [self.target] if self.draft is None else [self.target, self.draft]
        self.random = RandomNumbers(self.rule.sampling is not None, self.gamma, self.target.device)
        self.prefill = Prefill(self.target, self.draft, step=self.gamma + 1)

    def start(self, requests: Sequence[Request]) -> Step:
        """The first rows and their prefill, all at once."""
        self._reserve(len(requests), requests)
        group = Group(list(enumerate(requests)), self.target.device)
        group.target, group.draft = self.target, self.draft
        group.read()
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
        """Rows that the engines have, after the live ones, and idle ones last: their first tokens, of no cycle."""
        uniforms = self.random.enter([*(request.seed for request in group.requests), *[0] * idle])
        output, none = group.output, group.tokens[:, :0]
        with group.timer("rule"), torch.no_grad():
            given = None if uniforms is None else uniforms[: len(group)]
            verdict = self.rule(Block(none, output.logits, output.hidden, uniforms=given))
        first = torch.cat([verdict.next_token, verdict.next_token.new_zeros(idle)])
        if self.draft is not None:
            self.draft.enter(first)
        if self.cycle is None:
            self.cycle = find_cycle(self.target, self.draft, self.rule, self.gamma, trace=self.trace, first=first)
            self.cycle.confidence = self.confidence
        else:
            self.cycle = self.cycle.continued(alive, first)
        arrived = Rows.new(group.numbers, [request.max_new_tokens for request in group.requests])
        step = self._step(0, arrived, pack(none, verdict), group.timer)
        self.rows = self.rows.take(alive).extended(arrived).extended(Rows.new([-1] * idle, [1] * idle))
        return step

    def shrink(self, alive: list[int]) -> None:
        """Let finished rows leave; a static engine keeps some idle ones, up to a size that it has recorded."""
        idle = [i for i in range(len(self.rows)) if self.rows.finished[i]]
        kept = alive + idle[: self.target.bucket(len(alive), len(self.rows)) - len(alive)]
        self._select(kept)
        self.rows = self.rows.take(kept)
        assert self.cycle is not None
        self.cycle = self.cycle.continued(kept, self.cycle.last[:0, 0])

    def run(self) -> tuple[Tensor, PhaseTimer]:
        assert self.cycle is not None
        return self.cycle.run(self.random.next())

    def emit(self, number: int, packed: Tensor, timer: PhaseTimer) -> Step:
        return self._step(number, self.rows, packed, timer)

    def _select(self, rows: list[int]) -> None:
        for cache in self.caches:
            cache.select(rows)
        self.random.select(rows)

    def _step(self, number: int, rows: Rows, packed: Tensor, timer: PhaseTimer) -> Step:
        """Wait for a cycle (its one synchronisation) and hand its tokens to the rows."""
        seconds = timer.seconds()
        table = packed.cpu().numpy()
        irregular = bool(table[~rows.finished, -1].any())
        assert self.cycle is not None
        drafted = (table.shape[1] - 3) // (5 if self.cycle.trace else 2)  # see `pack`
        return Step(number, rows.emit(table, drafted, self.eos_ids), seconds, irregular)
