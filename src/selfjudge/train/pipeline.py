"""Training: label folders → a judge with thresholds, a card and a figure.
Prompts are split into fit (70 %: weights and scaler), select (15 %: C) and holdout (15 %: θ and all reported figures).
The weights are a logistic regression on standardised columns, fitted by Newton's method over streamed rows. The scaler
is folded into them: a judge reads plain columns."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from selfjudge.errors import SelfJudgeError
from selfjudge.judge.config import JudgeConfig, write_training_prompts
from selfjudge.judge.model import Judge
from selfjudge.store import locked, provenance, refuse_foreign, write_json
from selfjudge.train.config import LEFT_BY_A_KILL, TrainConfig
from selfjudge.train.dataset import PARTS, Chunk, LabelledRows
from selfjudge.train.holdout import Evidence, compute_quality_curve, find_thresholds, roc_auc, write_card
from selfjudge.types import Notify, check_config, ignore

GRID = tuple(float(c) for c in np.logspace(-6, 2, 13))
LOOSE = 100.0  # C of the margin: a single column needs no regularisation
NEWTON_STEPS = 50
TOLERANCE = 1e-9  # twice what a step can still gain


def train_judge(
    folders: Sequence[Path | str] | Path | str,
    out: Path | str,
    config: TrainConfig | None = None,
    *,
    device: str | None = None,
    notify: Notify = ignore,
) -> dict[str, Any]:
    """Train a judge on finished label folders of one target and write its folder; returns its `config.json`."""
    config = config or TrainConfig()
    check_config(config, TrainConfig)
    config, out = config.resolve(), Path(out)
    paths = [Path(folder) for folder in ([folders] if isinstance(folders, Path | str) else folders)]
    refuse_foreign(out, LEFT_BY_A_KILL)
    begun = time.monotonic()
    rows = load_rows(paths, config, notify)  # nothing is written where there is nothing to learn
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
                labels=[str(folder) for folder in paths],
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
    parts = [part for manifest in rows.manifests for part in (manifest, *manifest["shards"])]
    checksums = sorted(checksum for part in parts for checksum in part["files"].values())
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
        labels_sha256=hashlib.sha256("".join(checksums).encode()).hexdigest(),
    )


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
    """Number of rows and share of acceptable ones, by source of prompts."""
    counts = {}
    for name in np.unique(rows.sources[rows.used]):
        labels = rows.labels[rows.used & (rows.sources == name)]
        counts[str(name)] = {"rows": len(labels), "acceptable": float(labels.mean())}
    return counts


Chunks = Callable[[], Iterable[Chunk]]  # reads all rows once, a chunk at a time


@dataclass(frozen=True)
class Scaler:
    """Mean and deviation of every column."""

    mean: Tensor
    deviation: Tensor

    @classmethod
    def of(cls, chunks: Chunks) -> Scaler:
        """Measure them in one pass over all rows."""
        count, total, squares = 0, torch.tensor(0.0), torch.tensor(0.0)
        for x, _ in chunks():
            wide = x.double()
            count, total, squares = count + len(x), total + wide.sum(0), squares + wide.square().sum(0)
        mean = total / count
        deviation = (squares / count - mean.square()).clamp_min(0).sqrt()
        varies = deviation > 1e-7 * mean.abs() + 1e-12  # what rounding leaves of a constant is less
        return cls(mean, torch.where(varies, deviation, torch.ones_like(deviation)))

    def __call__(self, x: Tensor) -> Tensor:
        return (x - self.mean.float()) / self.deviation.float()

    def fold(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Weights [..., D] and biases for plain columns from those for standardised ones."""
        plain = weight.double() / self.deviation
        return plain, bias.double() - plain @ self.mean


@dataclass(frozen=True)
class Fitted:
    """A judge and its ROC-AUC on the mismatches of the part `select`."""

    judge: Judge
    auc_select: float
    c: float


class _Sums(NamedTuple):
    """Log-loss of the rows, its gradient [D + 1] and its curvature [D + 1, D + 1], without the penalty."""

    loss: float
    gradient: Tensor
    curvature: Tensor


