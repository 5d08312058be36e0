"""Choose the engine that runs a model, and lend the engines of a pair for a batch."""

import hashlib
import json
import math
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from typing import Any, TypeAlias, TypeVar
from uuid import uuid4

import torch
from transformers import PreTrainedModel

from selfjudge.engine.base import Engine, HeadEngine
from selfjudge.engine.cpu import engine as cpu
from selfjudge.engine.cuda import engine as cuda
from selfjudge.engine.draft import BatchEngines, Drafter, EagleDraft, ModelDraft
from selfjudge.engine.prefixes import PrefixStore
from selfjudge.engine.reference import ReferenceEngine, ReferenceHead
from selfjudge.errors import SelfJudgeError, first_line
from selfjudge.models.convert import dequantise
from selfjudge.models.device import make_current
from selfjudge.models.eagle import EagleHead, decoder_layers
from selfjudge.models.load import Draft, LoadedModel, as_draft, as_loaded
from selfjudge.models.pair import Pair
from selfjudge.ops import has_non_finite
from selfjudge.store import machine, versions
from selfjudge.types import ENGINES

AnyModel: TypeAlias = "PreTrainedModel | EagleHead | LoadedModel"
"""A model of transformers, a head, or either as it was loaded: engines are then kept with it for the next batch."""

MIN_MEASURED = 10_000_000  # parameters of a target whose speeds are worth keeping


class PairEngines:
    """The engines of a pair, chosen once: a captured cycle holds both models, so both run on one kind of engine."""

    def __init__(self, pair: Pair, kind: str = "auto", *, drafts: bool = True) -> None:
        """Without `drafts` the target decodes alone."""
        self.target, self.draft = pair.target_model, pair.draft_model if drafts and pair.draft is not None else None
        self.kind = kind
        self.prefixes: PrefixStore | None = None
        if kind != "auto":
            choose_kind(self.target, int8=self.target.int8, kind=kind)  # refuses what it cannot run
        if kind == "auto" and self.draft is not None and self.target.device.type == "cuda":
            reason = _why_not(self.target, "cuda") or _why_not(self.draft, "cuda")
            if reason is not None:
                _warn_once(f"using the reference engine: {reason}")
                self.kind = "reference"

    @property
    def draft_int8(self) -> bool:
        """Whether the draft runs in int8: as asked for, else where it can and is not the target itself."""
        if self.draft is None:
            return False
        if self.draft.int8 is not None:
            return self.draft.int8
        if self.draft.module is self.target.module or (self.draft.sha256 and self.draft.sha256 == self.target.sha256):
            return False
        return self.kind in ("auto", "cpu") and _why_not(self.draft, "cpu", int8=True) is None

    @property
    def draft_dtype(self) -> str:
        """The draft's weight format as tables print it; empty without a draft."""
        if self.draft is None or self.draft.module is None:
            return ""
        if self.draft.file is not None:
            return self.draft.file.dtype
        return "int8" if self.draft_int8 else str(self.draft.module.dtype).removeprefix("torch.")

    @contextmanager
    def borrow(self, *, hidden: bool = False) -> Iterator[BatchEngines]:
        """Lend both engines for one batch. `hidden` asks for the states that a judge reads."""
        features = () if self.draft is None else self.draft.features
        with borrow_engine(
            self.target, hidden=hidden, features=features, int8=self.target.int8, kind=self.kind
        ) as target:
            number = "" if self.draft is None else self.draft.keep("prefixes", uuid4)
            spaces = f"target {self.kind} {self.target.int8}", f"draft {self.kind} {self.draft_int8} {number}"
            prefixes = self.prefixes if target.copies_blocks else None
            if self.draft is None:
                yield BatchEngines(target, prefixes=prefixes, spaces=spaces)
                return
            int8 = self.draft_int8
            settings = self.kind, self.target.int8, int8, hidden, torch.get_num_threads()  # they set the speed
            with borrow_draft(self.draft, self.target, int8=int8, kind=self.kind) as draft:
                kept: dict[Hashable, Any] = self.draft.keep(("batches", self.target, settings), dict)
                shape = self.draft.keep(("shape", self.target, settings), self.shape)
                prefixes = prefixes if draft.engine.copies_blocks else None
                yield BatchEngines(target, draft, kept, shape, prefixes, spaces)

    def shape(self) -> str:
        """What decides how long a cycle takes, as JSON; empty without a draft, and for models too small to store it."""
        if self.draft is None or self.target.causal_lm.num_parameters() < MIN_MEASURED:
            return ""
        models = {"target": (self.target, self.target.dtype_name), "draft": (self.draft, self.draft_dtype)}
        described = {name: {**_describe_shape(model), "dtype": dtype} for name, (model, dtype) in models.items()}
        host = {
            "engine": self.kind,
            "device": self.target.device.type,
            "machine": machine(),
            "versions": versions("triton"),
        }
        return json.dumps({**described, **host}, sort_keys=True)


