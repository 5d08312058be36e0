"""What a report is made of: frozen records of the results that were read, and the order in which they are shown.

Tasks come as in the paper, rules from lossless to boldest. The γ that most of its runs have stands for a task.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from selfjudge.types import PHASES

Interval = tuple[float, float]
Key = tuple[str, str, str, int, str, int, int]
"""(pair, task, rule, γ, fold, examples, most tokens of an answer)"""
APART = " · "
"""Between a task and what sets some of its runs apart."""


@dataclass(frozen=True)
class Token:
    """One token of an answer and what the target thought there."""

    text: str
    origin: str
    choice: str
    """The target's most likely token."""
    p: float | None
    p_choice: float | None
    judge: float | None
    """The judge's P(acceptable), where it was asked."""
    cycle: int | None
    """The target pass that emitted it; 0 is prefill."""


@dataclass(frozen=True)
class Example:
    """An answer for the viewer."""

    id: str
    prompt: str
    score: float | None
    tokens: tuple[Token, ...]


@dataclass(frozen=True)
class Provenance:
    """What figures were measured on, as text."""

    machine: str = ""
    dtype: str = ""
    versions: str = ""
    date: str = ""
    commit: str = ""


class Answered(NamedTuple):
    """How one example was answered."""

    tokens: int
    cycles: int
    score: float | None = None
    agrees: float | None = None
    """With the answer of `exact`."""


@dataclass(frozen=True)
class Run:
    """One task decoded by one rule at one γ: eval's `summary.json` and what lies beside it. Scores are shares.

    Fields have the names of the summary's keys.
    """

    folder: Path
    pair: str
    task: str
    rule: str
    """As given, its judge included: `judged:F@selfjudge`."""
    judge: str
    gamma: int
    n: int
    measure: str
    score: float
    score_ci: Interval | None
    scores: Mapping[str, float]
    delta_score: float | None
    delta_ci: Interval | None
    delta_scores: Mapping[str, float]
    """Of the measures beside the one that stands for the task."""
    delta_scores_ci: Mapping[str, Interval]
    agreement: float | None
    agreement_ci: Interval | None
    lost: int | None
    """Examples that score less than with `exact`."""
    gained: int | None
    mean_accepted_length: float | None
    delta_m: float | None
    delta_m_ci: Interval | None
    """Older summaries have none."""
    m_ratio: float | None
    drafts_accepted: float | None
    judged_share: float | None
    tokens_per_second: float | None
    extraction_failures: float | None
    cut_off: float | None
    threshold: float | None
    label_method: str
    features: str
    suffix_length: int | None
    label_prompts: int | None
    """How many prompts its judge was labelled with."""
    fold: str
    batch: int | None
    max_new_tokens: int | None
    seconds: Mapping[str, float]
    substitutions: tuple[tuple[str, str, int], ...]
    provenance: Provenance
    answers: Mapping[str, Answered] = field(default_factory=dict, repr=False)
    """Of every example, by id."""
    examples: tuple[Example, ...] = field(default=(), repr=False)
    ships: bool = False
    """Whether its judge is the one that ships for the pair."""
    both: bool = False
    """Whether R is the same threshold as its F, and so the same run."""

    @property
    def m(self) -> float | None:
        return self.mean_accepted_length

    @property
    def name(self) -> str:
        """The rule without options: `judged`."""
        return re.split("[:@]", self.rule, maxsplit=1)[0]

    @property
    def option(self) -> str:
        """What was chosen of it: `F`, `0.35`, `2`; empty where nothing was."""
        return self.rule.partition("@")[0].partition(":")[2]

    @property
    def method(self) -> str:
        """What makes one curve: rule, whether it goes by a price, its other options, and judge."""
        _, by_price, others = _swept(self.option)
        named = "".join(f", {option}" for option in (*(["price"] if by_price else []), *others))
        return f"{self.name}{named}@{self.judge}" if self.judge else f"{self.name}{named}"

    @property
    def number(self) -> float | None:
        """What tells the points of its curve apart, where it is a number: threshold, quality or price."""
        try:
            return float(_swept(self.option)[0].removeprefix("q"))
        except ValueError:
            return None

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by phase; what the total has beyond them is `other`."""
        known = {phase: self.seconds[phase] for phase in PHASES if phase in self.seconds}
        total = self.seconds.get("total", 0.0)
        rest = total - sum(known.values())
        return {**known, "other": rest} if rest > 0.005 * total else known

    @property
    def key(self) -> Key:
        """What makes it another run."""
        return self.pair, self.task, self.rule, self.gamma, self.fold, self.n, self.max_new_tokens or 0


SWEPT = ("threshold", "theta", "k", "entropy", "share")
"""Names of the options that tell the points of a curve apart, where they are written out."""


def _swept(options: str) -> tuple[str, bool, list[str]]:
    """(the option that tells the points of a curve apart, whether it is a price, the others without a default guard)"""
    parts = options.split(",") if options else []
    price = next((part for part in parts if part.startswith("price=")), None)
    by_name = bool(parts) and parts[0].partition("=")[0] in SWEPT
    swept = price or (parts[0] if parts and ("=" not in parts[0] or by_name) else None)
    default = f"guard={price is not None}"  # rule objects write it out; it is on with a price alone
    others = [part for part in parts if part not in (swept, default)]
    return (swept or "").rpartition("=")[2], price is not None, others


@dataclass(frozen=True)
class Roc:
    """Of the holdout's mismatches: shares of unacceptable (x) and acceptable (y) tokens accepted."""

    fpr: tuple[float, ...]
    tpr: tuple[float, ...]
    marks: Mapping[str, Interval]
    auc: float | None


