"""Models whose weights are in an engine elsewhere: this process has their shape and output matrix, and asks it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


class Elsewhere(Protocol):
    """What such an engine is asked for."""

    @property
    def respond(self) -> Callable[..., Iterator[Any]]:
        """As `decoding.plain.respond`, without model and batch."""

    def states(self, sequences: Sequence[Sequence[int]], counts: Sequence[int]) -> list[Tensor]:
        """The states at the last `counts` tokens of each sequence, after the final norm."""


_ENGINES: WeakKeyDictionary[PreTrainedModel, Elsewhere] = WeakKeyDictionary()


def run_elsewhere(model: PreTrainedModel, engine: Elsewhere) -> None:
    """From now on this engine answers for the model."""
    _ENGINES[model] = engine


def elsewhere(model: PreTrainedModel) -> Elsewhere | None:
    """The engine that answers for a model; None where its weights are here."""
    return _ENGINES.get(model)
