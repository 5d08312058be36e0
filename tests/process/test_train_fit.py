"""Fits against scikit-learn, streamed rows against rows in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from fake_labels import HIDDEN, WIDTH, config_of, everything, flipped, label_folder
from selfjudge.judge.config import JudgeConfig
from selfjudge.judge.model import Judge
from selfjudge.train import dataset as reading
from selfjudge.train.dataset import PARTS, Chunk, LabelledRows
from selfjudge.train.pipeline import GRID, LOOSE, Scaler, fit_linear, fit_logistic, predict


def pieces(x: Tensor, y: Tensor, size: int = 97) -> Callable[[], Iterable[Chunk]]:
    return lambda: map(Chunk, x.split(size), y.split(size))


def logistic(chunks: Callable[[], Iterable[Chunk]], scaler: Scaler, penalty: Tensor) -> Tensor:
    """The fit of one penalty."""
    return next(fit_logistic(chunks, scaler, [penalty]))


def known(c: float) -> Pipeline:
    """scikit-learn's judge."""
    return make_pipeline(StandardScaler(), LogisticRegression(C=c, tol=1e-10, max_iter=500, solver="newton-cholesky"))


def random_features(seed: int, n: int = 400, width: int = 9) -> tuple[Tensor, Tensor]:
    """Columns of many scales and offsets, one of them constant; labels that partly follow."""
    rng = np.random.default_rng(seed)
    z = rng.normal(0, 1, (n, width))
    y = z @ rng.normal(0, 1, width) + rng.normal(0, 2, n) > 0.5
    x = z * rng.uniform(0.05, 20, width) + rng.normal(0, 10, width)
    x[:, 4] = 3.0
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)


@pytest.mark.parametrize("c", [0.001, 0.1, 100.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_logistic_with_one_c_is_scikit_learns(c: float, seed: int) -> None:
    x, y = random_features(seed)
    scaler = Scaler.of(pieces(x, y))
    weights = logistic(pieces(x, y), scaler, torch.full((x.shape[1],), 1 / c))
    judge = Judge(JudgeConfig(hidden_size=x.shape[1]), *scaler.fold(weights[:-1], weights[-1]))
    theirs = known(c).fit(x.double().numpy(), y.numpy())
    scale = theirs[0]
    assert np.allclose(scaler.mean, scale.mean_)
    assert np.allclose(scaler.deviation, scale.scale_)
    assert np.allclose(weights[:-1], theirs[1].coef_[0], atol=1e-5)
    assert np.allclose(judge.score(x), theirs.predict_proba(x.double().numpy())[:, 1], atol=1e-5)


def test_logistic_with_a_c_of_its_own_for_some_columns_is_scikit_learn_on_scaled_ones() -> None:
    x, y = random_features(2)
    c, other = 0.02, 30.0
    scaler = Scaler.of(pieces(x, y))
    penalty = torch.full((9,), 1 / c)
    penalty[6:] = 1 / other
    weights = logistic(pieces(x, y), scaler, penalty)
    z = StandardScaler().fit_transform(x.double().numpy())
    z[:, 6:] *= np.sqrt(other / c)
    theirs = LogisticRegression(C=c, tol=1e-10, max_iter=500, solver="newton-cholesky").fit(z, y.numpy())
    judge = Judge(JudgeConfig(hidden_size=9), *scaler.fold(weights[:-1], weights[-1]))
    assert np.allclose(judge.score(x), theirs.predict_proba(z)[:, 1], atol=1e-5)
    same = logistic(pieces(x, y), scaler, torch.full((9,), 1 / c))
    assert not np.allclose(weights, same, atol=1e-2)


def test_the_grid_of_c_reaches_far_below_what_judges_choose() -> None:
    assert len(GRID) == 13
    assert GRID[0] == pytest.approx(1e-6)
    assert GRID[-1] == pytest.approx(100)
    assert list(GRID) == sorted(GRID)


def test_a_path_of_fits_is_each_of_them_in_fewer_passes() -> None:
    """Every fit begins where the last one ended, with the sums of its last pass."""
    x, y = random_features(4)
    scaler = Scaler.of(pieces(x, y))
    penalties = [torch.full((9,), 1 / c) for c in GRID]
    passes = 0

    def counted() -> Iterable[Chunk]:
        nonlocal passes
        passes += 1
        return pieces(x, y)()

    path = list(fit_logistic(counted, scaler, penalties))
    along, passes = passes, 0
    alone = [logistic(counted, scaler, penalty) for penalty in penalties]
    assert len(path) == len(penalties)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(path, alone, strict=True))
    assert along < passes / 1.5
    assert along <= 3 * len(GRID)


@pytest.mark.parametrize("c", [0.003, 0.5])
def test_the_folded_linear_judge_is_scikit_learns_pipeline(labels: Path, c: float) -> None:
    rows = LabelledRows.load([labels])
    x, y = everything(rows, rows.of("fit"), "hidden")
    fitted = fit_linear(rows, config_of(rows), grid=(c,))
    theirs = known(c).fit(x.double().numpy(), y.numpy())
    every, _ = everything(rows, np.ones(len(rows), bool), "hidden")
    assert np.allclose(fitted.judge.score(every), theirs.predict_proba(every.double().numpy())[:, 1], atol=1e-5)
    assert fitted.c == c
    x, y = everything(rows, rows.of("select"), "hidden")
    assert fitted.auc_select == pytest.approx(
        roc_auc_score(y, theirs.predict_proba(x.double().numpy())[:, 1]), abs=1e-6
    )


@pytest.mark.parametrize("originals", [False, True])
def test_columns_beside_the_hidden_state_are_held_back_less(labels: Path, originals: bool) -> None:
    rows, c = LabelledRows.load([labels]), 0.01
    features = "hidden+margin"
    x, y = everything(rows, rows.of("fit"), features, originals=originals)
    assert x.shape == (int(rows.of("fit").sum()) * (1 + originals), WIDTH)
    fitted = fit_linear(rows, config_of(rows, features), originals=originals, grid=(c,))
    scale = StandardScaler().fit(x.double().numpy())
    widened = np.where(np.arange(WIDTH) < HIDDEN, 1, np.sqrt(LOOSE / c))
    z = scale.transform(x.double().numpy()) * widened
    theirs = LogisticRegression(C=c, tol=1e-10, max_iter=500, solver="newton-cholesky").fit(z, y.numpy())
    assert np.allclose(fitted.judge.score(x), theirs.predict_proba(z)[:, 1], atol=1e-5)


def test_c_is_the_one_of_the_best_auc_on_select(labels: Path) -> None:
    rows = LabelledRows.load([labels])
    grid = (0.0003, 0.01, 1.0, 100.0)
    config = config_of(rows, "hidden+margin")
    each = {c: fit_linear(rows, config, grid=(c,)) for c in grid}
    best = max(each.values(), key=lambda f: f.auc_select)
    found = fit_linear(rows, config, grid=grid)
    assert found.c == best.c
    assert found.auc_select == pytest.approx(best.auc_select, abs=1e-9)
    assert torch.allclose(found.judge.weight, best.judge.weight, atol=1e-5)
    assert len({round(f.auc_select, 6) for f in each.values()}) > 1


def test_the_rows_that_choose_c_influence_no_weights(labels: Path) -> None:
    rows, again = LabelledRows.load([labels]), flipped(LabelledRows.load([labels]), "select")
    one, other = (fit_linear(r, config_of(r), grid=(0.1,)) for r in (rows, again))
    assert torch.equal(one.judge.weight, other.judge.weight)
    assert other.auc_select == pytest.approx(1 - one.auc_select)


@pytest.mark.parametrize(("rows", "value"), [(700, 1000.1), (5000, 0.7)])
def test_a_column_that_never_changes_does_no_harm(rows: int, value: float) -> None:
    """What rounding leaves of its deviation (1e-5, 7e-9) is no deviation: folded scores would be off."""
    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(0))
    x[:, 1] = value
    scaler = Scaler.of(pieces(x, x[:, 0], size=1024))
    assert scaler.deviation[1] == StandardScaler().fit(x.double().numpy()).scale_[1] == 1
    g = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(3, generator=g), torch.randn((), generator=g)
    judge = Judge(JudgeConfig(hidden_size=3), *scaler.fold(weight, bias))
    assert torch.allclose(judge.score(x), torch.sigmoid(scaler(x) @ weight + bias), atol=1e-3)


