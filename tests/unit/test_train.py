"""Training a judge: who sees what, what is refused, the hub."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from fake_labels import flipped, label_folder, one_line
from selfjudge.decoding.rules import Judged
from selfjudge.errors import SelfJudgeError
from selfjudge.judge.config import JudgeConfig
from selfjudge.judge.model import Judge
from selfjudge.store import read_json, write_json
from selfjudge.train.config import TrainConfig
from selfjudge.train.dataset import LabelledRows
from selfjudge.train.holdout import format_card
from selfjudge.train.pipeline import Fitted, fit_linear, load_rows, make_judge_config, measure_on_holdout


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 rows of 60 prompts that a linear judge can learn, with evidence for τ."""
    return label_folder(tmp_path_factory.mktemp("labels") / "straight", evidence=400)


def fit(rows: LabelledRows, settings: TrainConfig) -> Fitted:
    return fit_linear(rows, make_judge_config(rows, settings), originals=settings.originals)


def test_thresholds_do_not_see_the_rows_that_chose_c(labels: Path) -> None:
    settings = TrainConfig()
    rows = LabelledRows.load([labels])
    fitted = fit(rows, settings)
    judge, evidence = measure_on_holdout(rows, fitted, settings)
    again, other = measure_on_holdout(flipped(LabelledRows.load([labels]), "select", "fit"), fitted, settings)
    assert again.config.thresholds == judge.config.thresholds
    assert again.config.quality_curve == judge.config.quality_curve
    kept = ("auc_mismatch", "auc_all", "n_holdout", "F_accepts_acceptable", "R_accepts_unacceptable")
    assert {k: again.config.metrics[k] for k in kept} == {k: judge.config.metrics[k] for k in kept}
    assert np.array_equal(evidence.scores, other.scores)
    third, _ = measure_on_holdout(flipped(LabelledRows.load([labels]), "holdout"), fitted, settings)
    assert third.config.thresholds != judge.config.thresholds


def test_as_released_is_what_the_released_code_does(labels: Path) -> None:
    settings = TrainConfig(as_released=True).resolve()
    assert (settings.features, settings.originals) == ("hidden", True)
    rows = load_rows([labels], settings)
    assert rows.labels[rows.used].mean() == pytest.approx(0.209, abs=0.01)
    judge, evidence = measure_on_holdout(rows, fit(rows, settings), settings)
    config = judge.config
    assert (config.score, config.acceptable) == ("confidence", 0.209)
    assert config.thresholds["F"] == config.thresholds["Youden"]
    bad = evidence.labels == 0
    assert (evidence.scores[bad] <= config.thresholds["R"]).mean() >= 0.8
    assert "score confidence" in format_card(config, evidence)
    assert "Youden's J is largest" in format_card(config, evidence)
    assert TrainConfig(as_released=True, tau=-0.0563).resolve().acceptable is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (TrainConfig(as_released=True, features="hidden+margin+previous"), "`as_released` sets `features` to hidden"),
        (TrainConfig(as_released=True, reject=0.7), "`as_released` sets `reject` to 0.8"),
        (TrainConfig(score="taste"), "unknown `score`"),
        (TrainConfig(threshold_f="x"), "unknown `threshold_f`"),
        (TrainConfig(margin_limit=0.0), "`margin_limit` must be more than 0"),
    ],
)
def test_settings_that_contradict_are_refused(settings: TrainConfig, message: str) -> None:
    with pytest.raises(SelfJudgeError, match=message) as caught:
        settings.check()
    one_line(caught)


def test_a_judge_keeps_its_margin_limit_and_measures_within_it(labels: Path) -> None:
    settings = TrainConfig(margin_limit=1.5)
    rows = load_rows([labels], settings)
    judge, evidence = measure_on_holdout(rows, fit(rows, settings), settings)
    assert judge.config.margin_limit == 1.5
    margins = rows.log_p[:, 0] - rows.log_p[:, 1]
    assert len(evidence.labels) == judge.config.metrics["n_holdout"] == int(rows.of("holdout").sum())
    assert margins[rows.of("holdout")].max() <= 1.5
    assert "more than 1.5 nats" in format_card(judge.config, evidence)


