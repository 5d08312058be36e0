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


def test_a_step_of_the_second_runner_is_few_launches_and_no_operators() -> None:
    """Nothing is uploaded for requests that stay, and nothing runs where all are lossless."""
    costs = json.loads(run("step_costs.py"))
    first = [costs.pop(f"first step, torch.{slots}") for slots in ("int32", "int64")]  # by the version of vLLM
    assert [(cost["launches"], cost["by_the_front_end"]) for cost in first] == [(3, 0), (3, 0)]
    assert costs.pop("off") == {"launches": 0, "by_the_front_end": 0, "operators": 0}
    assert set(costs) >= {"margin:1", "margin:price=0.2", "judged:0.5", "judged:price=0.04", "mixed"}
    for rule, cost in costs.items():
        assert cost == {"launches": 3, "by_the_front_end": 0, "operators": 0}, rule


def test_a_triton_that_calls_compiled_kernels_otherwise_is_asked_to_launch() -> None:
    costs = json.loads(run("step_costs.py", OTHER_TRITON="1"))
    assert costs["mixed"] == {"launches": 3, "by_the_front_end": 3, "operators": 0}
