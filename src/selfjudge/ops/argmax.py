"""The most likely token of each row of logits, and whether the row is finite.

On CUDA with Triton a row is split over many programs: one program for a whole vocabulary takes longer than a layer.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from selfjudge.types import LazyModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch")


def replace_non_finite(logits: Tensor) -> Tensor:
    """NaN → −inf and +inf → a very large number, so that argmax and softmax stay meaningful at any temperature.

    A row without a finite logit becomes uniform.
    """
    most = min(1e30, torch.finfo(logits.dtype).max)
    logits = torch.nan_to_num(logits, nan=-math.inf, posinf=most, neginf=-math.inf)
    return torch.where(torch.isneginf(logits.amax(-1, keepdim=True)), 0.0, logits)


def has_non_finite(logits: Tensor) -> Tensor:
    """[..., V] → [...] rows with a NaN or +inf (−inf is a legitimate ban). One pass: the maximum carries both."""
    most = logits.amax(-1)
    return torch.logical_or(torch.isnan(most), torch.isposinf(most))


def argmax_checked(logits: Tensor) -> tuple[Tensor, Tensor]:
    """[..., V] → the argmax [...] after `replace_non_finite`, and which rows have a NaN or +inf [...]."""
    if logits.is_cuda and has_triton():
        from selfjudge.ops.argmax_triton import split_argmax

        with torch.cuda.device(logits.device):  # kernels are launched on the current device
            return split_argmax(logits)
    if logits.device.type != "cpu":  # the copy is cheaper than a look at the result
        return replace_non_finite(logits).argmax(-1), has_non_finite(logits)
    if logits.dtype != torch.float32:
        best = logits.argmax(-1)  # of a NaN, where there is one: the largest tells whether the row is non-finite
        non_finite = has_non_finite(logits.gather(-1, best[..., None]))
        return replace_non_finite(logits).argmax(-1) if bool(non_finite.any()) else best, non_finite
    return _argmax_by_numpy(logits)


def _argmax_by_numpy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The same in a tenth of the time: torch's argmax goes one by one, and its small operations take longer."""
    values = logits.detach().numpy()
    best = np.asarray(values.argmax(-1))
    most = np.take_along_axis(values, best[..., None], -1)[..., 0]
    non_finite = ~(most < np.inf)
    if non_finite.any():
        best = np.asarray(replace_non_finite(logits).detach().numpy().argmax(-1))
    return torch.from_numpy(best), torch.from_numpy(np.asarray(non_finite))


@cache
def has_triton() -> bool:
    """Whether there is a Triton for this platform."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True
