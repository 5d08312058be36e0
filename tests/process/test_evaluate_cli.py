"""`selfjudge eval` and `report` as processes, killed and resumed; `reproduce` from labels to page."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
import typer
from markupsafe import Markup
from typer.main import get_command
from typer.testing import CliRunner

from selfjudge.cli.main import app
from selfjudge.cli.options import Options, with_options
from selfjudge.errors import SelfJudgeError
from selfjudge.evaluate import ReproduceConfig, reproduce_paper
from selfjudge.evaluate.config import PRESETS, Preset
from selfjudge.evaluate.pipeline import train_judges
from selfjudge.judge.config import JudgeConfig
from selfjudge.judge.model import Judge
from selfjudge.label.config import LabelConfig
from selfjudge.label.pipeline import label_pair
from selfjudge.models.pair import Pair
from selfjudge.prompts.sources import PromptRecord, Source
from selfjudge.store import read_json, read_rows
from selfjudge.train.pipeline import train_judge
from warm import Process

TIMED = ("seconds", "tokens_per_second", "busy")


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    rows = [{"prompt": " ".join(f"w{i}" for i in rng.integers(5, 50, 6)), "answer": "7"} for _ in range(40)]
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def command(checkpoints: dict[str, str], asked: Path, out: Path, *more: str) -> list[str]:
    return [
        "eval", "--target", checkpoints["target"], "--draft", checkpoints["draft"], "--tasks", f"file:{asked}", "--rules",
        "exact topk:3", "--gammas", "3", "--batch", "2", "--max-new-tokens", "20", "--out", str(out), *more,
    ]  # fmt: skip


@pytest.mark.slow
def test_kill_9_and_resume_give_the_summary_of_an_undisturbed_run(
    checkpoints: dict[str, str], asked: Path, tmp_path: Path
) -> None:
    runner = CliRunner()
    few = tmp_path / "few" / "mine.jsonl"
    few.parent.mkdir()
    few.write_text("".join(asked.read_text().splitlines(keepends=True)[:14]))  # seven parts
    whole = runner.invoke(app, [*command(checkpoints, few, tmp_path / "whole"), "--json"])
    assert whole.exit_code == 0, whole.output
    torn = tmp_path / "torn"
    process = Process(command(checkpoints, few, torn))
    while not list(torn.rglob("part-00001.jsonl")) and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert not (torn / "file:mine" / "topk:3-g3" / "summary.json").exists()
    again = runner.invoke(app, command(checkpoints, few, torn))
    assert "go on with `resume`" in str(again.exception)
    again = runner.invoke(app, [*command(checkpoints, few, torn, "--resume"), "--json"])
    assert again.exit_code == 0, again.output
    for run in ("exact-g3", "topk:3-g3"):
        one, other = (read_json(tmp_path / name / "file:mine" / run / "summary.json") for name in ("whole", "torn"))
        assert {k: v for k, v in one.items() if k not in TIMED} == {k: v for k, v in other.items() if k not in TIMED}
    page = tmp_path / "report.html"
    shown = runner.invoke(app, ["report", str(torn), "--out", str(page), "--json"])
    assert shown.exit_code == 0, shown.output
    assert "topk:3" in page.read_text(encoding="utf-8")
    table = runner.invoke(app, command(checkpoints, few, torn, "--resume"))
    assert "topk:3" in table.output
    assert "±" in table.output


def test_no_metavar_is_the_name_of_its_option() -> None:
    """typer 0.27 calls an option `--JUDGE` whose metavar is JUDGE; versions before 0.26 ask parsers for a name."""
    commands, options = [get_command(app)], []
    while commands:
        command = commands.pop()
        commands += getattr(command, "commands", {}).values()
        options += command.params
    assert len(options) > 240
    assert {"judge", "stop", "prompts"} <= {option.name for option in options}
    for option in options:
        assert (option.metavar or "").replace("-", "_").lower() != option.name
        assert all(name == name.lower() for name in option.opts if name.startswith("--"))


def test_wrong_input_is_one_line(checkpoints: dict[str, str], asked: Path, tmp_path: Path) -> None:
    Judge(JudgeConfig(hidden_size=3, target="t")).save_pretrained(tmp_path / "other")
    for more, message in (
        (["--rules", "judged:F"], "needs a judge"), (["--tasks", "nothing"], "unknown task"), (["--tasks", "arithmetic, nothing"], "unknown task"),
        (["--gammas", "x"], "whole numbers"), (["--judge", f"a={tmp_path / 'other'}"], "no rule in `rules` uses a judge"), (["--judge", f"a={tmp_path / 'other'}", "--rules", "judged:0.5"], "width 3"),
        (["--judge", f"a={tmp_path / 'none'}", "--rules", "judged:0.5"], "not a judge folder"), (["--tasks", f"file:{tmp_path / 'no'}"], "does not exist"),
        (["--rules", "judged:0.5", "--judge", "=x"], "a name of its own"), (["--limit", "0"], "Invalid value for '--limit'"),
        (["--gammas", "500"], "at most 32"),
    ):  # fmt: skip
        found = CliRunner().invoke(app, [*command(checkpoints, asked, tmp_path / "none-eval"), *more])
        assert found.exit_code != 0
        assert message in f"{found.exception} {' '.join(found.output.split())}", (more, found.exception, found.output)
    assert not (tmp_path / "none-eval" / "file:mine").exists()


def test_names_stand_between_commas_or_are_given_one_by_one() -> None:
    found: list[ReproduceConfig] = []
    program = typer.Typer()

    @program.command()
    @with_options
    def _(config: Annotated[ReproduceConfig, Options(commas=("tasks",))]) -> None:
        found.append(config)

    for tasks in (["--tasks", "arithmetic, gsm8k"], ["--tasks", "arithmetic", "--tasks", "gsm8k"]):
        given = [*tasks, "--prompts", "self:3", "--prompts", "arithmetic:4", "--calibrate-prompts", "7"]
        assert CliRunner().invoke(program, given).exit_code == 0
    assert found[0] == found[1]
    assert found[0].tasks == ("arithmetic", "gsm8k")
    assert found[0].choose_preset().prompts == ("self:3", "arithmetic:4")
    assert found[0].choose_preset().calibrate_prompts == 7


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rough intervals, no figures of judges and no charts: what a whole reproduction spends most of its time on."""
    monkeypatch.setattr("selfjudge.evaluate.compare.RESAMPLES", 50)
    monkeypatch.setattr("selfjudge.train.holdout.draw", lambda file, *_: file.write_bytes(b"figure"))
    monkeypatch.setattr("selfjudge.report.page.draw", lambda chart: Markup("<svg></svg>"))


