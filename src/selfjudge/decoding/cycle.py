"""One cycle: the draft proposes, the target verifies, the judge scores, the rule decides, the caches are rewound."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selfjudge.decoding.edits import RowEdits, VerifiedLogits, edit_draft
from selfjudge.decoding.guards import GuardedBlock
from selfjudge.decoding.rules import AcceptanceRule
from selfjudge.decoding.rules_by_row import SETTINGS, RowRules
from selfjudge.decoding.sampling import RowSampling, Sampling, sample
from selfjudge.engine.base import Output
from selfjudge.engine.draft import BatchEngines, Drafter
from selfjudge.models.device import send
from selfjudge.ops import argmax_checked, replace_non_finite
from selfjudge.types import PHASES, Block, JudgedToken, Verdict

Limits = Sequence[int] | NDArray[np.int64] | Tensor  # [B] how many drafts of each row are verified
GUARDS, SPENT, ROW_STATE = slice(2), 2, 3 + SETTINGS
"""Columns of the state of rows, and their number: that of `Guards.begin`, `Block.spent`, at last `Block.settings`."""
CAPTURED_CYCLES = 256  # maximum cycles that an engine keeps: nine sizes of a batch, each with eight γ and three rules


@dataclass(frozen=True, slots=True)
class Packed:
    """The outcome of a cycle in one integer tensor, so that one copy brings it to the host."""

    table: Tensor
    """[B, 3+2γ], traced [B, 3+6γ]: n accepted, next token, non-finite; γ each of drafts, judged, parts of `_trace`.
    Of a guarded cycle one column more, `GuardedBlock.bits`, before the drafts."""
    drafted: int  # γ: draft tokens of each row
    traced: bool
    guarded: bool = False

    @classmethod
    def pack(cls, block: Block, verdict: Verdict, *, traced: bool = False, guarded: GuardedBlock | None = None) -> Self:
        n, next_token = verdict.n_accepted[:, None], verdict.next_token[:, None]
        head = [n, next_token, verdict.non_finite.long().expand_as(n)]
        head += [] if guarded is None else [guarded.bits[:, None]]
        parts = [block.draft_tokens, verdict.judged.long(), *(_trace(block, verdict) if traced else ())]
        return cls(torch.cat(head + parts, 1), block.gamma, traced, guarded is not None)

    def unpack(self) -> CycleOutcome:
        """The columns of a table that has reached the host."""
        table: NDArray[np.int64] = self.table.cpu().numpy()
        guarded = table[:, 3] if self.guarded else np.zeros(len(table), np.int64)
        parts = table[:, 3 + self.guarded :].reshape(len(table), 6 if self.traced else 2, self.drafted)
        trace = parts[:, 2:] if self.traced else None
        return CycleOutcome(table[:, 0], table[:, 1], table[:, 2], parts[:, 0], parts[:, 1], trace, guarded)


@dataclass(frozen=True, slots=True)
class CycleOutcome:
    """The outcome of a cycle on the host."""

    accepted: NDArray[Any]  # [B] accepted drafts
    next_token: NDArray[Any]  # [B] the target's token after them
    non_finite: NDArray[Any]  # [B] 1 where a non-finite logit or hidden state was met
    drafts: NDArray[Any]  # [B, γ] draft tokens
    judged: NDArray[Any]  # [B, γ] 1 where the draft was accepted although the alignment rule rejects it
    trace: NDArray[Any] | None  # [B, 4, γ] the four parts of `_trace`
    guarded: NDArray[Any]  # [B] `GuardedBlock.bits`, zeros of a cycle without guards

    def judged_tokens(self, row: int, tokens: int) -> tuple[JudgedToken, ...]:
        """The judged ones among the first `tokens` tokens of a row; none without a trace."""
        if self.trace is None:
            return ()
        choice, *bits = self.trace[row]
        p, p_choice, score = (part.astype(np.int32).view(np.float32).tolist() for part in bits)
        drafts, choices = self.drafts[row].tolist(), choice.tolist()
        return tuple(
            JudgedToken(j, drafts[j], "", p[j], choices[j], "", p_choice[j], None if math.isnan(score[j]) else score[j])
            for j in np.flatnonzero(self.judged[row, : min(tokens, self.accepted[row])]).tolist()
        )


def _trace(block: Block, verdict: Verdict) -> list[Tensor]:
    """Four parts [B, γ]: the target's choice; as float32 bits, p of the draft, p of the choice, the judge's score."""
    assert block.argmax is not None
    choice = block.argmax[0][:, :-1]
    if choice.device.type == "cpu" and not verdict.judged.any():
        return [torch.zeros_like(choice)] * 4  # only judged tokens are read
    probabilities = block.target_logits[:, :-1].softmax(-1, dtype=torch.float32)
    p, p_choice = probabilities.gather(-1, torch.stack([block.draft_tokens, choice], -1)).unbind(-1)
    score = torch.full_like(p, math.nan) if block.scores is None else block.scores.float()
    return [choice, *(part.view(torch.int32).long() for part in (p, p_choice, score))]


class CycleSize(NamedTuple):
    """What a captured cycle is captured for, besides its rule and its rows."""

    gamma: int
    limited: bool = False  # whether rows may have fewer drafts verified; engines that are not static always may


class Cycle:
    """One cycle as four functions over fixed tensors, so that an engine can capture and replay them without Python."""

    def __init__(
        self,
        engines: BatchEngines,
        rule: AcceptanceRule,
        size: CycleSize,
        *,
        trace: bool,
        first: Tensor,
        row_state: Tensor | None = None,
    ) -> None:
        """`first` [B] are the newest tokens, `row_state` what rules know; `trace` asks what the target wanted."""
        self.size = size
        gamma = size.gamma
        self.target, self.draft = engines.target, engines.draft
        self.rule, self.gamma, self.guards = rule, gamma, rule.guards
        self.trace = trace and gamma > 0 and not rule.lossless
        self.draft_on: Callable[[Callable[[], Sequence[float]]], bool] | None = None
        """Decides whether to draft on; its argument computes the probabilities [B] of the newest drafts."""
        self.last = first[:, None].clone()
        zeros = first.new_zeros((len(first), ROW_STATE), dtype=torch.float32)
        self.row_state = zeros if row_state is None else row_state.clone()
        """[B, ROW_STATE] what a rule has to know of each answer so far."""
        self.limits = torch.full_like(first, gamma)  # [B] drafts of each row that are verified, if rows are `limited`
        self.limited = size.limited
        self.uniforms = (
            None if rule.sampling is None else first.new_zeros((len(first), 2 * gamma + 1), dtype=torch.float32)
        )
        self.captured: list[Callable[[], None]] | None = None  # the four phases, where the engine has captured them
        self.drafts = self.last[:, :0]
        self.draft_logits: Tensor | None = None
        self.output: Output | None = None
        self.block: Block | None = None
        self.guarded: GuardedBlock | None = None
        self.edits: Sequence[RowEdits] = ()  # of the rows, while the phases run
        self.verified: VerifiedLogits | None = None  # for the edits of rows
        self.packed: Packed | None = None
        self.timer: PhaseTimer | None = None  # of a cycle that is prepared

    @property
    def settings(self) -> Tensor:
        """[B, SETTINGS] as in `Block`."""
        return self.row_state[:, -SETTINGS:]

    @torch.no_grad()
    def prepare(self) -> None:
        """Catch up and capture what is new: all that static engines need memory for. May be retried after an error."""
        self.timer = PhaseTimer(self.target.device)
        if self.draft is not None:
            with self.timer("draft"):
                self.draft.prepare(self.gamma)
        # only static engines set `captured`: it refers back to the cycle, and would keep an eager cycle's logits alive
        if self.target.static and self.captured is None:
            self.capture()

    @torch.no_grad()
    def run(
        self, uniforms: Tensor | None, limits: Limits | None = None, edits: Sequence[RowEdits] = ()
    ) -> tuple[Packed, PhaseTimer]:
        """Start one cycle and return its outcome without waiting for it, unless there are `edits` of the rows.
        Of row b only the first limits[b] drafts are verified, 0 … γ; without `limits`, all are."""
        if self.timer is None:
            self.prepare()
        timer, self.timer = self.timer, None
        assert timer is not None
        if self.uniforms is not None and uniforms is not None:
            self.uniforms.copy_(uniforms)
        if limits is not None:
            self.limit(limits)
        elif self.target.static and self.size.limited:
            raise ValueError("a cycle that is captured with limits needs them")
        else:
            self.limited = False
        self.run_phases(timer, edits)
        assert self.packed is not None
        return timer.send(self.packed), timer

    def run_phases(self, timer: PhaseTimer, edits: Sequence[RowEdits] = ()) -> None:
        """Start the four phases, captured or not; edits of rows act on the host between the second and the third."""
        self.edits = edits
        for name, phase in zip(PHASES, self.captured or self._phases(), strict=True):
            if edits and name == "judge":
                assert self.verified is not None
                with timer("rule"):
                    self.verified.edit(edits)
            with timer(name):
                phase()

    def _phases(self) -> list[Callable[[], None]]:
        return [self.propose, self.verify, self.judge, self.decide]

    def state(self) -> list[Tensor]:
        """The tensors that a cycle of a static engine changes in place, without the caches."""
        return [self.last, self.row_state, *self.target.state(), *([] if self.draft is None else self.draft.state())]

    @torch.no_grad()
    def capture(self) -> None:
        """Let a static engine capture the phases; `state` stays as it is."""
        try:
            self.captured = self.target.capture(self._phases(), self.state())
        finally:  # not read after a capture: later captures reuse this memory, most of the total for large batches
            self.draft_logits = self.output = self.block = self.guarded = None
            self.verified = self.verified.unowned() if self.verified and self.captured else None

    def limit(self, limits: Limits) -> None:
        """Verify only the first limits[b] drafts of each row; `draft_on` may change it if the engine is not static."""
        if self.target.static and not self.size.limited:
            raise ValueError("a captured cycle takes limits only if it is captured with them")
        self.limits.copy_(send(limits, self.limits.device))
        self.limited = True

    def propose(self) -> None:
        """Set the drafts [B, ≤ γ] of this cycle."""
        self.drafts, self.draft_logits = self.last[:, :0], None
        if self.draft is not None and self.gamma:
            self.drafts, self.draft_logits = self._proposals(self.draft)

    def _proposals(self, draft: Drafter) -> tuple[Tensor, Tensor | None]:
        """[B, γ] drafts (fewer if `draft_on` says so) and, where they are read, `Block.draft_logits`."""
        tokens: list[Tensor] = []
        drawn_from: list[Tensor] = []
        size, ids = self.target.vocab_size, draft.vocabulary
        draft_on = None if draft.static else self.draft_on
        output = draft.propose(self.gamma)
        for i in range(self.gamma):
            logits = output.logits[:, -1]
            if self.edits and not draft.static:
                edit_draft(self.edits, logits, tokens, ids)
            known = logits[:, :size]
            if self.rule.sampling is not None:
                known, chosen, token = self._draw(logits, i, ids)
                drawn_from.append(known)
            else:
                whole = output.argmax if known.shape == logits.shape and not self.edits else None
                chosen = argmax_checked(known)[0] if whole is None else whole[0][:, -1]
                if self.rule.reads_draft:
                    drawn_from.append(_over_vocabulary(replace_non_finite(logits), size, ids))
                token = chosen if ids is None else ids[chosen]
            tokens.append(token)
            if draft_on is not None and not draft_on(partial(_probabilities, known, chosen)):
                break
            if i + 1 < self.gamma:
                output = draft.extend(tokens[-1])
        return torch.stack(tokens, 1), torch.stack(drawn_from, 1) if drawn_from else None

    def _draw(self, logits: Tensor, i: int, ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Logits that draft i is drawn from; its place in them and its token [B]; of greedy rows the likeliest."""
        assert self.uniforms is not None
        size, own = self.target.vocab_size, cast("Sampling | RowSampling", self.rule.sampling)
        rows: slice | Tensor = slice(None)
        if isinstance(self.rule, RowRules):
            own = self.rule.sampled(self.settings)
            rows = own.rows
            if own.fused:
                known, chosen = own.draw(logits[:, :size], self.uniforms[:, i])
                return known, chosen, chosen if ids is None else ids[chosen]
        warped = own.warp(_over_vocabulary(replace_non_finite(logits[rows]), size, ids))
        drawn = sample(warped.softmax(-1), self.uniforms[rows, i])
        if isinstance(own, RowSampling):
            greedy = argmax_checked(logits[:, :size])[0]
            drawn = own.put(greedy if ids is None else ids[greedy], drawn)
        return warped, drawn, drawn

    def _draft_places(self) -> Tensor | None:
        """`Block.draft_places`."""
        ids, size = None if self.draft is None else self.draft.vocabulary, self.target.vocab_size
        if ids is None or self.draft_logits is None or self.draft_logits.shape[-1] == size:
            return None
        return ids.new_full((size,), -1).index_copy_(0, ids, torch.arange(len(ids), device=ids.device))

    def verify(self) -> None:
        """Run the target over the last token and the drafts."""
        tokens, limits = torch.cat([self.last, self.drafts], 1), self._limits()
        if limits is None:
            self.output = output = self.target.extend(tokens)
        else:
            self.output = output = self.target.extend_first(tokens, limits + 1)
        u, drafted = self.uniforms, self.drafts.shape[1]
        uniforms = None if u is None else torch.cat([u[:, self.gamma : self.gamma + drafted], u[:, -1:]], 1)
        argmax = output.argmax or argmax_checked(output.logits)
        self.verified = VerifiedLogits(output.logits, argmax, self.drafts, limits)
        if self.guards is not None:
            self.guarded = GuardedBlock(self.guards, self.row_state[:, GUARDS], self.drafts)
        self.block = Block(
            self.drafts, output.logits, None if self.rule.judge is None else output.hidden, self.draft_logits, uniforms,
            argmax=argmax, limits=limits, spent=self.row_state[:, SPENT],
            exact_only=None if self.guarded is None else self.guarded.exact[:, :-1],
            settings=self.settings if isinstance(self.rule, RowRules) else None, draft_places=self._draft_places(),
        )  # fmt: skip

    def _limits(self) -> Tensor | None:
        """[B] how many of the drafts of each row are verified; None where all of them are."""
        if not self.limited:
            return None
        limits = self.limits.clamp(0, self.drafts.shape[1])  # drafting may have ended early
        return limits if self.target.static or bool((limits < self.drafts.shape[1]).any()) else None

    def judge(self) -> None:
        """Add the judge's scores to the block, where the rule has a judge and needs it."""
        assert self.block is not None
        if self.rule.judge is not None and self.gamma and not self.rule.settled(self.block):
            self.block = replace(self.block, scores=self.rule.judge.on(self.drafts.device)(self.block))

    def decide(self) -> None:
        """Apply the rule, and rewind both caches to what it accepts."""
        assert self.block is not None
        assert self.output is not None
        verdict = self.rule(self.block)
        verified = self.block.gamma if self.block.limits is None else self.block.limits
        self.target.rewind(verified - verdict.n_accepted)
        self.last.copy_(verdict.next_token[:, None])
        if verdict.spent is not None:
            self.row_state[:, SPENT] = verdict.spent
        if self.guarded is not None:
            self.row_state[:, GUARDS] = self.guarded.advance(verdict.n_accepted, verdict.next_token)
        if self.draft is not None:
            self.draft.accept(self.drafts, verdict, self.output.features)
        self.packed = Packed.pack(self.block, verdict, traced=self.trace, guarded=self.guarded)


