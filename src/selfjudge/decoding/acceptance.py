"""Counts of accepted drafts: by position, by the draft's probability, and by γ.
Counts of one γ say little of another, since a short block often begins within an easy passage. `RowBlocks` therefore
cuts accepted tokens into the blocks of every γ."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from selfjudge.types import MAX_GAMMA

DECAY = 0.97  # weight of the counts so far when the next cycle is counted
OWN_TOKENS = 16.0  # tokens after which a row's own counts weigh as much as those of all rows
BLOCK_COUNTS = MAX_GAMMA + 4  # drafts reached, drafts accepted, tokens, and for each γ the cycles that make them


class Acceptance:
    """How often draft i is accepted once those before it are: decaying counts, the share of draft i − 1 as prior."""

    FIRST = 0.7  # prior of the first draft
    STRENGTH = 2.0  # weight of a prior, in cycles

    def __init__(self) -> None:
        self.reached = np.zeros(MAX_GAMMA)
        self.accepted = np.zeros(MAX_GAMMA)

    def observe(self, accepted: NDArray[np.int64], drafts: int | NDArray[np.int64], decay: float = DECAY) -> None:
        """Count a cycle in which row b accepted accepted[b] of drafts[b] drafts."""
        self.fade(decay)
        most = np.broadcast_to(drafts, accepted.shape)
        for (n, drafted), rows in Counter(zip(accepted.tolist(), most.tolist(), strict=True)).items():
            self.reached[: min(n + 1, drafted)] += rows / len(accepted)
            self.accepted[:n] += rows / len(accepted)

    def fade(self, share: float) -> None:
        """Let this share of the counts stay."""
        self.reached *= share
        self.accepted *= share

    def begin_with(self, other: Acceptance, weight: float) -> None:
        """Start from another's counts, weighted as at most `weight` cycles."""
        share = min(1.0, weight / max(other.reached[0], 1e-9))
        self.reached, self.accepted = share * other.reached, share * other.accepted

    def shares(self, most: int) -> list[float]:
        """P(draft i is accepted | those before it are) for i = 1 … `most`."""
        shares, before = [], self.FIRST
        for reached, accepted in zip(self.reached[:most].tolist(), self.accepted[:most].tolist(), strict=True):
            before = (accepted + self.STRENGTH * before) / (reached + self.STRENGTH)
            shares.append(before)
        return shares


class Calibration:
    """How often a draft is accepted, by the probability that the draft model gave it."""

    EDGES = np.array([0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97])
    GUESS = np.array([0.05, 0.1, 0.15, 0.2, 0.35, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95])
    STRENGTH = 4.0  # weight of the guess, in drafts
    MAX_COUNT = 2000.0  # counts of a bin before they are halved

    def __init__(self) -> None:
        self.count = np.zeros(len(self.GUESS))
        self.accepted = np.zeros(len(self.GUESS))

    def observe(self, q: NDArray[np.float64], accepted: NDArray[np.int64]) -> None:
        """Count drafts of probability q [B, γ], of which `accepted` [B]. Those after a rejection do not count."""
        at = np.arange(q.shape[1])
        bins, reached = np.searchsorted(self.EDGES, q), accepted[:, None] >= at
        np.add.at(self.count, bins[reached], 1.0)
        np.add.at(self.accepted, bins[reached & (accepted[:, None] > at)], 1.0)
        full = self.count > self.MAX_COUNT
        self.count[full] /= 2
        self.accepted[full] /= 2

    def shares(self) -> NDArray[np.float64]:
        """The share of accepted drafts in each bin."""
        shares: NDArray[np.float64] = (self.accepted + self.STRENGTH * self.GUESS) / (self.count + self.STRENGTH)
        return shares

    def __call__(self, q: NDArray[np.float64]) -> NDArray[np.float64]:
        """The share of accepted drafts among those of probability q."""
        return self.shares()[np.searchsorted(self.EDGES, q)]


_FIRST_TOKENS = 2.0  # weight of the guess below, in tokens
_GUESS = _FIRST_TOKENS * np.concatenate([
    [1.0, Acceptance.FIRST, 1.0],
    1 / np.cumsum(Acceptance.FIRST ** np.arange(MAX_GAMMA + 1)),
])  # fmt: skip


class RowBlocks(NamedTuple):
    """What each row's latest blocks say of every γ; changed in place."""

    counts: NDArray[np.float64]  # [B, BLOCK_COUNTS]; earlier cycles fade
    run: NDArray[np.int64]  # [B] tokens since the last rejection: a longer block might have had the next ones, too

    @classmethod
    def new(cls, rows: int) -> RowBlocks:
        return cls(np.zeros((rows, BLOCK_COUNTS)), np.zeros(rows, np.int64))

    def observe(
        self,
        accepted: NDArray[np.int64],
        limits: NDArray[np.int64],
        live: NDArray[np.bool_],
        all_rows: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """Count a cycle in which row b accepted accepted[b] of limits[b] drafts; return the mean of the live rows.
        A full block ends with a token of the target. A longer block would have had it about as often as the first draft
        after a full block is accepted, by the counts of `all_rows`."""
        before, accepted, full = self.run[live], accepted[live], accepted[live] == limits[live]
        tokens, sizes = accepted + 1, np.arange(1, MAX_GAMMA + 2)
        after = before + tokens
        known = all_rows + _GUESS
        alone, begun, earlier = (np.ceil(count[:, None] / sizes) for count in (tokens, after, before))
        cycles = alone + known[1] / known[0] * (begun - earlier - alone)
        follows = before > 0
        new = np.column_stack([follows, follows & (accepted > 0), tokens, cycles])
        self.counts[live] = DECAY * self.counts[live] + new
        self.run[live] = np.where(full, after, 0)
        return new.mean(0)  # type: ignore[no-any-return]

    def tokens(self, all_rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """[B, G] tokens of a row's cycle by γ < G; `all_rows` [G] are those of any row."""
        return (self.counts[:, 2:3] + OWN_TOKENS) / (self.counts[:, 3 : 3 + len(all_rows)] + OWN_TOKENS / all_rows)


def tokens_by_gamma(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """[1+MAX_GAMMA] tokens of a cycle by γ, from BLOCK_COUNTS counts."""
    known = counts + _GUESS
    tokens: NDArray[np.float64] = known[2] / known[3:]
    return tokens