@pytest.mark.usefixtures("short")
def test_reproduce_goes_from_labels_to_a_page_and_keeps_what_is_done(
    tiny_pair: Pair, asked: Path, tmp_path: Path
) -> None:
    here = (f"file:{asked}",)
    preset = Preset(
        prompts=here, auto=here, auto_plus=here, tasks=here, limit=6, sweep_tasks=here, gamma=3, gammas=(2,),
        label_tokens=40, eval_tokens=12, calibrate_prompts=4, substitutions=3,
    )  # fmt: skip
    config = ReproduceConfig(batch=8)
    said: list[str] = []
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "quick", preset)
        patch.setattr(
            "selfjudge.evaluate.pipeline.find_shipped_tau", lambda *_: {"tau": -20.0}
        )  # a tiny random model answers nothing
        patch.setattr(
            "selfjudge.label.config.find_shipped_tau", lambda *_: {"tau": -20.0, "shipped": True}
        )  # that could be checked
        found = reproduce_paper(tiny_pair, out, config, warn=said.append)
        assert (out / "report.html").is_file()
        made = {path.parent.name for path in (out / "judges").glob("*/config.json")}
        assert {"selfjudge", "paper"} <= made
        runs = {path.parent.name for path in (out / "eval").rglob("summary.json")}
        assert {
            "exact-g3",
            "exact-g2",
            "topk:2-g3",
            "judged:F@selfjudge-g3",
            "judged:q0.9@selfjudge-g3",
            "judge_only:F@selfjudge-g3",
        } <= runs
        assert "fly:0.15,6-g3" not in runs  # γ is too small for its window
        before = {path: path.stat().st_mtime_ns for path in out.rglob("summary.json")}
        again = reproduce_paper(tiny_pair, out, config, warn=said.append)
        assert {path: path.stat().st_mtime_ns for path in out.rglob("summary.json")} == before
    assert again["tables"].keys() == found["tables"].keys()


