"""What a process takes of the machine: memory that was freed goes back, and threads that wait sleep."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

SCRIPT = """
import ctypes
import os
from pathlib import Path

from selfjudge.models.device import give_back

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
size = 64 << 10  # below what the C library maps by itself
blocks = [libc.malloc(size) for _ in range(2000)]
for block in blocks:
    ctypes.memset(block, 1, size)
for block in blocks[:-1]:  # the last one pins the end of the heap
    libc.free(ctypes.c_void_p(block))
before = resident()
give_back()
print(before - resident())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="malloc_trim is glibc's")
def test_freed_memory_is_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) > 64 << 20  # of 125 MiB


@pytest.mark.parametrize(
    ("given", "waits"), [({}, True), ({"GOMP_SPINCOUNT": "7"}, False), ({"OMP_WAIT_POLICY": "active"}, False)]
)
def test_waiting_threads_sleep_soon_unless_the_user_says_how_they_wait(given: dict[str, str], waits: bool) -> None:
    """Read by OpenMP when torch is loaded, so it must be there once the package is."""
    kept = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    script = "import os, selfjudge; print(os.environ.get('GOMP_SPINCOUNT', ''))"
    done = subprocess.run(
        [sys.executable, "-c", script], env=kept | given, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() in (("4000", "100000") if waits else (given.get("GOMP_SPINCOUNT", ""),))
