"""The verdict: the result in three sentences and one chart, on the paper's tasks that were run, else the first task.
Every figure is paired with `exact`: the same prompts, the same γ."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from selfjudge.report.charts import FIRST, SCORE, Chart, Series
from selfjudge.report.formats import Sentences, show_count
from selfjudge.report.records import PAPER, EvalRun, rule_order, task_order, task_title, usual_gamma
from selfjudge.report.tables import Row, average_row

LOW_SCORE = 0.1  # a score of `exact` below which a rule can hardly lose anything
FEW_PROMPTS = 100  # below so many prompts a loss of 3 points may go unseen, even if not one answer changed
_say = Sentences("verdict.txt", few_prompts=FEW_PROMPTS)


class VerdictSection(NamedTuple):
    sentences: Sequence[str]
    chart: Chart
    warning: str


def make_verdict(runs: Sequence[EvalRun]) -> VerdictSection | None:
    """The verdict on the pair with most runs; None where no rule was run besides `exact`."""
    counts = Counter(run.pair for run in runs)
    pair = max(counts, key=lambda name: (counts[name], name), default="")
    own = [run for run in runs if run.pair == pair]
    tasks = _find_tasks(own)
    if not tasks:
        return None
    gamma = usual_gamma(run for run in own if run.task in tasks)
    exact, *others = _choose_rules(own, tasks, gamma) or [[]]
    if not others or exact[0].kind != "exact":
        return None
    rows = list(map(average_row, [exact, *others]))
    series = (Series(row["rule"], style, (SCORE.place(row),)) for style, row in enumerate(rows))
    chart = SCORE.chart("verdict", SCORE.describe(rows[1]), series)
    n = show_count(sum(run.n for run in exact), "prompt")
    where = f"{', '.join(map(task_title, tasks))}, γ = {gamma}{f', {pair}' if len(counts) > 1 else ''}; {n}"
    sentences = _describe(rows[1:], where, sum(run.score for run in exact) / len(exact))
    return VerdictSection(sentences, chart, _say("few", sum(run.scored for run in exact)))


def _find_tasks(runs: Sequence[EvalRun]) -> list[str]:
    """The paper's tasks that `exact` was run on, else the first task."""
    with_exact = sorted({run.task for run in runs if run.kind == "exact"}, key=task_order)
    return [task for task in with_exact if task in PAPER] or with_exact[:1]


def _describe(rows: Sequence[Row], where: str, exact_score: float) -> list[str]:
    """The gain and cost of the first rule, those of the others, and where no loss is shown."""
    first, *others = rows
    sentences = [_say("first", first, where), *([_say("others", others)] if others else [])]
    if exact_score < LOW_SCORE:
        return [_say("little", exact_score), *sentences]
    without_loss = [row for row in rows if row["delta_ci"] is not None and row["delta_ci"][1] >= 0]
    return sentences if first["few"] else [*sentences, _say("loss", without_loss)]


def _choose_rules(runs: Sequence[EvalRun], tasks: Sequence[str], gamma: int) -> list[list[EvalRun]]:
    """One rule of each kind that was run on all tasks, as its runs: the judge's default threshold, or most runs."""
    usual = Counter(name for run in runs for name in {run.method, run.rule})
    default = {"R": 2, "F": 1}  # a judge decides at R unless it is told otherwise
    rules: dict[str, list[EvalRun]] = {}
    for run in sorted((run for run in runs if run.task in tasks and run.gamma == gamma), key=rule_order):
        if run.kind == "exact" or None not in (run.delta_score, run.m_ratio):
            rules.setdefault(run.rule, []).append(run)

    def order(own: Sequence[EvalRun]) -> tuple[Any, ...]:
        return default.get(own[0].option, 0), usual[own[0].method], usual[own[0].rule]

    complete = [own for own in rules.values() if len(own) == len(tasks)]
    by_kind = ([own for own in complete if own[0].kind == kind] for kind in FIRST)
    return [max(own, key=order) for own in by_kind if own]
