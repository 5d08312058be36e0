"""Is the loss of a rule at most ε? A bet against the claim that it is more; numpy alone. A group of prompts that depend
on one another, mostly one prompt, is one observation: their mean D = S_exact − S_rule ∈ [−1, 1]. The hypothesis to
refute is E[D] > ε. A capital of 1 is multiplied at each observation by 1 − λ(X − μ), where X = (D + 1)/2 and μ = (1 +
ε)/2. Under the hypothesis it does not grow on average, however λ is chosen from the past; the probability that it ever
reaches 1/δ is at most δ (Ville). So a bet may end at any time."""

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from selfjudge.errors import SelfJudgeError

POWER = 0.9  # the share of runs that succeed with `estimate_needed_prompts`
DISCORDANT = 0.05  # the assumed share of prompts whose score a rule changes
ASIDE = 10  # one prompt of so many is set aside to choose γ with, at most a batch
POINTS = 200  # points of the capital's course that a certificate keeps
FEWEST_FOR_HOPE = 32  # observations before a rule is given up because it will hardly be certified
HOPE = 2.0  # standard deviations by which what is seen may be worse than what is to come
CAP = 0.9  # the most of the capital that a single prompt may cost
_Z = 1.2816  # the normal quantile of POWER
_ZETA = 1.2020570  # Σ 1/k³, rounded up
_STEPS = 200  # steps of `find_upper_bound` from 0 to 1
_FINE = 2**40  # steps of `find_binomial_bound`
_MANY = 1_000_000  # prompts; a message counts no further
_MOST = 1_000_000_000  # prompts; whoever would need more needs another ε

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Claim:
    """E[D] ≤ `epsilon` with confidence 1 − `delta`, to be shown on at most `n` prompts."""

    epsilon: float
    delta: float
    n: int

    @property
    def mu(self) -> float:
        return (1 + self.epsilon) / 2

    @property
    def goal(self) -> float:
        """ln(1/δ): the log capital that refutes the opposite."""
        return math.log(1 / self.delta)


def share_delta(delta: float, attempt: int) -> float:
    """The share of δ for attempt 1, 2, … on the same prompts, δ/(ζ(3) k³), which add up to δ. The steep series leaves
    83 % to the first attempt, mostly the only one; later ones need more prompts, by the logarithm of their share."""
    return delta / (_ZETA * attempt**3)


def average_groups(differences: Sequence[float], sizes: Sequence[int]) -> Floats:
    """The mean D of each group. `differences` has one group after the other; an unfinished group is left out."""
    ends = np.cumsum(np.asarray(sizes, int))
    whole = int(np.searchsorted(ends, len(differences), side="right"))
    if not whole:
        return np.zeros(0)
    counts = np.asarray(sizes[:whole], int)
    means: Floats = np.add.reduceat(np.asarray(differences, float)[: ends[whole - 1]], ends[:whole] - counts) / counts
    return means.clip(-1, 1)  # sums of floats may end beyond


def compute_log_capital(claim: Claim, differences: ArrayLike) -> Floats:
    """[..., t] D of prompts in their order → [..., t] ln K after each, with stakes
    λ_i = min(√(2 ln(1/δ) / (n σ̂²_{i−1})), 0.9/(1 − μ)); σ̂² is that of the prompts before, begun with 1/4."""
    return _bet(claim, *_observe(differences))


def _observe(differences: ArrayLike) -> tuple[Floats, Floats]:
    """What a bet needs of the differences D, whatever it claims: x = (D + 1)/2, and σ̂²_{i−1}."""
    x = (np.asarray(differences, float) + 1) / 2
    if x.size and not (x.min() >= 0 and x.max() <= 1):
        raise ValueError("differences must lie in [−1, 1]")
    count = np.arange(1, x.shape[-1] + 1)
    mean = (0.5 + x.cumsum(-1)) / (count + 1)
    variance = (0.25 + ((x - mean) ** 2).cumsum(-1)) / (count + 1)
    return x, np.concatenate([np.full((*x.shape[:-1], 1), 0.25), variance[..., :-1]], -1)[..., : x.shape[-1]]


def _bet(claim: Claim, x: Floats, before: Floats) -> Floats:
    stake = np.minimum(np.sqrt(2 * claim.goal / (claim.n * before)), CAP / (1 - claim.mu))
    capital: Floats = np.log1p(-stake * (x - claim.mu)).cumsum(-1)
    return capital


@dataclass(frozen=True)
class Decision:
    """The state of a claim after some prompts."""

    refuted_at: int | None  # prompts after which E[D] > ε was refuted: the claim is certified, whatever follows
    futile: bool  # whether it is not certified and will hardly be, so that the prompts are better spent on another rule
    log_capital: Floats
    soonest: int | None = None  # prompts after which it is certified if no more scores change; None if after none

    @property
    def certified(self) -> bool:
        return self.refuted_at is not None

    @property
    def p_value(self) -> float:
        """Anytime-valid: 1 over the largest capital so far."""
        return float(np.exp(-max(0.0, self.log_capital.max(initial=0.0))))


def decide(claim: Claim, differences: Sequence[float] | Floats) -> Decision:
    """The state of a claim after these prompts, in their order. To give up early costs power, never validity."""
    used = len(differences)
    rest = np.zeros(max(0, claim.n - used))
    capital = compute_log_capital(claim, np.concatenate([np.asarray(differences, float), rest]))
    reached = np.flatnonzero(capital >= claim.goal)
    soonest = int(reached[0]) + 1 if len(reached) else None
    at = None if soonest is None or soonest > used else soonest
    futile = soonest is None or is_hopeless(claim, np.asarray(differences, float))
    return Decision(at, at is None and futile, capital[:used], soonest)


