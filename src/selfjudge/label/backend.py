"""Who runs the target while labels are made: this process, or an engine that is handed in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from selfjudge.label.score import Scorer
from selfjudge.models.pair import Pair


class Backend(Protocol):
    """The target's scores; its answers come from `decoding.plain.respond`, wherever it runs."""

    @property
    def alternates(self) -> bool:
        """Whether it either answers or scores, and changes slowly: then all answers are made before any is scored."""

    def scorer(self, *, suffix_length: int, lookahead: int) -> Scorer:
        """What scores substitutions, N tokens after each."""


@dataclass(frozen=True)
class Torch:
    """The pair's own target."""

    pair: Pair
    alternates = False

    def scorer(self, *, suffix_length: int, lookahead: int) -> Scorer:
        return Scorer(self.pair.target, suffix_length=suffix_length, lookahead=lookahead)
