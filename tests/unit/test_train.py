"""Training: fits against scikit-learn, parts, thresholds by brute force, streaming, relabelling, refusals, the artefact."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from selfjudge.decoding.rules import Judged
from selfjudge.errors import SelfJudgeError
from selfjudge.judge.config import FEATURES, LOWEST, MARGINS, JudgeConfig, columns
from selfjudge.judge.features import block_features, lookahead_columns
from selfjudge.judge.model import Judge
from selfjudge.label.calibrate import tau_of, total
from selfjudge.label.folder import Labels, read_shards, write_shard
from selfjudge.store import RunFolder, read_json, read_rows, sha256, write_json, write_rows, write_tensors
from selfjudge.train import dataset as reading, fit as fitting
from selfjudge.train.config import TrainConfig
from selfjudge.train.dataset import PARTS, Rows
from selfjudge.train.fit import (
    LOOSE,
    FitOptions,
    Fitted,
    Scaler,
    auc,
    best_on_select,
    fit_linear,
    fit_mlp,
    logistic,
    predict,
)
from selfjudge.train.pipeline import fit_candidates, measure_on_holdout, train_judge
from selfjudge.train.study import critical_auc
from selfjudge.train.thresholds import accepted_shares, counts_above, find_thresholds, quality_curve
from selfjudge.types import Block

HIDDEN, SUFFIX, TAU = 12, 6, -4.0
WIDTH = HIDDEN + MARGINS  # of hidden+margin
Floats = NDArray[np.float64]
Signal = Callable[[Floats, Floats], Floats]
"""What a row's score is made of: (hidden [n, H], margin [n]) → [n]; τ is added."""


def straight(hidden: Floats, margin: Floats) -> Floats:
    """A plane through three directions of the hidden state, and the margin."""
    return 2 * hidden[:, 0] - hidden[:, 1] + hidden[:, 2] + margin + 1


def crossed(hidden: Floats, margin: Floats) -> Floats:
    """The sign of a product: no plane tells it."""
    return 4 * hidden[:, 0] * hidden[:, 1]


def folder(
    path: Path, *, prompts: int = 60, each: int = 10, hidden: int = HIDDEN, shards: int = 4, seed: int = 0,
    signal: Signal = straight, noise: float = 1.0, name: str = "p", first: int = 0, lookahead: bool = False,
    evidence: int = 0, method: str = "selfjudge", change: Callable[[dict[str, NDArray[Any]]], object] | None = None,
    **manifest: Any,
) -> Path:  # fmt: skip
    """A label folder: prompts `first` … `first + prompts`, `each` rows a prompt, `evidence` tokens to find τ from."""
    rng = np.random.default_rng(seed)
    asked = range(first, first + prompts)
    write_rows(path / "responses.jsonl", (
        {"prompt_id": f"{name}-{i}", "source": f"s{i % 2}", "prompt_ids": [1, i, 7], "response_ids": [5, 2], "finish": "eos"}
        for i in asked
    ))  # fmt: skip
    made = []
    for number, part in enumerate(np.array_split(np.asarray(asked, int), shards)):
        arrays = scored(rng, len(part) * each, hidden, signal, noise)
        if lookahead:
            ahead = rng.normal(-3, 1, (len(part) * each, 4)).astype(np.float32)
            ahead[np.arange(4) >= rng.integers(2, 9, (len(ahead), 1))] = np.nan  # the draft ended there
            arrays["lookahead"] = ahead
        if change:
            change(arrays)
        scores = [by_hand(arrays, k, SUFFIX) for k in range(len(part) * each)]
        rows = [
            {"prompt_id": f"{name}-{i}", "source": f"s{i % 2}", "position": 3, "target_token": 5, "draft_token": 6,
             "score": round(s, 5), "label": int(s > TAU), "method": method}
            for i, s in zip(np.repeat(part, each), scores, strict=True)
        ]  # fmt: skip
        labels = Labels(rows, arrays, {"acceptable": sum(r["label"] for r in rows)})
        made.append(write_shard(RunFolder(path), number, labels, ""))
    files = ["responses.jsonl"]
    if evidence:
        found = scored(rng, evidence, 1, straight, noise)
        arrays = {k: found[k] for k in ("log_p", "original", "substituted")}
        write_tensors(path / "calibration.safetensors", arrays | {"critical": rng.integers(0, 2, evidence, np.uint8)})
        files.append("calibration.safetensors")
    write_json(path / "manifest.json", {
        "format_version": 1, "target": "t", "draft": "d", "target_sha256": "a" * 64, "draft_sha256": "b" * 64,
        "dtype": "float32", "hidden_size": hidden, "hidden_dtype": "float32", "layer": "last", "norm": "post_final_norm",
        "method": method, "suffix_length": SUFFIX, "tau": TAU if method == "selfjudge" else None, "tau_evidence": {},
        "rows": sum(m["rows"] for m in made), "acceptable": sum(m["acceptable"] for m in made), "prompts": prompts,
        "yields": {}, "target_tokens": 0, "response_tokens": 0, "shards": made,
        "files": {name: sha256(path / name) for name in files}, **manifest,
    })  # fmt: skip
    return path


def scored(rng: np.random.Generator, n: int, hidden: int, signal: Signal, noise: float) -> dict[str, NDArray[Any]]:
    """Arrays of a shard whose scores are `signal` + noise + τ; some responses end within the suffix."""
    states = np.concatenate([rng.normal(0, 1, (n, hidden)), np.zeros((n, 3))], 1)
    margin = -rng.exponential(1.5, n)
    best = -rng.exponential(0.5, n)
    wanted = signal(states, margin) + rng.normal(0, noise, n) + TAU - margin
    original = -rng.exponential(0.5, (n, SUFFIX))
    shares = rng.dirichlet(np.ones(SUFFIX), n)
    ended = np.arange(SUFFIX) >= rng.integers(2, 2 * SUFFIX, n)[:, None]
    shares = np.where(ended, 0, shares)
    shares /= shares.sum(1, keepdims=True)
    substituted = original + shares * wanted[:, None]
    original[ended], substituted[ended] = np.nan, np.nan
    states = states[:, :hidden] * np.linspace(0.5, 3, hidden) + np.linspace(-2, 5, hidden)  # columns of many scales
    made = {
        "hidden_draft": states, "hidden_target": states + rng.normal(1, 1, (n, hidden)), "original": original,
        "log_p": np.stack([best, best + margin], 1), "substituted": substituted,
    }  # fmt: skip
    return {k: v.astype(np.float32) for k, v in made.items()}


def by_hand(arrays: dict[str, NDArray[Any]], k: int, length: int, *, mean: bool = False) -> float:
    """The score of row k over `length` tokens, token by token."""
    found, tokens = float(arrays["log_p"][k, 1]) - float(arrays["log_p"][k, 0]), 1
    for old, new in itertools.islice(zip(arrays["original"][k], arrays["substituted"][k], strict=True), length):
        if not math.isnan(old):
            found, tokens = found + float(new) - float(old), tokens + 1
    return found / tokens if mean else found


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 rows of 60 prompts that a linear judge can learn, with look-ahead and evidence for τ."""
    return folder(tmp_path_factory.mktemp("labels") / "straight", lookahead=True, evidence=400)


@pytest.fixture(scope="module")
def xor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("labels") / "xor", prompts=300, each=40, hidden=3, signal=crossed, noise=0.1)


def config_of(rows: Rows, features: str = "hidden", model: str = "linear") -> JudgeConfig:
    return JudgeConfig(hidden_size=rows.hidden_size, features=features, model=model)


def everything(rows: Rows, chosen: NDArray[np.bool_], features: str, **options: Any) -> tuple[Tensor, Tensor]:
    found = list(rows.chunks(chosen, features, **options))
    return torch.cat([x for x, _ in found]), torch.cat([y for _, y in found])


# fits against scikit-learn


def pieces(x: Tensor, y: Tensor, size: int = 97) -> Callable[[], Iterable[tuple[Tensor, Tensor]]]:
    return lambda: zip(x.split(size), y.split(size), strict=True)


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


def test_logistic_from_another_start_ends_at_the_same_place() -> None:
    x, y = random_features(3)
    scaler = Scaler.of(pieces(x, y))
    penalty = torch.full((9,), 2.0)
    start = 4 * torch.randn(10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    before = start.clone()
    assert torch.allclose(
        logistic(pieces(x, y), scaler, penalty, start), logistic(pieces(x, y), scaler, penalty), atol=1e-5
    )
    assert torch.equal(start, before)


@pytest.mark.parametrize("c", [0.003, 0.5])
def test_the_folded_linear_judge_is_scikit_learns_pipeline(labels: Path, c: float) -> None:
    rows = Rows.load([labels])
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
    rows, c = Rows.load([labels]), 0.01
    features = "hidden+margin+lookahead"
    x, y = everything(rows, rows.of("fit"), features, originals=originals)
    assert x.shape == (int(rows.of("fit").sum()) * (1 + originals), WIDTH + 8)
    fitted = fit_linear(rows, config_of(rows, features), FitOptions(originals=originals), grid=(c,))
    scale = StandardScaler().fit(x.double().numpy())
    widened = np.where(np.arange(WIDTH + 8) < HIDDEN, 1, np.sqrt(LOOSE / c))
    z = scale.transform(x.double().numpy()) * widened
    theirs = LogisticRegression(C=c, tol=1e-10, max_iter=500, solver="newton-cholesky").fit(z, y.numpy())
    assert np.allclose(fitted.judge.score(x), theirs.predict_proba(z)[:, 1], atol=1e-5)


def test_c_is_the_one_of_the_best_auc_on_select(labels: Path) -> None:
    rows = Rows.load([labels])
    grid = (0.0003, 0.01, 1.0, 100.0)
    config = config_of(rows, "hidden+margin")
    each = {c: fit_linear(rows, config, grid=(c,)) for c in grid}
    best = max(each.values(), key=lambda f: f.auc_select)
    found = fit_linear(rows, config, grid=grid)
    assert found.c == best.c
    assert found.auc_select == pytest.approx(best.auc_select, abs=1e-9)
    assert torch.allclose(found.judge.weight, best.judge.weight, atol=1e-5)
    assert len({round(f.auc_select, 6) for f in each.values()}) > 1


def test_only_chosen_rows_of_the_part_are_learned_from(labels: Path) -> None:
    """As a study of fewer labels asks for: the scaler and the weights know nothing of the others."""
    rows = Rows.load([labels])
    mine = np.arange(len(rows)) % 3 == 0
    fitted = fit_linear(rows, config_of(rows), FitOptions(chosen=mine), grid=(0.1,))
    x, y = everything(rows, rows.of("fit") & mine, "hidden")
    theirs = known(0.1).fit(x.double().numpy(), y.numpy())
    assert np.allclose(fitted.judge.score(x), theirs.predict_proba(x.double().numpy())[:, 1], atol=1e-5)


# parts


def prompts_of(folders: Sequence[Path]) -> list[tuple[int, ...]]:
    """The prompt's tokens of every row, in the order of the rows."""
    found = []
    for one in folders:
        asked = {row["prompt_id"]: tuple(row["prompt_ids"]) for row in read_rows(one / "responses.jsonl")}
        found += [asked[row["prompt_id"]] for rows, _ in read_shards(one) for row in rows]
    return found


