"""Edits of logits for tests, and what decoding under them must give: the whole text read anew for every token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import transformers as hf
from torch import Tensor

from selfjudge.decoding.edits import LogitsEdit


@dataclass
class Forbid(LogitsEdit):
    """Forbids tokens; `widths` notes how many rows of logits each pass had."""

    tokens: Sequence[int]
    widths: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)

    def edit(self, logits: Tensor, drafts: Sequence[int]) -> None:
        assert len(logits) == len(drafts) + 1
        self.widths.append(len(logits))
        logits[:, list(self.tokens)] = -math.inf

    def advance(self, tokens: Sequence[int]) -> None:
        self.emitted += tokens


@dataclass
class NoToken2x(LogitsEdit):
    """Forbids every token that the answer has already, drafts included: row i must follow drafts[:i]."""

    emitted: list[int] = field(default_factory=list)

    def edit(self, logits: Tensor, drafts: Sequence[int]) -> None:
        for i in range(len(logits)):
            logits[i, [*self.emitted, *drafts[:i]]] = -math.inf

    def advance(self, tokens: Sequence[int]) -> None:
        self.emitted += tokens


@torch.inference_mode()
def greedy_under(model: hf.PreTrainedModel, prompt: list[int], count: int, edit: Forbid | NoToken2x) -> list[int]:
    """What greedy decoding gives under an edit."""
    answer: list[int] = []
    for _ in range(count):
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, -1:].clone()
        edit.edit(logits, [])
        answer.append(int(logits.argmax()))
        edit.advance(answer[-1:])
    return answer
