"""The judge's score as one kernel: one program for each draft reads its state once and computes P(acceptable).

Rows are flat: row i of the logits predicts a token that row i + 1 of the states has read.
vLLM's worker uses parts of it, too."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # columns that a program holds at a time


class JudgeWeights(NamedTuple):
    """What the kernel reads of a judge."""

    weight: Tensor
    bias: Tensor
    limit: float  # the score is 0 where the margin is below −limit; inf for none
    constants: dict[str, Any]
    """Of `draft_score`: the least margin, and whether it reads the margin and the state at the token before, which
    are the columns after the state at the draft."""

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor, features: str, lowest: float, limit: float | None) -> JudgeWeights:
        reads = {"MARGIN": "margin" in features, "PREVIOUS": "previous" in features}
        constants = {"LOWEST": lowest, "LIMITED": limit is not None, "BLOCK": BLOCK}
        return cls(weight, bias, math.inf if limit is None else limit, reads | constants)


@triton.jit
def among(token, special_ptr, specials, SPECIALS: tl.constexpr):
    """Whether the token is one of the special ones."""
    at = tl.arange(0, SPECIALS)
    ids = tl.load(special_ptr + at, mask=at < specials, other=-1)
    return tl.max((ids == token).to(tl.int32), 0) != 0


@triton.jit
def draft_score(
    state, step, margin, weight_ptr, bias_ptr, hidden, limit, LOWEST: tl.constexpr, MARGIN: tl.constexpr,
    PREVIOUS: tl.constexpr, LIMITED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """P(acceptable) of a draft from the state at it, log p(d) − log p(most likely) and the state a `step` before: NaN
    where a state that is read is non-finite, 0 beyond the judge's limit of that margin."""
    beyond = False
    if LIMITED:
        beyond = margin < -limit
    if MARGIN:
        margin = tl.where(margin < LOWEST, LOWEST, margin)
    column = tl.arange(0, BLOCK)
    finite = 1
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


@triton.jit(do_not_specialize=("gamma",))
def _scores(
    hidden_ptr, logit_ptr, choice_ptr, draft_ptr, weight_ptr, bias_ptr, out_ptr, hidden_step, logit_step, hidden, limit,
    gamma, LOWEST: tl.constexpr, MARGIN: tl.constexpr, PREVIOUS: tl.constexpr, LIMITED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    row = (i + i // gamma).to(tl.int64)  # blocks have γ drafts and one row more
    margin = 0.0
    if MARGIN or LIMITED:
        logits, token = logit_ptr + row * logit_step, tl.load(draft_ptr + i)
        best = tl.load(logits + tl.load(choice_ptr + row)).to(tl.float32)
        margin = tl.load(logits + token).to(tl.float32) - best  # Δ log p = Δ logit
    score = draft_score(
        hidden_ptr + (row + 1) * hidden_step, hidden_step, margin, weight_ptr, bias_ptr, hidden, limit, LOWEST, MARGIN,
        PREVIOUS, LIMITED, BLOCK,
    )  # fmt: skip
    tl.store(out_ptr + i, score)


def draft_scores(judge: JudgeWeights, hidden: Tensor, logits: Tensor, choice: Tensor, drafts: Tensor) -> Tensor:
    """[B, γ] P(acceptable) of the drafts of blocks; NaN where the state is non-finite.

    States [B, γ+1, H], logits [B, γ+1, V], their most likely tokens [B, γ+1], drafts [B, γ]."""
    out = torch.empty(drafts.shape, dtype=torch.float32, device=drafts.device)
    hidden, logits = hidden.flatten(0, 1), logits.flatten(0, 1)
    _scores[(drafts.numel(),)](
        hidden, logits, choice, drafts.contiguous(), judge.weight, judge.bias, out, hidden.stride(0), logits.stride(0),
        hidden.shape[1], judge.limit, drafts.shape[1], num_warps=4, **judge.constants,
    )  # fmt: skip
    return out
