"""Training: label folders → a judge with thresholds, a card and a figure.

    fit       70 % of the prompts: weights and scaler
    select    15 %: C, the epoch of an MLP
    holdout   15 %: thresholds and everything that is reported

θ never sees the rows that chose C, and no prompt stands in two parts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.metrics import roc_auc_score

from selfjudge.errors import SelfJudgeError
from selfjudge.judge.config import JudgeConfig
from selfjudge.judge.model import Judge
from selfjudge.store import provenance, write_json
from selfjudge.train.card import write_card
from selfjudge.train.config import TrainConfig
from selfjudge.train.dataset import PARTS, Rows
from selfjudge.train.fit import Fitted, auc, fit_linear, fit_mlp, predict
from selfjudge.train.thresholds import at, quality_curve, thresholds

Notify = Callable[[str, float], None]


def train_judge(
    folders: Sequence[Path], out: Path, settings: TrainConfig | None = None, *, device: str | None = None,
    notify: Notify | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Train a judge and write its folder; what it gives back is `config.json`."""
    settings = settings or TrainConfig()
    settings.check()
    new = not out.exists()
    _claim(out)
    begun = time.monotonic()
    place = torch.device(device) if device else None
    try:
        rows = Rows(folders, seed=settings.seed, notify=notify)
        if settings.sources:
            rows = rows.only(settings.sources)
        if settings.relabels:
            rows = rows.relabelled(
                settings.suffix_length, settings.tau, gap=settings.suffix_gap, acceptable=settings.acceptable
            )
        rows.check(settings.features, settings.originals)
    except SelfJudgeError:
        if new:
            out.rmdir()  # nothing is left of a training that could not begin
        raise
    tried = candidates(rows, settings, place, notify)
    chosen = choice(rows, tried, place)
    judge, evidence = finish(rows, chosen, settings, place)
    evidence["tried"] = {kind: round(fitted.auc_select, 4) for kind, fitted in tried.items()}
    seconds = round(time.monotonic() - begun, 1)
    try:
        write_card(out, judge, evidence)
        write_json(
            out / "run.json",
            provenance(
                settings=asdict(settings), labels=[str(f) for f in folders], seconds=seconds, auc_select=evidence["tried"],
                **evidence["counts"],
            ),
        )  # fmt: skip
        judge.save_pretrained(out)
    except OSError as error:
        raise SelfJudgeError(f"cannot write {out}: {error}") from None
    return asdict(judge.config)


def _claim(out: Path) -> None:
    """Refuse a folder with anything in it but what a training that was killed has left."""
    left = {
        "README.md",
        "roc.json",
        "roc.png",
        "run.json",
        "model.safetensors",
        ".README.md.partial",
        ".model.safetensors.partial",
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        others = [file.name for file in out.iterdir() if file.name not in left]
    except OSError as error:
        raise SelfJudgeError(f"cannot use {out} as a folder: {error}") from None
    if others:
        raise SelfJudgeError(f"{out} is not an empty folder: name a new one with --out")


def candidates(
    rows: Rows, settings: TrainConfig, device: torch.device | None, notify: Notify | None
) -> dict[str, Fitted]:
    """The judges that `settings.model` asks for, by kind."""
    taus = {tau for tau in rows.taus if tau is not None}
    lengths = set(rows.suffix_lengths)
    first = rows.manifests[0]
    drafts, methods = (dict.fromkeys(m[key] for m in rows.manifests) for key in ("draft", "method"))
    config = JudgeConfig(
        hidden_size=rows.hidden_size, target=first["target"], target_sha256=first["target_sha256"], draft=", ".join(drafts),
        draft_sha256=first["draft_sha256"], features=settings.features, label_method="+".join(methods),
        suffix_length=lengths.pop() if len(lengths) == 1 else None, suffix_gap=settings.suffix_gap, tau=taus.pop() if len(taus) == 1 else None,
        acceptable=settings.acceptable,
        sources=tuple(str(name) for name in np.unique(rows.sources[rows.used])),
    )  # fmt: skip
    made: dict[str, Fitted] = {}
    if settings.model in ("linear", "auto"):
        made["linear"] = fit_linear(rows, config, originals=settings.originals, device=device, notify=notify)
    if settings.model in ("mlp", "auto"):
        deep = replace(config, model="mlp")
        made["mlp"] = fit_mlp(
            rows, deep, originals=settings.originals, seed=settings.seed, device=device, notify=notify
        )
    return made


def choice(rows: Rows, tried: dict[str, Fitted], device: torch.device | None) -> Fitted:
    """The only one, or the linear judge unless the MLP is better both where it was selected and on the holdout."""
    if len(tried) == 1:
        return next(iter(tried.values()))
    linear, mlp = tried["linear"], tried["mlp"]
    on_holdout = [auc(rows, fitted.judge, rows.of("holdout"), device=device) for fitted in (linear, mlp)]
    return mlp if mlp.auc_select > linear.auc_select and on_holdout[1] > on_holdout[0] else linear


def finish(
    rows: Rows, fitted: Fitted, settings: TrainConfig, device: torch.device | None
) -> tuple[Judge, dict[str, Any]]:
    """Thresholds and figures from the holdout, into the judge's configuration."""
    holdout = rows.of("holdout")
    scores, labels = predict(rows, fitted.judge, holdout, device=device)
    found = thresholds(scores, labels, reject=settings.reject)
    metrics = {
        "auc_mismatch": float(roc_auc_score(labels, scores)),
        "auc_select": fitted.auc_select, "n_labels": int(rows.used.sum()), "n_prompts": rows.n_prompts, "n_holdout": len(labels),
        "n_aligned": int(rows.aligned.sum()), "acceptable_rate": float(rows.labels[rows.used].mean()),
        **{f"{name}_{key}": value for name in ("F", "R") for key, value in at(scores, labels, found[name]).items()},
        **({} if fitted.c is None else {"C": fitted.c}),
    }  # fmt: skip
    if "lookahead" not in settings.features:  # none is stored for the target's own tokens
        every, truth = predict(rows, fitted.judge, holdout, originals=True, device=device)
        metrics["auc_all"] = float(roc_auc_score(truth, every))
    config = replace(
        fitted.judge.config, thresholds=found, quality_curve=quality_curve(scores, labels), metrics=metrics
    )
    judge = Judge(config, **dict(fitted.judge.cpu().named_buffers()))
    counts = {
        "rows": {name: int(rows.of(name).sum()) for name in PARTS},
        "sources": {
            str(name): {"rows": int(mine.sum()), "acceptable": float(rows.labels[mine].mean())}
            for name in np.unique(rows.sources[rows.used])
            for mine in [rows.used & (rows.sources == name)]
        },
    }  # fmt: skip
    return judge, {"scores": scores, "labels": labels, "counts": counts}
