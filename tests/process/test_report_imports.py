"""What importing the report loads."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["selfjudge.report", "selfjudge.report.page", "selfjudge.report.demo"])
def test_a_report_needs_no_torch_and_no_numpy(module: str) -> None:
    heavy = "{'torch', 'transformers', 'numpy', 'matplotlib'}"
    code = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
