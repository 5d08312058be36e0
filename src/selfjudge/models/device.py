"""Where models run: the device of a name, or the best there is, and how much memory there is."""

from __future__ import annotations

import ctypes
import re
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfjudge.errors import SelfJudgeError, first_line
from selfjudge.types import LazyModule

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")
CAPTURING = threading.Lock()  # of the thread that captures CUDA graphs


def empty_cache() -> None:
    """Give spare memory back to the GPU, once no thread captures: torch would keep it meanwhile."""
    with CAPTURING:
        torch.cuda.empty_cache()


def choose_device(name: str | None) -> torch.device:
    """The device of that name, or the best there is."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # kernels are launched on the current device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise SelfJudgeError(f"no `device` {name!r}: {first_line(error)}; omit it or install a torch for it") from None
    return device


def make_current(device: torch.device) -> None:
    """Let this thread launch kernels on a device: on CUDA they go to the current one, which is each thread's own."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def available_memory() -> int | None:
    """Bytes that can be had without swapping, within the limit of a container; None where the system does not say."""
    known = [_field(MEMINFO, "MemAvailable", 1024), _left_of_group()]
    return min((size for size in known if size is not None), default=None)


def parse_memory(text: str, option: str = "gpu_memory") -> float:
    """A share of a device (`0.9`) as it is, a size (`8GB`, `500MB`) in bytes; `option` is what the user calls it."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(|GB|GiB|MB)", text) if isinstance(text, str) else None
    size = 0.0 if found is None else float(found[1]) * {"": 1, "GB": 1e9, "GiB": 1 << 30, "MB": 1e6}[found[2]]
    if size <= 0 or (1 < size < 1_000_000):
        raise SelfJudgeError(f"`{option}` is a share such as '0.9' or a size such as '8GB', not {text!r}")
    return size


def limit_memory(device: torch.device, text: str) -> None:
    """Let torch take at most this share or this size of a CUDA device; more is out of memory."""
    size = parse_memory(text)
    if device.type != "cuda":
        raise SelfJudgeError(f"`gpu_memory` needs a CUDA device, not {device.type}")
    total = torch.cuda.get_device_properties(device).total_memory
    if size > max(1, total):
        raise SelfJudgeError(f"`gpu_memory` {text} is more than the {total / 1e9:.0f} GB of this device")
    torch.cuda.set_per_process_memory_fraction(size if size <= 1 else size / total, _index(device))


def send(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Numbers on a device. A copy to CUDA comes from pinned memory: it does not wait for work that is under way."""
    tensor = torch.as_tensor(values, dtype=dtype)
    pinned = device.type == "cuda" and not tensor.is_cuda
    return (tensor.pin_memory() if pinned else tensor).to(device, non_blocking=pinned)


def free_memory(device: torch.device) -> int | None:
    """Bytes that this process can still have on a device, within its limit; None where nobody says."""
    if device.type != "cuda":
        return available_memory()
    free, total = torch.cuda.mem_get_info(device)
    reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    limit = int(torch.cuda.get_per_process_memory_fraction(_index(device)) * total)
    return min(free, limit - reserved) + reserved - allocated


def _index(device: torch.device) -> int:
    """The number of a CUDA device, also where its name has none: some functions of torch want it."""
    return torch.cuda.current_device() if device.index is None else device.index


def check_memory(needed: int, reference: str, device: torch.device | None = None) -> None:
    """Refuse a model whose weights do not fit."""
    free = available_memory() if device is None else free_memory(device)
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
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
    except (OSError, ValueError):  # no such limit
        return None
    return limit - used + (_field(CGROUP / "memory.stat", "file", 1) or 0)


def _field(file: Path, name: str, unit: int) -> int | None:
    """A number of a file of lines `name number`, in bytes; None where it is not there."""
    try:
        found = re.search(rf"^{name}:?\s+(\d+)", file.read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else int(found[1]) * unit
