"""`Approval` as kernels: every launch costs time in each step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfjudge.decoding import rules_by_row as codes
from selfjudge.ops.kernels_triton import ROW_BLOCK, ROW_WARPS, JudgeWeights, among, draft_score, flat_scan, row_argmax

SCORE, LOG_SCORE, RANK, ENTROPY = (
    tl.constexpr(value) for value in (codes.SCORE, codes.LOG_SCORE, codes.RANK, codes.ENTROPY)
)


@triton.jit
def _rank(x_ptr, size, at, BLOCK: tl.constexpr):
    """How many logits of a row are greater than `at`."""
    column = tl.arange(0, BLOCK)
    more = tl.zeros([BLOCK], tl.int32)
    for first in range(0, size, BLOCK):
        inside = first + column < size
        x = tl.load(x_ptr + first + column, mask=inside, other=-float("inf")).to(tl.float32)
        more += (x > at).to(tl.int32)
    return tl.sum(more, 0).to(tl.float32)


@triton.jit
def _entropy(x_ptr, size, best, BLOCK: tl.constexpr):
    """Entropy of the softmax of a row whose largest logit is `best`, in nats."""
    column = tl.arange(0, BLOCK)
    total, weighted = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in range(0, size, BLOCK):
        inside = first + column < size
        x = tl.load(x_ptr + first + column, mask=inside, other=-float("inf")).to(tl.float32) - best
        e = tl.exp(x)
        total += e
        weighted += tl.where(e > 0, x * e, 0.0)
    mass = tl.sum(total, 0)
    return tl.log(mass) - tl.sum(weighted, 0) / mass


@triton.jit
def _decide(
    hidden_ptr, logit_ptr, at_ptr, draft_ptr, value_ptr, limit_ptr, weight_ptr, bias_ptr, special_ptr, out_ptr,
    harm_ptr, hidden_step, logit_step, hidden, vocabulary, log_vocabulary, judge_limit, specials, JUDGE: tl.constexpr,
    LOWEST: tl.constexpr, MARGIN: tl.constexpr, PREVIOUS: tl.constexpr, LIMITED: tl.constexpr, BLOCK: tl.constexpr,
    SPECIALS: tl.constexpr, ROW_BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One draft by its code (`rules_by_row.Code`): with AHEAD its harm and whether it is aligned, else its approval."""
    i = tl.program_id(0)
    row, token = tl.load(at_ptr + i).to(tl.int64), tl.load(draft_ptr + i).to(tl.int64)
    which, limit = tl.load(value_ptr + i), tl.load(limit_ptr + i)
    logits = logit_ptr + row * logit_step
    choice, best, non_finite = row_argmax(logits, vocabulary, ROW_BLOCK)
    at = tl.load(logits + tl.maximum(token, 0)).to(tl.float32)
    value = best - at  # Δ log p = Δ logit
    if which == RANK:
        value = _rank(logits, vocabulary, at, ROW_BLOCK)
    if which == ENTROPY:
        value = -_entropy(logits, vocabulary, best, ROW_BLOCK) / log_vocabulary
    if JUDGE:  # noqa: SIM102 (known when the kernel is compiled; the other is not)
        if which <= LOG_SCORE:
            score = draft_score(
                hidden_ptr + (row + 1) * hidden_step, hidden_step, at - best, weight_ptr, bias_ptr, hidden,
                judge_limit, LOWEST, MARGIN, PREVIOUS, LIMITED, BLOCK,
            )  # fmt: skip
            value = -tl.where(which == SCORE, score, tl.log(score))
    has_say = (token >= 0) & (non_finite == 0)
    if SPECIALS:
        has_say = has_say & (among(token, special_ptr, specials, SPECIALS) == 0)
        has_say = has_say & (among(choice, special_ptr, specials, SPECIALS) == 0)
    if AHEAD:
        harm = tl.where(limit != limit, value, tl.where(value < limit, 0.0, float("inf")))
        tl.store(harm_ptr + i, tl.where(has_say, harm, float("inf")))
        tl.store(out_ptr + i, (token >= 0) & (token == choice))
    else:
        tl.store(out_ptr + i, has_say & (value < limit))


def approvals(
    judge: JudgeWeights | None, hidden: Tensor, logits: Tensor, at: Tensor, drafts: Tensor, value: Tensor,
    limit: Tensor, special: Tensor, ahead: Sequence[Tensor] | None,
) -> Tensor:  # fmt: skip
    """`Approval.__call__`, for rules that have codes: value and limit [n] of each draft. Where the fate of drafts
    depends on those after them: first row, number of drafts, price and window of each block [R]."""
    out = torch.empty(len(drafts), dtype=torch.bool, device=drafts.device)
    harm = None if ahead is None else torch.empty(len(drafts), device=drafts.device)
    specials = len(special)
    _decide[(len(drafts),)](
        hidden, logits, at, drafts, value, limit, *(judge[:2] if judge else (None, None)), special, out, harm,
        hidden.stride(0), logits.stride(0), hidden.shape[1], logits.shape[1], math.log(logits.shape[1]),
        judge.limit if judge else 0.0, specials, JUDGE=judge is not None,
        SPECIALS=triton.next_power_of_2(specials) if specials else 0,
        ROW_BLOCK=ROW_BLOCK, AHEAD=ahead is not None, num_warps=ROW_WARPS, **(judge.constants if judge else NO_JUDGE),
    )  # fmt: skip
    return out if harm is None or ahead is None else flat_scan(harm, out, *ahead)


NO_JUDGE: dict[str, Any] = {"LOWEST": 0.0, "MARGIN": False, "PREVIOUS": False, "LIMITED": False, "BLOCK": 16}


@triton.jit(do_not_specialize=("flag_step",))
def _mark(
    logit_ptr, draft_ptr, approved_ptr, special_ptr, flag_ptr, step, flag_step, vocabulary, specials,
    MARK: tl.constexpr, SPECIALS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    logits, token = logit_ptr + i * step, tl.load(draft_ptr + i).to(tl.int64)
    choice, _, _ = row_argmax(logits, vocabulary, BLOCK)
    drafted = token >= 0
    at = logits + tl.maximum(token, 0)
    raised = (tl.load(approved_ptr + i) != 0) & drafted & (tl.load(at).to(tl.float32) > -float("inf"))
    if SPECIALS:
        raised = raised & (among(choice, special_ptr, specials, SPECIALS) == 0)
    tl.debug_barrier()  # the whole row has been read
    tl.store(at, MARK, mask=raised)
    tl.store(flag_ptr + i, raised)
    tl.store(flag_ptr + flag_step + i, drafted & (choice == token))
    tl.store(flag_ptr + 2 * flag_step + i, drafted)


def mark(logits: Tensor, drafts: Tensor, approved: Tensor, special: Tensor, value: float, flags: Tensor) -> None:
    """`Approval.mark`, which writes its flags to a tensor [3, n]."""
    specials = len(special)
    _mark[(len(drafts),)](
        logits, drafts, approved, special, flags, logits.stride(0), flags.stride(0), logits.shape[1], specials,
        MARK=value, SPECIALS=triton.next_power_of_2(specials) if specials else 0, BLOCK=ROW_BLOCK, num_warps=ROW_WARPS,
    )  # fmt: skip
