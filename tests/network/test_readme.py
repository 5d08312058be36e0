"""The commands and the Python of the README and the quick start run as written, with the small pair."""

from __future__ import annotations

import json
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


def commands(page: str) -> list[str]:
    """The lines of shell of a page, without comments."""
    blocks = [code.replace("\\\n", "") for name, kind, code in BLOCKS if name == page and not kind]
    return [shlex.join(shlex.split(line, comments=True)) for code in blocks for line in code.splitlines()]


LINES = [line for page in PAGES for line in commands(page)]
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
    assert len(QUICK) > 1


@pytest.mark.quick("*--quality*")
@pytest.mark.parametrize("line", QUICK)
def test_answers(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, f"{line} --max-new-tokens 12 --gamma 4")  # whatever passes cost on this machine
    shown = capsys.readouterr()
    assert ("\x1b[" in shown.out) == ("--color" in line)
    assert "tokens/s" in shown.err


@pytest.mark.quick("0", "1")
@pytest.mark.parametrize("number", range(sum(kind == "python" for _, kind, _ in BLOCKS)))
def test_python(
    number: int, shipped: Pair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As written, with the pair that is loaded already and short answers."""
    monkeypatch.setattr(Pair, "load", lambda name: shipped)
    monkeypatch.setattr(selfjudge, "generate", lambda *args, **named: generate(*args, **{"max_new_tokens": 6} | named))
    page, code = [(page, code) for page, kind, code in BLOCKS if kind == "python"][number]
    exec(compile(code, page, "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_a_certificate(
    page: str, start: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lines of a page in their order, some seconds of tuning; the README's prompts are sums, whose answers are short."""
    sums = [(a, b) for a in range(2, 20) for b in range(2, 16)]
    rows = [{"prompt": f"What is {a} + {b}? Say the number alone.", "answer": str(a + b)} for a, b in sums]
    Path("mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [line for line in commands(page) if line in RECIPE]
    assert len(lines) >= 2
    for line in lines:
        if line.startswith("selfjudge serve"):
            assert start(*shlex.split(line)[2:]).send("GET", "/")[0] == 200  # the playground
            continue
        hurry = " --minutes 0.2 --max-new-tokens 32" if line.startswith("selfjudge tune") else ""
        run(monkeypatch, line + hurry)  # of an option that is given twice the last counts
        shown = capsys.readouterr().out
        assert not hurry or re.search(r"certified ≤|[Uu]se (exact|plain)", shown)