@dataclass(frozen=True)
class JudgeCard:
    """A judge's `config.json`, and its ROC curve where there is one."""

    folder: Path
    name: str
    config: Mapping[str, Any]
    roc: Roc | None
    ships: bool = False
    """Whether it is the one that ships for its target."""

    @property
    def label(self) -> str:
        return f"{self.name} (ships)" if self.ships else self.name


@dataclass(frozen=True)
class LabelRun:
    """One method of a label run."""

    pair: str
    method: str
    prompts: int | None
    rows: int
    acceptable: float | None
    rows_per_hour: float
    """Prompts and responses included, the search for τ not."""
    tau_seconds: float | None
    target_tokens_per_label: float | None
    provenance: Provenance


@dataclass(frozen=True)
class Study:
    """`study.json`: learning curve and features, ROC-AUC on holdout mismatches."""

    name: str
    target: str
    learning_curve: tuple[Mapping[str, float | None], ...]
    features: tuple[Mapping[str, Any], ...]
    provenance: Provenance


@dataclass(frozen=True)
class Results:
    """All that a report is made of."""

    runs: tuple[Run, ...]
    judges: tuple[JudgeCard, ...]
    labels: tuple[LabelRun, ...]
    studies: tuple[Study, ...]
    skipped: tuple[tuple[str, str], ...]
    """(folder, why) of what was found and left out."""


PAPER = ("gsm8k", "math500", "mmlu", "cnn_dailymail")
"""The tasks whose average the paper reports."""
TITLES = {
    "gsm8k": "GSM8K", "math500": "MATH-500", "mmlu": "MMLU", "cnn_dailymail": "CNN/DailyMail",
    "livecodebench": "LiveCodeBench", "mbpp": "MBPP", "dolly": "Dolly",
}  # fmt: skip


def title(task: str) -> str:
    name, _, apart = task.partition(APART)
    benchmark, _, split = name.partition("-")
    known = TITLES.get(benchmark, benchmark)
    if split and benchmark in TITLES:
        known = f"{known}, all folds" if name == "livecodebench-all" else f"{known}, {split}"
    elif split:
        known = name
    return f"{known}, {apart}" if apart else known


def task_order(task: str) -> tuple[int, str]:
    known, name = (*PAPER, "livecodebench"), task.partition(APART)[0].partition("-")[0]
    return (known.index(name) if name in known else len(known), task)


def rule_order(run: Run) -> tuple[Any, ...]:
    """`exact`, other rules, judged, judge_only; F and R before numbers."""
    rank = {"exact": 0, "judged": 2, "judge_only": 3}.get(run.name, 1)
    option = (0, 0.0, run.option) if run.number is None else (1, run.number, run.option)
    return rank, run.method, option, run.gamma, run.fold


def by_task(runs: Iterable[Run]) -> dict[tuple[str, str], list[Run]]:
    """(pair, task) → runs in order."""
    grouped: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        grouped[run.pair, run.task].append(run)
    keys = sorted(grouped, key=lambda key: (key[0], task_order(key[1])))
    return {key: sorted(grouped[key], key=rule_order) for key in keys}


def usual_gamma(runs: Iterable[Run]) -> int:
    """The γ most runs have; the larger of two."""
    counts = Counter(run.gamma for run in runs)
    return max(counts, key=lambda gamma: (counts[gamma], gamma))


def named(run: Run) -> bool:
    """Whether its option is F, R or nothing. Numbers, qualities and prices of a judged rule are points of a sweep."""
    return run.number is None or not run.judge


def several(values: Iterable[Any]) -> bool:
    return len(set(values)) > 1


def timed(runs: Sequence[Run]) -> list[Run]:
    """One task's runs at its usual γ whose time is known; of a sweep only where nothing else of its method is."""
    gamma = usual_gamma(runs)
    known = [r for r in runs if r.gamma == gamma and sum(r.phases.values()) > 0]
    methods = {r.method for r in known if named(r)}
    return [r for r in known if named(r) or r.method not in methods]
