"""γ of a batch: by cycle where no answer depends on it, by row elsewhere; and what is captured and counted for that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from selfjudge.decoding.admission import BatchRows, Request
from selfjudge.decoding.capture import capture_cycles, time_cycle
from selfjudge.decoding.costs import CostTable, say_measuring
from selfjudge.decoding.cycle import CycleSize, is_captured
from selfjudge.decoding.gamma import GammaController, PairStatistics, RequestGamma
from selfjudge.decoding.rules import EXACT, AcceptanceRule
from selfjudge.decoding.rules_by_row import RowRules
from selfjudge.engine.draft import BatchEngines
from selfjudge.models.device import empty_cache


class CyclePlan(NamedTuple):
    """What the next cycle drafts and verifies."""

    size: CycleSize
    limits: NDArray[np.int64] | None = None  # [B] drafts of each row that are verified; None: all of them
    gammas: NDArray[np.int64] | None = None  # [B] γ of each row; None where the cycle has one
    behind: bool = False  # whether the draft has to catch up


@dataclass
class BatchGamma:
    """Chooses γ for the cycles of one batch. Rows whose answers depend on γ get theirs when they enter, for good.
    While all other rows leave it open, a controller chooses for each cycle. Beside rows that have a γ, they take what
    is best for them in cycles of at least as many drafts."""

    engines: BatchEngines
    rule: AcceptanceRule
    most: int  # maximum drafts of a cycle
    trace: bool = False
    controller: GammaController | None = None  # of cycles whose rows all leave γ open
    statistics: PairStatistics | None = None  # what γ is chosen by; None where it is `most` for all rows
    served: bool = False  # whether rows enter as others leave, and the host has more to do
    policies: dict[tuple[str, int], RequestGamma] = field(default_factory=dict)  # of rows, by their rules

    def __post_init__(self) -> None:
        self.by_row = isinstance(self.rule, RowRules)
        self.lossless = EXACT if self.by_row else self.rule  # the rule of rows that leave γ open
        if self.controller is not None and self.engines.target.static:
            self.controller.is_captured = lambda rows, gamma: is_captured(
                self.engines, self.lossless, CycleSize(gamma), trace=self.trace, rows=rows
            )

    @property
    def fixed(self) -> int:
        """γ of rows that name none, −1 where it is chosen."""
        return self.most if self.controller is None and self.statistics is None else -1

    def rule_of(self, request: Request) -> AcceptanceRule:
        return (request.rule or EXACT) if self.by_row else self.rule

    def _find_policy(self, rule: AcceptanceRule) -> RequestGamma:
        """What chooses γ of rows with this rule."""
        assert self.statistics is not None
        key = rule.name, rule.matches_needed
        if key not in self.policies:
            self.policies[key] = RequestGamma(self.statistics, rule)
        return self.policies[key]

    def choose(self, rows: BatchRows, unread: int, *, changed: bool, by_gamma: bool) -> CyclePlan:
        """The next cycle of these rows, of which the draft has not read the latest `unread` tokens. `changed` says
        whether rows have entered or left, `by_gamma` whether answers of this cycle depend on γ."""
        if changed and self.statistics is not None:
            self._choose_for_entered(rows)
        live, behind = ~rows.finished, unread > 0
        fixed, static = live & (rows.gamma >= 0), self.engines.target.static
        if self.controller is not None and not fixed.any():
            drafts = self.controller.choose(len(rows), unread, rows.live)
            return CyclePlan(CycleSize(drafts), behind=behind)
        gammas = np.where(fixed, rows.gamma, 0)
        if (free := live & ~fixed).any():
            gammas[free] = min(self.most, self._find_policy(self.lossless).choose(len(rows), int(gammas.max())))
        drafts = int(gammas.max())
        alike = self.statistics is None or (not by_gamma and (gammas[live] == drafts).all())
        if not drafts or alike:
            return CyclePlan(CycleSize(drafts), None, gammas, behind)
        return CyclePlan(CycleSize(drafts, limited=static), gammas, gammas, behind)

    def _choose_for_entered(self, rows: BatchRows) -> None:
        """Give γ to the rows that have entered and whose answers depend on it."""
        live = ~rows.finished
        entered = [i for i in np.flatnonzero(live & (rows.gamma < 0)).tolist()
                   if self.rule_of(rows.requests[i]).depends_on_gamma]  # fmt: skip
        policies = {i: self._find_policy(self.rule_of(rows.requests[i])) for i in entered}
        if self.engines.target.static and self.statistics is not None:
            self.time_choices(len(rows), self.statistics.costs)
        most = int(rows.gamma[live].max(initial=0))
        chosen = {policy: policy.choose(len(rows), most, for_good=True) for policy in dict.fromkeys(policies.values())}
        for i, policy in policies.items():
            rows.gamma[i] = min(self.most, chosen[policy])

    def time_choices(self, rows: int, costs: CostTable) -> None:
        """Before the first cycle of so many rows, capture and time every γ where the table lacks them.
        Where it knows them, a γ is captured when it first runs: what may never run is not worth its capture."""
        usual = rows & (rows - 1) == 0  # others are estimated
        costs.stale &= not self.served  # a busy host slows cycles down, and nobody shall wait for a new table
        if (rows in costs.cycles or not usual) and costs.covers(rows):
            return
        say_measuring()
        try:
            self.time_all(rows, costs)
        except torch.OutOfMemoryError:
            empty_cache()  # γ is chosen by estimates

    def time_all(self, rows: int, costs: CostTable) -> None:
        """Capture and time every γ of so many rows."""
        gammas = [0, *self._find_policy(self.lossless).choices]
        cycles = capture_cycles(self.engines, self.lossless, rows, map(CycleSize, gammas), trace=self.trace)
        seconds = [time_cycle(cycle) for cycle in cycles]
        costs.begin(rows)
        for gamma, spent in zip(gammas, seconds, strict=True):
            costs.add(rows, gamma, spent)
        costs.save(rows)

    def observe(
        self,
        plan: CyclePlan,
        drafts: int,
        used: NDArray[np.int64],
        live: NDArray[np.bool_],
        rows: BatchRows,
        seconds: Mapping[str, float],
    ) -> tuple[float, float]:
        """Count a cycle of `seconds` by phase, in which row b of the `live` ones accepted used[b] drafts. Returns the
        table's seconds of a plain cycle and of this one; zeros where γ is not chosen."""
        if plan.gammas is None or self.statistics is None:
            if self.controller is None:
                return 0.0, 0.0
            self.controller.observe(used, live, drafts, seconds, rows.blocks, behind=plan.behind)
            return self.controller.costs_of(len(rows), drafts)
        gammas = np.where(live, plan.gammas, 0)
        if not (plan.behind and drafts) and (gammas[live] == drafts).all():
            self.statistics.costs.watch(len(rows), drafts, sum(seconds.values()))
        owners = {i: self._find_policy(self.rule_of(rows.requests[i])) for i in np.flatnonzero(gammas).tolist()}
        for policy in dict.fromkeys(owners.values()):  # the rows of each rule by themselves
            own = np.array([owners.get(i) is policy for i in range(len(rows))])
            policy.observe(used, np.where(own, gammas, 0), rows.blocks)
        return self._find_policy(self.lossless).costs_of(len(rows), drafts)
