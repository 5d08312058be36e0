"""Memory that was freed goes back to the system."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

SCRIPT = """
import ctypes
import os
from pathlib import Path

from selfjudge.models.memory import give_back

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
