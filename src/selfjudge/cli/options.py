"""Options of the command line: those that mean the same everywhere, and those that a config declares."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any, get_type_hints

import typer


def config_options(
    config: type, *, without: tuple[str, ...] = (), **defaults: Any
) -> Callable[[Callable[..., Any]], Any]:
    """Give a command the options that a config declares; it gets the built and checked config as its argument `config`.

    Every field made by `types.setting` becomes an option of its own name, default, help and range, unless it is in
    `without`. `defaults` are for fields whose default the command line chooses otherwise.
    """
    hints = get_type_hints(config)
    declared = {f.name: f for f in fields(config) if "help" in f.metadata and f.name not in without}

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(command, eval_str=True)
        parameters = [p for p in own.parameters.values() if p.name != "config"]

        def wrapped(**given: Any) -> Any:
            values = {name: _as_field(given.pop(name)) for name in declared}
            return command(config=config(**values), **given)

        for name, f in declared.items():
            kind = inspect.Parameter.KEYWORD_ONLY
            default = defaults.get(name, None if f.default is MISSING else f.default)
            parameters.append(
                inspect.Parameter(name, kind, default=_as_option(default), annotation=_annotated(hints[name], f))
            )
        wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
        wrapped.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
        )
        wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapped

    return decorate


def _annotated(hint: Any, f: Field[Any]) -> Any:
    low, high = f.metadata["minimum"], f.metadata["maximum"]
    number = hint in (int, float, int | None, float | None)
    bounds = {"min": low, "max": high} if number else {}
    words = f.metadata["help"]
    if f.metadata["choices"]:
        words = f"{words.rstrip('.')}: {', '.join(f.metadata['choices'])}."
    return Annotated[list[str] | None if hint == tuple[str, ...] else hint, typer.Option(help=words, **bounds)]


def _as_option(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _as_field(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
