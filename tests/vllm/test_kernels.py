"""The kernels of a GPU under Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

MOST = {"attention": 16, "product": 12, "norm": 10}
"""Most variants of a kernel, where they are more than four."""


def run(script: str, **more: str) -> str:
    """What a script prints, with Triton."""
    paths = os.pathsep.join([str(Path(sys.prefix) / "triton"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(Path(__file__).parents[1] / script)]
    environment = os.environ | {"PYTHONPATH": paths} | more
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_kernels_are_what_torch_says() -> None:
    assert run("kernel_checks.py", TRITON_INTERPRET="1") == "the kernels agree"


def test_few_variants_of_kernels_serve_all_batches() -> None:
    """1 to 512 rows, γ of 0 to 10, and prompts: what changes with them is not compiled into the kernels."""
    counts = json.loads(run("kernel_variants.py"))
    assert set(MOST) < set(counts)
    for name, count in counts.items():
        assert count <= MOST.get(name, 4), (name, counts)
