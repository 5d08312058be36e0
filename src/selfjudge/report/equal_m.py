"""Rules at equal m: how much more a rule keeps than an untrained margin with the same m.

A margin's curve begins at `exact`, has a point for each threshold, and straight lines between. Agreement falls steeply
at first, then less and less, so a line lies above the curve that it approximates. From `exact` to the strictest margin
it lies far above: there a lead is a lower bound, without an interval. Elsewhere intervals are paired by example.

m is a ratio of sums, so its standard error comes from the linearised ratio: each example i adds
z_i = (t_i − m·c_i) / c̄ with its t_i tokens and c_i cycles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import stdev
from typing import Any

from selfjudge.report.formats import percent, show_interval, signed_points
from selfjudge.report.records import Answered, EvalRun, Interval, group_by_task, name_task, slug
from selfjudge.report.table import AGREEMENT, GAMMA, RULE, Column, Row, Table

CURVES = {"margin": "margin", "margin, price": "priced margin"}
"""Untrained methods that others are compared with, and their names in a table."""
AGREES, SCORE = "agrees", "score"
"""The fields of an answer that are compared."""
FIGURES = {AGREES: "same answer", SCORE: "score"}
Z = 1.959964
"""95 % of a normal distribution lie within ± Z standard deviations."""


@dataclass(frozen=True)
class Lead:
    """The difference between a run and a curve at the same m, as a share."""

    value: float
    interval: Interval | None
    at_least: bool = False
    """Whether it is a lower bound."""

    @property
    def is_sure(self) -> bool:
        """Whether its interval lies above 0; a bound has none."""
        return self.interval is not None and self.interval[0] > 0


def compare_at_equal_m(runs: Sequence[EvalRun]) -> list[Table]:
    """One table a task: every rule against the untrained margins at its m."""
    tables = []
    for (pair, task), here in group_by_task(runs).items():
        rows = [row for run in here if (row := _row(run, here)) is not None]
        if rows:
            title, part = name_task(pair, task, runs)
            tables.append(Table(slug("equal-m", part), f"{title}: lead at equal m", _columns(rows), tuple(rows)))
    return tables


def _key(figure: str, method: str) -> str:
    """`agreement_over_priced_margin`"""
    kind = "agreement" if figure == AGREES else figure
    return f"{kind}_over_{CURVES[method].replace(' ', '_')}"


def _row(run: EvalRun, runs: Sequence[EvalRun]) -> Row | None:
    """A rule's leads over the curves that reach its m; None where none does, and for `margin`, `exact` and `null`."""
    if not is_compared(run):
        return None
    assert run.m_ratio is not None
    row: dict[str, Any] = {
        **{name: getattr(run, name) for name in ("pair", "task", "rule", "method", "gamma")},
        "gain": run.m_ratio - 1,
        "agreement": run.agreement,
        "agreement_ci": run.agreement_ci,
    }
    known = False
    for method in CURVES:
        for figure in FIGURES:
            lead = lead_over(run, margin_curve(method, run, runs), figure) if method != run.method else None
            key = _key(figure, method)
            row[key], row[f"{key}_ci"] = (None, None) if lead is None else (lead.value, lead.interval)
            row[f"{key}_at_least"] = lead is not None and lead.at_least
            known |= lead is not None
    return row if known else None


def is_compared(run: EvalRun) -> bool:
    """Whether a run is compared with the margins."""
    return run.method != "margin" and run.name not in ("exact", "null") and run.m_ratio is not None


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


def margin_curve(method: str, run: EvalRun, runs: Sequence[EvalRun]) -> list[EvalRun]:
    """The runs of a method in the setting of `run`, by m, from `exact` on; none where either is missing."""
    here = [r for r in runs if r.setting == run.setting and r.m is not None]
    exact, others = [r for r in here if r.name == "exact"], [r for r in here if r.method == method]
    return sorted((*exact, *others), key=lambda r: (r.m, r.rule)) if exact and others else []


def lead_over(run: EvalRun, points: Sequence[EvalRun], figure: str) -> Lead | None:
    """The lead of a run over the line through `points` at its m; None beyond the line's ends."""
    for low, high in pairwise(points):
        assert None not in (run.m, low.m, high.m)
        if low.m <= run.m <= high.m and low.m < high.m:  # type: ignore[operator]
            return _lead(run, low, high, figure)
    return None


def _lead(run: EvalRun, low: EvalRun, high: EvalRun, figure: str) -> Lead | None:
    """The lead of `run` over the line from `low` to `high`, on the examples that all three have."""
    shared = sorted(run.answers.keys() & low.answers.keys() & high.answers.keys())
    values = [_mean(r, shared, figure) for r in (run, low, high)]
    lengths = [m_influences([r.answers[i] for i in shared]) for r in (run, low, high)]
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
    if figure == AGREES and low.name == "exact":
        return Lead(lead, None, at_least=True) if lead > 0 else None  # a bound below 0 says nothing
    # the lead moves with the three values, and with the three m along the slope of the line
    changes = [
        beyond(*moved[:3]) - slope * beyond(*moved[3:])
        for moved in zip(y, y_low, y_high, z, z_low, z_high, strict=True)
    ]
    return Lead(lead, interval_around(lead, stdev(changes) / math.sqrt(len(changes))))


def _mean(run: EvalRun, ids: Sequence[str], figure: str) -> tuple[float, list[float]] | None:
    """The mean of a figure over the answers that have it, and by how much each answer moves it."""
    is_exact = figure == AGREES and run.name == "exact"  # it agrees with itself; its rows do not say so
    values: list[float | None] = [1.0 if is_exact else getattr(run.answers[i], figure) for i in ids]
    known = [value for value in values if value is not None]
    if not known:
        return None
    mean = sum(known) / len(known)
    return mean, [0.0 if value is None else (value - mean) * len(values) / len(known) for value in values]


def m_influences(answers: Sequence[Answered]) -> tuple[float, list[float]] | None:
    """Pooled m and every example's z; the token that prefill yields belongs to no cycle."""
    emitted = [(a.tokens - 1 if a.cycles else 0, a.cycles) for a in answers]
    cycles = sum(c for _, c in emitted)
    m = sum(t for t, _ in emitted) / cycles if cycles else 0.0
    if not m:
        return None
    return m, [(t - m * c) * len(emitted) / cycles for t, c in emitted]


def interval_around(value: float | None, error: float | None) -> Interval | None:
    return None if value is None or error is None else (value - Z * error, value + Z * error)


def mean_with_interval(
    values: Sequence[float | None], intervals: Sequence[Interval | None]
) -> tuple[float | None, Interval | None]:
    """The mean of independent figures and its interval; None where one of them is unknown."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None, None
    if len(known) == 1:
        return known[0], intervals[0]
    mean = sum(known) / len(known)
    errors = [(high - low) / (2 * Z) for low, high in filter(None, intervals)]
    error = math.hypot(*errors) / len(known) if len(errors) == len(known) else None
    return mean, interval_around(mean, error)
