"""The verdict: the result in three sentences, one chart and at most five rows.

It covers the paper's tasks, as far as they were run, else the first task. Every figure is paired with `exact`: the same
prompts, the same γ."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from selfjudge.report.charts import FIRST, GAIN, Chart, Point, Series, in_points
from selfjudge.report.formats import Sentences, change, fixed, gain, show_count, signed_points
from selfjudge.report.records import PAPER, EvalRun, rule_order, task_order, task_title, usual_gamma
from selfjudge.report.tables import AGREEMENT, PER_PASS, RULE, Column, Row, Table, average_row, score_column

LOW_SCORE = 0.1  # a score of `exact` below which a rule can hardly lose anything
FEW_PROMPTS = 100  # below so many prompts a loss of 3 points may go unseen, even if not one answer changed


class VerdictSection(NamedTuple):
    sentences: Sequence[str]
    chart: Chart
    table: Table
    warning: str


def make_verdict(runs: Sequence[EvalRun]) -> VerdictSection | None:
    """The verdict on the pair with most runs; None where no rule was run besides `exact`."""
    counts = Counter(run.pair for run in runs)
    pair = max(counts, key=lambda name: (counts[name], name), default="")
    own = [run for run in runs if run.pair == pair]
    tasks = _covered_tasks(own)
    if not tasks:
        return None
    gamma = usual_gamma(run for run in own if run.task in tasks)
    exact, *others = _choose_rules(own, tasks, gamma) or [[]]
    if not others or exact[0].name != "exact":
        return None
    rows = list(map(average_row, [exact, *others]))
    where = f"{', '.join(map(task_title, tasks))}, γ = {gamma}" + (f", {pair}" if len(counts) > 1 else "")
    score = sum(run.score for run in exact) / len(exact)
    n = sum(run.n for run in exact)
    sentences = _sentences(rows[1:], f"{where}; {show_count(n, 'prompt')}", score)
    warning = _say("few", sum(run.scored for run in exact))
    return VerdictSection(sentences, _chart(rows), _table(rows, where), warning)


def _covered_tasks(runs: Sequence[EvalRun]) -> list[str]:
    """The paper's tasks that `exact` was run on, else the first task."""
    with_exact = sorted({run.task for run in runs if run.name == "exact"}, key=task_order)
    return [task for task in with_exact if task in PAPER] or with_exact[:1]


def _choose_rules(runs: Sequence[EvalRun], tasks: Sequence[str], gamma: int) -> list[list[EvalRun]]:
    """One rule of each kind that was run on all tasks, as its runs: the judge's default threshold, or most runs."""
    usual = Counter(name for run in runs for name in {run.method, run.rule})
    default = {"R": 2, "F": 1}  # a judge decides at R unless it is told otherwise
    rules: dict[str, list[EvalRun]] = {}
    for run in sorted((run for run in runs if run.task in tasks and run.gamma == gamma), key=rule_order):
        if run.name == "exact" or None not in (run.delta_score, run.m_ratio):
            rules.setdefault(run.rule, []).append(run)

    def order(found: Sequence[EvalRun]) -> tuple[Any, ...]:
        return default.get(found[0].option, 0), usual[found[0].method], usual[found[0].rule]

    complete = [found for found in rules.values() if len(found) == len(tasks)]
    by_kind = ([found for found in complete if found[0].name == kind] for kind in FIRST)
    return [max(found, key=order) for found in by_kind if found]


_say = Sentences("verdict.txt", few_prompts=FEW_PROMPTS)


def _sentences(rows: Sequence[Row], where: str, exact_score: float) -> list[str]:
    """The gain and cost of the first rule, those of the others, and where no loss is shown.

    That `exact` itself is hardly ever right comes first."""
    first, *others = rows
    sentences = [_say("first", first, where), *([_say("others", others)] if others else [])]
    if exact_score < LOW_SCORE:
        return [_say("little", exact_score), *sentences]
    without_loss = [row for row in rows if row["delta_ci"] is not None and row["delta_ci"][1] >= 0]
    return sentences if first["few"] else [*sentences, _say("loss", without_loss)]


def _chart(rows: Sequence[Row]) -> Chart:
    """The paired change of the score against the gain in m, a point a rule."""
    exact, *others = rows
    series = [Series("exact", 0, (Point(0.0, 0.0, exact["rule"]),))]
    for style, row in enumerate(others, 1):
        label = f"{row['rule']}: m {gain(row['m_ratio'])}, {_say('changed', row)}"
        x, y = 100 * (row["m_ratio"] - 1), 100 * row["delta_score"]
        spread = None if row["few"] else in_points(row["delta_ci"])
        series.append(Series(row["rule"], style, (Point(x, y, label, interval=spread),)))
    first = others[0]
    shown = change(first["delta_score"], first["delta_ci"], first["few"])
    finding = f"{first['rule']}: {gain(first['m_ratio'])} m, {shown}"
    return Chart("verdict", finding, GAIN, "change of the score, points", tuple(series), level=0.0)


def _table(rows: Sequence[Row], where: str) -> Table:
    columns = (
        RULE,
        Column(PER_PASS.head, "m", fixed, help="of the target, mean over the tasks"),
        Column("gain in m", "m_ratio", gain, "m_ratio_ci", "against exact, same task and γ"),
        score_column("change, points", "delta_score", signed_points, "delta_ci", "of the score, paired by example"),
        AGREEMENT,
    )
    return Table("verdict", where, columns, tuple(rows))
