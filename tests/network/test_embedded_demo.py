"""The demo on the embedded pair; a file of its own, so that a second worker has it while the first has the other tests."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from selfjudge.cli.main import main
from selfjudge.label.config import find_shipped_tau
from selfjudge.models.pair import Pair

pytestmark = pytest.mark.slow


def demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path, *options: str
) -> dict[str, Any]:
    options = ("--out", str(tmp_path / "demo.html"), *options)
    monkeypatch.setattr(
        sys, "argv", ["selfjudge", "demo", "--limit", "1", "--max-new-tokens", "12", "--json", *options]
    )
    with contextlib.suppress(SystemExit):
        main()
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_demo_makes_a_judge_and_ends_in_a_table(
    embedded: Pair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    """With labels; tests/process/test_wheel.py has the demo without."""
    found = demo(monkeypatch, capsys, tmp_path)
    assert "judged, shipped" in (tmp_path / "demo.html").read_text()
    rules = [row["rule"] for row in found["rows"]]
    assert rules == ["plain", "exact", "topk:2", "judged, made just now", "judged, shipped"]
    assert (found["dtype"], found["draft_dtype"]) == ("q4", "int8")
    own = found["own"]
    assert own["labels"] > 50
    assert 0 < own["acceptable"] < 0.5
    assert own["tau"] == find_shipped_tau("smollm2-135m", embedded.draft_sha256, 10)["tau"]
    assert "why_not" not in own
    assert 0 <= own["auc"] <= 1
