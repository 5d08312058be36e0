"""`Approval.mark` as one kernel: every launch costs time in each step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfjudge.ops.argmax_triton import ROW_BLOCK, ROW_WARPS, row_argmax
from selfjudge.ops.judge_score_triton import among


@triton.jit
def _mark(
    logit_ptr, draft_ptr, approved_ptr, special_ptr, flag_ptr, step, vocabulary, specials, MARK: tl.constexpr,
    SPECIALS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    logits, token = logit_ptr + i * step, tl.load(draft_ptr + i).to(tl.int64)
    choice, _, _ = row_argmax(logits, vocabulary, BLOCK)
    drafted = token >= 0
    at = logits + tl.maximum(token, 0)
    raised = (tl.load(approved_ptr + i) != 0) & drafted & (tl.load(at).to(tl.float32) > -float("inf"))
    if SPECIALS:
        raised = raised & (among(choice, special_ptr, specials, SPECIALS) == 0)
    tl.debug_barrier()  # the whole row has been read
    tl.store(at, MARK, mask=raised)
    tl.store(flag_ptr + i, raised)
    tl.store(flag_ptr + tl.num_programs(0) + i, drafted & (choice == token))


def mark(logits: Tensor, drafts: Tensor, approved: Tensor, special: Tensor, value: float) -> Tensor:
    """`Approval.mark`."""
    n, specials = len(drafts), len(special)
    flags = torch.empty((2, n), dtype=torch.bool, device=logits.device)
    _mark[(n,)](
        logits, drafts, approved, special, flags, logits.stride(0), logits.shape[1], specials, MARK=value,
        SPECIALS=triton.next_power_of_2(specials) if specials else 0, BLOCK=ROW_BLOCK, num_warps=ROW_WARPS,
    )  # fmt: skip
    return flags
