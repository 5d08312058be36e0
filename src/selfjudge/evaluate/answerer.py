"""Who answers prompts under a rule: this process, or an engine that is handed in."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from selfjudge.decoding.rules import AcceptanceRule
from selfjudge.decoding.text import generate
from selfjudge.engine.select import choose_kind
from selfjudge.models.pair import Pair, Prompt
from selfjudge.types import PHASES, Generation

Answers = tuple[list[Generation], dict[str, float]]
"""The answers to prompts, in their order, and the seconds by phase with their `total`."""


@dataclass(frozen=True)
class BatchOptions:
    """How a batch of prompts is answered, beside the rule; a seed for each prompt, if the rule draws at random."""

    gamma: int
    max_new_tokens: int
    seeds: Sequence[int] | None = None


class Answerer(ABC):
    """Answers prompts that one rule decodes together."""

    engine: str
    """Name of what runs the models."""
    one_gamma = False
    """Whether another γ takes another start of the engine: then γ is not measured."""

    @property
    @abstractmethod
    def device(self) -> str:
        """cuda, mps or cpu."""

    @abstractmethod
    def answer(self, prompts: Sequence[Prompt], rule: AcceptanceRule, options: BatchOptions) -> Answers:
        """The answers of all prompts."""


class TorchAnswerer(Answerer):
    """Answers with our own decoding loop."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.engine = choose_kind(pair.target_model, int8=pair.target_model.int8)

    @property
    def device(self) -> str:
        return str(self.pair.target.device.type)

    def answer(self, prompts: Sequence[Prompt], rule: AcceptanceRule, options: BatchOptions) -> Answers:
        start = time.perf_counter()
        answers = generate(
            self.pair,
            prompts,
            rule,
            gamma=options.gamma,
            max_new_tokens=options.max_new_tokens,
            batch=len(prompts),
            seeds=options.seeds,
            trace=False,
        )
        total = time.perf_counter() - start
        # the last to end took part in all passes
        phases = {phase: max(answer.seconds[phase] for answer in answers) for phase in PHASES}
        return answers, {**phases, "total": total}
