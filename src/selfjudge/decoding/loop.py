"""THE loop: batched speculative decoding over any two engines and any acceptance rule.

One cycle: the draft proposes d_1 … d_γ, one target pass verifies them, the rule says how many stand, both caches
are rewound, and the rows get their accepted drafts plus one token of the target. γ = 0 is plain autoregressive decoding.
The loop yields one `Step` per target pass; text, streaming and statistics are layers above (`shells.py`).
Between steps rows leave: those that finished, and those the caller cancels; where the caller keeps a `AdmissionQueue`, others enter.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selfjudge.decoding.rules import AcceptanceRule, sample
from selfjudge.engine.base import Engine, Output
from selfjudge.errors import SelfJudgeError
from selfjudge.ops.argmax import argmax_checked, regular
from selfjudge.types import PHASES, Block, Emission, Finish, Origin, Step, TokenColumn, Verdict


class Request(NamedTuple):
    """A row that waits to enter a batch."""

    prompt: Sequence[int]
    max_new_tokens: int
    seed: int = 0


IDLE = Request((0,), 1)


@dataclass
class AdmissionQueue:
    """Where rows enter a batch that is under way: the caller puts them here between steps."""

    rows: int
    """The most rows at a time."""
    length: int
    """The most tokens a row may have, prompt and answer: static engines reserve so much for each."""
    waiting: deque[Request] = field(default_factory=deque)

    def put(self, request: Request) -> None:
        if len(request.prompt) + request.max_new_tokens > self.length:
            raise SelfJudgeError(f"a row of this batch has at most {self.length} tokens, prompt and answer")
        self.waiting.append(request)

    def take(self, there: int, static: bool) -> list[Request]:
        """Those who fit beside the rows that are there; with idle rows up to 1, 2, 4, 8 … in all for a static engine."""
        new = [self.waiting.popleft() for _ in range(min(len(self.waiting), self.rows - there))]
        total = there + len(new)
        return new + [IDLE] * (min(1 << (total - 1).bit_length(), self.rows) - total) * static


def decode(
    target: Engine,
    draft: Engine | None,
    prompts: Sequence[Sequence[int]],
    rule: AcceptanceRule,
    *,
    gamma: int = 5,
    max_new_tokens: int | Sequence[int] = 256,
    eos_ids: Collection[int] = (),
    seeds: Sequence[int] | None = None,
    confidence: float = 0.0,
    cancelled: set[int] | None = None,
    queue: AdmissionQueue | None = None,
) -> Iterator[Step]:
    """Decode all prompts together; rows that finish leave the batch. `max_new_tokens` is one limit for all, or one for each.

    Drafting ends before γ once the draft itself gives what it has proposed so far a probability below `confidence`, in
    every row. It looks at the draft alone, so lossless rules stay lossless; static engines always draft γ.

    `draft` may be None only with γ = 0. `cancelled` may be filled by the caller between steps: those rows leave before
    the next one, and are taken out of the set. So may the `queue`: its rows enter while there is room, as soon as no pass
    is in flight, with a step of their own for the prefill; they are numbered on from the prompts in the order of the queue.
    The loop ends once no row is left and none waits.

    With a sampling rule, a row's random numbers depend on its own seed alone, not on its neighbours (with `confidence`,
    how many of them are used depends on the neighbours too).
    """
    limits = check(target, draft, prompts, rule, gamma, max_new_tokens, confidence)
    draft = draft if gamma else None
    engines = [target] if draft is None else [target, draft]
    rows = _Rows.new(0, limits)
    seen = len(rows)
    random = _Random(rule, gamma, target.device)
    longest = max(len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True)) + gamma + 1
    for engine in engines:
        if queue is not None:
            engine.reserve(max(len(rows), queue.rows), max(longest, queue.length + gamma + 1))
        engine.reserve(len(rows), longest)

    timer = _Timer(target.device)
    uniforms = random.enter(range(seen) if seeds is None else seeds)
    first, packed = _begin([engine.prefill for engine in engines], prompts, rule, uniforms, timer)
    cycle = _cycle(target, draft, rule, gamma, first)
    cycle.confidence = confidence
    yield _emitted(0, rows, packed, timer, eos_ids)

    number = 0
    in_flight: deque[tuple[int, Tensor, _Timer]] = deque()
    while True:
        if cancelled:
            rows.finished |= np.isin(rows.index, list(cancelled))
            cancelled.difference_update(rows.index.tolist())
        alive = np.flatnonzero(~rows.finished).tolist()
        if not alive:
            if queue is None or not queue.waiting:
                return
            in_flight.clear()  # nobody reads them
        if queue is not None and queue.waiting and len(alive) < queue.rows:
            if not in_flight:
                if len(alive) < len(rows):
                    for engine in engines:
                        engine.select(alive)
                    random.select(alive)
                new = queue.take(len(alive), target.static)
                asked, most = [n.prompt for n in new], [n.max_new_tokens for n in new]
                arrived = _Rows.new(seen, check(target, draft, asked, rule, gamma, most))
                arrived.finished = np.array([n is IDLE for n in new])
                arrived.index[arrived.finished] = -1
                seen += int((~arrived.finished).sum())
                timer, uniforms = _Timer(target.device), random.enter(n.seed for n in new)
                first, packed = _begin([engine.enter for engine in engines], asked, rule, uniforms, timer)
                cycle = cycle.followed(alive, first)
                step = _emitted(0, arrived, packed, timer, eos_ids)
                rows = rows.take(alive).followed(arrived)
                yield step
                continue
        # a static engine has recordings for batches of 1, 2, 4, 8 … rows, and keeps idle rows until half of them are
        elif len(alive) < len(rows) and (not target.static or len(alive) <= len(rows) // 2):
            if not in_flight:
                kept = alive
                if target.static:
                    idle = np.flatnonzero(rows.finished).tolist()
                    kept = alive + idle[: (1 << (len(alive) - 1).bit_length()) - len(alive)]
                rows = rows.take(kept)
                cycle = cycle.select(kept)
                random.select(kept)
        elif len(in_flight) < 2:
            number += 1
            in_flight.append((number, *cycle.run(random.next())))
            if target.static and len(in_flight) < 2:
                continue  # the device works on the next cycle while the host reads this one
        if not in_flight:
            continue
        done, packed, timer = in_flight.popleft()
        yield _emitted(done, rows, packed, timer, eos_ids)


def _begin(
    passes: Sequence[Callable[[Tensor, Tensor], Output]],
    prompts: Sequence[Sequence[int]],
    rule: AcceptanceRule,
    uniforms: Tensor | None,
    timer: _Timer,
) -> tuple[Tensor, Tensor]:
    """Prompts through target and draft: the target's token after each, which belongs to no cycle, and the packed verdict."""
    tokens, counts = _left_padded(prompts, timer.device)
    with timer("target"):
        output = passes[0](tokens, counts)
    with timer("rule"), torch.no_grad():
        verdict = rule(Block(tokens[:, :0], output.logits, output.hidden, uniforms=uniforms))
    for draft in passes[1:]:
        with timer("draft"):
            draft(tokens, counts)
    return verdict.next_token, _packed(tokens[:, :0], verdict)


