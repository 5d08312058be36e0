"""The script for the paper's regime: both of its parts on a tiny model, and what a second call still has to do."""

from __future__ import annotations

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from runs import random_judges
from selfjudge.models.pair import Pair
from selfjudge.types import Block

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from grown_target import grow_target

SCRIPT = str(Path(__file__).parents[2] / "benchmarks" / "paper_regime.py")


@pytest.mark.slow
def test_cells_are_measured_once(
    checkpoints: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = Pair.load(checkpoints["target"], device="cpu", needs_draft=False)
    judge = random_judges(pair.hidden_size)["mine"]
    judge.config = replace(judge.config, target=pair.target_id)
    judge.save_pretrained(tmp_path / "judge")
    out = tmp_path / "out"

    def call(*more: str) -> dict[str, Any]:
        words = ["--pair", checkpoints["target"], "--group", "8", "--device", "cpu", "--judge", f"mine={tmp_path / 'judge'}",
            "--tasks", "arithmetic:4", "--rules", "margin:1 judged:price=0.5", "--gammas", "4", "--batch", "4",
            "--max-new-tokens", "12", "--speed-rules", "judged:0.5", "--speed-gammas", "10,3", "--speed-tokens", "8",
            "--prompts-alone", "2", "--loads", "1,2", "--repeats", "1", "--grown", "4", "--out", str(out), *more]  # fmt: skip
        monkeypatch.setattr("sys.argv", ["x", *words])
        runpy.run_path(SCRIPT, run_name="__main__")
        return dict(json.loads((out / "cells.json").read_text())["cells"])

    assert call("--minutes", "0") == {}
    some = call("--parts", "quality", "--rules", "")
    assert list(some) == ["quality/arithmetic/exact/4/4", "quality/arithmetic/null/4/2"]
    cells = call()
    assert cells.keys() >= some.keys()
    assert cells["quality/arithmetic/exact/4/4"]["seconds"] == some["quality/arithmetic/exact/4/4"]["seconds"]
    null, judged = cells["quality/arithmetic/null/4/2"], cells["quality/arithmetic/judged:price=0.5@mine/4/4"]
    assert (null["change"], null["lost"], null["m_ratio"]) == (0, 0, 1)
    assert judged["n"] == 4
    assert 0 <= judged["judged_share"] <= 1
    speeds = {(row["load"], row["rule"], row["gamma"]): row for row in cells.values() if row["part"] == "speed"}
    assert {key[1:] for key in speeds} == {("exact", 0), ("exact", 10), ("exact", 3), ("judged:0.5@mine", 10)}
    assert {key[0] for key in speeds} == {1, 2}
    for (load, rule, gamma), row in speeds.items():
        best = max(speeds[load, "exact", g]["tokens_per_second"] for g in (3, 10))
        assert row["over_best_exact"] == pytest.approx(row["tokens_per_second"] / best)
        if rule != "exact":
            same = speeds[load, "exact", gamma]["tokens_per_second"]
            assert row["over_same_gamma"] == pytest.approx(row["tokens_per_second"] / same)
    assert "| arithmetic (4) | judged:price=0.5@mine | 4 |" in capsys.readouterr().out


@pytest.mark.parametrize("features", ["hidden", "hidden+margin", "hidden+margin+previous"])
def test_a_grown_judge_says_the_same(features: str, checkpoints: dict[str, str]) -> None:
    small = Pair.load(checkpoints["target"], device="cpu", needs_draft=False).target
    large = grow_target(small, small.config.num_hidden_layers + 1)
    judge = random_judges(small.config.hidden_size)["mine"]
    config = replace(judge.config, features=features)
    judge = type(judge)(config, torch.randn(config.width, generator=torch.Generator().manual_seed(0)))
    grown = runpy.run_path(SCRIPT)["grow_judge"](judge)
    tokens = torch.tensor([[5, 6, 7, 8]])
    scores = []
    for model, own in ((small, judge), (large, grown)):
        out = model(tokens, output_hidden_states=True)
        scores.append(own(Block(tokens[:, 1:], out.logits, out.hidden_states[-1])))
    torch.testing.assert_close(scores[0], scores[1], atol=1e-4, rtol=1e-4)
