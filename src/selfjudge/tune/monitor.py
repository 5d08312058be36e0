"""Tests on a share of live requests whether a certificate holds for them. Loads no torch. Live requests have no right
answers, so D = 1 − the share of words in common, in order, with `exact`. The bet of `certify` is turned round: it
refutes E[D] ≤ bound. The bound is ε if overlap was certified, else the most that the calibration prompts allow. A bet
that has lost its capital on good requests would not notice bad ones, so it begins anew every n requests. Round j has
the share δ/(j(j + 1)), and all rounds together are wrong with probability ≤ δ. Figures of every answer show whether
requests have changed: whether the prompt asks for code or structure, passes per token, the share of substitutions. A
certificate's `scope` has the interval of each mean over its own prompts. Two bets watch its ends, with half of δ."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from logging import Logger
from typing import TYPE_CHECKING

from selfjudge.decoding.guards import asks_for_structure
from selfjudge.errors import SelfJudgeError
from selfjudge.evaluate.compare import compute_overlap
from selfjudge.tune.certify import Claim, compute_log_capital, find_upper_bound
from selfjudge.tune.recipe import Recipe

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

WORDS = 512  # words of an answer that are compared: the time grows with their square, and the server waits
DRIFT_ROUND = 250  # answers of a round of the bets on figures that all answers have
WAITING = 16  # requests that may wait for an idle engine; while so many do, no other is chosen
FIGURES = {  # names and meanings of `Monitor.figures`
    "shadow_loss": "Mean loss of agreement of the requests that were decoded both ways.",
    "shadow_bound": "The most that the certificate allows.",
    "shadow_log_capital": "Logarithm of the capital of the bet against the certificate, in its present round.",
    "shadow_goal": "The log capital that refutes the certificate.",
    "shadow_switched_off": "1 once the certificate is refuted: requests that name no rule are decoded exactly.",
}
OUTCOMES = "Requests chosen to be decoded both ways: counted, skipped (too many waited) or failed (no two answers)."


class Monitor:
    """A running bet against E[D] ≤ `bound`, in rounds of `n` requests."""

    def __init__(self, bound: float, delta: float, n: int) -> None:
        self.bound, self.delta, self.n = bound, delta, n
        self.round, self.count, self.lost = 1, 0, 0.0
        self.refuted = False
        self._differences: list[float] = []
        self._log_capital = 0.0

    @property
    def claim(self) -> Claim:
        """The bet's own claim in this round: it is won where E[−D] < −bound is shown."""
        return Claim(-self.bound, self.delta / (self.round * (self.round + 1)), self.n)

    def observe(self, difference: float) -> bool:
        """D of a request; True if it is the one that refutes the certificate."""
        if self.refuted:
            return False
        self.count += 1
        self.lost += difference
        self._differences.append(-difference)
        self._log_capital = float(compute_log_capital(self.claim, self._differences)[-1])
        if self._log_capital >= self.claim.goal:
            self.refuted = True
        elif len(self._differences) == self.n:
            self.round, self._differences, self._log_capital = self.round + 1, [], 0.0
        return self.refuted

    @property
    def loss(self) -> float:
        return self.lost / self.count if self.count else 0.0

    def figures(self) -> dict[str, float]:
        """The figures that `FIGURES` names."""
        values = (self.loss, self.bound, self._log_capital, self.claim.goal, float(self.refuted))
        return dict(zip(FIGURES, values, strict=True))

    @property
    def verdict(self) -> str:
        """The message when the certificate is refuted."""
        return (
            f"the certificate does not hold for these requests: {self.loss:.1%} of the words are not those of exact"
            f" over {self.count} requests, {self.bound:.1%} are allowed; requests that name no rule are decoded exactly"
            " from now on"
        )


def watch(recipe: Recipe | None) -> Monitor:
    """The monitor of a recipe's certificate."""
    if recipe is None:
        raise SelfJudgeError("`shadow` watches what a certificate claims: give `recipe`")
    certificate = recipe.certificate
    if not certificate["certified"]:
        raise SelfJudgeError(f"{recipe.folder} is a recipe for exact, which loses nothing: leave out `shadow`")
    bound = certificate["epsilon"] if certificate["measure"] == "overlap" else certificate["overlap"]["bound"]
    return Monitor(bound, certificate["delta"] / (2 if certificate.get("scope") else 1), certificate["n"])


def watch_scope(recipe: Recipe) -> DriftMonitor | None:
    """The monitor of what every answer shows; None for a certificate without a scope."""
    scope = recipe.certificate.get("scope")
    return DriftMonitor(scope, recipe.certificate["delta"]) if scope else None


