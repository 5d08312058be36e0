"""Studies of the judge: `python benchmarks/study.py LABELS --out DIR [--features F --seed S --device D --json]`.

From one label folder: how many labels, which suffix, features, score and prompts. Everything is measured on the
mismatches of the holdout's prompts. A study changes one thing and keeps the rest. `selfjudge report` reads study.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from selfjudge.errors import SelfJudgeError
from selfjudge.judge.config import FEATURES, SCORES, JudgeConfig
from selfjudge.label.methods import read_evidence
from selfjudge.label.score import sum_scores
from selfjudge.store import measured_on, write_json
from selfjudge.train.config import TrainConfig
from selfjudge.train.dataset import LabelledRows
from selfjudge.train.holdout import roc_auc
from selfjudge.train.pipeline import GRID, Fitted, fit_linear, predict

POINTS = 10
LENGTHS = (0, 5, 10, 20)
GAPS = (0, 1, 2, 3, 5)
SOME_C = GRID[:9:2]  # a study compares many fits: five values of C each, 1e-6 to 0.2


def run_study(
    folder: Path, out: Path, *, features: str = "hidden+margin", seed: int = 0, device: str | None = None
) -> dict[str, Any]:
    """Run all studies of a finished label folder; `study.json` and figures go to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    rows = LabelledRows.load([folder], seed=seed)
    rows.check(features)
    study = Study(rows, torch.device(device) if device else None, features, seed)
    results: dict[str, Any] = {
        "labels": int(rows.used.sum()),
        "prompts": rows.n_prompts,
        "acceptable": float(rows.labels[rows.used].mean()),
        "settings": {"features": features, "seed": seed},
        "target": rows.manifests[0]["target"],
        "draft": rows.manifests[0]["draft"],
        "C_grid": list(SOME_C),
        **measured_on(),
    }
    studies: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "learning_curve": study.learning_curve,
        "features": study.compare_features,
        "originals": study.originals,
        "transfer": study.transfer,
        "suffix_length": study.suffix_length,
        "suffix_gap": study.suffix_gap,
    }
    for name, run in studies.items():
        print(f"study: {name.replace('_', ' ')}", file=sys.stderr)
        results[name] = run()
    results["seconds"] = round(time.monotonic() - begun, 1)
    results["figures"] = draw(out, results)
    write_json(out / "study.json", results)
    return results


@dataclass(frozen=True)
class Study:
    rows: LabelledRows
    device: torch.device | None
    features: str
    """Features that the judge reads in all studies but that of features."""
    seed: int

    def fit(
        self, features: str | None = None, *, chosen: NDArray[np.bool_] | None = None, originals: bool = False
    ) -> Fitted:
        """A judge, learnt from the chosen rows of the part `fit`."""
        judge = JudgeConfig(self.rows.hidden_size, features=features or self.features)
        rows = self.rows
        if chosen is not None:  # the other rows of the part `fit` belong to no part
            rows = replace(rows, part=np.where(chosen | ~rows.of("fit"), rows.part, -1))
        return fit_linear(rows, judge, originals=originals, device=self.device, grid=SOME_C)

    def holdout(
        self, fitted: Fitted, chosen: NDArray[np.bool_] | None = None, *, originals: bool = False
    ) -> float | None:
        """AUC on the holdout or some of it; None where that is of one kind."""
        inside = self.rows.of("holdout") if chosen is None else self.rows.of("holdout") & chosen
        value = roc_auc(*predict(self.rows, fitted.judge, inside, originals=originals, device=self.device))
        return None if np.isnan(value) else value

    def learnable(self, chosen: NDArray[np.bool_]) -> int:
        """How many rows of the part `fit` are chosen; 0 where their labels are of one kind."""
        labels = self.rows.labels[self.rows.of("fit") & chosen]
        return len(labels) if len(set(labels.tolist())) == 2 else 0

    def learning_curve(self) -> list[dict[str, Any]]:
        """AUC against the number of labels, whole prompts at a time, at ten sizes up to all."""
        prompts = np.unique(self.rows.prompts[self.rows.of("fit")])
        order = np.random.default_rng(self.seed).permutation(prompts)
        points = []
        for size in sorted({max(2, round(len(order) * share)) for share in np.logspace(-2, 0, POINTS)}):
            chosen = np.isin(self.rows.prompts, order[:size])
            if n_labels := self.learnable(chosen):
                auc = self.holdout(self.fit(chosen=chosen))
                points.append({"prompts": int(size), "labels": n_labels, "linear": auc})
        return points

    def compare_features(self) -> list[dict[str, Any]]:
        """Every group of features that the labels hold."""
        stored = [f for f in FEATURES if self.rows.has_previous or "previous" not in f]
        return [{"features": f, "linear": self.holdout(self.fit(f))} for f in stored]

    def originals(self) -> list[dict[str, Any]]:
        """The target's own tokens as rows to learn from, and to be measured on."""
        rows = []
        for originals in (False, True):
            fitted = self.fit(originals=originals)
            both = self.holdout(fitted, originals=True)
            rows.append({"originals": originals, "auc_mismatch": self.holdout(fitted), "auc_all": both})
        return rows

    def transfer(self) -> list[dict[str, Any]]:
        """Learn from one source of prompts, test on every one."""
        sources = self.rows.sources
        rows = []
        for source in np.unique(sources):
            if n_labels := self.learnable(sources == source):
                fitted = self.fit(chosen=sources == source)
                tested = {str(other): self.holdout(fitted, sources == other) for other in np.unique(sources)}
                row = {"trained_on": str(source), "labels": n_labels, "auc": tested}
                rows.append({**row, "auc_all_sources": self.holdout(fitted)})
        return rows

    def suffix_length(self) -> list[dict[str, Any]]:
        """Labels by other scores: shorter suffixes, and the released score."""
        return [self._with_score(length, score=score) for length in LENGTHS for score in SCORES]

    def suffix_gap(self) -> list[dict[str, Any]]:
        """Labels by scores that pass over the first tokens after the substitution."""
        longest = min(self.rows.suffix_lengths)
        return [self._with_score(longest, gap=gap) for gap in GAPS if gap < longest]

    def _with_score(self, length: int, *, gap: int = 0, score: str = "likelihood") -> dict[str, Any]:
        """Labels by another score, τ from the same evidence each time.

        How many are acceptable, how well a judge learns them, and how far the margin alone goes. `told_apart` is how
        well the score itself tells substitutions that kept the answer from those that changed it.
        An AUC against easier labels is not a better judge: compare what they buy in decoding.
        """
        row: dict[str, Any] = {"suffix_length": length, "suffix_gap": gap, "score": score}
        evidence = self.rows.folders[0] / "calibration.safetensors"
        if evidence.is_file():
            row["told_apart"] = critical_auc(evidence, length, gap=gap, score=score)
        try:
            rows = self.rows.relabel(TrainConfig(suffix_length=length, suffix_gap=gap, score=score))
            rows.check(self.features)
        except SelfJudgeError as error:
            return {**row, "why_not": str(error)}
        holdout = rows.of("holdout")
        margins = rows.log_p[holdout, 1] - rows.log_p[holdout, 0]
        study = replace(self, rows=rows)
        return {
            **row,
            "tau": rows.taus[0],
            "acceptable": float(rows.labels[rows.used].mean()),
            "auc_margin": roc_auc(margins, rows.labels[holdout]),
            "auc_mismatch": study.holdout(study.fit()),
        }


