"""A table: plain rows, and columns that say how they are shown; the same for the page and for markdown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from selfjudge.store import markdown_table

Row = Mapping[str, Any]
LETTERS_SHOWN = 24
"""Of a token in a table."""


def text(value: Any) -> str:
    return "–" if value is None or value == "" else str(value)


@dataclass(frozen=True)
class Column:
    """`form` shows the row's `value`: a key, or a function of the row.

    `below` stands smaller under it, in markdown after `joint`: the key of an interval, or a function of the row.
    """

    head: str
    value: str | Callable[[Row], Any]
    form: Callable[[Any], str] = text
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
        ends = row[self.below] if self.below else None
        return "" if ends is None else f"[{self.form(ends[0])}, {self.form(ends[1])}]"


def word_column(head: str, value: str | Callable[[Row], Any], **more: Any) -> Column:
    """A column of words, not of numbers."""
    return Column(head, value, numeric=False, **more)


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

        def cell(column: Column, row: Row) -> str:
            return _escaped(column.joint.join(filter(None, (column.show(row), column.small(row)))))

        table = markdown_table(
            [_escaped(column.head) for column in self.columns],
            ([cell(column, row) for column in self.columns] for row in self.rows),
            "".join("r" if column.numeric else "l" for column in self.columns),
        )
        note = f"\n{_escaped(self.note)}\n" if self.note else ""
        return f"## {_escaped(self.title)}\n\n{table}\n{note}"


def _escaped(text: str) -> str:
    """Safe inside a markdown table: no column, link, tag or emphasis comes from a result."""
    return re.sub(r"([\\|`*_\[\]<>&#])", r"\\\1", " ".join(text.split()))


def fixed(value: Any, digits: int = 2, sign: str = "") -> str:
    """Rounded, with a real minus and none before a zero; what is not a number as text."""
    if not isinstance(value, int | float):
        return text(value)
    return f"{round(value, digits) + 0.0:{sign},.{digits}f}".replace("-", "−")


def whole(value: Any) -> str:
    return fixed(value, 0)


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
    return f"{100 * value:.1f}\N{NO-BREAK SPACE}%" if isinstance(value, int | float) else text(value)


def quoted(token: str) -> str:
    """A token with its spaces, line ends and other invisible characters visible; long ones are cut."""
    token = token if len(token) <= LETTERS_SHOWN else token[: LETTERS_SHOWN - 1] + "…"
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in token.replace("\\", "\\\\"))
    return f"“{shown.replace(' ', '␣')}”"


def slug(*parts: str) -> str:
    """A short name of letters, digits and dashes, for ids and files."""
    return "-".join(filter(None, (re.sub(r"[^a-z0-9]+", "-", part.casefold()).strip("-")[:60] for part in parts)))


def distinct(names: Iterable[str]) -> list[str]:
    """The names, those that were there before with a number."""
    seen: Counter[str] = Counter()
    numbered = []
    for name in names:
        seen[name] += 1
        numbered.append(name if seen[name] == 1 else f"{name}--{seen[name]}")
    return numbered


def rule_name(row: Row) -> str:
    """The rule, with what else it is: one whose F and R are the same threshold, and the judge that ships."""
    notes = [note for key, note in (("both", "F = R"), ("ships", "ships")) if row.get(key)]
    return f"{row['rule']} ({', '.join(notes)})" if notes else str(row["rule"])


def same_answer(interval: str = "") -> Column:
    about = "as exact; of open tasks the share of matching words"
    return Column("same answer", "agreement", percent, interval, about)


RULE = word_column("rule", rule_name)
GAMMA = Column("γ", "gamma")
FOLD = Column("fold", "fold")