def test_the_holdout_influences_neither_weights_nor_c(labels: Path) -> None:
    settings = TrainConfig()
    plain = fit(LabelledRows.load([labels]), settings)
    other = fit(flipped(LabelledRows.load([labels]), "holdout"), settings)
    assert (plain.c, plain.auc_select) == (other.c, other.auc_select)
    for one, same in zip(plain.judge.buffers(), other.judge.buffers(), strict=True):
        assert torch.equal(one, same)


def test_a_stored_threshold_does_in_a_rule_what_it_did_on_the_holdout(labels: Path) -> None:
    """The same `>` there and here, although θ is itself one of the scores and went through a file of text."""
    settings = TrainConfig(features="hidden")
    rows = LabelledRows.load([labels])
    judge, evidence = measure_on_holdout(rows, fit(rows, settings), settings)
    truth = evidence.labels
    block = SimpleNamespace(scores=torch.from_numpy(evidence.scores)[:, None])
    for name in ("F", "R"):
        theta = json.loads(json.dumps(judge.config.thresholds))[name]
        assert theta in evidence.scores.tolist()
        approved = Judged(judge, theta).approves(block)[:, 0].numpy()  # type: ignore[arg-type]
        assert approved[truth == 1].mean() == judge.config.metrics[f"{name}_accepts_acceptable"]
        assert approved[truth == 0].mean() == judge.config.metrics[f"{name}_accepts_unacceptable"]


@pytest.mark.parametrize(
    "wrong", [{"hidden_size": "576"}, {"thresholds": [1]}, {"thresholds": {"F": "a"}}, {"quality_curve": [0.5]},
              {"thresholds": {"F": 7.0}}, {"metrics": 3}, {"model": "mlp"}],
)  # fmt: skip
def test_a_configuration_that_no_judge_has_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    Judge(JudgeConfig(hidden_size=576, target="t")).save_pretrained(tmp_path)
    write_json(tmp_path / "config.json", read_json(tmp_path / "config.json") | wrong)
    with pytest.raises(SelfJudgeError, match="is not a judge config") as error:
        Judge.from_pretrained(tmp_path)
    one_line(error)


def test_a_judge_over_an_old_one_is_never_half_of_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Judge(JudgeConfig(hidden_size=3), torch.ones(3)).save_pretrained(tmp_path)

    def full(*_: Any) -> None:
        raise SelfJudgeError("no space left")

    monkeypatch.setattr("selfjudge.judge.model.write_tensors", full)
    with pytest.raises(SelfJudgeError):
        Judge(JudgeConfig(hidden_size=3), torch.zeros(3)).save_pretrained(tmp_path)
    assert not (tmp_path / "config.json").exists()


def test_the_reject_share_decides_r(labels: Path) -> None:
    rows = LabelledRows.load([labels])
    fitted = fit(rows, TrainConfig())
    some, most = (measure_on_holdout(rows, fitted, TrainConfig(reject=r))[0].config for r in (0.9, 1.0))
    assert some.thresholds["F"] == most.thresholds["F"]
    assert some.thresholds["R"] < most.thresholds["R"]
    assert most.metrics["R_accepts_unacceptable"] == 0
    assert some.metrics["R_accepts_unacceptable"] <= 0.1


def test_a_hub_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)

    def download(name: str, **_: Any) -> str:
        raise OSError("\n\n401 Client Error.\nPlease log in.")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(
        SelfJudgeError, match=r"owner/name is not a folder, and the hub did not give it \(401 Client Error"
    ) as error:
        Judge.from_pretrained("owner/name")
    one_line(error)


def test_a_file_without_weights_is_refused(tmp_path: Path) -> None:
    """Or it would be a judge of zeros, which says σ(b) of every token."""
    Judge(JudgeConfig(hidden_size=3, target="t"), torch.ones(3), 0.5).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for missing in ("weight", "bias"):
        save_file({k: v for k, v in tensors.items() if k != missing}, tmp_path / "model.safetensors")
        with pytest.raises(SelfJudgeError):
            Judge.from_pretrained(tmp_path)
