"""Thresholds by brute force, and the quality curve."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from selfjudge.errors import SelfJudgeError
from selfjudge.judge.config import JudgeConfig
from selfjudge.judge.model import Judge
from selfjudge.train.holdout import Evidence, compute_quality_curve, count_above, find_thresholds, roc_auc

Scores = NDArray[np.float32]


@st.composite
def scores_and_labels(draw: st.DrawFn) -> tuple[Scores, Scores]:
    """A few scores, in half of the cases many of them equal, with labels of both kinds; now and then 0 and 1."""
    score = draw(st.sampled_from([st.integers(0, 10).map(lambda n: n / 10), st.floats(0, 1, width=32)]))
    rows = draw(st.lists(st.tuples(score, st.booleans()), max_size=38))
    rows += [(draw(score), True), (draw(score), False)]
    return np.asarray([s for s, _ in rows], np.float32), np.asarray([y for _, y in rows], np.float32)


def random_scores(seed: int) -> tuple[Scores, Scores]:
    """Scores that the labels partly follow."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 40))
    scores = (rng.integers(0, 11, n) / 10 if seed % 2 else rng.random(n)).astype(np.float32)
    labels = rng.random(n) < (scores + 0.3) / 1.6
    labels[:2] = True, False
    return scores, labels.astype(np.float32)


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


@settings(max_examples=40)
@given(scores_and_labels())
def test_the_area_under_the_curve_is_scikit_learns(case: tuple[Scores, Scores]) -> None:
    scores, truth = case
    assert roc_auc(scores, truth) == pytest.approx(roc_auc_score(truth, scores), abs=1e-9)
    assert np.isnan(roc_auc(scores, np.ones_like(truth)))
    assert np.isnan(roc_auc(scores[:0], truth[:0]))


@settings(max_examples=60)
@given(scores_and_labels())
def test_thresholds_are_those_of_a_search_by_hand(case: tuple[Scores, Scores]) -> None:
    scores, truth = case
    bad = int((truth == 0).sum())
    for share in ("0.5", "0.8", "0.9", "1"):
        found = find_thresholds(scores, truth, reject=float(share))
        best = {p: max(places(scores), key=lambda t, p=p: (f1(scores, truth, t, p), t)) for p in (0, 1)}
        assert found["F_accept"] == best[1]
        assert found["F_reject"] == best[0]
        assert found["F"] == max(best.values())
        rejecting = min(t for t in places(scores) if bad - accepted(scores, truth, t)[1] >= Fraction(share) * bad)
        assert found["R"] == max(rejecting, found["F"])


@settings(max_examples=60)
@given(scores_and_labels())
def test_youden_is_where_the_shares_are_furthest_apart(case: tuple[Scores, Scores]) -> None:
    scores, truth = case
    good, bad = int((truth == 1).sum()), int((truth == 0).sum())

    def apart(theta: float) -> Fraction:
        kept, passed = accepted(scores, truth, theta)
        return Fraction(kept, good) - Fraction(passed, bad)

    best = max(places(scores), key=lambda theta: (apart(theta), theta))
    ours, released = (find_thresholds(scores, truth, reject=0.8, f=f) for f in ("f1", "youden"))
    assert ours["Youden"] == released["Youden"] == released["F"] == best
    rejecting = min(t for t in places(scores) if bad - accepted(scores, truth, t)[1] >= Fraction("0.8") * bad)
    assert released["R"] == rejecting <= ours["R"]


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


@settings(max_examples=30)
@given(scores_and_labels())
def test_the_quality_curve_keeps_its_word_and_asks_for_no_more(case: tuple[Scores, Scores]) -> None:
    scores, truth = case
    bad = int((truth == 0).sum())
    curve = compute_quality_curve(scores, truth)
    shares, thetas = zip(*curve, strict=True)
    assert list(shares) == sorted(set(shares))
    assert list(thetas) == sorted(thetas)
    assert curve[-1] == (1.0, 1.0)
    assert {0.5, 0.9, 0.95, 0.99, 0.999} <= set(shares)
    rejected = {theta: bad - accepted(scores, truth, theta)[1] for theta in places(scores)}
    for share, theta in curve[:-1]:
        wanted = Fraction(str(share)) * bad
        assert rejected[theta] >= wanted
        assert all(n < wanted for other, n in rejected.items() if other < theta)


def test_quality_picks_from_the_curve() -> None:
    scores, truth = random_scores(4)
    curve = compute_quality_curve(scores, truth)
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
    evidence = Evidence(scores, truth, {}, {})
    assert evidence.locate(0.5) == (0.5, 0.0)  # of the bad rows, of the acceptable ones
    assert evidence.locate(0.49) == (1.0, 0.5)
    thetas, kept, passed = count_above(scores, truth)
    assert (thetas.tolist(), kept.tolist(), passed.tolist()) == (
        [0, 0.25, 0.5, 0.75, 1],
        [2, 1, 0, 0, 0],
        [2, 2, 1, 0, 0],
    )
