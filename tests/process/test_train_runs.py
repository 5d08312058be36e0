"""Whole trainings of a judge: refusals, the judge folder and its card."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from sklearn.metrics import roc_auc_score

from fake_labels import HIDDEN, SUFFIX, TAU, all_arrays, config_of, everything, label_folder, one_line
from selfjudge.errors import SelfJudgeError
from selfjudge.judge.config import FEATURES, JudgeConfig
from selfjudge.judge.model import Judge
from selfjudge.store import read_json, sha256, write_json
from selfjudge.train.config import TrainConfig
from selfjudge.train.dataset import LabelledRows
from selfjudge.train.holdout import compute_quality_curve, find_thresholds, roc_auc
from selfjudge.train.pipeline import fit_linear, predict, train_judge
from selfjudge.types import Block


@pytest.fixture(autouse=True)
def no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A figure takes longer than all the rest of a small training; `judged` draws it before, for those who look at it."""
    monkeypatch.setattr("selfjudge.train.holdout.draw", lambda file, *_: file.write_bytes(b"figure"))


def test_a_judge_may_learn_from_some_sources_alone(labels: Path, tmp_path: Path) -> None:
    config = train_judge([labels], tmp_path / "judge", TrainConfig(sources=("s1",)))
    rows = LabelledRows.load([labels])
    assert config["metrics"]["n_labels"] == int((rows.used & (rows.sources == "s1")).sum()) > 0
    assert config["metrics"]["n_prompts"] == 30
    assert list(read_json(tmp_path / "judge" / "run.json")["sources"]) == ["s1"]
    with pytest.raises(SelfJudgeError, match=r"no labels come from s9; the sources are: s0, s1"):
        train_judge([labels], tmp_path / "none", TrainConfig(sources=("s9",)))


def test_nothing_is_written_where_there_are_no_labels(tmp_path: Path) -> None:
    with pytest.raises(SelfJudgeError, match="label folder"):
        train_judge([tmp_path / "nowhere"], tmp_path / "judge")
    assert not (tmp_path / "judge").exists()


def test_a_longer_suffix_than_the_stored_one_is_refused(labels: Path, tmp_path: Path) -> None:
    with pytest.raises(SelfJudgeError, match=r"scores of 6 tokens: label again with `suffix_length` 7") as error:
        train_judge([labels], tmp_path / "judge", TrainConfig(suffix_length=7, tau=-1.0))
    assert "\n" not in str(error.value)


def test_a_judge_says_which_labels_it_learned(labels: Path, tmp_path: Path) -> None:
    gapped = train_judge([labels], tmp_path / "gapped", TrainConfig(features="hidden", suffix_gap=2))
    assert (gapped["suffix_gap"], gapped["tau"]) == (
        2,
        LabelledRows.load([labels]).relabel(TrainConfig(suffix_gap=2)).taus[0],
    )
    settings = TrainConfig(features="hidden", suffix_length=3)
    config = train_judge([labels], tmp_path / "judge", settings)
    rows = LabelledRows.load([labels]).relabel(TrainConfig(suffix_length=3))
    assert (config["suffix_length"], config["tau"]) == (3, rows.taus[0])
    assert config["metrics"]["acceptable_rate"] == pytest.approx(float(rows.labels.mean()))
    assert config["metrics"]["acceptable_rate"] != pytest.approx(float(LabelledRows.load([labels]).labels.mean()))


def test_a_stated_share_of_the_mismatches_is_acceptable(labels: Path, tmp_path: Path) -> None:
    every = LabelledRows.load([labels])
    rows = every.relabel(TrainConfig(acceptable=0.4, suffix_gap=1))
    assert rows.labels[rows.used].mean() == pytest.approx(0.4, abs=1.5 / rows.used.sum())
    again = every.relabel(TrainConfig(tau=rows.taus[0], suffix_gap=1))
    assert (again.labels == rows.labels).all()
    one = every.select_sources([every.sources[0]])
    own = one.relabel(TrainConfig(acceptable=0.4))
    assert own.labels[own.used].mean() == pytest.approx(0.4, abs=1.5 / own.used.sum())
    settings = TrainConfig(features="hidden", suffix_gap=1, acceptable=0.4)
    config = train_judge([labels], tmp_path / "judge", settings)
    assert (config["tau"], config["suffix_gap"], config["acceptable"]) == (rows.taus[0], 1, 0.4)
    assert config["metrics"]["acceptable_rate"] == pytest.approx(float(rows.labels[rows.used].mean()))
    assert "by a stated share; 40." in (tmp_path / "judge" / "README.md").read_text(encoding="utf-8")


