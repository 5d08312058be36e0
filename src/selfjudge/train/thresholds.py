"""Thresholds from the holdout's mismatches: a draft is accepted when its score is greater than θ."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

QUALITIES = (*(round(q / 100, 2) for q in range(100)), 0.995, 0.999)


def rates(scores: NDArray[Any], labels: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Every threshold that makes a difference, ascending; how many acceptable and unacceptable rows lie above each."""
    thetas = np.unique(np.concatenate([[0.0], scores.astype(np.float64), [1.0]]))
    good, bad = np.sort(scores[labels > 0.5]), np.sort(scores[labels <= 0.5])
    kept = len(good) - np.searchsorted(good, thetas, side="right")
    passed = len(bad) - np.searchsorted(bad, thetas, side="right")
    return thetas, kept, passed


def thresholds(scores: NDArray[Any], labels: NDArray[Any], *, reject: float = 0.9) -> dict[str, float]:
    """`F`: the best F1, the stricter of its two readings, which are stored as well; `R`: the most permissive that rejects at least
    the share `reject` of the unacceptable, and never more permissive than `F`."""
    thetas, kept, passed = rates(scores, labels)
    good, bad = int((labels > 0.5).sum()), int((labels <= 0.5).sum())
    f_accept = 2 * kept / np.maximum(1, kept + passed + good)
    rejected, lost = bad - passed, good - kept
    f_reject = 2 * rejected / np.maximum(1, rejected + lost + bad)
    first, second = (float(thetas[len(f) - 1 - np.argmax(f[::-1])]) for f in (f_accept, f_reject))
    strict = max(first, second)
    return {
        "F": strict,
        "R": max(strict, rejecting(thetas, passed, bad, reject)),
        "F_accept": first,
        "F_reject": second,
    }


def rejecting(thetas: NDArray[Any], passed: NDArray[Any], bad: int, share: float) -> float:
    """The most permissive θ with at most 1 − share of the unacceptable above it."""
    return float(thetas[np.argmax(passed <= (1 - share) * bad + 1e-9)])


def quality_curve(scores: NDArray[Any], labels: NDArray[Any]) -> tuple[tuple[float, float], ...]:
    """(share of the unacceptable that is rejected, the most permissive θ that does so); all of them takes θ = 1."""
    thetas, _, passed = rates(scores, labels)
    bad = int((labels <= 0.5).sum())
    return (*((q, rejecting(thetas, passed, bad, q)) for q in QUALITIES), (1.0, 1.0))


def at(scores: NDArray[Any], labels: NDArray[Any], theta: float) -> dict[str, float]:
    """What a threshold does: the shares of acceptable and of unacceptable rows that it accepts."""
    above = scores > theta
    good = labels > 0.5
    return {"accepts_acceptable": float(above[good].mean()), "accepts_unacceptable": float(above[~good].mean())}
