"""The mark and the counts of `approval` and `counts` as one kernel each: what a step costs beside them is launching."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfjudge.judge_triton import among


@triton.jit
def _mark(
    logit_ptr, choice_ptr, draft_ptr, approved_ptr, special_ptr, raised_ptr, aligned_ptr, step, specials,
    MARK: tl.constexpr, SPECIALS: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    token, choice = tl.load(draft_ptr + i).to(tl.int64), tl.load(choice_ptr + i)
    there = token >= 0
    at = logit_ptr + i * step + tl.maximum(token, 0)
    raised = (tl.load(approved_ptr + i) != 0) & there & (tl.load(at).to(tl.float32) > -float("inf"))
    if SPECIALS:
        raised = raised & (among(choice, special_ptr, specials, SPECIALS) == 0)
    tl.store(at, MARK, mask=raised)
    tl.store(raised_ptr + i, raised)
    tl.store(aligned_ptr + i, there & (choice == token))


def mark(
    logits: Tensor, choice: Tensor, drafts: Tensor, approved: Tensor, special: Tensor, value: float
) -> tuple[Tensor, Tensor]:
    """`Approval.mark`, the most likely tokens being known."""
    raised, aligned = torch.empty((2, len(drafts)), dtype=torch.bool, device=logits.device)
    specials = len(special)
    _mark[(len(drafts),)](
        logits, choice, drafts, approved, special, raised, aligned, logits.stride(0), specials, MARK=value,
        SPECIALS=triton.next_power_of_2(specials) if specials else 0, num_warps=1,
    )  # fmt: skip
    return raised, aligned


@triton.jit(do_not_specialize=["requests"])  # it changes from step to step
def _count(
    total_ptr, first_ptr, count_ptr, accepted_ptr, raised_ptr, aligned_ptr, requests, BLOCK: tl.constexpr
):  # fmt: skip
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = request < requests
    count = tl.load(count_ptr + request, mask=inside, other=0)
    first = tl.load(first_ptr + request, mask=inside, other=0)
    accepted = tl.load(accepted_ptr + request, mask=inside, other=0)
    drafted = (count > 0).to(tl.int64)
    leading = tl.zeros([BLOCK], tl.int64)
    judged = tl.zeros([BLOCK], tl.int64)
    goes_on = drafted
    for place in range(tl.max(count, 0)):
        here = place < count
        aligned = tl.load(aligned_ptr + first + place, mask=here, other=0).to(tl.int64)
        raised = tl.load(raised_ptr + first + place, mask=here, other=0).to(tl.int64)
        goes_on = goes_on * aligned
        leading += goes_on
        judged += raised * (1 - aligned) * (place < accepted).to(tl.int64)
    cycles = tl.sum(drafted, 0)
    tl.atomic_add(total_ptr, cycles)
    tl.atomic_add(total_ptr + 1, tl.sum(accepted * drafted, 0) + cycles)
    tl.atomic_add(total_ptr + 2, tl.sum(leading, 0) + cycles)
    tl.atomic_add(total_ptr + 3, tl.sum(judged, 0))


def count(total: Tensor, first: Tensor, counts: Tensor, accepted: Tensor, raised: Tensor, aligned: Tensor) -> None:
    """`Counts.add`: rows `first[r]` … `first[r] + counts[r]` belong to request r."""
    requests, block = len(counts), 32
    _count[(triton.cdiv(requests, block),)](
        total, first, counts, accepted, raised, aligned, requests, BLOCK=block, num_warps=1
    )  # fmt: skip
