"""The engines of one batch: that of the target and, unless decoding is plain, that of the draft."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from selfjudge.engine.base import Engine, RowCache
from selfjudge.engine.draft import Drafter
from selfjudge.errors import SelfJudgeError


@dataclass(frozen=True, eq=False)
class BatchEngines:
    """A target's engine and its draft over the same rows."""

    target: Engine
    draft: Drafter | None = None
    """None for plain decoding."""
    kept: dict[Hashable, Any] = field(default_factory=dict)
    """What earlier batches learned about these models on such engines."""

    def __post_init__(self) -> None:
        if self.target.static and self.draft is not None and not self.draft.static:
            raise SelfJudgeError(
                "a target on the cuda engine needs a draft on it too: use the reference engine for both"
            )

    @property
    def caches(self) -> list[RowCache]:
        return [self.target] if self.draft is None else [self.target, self.draft]

    @property
    def window(self) -> int:
        """The most positions that a row may have."""
        return min(cache.window for cache in self.caches)

    def reserve(self, rows: int, length: int) -> None:
        """Begin a batch: room for so many rows of at most `length` tokens."""
        for cache in self.caches:
            cache.reserve(rows, length)

    def aside(self) -> BatchEngines:
        """The same weights with empty caches, for prompts that will `join` these."""
        return BatchEngines(self.target.aside(), self.draft and self.draft.aside(), self.kept)

    def join(self, other: BatchEngines, idle: int) -> None:
        """Take over the rows of engines that were `aside`, then some idle ones."""
        for cache, others in zip(self.caches, other.caches, strict=True):
            cache.join(others, idle)

    def select(self, rows: list[int]) -> None:
        """Keep these rows, in this order."""
        for cache in self.caches:
            cache.select(rows)
