"""Wrong input of every kind: one line on stderr, exit code 2, nothing on stdout."""

from __future__ import annotations

import ast
import re
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


def test_the_messages_of_the_troubleshooting_page_are_those_of_the_source() -> None:
    rows = re.findall(r"^\| (`.*?) \| .+ \| .+ \|$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.M)
    assert len(rows) == 14
    texts = [text for file in (ROOT / "src").rglob("*.py") for text in strings(ast.parse(file.read_text()))]
    texts += [file.read_text() for file in (ROOT / "src").rglob("*.txt")]
    for message in re.findall(r"`(.+?)`", "\n".join(rows)):
        plain = re.sub(r"--([a-z]+)", r"`\1`", message).replace("'…'", "…")  # options, and what is quoted by !r
        pattern = re.compile(".*".join(map(re.escape, plain.split("…"))))
        assert any(pattern.search(text) for text in texts), message


def strings(tree: ast.AST) -> list[str]:
    """Every text of a module, what is put in at run time left out."""
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    return [
        "".join(part.value if isinstance(part, ast.Constant) else "" for part in node.values)
        if isinstance(node, ast.JoinedStr)
        else str(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and id(node) not in parts)
    ]
