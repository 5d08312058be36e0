"""The settings of an evaluation, and the examples of its tasks. This module loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from selfjudge.errors import SelfJudgeError
from selfjudge.tasks.base import FILE, Row, Task
from selfjudge.tasks.registry import load_task, split_of
from selfjudge.types import MAX_GAMMA, check_settings, setting


@dataclass(frozen=True)
class EvalConfig:
    """Which rules are evaluated on which tasks, and how."""

    tasks: tuple[str, ...] = setting((), "Tasks, with a split if it is not `test`: `livecodebench/all`.")
    rules: tuple[Any, ...] | None = setting(
        None,
        "Rules as text, such as `judged:F@mine`, or as objects. If not given: exact, and judged if there is a judge.",
    )
    gammas: tuple[int, ...] = setting(
        (), "Draft tokens per cycle; the default of the device if not given.", minimum=0, maximum=MAX_GAMMA
    )
    limit: int | None = setting(None, "Examples of each task; all if not given.", minimum=1)
    max_new_tokens: int | None = setting(
        None, "Maximum new tokens of an answer; the task's own number if not given.", minimum=1
    )
    batch: int | None = setting(None, "Prompts at a time: 8, on CUDA 256.", minimum=1)
    seed: int = setting(0, "Seed of rules that sample.")
    nli: str = setting(
        "auto", "Factual consistency of summaries: an NLI model, proxy (the target itself), off, or auto."
    )
    examples: int = setting(3, "Answers of each run that are kept token by token.", minimum=0)
    compact: bool = setting(False, "Leave texts out of the rows at the end, and round to five decimals.")
    times: bool = setting(True, "Measure tokens/s; not on a machine that does other work meanwhile.")
    data: Path | None = setting(None, "Folder with the benchmarks' files; SELFJUDGE_DATA if not given.")
    allow_unsafe: bool = setting(False, "Run generated code even if it cannot be isolated.")

    def check(self) -> None:
        """Refuse what cannot work, before a model is loaded."""
        check_settings(self)
        if not self.tasks:
            raise SelfJudgeError("`tasks` names no task; see selfjudge ls tasks")
        if self.rules == ():
            raise SelfJudgeError("`rules` names no rule; see selfjudge ls rules")
        if len({make_label(name) for name in self.tasks}) < len(self.tasks):
            raise SelfJudgeError("two of the tasks have the same name: evaluate them into different folders")
        for name in self.tasks:
            load_task(name, self.data, allow_unsafe=self.allow_unsafe).prepare()

    def choose_rules(self, has_judge: bool) -> tuple[Any, ...]:
        """`rules`, or the default rules."""
        if self.rules is not None:
            return self.rules
        return ("exact", "judged") if has_judge else ("exact",)


def make_label(name: str) -> str:
    """A task's name in folders and tables: `gsm8k/train[9:]` is gsm8k-train-9-, a file goes by its stem."""
    if name.startswith(FILE):
        return f"{FILE}{Path(name.removeprefix(FILE)).stem}"
    return name.translate(str.maketrans("/[:", "---", "]"))


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
    def places(self) -> dict[str, int]:
        """Index of each example, by its id."""
        return {row["id"]: place for place, row in enumerate(self.rows)}

    @property
    def has_stories(self) -> bool:
        return self.task.story(self.rows[0]) is not None

    def score(self, rows: Sequence[Row], texts: Sequence[str]) -> list[tuple[str | None, dict[str, float]]]:
        """The answer found in each text, if the task has answers, and the text's scores."""
        if not self.task.checkable:
            return [(None, self.task.score(row, text)) for row, text in zip(rows, texts, strict=True)]
        answers = self.task.extract_many(rows, texts)
        return [(answer, self.task.rate(row, answer)) for row, answer in zip(rows, answers, strict=True)]


def check_examples(config: EvalConfig) -> None:
    """Refuse tasks whose examples cannot be loaded, before a model is."""
    for name in config.tasks:
        TaskExamples.load(name, config)
