"""The examples that a task is evaluated on, and the scores of texts. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from selfjudge.errors import SelfJudgeError
from selfjudge.evaluate.config import EvalConfig, task_label
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
        found = load_task(name, config.data, allow_unsafe=config.allow_unsafe)
        rows = found.examples(split_of(name) or ("all" if name.startswith(FILE) else "test"), config.limit)
        if not rows:
            raise SelfJudgeError(f"{name} has no examples")
        if len({row["id"] for row in rows}) < len(rows):
            raise SelfJudgeError(f"{name} has two examples with the same id: give each its own")
        return cls(name, found, rows)

    @property
    def label(self) -> str:
        return task_label(self.name)

    @cached_property
    def checkable(self) -> bool:
        return self.task.checkable

    @cached_property
    def places(self) -> dict[str, int]:
        """Where an example stands in the task, by its id."""
        return {row["id"]: place for place, row in enumerate(self.rows)}

    @property
    def has_stories(self) -> bool:
        return self.task.story(self.rows[0]) is not None


def check_examples(config: EvalConfig) -> None:
    """Refuse tasks whose examples cannot be had, before a model is loaded."""
    for name in config.tasks:
        TaskExamples.load(name, config)


def score_texts(
    examples: TaskExamples, rows: Sequence[Row], texts: Sequence[str]
) -> tuple[list[str | None], list[dict[str, float]]]:
    """The answer that is found in each text, where the task has answers, and the text's scores."""
    task = examples.task
    if not examples.checkable:
        return [None] * len(rows), task.score_many(rows, texts)
    extracted = task.extract_many(rows, texts)
    return extracted, [task.rate(row, answer) for row, answer in zip(rows, extracted, strict=True)]