def _cycle(target: Engine, draft: Engine | None, rule: AcceptanceRule, gamma: int, first: Tensor) -> _Cycle:
    """A new cycle, or the one this engine recorded for an earlier batch of the same shape."""
    if not target.static:
        return _Cycle(target, draft, rule, gamma, first)
    key = (rule, gamma, len(first), draft, draft and draft.version)
    if key in target.recorded:
        cycle: _Cycle = target.recorded.pop(key)
        target.recorded[key] = cycle  # the latest used goes last, and is dropped last
        cycle.begin(first)
        return cycle
    while len(target.recorded) >= 32:  # each keeps its own outputs on the device
        target.recorded.pop(next(iter(target.recorded)))
    cycle = target.recorded[key] = _Cycle(target, draft, rule, gamma, first)
    return cycle


class _Cycle:
    """One cycle as functions over fixed tensors, so that an engine may record them and replay them without Python."""

    def __init__(self, target: Engine, draft: Engine | None, rule: AcceptanceRule, gamma: int, first: Tensor) -> None:
        self.target, self.draft, self.rule, self.gamma = target, draft, rule, gamma
        self.last = first[:, None].clone()
        self.backlog = torch.cat([self.last, self.last], 1)  # the newest emitted tokens; the draft lacks the last
        self.missing = torch.ones_like(first)  # `missing` of them
        self.uniforms = (
            None if rule.sampling is None else first.new_zeros((len(first), 2 * gamma + 1), dtype=torch.float32)
        )
        self.steps: list[Callable[[], None]] | None = None
        self.confidence = 0.0

    def begin(self, first: Tensor) -> None:
        """Start over with the tokens that prefill yielded."""
        self.last.copy_(first[:, None])
        self.backlog.copy_(first[:, None].expand_as(self.backlog))
        self.missing.fill_(1)

    @torch.no_grad()
    def run(self, uniforms: Tensor | None) -> tuple[Tensor, _Timer]:
        """Start one cycle; the packed verdict, not yet waited for."""
        if self.uniforms is not None and uniforms is not None:
            self.uniforms.copy_(uniforms)
        if self.steps is None:
            engines = [self.target] if self.draft is None else [self.target, self.draft]
            state = [self.last, self.backlog, self.missing, *(t for engine in engines for t in engine.state())]
            self.steps = self.target.capture([self.propose, self.verify, self.judge, self.decide], state)
            # nobody reads these after a recording: the next ones may use their memory, which for large batches is most of it
            for name in ("draft_logits", "output", "argmax", "block"):
                vars(self).pop(name, None)
        timer = _Timer(self.target.device)
        for phase, step in zip(PHASES, self.steps, strict=True):
            with timer(phase):
                step()
        return timer.sent(self.packed), timer

    def propose(self) -> None:
        self.drafts, self.draft_logits = self.last[:, :0], None
        if self.draft is not None:
            behind = self.draft.static or bool((self.missing > 1).any())
            backlog, missing = (self.backlog, self.missing) if behind else (self.backlog[:, 1:], None)
            self.drafts, self.draft_logits = _propose(
                self.draft, backlog, missing, self.gamma, self.rule, self.target.vocab_size, self.uniforms,
                0.0 if self.draft.static else self.confidence,
            )  # fmt: skip

    def verify(self) -> None:
        self.output = self.target.extend(torch.cat([self.last, self.drafts], 1))
        self.argmax = argmax_checked(self.output.logits)

    def judge(self) -> None:
        u, drafted = self.uniforms, self.drafts.shape[1]
        chosen = None if u is None else torch.cat([u[:, self.gamma : self.gamma + drafted], u[:, -1:]], 1)
        output = self.output
        self.block = Block(self.drafts, output.logits, output.hidden, self.draft_logits, chosen, argmax=self.argmax)
        if self.rule.judge is not None and self.gamma and not self.rule.settled(self.block):
            self.block = replace(self.block, scores=self.rule.judge(self.block))

    def decide(self) -> None:
        verdict = self.rule(self.block)
        k, drafted = verdict.n_accepted, self.drafts.shape[1]
        self.target.rewind(drafted - k)
        self.last.copy_(verdict.next_token[:, None])
        if self.draft is not None:
            self.draft.rewind((drafted - 1 - k).clamp_min(0))  # the last draft itself was never fed to the draft
            # a fully accepted block leaves the draft two tokens behind: d_γ and the bonus token
            self.backlog.copy_(torch.cat([self.drafts[:, -1:], self.last], 1))
            self.missing.copy_(1 + (k == drafted).long())
        self.packed = _packed(self.drafts, verdict)

    def select(self, rows: list[int]) -> _Cycle:
        """Keep these rows; the cycle for what is left, which a static engine may have recorded before."""
        self.target.select(rows)
        if self.draft is not None:
            self.draft.select(rows)
        return self.followed(rows, self.last[:0, 0])

    def followed(self, rows: list[int], first: Tensor) -> _Cycle:
        """The cycle for these rows and, after them, new ones whose prefill yielded `first`; the engines have them already."""
        last, backlog, missing = self.last[rows, 0], self.backlog[rows], self.missing[rows]
        cycle = _cycle(self.target, self.draft, self.rule, self.gamma, torch.cat([last, first]))
        cycle.confidence = self.confidence
        cycle.backlog[: len(rows)] = backlog
        cycle.missing[: len(rows)] = missing
        return cycle


