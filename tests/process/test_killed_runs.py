"""Runs that are killed without warning, and two processes on one folder."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from runs import content, prompts_file
from selfjudge.errors import SelfJudgeError
from selfjudge.label.config import LabelConfig
from selfjudge.label.pipeline import label_pair
from selfjudge.models.pair import Pair
from selfjudge.store import RunFolder
from warm import Process


@pytest.mark.slow
def test_killed_and_resumed_the_command_ends_in_the_same_bytes(checkpoints: dict[str, str], tmp_path: Path) -> None:
    asked = prompts_file(tmp_path / "asked.jsonl", 150)
    config = LabelConfig(prompts=(str(asked),), tau=-8.0, max_new_tokens=24)
    pair = Pair.load(checkpoints["target"], checkpoints["draft"], device="cpu")
    label_pair(pair, tmp_path / "undisturbed", config)

    def command(out: str, *more: str) -> list[str]:
        return [
            "label", "--target", checkpoints["target"], "--draft", checkpoints["draft"], "--prompts", str(asked),
            "--tau", "-8", "--max-new-tokens", "24", "--out", str(tmp_path / out), "--device", "cpu", *more,
        ]  # fmt: skip

    for name, seal in (("early", "work/responses-00000.json"), ("late", "work/labels-00000.json")):
        running = Process(command(name))
        limit = time.monotonic() + 120
        while not (tmp_path / name / seal).is_file():
            assert running.poll() is None, "it ended before it could be killed"
            assert time.monotonic() < limit
            time.sleep(0.005)
        running.kill()
        running.wait()
        assert not (tmp_path / name / "manifest.json").is_file()
    words = [sys.executable, "-m", "selfjudge", *command("early", "--resume")]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    assert "labels from 150 prompts" in done.stdout
    label_pair(pair, tmp_path / "late", config, resume=True)
    for name in ("early", "late"):
        assert content(tmp_path / name) == content(tmp_path / "undisturbed")


def test_two_processes_cannot_write_the_same_folder(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    code = (
        "import sys, time; from pathlib import Path; from selfjudge.store import RunFolder\n"
        "with RunFolder(Path(sys.argv[1])).working({'seed': 0}): print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(run.path)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    with pytest.raises(SelfJudgeError, match="another process works on") as caught, run.working({"seed": 0}):
        pytest.fail("two at a time")
    assert "\n" not in str(caught.value)
    holder.kill()  # the lock dies with its process
    holder.wait()
    with run.working({"seed": 0}):
        assert run.begun
