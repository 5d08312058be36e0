"""Fitting: standardised columns, logistic regression by Newton's method over streamed rows.

The scaler is folded into the weights: a judge reads plain columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from selfjudge.judge.config import JudgeConfig
from selfjudge.judge.model import Judge
from selfjudge.train.dataset import Chunk, LabelledRows
from selfjudge.train.holdout import roc_auc
from selfjudge.types import Notify, ignore

GRID = tuple(float(c) for c in np.logspace(-6, 2, 13))
LOOSE = 100.0  # C of the margin: a single column needs no regularisation
NEWTON_STEPS = 50
TOLERANCE = 1e-9  # twice what a step can still gain

Chunks = Callable[[], Iterable[Chunk]]  # reads all rows once, a chunk at a time


@dataclass(frozen=True)
class Scaler:
    """Mean and deviation of every column."""

    mean: Tensor
    deviation: Tensor

    @classmethod
    def of(cls, chunks: Chunks) -> Scaler:
        count, total, squares = 0, torch.zeros(0), torch.zeros(0)
        for x, _ in chunks():
            wide = x.double()
            total = wide.sum(0) if not count else total + wide.sum(0)
            squares = wide.square().sum(0) if not count else squares + wide.square().sum(0)
            count += len(x)
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
    """[D + 1] weights and bias that minimise Σ log-loss + ½ Σ penalty_j w_j² on standardised columns, for each
    penalty [D] in turn. The bias is not penalised.

    Newton's method: a step is one pass over the rows. Each search begins where the last one ended, with its sums."""
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
    """One pass over the rows."""
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
    """A judge: C from the ascending grid by ROC-AUC on the mismatches of the part `select`, the first of equals.

    With `originals` it learns from the target's own tokens as well, as acceptable rows."""
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
    judge = deepcopy(judge).to(device or "cpu")  # whoever decodes with it keeps it where it is
    scores, labels = [np.zeros(0, np.float32)], [np.zeros(0, np.float32)]
    for x, truth in rows.chunks(chosen, judge.config.features, originals=originals, device=device):
        scores.append(judge.score(x).cpu().numpy())
        labels.append(truth.cpu().numpy())
    return np.concatenate(scores), np.concatenate(labels)
