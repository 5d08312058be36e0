"""Who runs the target while labels are made: this process, or an engine that is handed in."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from selfjudge.decoding.plain import Answer, respond
from selfjudge.label.score import Scorer
from selfjudge.models.pair import Pair


class Backend(Protocol):
    """The target's answers and scores. Answers come first, scores after: a backend need not do both at a time."""

    def respond(
        self, prompts: Sequence[Sequence[int]], *, eos_ids: Collection[int], max_new_tokens: int, batch: int
    ) -> Iterator[Answer]:
        """Greedy answers, as they are finished."""

    def scorer(self, *, suffix_length: int, lookahead: int) -> Scorer:
        """What scores substitutions, N tokens after each."""


@dataclass(frozen=True)
class Torch:
    """The pair's own target."""

    pair: Pair

    def respond(
        self, prompts: Sequence[Sequence[int]], *, eos_ids: Collection[int], max_new_tokens: int, batch: int
    ) -> Iterator[Answer]:
        return respond(self.pair.target, prompts, eos_ids=eos_ids, max_new_tokens=max_new_tokens, batch=batch)

    def scorer(self, *, suffix_length: int, lookahead: int) -> Scorer:
        return Scorer(self.pair.target, suffix_length=suffix_length, lookahead=lookahead)
