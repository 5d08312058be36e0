"""Drafts propose tokens to a target and keep up with the tokens that are accepted."""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from selfjudge.engine.base import Engine, HeadEngine, Output, RowCache, move_rows
from selfjudge.engine.prefixes import PrefixStore
from selfjudge.errors import SelfJudgeError
from selfjudge.models.device import empty_cache, free_memory, send
from selfjudge.models.memory import LOGIT_BYTES
from selfjudge.types import Verdict

CACHE_SHARE = 0.8  # of the memory that is free, for caches; the rest is for prompts, logits and captured graphs
BACKLOG = 64  # newest tokens that a draft reads when it drafts again after plain cycles; it never reads older ones


class Backlog:
    """The tokens of every row that a draft has not read, the newest last, in buffers that captured graphs refer to."""

    def __init__(self, device: torch.device, hidden: int = 0, dtype: torch.dtype = torch.float32) -> None:
        """With `hidden`, every token comes with a state of that width."""
        self._buffers = [
            torch.zeros(0, BACKLOG, dtype=torch.long, device=device),
            torch.zeros(0, dtype=torch.long, device=device),
            torch.zeros(0, BACKLOG, hidden, dtype=dtype, device=device),
        ]
        self.reserve(0)

    def use_rows(self, batch: int) -> None:
        """Work on the first rows of the buffers, which grow if they must."""
        if (more := batch - len(self._buffers[0])) > 0:
            self._buffers = [torch.cat([b, b.new_zeros((more, *b.shape[1:]))]) for b in self._buffers]
        # [B, BACKLOG], right-aligned; [B] how many of them have not been read; [B, BACKLOG, H]
        self.tokens, self.missing, self.states = (b[:batch] for b in self._buffers)

    def reserve(self, batch: int) -> None:
        """Begin with so many rows, each of which lacks the target's first token after the prompt."""
        self.use_rows(batch)
        self.mark_read()
        self.states.zero_()

    def enter(self, first: Tensor) -> None:
        """Set the first tokens [B'] of the last rows, whose prompts have been read."""
        new = len(self.missing) - len(first)
        self.tokens[new:, -1] = first
        self.missing[new:] = 1

    def push(self, tokens: Tensor, states: Tensor | None = None) -> None:
        """Add one token [B, 1] to every row, and its state [B, 1, H]."""
        self.tokens.copy_(torch.cat([self.tokens[:, 1:], tokens], 1))
        if states is not None:
            self.states.copy_(torch.cat([self.states[:, 1:], states], 1))
        self.missing.add_(1).clamp_(max=BACKLOG)

    def mark_read(self) -> None:
        """Note that all but the newest token of every row have been read."""
        self.missing.fill_(1)
        self.max_missing = 1  # upper bound of `missing`, which the host knows without waiting for the device

    def join(self, other: Self, idle: int) -> None:
        there, new = len(self.missing), len(other.missing)
        self.use_rows(there + new + idle)
        self.missing[there:] = 1
        for own, others in zip(self.tensors(), other.tensors(), strict=True):
            own[there : there + new] = others
        self.max_missing = max(self.max_missing, other.max_missing)

    def select(self, rows: list[int]) -> None:
        self.use_rows(len(rows))
        move_rows(rows, self._buffers)

    def tensors(self) -> list[Tensor]:
        return [self.tokens, self.missing, self.states]


_Prompt = tuple[Tensor, Tensor | None]  # tokens [T] and, for a head, the target's features [T, F]


