"""The steps of a pass as Triton kernels; their contracts are those of `kernels_torch.Kernels`.

Decoding with few rows is a chain of small kernels, each bound by the time its weights take to arrive. Products of up to
FEW rows split their inputs over enough programs to keep the whole device reading, and leave the sum of the parts to the
next kernel. Each kernel starts while the one before it still runs (programmatic dependent launch): it loads its weights
first and only then waits for its inputs (`gdc_wait`).

Few variants are compiled: of the batch and of γ only tile sizes, each one of a few, are compile-time constants, and
`@run_time` keeps Triton from compiling numbers that are 1 or divisible by 16, and aligned pointers, once more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfjudge.engine.cuda.kernels_torch import Kernels, Packing, TensorPair

FEW = 32  # rows of a split product; larger products are compute-bound and go to torch
SHARED_BYTES = 160 << 10  # shared memory that a split product may need; with less, torch does all products
SHARES = 16  # most parts that attention splits the keys of a row into
PROCESSORS = 132  # multiprocessors of an H100 or H200; with more or fewer the work spreads less evenly


def run_time(*names: str) -> Callable[[Callable[..., None]], Any]:
    """`triton.jit` for a kernel whose arguments of these names get no variants of their own; none is read as vector."""
    return triton.jit(do_not_specialize=names, do_not_specialize_on_alignment=names)


@run_time("token_ptr", "count_ptr", "length_ptr", "width")
def _begin(
    token_ptr, count_ptr, length_ptr, table_ptr, x_ptr, slot_ptr, position_ptr, width, slots, vocabulary, hidden,
    COUNTS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    row, column = place // width, place % width  # in 32 bits, and before the wait
    place = place.to(tl.int64)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    missing = width - tl.load(count_ptr + row) if COUNTS else 0
    position = tl.load(length_ptr + row) + column - missing
    position = tl.minimum(tl.maximum(position, 0), slots - 2)
    tl.store(slot_ptr + place, tl.where(column >= missing, position, slots - 1))
    tl.store(position_ptr + place, tl.where(column >= missing, position, 0))
    token = tl.minimum(tl.maximum(tl.load(token_ptr + place), 0), vocabulary - 1)
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + place * hidden + at, tl.load(table_ptr + token * hidden + at, at < hidden), at < hidden)


@triton.jit
def _norm(
    x_ptr, part_ptr, w_ptr, y_ptr, hidden, step, epsilon,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < hidden
    w = tl.load(w_ptr + at, mask=inside, other=0.0)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row * hidden + at, mask=inside, other=0.0)
    if PARTS:
        more = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(PARTS):
            more += tl.load(part_ptr + i * step + row * hidden + at, mask=inside, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) + more.to(x.dtype).to(tl.float32)).to(x.dtype)
        tl.store(x_ptr + row * hidden + at, x, mask=inside)
    wide = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / hidden + epsilon)
    tl.store(y_ptr + row * hidden + at, (wide * scale).to(x.dtype) * w, mask=inside)


@run_time("rows")
def _product(
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
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
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


@run_time("rows")
def _gated(
    x_ptr, w_ptr, y_ptr, rows, inner, inputs,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
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
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_at, mask=real_m[None, :] & (k < inputs)[:, None], other=0.0)
    gate, up = tl.dot(w1, x), tl.dot(w2, x)
    for start in range(BLOCK_K, inputs, BLOCK_K):
        inside = k + start < inputs
        weights = real_n[:, None] & inside[None, :]
        x = tl.load(x_at + start, mask=real_m[None, :] & inside[:, None], other=0.0)
        gate = tl.dot(tl.load(gate_at + start, mask=weights, other=0.0), x, gate)
        up = tl.dot(tl.load(up_at + start, mask=weights, other=0.0), x, up)
    y = gate / (1.0 + tl.exp(-gate)) * up
    out_at = y_ptr + m[None, :] * inner + n[:, None]
    tl.store(out_at, y.to(y_ptr.dtype.element_ty), mask=real_n[:, None] & real_m[None, :])


@run_time("slot_ptr", "position_ptr", "row_ptr", "width")
def _rotate(
    qkv_ptr, cos_ptr, sin_ptr, slot_ptr, position_ptr, row_ptr, q_ptr, k_ptr, v_ptr, width, slots, heads, kv, step,
    PARTS: tl.constexpr, DIM: tl.constexpr, PACKED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // width).to(tl.int64)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half: tl.constexpr = DIM // 2
    at = tl.arange(0, half)
    source = qkv_ptr + (token * (heads + 2 * kv) + head) * DIM
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    a = tl.zeros([half], tl.float32)
    b = tl.zeros([half], tl.float32)
    for i in tl.static_range(PARTS):
        a += tl.load(source + i * step + at).to(tl.float32)
        b += tl.load(source + i * step + half + at).to(tl.float32)
    a, b = a.to(q_ptr.dtype.element_ty), b.to(q_ptr.dtype.element_ty)
    row = tl.load(row_ptr + token) if PACKED else row
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


@run_time("position_ptr", "start_ptr", "width", "blocks", "queries", "splits")
def _attention(
    q_ptr, k_ptr, v_ptr, position_ptr, start_ptr, out_ptr, part_ptr, scale, width, slots, heads, kv, blocks, queries,
    splits, GROUP: tl.constexpr, TOGETHER: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    SPLIT: tl.constexpr, EXACT: tl.constexpr, PACKED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: `queries` tokens times TOGETHER heads of one row against its keys, online softmax.

    PACKED rows have their own numbers of tokens and follow one another, from start_ptr[row] on.
    With SPLIT it reads one of `splits` shares of the keys, and writes the unnormalised sum, the mass and the maximum of
    its share for `_combine`.
    """
    row = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * TOGETHER
    share = tl.program_id(2) // blocks
    index = tl.arange(0, ROWS)
    token = (tl.program_id(2) % blocks) * queries + index // TOGETHER
    head = first_head + index % TOGETHER
    d = tl.arange(0, DIM)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    first = tl.load(start_ptr + row) if PACKED else row * width
    count = tl.load(start_ptr + row + 1) - first if PACKED else width
    real = (index < queries * TOGETHER) & (token < count)
    position = tl.load(position_ptr + first + token, mask=real, other=-1)
    line = (first + token) * heads + head
    q = tl.load(q_ptr + line[:, None] * DIM + d[None, :], mask=real[:, None], other=0.0)
    base = (row * kv + first_head // GROUP) * slots * DIM
    most = tl.full([ROWS], -1.0e30, tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIM], tl.float32)
    last = tl.max(position, 0).to(tl.int32)
    begin, stop = 0, last + 1
    if SPLIT:
        size = tl.cdiv(last + 1, splits * BLOCK) * BLOCK
        begin, stop = share * size, tl.minimum(last + 1, (share + 1) * size)
    for start in range(begin, stop, BLOCK):
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
    if not SPLIT:
        mixed = mixed / tl.where(mass > 0, mass, 1.0)[:, None]
        tl.store(out_ptr + line[:, None] * DIM + d[None, :], mixed.to(out_ptr.dtype.element_ty), mask=real[:, None])
    else:
        place = (line * splits + share) * (DIM + 2)
        tl.store(part_ptr + place[:, None] + d[None, :], mixed, mask=real[:, None])
        tl.store(part_ptr + place + DIM, mass, mask=real)
        tl.store(part_ptr + place + DIM + 1, most, mask=real)


