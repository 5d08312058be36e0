"""THE loop: batched speculative decoding over any two engines and any acceptance rule.

One cycle: the draft proposes d_1 … d_γ, one target pass verifies them, the rule says how many stand, both caches
are rewound, and the rows get their accepted drafts plus one token of the target. γ = 0 is plain decoding.
The loop yields one `Step` per target pass; text, streaming and statistics are layers above (`text.py`).
Between steps rows leave: those that finished, and those the caller cancels. Where the caller keeps an `AdmissionQueue`,
others enter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from selfjudge.decoding.admission import AdmissionQueue, Rows
from selfjudge.decoding.cycle import Cycle, PhaseTimer, find_cycle, pack
from selfjudge.decoding.rules import AcceptanceRule
from selfjudge.decoding.sampling import RandomNumbers
from selfjudge.engine.base import Engine, Output
from selfjudge.errors import SelfJudgeError
from selfjudge.types import MAX_GAMMA, Block, Step, default_gamma


def decode(
    target: Engine,
    draft: Engine | None,
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
    So may it fill the `queue`: its requests enter while there is room, as soon as no pass is in flight, with a step of
    their own for the prefill; rows are numbered on from the prompts. The loop ends once no row is left and none waits.

    With a sampling rule, a row's random numbers depend on its own seed alone, not on its neighbours (with `confidence`,
    how many of them are used depends on the neighbours too).
    """
    gamma = default_gamma(target.device.type) if gamma is None else gamma
    limits = check_request(target, draft, prompts, rule, gamma, max_new_tokens, confidence)
    batch = _Batch(target, draft if gamma else None, rule, gamma, eos_ids, confidence, trace)
    batch.reserve(max(len(p) + n for p, n in zip(prompts, limits, strict=True)), len(prompts), queue)
    yield batch.start(prompts, limits, range(len(prompts)) if seeds is None else seeds)

    number = 0
    in_flight: deque[tuple[int, Tensor, PhaseTimer]] = deque()
    while True:
        batch.rows.cancel(cancelled)
        alive = batch.rows.alive()
        if not alive:
            if queue is None or not queue.waiting:
                return
            in_flight.clear()  # nobody reads them
        if queue is not None and queue.open(len(alive)):  # rows enter, once nothing is in flight
            if not in_flight:
                yield batch.admit(alive, queue)
                continue
        elif target.bucket(len(alive), len(batch.rows)) < len(batch.rows):  # rows leave, once nothing is in flight
            if not in_flight:
                batch.shrink(alive)
        elif len(in_flight) < 2:
            number += 1
            in_flight.append((number, *batch.run()))
            if target.static and len(in_flight) < 2:
                continue  # the device works on the next cycle while the host reads this one
        if in_flight:
            yield batch.emit(*in_flight.popleft())


