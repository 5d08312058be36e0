"""What an engine is: one model, a ragged batch, a cache that can be rewound."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, Self

from torch import Tensor, device
from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Output:
    """The last `keep` positions of a pass."""

    logits: Tensor
    """[B, keep, V]"""
    hidden: Tensor | None
    """[B, keep, H] the tensor that feeds the LM head, where it was asked for."""
    features: Tensor | None = None
    """[B, T, F] of all positions: the inputs of the layers that were asked for, side by side."""


class RowCache(Protocol):
    """What holds the rows of a ragged batch: every row has its own number of cached tokens."""

    window: int
    """Context window: the most positions a row may hold."""
    device: device
    static: bool = False
    """Whether every pass must have the shape of the first: `capture` then replays it without Python."""

    @property
    def version(self) -> int:
        """Changes whenever the tensors behind a captured graph are replaced."""
        return 0

    def reserve(self, batch: int, length: int) -> None:
        """Begin a batch: room for `batch` rows of at most `length` tokens, none of them filled."""

    def aside(self) -> Self:
        """The same weights with an empty cache of their own, for prompts that will `join` this one."""
        other = copy.copy(self)
        other.reserve(0, 0)
        return other

    def join(self, other: Self, idle: int = 0) -> None:
        """Take over the rows of what was `aside`, after those that are there; then some idle ones.

        Where passes are static there must be room for them; nowhere else are there idle rows.
        """

    def select(self, rows: list[int]) -> None:
        """Keep these rows, in this order; the others leave the batch. One that is named twice becomes two rows.

        Where passes are static there must be room for them.
        """

    def state(self) -> list[Tensor]:
        """The tensors that a pass changes in place, without the cache itself."""
        return []


class Engine(RowCache):
    """One model over a ragged batch. Unless an engine does otherwise, every pass is run from Python."""

    vocab_size: int
    captured_cycles: dict[Hashable, Any]
    """Cycles that were captured with this engine, for the next batch of the same shape."""

    @cached_property
    def chunk(self) -> int:
        """Tokens of a prompt that cost about as much as a decoding step: few where arithmetic is the limit."""
        return 8 if self.device.type == "cpu" else 512

    def extend(self, tokens: Tensor, counts: Tensor | None = None, keep: int | None = None) -> Output:
        """Append tokens [B, T]; where `counts` [B] is given, row b takes its last counts[b] tokens only."""
        raise NotImplementedError

    def prefill(self, tokens: Tensor, counts: Tensor) -> Output:
        """`extend` for the prompts of a batch: only the last position is kept."""
        return self.extend(tokens, counts, keep=1)

    def bucket(self, rows: int, now: int = 0) -> int:
        """How many rows a batch should have in which `rows` are live and, if it is under way, `now` are there."""
        return rows

    def rewind(self, rejected: Tensor) -> None:
        """Forget the last rejected[b] tokens of each row."""

    def capture(self, functions: Sequence[Callable[[], None]], state: Sequence[Tensor]) -> list[Callable[[], None]]:
        """The same functions over the same tensors, as captured graphs where it can; `state` is left as it was."""
        return list(functions)


class HeadEngine(Engine):
    """An EAGLE-3 head over a ragged batch: entry t of a row is made of the token at t+1 and the state at t."""

    vocabulary: Tensor
    """[D] the tokens it proposes from."""
    hidden_size: int

    def append(self, tokens: Tensor, states: Tensor, counts: Tensor | None = None, keep: int = 1) -> Output:
        """Append entries of tokens [B, T] and states; of row b the last counts[b], as `extend` does.

        States are the target's features [B, T, 3H], or what earlier entries gave [B, T, H]. Of the last `keep` entries,
        none or one, come logits [B, keep, D] and, as features, the states [B, keep, H] of the entries that follow.
        """
        raise NotImplementedError


def shape_reason(model: PreTrainedModel) -> str | None:
    """Why a model does not have the shape of Llama or Qwen2 that the fast engines need; None if it has."""
    config = model.config.get_text_config()
    if type(model).__name__ not in ("LlamaForCausalLM", "Qwen2ForCausalLM", "MistralForCausalLM"):
        return f"models of type {config.model_type!r} run on the reference engine"
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention"} or (not kinds and getattr(config, "sliding_window", None)):
        return "it has sliding-window layers"
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    if rope not in ("default", "linear", "llama3", "yarn"):
        return f"its rotary embedding is of type {rope!r}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act!r}"
    return None
