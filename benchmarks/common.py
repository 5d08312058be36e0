"""What the scripts share: lines with the time since the start."""

from __future__ import annotations

import time

START = time.monotonic()


def say(*parts: object) -> None:
    print(f"[{time.monotonic() - START:.0f} s]", *parts, flush=True)
