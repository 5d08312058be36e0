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
    for i in range(0, tl.cdiv(size, BLOCK)):
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
def _find_block(sums, uniform, BLOCKS: tl.constexpr):
    """As `sample`: the block in which a token lies, and how much of the block is before that token."""
    total = tl.sum(sums, 0)
    point = tl.minimum(uniform * total, total * (1 - 1e-6))
    block, before = _find(sums, point, BLOCKS)
    return block, point - before


@triton.jit
def _draw(
    x_ptr, temperature_ptr, uniform_ptr, token_ptr, size, x_row, temperature_row, uniform_row, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row * temperature_row)
    if temperature > 0:
        logits = x_ptr + row * x_row
        most, sums = _sum_blocks(logits, size, temperature, BLOCK, BLOCKS)
        block, point = _find_block(sums, tl.load(uniform_ptr + row * uniform_row), BLOCKS)
        weights = _weigh(logits, block * BLOCK + tl.arange(0, BLOCK), size, temperature, most)
        token, _ = _find(weights, point, BLOCK)
        tl.store(token_ptr + row, (block * BLOCK + token).to(tl.int64))


@triton.jit
def _probability(x_ptr, at, size, temperature, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    most, sums = _sum_blocks(x_ptr, size, temperature, BLOCK, BLOCKS)
    return _weigh(x_ptr, at, size, temperature, most) / tl.sum(sums, 0)


@triton.jit(do_not_specialize=("gamma",))
def _accept(
    p_ptr, q_ptr, place_ptr, temperature_ptr, draft_ptr, uniform_ptr, out_ptr, gamma, p_size, q_size, p_row, p_step,
    q_row, q_step, temperature_row, uniform_row, MAPPED: tl.constexpr, BLOCK: tl.constexpr, P_BLOCKS: tl.constexpr,
    Q_BLOCKS: tl.constexpr,
):  # fmt: skip
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row * temperature_row)
    if temperature > 0:
        token = tl.load(draft_ptr + row * gamma + i)
        p = _probability(p_ptr + row * p_row + i * p_step, token, p_size, temperature, BLOCK, P_BLOCKS)
        place = tl.load(place_ptr + token) if MAPPED else token
        q = _probability(q_ptr + row * q_row + i * q_step, place, q_size, temperature, BLOCK, Q_BLOCKS)
        tl.store(out_ptr + row * gamma + i, tl.load(uniform_ptr + row * uniform_row + i) * q < p)  # accept if u < p/q


@triton.jit
def _residual(
    p_ptr, q_ptr, place_ptr, at, p_size, q_size, temperature, p_most, q_most, p_total, q_total, MAPPED: tl.constexpr
):  # fmt: skip
    """max(0, p − q) of tokens; p where `q_size` is 0."""
    place = tl.load(place_ptr + at, mask=at < p_size, other=-1) if MAPPED else at
    p = _weigh(p_ptr, at, p_size, temperature, p_most) / p_total
    return tl.maximum(p - _weigh(q_ptr, place, q_size, temperature, q_most) / q_total, 0.0)


