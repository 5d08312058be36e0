"""What the judge did, counted on the device and shown as Prometheus counters; no step waits for a count."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from selfjudge.integrations.vllm.approval import Rows

COUNTERS = {
    "cycles": "Verified blocks of drafts.",
    "tokens": "Tokens emitted by them: accepted drafts and the target's own token after.",
    "aligned_tokens": "Tokens the same blocks would have emitted without the judge.",
    "judged_tokens": "Accepted drafts that were not the target's most likely token, on the judge's word.",
}
EVERY = 1.0  # seconds between two looks at the device
STEPS = 64  # that are counted together
MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"


@cache
def _counters() -> list[Any]:
    from prometheus_client import Counter

    return [Counter(f"selfjudge:{name}", text, ["model_name", "engine"]) for name, text in COUNTERS.items()]


class Step(NamedTuple):
    """What became of the drafts of a step."""

    rows: Rows
    sampled: Tensor
    """[R, γ+1] the tokens of each request, −1 where there is none, or [R] how many there are; the last one is no draft."""
    flags: Tensor | None
    """[2, n] which drafts were raised and which aligned anyway; a third row says which were looked at, if not all were.
    Of drafts that nobody looked at, those that were accepted are aligned; None: nobody asked the judge at all."""


def counted(steps: Sequence[Step]) -> Tensor:
    """The counters [4] of steps of which all or none asked the judge: their requests are those of one larger step."""
    counts, accepted = torch.cat([step.rows.counts for step in steps]), _sampled(steps) - 1
    drafted = counts > 0
    cycles = drafted.sum()
    tokens = (accepted * drafted).sum() + cycles
    flags = [step.flags for step in steps if step.flags is not None]
    if not flags:
        return torch.stack([cycles, tokens, tokens, torch.zeros_like(tokens)])
    rows = Rows.of(counts, sum(len(step.rows.owner) for step in steps))
    taken = rows.place < accepted[rows.owner]
    raised, aligned, *seen = torch.cat(flags, 1)
    if seen:
        aligned = torch.where(seen[0], aligned, taken)
    return torch.stack([cycles, tokens, rows.leading(aligned).sum() + cycles, (taken & raised & ~aligned).sum()])


def _sampled(steps: Sequence[Step]) -> Tensor:
    """[R] how many tokens the requests of all steps were given; blocks are as wide as the longest of their step."""
    blocks = [torch.cat(list(some)) for _, some in groupby([step.sampled for step in steps], lambda x: x.shape[1:])]
    return torch.cat([(block >= 0).sum(1) if block.ndim > 1 else block for block in blocks])


class Counts:
    """Totals of one engine: `add` keeps a step, to be counted on the device with others; `report` to Prometheus, `read` when
    somebody asks."""

    def __init__(self, device: torch.device, *labels: str) -> None:
        self.total = torch.zeros(len(COUNTERS), dtype=torch.long, device=device)
        self._steps: list[Step] = []
        self._labels = labels
        self._shown = [0] * len(COUNTERS)
        self._copy = torch.zeros_like(self.total, device="cpu", pin_memory=device.type == "cuda")
        self._arrived: torch.Event | None = None
        self._asked = time.monotonic()

    def add(self, rows: Rows, sampled: Tensor, flags: Tensor | None) -> None:
        """One step, as `Step` says; the tensors are read later and must not be written to again."""
        self._steps.append(Step(rows, sampled, flags))
        if len(self._steps) >= STEPS:
            self._fold()

    @torch.inference_mode()  # as what is kept was made
    def _fold(self) -> None:
        """Count the steps that were kept; nothing waits."""
        steps, self._steps = self._steps, []
        for lossless in (True, False):
            if some := [step for step in steps if (step.flags is None) is lossless]:
                self.total += counted(some)

    def read(self) -> dict[str, int]:
        """The totals now; waits for the device."""
        self._fold()
        return dict(zip(COUNTERS, self.total.tolist(), strict=True))

    def report(self, *, idle: bool) -> None:
        """Called every step. Looks at the device once a second without waiting; an idle engine may be waited for."""
        if idle:
            self._arrived = None
            self._fold()
            self._show(self.total.tolist())
        elif self._arrived is not None:
            if self._arrived.query():
                self._arrived = None
                self._show(self._copy.tolist())
        elif time.monotonic() - self._asked > EVERY:
            self._asked = time.monotonic()
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