def critical_auc(evidence: Path, suffix_length: int, *, gap: int = 0, score: str = "likelihood") -> float | None:
    """ROC-AUC of the score: substitutions that kept the answer against critical ones; None if all are one kind."""
    arrays = read_evidence(evidence)
    scores = sum_scores(arrays, suffix_length, gap=gap, score=score)
    finite, kept = np.isfinite(scores), arrays["critical"] == 0
    value = roc_auc(scores[finite], kept[finite])
    return None if np.isnan(value) else value


def draw(out: Path, results: dict[str, Any]) -> list[str]:
    """The figures; returns their names."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 4), layout="constrained")
    axes = figure.subplots()
    points = results["learning_curve"]
    axes.plot([p["labels"] for p in points], [p["linear"] for p in points], marker="o")
    finding = f"{points[-1]['labels']:,} labels: {points[-1]['linear']:.3f}"
    axes.set(xscale="log", xlabel="labels", ylabel="ROC-AUC, holdout mismatches", title=finding)
    figure.savefig(out / "learning_curve.png", dpi=100)
    figure = Figure(figsize=(5, 4), layout="constrained")
    axes = figure.subplots()
    for score, mark in zip(SCORES, ("o", "s"), strict=True):
        rows = [row for row in results["suffix_length"] if row["score"] == score and "auc_mismatch" in row]
        lengths = [row["suffix_length"] for row in rows]
        for key, name, line in (("auc_mismatch", "AUC", "-"), ("acceptable", "acceptable", ":")):
            axes.plot(lengths, [row[key] for row in rows], marker=mark, linestyle=line, label=f"{score}, {name}")
    axes.set(xlabel="N", title="suffix length")
    axes.legend()
    figure.savefig(out / "suffix_length.png", dpi=100)
    return ["learning_curve.png", "suffix_length.png"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("labels", type=Path, help="a finished label folder")
    parser.add_argument("--out", type=Path, required=True, help="folder of study.json and figures")
    parser.add_argument("--features", choices=FEATURES, default="hidden+margin")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default=None)
    parser.add_argument("--json", action="store_true", help="print all results as JSON")
    o = parser.parse_args()
    try:
        results = run_study(o.labels, o.out, features=o.features, seed=o.seed, device=o.device)
    except SelfJudgeError as error:
        sys.exit(str(error))
    if o.json:
        print(json.dumps(results))
        return
    for name in ("learning_curve", "features", "originals", "suffix_length", "transfer"):
        print(f"\n{name.replace('_', ' ')} (ROC-AUC on holdout mismatches)")
        for row in results[name]:
            print(row)


if __name__ == "__main__":
    main()
