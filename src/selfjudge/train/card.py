"""The card of a judge: where it comes from, how well it does, at which thresholds, with a figure."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from selfjudge.judge.config import JudgeConfig
from selfjudge.store import fill_template, write_text
from selfjudge.train.thresholds import count_above

QUALITIES = (0.8, 0.9, 0.95)


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
    """The card in Markdown."""
    curve = dict(judge.quality_curve)
    named = {name: judge.thresholds[name] for name in ("F", "R", "F_accept", "F_reject", "Youden")}
    named |= {f"rejects {q:.0%} of bad substitutions (`--quality {q}`)": curve[q] for q in QUALITIES}
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
