"""γ of a batch: by cycle where no answer depends on it, by row elsewhere; and what is captured and counted for that."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from selfjudge.decoding.admission import BatchRows, Request
from selfjudge.decoding.capture import capture_cycles, time_cycle
from selfjudge.decoding.costs import say_measuring
from selfjudge.decoding.cycle import Cycle, CycleSize, is_captured
from selfjudge.decoding.gamma import STATIC_CHOICES, GammaController, PairStatistics, RequestGamma
from selfjudge.decoding.rules import EXACT, AcceptanceRule
from selfjudge.decoding.rules_by_row import RowRules
from selfjudge.engine.draft import BatchEngines

_Wanted = tuple[AcceptanceRule, CycleSize, bool, int]  # rule, size and trace of a cycle, and for how many rows
LATE = 2.0  # times its cost that padding may lose before a smaller size is captured in the middle of answers


class CyclePlan(NamedTuple):
    """What the next cycle drafts and verifies."""

    size: CycleSize
    limits: NDArray[np.int64] | None = None  # [B] drafts of each row that are verified; None: all of them
    gammas: NDArray[np.int64] | None = None  # [B] γ of each row; None where the cycle has one
    behind: bool = False  # whether the draft has to catch up


@dataclass
class BatchGamma:
    """Chooses γ for the cycles of one batch.

    Rows under rules whose answers depend on γ get theirs when they enter, for good. While all other rows leave it open,
    a controller chooses for each cycle. Beside rows that have a γ, they take what is best for them in cycles of at
    least as many drafts."""

    engines: BatchEngines
    rule: AcceptanceRule
    most: int  # maximum drafts of a cycle
    trace: bool = False
    controller: GammaController | None = None  # of cycles whose rows all leave γ open
    statistics: PairStatistics | None = None  # what γ is chosen by; None where it is `most` for all rows
    policies: dict[tuple[str, int], RequestGamma] = field(default_factory=dict)  # of rows, by their rules

    def __post_init__(self) -> None:
        self.by_row = isinstance(self.rule, RowRules)
        self.lossless = EXACT if self.by_row else self.rule  # the rule of rows that leave γ open
        if self.controller is not None and self.engines.target.static:
            self.controller.is_captured = lambda rows, gamma: is_captured(
                self.engines, self.lossless, CycleSize(gamma), trace=self.trace, rows=rows
            )
        self.lost: dict[_Wanted, float] = self.engines.kept.setdefault("lost", {})
        """Seconds that padding has lost because a cycle is not captured for fewer rows."""

    @property
    def fixed(self) -> int:
        """γ of rows that name none, −1 where it is chosen."""
        return self.most if self.controller is None and self.statistics is None else -1

    def rule_of(self, request: Request) -> AcceptanceRule:
        """The rule of one row."""
        return (request.rule or EXACT) if self.by_row else self.rule

    def _find_policy(self, rule: AcceptanceRule) -> RequestGamma:
        """What chooses γ of rows with this rule."""
        assert self.statistics is not None
        key = rule.name, rule.matches_needed
        if key not in self.policies:
            self.policies[key] = RequestGamma(self.statistics, rule)
        return self.policies[key]

    def is_ready(self, rows: int, cycle: Cycle) -> bool:
        """Whether a batch of so many rows can go on after this cycle, of another number of rows, without a capture."""
        if not self.engines.target.static:
            return True
        if self._is_controlled(cycle):
            assert self.controller is not None
            return any(self.controller.is_captured(rows, gamma) for gamma in (0, *self.controller.choices))
        return is_captured(self.engines, cycle.rule, cycle.size, trace=cycle.trace, rows=rows)

    def _is_controlled(self, cycle: Cycle) -> bool:
        """Whether the next cycle may have another γ."""
        return self.controller is not None and cycle.rule == self.lossless and not cycle.size.limited

    def fit(self, live: int, most: int, cycle: Cycle | None, now: int = 0) -> int:
        """The best number of rows, at most so many, for a batch with so many live ones; `now` is the present number.

        A number that is not captured waits: the next larger one takes its place, and the other rows are idle."""
        best = rows = min(self.engines.target.bucket(live, now), most)
        if cycle is None or self.lost.get(self._key(best, cycle), 0.0) >= LATE * self._capture_seconds(best):
            return best
        while rows < most and not self.is_ready(rows, cycle):
            rows = min(2 * rows, most)
        return rows if now or self.is_ready(rows, cycle) else best

    def _key(self, rows: int, cycle: Cycle) -> _Wanted:
        size = CycleSize(0) if self._is_controlled(cycle) else cycle.size
        return cycle.rule, size, cycle.trace, rows

    def _capture_seconds(self, rows: int) -> float:
        """What it takes to capture the cycles of so many rows."""
        if self.statistics is None:
            return PairStatistics.capture_seconds
        measured = self.controller is None or rows in self.statistics.costs.cycles
        return self.statistics.capture_seconds * (1 if measured else 1 + len(STATIC_CHOICES))

    def note_padding(self, live: int, rows: int, cycle: Cycle, seconds: float) -> None:
        """Count what a cycle lost because it had more rows than its live ones need."""
        best = self.engines.target.bucket(live, rows)
        if best < rows and not self.is_ready(best, cycle):
            share = (1 - best / rows) / 2  # a guess: half of a cycle grows with its rows
            if self.statistics is not None and self.statistics.costs.cycles:
                times = [self.statistics.costs.seconds(n, cycle.gamma)[cycle.gamma] for n in (best, rows)]
                share = 1 - times[0] / times[1]
            key = self._key(best, cycle)
            self.lost[key] = self.lost.get(key, 0.0) + max(0.0, share) * seconds

    def capture_lost(self) -> None:
        """Between answers: capture the cycles for want of which padding has lost more time than their capture takes."""
        for rule, size, trace, rows in [
            key for key, lost in self.lost.items() if lost >= self._capture_seconds(key[-1])
        ]:
            del self.lost[rule, size, trace, rows]
            if self.controller is not None and rule == self.lossless:
                self.capture_choices(rows, self.controller)
            with suppress(torch.OutOfMemoryError):
                capture_cycles(self.engines, rule, rows, [size], trace=trace)

    def choose(self, rows: BatchRows, unread: int, *, changed: bool, may_capture: bool, by_gamma: bool) -> CyclePlan:
        """The next cycle of these rows, of which the draft has not read the latest `unread` tokens. `changed` says
        whether rows have entered or left, `may_capture` whether their cycles are then captured, `by_gamma` whether
        answers of this cycle depend on γ."""
        if changed and self.statistics is not None:
            self._choose_for_entered(rows, may_capture)
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

    def _choose_for_entered(self, rows: BatchRows, may_capture: bool) -> None:
        """Give γ to the rows that have entered and whose answers depend on it."""
        live = ~rows.finished
        entered = [i for i in np.flatnonzero(live & (rows.gamma < 0)).tolist()
                   if self.rule_of(rows.requests[i]).depends_on_gamma]  # fmt: skip
        policies = {i: self._find_policy(self.rule_of(rows.requests[i])) for i in entered}
        if may_capture and self.engines.target.static:
            leave_open = not entered and not (rows.gamma[live] >= 0).any()
            self.capture_choices(len(rows), (leave_open and self.controller) or self._find_policy(self.lossless))
        most = int(rows.gamma[live].max(initial=0))
        chosen = {policy: policy.choose(len(rows), most) for policy in dict.fromkeys(policies.values())}
        for i, policy in policies.items():
            rows.gamma[i] = min(self.most, chosen[policy])

    def capture_choices(self, rows: int, controller: GammaController | RequestGamma) -> None:
        """Before the first cycle of another number of rows: capture every γ that they may soon use; where the table
        does not know so many rows, capture and time all of them."""
        statistics = controller.statistics
        costs, usual = statistics.costs, rows & (rows - 1) == 0  # what batches shrink to is measured, others estimated
        known = (rows in costs.cycles or not usual) and costs.covers(rows)
        start, captured = time.perf_counter(), len(self.engines.target.captured_cycles)
        try:
            if not known:
                say_measuring()
                gammas = [0, *controller.choices]
                cycles = capture_cycles(self.engines, self.lossless, rows, map(CycleSize, gammas), trace=self.trace)
                seconds = [time_cycle(cycle) for cycle in cycles]
                costs.begin(rows)
                for gamma, spent in zip(gammas, seconds, strict=True):
                    costs.add(rows, gamma, spent)
                costs.save(rows)
            sizes = map(CycleSize, controller.candidates(rows))
            capture_cycles(self.engines, self.lossless, rows, sizes, trace=self.trace)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return  # γ is chosen by estimates, and captured one at a time
        if known and (new := len(self.engines.target.captured_cycles) - captured) > 0:
            statistics.capture_seconds = (time.perf_counter() - start) / new

    def observe(
        self,
        plan: CyclePlan,
        drafts: int,
        used: NDArray[np.int64],
        live: NDArray[np.bool_],
        rows: BatchRows,
        seconds: Mapping[str, float],
    ) -> tuple[float, float]:
        """Count a cycle of so many `seconds` by phase, in which row b of the `live` ones accepted used[b] drafts.
        Returns the seconds that the table of costs has for a plain cycle and for this one; zeros where γ is not
        chosen."""
        behind = plan.behind
        if plan.gammas is None or self.statistics is None:
            if self.controller is None:
                return 0.0, 0.0
            self.controller.observe(used, live, drafts, seconds, rows.blocks, behind=behind)
            return self.controller.costs_of(len(rows), drafts)
        gammas = np.where(live, plan.gammas, 0)
        if not (behind and drafts) and (gammas[live] == drafts).all():
            self.statistics.costs.watch(len(rows), drafts, sum(seconds.values()))
        owners = {i: self._find_policy(self.rule_of(rows.requests[i])) for i in np.flatnonzero(gammas).tolist()}
        for policy in dict.fromkeys(owners.values()):  # the rows of each rule by themselves
            own = np.array([owners.get(i) is policy for i in range(len(rows))])
            policy.observe(used, np.where(own, gammas, 0), rows.blocks)
        return self._find_policy(self.lossless).costs_of(len(rows), drafts)
