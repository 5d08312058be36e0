"""The scripts of benchmarks/ start."""

from __future__ import annotations

import importlib
import json
import math
import random
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.numpy import load_file
from sklearn.metrics import roc_auc_score
from tokenizers import Tokenizer, models

from conftest import VOCAB, tiny_head, tiny_model
from fake_eval import samples, write_run
from fake_labels import SUFFIX, label_folder
from selfjudge.decoding.plain import respond
from selfjudge.errors import SelfJudgeError
from selfjudge.label.score import sum_scores
from selfjudge.models.load import Draft, Target
from selfjudge.models.pair import Pair
from selfjudge.report.records import read_results

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(script.name for script in FOLDER.glob("*.py") if script.name != "common.py")


@pytest.fixture
def run_script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a script of the folder with arguments and returns what it prints."""
    monkeypatch.syspath_prepend(str(FOLDER))

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(FOLDER / name), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_says_how_it_is_called(
    name: str, run_script: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        run_script(name, "--help")
    text = capsys.readouterr().out
    assert end.value.code in (0, None)
    assert text.startswith("usage: ")
    assert "--out OUT" in text


def test_the_readme_names_every_script() -> None:
    assert re.findall(r"^\| `(\w+\.py)`", (FOLDER / "README.md").read_text(), re.M) == SCRIPTS


def random_prompts(lengths: list[int]) -> list[list[int]]:
    random = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCAB, (n,), generator=random).tolist() for n in lengths]


@pytest.fixture
def draft_quality(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("draft_quality")


@pytest.mark.slow
def test_costs_of_passes_drafts_and_labels(
    checkpoints: dict[str, str], tmp_path: Path, run_script: Callable[..., str]
) -> None:
    small = ["--limit", "2", "--max-new-tokens", "8", "--pair", checkpoints["target"], "--draft", checkpoints["draft"]]

    def measure(script: str, *options: str) -> dict[str, Any]:
        out = tmp_path / f"{script}.json"
        run_script(f"{script}.py", *options, "--device", "cpu", "--out", str(out))
        result: dict[str, Any] = json.loads(out.read_text())
        assert {"machine", "versions", "date"} <= result.keys()
        return result

    passes = measure("pass_cost", "--model", checkpoints["target"], "--tokens", "1", "3", "--repeats", "1")
    assert [row["tokens"] for row in passes["runs"]] == [1, 3]
    assert all(row["milliseconds"] > 0 < row["floor_milliseconds"] for row in passes["runs"])
    drafts = measure("draft_quality", *small, "--gammas", "2", "--timed", "1")
    assert [row["prompts"] for row in drafts["runs"]] == ["built-in", "all"]
    labels = measure("label_cost", *small, "--suffix-length", "3")
    assert [row["name"] for row in labels["runs"]][:2] == ["selfjudge", "public-pattern"]
    assert all(row["target_tokens_per_label"] > 0 < row["labels_per_second"] for row in labels["runs"])


def test_the_target_as_its_own_draft_is_always_right(draft_quality: Any, checkpoints: dict[str, str]) -> None:
    pair = Pair.load(checkpoints["target"], checkpoints["draft"], device="cpu")
    same = replace(pair, draft_model=Draft(pair.target))
    prompts = random_prompts([3, 9, 5, 12, 7])
    hits, seen = draft_quality.agreement(same, prompts, max_new_tokens=41, batch=2)
    assert hits == seen > 0
    answers = [tokens for _, tokens, _ in respond(pair.target, prompts, eos_ids={2}, max_new_tokens=41)]
    assert seen == sum(map(len, answers))
    for gamma in (1, 4):
        tokens, cycles = draft_quality.accepted(same, prompts, gamma=gamma, max_new_tokens=41, batch=2)
        assert tokens == sum(len(a) - 1 for a in answers)
        assert cycles == sum(-(-(len(a) - 1) // (gamma + 1)) for a in answers)


@pytest.mark.slow
def test_the_quality_of_a_draft_is_pooled_over_all_prompts(draft_quality: Any) -> None:
    target, other = (tiny_model(seed=s, max_position_embeddings=512) for s in (1, 2))
    words = models.WordLevel({w: i for i, w in enumerate(["<pad>", "<s>", "</s>", "<unk>"])}, unk_token="<unk>")
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="</s>")
    sets = {"short": random_prompts([3, 4, 5]), "long": random_prompts([20, 30])}
    config = draft_quality.DraftBenchConfig(gammas=(3,), max_new_tokens=41, batch=2, timed=2, repeats=1)
    same = draft_quality.bench_draft(Pair("p", Target(target, "t"), Draft(target, "t"), tokenizer), sets, config)
    assert [row["prompts"] for row in same["runs"]] == ["short", "long", "all"]
    assert [row["n"] for row in same["runs"]] == [3, 2, 5]
    for row in same["runs"]:
        assert row["top1"] == 1.0
        assert 3.5 < row["m_gamma_3"] <= 4  # the end of an answer cuts its last cycle
        assert row["predicted_speedup_gamma_3"] > 0
        predicted = row["predicted_tokens_per_second_gamma_3"] / row["predicted_tokens_per_second_plain"]
        assert predicted == pytest.approx(row["predicted_speedup_gamma_3"])
        assert row["tokens_per_second_gamma_3"] > 0 < row["tokens_per_second_plain"]
    assert same["runs"][-1]["answer_tokens"] == sum(row["answer_tokens"] for row in same["runs"][:-1])
    unlike = draft_quality.bench_draft(
        Pair("p", Target(target, "t"), Draft(other, "d"), tokenizer), sets, replace(config, timed=0)
    )
    assert unlike["runs"][-1]["tokens_per_second_gamma_3"] is unlike["runs"][-1]["tokens_per_second_plain"] is None
    assert unlike["runs"][-1]["top1"] < 0.5
    assert 1 <= unlike["runs"][-1]["m_gamma_3"] < 2
    head = draft_quality.bench_draft(
        Pair("p", Target(target, "t"), Draft(tiny_head(target), "h"), tokenizer), sets, config
    )
    assert head["draft_kind"] == "eagle3"
    assert head["draft_pass_milliseconds"] > 0
    assert 1 <= head["runs"][-1]["m_gamma_3"] < 2
    assert head["runs"][-1]["tokens_per_second_gamma_3"] > 0
    for gamma in (0, 3):  # what is timed is all but the first token of every answer
        answers = respond(target, sets["short"], eos_ids={2}, max_new_tokens=41)
        pair = Pair("p", Target(target, "t"), Draft(tiny_head(target), "h"), tokenizer)
        tokens, nanoseconds = draft_quality.timed(pair, sets["short"], gamma=gamma, max_new_tokens=41)
        assert tokens == sum(len(answer) - 1 for _, answer, _ in answers)
        assert nanoseconds > 0
    with pytest.raises(SelfJudgeError, match="`draft`"):
        draft_quality.bench_draft(Pair("p", Target(target, "t"), None, tokenizer), sets)


@pytest.mark.slow
def test_a_study_compares_judges_of_one_label_folder(run_script: Callable[..., str], tmp_path: Path) -> None:
    labels = label_folder(tmp_path / "labels", evidence=400)
    found = json.loads(run_script("study.py", str(labels), "--out", str(tmp_path / "study"), "--json"))
    assert found == json.loads((tmp_path / "study" / "study.json").read_text())
    assert [row["features"] for row in found["features"]] == ["hidden", "hidden+margin"]
    assert {row["suffix_length"] for row in found["suffix_length"]} == {0, 5, 10, 20}
    assert [row["suffix_gap"] for row in found["suffix_gap"]] == [0, 1, 2, 3, 5]
    assert found["learning_curve"][-1]["labels"] > found["learning_curve"][0]["labels"]
    assert (tmp_path / "study" / "learning_curve.png").is_file()
    arrays = load_file(labels / "calibration.safetensors")
    scores = sum_scores(arrays, SUFFIX, gap=3)
    told_apart = next(row["told_apart"] for row in found["suffix_gap"] if row["suffix_gap"] == 3)
    assert told_apart == pytest.approx(roc_auc_score(arrays["critical"] == 0, scores))


@pytest.mark.parametrize("transport", ["http", "in-process"])
@pytest.mark.slow
def test_load_is_measured_with_and_without_http(transport: str, checkpoints: dict[str, str], tmp_path: Path) -> None:
    """Without HTTP also under a Python that has no packages for it."""
    out = tmp_path / "load.json"
    models = [
        "--rule",
        "exact",
        "--target",
        checkpoints["target"],
        "--draft",
        checkpoints["draft"],
        "--device",
        "cpu",
        "--gamma",
        "2",
    ]
    levels = ["--minutes", "0.01", "--clients", "1", "6", "--prompts", "2", "--max-batch", "2", "--max-queue", "2"]
    call = ["load.py", "--out", str(out), *levels, *models, *(["--in-process"] if transport == "in-process" else [])]
    http = ["fastapi", "uvicorn", "starlette", "selfjudge.integrations.server.schema"]  # the last needs pydantic
    missing = http if transport == "in-process" else []
    code = "import runpy, sys; sys.modules.update(dict.fromkeys({}, None)); sys.argv = {}; sys.path.insert(0, {!r})"
    code += "; runpy.run_path({!r}, run_name='__main__')"
    program = code.format(missing, call, str(FOLDER), str(FOLDER / "load.py"))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert (report["transport"], report["dtype"], report["gamma"]) == (transport, "float32", 2)
    assert report["alone_after"]["equal"] == report["alone"]["requests"] == 6
    few, many = report["levels"]
    assert (few["clients"], many["clients"]) == (1, 6)
    for row in (few, many):
        assert row["failed"] == 0, row["failures"]
        assert row["equal"] == row["compared"] > 0
        assert row["tokens_per_second"] > 0
        assert all(row["memory"][at]["rss_mb"] > 0 for at in ("start", "middle", "end"))
    assert few["refused"] == 0 < many["refused"]  # two places, two in the queue, six clients
    assert many["requests"] == sum(many["by_kind"].values())
    assert len(out.with_suffix(".md").read_text().splitlines()) == 4


@pytest.fixture
def equal_m(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("equal_m")


def write_margins(folder: Path, judged: list[float]) -> None:
    """`exact` at m 3, a margin at 4 that keeps half, one at 6 that keeps none, and a judged rule at 5."""
    exact = samples([(13, 4)] * 4, [1, 1, 1, 0])
    write_run(folder, "gsm8k", "exact", 10, exact, None)
    write_run(folder, "gsm8k", "margin:1", 10, samples([(13, 3)] * 4, [1, 0, 1, 0]), exact)
    write_run(folder, "gsm8k", "margin:3", 10, samples([(13, 2)] * 4, [0, 0, 0, 0]), exact)
    write_run(folder, "gsm8k", "margin:price=0.2", 10, samples([(13, 2)] * 4, [1, 1, 0, 0]), exact)
    write_run(folder, "gsm8k", "judged:F@j", 10, samples([(11, 2)] * 4, judged), exact)
    write_run(folder, "gsm8k", "null", 10, samples([(15, 4)] * 4, [1, 1, 1, 1]), exact)
    write_run(folder, "gsm8k", "topk:2", 10, samples([(13, 1)] * 4, [0, 0, 0, 0]), exact)  # beyond both lines


def test_a_lead_at_equal_m_by_hand(equal_m: Any, tmp_path: Path) -> None:
    write_margins(tmp_path, [1, 1, 0, 1])
    (table,) = equal_m.compare_at_equal_m([tmp_path])
    rows = {row["rule"]: row for row in table.rows}
    assert set(rows) == {"judged:F@j", "margin:price=0.2"}
    mine = rows["judged:F@j"]
    assert mine["agreement_over_margin"] == pytest.approx(0.75 - 0.25)
    assert mine["score_over_margin"] == pytest.approx(0.75 - 0.25)
    # m does not vary; what an example moves: judged ¼ ¼ −¾ ¼, half of the margin's ±½ → 0, ½, −1, ½
    half = 1.959964 * math.sqrt((0 + 0.25 + 1 + 0.25) / 3) / 2
    assert mine["agreement_over_margin_ci"] == pytest.approx((0.5 - half, 0.5 + half))
    # the line of the priced margin begins at exact: two thirds of the way from 1 to ½, and a lower bound
    assert mine["agreement_over_priced_margin"] == pytest.approx(0.75 - 2 / 3)
    assert (mine["agreement_over_priced_margin_ci"], mine["agreement_over_priced_margin_at_least"]) == (None, True)
    assert mine["score_over_priced_margin"] == pytest.approx(0.75 - (0.75 / 3 + 0.5 * 2 / 3))
    assert mine["score_over_priced_margin_ci"] is not None
    assert "| +50.0 \\[−19.3, +119.3\\] | ≥ +8.3 |" in table.markdown()


def at_equal_m(folder: Path, n: int = 300) -> None:
    """`exact`, two margins and a judged rule between them. All rules keep the same answers more often, and there the
    judged one has a larger m."""
    dice = random.Random(3)
    luck = [dice.random() for _ in range(n)]
    lengths = [40 + int(160 * (1 - x) * dice.random()) for x in luck]
    exact = samples([(1 + t, t // 4 + 1) for t in lengths], [0] * n)
    write_run(folder, "gsm8k", "exact", 10, exact, None)
    for rule, pace, kept in (("margin:0.5", 4.5, 0.9), ("margin:2", 6, 0.2), ("judged:q0.8@j", 6, 0.75)):
        ease = [0.6 + 0.8 * x if rule.startswith("judged") else 1 for x in luck]
        spent = [int(t / (pace * e)) + 1 for t, e in zip(lengths, ease, strict=True)]
        rows = samples([(1 + t, c) for t, c in zip(lengths, spent, strict=True)], [0] * n)
        for sample, x in zip(rows, luck, strict=True):
            sample["agrees"] = None if dice.random() < 0.5 else float(x + 0.2 * dice.random() > 1.1 - kept)
        write_run(folder, "gsm8k", rule, 10, rows, exact)


@pytest.mark.slow
def test_the_interval_of_a_lead_is_that_of_resampled_examples(equal_m: Any, tmp_path: Path) -> None:
    at_equal_m(tmp_path / "eval")
    runs = read_results([tmp_path / "eval"])[0]
    by_rule = {run.rule: equal_m.Answered(run, equal_m.read_answers(run.folder)) for run in runs}
    judged, points = by_rule["judged:q0.8@j"], [by_rule["margin:0.5"], by_rule["margin:2"]]
    lead = equal_m.lead_over(judged, points, equal_m.AGREES)
    assert lead is not None
    assert lead.interval is not None
    ids, dice, seen = sorted(judged.answers), random.Random(0), []
    for _ in range(800):
        drawn = {str(place): dice.choice(ids) for place in range(len(ids))}
        again = [r._replace(answers={k: r.answers[i] for k, i in drawn.items()}) for r in (judged, *points)]
        found = equal_m.lead_over(again[0], again[1:], equal_m.AGREES)
        assert found is not None
        seen.append(found.value)
    assert (lead.interval[1] - lead.interval[0]) / 2 == pytest.approx(1.959964 * stdev(seen), rel=0.08)
    assert sum(lead.interval) / 2 == pytest.approx(lead.value)