@triton.jit(do_not_specialize=("gamma",))
def _follow(
    p_ptr, q_ptr, place_ptr, temperature_ptr, aligned_ptr, limit_ptr, n_ptr, uniform_ptr, token_ptr, gamma, p_size,
    q_size, p_row, p_step, q_row, q_step, temperature_row, uniform_row, MAPPED: tl.constexpr, LIMITED: tl.constexpr,
    BLOCK: tl.constexpr, P_BLOCKS: tl.constexpr, Q_BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row * temperature_row)
    if temperature > 0:
        n = tl.load(n_ptr + row)
        drafted = tl.load(limit_ptr + row) if LIMITED else gamma
        # the bonus row has no q; and where alignment accepts but the judge rejects, p itself is the correction
        rejected = tl.load(aligned_ptr + row * gamma + n, mask=n < drafted, other=1) == 0
        p, q = p_ptr + row * p_row + n * p_step, q_ptr + row * q_row + n * q_step
        p_most, p_sums = _sum_blocks(p, p_size, temperature, BLOCK, P_BLOCKS)
        p_total = tl.sum(p_sums, 0)
        q_size = tl.where(rejected, q_size, 0)
        q_most, q_sums = _sum_blocks(q, q_size, temperature, BLOCK, Q_BLOCKS)
        q_total = tl.where(rejected, tl.sum(q_sums, 0), 1.0)
        column, block = tl.arange(0, BLOCK), tl.arange(0, P_BLOCKS)
        sums = tl.zeros([P_BLOCKS], tl.float32)
        for i in range(0, tl.cdiv(p_size, BLOCK)):
            left = _residual(
                p, q, place_ptr, i * BLOCK + column, p_size, q_size, temperature, p_most, q_most, p_total, q_total,
                MAPPED,
            )  # fmt: skip
            sums = tl.where(block == i, tl.sum(left, 0), sums)
        some = tl.sum(sums, 0) > 0
        sums, q_size = tl.where(some, sums, p_sums / p_total), tl.where(some, q_size, 0)
        first, point = _find_block(sums, tl.load(uniform_ptr + row * uniform_row), P_BLOCKS)
        left = _residual(
            p, q, place_ptr, first * BLOCK + column, p_size, q_size, temperature, p_most, q_most, p_total, q_total,
            MAPPED,
        )  # fmt: skip
        token, _ = _find(left, point, BLOCK)
        tl.store(token_ptr + row, (first * BLOCK + token).to(tl.int64))


def _split(*sizes: int) -> list[int]:
    """Into how many blocks rows of these sizes are split."""
    return [triton.next_power_of_2(triton.cdiv(size, ROW_BLOCK)) for size in sizes]


def draw_rows(logits: Tensor, temperature: Tensor, uniforms: Tensor, tokens: Tensor) -> None:
    """Write to tokens [B] draws from softmax(logits [B, V]/temperature [B]) of the rows that sample."""
    _draw[(len(logits),)](
        logits, temperature, uniforms, tokens, logits.shape[1], logits.stride(0), temperature.stride(0),
        uniforms.stride(0), ROW_BLOCK, *_split(logits.shape[1]), num_warps=ROW_WARPS,
    )  # fmt: skip


def accept_rows(block: Block, logits: Tensor, temperature: Tensor, aligned: Tensor) -> None:
    """Write to aligned [B, γ] which drafts of the rows that sample are accepted, by logits [B, γ+1, V]."""
    if aligned.numel():
        q, sizes = block.draft_logits, (logits.shape[-1], block.draft_logits.shape[-1])
        _accept[aligned.shape](
            logits, q, block.draft_places, temperature, block.draft_tokens, block.uniforms, aligned, block.gamma,
            *sizes, *logits.stride()[:2], *q.stride()[:2], temperature.stride(0), block.uniforms.stride(0),
            block.draft_places is not None, ROW_BLOCK, *_split(*sizes), num_warps=ROW_WARPS,
        )  # fmt: skip


def follow_rows(
    block: Block, logits: Tensor, temperature: Tensor, aligned: Tensor, n: Tensor, tokens: Tensor
) -> None:
    """Write to tokens [B] what follows n [B] accepted drafts in the rows that sample: of the residual, or of p."""
    q = block.draft_logits if block.gamma else logits  # without drafts it is not read
    sizes, uniforms = (logits.shape[-1], q.shape[-1]), block.uniforms[:, -1]
    _follow[(len(n),)](
        logits, q, block.draft_places, temperature, aligned, block.limits, n, uniforms, tokens, block.gamma, *sizes,
        *logits.stride()[:2], *q.stride()[:2], temperature.stride(0), uniforms.stride(0),
        block.draft_places is not None, block.limits is not None, ROW_BLOCK, *_split(*sizes), num_warps=ROW_WARPS,
    )  # fmt: skip
