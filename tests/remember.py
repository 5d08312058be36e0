"""Work that tests of whole runs repeat, done once: what models answer to the same question.

Runs are broken off, gone on with and compared many times over; decoding itself has tests of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from selfjudge.evaluate.execute import TorchAnswerer


def remember_answers(patch: pytest.MonkeyPatch) -> None:
    """`TorchAnswerer` decodes the same prompts by the same rule once."""
    decode, known = TorchAnswerer.answer, dict[Any, Any]()

    def answer(self: TorchAnswerer, prompts: Any, run: Any, max_new_tokens: int, seeds: Any, **how: Any) -> Any:
        rule = run.rule
        asked = (repr(prompts), repr(rule), id(rule.judge), run.gamma, max_new_tokens, tuple(seeds), how.get("trace"))
        key = (id(self.pair), *asked)
        if key not in known:
            kept = self.pair, rule.judge  # ids are of use only as long as what they name is there
            known[key] = decode(self, prompts, run, max_new_tokens, seeds, **how), kept
        answers, seconds = known[key][0]
        return answers, dict(seconds)

    patch.setattr(TorchAnswerer, "answer", answer)


def remember_responses(patch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """The function `respond` that a module uses answers the same prompts once."""
    decode, known = module.respond, dict[Any, Any]()

    def respond(model: Any, prompts: Any, **options: Any) -> Iterator[Any]:
        key = (id(model), repr(prompts), repr(sorted(options.items())))
        if key not in known:
            known[key] = list(decode(model, prompts, **options)), model
        yield from known[key][0]

    patch.setattr(module, "respond", respond)
