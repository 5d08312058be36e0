"""Benchmarks: what they ask, split by split. One small file each; the rows are read from local files.

The files are those published by each benchmark's authors (see `docs/tasks.md`), in the folder that `--data` or
`SELFJUDGE_DATA` names. A row of the training split never occurs in the test split.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from selfjudge.errors import SelfJudgeError

Row = dict[str, Any]

NAMES = ("gsm8k", "mbpp", "dolly", "cnn_dailymail")


class Task:
    """Base of all tasks."""

    name: ClassVar[str]
    summary: ClassVar[str]
    licence: ClassVar[str]
    splits: ClassVar[tuple[str, ...]]

    def __init__(self, data: Path | None = None) -> None:
        self.data = data

    def examples(self, split: str, limit: int | None = None) -> list[Row]:
        """The first `limit` rows of a split; every row has an `id`."""
        if split not in self.splits:
            raise SelfJudgeError(f"{self.name} has no split {split!r}; it has: {', '.join(self.splits)}")
        return self.rows(split)[:limit]

    def rows(self, split: str) -> list[Row]:
        raise NotImplementedError

    def prompt(self, row: Row) -> str:
        """The user's message."""
        raise NotImplementedError

    def file(self, name: str) -> Path:
        """A data file, plain or gzipped."""
        folder = self.data or (Path(os.environ["SELFJUDGE_DATA"]) if "SELFJUDGE_DATA" in os.environ else None)
        if folder is None:
            raise SelfJudgeError(f"{self.name} needs its data: give --data DIR or set SELFJUDGE_DATA")
        for path in (folder / self.name / name, folder / self.name / f"{name}.gz"):
            if path.is_file():
                return path
        raise SelfJudgeError(f"{self.name} needs {folder / self.name / name} or the same gzipped (see docs/tasks.md)")


def task(name: str, data: Path | None = None) -> Task:
    """A task by name."""
    if name not in NAMES:
        raise SelfJudgeError(f"unknown task {name!r}; tasks are: {', '.join(NAMES)}")
    made: Task = import_module(f"selfjudge.tasks.{name}").TASK(data)
    return made


def read_jsonl(path: Path) -> list[Row]:
    """Rows of a jsonl file, plain or gzipped."""
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            return [json.loads(line) for line in file if line.strip()]
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise SelfJudgeError(f"cannot read {path}: {error}") from None


def numbered(name: str, rows: Sequence[Row]) -> list[Row]:
    """Rows with an `id` that names the task and the place in its file."""
    return [{"id": f"{name}-{i}", **row} for i, row in enumerate(rows)]
