"""The command line as a user meets it: results on stdout, one line and exit code 2 for wrong input."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from selfjudge.cli import main as cli
from selfjudge.judge.config import JudgeConfig
from selfjudge.judge.model import Judge

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture):
    """Call the program; returns (exit code, stdout, stderr)."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["selfjudge", *arguments])
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capfd.readouterr()
        return code, out, err

    return call


@pytest.fixture
def pair(checkpoints: dict[str, str]) -> list[str]:
    return ["--target", checkpoints["target"], "--draft", checkpoints["draft"]]


def test_generate_json_has_the_contracted_names(run, pair: list[str]) -> None:
    code, out, _ = run("generate", "w1 w2", *pair, "--gamma", "3", "--max-new-tokens", "20", "--json")
    assert code == 0
    result = json.loads(out)
    assert set(result) >= {
        "text", "token_ids", "origins", "cycles", "mean_accepted_length", "drafts_accepted", "judged_share",
        "tokens_per_second", "seconds", "pair", "rule", "gamma", "threshold",
    }  # fmt: skip
    assert set(result["seconds"]) == {"draft", "target", "judge", "rule", "total"}
    assert len(result["token_ids"]) == len(result["origins"]) == 20
    assert set(result["origins"]) <= {"draft", "judge", "target"}


def test_generate_streams_text_and_reports_on_stderr(run, pair: list[str]) -> None:
    code, out, err = run("generate", "w1 w2", *pair, "--max-new-tokens", "8")
    assert code == 0
    assert len(out.split()) == 8
    assert "tokens/s" in err


def test_color_tints_by_origin(run, pair: list[str]) -> None:
    _, out, _ = run("generate", "w1 w2", *pair, "--rule", "topk:20", "--color", "--max-new-tokens", "20")
    assert "\x1b[34m" in out  # target
    assert "\x1b[30;42m" in out  # accepted against alignment


def test_prompt_from_standard_input(pair: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "selfjudge.cli", "generate", "-", *pair, "--max-new-tokens", "4", "--json"],
        input="w1 w2", capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert len(json.loads(done.stdout)["token_ids"]) == 4


def test_judged_from_a_folder(run, pair: list[str], tmp_path: Path) -> None:
    Judge(JudgeConfig(hidden_size=32), bias=torch.tensor(torch.inf)).save_pretrained(tmp_path)
    command = ["generate", "w1 w2", *pair, "--judge", str(tmp_path), "--gamma", "3", "--json", "--max-new-tokens", "13"]
    _, out, _ = run(*command, "--rule", "judged:0.5,guard=off")
    result = json.loads(out)
    assert result["mean_accepted_length"] == 4
    assert result["threshold"] == 0.5
    assert "judge" in result["origins"]
    _, out, _ = run(*command, "--rule", "judged", "--theta", "1")
    exact = json.loads(run("generate", "w1 w2", *pair, "--gamma", "3", "--json", "--max-new-tokens", "13")[1])
    assert json.loads(out)["token_ids"] == exact["token_ids"]


@pytest.mark.parametrize("what", ["pairs", "rules", "tasks"])
def test_ls(run, what: str) -> None:
    code, out, _ = run("ls", what, "--json")
    assert code == 0
    assert json.loads(out)
    assert run("ls", what)[1].count("\n") > 2


def test_bench_decode(run, pair: list[str]) -> None:
    code, out, _ = run(
        "bench",
        "decode",
        *pair,
        "--gammas",
        "1,2",
        "--limit",
        "2",
        "--repeats",
        "2",
        "--max-new-tokens",
        "12",
        "--json",
    )
    assert code == 0
    result = json.loads(out)
    names = [(r["name"], r["gamma"]) for r in result["runs"]]
    assert names == [
        ("transformers-plain", 0), ("transformers-assisted", 1), ("transformers-assisted", 2), ("selfjudge-plain", 0),
        ("selfjudge-exact", 1), ("selfjudge-exact", 2),
    ]  # fmt: skip
    for row in result["runs"]:
        assert row["identical_to_plain"] == 1.0
        assert row["spread"][0] <= row["ratio_to_plain"] <= row["spread"][1]
    assert set(result) >= {"machine", "versions", "dtype", "runs", "date"}
    assert (result["draft_dtype"], result["judged_draft_dtype"]) == ("float32", "float32")
    code, out, _ = run(
        "bench", "decode", *pair, "--gammas", "1", "--limit", "1", "--repeats", "1", "--max-new-tokens", "6"
    )
    assert code == 0
    assert "transformers-assisted" in out


