"""What a process takes of the machine: memory that was freed goes back, loading takes little of it, and threads that wait sleep."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, LlamaConfig, LlamaModel

from selfjudge.models import load
from selfjudge.models.checkpoint import StoredTensor
from warm import forks

M_MMAP_THRESHOLD = -3  # of malloc.h

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
        [sys.executable, "-c", script], env=kept | given, capture_output=True, text=True, timeout=600, check=True
    )
    assert done.stdout.strip() in (("4000", "100000") if waits else (given.get("GOMP_SPINCOUNT", ""),))


def measure_load(source: Path, answer: Connection) -> None:
    """In a process of its own: send by how many MiB its memory grows at most while it loads a checkpoint."""
    # blocks that were freed go back at once, and no thread of transformers reads ahead of one that waits for a core
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1_000_000)
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    kept = StoredTensor.to

    def forget(self: StoredTensor, **options: Any) -> torch.Tensor:
        return kept(self, **options).to("meta")  # what a device of its own memory leaves on the host

    def resident(name: str) -> int:
        (found,) = re.findall(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
        return int(found) // 1024

    StoredTensor.to = forget  # type: ignore[method-assign]
    torch.nn.Module.to = lambda self, *args: self  # type: ignore[method-assign]
    config = AutoConfig.from_pretrained(source)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    load._load_model(source, config, torch.bfloat16, torch.device("cpu"), {})
    answer.send(resident("VmHWM") - before)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a part of a run is Linux's")
def test_host_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """A device with memory of its own is played by `meta`: the host then holds what is on its way alone."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=1024, intermediate_size=8192, num_hidden_layers=5, num_attention_heads=8,
        num_key_value_heads=8, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = torch.nn.ModuleDict({"model": LlamaModel(config)})
    zeros = {name: torch.zeros(p.shape, dtype=torch.bfloat16) for name, p in model.named_parameters()}
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    save_file(zeros, tmp_path / "model.safetensors", {"format": "pt"})
    size = (tmp_path / "model.safetensors").stat().st_size >> 20
    assert size > 250
    answers, answer = forks().Pipe(duplex=False)
    process = forks().Process(target=measure_load, args=(tmp_path, answer))
    process.start()
    answer.close()
    assert 0 < answers.recv() < size // 3
    process.join()
