"""The bet against a certificate: how often it is wrong, what it notices, and what it is made from."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fake_certificate import recipe_folder
from selfjudge.errors import SelfJudgeError
from selfjudge.models.pair import Pair
from selfjudge.tune.certify import Claim, compute_log_capital, find_upper_bound
from selfjudge.tune.monitor import DRIFT_ROUND, FIGURES, DriftMonitor, Monitor, describe_scope, measure_answer, watch
from selfjudge.tune.pipeline import _average_figures
from selfjudge.tune.recipe import Recipe
from selfjudge.tune.verify import describe_overlap

LOSSES = st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0]), min_size=1, max_size=40)


def refuted(bound: float, delta: float, n: int, differences: np.ndarray) -> np.ndarray:
    """[runs, requests] D → [runs] whether a monitor would have switched off: all rounds at once."""
    switched = np.zeros(len(differences), bool)
    for number, start in enumerate(range(0, differences.shape[1], n), 1):
        claim = Claim(-bound, delta / (number * (number + 1)), n)
        switched |= compute_log_capital(claim, -differences[:, start : start + n]).max(-1) >= claim.goal
    return switched


@given(LOSSES, st.floats(0.0, 0.6), st.floats(0.01, 0.5), st.integers(1, 15))
@settings(max_examples=60)
def test_one_request_after_the_other_is_all_at_once(losses: list[float], bound: float, delta: float, n: int) -> None:
    monitor = Monitor(bound, delta, n)
    verdicts = [monitor.observe(loss) for loss in losses]
    assert monitor.refuted == refuted(bound, delta, n, np.array([losses]))[0]
    assert sum(verdicts) == monitor.refuted  # said once
    seen = verdicts.index(True) + 1 if monitor.refuted else len(losses)
    assert (monitor.count, monitor.lost) == (seen, pytest.approx(sum(losses[:seen])))


@pytest.mark.parametrize("kind", ["all or nothing", "graded", "both ways"])
def test_a_certificate_that_holds_is_switched_off_with_probability_delta_at_most(kind: str) -> None:
    """At the null, E[D] = bound, over 12 rounds looked at after every request."""
    bound, delta, n, runs = 0.1, 0.1, 50, 2000
    u = np.random.default_rng(0).random((runs, 12 * n))
    differences = {
        "all or nothing": (u < bound).astype(float),
        "graded": 2 * bound * u,
        "both ways": np.where(u < 0.2, 1.0, np.where(u < 0.3, -1.0, 0.0)),
    }[kind]
    assert refuted(bound, delta, n, differences).mean() <= delta + 3 * math.sqrt(delta * (1 - delta) / runs)


@pytest.mark.slow
def test_coverage_over_a_hundred_rounds() -> None:
    """10,000 runs of 2,000 requests each."""
    bound, delta, n = 0.1, 0.05, 20
    rng, wrong = np.random.default_rng(1), 0
    for _ in range(10):
        wrong += int(refuted(bound, delta, n, (rng.random((1000, 100 * n)) < bound).astype(float)).sum())
    assert wrong / 10_000 <= delta + 3 * math.sqrt(delta * (1 - delta) / 10_000)


def test_what_is_worse_is_noticed_and_what_is_better_is_not() -> None:
    rng = np.random.default_rng(0)
    worse, better = ((rng.random((500, 600)) < share).astype(float) for share in (0.2, 0.05))
    assert refuted(0.1, 0.05, 300, worse).mean() > 0.95
    assert refuted(0.1, 0.05, 300, better).mean() == 0


def test_requests_that_become_bad_after_many_good_ones_are_noticed() -> None:
    """One bet without rounds would have lost its capital for good."""
    monitor = Monitor(0.1, 0.05, 100)
    for _ in range(1050):
        assert not monitor.observe(0.0)
    assert any(monitor.observe(float(i % 3 == 0)) for i in range(250))
    unending = compute_log_capital(Claim(-0.1, 0.05, 100), [*[0.0] * 1050, *[-float(i % 3 == 0) for i in range(250)]])
    assert unending.max() < math.log(20)


def test_figures_have_the_names_that_servers_show() -> None:
    monitor = Monitor(0.1, 0.05, 20)
    assert list(monitor.figures()) == list(FIGURES)
    assert monitor.figures()["shadow_goal"] == pytest.approx(math.log(40))
    monitor.observe(0.5)
    assert monitor.figures()["shadow_loss"] == 0.5
    while not monitor.observe(1.0):
        pass
    figures = monitor.figures()
    assert figures["shadow_switched_off"] == 1
    assert figures["shadow_log_capital"] >= figures["shadow_goal"]
    before = monitor.count
    assert not monitor.observe(1.0)
    assert monitor.count == before  # over is over
    assert "10.0% are allowed" in monitor.verdict


def test_one_request_a_round_refutes_nothing_false() -> None:
    monitor = Monitor(0.5, 0.05, 1)
    assert not any(monitor.observe(1.0) for _ in range(50))


@given(st.lists(st.floats(0, 1), min_size=20, max_size=60), st.floats(0.01, 0.3))
@settings(max_examples=20)
def test_the_bound_of_the_calibration_is_above_what_it_saw(losses: list[float], delta: float) -> None:
    bound = find_upper_bound(losses, delta, 60)
    assert min(losses) <= bound <= 1
    assert find_upper_bound(losses, delta / 4, 60) >= bound


@pytest.mark.slow
def test_the_bound_holds_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    losses = rng.random((150, 80)) < 0.3
    bounds = [find_upper_bound(own, 0.1, 80) for own in losses]
    assert np.mean([bound < 0.3 for bound in bounds]) <= 0.1
    assert np.mean(bounds) < 0.55
    assert find_upper_bound([], 0.1, 80) == 1


def test_where_a_run_ends_makes_no_bound_smaller() -> None:
    """The time may be up at any prompt, also at one that suits the rule: stakes are for the prompts that were planned."""
    losses = (np.random.default_rng(0).random(80) < 0.3).astype(float)
    ends = [describe_overlap(losses[:end].tolist(), [1] * 80, 0.1)["bound"] for end in range(10, 81, 10)]
    assert ends == sorted(ends, reverse=True)
    scopes = [describe_scope({"judged_share": losses[:end].tolist()}, 0.4, 80)["judged_share"] for end in (20, 50, 80)]
    assert [high for _, high in scopes] == sorted((high for _, high in scopes), reverse=True)
    assert [low for low, _ in scopes] == sorted(low for low, _ in scopes)


def test_what_is_watched_is_what_was_certified_or_what_the_calibration_showed(tiny_pair: Pair, tmp_path: Path) -> None:
    def monitor(name: str, **more: object) -> Monitor:
        return watch(Recipe.load(recipe_folder(tmp_path / name, tiny_pair, **more)))

    by_words = monitor("words", measure="overlap", epsilon=0.2, n=50)
    assert (by_words.bound, by_words.delta, by_words.n) == (0.2, 0.05, 50)
    assert 0.3 < monitor("score").bound < 0.4  # what the calibration prompts lost
    with pytest.raises(SelfJudgeError, match="recipe for exact"):
        monitor("exact", rule="exact", certified=False)
    with pytest.raises(SelfJudgeError, match="give `recipe`"):
        watch(None)


def beta(rng: np.random.Generator, mean: float, deviation: float, n: int) -> np.ndarray:
    total = mean * (1 - mean) / deviation**2 - 1
    return rng.beta(mean * total, (1 - mean) * total, n)


def served(rng: np.random.Generator, n: int, *, asks: float, m: float, judged: float) -> dict[str, np.ndarray]:
    """Figures of n answers, with the spread between answers that chat and code have."""
    return {
        "structured": (rng.random(n) < asks).astype(float),
        "passes_per_token": beta(rng, 1 / m, 0.08, n),
        "judged_share": beta(rng, judged, 0.03, n) if judged else np.zeros(n),
    }


CHAT = {"asks": 0.01, "m": 2.4, "judged": 0.04}
SHIFTS = {
    "code, known by its prompts, which the guard verifies exactly": {"asks": 0.95, "m": 3.0, "judged": 0.0},
    "code that no prompt gives away": {"asks": 0.01, "m": 3.6, "judged": 0.04},
    "one request in five asks for code": {"asks": 0.2, "m": 2.45, "judged": 0.035},
    "more substitutions": {"asks": 0.01, "m": 2.4, "judged": 0.1},
}


@pytest.mark.quick("code that no*", "more sub*")
@pytest.mark.parametrize("runs", [1, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shift", SHIFTS)
def test_other_requests_are_noticed_within_500(shift: str, runs: int) -> None:
    """Calibrated on 600 chats; after 250 good requests. In 19 of 20 runs, or in all of fewer."""
    noticed = 0
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        monitor = DriftMonitor(describe_scope(served(rng, 600, **CHAT), 0.05, 600), 0.05)
        good, other = served(rng, 250, **CHAT), served(rng, 500, **SHIFTS[shift])
        for figures in (good, other):
            for row in zip(*figures.values(), strict=True):
                monitor.observe(dict(zip(figures, row, strict=True)))
            if figures is good:
                assert monitor.changed is None
        noticed += monitor.changed is not None
    assert noticed >= runs - runs // 20
    assert "requests are unlike those of the certificate: " in monitor.verdict


@pytest.mark.parametrize("runs", [10, pytest.param(40, marks=pytest.mark.slow)])
def test_requests_like_the_calibrations_are_seldom_taken_for_others(runs: int) -> None:
    """Each calibration with 1,000 requests of the same kind: half of δ is what these bets and intervals may spend."""
    delta, wrong = 0.2, 0
    for seed in range(runs):
        rng = np.random.default_rng(100 + seed)
        scope, share = describe_scope(served(rng, 200, **CHAT), delta, 200), delta / 8 / 3
        live = served(rng, 1000, **CHAT)
        wrong += any(
            bool(refuted(bound, share, DRIFT_ROUND, values[None])[0])
            for name, (low, high) in scope.items()
            for bound, values in ((high, live[name]), (1 - low, 1 - live[name]))
        )
    assert wrong <= runs * delta / 2


def test_a_group_of_prompts_is_one_observation_of_the_scope() -> None:
    """Ten prompts of one group ask for code, ten others for none: one group in eleven, not half of all."""
    texts = ["Write a function."] * 10 + ["Why?"] * 10
    rows = [{"emitted": 8 if i else 0, "cycles": 4, "judged": i % 2} for i in range(20)]
    job: Any = SimpleNamespace(sizes=[10, *[1] * 10], prompts=[SimpleNamespace(prompt=text) for text in texts])
    best: Any = SimpleNamespace(samples=rows)
    figures = _average_figures(job, best)
    assert figures["structured"] == [1.0, *[0.0] * 10]
    assert figures["passes_per_token"] == [0.5] * 11  # the first answer of the first group says nothing of it
    assert figures["judged_share"] == pytest.approx([5 / 72, *[0.0, 0.125] * 5])


def test_the_figures_of_an_answer() -> None:
    assert measure_answer("Write a function.", 8, 4, 2) == {
        "structured": 1.0, "passes_per_token": 0.5, "judged_share": 0.25,
    }  # fmt: skip
    assert measure_answer("Why?", 0, 0, 0) == {"structured": 0.0}
    monitor = DriftMonitor({"structured": (0.0, 0.05)}, 0.05)
    for _ in range(60):
        monitor.observe({"structured": 1.0, "passes_per_token": 0.1})  # a figure that was not certified is not watched
    assert monitor.changed == "structured"
    assert not monitor.observe({"structured": 1.0})
