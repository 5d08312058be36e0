"""Schemas of JSON values, declared as types and checked in one place: files may come from anywhere.
A schema is a TypedDict or a dataclass; keys that it does not declare are let through. Fields are `Any`, `None`,
`bool`, `int`, `float` (finite), `str`, `Literal`, lists, tuples, dictionaries, unions and other schemas, narrowed with
`Annotated[…, Range | Pattern]`; `Annotated[str, Literal[…]]` is a choice whose type is `str` elsewhere.
`formats.json` declares those of files that runs write, by key: type and meaning. `?` marks keys that may be absent."""

import json
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from itertools import count, repeat
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

from selfjudge.errors import SelfJudgeError

LARGEST = 1e15  # the largest number that a file may hold: sums and products of many stay finite
RECORD = "record"  # stands for TypedDicts and dataclasses
TYPES: dict[Any, tuple[str, tuple[type, ...], float | None]] = {
    NoneType: ("null", (NoneType,), None),
    bool: ("true or false", (bool,), None),
    int: ("a whole number", (int,), 2**63 - 1),
    float: ("a number", (int, float), LARGEST),
    str: ("a text", (str,), None),
    **dict.fromkeys((list, tuple), ("a list", (list, tuple), None)),
    **dict.fromkeys((dict, Mapping, RECORD), ("an object", (dict,), None)),
}
"""Of each kind of value its name, the types that it may have, and its largest size."""

Plan = tuple[Any, Any]  # a kind of value as `_plan` describes it


@dataclass(frozen=True)
class Range:
    """A number of at least `low` and at most `high`."""

    low: float
    high: float = LARGEST

    def __call__(self, value: Any) -> None:
        if not self.low <= value <= self.high:
            bounds = f"at least {self.low}" if self.high == LARGEST else f"from {self.low} to {self.high}"
            raise _mismatch(bounds, value)


@dataclass(frozen=True)
class Pattern:
    """A text that a regular expression matches as a whole; `name` says what it is."""

    expression: str
    name: str

    def __call__(self, value: Any) -> None:
        if not re.fullmatch(self.expression, value):
            raise _mismatch(self.name, value)


class _Mismatch(Exception):  # noqa: N818 (it never leaves this module)
    """A value that is not what its schema says; `path` is filled in from the inside out."""

    def __init__(self, what: str, *path: int | str) -> None:
        self.what, self.path = what, path

    def __str__(self) -> str:
        steps = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.path)
        key = "".join(steps).removeprefix(".")[:80]
        return f'"{key}" {self.what}' if key else f"it {self.what}"


def _mismatch(should: str, value: Any) -> _Mismatch:
    return _Mismatch(f"must be {should}, not {_shown(value)}")


def conform(value: Any, schema: Any, where: Any) -> Any:
    """The value, if it is what the schema says; else an error that names the file or line `where` and the key."""
    try:
        _check(value, _plan(schema))
    except _Mismatch as wrong:
        name = _kind_name(_plan(schema))
        if is_typeddict(schema) or is_dataclass(schema):  # `LabelManifest` is a label manifest
            words = re.sub(r"(?<!^)(?=[A-Z])", " ", schema.__name__).lower()
            name = f"{'an' if words[0] in 'aeio' else 'a'} {words}"
        raise SelfJudgeError(f"{where} is not {name}: {wrong}") from None
    return value


@cache
def _plan(kind: Any) -> Plan:
    """The outside and the inside of a kind: `list[int]` is a list of (int,), a record a dictionary of its fields."""
    if is_typeddict(kind) or is_dataclass(kind):
        hints = get_type_hints(kind, include_extras=True)
        optional = {name for name, hint in hints.items() if get_origin(hint) is NotRequired}
        for f in fields(kind) if is_dataclass(kind) else ():
            if (f.default, f.default_factory) != (MISSING, MISSING):
                optional.add(f.name)
        return RECORD, {name: (_plan(hint), name in optional) for name, hint in hints.items()}
    origin, inside = get_origin(kind) or kind, get_args(kind)
    if origin is NotRequired:
        return _plan(inside[0])
    if origin is Annotated and get_origin(inside[1]) is Literal:
        return _plan(inside[1])
    if origin is Annotated:
        return origin, (_plan(inside[0]), *filter(callable, inside[1:]))
    return Union if origin is UnionType else origin, inside if origin is Literal else tuple(map(_plan, inside))


def _check(value: Any, plan: Plan) -> None:
    """Raise a `_Mismatch` where the value is not what the plan says."""
    origin, inside = plan
    if origin is Any:
        return
    if origin is Annotated:
        _check(value, inside[0])
        for limit in inside[1:]:
            limit(value)
    elif origin is Literal:
        if not any(type(value) is type(choice) and value == choice for choice in inside):
            raise _mismatch(_alternatives(inside), value)
    elif origin is Union:
        _check_union(value, inside)
    else:
        name, types, largest = TYPES[origin]
        if type(value) not in types:
            raise _mismatch(name, value)
        if largest is not None and not abs(value) <= largest:
            raise _mismatch("a finite number, at most 1e15 in size", value)
        for key, part, its_plan in _parts(value, origin, inside) if inside else ():
            try:
                _check(part, its_plan)
            except _Mismatch as wrong:
                raise _Mismatch(wrong.what, key, *wrong.path) from None


