"""Triton kernels of `Approval`. A step of vLLM's second model runner launches three: `_decide` before the logits are
processed, `_mark` on the processed logits, `_finish` once tokens are sampled. What a request asks is a line of a table,
by its slot; the rest stays where the runner keeps it on the device, in rows as `v2` describes. A program of `_decide`
or `_mark` handles one row of one request, and follows the request's text up to that row."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfjudge.decoding import guards, rules_by_row as codes
from selfjudge.integrations.vllm.plan import Plan
from selfjudge.models.device import send
from selfjudge.ops.kernels_triton import ROW_BLOCK, ROW_WARPS, JudgeWeights, draft_score, flat_scan, row_argmax, scan

STATE, POSITION, STRICT_UNTIL, STRICT_CODE, VALUE, LIMIT, PRICE, WINDOW, COLUMNS = map(tl.constexpr, range(9))
"""Columns of the table: what `RequestGuards` keeps, then the rule's code."""
ALWAYS, STATES = map(tl.constexpr, (guards.ALWAYS, guards.STATES))
SCORE, LOG_SCORE, RANK, ROW = map(tl.constexpr, (codes.SCORE, codes.LOG_SCORE, codes.RANK, ROW_BLOCK))


@triton.jit
def _rank_and_entropy(x_ptr, size, at, best, BLOCK: tl.constexpr):
    """How many logits of a row are greater than `at`; the entropy of its softmax in nats, if `best` is the largest."""
    column, more = tl.arange(0, BLOCK), tl.zeros([BLOCK], tl.int32)
    total, weighted = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in range(0, size, BLOCK):
        inside = first + column < size
        x = tl.load(x_ptr + first + column, mask=inside, other=-float("inf")).to(tl.float32)
        more += (x > at).to(tl.int32)
        e = tl.exp(x - best)
        total += e
        weighted += tl.where(e > 0, (x - best) * e, 0.0)
    mass = tl.sum(total, 0)
    return tl.sum(more, 0).to(tl.float32), tl.log(mass) - tl.sum(weighted, 0) / mass


@triton.jit
def _among(token, special_ptr, SPECIALS: tl.constexpr):
    """Whether the token is one of the special ones."""
    return tl.max((tl.load(special_ptr + tl.arange(0, SPECIALS)) == token).to(tl.int32), 0) != 0