class Drafter(RowCache):
    """Proposes tokens to a target, over the same ragged batch. γ may change from cycle to cycle, also to 0 and back."""

    engine: RowCache
    features: tuple[int, ...] = ()  # layers of the target whose inputs the draft reads, for every token
    vocabulary: Tensor | None = None  # [D] the token of each of its logits; None: all tokens, in their order

    def __init__(self, engine: RowCache, backlog: Backlog) -> None:
        self.engine, self.backlog = engine, backlog
        self.device, self.window, self.static = engine.device, engine.window, engine.static
        self.postponed: list[_Prompt] = []  # the prompts of all rows, while the engine has read none of them

    @property
    def version(self) -> int:
        return self.engine.version

    def release(self) -> None:
        self.engine.release()

    def reserve(self, batch: int, length: int) -> None:
        self.engine.reserve(batch, length)
        self.backlog.reserve(batch)
        self.postponed = []

    def join(self, other: Self, idle: int = 0) -> None:
        if len(self.backlog.missing) > len(self.postponed):  # this one has read its rows
            other.catch_up()
        elif not other.postponed:
            self.catch_up()
        self.postponed += other.postponed
        self.engine.join(other.engine, idle)
        self.backlog.join(other.backlog, idle)

    def select(self, rows: list[int]) -> None:
        if self.postponed:
            self.postponed = [self.postponed[row] for row in rows]
        else:
            self.engine.select(rows)
        self.backlog.select(rows)

    def use_rows(self, batch: int) -> int:
        self.backlog.use_rows(batch)
        return self.engine.use_rows(batch)

    def part(self, rows: slice) -> Self:
        other = super().part(rows)
        other.engine, other.backlog = self.engine.part(rows), copy.copy(self.backlog)
        other.backlog.states = self.backlog.states[rows]
        return other

    def state(self) -> list[Tensor]:
        return [*self.engine.state(), *self.backlog.tensors()]

    def read(self, tokens: Tensor, counts: Tensor, features: Tensor | None) -> None:
        """Read the next tokens [B, T] of prompts, of row b the last counts[b]; the target's features are [B, T, F]."""

    def postpone(self, prompts: Sequence[Sequence[int]], features: Sequence[Tensor]) -> None:
        """Read whole prompts when tokens are first proposed, if ever; for engines that are not static, whose rows are
        all empty. The target's features are [B, T, F], right-aligned, of one prompt in chunks; of a model none."""
        for row, prompt in enumerate(prompts):  # copies: padding is freed
            states = torch.cat([part[row, -len(prompt) :] for part in features]) if features else None
            self.postponed.append((send(prompt, self.device), states))
        if features:
            self.backlog.states[:, -1:] = features[-1][:, -1:]

    def catch_up(self) -> None:
        """Read the prompts that were postponed."""
        if self.postponed:
            tokens, features = map(list, zip(*self.postponed, strict=True))
            self.postponed = []
            counts = send([len(row) for row in tokens], self.device)
            states = None if features[0] is None else pad_sequence(features, True, padding_side="left")
            self._read_postponed(pad_sequence(tokens, True, padding_side="left"), counts, states)

    def _read_postponed(self, tokens: Tensor, counts: Tensor, features: Tensor | None) -> None:
        """`read` of whole prompts, whose answers have begun."""
        self.read(tokens, counts, features)

    def enter(self, first: Tensor) -> None:
        """End the prompts of the last rows; `first` [B'] are the target's first tokens after them."""
        self.backlog.enter(first)

    def prepare(self, gamma: int) -> None:
        """Read, before a cycle of γ proposals, the tokens that its captured graph has no room for.
        Plain cycles (γ = 0) read nothing and so cost nothing; after many of them the oldest tokens are left out."""

    def propose(self, gamma: int) -> Output:
        """Read the accepted tokens that have not been read; return logits [B, 1, D] of the first of γ proposals."""
        raise NotImplementedError

    def extend(self, tokens: Tensor) -> Output:
        """Return logits [B, 1, D] of the next proposal; `tokens` [B] are the last ones so far."""
        raise NotImplementedError

    def accept(self, drafts: Tensor, verdict: Verdict, features: Tensor | None) -> None:
        """Forget the rejected proposals of [B, γ], γ ≥ 0; `features` [B, γ+1, F] are those of the verifying pass."""


class ModelDraft(Drafter):
    """A whole model as a draft. It lacks the newest token, and the last proposal too if all of them are accepted."""

    engine: Engine

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, Backlog(engine.device))

    def aside(self, rows: int = 0, length: int = 0) -> Self:
        return type(self)(self.engine.aside(rows, length))

    def read(self, tokens: Tensor, counts: Tensor, features: Tensor | None) -> None:
        self.engine.prefill(tokens, counts)

    def prepare(self, gamma: int) -> None:
        backlog = self.backlog
        if gamma and self.static and backlog.max_missing > 2:
            self.engine.prefill(backlog.tokens[:, -backlog.max_missing : -1], backlog.missing - 1)
            backlog.mark_read()
        backlog.max_missing = 2 if gamma else min(backlog.max_missing + 1, BACKLOG)  # after this cycle

    def propose(self, gamma: int) -> Output:
        self.catch_up()
        width = 2 if self.static else int(self.backlog.missing.max())
        missing = None if width == 1 else self.backlog.missing  # nothing to mask
        return self.engine.extend(self.backlog.tokens[:, -width:], missing, keep=1)

    def extend(self, tokens: Tensor) -> Output:
        return self.engine.extend(tokens[:, None])

    def accept(self, drafts: Tensor, verdict: Verdict, features: Tensor | None) -> None:
        k, drafted, last = verdict.n_accepted, drafts.shape[1], verdict.next_token[:, None]
        if not drafted:
            self.backlog.push(last)
            return
        self.engine.rewind((drafted - 1 - k).clamp_min(0))  # the draft model never read the last proposal
        # after a fully accepted block it lacks two tokens: d_γ and the bonus token
        self.backlog.tokens[:, -2:] = torch.cat([drafts[:, -1:], last], 1)
        self.backlog.missing.copy_(1 + (k == drafted).long())


