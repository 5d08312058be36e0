"""What the commands print: results on stdout as tables or JSON, progress on stderr."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

QUIET = 15.0
"""Seconds after which a stage that goes on says so where there is no progress bar."""

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


@contextmanager
def progress() -> Iterator[Callable[[str, float], None]]:
    """A progress bar on stderr that appears with the first report; a line a stage where there is no terminal."""
    if not Console(file=sys.stderr).is_terminal:
        yield _lines()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("", total=1.0, visible=False)
        current = ""

        def show(stage: str, share: float) -> None:
            nonlocal current
            if stage.split(":")[0] != current:  # the time left is that of the stage
                current = stage.split(":")[0]
                bar.reset(task)
            bar.update(task, description=stage, completed=share, visible=True)

        yield show


def _lines() -> Callable[[str, float], None]:
    """Reports in a pipe: each stage once, and again every QUIET seconds while it goes on."""
    seen, last = set[str](), 0.0

    def report(stage: str, share: float) -> None:
        nonlocal last
        known, now = stage in seen, time.monotonic()
        if known and now - last < QUIET:
            return
        seen.add(stage)
        last = now
        print(f"{stage} {share:.0%}" if known else stage if share >= 1 else f"{stage} …", file=sys.stderr, flush=True)

    return report


class StatusLine:
    """Reports of what is going on: one changing line on a terminal, a line a report elsewhere; both on stderr."""

    def __init__(self) -> None:
        console = Console(file=sys.stderr)
        self._spinner = console.status("") if console.is_terminal else None

    def __call__(self, text: str) -> None:
        if self._spinner is None:
            print(text, file=sys.stderr, flush=True)
        else:
            self._spinner.update(text)
            self._spinner.start()

    def print(self, text: str) -> None:
        """A line of the result on stdout, at once also in a pipe."""
        self.stop()
        print(text, flush=True)

    def stop(self) -> None:
        """Take the changing line away until the next report."""
        if self._spinner is not None:
            self._spinner.stop()


@contextmanager
def status() -> Iterator[StatusLine]:
    """A line that says what is going on while the work lasts."""
    line = StatusLine()
    try:
        yield line
    finally:
        line.stop()