@triton.jit(do_not_specialize=("rows",))
def _decide(
    slot_ptr, end_ptr, index_ptr, id_ptr, position_ptr, hidden_ptr, logit_ptr, table_ptr, follow_ptr, exact_ptr,
    state_ptr, flag_ptr, value_ptr, limit_ptr, draft_ptr, said_ptr, rows, known, hidden_step, logit_step, hidden,
    vocabulary, weight_ptr, bias_ptr, special_ptr, SPECIALS: tl.constexpr, LOWEST: tl.constexpr, MARGIN: tl.constexpr,
    PREVIOUS: tl.constexpr, FURTHEST: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, DECIDE: tl.constexpr,
):  # fmt: skip
    """A draft's harm by its code (`rules_by_row.Code`), 0 or inf where that has a limit, and whether it is aligned;
    inf where the rule has no say. With STEP also the draft of each row (−1 for the last) and the state after its token;
    without DECIDE the limit instead of the harm, −inf where alignment alone decides."""
    at = tl.program_id(0)
    if STEP:
        first, end = tl.load(end_ptr + at), tl.load(end_ptr + at + 1)
        line = table_ptr + tl.load(slot_ptr + at).to(tl.int64) * COLUMNS
        at = first + tl.program_id(1)
        if at >= end:
            return
        position = tl.load(position_ptr + tl.load(index_ptr + first))
        missed = position > tl.load(line + POSITION).to(tl.int64)
        state = tl.where(missed, ALWAYS, tl.load(line + STATE).to(tl.int32))
        for one in range(first, at + 1):
            token = tl.load(id_ptr + tl.load(index_ptr + one)).to(tl.int64)
            state = tl.load(follow_ptr + tl.minimum(tl.maximum(token, 0), known - 1) * STATES + state).to(tl.int32)
        tl.store(state_ptr + at, state)
        tl.store(flag_ptr + 2 * rows + at, 0)  # not marked yet
        if at + 1 == end:
            tl.store(draft_ptr + at, -1)
            tl.store(said_ptr + at, -float("inf"))
            return
        row, previous, following = at.to(tl.int64), tl.load(index_ptr + at), tl.load(index_ptr + at + 1)
        token = tl.load(id_ptr + following).to(tl.int64)
        tl.store(draft_ptr + at, token.to(tl.int32))
        after = tl.load(follow_ptr + tl.minimum(tl.maximum(token, 0), known - 1) * STATES + state).to(tl.int32)
        inside = (tl.load(exact_ptr + state) != 0) | (tl.load(exact_ptr + after) != 0)
        strict = position + at + 1 - first < tl.load(line + STRICT_UNTIL).to(tl.int64)
        which, limit = tl.load(line + VALUE).to(tl.int32), tl.load(line + LIMIT).to(tl.float32)
        limit = tl.where(strict | (inside & (tl.load(line + STRICT_CODE) != 0)), -float("inf"), limit)
    else:
        row, token = tl.load(index_ptr + at).to(tl.int64), tl.load(draft_ptr + at).to(tl.int64)
        which, limit, previous, following = tl.load(value_ptr + at), tl.load(limit_ptr + at), row, row + 1
    harm = limit
    if DECIDE:
        logits = logit_ptr + row * logit_step
        choice, best, non_finite = row_argmax(logits, vocabulary, ROW)
        logit = tl.load(logits + tl.maximum(token, 0)).to(tl.float32)
        value = best - logit  # Δ log p = Δ logit
        if which >= RANK:  # or the entropy
            rank, entropy = _rank_and_entropy(logits, vocabulary, logit, best, ROW)
            value = tl.where(which == RANK, rank, -entropy / tl.log(vocabulary.to(tl.float32)))
        if BLOCK:  # noqa: SIM102 (known when the kernel is compiled, 0 without a judge; the other is not)
            if which <= LOG_SCORE:
                score = draft_score(
                    hidden_ptr + following.to(tl.int64) * hidden_step, hidden_ptr + previous.to(tl.int64) * hidden_step,
                    logit - best, weight_ptr, bias_ptr, hidden, LOWEST, MARGIN, PREVIOUS, FURTHEST, BLOCK,
                )  # fmt: skip
                value = -tl.where(which == SCORE, score, tl.log(score))
        has_say = (token >= 0) & (non_finite == 0)
        if SPECIALS:
            has_say = has_say & ((_among(token, special_ptr, SPECIALS) | _among(choice, special_ptr, SPECIALS)) == 0)
        harm = tl.where(limit != limit, value, tl.where(value < limit, 0.0, float("inf")))
        harm = tl.where(has_say, harm, float("inf"))
        tl.store(said_ptr + rows + at, ((token >= 0) & (token == choice)).to(tl.float32))
    tl.store(said_ptr + at, harm)


NO_JUDGE: dict[str, Any] = {"LOWEST": 0.0, "MARGIN": False, "PREVIOUS": False, "LIMIT": None, "BLOCK": 0}


def _judging(judge: JudgeWeights | None, special: Tensor, hidden: Tensor, logits: Tensor) -> tuple[Any, ...]:
    """Arguments of `_decide` from `hidden_step` to BLOCK."""
    sizes = hidden.stride(0), logits.stride(0), hidden.shape[1], logits.shape[1]
    constants = [(judge.constants if judge else NO_JUDGE)[name] for name in NO_JUDGE]
    return *sizes, *(judge[:2] if judge else (None, None)), special, len(special), *constants


def approvals(
    judge: JudgeWeights | None, hidden: Tensor, logits: Tensor, at: Tensor, drafts: Tensor, plan: Plan,
    exact: Tensor | None, special: Tensor,
) -> Tensor:  # fmt: skip
    """`Approval.__call__`, for rules that have codes."""
    (value, limit, price, window), rows = plan.table, plan.rows
    if exact is not None:
        limit = limit.masked_fill(exact, -torch.inf)  # no value is below it
    n, said = len(drafts), torch.empty((2, len(drafts)), device=drafts.device)
    _decide[(n,)](
        None, None, at, None, None, hidden, logits, None, None, None, None, None, value, limit, drafts, said, n, 0,
        *_judging(judge, special, hidden, logits), STEP=False, DECIDE=True, num_warps=ROW_WARPS,
    )  # fmt: skip
    return flat_scan(*said, rows.first, rows.counts, price, window) if plan.looks_ahead else said[0] < torch.inf


