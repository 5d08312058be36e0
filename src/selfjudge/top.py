"""The most likely token of each row of logits, and whether the row can be trusted.

A vocabulary is one long reduction: on CUDA it is split over many programs (Triton, where there is one), because a single
row would otherwise keep one corner of the device busy for longer than a layer takes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # no Triton for this platform: torch's own reductions serve
    triton = None

CHUNK = 2048  # logits per program


def regular(logits: Tensor) -> Tensor:
    """NaN → −inf and +inf → a very large number, so that argmax and softmax stay meaningful at any temperature; a row
    that then holds no finite logit at all becomes uniform."""
    most = min(1e30, torch.finfo(logits.dtype).max)
    logits = torch.nan_to_num(logits, nan=-math.inf, posinf=most, neginf=-math.inf)
    return torch.where(torch.isneginf(logits.amax(-1, keepdim=True)), 0.0, logits)


def broken(logits: Tensor) -> Tensor:
    """[..., V] → [...] rows with a NaN or +inf (−inf is a legitimate ban). One pass: the maximum carries both."""
    most = logits.amax(-1)
    return torch.logical_or(torch.isnan(most), torch.isposinf(most))


def top(logits: Tensor) -> tuple[Tensor, Tensor]:
    """[..., V] → the argmax of the regular logits [...] and whether the row is broken [...]."""
    if triton is None or not logits.is_cuda:
        odd = broken(logits)
        if logits.is_cuda or bool(odd.any()):  # on a GPU the copy is cheaper than asking
            logits = regular(logits)
        return logits.argmax(-1), odd
    return split_top(logits)


def split_top(logits: Tensor) -> tuple[Tensor, Tensor]:
    """`top` as two kernels: the best of every chunk, then the best of those."""
    flat = logits.reshape(-1, logits.shape[-1])
    rows, size = flat.shape
    chunks = triton.cdiv(size, CHUNK)
    best = torch.empty(rows, chunks, dtype=torch.float32, device=flat.device)
    place = torch.empty(rows, chunks, dtype=torch.int64, device=flat.device)
    odd_chunk = torch.empty(rows, chunks, dtype=torch.int8, device=flat.device)
    choice = torch.empty(rows, dtype=torch.int64, device=flat.device)
    odd = torch.empty(rows, dtype=torch.bool, device=flat.device)
    _chunk_top[(rows, chunks)](
        flat, best, place, odd_chunk, size, flat.stride(0), chunks, BLOCK=CHUNK, num_warps=4
    )  # fmt: skip
    _row_top[(rows,)](best, place, odd_chunk, choice, odd, chunks, BLOCK=triton.next_power_of_2(chunks), num_warps=1)
    return choice.view(logits.shape[:-1]), odd.view(logits.shape[:-1])


if triton is not None:

    @triton.jit
    def _chunk_top(x_ptr, best_ptr, place_ptr, odd_ptr, size, stride, chunks, BLOCK: tl.constexpr):
        row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
        at = chunk * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + at, mask=at < size, other=-float("inf")).to(tl.float32)
        nan, endless = x != x, x == float("inf")
        x = tl.where(nan, -float("inf"), tl.where(endless, 1.0e30, x))
        best, where = tl.max(x, 0, return_indices=True)
        odd = tl.max((nan | endless).to(tl.int32), 0)
        tl.store(best_ptr + row * chunks + chunk, best)
        tl.store(place_ptr + row * chunks + chunk, (chunk * BLOCK + where).to(tl.int64))
        tl.store(odd_ptr + row * chunks + chunk, odd.to(tl.int8))

    @triton.jit
    def _row_top(best_ptr, place_ptr, odd_ptr, choice_ptr, broken_ptr, chunks, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        at = tl.arange(0, BLOCK)
        best = tl.load(best_ptr + row * chunks + at, mask=at < chunks, other=-float("inf"))
        _, where = tl.max(best, 0, return_indices=True)
        odd = tl.max(tl.load(odd_ptr + row * chunks + at, mask=at < chunks, other=0).to(tl.int32), 0)
        tl.store(choice_ptr + row, tl.load(place_ptr + row * chunks + where))
        tl.store(broken_ptr + row, odd != 0)
