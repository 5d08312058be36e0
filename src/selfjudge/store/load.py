"""Whether a machine is quiet enough for its times to mean something."""

import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from multiprocessing import active_children
from pathlib import Path
from statistics import median

SPREAD = 0.35  # times of the same work that differ by a larger share of their median are not reliable
OTHERS = 0.12  # share of the processors that other programs may use beside work that takes all the rest
FULL = 0.85  # share of the processors in use from which programs wait for each other
SHORTEST = 0.5  # seconds below which neither the system's counts nor differing times say anything
Usage = tuple[float, float, float]
"""Seconds: of the clock, of work on our processors, and of this process and its children."""


class LoadWatch:
    """Watches the processors from its construction on: those that this process may use, by the system's own counts."""

    def __init__(self) -> None:
        self._begun = _read_clocks()

    @property
    def usage(self) -> Usage:
        """What was used since the beginning."""
        wall, busy, own = (now - then for now, then in zip(_read_clocks(), self._begun, strict=True))
        return wall, busy, own

    def describe(self, turns: Iterable[Sequence[float]] = ()) -> str:
        """`describe_load` of the time since the beginning."""
        return describe_load([self.usage], turns)


def describe_load(usages: Iterable[Usage], turns: Iterable[Sequence[float]] = ()) -> str:
    """Why times measured during these usages are not reliable, in one sentence; empty where they are.

    `turns` are seconds of repeated work: each sequence those of the same work."""
    wall, busy, own = (sum(column) for column in zip((0.0, 0.0, 0.0), *usages, strict=True))
    seconds, cores = max(wall, SHORTEST), _count_cores()
    used, others = busy / seconds, max(0.0, busy - own) / seconds
    spread = max((0.0, *((max(each) - min(each)) / median(each) for each in turns if sum(each) >= SHORTEST)))
    reasons = []
    if wall >= SHORTEST and used > FULL * cores and others > OTHERS * cores:
        reasons.append(f"other programs took {others:.1f} of {cores} cores")
    if spread > SPREAD:
        reasons.append(f"times of the same answer differ by {spread:.0%}")
    return f"this machine is busy: speeds are not reliable ({', '.join(reasons)})" if reasons else ""


def _count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _read_clocks() -> Usage:
    """The clocks now; without Linux's counts of all work it is our own."""
    own = busy = sum(os.times()[:4])
    with suppress(OSError):
        second = os.sysconf("SC_CLK_TCK")
        for child in active_children():  # an engine in a process of its own; those that ended are in our own times
            stat = Path(f"/proc/{child.pid}/stat").read_text("utf-8").rpartition(")")[2].split()
            own += sum(map(int, stat[11:15])) / second
        ours = {f"cpu{number}" for number in os.sched_getaffinity(0)} if hasattr(os, "sched_getaffinity") else set()
        lines = [line.split() for line in Path("/proc/stat").read_text("utf-8").splitlines()]
        # user, nice, system, irq, softirq, steal: neither idle nor waiting for a disk
        busy = sum(int(line[i]) for line in lines if line[0] in ours for i in (1, 2, 3, 6, 7, 8)) / second
    return time.monotonic(), busy, own
