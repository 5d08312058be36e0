"""Forward passes with a rewindable KV cache. Engines speak token ids only; text lives in the shells above."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol
from weakref import WeakKeyDictionary

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
    version: int
    """Changes whenever the tensors behind a recording are replaced."""
    recorded: dict[Hashable, Any]
    """What was recorded with this engine, for the next batch of the same shape."""

    def reserve(self, batch: int, length: int) -> None:
        """Begin a batch: room for `batch` rows of at most `length` tokens, none of them filled."""

    def extend(self, tokens: Tensor, counts: Tensor | None = None, keep: int | None = None) -> Output:
        """Append tokens [B, T]; where `counts` [B] is given, row b takes its last counts[b] tokens only."""

    def prefill(self, tokens: Tensor, counts: Tensor) -> Output:
        """`extend` for the prompts of a batch: the last position alone is kept, and another batch may follow soon."""

    def enter(self, tokens: Tensor, counts: Tensor) -> Output:
        """`prefill` for rows that join a batch which is under way: they come after those that are there. A static engine
        must have reserved room for them."""

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
    version = 0

    def __init__(self) -> None:
        self.recorded: dict[Hashable, Any] = {}

    def extend(self, tokens: Tensor, counts: Tensor | None = None, keep: int | None = None) -> Output:
        raise NotImplementedError

    def prefill(self, tokens: Tensor, counts: Tensor) -> Output:
        return self.extend(tokens, counts, keep=1)

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


def may_be_rough(draft: PreTrainedModel, kind: str = "auto") -> bool:
    """Whether the CPU engine can run a draft with int8 weights."""
    from selfjudge.engine import cpu

    return kind in ("auto", "cpu") and cpu.why_not(draft, int8=True) is None


def common_kind(target: PreTrainedModel, draft: PreTrainedModel, kind: str) -> str:
    """The engine for a pair: a recorded cycle holds both models, so either both are on the cuda engine or neither."""
    from selfjudge.engine import cuda

    if kind == "auto" and target.device.type == "cuda":
        for model in (target, draft):
            if (reason := cuda.why_not(model)) is not None:
                _say_once(f"using the reference engine: {reason}")
                return "reference"
    return kind


_IDLE: WeakKeyDictionary[PreTrainedModel, list[tuple[bool, Engine]]] = WeakKeyDictionary()


@contextmanager
def borrowed(
    model: PreTrainedModel, *, hidden: bool = False, int8: bool = False, kind: str = "auto"
) -> Iterator[Engine]:
    """An engine for one batch. A static engine goes back on a shelf, so that the next batch finds its recordings."""
    shelf = _IDLE.setdefault(model, [])
    wanted = kind == "cuda" or (kind == "auto" and model.device.type == "cuda")
    found = next((i for i, (had, _) in enumerate(shelf) if wanted and had == hidden), None)
    engine = make_engine(model, hidden=hidden, int8=int8, kind=kind) if found is None else shelf.pop(found)[1]
    yield engine  # after an exception, out of memory say, the engine is not to be trusted and goes
    if engine.static:
        shelf.append((hidden, engine))


def release(model: PreTrainedModel) -> None:
    """Give back the memory of a model's engines: caches, recordings and fused weights."""
    from selfjudge.engine import cuda

    _IDLE.pop(model, None)
    cuda.forget(model)


@cache
def _say_once(text: str) -> None:
    warnings.warn(text, stacklevel=3)
