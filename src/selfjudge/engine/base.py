"""The contract of an engine: one model, a ragged batch, a KV cache that can be rewound."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Protocol, Self

import torch
from torch import Tensor, device

from selfjudge.models.device import send

ASIDE_TOKENS = 16384  # up to here the cache of an engine aside only grows: with another one it has no graphs


@dataclass(frozen=True, slots=True)
class Output:
    """What a forward pass returns."""

    logits: Tensor  # [B, keep, V] of the last `keep` positions
    hidden: Tensor | None  # [B, keep, H] the input of the LM head, where it was asked for
    features: Tensor | None = None
    """[B, T, F] inputs of the layers that were asked for, at all positions. Of a head: its states [B, keep, H]."""
    argmax: tuple[Tensor, Tensor] | None = None  # `argmax_checked` of the logits, where the pass has found it

    def take(self, place: Tensor) -> Output:
        """The outputs at places [B, T] among all tokens, as [B, T, …]."""

        def taken(values: Tensor) -> Tensor:
            flat = values.reshape(-1, values.shape[-1])
            return flat.index_select(0, place.flatten()).view(*place.shape, -1)

        hidden, features = (None if values is None else taken(values) for values in (self.hidden, self.features))
        return Output(taken(self.logits), hidden, features)


class RowCache(Protocol):
    """The rows of a ragged batch: every row has its own number of cached tokens."""

    window: int  # context window: the most positions a row may hold
    device: device
    copies_blocks: bool = False  # whether it has `view_block` and `restore`
    static: bool = False  # whether every pass has the shape of the first: `capture` replays it without Python
    idle: Mapping[Hashable, list[Any]] = MappingProxyType({})
    """Engines of the same weights that nobody uses, kept with their caches and captured graphs."""

    @property
    def version(self) -> int:
        """Changes whenever the tensors behind a captured graph are replaced."""
        return 0

    def reserve(self, batch: int, length: int) -> None:
        """Begin a batch: room for `batch` rows of at most `length` tokens, none of them filled."""

    def release(self) -> None:
        """Free the cache, and all graphs that were captured with it."""
        self.reserve(0, 0)

    def aside(self, rows: int = 0, length: int = 0) -> Self:
        """The same weights with an empty cache, for so many prompts of this length, whose rows will `join` this one."""
        other = copy.copy(self)
        other.reserve(0, 0)
        return other

    def join(self, other: Self, idle: int = 0) -> None:
        """Append the rows of `other`, which `aside` made, and then `idle` empty rows.
        A static cache must have room for all of them; other caches take no idle rows."""

    def select(self, rows: list[int]) -> None:
        """Keep these rows, in this order, one named twice as two rows. A static cache must have room for them."""

    def use_rows(self, batch: int) -> int:
        """Let a static cache work on its first `batch` rows, all as they are; return on how many it worked before."""
        return 0

    def part(self, rows: slice) -> Self:
        """A static cache of these rows alone, in the memory of this one."""
        return copy.copy(self)

    def state(self) -> list[Tensor]:
        """The tensors that a pass changes in place, without the cache itself."""
        return []


class Engine(RowCache):
    """One model over a ragged batch. Unless an engine does otherwise, every pass is run from Python."""

    vocab_size: int
    captured_cycles: dict[Hashable, Any]  # captured with this engine, for the next batch of the same shape

    @cached_property
    def chunk(self) -> int:
        """Prompt tokens that cost about as much as a decoding step: few where arithmetic is the limit."""
        return 8 if self.device.type == "cpu" else 512

    def extend(self, tokens: Tensor, counts: Tensor | None = None, keep: int | None = None) -> Output:
        """Append tokens [B, T]; where `counts` [B] is given, row b takes its last counts[b] tokens only."""
        raise NotImplementedError

    def extend_first(self, tokens: Tensor, counts: Tensor) -> Output:
        """Append the first counts[b] ≥ 1 tokens of each row of [B, T]; outputs of cells beyond them mean nothing."""
        most = int(counts.max())
        output = self.extend(align_right(tokens[:, :most], counts), counts)
        row, column = (torch.arange(n, device=tokens.device) for n in tokens.shape)
        return output.take(row[:, None] * most + (column + (most - counts)[:, None]).clamp_max(most - 1))

    def prefill(self, tokens: Tensor, counts: Tensor) -> Output:
        """`extend` for the prompts of a batch: only the last position is kept."""
        return self.extend(tokens, counts, keep=1)

    def bucket(self, rows: int, now: int = 0) -> int:
        """The best number of rows for a batch with `rows` live ones; `now` is its present number, 0 if it is new."""
        return rows

    def rewind(self, rejected: Tensor) -> None:
        """Forget the last rejected[b] tokens of each row."""

    def view_block(self, row: int, start: int, stop: int) -> Tensor:
        """The keys and values [2, layers, kv_heads, stop − start, width] of these positions of a row, not copied."""
        raise NotImplementedError

    def restore(self, rows: Sequence[Sequence[Tensor]]) -> None:
        """Begin the rows of an empty batch with blocks, one after the other: copies of what `view_block` gives."""
        raise NotImplementedError

    def capture(self, functions: Sequence[Callable[[], None]], state: Sequence[Tensor]) -> list[Callable[[], None]]:
        """Return the functions, as captured graphs where the engine can; tensors of `state` are left as they were."""
        return list(functions)


class HeadEngine(Engine):
    """An EAGLE-3 head over a ragged batch: entry t of a row is made of the token at t+1 and the state at t."""

    vocabulary: Tensor  # [D] the token of each of its logits
    hidden_size: int

    def append(self, tokens: Tensor, states: Tensor, counts: Tensor | None = None, keep: int = 1) -> Output:
        """Append entries of tokens [B, T] and states; of row b the last counts[b], as `extend` does. `keep` is 0 or 1.
        States are the target's features [B, T, 3H], or the head's own from earlier entries [B, T, H].
        The output has logits [B, keep, D] and, as features, the states [B, keep, H] for the entries that follow."""
        raise NotImplementedError


def move_rows(rows: Sequence[int], tensors: Sequence[Tensor]) -> None:
    """Let `rows`, one named twice as two, be the first rows of tensors, in place; those that stay are not copied."""
    if moves := [(place, row) for place, row in enumerate(rows) if place != row]:
        places, moved = send(list(zip(*moves, strict=True)), tensors[0].device)
        for tensor in tensors:
            tensor.index_copy_(0, places, tensor.index_select(0, moved))  # what moves is copied first


def align_right(tokens: Tensor, counts: Tensor) -> Tensor:
    """Move the first counts[b] tokens of each row of [B, T] to its end; those before them do not matter."""
    column = torch.arange(tokens.shape[1], device=tokens.device)
    return tokens.gather(1, (column - tokens.shape[1] + counts[:, None]).clamp_min(0))