def compute_loss(exact: str, shown: str) -> float:
    """D of a live request, by the first words of both answers."""
    return 1.0 - compute_overlap(*(" ".join(text.split()[:WORDS]) for text in (exact, shown)))


def describe_scope(figures: Mapping[str, Sequence[float]], delta: float, n: int) -> dict[str, list[float]]:
    """Intervals of the means of figures, planned for `n` groups; all are right with confidence 1 − δ/4."""
    share = delta / 8 / max(1, len(figures))
    return {
        name: [1.0 - find_upper_bound([1.0 - value for value in values], share, n), find_upper_bound(values, share, n)]
        for name, values in figures.items()
    }


def measure_answer(prompt: str, tokens: int, cycles: int, judged: int) -> dict[str, float]:
    """The figures of an answer, each between 0 and 1; `tokens` without the one that the prompt's own pass yields."""
    figures = {"structured": float(asks_for_structure(prompt))}
    if tokens:
        figures |= {"passes_per_token": min(1.0, cycles / tokens), "judged_share": min(1.0, judged / tokens)}
    return figures


class DriftMonitor:
    """Bets that the mean of a figure is outside of its interval in `scope`."""

    def __init__(self, scope: Mapping[str, Sequence[float]], delta: float) -> None:
        share = delta / 8 / max(1, len(scope))
        self.bets = {
            name: (Monitor(high, share, DRIFT_ROUND), Monitor(1.0 - low, share, DRIFT_ROUND))
            for name, (low, high) in scope.items()
        }
        self.changed: str | None = None  # the figure that has changed, once one has

    def observe(self, figures: Mapping[str, float]) -> bool:
        """The figures of an answer; True if it is the one that shows a change."""
        if self.changed is not None:
            return False
        for name, value in figures.items():
            above, below = self.bets.get(name, (None, None))
            if above is not None and below is not None and (above.observe(value) or below.observe(1.0 - value)):
                self.changed = name
                break
        return self.changed is not None

    @property
    def verdict(self) -> str:
        """The message when requests have changed."""
        assert self.changed is not None
        above, below = self.bets[self.changed]
        return (
            f"requests are unlike those of the certificate: {self.changed} is {above.loss:.2f} over {above.count},"
            f" and was {1 - below.bound:.2f} to {above.bound:.2f}; those without a rule are decoded exactly from now on"
        )


class Shadow:
    """Has a share of the requests answered again, exactly, and compares the answers. Says once when the certificate is
    refuted. Each request that `choose` took needs one call of `end`. No prompt or answer is kept."""

    def __init__(
        self, monitor: Monitor, share: float, log: Logger, registry: CollectorRegistry, drift: DriftMonitor | None
    ) -> None:
        from prometheus_client import Counter, Gauge

        self.monitor, self.share, self.log, self.drift = monitor, share, log, drift
        self._outcomes = Counter("selfjudge_shadow_requests_total", OUTCOMES, ["outcome"], registry=registry)
        self._figures = {
            name: Gauge(f"selfjudge_{name}", about, multiprocess_mode="mostrecent", registry=registry)
            for name, about in FIGURES.items()
        }
        self.on_refuted: Callable[[], None] = lambda: None
        self._chosen = 0  # requests that lack one of their two answers
        self._lock = threading.Lock()
        self._show()

    def choose(self) -> bool:
        """Toss a coin for a request: whether it is answered both ways."""
        if self.monitor.refuted or random.random() >= self.share:  # noqa: S311
            return False
        with self._lock:
            chosen = self._chosen < WAITING
            self._chosen += chosen
        if not chosen:  # whatever its answer would be: to skip by that would be biased
            self._outcomes.labels("skipped").inc()
        return chosen

    def notice(self, figures: Mapping[str, float]) -> None:
        """The figures of an answer under the certified rule, chosen or not."""
        if self.drift is None or self.monitor.refuted:
            return
        with self._lock:
            changed = self.drift.observe(figures)
            self.monitor.refuted |= changed
        if changed:
            self.log.warning(self.drift.verdict)
            self.on_refuted()
            self._show()

    def end(self, difference: float | None) -> None:
        """Count a request by the difference of its answers; None where one is missing."""
        refuted = difference is not None and self.monitor.observe(difference)
        if refuted:
            self.log.warning(self.monitor.verdict)
            self.on_refuted()
        self._show()
        with self._lock:
            self._chosen -= 1
        self._outcomes.labels("failed" if difference is None else "counted").inc()

    def _show(self) -> None:
        for name, value in self.monitor.figures().items():
            self._figures[name].set(value)
