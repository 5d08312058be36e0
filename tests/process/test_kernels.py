"""The kernels for other processors than this one: older ones of its kind, and those of the other kind under an emulator."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from fake_gguf import KINDS, check_kind
from selfjudge.engine.cpu.library import SOURCES, library

OTHER = "aarch64" if platform.machine() == "x86_64" else "x86_64"
CROSS, EMULATOR = f"{OTHER}-linux-gnu-g++", f"qemu-{OTHER}-static"
EMULATED = {  # what qemu knows: no AVX-512
    "aarch64": [("-mcpu=neoverse-n1", "neon"), ("-mcpu=cortex-a72", "portable")],
    "x86_64": [("-march=haswell", "avx2"), ("-march=x86-64", "portable")],
}
OLDER = {"x86_64": [("x86-64", b"portable"), ("haswell", b"avx2")], "aarch64": [("cortex-a72", b"portable")]}
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("processor", "name"), OLDER.get(platform.machine(), []))
def test_kernels_of_older_processors_give_the_same_products(processor: str, name: bytes) -> None:
    assert library(processor).block_kernel() == name
    for kind in KINDS:
        check_kind(kind, processor)


@pytest.mark.skipif(not (shutil.which(CROSS) and shutil.which(EMULATOR)), reason=f"needs {CROSS} and {EMULATOR}")
@pytest.mark.parametrize(("processor", "name"), EMULATED[OTHER])
def test_kernels_of_the_other_kind_give_the_same_products_emulated(processor: str, name: str, tmp_path: Path) -> None:
    program, source = tmp_path / "apply", Path(__file__).with_name("apply_blocks.cpp")
    flags = ["-O2", processor, "-std=c++17", "-fno-math-errno", "-fno-trapping-math"]
    folder = f"-I{Path(SOURCES[0]).parent}"
    subprocess.run([CROSS, *flags, "-fopenmp", folder, str(source), "-o", str(program)], check=True)

    def emulated(data: NDArray[np.uint8], kind: int, x: NDArray[np.float32]) -> NDArray[np.float32]:
        sizes = [str(n) for n in (kind, len(data), x.shape[1], len(x))]
        command = [EMULATOR, "-cpu", "max", "-L", f"/usr/{OTHER}-linux-gnu", str(program), *sizes]
        done = subprocess.run(command, input=data.tobytes() + x.tobytes(), capture_output=True, check=True)
        assert name in done.stderr.decode()
        return np.frombuffer(done.stdout, np.float32).reshape(len(x), len(data))

    for kind in KINDS:
        check_kind(kind, emulated)
