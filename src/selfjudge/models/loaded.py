"""A loaded model as one object: its module, where its weights are, and what engines keep for it."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from selfjudge.errors import SelfJudgeError
from selfjudge.models.eagle import EagleHead
from selfjudge.models.gguf import FULL_PRECISION, GgufFile, gguf_file
from selfjudge.models.tokens import context_window

_T = TypeVar("_T")


@dataclass(eq=False)
class LoadedModel:
    """What target and draft share. Where the weights stay in a GGUF file, the module has their shapes alone."""

    module: PreTrainedModel | EagleHead | None  # None: it is in a remote engine alone
    reference: str = ""  # embedded name, hub id or path that it was loaded from
    sha256: str = ""  # hash of the weights; empty where none is known
    int8: bool | None = False  # whether the CPU engine quantises the weights to int8; None: where it can
    kept: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    """What engines keep for the next batch: packed weights, idle engines with their captured graphs."""

    @property
    def causal_lm(self) -> PreTrainedModel:
        """The module, which is not a head."""
        assert isinstance(self.module, PreTrainedModel)
        return self.module

    @property
    def device(self) -> torch.device:
        assert self.module is not None
        return self.module.device

    @property
    def file(self) -> GgufFile | None:
        """The GGUF file that holds the weights; None where the module holds them itself."""
        return None if self.module is None else gguf_file(self.module)

    def keep(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """What is kept under this key, made where it is not there yet."""
        if key not in self.kept:
            self.kept[key] = make()
        value: _T = self.kept[key]
        return value

    def release(self) -> None:
        """Free the memory of everything that engines keep; the next engine makes it again."""
        self.kept.clear()


@dataclass(eq=False)
class Target(LoadedModel):
    """A causal LM of transformers; any model that generates text by itself can be one."""

    module: PreTrainedModel
    int8: bool = False  # whether the CPU engine quantises the weights to int8
    remote: Any = None
    """The `VllmBackend` that answers for this model; the module then has its shape and its output matrix alone."""

    @property
    def dtype_name(self) -> str:
        """The weight format as tables print it."""
        if self.file is not None:
            return "q4"
        return "int8" if self.int8 else str(self.module.dtype).removeprefix("torch.")

    @property
    def full_precision(self) -> bool:
        """Whether the weights are here as floats: neither in a GGUF file nor in a remote engine."""
        return self.file is None and not any(parameter.is_meta for parameter in self.module.parameters())

    def check_full_precision(self) -> None:
        """Refuse a model whose weights stay in a file, before any work."""
        if self.file is not None:
            raise SelfJudgeError(FULL_PRECISION)


@dataclass(eq=False)
class Draft(LoadedModel):
    """What drafts for a target: a causal LM with its vocabulary, or an EAGLE-3 head that reads its states."""

    @property
    def head(self) -> EagleHead | None:
        """The module, where it is a head."""
        return self.module if isinstance(self.module, EagleHead) else None

    @property
    def eagle_head(self) -> EagleHead:
        """The module, which is a head."""
        assert isinstance(self.module, EagleHead)
        return self.module

    @property
    def kind(self) -> str:
        """`eagle3` for a head, `layers` for a model."""
        return "layers" if self.head is None else "eagle3"

    @property
    def features(self) -> tuple[int, ...]:
        """The layers of the target whose inputs it reads."""
        return () if self.head is None else self.head.config.aux_layers

    @property
    def window(self) -> int:
        """The most positions that it can hold."""
        return context_window(self.causal_lm) if self.head is None else self.head.window


def as_loaded(model: PreTrainedModel | EagleHead | LoadedModel) -> LoadedModel:
    """A model of transformers or a head as a loaded one, for which nothing is kept yet."""
    if isinstance(model, LoadedModel):
        return model
    return Draft(model) if isinstance(model, EagleHead) else Target(model)


def as_draft(model: PreTrainedModel | EagleHead | Draft) -> Draft:
    """A model or a head as a draft, for which nothing is kept yet."""
    return model if isinstance(model, Draft) else Draft(model)
