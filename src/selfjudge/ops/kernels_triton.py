"""The operations of this package as kernels, and parts of them for the kernels of vLLM's worker.
Argmax: a row is split over many programs; inside another kernel, one program reads it all. The judge's score: one
program for each draft reads its state once and computes P(acceptable). Row i of the flat logits predicts a token that
row i + 1 of the states has read. `worth_taking`: a program for each block walks it from the right."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 2048  # logits per program
JUDGE_BLOCK = 1024  # columns of a state that a program holds at a time

ROW_BLOCK, ROW_WARPS = 8192, 16  # logits that a program reads at a time where it reads a whole row


@triton.jit
def _chunk_argmax(x_ptr, best_ptr, index_ptr, bad_ptr, size, stride, chunks, BLOCK: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + at, mask=at < size, other=-float("inf")).to(tl.float32)
    nan, infinite = x != x, x == float("inf")
    x = tl.where(nan, -float("inf"), tl.where(infinite, 1.0e30, x))
    best, where = tl.max(x, 0, return_indices=True)
    bad = tl.max((nan | infinite).to(tl.int32), 0)
    tl.store(best_ptr + row * chunks + chunk, best)
    tl.store(index_ptr + row * chunks + chunk, (chunk * BLOCK + where).to(tl.int64))
    tl.store(bad_ptr + row * chunks + chunk, bad.to(tl.int8))


@triton.jit
def _row_argmax(best_ptr, index_ptr, bad_ptr, choice_ptr, odd_ptr, chunks, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    best = tl.load(best_ptr + row * chunks + at, mask=at < chunks, other=-float("inf"))
    _, where = tl.max(best, 0, return_indices=True)
    bad = tl.max(tl.load(bad_ptr + row * chunks + at, mask=at < chunks, other=0).to(tl.int32), 0)
    tl.store(choice_ptr + row, tl.load(index_ptr + row * chunks + where))
    tl.store(odd_ptr + row, bad != 0)


@triton.jit
def row_argmax(x_ptr, size, BLOCK: tl.constexpr):
    """`argmax_checked` of one row inside a program: the most likely token, its logit, whether the row is non-finite."""
    column = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], -float("inf"), tl.float32)  # of each column of blocks, and where it was first seen
    index = tl.zeros([BLOCK], tl.int32)
    bad = tl.zeros([BLOCK], tl.int32)
    for first in range(0, size, BLOCK):
        at = first + column
        x = tl.load(x_ptr + at, mask=at < size, other=-float("inf")).to(tl.float32)
        nan, infinite = x != x, x == float("inf")
        x = tl.where(nan, -float("inf"), tl.where(infinite, 1.0e30, x))
        index = tl.where(x > best, at, index)
        best = tl.where(x > best, x, best)
        bad = bad | (nan | infinite).to(tl.int32)
    most = tl.max(best, 0)
    choice = tl.min(tl.where(best == most, index, size), 0).to(tl.int64)
    return choice, most, tl.max(bad, 0) != 0


def split_argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """`argmax_checked` as two kernels: the best of every chunk, then the best of those."""
    flat = logits.reshape(-1, logits.shape[-1])
    rows, size = flat.shape
    chunks = triton.cdiv(size, CHUNK)
    best = torch.empty(rows, chunks, dtype=torch.float32, device=flat.device)
    index = torch.empty(rows, chunks, dtype=torch.int64, device=flat.device)
    bad_chunk = torch.empty(rows, chunks, dtype=torch.int8, device=flat.device)
    choice = torch.empty(rows, dtype=torch.int64, device=flat.device)
    odd = torch.empty(rows, dtype=torch.bool, device=flat.device)
    _chunk_argmax[(rows, chunks)](flat, best, index, bad_chunk, size, flat.stride(0), chunks, BLOCK=CHUNK, num_warps=4)
    _row_argmax[(rows,)](best, index, bad_chunk, choice, odd, chunks, BLOCK=triton.next_power_of_2(chunks), num_warps=1)
    return choice.view(logits.shape[:-1]), odd.view(logits.shape[:-1])


class JudgeWeights(NamedTuple):
    """What the kernel reads of a judge."""

    weight: Tensor
    bias: Tensor
    constants: dict[str, Any]
    """Of `draft_score`: least margin; whether it reads margin and previous state, in columns after the state; the score
    is 0 where the margin is below −limit."""

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor, features: str, lowest: float, limit: float | None) -> JudgeWeights:
        reads = {"MARGIN": "margin" in features, "PREVIOUS": "previous" in features}
        return cls(weight, bias, reads | {"LOWEST": lowest, "LIMIT": limit, "BLOCK": JUDGE_BLOCK})


@triton.jit
def draft_score(
    state, previous, margin, weight_ptr, bias_ptr, hidden, LOWEST: tl.constexpr, MARGIN: tl.constexpr,
    PREVIOUS: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """P(acceptable) of a draft from the state at it, the one before it and log p(d) − log p(most likely): NaN where a
    state that is read is non-finite, 0 beyond the judge's limit of that margin."""
    beyond = False
    if LIMIT is not None:
        beyond = margin < -LIMIT
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
            h = tl.load(previous + first + column, mask=inside, other=0.0).to(tl.float32)
            finite = finite & tl.min((tl.abs(h) < float("inf")).to(tl.int32), 0)
            sums += h * tl.load(weight_ptr + hidden + MARGIN + first + column, mask=inside, other=0.0)
    x = tl.sum(sums, 0)
    if MARGIN:
        x += margin * tl.load(weight_ptr + hidden)
    score = tl.sigmoid(x + tl.load(bias_ptr))
    if LIMIT is not None:
        score = tl.where(beyond, 0.0, score)
    return tl.where(finite != 0, score, float("nan"))


