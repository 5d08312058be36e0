"""Schemas of JSON values, declared as types and checked in one place: files may come from anywhere.

A schema is a TypedDict or a dataclass; keys that it does not declare are let through. Its fields are `Any`, `None`,
`bool`, `int`, `float` (finite), `str`, `Literal`, lists, tuples, dictionaries, unions and other schemas, narrowed
with `Annotated[…, Range | OneOf | Pattern]`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from itertools import count, repeat
from math import isfinite
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

from selfjudge.errors import SelfJudgeError

LARGEST = 1e15
"""The largest number that a file may hold: sums and products of many stay finite."""
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
            raise _mismatch(bounds, value)


@dataclass(frozen=True)
class OneOf:
    """One of these texts."""

    choices: tuple[str, ...]

    def __call__(self, value: Any) -> None:
        if value not in self.choices:
            raise _mismatch(_alternatives(self.choices), value)


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

    def __init__(self, what: str, path: str = "") -> None:
        self.what, self.path = what, path

    def inside(self, key: int | str) -> _Mismatch:
        label = f"[{key}]" if isinstance(key, int) else key
        joined = "." if label and self.path and not self.path.startswith("[") else ""
        self.path = f"{label}{joined}{self.path}"
        return self


def _mismatch(should: str, value: Any) -> _Mismatch:
    return _Mismatch(f"must be {should}, not {_shown(value)}")


def conform(value: Any, schema: Any, where: Any) -> Any:
    """The value, if it is what the schema says; else an error that names the file or line `where` and the key."""
    try:
        _checker(schema)(value)
    except _Mismatch as wrong:
        key = f'"{wrong.path[:80]}"' if wrong.path else "it"
        raise SelfJudgeError(f"{where} is not {name_of(schema)}: {key} {wrong.what}") from None
    return value


def name_of(schema: Any) -> str:
    """The name of a schema in errors: `LabelManifest` is a label manifest."""
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
    if origin in (list, tuple):
        return _list(inside)
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
            raise _mismatch("a finite number, at most 1e15 in size" if large else _kind_name(kind), value)

    return check


def _all_of(checks: list[Check]) -> Check:
    def check(value: Any) -> None:
        for each in checks:
            each(value)

    return check


def _any_of(kinds: tuple[Any, ...]) -> Check:
    others = [kind for kind in kinds if kind is not NoneType]
    checks = [_checker(kind) for kind in others]

    def check(value: Any) -> None:
        if value is None and len(others) < len(kinds):
            return None
        for each in checks:
            try:
                return each(value)
            except _Mismatch:
                if len(checks) == 1:
                    raise
        raise _mismatch(" or ".join(map(_kind_name, kinds)), value)

    return check


def _literal(choices: tuple[Any, ...]) -> Check:
    known = {(type(choice), choice) for choice in choices}

    def check(value: Any) -> None:
        if type(value) not in (str, int, bool, NoneType) or (type(value), value) not in known:
            raise _mismatch(_alternatives(choices), value)

    return check


def _each(parts: Callable[[Any], Iterator[tuple[int | str, Check, Any]]]) -> Check:
    """Check the parts of a value, each given as (key, check, part); errors name the key."""

    def check(value: Any) -> None:
        for key, inner, part in parts(value):
            try:
                inner(part)
            except _Mismatch as wrong:
                raise wrong.inside(key) from None

    return check


def _list(kinds: tuple[Any, ...]) -> Check:
    """Check a list or `tuple[X, ...]`, whose items are of one kind, or a tuple of fixed length."""
    checks = [_checker(kind) for kind in kinds if kind is not Ellipsis]
    fixed = len(checks) > 1

    def parts(value: Any) -> Iterator[tuple[int, Check, Any]]:
        if type(value) not in (list, tuple) or (fixed and len(value) != len(checks)):
            raise _mismatch(f"a list of {len(checks)}" if fixed else "a list", value)
        return zip(count(), checks if fixed else repeat(checks[0]), value, strict=False)

    return _each(parts)


def _mapping(keys: Any, values: Any) -> Check:
    of_key, of_value = _checker(keys), _checker(values)

    def parts(value: Any) -> Iterator[tuple[str, Check, Any]]:
        if type(value) is not dict:
            raise _mismatch("an object", value)
        for key, item in value.items():
            yield str(key), of_key, key
            yield str(key), of_value, item

    return _each(parts)


def _record(schema: Any) -> Check:
    """Check a TypedDict or a dataclass: fields with a default, or not required, may be missing."""
    hints = get_type_hints(schema, include_extras=True)
    if is_dataclass(schema):
        optional = {f.name for f in fields(schema) if f.default is not MISSING or f.default_factory is not MISSING}
    else:
        optional = {name for name, kind in hints.items() if get_origin(kind) is NotRequired or not schema.__total__}
    checks = {name: _checker(kind) for name, kind in hints.items()}

    def parts(value: Any) -> Iterator[tuple[str, Check, Any]]:
        if type(value) is not dict:
            raise _mismatch("an object", value)
        for name, inner in checks.items():
            if name in value:
                yield name, inner, value[name]
            elif name not in optional:
                raise _Mismatch("is missing", name)

    return _each(parts)


def _kind_name(kind: Any) -> str:
    """The name of a kind of value: `int` is a whole number."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Annotated, NotRequired):
        return _kind_name(inside[0])
    if origin is Literal:
        return _alternatives(inside)
    if origin in (list, tuple) or kind is list:
        return "a list"
    names = {NoneType: "null", bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    return names.get(kind, "an object")


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
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value!r:.40}"