class EagleDraft(Drafter):
    """An EAGLE-3 head as a draft. Its cache keeps entries of the target's states; a cycle's proposals are rewound."""

    engine: HeadEngine

    def __init__(self, engine: HeadEngine, features: tuple[int, ...], dtype: torch.dtype) -> None:
        """`features` are the target's layers that the head reads, in the dtype of the target's states."""
        super().__init__(engine, Backlog(engine.device, len(features) * engine.hidden_size, dtype))
        self.features, self.vocabulary = features, engine.vocabulary
        self._begun = False

    def reserve(self, batch: int, length: int) -> None:
        super().reserve(batch, length)
        self._begun = False

    def aside(self, rows: int = 0, length: int = 0) -> Self:
        return type(self)(self.engine.aside(rows, length), self.features, self.backlog.states.dtype)

    def read(self, tokens: Tensor, counts: Tensor, features: Tensor | None) -> None:
        """A prompt's first token makes no entry: there is no state before it. Its last state waits for the answer."""
        assert features is not None
        before = torch.cat([self.backlog.states[:, -1:], features[:, :-1]], 1)
        self.engine.append(tokens, before, counts if self._begun else counts - 1, keep=0)
        self.backlog.states[:, -1:] = features[:, -1:]
        self._begun = True

    def prepare(self, gamma: int) -> None:
        backlog = self.backlog
        if gamma and self.static and backlog.max_missing > gamma + 1:
            unread = slice(-backlog.max_missing, -1)
            self.engine.append(backlog.tokens[:, unread], backlog.states[:, unread], backlog.missing - 1, keep=0)
            backlog.mark_read()
        backlog.max_missing = gamma + 1 if gamma else min(backlog.max_missing + 1, BACKLOG)  # after this cycle

    def _read_postponed(self, tokens: Tensor, counts: Tensor, features: Tensor | None) -> None:
        assert features is not None
        first = min(1, tokens.shape[1] - 1)  # prompts of one token make no entries, but rows
        self.engine.append(tokens[:, first:], features[:, : tokens.shape[1] - first], counts - 1, keep=0)

    def propose(self, gamma: int) -> Output:
        self.catch_up()
        backlog, width = self.backlog, gamma + 1 if self.static else int(self.backlog.missing.max())
        return self._step(backlog.tokens[:, -width:], backlog.states[:, -width:], backlog.missing)

    def extend(self, tokens: Tensor) -> Output:
        return self._step(tokens[:, None], self._last, None)

    def _step(self, tokens: Tensor, states: Tensor, counts: Tensor | None) -> Output:
        output = self.engine.append(tokens, states, counts)
        assert output.features is not None
        self._last = output.features
        return output

    def accept(self, drafts: Tensor, verdict: Verdict, features: Tensor | None) -> None:
        assert features is not None
        k, drafted, last = verdict.n_accepted, drafts.shape[1], verdict.next_token[:, None]
        if not drafted:
            self.backlog.push(last, features)
            return
        self.engine.rewind(torch.full_like(k, drafted - 1))  # entries whose states were the head's own
        # d_1 … d_k and the token after them, each with the target's state before it, right-aligned
        column = (torch.arange(drafted + 1, device=k.device) - (drafted - k)[:, None]).clamp_min(0)
        tokens = torch.cat([drafts, last], 1).scatter_(1, k[:, None], last)
        self.backlog.tokens[:, -drafted - 1 :] = tokens.gather(1, column)
        states = features.gather(1, column[..., None].expand_as(features))
        self.backlog.states[:, -drafted - 1 :] = states
        self.backlog.missing.copy_(k + 1)


