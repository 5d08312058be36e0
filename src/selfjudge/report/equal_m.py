"""Rules at equal m: what a rule keeps beyond what an untrained margin of the same m keeps.

A margin's curve begins at `exact`, has a point for each threshold and straight lines between. Agreement falls steeply
at first, then less and less, so such a line lies above the curve it stands for: a lead is rather too small.
Intervals are paired by example and linearised, as those of m are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import stdev
from typing import Any

from selfjudge.report.intervals import around, influences
from selfjudge.report.records import Answered, Interval, Run, by_task, several, title
from selfjudge.report.table import GAMMA, RULE, Column, Table, percent, signed_points, slug

CURVES = {"margin": "margin", "margin, price": "priced margin"}
"""Methods that need no training, which others are compared with, and what they are called."""
SAME, SCORE = "agrees", "score"
"""What of an answer is compared."""


@dataclass(frozen=True)
class Lead:
    """How much more a run has than a curve at its m, as a share."""

    value: float
    interval: Interval | None


def equal_m(runs: Sequence[Run]) -> list[Table]:
    """One table a task: every rule against the untrained margins at its m."""
    tables = []
    pairs = several(run.pair for run in runs)
    for (pair, task), here in by_task(runs).items():
        rows = [row for run in here if (row := _row(run, here)) is not None]
        if rows:
            where = title(task) + (f", {pair}" if pairs else "")
            name = slug("equal-m", pair if pairs else "", task)
            tables.append(Table(name, f"{where}: lead at equal m", _columns(rows), tuple(rows)))
    return tables


def _row(run: Run, runs: Sequence[Run]) -> dict[str, Any] | None:
    """A rule's leads over those curves that reach its m; None where there are none, and for margin and `exact`."""
    if run.method == "margin" or run.name in ("exact", "null") or run.m_ratio is None:
        return None
    row: dict[str, Any] = {
        **{name: getattr(run, name) for name in ("pair", "task", "rule", "method", "ships", "both", "gamma")},
        "gain": run.m_ratio - 1,
        "agreement": run.agreement,
        "agreement_ci": run.agreement_ci,
    }
    found = False
    for method in CURVES:
        for what in (SAME, SCORE):
            lead = lead_over(run, curve(method, run, runs), what) if method != run.method else None
            row[f"{what} over {method}"] = None if lead is None else lead.value
            row[f"{what} over {method}, ci"] = None if lead is None else lead.interval
            found |= lead is not None
    return row if found else None


def _columns(rows: Sequence[dict[str, Any]]) -> tuple[Column, ...]:
    names = {
        f"{what} over {method}": f"{'same answer' if what == SAME else 'score'} over {called}"
        for what in (SAME, SCORE)
        for method, called in CURVES.items()
    }
    return (
        RULE,
        GAMMA,
        Column("gain in m", "gain", percent),
        Column("same answer", "agreement", percent, "agreement_ci", "as exact; of open tasks the matching words"),
        *(
            Column(head, key, signed_points, f"{key}, ci", "points more, at the same m")
            for key, head in names.items()
            if any(row[key] is not None for row in rows)
        ),
    )


def curve(method: str, run: Run, runs: Sequence[Run]) -> list[Run]:
    """The runs of a method that compare with `run`, from `exact` on, by m; none where `exact` or the method lacks."""
    place = run.pair, run.task, run.gamma, run.fold
    here = [r for r in runs if (r.pair, r.task, r.gamma, r.fold) == place and r.m is not None]
    exact, others = [r for r in here if r.name == "exact"], [r for r in here if r.method == method]
    return sorted((*exact, *others), key=lambda r: (r.m, r.rule)) if exact and others else []


def lead_over(run: Run, points: Sequence[Run], what: str) -> Lead | None:
    """How much more of `what` a run has than the line through `points` at its m; None where the line does not reach."""
    for low, high in pairwise(points):
        assert run.m is not None
        assert low.m is not None
        assert high.m is not None
        if low.m <= run.m <= high.m and low.m < high.m:
            return _lead(run, low, high, what)
    return None


def _lead(run: Run, low: Run, high: Run, what: str) -> Lead | None:
    """Of `run` over the line from `low` to `high`, with an interval paired over the examples that all three have."""
    shared = sorted(run.answers.keys() & low.answers.keys() & high.answers.keys())
    figures = [_figures(r, shared, what) for r in (run, low, high)]
    lengths = [influences([r.answers[i] for i in shared]) for r in (run, low, high)] if len(shared) > 1 else [None]
    if None in figures or None in lengths:
        return None
    (value, x), (value_low, x_low), (value_high, x_high) = (f for f in figures if f is not None)
    (m, z), (m_low, z_low), (m_high, z_high) = (f for f in lengths if f is not None)
    if m_low == m_high:
        return None
    part = (m - m_low) / (m_high - m_low)
    slope = (value_high - value_low) / (m_high - m_low)

    def beyond(own: float, at_low: float, at_high: float) -> float:
        return own - (1 - part) * at_low - part * at_high

    changes = [
        beyond(*parts) - slope * beyond(*cycles)
        for parts, cycles in zip(zip(x, x_low, x_high, strict=True), zip(z, z_low, z_high, strict=True), strict=True)
    ]
    lead = beyond(value, value_low, value_high)
    return Lead(lead, around(lead, stdev(changes) / math.sqrt(len(changes))))


def _figures(run: Run, ids: Sequence[str], what: str) -> tuple[float, list[float]] | None:
    """The mean of a figure over the examples that have it, and what each example adds to it."""
    values = [_value(run, run.answers[i], what) for i in ids]
    known = [value for value in values if value is not None]
    if not known:
        return None
    mean = sum(known) / len(known)
    return mean, [0.0 if value is None else (value - mean) * len(values) / len(known) for value in values]


def _value(run: Run, answer: Answered, what: str) -> float | None:
    """`exact` agrees with itself, which its rows do not say."""
    return 1.0 if what == SAME and run.name == "exact" else getattr(answer, what)