@triton.jit(do_not_specialize=("begun", "rows"))
def _mark(
    slot_ptr, end_ptr, said_ptr, logit_ptr, begun, table_ptr, draft_ptr, flag_ptr, special_ptr, rows, logit_step,
    vocabulary, MARK: tl.constexpr, SPECIALS: tl.constexpr, STEP: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """A draft is marked on its logits if its rule accepts it. With STEP a draft of the requests from `begun` on, whose
    logits these are; with AHEAD its fate depends on the drafts after it, else on its own harm."""
    at = tl.program_id(0)
    row = at.to(tl.int64)
    if STEP:
        request = begun + at
        first, end = tl.load(end_ptr + request), tl.load(end_ptr + request + 1)
        at = first + tl.program_id(1)
        if at + 1 >= end:
            return
        row = (at - tl.load(end_ptr + begun)).to(tl.int64)
        approved = tl.load(said_ptr + at) < float("inf")
        if AHEAD:
            line = table_ptr + tl.load(slot_ptr + request).to(tl.int64) * COLUMNS
            price, window = tl.load(line + PRICE).to(tl.float32), tl.load(line + WINDOW).to(tl.int32)
            worth, matching = price, 0
            for back in range(end - 1 - at):
                one = said_ptr + end - 2 - back
                aligned = tl.load(one + rows) != 0
                approved, worth, matching = scan(tl.load(one), aligned, worth, matching, price, window)
    else:
        approved = tl.load(said_ptr + at) != 0
    logits, token = logit_ptr + row * logit_step, tl.load(draft_ptr + at).to(tl.int64)
    choice, _, _ = row_argmax(logits, vocabulary, ROW)
    drafted = token >= 0
    logit = logits + tl.maximum(token, 0)
    raised = approved & drafted & (tl.load(logit).to(tl.float32) > -float("inf"))
    if SPECIALS:
        raised = raised & (_among(choice, special_ptr, SPECIALS) == 0)
    tl.debug_barrier()  # the whole row has been read
    tl.store(logit, MARK, mask=raised)
    tl.store(flag_ptr + at, raised)
    tl.store(flag_ptr + rows + at, drafted & (choice == token))
    tl.store(flag_ptr + 2 * rows + at, drafted)


def mark(logits: Tensor, drafts: Tensor, approved: Tensor, special: Tensor, value: float) -> Tensor:
    """`Approval.mark`."""
    flags = torch.empty((3, len(drafts)), dtype=torch.bool, device=logits.device)
    _mark[(len(drafts),)](
        None, None, approved, logits, 0, None, drafts, flags, special, len(drafts), logits.stride(0), logits.shape[1],
        value, len(special), STEP=False, AHEAD=False, num_warps=ROW_WARPS,
    )  # fmt: skip
    return flags


@triton.jit
def _finish(slot_ptr, end_ptr, index_ptr, position_ptr, emitted_ptr, table_ptr, state_ptr, flag_ptr, total_ptr, rows):
    """One request that got so many tokens: its guards follow them, and `approval.COUNTERS` grow."""
    request = tl.program_id(0)
    first, end = tl.load(end_ptr + request), tl.load(end_ptr + request + 1)
    emitted, count = tl.load(emitted_ptr + request), end - first - 1
    line = table_ptr + tl.load(slot_ptr + request).to(tl.int64) * COLUMNS
    position = tl.load(position_ptr + tl.load(index_ptr + first))
    begun = position >= tl.load(line + POSITION).to(tl.int64)  # before that a prompt is being read
    state = tl.load(state_ptr + first + tl.maximum(emitted, 1) - 1)
    tl.store(line + STATE, state.to(tl.float64), mask=begun)
    tl.store(line + POSITION, (position + emitted).to(tl.float64), mask=begun)
    leading, judged, going = 0, 0, 1
    for place in range(count):
        accepted, flags = place < emitted - 1, flag_ptr + first + place
        aligned = tl.where(tl.load(flags + 2 * rows) != 0, tl.load(flags + rows) != 0, accepted)
        judged += (accepted & (tl.load(flags) != 0) & (aligned == 0)).to(tl.int32)
        going = going & aligned.to(tl.int32)
        leading += going
    drafted = count > 0
    tl.atomic_add(total_ptr, 1, mask=drafted)
    tl.atomic_add(total_ptr + 1, emitted, mask=drafted)
    tl.atomic_add(total_ptr + 2, leading + 1, mask=drafted)
    tl.atomic_add(total_ptr + 3, judged, mask=drafted)


class Launch:
    """A kernel with its constant arguments, launched with those that change in front of them. Triton's front end takes
    longer on the host than the rest of a step. So it is used once for each set of dtypes; later launches call the
    compiled kernel directly, unless a tensor does not begin at a multiple of 16 bytes."""

    direct = True  # until a Triton turns out to call compiled kernels in another way

    def __init__(self, kernel: Any, warps: int, *stays: Any) -> None:
        self.kernel, self.warps, self.stays = kernel, warps, stays
        self.pointers = [one.data_ptr() if isinstance(one, Tensor) else one for one in stays]
        self.compiled: dict[tuple[torch.dtype, ...], Any] = {}

    def __call__(self, grid: tuple[int, int, int], tensors: Sequence[Tensor], *numbers: int) -> None:
        pointers, dtypes = [one.data_ptr() for one in tensors], tuple([one.dtype for one in tensors])
        if (compiled := self.compiled.get(dtypes)) is not None and not reduce(operator.or_, pointers) & 15:
            try:
                compiled[grid](*pointers, *numbers, *self.pointers)
                return
            except (AttributeError, TypeError):  # before anything is launched
                Launch.direct = False
        compiled = self.kernel[grid](*tensors, *numbers, *self.stays, num_warps=self.warps)
        self.compiled[dtypes] = compiled if Launch.direct else None


class RequestTable:
    """What requests ask, by slot, and the rows of the current step, both on the device."""

    def __init__(self, slots: int, width: int, structure: Any, special: Tensor, total: Tensor) -> None:
        """Steps have at most so many rows of a request; what they do is added to the total."""
        self.width, self.special, self.rows, device = width, special, slots * width, total.device
        self.lines = torch.zeros((slots, COLUMNS.value), dtype=torch.float64, device=device)
        self.follow, self.exact = structure.on(device)
        self.drafts, self.state = (torch.empty(self.rows, dtype=torch.int32, device=device) for _ in range(2))
        self.said = torch.empty((2, self.rows), device=device)
        self.flags = torch.empty((3, self.rows), dtype=torch.bool, device=device)
        self.new: dict[int, Sequence[float]] = {}  # lines of requests that begin, by slot
        self._finish = Launch(_finish, 1, self.lines, self.state, self.flags, total, self.rows)
        self._launches: dict[Any, Launch] = {}

    def decide(self, batch: Any, hidden: Tensor, logits: Tensor, judge: JudgeWeights | None, *, fused: bool) -> None:
        """Fill in the rows of a step, whose tokens have these states; without verdicts where it is not fused."""
        if self.new:  # copied without waiting
            lines = send([[slot, *line] for slot, line in self.new.items()], self.lines.device, torch.float64)
            self.new = {}
            self.lines[lines[:, 0].long()] = lines[:, 1:]
        key = fused, judge is None, hidden.stride(0), logits.stride(0)
        if key not in self._launches:
            self._launches[key] = Launch(
                _decide, ROW_WARPS if fused else 1, self.lines, self.follow, self.exact, self.state, self.flags, None,
                None, self.drafts, self.said, self.rows, len(self.follow),
                *_judging(judge, self.special, hidden, logits), True, fused,
            )  # fmt: skip
        rows = batch.idx_mapping, batch.cu_num_logits, batch.logits_indices, batch.input_ids, batch.positions
        self._launches[key]((batch.num_reqs, self.width, 1), (*rows, hidden, logits))

    def mark(self, batch: Any, said: Tensor, logits: Tensor, value: float, requests: range, *, ahead: bool) -> None:
        """Mark the drafts of some requests on their logits, after what was said of all rows."""
        key = value, ahead, logits.stride(0)
        if key not in self._launches:
            self._launches[key] = Launch(
                _mark, ROW_WARPS, self.lines, self.drafts, self.flags, self.special, self.rows, logits.stride(0),
                logits.shape[1], value, len(self.special), True, ahead,
            )  # fmt: skip
        grid = len(requests), self.width - 1, 1
        self._launches[key](grid, (batch.idx_mapping, batch.cu_num_logits, said, logits), requests.start)

    def finish(self, batch: Any, emitted: Tensor) -> None:
        """Follow and count the tokens that a batch got, which was marked."""
        rows = batch.idx_mapping, batch.cu_num_logits, batch.logits_indices, batch.positions, emitted
        self._finish((batch.num_reqs, 1, 1), rows)
