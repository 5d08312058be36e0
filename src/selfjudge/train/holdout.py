"""How a judge does on the holdout's mismatches: thresholds, and its card with a figure. A draft is accepted when its
score is greater than θ. Rows with label 1 are acceptable; the others are bad substitutions."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from selfjudge.judge.config import JudgeConfig
from selfjudge.store import fill_template, write_text

QUALITIES = (*(round(q / 100, 2) for q in range(100)), 0.995, 0.999)
SHOWN = (0.8, 0.9, 0.95)


class CountsAbove(NamedTuple):
    """Every θ that makes a difference, ascending, and how many rows of each kind score above it."""

    thetas: NDArray[Any]
    acceptable: NDArray[Any]
    bad: NDArray[Any]


def count_above(scores: NDArray[Any], labels: NDArray[Any]) -> CountsAbove:
    """Count the rows above each θ that makes a difference: 0, 1 and all scores."""
    thetas = np.unique(np.concatenate([[0.0], scores.astype(np.float64), [1.0]]))
    acceptable, bad = np.sort(scores[labels > 0.5]), np.sort(scores[labels <= 0.5])
    return CountsAbove(
        thetas,
        len(acceptable) - np.searchsorted(acceptable, thetas, side="right"),
        len(bad) - np.searchsorted(bad, thetas, side="right"),
    )


def roc_auc(scores: NDArray[Any], labels: NDArray[Any]) -> float:
    """Area under the ROC curve: P(an acceptable row scores above a bad one), ties by half; nan with one kind."""
    acceptable, bad = scores[labels > 0.5], np.sort(scores[labels <= 0.5])
    if not len(acceptable) or not len(bad):
        return float("nan")
    below = np.searchsorted(bad, acceptable, side="left") + np.searchsorted(bad, acceptable, side="right")
    return float(below.mean() / (2 * len(bad)))


def find_thresholds(
    scores: NDArray[Any], labels: NDArray[Any], *, reject: float = 0.9, f: str = "f1"
) -> dict[str, float]:
    """`F`: θ of the best F1, the stricter of two (positive is acceptable, or bad); both are stored. `R`: the most
    permissive θ that rejects at least the share `reject` of the bad rows, but not below `F`. `Youden`: θ with the
    largest gap between accepted shares of acceptable and of bad rows. With `f` "youden", as in the released code, F is
    that one, and R may lie below it."""
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


@dataclass(frozen=True)
class Evidence:
    """What was measured while a judge was made."""

    scores: NDArray[np.float32]  # P(acceptable) of the holdout's mismatches
    labels: NDArray[np.float32]
    sources: Mapping[str, Mapping[str, float]]  # number of `rows` and `acceptable` share of each source of prompts
    threshold_f: str = "f1"  # the setting that chose F

    def locate(self, theta: float) -> tuple[float, float]:
        """The point of a threshold on the ROC curve: shares of bad and of acceptable rows that are accepted."""
        above, acceptable = self.scores > theta, self.labels > 0.5
        return float(above[~acceptable].mean()), float(above[acceptable].mean())


def write_card(folder: Path, judge: JudgeConfig, evidence: Evidence) -> None:
    """Write README.md and roc.png."""
    draw(folder / "roc.png", judge, evidence)
    write_text(folder / "README.md", format_card(judge, evidence))


def format_card(judge: JudgeConfig, evidence: Evidence) -> str:
    """The text of the card: thresholds with the shares of tokens that they accept, AUC, sources."""
    curve = dict(judge.quality_curve)
    named = {name: judge.thresholds[name] for name in ("F", "R", "F_accept", "F_reject", "Youden")}
    named |= {f"rejects {q:.0%} of bad substitutions (`--quality {q}`)": curve[q] for q in SHOWN}
    thresholds = [(name, theta, *reversed(evidence.locate(theta))) for name, theta in named.items()]
    file = Path(__file__).with_name("card.md")
    return fill_template(file, judge=judge, evidence=evidence, thresholds=thresholds)


def draw(file: Path, judge: JudgeConfig, evidence: Evidence) -> None:
    """Draw the ROC curve with F and R."""
    from matplotlib.figure import Figure

    _, acceptable, bad = count_above(evidence.scores, evidence.labels)
    n_acceptable = (evidence.labels > 0.5).sum()
    figure = Figure(figsize=(5, 4), layout="constrained")
    axes = figure.subplots()
    auc = f"AUC {judge.metrics['auc_mismatch']:.3f}"
    axes.plot(bad / max(1, len(evidence.labels) - n_acceptable), acceptable / max(1, n_acceptable), label=auc)
    axes.plot([0, 1], [0, 1], color="0.8", linewidth=1)
    for name, mark in (("F", "o"), ("R", "s")):
        axes.plot(*evidence.locate(judge.thresholds[name]), mark, color="black", label=name, fillstyle="none")
    axes.set(xlabel="unacceptable tokens accepted", ylabel="acceptable tokens accepted", title="holdout mismatches")
    axes.legend()
    figure.savefig(file, dpi=100)
