"""A fix for a CPU kernel of vLLM 0.20 to 0.32 that loses temperature, top-k and top-p where drafts are verified."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def expand(
    output_ptr: Tensor,
    input_ptr: Tensor,
    cu_num_tokens_ptr: Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,  # noqa: N803
) -> None:
    """What vLLM's `expand_kernel` should do: write each request's value for each of its drafts."""
    ends = cu_num_tokens_ptr.long()
    values = torch.where(input_ptr == replace_from, replace_to, input_ptr).to(output_ptr.dtype)
    output_ptr.copy_(values.repeat_interleave(torch.diff(ends, prepend=ends.new_zeros(1))))


def fix_expand_kernel(warn: Callable[[str], None]) -> None:
    """Replace the kernel through vLLM's own registry, on a CPU where it does not work."""
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    if HAS_TRITON or current_platform.device_type != "cpu" or _works():
        return
    try:
        from vllm.triton_utils.dispatcher import register_kernels
    except ImportError:
        warn(
            "this vLLM ignores the temperature of speculative requests on a CPU: decode greedily, or use 0.31 or later"
        )
        return
    register_kernels({"vllm.v1.sample.rejection_sampler.expand_kernel": expand})


def _works() -> bool:
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    expanded = expand_batch_to_tokens(torch.tensor([0.5, 0.25]), torch.tensor([1, 3], dtype=torch.int32), 3)
    return bool(expanded.tolist() == [0.5, 0.25, 0.25])
