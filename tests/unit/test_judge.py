"""The judge artefact: round trip, identity checks, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fake_judge import constant_judge
from selfjudge import Judged, Pair, generate
from selfjudge.decoding.text import Decoding
from selfjudge.errors import SelfJudgeError
from selfjudge.judge.config import JudgeConfig
from selfjudge.judge.model import Judge
from selfjudge.types import Block

CONFIG = JudgeConfig(hidden_size=4, target="t", target_sha256="a" * 64, thresholds={"F": 0.4, "R": 0.7})


def test_round_trip(tmp_path: Path) -> None:
    judge = Judge(CONFIG, torch.randn(4), 0.3)
    judge.save_pretrained(tmp_path)
    again = Judge.from_pretrained(tmp_path)
    hidden = torch.randn(2, 3, 4)
    block = Block(torch.zeros(2, 2, dtype=torch.long), torch.zeros(2, 3, 5), hidden)
    assert torch.equal(judge(block), again(block))
    assert torch.equal(judge(block), torch.sigmoid(hidden[:, 1:] @ judge.weight + 0.3))
    assert again.config == replace(CONFIG, quality_curve=again.config.quality_curve)
    assert again.threshold("R") == 0.7
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("features", ["hidden", "hidden+margin+previous"])
def test_a_judge_has_no_say_where_a_state_that_it_reads_is_broken(features: str) -> None:
    config = replace(CONFIG, features=features)
    hidden = torch.randn(1, 5, 4)
    hidden[0, 2, 1] = torch.inf
    block = Block(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 5, 5), hidden)
    said = Judge(config, torch.rand(config.width))(block)[0]
    broken = [False, True, False, False] if features == "hidden" else [False, True, True, False]
    assert said.isnan().tolist() == broken


def test_a_judge_stays_where_it_is_when_another_device_decodes_with_it(tiny_pair: Pair) -> None:
    """A copy scores there, the same one every time: captured graphs hold its weights."""
    judge, there = constant_judge(0.5, tiny_pair.hidden_size), torch.device("meta")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(tiny_pair.target), "device", there)
        Decoding(tiny_pair, Judged(judge, 0.5), gamma=2)
    assert judge.weight.device == torch.device("cpu")
    copied = judge.on(there)
    assert copied.weight.device == there
    assert judge.on(there) is copied.on(there) is copied
    assert judge.on(torch.device("cpu")) is judge
    assert generate(tiny_pair, "w1 w2", Judged(judge, 0.5), gamma=2, max_new_tokens=6).tokens


def test_a_threshold_may_be_named_by_its_quality() -> None:
    judge = Judge(replace(CONFIG, quality_curve=((0.5, 0.2), (0.9, 0.6), (1.0, 1.0))))
    assert judge.threshold("q0.9") == judge.quality(0.9) == 0.6
    assert judge.threshold("q0.95") == 1.0


@pytest.mark.parametrize("theta", [-0.1, 1.1, float("nan"), "Q", "q", "q2", "qx"])
def test_thresholds_outside_are_refused(theta: float | str) -> None:
    with pytest.raises(SelfJudgeError):
        Judge(CONFIG).threshold(theta)


def test_another_target_is_refused() -> None:
    judge = Judge(CONFIG)
    judge.config.check_target("t", "a" * 64, 4)
    with pytest.raises(SelfJudgeError, match="width 4, the target t has 8"):
        judge.config.check_target("t", "a" * 64, 8)
    with pytest.raises(SelfJudgeError, match="trained for t"):
        judge.config.check_target("other", "b" * 64, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 9}, "\"format_version\" must be 1, not 9"), ({"norm": "pre_norm"}, "norm"), ({"features": "hidden+x"}, "features"),
        ({"model": "forest"}, "model"), ({"layer": "12"}, "layer"), ({"hidden_size": 5}, "entries"),
        ({"margin_limit": -1}, "margin_limit"), ({"margin_limit": 99}, "margin_limit"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused(tmp_path: Path, change: dict, message: str) -> None:
    Judge(CONFIG).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(SelfJudgeError, match=message):
        Judge.from_pretrained(tmp_path)


def test_broken_folders_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(SelfJudgeError, match="not a judge folder"):
        Judge.from_pretrained(tmp_path)
    Judge(CONFIG).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(SelfJudgeError, match="cannot read"):
        Judge.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SelfJudgeError, match="cannot read"):
        Judge.from_pretrained(tmp_path)
