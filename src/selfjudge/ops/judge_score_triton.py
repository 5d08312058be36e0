"""The judge's score as one kernel: one program for each draft reads its state once and computes P(acceptable).

Rows are flat: row i of the logits predicts a token that row i + 1 of the states has read.
vLLM's worker uses parts of it, too.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LINEAR_BLOCK, TILE = 1024, 8192  # that a program holds at a time: columns of a linear judge, weights of an MLP


class JudgeWeights(NamedTuple):
    """What the kernel reads of a judge; the inner tensors are None for a linear judge."""

    weight: Tensor
    bias: Tensor
    inner_weight: Tensor | None
    inner_bias: Tensor | None
    margin: bool
    """Whether it reads log p(d) − log p(most likely), in the column after the state at the draft."""
    previous: bool
    """Whether it reads the state at the token before, in the last columns."""
    lowest: float
    """Lower bound of that margin."""
    limit: float
    """The score is 0 where the margin is below −limit; inf for none."""


@triton.jit
def among(token, special_ptr, specials, SPECIALS: tl.constexpr):
    """Whether the token is one of the special ones."""
    at = tl.arange(0, SPECIALS)
    ids = tl.load(special_ptr + at, mask=at < specials, other=-1)
    return tl.max((ids == token).to(tl.int32), 0) != 0


@triton.jit
def draft_score(
    state, step, margin, weight_ptr, bias_ptr, inner_ptr, inner_bias_ptr, hidden, units, limit, LOWEST: tl.constexpr,
    MARGIN: tl.constexpr, PREVIOUS: tl.constexpr, LIMITED: tl.constexpr, MLP: tl.constexpr, BLOCK: tl.constexpr,
    UNITS: tl.constexpr,
):  # fmt: skip
    """P(acceptable) of a draft from the state at it, log p(d) − log p(most likely) and the state a `step` before: NaN
    where a state that is read is non-finite, 0 beyond the judge's limit of that margin."""
    beyond = False
    if LIMITED:
        beyond = margin < -limit
    if MARGIN:
        margin = tl.where(margin < LOWEST, LOWEST, margin)
    width = hidden * (1 + PREVIOUS) + MARGIN
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
            if PREVIOUS:
                h = tl.load(state - step + first + column, mask=inside, other=0.0).to(tl.float32)
                finite = finite & tl.min((tl.abs(h) < float("inf")).to(tl.int32), 0)
                w = tl.load(tile + hidden + MARGIN, mask=known[:, None] & inside[None, :], other=0.0)
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
            if PREVIOUS:
                h = tl.load(state - step + first + column, mask=inside, other=0.0).to(tl.float32)
                finite = finite & tl.min((tl.abs(h) < float("inf")).to(tl.int32), 0)
                sums += h * tl.load(weight_ptr + hidden + MARGIN + first + column, mask=inside, other=0.0)
        x = tl.sum(sums, 0)
        if MARGIN:
            x += margin * tl.load(weight_ptr + hidden)
    score = tl.sigmoid(x + tl.load(bias_ptr))
    if LIMITED:
        score = tl.where(beyond, 0.0, score)
    return tl.where(finite != 0, score, float("nan"))


@triton.jit
def _scores(
    hidden_ptr, logit_ptr, choice_ptr, draft_ptr, weight_ptr, bias_ptr, inner_ptr, inner_bias_ptr, out_ptr, hidden_step,
    logit_step, hidden, units, limit, GAMMA: tl.constexpr, LOWEST: tl.constexpr, MARGIN: tl.constexpr,
    PREVIOUS: tl.constexpr, LIMITED: tl.constexpr, MLP: tl.constexpr, BLOCK: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    row = (i // GAMMA * (GAMMA + 1) + i % GAMMA).to(tl.int64)  # blocks have GAMMA drafts and one row more
    margin = 0.0
    if MARGIN or LIMITED:
        logits, token = logit_ptr + row * logit_step, tl.load(draft_ptr + i)
        best = tl.load(logits + tl.load(choice_ptr + row)).to(tl.float32)
        margin = tl.load(logits + token).to(tl.float32) - best  # Δ log p = Δ logit
    score = draft_score(
        hidden_ptr + (row + 1) * hidden_step, hidden_step, margin, weight_ptr, bias_ptr, inner_ptr, inner_bias_ptr,
        hidden, units, limit, LOWEST, MARGIN, PREVIOUS, LIMITED, MLP, BLOCK, UNITS,
    )  # fmt: skip
    tl.store(out_ptr + i, score)


def shape_of(judge: JudgeWeights) -> tuple[int, dict[str, Any]]:
    """The inner units of a judge, and the constants of `draft_score`."""
    units = 0 if judge.inner_bias is None else len(judge.inner_bias)
    padded = triton.next_power_of_2(units) if units else 1
    block = max(16, TILE // padded) if units else LINEAR_BLOCK
    reads = {"MARGIN": judge.margin, "PREVIOUS": judge.previous}
    constants = {"LOWEST": judge.lowest, "LIMITED": judge.limit < math.inf, "MLP": units > 0}
    return units, reads | constants | {"BLOCK": block, "UNITS": padded}


def draft_scores(judge: JudgeWeights, hidden: Tensor, logits: Tensor, choice: Tensor, drafts: Tensor) -> Tensor:
    """[B, γ] P(acceptable) of the drafts of blocks; NaN where the state is non-finite.

    States [B, γ+1, H], logits [B, γ+1, V], their most likely tokens [B, γ+1], drafts [B, γ].
    """
    out = torch.empty(drafts.shape, dtype=torch.float32, device=drafts.device)
    hidden, logits = hidden.flatten(0, 1), logits.flatten(0, 1)
    units, constants = shape_of(judge)
    _scores[(drafts.numel(),)](
        hidden, logits, choice, drafts.contiguous(), judge.weight, judge.bias, judge.inner_weight, judge.inner_bias,
        out, hidden.stride(0), logits.stride(0), hidden.shape[1], units, judge.limit,
        GAMMA=drafts.shape[1], num_warps=4, **constants,
    )  # fmt: skip
    return out
