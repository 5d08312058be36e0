"""Whether a machine is quiet enough for its times to mean something."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

SPREAD = 0.35
"""Times of the same work that differ by a larger share of their median are not reliable."""
OTHERS = 0.12
"""Share of the processors that other programs may use beside work that takes all the rest."""
FULL = 0.85
"""Share of the processors in use from which programs wait for each other."""


class LoadWatch:
    """Watches the processors from its construction on: those that this process may use, by the system's own counts."""

    def __init__(self) -> None:
        self._begun = _read_clocks()

    def describe(self, turns: Iterable[Sequence[float]] = ()) -> str:
        """Why times measured since the beginning are not reliable, in one sentence; empty where they are.

        `turns` are seconds of repeated work: each sequence those of the same work.
        """
        (wall, busy, own), (then, busy_then, own_then) = _read_clocks(), self._begun
        seconds, cores = max(wall - then, 1e-3), _count_cores()
        used, others = (busy - busy_then) / seconds, max(0.0, busy - busy_then - (own - own_then)) / seconds
        spread = max((0.0, *((max(each) - min(each)) / median(each) for each in turns if each)))
        reasons = []
        if used > FULL * cores and others > OTHERS * cores:
            reasons.append(f"other programs took {others:.1f} of {cores} cores")
        if spread > SPREAD:
            reasons.append(f"times of the same answer differ by {spread:.0%}")
        return f"this machine is busy: speeds are not reliable ({', '.join(reasons)})" if reasons else ""


def _count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _read_clocks() -> tuple[float, float, float]:
    """Seconds: of the clock, of work on our processors, and of this process and its children; without Linux's counts
    of all work it is our own."""
    own = busy = sum(os.times()[:4])
    with suppress(OSError):
        ours = {f"cpu{number}" for number in os.sched_getaffinity(0)} if hasattr(os, "sched_getaffinity") else set()
        lines = [line.split() for line in Path("/proc/stat").read_text("utf-8").splitlines()]
        # user, nice, system, irq, softirq, steal: neither idle nor waiting for a disk
        ticks = sum(int(line[i]) for line in lines if line[0] in ours for i in (1, 2, 3, 6, 7, 8))
        busy = ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic(), busy, own
