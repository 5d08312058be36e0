"""What a JSON value must be, declared as a type and checked in one place: files may come from anywhere.

A schema is a TypedDict or a dataclass; keys that it does not declare are let through. Its fields are `Any`, `None`,
`bool`, `int`, `float` (finite), `str`, `Literal`, lists, tuples, dictionaries, unions and other schemas, narrowed
with `Annotated[…, Range | OneOf | Pattern]`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from math import isfinite
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

from selfjudge.errors import SelfJudgeError

LARGEST = 1e15
"""Of a measured number; sums and products of many stay finite."""
LARGEST_INT = 2**63 - 1

Check = Callable[[Any], None]


@dataclass(frozen=True)
class Range:
    """A number of at least `low` and at most `high`."""

    low: float
    high: float = LARGEST

    def __call__(self, value: Any) -> None:
        if not self.low <= value <= self.high:
            bounds = f"at least {self.low}" if self.high == LARGEST else f"from {self.low} to {self.high}"
            raise _Mismatch(bounds, value)


@dataclass(frozen=True)
class OneOf:
    """One of these texts."""

    choices: tuple[str, ...]

    def __call__(self, value: Any) -> None:
        if value not in self.choices:
            raise _Mismatch(" or ".join(map(_shown, self.choices)), value)


@dataclass(frozen=True)
class Pattern:
    """A text that a regular expression matches as a whole; `name` says what it is."""

    expression: str
    name: str

    def __call__(self, value: Any) -> None:
        if not re.fullmatch(self.expression, value):
            raise _Mismatch(self.name, value)


class _Mismatch(Exception):  # noqa: N818 (it never leaves this module)
    """A value that is not what its schema says; `path` is filled in from the inside out."""

    def __init__(self, should: str, value: Any) -> None:
        self.what = f"must be {should}, not {_shown(value)}"
        self.path = ""

    def inside(self, key: str) -> _Mismatch:
        joined = "" if self.path.startswith("[") or not self.path or not key else "."
        self.path = f"{key}{joined}{self.path}"
        return self


class _Missing(_Mismatch):
    def __init__(self, key: str) -> None:
        self.what, self.path = "is missing", key


def conform(value: Any, schema: Any, where: Any) -> Any:
    """The value, if it is what the schema says; else an error that names the file or line `where` and the key."""
    try:
        _checker(schema)(value)
    except _Mismatch as wrong:
        key = f'"{wrong.path[:80]}"' if wrong.path else "it"
        raise SelfJudgeError(f"{where} is not {name_of(schema)}: {key} {wrong.what}") from None
    return value


def name_of(schema: Any) -> str:
    """What a schema is called in errors: `LabelManifest` is a label manifest."""
    if get_origin(schema) is not None or schema.__module__ == "builtins":
        return _kind_name(schema)
    words = re.sub(r"(?<!^)(?=[A-Z])", " ", schema.__name__).lower()
    return f"{'an' if words[0] in 'aeio' else 'a'} {words}"


@cache
def _checker(kind: Any) -> Check:
    """The function that refuses values of another kind."""
    origin, inside = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda value: None
    if origin is Annotated:
        return _all_of([_checker(inside[0]), *(about for about in inside[1:] if callable(about))])
    if origin is NotRequired:
        return _checker(inside[0])
    if origin is Literal:
        return _literal(inside)
    if origin in (Union, UnionType):
        return _any_of(inside)
    if is_typeddict(kind) or is_dataclass(kind):
        return _record(kind)
    if origin is tuple and inside[-1] is not Ellipsis:
        return _fixed(inside)
    if origin in (list, tuple):
        return _list(inside[0])
    if (origin or kind) in (dict, Mapping):
        return _mapping(*(inside or (str, Any)))
    return _simple(kind)


def _simple(kind: Any) -> Check:
    accepts: Callable[[Any], bool] = {
        NoneType: lambda value: value is None,
        bool: lambda value: type(value) is bool,
        str: lambda value: type(value) is str,
        int: lambda value: type(value) is int and abs(value) <= LARGEST_INT,
        float: lambda value: type(value) in (int, float) and isfinite(value) and abs(value) <= LARGEST,
        list: lambda value: type(value) is list,
    }[kind]

    def check(value: Any) -> None:
        if not accepts(value):
            large = type(value) is kind and kind in (int, float)
            raise _Mismatch("a finite number, at most 1e15 in size" if large else _kind_name(kind), value)

    return check


def _all_of(checks: Iterable[Check]) -> Check:
    every = tuple(checks)

    def check(value: Any) -> None:
        for one in every:
            one(value)

    return check


def _any_of(kinds: tuple[Any, ...]) -> Check:
    others = tuple(kind for kind in kinds if kind is not NoneType)
    checks = tuple(_checker(kind) for kind in others)

    def check(value: Any) -> None:
        if value is None and len(others) < len(kinds):
            return None
        for one in checks:
            try:
                return one(value)
            except _Mismatch:
                if len(checks) == 1:
                    raise
        raise _Mismatch(" or ".join(_kind_name(kind) for kind in kinds), value)

    return check


def _literal(choices: tuple[Any, ...]) -> Check:
    known = {(type(choice), choice) for choice in choices}

    def check(value: Any) -> None:
        if type(value) not in (str, int, bool, NoneType) or (type(value), value) not in known:
            raise _Mismatch(" or ".join(map(_shown, choices)), value)

    return check


def _list(kind: Any) -> Check:
    inner = _checker(kind)

    def check(value: Any) -> None:
        if type(value) not in (list, tuple):
            raise _Mismatch("a list", value)
        for number, item in enumerate(value):
            try:
                inner(item)
            except _Mismatch as wrong:
                raise wrong.inside(f"[{number}]") from None

    return check


def _fixed(kinds: tuple[Any, ...]) -> Check:
    checks = tuple(map(_checker, kinds))

    def check(value: Any) -> None:
        if type(value) not in (list, tuple) or len(value) != len(checks):
            raise _Mismatch(f"a list of {len(checks)}", value)
        for number, (one, item) in enumerate(zip(checks, value, strict=True)):
            try:
                one(item)
            except _Mismatch as wrong:
                raise wrong.inside(f"[{number}]") from None

    return check


def _mapping(keys: Any, values: Any) -> Check:
    of_key, of_value = _checker(keys), _checker(values)

    def check(value: Any) -> None:
        if type(value) is not dict:
            raise _Mismatch("an object", value)
        for key, item in value.items():
            try:
                of_key(key)
                of_value(item)
            except _Mismatch as wrong:
                raise wrong.inside(str(key)) from None

    return check


def _record(schema: Any) -> Check:
    """Of a TypedDict or a dataclass: fields with a default, or not required, may be missing."""
    hints = get_type_hints(schema, include_extras=True)
    if is_dataclass(schema):
        optional = {f.name for f in fields(schema) if f.default is not MISSING or f.default_factory is not MISSING}
    else:
        optional = {name for name, kind in hints.items() if get_origin(kind) is NotRequired or not schema.__total__}
    checks = {name: _checker(kind) for name, kind in hints.items()}

    def check(value: Any) -> None:
        if type(value) is not dict:
            raise _Mismatch("an object", value)
        for name, one in checks.items():
            if name in value:
                try:
                    one(value[name])
                except _Mismatch as wrong:
                    raise wrong.inside(name) from None
            elif name not in optional:
                raise _Missing(name)

    return check


def _kind_name(kind: Any) -> str:
    """What a kind of value is called: `int` is a whole number."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Annotated, NotRequired):
        return _kind_name(inside[0])
    if origin is Literal:
        return " or ".join(map(_shown, inside))
    if origin in (list, tuple) or kind is list:
        return "a list"
    names = {NoneType: "null", bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    return names.get(kind, "an object")


def _shown(value: Any) -> str:
    """A value as JSON has it, short."""
    if isinstance(value, dict):
        return "an object" if value else "{}"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}" if value else "[]"
    if isinstance(value, str):
        return f'"{value}"' if len(value) <= 40 else f'"{value[:40]}…"'
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value!r:.40}"
