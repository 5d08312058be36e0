"""Base of all benchmarks: their examples by split, and how an answer is found, compared and scored.

Rows come from the files that each benchmark's authors published (see `docs/tasks.md`), in the folder `data` or
`SELFJUDGE_DATA`. Where no folder is named and `datasets` is installed, they come from the hub. A row of the training
split never occurs in the test split.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from selfjudge.errors import SelfJudgeError, unknown
from selfjudge.store import quiet_hub, read_rows, unreachable

Row = dict[str, Any]
Prompt = str | Sequence[Mapping[str, str]]

NAMES = ("gsm8k", "math500", "mmlu", "cnn_dailymail", "livecodebench", "mbpp", "dolly", "arithmetic")
FILE = "file:"


class Task:
    """Base of all tasks."""

    name: str
    summary: str
    licence: str
    splits: tuple[str, ...]
    new_tokens: int = 512
    """Enough for an answer."""
    checkable: bool = False
    """Whether answers can be found in a text and compared: `extract`, `same`."""
    runs_programs: bool = False
    """Whether finding an answer runs programs."""
    hub: ClassVar[tuple[str, str | None] | None] = None
    """Dataset and configuration on the hub."""
    columns: ClassVar[Any] = dict[str, Any]
    """The schema of a row of the local files."""
    requires: ClassVar[tuple[str, ...]] = ()
    """Packages that scoring needs; summaries record their versions."""

    def __init__(self, data: Path | None = None, *, allow_unsafe: bool = False) -> None:
        self.data = data
        self.allow_unsafe = allow_unsafe
        """Run generated code even where it cannot be isolated."""

    def prepare(self) -> None:
        """Refuse to go on where something that scoring needs is missing."""
        for package in self.requires:
            if find_spec(package.replace("-", "_")) is None:
                raise SelfJudgeError(f"{self.name} needs {package}: pip install {package} (or selfjudge[eval])")

    def examples(self, split: str, limit: int | None = None) -> list[Row]:
        """The first `limit` rows of a split, of a part of it (`train[4792:]`) or of several (`test+train[4792:]`).

        Every row has an `id`.
        """
        rows: list[Row] = []
        for text in split.split("+"):
            name, part = split_and_part(text)
            if name not in self.splits:
                raise SelfJudgeError(f"{self.name} has no split {text!r}; it has: {', '.join(self.splits)}")
            rows += self.rows(name)[part]
        return rows[:limit]

    def rows(self, split: str) -> list[Row]:
        raise NotImplementedError

    def prompt(self, row: Row) -> Prompt:
        """The user's message, or a conversation."""
        raise NotImplementedError

    def question(self, row: Row) -> str:
        """The words that tell a row from others: no row of a training split has those of a test row."""
        return plain(self.prompt(row))

    def story(self, row: Row) -> str | None:
        """What a text must be consistent with, where it is a summary."""
        return None

    def gold(self, row: Row) -> str | None:
        """The right answer as `extract` would give it, where there is one."""
        return None

    def extract(self, row: Row, text: str) -> str | None:
        """The answer found in a text; None if there is none."""
        return None

    def extract_many(self, rows: Sequence[Row], texts: Sequence[str]) -> list[str | None]:
        """`extract` of many: code runs on all cores."""
        return [self.extract(row, text) for row, text in zip(rows, texts, strict=True)]

    def same(self, row: Row, a: str | None, b: str | None) -> bool:
        """Are two extracted answers equal? A missing one equals nothing."""
        return a is not None and a == b

    def is_scorable(self, row: Row, answer: str | None) -> bool:
        """Can this answer of a response be preserved, or is there none?"""
        return answer is not None

    def score(self, row: Row, text: str) -> dict[str, float]:
        """Measures of a text, each from 0 to 1."""
        return self.rate(row, self.extract(row, text)) if self.checkable else {}

    def score_many(self, rows: Sequence[Row], texts: Sequence[str]) -> list[dict[str, float]]:
        """`score` of many: code runs on all cores."""
        if not self.checkable:
            return [self.score(row, text) for row, text in zip(rows, texts, strict=True)]
        return [self.rate(row, answer) for row, answer in zip(rows, self.extract_many(rows, texts), strict=True)]

    def rate(self, row: Row, answer: str | None) -> dict[str, float]:
        """Measures of an extracted answer."""
        return {"accuracy": float(self.same(row, self.gold(row), answer))}

    @property
    def folder(self) -> Path | None:
        """Where the benchmarks' files are."""
        return self.data or (Path(os.environ["SELFJUDGE_DATA"]) if "SELFJUDGE_DATA" in os.environ else None)

    def file(self, name: str) -> Path:
        """A data file, plain or gzipped."""
        assert self.folder is not None
        for path in (self.folder / self.name / name, self.folder / self.name / f"{name}.gz"):
            if path.is_file():
                return path
        raise SelfJudgeError(
            f"{self.name} needs {self.folder / self.name / name} or the same gzipped (see docs/tasks.md)"
        )

    def load(self, file: str, split: str) -> list[Row]:
        """Rows of a local file, or, if no folder is named, of the hub's split."""
        return list(read_rows(self.file(file), self.columns)) if self.folder is not None else self.from_hub(split)

    def from_hub(self, split: str) -> list[Row]:
        """Rows as the hub has them, with the columns of the local files."""
        assert self.hub is not None
        return hub_rows(self.name, *self.hub, split=split)


