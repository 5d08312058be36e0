"""A table: plain rows, and columns that say how they are shown; the same for the page and for Markdown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from selfjudge.store import markdown_table

Row = Mapping[str, Any]
LETTERS_SHOWN = 24
"""Maximum number of letters of a token in a table."""


def show_text(value: Any) -> str:
    return "–" if value is None or value == "" else str(value)


@dataclass(frozen=True)
class Column:
    """`form` shows the row's `value`: a key, or a function of the row.

    `below` is shown smaller under it, in Markdown after `joint`: the key of an interval, or a function of the row.
    """

    head: str
    value: str | Callable[[Row], Any]
    form: Callable[[Any], str] = show_text
    below: str | Callable[[Row], str] = ""
    help: str = ""
    numeric: bool = True
    wide: bool = False
    joint: str = " "

    def show(self, row: Row) -> str:
        return self.form(row[self.value] if isinstance(self.value, str) else self.value(row))

    def small(self, row: Row) -> str:
        if not isinstance(self.below, str):
            return self.below(row)
        return show_interval(row[self.below], self.form) if self.below else ""


def word_column(head: str, value: str | Callable[[Row], Any], **more: Any) -> Column:
    """A column of words, not of numbers."""
    return Column(head, value, numeric=False, **more)


@dataclass(frozen=True)
class Table:
    """Rows have the keys `task`, `method` and `rule` where they belong to one: the page's filter reads them."""

    id: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    note: str = ""

    def markdown(self) -> str:
        """As a GitHub table; cells hold no markup of their own."""

        def cell(column: Column, row: Row) -> str:
            return _escape(column.joint.join(filter(None, (column.show(row), column.small(row)))))

        table = markdown_table(
            [_escape(column.head) for column in self.columns],
            ([cell(column, row) for column in self.columns] for row in self.rows),
            "".join("r" if column.numeric else "l" for column in self.columns),
        )
        note = f"\n{_escape(self.note)}\n" if self.note else ""
        return f"## {_escape(self.title)}\n\n{table}\n{note}"


def _escape(text: str) -> str:
    """Safe inside a Markdown table: no column, link, tag or emphasis comes from a result."""
    return re.sub(r"([\\|`*_\[\]<>&#])", r"\\\1", " ".join(text.split()))


def show_interval(ends: Any, form: Callable[[Any], str]) -> str:
    return "" if ends is None else f"[{form(ends[0])}, {form(ends[1])}]"


def fixed(value: Any, digits: int = 2, sign: str = "") -> str:
    """Rounded, with a real minus and none before a zero; a value that is not a number is shown as text."""
    if not isinstance(value, int | float):
        return show_text(value)
    return f"{round(value, digits) + 0.0:{sign},.{digits}f}".replace("-", "−")


def whole(value: Any) -> str:
    return fixed(value, 0)


def tenths(value: Any) -> str:
    return fixed(value, 1)


def thousandths(value: Any) -> str:
    return fixed(value, 3)


def signed(value: Any, digits: int = 2) -> str:
    return fixed(value, digits, "+")


def points(value: float | None) -> str:
    """A share in points."""
    return fixed(None if value is None else 100 * value, 1)


def signed_points(value: float | None) -> str:
    return signed(None if value is None else 100 * value, 1)


def percent(value: Any) -> str:
    return f"{100 * value:.1f}\N{NO-BREAK SPACE}%" if isinstance(value, int | float) else show_text(value)


def gain(ratio: float | None) -> str:
    """A ratio as a change in per cent: 1.05 is +5.0 %."""
    return "–" if ratio is None else f"{fixed(100 * (ratio - 1), 1, '+')} %"


def quote_token(token: str) -> str:
    """A token with its spaces, line ends and other invisible characters visible; long ones are cut."""
    token = token if len(token) <= LETTERS_SHOWN else token[: LETTERS_SHOWN - 1] + "…"
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in token.replace("\\", "\\\\"))
    return f"“{shown.replace(' ', '␣')}”"


def slug(*parts: str) -> str:
    """A short name of letters, digits and dashes, for ids and files."""
    return "-".join(filter(None, (re.sub(r"[^a-z0-9]+", "-", part.casefold()).strip("-")[:60] for part in parts)))


def number_repeats(names: Iterable[str]) -> list[str]:
    """The names; those that occurred before get a number."""
    seen: Counter[str] = Counter()
    numbered = []
    for name in names:
        seen[name] += 1
        numbered.append(name if seen[name] == 1 else f"{name}--{seen[name]}")
    return numbered


RULE = word_column("rule", "rule")
GAMMA = Column("γ", "gamma")
AGREEMENT = Column(
    "same answer", "agreement", percent, "agreement_ci", "as exact; of open tasks the share of matching words"
)
