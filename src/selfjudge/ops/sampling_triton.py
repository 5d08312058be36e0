"""Speculative sampling as kernels: drafts, their acceptance, the token after them. A program reads a whole row, and
returns at once where the row is greedy (temperature 0), since a captured cycle serves every mix of rows.
Draw, acceptance and residual take q from the same logits by the same functions: were it another q, the tokens would not
have the target's distribution. What the draft does not know has q = 0."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfjudge.ops.kernels_triton import ROW_BLOCK, ROW_WARPS
from selfjudge.types import Block


@triton.jit
def _load(x_ptr, at, size):
    """Logits of a row as `replace_non_finite` leaves them, −inf outside of it; a row without a finite one stays."""
    x = tl.load(x_ptr + at, mask=(at >= 0) & (at < size), other=-float("inf")).to(tl.float32)
    return tl.where(x != x, -float("inf"), tl.where(x == float("inf"), 1.0e30, x))


@triton.jit
def _weigh(x_ptr, at, size, temperature, most):
    """exp((x − most)/temperature), which softmax normalises; in a row without a finite logit all weigh 1."""
    weights = tl.exp((_load(x_ptr, at, size) - most) / temperature)
    return tl.where(most == -float("inf"), ((at >= 0) & (at < size)).to(tl.float32), weights)


@triton.jit
def _sum_blocks(x_ptr, size, temperature, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """The largest logit of a row, and the sums of `_weigh` over its blocks."""
    block = tl.arange(0, BLOCKS)
    tops, sums = tl.full([BLOCKS], -float("inf"), tl.float32), tl.zeros([BLOCKS], tl.float32)
    for i in range(tl.cdiv(size, BLOCK)):
        x = _load(x_ptr, i * BLOCK + tl.arange(0, BLOCK), size)
        top = tl.max(x, 0)
        weights = tl.exp((x - tl.where(top == -float("inf"), 0.0, top)) / temperature)
        tops, sums = tl.where(block == i, top, tops), tl.where(block == i, tl.sum(weights, 0), sums)
    most = tl.max(tops, 0)
    inside = tl.minimum(tl.maximum(size - block * BLOCK, 0), BLOCK).to(tl.float32)
    return most, tl.where(most == -float("inf"), inside, sums * tl.exp((tops - most) / temperature))


@triton.jit
def _find(weights, point, SIZE: tl.constexpr):
    """The first weight where the cumulative sum exceeds the point, and the sum before it; never a weight of 0."""
    at = tl.arange(0, SIZE)
    first = tl.min(tl.where((tl.cumsum(weights, 0) > point) & (weights > 0), at, SIZE), 0)
    first = tl.minimum(first, tl.max(tl.where(weights > 0, at, 0), 0))
    return first, tl.sum(tl.where(at < first, weights, 0.0), 0)


@triton.jit
def _residual(p_ptr, q_ptr, place_ptr, at, p_size, q_size, temperature, p_most, q_most, p_total, q_total):
    """max(0, p − q) of tokens; p where `q_size` is 0."""
    place = at
    if place_ptr is not None:
        place = tl.load(place_ptr + at, mask=at < p_size, other=-1)
    p = _weigh(p_ptr, at, p_size, temperature, p_most) / p_total
    return tl.maximum(p - _weigh(q_ptr, place, q_size, temperature, q_most) / q_total, 0.0)


@triton.jit(do_not_specialize=("gamma",))
def _sample(
    p_ptr, q_ptr, place_ptr, temperature_ptr, uniform_ptr, draft_ptr, limit_ptr, aligned_ptr, n_ptr, token_ptr, gamma,
    p_size, q_size, p_row, p_step, q_row, q_step, temperature_row, uniform_row, FOLLOW: tl.constexpr,
    BLOCK: tl.constexpr, P_BLOCKS: tl.constexpr, Q_BLOCKS: tl.constexpr,
):  # fmt: skip
    """With FOLLOW the token after n drafts of a row, else whether draft n is accepted."""
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperature_ptr + row * temperature_row)
    if temperature > 0:
        if FOLLOW:
            n = tl.load(n_ptr + row)
            drafted = gamma
            if limit_ptr is not None:
                drafted = tl.load(limit_ptr + row)
            # the bonus row has no q; and where alignment accepts but the judge rejects, p itself is the correction
            rejected = tl.load(aligned_ptr + row * gamma + n, mask=n < drafted, other=1) == 0
            q_size = tl.where(rejected, q_size, 0)
        p_ptr, q_ptr = p_ptr + row * p_row + n * p_step, q_ptr + row * q_row + n * q_step
        p_most, p_sums = _sum_blocks(p_ptr, p_size, temperature, BLOCK, P_BLOCKS)
        q_most, q_sums = _sum_blocks(q_ptr, q_size, temperature, BLOCK, Q_BLOCKS)
        p_total, q_total = tl.sum(p_sums, 0), tl.where(q_size > 0, tl.sum(q_sums, 0), 1.0)
        if FOLLOW:
            column, block, sums = tl.arange(0, BLOCK), tl.arange(0, P_BLOCKS), tl.zeros([P_BLOCKS], tl.float32)
            for i in range(tl.cdiv(p_size, BLOCK)):
                left = _residual(
                    p_ptr, q_ptr, place_ptr, i * BLOCK + column, p_size, q_size, temperature, p_most, q_most, p_total,
                    q_total,
                )  # fmt: skip
                sums = tl.where(block == i, tl.sum(left, 0), sums)
            some = tl.sum(sums, 0) > 0
            sums, q_size = tl.where(some, sums, p_sums / p_total), tl.where(some, q_size, 0)
            total = tl.sum(sums, 0)
            point = tl.minimum(tl.load(uniform_ptr + row * uniform_row) * total, total * (1 - 1e-6))  # as `sample`
            first, before = _find(sums, point, P_BLOCKS)
            left = _residual(
                p_ptr, q_ptr, place_ptr, first * BLOCK + column, p_size, q_size, temperature, p_most, q_most, p_total,
                q_total,
            )  # fmt: skip
            token, _ = _find(left, point - before, BLOCK)
            tl.store(token_ptr + row, (first * BLOCK + token).to(tl.int64))
        else:
            token = tl.load(draft_ptr + row * gamma + n)
            place = token
            if place_ptr is not None:
                place = tl.load(place_ptr + token)
            p = _weigh(p_ptr, token, p_size, temperature, p_most) / p_total
            q = _weigh(q_ptr, place, q_size, temperature, q_most) / q_total
            u = tl.load(uniform_ptr + row * uniform_row + n)
            tl.store(aligned_ptr + row * gamma + n, u * q < p)  # accept if u < p/q


def sample_rows(
    block: Block, logits: Tensor, temperature: Tensor, aligned: Tensor, n: Tensor | None, tokens: Tensor | None
) -> None:
    """Write what rows with a temperature [B] above 0 sample, by logits [B, γ+1, V]: without n and tokens to aligned
    [B, γ], which drafts are accepted; else to tokens [B], what follows n [B] of them: of the residual, or of p."""
    follow, q = n is not None, block.draft_logits if block.gamma else logits  # without drafts it is not read
    uniforms, sizes = block.uniforms[:, -1 if follow else 0 :], (logits.shape[-1], q.shape[-1])
    grid = len(temperature), 1 if follow else block.gamma
    if grid[1]:
        with torch.cuda.device(logits.get_device()):  # kernels are launched on the current device
            _sample[grid](
                logits, q, block.draft_places, temperature, uniforms, block.draft_tokens, block.limits, aligned, n,
                tokens, block.gamma, *sizes, *logits.stride()[:2], *q.stride()[:2], temperature.stride(0),
                uniforms.stride(0), follow, ROW_BLOCK,
                *(triton.next_power_of_2(triton.cdiv(size, ROW_BLOCK)) for size in sizes), num_warps=ROW_WARPS,
            )  # fmt: skip
