"""Base class of all tasks: examples by split, and how an answer is found, compared and scored. Rows come from the
authors' files (`docs/tasks.md`) in `data` or `SELFJUDGE_DATA`, else from the hub by `datasets`. No row of a training
split occurs in the test split."""

import os
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, TypedDict

from selfjudge.errors import SelfJudgeError, first_line
from selfjudge.store import quiet_hub, read_json, read_rows, unreachable

Row = dict[str, Any]
Prompt = str | Sequence[Mapping[str, str]]

ABOUT = read_json(Path(__file__).with_name("benchmarks.json"))  # attributes of the benchmarks, by name
FILE = "file:"  # prefix of a task that is a user's own file


class Task:
    """A benchmark declares `prompt`, and `gold`, `extract` and `same` or `score`; `benchmarks.json` has the rest."""

    name: str
    summary: str
    licence: str
    splits: tuple[str, ...]
    file = "{split}.jsonl"  # name of the data file
    row_id = "{split}-{index}"  # ends the id of a row without one; columns of the row may be named
    new_tokens: int = 512  # maximum new tokens of an answer
    checkable: bool = False  # whether answers can be found in a text and compared: `extract`, `same`
    hub: ClassVar[tuple[str, str | None] | None] = None  # dataset and configuration on the hub
    schema: ClassVar[Any] = dict[str, Any]  # of a row of the data file, made from `columns` of the class declaration
    requires: ClassVar[tuple[str, ...]] = ()  # packages that scoring needs; summaries record their versions

    def __init_subclass__(cls, name: str = "", columns: Mapping[str, Any] | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        for key, value in ({"name": name} | ABOUT[name] if name else {}).items():
            setattr(cls, key, tuple(value) if isinstance(value, list) else value)
        if columns is not None:
            cls.schema = TypedDict(f"{cls.__name__}Row", columns)  # type: ignore[misc]

    def __init__(self, data: Path | None = None, *, allow_unsafe: bool = False) -> None:
        self.data = data
        self.allow_unsafe = allow_unsafe  # run generated code even if it cannot be isolated

    def prepare(self) -> None:
        """Raise if a package that scoring needs is missing."""
        for package in self.requires:
            if find_spec(package.replace("-", "_")) is None:
                raise SelfJudgeError(f"{self.name} needs {package}: pip install {package}")

    def examples(self, split: str, limit: int | None = None) -> list[Row]:
        """The first `limit` rows of a split, a part (`train[4792:]`) or several (`test+train[:9]`), with `id`s."""
        rows: list[Row] = []
        for text in split.split("+"):
            name, part = parse_split(text)
            if name not in self.splits:
                raise SelfJudgeError(f"{self.name} has no split {text!r}; it has: {', '.join(self.splits)}")
            rows += self.rows(name)[part]
        return rows[:limit]

    def rows(self, split: str) -> list[Row]:
        """All rows of a split, in the order of the data file."""
        rows = self.load(self.file.format(split=split), split)
        return [
            {"id": f"{self.name}-{self.row_id.format_map({**row, 'split': split, 'index': i})}", **row}
            for i, row in enumerate(rows)
        ]

    def prompt(self, row: Row) -> Prompt:
        """The user's message, or a conversation."""
        raise NotImplementedError

    def question(self, row: Row) -> str:
        """The words that tell a row from others: no row of a training split has those of a test row."""
        return normalise_words(self.prompt(row))

    def story(self, row: Row) -> str | None:
        """The article that a text must be consistent with, if the text is a summary."""
        return None

    def gold(self, row: Row) -> str | None:
        """The right answer as `extract` would give it, if there is one."""
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
        """Whether there is an answer to preserve. An empty one, of programs that pass no test, is none: all agree."""
        return bool(answer)

    def score(self, row: Row, text: str) -> dict[str, float]:
        """Measures of a text, each from 0 to 1."""
        return self.rate(row, self.extract(row, text)) if self.checkable else {}

    def rate(self, row: Row, answer: str | None) -> dict[str, float]:
        """Measures of an extracted answer."""
        return {"accuracy": float(self.same(row, self.gold(row), answer))}

    @property
    def folder(self) -> Path | None:
        """The folder with the benchmarks' files."""
        return self.data or (Path(os.environ["SELFJUDGE_DATA"]) if "SELFJUDGE_DATA" in os.environ else None)

    def load(self, file: str, split: str) -> list[Row]:
        """Rows of a local file, plain or gzipped; if no folder is named, rows of the hub's split."""
        if self.folder is None:
            return self.load_from_hub(split)
        path = self.folder / self.name / file
        for present in (path, path.with_name(f"{file}.gz")):
            if present.is_file():
                return list(read_rows(present, self.schema))
        raise SelfJudgeError(f"{self.name} needs {path} or the same gzipped (see docs/tasks.md)")

    def load_from_hub(self, split: str) -> list[Row]:
        """Rows as the hub has them, with the columns of the local files."""
        assert self.hub is not None
        return load_hub_rows(self.name, *self.hub, split=split)

    def drop_test_questions(self, rows: Sequence[Row], test: Sequence[Row]) -> list[Row]:
        """The rows whose question is not that of a test row."""
        questions = {self.question(row) for row in test}
        return [row for row in rows if self.question(row) not in questions]


def parse_split(split: str) -> tuple[str, slice]:
    """A split's name and which of its rows are meant: `train[4792:]` leaves out the first 4,792."""
    if (match := re.fullmatch(r"(.*)\[(-?\d+)?:(-?\d+)?\]", split)) is None:
        return split, slice(None)
    name, start, stop = match.groups()
    return name, slice(int(start) if start else None, int(stop) if stop else None)


def load_hub_rows(task: str, name: str, config: str | None = None, **options: Any) -> list[Row]:
    """Rows of a dataset on the hub, by `datasets`."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise SelfJudgeError(f"{task} needs its data: give `data` or set SELFJUDGE_DATA, or install datasets") from None
    try:
        if unreachable() is not None:  # local copies only: `datasets` would try for half a minute
            from datasets import config as settings

            settings.HF_HUB_OFFLINE = True
        with quiet_hub():
            return [dict(row) for row in load_dataset(name, config, **options)]
    except Exception as error:  # the hub, the network, the disk: its errors are of many kinds
        why = first_line(error)
        raise SelfJudgeError(f"cannot load {name} from the hub ({why}): check the network or give `data`") from None


def find_prompt(row: Row, file: Path, number: int) -> Prompt:
    """The conversation or the prompt of row `number` of a user's file, which must have one."""
    prompt: Prompt = row.get("prompt") or "" if row.get("messages") is None else row["messages"]
    if not join_messages(prompt).strip():
        raise SelfJudgeError(f'{file}, row {number}: expected a JSON object with "prompt" or "messages"')
    return prompt


def join_messages(prompt: Prompt) -> str:
    """The text of a prompt: a conversation's messages, one a line."""
    return prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)


def normalise_words(prompt: Prompt) -> str:
    """A prompt's words without case and punctuation: two prompts with the same words count as one."""
    return " ".join(re.findall(r"\w+", join_messages(prompt).casefold()))
