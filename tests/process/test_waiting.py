"""No command works in silence: whatever takes time happens while a line says what is going on.

A line that stands is repeated by itself (tests/unit/test_progress.py), so this is all there is to show.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib.figure
import pytest
import torch
import transformers

from fake_eval import write_eval
from selfjudge.cli import main as cli, output
from selfjudge.engine import teacher_forced
from selfjudge.engine.cpu.engine import CpuEngine
from selfjudge.engine.reference import ReferenceEngine
from selfjudge.store import files as hub

WORK = [
    (transformers.AutoModelForCausalLM, "from_pretrained"),
    (transformers.AutoTokenizer, "from_pretrained"),
    (CpuEngine, "extend"),
    (ReferenceEngine, "extend"),
    (teacher_forced, "_passes"),
    (torch.Tensor, "backward"),
    (torch.linalg, "solve"),
    (matplotlib.figure.Figure, "savefig"),
]
"""What takes the time of all commands."""


class Watch:
    """Which work was done, and which of it in silence."""

    def __init__(self) -> None:
        self.open: list[Any] = []
        self.done: set[str] = set()
        self.silent: set[str] = set()

    def work(self, name: str) -> None:
        self.done.add(name)
        if not self.open:
            self.silent.add(name)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    watch = Watch()
    opened, closed = output.Progress.__enter__, output.Progress.__exit__

    def begin(self: output.Progress) -> output.Progress:
        watch.open.append(self)
        return opened(self)

    def end(self: output.Progress, *error: Any) -> None:
        closed(self, *error)
        watch.open.remove(self)

    monkeypatch.setattr(output.Progress, "__enter__", begin)
    monkeypatch.setattr(output.Progress, "__exit__", end)
    for owner, name in WORK:
        monkeypatch.setattr(owner, name, _watched(watch, name, getattr(owner, name)))
    yield watch
    assert watch.open == []


def _watched(watch: Watch, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(work)
    def call(*arguments: Any, **options: Any) -> Any:
        watch.work(name)
        return work(*arguments, **options)

    return call


@pytest.fixture
def run(watch: Watch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., set[str]]:
    """Call the program, which must succeed; returns the work that it did."""

    def call(*arguments: str) -> set[str]:
        watch.done.clear()
        monkeypatch.setattr(sys, "argv", ["selfjudge", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert not stop.value.code, capsys.readouterr().err
        assert watch.silent == set(), f"{arguments[0]} does this in silence"
        return set(watch.done)

    return call


def test_no_command_works_in_silence(run: Callable[..., set[str]], checkpoints: dict[str, str], tmp_path: Path) -> None:
    asked = tmp_path / "asked.jsonl"
    words = [" ".join(f"w{(7 * i + 3 * j) % 50 + 3}" for j in range(4 + i % 5)) for i in range(40)]
    asked.write_text("".join(json.dumps({"prompt": text, "answer": "7"}) + "\n" for text in words))
    pair = ["--target", checkpoints["target"], "--draft", checkpoints["draft"], "--device", "cpu"]
    short = ["--max-new-tokens", "8"]
    labels, judge = str(tmp_path / "labels"), str(tmp_path / "judge")
    loaded = {"from_pretrained", "extend"}
    assert run("generate", "w1 w2", *pair, *short, "--json") >= loaded
    assert (
        run("label", *pair, "--prompts", str(asked), "--tau", "-3", *short, "--suffix-length", "3", "--out", labels)
        >= loaded
    )
    run("labels", "info", labels)
    assert run("train", labels, "--out", judge, "--acceptable", "0.3") >= {"solve", "savefig"}
    evaluated = ["--tasks", f"file:{asked}", "--limit", "6", "--gammas", "2", *short]
    assert run("eval", *pair, *evaluated, "--rules", "exact topk:2", "--out", str(tmp_path / "eval")) >= loaded
    tuned = ["--prompts", str(asked), "--families", "topk", "--gamma", "2", "--epsilon", "0.3", *short, "--no-times"]
    assert run("tune", *pair, *tuned, "--out", str(tmp_path / "tuned")) >= loaded
    bench = [*pair, "--limit", "1", *short]
    assert run("bench", *bench, "--gammas", "1", "--repeats", "1", "--no-peers") >= loaded
    learned = ["--layers", "1", "--width", "64", "--held-out", "3", "--batch-tokens", "128", "--steps", "3"]
    target = ["--target", checkpoints["target"], "--device", "cpu", "--out", str(tmp_path / "draft")]
    assert run("distill", *target, "--prompts", f"{asked}:12x1", *learned, *short) >= {"from_pretrained", "backward"}
    write_eval(tmp_path / "results", ("arithmetic",))
    assert run("report", str(tmp_path / "results"), "--out", str(tmp_path / "report.html")) >= {"savefig"}


def test_a_server_starts_aloud(
    watch: Watch, checkpoints: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def serving(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("selfjudge.integrations.server.run.run", serving)
    pair = ["--target", checkpoints["target"], "--draft", checkpoints["draft"], "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["selfjudge", "serve", *pair, "--port", "0"])
    with pytest.raises(SystemExit):
        cli.main()
    assert watch.done >= {"from_pretrained", "extend"}
    assert watch.silent == set()


class TestHub:
    """A hub that cannot be reached is found out at once, and asked again after a while."""

    @pytest.fixture(autouse=True)
    def online(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str | None]]:
        """What the hub answers in turn: None, or the reason why it does not."""
        import huggingface_hub

        answers: list[str | None] = []

        class Session:
            def head(self, address: str, *, timeout: float) -> None:
                assert timeout <= 5
                if (reason := answers.pop(0)) is not None:
                    raise OSError(reason)

        monkeypatch.setattr(huggingface_hub, "get_session", Session)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(hub, "_last", (-hub.HUB_VALID, None))
        yield answers
        assert answers == []

    def test_a_model_is_refused_before_torch_is_asked(
        self,
        online: list[str | None],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        watch: Watch,
    ) -> None:
        online.append("no route")
        monkeypatch.setattr(sys, "argv", ["selfjudge", "generate", "hi", "--target", "org/big", "--draft", "org/small"])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert stop.value.code == 2
        assert "unknown model 'org/big'" in (said := capsys.readouterr().err)
        assert "no route" in said
        assert watch.done == set()

    def test_silence_and_answers_are_believed_for_a_while(
        self, online: list[str | None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = 1000.0
        monkeypatch.setattr(hub.time, "monotonic", lambda: now)
        online += ["no route", None, "no route"]
        assert "no route" in (hub.unreachable() or "")
        assert "no route" in (hub.unreachable() or "")  # it is not asked again
        assert hub.hub_options() == {"local_files_only": True}
        now += 2 * hub.HUB_VALID
        assert hub.unreachable() is None  # it answers again
        assert hub.hub_options() == {}
        now += 2 * hub.HUB_VALID
        assert "no route" in (hub.unreachable() or "")
