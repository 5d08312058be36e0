"""Checks of the parts of vLLM that the adapters use: a version where they differ is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NoReturn

from selfjudge.errors import SelfJudgeError, first_line


def adapter_of(module: str) -> Any:
    """The adapter for the runner whose rejection sampler lives in that module of vLLM; refuse one that is not known."""
    second = module.startswith("vllm.v1.worker.gpu.")
    try:
        adapter = import_module(f"selfjudge.integrations.vllm.{'v2' if second else 'v1'}")
    except ImportError as error:  # this vLLM lacks something that the adapter uses
        unknown(first_line(error))
    adapter.check()
    return adapter.SecondRunnerAdapter if second else adapter.FirstRunnerAdapter


def takes(function: Callable[..., Any], known: Sequence[str]) -> None:
    """Refuse a function whose parameters are not the known ones."""
    parameters = [name for name in inspect.signature(function).parameters if name != "self"]
    if parameters != list(known):
        unknown(f"{function.__qualname__} takes ({', '.join(parameters)}), known is ({', '.join(known)})")


def has(thing: Any, *names: str) -> None:
    """Refuse an object that lacks one of these attributes, or a dataclass or named tuple that lacks one as a field."""
    fields = inspect.signature(thing).parameters if isinstance(thing, type) else None
    if missing := [name for name in names if not (hasattr(thing, name) if fields is None else name in fields)]:
        unknown(f"{getattr(thing, '__qualname__', type(thing).__qualname__)} has no {', '.join(missing)}")


def exactly(thing: Any, kind: type) -> None:
    """Refuse an object of another class: its methods may do something else."""
    if type(thing) is not kind:
        unknown(f"{type(thing).__qualname__} is used where {kind.__qualname__} is known")


def unknown(what: str) -> NoReturn:
    """Refuse this vLLM."""
    from vllm import __version__

    raise SelfJudgeError(
        f"this selfjudge does not know vLLM {__version__}: {what}; use a version named in docs/vllm.md, or its first"
        " model runner: VLLM_USE_V2_MODEL_RUNNER=0"
    )
