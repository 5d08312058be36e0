"""Forward passes with a rewindable KV cache. Engines speak token ids only; text lives in the shells above."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, device
from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Output:
    """The last `keep` positions of a pass."""

    logits: Tensor
    """[B, keep, V]"""
    hidden: Tensor | None
    """[B, keep, H] the tensor that feeds the LM head, where it was asked for."""


class Engine(Protocol):
    """One model over a ragged batch: every row has its own number of cached tokens."""

    vocab_size: int
    window: int
    """Context window: the most positions a row may hold."""
    device: device

    def extend(self, tokens: Tensor, counts: Tensor | None = None, keep: int | None = None) -> Output:
        """Append tokens [B, T]; where `counts` [B] is given, row b takes its last counts[b] tokens only."""

    def rewind(self, refused: Tensor) -> None:
        """Forget the last refused[b] tokens of each row."""

    def select(self, rows: list[int]) -> None:
        """Keep these rows, in this order; the others leave the batch."""


def make_engine(model: PreTrainedModel, *, hidden: bool = False) -> Engine:
    """The engine for a model; `hidden` asks for the states a judge reads."""
    from selfjudge.engine.reference import ReferenceEngine

    return ReferenceEngine(model, hidden=hidden)
