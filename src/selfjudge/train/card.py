"""The card of a judge: where it comes from, how well it does, at which thresholds, with a figure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfjudge.judge.config import JudgeConfig
from selfjudge.store import markdown_table, write_json, write_text
from selfjudge.train.thresholds import count_above

BINS = 10
POINTS = 200  # of a stored ROC curve
QUALITIES = (0.8, 0.9, 0.95)
MEANING = {
    "f1": "F is the best F1, the stricter of its two readings (positive is acceptable, or is must-reject)."
    " R rejects the share it was asked for, and is never more permissive than F.",
    "youden": "F is where Youden's J is largest, R rejects the share it was asked for.",
}
"""What F and R mean, by the setting `threshold_f`."""
CARD = """---
library_name: selfjudge
tags: [speculative-decoding, judge]
---
# A judge for {judge.target}

It decides which tokens of a draft model (labelled with {judge.draft}) are accepted although the target prefers others.
{kind} on `{judge.features}`, trained by `selfjudge train`.{limit}

```
selfjudge generate "Why is the sky blue?" --target {judge.target} --judge FOLDER --quality 0.9
```

`--quality 0.9` takes the threshold that rejects 90 % of bad substitutions. It is not the quality of the answer.

## Labels

{n_labels:,} mismatches of {n_prompts:,} prompts, method {judge.label_method}{score}; {acceptable_rate:.1%} acceptable.
{n_aligned:,} more that alignment accepts (ties) were left out.

{sources}

## Holdout

{n_holdout:,} mismatches of prompts that nothing was fitted on and nothing was chosen by: no weight, C, epoch or kind of
judge. ROC-AUC {auc_mismatch:.3f} on mismatches, {auc_all:.3f} with the target's own tokens added.
On the part that chose C, epoch and kind: {on_select}.

{thresholds}

{meaning}

![ROC curve and calibration](roc.png)

{bins}

The target must be the one named above: loading checks its checksum and width.
"""


@dataclass(frozen=True)
class Evidence:
    """What was measured while a judge was made."""

    scores: NDArray[np.float32]
    """P(acceptable) of the holdout's mismatches."""
    labels: NDArray[np.float32]
    tried: Mapping[str, float]
    """ROC-AUC on the part `select` of each kind of judge."""
    sources: Mapping[str, Mapping[str, float]]
    """Number of `rows` and `acceptable` share of each source of prompts."""
    threshold_f: str = "f1"
    """The setting that chose F."""

    def locate(self, theta: float) -> tuple[float, float]:
        """The point of a threshold on the ROC curve: shares of bad and of acceptable rows that are accepted."""
        above, acceptable = self.scores > theta, self.labels > 0.5
        return float(above[~acceptable].mean()), float(above[acceptable].mean())

    def trace_roc(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """The ROC curve: shares of bad and of acceptable rows that are accepted, θ ascending."""
        above = count_above(self.scores, self.labels)
        acceptable = self.labels > 0.5
        return above.bad / max(1, (~acceptable).sum()), above.acceptable / max(1, acceptable.sum())

    def bin_scores(self) -> list[tuple[float, float, int, float]]:
        """(from, to, rows, share of acceptable) by tenths of the score."""
        number = np.minimum((self.scores * BINS).astype(int), BINS - 1)
        return [
            (b / BINS, (b + 1) / BINS, int((number == b).sum()), float(self.labels[number == b].mean()))
            for b in range(BINS)
            if (number == b).any()
        ]


def write_card(folder: Path, judge: JudgeConfig, evidence: Evidence) -> None:
    """Write README.md, roc.json and roc.png."""
    write_json(folder / "roc.json", sample_roc(judge, evidence))
    draw(folder / "roc.png", judge, evidence)
    write_text(folder / "README.md", format_card(judge, evidence))


def format_card(judge: JudgeConfig, evidence: Evidence) -> str:
    """The card in Markdown."""
    limit = judge.margin_limit
    score = [
        "" if judge.score == "likelihood" else f", score {judge.score}",
        "" if judge.suffix_length is None else f", N = {judge.suffix_length}",
        f" without the first {judge.suffix_gap}" if judge.suffix_gap else "",
        "" if judge.tau is None else f", τ = {judge.tau:.2f}",
        "" if judge.acceptable is None else " by a stated share",
    ]
    named = {name: judge.thresholds[name] for name in ("F", "R", "F_accept", "F_reject", "Youden")}
    curve = dict(judge.quality_curve)
    named |= {f"rejects {q:.0%} of bad substitutions (`--quality {q}`)": curve[q] for q in QUALITIES}
    sources = [(name, f"{row['rows']:,}", f"{row['acceptable']:.1%}") for name, row in evidence.sources.items()]
    thresholds = [
        (name, f"{theta:.3f}", *(f"{share:.1%}" for share in reversed(evidence.locate(theta))))
        for name, theta in named.items()
    ]
    bins = [(f"{low:.2f} to {high:.2f}", f"{n:,}", f"{share:.1%}") for low, high, n, share in evidence.bin_scores()]
    return CARD.format(
        judge=judge,
        **judge.metrics,
        kind="An MLP" if judge.model == "mlp" else "Logistic regression",
        limit=f"\nIt has no say where the target prefers its own token by more than {limit:g} nats." if limit else "",
        score="".join(score),
        sources=markdown_table(["source", "labels", "acceptable"], sources),
        on_select=", ".join(f"{name} {value:.3f}" for name, value in evidence.tried.items()),
        thresholds=markdown_table(
            ["threshold", "θ", "acceptable tokens accepted", "unacceptable tokens accepted"], thresholds
        ),
        meaning=MEANING[evidence.threshold_f],
        bins=markdown_table(["score", "rows", "acceptable"], bins),
    )


def sample_roc(judge: JudgeConfig, evidence: Evidence) -> dict[str, Any]:
    """The ROC curve in at most POINTS points, from nothing accepted to everything, and where F and R lie on it."""
    fpr, tpr = evidence.trace_roc()
    chosen = np.unique(np.linspace(0, len(tpr) - 1, POINTS).astype(int))[::-1]
    return {
        "auc": judge.metrics["auc_mismatch"],
        "fpr": [round(float(x), 5) for x in fpr[chosen]],
        "tpr": [round(float(x), 5) for x in tpr[chosen]],
        **{name: list(evidence.locate(judge.thresholds[name])) for name in ("F", "R")},
    }


def draw(file: Path, judge: JudgeConfig, evidence: Evidence) -> None:
    """Draw the ROC curve with F and R, and the calibration curve."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(*evidence.trace_roc(), label=f"AUC {judge.metrics['auc_mismatch']:.3f}")
    left.plot([0, 1], [0, 1], color="0.8", linewidth=1)
    for name, mark in (("F", "o"), ("R", "s")):
        left.plot(*evidence.locate(judge.thresholds[name]), mark, color="black", label=name, fillstyle="none")
    left.set(xlabel="unacceptable tokens accepted", ylabel="acceptable tokens accepted", title="holdout mismatches")
    left.legend()
    bins = evidence.bin_scores()
    right.plot([(low + high) / 2 for low, high, _, _ in bins], [share for *_, share in bins], marker="o")
    right.plot([0, 1], [0, 1], color="0.8", linewidth=1)
    right.set(xlabel="score", ylabel="share that is acceptable", title="calibration")
    figure.savefig(file, dpi=100)
