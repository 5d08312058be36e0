"""95 % intervals and standard errors of figures that are computed from others; tasks count as independent."""

from __future__ import annotations

import math
from collections.abc import Sequence

from selfjudge.report.records import Interval

Z = 1.959964
"""95 % of a normal distribution lie within ± Z standard deviations."""


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
