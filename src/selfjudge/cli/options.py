"""Options of the command line: each is written once, as a field of a config that declares default, meaning and range.

A command takes whole groups of options: `@config_options(LabelConfig)` gives it the options of that config, and the
command gets the built and checked config as one argument.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, fields
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
            built = config(**{name: _as_field(given.pop(name), name in commas) for name in declared})
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
    if (word := f.metadata["word"]) is not None:
        parser = Numbers(word, several=isinstance(default, tuple))
        return Annotated[Parsed, typer.Option(parser=parser, metavar=parser.metavar, help=words)]
    if hint == tuple[int, ...]:
        return Annotated[Parsed, typer.Option(parser=Numbers(), metavar="INT,INT,…", help=words)]
    if hint == tuple[int, int]:
        return Annotated[Parsed, typer.Option(parser=_parse_part, metavar="I/N", help=words)]
    if hint == tuple[str, ...]:
        return Annotated[list[str], typer.Option(metavar="NAME,NAME,…" if commas else _one(f.name), help=words)]
    bounds = {"min": low, "max": high} if hint in (int, float, int | None, float | None) else {}
    typed = str | None if hint is Any or str in get_args(hint) else hint  # other types are given by their names
    return Annotated[typed, typer.Option(help=words, **bounds)]


def _one(name: str) -> str:
    """What an option that may be repeated takes each time: PROMPT for `prompts`; TEXT for `stop`, which has no s.

    An option whose metavar differs from its name by case alone is called after the metavar by typer 0.27.
    """
    return name.upper().removesuffix("S") if name.endswith("s") else "TEXT"


def _as_option(hint: Any, value: Any) -> Any:
    """A default as it would be typed."""
    if not isinstance(value, tuple):
        return value
    if hint == tuple[int, int]:
        return "/".join(map(str, value))
    return list(value) if hint == tuple[str, ...] else ",".join(map(str, value))


def _as_field(value: Any, commas: bool) -> Any:
    if isinstance(value, Parsed):
        return value.value
    if isinstance(value, list):
        names = [name for given in value for name in (given.split(",") if commas else (given,))]
        return tuple(filter(None, map(str.strip, names))) if commas else tuple(names)
    return value


@dataclass(frozen=True)
class Parsed:
    """The value that a text on the command line stands for."""

    value: Any


@dataclass(frozen=True)
class Numbers:
    """Reads whole numbers separated by commas, or one; an empty text means none. A word may stand for a number.

    Their range is checked with the rest of the config.
    """

    word: str | None = None
    several: bool = True

    @property
    def __name__(self) -> str:  # typer before 0.26 asks for it
        return self.metavar

    @property
    def metavar(self) -> str:
        one = "INT" if self.word is None else f"INT|{self.word}"
        return f"{one},{one},…" if self.several else one

    def __call__(self, text: str) -> Parsed:
        parts = [text] if not self.several else text.split(",") if text else []
        try:
            numbers = tuple(part if part == self.word else int(part) for part in parts)
        except ValueError:
            raise typer.BadParameter(f"whole numbers are needed ({self.metavar}), not {text!r}") from None
        return Parsed(numbers if self.several else numbers[0])


def _parse_part(text: str) -> Parsed:
    """`i/n`: which part of how many."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not int(found[1]) < int(found[2]):
        raise typer.BadParameter(f"i/n with i from 0 to n − 1 is needed, such as 0/4, not {text!r}")
    return Parsed((int(found[1]), int(found[2])))
