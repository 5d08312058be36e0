"""Options of the command line: each is written once, as a field of a config that declares default, meaning and range.

A command takes whole groups of options: `@config_options(LabelConfig)` gives it the options of that config, and the
command gets the built and checked config as one argument.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import typer

from selfjudge.types import check_settings

KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Data = Annotated[Path | None, typer.Option(help="Folder of the benchmarks' files; SELFJUDGE_DATA if not given.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue what was begun in --out.")]


def config_options(
    config: type, argument: str = "config", *, without: Sequence[str] = (), commas: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Any]:
    """Give a command the options that a config declares; it gets the built and checked config as its `argument`.

    Every field made by `types.setting` becomes an option of its own name, default, help and range, unless it is in
    `without`. Names of a field in `commas` may be separated by commas as well as given by repeating the option.
    """
    hints = get_type_hints(config)
    declared = {f.name: f for f in fields(config) if "help" in f.metadata and f.name not in without}

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(command, eval_str=True)
        parameters = [p for p in own.parameters.values() if p.name != argument]

        def wrapped(**given: Any) -> Any:
            values = {n: _parse(f, hints[n], given.pop(n), n in commas) for n, f in declared.items()}
            built = config(**values)
            built.check() if hasattr(built, "check") else check_settings(built)
            return command(**{argument: built}, **given)

        for name, f in declared.items():
            default = None if f.default is MISSING else f.default
            annotation = _annotated(f, hints[name], default, name in commas)
            typed = _as_option(hints[name], default)
            parameters.append(inspect.Parameter(name, KEYWORD_ONLY, default=typed, annotation=annotation))
        wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
        wrapped.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [p.replace(kind=KEYWORD_ONLY) for p in parameters]
        )
        wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapped

    return decorate


def _annotated(f: Field[Any], hint: Any, default: Any, commas: bool) -> Any:
    """The annotated type that typer reads for a field."""
    words, low, high = (f.metadata[key] for key in ("help", "minimum", "maximum"))
    words = f"{words.removesuffix('.')}."
    if f.metadata["choices"] and hint != tuple[str, ...]:
        choice: Any = Literal[tuple(f.metadata["choices"])]
        return Annotated[choice | None if default is None else choice, typer.Option(help=words)]
    if hint is bool and not default:
        return Annotated[bool, typer.Option(f"--{f.name.replace('_', '-')}", help=words)]
    if metavar := _numbers(f, hint):
        return Annotated[str | None if default is None else str, typer.Option(metavar=metavar, help=words)]
    if hint == tuple[str, ...]:
        # typer 0.27 would call an option after a metavar that differs from its name by case alone
        one = f.name.upper().removesuffix("S") if f.name.endswith("s") else "TEXT"
        return Annotated[list[str], typer.Option(metavar="NAME,NAME,…" if commas else one, help=words)]
    bounds = {"min": low, "max": high} if hint in (int, float, int | None, float | None) else {}
    typed = str | None if hint is Any or str in get_args(hint) else hint  # other types are given by their names
    return Annotated[typed, typer.Option(help=words, **bounds)]


def _numbers(f: Field[Any], hint: Any) -> str:
    """What an option of several whole numbers takes, or of one that a word may stand for; empty for other options."""
    one = f"INT|{f.metadata['word']}" if f.metadata["word"] else "INT"
    if isinstance(f.default, tuple) and hint != tuple[str, ...]:
        return f"{one},{one},…"
    return one if f.metadata["word"] else ""


def _as_option(hint: Any, value: Any) -> Any:
    """A default as it would be typed."""
    if not isinstance(value, tuple):
        return value
    return list(value) if hint == tuple[str, ...] else ",".join(map(str, value))


def _parse(f: Field[Any], hint: Any, value: Any, commas: bool) -> Any:
    """The value of a field from what was typed; the range of numbers is checked with the rest of the config."""
    if isinstance(value, list):
        names = [name for given in value for name in (given.split(",") if commas else (given,))]
        return tuple(filter(None, map(str.strip, names))) if commas else tuple(names)
    if value is None or not (metavar := _numbers(f, hint)):
        return value
    several = isinstance(f.default, tuple)
    texts = [value] if not several else value.split(",") if value else []
    try:
        numbers = tuple(text if text == f.metadata["word"] else int(text) for text in texts)
    except ValueError:
        needed, option = f"whole numbers are needed ({metavar})", f"'--{f.name.replace('_', '-')}'"
        raise typer.BadParameter(f"{needed}, not {value!r}", param_hint=option) from None
    return numbers if several else numbers[0]