def _describe_shape(model: LoadedModel) -> dict[str, object]:
    """A digest of the shapes of all matrices, and of a model, unlike a head, the number of parameters."""
    if isinstance(model.module, EagleHead):  # the CPU engine frees its matrices once it has packed them
        return {"shapes": _digest(model.module.config)}
    shapes = [(name, tuple(p.shape)) for name, p in model.causal_lm.named_parameters()]
    return {"parameters": sum(math.prod(shape) for _, shape in shapes), "shapes": _digest(shapes)}


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def make_engine(
    model: PreTrainedModel | LoadedModel,
    *,
    hidden: bool = False,
    features: tuple[int, ...] = (),
    int8: bool = False,
    kind: str = "auto",
) -> Engine:
    """Make the fastest engine for a model, or the one that `kind` names. Only the CPU engine has `int8` weights.
    `hidden` asks for the states a judge reads, `features` for the inputs of these layers, which a draft reads."""
    model = as_loaded(model)
    if features:
        decoder_layers(model.causal_lm)  # raises where the layers cannot be found
    kind = choose_kind(model, int8=int8, kind=kind)
    if kind == "cuda":
        return cuda.CudaEngine(model, hidden=hidden, features=features)
    engine: Engine
    if kind == "cpu":
        engine = cpu.CpuEngine(model, hidden=hidden, features=features, int8=int8)
    else:
        module = model.causal_lm
        if model.file is not None:
            module = model.keep("dequantised", lambda: dequantise(model.causal_lm, torch.float32))
        engine = ReferenceEngine(module, hidden=hidden, features=features)
    if model.reference:
        model.keep("tried", lambda: _try_pass(engine, model.reference))  # once per model
    return engine


def _try_pass(engine: Engine, reference: str) -> None:
    """Raise where a model cannot run or its logits are non-finite: weights can look valid one by one."""
    tokens = torch.tensor([[engine.vocab_size // 3, engine.vocab_size // 2]], device=engine.device)
    try:
        logits = engine.aside().extend(tokens).logits
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise SelfJudgeError(f"{reference} cannot be run: {first_line(error)}") from None
    if bool((has_non_finite(logits) | logits.isneginf().all(-1)).any()):
        raise SelfJudgeError(f"{reference} gives logits that are not finite: its weights or its config are damaged")


def make_draft(
    draft: AnyModel, target: PreTrainedModel | LoadedModel, *, int8: bool = False, kind: str = "auto"
) -> Drafter:
    """Make the draft of a target from a model or a head, on the fastest engine or the one that `kind` names.
    The target's engine must be made with the draft's `features`."""
    draft, target = as_draft(draft), as_loaded(target)
    if (head := draft.head) is None:
        return ModelDraft(make_engine(draft, int8=int8, kind=kind))
    kind = choose_kind(draft, int8=int8, kind=kind)
    engine: HeadEngine
    if kind == "cuda":
        engine = cuda.CudaHead(draft)
    elif kind == "cpu":
        engine = cpu.CpuHead(draft, target, int8=int8)
    elif target.file is not None:
        raise SelfJudgeError("a head beside q4 weights needs the cpu engine, not reference")
    else:
        engine = ReferenceHead(head)
    return EagleDraft(engine, draft.features, head.dtype)


def choose_kind(model: AnyModel, *, int8: bool = False, kind: str = "auto") -> str:
    """The kind of engine to use: the one named, if it can run the model, or for `auto` the fastest that can."""
    if kind not in ENGINES:
        raise SelfJudgeError(f"unknown `engine` {kind!r}; there are: {', '.join(ENGINES)}")
    model = as_loaded(model)
    if model.file is not None and kind == "cuda":
        raise SelfJudgeError("q4 weights need the cpu engine, not cuda")
    chosen = ("cuda" if model.device.type == "cuda" else "cpu") if kind == "auto" else kind
    if int8 and chosen != "cpu":
        raise SelfJudgeError(f"int8 weights need the cpu engine, not {chosen}")
    reason = None if chosen == "reference" else _why_not(model, chosen, int8=int8)
    if reason is None:
        return chosen
    if kind == "auto" and not int8:
        slower = ", which is many times slower in q4" if model.file is not None else ""
        _warn_once(f"using the reference engine{slower}: {reason}")
        return "reference"
    what = "head" if isinstance(model.module, EagleHead) else "model"
    raise SelfJudgeError(f"the {chosen} engine cannot run this {what}: {reason}")


def _why_not(model: LoadedModel, kind: str, *, int8: bool = False) -> str | None:
    """Why the engine of this kind cannot run a model or a head; None if it can."""
    assert model.module is not None
    return cuda.why_not(model.module) if kind == "cuda" else cpu.why_not(model.module, int8=int8)


_Lent = TypeVar("_Lent", Engine, Drafter)


def borrow_engine(
    model: LoadedModel, *, hidden: bool = False, features: tuple[int, ...] = (), int8: bool = False, kind: str = "auto"
) -> AbstractContextManager[Engine]:
    """Lend an engine for one batch. A static one is kept, so that the next batch finds its captured graphs."""
    key = hidden, features
    return _borrow(model, key, kind, lambda: make_engine(model, hidden=hidden, features=features, int8=int8, kind=kind))


def borrow_draft(
    draft: Draft, target: LoadedModel, *, int8: bool = False, kind: str = "auto"
) -> AbstractContextManager[Drafter]:
    """Lend a draft for one batch; it is kept like an engine."""
    return _borrow(draft, "draft", kind, lambda: make_draft(draft, target, int8=int8, kind=kind))


@contextmanager
def _borrow(model: LoadedModel, key: Hashable, kind: str, make: Callable[[], _Lent]) -> Iterator[_Lent]:
    idle: dict[Hashable, list[_Lent]] = model.keep("idle engines", dict)
    may_be_static = kind == "cuda" or (kind == "auto" and model.device.type == "cuda")
    make_current(model.device)
    engine: _Lent | None = None
    with suppress(KeyError, IndexError):  # another thread may take the last
        engine = idle[key].pop() if may_be_static else None
    engine = make() if engine is None else engine
    engine.idle = idle
    whole = engine.static
    try:
        yield engine
    except BaseException as error:  # it may be damaged (out of memory), unless a stream is not read to its end
        whole &= isinstance(error, GeneratorExit)
        raise
    finally:
        if whole:
            idle.setdefault(key, []).append(engine)


@cache
def _warn_once(text: str) -> None:
    warnings.warn(text, stacklevel=3)
