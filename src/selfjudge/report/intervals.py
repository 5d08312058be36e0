"""95 % intervals that eval does not store: of Δm and its ratio, and of averages over tasks.

m is a ratio of sums, so its standard error comes from the linearised ratio:
each example i adds z_i = (t_i − m·c_i) / c̄ with its t_i tokens and c_i cycles.
Rules answer the same prompts, so examples are paired. Tasks are independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import stdev

from selfjudge.report.records import Answered, Interval, Run

Z = 1.959964
"""Of a normal distribution, 95 % lie within ± Z."""


@dataclass(frozen=True)
class Errors:
    """Standard errors against `exact`; None where they are not known."""

    delta_m: float | None = None
    m_ratio: float | None = None


def m_errors(run: Run, exact: Run) -> Errors:
    """Of Δm and m/m_exact over the examples both have, at least two."""
    shared = sorted(run.answers.keys() & exact.answers.keys())
    if len(shared) < 2:
        return Errors()
    judged, base = (influences([r.answers[i] for i in shared]) for r in (run, exact))
    if judged is None or base is None:
        return Errors()
    (m, z), (m_0, z_0) = judged, base
    root = math.sqrt(len(shared))
    return Errors(
        stdev(a - b for a, b in zip(z, z_0, strict=True)) / root,
        stdev(a / m_0 - m * b / m_0**2 for a, b in zip(z, z_0, strict=True)) / root,
    )


def influences(answers: Sequence[Answered]) -> tuple[float, list[float]] | None:
    """Pooled m and every example's z; the token that prefill yields belongs to no cycle."""
    emitted = [(a.tokens - 1 if a.cycles else 0, a.cycles) for a in answers]
    cycles = sum(c for _, c in emitted)
    m = sum(t for t, _ in emitted) / cycles if cycles else 0.0
    if not m:
        return None
    return m, [(t - m * c) * len(emitted) / cycles for t, c in emitted]


def around(value: float | None, error: float | None) -> Interval | None:
    return None if value is None or error is None else (value - Z * error, value + Z * error)


def error_of(interval: Interval | None) -> float | None:
    """The standard error that an interval stands for."""
    return None if interval is None else (interval[1] - interval[0]) / (2 * Z)


def mean_error(errors: Sequence[float | None]) -> float | None:
    """Of the mean of independent figures; None where one is not known."""
    known = [e for e in errors if e is not None]
    return math.sqrt(sum(e * e for e in known)) / len(known) if known and len(known) == len(errors) else None