@dataclass(frozen=True, eq=False)
class BatchEngines:
    """A target's engine and its draft over the same rows."""

    target: Engine
    draft: Drafter | None = None  # none for plain decoding
    kept: dict[Hashable, Any] = field(default_factory=dict)  # handed on to the next batch, such as measured speeds
    shape: str = ""  # JSON of models, engine, device and versions, which decide a cycle's time; empty: unknown
    prefixes: PrefixStore | None = None  # blocks of earlier rows; None where they are not kept
    spaces: Sequence[str] = ()  # what the store calls the blocks of target and draft

    def __post_init__(self) -> None:
        if self.target.static and self.draft is not None and not self.draft.static:
            raise SelfJudgeError("a target on the cuda engine needs its draft there too: use reference for both")

    @property
    def caches(self) -> list[RowCache]:
        return [self.target] if self.draft is None else [self.target, self.draft]

    @property
    def window(self) -> int:
        """The most positions that a row may have."""
        return min(cache.window for cache in self.caches)

    @property
    def engines(self) -> list[Any]:
        return [self.target] if self.draft is None else [self.target, self.draft.engine]

    @property
    def static_engines(self) -> list[Any]:
        """The engines whose caches do not grow by themselves."""
        return self.engines if self.target.static else []

    def rows_held(self, length: int) -> float:
        """Rows of that length for which `reserve` needs no more memory."""
        return min((engine.rows_held(length) for engine in self.static_engines), default=math.inf)

    def longest(self, otherwise: int) -> int:
        """Maximum tokens of a row of the caches that are there; `otherwise` where they grow by themselves."""
        return min((engine.longest for engine in self.static_engines), default=otherwise)

    def limit_rows(
        self, rows: int, length: int, share: float = CACHE_SHARE, *, step_tokens: int = 1, aside: int = 0
    ) -> int:
        """How many of these rows, each of at most `length` tokens, `reserve` finds room for in this share of memory.
        A row needs its part of the caches and the logits of `step_tokens` tokens; so do rows that are read `aside`.
        Where there is too little, idle engines lose their caches, and these theirs if no room is left for logits."""
        logits = LOGIT_BYTES * self.target.vocab_size * step_tokens
        free, held = free_memory(self.target.device) if self.static_engines else None, self.rows_held(length)
        if free is None or (held >= rows and free >= rows * logits):
            return rows
        for engine in self.static_engines if held >= rows else ():
            held = engine.release() or 0
        row = logits + sum(engine.row_bytes(length) for engine in self.static_engines)
        for last in (False, True):
            free = free_memory(self.target.device) or 0
            free += sum(engine.cache_bytes for engine in self.static_engines)  # freed first
            if self.prefixes is not None:
                free -= self.prefixes.limit - self.prefixes.used
            fitting = int(share * free // row)
            if last or fitting >= rows + aside or not self.release_idle():
                break
        return min(rows, max(int(held), min(fitting, 1), fitting - aside))

    def release_idle(self) -> bool:
        """Free the caches of engines of these models that nobody uses; whether there were any."""
        kept = [engines for cache in self.caches for engines in cache.idle.values()]
        idle = [engines.pop() for engines in kept for _ in range(len(engines))]
        for engine in idle:
            engine.release()
        return bool(idle)

    def release_spare(self, *, cycles: bool = False) -> None:
        """Free all that these models can do without, of captured `cycles` those that are not running."""
        for engine in self.static_engines:
            engine.trim(cycles=cycles)
        if self.prefixes is not None:
            self.prefixes.clear()
        self.release_idle()
        empty_cache()

    def reserve(self, rows: int, length: int) -> None:
        """Begin a batch: room for so many rows of at most `length` tokens."""
        for cache in self.caches:
            cache.reserve(rows, length)

    def aside(self, rows: int = 0, length: int = 0) -> BatchEngines:
        """The same weights with empty caches, for so many prompts of this length, whose rows will `join` these."""
        draft = self.draft and self.draft.aside(rows, length)
        return BatchEngines(self.target.aside(rows, length), draft, self.kept, self.shape)

    @property
    def has_asides(self) -> bool:
        """Whether all static engines have others that have captured passes over prompts of the usual shapes."""
        return all(any(other.usual for other in engine.asides) for engine in self.static_engines)

    def keep_aside(self, other: BatchEngines) -> None:
        """Let the next prompts be read by static engines that `aside` made."""
        for engine, others in zip(self.static_engines, other.static_engines, strict=True):
            engine.keep_aside(others)

    def join(self, other: BatchEngines, idle: int) -> None:
        """Append the rows of `other`, which `aside` made, and then `idle` empty rows."""
        for cache, others in zip(self.caches, other.caches, strict=True):
            cache.join(others, idle)

    def part(self, rows: slice) -> BatchEngines:
        """Static engines of these rows alone, in the memory of these."""
        return BatchEngines(self.target.part(rows), self.draft and self.draft.part(rows))

    def select(self, rows: list[int]) -> None:
        """Keep these rows, in this order."""
        for cache in self.caches:
            cache.select(rows)

    def find_blocks(self, tokens: Sequence[int], salt: Hashable) -> list[list[Tensor]]:
        """For each engine the blocks that a row of these tokens may begin with; a head needs those of the target."""
        if self.prefixes is None:
            return [[] for _ in self.engines]
        found = [self.prefixes.find((space, salt), tokens) for space in self.spaces[: len(self.engines)]]
        if self.draft is not None and self.draft.features:
            found = [blocks[: min(map(len, found))] for blocks in found]
        return found

    def store_blocks(self, row: int, tokens: Sequence[int], salt: Hashable, positions: Sequence[int]) -> None:
        """Store the blocks of a row, of each engine among its first positions[i]; where there is no memory, none."""
        assert self.prefixes is not None
        try:
            for engine, space, count in zip(self.engines, self.spaces, positions, strict=False):
                self.prefixes.put((space, salt), tokens[: count + 1], partial(engine.view_block, row))
        except torch.OutOfMemoryError:
            self.prefixes.clear()
