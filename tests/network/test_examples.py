"""The examples run as they stand, on the embedded pair; a tune has some seconds."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

import selfjudge.tune
from selfjudge.models.pair import Pair
from selfjudge.tune import TuneConfig

FOLDER = Path(__file__).parents[2] / "examples"


@pytest.mark.quick("custom_rule*")
@pytest.mark.parametrize(
    ("script", "shows"),
    [
        ("judged_answer.py", ["tokens per target pass", "judge's score"]),
        pytest.param("certified_rule.py", ["margin:0.1,guard=on | certified after"], marks=pytest.mark.slow),
        ("custom_rule.py", ["[", "]"]),
        ("token_loop.py", ["pass 0, row 1:", "pass 1, row 0:"]),
    ],
)
def test_examples_run(
    shipped: Pair, script: str, shows: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Pair, "load", lambda name: shipped)  # the pair that is loaded already
    # certified by its prompts, however long they take on a busy machine
    quicker = {"minutes": 10.0, "times": False, "max_new_tokens": 12}
    monkeypatch.setattr(selfjudge.tune, "TuneConfig", lambda **named: TuneConfig(**named | quicker))
    runpy.run_path(str(FOLDER / script), run_name="__main__")
    printed = capsys.readouterr().out
    assert all(text in printed for text in shows), printed


def test_every_example_is_listed_and_tried() -> None:
    listed = (FOLDER / "README.md").read_text(encoding="utf-8")
    scripts = sorted(path.name for path in FOLDER.glob("*.py"))
    assert scripts == ["agent.py", "certified_rule.py", "custom_rule.py", "judged_answer.py", "token_loop.py"]
    assert all(f"({name})" in listed for name in scripts)