def parts_of(rows: Rows) -> dict[tuple[int, ...], int]:
    """Part of every prompt; a prompt in two of them fails."""
    found: dict[tuple[int, ...], int] = {}
    for prompt, part in zip(prompts_of(rows.folders), rows.part, strict=True):
        assert found.setdefault(prompt, int(part)) == part
    return found


def test_no_prompt_stands_in_two_parts(labels: Path, tmp_path: Path) -> None:
    """Not even one that two folders hold, under different names or, worse, under one name for two prompts."""
    again = folder(tmp_path / "again", name="other", first=20, prompts=60, each=3, seed=1)
    shifted = folder(tmp_path / "shifted", name="p", first=70, prompts=30, each=2, shards=1, seed=2)
    rows = Rows.load([labels, again, shifted])
    found = parts_of(rows)
    assert len(rows) == 600 + 180 + 60
    assert rows.n_prompts == len(found) == 100
    assert np.bincount(list(found.values())).tolist() == [70, 15, 15]
    assert sum(rows.of(name).astype(int) for name in PARTS).tolist() == [1] * len(rows)
    assert parts_of(Rows.load([shifted, labels, again])) == found
    numbers: dict[int, set[tuple[int, ...]]] = {}
    for number, prompt in zip(rows.prompts, prompts_of(rows.folders), strict=True):
        numbers.setdefault(int(number), set()).add(prompt)
    assert all(len(one) == 1 for one in numbers.values())


@pytest.mark.parametrize("count", [6, 7, 20, 60, 333])
def test_parts_are_70_15_15_of_the_prompts(tmp_path: Path, count: int) -> None:
    rows = Rows.load([folder(tmp_path / "labels", prompts=count, each=1, shards=2)])
    sizes = [int(rows.of(name).sum()) for name in PARTS]
    assert sum(sizes) == count
    assert all(abs(size - share * count) <= 1 for size, share in zip(sizes, (0.7, 0.15, 0.15), strict=True))
    assert min(sizes) >= 1


def test_the_seed_decides_the_split(labels: Path) -> None:
    one, same, other = (Rows.load([labels], seed=seed) for seed in (3, 3, 4))
    assert np.array_equal(one.part, same.part)
    moved = np.mean([parts_of(one)[prompt] != part for prompt, part in parts_of(other).items()])
    assert 0.2 < moved < 0.8  # 47 % are expected to
    assert one.n_prompts == other.n_prompts


def test_a_split_does_not_follow_the_order_of_the_prompts(labels: Path) -> None:
    """The first prompts of a folder are of one source: each part gets some of both ends."""
    places = [prompt[1] for prompt, part in parts_of(Rows.load([labels])).items() if part]
    assert min(places) < 20 < 40 < max(places)


# who sees what


def flipped(rows: Rows, *parts: str) -> Rows:
    for part in parts:
        rows.labels[rows.of(part)] ^= 1
    return rows


def test_thresholds_do_not_see_the_rows_that_chose_c(labels: Path) -> None:
    settings = TrainConfig(model="linear")
    rows = Rows.load([labels])
    fitted = fit_candidates(rows, settings)["linear"]
    judge, evidence = measure_on_holdout(rows, {"linear": fitted}, settings)
    again, other = measure_on_holdout(flipped(Rows.load([labels]), "select", "fit"), {"linear": fitted}, settings)
    assert again.config.thresholds == judge.config.thresholds
    assert again.config.quality_curve == judge.config.quality_curve
    kept = ("auc_mismatch", "auc_all", "n_holdout", "F_accepts_acceptable", "R_accepts_unacceptable")
    assert {k: again.config.metrics[k] for k in kept} == {k: judge.config.metrics[k] for k in kept}
    assert np.array_equal(evidence.scores, other.scores)
    third, _ = measure_on_holdout(flipped(Rows.load([labels]), "holdout"), {"linear": fitted}, settings)
    assert third.config.thresholds != judge.config.thresholds


def test_the_holdout_influences_neither_weights_nor_c(labels: Path) -> None:
    settings = TrainConfig(model="auto")
    plain = fit_candidates(Rows.load([labels]), settings)
    other = fit_candidates(flipped(Rows.load([labels]), "holdout"), settings)
    for kind in ("linear", "mlp"):
        assert plain[kind].c == other[kind].c
        assert plain[kind].auc_select == other[kind].auc_select
        for one, same in zip(plain[kind].judge.buffers(), other[kind].judge.buffers(), strict=True):
            assert torch.equal(one, same)


def test_the_rows_that_choose_c_influence_no_weights(labels: Path) -> None:
    rows, again = Rows.load([labels]), flipped(Rows.load([labels]), "select")
    one, other = (fit_linear(r, config_of(r), grid=(0.1,)) for r in (rows, again))
    assert torch.equal(one.judge.weight, other.judge.weight)
    assert other.auc_select == pytest.approx(1 - one.auc_select)


# thresholds