def find_cycle(
    engines: BatchEngines,
    rule: AcceptanceRule,
    size: CycleSize,
    *,
    trace: bool,
    first: Tensor,
    row_state: Tensor | None = None,
) -> Cycle:
    """The cycle that the engine captured for an earlier batch of its shape, else a new one; arguments: see `Cycle`."""
    if not engines.target.static:
        return Cycle(engines, rule, CycleSize(size.gamma), trace=trace, first=first, row_state=row_state)
    kept, key = engines.target.captured_cycles, _key(engines, rule, size, trace, len(first))
    if key in kept:
        cycle: Cycle = kept.pop(key)
        kept[key] = cycle  # least recently used first
        cycle.last.copy_(first[:, None])
        cycle.row_state.zero_() if row_state is None else cycle.row_state.copy_(row_state)
        return cycle
    while len(kept) >= CAPTURED_CYCLES:
        kept.pop(next(iter(kept)))
    cycle = kept[key] = Cycle(engines, rule, size, trace=trace, first=first, row_state=row_state)
    return cycle


def is_captured(engines: BatchEngines, rule: AcceptanceRule, size: CycleSize, *, trace: bool, rows: int) -> bool:
    """Whether a static engine has captured a cycle of this size for this number of rows."""
    cycle = kept_cycle(engines, rule, size, trace=trace, rows=rows)
    return cycle is not None and cycle.captured is not None


