"""`argmax_checked` for CUDA: a row is split over many programs; inside another kernel, one program reads it all."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 2048  # logits per program
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
