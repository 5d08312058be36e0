"""The card of a judge: where it comes from, how well it does, at which thresholds, with a figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfjudge.judge.model import Judge
from selfjudge.store import write_json
from selfjudge.train.thresholds import at, rates

BINS = 10
POINTS = 200  # of a stored ROC curve


def write_card(folder: Path, judge: Judge, evidence: dict[str, Any]) -> None:
    """README.md, roc.json, and roc.png where matplotlib is installed."""
    write_json(folder / "roc.json", roc(judge, evidence["scores"], evidence["labels"]))
    drawn = draw(folder / "roc.png", judge, evidence["scores"], evidence["labels"])
    partial = folder / ".README.md.partial"
    partial.write_text(card(judge, evidence, drawn), encoding="utf-8")
    partial.replace(folder / "README.md")


def card(judge: Judge, evidence: dict[str, Any], drawn: bool) -> str:
    c, m = judge.config, judge.config.metrics
    scores, labels = evidence["scores"], evidence["labels"]
    kind = "an MLP" if c.model == "mlp" else "logistic regression"
    chosen = ", ".join(f"{name} {value:.3f}" for name, value in evidence["tried"].items())
    lines = [
        "---", "library_name: selfjudge", "tags: [speculative-decoding, judge]", "---",
        f"# A judge for {c.target}", "",
        f"It says which tokens of a draft model (labelled with {c.draft}) may stand although the target would have chosen others;"
        f" {kind} on `{c.features}`, made by `selfjudge train`.", "",
        "```", f'selfjudge generate "Why is the sky blue?" --target {c.target} --judge FOLDER --quality 0.9', "```", "",
        "## Labels", "",
        f"{m['n_labels']:,} mismatches of {m['n_prompts']:,} prompts, method {c.label_method}"
        + (f", N = {c.suffix_length}" if c.suffix_length is not None else "")
        + (f" without the first {c.suffix_gap}" if c.suffix_gap else "")
        + (f", τ = {c.tau:.2f}" if c.tau is not None else "")
        + (" by a stated share" if c.acceptable is not None else "")
        + f"; {m['acceptable_rate']:.1%} acceptable. {m['n_aligned']:,} more that alignment accepts (ties) were left out.", "",
        "| source | labels | acceptable |", "| --- | ---: | ---: |",
        *(f"| {name} | {row['rows']:,} | {row['acceptable']:.1%} |" for name, row in evidence["counts"]["sources"].items()), "",
        "## Holdout", "",
        f"{m['n_holdout']:,} mismatches of prompts that fitted nothing and chose no C and no epoch (where both kinds were tried, the MLP also had to be better here). ROC-AUC {m['auc_mismatch']:.3f} on mismatches"
        + (f", {m['auc_all']:.3f} with the target's own tokens added" if "auc_all" in m else "")
        + f". On the part that chose the kind: {chosen}.", "",
        "| threshold | θ | acceptable tokens accepted | unacceptable tokens accepted |", "| --- | ---: | ---: | ---: |",
        *(_row(name, judge.config.thresholds[name], scores, labels) for name in ("F", "R", "F_accept", "F_reject")), "",
        "F is the best F1, the stricter of its two readings (positive is acceptable, or is must-reject). R rejects the share it was asked for,"
        " and is never more permissive than F.", "",
    ]  # fmt: skip
    if drawn:
        lines += ["![ROC curve and calibration](roc.png)", ""]
    lines += [
        "| score | rows | acceptable |", "| --- | ---: | ---: |",
        *(f"| {low:.2f} to {high:.2f} | {n:,} | {share:.1%} |" for low, high, n, share in calibration(scores, labels)), "",
        "The target must be the one named above: loading checks its checksum and width.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _row(name: str, theta: float, scores: NDArray[Any], labels: NDArray[Any]) -> str:
    does = at(scores, labels, theta)
    return f"| {name} | {theta:.3f} | {does['accepts_acceptable']:.1%} | {does['accepts_unacceptable']:.1%} |"


def calibration(scores: NDArray[Any], labels: NDArray[Any]) -> list[tuple[float, float, int, float]]:
    """(from, to, rows, share of acceptable) by tenths of the score."""
    number = np.minimum((scores * BINS).astype(int), BINS - 1)
    return [
        (b / BINS, (b + 1) / BINS, int((number == b).sum()), float(labels[number == b].mean()))
        for b in range(BINS)
        if (number == b).any()
    ]


def roc(judge: Judge, scores: NDArray[Any], labels: NDArray[Any]) -> dict[str, Any]:
    """The ROC curve in at most POINTS points, from nothing accepted to everything, and where F and R lie on it."""
    _, kept, passed = rates(scores, labels)
    chosen = np.unique(np.linspace(0, len(kept) - 1, POINTS).astype(int))[::-1]
    places = {name: at(scores, labels, judge.config.thresholds[name]) for name in ("F", "R")}
    return {
        "auc": judge.config.metrics["auc_mismatch"],
        "fpr": [round(float(x), 5) for x in passed[chosen] / max(1, (labels <= 0.5).sum())],
        "tpr": [round(float(x), 5) for x in kept[chosen] / max(1, (labels > 0.5).sum())],
        **{name: [does["accepts_unacceptable"], does["accepts_acceptable"]] for name, does in places.items()},
    }


def draw(file: Path, judge: Judge, scores: NDArray[Any], labels: NDArray[Any]) -> bool:
    """ROC curve with F and R, and the calibration curve; whether it could be drawn."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    _, kept, passed = rates(scores, labels)
    good, bad = int((labels > 0.5).sum()), int((labels <= 0.5).sum())
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(passed / bad, kept / good, label=f"AUC {judge.config.metrics['auc_mismatch']:.3f}")
    left.plot([0, 1], [0, 1], color="0.8", linewidth=1)
    for name, mark in (("F", "o"), ("R", "s")):
        does = at(scores, labels, judge.config.thresholds[name])
        left.plot(
            does["accepts_unacceptable"], does["accepts_acceptable"], mark, color="black", label=name, fillstyle="none"
        )
    left.set(xlabel="unacceptable tokens accepted", ylabel="acceptable tokens accepted", title="holdout mismatches")
    left.legend()
    curve = calibration(scores, labels)
    right.plot([(low + high) / 2 for low, high, _, _ in curve], [share for *_, share in curve], marker="o")
    right.plot([0, 1], [0, 1], color="0.8", linewidth=1)
    right.set(xlabel="score", ylabel="share that is acceptable", title="calibration")
    figure.savefig(file, dpi=100)
    return True
