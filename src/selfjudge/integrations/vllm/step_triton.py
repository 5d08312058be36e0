"""A step of vLLM's second model runner, around the kernels of `approval_triton`: two more, and no small operations. A
slot's line in a table has what its request asks; the runner has the rest on the device, in rows as in `v2`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from selfjudge.decoding import guards, rules_by_row
from selfjudge.decoding.rules_by_row import Code

STATE, POSITION, STRICT_UNTIL, STRICT_CODE, VALUE, LIMIT, PRICE, WINDOW, COLUMNS = map(tl.constexpr, range(9))
"""Columns of the table: what `RequestGuards` keeps, then the rule's code."""
ALWAYS, STATES, MARGIN = map(tl.constexpr, (guards.ALWAYS, guards.STATES, rules_by_row.MARGIN))


@triton.jit
def _prepare(
    slot_ptr, end_ptr, index_ptr, id_ptr, position_ptr, table_ptr, follow_ptr, exact_ptr, draft_ptr, value_ptr,
    limit_ptr, state_ptr, count_ptr, price_ptr, window_ptr, flag_ptr, flag_step, vocabulary,
):  # fmt: skip
    """One request: the draft that each row predicts (−1 for the last), what decides it, the state after each token."""
    request = tl.program_id(0)
    row = table_ptr + tl.load(slot_ptr + request).to(tl.int64) * COLUMNS
    first, end = tl.load(end_ptr + request), tl.load(end_ptr + request + 1)
    position = tl.load(position_ptr + tl.load(index_ptr + first))
    missed = position > tl.load(row + POSITION).to(tl.int64)
    state = tl.where(missed, ALWAYS, tl.load(row + STATE).to(tl.int32))
    strict_until, strict_code = tl.load(row + STRICT_UNTIL).to(tl.int64), tl.load(row + STRICT_CODE) != 0
    value, limit = tl.load(row + VALUE).to(tl.int32), tl.load(row + LIMIT).to(tl.float32)
    tl.store(count_ptr + request, end - first)
    tl.store(price_ptr + request, tl.load(row + PRICE).to(tl.float32))
    tl.store(window_ptr + request, tl.load(row + WINDOW).to(tl.int32))
    before = 0  # whether the token before is part of structure
    for at in range(first, end):
        token = tl.load(id_ptr + tl.load(index_ptr + at)).to(tl.int64)
        known = tl.minimum(tl.maximum(token, 0), vocabulary - 1)
        state = tl.load(follow_ptr + known * STATES + state).to(tl.int32)
        tl.store(state_ptr + at, state)
        tl.store(flag_ptr + 2 * flag_step + at, 0)  # not marked yet
        inside = tl.load(exact_ptr + state).to(tl.int32)
        if at > first:
            exact = (position + at - first < strict_until) | (strict_code & ((inside | before) != 0))
            tl.store(draft_ptr + at - 1, token.to(tl.int32))
            tl.store(value_ptr + at - 1, value)
            tl.store(limit_ptr + at - 1, tl.where(exact, -float("inf"), limit))
        before = inside
    tl.store(draft_ptr + end - 1, -1)
    tl.store(value_ptr + end - 1, MARGIN)
    tl.store(limit_ptr + end - 1, -float("inf"))


@triton.jit
def _finish(
    slot_ptr, end_ptr, index_ptr, position_ptr, emitted_ptr, table_ptr, state_ptr, flag_ptr, total_ptr, flag_step,
    MARKED: tl.constexpr,
):  # fmt: skip
    """One request that got so many tokens: its guards follow them, and `approval.COUNTERS` grow."""
    request = tl.program_id(0)
    first, end = tl.load(end_ptr + request), tl.load(end_ptr + request + 1)
    emitted, count = tl.load(emitted_ptr + request), end - first - 1
    if MARKED:
        row = table_ptr + tl.load(slot_ptr + request).to(tl.int64) * COLUMNS
        position = tl.load(position_ptr + tl.load(index_ptr + first))
        begun = position >= tl.load(row + POSITION).to(tl.int64)  # before that a prompt is being read
        state = tl.load(state_ptr + first + tl.maximum(emitted, 1) - 1)
        tl.store(row + STATE, state.to(tl.float64), mask=begun)
        tl.store(row + POSITION, (position + emitted).to(tl.float64), mask=begun)
    leading, judged, going = 0, 0, 1
    for place in range(count):
        accepted = place < emitted - 1
        aligned = accepted
        if MARKED:
            flags = flag_ptr + first + place
            aligned = tl.where(tl.load(flags + 2 * flag_step) != 0, tl.load(flags + flag_step) != 0, accepted)
            judged += (accepted & (tl.load(flags) != 0) & (aligned == 0)).to(tl.int32)
        going = going & aligned.to(tl.int32)
        leading += going
    drafted = count > 0
    tl.atomic_add(total_ptr, 1, mask=drafted)
    tl.atomic_add(total_ptr + 1, emitted, mask=drafted)
    tl.atomic_add(total_ptr + 2, leading + 1, mask=drafted)
    if MARKED:
        tl.atomic_add(total_ptr + 3, judged, mask=drafted)


class RequestTable:
    """What requests ask, by slot, and the rows of the current step, both on the device."""

    def __init__(self, slots: int, rows: int, structure: Any, device: torch.device) -> None:
        self.lines = torch.zeros((slots, COLUMNS.value), dtype=torch.float64, device=device)
        self.follow, self.exact = structure.on(device)
        self.rows = torch.arange(rows, device=device)
        self.drafts, self.value, self.state = (torch.empty_like(self.rows, dtype=torch.int32) for _ in range(3))
        self.limit = torch.empty_like(self.rows, dtype=torch.float32)
        self.counts, self.window = (torch.empty(slots, dtype=torch.int32, device=device) for _ in range(2))
        self.price = torch.empty(slots, dtype=torch.float32, device=device)
        self.flags = torch.empty((3, rows), dtype=torch.bool, device=device)
        self._new: dict[int, list[float]] = {}

    def enter(self, slot: int, guard: Sequence[float], code: Code | None) -> None:
        """A request begins: the first four columns, and the code of its rule; any, where it has none."""
        self._new[slot] = [*guard, *(code or Code(rules_by_row.MARGIN, 0.0))]

    def prepare(self, batch: Any) -> None:
        """Fill in the rows of a step."""
        if self._new:  # copied without waiting
            lines = torch.tensor([[slot, *line] for slot, line in self._new.items()], dtype=torch.float64)
            self._new = {}
            lines = (lines.pin_memory() if self.lines.is_cuda else lines).to(self.lines.device, non_blocking=True)
            self.lines[lines[:, 0].long()] = lines[:, 1:]
        _prepare[(batch.num_reqs,)](
            batch.idx_mapping, batch.cu_num_logits, batch.logits_indices, batch.input_ids, batch.positions, self.lines,
            self.follow, self.exact, self.drafts, self.value, self.limit, self.state, self.counts, self.price,
            self.window, self.flags, self.flags.stride(0), len(self.follow), num_warps=1,
        )  # fmt: skip

    def finish(self, batch: Any, emitted: Tensor, total: Tensor, *, marked: bool) -> None:
        """Follow and count the tokens that a batch got; the rows are not marked where all requests are lossless."""
        _finish[(batch.num_reqs,)](
            batch.idx_mapping, batch.cu_num_logits, batch.logits_indices, batch.positions, emitted, self.lines,
            self.state, self.flags, total, self.flags.stride(0), MARKED=marked, num_warps=1,
        )  # fmt: skip