def _propose(
    draft: Engine,
    backlog: Tensor,
    missing: Tensor | None,
    gamma: int,
    rule: AcceptanceRule,
    vocab_size: int,
    u: Tensor | None,
    confidence: float,
) -> tuple[Tensor, Tensor | None]:
    """[B, γ] drafts and, when sampling, the [B, γ, V] logits they were drawn from; fewer if the draft is unsure."""
    tokens: list[Tensor] = []
    drawn_from: list[Tensor] = []
    log_q = torch.zeros(len(backlog), device=backlog.device)  # of everything proposed so far
    output = draft.extend(backlog, missing, keep=1)
    for i in range(gamma):
        logits = output.logits[:, -1]
        if rule.sampling is not None:
            assert u is not None
            logits = rule.sampling.warp(_fitted(regular(logits), vocab_size))
            drawn_from.append(logits)
            tokens.append(sample(logits.softmax(-1), u[:, i]))
        else:
            tokens.append(argmax_checked(logits[:, :vocab_size])[0])
        if confidence > 0:
            known = logits[:, :vocab_size].float()
            log_q += known.gather(1, tokens[-1][:, None]).squeeze(1) - known.logsumexp(-1)
            if bool((log_q < math.log(confidence)).all()):
                break
        if i + 1 < gamma:
            output = draft.extend(tokens[-1][:, None])
    return torch.stack(tokens, 1), torch.stack(drawn_from, 1) if drawn_from else None


