"""The settings of an evaluation, its runs, and the examples of its tasks. This module loads no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfjudge.decoding.rule_parser import RuleRequest, rule_text
from selfjudge.decoding.rules import EXACT, AcceptanceRule, Exact
from selfjudge.errors import SelfJudgeError
from selfjudge.tasks import FILE, Row, Task, load_task, split_of
from selfjudge.types import MAX_GAMMA, check_settings, setting

if TYPE_CHECKING:
    from selfjudge.judge.model import Judge
    from selfjudge.models.pair import Pair

NULL = "null"
Judges = Mapping[str, "Judge"]


@dataclass(frozen=True)
class EvalConfig:
    """Which rules are evaluated on which tasks, and how."""

    tasks: tuple[str, ...] = setting((), "Tasks, with a split if it is not `test`: `livecodebench/all`.")
    rules: tuple[Any, ...] | None = setting(None, "Rules, as text or objects; exact and judged if not given.")
    gammas: tuple[int, ...] = setting((), "Draft tokens per cycle; else the default.", minimum=0, maximum=MAX_GAMMA)
    limit: int | None = setting(None, "Examples of each task; all if not given.", minimum=1)
    max_new_tokens: int | None = setting(None, "Maximum new tokens of an answer; else the task's.", minimum=1)
    batch: int | None = setting(None, "Prompts at a time: 8, on CUDA 256.", minimum=1)
    seed: int = setting(0, "Seed of rules that sample.")
    nli: str = setting("auto", "Factual consistency by: an NLI model, proxy (the target itself), off, or auto.")
    examples: int = setting(3, "Answers of each run that are kept token by token.", minimum=0)
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


def check_examples(config: EvalConfig) -> bool:
    """Refuse tasks whose examples cannot be loaded, before a model is; returns whether the target may have to judge
    summaries, which it does in full precision."""
    tasks = [TaskExamples.load(name, config) for name in config.tasks]
    return config.nli != "off" and any(examples.has_stories for examples in tasks)


@dataclass(frozen=True, eq=False)
class RuleRun:
    """One rule at one γ, with the name of its judge."""

    name: str
    gamma: int
    rule: AcceptanceRule
    judge: str | None = None

    def batch(self, size: int) -> int:
        """Rows decoded together, if others have `size`. `null` is `exact` in other batches: only rounding differs."""
        if self.name != NULL:
            return size
        return size // 2 if size > 1 else 2

    @property
    def folder(self) -> str:
        return f"{self.name}-g{self.gamma}"

    @cached_property
    def identity(self) -> str:
        """Digest of the name, γ, the rule's options and its judge; `run_sha256` of summaries."""
        names = dict.fromkeys([*(f.name for f in fields(self.rule)), *sorted(vars(self.rule))])  # of any class
        values = {name: getattr(self.rule, name) for name in names if name not in ("judge", "base")}
        given = {name: value for name, value in values.items() if value is not None}
        judge = "" if self.rule.judge is None else self.rule.judge.digest()
        return hashlib.sha256(f"{self.name}:{self.gamma}:{self.rule.name}:{given}:{judge}".encode()).hexdigest()


def plan_runs(
    rules: Sequence[str | AcceptanceRule], gammas: Sequence[int], judges: Judges, pair: Pair | tuple[int, ...]
) -> list[RuleRun]:
    """Runs of rules such as `exact`, `topk:2`, `judged:F@mine`, or of rule objects.

    A judged rule that names no judge runs once with each. `exact` comes first: the others are compared with it.
    `null` is `exact` once more, in batches of another size. Rules have the guards that their text names and no others:
    `margin:1,strict_start=16,strict_code=on`."""
    variants: dict[str, tuple[AcceptanceRule, str | None]] = {}
    for rule in sorted(rules, key=lambda rule: not (rule == "exact" or isinstance(rule, Exact))):
        if not isinstance(rule, AcceptanceRule):
            variants |= _resolve(rule, judges, pair)
        elif (name := rule_text(rule)) in variants:
            raise SelfJudgeError(f"two rules are called {name}: give them different names, or judges by `judges`")
        else:
            variants[name] = rule, None
    for gamma in gammas:
        for resolved, _ in variants.values():
            resolved.check(gamma)
    return [RuleRun(name, gamma, resolved, judge) for gamma in gammas for name, (resolved, judge) in variants.items()]


def _resolve(spec: str, judges: Judges, pair: Pair | tuple[int, ...]) -> dict[str, tuple[AcceptanceRule, str | None]]:
    """The rules that a text stands for, by name, each with the name of its judge."""
    if spec == NULL:
        return {NULL: (EXACT, None)}
    text, _, wanted = spec.partition("@")
    request = RuleRequest(text)
    if not request.needs_judge:
        if wanted:
            raise SelfJudgeError(f"rule {text!r} does not use a judge: leave out @{wanted}")
        return {spec: (request.resolve(pair, bare=True), None)}
    if not judges:
        raise SelfJudgeError(f"rule {spec!r} needs a judge: give `judge`, such as mine=FOLDER")
    if wanted and wanted not in judges:
        raise SelfJudgeError(f"rule {spec!r} names an unknown judge; judges are: {', '.join(judges)}")
    names = [wanted] if wanted else list(judges)
    return {f"{text}@{name}": (request.resolve(pair, judges[name], bare=True), name) for name in names}


def needs_judge(spec: str) -> bool:
    """Whether a rule's text, such as `judged:F@mine`, asks for a judge."""
    return spec != NULL and RuleRequest(spec.partition("@")[0]).needs_judge
