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
from selfjudge.train.thresholds import accepted_shares, counts_above

BINS = 10
POINTS = 200  # of a stored ROC curve
QUALITIES = (0.8, 0.9, 0.95)
MEANING = {
    "f1": "F is the best F1, the stricter of its two readings (positive is acceptable, or is must-reject)."
    " R rejects the share it was asked for, and is never more permissive than F.",
    "youden": "F is where Youden's J is largest, R rejects the share it was asked for.",
}
"""Of F and R, by what chose F."""


@dataclass(frozen=True)
class Evidence:
    """What was measured while a judge was made."""

    scores: NDArray[np.float32]
    """P(acceptable) of the holdout's mismatches."""
    labels: NDArray[np.float32]
    tried: Mapping[str, float]
    """ROC-AUC on the part `select` by kind of judge."""
    rows: Mapping[str, int]
    """By part."""
    sources: Mapping[str, Mapping[str, float]]
    """`rows` and the share that is `acceptable`, by source of prompts."""
    threshold_f: str = "f1"
    """What chose F."""


def write_card(folder: Path, judge: JudgeConfig, evidence: Evidence) -> None:
    """README.md, roc.json and roc.png."""
    write_json(folder / "roc.json", roc(judge, evidence))
    draw(folder / "roc.png", judge, evidence)
    write_text(folder / "README.md", card(judge, evidence))


def card(judge: JudgeConfig, evidence: Evidence) -> str:
    """The card in Markdown."""
    lines = [
        "---",
        "library_name: selfjudge",
        "tags: [speculative-decoding, judge]",
        "---",
        *_about(judge),
        *_labels(judge, evidence),
        *_holdout(judge, evidence),
        "The target must be the one named above: loading checks its checksum and width.",
    ]
    return "\n".join(lines) + "\n"


def _about(judge: JudgeConfig) -> list[str]:
    kind = "An MLP" if judge.model == "mlp" else "Logistic regression"
    return [
        f"# A judge for {judge.target}",
        "",
        f"It decides which tokens of a draft model (labelled with {judge.draft}) are accepted although the target"
        f" prefers others. {kind} on `{judge.features}`, trained by `selfjudge train`.{_limit(judge)}",
        "",
        "```",
        f'selfjudge generate "Why is the sky blue?" --target {judge.target} --judge FOLDER --quality 0.9',
        "```",
        "",
        "`--quality 0.9` takes the threshold that rejects 90 % of bad substitutions."
        " It is not the quality of the answer.",
        "",
    ]


def _limit(judge: JudgeConfig) -> str:
    if judge.margin_limit is None:
        return ""
    return f" It has no say where the target prefers its own token by more than {judge.margin_limit:g} nats."


def _labels(judge: JudgeConfig, evidence: Evidence) -> list[str]:
    metrics = judge.metrics
    score = [
        "" if judge.score == "likelihood" else f", score {judge.score}",
        "" if judge.suffix_length is None else f", N = {judge.suffix_length}",
        f" without the first {judge.suffix_gap}" if judge.suffix_gap else "",
        "" if judge.tau is None else f", τ = {judge.tau:.2f}",
        "" if judge.acceptable is None else " by a stated share",
    ]
    sources = ((name, f"{row['rows']:,}", f"{row['acceptable']:.1%}") for name, row in evidence.sources.items())
    return [
        "## Labels",
        "",
        f"{metrics['n_labels']:,} mismatches of {metrics['n_prompts']:,} prompts, method {judge.label_method}"
        f"{''.join(score)}; {metrics['acceptable_rate']:.1%} acceptable."
        f" {metrics['n_aligned']:,} more that alignment accepts (ties) were left out.",
        "",
        markdown_table(["source", "labels", "acceptable"], sources),
        "",
    ]


