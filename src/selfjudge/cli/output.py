"""Printing: results on stdout as tables or JSON, progress on stderr."""

import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, Self

import typer
from rich import progress as bars
from rich.console import Console
from rich.table import Table

from selfjudge.store.files import dump, fill_template

QUIET = 15.0  # seconds after which a stage that goes on says so where there is no terminal
CELL = " ¦ "  # between the cells of a table in `texts`
TICK = 1.0  # seconds between two looks at the clock

OPTIONS: dict[str, str] = {}  # the option of each argument; the program fills it in when it starts


def as_options(message: str) -> str:
    """A message in which arguments in backticks are replaced by their options."""
    return re.sub(r"`(\w+)`", lambda match: OPTIONS.get(match[1], match[0]), message)


def print_json(value: Any) -> None:
    typer.echo(dump(value, indent=2))


def fill_text(name: str, **values: Any) -> str:
    """A text of the folder `texts`, filled in, without its last line end."""
    return fill_template(Path(__file__).with_name("texts") / f"{name}.txt", **values).removesuffix("\n")


def print_text(name: str, **values: Any) -> None:
    """Print a text of the folder `texts`; lines of cells, with CELL between them, are a table."""
    for is_table, lines in groupby(fill_text(name, **values).splitlines(), lambda line: CELL in line):
        if is_table:
            head, *rows = (line.split(CELL) for line in lines)
            print_rows([dict(zip(head, cells, strict=False)) for cells in rows])
        else:
            typer.echo("\n".join(lines))


def print_rows(rows: list[dict[str, Any]]) -> None:
    """A table on a terminal; the same columns, unwrapped, in a pipe. Columns without any value are left out."""
    table = Table(box=None, pad_edge=False)
    named = dict.fromkeys(column for row in rows for column in row)
    columns = [column for column in named if any(row.get(column, "") != "" for row in rows)]
    for column in columns:
        numeric = all(str(row[column])[:1].isdigit() for row in rows if row.get(column, "") != "")
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row.get(column, "")) for column in columns))
    width = None if Console().is_terminal else 160
    Console(highlight=False, markup=False, emoji=False, width=width).print(table)  # brackets and colons are meant


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{k}={'–' if v is None else v}" for k, v in value.items())
    return str(value)


def warn(text: str) -> None:
    """Print a line on stderr; arguments in backticks are shown as options."""
    print(f"selfjudge: {as_options(text)}", file=sys.stderr, flush=True)


class Progress:
    """Says on stderr what is going on: one changing line with a bar on a terminal, otherwise lines. Without a terminal,
    a stage is said when it begins, and again every QUIET seconds while it lasts. With `patient` nothing is said before
    QUIET seconds have passed: work that is soon done leaves no line. `resume` says after Ctrl-C how it is continued."""

    def __init__(self, patient: bool = False, resume: str = "") -> None:
        self._patient, self._resume = patient, resume
        self._out = sys.stderr  # a model load may redirect stderr
        self._stage, self._seen = "", {""}
        self._share: float | None = None
        self._first = 0.0, 0.0  # when the estimate of the time left was begun, and the share done by then
        self._begun = self._said = time.monotonic()
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._watch = threading.Thread(target=self._repeat, daemon=True)
        console, columns = Console(file=sys.stderr), bars.Progress.get_default_columns()
        self._bar = bars.Progress(*columns, console=console, transient=True) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._bar is None:
            self._watch.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.hide()
        self._closed.set()
        if self._bar is None:
            self._watch.join()
        if self._resume and kind is KeyboardInterrupt:
            warn(f"interrupted; {self._resume}")

    def __call__(self, stage: str, share: float | None = None) -> None:
        """Say what goes on, with the share of it that is done where that is known."""
        with self._lock:
            if share is not None and (self._share is None or share < self._share):  # other work, another estimate
                self._first = time.monotonic(), share
            if self._bar is not None:
                self._draw(self._bar, stage, share)
            elif stage != self._stage:
                self._begun = time.monotonic()
            self._stage, self._share = stage, share
            if self._bar is None:
                self._say()

    def print(self, text: str) -> None:
        """Print a line of the result on stdout, at once also into a pipe."""
        self.hide()
        print(text, flush=True)
        with self._lock:
            self._said = time.monotonic()

    def hide(self) -> None:
        """Take the changing line away until the next report."""
        if self._bar is not None:
            self._bar.stop()

    def _draw(self, bar: bars.Progress, stage: str, share: float | None) -> None:
        """Update the changing line; its estimate of the time left begins again where less is done than before."""
        if bar.tasks and (not share or share < (self._share or 0.0)):
            bar.remove_task(bar.task_ids[0])
        if not bar.tasks:
            bar.add_task("", total=None)  # runs to and fro, without a percentage
        bar.update(bar.task_ids[0], description=stage, total=1.0 if share else None, completed=share or 0.0)
        bar.start()

    def _repeat(self) -> None:
        """Look at the clock while the work itself says nothing."""
        while not self._closed.wait(TICK):
            with self._lock:
                self._say()

    def _say(self) -> None:
        """Print a line if the stage is new, or if nothing was said for QUIET seconds."""
        now, words = time.monotonic(), self._stage.removesuffix(" …") or "working"
        if self._stage not in self._seen and not self._patient:
            line = self._stage if self._share in (None, 1) else f"{words} …"
        elif now - self._said < QUIET:
            return
        elif not self._share:
            line = f"{words} … {now - self._begun:.0f} s"
        else:
            line = f"{words} {self._share:.0%}{self._describe_time_left(now)}"
        self._seen.add(self._stage)
        self._said = now
        print(line, file=self._out, flush=True)

    def _describe_time_left(self, now: float) -> str:
        """As long as the rest takes at the speed so far; empty before there is one."""
        since, share = self._first
        if self._share is None or self._share <= share:
            return ""
        left = (now - since) * (1 - self._share) / (self._share - share)
        return f", about {left:.0f} s left" if left < 120 else f", about {left / 60:.0f} min left"


@contextmanager
def waiting(text: str) -> Iterator[Progress]:
    """Say what is waited for: on a terminal at once, otherwise after QUIET seconds."""
    with Progress(patient=True) as progress:
        progress(text)
        yield progress
