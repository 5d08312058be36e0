"""Files from strangers: one line on stderr, exit code 2, nothing written."""

from __future__ import annotations

from pathlib import Path

import pytest

from selfjudge.errors import SelfJudgeError
from selfjudge.store import read_json, read_rows


def test_json_nested_a_hundred_thousand_deep(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.json"
    bomb.write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(SelfJudgeError, match="nested too deep"):
        read_json(bomb)
    with pytest.raises(SelfJudgeError, match="nested too deep"):
        next(read_rows(bomb))