def random_scores(seed: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """A few scores, many of them equal, with both kinds of labels; now and then 0 and 1."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 40))
    scores = (rng.integers(0, 11, n) / 10 if seed % 2 else rng.random(n)).astype(np.float32)
    made = rng.random(n) < (scores + 0.3) / 1.6
    made[:2] = True, False
    return scores, made.astype(np.float32)


def accepted(scores: NDArray[Any], labels: NDArray[Any], theta: float) -> tuple[int, int]:
    """(acceptable, unacceptable) rows whose score is greater than θ."""
    above = [(s, y) for s, y in zip(scores.tolist(), labels.tolist(), strict=True) if s > theta]
    return sum(y == 1 for _, y in above), sum(y == 0 for _, y in above)


def places(scores: NDArray[Any]) -> list[float]:
    """Every θ that makes a difference."""
    return sorted({0.0, 1.0, *scores.tolist()})


def f1(scores: NDArray[Any], labels: NDArray[Any], theta: float, positive: int) -> Fraction:
    good, bad = int((labels == 1).sum()), int((labels == 0).sum())
    kept, passed = accepted(scores, labels, theta)
    hit, wrong, missed = (kept, passed, good - kept) if positive else (bad - passed, good - kept, passed)
    return Fraction(2 * hit, max(1, 2 * hit + wrong + missed))


@pytest.mark.parametrize("seed", range(60))
def test_thresholds_are_those_of_a_search_by_hand(seed: int) -> None:
    scores, truth = random_scores(seed)
    bad = int((truth == 0).sum())
    for share in ("0.5", "0.8", "0.9", "1"):
        found = find_thresholds(scores, truth, reject=float(share))
        best = {p: max(places(scores), key=lambda t, p=p: (f1(scores, truth, t, p), t)) for p in (0, 1)}
        assert found["F_accept"] == best[1]
        assert found["F_reject"] == best[0]
        assert found["F"] == max(best.values())
        rejecting = min(t for t in places(scores) if bad - accepted(scores, truth, t)[1] >= Fraction(share) * bad)
        assert found["R"] == max(rejecting, found["F"])


def test_no_theta_between_the_scores_is_better() -> None:
    for seed in range(30):
        scores, truth = random_scores(seed)
        found = find_thresholds(scores, truth)
        fine = np.linspace(0, 1, 201)
        assert f1(scores, truth, found["F_accept"], 1) >= max(f1(scores, truth, t, 1) for t in fine)
        assert f1(scores, truth, found["F_reject"], 0) >= max(f1(scores, truth, t, 0) for t in fine)


def test_r_is_stricter_than_f_only_where_it_has_to_be() -> None:
    scores, truth = np.linspace(0.01, 0.99, 50, dtype=np.float32), np.zeros(50, np.float32)
    truth[40:] = 1
    apart = find_thresholds(scores, truth, reject=0.5)
    assert apart["R"] == apart["F"] == scores[39]
    truth[[10, 20, 25, 30]] = 1
    truth[[45, 47]] = 0
    strict = find_thresholds(scores, truth, reject=1.0)
    assert strict["R"] == scores[47] > strict["F"]


@pytest.mark.parametrize("seed", range(30))
def test_the_quality_curve_keeps_its_word_and_asks_for_no_more(seed: int) -> None:
    scores, truth = random_scores(seed)
    bad = int((truth == 0).sum())
    curve = quality_curve(scores, truth)
    shares, thetas = zip(*curve, strict=True)
    assert list(shares) == sorted(set(shares))
    assert list(thetas) == sorted(thetas)
    assert curve[-1] == (1.0, 1.0)
    assert {0.5, 0.9, 0.95, 0.99, 0.999} <= set(shares)
    for share, theta in curve[:-1]:
        wanted = Fraction(str(share)) * bad
        assert bad - accepted(scores, truth, theta)[1] >= wanted
        assert all(bad - accepted(scores, truth, t)[1] < wanted for t in places(scores) if t < theta)


def test_quality_picks_from_the_curve() -> None:
    scores, truth = random_scores(4)
    curve = quality_curve(scores, truth)
    judge = Judge(JudgeConfig(hidden_size=1, quality_curve=curve))
    for share, theta in curve:
        assert judge.quality(share) == theta
    bad = int((truth == 0).sum())
    for share in (0.511, 0.873, 0.9951, 0.9999):
        theta = judge.quality(share)
        assert theta == min(t for s, t in curve if s >= share)
        assert bad - accepted(scores, truth, theta)[1] >= share * bad
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(SelfJudgeError, match="`quality` must lie"):
            judge.quality(share)
    with pytest.raises(SelfJudgeError, match="no quality curve"):
        Judge(JudgeConfig(hidden_size=1)).quality(0.9)


def test_a_score_equal_to_theta_is_not_accepted() -> None:
    scores, truth = np.asarray([0.25, 0.5, 0.5, 0.75], np.float32), np.asarray([1, 1, 0, 0], np.float32)
    assert accepted_shares(scores, truth, 0.5) == {"accepts_acceptable": 0.0, "accepts_unacceptable": 0.5}
    assert accepted_shares(scores, truth, 0.49) == {"accepts_acceptable": 0.5, "accepts_unacceptable": 1.0}
    thetas, kept, passed = counts_above(scores, truth)
    assert (thetas.tolist(), kept.tolist(), passed.tolist()) == (
        [0, 0.25, 0.5, 0.75, 1],
        [2, 1, 0, 0, 0],
        [2, 2, 1, 0, 0],
    )


def test_a_stored_threshold_does_in_a_rule_what_it_did_on_the_holdout(labels: Path) -> None:
    """The same `>` there and here, although θ is itself one of the scores and went through a file of text."""
    settings = TrainConfig(model="linear", features="hidden")
    rows = Rows.load([labels])
    judge, evidence = measure_on_holdout(rows, fit_candidates(rows, settings), settings)
    truth = evidence.labels
    block = SimpleNamespace(scores=torch.from_numpy(evidence.scores)[:, None])
    for name in ("F", "R"):
        theta = json.loads(json.dumps(judge.config.thresholds))[name]
        assert theta in evidence.scores.tolist()
        approved = Judged(judge, theta).approves(block)[:, 0].numpy()  # type: ignore[arg-type]
        assert approved[truth == 1].mean() == judge.config.metrics[f"{name}_accepts_acceptable"]
        assert approved[truth == 0].mean() == judge.config.metrics[f"{name}_accepts_unacceptable"]


# streaming


def test_streamed_rows_give_the_judge_of_rows_in_memory(
    labels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [labels, folder(tmp_path / "more", first=60, prompts=30, each=7, shards=9, seed=1)]
    kept = Rows.load(folders)
    config = config_of(kept, "hidden+margin")
    whole = fit_linear(kept, config)
    monkeypatch.setattr(reading, "KEPT_BYTES", 10_000)
    monkeypatch.setattr(reading, "CHUNK_BYTES", 29 * 4 * config.width)
    streamed = Rows.load(folders)
    assert kept.kept is not None
    assert streamed.kept is None
    assert np.array_equal(kept.part, streamed.part)
    assert np.array_equal(kept.labels, streamed.labels)
    again = fit_linear(streamed, config)
    assert again.c == whole.c
    assert torch.allclose(again.judge.weight, whole.judge.weight, atol=1e-6)
    assert float(again.judge.bias) == pytest.approx(float(whole.judge.bias), abs=1e-6)
    for part in PARTS:
        (scores, truth), (others, same) = (predict(r, whole.judge, r.of(part)) for r in (kept, streamed))
        assert np.allclose(scores, others, atol=1e-6)
        assert np.array_equal(truth, same)
        assert np.array_equal(truth, kept.labels[kept.of(part)])


def test_an_mlp_learns_the_same_from_files(labels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Rows.load([labels])
    whole = fit_mlp(kept, config_of(kept, model="mlp"))
    monkeypatch.setattr(reading, "KEPT_BYTES", 0)
    streamed = Rows.load([labels])
    assert streamed.kept is None
    again = fit_mlp(streamed, config_of(kept, model="mlp"))
    assert all(torch.equal(a, b) for a, b in zip(whole.judge.buffers(), again.judge.buffers(), strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("spare", [0, 1 << 60])
def test_the_gpu_gives_the_same_judge_and_keeps_features_where_there_is_room(
    labels: Path, monkeypatch: pytest.MonkeyPatch, spare: int
) -> None:
    monkeypatch.setattr(reading, "GPU_SPARE", spare)
    rows, device = Rows.load([labels]), torch.device("cuda")
    config = config_of(rows, "hidden+margin")
    here, there = fit_linear(rows, config), fit_linear(rows, config, FitOptions(device=device))
    assert here.c == there.c
    assert torch.allclose(here.judge.weight, there.judge.weight.cpu(), atol=1e-4)
    assert bool(rows.on_gpu) == (spare == 0)


def test_a_judge_may_learn_from_some_sources_alone(labels: Path, tmp_path: Path) -> None:
    config = train_judge([labels], tmp_path / "judge", TrainConfig(model="linear", sources=("s1",)))
    rows = Rows.load([labels])
    assert config["metrics"]["n_labels"] == int((rows.used & (rows.sources == "s1")).sum()) > 0
    assert config["metrics"]["n_prompts"] == 30
    assert list(read_json(tmp_path / "judge" / "run.json")["sources"]) == ["s1"]
    with pytest.raises(SelfJudgeError, match=r"no labels come from s9; the sources are: s0, s1"):
        train_judge([labels], tmp_path / "none", TrainConfig(sources=("s9",)))


@pytest.mark.parametrize("originals", [False, True])
@pytest.mark.parametrize("shuffled", [False, True])
def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, originals: bool, shuffled: bool) -> None:
    """A chunk has at most `most` rows, and no more than `most` rows and one shard ever wait."""
    made = folder(tmp_path / "labels", prompts=48, each=10, shards=16)  # 30 rows a shard
    most, waited = 70, []
    monkeypatch.setattr(reading, "KEPT_BYTES", 0)
    monkeypatch.setattr(reading, "CHUNK_BYTES", most * 4 * WIDTH + 3)
    gathered, read = reading._pieces, reading.read_tensors
    opened: list[Path] = []

    def pieces(waiting: list[Any], *rest: Any) -> Any:
        waited.append(sum(len(y) for _, y in waiting))
        return gathered(waiting, *rest)

    rows = Rows.load([made])
    monkeypatch.setattr(reading, "_pieces", pieces)
    monkeypatch.setattr(reading, "read_tensors", lambda file, names: opened.append(file) or read(file, names))  # type: ignore[func-returns-value]
    generator = torch.Generator().manual_seed(0) if shuffled else None
    every = np.ones(len(rows), bool)
    sizes = [len(y) for _, y in rows.chunks(every, "hidden+margin", originals=originals, generator=generator)]
    assert sum(sizes) == 480 * (1 + originals) == sum(waited)
    assert max(sizes) <= most
    assert max(waited) < most + 30 * (1 + originals)
    assert len(opened) == len(set(opened)) == 16


def test_shuffled_chunks_hold_every_row_once(labels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "CHUNK_BYTES", 100 * 4 * HIDDEN)
    rows = Rows.load([labels])
    chosen = rows.of("fit")
    plain, truth = everything(rows, chosen, "hidden")
    mixed, same = everything(rows, chosen, "hidden", generator=torch.Generator().manual_seed(1))
    assert not torch.equal(plain, mixed)
    order, other = plain[:, 0].argsort(), mixed[:, 0].argsort()
    assert torch.equal(plain[order], mixed[other])
    assert torch.equal(truth[order], same[other])


def test_shards_without_rows_do_no_harm(tmp_path: Path) -> None:
    rows = Rows.load([folder(tmp_path / "labels", prompts=10, each=3, shards=15)])
    assert len(rows) == 30
    assert rows.n_prompts == 10
    x, _ = everything(rows, np.ones(30, bool), "hidden+margin", originals=True)
    assert x.shape == (60, WIDTH)


# labels again, from scores


def all_arrays(one: Path) -> dict[str, NDArray[Any]]:
    found = [arrays for _, arrays in read_shards(one)]
    return {k: np.concatenate([arrays[k] for arrays in found]) for k in found[0]}


@pytest.mark.parametrize("length", [0, 1, 3, SUFFIX])
@pytest.mark.parametrize("mean", [False, True])
def test_labels_follow_from_the_stored_scores(labels: Path, length: int, mean: bool) -> None:
    arrays = all_arrays(labels)
    for tau in (-3.0, -0.7):
        rows = Rows.load([labels]).relabel(suffix_length=length, tau=tau, mean=mean)
        scores = total(arrays["log_p"], arrays["original"], arrays["substituted"], length, mean=mean)
        assert np.array_equal(rows.labels, scores > tau)
        hand = [by_hand(arrays, k, length, mean=mean) for k in range(len(rows))]
        assert np.allclose(scores, hand, atol=1e-4)
        assert 0 < rows.labels.mean() < 1
        assert rows.taus == [tau]
    if length in (0, SUFFIX):
        return
    assert not np.array_equal(rows.labels, Rows.load([labels]).relabel(tau=-0.7, mean=mean).labels)


@pytest.mark.parametrize("gap", [1, 3])
def test_the_first_tokens_of_a_suffix_can_be_passed_over(labels: Path, gap: int) -> None:
    arrays, evidence = all_arrays(labels), load_file(labels / "calibration.safetensors")
    rows = Rows.load([labels]).relabel(gap=gap)
    expected = tau_of(labels / "calibration.safetensors", SUFFIX, 0.9, gap=gap)["tau"]
    assert rows.taus == [expected] != [TAU]
    hand = np.asarray([by_hand(arrays, k, SUFFIX) - by_hand(arrays, k, gap) for k in range(len(rows))])
    hand += arrays["log_p"][:, 1] - arrays["log_p"][:, 0]  # what is before the suffix stands
    clear = np.abs(hand - expected) > 1e-4
    assert np.array_equal(rows.labels[clear], hand[clear] > expected)
    assert clear.mean() > 0.99
    found = critical_auc(labels / "calibration.safetensors", SUFFIX, gap=gap)
    scores = total(evidence["log_p"], evidence["original"], evidence["substituted"], SUFFIX, gap=gap)
    assert found == pytest.approx(roc_auc_score(evidence["critical"] == 0, scores))
    with pytest.raises(SelfJudgeError, match=f"`suffix_gap` {SUFFIX} leaves nothing"):
        Rows.load([labels]).relabel(gap=SUFFIX)


def test_stored_labels_are_left_alone(tmp_path: Path) -> None:
    """Where nothing is asked for: those of other methods do not follow from scores at all."""
    made = folder(tmp_path / "labels", method="autojudge")
    rows = Rows.load([made])
    assert rows.labels.tolist() == [row["label"] for found, _ in read_shards(made) for row in found]
    assert rows.taus == [None]


def test_a_tau_alone_asks_for_other_labels(labels: Path) -> None:
    rates_ = [float(Rows.load([labels]).relabel(tau=tau).labels.mean()) for tau in (-8.0, TAU, 0.0)]
    assert rates_ == sorted(rates_, reverse=True)
    assert rates_[1] == Rows.load([labels]).labels.mean()
    assert len(set(rates_)) == 3


@pytest.mark.parametrize(("length", "mean"), [(2, False), (0, False), (SUFFIX, True), (3, True)])
def test_tau_of_another_score_comes_from_the_folders_evidence(labels: Path, length: int, mean: bool) -> None:
    rows = Rows.load([labels]).relabel(suffix_length=length, mean=mean)
    expected = tau_of(labels / "calibration.safetensors", length, 0.9, mean=mean)["tau"]
    assert rows.taus == [expected] != [TAU]
    arrays = all_arrays(labels)
    scores = total(arrays["log_p"], arrays["original"], arrays["substituted"], length, mean=mean)
    assert np.array_equal(rows.labels, scores > expected)
    evidence = load_file(labels / "calibration.safetensors")
    critical = [by_hand(evidence, k, length, mean=mean) for k in np.flatnonzero(evidence["critical"])]
    assert np.mean(np.asarray(critical) <= expected + 1e-4) >= 0.9
    assert np.mean(np.asarray(critical) < expected - 1e-4) < 0.9


def test_the_stored_tau_is_used_for_the_stored_scores(labels: Path) -> None:
    assert Rows.load([labels]).relabel(suffix_length=SUFFIX).taus == [TAU]
    assert np.array_equal(Rows.load([labels]).relabel(suffix_length=SUFFIX).labels, Rows.load([labels]).labels)


@pytest.mark.parametrize(("length", "mean"), [(2, False), (None, True)])
def test_without_evidence_another_score_needs_a_tau(tmp_path: Path, length: int | None, mean: bool) -> None:
    made = folder(tmp_path / "labels")
    with pytest.raises(SelfJudgeError, match="give `tau` or `acceptable`") as error:
        Rows.load([made]).relabel(suffix_length=length, mean=mean)
    assert "\n" not in str(error.value)
    assert Rows.load([made]).relabel(suffix_length=length, mean=mean, tau=-2.0).taus == [-2.0]


def test_nothing_is_written_where_there_are_no_labels(tmp_path: Path) -> None:
    with pytest.raises(SelfJudgeError, match="label folder"):
        train_judge([tmp_path / "nowhere"], tmp_path / "judge")
    assert not (tmp_path / "judge").exists()


def test_a_longer_suffix_than_the_stored_one_is_refused(labels: Path, tmp_path: Path) -> None:
    with pytest.raises(
        SelfJudgeError, match=r"scores of 6 tokens, not 7: label again with a `suffix_length` of 7"
    ) as error:
        train_judge([labels], tmp_path / "judge", TrainConfig(suffix_length=7, tau=-1.0))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("asked", [{"suffix_length": 3}, {"tau": -2.0}, {"mean": True}])
def test_autojudge_labels_cannot_be_made_again(tmp_path: Path, asked: dict[str, Any]) -> None:
    made = folder(tmp_path / "labels", method="autojudge", evidence=100)
    with pytest.raises(SelfJudgeError, match="autojudge labels: those do not follow from scores") as error:
        Rows.load([made]).relabel(**asked)
    assert "\n" not in str(error.value)


def test_a_judge_says_which_labels_it_learned(labels: Path, tmp_path: Path) -> None:
    gapped = train_judge([labels], tmp_path / "gapped", TrainConfig(model="linear", features="hidden", suffix_gap=2))
    assert (gapped["suffix_gap"], gapped["tau"]) == (2, Rows.load([labels]).relabel(gap=2).taus[0])
    settings = TrainConfig(model="linear", features="hidden", suffix_length=3)
    config = train_judge([labels], tmp_path / "judge", settings)
    rows = Rows.load([labels]).relabel(suffix_length=3)
    assert (config["suffix_length"], config["tau"]) == (3, rows.taus[0])
    assert config["metrics"]["acceptable_rate"] == pytest.approx(float(rows.labels.mean()))
    assert config["metrics"]["acceptable_rate"] != pytest.approx(float(Rows.load([labels]).labels.mean()))


def test_a_stated_share_of_the_mismatches_is_acceptable(labels: Path, tmp_path: Path) -> None:
    every = Rows.load([labels])
    rows = every.relabel(acceptable=0.4, gap=1)
    assert rows.labels[rows.used].mean() == pytest.approx(0.4, abs=1.5 / rows.used.sum())
    again = every.relabel(tau=rows.taus[0], gap=1)
    assert (again.labels == rows.labels).all()
    one = every.only([every.sources[0]])
    own = one.relabel(acceptable=0.4)
    assert own.labels[own.used].mean() == pytest.approx(0.4, abs=1.5 / own.used.sum())
    settings = TrainConfig(model="linear", features="hidden", suffix_gap=1, acceptable=0.4)
    config = train_judge([labels], tmp_path / "judge", settings)
    assert (config["tau"], config["suffix_gap"], config["acceptable"]) == (rows.taus[0], 1, 0.4)
    assert config["metrics"]["acceptable_rate"] == pytest.approx(float(rows.labels[rows.used].mean()))
    assert "by a stated share; 40." in (tmp_path / "judge" / "README.md").read_text(encoding="utf-8")


def test_a_stated_share_is_one_of_all_folders_and_of_the_sources_that_are_used(labels: Path, tmp_path: Path) -> None:
    other = folder(tmp_path / "other", seed=5)
    rows = Rows.load([labels, other]).relabel(acceptable=0.3)
    assert rows.taus[0] == rows.taus[1]
    assert rows.labels[rows.used].mean() == pytest.approx(0.3, abs=1.5 / rows.used.sum())
    source = str(Rows.load([labels]).sources[0])
    config = train_judge(
        [labels], tmp_path / "judge", TrainConfig(model="linear", features="hidden", sources=(source,), acceptable=0.3)
    )
    assert config["metrics"]["acceptable_rate"] == pytest.approx(0.3, abs=1.5 / config["metrics"]["n_labels"])


def test_nothing_is_left_of_a_training_that_could_not_begin(tmp_path: Path) -> None:
    few = folder(tmp_path / "labels", prompts=2)
    with pytest.raises(SelfJudgeError):
        train_judge([few], tmp_path / "judge", TrainConfig(model="linear"))
    assert not (tmp_path / "judge").exists()


def test_a_stated_share_of_nothing_is_said_to_be_of_nothing(labels: Path) -> None:
    rows = Rows.load([labels])
    rows.part[:] = -1
    with pytest.raises(SelfJudgeError, match="no mismatch that alignment would refuse"):
        rows.relabel(acceptable=0.3).check("hidden", False)


# what is refused


def one_line(error: pytest.ExceptionInfo[SelfJudgeError]) -> None:
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (TrainConfig(features="hidden+x"), r"unknown `features` 'hidden\+x'; there are: hidden"),
        (TrainConfig(model="forest"), "unknown `model` 'forest'; there are: linear, mlp, auto"),
        (TrainConfig(reject=0.0), "`reject`"),
        (TrainConfig(reject=1.5), "`reject`"),
        (TrainConfig(reject=math.nan), "`reject`"),
        (TrainConfig(suffix_length=-1), "`suffix_length`"),
        (TrainConfig(suffix_gap=-1), "`suffix_gap`"),
        (TrainConfig(tau=math.nan), "`tau`"),
        (TrainConfig(tau=math.inf), "`tau`"),
        (TrainConfig(acceptable=0.0), "`acceptable`"),
        (TrainConfig(acceptable=1.0), "`acceptable`"),
        (TrainConfig(acceptable=0.3, tau=-1.0), "give one of them"),
    ],
)
def test_settings_are_checked_before_anything_is_read(tmp_path: Path, settings: TrainConfig, message: str) -> None:
    with pytest.raises(SelfJudgeError, match=message) as error:
        train_judge([tmp_path / "nowhere"], tmp_path / "judge", settings)
    one_line(error)
    assert not (tmp_path / "judge").exists()


@pytest.mark.parametrize(("tau", "which"), [(-1e6, "acceptable"), (1e6, "unacceptable")])
def test_labels_of_one_kind_are_refused(labels: Path, tmp_path: Path, tau: float, which: str) -> None:
    with pytest.raises(SelfJudgeError, match=f"all 600 labels are {which}.*another τ") as error:
        train_judge([labels], tmp_path / "judge", TrainConfig(tau=tau))
    one_line(error)


@pytest.mark.parametrize(("prompts", "message"), [(1, "1 prompts cannot be split"), (2, "cannot be split")])
def test_too_few_prompts_are_refused(tmp_path: Path, prompts: int, message: str) -> None:
    made = folder(tmp_path / "labels", prompts=prompts, each=30, shards=1)
    with pytest.raises(SelfJudgeError, match=message) as error:
        train_judge([made], tmp_path / "judge")
    one_line(error)


@pytest.mark.parametrize("prompts", [3, 4, 5, 6, 7])
def test_every_part_has_a_prompt_where_there_are_three(tmp_path: Path, prompts: int) -> None:
    rows = Rows.load([folder(tmp_path / "labels", prompts=prompts, each=30, shards=1)])
    assert {str(p) for p in np.unique(rows.part)} == {"0", "1", "2"}
    rows.check("hidden")


def test_a_part_with_labels_of_one_kind_is_refused(labels: Path) -> None:
    rows = Rows.load([labels])
    rows.labels[rows.of("select")] = 0
    with pytest.raises(SelfJudgeError, match="part 'select' has labels of one kind only: 60 prompts are too few"):
        rows.check("hidden")


@pytest.mark.parametrize(
    ("name", "value"),
    [("hidden_draft", np.nan), ("hidden_draft", np.inf), ("hidden_target", np.nan), ("log_p", np.nan)],
)
def test_features_that_are_no_numbers_are_refused(tmp_path: Path, name: str, value: float) -> None:
    def spoil(arrays: dict[str, NDArray[Any]]) -> None:
        arrays[name][3:5, 0] = value

    made = folder(tmp_path / "labels", change=spoil, method="autojudge")
    with pytest.raises(
        SelfJudgeError, match=r"hidden-0000\d.safetensors has \d rows whose features are not finite"
    ) as error:
        train_judge([made], tmp_path / "judge", TrainConfig(model="linear"))
    one_line(error)
    assert not (tmp_path / "judge" / "config.json").exists()


def test_mixed_widths_are_refused(labels: Path, tmp_path: Path) -> None:
    with pytest.raises(SelfJudgeError, match="hidden_size 8 and 12") as error:
        train_judge([labels, folder(tmp_path / "narrow", hidden=8)], tmp_path / "judge")
    one_line(error)


def test_labels_of_another_target_are_refused(labels: Path, tmp_path: Path) -> None:
    """By checksum; by name where there is none. The same weights under another name are welcome."""
    with pytest.raises(SelfJudgeError, match=r"different targets .target_sha256 'other'.*a judge has one") as error:
        train_judge([labels, folder(tmp_path / "other", target_sha256="other")], tmp_path / "judge")
    one_line(error)
    unknown = [folder(tmp_path / name, target=name, target_sha256="") for name in ("one", "two")]
    with pytest.raises(SelfJudgeError, match=r"different targets .target 'two' and 'one'"):
        Rows.load(unknown)
    assert len(Rows.load([labels, folder(tmp_path / "renamed", target="renamed")])) == 1200


def test_labels_of_another_draft_are_welcome(labels: Path, tmp_path: Path) -> None:
    assert len(Rows.load([labels, folder(tmp_path / "other", draft="e", draft_sha256="e" * 64)])) == 1200


@pytest.mark.parametrize("shards", [0, 2])
def test_a_folder_without_rows_is_refused(tmp_path: Path, shards: int) -> None:
    made = folder(tmp_path / "labels", prompts=4, each=0, shards=2)
    if not shards:
        write_json(made / "manifest.json", read_json(made / "manifest.json") | {"shards": []})
    with pytest.raises(SelfJudgeError, match="holds no labels") as error:
        train_judge([made], tmp_path / "judge")
    one_line(error)


def test_no_folder_and_no_label_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SelfJudgeError, match="at least one folder"):
        train_judge([], tmp_path / "judge")
    with pytest.raises(SelfJudgeError, match="is not a label folder"):
        train_judge([tmp_path], tmp_path / "judge")


def test_a_damaged_shard_is_refused(tmp_path: Path) -> None:
    made = folder(tmp_path / "labels")
    with (made / "hidden-00001.safetensors").open("r+b") as file:
        file.seek(-5, 2)
        file.write(b"\xff")
    with pytest.raises(SelfJudgeError, match=r"hidden-00001\.safetensors is missing or damaged"):
        train_judge([made], tmp_path / "judge")


def test_lookahead_has_to_be_labelled(labels: Path, tmp_path: Path) -> None:
    """In every folder."""
    settings = TrainConfig(features="hidden+margin+lookahead", model="linear")
    assert train_judge([labels], tmp_path / "judge", settings)["features"] == settings.features
    with pytest.raises(SelfJudgeError, match="no look-ahead: label again with `lookahead`") as error:
        train_judge([labels, folder(tmp_path / "without", first=60)], tmp_path / "other", settings)
    one_line(error)


def test_nothing_is_overwritten(labels: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name, message in {
        "full":  "full holds other files .kept.txt ….: name a new or empty folder with `out`", "file": "file is a file: name a folder with `out`",
        "file/below": "cannot use .*below as a folder",
    }.items():  # fmt: skip
        with pytest.raises(SelfJudgeError, match=message) as error:
            train_judge([labels], tmp_path / name)
        one_line(error)
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["kept.txt"]
    (tmp_path / "killed").mkdir()
    for left in ("README.md", "roc.png", "model.safetensors"):  # config.json comes last: it was killed before
        (tmp_path / "killed" / left).write_text("half")
    train_judge([labels], tmp_path / "killed", TrainConfig(model="linear"))
    with pytest.raises(SelfJudgeError, match=r"holds other files .config\.json"):
        train_judge([labels], tmp_path / "killed", TrainConfig(model="linear"))


def test_a_draft_token_that_alignment_accepts_is_no_mismatch(tmp_path: Path) -> None:
    """Rank 0: two passes in bfloat16 disagreed about a tie. Such rows are in no part, and are counted."""
    labels = folder(tmp_path / "labels")
    plain = Rows.load([labels])
    manifest = read_json(labels / "manifest.json")
    for shard in manifest["shards"]:
        name = list(shard["files"])[1]
        arrays = load_file(labels / name)
        arrays["rank"] = (np.arange(len(arrays["log_p"])) % 5).astype(np.int32)
        save_file(arrays, labels / name)
        shard["files"][name] = sha256(labels / name)
    write_json(labels / "manifest.json", manifest)
    rows = Rows.load([labels])
    assert 0.15 < (~rows.used).mean() < 0.25
    assert np.array_equal(rows.part[rows.used], plain.part[rows.used])
    config = train_judge([labels], tmp_path / "judge", TrainConfig(model="linear"))
    assert config["metrics"]["n_labels"] == rows.used.sum()
    assert config["metrics"]["n_aligned"] == (~rows.used).sum()


@pytest.mark.parametrize(
    "wrong", [{"hidden_size": "576"}, {"thresholds": [1]}, {"thresholds": {"F": "a"}}, {"quality_curve": [0.5]},
              {"thresholds": {"F": 7.0}}, {"metrics": 3}],
)  # fmt: skip
def test_a_configuration_that_no_judge_has_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    Judge(JudgeConfig(hidden_size=576)).save_pretrained(tmp_path)
    write_json(tmp_path / "config.json", read_json(tmp_path / "config.json") | wrong)
    with pytest.raises(SelfJudgeError, match="has an impossible") as error:
        Judge.from_pretrained(tmp_path)
    one_line(error)


# the MLP


def test_an_mlp_learns_what_no_plane_tells_and_auto_takes_it(xor: Path, tmp_path: Path) -> None:
    rows, settings = Rows.load([xor]), TrainConfig(features="hidden")
    tried = fit_candidates(rows, settings)
    holdout = {kind: auc(rows, fitted.judge, rows.of("holdout")) for kind, fitted in tried.items()}
    assert tried["mlp"].auc_select > 0.9 < holdout["mlp"]
    assert tried["linear"].auc_select < 0.65 > holdout["linear"]
    assert best_on_select(tried.values()) is tried["mlp"]
    config = train_judge([xor], tmp_path / "judge", settings)
    assert config["model"] == "mlp"
    assert config["metrics"]["auc_mismatch"] == pytest.approx(holdout["mlp"], abs=1e-6)
    assert "C" not in config["metrics"]


def test_auto_keeps_the_linear_judge_on_few_rows_of_a_plane(labels: Path, tmp_path: Path) -> None:
    rows, settings = Rows.load([labels]), TrainConfig()
    tried = fit_candidates(rows, settings)
    holdout = {kind: auc(rows, fitted.judge, rows.of("holdout")) for kind, fitted in tried.items()}
    assert tried["mlp"].auc_select < tried["linear"].auc_select
    assert holdout["mlp"] < holdout["linear"]
    assert best_on_select(tried.values()) is tried["linear"]
    config = train_judge([labels], tmp_path / "judge", settings)
    assert config["model"] == "linear"
    assert config["metrics"]["C"] == tried["linear"].c
    assert config["metrics"]["auc_mismatch"] > 0.85


@pytest.mark.parametrize(("select", "holdout"), itertools.product((-1, 0, 1), repeat=2))
def test_auto_chooses_on_select_and_never_on_the_holdout(labels: Path, select: int, holdout: int) -> None:
    """Whatever the holdout prefers. Its labels are turned round, so that the two parts disagree."""
    rows = flipped(Rows.load([labels]), "fit", "select")
    linear = Judge(config_of(rows))  # AUC 0.5
    weight = torch.zeros(2, HIDDEN)
    weight[0, :3] = torch.tensor([2.0, -1.0, 1.0])
    weight[1] = -weight[0]
    sign = torch.tensor([1.0, -1.0]) * holdout  # gelu(z) − gelu(−z) = z
    mlp = Judge(config_of(rows, model="mlp"), sign, 0.0, weight, torch.zeros(2))
    fits = {"linear": Fitted(linear, 0.7), "mlp": Fitted(mlp, 0.7 + select / 10)}
    assert np.sign(auc(rows, mlp, rows.of("holdout")) - 0.5) == holdout
    assert np.sign(auc(rows, mlp, rows.of("select")) - 0.5) == -holdout
    judge, evidence = measure_on_holdout(rows, fits, TrainConfig(features="hidden"))
    assert judge.config.model == ("mlp" if select > 0 else "linear")
    assert evidence.tried == {"linear": 0.7, "mlp": round(0.7 + select / 10, 4)}
    alone, _ = measure_on_holdout(rows, {"mlp": fits["mlp"]}, TrainConfig(features="hidden"))
    assert alone.config.model == "mlp"


def test_training_takes_the_kind_that_select_prefers_where_the_holdout_prefers_the_other(
    xor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No plane tells these labels, so the MLP wins; with the holdout's labels turned round it does worst there."""
    load = Rows.load
    monkeypatch.setattr(Rows, "load", lambda *folders, **options: flipped(load(*folders, **options), "holdout"))
    settings = TrainConfig(features="hidden")
    rows = Rows.load([xor])
    fits = fit_candidates(rows, settings)
    on_holdout = {kind: auc(rows, fitted.judge, rows.of("holdout")) for kind, fitted in fits.items()}
    assert on_holdout["mlp"] < 0.1 < on_holdout["linear"]
    config = train_judge([xor], tmp_path / "judge", settings)
    assert config["model"] == "mlp"
    assert config["metrics"]["auc_mismatch"] == pytest.approx(on_holdout["mlp"], abs=1e-6)


@pytest.mark.parametrize("originals", [False, True])
def test_an_mlp_is_decided_by_its_seed(labels: Path, originals: bool) -> None:
    rows = Rows.load([labels])
    made = []
    for seed in (5, 5, 6):
        torch.manual_seed(len(made))
        before = torch.get_rng_state()
        made.append(fit_mlp(rows, config_of(rows, model="mlp"), FitOptions(seed=seed, originals=originals)))
        assert torch.equal(torch.get_rng_state(), before)
    one, same, other = ([*fitted.judge.buffers()] for fitted in made)
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_an_mlp_folds_its_scaler(labels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes out reads plain columns and says what the network said of standardised ones."""
    inside: list[tuple[Scaler, Tensor, Tensor]] = []
    fold = Scaler.fold

    def watched(self: Scaler, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        inside.append((self, weight.clone(), bias.clone()))
        return fold(self, weight, bias)

    monkeypatch.setattr(Scaler, "fold", watched)
    monkeypatch.setattr(fitting, "EPOCHS", 1)
    rows = Rows.load([labels])
    judge = fit_mlp(rows, config_of(rows, "hidden+margin", "mlp")).judge
    [(scaler, weight, bias)] = inside
    x, _ = everything(rows, np.ones(len(rows), bool), "hidden+margin")
    z = (
        StandardScaler()
        .fit(everything(rows, rows.of("fit"), "hidden+margin")[0].double().numpy())
        .transform(x.double().numpy())
    )
    assert np.allclose(scaler(x), z, atol=1e-4)
    inner = torch.nn.functional.gelu(torch.tensor(z, dtype=torch.float32) @ weight.T + bias)
    network = torch.sigmoid(inner @ judge.weight + judge.bias)
    assert torch.allclose(judge.score(x), network, atol=1e-5)
    assert float(network.std()) > 0.01


def test_the_epoch_is_the_one_of_the_best_auc_on_select(xor: Path) -> None:
    rows = Rows.load([xor])
    said: list[str] = []
    found = fit_mlp(rows, config_of(rows, model="mlp"), FitOptions(notify=lambda stage, share: said.append(stage)))
    each = [float(stage.rsplit(" ", 1)[1]) for stage in said]
    assert len(each) == fitting.EPOCHS
    assert round(found.auc_select, 3) == max(each)
    assert found.auc_select == auc(rows, found.judge, rows.of("select"))


# the artefact


SETTINGS = {"linear": TrainConfig(model="linear"), "mlp": TrainConfig(model="mlp", features="hidden")}


@pytest.fixture(scope="module", params=list(SETTINGS))
def judged(
    request: pytest.FixtureRequest, labels: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, dict]:
    out = tmp_path_factory.mktemp("judge") / request.param
    return request.param, out, train_judge([labels], out, SETTINGS[request.param])


def test_the_configuration_says_everything(judged: tuple[str, Path, dict], labels: Path) -> None:
    kind, out, config = judged
    stored = read_json(out / "config.json")
    assert stored == json.loads(json.dumps(config))
    settings, rows = SETTINGS[kind], Rows.load([labels])
    expected = {
        "format_version": 1, "target": "t", "draft": "d", "target_sha256": "a" * 64, "draft_sha256": "b" * 64,
        "hidden_size": HIDDEN, "layer": "final", "norm": "post_final_norm", "features": settings.features, "model": kind,
        "label_method": "selfjudge", "suffix_length": SUFFIX, "suffix_gap": 0, "tau": TAU, "acceptable": None, "sources": sorted(set(rows.sources.tolist())),
    }  # fmt: skip
    assert {key: stored[key] for key in expected} == expected
    assert set(stored) == {*expected, "quality_curve", "thresholds", "metrics"}
    judge = Judge.from_pretrained(out)
    scores, truth = predict(rows, judge, rows.of("holdout"))
    every, more = predict(rows, judge, rows.of("holdout"), originals=True)
    assert stored["thresholds"] == find_thresholds(scores, truth, reject=0.9)
    assert stored["quality_curve"] == [[share, theta] for share, theta in quality_curve(scores, truth)]
    assert judge.quality(0.9) == next(theta for share, theta in stored["quality_curve"] if share == 0.9)
    metrics = stored["metrics"]
    assert metrics["auc_mismatch"] == pytest.approx(roc_auc_score(truth, scores))
    assert metrics["auc_all"] == pytest.approx(roc_auc_score(more, every))
    assert len(more) == 2 * len(truth)
    assert metrics["auc_select"] == pytest.approx(auc(rows, judge, rows.of("select")))
    assert (metrics["n_labels"], metrics["n_prompts"], metrics["n_holdout"]) == (600, 60, 90)
    assert metrics["acceptable_rate"] == pytest.approx(float(rows.labels.mean()))
    for name in ("F", "R"):
        above = scores > stored["thresholds"][name]
        assert metrics[f"{name}_accepts_acceptable"] == pytest.approx(above[truth == 1].mean())
        assert metrics[f"{name}_accepts_unacceptable"] == pytest.approx(above[truth == 0].mean())
    judge.check_target("t", "a" * 64, HIDDEN)
    with pytest.raises(SelfJudgeError, match="trained for t"):
        judge.check_target("u", "c" * 64, HIDDEN)


def test_the_folder_holds_a_card_a_figure_and_no_pickle(judged: tuple[str, Path, dict]) -> None:
    _, out, _ = judged
    files = {p.name: p.read_bytes() for p in out.iterdir()}
    assert set(files) == {"config.json", "model.safetensors", "README.md", "roc.json", "roc.png", "run.json"}
    assert not any(content.startswith((b"\x80", b"PK")) for content in files.values())
    assert files["roc.png"].startswith(b"\x89PNG\r\n\x1a\n")
    assert len(files["roc.png"]) > 5000
    curve = json.loads(files["roc.json"])
    assert np.trapezoid(curve["tpr"], curve["fpr"]) == pytest.approx(curve["auc"], abs=1e-3)
    assert (curve["fpr"][0], curve["tpr"][0], curve["fpr"][-1], curve["tpr"][-1]) == (0, 0, 1, 1)
    assert curve["R"][0] <= 0.1
    run = json.loads(files["run.json"])
    assert run["rows"] == {"fit": 420, "select": 90, "holdout": 90}
    assert {"argv", "time", "versions", "settings", "labels"} <= set(run)


def test_the_card_says_counts_aucs_and_thresholds(judged: tuple[str, Path, dict], labels: Path) -> None:
    kind, out, config = judged
    text = (out / "README.md").read_text(encoding="utf-8")
    metrics, found = config["metrics"], Rows.load([labels])
    assert "600 mismatches of 60 prompts, method selfjudge, N = 6, τ = -4.00" in text
    assert f"{metrics['acceptable_rate']:.1%} acceptable" in text
    assert f"ROC-AUC {metrics['auc_mismatch']:.3f} on mismatches, {metrics['auc_all']:.3f} with" in text
    assert "90 mismatches" in text
    assert f"{kind} {metrics['auc_select']:.3f}" in text
    for name in ("F", "R"):
        share = metrics[f"{name}_accepts_acceptable"], metrics[f"{name}_accepts_unacceptable"]
        assert f"| {name} | {config['thresholds'][name]:.3f} | {share[0]:.1%} | {share[1]:.1%} |" in text
    for source in ("s0", "s1"):
        mine = found.labels[found.sources == source]
        assert len(mine) == 300
        assert f"| {source} | 300 | {mine.mean():.1%} |" in text
    assert "](roc.png)" in text
    for line in text.splitlines():
        assert "nan" not in line.split()


def test_a_round_trip_gives_identical_scores(judged: tuple[str, Path, dict], labels: Path, tmp_path: Path) -> None:
    kind, out, _ = judged
    one = Judge.from_pretrained(str(out))
    assert (one.inner_weight is not None) == (kind == "mlp")
    one.save_pretrained(tmp_path / "copy")
    other = Judge.from_pretrained(tmp_path / "copy")
    assert (tmp_path / "copy" / "config.json").read_bytes() == (out / "config.json").read_bytes()
    rows = Rows.load([labels])
    x, _ = everything(rows, np.ones(len(rows), bool), one.config.features)
    assert torch.equal(one.score(x), other.score(x))
    settings = SETTINGS[kind]
    fitted = fit_candidates(rows, settings)[kind]  # the same again, never written
    assert torch.equal(fitted.judge.score(x), one.score(x))
    block = Block(torch.ones(2, 3).long(), torch.randn(2, 4, 9), torch.randn(2, 4, HIDDEN))
    assert torch.equal(one(block), other(block))
    assert one(block).shape == (2, 3)


def test_the_configuration_is_written_last(labels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its existence means that the folder is whole: a run that dies before leaves none."""
    seen: list[tuple[str, set[str]]] = []

    def watched(path: Path, value: Any) -> None:
        seen.append((path.name, {p.name for p in path.parent.iterdir()}))
        write_json(path, value)

    monkeypatch.setattr("selfjudge.judge.model.write_json", watched)
    train_judge([labels], tmp_path / "whole", SETTINGS["linear"])
    assert seen == [("config.json", {"model.safetensors", "README.md", "roc.json", "roc.png", "run.json"})]

    def full(*_: Any) -> None:
        raise SelfJudgeError("no space left")

    monkeypatch.setattr("selfjudge.judge.model.write_tensors", full)
    with pytest.raises(SelfJudgeError, match="no space"):
        train_judge([labels], tmp_path / "torn", SETTINGS["linear"])
    assert not (tmp_path / "torn" / "config.json").exists()
    with pytest.raises(SelfJudgeError, match="not a judge folder"):
        Judge.from_pretrained(tmp_path / "torn")


def test_a_judge_over_an_old_one_is_never_half_of_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Judge(JudgeConfig(hidden_size=3), torch.ones(3)).save_pretrained(tmp_path)

    def full(*_: Any) -> None:
        raise SelfJudgeError("no space left")

    monkeypatch.setattr("selfjudge.judge.model.write_tensors", full)
    with pytest.raises(SelfJudgeError):
        Judge(JudgeConfig(hidden_size=3), torch.zeros(3)).save_pretrained(tmp_path)
    assert not (tmp_path / "config.json").exists()


def test_tensors_of_another_kind_than_the_configuration_are_refused(
    judged: tuple[str, Path, dict], tmp_path: Path
) -> None:
    kind, out, _ = judged
    other = {"linear": "mlp", "mlp": "linear"}[kind]
    (tmp_path / "model.safetensors").write_bytes((out / "model.safetensors").read_bytes())
    write_json(tmp_path / "config.json", read_json(out / "config.json") | {"model": other})
    with pytest.raises(SelfJudgeError, match=f"a judge of model {other} has bias") as error:
        Judge.from_pretrained(tmp_path)
    one_line(error)


def test_other_features_than_the_tensors_are_refused(judged: tuple[str, Path, dict], tmp_path: Path) -> None:
    _, out, config = judged
    (tmp_path / "model.safetensors").write_bytes((out / "model.safetensors").read_bytes())
    for features in FEATURES:
        write_json(tmp_path / "config.json", read_json(out / "config.json") | {"features": features})
        if features == config["features"]:
            Judge.from_pretrained(tmp_path)
            continue
        with pytest.raises(SelfJudgeError, match=r"judge (weight has|layer is)") as error:
            Judge.from_pretrained(tmp_path)
        one_line(error)


def test_the_reject_share_decides_r(labels: Path) -> None:
    rows = Rows.load([labels])
    fitted = fit_candidates(rows, SETTINGS["linear"])["linear"]
    some, most = (
        measure_on_holdout(rows, {"linear": fitted}, replace(SETTINGS["linear"], reject=r))[0].config
        for r in (0.9, 1.0)
    )
    assert some.thresholds["F"] == most.thresholds["F"]
    assert some.thresholds["R"] < most.thresholds["R"]
    assert most.metrics["R_accepts_unacceptable"] == 0
    assert some.metrics["R_accepts_unacceptable"] <= 0.1


def test_two_folders_make_one_judge(labels: Path, tmp_path: Path) -> None:
    """What differs between them is left open: τ, N; the methods are named."""
    more = folder(tmp_path / "more", method="autojudge", first=60, prompts=20, seed=4, suffix_length=5)
    config = train_judge([labels, more], tmp_path / "judge", SETTINGS["linear"])
    assert (config["label_method"], config["tau"], config["suffix_length"]) == ("selfjudge+autojudge", TAU, None)
    assert config["metrics"]["n_labels"] == 800
    assert config["metrics"]["n_prompts"] == 80


def test_originals_are_acceptable_rows(labels: Path, tmp_path: Path) -> None:
    rows = Rows.load([labels])
    x, y = everything(rows, rows.of("fit"), "hidden+margin", originals=True)
    arrays = all_arrays(labels)
    plain = {k: v[rows.of("fit")] for k, v in arrays.items()}
    own = (x[:, None, :HIDDEN] == torch.tensor(plain["hidden_target"])[None]).all(-1)
    assert own.sum() == len(plain["log_p"])
    mine = own.any(1)
    assert (y[mine] == 1).all()
    assert (x[mine][:, HIDDEN] == 0).all()
    assert torch.equal(x[~mine][:, :HIDDEN], torch.tensor(plain["hidden_draft"]))
    assert np.array_equal(y[~mine].numpy(), rows.labels[rows.of("fit")])
    config = train_judge([labels], tmp_path / "with", replace(SETTINGS["linear"], originals=True))
    assert config["metrics"]["n_labels"] == 600
    without = fit_candidates(rows, SETTINGS["linear"])["linear"]
    assert not torch.allclose(Judge.from_pretrained(tmp_path / "with").weight, without.judge.weight, atol=1e-3)


# the hub


def test_a_judge_comes_from_the_hub(
    judged: tuple[str, Path, dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, out, _ = judged
    monkeypatch.chdir(tmp_path)
    asked = []

    def download(name: str, **options: Any) -> str:
        asked.append(name)
        assert {"config.json", "model.safetensors"} <= set(
            options.get("allow_patterns") or ["config.json", "model.safetensors"]
        )
        return str(out)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    judge = Judge.from_pretrained("owner/name")
    assert asked == ["owner/name"]
    assert all(torch.equal(a, b) for a, b in zip(judge.buffers(), Judge.from_pretrained(out).buffers(), strict=True))
    for local in ("./owner", "owner", str(tmp_path / "x"), Path("owner/name"), "a/b/c"):
        with pytest.raises(SelfJudgeError, match="not a judge folder"):
            Judge.from_pretrained(local)
    Judge(JudgeConfig(hidden_size=2)).save_pretrained("owner/name")  # what is here is not asked for there
    assert Judge.from_pretrained("owner/name").config.hidden_size == 2
    assert asked == ["owner/name"]


def test_a_hub_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)

    def download(name: str, **_: Any) -> str:
        raise OSError("\n\n401 Client Error.\nPlease log in.")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(
        SelfJudgeError, match=r"owner/name is not a folder, and the hub did not give it \(401 Client Error"
    ) as error:
        Judge.from_pretrained("owner/name")
    one_line(error)


class FakeHub:
    """Remembers what was uploaded; the folder may be gone afterwards."""

    def __init__(self) -> None:
        self.created: list[tuple[str, dict[str, Any]]] = []
        self.files: dict[str, bytes] = {}
        self.broken = False

    def create_repo(self, repo_id: str, **options: Any) -> None:
        if self.broken:
            raise RuntimeError("403 Forbidden\nYou may not.")
        self.created.append((repo_id, options))

    def upload_folder(self, *, repo_id: str, folder_path: Path, **_: Any) -> str:
        self.files = {
            f"{repo_id}/{p.relative_to(folder_path)}": p.read_bytes()
            for p in Path(folder_path).rglob("*")
            if p.is_file()
        }
        return f"https://hub/{repo_id}"


def test_a_judge_goes_to_the_hub(
    judged: tuple[str, Path, dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, out, _ = judged
    hub = FakeHub()
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub)
    judge = Judge.from_pretrained(out)
    assert judge.push_to_hub("owner/name", private=True) == "https://hub/owner/name"
    assert [name for name, _ in hub.created] == ["owner/name"]
    assert hub.created[0][1] == {"exist_ok": True, "private": True}
    assert {"owner/name/config.json", "owner/name/model.safetensors"} <= set(hub.files)
    for name, content in hub.files.items():
        (tmp_path / name.rsplit("/", 1)[1]).write_bytes(content)
    again = Judge.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(judge.buffers(), again.buffers(), strict=True))
    assert again.config == judge.config
    hub.broken = True
    with pytest.raises(SelfJudgeError, match="cannot upload to owner/name: 403 Forbidden") as error:
        judge.push_to_hub("owner/name")
    one_line(error)


# columns: what a judge reads while decoding is what it learned from


def block_of(seed: int, rows: int = 5, gamma: int = 6, vocabulary: int = 11, hidden: int = HIDDEN) -> Any:
    """Logits with a draft that is the most likely token, some that are impossible and one that is nearly so."""
    g = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(rows, gamma + 1, vocabulary, generator=g)
    drafts = torch.randint(0, vocabulary, (rows, gamma), generator=g)
    drafts[0, 0] = logits[0, 0].argmax()
    logits[1, 1, drafts[1, 1]] = -200.0
    logits[2, 2, drafts[2, 2]] = -torch.inf
    states = torch.randn(rows, gamma + 1, hidden, generator=g)
    return SimpleNamespace(draft_tokens=drafts, target_logits=logits, hidden=states, scores=None, argmax=None)


def labelled(path: Path, block: Any) -> Path:
    """A label folder with the numbers of a Block, worked out one place at a time."""
    b, gamma = block.draft_tokens.shape
    said = block.target_logits.double().log_softmax(-1)
    made: dict[str, list[Any]] = {k: [] for k in ("hidden_draft", "hidden_target", "log_p", "lookahead")}
    for i, j in itertools.product(range(b), range(gamma)):
        log_p = [float(said[i, k, block.draft_tokens[i, k]]) for k in range(gamma)]
        made["hidden_draft"].append(block.hidden[i, j + 1].tolist())
        made["hidden_target"].append((-block.hidden[i, j + 1]).tolist())
        made["log_p"].append([float(said[i, j].max()), log_p[j]])
        after = log_p[j + 1 : j + 5]
        made["lookahead"].append([*after, *[math.nan] * (4 - len(after))])
    arrays = {k: np.asarray(v, np.float32) for k, v in made.items()}
    arrays |= {k: np.zeros((b * gamma, SUFFIX), np.float32) for k in ("original", "substituted")}

    def fill(found: dict[str, NDArray[Any]]) -> None:
        found.update(arrays)

    return folder(path, prompts=b, each=gamma, shards=1, change=fill, method="autojudge")


@pytest.mark.parametrize("features", FEATURES)
def test_a_block_is_read_as_the_rows_were(tmp_path: Path, features: str) -> None:
    """All but the look-ahead, which the next test compares."""
    block = block_of(0)
    rows = Rows.load([labelled(tmp_path / "labels", block)])
    x, _ = everything(rows, np.ones(len(rows), bool), features)
    found = block_features(block, features)
    assert found.shape == (5, 6, HIDDEN + columns(features))
    assert found.dtype == torch.float32
    same = WIDTH if "margin" in features else HIDDEN
    assert torch.allclose(found.reshape(x.shape)[:, :same], x[:, :same], atol=1e-5)
    assert torch.equal(found[..., :HIDDEN], block.hidden[:, 1:])
    judge = Judge(
        JudgeConfig(hidden_size=HIDDEN, features=features), torch.linspace(-1, 1, HIDDEN + columns(features)), 0.2
    )
    assert torch.equal(judge(block), judge.score(found))
    if features == "hidden":
        return
    assert bool(found.isfinite().all())
    for i, j in itertools.product(range(5), range(6)):
        logits = block.target_logits[i, j].tolist()
        margin = logits[block.draft_tokens[i, j]] - max(logits)
        assert float(found[i, j, HIDDEN]) == pytest.approx(max(margin, LOWEST), abs=1e-5)
    assert found[0, 0, HIDDEN] == 0
    for i in (1, 2):
        assert set(found[i, i, HIDDEN:WIDTH].tolist()) == {LOWEST}
        assert ("lookahead" in features) == (LOWEST in found[i, i - 1, WIDTH:].tolist())


def test_blocks_end_early_in_the_look_ahead_that_is_learned_from(tmp_path: Path) -> None:
    """A row sees the first 0 to 4 of what follows, always the same for one row, and nothing of the rest."""
    block = block_of(3, rows=40)
    rows = Rows.load([labelled(tmp_path / "labels", block)])
    every = np.ones(len(rows), bool)
    x, _ = everything(rows, every, "hidden+margin+lookahead")
    assert torch.equal(everything(rows, every, "hidden+margin+lookahead")[0], x)
    whole = block_features(block, "hidden+margin+lookahead").reshape(x.shape)
    values, there = x[:, WIDTH : WIDTH + 4], x[:, WIDTH + 4 :]
    assert torch.equal(there, there.cummin(1).values)
    assert (there <= whole[:, WIDTH + 4 :]).all()
    assert torch.allclose(values, there * whole[:, WIDTH : WIDTH + 4], atol=1e-5)
    assert np.bincount(there.sum(1).int()[whole[:, -1] == 1], minlength=5).min() > 3


def test_the_targets_own_token_is_read_as_the_original_was(tmp_path: Path) -> None:
    block = block_of(1)
    rows = Rows.load([labelled(tmp_path / "labels", block)])
    every = np.ones(len(rows), bool)
    x, y = everything(rows, every, "hidden+margin", originals=True)
    block.draft_tokens, block.hidden = block.target_logits[:, :-1].argmax(-1), -block.hidden
    found = block_features(block, "hidden+margin")
    assert torch.allclose(found.reshape(-1, WIDTH), x[len(rows) :], atol=1e-5)
    assert (y[len(rows) :] == 1).all()


def test_half_precision_logits_are_read_in_full() -> None:
    block = block_of(2)
    block.target_logits, block.hidden = block.target_logits.bfloat16(), block.hidden.bfloat16()
    found = block_features(block, "hidden+margin+lookahead").double()
    said = block.target_logits[:, :-1].double().log_softmax(-1)
    own = said.gather(-1, block.draft_tokens[..., None])[..., 0]
    most = said.amax(-1)
    assert torch.allclose(found[..., HIDDEN], (own - most).clamp_min(LOWEST), atol=1e-5)
    assert torch.allclose(found[:, :-1, WIDTH], own[:, 1:].clamp_min(LOWEST), atol=1e-5)


def test_lookahead_columns_by_hand() -> None:
    found = lookahead_columns(torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, -60.0]]))
    assert found.tolist() == [
        [[-2, -3, 0, 0, 1, 1, 0, 0], [-3, 0, 0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0]],
        [[-5, -60, 0, 0, 1, 1, 0, 0], [-60, 0, 0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0]],
    ]
    long = lookahead_columns(torch.arange(0.0, -7, -1)[None])
    assert long[0, 0].tolist() == [-1, -2, -3, -4, 1, 1, 1, 1]
    assert long[0, 4].tolist() == [-5, -6, 0, 0, 1, 1, 0, 0]


