"""`worth_taking` as one kernel: a program for each block walks it from the right."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


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
        aligned, harm = tl.load(aligned_ptr + at) != 0, tl.load(harm_ptr + at)
        taken = (worth > harm) & (matching >= window)
        tl.store(out_ptr + at, taken)
        longer = price + worth - tl.where(aligned, 0.0, harm)
        worth = tl.where(aligned | taken, longer, price)
        matching = tl.where(aligned, matching + 1, 0)


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


def flat_scan(
    harm: Tensor, aligned: Tensor, first: Tensor, counts: Tensor, price: Tensor, window: Tensor
) -> Tensor:  # fmt: skip
    """[n] `worth_taking` for blocks of different lengths that stand one after another, and where `window` drafts after
    it match. A block's first row, number of drafts, price and window: [R] each."""
    out = torch.empty_like(aligned)
    _scan[(len(counts),)](
        harm, aligned, first, counts, price, window, out, 0, 0.0, FLAT=True, OWN=True, num_warps=1
    )  # fmt: skip
    return out