def test_distill_is_killed_and_goes_on(run, checkpoints: dict[str, str], tmp_path: Path) -> None:
    """kill -9 while the student trains; the same command finishes it, and the draft works like any other."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "draft"
    prompts.write_text("".join(json.dumps({"prompt": f"w{i} w{i + 1}"}) + "\n" for i in range(12)))
    command = [
        "distill", "--target", checkpoints["target"], "--out", str(out), "--prompts", f"{prompts}:12x3", "--layers", "1",
        "--width", "64", "--max-new-tokens", "8", "--held-out", "3", "--batch-tokens", "128",
    ]  # fmt: skip
    child = subprocess.Popen(
        [sys.executable, "-m", "selfjudge.cli", *command, "--minutes", "9"], stderr=subprocess.PIPE
    )
    assert child.stderr is not None
    for line in child.stderr:
        if line.startswith(b"training"):
            child.kill()
            break
    assert child.wait() == -9
    answers = sorted((out / "work").glob("answers-*"))
    before = [f.stat().st_mtime_ns for f in answers]
    assert answers
    assert not (out / "run.json").exists()
    code, text, err = run(*command, "--minutes", "9", "--steps", "20", "--json")
    assert code == 0, err
    assert json.loads(text)["training"]["steps"] > 0
    assert (out / "run.json").exists()
    assert [f.stat().st_mtime_ns for f in answers] == before
    pair = ["--target", checkpoints["target"], "--draft", str(out)]
    assert run("generate", "w1 w2", *pair, "--max-new-tokens", "6")[0] == 0
    code, text, _ = run(
        "bench", "draft", *pair, "--prompts", str(prompts), "--gammas", "2", "--max-new-tokens", "8", "--json"
    )
    assert code == 0
    assert json.loads(text)["runs"][-1]["n"] == 12
    code, text, _ = run("bench", "draft", *pair, "--prompts", str(prompts), "--gammas", "2", "--max-new-tokens", "8")
    assert "predicted" in text


def test_label_train_study_and_generate_in_a_line(run, checkpoints: dict[str, str], tmp_path: Path) -> None:
    """The main job on a tiny pair: labels with look-ahead, judges of every kind, decoding with them by θ and by quality."""
    prompts = tmp_path / "prompts.jsonl"
    words = [" ".join(f"w{(7 * i + 3 * j) % 90 + 3}" for j in range(4 + i % 5)) for i in range(40)]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in words))
    pair = ["--target", checkpoints["target"], "--draft", checkpoints["draft"]]
    labels, judge = str(tmp_path / "labels"), str(tmp_path / "judge")
    code, _, err = run(
        "label", *pair, "--prompts", str(prompts), "--tau", "-0.5", "--suffix-length", "5", "--max-new-tokens", "24",
        "--lookahead", "--out", labels,
    )  # fmt: skip
    assert code == 0, err
    code, text, err = run("labels", "info", labels, "--json")
    assert code == 0, err
    tau = str(json.loads(text)[labels]["score_quantiles"]["75%"])
    code, text, err = run("train", labels, "--out", judge, "--tau", tau)
    assert code == 0, err
    assert "ROC-AUC" in text
    assert json.loads((tmp_path / "judge" / "config.json").read_text(encoding="utf-8"))["tau"] == float(tau)
    assert (tmp_path / "judge" / "roc.png").read_bytes().startswith(b"\x89PNG")
    ask = ["generate", words[0], *pair, "--max-new-tokens", "16", "--json"]
    tokens = {}
    for name, options in {
        "exact": [], "F": ["--theta", "F"], "strict": ["--quality", "1"], "loose": ["--quality", "0"], "all": ["--theta", "0"],
    }.items():  # fmt: skip
        code, text, err = run(*ask, *(["--judge", judge, *options] if options else []))
        assert code == 0, err
        tokens[name] = json.loads(text)
    assert tokens["strict"]["threshold"] == 1.0
    assert tokens["strict"]["token_ids"] == tokens["exact"]["token_ids"]
    assert tokens["loose"]["threshold"] < 1.0
    assert tokens["all"]["mean_accepted_length"] > tokens["exact"]["mean_accepted_length"]
    ahead = str(tmp_path / "ahead")
    code, text, err = run(
        "train", labels, "--out", ahead, "--features", "hidden+margin+lookahead", "--model", "mlp",
        "--suffix-length", "2", "--acceptable", "0.25", "--json",
    )  # fmt: skip
    assert code == 0, err
    config = json.loads(text)
    assert (config["model"], config["suffix_length"], config["acceptable"]) == ("mlp", 2, 0.25)
    assert config["metrics"]["acceptable_rate"] == pytest.approx(0.25, abs=0.02)
    assert run(*ask, "--judge", ahead)[0] == 0
    code, text, err = run("bench", "decode", *pair, "--judge", ahead, "--gammas", "2", "--limit", "1", "--repeats", "1",
                          "--max-new-tokens", "8", "--prompts", str(prompts), "--json")  # fmt: skip
    assert code == 0, err
    judged = next(r for r in json.loads(text)["runs"] if r["name"] == "selfjudge-judged")
    assert 0 < judged["judge_time_share"] < 1
    code, _, err = run(
        "label", *pair, "--prompts", str(prompts), "--tau", tau, "--suffix-length", "5", "--max-new-tokens", "24",
        "--lookahead", "--out", f"{labels}2",
    )  # fmt: skip
    assert code == 0, err
    code, text, err = run("study", f"{labels}2", "--out", str(tmp_path / "study"), "--json")
    assert code == 0, err
    found = json.loads(text)
    assert len(found["features"]) == 3
    assert {r["suffix_length"] for r in found["suffix_length"]} == {0, 5, 10, 20}
    assert found["suffix_gap"][0]["suffix_gap"] == 0
    assert found["learning_curve"][-1]["labels"] > found["learning_curve"][0]["labels"]
    assert (tmp_path / "study" / "learning_curve.png").is_file()
    assert run("study", f"{labels}2", "--out", str(tmp_path / "again"))[0] == 0


def _documented() -> list[re.Pattern[str]]:
    """The right column of the table in docs/errors.md; an ellipsis stands for anything."""
    rows = [line.split("|") for line in (DOCS / "errors.md").read_text().splitlines() if line.startswith("| ")]
    messages = [row[2].strip().strip("`") for row in rows if "`" in row[2]]
    return [re.compile("selfjudge: " + ".*".join(map(re.escape, m.split("…")))) for m in messages]


def _wrong(checkpoints: dict[str, str], tmp: Path) -> dict[str, list[str]]:
    """Every row of the table, as a command line."""
    target, draft = ["--target", checkpoints["target"]], ["--draft", checkpoints["draft"]]
    Judge(JudgeConfig(hidden_size=7)).save_pretrained(tmp / "narrow")
    Judge(JudgeConfig(hidden_size=32, target="another", target_sha256="f" * 64)).save_pretrained(tmp / "foreign")
    (tmp / "prompts.jsonl").write_text('{"question": "no prompt here"}\n')
    (tmp / "numbers.jsonl").write_text('{"prompt": 5}\n')
    Judge(JudgeConfig(hidden_size=32)).save_pretrained(tmp / "plain")
    ask = ["generate", "w1 w2", *target, *draft]
    serve = ["serve", *target, *draft, "--port", "0"]
    distill = ["distill", *target, "--out", str(tmp / "draft")]
    (tmp / "asked.jsonl").write_text('{"prompt": "w5 w6"}\n{"prompt": "w9 w8 w7"}\n')
    (tmp / "begun").mkdir()
    (tmp / "begun" / "settings.json").write_text("{}")
    (tmp / "page.html").mkdir()
    for name, text in (("damaged", "[]"), ("unreadable", "{")):
        (tmp / name).mkdir()
        (tmp / name / "summary.json").write_text(text)
    label = ["label", *target, *draft, "--prompts", str(tmp / "asked.jsonl"), "--max-new-tokens", "24"]
    shutil.copytree(checkpoints["target"], tmp / "bare")
    (tmp / "bare" / "chat_template.jinja").unlink()
    evaluate = [
        "eval",
        "--tasks",
        f"file:{tmp / 'asked.jsonl'}",
        "--out",
        str(tmp / "new"),
        "--gammas",
        "2",
        *target,
        *draft,
    ]
    inside = [*label, "--out", str(tmp / "new"), "--backend", "vllm"]
    return {
        "unknown model": ["generate", "hi", "--target", "no-such-org/no-such-model", *draft],
        "unknown pair": ["generate", "hi", "--pair", "nobody"],
        "nearly a model": ["generate", "hi", "--target", "smollm2-135"],
        "missing file": ["generate", "hi", "--target", "./missing.gguf", *draft],
        "no draft": ["generate", "hi", *target],
        "tokenizer mismatch": ["generate", "hi", *target, "--draft", checkpoints["stranger"]],
        "empty prompt": ["generate", " ", *target, *draft],
        "long prompt": ["generate", "w1 " * 200, *target, *draft],
        "gamma": [*ask, "--gamma", "-2"],
        "max-new-tokens": [*ask, "--max-new-tokens", "0"],
        "theta": [*ask, "--rule", "judged", "--theta", "1.5", "--judge", str(tmp / "foreign")],
        "no judge": [*ask, "--rule", "judged"],
        "judge width": [*ask, "--rule", "judged", "--judge", str(tmp / "narrow")],
        "judge target": [*ask, "--rule", "judged", "--judge", str(tmp / "foreign")],
        "judge unasked": [*ask, "--rule", "exact", "--judge", str(tmp / "foreign")],
        "repeats": ["bench", "decode", *target, *draft, "--repeats", "0"],
        "limit": ["demo", "--limit", "0"],
        "prompt type": ["bench", "decode", *target, *draft, "--prompts", str(tmp / "numbers.jsonl")],
        "no judge folder": [*ask, "--rule", "judged", "--judge", str(tmp)],
        "unknown rule": [*ask, "--rule", "nope"],
        "rule option": [*ask, "--rule", "topk:z=1"],
        "fly": [*ask, "--rule", "fly", "--gamma", "4"],
        "temperature": [*ask, "--temperature", "0.7"],
        "temperature range": [*ask, "--rule", "sampling", "--temperature", "0"],
        "top-p": [*ask, "--rule", "sampling", "--top-p", "1.5"],
        "device": [*ask, "--device", "tpu9"],
        "dtype": [*ask, "--dtype", "int3"],
        "pull": ["pull", "nope"],
        "ls": ["ls", "nope"],
        "prompts": ["bench", "decode", *target, *draft, "--prompts", str(tmp / "prompts.jsonl")],
        "split for tests": [*label, "--prompts", "livecodebench/test-1", "--out", str(tmp / "new"), "--tau", "-5"],
        "gammas": ["bench", "decode", *target, *draft, "--gammas", "1,x"],
        "confidence": [*ask, "--confidence", "1.5"],
        "data": [*distill, "--prompts", "gsm8k"],
        "split": [*distill, "--prompts", "math500"],
        "nothing": [*distill, "--prompts", "self:0"],
        "source": [*distill, "--prompts", "self:5xq"],
        "twice": [*distill, "--prompts", "self:5", "--prompts", "self:6"],
        "width": [*distill, "--width", "100"],
        "minutes": [*distill, "--minutes", "0"],
        "strangers": ["distill", *target, "--out", str(tmp)],
        "chat template": ["distill", "--target", str(tmp / "bare"), "--out", str(tmp / "draft")],
        "no tau": [*label, "--out", str(tmp / "none")],
        "both taus": [*label, "--out", str(tmp / "new"), "--tau", "-5", "--calibrate", "arithmetic"],
        "uncheckable": [*label, "--out", str(tmp / "new"), "--calibrate", "dolly"],
        "open prompts": [*label, "--out", str(tmp / "new"), "--method", "autojudge"],
        "method": [*label, "--out", str(tmp / "new"), "--method", "magic"],
        "limit of counts": ["label", *target, *draft, "--prompts", "self:500", "--limit", "50", "--out", str(tmp / "new")],
        "no share": ["label", *target, *draft, "--prompts", "self@1", "--prompts", "self-summaries@100", "--limit", "5",
                     "--out", str(tmp / "new")],
        "answers": ["label", *target, *draft, "--prompts", "self:5x3", "--tau", "-5", "--out", str(tmp / "new")],
        "int8": [*label, "--out", str(tmp / "new"), "--tau", "-5", "--dtype", "int8", "--device", "cpu"],
        "weights": ["label", *target, *draft, "--prompts", "self@2", "--tau", "-5", "--out", str(tmp / "new")],
        "shard": [*label, "--out", str(tmp / "new"), "--tau", "-5", "--shard", "3"],
        "unfinished": ["labels", "info", str(tmp / "begun")],
        "begun": [*label, "--out", str(tmp / "begun"), "--tau", "-5"],
        "no labels": ["labels", "merge", str(tmp), "--out", str(tmp / "new")],
        "bench label": ["bench", "label", *target, *draft, "--prompts", "dolly"],
        "quality and theta": [*ask, "--rule", "judged", "--judge", str(tmp / "foreign"), "--theta", "F", "--quality", "0.9"],
        "quality unasked": [*ask, "--rule", "exact", "--quality", "0.9"],
        "no such threshold": [*ask, "--judge", str(tmp / "foreign"), "--theta", "Q"],
        "no curve": [*ask, "--judge", str(tmp / "foreign"), "--quality", "0.9"],
        "judge nowhere": [*ask, "--judge", "no-such-org/no-such-judge"],
        "train into": ["train", str(tmp), "--out", str(tmp)],
        "train below a file": ["train", str(tmp), "--out", str(tmp / "prompts.jsonl" / "judge")],
        "two thresholds": [*ask, "--rule", "judged:0.5", "--judge", str(tmp / "foreign"), "--theta", "0.4"],
        "labels gone": ["train", str(tmp / "gone"), "--out", str(tmp / "new")],
        "train features": ["train", str(tmp), "--out", str(tmp / "new"), "--features", "taste"],
        "train model": ["train", str(tmp), "--out", str(tmp / "new"), "--model", "forest"],
        "originals": ["train", str(tmp), "--out", str(tmp / "new"), "--originals", "maybe"],
        "lookahead": [*label, "--out", str(tmp / "new"), "--method", "autojudge+", "--lookahead"],
        "report nowhere": ["report", str(tmp / "nowhere")],
        "report nothing": ["report", str(tmp / "begun")],
        "report page": ["report", str(tmp / "begun"), "--out", str(tmp / "report.pdf")],
        "report folder": ["report", str(tmp / "begun"), "--out", str(tmp / "page.html")],
        "report among others": ["report", str(tmp / "begun"), "--out", str(tmp / "begun.html")],
        "report damaged": ["report", str(tmp / "damaged")],
        "report unreadable": ["report", str(tmp / "unreadable")],
        "rule range": [*ask, "--rule", "topk:99999999999"],
        "backend": ["serve", "--backend", "magic"],
        "backend option": ["serve", "--backend", "vllm", "--rule", "topk:2"],
        "draft dtype": [*ask, "--draft-dtype", "float16"],
        "draft dtype beside another": [*ask, "--draft-dtype", "int8", "--dtype", "bfloat16", "--device", "cpu"],
        "share": ["train", str(tmp), "--out", str(tmp / "new"), "--acceptable", "2"],
        "share and tau": ["train", str(tmp), "--out", str(tmp / "new"), "--acceptable", "0.3", "--tau", "-1"],
        "draft dtype of another backend": ["serve", "--backend", "vllm", "--draft-dtype", "int8"],
        "option of another backend": [*serve, "--vllm", "--enforce-eager"],
        "serve limit": [*serve, "--max-queue", "0"],
        "serve host": [*serve, "--host", "203.0.113.1"],
        "serve port": [*serve, "--port", "99999"],
        "serve theta": [*serve, "--theta", "0.4"],
        "serve key": [*serve, "--api-key", " "],
        "serve timeout": [*serve, "--timeout", "0"],
        "serve temperature": [*serve, "--temperature", "3"],
        "serve gamma": [*serve, "--gamma", "-1"],
        "serve threshold": [*serve, "--judge", str(tmp / "plain")],
        "no task": [*evaluate, "--tasks", ""],
        "no judge for a rule": [*evaluate, "--rules", "judged:0.5"],
        "no such judge": [*evaluate, "--rules", "judged:0.5@you", "--judge", f"me={tmp / 'plain'}"],
        "preset": ["reproduce", "--preset", "huge", "--out", str(tmp / "new")],
        "search in vllm": [*inside, "--method", "autojudge+"],
        "tau in vllm": [*inside, "--calibrate", "arithmetic"],
        "self-written in vllm": [*label, "--out", str(tmp / "new"), "--backend", "vllm", "--prompts", "self:5"],
        "engine options": [*label, "--out", str(tmp / "new"), "--engine-options", "{}"],
        "engine options json": [*inside, "--engine-options", "{"],
        "vllm without judge": ["serve", "--backend", "vllm", *target, *draft],
        "vllm without drafts": ["serve", "--backend", "vllm", "--gamma", "0"],
        "option": ["generate", "hi", "--no-such-option"],
        "argument": ["generate"],
    }  # fmt: skip


def test_every_row_of_the_bad_input_table(
    run, checkpoints: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # as on a machine without it
    documented = _documented()
    unseen = set(documented)
    for name, command in _wrong(checkpoints, tmp_path).items():
        code, out, err = run(*command)
        assert code == 2, (name, out, err)
        assert out == "", name
        assert err.count("\n") == 1, (name, err)
        matching = {pattern for pattern in documented if pattern.fullmatch(err.strip())}
        assert matching, f"{name}: not in docs/errors.md: {err}"
        unseen -= matching
    # test_pull, test_decode, test_distill, test_tasks, test_sandbox, test_label, test_shells, test_train
    elsewhere = (
        "cannot fetch",
        "converting",
        "cannot use the cache",
        "needs",
        "non-finite",
        "was begun",
        "cannot write",
        "cannot load",
        "ROUGE needs",
        "generated code",
        "another process works",
        "and .* differ in",
        "there is no mismatch",
        "prompts cannot be split",
        "the part",
        "all .* labels are",
        "and .* are of different targets",
        "has .* rows with features",
        "these labels hold no look-ahead",
        "no look-ahead is stored",
        "/config.json has a",
        "holds",
        "serving needs",
        "JudgeWorker",
        "unknown setting",
        "--quality chooses θ: give one",
        "this selfjudge",
        "vLLM is not installed",
        "is not a readable checkpoint of safetensors",
        "is no NLI model",
        "no labels come from",
        "was made with",
        "--draft-dtype int8 needs a cpu",
    )
    missing = [
        p.pattern
        for p in unseen
        if not p.pattern.replace("\\", "").removeprefix("selfjudge: ").lstrip(".*").strip().startswith(elsewhere)
    ]
    assert not missing, "\n".join(missing)


def test_non_finite_states_are_said_once(run, checkpoints: dict[str, str], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    broken = AutoModelForCausalLM.from_pretrained(checkpoints["target"])
    with torch.no_grad():
        broken.get_output_embeddings().weight[7] = torch.nan
    broken.save_pretrained(tmp_path / "broken")
    AutoTokenizer.from_pretrained(checkpoints["target"]).save_pretrained(tmp_path / "broken")
    done = subprocess.run(
        [
            sys.executable, "-m", "selfjudge.cli", "generate", "w1 w2", "--target", str(tmp_path / "broken"),
            "--draft", checkpoints["draft"], "--json",
        ],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout)["token_ids"]
    assert done.stderr.count("non-finite") == 1


def test_an_unreadable_cache(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SELFJUDGE_HOME", str(tmp_path / "file"))
    code, _, err = run("generate", "hi")
    assert code == 2
    assert any(p.fullmatch(err.strip()) for p in _documented())


def test_a_bare_command_shows_the_help(run) -> None:
    code, out, err = run()
    assert (code, err) == (0, "")
    assert out.count("\n") > 5
    assert "generate" in out


def test_an_interrupt_is_no_success(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("selfjudge.models.pull.pull", interrupted)
    assert run("pull", "smollm2-135m")[0] == 130


def test_a_full_device_is_one_line(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB"
        )

    monkeypatch.setattr("selfjudge.cli.main.app", lambda **_: full())
    code, out, err = run("ls", "rules")
    assert (code, out) == (2, "")
    assert err.startswith("selfjudge: CUDA out of memory. Tried to allocate 2.00 GiB: use a smaller --batch")
    assert err.count("\n") == 1


def test_help_carries_an_example_everywhere(run) -> None:
    commands = (
        ["pull"],
        ["generate"],
        ["ls"],
        ["bench", "decode"],
        ["bench", "passes"],
        ["demo"],
        ["train"],
        ["study"],
        ["report"],
        ["serve"],
        ["eval"],
        ["reproduce"],
    )
    for command in commands:
        code, out, _ = run(*command, "--help")
        assert code == 0
        assert f"Example: selfjudge {' '.join(command)}" in " ".join(out.split())


def test_the_command_reference_is_what_the_program_says() -> None:
    done = subprocess.run([sys.executable, DOCS / "make_cli.py"], capture_output=True, text=True, check=True)
    assert (DOCS / "cli.md").read_text() == done.stdout, "run: make docs"


def test_help_needs_no_torch() -> None:
    code = (
        "import sys, runpy; sys.argv = ['selfjudge', 'ls', 'pairs'];"
        "runpy.run_module('selfjudge.cli', run_name='__main__')"
    )
    probe = f"import sys\ntry:\n    exec({code!r})\nexcept SystemExit: pass\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.split()[-1] == "False"
