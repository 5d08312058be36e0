"""Rules at equal m: how much more a rule keeps than an untrained margin with the same m.

`python benchmarks/equal_m.py DIR...` reads folders that `selfjudge eval` wrote and prints a table for each task.

A margin's curve begins at `exact`, has a point for each threshold, and straight lines between. Agreement falls steeply
at first, then less and less, so a line lies above the curve that it approximates. From `exact` to the strictest margin
it lies far above: there a lead is a lower bound, without an interval. Elsewhere intervals are paired by example.

m is a ratio of sums, so its standard error comes from the linearised ratio: each example i adds
z_i = (t_i − m·c_i) / c̄ with its t_i tokens and c_i cycles.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import stdev
from typing import Any, NamedTuple

from selfjudge.report.formats import percent, show_interval, signed_points
from selfjudge.report.records import FEWEST_SCORED, EvalRun, Interval, group_by_task, name_task, read_results, slug
from selfjudge.report.tables import AGREEMENT, GAMMA, RULE, Column, Row, Table
from selfjudge.store import measured_on, read_rows, write_json

CURVES = {"margin": "margin", "margin, price": "priced margin"}
"""Untrained methods that others are compared with, and their names in a table."""
AGREES, SCORE = "agrees", "score"
"""The fields of an answer that are compared."""
FIGURES = {AGREES: "same answer", SCORE: "score"}
Z = 1.959964
"""95 % of a normal distribution lie within ± Z standard deviations."""
Answers = Mapping[str, Mapping[str, Any]]
"""Rows of samples.jsonl.gz by id."""


class Answered(NamedTuple):
    """A run and its answers."""

    run: EvalRun
    answers: Answers


class Lead(NamedTuple):
    """The difference between a run and a curve at the same m, as a share."""

    value: float
    interval: Interval | None
    at_least: bool = False
    """Whether it is a lower bound."""


def compare_at_equal_m(folders: Sequence[Path]) -> list[Table]:
    """One table a task: every rule against the untrained margins at its m."""
    runs, tables = read_results(folders)[0], []
    for (pair, task), own in group_by_task(runs).items():
        here = [Answered(run, read_answers(run.folder)) for run in own]
        rows = [row for one in here if (row := _row(one, here)) is not None]
        if rows:
            title, part = name_task(pair, task, runs)
            tables.append(Table(slug("equal-m", part), f"{title}: lead at equal m", _columns(rows), tuple(rows)))
    return tables


def read_answers(folder: Path) -> Answers:
    """The rows of a run; none where they were not kept."""
    file = folder / "samples.jsonl.gz"
    return {row["id"]: row for row in read_rows(file, dict[str, Any])} if file.is_file() else {}


def _key(figure: str, method: str) -> str:
    """`agreement_over_priced_margin`"""
    kind = "agreement" if figure == AGREES else figure
    return f"{kind}_over_{CURVES[method].replace(' ', '_')}"


def _row(one: Answered, others: Sequence[Answered]) -> Row | None:
    """A rule's leads over the curves that reach its m; None where none does, and for `margin`, `exact` and `null`."""
    run = one.run
    if run.method == "margin" or run.kind in ("exact", "null") or run.m_ratio is None:
        return None
    row: dict[str, Any] = {
        **{name: getattr(run, name) for name in ("pair", "task", "rule", "method", "gamma")},
        "gain": run.m_ratio - 1,
        "agreement": run.agreement,
        "agreement_ci": run.agreement_ci,
        "few": run.scored < FEWEST_SCORED,
    }
    known = False
    for method in CURVES:
        for figure in FIGURES:
            lead = lead_over(one, margin_curve(method, run, others), figure) if method != run.method else None
            key = _key(figure, method)
            row[key], row[f"{key}_ci"] = (None, None) if lead is None else (lead.value, lead.interval)
            row[f"{key}_at_least"] = lead is not None and lead.at_least
            known |= lead is not None
    return row if known else None


def _columns(rows: Sequence[Row]) -> tuple[Column, ...]:
    leads = (
        _lead_column(key, f"{word} over {called}")
        for figure, word in FIGURES.items()
        for method, called in CURVES.items()
        if any(row[key := _key(figure, method)] is not None for row in rows)
    )
    return RULE, GAMMA, Column("gain in m", "gain", percent), AGREEMENT, *leads