@triton.jit(do_not_specialize=("gamma",))
def _scores(
    hidden_ptr, logit_ptr, choice_ptr, draft_ptr, weight_ptr, bias_ptr, out_ptr, hidden_step, logit_step, hidden, gamma,
    LOWEST: tl.constexpr, MARGIN: tl.constexpr, PREVIOUS: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    row = (i + i // gamma).to(tl.int64)  # blocks have γ drafts and one row more
    margin = 0.0
    if MARGIN or LIMIT is not None:
        logits, token = logit_ptr + row * logit_step, tl.load(draft_ptr + i)
        best = tl.load(logits + tl.load(choice_ptr + row)).to(tl.float32)
        margin = tl.load(logits + token).to(tl.float32) - best  # Δ log p = Δ logit
    previous = hidden_ptr + row * hidden_step
    score = draft_score(
        previous + hidden_step, previous, margin, weight_ptr, bias_ptr, hidden, LOWEST, MARGIN, PREVIOUS, LIMIT,
        BLOCK,
    )  # fmt: skip
    tl.store(out_ptr + i, score)


def draft_scores(judge: JudgeWeights, hidden: Tensor, logits: Tensor, choice: Tensor, drafts: Tensor) -> Tensor:
    """[B, γ] P(acceptable) of drafts [B, γ]; NaN where the state is non-finite.
    States [B, γ+1, H]; logits [B, γ+1, V] and their most likely tokens [B, γ+1]."""
    out = torch.empty(drafts.shape, dtype=torch.float32, device=drafts.device)
    hidden, logits = hidden.flatten(0, 1), logits.flatten(0, 1)
    _scores[(drafts.numel(),)](
        hidden, logits, choice, drafts.contiguous(), judge.weight, judge.bias, out, hidden.stride(0), logits.stride(0),
        hidden.shape[1], drafts.shape[1], num_warps=4, **judge.constants,
    )  # fmt: skip
    return out


@triton.jit
def scan(harm, aligned, worth, matching, price, window):
    """`worth_taking` of one draft, from what the drafts after it are worth and how many of them match in a row."""
    taken = (worth > harm) & (matching >= window)
    longer = price + worth - tl.where(aligned, 0.0, harm)
    return taken, tl.where(aligned | taken, longer, price), tl.where(aligned, matching + 1, 0)


@triton.jit(do_not_specialize=("gamma",))
def _scan(
    harm_ptr, aligned_ptr, first_ptr, count_ptr, price_ptr, window_ptr, out_ptr, gamma, price, FLAT: tl.constexpr,
    OWN: tl.constexpr,
):  # fmt: skip
    """With FLAT blocks have their own first row and number of drafts, with OWN their own price and window."""
    block = tl.program_id(0)
    first, count, window = block * gamma, gamma, 0
    if FLAT:
        first, count = tl.load(first_ptr + block), tl.load(count_ptr + block)
    if OWN:
        price, window = tl.load(price_ptr + block), tl.load(window_ptr + block)
    worth = price  # U_{γ+1} = π
    matching = 0  # drafts in a row that match, after this one
    for back in range(count):
        at = first + count - 1 - back
        aligned = tl.load(aligned_ptr + at) != 0
        taken, worth, matching = scan(tl.load(harm_ptr + at), aligned, worth, matching, price, window)
        tl.store(out_ptr + at, taken)


def block_scan(harm: Tensor, aligned: Tensor, price: float | Tensor, window: Tensor | None = None) -> Tensor:
    """`worth_taking`."""
    out = torch.empty_like(aligned, memory_format=torch.contiguous_format)
    blocks, gamma = harm.shape
    if isinstance(price, Tensor):
        assert window is not None
        rows, price, own = (price.contiguous(), window.contiguous()), 0.0, True
    else:
        rows, own = (None, None), False
    _scan[(blocks,)](
        harm.contiguous(), aligned.contiguous(), None, None, *rows, out, gamma, price, FLAT=False, OWN=own, num_warps=1
    )  # fmt: skip
    return out


def flat_scan(harm: Tensor, aligned: Tensor, first: Tensor, counts: Tensor, price: Tensor, window: Tensor) -> Tensor:
    """[n] `worth_taking` of blocks one after another; first row, drafts, price and window of each block are [R]."""
    out = torch.empty_like(aligned, dtype=torch.bool)
    _scan[(len(counts),)](
        harm, aligned, first, counts, price, window, out, 0, 0.0, FLAT=True, OWN=True, num_warps=1
    )  # fmt: skip
    return out
