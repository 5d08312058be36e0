"""How often a claim is certified: simulated runs."""

from __future__ import annotations

import numpy as np

from selfjudge.tune.certify import DISCORDANT, Claim, compute_log_capital

CHUNK = 1 << 21  # simulated prompts at a time


def simulate_power(claim: Claim, *, discordant: float = DISCORDANT, drop: float = 0.0, runs: int) -> float:
    """The share of simulated runs that certify the claim.

    A share `discordant` of the prompts has another score under the rule, D = ±1, with E[D] = `drop`.
    """
    lost, changed = (discordant + drop) / 2, discordant
    rng = np.random.default_rng(0)
    certified, rows = 0, max(1, CHUNK // claim.n)
    for start in range(0, runs, rows):
        u = rng.random((min(rows, runs - start), claim.n))
        differences = np.where(u < lost, 1.0, np.where(u < changed, -1.0, 0.0))
        certified += int((compute_log_capital(claim, differences).max(-1) >= claim.goal).sum())
    return certified / runs
