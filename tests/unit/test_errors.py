"""Every row of docs/errors.md is tried, and every refusal tried here has a row: one line on stderr, exit code 2."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from refusals import known_at_once, known_from_models, write_inputs
from selfjudge.cli import main as cli

TABLE = Path(__file__).parents[2] / "docs" / "errors.md"


def documented() -> list[re.Pattern[str]]:
    """The right column of the table; an ellipsis stands for anything."""
    rows = [line.split("|") for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    messages = [row[2].strip().strip("`") for row in rows if "`" in row[2]]
    return [re.compile("selfjudge: " + ".*".join(map(re.escape, m.split("…")))) for m in messages]


def test_every_row_of_the_table(
    checkpoints: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # as on a machine without it
    monkeypatch.delenv("SELFJUDGE_DATA", raising=False)
    write_inputs(tmp_path, checkpoints)
    patterns = documented()
    untried, wrong = set(patterns), []
    for name, command in (known_at_once(tmp_path, checkpoints) | known_from_models(tmp_path, checkpoints)).items():
        monkeypatch.setattr(sys, "argv", ["selfjudge", *command])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        streams = capsys.readouterr()
        assert (stop.value.code, streams.out) == (2, ""), (name, streams)
        assert streams.err.count("\n") == 1, (name, streams.err)
        matching = {pattern for pattern in patterns if pattern.fullmatch(streams.err.strip())}
        untried -= matching
        if not matching:
            wrong.append(f"{name}: {streams.err.strip()}")
    assert not wrong, "not in docs/errors.md:\n" + "\n".join(wrong)
    assert not untried, "tried by no command:\n" + "\n".join(pattern.pattern for pattern in untried)
