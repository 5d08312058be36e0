"""Fitting: standardised columns, logistic regression by Newton's method over streamed rows, a small MLP.

The scaler is folded into what comes out: a judge reads plain columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from selfjudge.judge.config import JudgeConfig
from selfjudge.judge.model import Judge
from selfjudge.train.dataset import Rows

GRID = tuple(float(c) for c in np.logspace(-3, 2, 10))
LOOSE = 100.0  # C of the columns beside the hidden state: a handful of them needs no holding back
NEWTON_STEPS = 50
TOLERANCE = 1e-9  # of twice what a step can still gain
UNITS, DROPOUT, DECAY, RATE, EPOCHS, BATCH = 128, 0.5, 0.5, 2e-3, 8, 512

Chunks = Callable[[], Iterable[tuple[Tensor, Tensor]]]
"""(x [m, D], labels [m]) pieces, as often as asked for."""


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
    """A judge and how it did on the rows that chose it."""

    judge: Judge
    auc_select: float
    c: float | None = None


def logistic(chunks: Chunks, scaler: Scaler, penalty: Tensor, start: Tensor | None = None) -> Tensor:
    """[D + 1] weights and bias that minimise Σ log-loss + ½ Σ penalty_j w_j² on standardised columns; the bias is free.

    Newton's method: a few passes over the rows, each of which adds up gradient and curvature.
    """
    size = len(penalty)
    weights = torch.zeros(size + 1, dtype=torch.float64, device=penalty.device) if start is None else start.clone()
    ridge = F.pad(penalty.double(), (0, 1))
    loss, gradient, curvature = _sums(chunks, scaler, weights, ridge)
    for _ in range(NEWTON_STEPS):
        step = torch.linalg.solve(curvature, gradient)
        if float(gradient @ step) < TOLERANCE:
            break
        length = 1.0
        made = _sums(chunks, scaler, weights - step, ridge)
        while made[0] > loss + 1e-12 * abs(loss) and length > 1e-3:  # too far
            length /= 2
            made = _sums(chunks, scaler, weights - length * step, ridge)
        weights, (loss, gradient, curvature) = weights - length * step, made
    return weights


def _sums(chunks: Chunks, scaler: Scaler, weights: Tensor, ridge: Tensor) -> tuple[float, Tensor, Tensor]:
    """Loss, gradient and curvature of the objective."""
    loss = 0.5 * float((ridge * weights.square()).sum())
    gradient, curvature = ridge * weights, torch.diag(ridge)
    for x, labels in chunks():
        x = F.pad(scaler(x), (0, 1), value=1.0)
        wide = x.double()  # sums of many small terms; curvature only has to point the way
        logits = wide @ weights
        p = logits.sigmoid()
        loss += float(F.binary_cross_entropy_with_logits(logits, labels.double(), reduction="sum"))
        gradient = gradient + wide.T @ (p - labels)
        root = x * (p * (1 - p)).sqrt().float()[:, None]
        curvature = curvature + (root.T @ root).double()
    return loss, gradient, curvature


def fit_linear(
    rows: Rows, config: JudgeConfig, *, chosen: NDArray[np.bool_] | None = None, originals: bool = False,
    grid: Sequence[float] = GRID, device: torch.device | None = None,
    notify: Callable[[str, float], None] | None = None,
) -> Fitted:  # fmt: skip
    """A linear judge: C from the grid by ROC-AUC on the mismatches of the part `select`."""
    mine = rows.of("fit") if chosen is None else rows.of("fit") & chosen
    chunks = partial(rows.chunks, mine, config.features, originals=originals, device=device)
    scaler = Scaler.of(chunks)
    best: Fitted | None = None
    weights = None
    for number, c in enumerate(grid):
        penalty = torch.full((config.width,), 1 / c, device=device)
        penalty[config.hidden_size :] = 1 / LOOSE
        weights = logistic(chunks, scaler, penalty, weights)
        judge = Judge(config, *scaler.fold(weights[:-1], weights[-1]))
        found = Fitted(judge, auc(rows, judge, rows.of("select"), device=device), c)
        if best is None or found.auc_select > best.auc_select:
            best = found
        if notify:
            notify(f"logistic regression, C = {c:.2g}: AUC {found.auc_select:.3f}", (number + 1) / len(grid))
    assert best is not None
    return best


def fit_mlp(
    rows: Rows, config: JudgeConfig, *, chosen: NDArray[np.bool_] | None = None, originals: bool = False, seed: int = 0,
    device: torch.device | None = None, notify: Callable[[str, float], None] | None = None,
) -> Fitted:  # fmt: skip
    """A judge with one hidden layer; the epoch is chosen by ROC-AUC on the mismatches of the part `select`."""
    mine = rows.of("fit") if chosen is None else rows.of("fit") & chosen
    chunks = partial(rows.chunks, mine, config.features, originals=originals, device=device)
    scaler = Scaler.of(chunks)
    with torch.random.fork_rng(devices=[device] if device is not None and device.type == "cuda" else []):
        torch.manual_seed(seed)
        inner, outer = nn.Linear(config.width, UNITS).to(device), nn.Linear(UNITS, 1).to(device)
        parameters = [*inner.parameters(), *outer.parameters()]
        optimiser = torch.optim.AdamW(parameters, lr=RATE, weight_decay=DECAY)
        generator = torch.Generator().manual_seed(seed)
        steps = EPOCHS * max(1, -(-int(mine.sum()) * (1 + originals) // BATCH))
        best: Fitted | None = None
        done = 0
        for epoch in range(EPOCHS):
            for x, labels in chunks(generator=generator):
                for piece, truth in zip(scaler(x).split(BATCH), labels.split(BATCH), strict=True):
                    optimiser.param_groups[0]["lr"] = RATE * max(0.02, 1 - done / steps)
                    done += 1
                    logits = outer(F.dropout(F.gelu(inner(piece)), DROPOUT)).squeeze(1)
                    optimiser.zero_grad()
                    F.binary_cross_entropy_with_logits(logits, truth).backward()
                    optimiser.step()
            with torch.no_grad():
                folded = scaler.fold(inner.weight, inner.bias)
                judge = Judge(config, outer.weight[0].clone(), outer.bias[0].clone(), *folded)
            found = Fitted(judge, auc(rows, judge, rows.of("select"), device=device))
            if best is None or found.auc_select > best.auc_select:
                best = found
            if notify:
                notify(f"MLP, epoch {epoch + 1}: AUC {found.auc_select:.3f}", (epoch + 1) / EPOCHS)
    assert best is not None
    return best


@torch.no_grad()
def predict(
    rows: Rows, judge: Judge, chosen: NDArray[np.bool_], *, originals: bool = False, device: torch.device | None = None
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """P(acceptable) and labels of the chosen rows (in no particular order with `originals`)."""
    judge = deepcopy(judge).to(device or "cpu")  # whoever decodes with it keeps it where it is
    scores, labels = [np.zeros(0, np.float32)], [np.zeros(0, np.float32)]
    for x, truth in rows.chunks(chosen, judge.config.features, originals=originals, device=device):
        scores.append(judge.score(x).cpu().numpy())
        labels.append(truth.cpu().numpy())
    return np.concatenate(scores), np.concatenate(labels)


def auc(
    rows: Rows, judge: Judge, chosen: NDArray[np.bool_], *, originals: bool = False, device: torch.device | None = None
) -> float:
    """Area under the ROC curve on the chosen rows; nan where they are of one kind."""
    scores, labels = predict(rows, judge, chosen, originals=originals, device=device)
    return float(roc_auc_score(labels, scores)) if len(labels) and labels.min() < labels.max() else float("nan")
