"""kill -9 at every moment of writing a judge: what is left is never taken for a judge, and the same training finishes it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fake_labels import label_folder
from selfjudge.errors import SelfJudgeError
from selfjudge.judge.model import Judge
from selfjudge.train.config import TrainConfig
from selfjudge.train.pipeline import train_judge

# before and after each of five files gets its name, the weights twice: card, prompts, run.json, weights, config.json
MOMENTS = 12
CONFIG = TrainConfig(features="hidden")
CHILD = f"""
import os, signal, sys
from pathlib import Path
from selfjudge.train import holdout
from selfjudge.train.config import TrainConfig
from selfjudge.train.pipeline import train_judge

holdout.draw = lambda file, *_: file.write_bytes(b"figure")
replace = os.replace
for moment in range({MOMENTS}):
    if child := os.fork():
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        continue
    passed = 0

    def deadly(source, target):
        global passed
        for act in (lambda: None, lambda: replace(source, target)):
            act()
            if passed == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            passed += 1

    os.replace = deadly
    train_judge([Path(sys.argv[1])], Path(sys.argv[2]) / str(moment), {CONFIG!r})
    os._exit(0)
"""


@pytest.mark.slow
def test_a_training_that_is_killed_leaves_nothing_that_passes_for_a_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("selfjudge.train.holdout.draw", lambda file, *_: file.write_bytes(b"figure"))  # no need to wait
    labels = label_folder(tmp_path / "labels", prompts=20, each=5)
    command = [sys.executable, "-c", CHILD, str(labels), str(tmp_path / "judges")]
    subprocess.run(command, check=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
    expected = train_judge([labels], tmp_path / "whole", CONFIG)
    files = {file.name for file in (tmp_path / "whole").iterdir()}
    for moment in range(MOMENTS):
        folder = tmp_path / "judges" / str(moment)
        if moment < MOMENTS - 1:
            with pytest.raises(SelfJudgeError, match="is not a judge folder"):
                Judge.from_pretrained(folder)
            assert train_judge([labels], folder, CONFIG) == expected
        assert {file.name for file in folder.iterdir()} - {
            ".lock"
        } == files  # config.json is written last: all the rest is there
        assert Judge.from_pretrained(folder).config == Judge.from_pretrained(tmp_path / "whole").config
