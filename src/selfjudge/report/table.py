"""A table: plain rows, and columns that say how they are shown; the same for the page and for markdown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from selfjudge.report.records import Interval

Row = Mapping[str, Any]
LETTERS_SHOWN = 24
"""Of a token in a table."""


@dataclass(frozen=True)
class Column:
    """`small` stands smaller below what `show` says, in markdown after `joint`; both get the whole row."""

    head: str
    show: Callable[[Row], str]
    small: Callable[[Row], str] = lambda row: ""
    numeric: bool = True
    wide: bool = False
    help: str = ""
    joint: str = " "


@dataclass(frozen=True)
class Table:
    """Rows carry `task`, `method` and `rule` where they belong to one: the page's filter reads them."""

    id: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    note: str = ""

    def markdown(self) -> str:
        """As a GitHub table; cells hold no markup of their own."""
        heads = [_escaped(column.head) for column in self.columns]
        lines = [
            f"## {_escaped(self.title)}", "",
            f"| {' | '.join(heads)} |",
            f"| {' | '.join('---:' if c.numeric else '---' for c in self.columns)} |",
            *(
                f"| {' | '.join(_escaped(c.joint.join(filter(None, (c.show(row), c.small(row))))) for c in self.columns)} |"
                for row in self.rows
            ),
            "", *([_escaped(self.note), ""] if self.note else []),
        ]  # fmt: skip
        return "\n".join(lines)


def _escaped(text: str) -> str:
    """Safe inside a markdown table: no column, link, tag or emphasis comes from a result."""
    return re.sub(r"([\\|`*_\[\]<>&#])", r"\\\1", " ".join(text.split()))


def fixed(value: float | None, digits: int = 2) -> str:
    """Rounded, with a real minus and none before a zero."""
    return "–" if value is None else f"{round(value, digits) + 0.0:,.{digits}f}".replace("-", "−")


def signed(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{round(value, digits) + 0.0:+,.{digits}f}".replace("-", "−")


def points(value: float | None, digits: int = 1) -> str:
    """A share in points."""
    return fixed(None if value is None else 100 * value, digits)


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}\N{NO-BREAK SPACE}%"


def interval(value: Interval | None, show: Callable[[float], str]) -> str:
    return "" if value is None else f"[{show(value[0])}, {show(value[1])}]"


def signed_points(value: float | None) -> str:
    return signed(None if value is None else 100 * value, 1)


def slug(*parts: str) -> str:
    """A short name of letters, digits and dashes, for ids and files."""
    return "-".join(filter(None, (re.sub(r"[^a-z0-9]+", "-", part.casefold()).strip("-")[:60] for part in parts)))


def distinct(names: Iterable[str]) -> list[str]:
    """The names, those that were there before with a number."""
    seen: Counter[str] = Counter()
    made = []
    for name in names:
        seen[name] += 1
        made.append(name if seen[name] == 1 else f"{name}--{seen[name]}")
    return made


def text(value: Any) -> str:
    return "–" if value is None else str(value)


def figure(value: Any, digits: int) -> str:
    return fixed(value, digits) if isinstance(value, int | float) else text(value)


def share(value: Any) -> str:
    return percent(value) if isinstance(value, int | float) else text(value)


def quoted(token: str) -> str:
    """A token with its spaces, line ends and other invisible characters visible; long ones are cut."""
    token = token if len(token) <= LETTERS_SHOWN else token[: LETTERS_SHOWN - 1] + "…"
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in token.replace("\\", "\\\\"))
    return f"“{shown.replace(' ', '␣')}”"