@run_time("splits")
def _combine(part_ptr, out_ptr, splits, SHARES: tl.constexpr, DIM: tl.constexpr, EARLY: tl.constexpr):
    """One program: add up the shares of one token and head, `splits` of at most SHARES."""
    line = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, DIM)
    share = tl.arange(0, SHARES)
    real = share < splits
    place = part_ptr + (line * splits + share) * (DIM + 2)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    mass = tl.load(place + DIM, mask=real, other=0.0)
    most = tl.load(place + DIM + 1, mask=real, other=-float("inf"))
    weight = tl.exp(most - tl.max(most, 0))
    parts = tl.load(place[:, None] + d[None, :], mask=real[:, None], other=0.0)
    mixed = tl.sum(parts * weight[:, None], 0) / tl.sum(mass * weight, 0)
    tl.store(out_ptr + line * DIM + d, mixed.to(out_ptr.dtype.element_ty))


@triton.jit
def _gate(x_ptr, y_ptr, inner, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < inner
    gate = tl.load(x_ptr + row * 2 * inner + at, mask=inside, other=0.0)
    up = tl.load(x_ptr + row * 2 * inner + inner + at, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    tl.store(y_ptr + row * inner + at, (wide / (1.0 + tl.exp(-wide))).to(gate.dtype) * up, mask=inside)


def _tiles(outputs: int, inputs: int) -> dict[str, int]:
    """Tiles of a product with few rows, tuned on an H200: about one program per multiprocessor, few parts to add."""
    if 1024 < inputs <= 2048:
        return {"BLOCK_N": 32, "BLOCK_K": 512, "SPAN": 512, "num_warps": 4, "num_stages": 3}
    blocks = triton.cdiv(inputs, 256) * triton.cdiv(outputs, 64)
    return {
        "BLOCK_N": 64, "BLOCK_K": 256, "SPAN": 256 * triton.cdiv(blocks, PROCESSORS), "num_warps": 4, "num_stages": 3,
    }  # fmt: skip


class TritonKernels(Kernels):
    """The steps of a pass as Triton kernels."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.early, self.split = False, True
        if device is not None and device.type == "cuda":
            known = torch.cuda.get_device_properties(device)
            nvidia = torch.version.hip is None
            self.early = nvidia and (known.major, known.minor) >= (9, 0)
            self.split = nvidia and known.shared_memory_per_block_optin >= SHARED_BYTES

    def _launch(self, rows: int) -> dict[str, bool]:
        """Launch options: small kernels start early; large ones would only take room from those before them."""
        early = self.early and rows <= FEW
        return {"EARLY": early, "launch_pdl": early} if early else {"EARLY": False}

    def begin(
        self, tokens: Tensor, counts: Tensor | None, lengths: Tensor, slots: int, embedding: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        batch, width = tokens.shape
        vocabulary, hidden = embedding.shape
        x = torch.empty(batch, width, hidden, dtype=embedding.dtype, device=tokens.device)
        slot, position = torch.empty_like(tokens), torch.empty_like(tokens)
        _begin[(batch * width,)](
            tokens.contiguous(), lengths if counts is None else counts, lengths, embedding, x, slot, position,
            width, slots, vocabulary, hidden, COUNTS=counts is not None, BLOCK=triton.next_power_of_2(hidden),
            **self._launch(batch * width),
        )  # fmt: skip
        return x, slot, position

    def norm(self, x: Tensor, parts: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
        y = torch.empty_like(x)
        rows, hidden = x.shape
        block = triton.next_power_of_2(hidden)
        _norm[(rows,)](
            x, x if parts is None else parts, weight, y, hidden, x.numel(), epsilon,
            PARTS=0 if parts is None else len(parts), BLOCK=block, num_warps=4 if block <= 2048 else 8,
            **self._launch(rows),
        )  # fmt: skip
        return y

    def _few(self, x: Tensor) -> bool:
        return self.split and len(x) <= FEW and x.dtype != torch.float32

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not self._few(x):
            return super().product(x, weight, bias)
        rows, inputs = x.shape
        outputs = len(weight)
        c = _tiles(outputs, inputs)
        shares = triton.cdiv(inputs, c["SPAN"])
        out = torch.empty(shares, rows, outputs, dtype=torch.float32, device=x.device)
        _product[(triton.cdiv(outputs, c["BLOCK_N"]), shares)](
            x, weight, x if bias is None else bias, out, rows, outputs, inputs,
            ROWS=16 if rows <= 16 else 32, BIAS=bias is not None, **c, **self._launch(rows),
        )  # fmt: skip
        return out

    def add(self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        return self.product(y, weight, bias) if self._few(x) else super().add(x, y, weight, bias)

    def gated(self, x: Tensor, weight: Tensor) -> Tensor:
        rows, inputs = x.shape
        inner = len(weight) // 2
        y = torch.empty(rows, inner, dtype=x.dtype, device=x.device)
        if not self._few(x):
            _gate[(rows, triton.cdiv(inner, 1024))](
                torch.nn.functional.linear(x, weight), y, inner, BLOCK=1024, num_warps=4, **self._launch(rows)
            )
            return y
        # large: tiles that one warp group multiplies at once; small: more programs, so that no multiprocessor is idle
        block_n, block_k, stages = (64, 64, 5) if inner >= 64 * PROCESSORS else (32, 128, 4)
        _gated[(triton.cdiv(inner, block_n),)](
            x, weight, y, rows, inner, inputs, ROWS=16 if rows <= 16 else 32, BLOCK_N=block_n, BLOCK_K=block_k,
            num_warps=4, num_stages=stages, **self._launch(rows),
        )  # fmt: skip
        return y

    def rotate(
        self,
        qkv: Tensor,
        rotary: TensorPair,
        at: TensorPair,
        cache: TensorPair,
        heads: int,
        packing: Packing | None = None,
    ) -> Tensor:
        (cosine, sine), (slot, position), (keys, values) = rotary, at, cache
        batch, width = slot.shape
        kv, slots, dim = keys.shape[1:]
        q = torch.empty(batch, width, heads, dim, dtype=keys.dtype, device=qkv.device)
        _rotate[(batch * width, heads + 2 * kv)](
            qkv, cosine, sine, slot.contiguous(), position.contiguous(), slot if packing is None else packing.row,
            q, keys, values, width, slots, heads, kv, qkv[0].numel(), PARTS=len(qkv), DIM=dim,
            PACKED=packing is not None, num_warps=1, **self._launch(batch * width),
        )  # fmt: skip
        return q

    def attention(
        self, q: Tensor, keys: Tensor, values: Tensor, position: Tensor, packing: Packing | None = None
    ) -> Tensor:
        """What padding of a packed pass gets is undefined: nothing reads it but padding."""
        batch, width, heads, dim = q.shape
        tokens = batch * width
        if packing is not None:
            batch, width = packing.place.shape
        kv, slots = keys.shape[1:3]
        group = heads // kv
        # many rows: the heads of a key-value head share one reading of its keys; few rows: a program for each head, and
        # the keys themselves are split until the device is busy
        together = group if batch * kv >= 64 and width * group <= 64 else 1
        queries = min(width, max(1, 64 // together))
        blocks = triton.cdiv(width, queries)
        programs = batch * (heads // together) * blocks
        exact = q.dtype == torch.float32
        splits = min(
            SHARES, triton.next_power_of_2(max(1, PROCESSORS // programs)), triton.next_power_of_2(slots // 32)
        )
        out = torch.empty(tokens, heads * dim, dtype=q.dtype, device=q.device)
        parts = out if splits == 1 else q.new_empty((tokens * heads, splits, dim + 2), dtype=torch.float32)
        _attention[(batch, heads // together, blocks * splits)](
            q, keys, values, position.contiguous(), position if packing is None else packing.start, out, parts,
            dim**-0.5, width, slots, heads, kv, blocks, queries, splits,
            GROUP=group, TOGETHER=together, ROWS=max(16, triton.next_power_of_2(queries * together)),
            DIM=dim, BLOCK=32 if exact or splits > 1 else 64, SPLIT=splits > 1, EXACT=exact,
            PACKED=packing is not None, num_warps=2 if splits > 1 else 4, num_stages=2, **self._launch(tokens),
        )  # fmt: skip
        if splits > 1:
            _combine[(tokens * heads,)](
                parts, out, splits, SHARES=SHARES, DIM=dim, num_warps=1, **self._launch(tokens)
            )  # fmt: skip
        return out