@dataclass
class _Batch:
    """What rows share: the engines, the cycle, the random numbers. All change together when rows come and go."""

    target: Engine
    draft: Engine | None
    rule: AcceptanceRule
    gamma: int
    eos_ids: Collection[int]
    confidence: float
    trace: bool
    rows: Rows = field(default_factory=lambda: Rows.new(0, ()))
    seen: int = 0
    """Rows so far, those that left included."""

    def __post_init__(self) -> None:
        self.engines = [self.target] if self.draft is None else [self.target, self.draft]
        self.random = RandomNumbers(self.rule.sampling is not None, self.gamma, self.target.device)
        self.cycle: Cycle

    def reserve(self, longest: int, rows: int, queue: AdmissionQueue | None) -> None:
        """Room in the caches: for those who may come, then for those who are there."""
        spare = self.gamma + 1
        for engine in self.engines:
            if queue is not None:
                engine.reserve(max(rows, queue.rows), max(longest, queue.length) + spare)
            engine.reserve(rows, longest + spare)

    def start(self, prompts: Sequence[Sequence[int]], limits: Sequence[int], seeds: Iterable[int]) -> Step:
        """The first rows and their prefill."""
        self.rows, self.seen = Rows.new(0, limits), len(limits)
        timer = PhaseTimer(self.target.device)
        first, packed = self._prefill([engine.prefill for engine in self.engines], prompts, seeds, timer)
        self.cycle = find_cycle(self.target, self.draft, self.rule, self.gamma, trace=self.trace, first=first)
        self.cycle.confidence = self.confidence
        return self._step(0, self.rows, packed, timer)

    def admit(self, alive: list[int], queue: AdmissionQueue) -> Step:
        """Let those who wait enter beside the live rows; their prefill."""
        if len(alive) < len(self.rows):
            self._select(alive)
        requests = queue.take(len(alive), self.target)
        prompts, most = [r.prompt for r in requests], [r.max_new_tokens for r in requests]
        limits = check_request(self.target, self.draft, prompts, self.rule, self.gamma, most)
        arrived = Rows.new(self.seen, limits, requests)
        self.seen += len(arrived.alive())
        timer, seeds = PhaseTimer(self.target.device), [r.seed for r in requests]
        first, packed = self._prefill([engine.enter for engine in self.engines], prompts, seeds, timer)
        self.cycle = self.cycle.continued(alive, first)
        step = self._step(0, arrived, packed, timer)
        self.rows = self.rows.take(alive).extended(arrived)
        return step

    def shrink(self, alive: list[int]) -> None:
        """Let finished rows leave; a static engine keeps some idle ones, up to a size that it has recorded."""
        idle = [i for i in range(len(self.rows)) if self.rows.finished[i]]
        kept = alive + idle[: self.target.bucket(len(alive), len(self.rows)) - len(alive)]
        self._select(kept)
        self.rows = self.rows.take(kept)
        self.cycle = self.cycle.continued(kept, self.cycle.last[:0, 0])

    def run(self) -> tuple[Tensor, PhaseTimer]:
        return self.cycle.run(self.random.next())

    def emit(self, number: int, packed: Tensor, timer: PhaseTimer) -> Step:
        return self._step(number, self.rows, packed, timer)

    def _select(self, rows: list[int]) -> None:
        for engine in self.engines:
            engine.select(rows)
        self.random.select(rows)

    def _prefill(
        self,
        passes: Sequence[Callable[[Tensor, Tensor], Output]],
        prompts: Sequence[Sequence[int]],
        seeds: Iterable[int],
        timer: PhaseTimer,
    ) -> tuple[Tensor, Tensor]:
        """Prompts through target and draft: the target's token after each, of no cycle, and the packed verdict."""
        uniforms = self.random.enter(seeds)
        tokens, counts = _left_padded(prompts, timer.device)
        with timer("target"):
            output = passes[0](tokens, counts)
        with timer("rule"), torch.no_grad():
            verdict = self.rule(Block(tokens[:, :0], output.logits, output.hidden, uniforms=uniforms))
        for draft in passes[1:]:
            with timer("draft"):
                draft(tokens, counts)
        return verdict.next_token, pack(tokens[:, :0], verdict)

    def _step(self, number: int, rows: Rows, packed: Tensor, timer: PhaseTimer) -> Step:
        """Wait for a cycle (its one synchronisation) and hand its tokens to the rows."""
        seconds = timer.seconds()
        table = packed.cpu().numpy()
        irregular = bool(table[~rows.finished, -1].any())
        drafted = (table.shape[1] - 3) // (5 if self.cycle.trace else 2)  # see `pack`
        return Step(number, rows.emit(table, drafted, self.eos_ids), seconds, irregular)


def check_request(
    target: Engine,
    draft: Engine | None,
    prompts: Sequence[Sequence[int]],
    rule: AcceptanceRule,
    gamma: int,
    max_new_tokens: int | Sequence[int],
    confidence: float = 0.0,
) -> list[int]:
    """Refuse impossible requests before any work; the number of tokens each row may emit."""
    if not 0 <= gamma <= MAX_GAMMA:
        raise SelfJudgeError(f"`gamma` must lie between 0 (plain decoding) and {MAX_GAMMA}, not {gamma}")
    if gamma and draft is None:
        raise SelfJudgeError("`gamma` > 0 needs a draft model; use gamma 0 for plain decoding")
    if target.static and draft is not None and gamma and not draft.static:
        raise SelfJudgeError("a target on the cuda engine needs a draft on it too: use the reference engine for both")
    if not prompts:
        raise SelfJudgeError("there is no prompt to decode")
    most = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
    if min(most) < 1:
        raise SelfJudgeError(f"`max_new_tokens` must be at least 1, not {min(most)}")
    if not 0 <= confidence <= 1:
        raise SelfJudgeError(f"`confidence` must lie in [0, 1], not {confidence}")
    rule.check(gamma)
    window = target.window if draft is None else min(target.window, draft.window)
    limits = []
    for prompt, limit in zip(prompts, most, strict=True):
        if not prompt:
            raise SelfJudgeError("the prompt is empty: give at least one token")
        if len(prompt) >= window:
            raise SelfJudgeError(
                f"the prompt has {len(prompt)} tokens and the context window holds {window}: shorten the prompt"
            )
        limits.append(min(limit, window - len(prompt)))
    return limits


def _left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    counts = [len(prompt) for prompt in prompts]
    longest = max(counts)
    padded = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    return torch.tensor(padded, device=device), torch.tensor(counts, device=device)