def is_hopeless(claim: Claim, differences: Floats) -> bool:
    """Whether a bet will hardly be won even if the rest is better than what was seen, by a normal approximation."""
    if len(differences) < FEWEST_FOR_HOPE:
        return False
    variance = max(float(differences.var()), 1 / len(differences))
    mean = float(differences.mean()) - HOPE * math.sqrt(variance / len(differences))
    drift = math.sqrt(2 * claim.goal * claim.n / variance) * (claim.epsilon - mean)
    return drift + HOPE * math.sqrt(2 * claim.goal) < 2 * claim.goal


def can_certify(claim: Claim) -> bool:
    """Whether so many prompts can certify the claim at all: whether they do if no score changes."""
    return claim.n > 0 and bool(compute_log_capital(claim, np.zeros(claim.n)).max() >= claim.goal)


def find_fewest_prompts(epsilon: float, delta: float) -> int:
    """The smallest number of prompts that can certify such a claim."""

    def enough(n: int) -> bool:
        return can_certify(Claim(epsilon, delta, n))

    most = next(n for n in (2**k for k in itertools.count()) if enough(n))
    return bisect_left(range(most), True, key=enough)


def count_aside(prompts: int, batch: int | None) -> int:
    """How many of the prompts choose γ instead of testing rules: a tenth, at most a batch; none if that is None."""
    return min(batch, -(-prompts // ASIDE)) if batch else 0


def check_prompt_count(
    prompts: int, batch: int | None, epsilon: float, delta: float, families: int, largest: int | None = None
) -> None:
    """Refuse an ε that so few prompts cannot certify, less those set aside (see `count_aside`). A `batch` that is not
    known yet is the smallest possible one, and the number of prompts asked for is enough for the `largest`."""
    share = delta / families
    if can_certify(Claim(epsilon, share, prompts - count_aside(prompts, batch))):
        return
    needed = f"more than {_MANY:,} are needed"
    if can_certify(Claim(epsilon, share, _MANY - count_aside(_MANY, batch))):
        fewest = find_fewest_prompts(epsilon, share)
        given = next(n for n in itertools.count(fewest) if n - count_aside(n, largest or batch) >= fewest)
        needed = f"at least {given} are needed" + (f", {given - fewest} of them to choose γ" if batch else "")
    over, fewer = ("1 family", "") if families == 1 else (f"{families} families", ", fewer `families`")
    raise SelfJudgeError(
        f"{prompts} prompts cannot certify `epsilon` {epsilon:g} with {delta:.2g} of `delta` (83 % of it at a first"
        f" attempt), over {over}: {needed}; give more prompts{fewer} or a larger `epsilon`"
    )


def estimate_needed_prompts(
    epsilon: float, delta: float, *, mean: float = 0.0, variance: float = DISCORDANT
) -> int | None:
    """About how many prompts certify the claim in 9 of 10 runs, if D has this mean and variance; None if no number.
    With stakes λ = √(2L/(nσ²)) and L = ln(1/δ), ln K_n has the mean √(2Ln) (ε − mean)/σ − L and the deviation √(2L).
    Until σ̂² is known stakes are smaller: half of the fewest prompts comes on top."""
    gap = epsilon - mean
    if gap <= 0:
        return None
    goal = math.log(1 / delta)
    n = variance / gap**2 * (2 * goal + _Z * math.sqrt(2 * goal)) ** 2 / (2 * goal)
    if n > _MOST:
        return None
    least = find_fewest_prompts(gap, delta)
    return max(least, math.ceil(n + least / 2))


def describe_evidence(claim: Claim, observations: Sequence[float] | Floats, delta: float) -> dict[str, Any]:
    """The course of a bet that was won, until it was; and the exact binomial bound of losses, unless it ended early."""
    decision = decide(claim, observations)
    hits, used = sum(d > 0 for d in observations), len(observations)
    course = decision.log_capital[: decision.refuted_at]
    kept = np.unique(np.linspace(0, len(course) - 1, min(POINTS, len(course))).round().astype(int))
    return {
        "delta": claim.delta,
        "refuted_at": decision.refuted_at,
        "p_value": decision.p_value,
        "goal": claim.goal,
        "log_capital": [[int(i) + 1, float(course[i])] for i in kept],
        **({"lost_bound": find_binomial_bound(hits, used, delta)} if used == claim.n else {}),
    }


def find_upper_bound(differences: Sequence[float] | Floats, delta: float, n: int) -> float:
    """The smallest ε, in steps of 0.005, that these prompts certify with every larger one: E[D] ≤ ε; 1 if none. Stakes
    are for the `n` that were planned: where a run ended may depend on what it saw."""
    bound, observed = 1.0, _observe(differences)
    for epsilon in np.arange(_STEPS - 1, -1, -1) / _STEPS:
        claim = Claim(float(epsilon), delta, n)
        if _bet(claim, *observed).max(initial=0.0) < claim.goal:
            break
        bound = claim.epsilon
    return bound


def find_binomial_bound(hits: int, n: int, delta: float) -> float:
    """Clopper and Pearson's upper bound: the probability at which `hits` or fewer of n have the probability δ."""
    if hits >= n:
        return 1.0
    k = np.arange(hits + 1)
    log_choose = np.array([math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) for i in k])

    def reached(step: int) -> bool:
        p = step / _FINE
        return bool(np.exp(log_choose + k * math.log(p) + (n - k) * math.log1p(-p)).sum() <= delta)

    return (1 + bisect_left(range(1, _FINE), True, key=reached)) / _FINE
