"""The kernels of a GPU under Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_judge_and_mark_are_what_torch_says() -> None:
    checks = Path(__file__).parents[1] / "kernel_checks.py"
    paths = os.pathsep.join([str(Path(sys.prefix) / "triton"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(checks)], env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.stdout.strip() == "the kernels agree", done.stderr[-2000:]
