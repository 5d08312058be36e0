"""Forward passes with a rewindable KV cache. Engines speak token ids only; text lives in the shells above."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
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
    static: bool
    """Whether every pass must have the shape of the first: `capture` then replays it without Python."""

    def reserve(self, batch: int, length: int) -> None:
        """Make room for `batch` rows of at most `length` tokens."""

    def extend(self, tokens: Tensor, counts: Tensor | None = None, keep: int | None = None) -> Output:
        """Append tokens [B, T]; where `counts` [B] is given, row b takes its last counts[b] tokens only."""

    def rewind(self, refused: Tensor) -> None:
        """Forget the last refused[b] tokens of each row."""

    def select(self, rows: list[int]) -> None:
        """Keep these rows, in this order; the others leave the batch."""

    def state(self) -> list[Tensor]:
        """The tensors that a pass changes in place, the cache itself apart."""

    def capture(self, functions: Sequence[Callable[[], None]], state: Sequence[Tensor]) -> list[Callable[[], None]]:
        """The same functions over the same tensors, recorded where the engine can; `state` is left as it was."""


class Eager:
    """What engines that run every pass from Python have in common."""

    static = False

    def reserve(self, batch: int, length: int) -> None:
        """Caches grow as needed."""

    def state(self) -> list[Tensor]:
        return []

    def capture(self, functions: Sequence[Callable[[], None]], state: Sequence[Tensor]) -> list[Callable[[], None]]:
        return list(functions)


def shape_reason(model: PreTrainedModel) -> str | None:
    """Why a model has not the shape of Llama or Qwen2 that the fast engines know; None if it has."""
    config = model.config.get_text_config()
    if type(model).__name__ not in ("LlamaForCausalLM", "Qwen2ForCausalLM", "MistralForCausalLM"):
        return f"models of type {config.model_type!r} run on the reference engine"
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention"} or (not kinds and getattr(config, "sliding_window", None)):
        return "it has sliding-window layers"
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    if rope not in ("default", "linear", "llama3", "yarn"):
        return f"its rotary embedding is of type {rope!r}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act!r}"
    return None


KINDS = ("auto", "reference", "cpu", "cuda")


def make_engine(model: PreTrainedModel, *, hidden: bool = False, int8: bool = False, kind: str = "auto") -> Engine:
    """The fastest engine for a model, or the one named.

    `hidden` asks for the states a judge reads; `int8` for quantised weights, which the CPU engine alone offers.
    """
    from selfjudge.engine import cpu, cuda
    from selfjudge.engine.reference import ReferenceEngine

    if kind not in KINDS:
        raise SelfJudgeError(f"unknown engine {kind!r}; engines are: {', '.join(KINDS)}")
    if kind == "auto":
        kind = "cuda" if model.device.type == "cuda" else "cpu"
        reason = cuda.why_not(model) if kind == "cuda" else cpu.why_not(model, int8=int8)
        if reason is not None and not int8:
            _say_once(f"using the reference engine: {reason}")
            kind = "reference"
    if int8 and kind != "cpu":
        raise SelfJudgeError(f"int8 weights need the cpu engine, not {kind}")
    if kind == "reference":
        return ReferenceEngine(model, hidden=hidden)
    reason = cuda.why_not(model) if kind == "cuda" else cpu.why_not(model, int8=int8)
    if reason is not None:
        raise SelfJudgeError(f"the {kind} engine cannot run this model: {reason}")
    return cuda.CudaEngine(model, hidden=hidden) if kind == "cuda" else cpu.CpuEngine(model, hidden=hidden, int8=int8)


def make_draft_engine(model: PreTrainedModel, *, int8: bool = False, kind: str = "auto") -> Engine:
    """The engine for a draft. On the CPU engine its weights are quantised where their shape allows it: a proposal may be
    rough, since the target verifies it."""
    from selfjudge.engine import cpu

    rough = int8 or (kind in ("auto", "cpu") and cpu.why_not(model, int8=True) is None)
    return make_engine(model, int8=rough, kind=kind)


@cache
def _say_once(text: str) -> None:
    warnings.warn(text, stacklevel=3)
