"""Counts what the rules did, on the device, and shows it as Prometheus counters; no step waits for a count."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from selfjudge.integrations.vllm.plan import DraftRows

COUNTERS = {
    "cycles": "Verified blocks of drafts.",
    "tokens": "Tokens emitted by them: accepted drafts and the target's own token after.",
    "aligned_tokens": "Tokens the same blocks would have emitted losslessly.",
    "judged_tokens": "Drafts that a rule accepted although they were not the target's most likely token.",
}
EVERY = 1.0  # seconds between two reads of the device's counts
STEPS = 64  # steps that are counted together


@cache
def _counters() -> list[Any]:
    from prometheus_client import Counter

    return [Counter(f"selfjudge:{name}", text, ["model_name", "engine"]) for name, text in COUNTERS.items()]


class CountedStep(NamedTuple):
    """The drafts of a step and what was accepted of them."""

    rows: DraftRows
    emitted: Tensor
    """[R] the tokens that each request got; the last one is not a draft."""
    flags: Tensor
    """[3, n] which drafts were raised, which were aligned anyway, and which were marked at all: of the others, those
    that were accepted count as aligned."""


def count_steps(steps: Sequence[CountedStep]) -> Tensor:
    """The counters [4] of some steps, which are counted as one larger step."""
    rows = DraftRows.of(torch.cat([step.rows.counts for step in steps]), sum(len(step.rows.owner) for step in steps))
    drafted, accepted = rows.counts > 0, torch.cat([step.emitted for step in steps]) - 1
    accepted_here = rows.place < accepted[rows.owner]
    raised, aligned, marked = torch.cat([step.flags for step in steps], 1)
    aligned = torch.where(marked, aligned, accepted_here)
    cycles, judged = drafted.sum(), (accepted_here & raised & ~aligned).sum()
    return torch.stack([cycles, (accepted * drafted).sum() + cycles, rows.leading(aligned).sum() + cycles, judged])


class Counts:
    """Totals of one engine.

    `add` keeps a step, to be counted on the device together with others. `report` shows the totals to Prometheus,
    `read` returns them."""

    def __init__(self, device: torch.device, *labels: str) -> None:
        self.total = torch.zeros(len(COUNTERS), dtype=torch.long, device=device)
        self._steps: list[CountedStep] = []
        self._labels = labels
        self._shown = [0] * len(COUNTERS)
        self._copy = torch.zeros_like(self.total, device="cpu", pin_memory=device.type == "cuda")
        self._arrived: torch.Event | None = None
        self._copied = time.monotonic()

    def add(self, rows: DraftRows, emitted: Tensor, flags: Tensor | None) -> None:
        """One step, as `CountedStep` says, without flags where all requests are lossless. The tensors are read later
        and must not be written to again."""
        self._steps.append(CountedStep(rows, emitted, rows.unmarked if flags is None else flags))
        if len(self._steps) >= STEPS:
            self._fold()

    @torch.inference_mode()  # the kept tensors were made in this mode
    def _fold(self) -> None:
        """Count the steps that were kept, without waiting for the device."""
        steps, self._steps = self._steps, []
        if steps:
            self.total += count_steps(steps)

    def read(self) -> dict[str, int]:
        """The totals now; waits for the device."""
        self._fold()
        return dict(zip(COUNTERS, self.total.tolist(), strict=True))

    def report(self, *, idle: bool) -> None:
        """Called every step. Copies the totals once a second without waiting; only an idle engine waits for them."""
        if idle:
            self._arrived = None
            self._fold()
            self._show(self.total.tolist())
        elif self._arrived is not None:
            if self._arrived.query():
                self._arrived = None
                self._show(self._copy.tolist())
        elif time.monotonic() - self._copied > EVERY:
            self._copied = time.monotonic()
            self._fold()
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
