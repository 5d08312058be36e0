"""`share_tokens` for CUDA: one program a row counts how many drafts of all rows come before its own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64  # rows that a program looks at together


@triton.jit
def _share(q_ptr, caps_ptr, limits_ptr, rows, count, GAMMA: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, WIDE)
    cap = tl.load(caps_ptr + row)
    mine = tl.zeros([WIDE], tl.float32)  # the products of this row, multiplied in the same order as those of others
    product = 1.0
    for i in tl.static_range(GAMMA):
        product = product * tl.load(q_ptr + row * GAMMA + i, mask=i < cap, other=0.0)
        mine = tl.where(column == i, product, mine)
    place = column * rows + row
    before = tl.zeros([WIDE], tl.int32)
    for first in range(0, rows, BLOCK):
        other = first + tl.arange(0, BLOCK)
        caps = tl.load(caps_ptr + other, mask=other < rows, other=0)
        p = tl.full([BLOCK], 1.0, tl.float32)
        for i in tl.static_range(GAMMA):
            p = p * tl.load(q_ptr + other * GAMMA + i, mask=i < caps, other=0.0)
            tie = (p[None, :] == mine[:, None]) & ((i * rows + other)[None, :] < place[:, None])
            before += tl.sum(((p[None, :] > mine[:, None]) | tie).to(tl.int32), 1)
    taken = (mine > 0) & (before < count)
    tl.store(limits_ptr + row, tl.sum(taken.to(tl.int64), 0))


def share(q: Tensor, caps: Tensor, count: int) -> Tensor:
    rows, gamma = q.shape
    limits = torch.empty_like(caps)
    _share[(rows,)](
        q, caps, limits, rows, count, GAMMA=gamma, WIDE=triton.next_power_of_2(gamma), BLOCK=BLOCK, num_warps=4
    )
    return limits
