"""Small operations that our loop and vLLM's worker share; on CUDA with Triton they are kernels.
There an argmax splits a row over many programs: one program for a whole vocabulary takes longer than a layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from selfjudge.types import LazyModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch")

COMPILING = "compiling kernels, once on this machine …"


def replace_non_finite(logits: Tensor) -> Tensor:
    """NaN → −inf, +inf → a very large number: softmax stays meaningful. A row without a finite logit is uniform."""
    most = min(1e30, torch.finfo(logits.dtype).max)
    logits = torch.nan_to_num(logits, nan=-math.inf, posinf=most, neginf=-math.inf)
    return torch.where(torch.isneginf(logits.amax(-1, keepdim=True)), 0.0, logits)


def has_non_finite(logits: Tensor) -> Tensor:
    """[..., V] → [...] rows with a NaN or +inf (−inf is a legitimate ban). One pass: the maximum carries both."""
    most = logits.amax(-1)
    return torch.logical_or(torch.isnan(most), torch.isposinf(most))


def argmax_checked(logits: Tensor) -> tuple[Tensor, Tensor]:
    """[..., V] → the argmax [...] after `replace_non_finite`, and which rows have a NaN or +inf [...]."""
    if runs_kernels(logits):
        from selfjudge.ops.kernels_triton import split_argmax

        with torch.cuda.device(logits.device):  # kernels are launched on the current device
            return split_argmax(logits)
    if logits.device.type != "cpu":  # the copy is cheaper than a look at the result
        return replace_non_finite(logits).argmax(-1), has_non_finite(logits)
    if logits.dtype != torch.float32:
        best = logits.argmax(-1)  # of a NaN, where there is one: the largest tells whether the row is non-finite
        non_finite = has_non_finite(logits.gather(-1, best[..., None]))
        return replace_non_finite(logits).argmax(-1) if bool(non_finite.any()) else best, non_finite
    values = logits.detach().numpy()  # a tenth of the time: torch goes one by one, and its small operations take longer
    choice = np.asarray(values.argmax(-1))
    bad = ~(np.take_along_axis(values, choice[..., None], -1)[..., 0] < np.inf)
    if bad.any():
        choice = np.asarray(replace_non_finite(logits).detach().numpy().argmax(-1))
    return torch.from_numpy(choice), torch.from_numpy(np.asarray(bad))


@cache
def has_triton() -> bool:
    """Whether there is a Triton for this platform."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def runs_kernels(tensor: Tensor) -> bool:
    """Whether operations on this tensor are kernels of ours."""
    return tensor.is_cuda and has_triton()


@contextmanager
def watch_compiling(say: Callable[[str], None]) -> Iterator[None]:
    """Say `COMPILING` whenever Triton has compiled a kernel that it had not kept: usually others follow."""
    knobs: Any = None
    if has_triton():
        import triton

        knobs = getattr(triton, "knobs", None)  # older ones have none, and nothing is said
    if knobs is None:
        yield
        return
    before = knobs.compilation.listener

    def listen(*, cache_hit: bool, **details: Any) -> None:
        if not cache_hit:
            say(COMPILING)
        if before is not None:
            before(cache_hit=cache_hit, **details)

    knobs.compilation.listener = listen
    try:
        yield
    finally:
        knobs.compilation.listener = before


def worth_taking(harm: Tensor, aligned: Tensor, price: float | Tensor, window: Tensor | None = None) -> Tensor:
    """[B, γ] where the rest of the block is worth the harm c_i of accepting d_i; +inf is never taken. Rows may have
    prices of their own [B], and want `window` [B] drafts after d_i to match.
    A walk that accepts d_1 … d_k and stops is worth π·(k+1) − Σ c_i over its mismatches: every token has the price π,
    the target's own at the end included. U_i is the most that positions i … γ+1 can be worth: U_{γ+1} = π, and U_i =
    max(π, π + U_{i+1} − c_i), where an aligned draft costs nothing. This gives the best and shortest walk."""
    if runs_kernels(harm):
        from selfjudge.ops.kernels_triton import block_scan

        with torch.cuda.device(harm.device):  # kernels are launched on the current device
            return block_scan(harm, aligned, price, window)
    worth = price if isinstance(price, torch.Tensor) else harm.new_full((len(harm),), price)  # U_{γ+1}
    matching, taken = torch.zeros_like(worth), torch.zeros_like(aligned)
    for i in range(harm.shape[1] - 1, -1, -1):
        taken[:, i] = worth > harm[:, i]  # accept if U_{i+1} > c_i
        if window is not None:
            taken[:, i] &= matching >= window
            matching = torch.where(aligned[:, i], matching + 1, 0)
        longer = price + worth - torch.where(aligned[:, i], 0.0, harm[:, i])
        worth = torch.where(aligned[:, i] | taken[:, i], longer, price)
    return taken
