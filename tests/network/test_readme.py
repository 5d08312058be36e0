"""The commands and the Python of the README run as written, on the embedded pair."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from selfjudge.cli import main as cli
from selfjudge.models.pair import Pair
from servers import Server

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.M | re.S)
COMMANDS = [shlex.split(line, comments=True) for kind, block in BLOCKS if not kind for line in block.splitlines()]
ELSEWHERE = {
    "make demo": "by hand: it makes an environment; its one command is tried in test_embedded_demo.py",
    "pip install build && python -m build && pip install dist/selfjudge-0.1.0-py3-none-any.whl[serve]": "tests/process/test_wheel.py",
}


def command(name: str) -> list[str]:
    """The one line of the README with this command, without `selfjudge`."""
    (words,) = (words[1:] for words in COMMANDS if words[:2] == ["selfjudge", name])
    return words


def test_every_command_is_tried() -> None:
    lines = {" ".join(words) for words in COMMANDS}
    tried = {"doctor", "generate", "tune", "serve"}
    assert {line for line in lines if line.split()[1] not in tried} == set(ELSEWHERE)


def run(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["selfjudge", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code


def test_doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, command("doctor"))
    assert "torch" in capsys.readouterr().out


def test_generate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, command("generate"))
    shown = capsys.readouterr()
    assert "\x1b[" in shown.out  # coloured
    assert "tokens/s" in shown.err
    assert "the target wanted" in shown.err


def test_the_python_of_the_readme(
    embedded: Pair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Pair, "load", lambda name: embedded)
    (code,) = (block for kind, block in BLOCKS if kind == "python")
    exec(compile(code, "README.md", "exec"), {})
    assert "[(" in capsys.readouterr().out


@pytest.mark.slow
def test_tune_and_serve(
    start: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On sums, whose answers are short. Only the port is another, since 8000 may be taken, and tune ends after a minute."""
    monkeypatch.chdir(tmp_path)
    sums = [(a, b) for a in range(2, 20) for b in range(2, 16)]
    rows = [{"prompt": f"What is {a} + {b}? Say the number alone.", "answer": str(a + b)} for a, b in sums]
    Path("mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(monkeypatch, [*command("tune"), "--minutes", "1"])
    assert re.search(r"certified ≤ 3\.|use exact", capsys.readouterr().out)
    serve = command("serve")
    assert serve[0] == "serve"
    server = start(*serve[1:])
    answer = server.client().chat.completions.create(
        model="smollm2-135m", messages=[{"role": "user", "content": rows[0]["prompt"]}], max_tokens=8
    )
    assert answer.choices[0].message.content
    assert server.send("GET", "/")[0] == 200  # the playground