def _holdout(judge: JudgeConfig, evidence: Evidence) -> list[str]:
    metrics = judge.metrics
    with_originals = f", {metrics['auc_all']:.3f} with the target's own tokens added" if "auc_all" in metrics else ""
    on_select = ", ".join(f"{name} {value:.3f}" for name, value in evidence.tried.items())
    named = {name: judge.thresholds[name] for name in ("F", "R", "F_accept", "F_reject", "Youden")}
    curve = dict(judge.quality_curve)
    named |= {f"rejects {q:.0%} of bad substitutions (`--quality {q}`)": curve[q] for q in QUALITIES}
    thresholds = ((name, f"{theta:.3f}", *_percent(evidence, theta)) for name, theta in named.items())
    bins = ((f"{low:.2f} to {high:.2f}", f"{n:,}", f"{share:.1%}") for low, high, n, share in calibration(evidence))
    return [
        "## Holdout",
        "",
        f"{metrics['n_holdout']:,} mismatches of prompts that nothing was fitted on and nothing was chosen by:"
        f" no weight, C, epoch or kind of judge. ROC-AUC {metrics['auc_mismatch']:.3f} on mismatches{with_originals}."
        f" On the part that chose C, epoch and kind: {on_select}.",
        "",
        markdown_table(["threshold", "θ", "acceptable tokens accepted", "unacceptable tokens accepted"], thresholds),
        "",
        MEANING[evidence.threshold_f],
        "",
        "![ROC curve and calibration](roc.png)",
        "",
        markdown_table(["score", "rows", "acceptable"], bins),
        "",
    ]


def _percent(evidence: Evidence, theta: float) -> list[str]:
    return [f"{share:.1%}" for share in accepted_shares(evidence.scores, evidence.labels, theta).values()]


def calibration(evidence: Evidence) -> list[tuple[float, float, int, float]]:
    """(from, to, rows, share of acceptable) by tenths of the score."""
    number = np.minimum((evidence.scores * BINS).astype(int), BINS - 1)
    return [
        (b / BINS, (b + 1) / BINS, int((number == b).sum()), float(evidence.labels[number == b].mean()))
        for b in range(BINS)
        if (number == b).any()
    ]


def roc(judge: JudgeConfig, evidence: Evidence) -> dict[str, Any]:
    """The ROC curve in at most POINTS points, from nothing accepted to everything, and where F and R lie on it."""
    fpr, tpr = _curve(evidence)
    chosen = np.unique(np.linspace(0, len(tpr) - 1, POINTS).astype(int))[::-1]
    return {
        "auc": judge.metrics["auc_mismatch"],
        "fpr": [round(float(x), 5) for x in fpr[chosen]],
        "tpr": [round(float(x), 5) for x in tpr[chosen]],
        **{name: list(_place(evidence, judge.thresholds[name])) for name in ("F", "R")},
    }


def _curve(evidence: Evidence) -> tuple[NDArray[Any], NDArray[Any]]:
    """Shares of bad and of acceptable rows that are accepted, θ ascending."""
    above = counts_above(evidence.scores, evidence.labels)
    acceptable = evidence.labels > 0.5
    return above.bad / max(1, (~acceptable).sum()), above.acceptable / max(1, acceptable.sum())


def _place(evidence: Evidence, theta: float) -> tuple[float, float]:
    """Where a threshold lies on the ROC curve."""
    shares = accepted_shares(evidence.scores, evidence.labels, theta)
    return shares["accepts_unacceptable"], shares["accepts_acceptable"]


def draw(file: Path, judge: JudgeConfig, evidence: Evidence) -> None:
    """ROC curve with F and R, and the calibration curve."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(*_curve(evidence), label=f"AUC {judge.metrics['auc_mismatch']:.3f}")
    left.plot([0, 1], [0, 1], color="0.8", linewidth=1)
    for name, mark in (("F", "o"), ("R", "s")):
        left.plot(*_place(evidence, judge.thresholds[name]), mark, color="black", label=name, fillstyle="none")
    left.set(xlabel="unacceptable tokens accepted", ylabel="acceptable tokens accepted", title="holdout mismatches")
    left.legend()
    bins = calibration(evidence)
    right.plot([(low + high) / 2 for low, high, _, _ in bins], [share for *_, share in bins], marker="o")
    right.plot([0, 1], [0, 1], color="0.8", linewidth=1)
    right.set(xlabel="score", ylabel="share that is acceptable", title="calibration")
    figure.savefig(file, dpi=100)
