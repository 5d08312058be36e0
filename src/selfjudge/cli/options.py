"""Options of the command line: each is written once, as a field of a config that declares default, meaning and range.

A command takes whole groups of options: a parameter `config: LabelConfig` gives it the options of that config, and the
command gets the built and checked config. One that yields its result has the option --json, which prints it and ends
the command there; without it the command goes on, and prints the result for people.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import typer

from selfjudge.cli.output import print_json
from selfjudge.types import check_settings

KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Data = Annotated[Path | None, typer.Option(help="Folder of the benchmarks' files; SELFJUDGE_DATA if not given.")]
Result = Iterator[Any]  # what a command yields: --json prints it
Resume = Annotated[bool, typer.Option("--resume", help="Continue what was begun in --out.")]


@dataclass(frozen=True)
class Options:
    """Which options a command takes of a config: `config: Annotated[LabelConfig, Options(without=("backend",))]`."""

    without: tuple[str, ...] = ()
    commas: tuple[str, ...] = ()  # fields whose names may be separated by commas as well as given one by one


def with_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command as typer reads it: every parameter that is a config is replaced by the options which it declares.

    Each field made by `types.setting` is an option of its own name, default, help and range."""
    parameters: list[inspect.Parameter] = []
    configs: dict[str, tuple[Any, Options]] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        config, *asked = get_args(parameter.annotation) or (parameter.annotation,)
        if is_dataclass(config):
            configs[parameter.name] = config, asked[0] if asked else Options()
            for f, hint, commas in _declared(*configs[parameter.name]):
                default = None if f.default is MISSING else f.default
                annotation, typed = _annotated(f, hint, default, commas), _as_option(hint, default)
                parameters.append(inspect.Parameter(f.name, KEYWORD_ONLY, default=typed, annotation=annotation))
        else:
            parameters.append(parameter.replace(kind=KEYWORD_ONLY))
    yields = inspect.isgeneratorfunction(command)
    if yields:
        parameters.append(inspect.Parameter("as_json", KEYWORD_ONLY, default=False, annotation=AsJson))

    def wrapped(**given: Any) -> None:
        built, as_json = {}, yields and given.pop("as_json")
        for argument, (config, asked) in configs.items():
            declared = _declared(config, asked)
            values = {f.name: _parse(f, hint, given.pop(f.name), commas) for f, hint, commas in declared}
            built[argument] = one = config(**values)
            one.check() if hasattr(one, "check") else check_settings(one)
        for result in command(**built, **given) or ():
            if as_json:
                print_json(result)
                break

    wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapped


def _declared(config: Any, asked: Options) -> list[tuple[Field[Any], Any, bool]]:
    """The fields that are options, each with its type and whether commas part its names."""
    hints, declared = get_type_hints(config), [f for f in fields(config) if "help" in f.metadata]
    return [(f, hints[f.name], f.name in asked.commas) for f in declared if f.name not in asked.without]


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
