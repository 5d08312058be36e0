"""Studies of the judge from one label folder: how many labels, which suffix, which features, which score, which prompts.

Everything is measured on the mismatches of the holdout's prompts; a study changes one thing and leaves the rest as it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from selfjudge.errors import SelfJudgeError
from selfjudge.judge.config import FEATURES, JudgeConfig
from selfjudge.label.calibrate import total
from selfjudge.store import machine, read_tensors, versions, write_json
from selfjudge.train.config import StudyConfig
from selfjudge.train.dataset import Rows
from selfjudge.train.fit import GRID, Fitted, auc, fit_linear, fit_mlp

Notify = Callable[[str, float], None]
POINTS = 10
LENGTHS = (0, 5, 10, 20)
GAPS = (0, 1, 2, 3, 5)
SOME_C = GRID[:6:2]  # a study compares many fits: three strengths of regularisation each


def run_study(
    folder: Path,
    out: Path,
    settings: StudyConfig | None = None,
    *,
    device: str | None = None,
    notify: Notify | None = None,
) -> dict[str, Any]:
    """Run all studies; `study.json` and figures land in `out`."""
    settings = settings or StudyConfig()
    settings.check()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SelfJudgeError(f"cannot use {out} as a folder: {error}") from None
    begun = time.monotonic()
    tell = notify or (lambda stage, share: None)
    place = torch.device(device) if device else None
    rows = Rows([folder], seed=settings.seed)
    rows.check(settings.features)
    fits = _Fits(rows, place, settings)
    found: dict[str, Any] = {
        "labels": int(rows.used.sum()), "prompts": rows.n_prompts, "acceptable": float(rows.labels[rows.used].mean()), "settings": asdict(settings),
        "target": rows.manifests[0]["target"], "draft": rows.manifests[0]["draft"], "C_grid": list(SOME_C),
        "machine": machine(), "versions": versions(), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    studies: dict[str, Callable[[], Any]] = {
        "learning_curve": fits.learning_curve,
        "features": fits.features,
        "originals": fits.originals,
        "transfer": fits.transfer,
        "suffix_length": fits.suffix_length,
        "suffix_gap": fits.suffix_gap,
    }
    for number, (name, run) in enumerate(studies.items()):
        tell(f"study: {name.replace('_', ' ')}", number / len(studies))
        found[name] = run()
    found["seconds"] = round(time.monotonic() - begun, 1)
    found["figures"] = draw(out, found)
    write_json(out / "study.json", found)
    tell("study", 1.0)
    return found


@dataclass(frozen=True)
class _Fits:
    rows: Rows
    device: torch.device | None
    settings: StudyConfig

    def fit(self, kind: str, features: str | None = None, **options: Any) -> Fitted:
        config = JudgeConfig(self.rows.hidden_size, features=features or self.settings.features, model=kind)
        if kind == "mlp":
            return fit_mlp(self.rows, config, seed=self.settings.seed, device=self.device, **options)
        return fit_linear(self.rows, config, grid=SOME_C, device=self.device, **options)

    def holdout(self, fitted: Fitted, chosen: NDArray[np.bool_] | None = None, **options: Any) -> float | None:
        """AUC on the holdout or some of it; None where that is of one kind."""
        mine = self.rows.of("holdout") if chosen is None else self.rows.of("holdout") & chosen
        found = auc(self.rows, fitted.judge, mine, device=self.device, **options)
        return None if np.isnan(found) else found

    def learning_curve(self) -> list[dict[str, Any]]:
        """AUC against the number of labels, whole prompts at a time, at ten sizes up to all."""
        rows = self.rows
        numbers = np.unique(rows.prompts[rows.of("fit")])
        order = np.random.default_rng(self.settings.seed).permutation(numbers)
        points = []
        for size in sorted({max(2, round(len(order) * share)) for share in np.logspace(-2, 0, POINTS)}):
            chosen = np.isin(rows.prompts, order[:size])
            labels = rows.labels[rows.of("fit") & chosen]
            if len(labels) == 0 or labels.min() == labels.max():
                continue  # of one kind: nothing to learn yet
            row: dict[str, Any] = {"prompts": int(size), "labels": len(labels)}
            for kind in ("linear", "mlp"):
                row[kind] = self.holdout(self.fit(kind, chosen=chosen))
            points.append(row)
        return points

    def features(self) -> list[dict[str, Any]]:
        """Every group of features that the labels hold."""
        known = [f for f in FEATURES if self.rows.lookahead or "lookahead" not in f]
        return [{"features": f, **{k: self.holdout(self.fit(k, f)) for k in ("linear", "mlp")}} for f in known]

    def originals(self) -> list[dict[str, Any]]:
        """The target's own tokens as rows to learn from, and to be measured on."""
        made = []
        plain = self.settings.features.removesuffix("+lookahead")  # none is stored for the target's own tokens
        for originals in (False, True):
            fitted = self.fit("linear", plain, originals=originals)
            both = self.holdout(fitted, originals=True)
            made.append({"originals": originals, "auc_mismatch": self.holdout(fitted), "auc_all": both})
        return made

    def transfer(self) -> list[dict[str, Any]]:
        """Learn from one source of prompts, test on every one."""
        rows = self.rows
        made = []
        for source in (str(s) for s in np.unique(rows.sources)):
            labels = rows.labels[rows.of("fit") & (rows.sources == source)]
            if len(labels) == 0 or labels.min() == labels.max():
                continue
            fitted = self.fit("linear", chosen=rows.sources == source)
            tested = {str(s): self.holdout(fitted, rows.sources == s) for s in np.unique(rows.sources)}
            made.append(
                {"trained_on": source, "labels": len(labels), "auc": tested, "auc_all_sources": self.holdout(fitted)}
            )
        return made

    def suffix_length(self) -> list[dict[str, Any]]:
        """Labels by other scores: shorter suffixes, and the mean instead of the sum."""
        return [self._scored(length, mean=mean) for length in LENGTHS for mean in (False, True)]

    def suffix_gap(self) -> list[dict[str, Any]]:
        """Labels by scores that pass over the first tokens after the substitution."""
        longest = min(self.rows.suffix_lengths)
        return [self._scored(longest, gap=gap) for gap in GAPS if gap < longest]

    def _scored(self, length: int, *, mean: bool = False, gap: int = 0) -> dict[str, Any]:
        """Labels by another score, τ from the same evidence each time: how many are acceptable, how well a judge learns them, how far
        the margin alone goes, and how well the score itself tells substitutions that kept the answer from those that changed it.

        An AUC against easier labels is not a better judge: compare what they buy in decoding.
        """
        row: dict[str, Any] = {"suffix_length": length, "suffix_gap": gap, "score": "mean" if mean else "sum"}
        evidence = self.rows.folders[0] / "calibration.safetensors"
        if evidence.is_file():
            row["told_apart"] = critical_auc(evidence, length, mean=mean, gap=gap)
        try:
            rows = self.rows.relabelled(length, mean=mean, gap=gap)
            rows.check(self.settings.features)
        except SelfJudgeError as error:
            return {**row, "why_not": str(error)}
        fits = replace(self, rows=rows)
        row |= {"tau": rows.taus[0], "acceptable": float(rows.labels[rows.used].mean())}
        mine = rows.of("holdout")
        margins = rows.log_p[mine, 1] - rows.log_p[mine, 0]
        row["auc_margin"] = float(roc_auc_score(rows.labels[mine], margins))
        return {**row, "auc_mismatch": fits.holdout(fits.fit("linear"))}