def test_a_file_without_weights_is_refused(tmp_path: Path) -> None:
    """Or it would be a judge of zeros, which says σ(b) of every token."""
    Judge(JudgeConfig(hidden_size=3), torch.ones(3), 0.5).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for missing in ("weight", "bias"):
        save_file({k: v for k, v in tensors.items() if k != missing}, tmp_path / "model.safetensors")
        with pytest.raises(SelfJudgeError):
            Judge.from_pretrained(tmp_path)


@pytest.mark.parametrize(("rows", "value"), [(700, 1000.1), (5000, 0.7)])
def test_a_column_that_never_changes_does_no_harm(rows: int, value: float) -> None:
    """What rounding leaves of its deviation (1e-5, 7e-9) is no deviation: an MLP's folded scores would be off by 0.2."""
    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(0))
    x[:, 1] = value
    scaler = Scaler.of(pieces(x, x[:, 0], 1024))
    assert scaler.deviation[1] == StandardScaler().fit(x.double().numpy()).scale_[1] == 1
    g = torch.Generator().manual_seed(1)
    weight, bias, outer = (torch.randn(*shape, generator=g) / 2 for shape in ((64, 3), (64,), (64,)))
    judge = Judge(JudgeConfig(hidden_size=3, model="mlp"), outer, 0.0, *scaler.fold(weight, bias))
    network = torch.sigmoid(torch.nn.functional.gelu(scaler(x) @ weight.T + bias) @ outer)
    assert torch.allclose(judge.score(x), network, atol=1e-3)