def test_a_stated_share_is_one_of_all_folders_and_of_the_sources_that_are_used(labels: Path, tmp_path: Path) -> None:
    other = label_folder(tmp_path / "other", seed=5)
    rows = LabelledRows.load([labels, other]).relabel(TrainConfig(acceptable=0.3))
    assert rows.taus[0] == rows.taus[1]
    assert rows.labels[rows.used].mean() == pytest.approx(0.3, abs=1.5 / rows.used.sum())
    source = str(LabelledRows.load([labels]).sources[0])
    config = train_judge(
        [labels], tmp_path / "judge", TrainConfig(features="hidden", sources=(source,), acceptable=0.3)
    )
    assert config["metrics"]["acceptable_rate"] == pytest.approx(0.3, abs=1.5 / config["metrics"]["n_labels"])


def test_nothing_is_left_of_a_training_that_could_not_begin(tmp_path: Path) -> None:
    few = label_folder(tmp_path / "labels", prompts=2)
    with pytest.raises(SelfJudgeError):
        train_judge([few], tmp_path / "judge", TrainConfig())
    assert not (tmp_path / "judge").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (TrainConfig(features="hidden+x"), r"unknown `features` 'hidden\+x'; there are: hidden"),
        (TrainConfig(reject=0.0), "`reject`"),
        (TrainConfig(reject=1.5), "`reject`"),
        (TrainConfig(reject=math.nan), "`reject`"),
        (TrainConfig(suffix_length=-1), "`suffix_length`"),
        (TrainConfig(suffix_gap=-1), "`suffix_gap`"),
        (TrainConfig(tau=math.nan), "`tau`"),
        (TrainConfig(tau=math.inf), "`tau`"),
        (TrainConfig(acceptable=0.0), "`acceptable`"),
        (TrainConfig(acceptable=1.0), "`acceptable`"),
        (TrainConfig(acceptable=0.3, tau=-1.0), "give one of them"),
    ],
)
def test_settings_are_checked_before_anything_is_read(tmp_path: Path, settings: TrainConfig, message: str) -> None:
    with pytest.raises(SelfJudgeError, match=message) as error:
        train_judge([tmp_path / "nowhere"], tmp_path / "judge", settings)
    one_line(error)
    assert not (tmp_path / "judge").exists()


@pytest.mark.parametrize(("tau", "which"), [(-1e6, "acceptable"), (1e6, "unacceptable")])
def test_labels_of_one_kind_are_refused(labels: Path, tmp_path: Path, tau: float, which: str) -> None:
    with pytest.raises(SelfJudgeError, match=f"all 600 labels are {which}.*another τ") as error:
        train_judge([labels], tmp_path / "judge", TrainConfig(tau=tau))
    one_line(error)


@pytest.mark.parametrize(("prompts", "message"), [(1, "1 prompts cannot be split"), (2, "cannot be split")])
def test_too_few_prompts_are_refused(tmp_path: Path, prompts: int, message: str) -> None:
    made = label_folder(tmp_path / "labels", prompts=prompts, each=30, shards=1)
    with pytest.raises(SelfJudgeError, match=message) as error:
        train_judge([made], tmp_path / "judge")
    one_line(error)


@pytest.mark.parametrize(
    ("name", "value"),
    [("hidden_draft", np.nan), ("hidden_draft", np.inf), ("hidden_target", np.nan), ("log_p", np.nan)],
)
def test_features_that_are_no_numbers_are_refused(tmp_path: Path, name: str, value: float) -> None:
    def spoil(arrays: dict[str, NDArray[Any]]) -> None:
        arrays[name][3:5, 0] = value

    made = label_folder(tmp_path / "labels", change=spoil, method="autojudge")
    with pytest.raises(
        SelfJudgeError, match=r"hidden-0000\d.safetensors has \d rows whose features are not finite"
    ) as error:
        train_judge([made], tmp_path / "judge", TrainConfig())
    one_line(error)
    assert not (tmp_path / "judge" / "config.json").exists()