def task(name: str, data: Path | None = None, *, allow_unsafe: bool = False) -> Task:
    """A task by name, or `file:PATH`; a split that is named with it (`livecodebench/all`) makes no difference."""
    result: Task
    if name.startswith(FILE):
        path = Path(name.removeprefix(FILE)).expanduser()
        result = import_module("selfjudge.tasks.file").TASK(path, allow_unsafe=allow_unsafe)
    elif (benchmark := name.partition("/")[0]) in NAMES:
        result = import_module(f"selfjudge.tasks.{benchmark}").TASK(data, allow_unsafe=allow_unsafe)
    else:
        raise unknown("task", name, (*NAMES, f"{FILE}PATH"))
    return result


def known(name: str) -> bool:
    """Whether this names a task, or a split of one."""
    return name in NAMES or name.startswith(FILE) or (name.partition("/")[0] in NAMES and not Path(name).is_file())


def split_of(name: str) -> str | None:
    """The split that is named with a task: `all` of `livecodebench/all`."""
    return None if name.startswith(FILE) else name.partition("/")[2] or None


def split_and_part(split: str) -> tuple[str, slice]:
    """A split's name and which of its rows are meant: `train[4792:]` leaves out the first 4,792."""
    if (found := re.fullmatch(r"(.*)\[(-?\d*):(-?\d*)\]", split)) is None:
        return split, slice(None)
    name, start, stop = found.groups()
    try:
        return name, slice(int(start) if start else None, int(stop) if stop else None)
    except ValueError:  # a minus without a number
        return split, slice(None)


def hub_rows(task: str, name: str, config: str | None = None, **options: Any) -> list[Row]:
    """Rows of a dataset on the hub, by `datasets`."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise SelfJudgeError(
            f"{task} needs its data: give `data` or set SELFJUDGE_DATA, or install datasets to read it from the hub"
        ) from None
    try:
        with quiet_hub(), _offline_if_unreachable():
            return [dict(row) for row in load_dataset(name, config, **options)]
    except Exception as error:  # the hub, the network, the disk: its errors are of many kinds
        why = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise SelfJudgeError(f"cannot load {name} from the hub ({why}): check the network or give `data`") from None


@contextlib.contextmanager
def _offline_if_unreachable() -> Iterator[None]:
    """Read local copies alone where the hub does not answer: `datasets` would try for half a minute."""
    if unreachable() is None:
        yield
        return

    from datasets import config

    before, config.HF_HUB_OFFLINE = config.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before


def numbered(name: str, rows: Sequence[Row]) -> list[Row]:
    """Rows with an `id` that names the task and the place in its file."""
    return [{"id": f"{name}-{i}", **row} for i, row in enumerate(rows)]


def plain(prompt: Prompt) -> str:
    """A prompt's words alone, without case and punctuation: two prompts with the same ones count as one."""
    text = prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
    return " ".join(re.findall(r"\w+", text.casefold()))


def without_test_questions(task: Task, rows: Iterable[Row], test: Iterable[Row]) -> list[Row]:
    """The rows whose question is not one of the test rows."""
    questions = {task.question(row) for row in test}
    return [row for row in rows if task.question(row) not in questions]
