"""Which engine runs a model, and where static engines are kept for the next batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import TypeVar
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from selfjudge.engine.base import Engine
from selfjudge.engine.cpu import engine as cpu
from selfjudge.engine.cpu.head import CpuHead
from selfjudge.engine.cuda import engine as cuda
from selfjudge.engine.cuda.head import CudaHead
from selfjudge.engine.draft import Draft, EagleDraft, HeadEngine, LayersDraft
from selfjudge.engine.reference import ReferenceEngine, ReferenceHead
from selfjudge.engine.unpacked import unpacked
from selfjudge.errors import SelfJudgeError
from selfjudge.models.eagle import EagleHead, decoder_layers
from selfjudge.models.gguf import gguf_of

KINDS = ("auto", "reference", "cpu", "cuda")


def make_engine(
    model: PreTrainedModel,
    *,
    hidden: bool = False,
    features: tuple[int, ...] = (),
    int8: bool = False,
    kind: str = "auto",
) -> Engine:
    """The fastest engine for a model, or the one named.

    `hidden` asks for the states a judge reads, `features` for the inputs of these layers, which a draft reads; `int8`
    for quantised weights, which the CPU engine alone offers.
    """
    if features:
        decoder_layers(model)
    kind = engine_kind(model, int8=int8, kind=kind)
    if int8 and kind != "cpu":
        raise SelfJudgeError(f"int8 weights need the cpu engine, not {kind}")
    if kind == "reference":
        file = gguf_of(model)
        return ReferenceEngine(model if file is None else unpacked(model, file), hidden=hidden, features=features)
    reason = cuda.why_not(model) if kind == "cuda" else cpu.why_not(model, int8=int8)
    if reason is not None:
        raise SelfJudgeError(f"the {kind} engine cannot run this model: {reason}")
    if kind == "cuda":
        return cuda.CudaEngine(model, hidden=hidden, features=features)
    return cpu.CpuEngine(model, hidden=hidden, features=features, int8=int8)


def engine_kind(model: PreTrainedModel, *, int8: bool = False, kind: str = "auto") -> str:
    """The engine that `kind` names; `auto` is the fastest that runs the model."""
    if kind not in KINDS:
        raise SelfJudgeError(f"unknown `engine` {kind!r}; there are: {', '.join(KINDS)}")
    in_file = gguf_of(model) is not None
    if in_file and kind == "cuda":
        raise SelfJudgeError("q4 weights need the cpu engine, not cuda")
    if kind != "auto":
        return kind
    kind = "cuda" if model.device.type == "cuda" else "cpu"
    reason = cuda.why_not(model) if kind == "cuda" else cpu.why_not(model, int8=int8)
    if reason is not None and not int8:
        slower = ", which is many times slower in q4" if in_file else ""
        _say_once(f"using the reference engine{slower}: {reason}")
        return "reference"
    return kind


def make_draft(
    draft: PreTrainedModel | EagleHead, target: PreTrainedModel, *, int8: bool = False, kind: str = "auto"
) -> Draft:
    """A model or a head as the draft of a target, on the fastest engine for it or the one named.

    The target's engine must be made with the draft's `features`.
    """
    if not isinstance(draft, EagleHead):
        return LayersDraft(make_engine(draft, int8=int8, kind=kind))
    if kind == "auto":
        kind = "cuda" if draft.device.type == "cuda" else "cpu"
        if (reason := _head_reason(draft, kind, int8)) is not None and not int8:
            _say_once(f"using the reference engine: {reason}")
            kind = "reference"
    if int8 and kind != "cpu":
        raise SelfJudgeError(f"int8 weights need the cpu engine, not {kind}")
    if kind == "reference" and gguf_of(target) is not None:
        raise SelfJudgeError("a head beside q4 weights needs the cpu engine, not reference")
    engine: HeadEngine
    if kind == "reference":
        engine = ReferenceHead(draft)
    elif (reason := _head_reason(draft, kind, int8)) is not None:
        raise SelfJudgeError(f"the {kind} engine cannot run this head: {reason}")
    else:
        engine = CudaHead(draft) if kind == "cuda" else CpuHead(draft, target, int8=int8)
    return EagleDraft(engine, draft.config.aux_layers, draft.dtype)


def draft_features(draft: PreTrainedModel | EagleHead | None) -> tuple[int, ...]:
    """The layers of the target whose inputs a draft reads."""
    return draft.config.aux_layers if isinstance(draft, EagleHead) else ()


def _head_reason(head: EagleHead, kind: str, int8: bool = False) -> str | None:
    return cuda.head_reason(head) if kind == "cuda" else cpu.head_reason(head, int8=int8)


def supports_int8_draft(draft: PreTrainedModel | EagleHead, kind: str = "auto") -> bool:
    """Whether the CPU engine can run a draft with int8 weights."""
    if kind not in ("auto", "cpu"):
        return False
    why_not = cpu.head_reason if isinstance(draft, EagleHead) else cpu.why_not
    return why_not(draft, int8=True) is None


def common_kind(target: PreTrainedModel, draft: PreTrainedModel | EagleHead, kind: str) -> str:
    """The engine for a pair: a recorded cycle holds both models, so either both are on the cuda engine or neither."""
    if kind == "auto" and target.device.type == "cuda":
        of_draft = cuda.head_reason(draft) if isinstance(draft, EagleHead) else cuda.why_not(draft)
        if (reason := cuda.why_not(target) or of_draft) is not None:
            _say_once(f"using the reference engine: {reason}")
            return "reference"
    return kind


_Kept = TypeVar("_Kept", Engine, Draft)
_IDLE: WeakKeyDictionary[PreTrainedModel | EagleHead, dict[Hashable, list[Engine | Draft]]] = WeakKeyDictionary()


@contextmanager
def borrowed(
    model: PreTrainedModel,
    *,
    hidden: bool = False,
    features: tuple[int, ...] = (),
    int8: bool = False,
    kind: str = "auto",
) -> Iterator[Engine]:
    """An engine for one batch. A static engine is kept afterwards, so that the next batch finds its recordings."""
    make = partial(make_engine, model, hidden=hidden, features=features, int8=int8, kind=kind)
    with _lent(model, ("engine", hidden, features), make, kind) as engine:
        yield engine


@contextmanager
def borrowed_draft(
    draft: PreTrainedModel | EagleHead, target: PreTrainedModel, *, int8: bool = False, kind: str = "auto"
) -> Iterator[Draft]:
    """A draft for one batch, kept like an engine."""
    with _lent(draft, "draft", partial(make_draft, draft, target, int8=int8, kind=kind), kind) as made:
        yield made


@contextmanager
def _lent(model: PreTrainedModel | EagleHead, key: Hashable, make: Callable[[], _Kept], kind: str) -> Iterator[_Kept]:
    idle: list[_Kept] = _IDLE.setdefault(model, {}).setdefault(key, [])  # type: ignore[assignment]
    static = kind == "cuda" or (kind == "auto" and model.device.type == "cuda")
    made = idle.pop() if static and idle else make()
    yield made  # after an exception (out of memory) it may be broken and is not kept
    if made.static:
        idle.append(made)


def release(model: PreTrainedModel) -> None:
    """Free the memory of a model's engines: caches, recordings and fused weights."""
    _IDLE.pop(model, None)
    cuda.forget(model)


@cache
def _say_once(text: str) -> None:
    warnings.warn(text, stacklevel=3)
