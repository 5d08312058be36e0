"""The most likely token of each row of logits, and whether the row can be trusted.

A vocabulary is one long reduction: on CUDA it is split over many programs (Triton, where there is one), because a single
row would otherwise keep one corner of the device busy for longer than a layer takes.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING

from selfjudge.types import lazy_module

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_module("torch")


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


def argmax_checked(logits: Tensor) -> tuple[Tensor, Tensor]:
    """[..., V] → the argmax of the regular logits [...] and whether the row is broken [...]."""
    if logits.is_cuda and has_triton():
        from selfjudge.ops.argmax_triton import split_argmax

        with torch.cuda.device(logits.device):  # kernels are launched on the current device
            return split_argmax(logits)
    odd = broken(logits)
    if logits.is_cuda or bool(odd.any()):  # on a GPU the copy is cheaper than asking
        logits = regular(logits)
    return logits.argmax(-1), odd


@cache
def has_triton() -> bool:
    """Whether there is a Triton for this platform."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True
