"""A table: plain rows, and columns that say how they are shown; the same for the page and for Markdown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from selfjudge.report.formats import fixed, percent, show_interval, show_text
from selfjudge.store import markdown_table
from selfjudge.types import GLOSSARY

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """`form` shows the row's `value`: a key, or a function of the row.

    `below` is shown smaller under it, as plain text after `joint`: the key of an interval, or a function of the row.
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

    def text(self, row: Row) -> str:
        """Both in one line."""
        return self.joint.join(filter(None, (self.show(row), self.small(row))))


def score_column(head: str, value: str, form: Callable[[Any], str], interval: str, words: str = "") -> Column:
    """A score or its change; the interval below it is left out where few examples were scored."""
    return Column(head, value, form, lambda row: "" if row["few"] else show_interval(row[interval], form), words)


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
        table = markdown_table(
            [escape(column.head) for column in self.columns],
            ([escape(column.text(row)) for column in self.columns] for row in self.rows),
            "".join("r" if column.numeric else "l" for column in self.columns),
        )
        note = f"\n{escape(self.note)}\n" if self.note else ""
        return f"## {escape(self.title)}\n\n{table}\n{note}"


def escape(text: str) -> str:
    """Safe in Markdown, tables included: no column, link, tag or emphasis comes from a result."""
    return re.sub(r"([\\|`*_\[\]<>&#])", r"\\\1", " ".join(text.split()))


def number_ids(sections: Mapping[str, Iterable[Any]]) -> dict[str, list[Any]]:
    """Section → its tables or charts, if it has any; an id that occurred before gets a number."""
    seen: Counter[str] = Counter()

    def number(part: Any) -> Any:
        seen[part.id] += 1
        return part if seen[part.id] == 1 else replace(part, id=f"{part.id}--{seen[part.id]}")

    numbered = {name: [number(part) for part in section] for name, section in sections.items()}
    return {name: section for name, section in numbered.items() if section}


RULE = word_column("rule", "rule")
GAMMA = Column(f"{GLOSSARY['γ']} (γ)", "gamma")
PER_PASS = Column(f"{GLOSSARY['m']} (m)", "mean_accepted_length", fixed, help="of the target, its own token included")
AGREEMENT = score_column(
    "same answer", "agreement", percent, "agreement_ci", "as exact; of open tasks the share of matching words"
)
