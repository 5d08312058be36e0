"""The steps between the matrix products as Triton kernels; their contracts are those of `cuda.Kernels`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfjudge.engine.cuda import Kernels


@triton.jit
def _norm(x_ptr, w_ptr, y_ptr, hidden, epsilon, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < hidden
    x = tl.load(x_ptr + row * hidden + at, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / hidden + epsilon)
    w = tl.load(w_ptr + at, mask=inside, other=0.0)
    tl.store(y_ptr + row * hidden + at, (wide * scale).to(x.dtype) * w, mask=inside)


@triton.jit
def _rotate(
    qkv_ptr, cos_ptr, sin_ptr, slot_ptr, position_ptr, q_ptr, k_ptr, v_ptr,
    width, slots, heads, kv, DIM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half: tl.constexpr = DIM // 2
    at = tl.arange(0, half)
    source = qkv_ptr + (token * (heads + 2 * kv) + head) * DIM
    a = tl.load(source + at)
    b = tl.load(source + half + at)
    row = token // width
    slot = tl.load(slot_ptr + token)
    if head < heads + kv:
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


@triton.jit
def _attention(
    q_ptr, k_ptr, v_ptr, position_ptr, out_ptr, part_ptr, scale, width, slots, heads, kv, blocks,
    GROUP: tl.constexpr, TOGETHER: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One program: QUERIES tokens times TOGETHER heads of one row against a share of its keys, online softmax.

    With SPLITS > 1 it writes the unnormalised sum, the mass and the maximum of its share for `_combine`.
    """
    row = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * TOGETHER
    share = tl.program_id(2) // blocks
    index = tl.arange(0, ROWS)
    token = (tl.program_id(2) % blocks) * QUERIES + index // TOGETHER
    head = first_head + index % TOGETHER
    real = (index < QUERIES * TOGETHER) & (token < width)
    d = tl.arange(0, DIM)
    position = tl.load(position_ptr + row * width + token, mask=real, other=-1)
    line = (row * width + token) * heads + head
    q = tl.load(q_ptr + line[:, None] * DIM + d[None, :], mask=real[:, None], other=0.0)
    base = (row * kv + first_head // GROUP) * slots * DIM
    most = tl.full([ROWS], -1.0e30, tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIM], tl.float32)
    last = tl.max(position, 0).to(tl.int32)
    size = tl.cdiv(last + 1, SPLITS * BLOCK) * BLOCK
    for start in range(share * size, tl.minimum(last + 1, (share + 1) * size), BLOCK):
        s = start + tl.arange(0, BLOCK)
        inside = s <= last
        k = tl.load(k_ptr + base + s[None, :] * DIM + d[:, None], mask=inside[None, :], other=0.0)
        v = tl.load(v_ptr + base + s[:, None] * DIM + d[None, :], mask=inside[:, None], other=0.0)
        score = tl.dot(q, k, input_precision="ieee" if EXACT else "tf32") * scale
        score = tl.where(s[None, :] <= position[:, None], score, -float("inf"))
        higher = tl.maximum(most, tl.max(score, 1))
        p = tl.exp(score - higher[:, None])
        shrink = tl.exp(most - higher)
        mass = mass * shrink + tl.sum(p, 1)
        mixed = mixed * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee" if EXACT else "tf32")
        most = higher
    if SPLITS == 1:
        mixed = mixed / tl.where(mass > 0, mass, 1.0)[:, None]
        tl.store(out_ptr + line[:, None] * DIM + d[None, :], mixed.to(out_ptr.dtype.element_ty), mask=real[:, None])
    else:
        place = (line * SPLITS + share) * (DIM + 2)
        tl.store(part_ptr + place[:, None] + d[None, :], mixed, mask=real[:, None])
        tl.store(part_ptr + place + DIM, mass, mask=real)
        tl.store(part_ptr + place + DIM + 1, most, mask=real)


