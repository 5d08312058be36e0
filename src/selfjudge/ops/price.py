"""Priced acceptance: whether what follows a substitution is worth its harm. Shared by the loop and by vLLM's worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from selfjudge.ops.argmax import has_triton
from selfjudge.types import LazyModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch")


def worth_taking(harm: Tensor, aligned: Tensor, price: float) -> Tensor:
    """[B, γ] where the rest of the block is worth the harm c_i of accepting d_i; +inf is never taken.

    Let a walk that accepts d_1 … d_k and stops be worth π·(k+1) − Σ c_i over its mismatches: every token has the price
    π, the target's own one at the end included. U_i is the most that positions i … γ+1 can be worth once d_i is
    reached: U_{γ+1} = π, and U_i = max(π, π + U_{i+1} − c_i), where an aligned draft costs nothing. So accepting what
    is worth it, and what is aligned, gives the best walk of the block; of walks that are worth the same, the shortest.
    """
    if harm.is_cuda and has_triton():
        from selfjudge.ops.price_triton import block_scan

        with torch.cuda.device(harm.device):  # kernels are launched on the current device
            return block_scan(harm, aligned, price)
    worth = harm.new_full((len(harm),), price)  # U_{γ+1}
    taken = torch.zeros_like(aligned)
    for i in range(harm.shape[1] - 1, -1, -1):
        taken[:, i] = worth > harm[:, i]  # accept if U_{i+1} > c_i
        longer = price + worth - torch.where(aligned[:, i], 0.0, harm[:, i])
        worth = torch.where(aligned[:, i] | taken[:, i], longer, price)
    return taken
