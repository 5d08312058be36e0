"""The Triton programs of `kernels_triton`. With EARLY each loads its weights, then waits for the kernel before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl


def run_time(*names: str) -> Callable[[Callable[..., None]], Any]:
    """`triton.jit` for a kernel whose arguments of these names get no variants of their own; none is read as vector."""
    return triton.jit(do_not_specialize=names, do_not_specialize_on_alignment=names)


@triton.jit
def _wait(EARLY: tl.constexpr):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@run_time("token_ptr", "count_ptr", "length_ptr", "width")
def begin(
    token_ptr, count_ptr, length_ptr, table_ptr, x_ptr, slot_ptr, position_ptr, width, slots, vocabulary, hidden,
    COUNTS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    row, column = place // width, place % width  # in 32 bits, and before the wait
    place = place.to(tl.int64)
    _wait(EARLY)
    missing = width - tl.load(count_ptr + row) if COUNTS else 0
    position = tl.load(length_ptr + row) + column - missing
    position = tl.minimum(tl.maximum(position, 0), slots - 2)
    tl.store(slot_ptr + place, tl.where(column >= missing, position, slots - 1))
    tl.store(position_ptr + place, tl.where(column >= missing, position, 0))
    token = tl.minimum(tl.maximum(tl.load(token_ptr + place), 0), vocabulary - 1)
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + place * hidden + at, tl.load(table_ptr + token * hidden + at, at < hidden), at < hidden)


@triton.jit
def _weighted(wide, w, dtype: tl.constexpr):
    """Normed values times a weight: in float32 where the weight is, else in `dtype`."""
    return (wide * w).to(dtype) if w.dtype == tl.float32 else wide.to(dtype) * w


@triton.jit
def norm(
    x_ptr, part_ptr, after_ptr, w_ptr, y_ptr, hidden, step, epsilon, residual,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """With `after` the sum of the parts is normalised before x gets it, with `residual` it is scaled; or None."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < hidden
    if after_ptr is not None:
        after = tl.load(after_ptr + at, mask=inside, other=0.0)
    if w_ptr is not None:
        w = tl.load(w_ptr + at, mask=inside, other=0.0)
    _wait(EARLY)
    x = tl.load(x_ptr + row * hidden + at, mask=inside, other=0.0)
    if PARTS:
        more = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(PARTS):
            more += tl.load(part_ptr + i * step + row * hidden + at, mask=inside, other=0.0).to(tl.float32)
        more = more.to(x.dtype).to(tl.float32)
        if after_ptr is not None:
            scale = 1.0 / tl.sqrt(tl.sum(more * more, 0) / hidden + epsilon)
            more = _weighted(more * scale, after, x.dtype).to(tl.float32)
        if residual is not None:
            more = (more * residual).to(x.dtype).to(tl.float32)
        x = (x.to(tl.float32) + more).to(x.dtype)
        tl.store(x_ptr + row * hidden + at, x, mask=inside)
    if w_ptr is not None:
        wide = x.to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / hidden + epsilon)
        tl.store(y_ptr + row * hidden + at, _weighted(wide * scale, w, x.dtype), mask=inside)


@triton.jit
def whole_norms(
    qkv_ptr, q_norm_ptr, k_norm_ptr, out_ptr, queries, keys, step, epsilon, share,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: the queries, the keys or the values of one token, all heads; `share` of their columns are real."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    begin = tl.where(part == 0, 0, queries + (part - 1) * keys)
    count = tl.where(part == 0, queries, keys)
    at = tl.arange(0, BLOCK)
    inside = at < count
    place = token * (queries + 2 * keys) + begin + at
    _wait(EARLY)
    x = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(PARTS):
        x += tl.load(qkv_ptr + i * step + place, mask=inside, other=0.0).to(tl.float32)
    y = x.to(out_ptr.dtype.element_ty)
    if part < 2:
        wide = y.to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / (count * share) + epsilon)
        if part == 0:
            w = tl.load(q_norm_ptr + at, mask=inside, other=0.0)
        else:
            w = tl.load(k_norm_ptr + at, mask=inside, other=0.0)
        y = _weighted(wide * scale, w, out_ptr.dtype.element_ty)
    tl.store(out_ptr + place, y, mask=inside)


@run_time("rows")
def product(
    x_ptr, w_ptr, bias_ptr, out_ptr, rows, outputs, inputs,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPAN: tl.constexpr, BIAS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N outputs of all rows, over SPAN of the inputs."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    share = tl.program_id(1)
    k = share * SPAN + tl.arange(0, BLOCK_K)
    m = tl.arange(0, ROWS)
    real_n, real_m = n < outputs, m < rows
    w_at = w_ptr + n[:, None].to(tl.int64) * inputs + k[None, :]
    x_at = x_ptr + m[None, :] * inputs + k[:, None]
    w = tl.load(w_at, mask=real_n[:, None] & (k < inputs)[None, :], other=0.0)
    _wait(EARLY)
    x = tl.load(x_at, mask=real_m[None, :] & (k < inputs)[:, None], other=0.0)
    total = tl.dot(w, x)
    for start in range(BLOCK_K, SPAN, BLOCK_K):
        inside = k + start < inputs
        w = tl.load(w_at + start, mask=real_n[:, None] & inside[None, :], other=0.0)
        x = tl.load(x_at + start, mask=real_m[None, :] & inside[:, None], other=0.0)
        total = tl.dot(w, x, total)
    if BIAS and share == 0:
        total += tl.load(bias_ptr + n, mask=real_n, other=0.0).to(tl.float32)[:, None]
    out_at = out_ptr + (share * rows + m[None, :]) * outputs + n[:, None]
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=real_n[:, None] & real_m[None, :])


