"""Which run comes where: tasks as in the paper, rules from lossless to boldest, and the γ that stands for a task."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from selfjudge.report.records import APART, Run

PAPER = ("gsm8k", "math500", "mmlu", "cnn_dailymail")
"""The tasks whose average the paper reports."""
TITLES = {
    "gsm8k": "GSM8K", "math500": "MATH-500", "mmlu": "MMLU", "cnn_dailymail": "CNN/DailyMail",
    "livecodebench": "LiveCodeBench", "mbpp": "MBPP", "dolly": "Dolly",
}  # fmt: skip


def title(task: str) -> str:
    name, _, apart = task.partition(APART)
    known = TITLES.get(name, name) if name != "livecodebench-all" else "LiveCodeBench, all folds"
    return f"{known}, {apart}" if apart else known


def task_order(task: str) -> tuple[int, str]:
    known, name = (*PAPER, "livecodebench", "livecodebench-all"), task.partition(APART)[0]
    return (known.index(name) if name in known else len(known), task)


def rule_order(run: Run) -> tuple[Any, ...]:
    """`exact`, other rules, judged, judge_only; F and R before numbers."""
    rank = {"exact": 0, "judged": 2, "judge_only": 3}.get(run.name, 1)
    try:
        option: tuple[int, float, str] = (1, float(run.option.removeprefix("q")), "")
    except ValueError:
        option = (0, 0.0, run.option)
    return rank, run.method, option, run.gamma, run.fold


def by_task(runs: Iterable[Run]) -> dict[tuple[str, str], list[Run]]:
    """(pair, task) → runs in order."""
    found: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        found[run.pair, run.task].append(run)
    keys = sorted(found, key=lambda key: (key[0], task_order(key[1])))
    return {key: sorted(found[key], key=rule_order) for key in keys}


def usual_gamma(runs: Iterable[Run]) -> int:
    """The γ most runs have; the larger of two."""
    counts: dict[int, int] = defaultdict(int)
    for run in runs:
        counts[run.gamma] += 1
    return max(counts, key=lambda gamma: (counts[gamma], gamma))


def named(run: Run) -> bool:
    """Whether its option is no number: F, R or nothing. Numbers and qualities of a judged rule are points of a sweep."""
    try:
        float(run.option.removeprefix("q"))
    except ValueError:
        return True
    return not run.judge


def several(values: Iterable[Any]) -> bool:
    return len(set(values)) > 1


def timed(runs: Sequence[Run]) -> list[Run]:
    """One task's runs at its usual γ whose time is known; of a sweep over θ only where nothing else of its method is."""
    gamma = usual_gamma(runs)
    mine = [r for r in runs if r.gamma == gamma and sum(r.phases.values()) > 0]
    known = {r.method for r in mine if named(r)}
    return [r for r in mine if named(r) or r.method not in known]
