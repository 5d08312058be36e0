"""The verdict: what came out, in three sentences, one chart and at most five rows.

Over the paper's tasks, as far as they were run, else over the first task. Every figure is paired with `exact`: the same
prompts, the same γ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from selfjudge.report.charts import Lines, Point, Series, drop_far_points
from selfjudge.report.records import PAPER, Run, rule_order, task_order, title, usual_gamma
from selfjudge.report.table import RULE, Column, Row, Table, fixed, percent, points, same_answer, signed_points, whole
from selfjudge.report.tables import Against, average

LITTLE = 0.1
"""A score of `exact` below which hardly anything can be lost."""
KINDS = ("exact", "judged", "margin", "fly", "topk")
"""Rules that the verdict is about, one of each kind: where nothing ships, the judged one with most runs."""


@dataclass(frozen=True)
class Verdict:
    sentences: tuple[str, ...]
    chart: Lines
    table: Table


def verdict(runs: Sequence[Run], against: Against) -> Verdict | None:
    """Of the pair with most runs; None where no rule was run beside `exact`."""
    counts = Counter(run.pair for run in runs)
    pair = max(counts, key=lambda name: (counts[name], name), default="")
    own = [run for run in runs if run.pair == pair and not run.fold]
    tasks = sorted({run.task for run in own if run.name == "exact"}, key=task_order)
    tasks = [task for task in tasks if task in PAPER] or tasks[:1]
    here = [run for run in own if run.task in tasks]
    if not here:
        return None
    gamma = usual_gamma(here)
    at_gamma = [run for run in here if run.gamma == gamma]
    usual = Counter(name for run in own for name in {run.method, run.rule})
    chosen = [found for kind in KINDS if (found := _chosen(kind, at_gamma, tasks, usual))]
    rows = [_row(each, against) for each in chosen]
    rows = [row for row in rows if row["kind"] == "exact" or None not in (row["delta_score"], row["m_ratio"])]
    if len(rows) < 2 or rows[0]["kind"] != "exact":
        return None
    others = rows[1:]
    where = f"{', '.join(map(title, tasks))}, γ = {gamma}" + (f", {pair}" if len(counts) > 1 else "")
    exact = chosen[0]
    score = sum(run.score for run in exact) / len(exact)
    asked = f"{where}; {whole(sum(run.n for run in exact))} prompts"
    return Verdict(tuple(_sentences(others, asked, score)), _chart(rows, where), _table(rows, where))


def _chosen(kind: str, runs: Sequence[Run], tasks: Sequence[str], usual: Counter[str]) -> list[Run]:
    """The runs of one rule of that kind, one a task: what ships first, then what was run most often."""
    rules: dict[str, list[Run]] = {}
    for run in sorted((r for r in runs if r.name == kind), key=rule_order):
        rules.setdefault(run.rule, []).append(run)
    whole = [found for found in rules.values() if len(found) == len(tasks)]
    default = {"R": 2, "F": 1}  # a judge decides at R where nobody says otherwise

    def order(found: Sequence[Run]) -> tuple[Any, ...]:
        run = found[0]
        return run.ships, default.get(run.option, 0), usual[run.method], usual[run.rule]

    return max(whole, key=order, default=[])


def _row(runs: Sequence[Run], against: Against) -> Row:
    agreements = [run.agreement for run in runs if run.agreement is not None]
    return {
        **average(runs, against),
        "kind": runs[0].name,
        "m": sum(run.m or 0.0 for run in runs) / len(runs),
        "agreement": sum(agreements) / len(agreements) if agreements else None,
    }


def gain(row: Row) -> str:
    """Of m, in per cent."""
    return f"{fixed(100 * (row['m_ratio'] - 1), 1, '+')} %"


def _change(row: Row) -> str:
    ends = row["delta_ci"]
    interval = "" if ends is None else f" [{signed_points(ends[0])}, {signed_points(ends[1])}]"
    return f"{signed_points(row['delta_score'])}{interval} points"


def _name(row: Row) -> str:
    return RULE.show(row)


def _sentences(rows: Sequence[Row], where: str, exact: float) -> list[str]:
    """What the first rule gains and costs, what the others do, and which of them show no loss.

    Where `exact`, the score of exact, is near 0, no rule can lose much: that is said instead.
    """
    first, *others = rows
    said = [
        f"{_name(first)} yields {gain(first)} tokens per target pass against exact and changes the score by"
        f" {_change(first)} ({where})."
    ]
    if others:
        said.append("Beside it: " + "; ".join(f"{_name(row)} {gain(row)} at {_change(row)}" for row in others) + ".")
    if exact < LITTLE:
        kept = (
            ""
            if first["agreement"] is None
            else f", and {_name(first)} keeps {percent(first['agreement'])} of its answers"
        )
        return [*said, f"There is little to lose here: exact itself scores {points(exact)} of 100 points{kept}."]
    level = [row for row in rows if row["delta_ci"] is not None and row["delta_ci"][1] >= 0]
    best = max(level, key=lambda row: row["m_ratio"], default=None)
    if best is None:
        said.append("Every one of them loses measurably: use exact where the answer counts.")
    else:
        said.append(
            f"Of those whose interval does not rule out 0, {_name(best)} gains most; an interval that holds 0 is not"
            " a proof that nothing is lost."
        )
    return said


def _chart(rows: Sequence[Row], where: str) -> Lines:
    """The paired change of the score against the gain in m, a point a rule."""
    series = []
    for style, row in enumerate(rows):
        exact = row["kind"] == "exact"
        x, y = (0.0, 0.0) if exact else (100 * (row["m_ratio"] - 1), 100 * row["delta_score"])
        ends = None if exact or row["delta_ci"] is None else tuple(100 * end for end in row["delta_ci"])
        label = _name(row) if exact else f"{_name(row)}: m {gain(row)}, {_change(row)}"
        series.append(Series(_name(row), style, (Point(x, y, label, interval=ends),)))
    first = rows[1]
    finding = f"{_name(first)}: {gain(first)} m, {signed_points(first['delta_score'])} points"
    axes = "gain in m against exact, %", "change of the score, points"
    return drop_far_points(Lines("verdict", finding, *axes, tuple(series), level=0.0))


def _table(rows: Sequence[Row], where: str) -> Table:
    columns = (
        RULE,
        Column("m", "m", fixed, help="tokens per target pass, mean over the tasks"),
        Column("gain in m", "m_ratio", _ratio, "m_ratio_ci", "against exact, same task and γ"),
        Column("change, points", "delta_score", signed_points, "delta_ci", "of the score, paired by example"),
        same_answer(),
    )
    return Table("verdict", where, columns, tuple(rows))


def _ratio(value: Any) -> str:
    return "–" if value is None else f"{fixed(100 * (value - 1), 1, '+')} %"