@triton.jit
def _slope(x, GELU: tl.constexpr):
    """x is multiplied with the logistic function of this: x for SiLU, 2 · √(2/π) · (x + 0.044715 x³) for GELU."""
    return 1.5957691216057308 * (x + 0.044715 * x * x * x) if GELU else x


@run_time("rows")
def gated(
    x_ptr, w_ptr, y_ptr, rows, inner, inputs,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GELU: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N outputs of all rows; gate and up lie `inner` rows apart in the weights."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m = tl.arange(0, ROWS)
    real_n, real_m = n < inner, m < rows
    gate_at = w_ptr + n[:, None].to(tl.int64) * inputs + k[None, :]
    up_at = gate_at + inner.to(tl.int64) * inputs
    x_at = x_ptr + m[None, :] * inputs + k[:, None]
    weights = real_n[:, None] & (k < inputs)[None, :]
    w1 = tl.load(gate_at, mask=weights, other=0.0)
    w2 = tl.load(up_at, mask=weights, other=0.0)
    _wait(EARLY)
    x = tl.load(x_at, mask=real_m[None, :] & (k < inputs)[:, None], other=0.0)
    gate, up = tl.dot(w1, x), tl.dot(w2, x)
    for start in range(BLOCK_K, inputs, BLOCK_K):
        inside = k + start < inputs
        weights = real_n[:, None] & inside[None, :]
        x = tl.load(x_at + start, mask=real_m[None, :] & inside[:, None], other=0.0)
        gate = tl.dot(tl.load(gate_at + start, mask=weights, other=0.0), x, gate)
        up = tl.dot(tl.load(up_at + start, mask=weights, other=0.0), x, up)
    y = gate / (1.0 + tl.exp(-_slope(gate, GELU))) * up
    out_at = y_ptr + m[None, :] * inner + n[:, None]
    tl.store(out_at, y.to(y_ptr.dtype.element_ty), mask=real_n[:, None] & real_m[None, :])


@run_time("slot_ptr", "position_ptr", "width")
def rotate(
    qkv_ptr, cos_ptr, sin_ptr, slot_ptr, position_ptr, q_norm_ptr, k_norm_ptr, q_ptr, k_ptr, v_ptr, width,
    slots, heads, kv, step, epsilon, columns,
    PARTS: tl.constexpr, DIM: tl.constexpr, NORMS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // width).to(tl.int64)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half: tl.constexpr = DIM // 2
    at = tl.arange(0, half)
    source = qkv_ptr + (token * (heads + 2 * kv) + head) * DIM
    _wait(EARLY)
    a = tl.zeros([half], tl.float32)
    b = tl.zeros([half], tl.float32)
    for i in tl.static_range(PARTS):
        a += tl.load(source + i * step + at).to(tl.float32)
        b += tl.load(source + i * step + half + at).to(tl.float32)
    a, b = a.to(q_ptr.dtype.element_ty), b.to(q_ptr.dtype.element_ty)
    slot = tl.load(slot_ptr + token)
    if head < heads + kv:
        if NORMS:  # of `columns` of a head: the others are zeros
            if head < heads:
                w1, w2 = tl.load(q_norm_ptr + at), tl.load(q_norm_ptr + half + at)
            else:
                w1, w2 = tl.load(k_norm_ptr + at), tl.load(k_norm_ptr + half + at)
            one, two = a.to(tl.float32), b.to(tl.float32)
            scale = 1.0 / tl.sqrt((tl.sum(one * one, 0) + tl.sum(two * two, 0)) / columns + epsilon)
            a = _weighted(one * scale, w1, q_ptr.dtype.element_ty)
            b = _weighted(two * scale, w2, q_ptr.dtype.element_ty)
        position = tl.load(position_ptr + token)
        c1 = tl.load(cos_ptr + position * DIM + at)
        s1 = tl.load(sin_ptr + position * DIM + at)
        c2 = tl.load(cos_ptr + position * DIM + half + at)
        s2 = tl.load(sin_ptr + position * DIM + half + at)
        first = (a.to(tl.float32) * c1 - b.to(tl.float32) * s1).to(a.dtype)
        second = (b.to(tl.float32) * c2 + a.to(tl.float32) * s2).to(a.dtype)
        if head < heads:
            target = q_ptr + (token * heads + head) * DIM
        else:
            target = k_ptr + ((row * kv + head - heads) * slots + slot) * DIM
        tl.store(target + at, first)
        tl.store(target + half + at, second)
    else:
        target = v_ptr + ((row * kv + head - heads - kv) * slots + slot) * DIM
        tl.store(target + at, a)
        tl.store(target + half + at, b)


@run_time("position_ptr", "width", "blocks", "queries", "splits", "window")
def attention(
    q_ptr, k_ptr, v_ptr, position_ptr, out_ptr, part_ptr, scale, width, slots, heads, kv, blocks, queries,
    splits, window, cap, GROUP: tl.constexpr, TOGETHER: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr, SPLIT: tl.constexpr, EXACT: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One program: `queries` tokens times TOGETHER heads of one row against its keys, online softmax.
    With SPLIT it reads one of `splits` shares of the keys; `combine` gets its unnormalised sum, mass and maximum."""
    row = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * TOGETHER
    share = tl.program_id(2) // blocks
    index = tl.arange(0, ROWS)
    token = (tl.program_id(2) % blocks) * queries + index // TOGETHER
    head = first_head + index % TOGETHER
    d = tl.arange(0, DIM)
    _wait(EARLY)
    first = row * width
    real = (index < queries * TOGETHER) & (token < width)
    position = tl.load(position_ptr + first + token, mask=real, other=-1)
    line = (first + token) * heads + head
    q = tl.load(q_ptr + line[:, None] * DIM + d[None, :], mask=real[:, None], other=0.0)
    base = (row * kv + first_head // GROUP) * slots * DIM
    most = tl.full([ROWS], -1.0e30, tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIM], tl.float32)
    last = tl.max(position, 0).to(tl.int32)
    begin, stop = 0, last + 1
    if WINDOW:  # blocks that no query sees are left out
        nearest = tl.min(tl.where(real, position, last), 0).to(tl.int32)
        begin = tl.maximum(nearest - window + 1, 0) // BLOCK * BLOCK
    if SPLIT:
        size = tl.cdiv(last + 1 - begin, splits * BLOCK) * BLOCK
        stop = tl.minimum(last + 1, begin + (share + 1) * size)
        begin = begin + share * size
    for start in range(begin, stop, BLOCK):
        s = start + tl.arange(0, BLOCK)
        inside = s <= last
        k = tl.load(k_ptr + base + s[None, :] * DIM + d[:, None], mask=inside[None, :], other=0.0)
        v = tl.load(v_ptr + base + s[:, None] * DIM + d[None, :], mask=inside[:, None], other=0.0)
        score = tl.dot(q, k, input_precision="ieee" if EXACT else "tf32") * scale
        if CAP:
            score = cap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 / cap * score)))
        score = tl.where(s[None, :] <= position[:, None], score, -float("inf"))
        if WINDOW:
            score = tl.where(s[None, :] > position[:, None] - window, score, -float("inf"))
        higher = tl.maximum(most, tl.max(score, 1))
        p = tl.exp(score - higher[:, None])
        shrink = tl.exp(most - higher)
        mass = mass * shrink + tl.sum(p, 1)
        mixed = mixed * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee" if EXACT else "tf32")
        most = higher
    if not SPLIT:
        mixed = mixed / tl.where(mass > 0, mass, 1.0)[:, None]
        tl.store(out_ptr + line[:, None] * DIM + d[None, :], mixed.to(out_ptr.dtype.element_ty), mask=real[:, None])
    else:
        place = (line * splits + share) * (DIM + 2)
        tl.store(part_ptr + place[:, None] + d[None, :], mixed, mask=real[:, None])
        tl.store(part_ptr + place + DIM, mass, mask=real)
        tl.store(part_ptr + place + DIM + 1, most, mask=real)


@run_time("splits")
def combine(part_ptr, out_ptr, splits, SHARES: tl.constexpr, DIM: tl.constexpr, EARLY: tl.constexpr):
    """One program: add up the shares of one token and head, `splits` of at most SHARES."""
    line = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, DIM)
    share = tl.arange(0, SHARES)
    real = share < splits
    place = part_ptr + (line * splits + share) * (DIM + 2)
    _wait(EARLY)
    mass = tl.load(place + DIM, mask=real, other=0.0)
    most = tl.load(place + DIM + 1, mask=real, other=-float("inf"))
    weight = tl.exp(most - tl.max(most, 0))
    parts = tl.load(place[:, None] + d[None, :], mask=real[:, None], other=0.0)
    mixed = tl.sum(parts * weight[:, None], 0) / tl.sum(mass * weight, 0)
    tl.store(out_ptr + line * DIM + d, mixed.to(out_ptr.dtype.element_ty))


@triton.jit
def gate(x_ptr, y_ptr, inner, BLOCK: tl.constexpr, GELU: tl.constexpr, EARLY: tl.constexpr):
    _wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < inner
    gate = tl.load(x_ptr + row * 2 * inner + at, mask=inside, other=0.0)
    up = tl.load(x_ptr + row * 2 * inner + inner + at, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    tl.store(y_ptr + row * inner + at, (wide / (1.0 + tl.exp(-_slope(wide, GELU)))).to(gate.dtype) * up, mask=inside)
