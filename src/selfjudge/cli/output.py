"""What the commands print: results on stdout as tables or JSON, progress on stderr."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

QUIET = 15.0
"""Seconds after which a stage that goes on says so where there is no terminal."""
TICK = 1.0
"""Seconds between two looks at the clock."""

OPTIONS: dict[str, str] = {}
"""The option of each argument; the program fills it in when it starts."""


def as_options(message: str) -> str:
    """A message with the arguments that it names in backticks as the options that they are here."""
    return re.sub(r"`(\w+)`", lambda match: OPTIONS.get(match[1], match[0]), message)


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, ensure_ascii=False, indent=2))


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


def figure(value: float | None, form: str, missing: str = "") -> str:
    """A number in a table's cell."""
    return missing if value is None else format(value, form)


def with_spread(value: float | None, interval: list[float] | None, scale: float = 100.0) -> str:
    """A difference in hundredths with the half-width of its interval."""
    if value is None:
        return ""
    if interval is None:
        return f"{scale * value:+.1f}"
    low, high = interval
    return f"{scale * value:+.1f} ± {scale * (high - low) / 2:.1f}"


def describe_machine(result: dict[str, Any]) -> str:
    """The machine and the versions that a result was measured with, in a few words."""
    machine, versions = result["machine"], result["versions"]
    processor = machine.get("gpu") or machine.get("cpu", machine["arch"])
    return f"{processor}, {machine['cpus']} cores, torch {versions['torch']}, transformers {versions['transformers']}"


def warn(text: str) -> None:
    """One line on stderr, with the options of the command line in place of the arguments that it names."""
    print(f"selfjudge: {as_options(text)}", file=sys.stderr, flush=True)


@contextmanager
def going_on(words: str) -> Iterator[None]:
    """Say after Ctrl-C how the work is gone on with."""
    try:
        yield
    except KeyboardInterrupt:
        warn(f"interrupted; {words}")
        raise


class Lines:
    """Reports where there is no terminal: each stage once, and again every QUIET seconds while it goes on.

    A patient one begins to speak after QUIET seconds: work that is soon done, or refused, leaves no line.
    """

    def __init__(self, patient: bool = False) -> None:
        self._patient, self._seen, self._out = patient, set[str](), sys.stderr  # which a load may redirect
        self._stage = ""
        self._share: float | None = None
        self._begun = self._said = time.monotonic()
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._watch = threading.Thread(target=self._repeat, daemon=True)
        self._watch.start()

    def __call__(self, stage: str, share: float | None = None) -> None:
        """Say what goes on, with the share of it that is done where that is known."""
        with self._lock:
            if stage != self._stage:
                self._begun = time.monotonic()
            self._stage, self._share = stage, share
            if self._due:
                self._say()
            elif stage not in self._seen and not self._patient:
                self._say(first=True)

    def result_said(self) -> None:
        """A line of the result was printed: the silence begins anew."""
        with self._lock:
            self._said = time.monotonic()

    def close(self) -> None:
        self._closed.set()
        self._watch.join()

    @property
    def _due(self) -> bool:
        known = self._patient or not self._stage or self._stage in self._seen
        return known and time.monotonic() - self._said >= QUIET

    def _repeat(self) -> None:
        """Look at the clock while the work itself says nothing."""
        while not self._closed.wait(TICK):
            with self._lock:
                if self._due:
                    self._say()

    def _say(self, first: bool = False) -> None:
        words = self._stage.removesuffix(" …") or "working"
        if self._share is not None and not first:
            line = f"{words} {self._share:.0%}"
        elif first:
            line = self._stage if self._share is None or self._share >= 1 else f"{words} …"
        else:
            passed = time.monotonic() - self._begun
            line = f"{words} … {passed:.0f} s" if passed >= 1 else f"{words} …"
        self._seen.add(self._stage)
        self._said = time.monotonic()
        print(line, file=self._out, flush=True)


@contextmanager
def progress(patient: bool = False) -> Iterator[Callable[[str, float], None]]:
    """A progress bar on stderr; lines where there is no terminal."""
    if not Console(file=sys.stderr).is_terminal:
        lines = Lines(patient)
        try:
            yield lines
        finally:
            lines.close()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("starting", total=1.0)
        current = ""

        def show(stage: str, share: float) -> None:
            nonlocal current
            if stage.split(":")[0] != current:  # the time left is that of the stage
                current = stage.split(":")[0]
                bar.reset(task)
            bar.update(task, description=stage, completed=share)

        yield show


class StatusLine:
    """Reports of what is going on: one changing line on a terminal, lines elsewhere; both on stderr."""

    def __init__(self, patient: bool = False) -> None:
        console = Console(file=sys.stderr)
        self._spinner = console.status("") if console.is_terminal else None
        self._lines = None if console.is_terminal else Lines(patient)

    def __call__(self, text: str) -> None:
        if self._lines is not None:
            self._lines(text)
        elif self._spinner is not None:
            self._spinner.update(text)
            self._spinner.start()

    def print(self, text: str) -> None:
        """A line of the result on stdout, at once also in a pipe."""
        self.stop()
        print(text, flush=True)
        if self._lines is not None:
            self._lines.result_said()

    def stop(self) -> None:
        """Take the changing line away until the next report."""
        if self._spinner is not None:
            self._spinner.stop()

    def close(self) -> None:
        self.stop()
        if self._lines is not None:
            self._lines.close()


@contextmanager
def status(patient: bool = False) -> Iterator[StatusLine]:
    """A line that says what is going on while the work lasts."""
    line = StatusLine(patient)
    try:
        yield line
    finally:
        line.close()


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Say what is waited for: on a terminal at once, elsewhere once it has taken QUIET seconds."""
    with status(patient=True) as line:
        line(text)
        yield