def test_responses_that_lack_a_labelled_prompt_are_one_line(tmp_path: Path) -> None:
    made = folder(tmp_path / "labels")
    write_rows(made / "responses.jsonl", list(read_rows(made / "responses.jsonl"))[:-5])
    with pytest.raises(SelfJudgeError):
        Rows.load([made])


def test_evidence_that_was_damaged_is_refused(tmp_path: Path) -> None:
    made = folder(tmp_path / "labels", evidence=100)
    content = bytearray((made / "calibration.safetensors").read_bytes())
    content[-40] ^= 0xFF
    (made / "calibration.safetensors").write_bytes(content)
    with pytest.raises(SelfJudgeError, match="damaged"):
        Rows.load([made]).relabel(suffix_length=2)


def test_tau_of_another_length_rejects_what_the_folders_tau_rejects(tmp_path: Path) -> None:
    """The folder was calibrated to reject 70 % of the critical tokens, not the usual 90."""
    made = folder(tmp_path / "labels", evidence=400, tau_evidence={"reject_recall": 0.7})
    expected = tau_of(made / "calibration.safetensors", 2, 0.7)["tau"]
    assert expected != tau_of(made / "calibration.safetensors", 2, 0.9)["tau"]
    assert Rows.load([made]).relabel(suffix_length=2).taus == [expected]


def test_originals_do_not_go_with_look_ahead(tmp_path: Path) -> None:
    """They have none, so a judge would learn from its absence that the last draft of a block is acceptable."""
    labels = folder(tmp_path / "labels", lookahead=True)
    with pytest.raises(SelfJudgeError, match="own tokens"):
        train_judge([labels], tmp_path / "judge", TrainConfig(features="hidden+margin+lookahead", originals=True))