def _fitted(logits: Tensor, vocab_size: int) -> Tensor:
    """Draft logits over the target's vocabulary: families pad their embedding matrices to different sizes."""
    missing = vocab_size - logits.shape[-1]
    if missing > 0:
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
    return logits[..., :vocab_size]


@dataclass
class _Rows:
    """What the loop keeps of the rows in the batch."""

    index: NDArray[np.int64]
    left: NDArray[np.int64]
    """Tokens each may still emit."""
    finished: NDArray[np.bool_]

    @classmethod
    def new(cls, first: int, limits: Sequence[int]) -> _Rows:
        """Rows numbered from `first` on."""
        return cls(np.arange(first, first + len(limits)), np.asarray(limits), np.zeros(len(limits), bool))

    def __len__(self) -> int:
        return len(self.index)

    def take(self, kept: list[int]) -> _Rows:
        return _Rows(self.index[kept], self.left[kept], self.finished[kept])

    def followed(self, other: _Rows) -> _Rows:
        mine, theirs = (self.index, self.left, self.finished), (other.index, other.left, other.finished)
        return _Rows(*(np.concatenate(both) for both in zip(mine, theirs, strict=True)))


def _packed(drafts: Tensor, verdict: Verdict) -> Tensor:
    """[B, 2γ+3] everything the host wants to know, in one piece: d, judged, n, next token, irregular."""
    n, following = verdict.n_accepted[:, None], verdict.next_token[:, None]
    return torch.cat([drafts, verdict.judged.long(), n, following, verdict.irregular.long().expand_as(n)], 1)