def test_mixed_widths_are_refused(labels: Path, tmp_path: Path) -> None:
    with pytest.raises(SelfJudgeError, match="hidden_size 8 and 12") as error:
        train_judge([labels, label_folder(tmp_path / "narrow", hidden=8)], tmp_path / "judge")
    one_line(error)


def test_labels_of_another_target_are_refused(labels: Path, tmp_path: Path) -> None:
    """By checksum; by name where there is none. The same weights under another name are welcome."""
    with pytest.raises(SelfJudgeError, match=r"different targets .target_sha256 'other'.*a judge has one") as error:
        train_judge([labels, label_folder(tmp_path / "other", target_sha256="other")], tmp_path / "judge")
    one_line(error)
    unknown = [label_folder(tmp_path / name, target=name, target_sha256="") for name in ("one", "two")]
    with pytest.raises(SelfJudgeError, match=r"different targets .target 'two' and 'one'"):
        LabelledRows.load(unknown)
    assert len(LabelledRows.load([labels, label_folder(tmp_path / "renamed", target="renamed")])) == 1200


@pytest.mark.parametrize("shards", [0, 2])
def test_a_folder_without_rows_is_refused(tmp_path: Path, shards: int) -> None:
    made = label_folder(tmp_path / "labels", prompts=4, each=0, shards=2)
    if not shards:
        write_json(made / "manifest.json", read_json(made / "manifest.json") | {"shards": []})
    with pytest.raises(SelfJudgeError, match="holds no labels") as error:
        train_judge([made], tmp_path / "judge")
    one_line(error)


def test_no_folder_and_no_label_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SelfJudgeError, match="at least one folder"):
        train_judge([], tmp_path / "judge")
    with pytest.raises(SelfJudgeError, match="is not a label folder"):
        train_judge([tmp_path], tmp_path / "judge")


def test_a_damaged_shard_is_refused(tmp_path: Path) -> None:
    made = label_folder(tmp_path / "labels")
    with (made / "hidden-00001.safetensors").open("r+b") as file:
        file.seek(-5, 2)
        file.write(b"\xff")
    with pytest.raises(SelfJudgeError, match=r"hidden-00001\.safetensors is missing or damaged"):
        train_judge([made], tmp_path / "judge")


def test_the_state_before_has_to_be_labelled(labels: Path, tmp_path: Path) -> None:
    """In every folder."""

    def add(arrays: dict[str, Any]) -> None:
        arrays["hidden_before"] = arrays["hidden_draft"] + 1

    settings = TrainConfig(features="hidden+margin+previous")
    stored = label_folder(tmp_path / "with", change=add)
    assert train_judge([stored], tmp_path / "judge", settings)["features"] == settings.features
    with pytest.raises(SelfJudgeError, match="no state of the token before: label again with `previous`") as error:
        train_judge([stored, labels], tmp_path / "other", settings)
    one_line(error)