@triton.jit
def _combine(part_ptr, out_ptr, SPLITS: tl.constexpr, DIM: tl.constexpr):
    """One program: the shares of one token and head, put together."""
    line = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, DIM)
    share = tl.arange(0, SPLITS)
    place = part_ptr + (line * SPLITS + share) * (DIM + 2)
    mass, most = tl.load(place + DIM), tl.load(place + DIM + 1)
    weight = tl.exp(most - tl.max(most, 0))
    mixed = tl.sum(tl.load(place[:, None] + d[None, :]) * weight[:, None], 0) / tl.sum(mass * weight, 0)
    tl.store(out_ptr + line * DIM + d, mixed.to(out_ptr.dtype.element_ty))


@triton.jit
def _gate(x_ptr, y_ptr, inner, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < inner
    gate = tl.load(x_ptr + row * 2 * inner + at, mask=inside, other=0.0)
    up = tl.load(x_ptr + row * 2 * inner + inner + at, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    tl.store(y_ptr + row * inner + at, (wide / (1.0 + tl.exp(-wide))).to(gate.dtype) * up, mask=inside)


class TritonKernels(Kernels):
    """See the module's docstring."""

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        y = torch.empty_like(x)
        rows, hidden = x.shape
        block = triton.next_power_of_2(hidden)
        _norm[(rows,)](x, weight, y, hidden, epsilon, BLOCK=block, num_warps=4 if block <= 2048 else 8)
        return y

    def rotate(
        self,
        qkv: Tensor,
        cosine: Tensor,
        sine: Tensor,
        slot: Tensor,
        position: Tensor,
        keys: Tensor,
        values: Tensor,
        heads: int,
    ) -> Tensor:
        batch, width = slot.shape
        kv, slots, dim = keys.shape[1:]
        q = torch.empty(batch, width, heads, dim, dtype=qkv.dtype, device=qkv.device)
        _rotate[(batch * width, heads + 2 * kv)](
            qkv, cosine, sine, slot.contiguous(), position.contiguous(), q, keys, values,
            width, slots, heads, kv, DIM=dim, num_warps=1,
        )  # fmt: skip
        return q

    def attention(self, q: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
        batch, width, heads, dim = q.shape
        kv, slots = keys.shape[1:3]
        group = heads // kv
        # many rows: the heads of a key-value head share one reading of its keys; few rows: a program for each head, and
        # the keys themselves are split until the device is busy
        together = group if batch * kv >= 64 and width * group <= 64 else 1
        queries = min(width, max(1, 64 // together))
        blocks = triton.cdiv(width, queries)
        programs = batch * (heads // together) * blocks
        splits = min(
            16, triton.next_power_of_2(max(1, 132 // programs)), triton.next_power_of_2(triton.cdiv(slots, 128))
        )
        out = torch.empty(batch * width, heads * dim, dtype=q.dtype, device=q.device)
        parts = out if splits == 1 else q.new_empty((batch * width * heads, splits, dim + 2), dtype=torch.float32)
        exact = q.dtype == torch.float32
        _attention[(batch, heads // together, blocks * splits)](
            q, keys, values, position.contiguous(), out, parts, dim**-0.5, width, slots, heads, kv, blocks,
            GROUP=group, TOGETHER=together, QUERIES=queries, ROWS=max(16, triton.next_power_of_2(queries * together)),
            DIM=dim, BLOCK=32 if exact else 64, SPLITS=splits, EXACT=exact, num_warps=4, num_stages=2,
        )  # fmt: skip
        if splits > 1:
            _combine[(batch * width * heads,)](parts, out, SPLITS=splits, DIM=dim, num_warps=1)
        return out

    def gate(self, gate_up: Tensor) -> Tensor:
        rows, double = gate_up.shape
        y = torch.empty(rows, double // 2, dtype=gate_up.dtype, device=gate_up.device)
        _gate[(rows, triton.cdiv(double // 2, 1024))](gate_up, y, double // 2, BLOCK=1024, num_warps=4)
        return y
