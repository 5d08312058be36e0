"""Settings of an evaluation, its runs, the examples of its tasks, and `reproduce`'s presets. Loads no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfjudge.decoding.rule_parser import RuleRequest, rule_text
from selfjudge.decoding.rules import EXACT, AcceptanceRule, Exact
from selfjudge.errors import SelfJudgeError
from selfjudge.store import read_json
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
    rules: tuple[Any, ...] | None = setting(None, "Rules, such as 'exact judged:q0.9@NAME'; else exact, and judged.")
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


def load_examples(config: EvalConfig) -> list[TaskExamples]:
    """All tasks with their examples; refused where they cannot be loaded."""
    return [TaskExamples.load(name, config) for name in config.tasks]


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
    """Runs of rules such as `exact`, `topk:2`, `judged:F@mine`, or of rule objects; guards (`strict_code=on`) apply
    only where the text names them. A judged rule without a judge's name runs with each. `exact` comes first, for
    comparison; `null` is `exact` in batches of another size."""
    variants: dict[str, tuple[AcceptanceRule, str | None]] = {}
    for rule in sorted(rules, key=lambda rule: not (rule == "exact" or isinstance(rule, Exact))):
        if not isinstance(rule, AcceptanceRule):
            variants |= _resolve(rule, judges, pair)
        elif (name := rule_text(rule)) in variants:
            raise SelfJudgeError(f"two rules are called {name}: give them different names, or judges by `judges`")
        else:
            variants[name] = rule, None
    for gamma in (once := dict.fromkeys(gammas)):
        for resolved, _ in variants.values():
            resolved.check(gamma)
    return [RuleRun(name, gamma, resolved, judge) for gamma in once for name, (resolved, judge) in variants.items()]


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


_DECLARED = read_json(Path(__file__).with_name("presets.json"))
PAPER_PAIRS = _DECLARED.pop("pairs")  # target and draft of the paper's own pairs


@dataclass(frozen=True)
class Preset:
    """What is labelled, trained and evaluated."""

    prompts: tuple[str, ...]  # prompts labelled by likelihood (SelfJudge)
    auto: tuple[str, ...]  # prompts labelled by preserved answers (AutoJudge)
    auto_plus: tuple[str, ...]  # prompts labelled by the target's own verdict (AutoJudge+)
    tasks: tuple[str, ...]
    limit: int | None = None
    sweep_tasks: tuple[str, ...] = ()  # tasks on which thresholds and N are swept
    gamma: int = 10
    gammas: tuple[int, ...] = ()  # other γ, for `exact` and the main judges on the first task
    task_gammas: dict[str, int] = field(default_factory=dict)  # tasks with a γ of their own
    label_tokens: int = 512  # maximum new tokens of an answer that is labelled
    eval_tokens: int | None = None  # maximum new tokens of an answer that is evaluated; the task's own number if None
    calibrate_prompts: int = 100  # prompts to find τ with, if none ships with the pair
    substitutions: int | None = 30
    originals: bool = False
    released: bool = False  # whether a judge is also trained as in the authors' code, which differs from the paper


for _values in _DECLARED.values():
    _values |= {key: tuple(value) for key, value in _values.items() if isinstance(value, list)}
PRESETS = {name: Preset(**values) for name, values in _DECLARED.items()}
"""quick: little of everything on one small machine, needs no data; full: every method on every task, one GPU;
paper: the paper's own settings; released: the method as in the authors' code, beside that of the paper."""


@dataclass(frozen=True)
class ReproduceConfig:
    """What `reproduce` runs, and on what."""

    preset: str = setting("quick", "How much is run; paper has the paper's settings.", choices=tuple(PRESETS))
    prompts: tuple[str, ...] = setting((), "Prompts to label by likelihood, such as arithmetic:30, not the preset's.")
    tasks: tuple[str, ...] = setting((), "Tasks to evaluate on instead of the preset's.")
    limit: int | None = setting(None, "Examples of each task instead of the preset's number.", minimum=1)
    max_new_tokens: int | None = setting(None, "Most new tokens of an answer, not the preset's.", minimum=1)
    calibrate_prompts: int | None = setting(None, "Prompts to find τ with, if none ships.", minimum=1)
    batch: int | None = setting(None, "Prompts at a time; as label and eval choose if not given.", minimum=1)
    nli: str = setting("auto", "Factual consistency by: an NLI model, proxy (the target itself), off, or auto.")
    data: Path | None = setting(None, "Folder with the benchmarks' files; SELFJUDGE_DATA if not given.")
    allow_unsafe: bool = setting(False, "Run generated code even if it cannot be isolated.")

    def check(self) -> None:
        """Refuse what cannot work, before a model is loaded."""
        check_settings(self)
        self.evaluation.check()

    @property
    def evaluation(self) -> EvalConfig:
        """The settings that all evaluations of the preset share."""
        preset = self.choose_preset()
        return EvalConfig(
            tasks=preset.tasks, limit=preset.limit, max_new_tokens=preset.eval_tokens, batch=self.batch,
            nli=self.nli, data=self.data, allow_unsafe=self.allow_unsafe,
        )  # fmt: skip

    def choose_preset(self) -> Preset:
        """The preset, with the given settings in place of its own."""
        given = {name: getattr(self, name) for name in ("prompts", "tasks", "limit", "calibrate_prompts")}
        given |= {"label_tokens": self.max_new_tokens, "eval_tokens": self.max_new_tokens}
        preset = replace(PRESETS[self.preset], **{name: value for name, value in given.items() if value})
        return replace(preset, sweep_tasks=tuple(task for task in preset.sweep_tasks if task in preset.tasks))
