"""The kernel of `judge_score`: one program for each draft reads its state once and computes P(acceptable).

Rows are flat: row i of the logits predicts a token that row i + 1 of the states has read.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfjudge.ops.argmax_triton import ROW_BLOCK, ROW_WARPS, row_argmax

if TYPE_CHECKING:
    from selfjudge.ops.judge_score import Weights

LINEAR_BLOCK, TILE = 1024, 8192  # that a program holds at a time: columns of a linear judge, weights of an MLP


@triton.jit
def among(token, special_ptr, specials, SPECIALS: tl.constexpr):
    """Whether the token is one of the special ones."""
    at = tl.arange(0, SPECIALS)
    ids = tl.load(special_ptr + at, mask=at < specials, other=-1)
    return tl.max((ids == token).to(tl.int32), 0) != 0


@triton.jit
def _judge(
    hidden_ptr, logit_ptr, choice_ptr, at_ptr, draft_ptr, weight_ptr, bias_ptr, inner_ptr, inner_bias_ptr, theta_ptr,
    special_ptr, out_ptr, hidden_step, logit_step, hidden, vocabulary, units, theta, specials, limit,
    LOWEST: tl.constexpr, GAMMA: tl.constexpr, MARGIN: tl.constexpr, LIMITED: tl.constexpr, MLP: tl.constexpr,
    APPROVE: tl.constexpr, THETAS: tl.constexpr, BLOCK: tl.constexpr, UNITS: tl.constexpr, SPECIALS: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
):  # fmt: skip
    """With APPROVE: whether the draft is approved. Else: its score, NaN where the state is broken.

    With APPROVE the most likely token of the draft's row is computed here, else it is given.
    """
    i = tl.program_id(0)
    # rows of blocks: each has GAMMA drafts and one row more
    row = i // GAMMA * (GAMMA + 1) + i % GAMMA if GAMMA else tl.load(at_ptr + i)
    row = row.to(tl.int64)
    token = tl.load(draft_ptr + i).to(tl.int64)
    logits = logit_ptr + row * logit_step
    if APPROVE:
        choice, best, broken = row_argmax(logits, vocabulary, ROW_BLOCK)
    margin = 0.0
    beyond = False
    if MARGIN or LIMITED:
        if not APPROVE:
            best = tl.load(logits + tl.load(choice_ptr + row)).to(tl.float32)
        margin = tl.load(logits + tl.maximum(token, 0)).to(tl.float32) - best  # Δ log p = Δ logit
        beyond = margin < -limit
        margin = tl.where(margin < LOWEST, LOWEST, margin)
    state = hidden_ptr + (row + 1) * hidden_step
    width = hidden + MARGIN
    column = tl.arange(0, BLOCK)
    finite = 1
    if MLP:
        unit = tl.arange(0, UNITS)
        known = unit < units
        z = tl.load(inner_bias_ptr + unit, mask=known, other=0.0)
        for first in range(0, hidden, BLOCK):
            inside = first + column < hidden
            h = tl.load(state + first + column, mask=inside, other=0.0).to(tl.float32)
            finite = finite & tl.min((tl.abs(h) < float("inf")).to(tl.int32), 0)
            tile = inner_ptr + unit[:, None] * width + first + column[None, :]
            w = tl.load(tile, mask=known[:, None] & inside[None, :], other=0.0)
            z += tl.sum(w * h[None, :], 1)
        if MARGIN:
            z += margin * tl.load(inner_ptr + unit * width + hidden, mask=known, other=0.0)
        z = 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))  # gelu
        x = tl.sum(z * tl.load(weight_ptr + unit, mask=known, other=0.0), 0)
    else:
        sums = tl.zeros([BLOCK], tl.float32)
        for first in range(0, hidden, BLOCK):
            inside = first + column < hidden
            h = tl.load(state + first + column, mask=inside, other=0.0).to(tl.float32)
            finite = finite & tl.min((tl.abs(h) < float("inf")).to(tl.int32), 0)
            sums += h * tl.load(weight_ptr + first + column, mask=inside, other=0.0)
        x = tl.sum(sums, 0)
        if MARGIN:
            x += margin * tl.load(weight_ptr + hidden)
    score = tl.sigmoid(x + tl.load(bias_ptr))
    if LIMITED:
        score = tl.where(beyond, 0.0, score)
    if APPROVE:
        threshold = tl.load(theta_ptr + i) if THETAS else theta
        approved = (score > threshold) & (token >= 0) & (finite != 0) & (broken == 0)
        if SPECIALS:
            approved = approved & (among(token, special_ptr, specials, SPECIALS) == 0)
            approved = approved & (among(choice, special_ptr, specials, SPECIALS) == 0)
        tl.store(out_ptr + i, approved)
    else:
        tl.store(out_ptr + i, tl.where(finite != 0, score, float("nan")))


def _launch(
    judge: Weights, hidden: Tensor, logits: Tensor, choice: Tensor | None, at: Tensor | None, drafts: Tensor,
    out: Tensor, gamma: int, theta: float | Tensor, special: Tensor | None,
) -> Tensor:  # fmt: skip
    units = 0 if judge.inner_bias is None else len(judge.inner_bias)
    block_units = triton.next_power_of_2(units) if units else 1
    n, specials = drafts.numel(), 0 if special is None else len(special)
    approve = choice is None
    _judge[(n,)](
        hidden, logits, choice, at, drafts, judge.weight, judge.bias, judge.inner_weight, judge.inner_bias,
        theta if isinstance(theta, Tensor) else None, special, out, hidden.stride(0), logits.stride(0),
        hidden.shape[1], logits.shape[1], units, 0.0 if isinstance(theta, Tensor) else theta, specials,
        judge.limit, LOWEST=judge.lowest, GAMMA=gamma, MARGIN=judge.margin, LIMITED=judge.limit < math.inf,
        MLP=units > 0, APPROVE=approve,
        THETAS=isinstance(theta, Tensor), BLOCK=max(16, TILE // block_units) if units else LINEAR_BLOCK,
        UNITS=block_units, SPECIALS=triton.next_power_of_2(specials) if specials else 0, ROW_BLOCK=ROW_BLOCK,
        num_warps=ROW_WARPS if approve else 4,
    )  # fmt: skip
    return out


def scores(judge: Weights, hidden: Tensor, logits: Tensor, choice: Tensor, drafts: Tensor) -> Tensor:
    """`judge_score.scores`."""
    out = torch.empty(drafts.shape, dtype=torch.float32, device=drafts.device)
    flat = hidden.flatten(0, 1), logits.flatten(0, 1), choice
    return _launch(judge, *flat, None, drafts.contiguous(), out, drafts.shape[1], 0.0, None)


def approvals(
    judge: Weights, hidden: Tensor, logits: Tensor, at: Tensor, drafts: Tensor, theta: float | Tensor, special: Tensor
) -> Tensor:
    """`judge_score.approvals`."""
    out = torch.empty(len(drafts), dtype=torch.bool, device=drafts.device)
    return _launch(judge, hidden, logits, None, at, drafts, out, 0, theta, special)