def critical_auc(evidence: Path, suffix_length: int, *, mean: bool = False, gap: int = 0) -> float | None:
    """ROC-AUC of the score at telling substitutions that kept the answer from critical ones; None if they are of one kind."""
    arrays, _ = read_tensors(evidence)
    scores = total(arrays["log_p"], arrays["original"], arrays["substituted"], suffix_length, mean=mean, gap=gap)
    finite, kept = np.isfinite(scores), arrays["critical"] == 0
    one_kind = len(set(kept[finite].tolist())) < 2
    return None if one_kind else float(roc_auc_score(kept[finite], scores[finite]))


def draw(out: Path, found: dict[str, Any]) -> list[str]:
    """The figures, where matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return []
    figure = Figure(figsize=(5, 4), layout="constrained")
    axes = figure.subplots()
    curve = found["learning_curve"]
    for kind, mark in (("linear", "o"), ("mlp", "s")):
        axes.plot([p["labels"] for p in curve], [p[kind] for p in curve], marker=mark, label=kind)
    axes.set(xscale="log", xlabel="labels", ylabel="ROC-AUC, holdout mismatches", title="learning curve")
    axes.legend()
    figure.savefig(out / "learning_curve.png", dpi=100)
    figure = Figure(figsize=(5, 4), layout="constrained")
    axes = figure.subplots()
    for score, mark in (("sum", "o"), ("mean", "s")):
        done = [r for r in found["suffix_length"] if r["score"] == score and "auc_mismatch" in r]
        axes.plot(
            [r["suffix_length"] for r in done], [r["auc_mismatch"] for r in done], marker=mark, label=f"{score}, AUC"
        )
        axes.plot([r["suffix_length"] for r in done], [r["acceptable"] for r in done], marker=mark, linestyle=":", label=f"{score}, acceptable")  # fmt: skip
    axes.set(xlabel="N", title="suffix length")
    axes.legend()
    figure.savefig(out / "suffix_length.png", dpi=100)
    return ["learning_curve.png", "suffix_length.png"]