def test_streamed_rows_give_the_judge_of_rows_in_memory(
    labels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [labels, label_folder(tmp_path / "more", first=60, prompts=30, each=7, shards=9, seed=1)]
    kept = LabelledRows.load(folders)
    config = config_of(kept, "hidden+margin")
    whole = fit_linear(kept, config)
    monkeypatch.setattr(reading, "KEPT_BYTES", 10_000)
    monkeypatch.setattr(reading, "CHUNK_BYTES", 29 * 4 * config.width)
    streamed = LabelledRows.load(folders)
    assert np.array_equal(kept.part, streamed.part)
    assert np.array_equal(kept.labels, streamed.labels)
    again = fit_linear(streamed, config)
    assert len(kept.kept) == len(kept.shards) > len(streamed.kept)
    assert sum(tensor.nbytes for tensor in streamed.kept.values()) < 10_000
    assert again.c == whole.c
    assert torch.allclose(again.judge.weight, whole.judge.weight, atol=1e-6)
    assert float(again.judge.bias) == pytest.approx(float(whole.judge.bias), abs=1e-6)
    for part in PARTS:
        (scores, truth), (others, same) = (predict(r, whole.judge, r.of(part)) for r in (kept, streamed))
        assert np.allclose(scores, others, atol=1e-6)
        assert np.array_equal(truth, same)
        assert np.array_equal(truth, kept.labels[kept.of(part)])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("spare", [0, 1 << 60])
def test_the_gpu_gives_the_same_judge_and_keeps_features_where_there_is_room(
    labels: Path, monkeypatch: pytest.MonkeyPatch, spare: int
) -> None:
    monkeypatch.setattr(reading, "GPU_SPARE", spare)
    rows, device = LabelledRows.load([labels]), torch.device("cuda")
    config = config_of(rows, "hidden+margin")
    here, there = fit_linear(rows, config), fit_linear(rows, config, device=device)
    assert here.c == there.c
    assert torch.allclose(here.judge.weight, there.judge.weight.cpu(), atol=1e-4)
    assert any("cuda" in device for *_, device in rows.kept) == (spare == 0)
