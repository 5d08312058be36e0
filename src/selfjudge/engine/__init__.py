"""Forward passes with a rewindable KV cache. Engines speak token ids only; text lives in the shells above."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from torch import Tensor, device
from transformers import PreTrainedModel

from selfjudge.errors import SelfJudgeError


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


def make_engine(model: PreTrainedModel, *, hidden: bool = False, int8: bool = False, kind: str = "auto") -> Engine:
    """The fastest engine for a model, or the one named: `reference`, `cpu`.

    `hidden` asks for the states a judge reads; `int8` for quantised weights, which the CPU engine alone offers.
    """
    from selfjudge.engine import cpu
    from selfjudge.engine.reference import ReferenceEngine

    if kind not in KINDS:
        raise SelfJudgeError(f"unknown engine {kind!r}; engines are: {', '.join(KINDS)}")
    if kind != "reference":
        reason = cpu.why_not(model, int8=int8)
        if reason is None:
            return cpu.CpuEngine(model, hidden=hidden, int8=int8)
        if kind == "cpu":
            raise SelfJudgeError(f"the CPU engine cannot run this model: {reason}")
        if model.device.type == "cpu" and not int8:
            _say_once(f"using the reference engine: {reason}")
    else:
        reason = "the reference engine has no quantised weights"
    if int8:
        raise SelfJudgeError(f"int8 weights need the CPU engine: {reason}")
    return ReferenceEngine(model, hidden=hidden)


def make_draft_engine(model: PreTrainedModel, *, int8: bool = False, kind: str = "auto") -> Engine:
    """The engine for a draft. On the CPU engine its weights are quantised where their shape allows it: a proposal may be
    rough, since the target verifies it."""
    from selfjudge.engine import cpu

    rough = int8 or (kind != "reference" and cpu.why_not(model, int8=True) is None)
    return make_engine(model, int8=rough, kind=kind)


KINDS = ("auto", "reference", "cpu")


@cache
def _say_once(text: str) -> None:
    warnings.warn(text, stacklevel=3)
