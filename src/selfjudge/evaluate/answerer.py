"""Who answers prompts under a rule: this process, or an engine that is handed in. Evaluation and tuning ask no more."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from selfjudge.decoding.rules import AcceptanceRule
from selfjudge.decoding.text import generate
from selfjudge.engine.select import choose_kind
from selfjudge.models.pair import Pair, Prompt
from selfjudge.types import PHASES, Generation

Answers = tuple[list[Generation], dict[str, float]]
"""The answers to prompts, in their order, and the seconds by phase with their `total`."""


class Answerer(Protocol):
    """Answers prompts that one rule decodes together."""

    @property
    def engine(self) -> str:
        """What runs the models, by name."""

    @property
    def device(self) -> str:
        """cuda, mps or cpu."""

    @property
    def one_gamma(self) -> bool:
        """Whether another γ takes another start: then γ is not measured."""

    def answer(
        self,
        prompts: Sequence[Prompt],
        rule: AcceptanceRule,
        *,
        gamma: int,
        max_new_tokens: int,
        seeds: Sequence[int] | None = None,
    ) -> Answers:
        """The answers of all prompts; a seed for each, where the rule draws at random."""


@dataclass(frozen=True)
class TorchAnswerer:
    """Our own loop."""

    pair: Pair
    one_gamma = False

    @property
    def engine(self) -> str:
        return choose_kind(self.pair.target_model, int8=self.pair.target_model.int8)

    @property
    def device(self) -> str:
        return str(self.pair.target.device.type)

    def answer(
        self,
        prompts: Sequence[Prompt],
        rule: AcceptanceRule,
        *,
        gamma: int,
        max_new_tokens: int,
        seeds: Sequence[int] | None = None,
    ) -> Answers:
        start = time.perf_counter()
        answers = generate(
            self.pair, prompts, rule, gamma=gamma, max_new_tokens=max_new_tokens, batch=len(prompts), seeds=seeds,
            trace=False,
        )  # fmt: skip
        total = time.perf_counter() - start
        # the last to end took part in all passes
        phases = {phase: max(answer.seconds[phase] for answer in answers) for phase in PHASES}
        return answers, {**phases, "total": total}
