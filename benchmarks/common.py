"""What the scripts share: lines with the time since the start, and what a figure was measured on."""

from __future__ import annotations

import time
from typing import Any

from selfjudge.store import machine, versions

START = time.monotonic()


def say(*parts: object) -> None:
    print(f"[{time.monotonic() - START:.0f} s]", *parts, flush=True)


def measured_on() -> dict[str, Any]:
    """Machine, versions and date, for the head of a results file."""
    return {"machine": machine(), "versions": versions(), "date": time.strftime("%Y-%m-%d")}


class Progress:
    """Says each new stage, and a stage again after every `step` of it."""

    def __init__(self, step: float = 0.1) -> None:
        self.step = step
        self._said: dict[str, float] = {}

    def __call__(self, stage: str, share: float) -> None:
        kind = stage.split(":")[0]
        if share - self._said.get(kind, -1) >= self.step:
            self._said[kind] = share
            say(stage, f"{share:.0%}")