def fit_logistic(chunks: Chunks, scaler: Scaler, penalties: Iterable[Tensor]) -> Iterator[Tensor]:
    """[D + 1] weights and bias for each penalty [D] in turn that minimise Σ log-loss + ½ Σ penalty_j w_j² on
    standardised columns; the bias is not penalised. Each search starts from the last one's weights and sums."""
    weights, sums = torch.zeros(0), None
    for penalty in penalties:
        ridge = F.pad(penalty.double(), (0, 1))
        if sums is None:
            weights = torch.zeros_like(ridge)
            sums = _sum_rows(chunks, scaler, weights)
        for _ in range(NEWTON_STEPS):
            gradient = sums.gradient + ridge * weights
            step = torch.linalg.solve(sums.curvature + torch.diag(ridge), gradient)
            if float(gradient @ step) < TOLERANCE:
                break
            weights, sums = _take_step(chunks, scaler, ridge, weights, step, sums)
        yield weights.clone()


def _take_step(
    chunks: Chunks, scaler: Scaler, ridge: Tensor, weights: Tensor, step: Tensor, sums: _Sums
) -> tuple[Tensor, _Sums]:
    """Take a step, halved until the objective does not grow."""

    def objective(sums: _Sums, weights: Tensor) -> float:
        return sums.loss + 0.5 * float((ridge * weights.square()).sum())

    limit = objective(sums, weights)
    limit += 1e-12 * abs(limit)
    length = 1.0
    while True:
        moved = weights - length * step
        sums = _sum_rows(chunks, scaler, moved)
        if objective(sums, moved) <= limit or length <= 1e-3:
            return moved, sums
        length /= 2


def _sum_rows(chunks: Chunks, scaler: Scaler, weights: Tensor) -> _Sums:
    """One pass over all rows."""
    loss, gradient = 0.0, torch.zeros_like(weights)
    curvature = torch.zeros(len(weights), len(weights), dtype=weights.dtype, device=weights.device)
    for x, labels in chunks():
        x = F.pad(scaler(x), (0, 1), value=1.0)
        wide = x.double()  # sums of many small terms; curvature only has to point the way
        logits = wide @ weights
        p = logits.sigmoid()
        loss += float(F.binary_cross_entropy_with_logits(logits, labels.double(), reduction="sum"))
        gradient += wide.T @ (p - labels)
        root = x * (p * (1 - p)).sqrt().float()[:, None]
        curvature += (root.T @ root).double()
    return _Sums(loss, gradient, curvature)


def fit_linear(
    rows: LabelledRows,
    config: JudgeConfig,
    *,
    originals: bool = False,
    device: torch.device | None = None,
    notify: Notify = ignore,
    grid: Sequence[float] = GRID,
) -> Fitted:
    """A judge: the C of the ascending grid with the best ROC-AUC on mismatches of `select`, the first of equals. With
    `originals` it also learns from the target's own tokens, as acceptable rows."""
    chunks = partial(rows.chunks, rows.of("fit"), config.features, originals=originals, device=device)
    scaler = Scaler.of(chunks)

    def penalty(c: float) -> Tensor:
        columns = torch.full((config.width,), 1 / c, device=device)
        if "margin" in config.features:
            columns[config.hidden_size] = 1 / LOOSE
        return columns

    fits = []
    path = fit_logistic(chunks, scaler, map(penalty, grid))
    for number, (c, weights) in enumerate(zip(grid, path, strict=True), 1):
        judge = Judge(config, *scaler.fold(weights[:-1], weights[-1]))
        auc = roc_auc(*predict(rows, judge, rows.of("select"), device=device))
        fits.append(Fitted(judge, auc, c))
        notify(f"logistic regression, C = {c:.2g}: AUC {auc:.3f}", number / len(grid))
    return max(fits, key=lambda fitted: fitted.auc_select)


@torch.no_grad()
def predict(
    rows: LabelledRows,
    judge: Judge,
    chosen: NDArray[np.bool_],
    *,
    originals: bool = False,
    device: torch.device | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """P(acceptable) and labels of the chosen rows (in no particular order with `originals`)."""
    judge = judge.on(device or torch.device("cpu"))
    scores, labels = [np.zeros(0, np.float32)], [np.zeros(0, np.float32)]
    for x, truth in rows.chunks(chosen, judge.config.features, originals=originals, device=device):
        scores.append(judge.score(x).cpu().numpy())
        labels.append(truth.cpu().numpy())
    return np.concatenate(scores), np.concatenate(labels)
