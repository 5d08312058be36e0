"""The bet behind a certificate: what it may claim and how often it is wrong, by simulation and by hand."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy import stats

from power import simulate_power
from selfjudge.tune.certify import (
    CAP,
    Claim,
    can_certify,
    compute_log_capital,
    decide,
    describe_evidence,
    estimate_needed_prompts,
    find_binomial_bound,
    find_fewest_prompts,
)

DIFFERENCES = st.lists(st.sampled_from([-1.0, -0.3, 0.0, 0.4, 1.0]), min_size=1, max_size=60)


def by_hand(claim: Claim, differences: list[float]) -> list[float]:
    """The formula of the method, prompt by prompt."""
    capital, seen, squares, course = 1.0, [], 0.0, []
    for d in differences:
        variance = (0.25 + squares) / (len(seen) + 1)
        stake = min(math.sqrt(2 * math.log(1 / claim.delta) / (claim.n * variance)), CAP / (1 - claim.mu))
        x = (d + 1) / 2
        capital *= 1 - stake * (x - claim.mu)
        course.append(capital)
        seen.append(x)
        squares += (x - (0.5 + sum(seen)) / (len(seen) + 1)) ** 2
    return course


@given(DIFFERENCES, st.floats(0.01, 0.6), st.floats(0.001, 0.5), st.integers(1, 400))
@settings(max_examples=60)
def test_the_capital_is_that_of_the_formula(differences: list[float], epsilon: float, delta: float, n: int) -> None:
    claim = Claim(epsilon, delta, n)
    assert np.allclose(np.exp(compute_log_capital(claim, differences)), by_hand(claim, differences), rtol=1e-9)
    assert np.isfinite(compute_log_capital(claim, differences)).all()


@given(DIFFERENCES, DIFFERENCES)
@settings(max_examples=40)
def test_a_stake_depends_on_the_past_alone(differences: list[float], others: list[float]) -> None:
    claim = Claim(0.1, 0.05, 200)
    alone, before = compute_log_capital(claim, differences), compute_log_capital(claim, differences + others)
    assert np.array_equal(alone, before[: len(differences)])


@pytest.mark.parametrize("n", [50, 200])
@pytest.mark.parametrize("kind", ["losses", "both ways", "graded"])
def test_false_certificates_are_at_most_delta(n: int, kind: str) -> None:
    """At the null, E[D] = ε, looked at after every prompt: 10,000 runs."""
    check_coverage(n, kind, runs=10_000)


@pytest.mark.slow
@pytest.mark.parametrize("delta", [0.01, 0.05, 0.2])
@pytest.mark.parametrize("kind", ["losses", "both ways", "graded"])
def test_false_certificates_are_at_most_delta_on_many_prompts(kind: str, delta: float) -> None:
    check_coverage(2000, kind, runs=10_000, delta=delta)


def check_coverage(n: int, kind: str, runs: int, delta: float = 0.05, epsilon: float = 0.1) -> None:
    rng = np.random.default_rng(n)
    false = 0
    for start in range(0, runs, 1000):
        u = rng.random((min(1000, runs - start), n))
        if kind == "losses":
            differences = (u < epsilon).astype(float)
        elif kind == "both ways":  # 30 % discordant
            differences = np.where(u < 0.2, 1.0, np.where(u < 0.3, -1.0, 0.0))
        else:
            differences = 2 * epsilon * u
        false += int((compute_log_capital(Claim(epsilon, delta, n), differences).max(-1) >= math.log(1 / delta)).sum())
    assert false / runs <= delta + 3 * math.sqrt(delta * (1 - delta) / runs)


def test_fixed_sequence_over_families_is_wrong_with_probability_delta_at_most() -> None:
    check_families(runs=2000, n=100, families=3)


@pytest.mark.slow
@pytest.mark.parametrize("families", [1, 5])
def test_fixed_sequence_over_families_in_ten_thousand_runs(families: int) -> None:
    check_families(runs=10_000, n=400, families=families)


def check_families(runs: int, n: int, families: int, epsilon: float = 0.15, delta: float = 0.1) -> None:
    """Families with a rule that holds, one at the null and one beyond: how often is any false one certified?"""
    rng = np.random.default_rng(0)
    claim = Claim(epsilon, delta / families, n)
    wrong = np.zeros(runs, bool)
    for _ in range(families):
        standing = np.ones(runs, bool)
        for loss in (0.0, epsilon, epsilon + 0.05):
            capital = np.concatenate([
                compute_log_capital(claim, (rng.random((min(1000, runs - start), n)) < loss).astype(float)).max(-1)
                for start in range(0, runs, 1000)
            ])  # fmt: skip
            standing &= capital >= claim.goal
            wrong |= standing & (loss > 0)
    assert wrong.mean() <= delta + 3 * math.sqrt(delta * (1 - delta) / runs)


@pytest.mark.parametrize(("epsilon", "n"), [(0.02, 2000), (0.03, 1000), (0.05, 300)])
def test_power_is_as_the_method_says(epsilon: float, n: int) -> None:
    """5 % discordant prompts, no true drop."""
    assert simulate_power(Claim(epsilon, 0.05, n), runs=300) > 0.85
    assert 0.8 * n <= (estimate_needed_prompts(epsilon, 0.05) or 0) <= 1.1 * n
    assert simulate_power(Claim(epsilon, 0.05, n // 4), runs=300) < 0.7


@pytest.mark.parametrize(("drop", "discordant"), [(0.0, 0.05), (0.0, 0.3), (0.02, 0.1), (-0.02, 0.1)])
def test_so_many_prompts_as_needed_suffice_in_nine_runs_of_ten(drop: float, discordant: float) -> None:
    n = estimate_needed_prompts(0.06, 0.02, mean=drop, variance=discordant - drop**2)
    assert n is not None
    assert simulate_power(Claim(0.06, 0.02, n), discordant=discordant, drop=drop, runs=500) >= 0.82


def test_no_number_of_prompts_certifies_what_is_not_so() -> None:
    assert estimate_needed_prompts(0.03, 0.05, mean=0.03) is None
    assert estimate_needed_prompts(0.03, 0.05, mean=0.05) is None
    assert estimate_needed_prompts(0.03, 0.05, mean=0.0299999999) is None
    assert simulate_power(Claim(0.03, 0.05, 500), drop=0.05, runs=200) <= 0.05


def test_all_scores_equal_is_the_quickest_certificate() -> None:
    least = find_fewest_prompts(0.1, 0.05)
    decision = decide(Claim(0.1, 0.05, 200), [0.0] * 200)
    assert decision.certified
    assert least <= (decision.refuted_at or 0) < 100
    assert decision.p_value <= 0.05
    assert not decision.futile


@given(st.floats(0.02, 0.5), st.floats(0.001, 0.3))
@settings(max_examples=30)
def test_the_fewest_prompts_can_certify_and_one_less_cannot(epsilon: float, delta: float) -> None:
    least = find_fewest_prompts(epsilon, delta)
    assert can_certify(Claim(epsilon, delta, least))
    assert least == 1 or not can_certify(Claim(epsilon, delta, least - 1))


def test_one_prompt_and_none() -> None:
    assert not can_certify(Claim(0.1, 0.05, 1))
    assert not can_certify(Claim(0.1, 0.05, 0))
    single = decide(Claim(0.1, 0.05, 1), [0.0])
    assert (single.certified, single.futile, len(single.log_capital)) == (False, True, 1)
    none = decide(Claim(0.1, 0.05, 100), [])
    assert (none.certified, none.futile, none.p_value) == (False, False, 1.0)


def test_what_is_refuted_stays_so_whatever_follows() -> None:
    claim = Claim(0.2, 0.05, 100)
    before = decide(claim, [0.0] * 40)
    after = decide(claim, [0.0] * 40 + [1.0] * 60)
    assert before.refuted_at == after.refuted_at
    assert after.certified
    assert after.log_capital[-1] < 0


def test_the_soonest_certificate_is_that_of_unchanged_scores() -> None:
    claim = Claim(0.1, 0.05, 200)
    seen = [0.0, 1.0, -1.0, *[0.0] * 10]
    soonest = decide(claim, seen).soonest
    assert soonest is not None
    assert soonest > len(seen)
    assert not decide(claim, [*seen, *[0.0] * (soonest - 1 - len(seen))]).certified
    assert decide(claim, [*seen, *[0.0] * (soonest - len(seen))]).refuted_at == soonest
    assert decide(claim, [1.0] * 150).soonest is None


def test_hopeless_is_given_up_early_and_never_too_early() -> None:
    claim = Claim(0.1, 0.05, 100)
    lost = decide(claim, [1.0] * 12)
    assert lost.futile
    assert not decide(claim, [*[0.0] * 10, 1.0]).futile
    for losses in range(12):
        given_up = decide(claim, [1.0] * losses + [0.0] * 8).futile
        assert given_up == (not decide(claim, [1.0] * losses + [0.0] * (100 - losses)).certified)


def test_ties_count_as_evidence_and_gains_as_more() -> None:
    claim = Claim(0.1, 0.05, 100)
    tied, gained = (compute_log_capital(claim, [d] * 20)[-1] for d in (0.0, -1.0))
    assert 0 < tied < gained


def test_differences_beyond_one_are_refused() -> None:
    with pytest.raises(ValueError, match="must lie in"):
        compute_log_capital(Claim(0.1, 0.05, 10), [1.5])
    with pytest.raises(ValueError, match="must lie in"):
        compute_log_capital(Claim(0.1, 0.05, 10), [math.nan])


@given(st.integers(1, 300), st.integers(0, 300), st.floats(0.001, 0.5))
@settings(max_examples=60)
def test_the_binomial_bound_is_clopper_and_pearsons(n: int, hits: int, delta: float) -> None:
    hits = min(hits, n)
    expected = 1.0 if hits == n else float(stats.beta.ppf(1 - delta, hits + 1, n - hits))
    assert find_binomial_bound(hits, n, delta) == pytest.approx(expected, abs=1e-6)


def test_the_binomial_bound_is_left_out_where_prompts_ended_early() -> None:
    """When to stop was chosen by what was seen, and the bound is for a number of prompts fixed beforehand."""
    early, whole = (describe_evidence(Claim(0.1, 0.05, n), [0.0] * 60, 0.05) for n in (61, 60))
    assert "lost_bound" not in early
    assert whole["lost_bound"] == find_binomial_bound(0, 60, 0.05)


def test_a_bound_needs_nothing_that_a_plain_installation_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("scipy", "scipy.special", "sklearn"):
        monkeypatch.setitem(sys.modules, name, None)
    assert find_binomial_bound(0, 60, 0.05) == pytest.approx(1 - 0.05 ** (1 / 60))


def test_certificates_are_checked_without_torch() -> None:
    assert "torch" not in vars(sys.modules["selfjudge.tune.certify"])
