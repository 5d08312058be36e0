"""What a pipe is told of long work."""

from __future__ import annotations

import io
import threading
from contextlib import redirect_stderr

import pytest
from rich.console import Console

from selfjudge.cli import output


def test_a_stage_is_said_once_and_again_when_it_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(output.time, "monotonic", lambda: now)
    with output.Progress() as update:
        for seconds, stage, share in (
            (0, "labels", 0.1),
            (5, "labels", 0.2),
            (output.QUIET, "labels", 0.5),
            (1, "labels", 0.6),
            (1, "τ", 0.0),
            (2, "ready", 1.0),
        ):
            now += seconds
            update(stage, share)
    assert capsys.readouterr().err.splitlines() == ["labels …", "labels 50%, about 25 s left", "τ …", "ready"]


def test_no_percentage_is_said_before_one_is_known(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(output.time, "monotonic", lambda: now)
    with output.Progress() as update:
        for seconds, share in ((0, 0.0), (output.QUIET, 0.0), (output.QUIET, 0.5)):
            now += seconds
            update("reading the tokenizer", share)
    assert capsys.readouterr().err.splitlines() == [
        "reading the tokenizer …", "reading the tokenizer … 15 s", "reading the tokenizer 50%, about 30 s left",
    ]  # fmt: skip


def test_a_bar_without_a_share_has_no_percentage(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, width=120)
    monkeypatch.setattr(output, "Console", lambda **_: terminal)
    with output.Progress() as update:
        for share, shown in ((None, False), (0.0, False), (0.25, True), (0.0, False)):
            update("loading", share)
            assert update._bar is not None
            terminal.file = io.StringIO()
            terminal.print(update._bar.get_renderable())
            line = terminal.file.getvalue()
            assert "loading" in line
            assert (("%" in line), ("-:--:--" in line and not shown)) == (shown, False), line


class Watched(io.StringIO):
    """A pipe that can be waited on."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Semaphore(0)

    def write(self, text: str) -> int:
        count = super().write(text)
        if text.endswith("\n"):
            self.written.release()
        return count

    def wait(self, lines: int) -> list[str]:
        for _ in range(lines):
            assert self.written.acquire(timeout=600)
        return self.getvalue().splitlines()


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """For stderr, on a clock whose every look is a second later."""
    ticks = iter(range(10**9))
    monkeypatch.setattr(output.time, "monotonic", lambda: float(next(ticks)))
    monkeypatch.setattr(output, "TICK", 0.001)
    return Watched()


def test_work_that_says_nothing_is_spoken_for(pipe: Watched) -> None:
    with redirect_stderr(pipe), output.Progress() as update:
        update("labels", 0.25)
        said = pipe.wait(3)
    assert said[:3] == ["labels …", "labels 25%", "labels 25%"]


def test_work_that_has_said_nothing_yet(pipe: Watched) -> None:
    with redirect_stderr(pipe), output.Progress():
        assert pipe.wait(1)[0].startswith("working … ")


def test_a_status_that_goes_on(pipe: Watched) -> None:
    with redirect_stderr(pipe), output.Progress() as line:
        line("warming up …")
        said = pipe.wait(2)
    assert said[0] == "warming up …"
    assert said[1].startswith("warming up … ")
    assert said[1].endswith(" s")


def test_what_is_waited_for_is_said_late_and_where_it_was_asked(pipe: Watched) -> None:
    """A load sends what others write to stderr elsewhere; our own lines are not lost with it."""
    with redirect_stderr(pipe), output.waiting("loading a model …"), redirect_stderr(io.StringIO()) as lost:
        assert pipe.wait(1)[0].startswith("loading a model … ")
    assert lost.getvalue() == ""


def test_a_line_of_the_result_ends_the_silence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(output.time, "monotonic", lambda: now)
    with output.Progress(patient=True) as line:
        for seconds, stage in ((0, "labels"), (output.QUIET - 1, "labels"), (2, "a row"), (output.QUIET + 3, "a row")):
            now += seconds
            line(stage)
            if seconds == output.QUIET - 1:
                line.print("plain 1.0")
    streams = capsys.readouterr()
    assert streams.out == "plain 1.0\n"
    assert streams.err.splitlines() == ["a row … 18 s"]


def test_what_is_soon_done_leaves_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    with output.waiting("loading a model …"):
        pass
    with output.Progress(patient=True) as update:
        update("fetching", 0.5)
    assert capsys.readouterr().err == ""