def _check_union(value: Any, plans: tuple[Plan, ...]) -> None:
    others = [plan for plan in plans if plan[0] is not NoneType]
    if value is None and len(others) < len(plans):
        return None
    for plan in others:
        try:
            return _check(value, plan)
        except _Mismatch:
            if len(others) == 1:
                raise
    raise _mismatch(" or ".join(map(_kind_name, plans)), value)


def _parts(value: Any, origin: Any, inside: Any) -> Iterator[tuple[int | str, Any, Any]]:
    """The parts of a list or an object: each one's key, itself, and the plan of the kind that it must be."""
    if origin is RECORD:
        for name, (plan, optional) in inside.items():
            if name in value:
                yield name, value[name], plan
            elif not optional:
                raise _Mismatch("is missing", name)
    elif origin in (list, tuple):
        fixed = len(inside) > 1 and inside[1][0] is not Ellipsis
        if fixed and len(value) != len(inside):
            raise _mismatch(f"a list of {len(inside)}", value)
        yield from zip(count(), value, inside if fixed else repeat(inside[0]), strict=False)
    else:
        for key, item in value.items():
            yield str(key), key, inside[0]
            yield str(key), item, inside[1]


def _kind_name(plan: Plan) -> str:
    """The name of a kind of value: `int` is a whole number."""
    origin, inside = plan
    if origin is Annotated:
        return _kind_name(inside[0])
    return _alternatives(inside) if origin is Literal else TYPES[origin][0]


def _alternatives(choices: tuple[Any, ...]) -> str:
    return " or ".join(map(_shown, choices))


def _shown(value: Any) -> str:
    """A value as JSON has it, short."""
    if isinstance(value, dict):
        return "an object" if value else "{}"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}" if value else "[]"
    if isinstance(value, str):
        return f'"{value}"' if len(value) <= 40 else f'"{value[:40]}…"'
    return json.dumps(value, default=repr)[:40]


Count = Annotated[int, Range(0)]
Share = Annotated[float, Range(0, 1)]
Score = Annotated[float, Range(-1, 1)]  # factual consistency may be negative
Difference = Annotated[float, Range(-2, 2)]
Amount = Annotated[float, Range(0)]
SmallCount = Annotated[int, Range(1, 1 << 20)]
HeadCount = Annotated[int, Range(1, 1 << 16)]
HeadDim = Annotated[int, Range(2, 1 << 16)]
VocabSize = Annotated[int, Range(1, 1 << 31)]
SuffixLength = Annotated[int, Range(0, 1 << 16)]
GammaLength = Annotated[int, Range(0, 1000)]
PositiveGamma = Annotated[int, Range(1, 1000)]
Sha256 = Annotated[str, Pattern("[0-9a-f]{64}", "a sha256")]
PromptKey = Annotated[str, Pattern("[0-9a-f]{16}", "16 digits of a sha256")]
OriginLetters = Annotated[str, Pattern("[djt]*", "letters of origins")]
_NAME = r"[A-Za-z0-9_][\w.~-]{0,200}"
FileName = Annotated[str, Pattern(_NAME, "the name of a file in this folder")]
SealedFile = Annotated[str, Pattern(f"(work/)?{_NAME}", "the name of a file in this folder")]
TaskLabel = Annotated[str, Pattern(r"[^./\\\x00-\x1f][^/\\\x00-\x1f]{0,200}", "the name of a task")]
Packed = Annotated[str, Pattern("[0-9*. -]*", "numbers, such as '466*0 1 -0.25'")]
InnerPath = Annotated[str, Pattern(f"{_NAME}(/{_NAME})*", "a path in this folder")]


def read_formats() -> dict[str, dict[str, tuple[str, bool, str]]]:
    """Schema → key → its type, whether it may be absent, and what it means; `extends` adds the keys of another."""
    formats: dict[str, dict[str, tuple[str, bool, str]]] = {}
    declared = json.loads(Path(__file__).with_name("formats.json").read_text("utf-8"))
    for name, schema in declared.items():
        formats[name] = dict(formats[schema["extends"]]) if "extends" in schema else {}
        for key, about in schema["keys"].items():
            kind, _, meaning = about.partition(": ")
            formats[name][key.removesuffix("?")] = kind, key.endswith("?"), meaning
    return formats


for _schema, _keys in read_formats().items():
    kinds = {key: f"NotRequired[{kind}]" if optional else kind for key, (kind, optional, _) in _keys.items()}
    globals()[_schema] = typing.TypedDict(_schema, kinds)  # type: ignore[operator]

if typing.TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """The schemas of formats.json."""
