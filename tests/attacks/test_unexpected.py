"""An error that nobody foresaw: one line and exit code 1, the traceback on demand."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from selfjudge.cli import main as cli, models


def broken() -> Path:
    raise KeyError("tau\nand more")


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "home", broken)
    monkeypatch.setattr(sys, "argv", ["selfjudge", "ls", "pairs"])


@pytest.mark.usefixtures("failing")
def test_one_line_with_a_hint(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv(cli.DEBUG, raising=False)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    streams = capsys.readouterr()
    assert (stop.value.code, streams.out, streams.err.count("\n")) == (1, "", 1)
    assert streams.err.startswith("selfjudge: unexpected KeyError: 'tau")
    assert "SELFJUDGE_DEBUG=1" in streams.err


@pytest.mark.usefixtures("failing")
def test_the_traceback_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cli.DEBUG, "1")
    with pytest.raises(KeyError):
        cli.main()


@pytest.mark.usefixtures("failing")
@pytest.mark.parametrize("kind", [MemoryError, RecursionError, RuntimeError, OSError])
def test_other_kinds(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raising() -> Path:
        raise kind

    monkeypatch.setattr(models, "home", raising)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert (stop.value.code, capsys.readouterr().err.count("\n")) == (1, 1)


@pytest.mark.usefixtures("failing")
def test_halves_of_characters_are_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["selfjudge", "report", "nowhere\udc80"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    streams = capsys.readouterr()
    assert (stop.value.code, streams.err.count("\n")) == (2, 1)
    assert "nowhere\\udc80" in streams.err


@pytest.mark.parametrize("stdin", [io.TextIOWrapper(io.BytesIO(b"\xffHi"), "utf-8"), None])
def test_standard_input_that_is_no_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stdin: io.TextIOWrapper | None
) -> None:
    monkeypatch.setattr(sys, "argv", ["selfjudge", "generate", "-"])
    monkeypatch.setattr(sys, "stdin", stdin)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert (stop.value.code, capsys.readouterr().err) == (2, "selfjudge: standard input holds no text in UTF-8\n")
