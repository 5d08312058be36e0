"""Training: label folders → a judge with thresholds, a card and a figure.

    fit       70 % of the prompts: weights and scaler
    select    15 %: C
    holdout   15 %: thresholds and everything that is reported

The holdout chooses nothing but θ, and no prompt belongs to two parts.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from selfjudge.errors import SelfJudgeError
from selfjudge.judge.config import JudgeConfig, write_training_prompts
from selfjudge.judge.model import Judge
from selfjudge.store import locked, provenance, refuse_foreign, write_json
from selfjudge.train.config import LEFT_BY_A_KILL, TrainConfig
from selfjudge.train.dataset import PARTS, LabelledRows
from selfjudge.train.fit import Fitted, fit_linear, predict
from selfjudge.train.holdout import Evidence, compute_quality_curve, find_thresholds, roc_auc, write_card
from selfjudge.types import Notify, ignore


def train_judge(
    folders: Sequence[Path],
    out: Path,
    config: TrainConfig | None = None,
    *,
    device: str | None = None,
    notify: Notify = ignore,
) -> dict[str, Any]:
    """Train a judge on finished label folders of one target and write its folder; returns its `config.json`.

    `notify` is told each stage and the share of it that is done."""
    config = config or TrainConfig()
    config.check()
    config = config.resolve()
    refuse_foreign(out, LEFT_BY_A_KILL)
    begun = time.monotonic()
    rows = load_rows(folders, config, notify)  # nothing is written where there is nothing to learn
    lock, on = out / ".lock", torch.device(device) if device else None
    try:
        out.mkdir(parents=True, exist_ok=True)
        with locked(lock, refuse=f"another process works on {out}"):
            refuse_foreign(out, LEFT_BY_A_KILL)  # another process may have finished meanwhile
            fitted = fit_linear(
                rows, make_judge_config(rows, config), originals=config.originals, device=on, notify=notify
            )
            judge, evidence = measure_on_holdout(rows, fitted, config, on)
            run = provenance(
                settings=asdict(config),
                labels=[str(folder) for folder in folders],
                seconds=round(time.monotonic() - begun, 1),
                rows={name: int(rows.of(name).sum()) for name in PARTS},
                sources=evidence.sources,
            )
            write_card(out, judge.config, evidence)
            write_json(out / "run.json", run)
            write_training_prompts(out, (rows.keys[number] for number in np.unique(rows.prompts[rows.used])))
            judge.save_pretrained(out)
            lock.unlink()  # the folder travels
    except OSError as error:
        raise SelfJudgeError(f"cannot write {out}: {error}") from None
    return asdict(judge.config)


def load_rows(folders: Sequence[Path], config: TrainConfig, notify: Notify | None = None) -> LabelledRows:
    """The rows that a judge of this config learns from; an error where there is nothing to learn."""
    rows = LabelledRows.load(folders, seed=config.seed, notify=notify)
    if config.sources:
        rows = rows.select_sources(config.sources)
    if config.margin_limit is not None:
        rows = rows.limit_margin(config.margin_limit)
    if config.relabels:
        rows = rows.relabel(config)
    rows.check(config.features)
    return rows


def make_judge_config(rows: LabelledRows, config: TrainConfig) -> JudgeConfig:
    """The config of a judge of these rows. Fields that differ between label folders are left open."""
    first = rows.manifests[0]
    drafts, methods = (dict.fromkeys(m[key] for m in rows.manifests) for key in ("draft", "method"))
    taus = {tau for tau in rows.taus if tau is not None}
    lengths = set(rows.suffix_lengths)
    return JudgeConfig(
        hidden_size=rows.hidden_size,
        target=first["target"],
        target_sha256=first["target_sha256"],
        draft=", ".join(drafts),
        draft_sha256=first["draft_sha256"],
        features=config.features,
        label_method="+".join(methods),
        suffix_length=lengths.pop() if len(lengths) == 1 else None,
        suffix_gap=config.suffix_gap,
        score=config.score,
        tau=taus.pop() if len(taus) == 1 else None,
        acceptable=config.acceptable,
        margin_limit=config.margin_limit,
        sources=tuple(str(name) for name in np.unique(rows.sources[rows.used])),
        labels_sha256=_hash_labels(rows.manifests),
    )


def _hash_labels(manifests: Sequence[dict[str, Any]]) -> str:
    parts = [part for manifest in manifests for part in (manifest, *manifest["shards"])]
    checksums = sorted(checksum for part in parts for checksum in part["files"].values())
    return hashlib.sha256("".join(checksums).encode()).hexdigest()


def measure_on_holdout(
    rows: LabelledRows, fitted: Fitted, config: TrainConfig, device: torch.device | None = None
) -> tuple[Judge, Evidence]:
    """The judge with thresholds and figures from the holdout."""
    holdout = rows.of("holdout")
    scores, labels = predict(rows, fitted.judge, holdout, device=device)
    thresholds = find_thresholds(scores, labels, reject=config.reject, f=config.threshold_f)
    evidence = Evidence(scores=scores, labels=labels, sources=_count_by_source(rows), threshold_f=config.threshold_f)
    metrics: dict[str, float] = {
        "auc_mismatch": roc_auc(scores, labels),
        "auc_select": fitted.auc_select,
        "n_labels": int(rows.used.sum()),
        "n_prompts": rows.n_prompts,
        "n_holdout": len(labels),
        "n_aligned": int(rows.aligned.sum()),
        "acceptable_rate": float(rows.labels[rows.used].mean()),
    }
    for name in ("F", "R"):
        bad, acceptable = evidence.locate(thresholds[name])
        metrics |= {f"{name}_accepts_acceptable": acceptable, f"{name}_accepts_unacceptable": bad}
    metrics["C"] = fitted.c
    metrics["auc_all"] = roc_auc(*predict(rows, fitted.judge, holdout, originals=True, device=device))
    judge_config = replace(
        fitted.judge.config, thresholds=thresholds, quality_curve=compute_quality_curve(scores, labels), metrics=metrics
    )
    return Judge(judge_config, **dict(fitted.judge.cpu().named_buffers())), evidence


def _count_by_source(rows: LabelledRows) -> dict[str, dict[str, float]]:
    counts = {}
    for name in np.unique(rows.sources[rows.used]):
        labels = rows.labels[rows.used & (rows.sources == name)]
        counts[str(name)] = {"rows": len(labels), "acceptable": float(labels.mean())}
    return counts