def kept_cycle(engines: BatchEngines, rule: AcceptanceRule, size: CycleSize, *, trace: bool, rows: int) -> Cycle | None:
    """The cycle that a static engine keeps for this size and number of rows, captured or about to be."""
    cycle: Cycle | None = engines.target.captured_cycles.get(_key(engines, rule, size, trace, rows))
    return cycle


def _key(engines: BatchEngines, rule: AcceptanceRule, size: CycleSize, trace: bool, rows: int) -> Hashable:
    trace = trace and size.gamma > 0 and not rule.lossless
    return rule, size, trace, rows, engines.draft, engines.draft and engines.draft.version


def _probabilities(logits: Tensor, tokens: Tensor) -> list[float]:
    """[B] probabilities of tokens [B] by logits [B, V]."""
    logits = logits.float()
    log_p: Tensor = logits.gather(1, tokens[:, None]).squeeze(1) - logits.logsumexp(-1)
    return log_p.exp().tolist()


def _over_vocabulary(logits: Tensor, size: int, ids: Tensor | None) -> Tensor:
    """Draft logits over the target's vocabulary: a draft may know only some tokens, or be padded otherwise."""
    if ids is not None:
        return logits.new_full((len(logits), size), -torch.inf).index_copy_(1, ids, logits)
    missing = size - logits.shape[-1]
    if missing > 0:
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
    return logits[..., :size]