def test_nothing_is_overwritten(labels: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name, message in {
        "full":  "full holds other files .kept.txt ….: name a new or empty folder with `out`", "file": "file is a file: name a folder with `out`",
        "file/below": "cannot use .*below as a folder",
    }.items():  # fmt: skip
        with pytest.raises(SelfJudgeError, match=message) as error:
            train_judge([labels], tmp_path / name)
        one_line(error)
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["kept.txt"]
    (tmp_path / "killed").mkdir()
    for left in ("README.md", "roc.png", "model.safetensors"):  # config.json comes last: it was killed before
        (tmp_path / "killed" / left).write_text("half")
    train_judge([labels], tmp_path / "killed", TrainConfig())
    with pytest.raises(SelfJudgeError, match=r"holds other files .config\.json"):
        train_judge([labels], tmp_path / "killed", TrainConfig())


def test_a_draft_token_that_alignment_accepts_is_no_mismatch(tmp_path: Path) -> None:
    """Rank 0: two passes in bfloat16 disagreed about a tie. Such rows are in no part, and are counted."""
    labels = label_folder(tmp_path / "labels")
    plain = LabelledRows.load([labels])
    manifest = read_json(labels / "manifest.json")
    for shard in manifest["shards"]:
        name = list(shard["files"])[1]
        arrays = load_file(labels / name)
        arrays["rank"] = (np.arange(len(arrays["log_p"])) % 5).astype(np.int32)
        save_file(arrays, labels / name)
        shard["files"][name] = sha256(labels / name)
    write_json(labels / "manifest.json", manifest)
    rows = LabelledRows.load([labels])
    assert 0.15 < (~rows.used).mean() < 0.25
    assert np.array_equal(rows.part[rows.used], plain.part[rows.used])
    config = train_judge([labels], tmp_path / "judge", TrainConfig())
    assert config["metrics"]["n_labels"] == rows.used.sum()
    assert config["metrics"]["n_aligned"] == (~rows.used).sum()


def test_a_judge_learns_a_plane(labels: Path, tmp_path: Path) -> None:
    rows, settings = LabelledRows.load([labels]), TrainConfig()
    config = train_judge([labels], tmp_path / "judge", settings)
    assert config["metrics"]["C"] == fit_linear(rows, config_of(rows, settings.features)).c
    assert config["metrics"]["auc_mismatch"] > 0.85


SETTINGS = {features: TrainConfig(features=features) for features in ("hidden+margin", "hidden")}


@pytest.fixture(scope="module", params=list(SETTINGS))
def judged(
    request: pytest.FixtureRequest, labels: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, dict]:
    out = tmp_path_factory.mktemp("judge") / request.param
    return request.param, out, train_judge([labels], out, SETTINGS[request.param])


def test_the_configuration_says_everything(judged: tuple[str, Path, dict], labels: Path) -> None:
    features, out, config = judged
    stored = read_json(out / "config.json")
    assert stored == json.loads(json.dumps(config))
    rows = LabelledRows.load([labels])
    expected = {
        "format_version": 1, "target": "t", "draft": "d", "target_sha256": "a" * 64, "draft_sha256": "b" * 64,
        "hidden_size": HIDDEN, "layer": "final", "norm": "post_final_norm", "features": features, "model": "linear",
        "label_method": "selfjudge", "suffix_length": SUFFIX, "suffix_gap": 0, "score": "likelihood", "tau": TAU, "acceptable": None, "margin_limit": None, "sources": sorted(set(rows.sources.tolist())),
    }  # fmt: skip
    assert {key: stored[key] for key in expected} == expected
    assert set(stored) == {*expected, "labels_sha256", "quality_curve", "thresholds", "metrics"}
    judge = Judge.from_pretrained(out)
    scores, truth = predict(rows, judge, rows.of("holdout"))
    every, more = predict(rows, judge, rows.of("holdout"), originals=True)
    assert stored["thresholds"] == find_thresholds(scores, truth, reject=0.9)
    assert stored["quality_curve"] == [[share, theta] for share, theta in compute_quality_curve(scores, truth)]
    assert judge.quality(0.9) == next(theta for share, theta in stored["quality_curve"] if share == 0.9)
    metrics = stored["metrics"]
    assert metrics["auc_mismatch"] == pytest.approx(roc_auc_score(truth, scores))
    assert metrics["auc_all"] == pytest.approx(roc_auc_score(more, every))
    assert len(more) == 2 * len(truth)
    assert metrics["auc_select"] == pytest.approx(roc_auc(*predict(rows, judge, rows.of("select"))))
    assert (metrics["n_labels"], metrics["n_prompts"], metrics["n_holdout"]) == (600, 60, 90)
    assert metrics["acceptable_rate"] == pytest.approx(float(rows.labels.mean()))
    for name in ("F", "R"):
        above = scores > stored["thresholds"][name]
        assert metrics[f"{name}_accepts_acceptable"] == pytest.approx(above[truth == 1].mean())
        assert metrics[f"{name}_accepts_unacceptable"] == pytest.approx(above[truth == 0].mean())
    judge.config.check_target("t", "a" * 64, HIDDEN)
    with pytest.raises(SelfJudgeError, match="trained for t"):
        judge.config.check_target("u", "c" * 64, HIDDEN)


def test_the_folder_holds_a_card_a_figure_and_no_pickle(judged: tuple[str, Path, dict]) -> None:
    _, out, _ = judged
    files = {p.name: p.read_bytes() for p in out.iterdir()}
    assert set(files) == {
        "config.json", "model.safetensors", "prompts.json", "README.md", "roc.png", "run.json",
    }  # fmt: skip
    assert not any(content.startswith((b"\x80", b"PK")) for content in files.values())
    assert files["roc.png"].startswith(b"\x89PNG\r\n\x1a\n")
    assert len(files["roc.png"]) > 5000
    run = json.loads(files["run.json"])
    assert run["rows"] == {"fit": 420, "select": 90, "holdout": 90}
    assert {"argv", "time", "versions", "settings", "labels"} <= set(run)


def test_the_card_says_counts_aucs_and_thresholds(judged: tuple[str, Path, dict], labels: Path) -> None:
    _, out, config = judged
    text = (out / "README.md").read_text(encoding="utf-8")
    metrics, found = config["metrics"], LabelledRows.load([labels])
    assert "600 mismatches of 60 prompts, method selfjudge, N = 6, τ = -4.00" in text
    assert f"{metrics['acceptable_rate']:.1%} acceptable" in text
    assert f"ROC-AUC {metrics['auc_mismatch']:.3f} on mismatches, {metrics['auc_all']:.3f} with" in text
    assert "90 mismatches" in text
    assert f"On the part that chose C: {metrics['auc_select']:.3f}." in text
    for name in ("F", "R"):
        share = metrics[f"{name}_accepts_acceptable"], metrics[f"{name}_accepts_unacceptable"]
        assert f"| {name} | {config['thresholds'][name]:.3f} | {share[0]:.1%} | {share[1]:.1%} |" in text
    for source in ("s0", "s1"):
        mine = found.labels[found.sources == source]
        assert len(mine) == 300
        assert f"| {source} | 300 | {mine.mean():.1%} |" in text
    assert "](roc.png)" in text
    curve = dict(config["quality_curve"])
    for quality, percent in ((0.8, 80), (0.9, 90), (0.95, 95)):
        assert f"| rejects {percent}% of bad substitutions (`--quality {quality}`) | {curve[quality]:.3f} |" in text
    assert "`--quality 0.9` takes the threshold that rejects 90 % of bad substitutions" in text
    for line in text.splitlines():
        assert "nan" not in line.split()


def test_a_round_trip_gives_identical_scores(judged: tuple[str, Path, dict], labels: Path, tmp_path: Path) -> None:
    features, out, _ = judged
    one = Judge.from_pretrained(str(out))
    one.save_pretrained(tmp_path / "copy")
    other = Judge.from_pretrained(tmp_path / "copy")
    assert (tmp_path / "copy" / "config.json").read_bytes() == (out / "config.json").read_bytes()
    rows = LabelledRows.load([labels])
    x, _ = everything(rows, np.ones(len(rows), bool), one.config.features)
    assert torch.equal(one.score(x), other.score(x))
    fitted = fit_linear(rows, config_of(rows, features))  # the same again, never written
    assert torch.equal(fitted.judge.score(x), one.score(x))
    block = Block(torch.ones(2, 3).long(), torch.randn(2, 4, 9), torch.randn(2, 4, HIDDEN))
    assert torch.equal(one(block), other(block))
    assert one(block).shape == (2, 3)


def test_the_configuration_is_written_last(labels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its existence means that the folder is whole: a run that dies before leaves none."""
    seen: list[tuple[str, set[str]]] = []

    def watched(path: Path, value: Any) -> None:
        seen.append((path.name, {p.name for p in path.parent.iterdir()}))
        write_json(path, value)

    monkeypatch.setattr("selfjudge.judge.model.write_json", watched)
    train_judge([labels], tmp_path / "whole", SETTINGS["hidden+margin"])
    there = {".lock", "model.safetensors", "prompts.json", "README.md", "roc.png", "run.json"}
    assert seen == [("config.json", there)]
    assert not (tmp_path / "whole" / ".lock").exists()

    def full(*_: Any) -> None:
        raise SelfJudgeError("no space left")

    monkeypatch.setattr("selfjudge.judge.model.write_tensors", full)
    with pytest.raises(SelfJudgeError, match="no space"):
        train_judge([labels], tmp_path / "torn", SETTINGS["hidden+margin"])
    assert not (tmp_path / "torn" / "config.json").exists()
    with pytest.raises(SelfJudgeError, match="not a judge folder"):
        Judge.from_pretrained(tmp_path / "torn")


def test_other_features_than_the_tensors_are_refused(judged: tuple[str, Path, dict], tmp_path: Path) -> None:
    _, out, config = judged
    (tmp_path / "model.safetensors").write_bytes((out / "model.safetensors").read_bytes())
    for features in FEATURES:
        write_json(tmp_path / "config.json", read_json(out / "config.json") | {"features": features})
        if features == config["features"]:
            Judge.from_pretrained(tmp_path)
            continue
        with pytest.raises(SelfJudgeError, match="judge weight has") as error:
            Judge.from_pretrained(tmp_path)
        one_line(error)


def test_two_folders_make_one_judge(labels: Path, tmp_path: Path) -> None:
    """What differs between them is left open: τ, N; the methods are named."""
    more = label_folder(tmp_path / "more", method="autojudge", first=60, prompts=20, seed=4, suffix=5)
    config = train_judge([labels, more], tmp_path / "judge", SETTINGS["hidden+margin"])
    assert (config["label_method"], config["tau"], config["suffix_length"]) == ("selfjudge+autojudge", TAU, None)
    assert config["metrics"]["n_labels"] == 800
    assert config["metrics"]["n_prompts"] == 80


def test_originals_are_acceptable_rows(labels: Path, tmp_path: Path) -> None:
    rows = LabelledRows.load([labels])
    x, y = everything(rows, rows.of("fit"), "hidden+margin", originals=True)
    arrays = all_arrays(labels)
    plain = {k: v[rows.of("fit")] for k, v in arrays.items()}
    own = (x[:, None, :HIDDEN] == torch.tensor(plain["hidden_target"])[None]).all(-1)
    assert own.sum() == len(plain["log_p"])
    mine = own.any(1)
    assert (y[mine] == 1).all()
    assert (x[mine][:, HIDDEN] == 0).all()
    assert torch.equal(x[~mine][:, :HIDDEN], torch.tensor(plain["hidden_draft"]))
    assert np.array_equal(y[~mine].numpy(), rows.labels[rows.of("fit")])
    config = train_judge([labels], tmp_path / "with", replace(SETTINGS["hidden+margin"], originals=True))
    assert config["metrics"]["n_labels"] == 600
    without = fit_linear(rows, config_of(rows, "hidden+margin"))
    assert not torch.allclose(Judge.from_pretrained(tmp_path / "with").weight, without.judge.weight, atol=1e-3)


def test_a_judge_comes_from_the_hub(
    judged: tuple[str, Path, dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, out, _ = judged
    monkeypatch.chdir(tmp_path)
    asked = []

    def download(name: str, **options: Any) -> str:
        asked.append(name)
        assert {"config.json", "model.safetensors"} <= set(
            options.get("allow_patterns") or ["config.json", "model.safetensors"]
        )
        return str(out)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    judge = Judge.from_pretrained("owner/name")
    assert asked == ["owner/name"]
    assert all(torch.equal(a, b) for a, b in zip(judge.buffers(), Judge.from_pretrained(out).buffers(), strict=True))
    for local in ("./owner", "owner", str(tmp_path / "x"), Path("owner/name"), "a/b/c"):
        with pytest.raises(SelfJudgeError, match="not a judge folder"):
            Judge.from_pretrained(local)
    Judge(JudgeConfig(hidden_size=2, target="t")).save_pretrained("owner/name")  # what is here is not asked for there
    assert Judge.from_pretrained("owner/name").config.hidden_size == 2
    assert asked == ["owner/name"]
