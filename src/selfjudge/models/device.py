"""Where models run: the device of a name, or the best there is, and how much memory there is."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from selfjudge.errors import SelfJudgeError, first_line

if TYPE_CHECKING:
    import torch

GROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


def choose_device(name: str | None) -> torch.device:
    """The device of that name, or the best there is."""
    import torch

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # kernels are launched on the current device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise SelfJudgeError(f"`device` {name!r} cannot be used: {first_line(error)}") from None
    return device


def available_memory() -> int | None:
    """Bytes that can be had without swapping, within the limit of a container; None where the system does not say."""
    known = [_field(MEMINFO, "MemAvailable", 1024), _left_of_group()]
    return min((size for size in known if size is not None), default=None)


def check_memory(needed: int, reference: str) -> None:
    """Refuse a model whose weights do not fit."""
    free = available_memory()
    if free is not None and needed > free:
        raise SelfJudgeError(
            f"{reference} needs {needed / 1e9:.1f} GB of memory for its weights and {free / 1e9:.1f} GB are available"
        )


def give_back() -> None:
    """Give memory that was freed back to the system: glibc keeps it for this process otherwise."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
        if trim is not None:
            trim(0)


def _left_of_group() -> int | None:
    """What the limit of a control group leaves; pages of files do not count, the system drops them."""
    try:
        limit = int((GROUP / "memory.max").read_text())
        used = int((GROUP / "memory.current").read_text())
    except (OSError, ValueError):  # no such limit
        return None
    return limit - used + (_field(GROUP / "memory.stat", "file", 1) or 0)


def _field(file: Path, name: str, unit: int) -> int | None:
    try:
        found = re.search(rf"^{name}:?\s+(\d+)", file.read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else int(found[1]) * unit