class PhaseTimer:
    """Seconds of one cycle by phase; on CUDA measured by events, so that the host need not wait between phases."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.spans: list[tuple[str, Any, Any]] = []
        self.arrived: Any = None

    def _now(self) -> Any:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        if self.device.type == "mps":
            torch.mps.synchronize()
        return time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = self._now()
        yield
        self.spans.append((phase, start, self._now()))

    def wait(self) -> None:
        """Wait until the device has finished the phases so far."""
        if self.device.type == "cuda" and self.spans:
            self.spans[-1][2].synchronize()

    def send(self, packed: Packed) -> Packed:
        """Start copying the outcome to the host, out of the buffers that the next cycle overwrites."""
        if self.device.type != "cuda":
            return packed
        host = torch.empty(packed.table.shape, dtype=packed.table.dtype, pin_memory=True)
        host.copy_(packed.table, non_blocking=True)
        self.arrived = torch.cuda.Event()
        self.arrived.record()
        return replace(packed, table=host)

    def seconds(self) -> dict[str, float]:
        """Wait for the outcome that was sent, and return the seconds of each phase."""
        if self.device.type == "cuda":
            (self.arrived or torch.cuda.current_stream(self.device)).synchronize()
        total = dict.fromkeys(PHASES, 0.0)
        for phase, start, end in self.spans:
            total[phase] += start.elapsed_time(end) / 1e3 if self.device.type == "cuda" else end - start
        return total
