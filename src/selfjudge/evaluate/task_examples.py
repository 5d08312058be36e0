"""The examples that a task is evaluated on, and the scores of texts. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from selfjudge.errors import SelfJudgeError
from selfjudge.evaluate.config import EvalConfig, make_label
from selfjudge.tasks.base import FILE, Row, Task
from selfjudge.tasks.registry import load_task, split_of


@dataclass(frozen=True)
class TaskExamples:
    """A task and the examples that it is evaluated on."""

    name: str
    task: Task
    rows: list[Row]

    @classmethod
    def load(cls, name: str, config: EvalConfig) -> TaskExamples:
        """The test split, another split that is named, or all of a file."""
        task = load_task(name, config.data, allow_unsafe=config.allow_unsafe)
        rows = task.examples(split_of(name) or ("all" if name.startswith(FILE) else "test"), config.limit)
        if not rows:
            raise SelfJudgeError(f"{name} has no examples")
        if len({row["id"] for row in rows}) < len(rows):
            raise SelfJudgeError(f"{name} has two examples with the same id: give each its own")
        return cls(name, task, rows)

    @property
    def label(self) -> str:
        return make_label(self.name)

    @cached_property
    def checkable(self) -> bool:
        return self.task.checkable

    @cached_property
    def places(self) -> dict[str, int]:
        """Index of each example, by its id."""
        return {row["id"]: place for place, row in enumerate(self.rows)}

    @property
    def has_stories(self) -> bool:
        return self.task.story(self.rows[0]) is not None

    def score(self, rows: Sequence[Row], texts: Sequence[str]) -> list[tuple[str | None, dict[str, float]]]:
        """The answer found in each text, if the task has answers, and the text's scores."""
        if not self.checkable:
            return [(None, self.task.score(row, text)) for row, text in zip(rows, texts, strict=True)]
        answers = self.task.extract_many(rows, texts)
        return [(answer, self.task.rate(row, answer)) for row, answer in zip(rows, answers, strict=True)]


def check_examples(config: EvalConfig) -> None:
    """Refuse tasks whose examples cannot be loaded, before a model is."""
    for name in config.tasks:
        TaskExamples.load(name, config)
