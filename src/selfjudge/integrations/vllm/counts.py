"""What the judge did, counted on the device and shown as Prometheus counters; no step waits for a count."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import torch
from torch import Tensor

from selfjudge.integrations.vllm.approval import Rows
from selfjudge.top import has_triton

COUNTERS = {
    "cycles": "Verified blocks of drafts.",
    "tokens": "Tokens emitted by them: accepted drafts and the target's own token after.",
    "aligned_tokens": "Tokens the same blocks would have emitted without the judge.",
    "judged_tokens": "Accepted drafts that were not the target's most likely token, on the judge's word.",
}
EVERY = 1.0  # seconds between two looks at the device
MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"


@cache
def _counters() -> list[Any]:
    from prometheus_client import Counter

    return [Counter(f"selfjudge:{name}", text, ["model_name", "engine"]) for name, text in COUNTERS.items()]


class Counts:
    """Totals of one engine: `add` on the device, `report` to Prometheus, `read` when somebody asks."""

    def __init__(self, device: torch.device, *labels: str) -> None:
        self.total = torch.zeros(len(COUNTERS), dtype=torch.long, device=device)
        self._fused = device.type == "cuda" and has_triton()
        self._labels = labels
        self._shown = [0] * len(COUNTERS)
        self._copy = torch.zeros_like(self.total, device="cpu", pin_memory=device.type == "cuda")
        self._arrived: torch.Event | None = None
        self._asked = time.monotonic()

    def add(self, rows: Rows, accepted: Tensor, raised: Tensor, aligned: Tensor) -> None:
        """One step: accepted drafts of each request [R]; which rows were raised and which aligned anyway [n]."""
        if self._fused:
            from selfjudge.integrations.vllm.approval_triton import count

            count(self.total, rows.first, rows.counts, accepted, raised, aligned)
            return
        taken = rows.place < accepted[rows.owner]
        self.total += torch.stack([
            rows.cycles, (accepted * rows.drafted).sum() + rows.cycles, rows.leading(aligned).sum() + rows.cycles,
            (taken & raised & ~aligned).sum(),
        ])  # fmt: skip

    def add_lossless(self, rows: Rows, accepted: Tensor) -> None:
        """One step in which nobody asked the judge: what was accepted [R] is what would have been."""
        tokens = (accepted * rows.drafted).sum() + rows.cycles
        self.total += torch.stack([rows.cycles, tokens, tokens, torch.zeros_like(tokens)])

    def read(self) -> dict[str, int]:
        """The totals now; waits for the device."""
        return dict(zip(COUNTERS, self.total.tolist(), strict=True))

    def report(self, *, idle: bool) -> None:
        """Called every step. Looks at the device once a second without waiting; an idle engine may be waited for."""
        if idle:
            self._arrived = None
            self._show(self.total.tolist())
        elif self._arrived is not None:
            if self._arrived.query():
                self._arrived = None
                self._show(self._copy.tolist())
        elif time.monotonic() - self._asked > EVERY:
            self._asked = time.monotonic()
            self._copy.copy_(self.total, non_blocking=True)
            if self.total.is_cuda:
                self._arrived = torch.Event(self.total.device)
                self._arrived.record()
            else:
                self._show(self._copy.tolist())

    def _show(self, totals: list[int]) -> None:
        for counter, now, before in zip(_counters(), totals, self._shown, strict=True):
            counter.labels(*self._labels).inc(max(0, now - before))
        self._shown = totals