def test_a_judge_that_cannot_be_trained_is_left_out(
    tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def given(source: Source, data: Path | None, **_: Any) -> list[PromptRecord]:
        rng = np.random.default_rng(len(source.name))
        texts = [" ".join(f"w{i}" for i in rng.integers(5, 50, rng.integers(2, 9))) for _ in range(16)]
        return [PromptRecord(f"{source.name}-{i}", source.name, text) for i, text in enumerate(texts)]

    monkeypatch.setattr("selfjudge.prompts.sources.load_prompts", given)
    monkeypatch.setattr("selfjudge.prompts.self_written.load_prompts", given)
    monkeypatch.setattr("selfjudge.label.config.find_shipped_tau", lambda *_: {"tau": -20.0, "shipped": True})
    monkeypatch.setattr("selfjudge.evaluate.pipeline.train_judge", _refusing(train_judge, "paper"))
    preset = Preset(("gsm8k", "livecodebench"), (), (), ("livecodebench",), label_tokens=40)
    folder = tmp_path / "labels"
    label_pair(tiny_pair, folder, LabelConfig(prompts=preset.prompts, max_new_tokens=40))
    said: list[str] = []
    options: Any = {"device": "cpu", "notify": lambda *_: None, "warn": said.append}
    judges = train_judges({"selfjudge": folder}, tmp_path / "judges", preset, **options)
    assert said == ["judge paper: no; it is left out"]
    assert list(judges) == ["selfjudge"]
    assert judges["selfjudge"].config.sources == ("gsm8k", "livecodebench")


def _refusing(train: Any, name: str) -> Any:
    def trained(labels: Any, out: Path, *given: Any, **options: Any) -> Any:
        if out.name == name:
            raise SelfJudgeError("no")
        return train(labels, out, *given, **options)

    return trained


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_the_released_method_stands_beside_the_printed_one(tiny_pair: Pair, asked: Path, tmp_path: Path) -> None:
    here = (f"file:{asked}",)
    config = ReproduceConfig("released", prompts=here, tasks=here, limit=3, max_new_tokens=30, batch=8)
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("selfjudge.evaluate.pipeline.find_shipped_tau", lambda *_: {"tau": -20.0})
        patch.setattr("selfjudge.label.config.find_shipped_tau", lambda *_: {"tau": -20.0, "shipped": True})
        reproduce_paper(tiny_pair, tmp_path / "out", config, warn=said.append)
    judges = {path.parent.name: read_json(path) for path in (tmp_path / "out" / "judges").glob("*/config.json")}
    assert set(judges) == {"selfjudge", "paper", "released"}
    released = judges["released"]
    assert (released["features"], released["score"]) == ("hidden", "confidence")
    assert released["thresholds"]["F"] == released["thresholds"]["Youden"]
    assert released["metrics"]["acceptable_rate"] == pytest.approx(0.209, abs=0.02)
    runs = {path.parent.name for path in (tmp_path / "out" / "eval").rglob("summary.json")}
    assert {f"judged:{theta}@{name}-g20" for name in judges for theta in "FR"} <= runs
    assert sorted(path.name for path in (tmp_path / "out" / "labels").iterdir()) == ["selfjudge"]


def test_presets_are_known() -> None:
    assert set(PRESETS) == {"quick", "full", "paper", "released"}
    for preset in PRESETS.values():
        assert set(preset.sweep_tasks) <= set(preset.tasks)
    found = CliRunner().invoke(app, ["reproduce", "--preset", "huge", "--out", "x"])
    assert all(name in found.output for name in ("'huge'", "quick", "full", "paper", "released"))


def test_rows_of_an_evaluation_can_be_read_back(checkpoints: dict[str, str], asked: Path, tmp_path: Path) -> None:
    out = tmp_path / "eval"
    found = CliRunner().invoke(app, command(checkpoints, asked, out, "--limit", "3"))
    assert found.exit_code == 0, found.output
    rows = list(read_rows(out / "file:mine" / "topk:3-g3" / "samples.jsonl.gz"))
    assert [row["id"] for row in rows] == ["mine-1", "mine-2", "mine-3"]
    assert all(row["text"] for row in rows)
