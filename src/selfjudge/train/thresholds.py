"""Thresholds from the holdout's mismatches: a draft is accepted when its score is greater than θ.

A row is acceptable where its label is 1. The other rows are bad substitutions."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

QUALITIES = (*(round(q / 100, 2) for q in range(100)), 0.995, 0.999)


class CountsAbove(NamedTuple):
    """Every θ that makes a difference, ascending, and how many rows of each kind score above it."""

    thetas: NDArray[Any]
    acceptable: NDArray[Any]
    bad: NDArray[Any]


def count_above(scores: NDArray[Any], labels: NDArray[Any]) -> CountsAbove:
    thetas = np.unique(np.concatenate([[0.0], scores.astype(np.float64), [1.0]]))
    acceptable, bad = np.sort(scores[labels > 0.5]), np.sort(scores[labels <= 0.5])
    return CountsAbove(
        thetas,
        len(acceptable) - np.searchsorted(acceptable, thetas, side="right"),
        len(bad) - np.searchsorted(bad, thetas, side="right"),
    )


def roc_auc(scores: NDArray[Any], labels: NDArray[Any]) -> float:
    """Area under the ROC curve: how often an acceptable row scores above a bad one, ties by half.

    nan where the rows are of one kind."""
    acceptable, bad = scores[labels > 0.5], np.sort(scores[labels <= 0.5])
    if not len(acceptable) or not len(bad):
        return float("nan")
    below = np.searchsorted(bad, acceptable, side="left") + np.searchsorted(bad, acceptable, side="right")
    return float(below.mean() / (2 * len(bad)))


def find_thresholds(
    scores: NDArray[Any], labels: NDArray[Any], *, reject: float = 0.9, f: str = "f1"
) -> dict[str, float]:
    """`F`: the best F1. It has two readings (positive is acceptable, or bad), both are stored and F is the stricter.

    `R`: the most permissive θ that rejects at least the share `reject` of the bad rows, but not below `F`.
    `Youden`: where the shares of acceptable and of bad rows that are accepted are furthest apart. With `f` "youden",
    as in the released code, F is that one, and R may lie below it."""
    above = count_above(scores, labels)
    n_acceptable, n_bad = int((labels > 0.5).sum()), int((labels <= 0.5).sum())
    f_accept = 2 * above.acceptable / np.maximum(1, above.acceptable + above.bad + n_acceptable)
    rejected, lost = n_bad - above.bad, n_acceptable - above.acceptable
    f_reject = 2 * rejected / np.maximum(1, rejected + lost + n_bad)
    apart = above.acceptable * n_bad - above.bad * n_acceptable  # in whole numbers: ties are ties
    accept, rejects, youden = (
        float(above.thetas[len(x) - 1 - np.argmax(x[::-1])]) for x in (f_accept, f_reject, apart)
    )
    strict, recall = max(accept, rejects), find_rejecting_theta(above, n_bad, reject)
    return {
        "F": youden if f == "youden" else strict,
        "R": recall if f == "youden" else max(strict, recall),
        "F_accept": accept,
        "F_reject": rejects,
        "Youden": youden,
    }


def find_rejecting_theta(above: CountsAbove, n_bad: int, share: float) -> float:
    """The most permissive θ with at most 1 − share of the bad rows above it."""
    return float(above.thetas[np.argmax(above.bad <= (1 - share) * n_bad + 1e-9)])


def compute_quality_curve(scores: NDArray[Any], labels: NDArray[Any]) -> tuple[tuple[float, float], ...]:
    """(share of the bad rows that is rejected, the most permissive θ that does so); all of them takes θ = 1."""
    above = count_above(scores, labels)
    n_bad = int((labels <= 0.5).sum())
    return (*((q, find_rejecting_theta(above, n_bad, q)) for q in QUALITIES), (1.0, 1.0))
