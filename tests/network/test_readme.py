"""The commands and the Python of the README and the quick start run as written, with the small pair."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import selfjudge
from selfjudge import generate
from selfjudge.cli import main as cli
from selfjudge.models.pair import Pair
from servers import Server

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/quickstart.md")
BLOCKS = [
    (page, kind, code)
    for page in PAGES
    for kind, code in re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.M | re.S)
]
LINES = [
    shlex.join(shlex.split(line, comments=True)) for _, kind, code in BLOCKS if not kind for line in code.splitlines()
]
ELSEWHERE = {
    "make demo": "it makes an environment; its one command is tried in test_embedded_demo.py",
    "source .venv/bin/activate": "of every virtual environment",
    "python -m pip install build '&&' python -m build": "tests/process/test_wheel.py",
    "pip install 'dist/selfjudge-0.1.0-py3-none-any.whl[serve]'": "tests/process/test_wheel.py",
    "selfjudge serve": "tests/network/test_server.py, on another port",
}
QUICK = sorted({line for line in LINES if line.startswith("selfjudge generate")})
RECIPE = [line for line in LINES if re.match(r"selfjudge (tune|certificate|serve --recipe)", line)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The small pair wherever none is named, in an empty folder."""
    monkeypatch.setenv("SELFJUDGE_PAIR", "smollm2-135m")
    monkeypatch.chdir(tmp_path)


def run(monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    monkeypatch.setattr(sys, "argv", shlex.split(line))
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code


def test_every_command_is_tried() -> None:
    assert {*LINES} == {*ELSEWHERE, *QUICK, *RECIPE}
    assert len(QUICK) == 3


@pytest.mark.parametrize("line", QUICK)
def test_answers(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, f"{line} --max-new-tokens 32")
    shown = capsys.readouterr()
    assert ("\x1b[" in shown.out) == ("--color" in line)
    assert "tokens/s" in shown.err


@pytest.mark.parametrize("number", range(sum(kind == "python" for _, kind, _ in BLOCKS)))
def test_python(
    number: int, embedded: Pair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As written, with the pair that is loaded already and short answers."""
    monkeypatch.setattr(Pair, "load", lambda name: embedded)
    monkeypatch.setattr(selfjudge, "generate", lambda *args, **named: generate(*args, **{"max_new_tokens": 24} | named))
    page, code = [(page, code) for page, kind, code in BLOCKS if kind == "python"][number]
    exec(compile(code, page, "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()


@pytest.mark.slow
def test_a_certificate(
    start: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The quick start's lines in their order, on fewer minutes."""
    for line in RECIPE:
        if "--prompts mine.jsonl" in line:
            continue  # the README's, with the prompts of its reader
        if line.startswith("selfjudge tune"):
            run(monkeypatch, re.sub(r"--minutes \d+", "--minutes 1", line))
            assert re.search(r"certified ≤ 10\.|use exact", capsys.readouterr().out)
        elif line.startswith("selfjudge certificate"):
            run(monkeypatch, line)
        else:
            server = start(*shlex.split(line)[2:])
            assert server.send("GET", "/")[0] == 200
