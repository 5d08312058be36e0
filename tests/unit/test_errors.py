"""Wrong input of every kind: one line on stderr, exit code 2, nothing on stdout."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from refusals import known_at_once, known_from_models, write_inputs
from selfjudge.cli import main as cli

ROOT = Path(__file__).parents[2]


def test_wrong_input_is_answered_with_one_line(
    checkpoints: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # as on a machine without it
    monkeypatch.delenv("SELFJUDGE_DATA", raising=False)
    write_inputs(tmp_path, checkpoints)
    for name, command in (known_at_once(tmp_path, checkpoints) | known_from_models(tmp_path, checkpoints)).items():
        monkeypatch.setattr(sys, "argv", ["selfjudge", *command])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        streams = capsys.readouterr()
        assert (stop.value.code, streams.out) == (2, ""), (name, streams)
        assert streams.err.startswith("selfjudge: "), (name, streams.err)
        assert streams.err.count("\n") == 1, (name, streams.err)