def _emitted(number: int, rows: _Rows, packed: Tensor, timer: _Timer, eos_ids: Collection[int]) -> Step:
    """Wait for a cycle (its one synchronisation), cut each row at the end token and at its limit."""
    seconds = timer.seconds()
    table = packed.cpu().numpy()
    active = np.flatnonzero(~rows.finished)
    irregular = bool(table[active, -1].any())
    if table.shape[1] == 3:  # no drafts: one token a row, all rows at once
        tokens = table[active, 1]
        rows.left[active] -= 1
        ended = np.where(np.isin(tokens, list(eos_ids)), 1, np.where(rows.left[active] == 0, 2, 0))
        rows.finished[active] = ended > 0
        return Step(number, TokenColumn(rows.index[active], tokens, ended), seconds, irregular)
    emissions = []
    for i in active.tolist():
        *found, k, following, _ = table[i].tolist()
        judged = found[len(found) // 2 :]
        row_tokens = [*found[:k], following]
        origins: list[Origin] = ["judge" if judged[j] else "draft" for j in range(k)]
        origins.append("target")
        finish: Finish | None = None
        for j, token in enumerate(row_tokens):
            if token in eos_ids or j + 1 == rows.left[i]:
                finish = "eos" if token in eos_ids else "length"
                row_tokens, origins = row_tokens[: j + 1], origins[: j + 1]
                break
        rows.left[i] -= len(row_tokens)
        rows.finished[i] = finish is not None
        emissions.append(Emission(int(rows.index[i]), tuple(row_tokens), tuple(origins), finish))
    return Step(number, tuple(emissions), seconds, irregular)


def check(
    target: Engine,
    draft: Engine | None,
    prompts: Sequence[Sequence[int]],
    rule: AcceptanceRule,
    gamma: int,
    max_new_tokens: int | Sequence[int],
    confidence: float = 0.0,
) -> list[int]:
    """Refuse impossible requests before any work; the number of tokens each row may emit."""
    if gamma < 0:
        raise SelfJudgeError(f"gamma must be 0 (plain decoding) or more, not {gamma}")
    if gamma and draft is None:
        raise SelfJudgeError("gamma > 0 needs a draft model; use gamma 0 for plain decoding")
    if target.static and draft is not None and gamma and not draft.static:
        raise SelfJudgeError("a target on the cuda engine needs a draft on it too: use the reference engine for both")
    if not prompts:
        raise SelfJudgeError("there is no prompt to decode")
    most = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
    if min(most) < 1:
        raise SelfJudgeError(f"max-new-tokens must be at least 1, not {min(most)}")
    if not 0 <= confidence <= 1:
        raise SelfJudgeError(f"confidence must lie in [0, 1], not {confidence}")
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


class _Random:
    """Each row's own random numbers: the same ones whatever its neighbours do, drawn for many cycles at a time."""

    AHEAD = 32

    def __init__(self, rule: AcceptanceRule, gamma: int, device: torch.device) -> None:
        self.device, self.gamma, self.wanted = device, 2 * gamma + 1, rule.sampling is not None
        self.generators: list[torch.Generator] = []
        self.drawn: deque[Tensor] = deque()

    def _draw(self, generators: list[torch.Generator], cycles: int) -> Iterable[Tensor]:
        """For each cycle [B, 2γ+1]; the same numbers whether drawn at once or one by one."""
        numbers = torch.stack([torch.rand(cycles * self.gamma, generator=g) for g in generators]).to(self.device)
        return numbers.view(-1, cycles, self.gamma).unbind(1)

    def enter(self, seeds: Iterable[int]) -> Tensor | None:
        """Rows with these seeds come after those that are there; [B, 1] for the tokens that their prefill yields."""
        if not self.wanted:
            return None
        new = [torch.Generator().manual_seed(seed) for seed in seeds]
        first = torch.stack([torch.rand(1, generator=g) for g in new]).to(self.device)
        if self.drawn:
            ahead = self._draw(new, len(self.drawn))
            self.drawn = deque(torch.cat(both) for both in zip(self.drawn, ahead, strict=True))
        self.generators += new
        return first

    def next(self) -> Tensor | None:
        """[B, 2γ+1] for one cycle: γ to draw drafts, γ to accept them, one for the token that follows."""
        if not self.wanted:
            return None
        if not self.drawn:
            self.drawn.extend(self._draw(self.generators, self.AHEAD))
        return self.drawn.popleft()

    def select(self, rows: list[int]) -> None:
        if self.wanted:
            self.generators = [self.generators[i] for i in rows]
            self.drawn = deque(u[rows] for u in self.drawn)


class _Timer:
    """Wall clock of one cycle by phase. On CUDA by events, so that the host need not wait between phases."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.spans: list[tuple[str, Any, Any]] = []
        self.arrived: Any = None

    def _now(self) -> Any:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        if self.device.type == "mps":
            torch.mps.synchronize()
        return time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = self._now()
        yield
        self.spans.append((phase, start, self._now()))

    def sent(self, packed: Tensor) -> Tensor:
        """A copy of the verdict that the next cycle cannot overwrite, on its way to the host."""
        if self.device.type != "cuda":
            return packed
        host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        host.copy_(packed, non_blocking=True)
        self.arrived = torch.cuda.Event()
        self.arrived.record()
        return host

    def seconds(self) -> dict[str, float]:
        """Wait for what was sent; the seconds of each phase."""
        if self.device.type == "cuda":
            (self.arrived or torch.cuda.current_stream(self.device)).synchronize()
        total = dict.fromkeys(PHASES, 0.0)
        for phase, start, end in self.spans:
            total[phase] += start.elapsed_time(end) / 1e3 if self.device.type == "cuda" else end - start
        return total