def _lead_column(key: str, head: str) -> Column:
    return Column(
        head,
        lambda row: ("≥ " if row[f"{key}_at_least"] else "") + signed_points(row[key]),
        below=lambda row: show_interval(row[f"{key}_ci"], signed_points),
        help="points more, at the same m",
    )


def margin_curve(method: str, run: EvalRun, others: Sequence[Answered]) -> list[Answered]:
    """The runs of a method at the γ of `run`, by m, from `exact` on; none where either is missing."""
    here = [other for other in others if other.run.gamma == run.gamma and other.run.m is not None]
    exact = [other for other in here if other.run.kind == "exact"]
    margins = [other for other in here if other.run.method == method]
    return sorted((*exact, *margins), key=lambda o: (o.run.m, o.run.rule)) if exact and margins else []


def lead_over(one: Answered, points: Sequence[Answered], figure: str) -> Lead | None:
    """The lead of a run over the line through `points` at its m; None beyond the line's ends."""
    m = one.run.m or 0.0
    for low, high in pairwise(points):
        if (low.run.m or 0.0) <= m <= (high.run.m or 0.0) and low.run.m != high.run.m:
            return _lead(one, low, high, figure)
    return None


def _lead(one: Answered, low: Answered, high: Answered, figure: str) -> Lead | None:
    """The lead of a run over the line from `low` to `high`, on the examples that all three have."""
    shared = sorted(one.answers.keys() & low.answers.keys() & high.answers.keys())
    values = [_mean(r, shared, figure) for r in (one, low, high)]
    lengths = [m_influences([r.answers[i] for i in shared]) for r in (one, low, high)]
    if len(shared) < 2 or None in values or None in lengths:
        return None
    (value, y), (value_low, y_low), (value_high, y_high) = (v for v in values if v is not None)
    (m, z), (m_low, z_low), (m_high, z_high) = (v for v in lengths if v is not None)
    if m_low == m_high:
        return None
    part = (m - m_low) / (m_high - m_low)
    slope = (value_high - value_low) / (m_high - m_low)

    def beyond(own: float, at_low: float, at_high: float) -> float:
        return own - (1 - part) * at_low - part * at_high

    lead = beyond(value, value_low, value_high)
    if figure == AGREES and low.run.kind == "exact":
        return Lead(lead, None, at_least=True) if lead > 0 else None  # a bound below 0 says nothing
    # the lead moves with the three values, and with the three m along the slope of the line
    changes = [
        beyond(*moved[:3]) - slope * beyond(*moved[3:])
        for moved in zip(y, y_low, y_high, z, z_low, z_high, strict=True)
    ]
    half = Z * stdev(changes) / math.sqrt(len(changes))
    return Lead(lead, (lead - half, lead + half))


def _mean(one: Answered, ids: Sequence[str], figure: str) -> tuple[float, list[float]] | None:
    """The mean of a figure over the answers that have it, and by how much each answer moves it."""
    is_exact = figure == AGREES and one.run.kind == "exact"  # it agrees with itself; its rows do not say so
    values: list[float | None] = [1.0 if is_exact else one.answers[i].get(figure) for i in ids]
    known = [value for value in values if value is not None]
    if not known:
        return None
    mean = sum(known) / len(known)
    return mean, [0.0 if value is None else (value - mean) * len(values) / len(known) for value in values]


def m_influences(answers: Sequence[Mapping[str, Any]]) -> tuple[float, list[float]] | None:
    """Pooled m and every example's z; the token that prefill yields belongs to no cycle."""
    emitted = [(a["tokens"] - 1 if a["cycles"] else 0, a["cycles"]) for a in answers]
    cycles = sum(c for _, c in emitted)
    m = sum(t for t, _ in emitted) / cycles if cycles else 0.0
    if not m:
        return None
    return m, [(t - m * c) * len(emitted) / cycles for t, c in emitted]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", metavar="DIR", help="folders that `selfjudge eval` wrote")
    parser.add_argument("--out", type=Path, help="write the rows as JSON into this file")
    options = parser.parse_args()
    tables = compare_at_equal_m(options.folders)
    for table in tables:
        print(table.markdown())
    if options.out is not None:
        write_json(options.out, {**measured_on(), "tables": {table.id: list(table.rows) for table in tables}})
