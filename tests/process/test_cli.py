"""The command line as a user meets it: results on stdout, one line and exit code 2 for wrong input."""

from __future__ import annotations

import io
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fake_judge import constant_judge
from refusals import known_at_once, write_inputs
from selfjudge.cli import main as cli
from selfjudge.store.run_folder import LoadWatch
from warm import Process

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
        "tokens_per_second", "seconds", "pair", "rule", "gamma", "gamma_mean", "threshold",
    }  # fmt: skip
    assert set(result["seconds"]) == {"draft", "target", "judge", "rule", "total"}
    assert result["judged_tokens"] == []
    assert len(result["token_ids"]) == len(result["origins"]) == 20
    assert set(result["origins"]) <= {"draft", "judge", "target"}


def test_generate_streams_text_and_reports_on_stderr(run, pair: list[str]) -> None:
    code, out, err = run("generate", "w1 w2", *pair, "--max-new-tokens", "8")
    assert code == 0
    assert len(out.split()) == 8
    assert re.search(r"^8 tokens in \d+\.\d s, \d+\.\d tokens/s", err, re.M)
    assert re.search(r"\d\.\d\d tokens per pass \(m\), \d+\.\d drafted per step \(γ\)", err)
    assert "of 8 tokens were drafted, 0 of them accepted against the target's choice" in err


def test_color_tints_by_origin(run, pair: list[str]) -> None:
    drafts = ("--gamma", "3", "--max-new-tokens", "20")
    _, out, err = run("generate", "w1 w2", *pair, "--rule", "topk:20", "--strict-start", "0", "--color", *drafts)
    assert "the target wanted" in err
    assert "\x1b[30;43m" in out  # accepted against alignment
    assert re.search(r"\x1b\[30;43mjudge +\d+\x1b\[0m drafted, accepted against", err)  # the legend
    _, out, err = run("generate", "w1 w2", *pair[:3], pair[1], "--gamma", "3", "--color", "--max-new-tokens", "9")
    assert "\x1b[32m" in out  # a target that drafts for itself: what was drafted is its own choice
    assert "saved a pass each" in err


def test_prompt_from_standard_input(run, pair: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("w1 w2"))
    _, out, _ = run("generate", "-", *pair, "--max-new-tokens", "4", "--json")
    piped = json.loads(out)["token_ids"]
    _, out, _ = run("generate", "w1 w2", *pair, "--max-new-tokens", "4", "--json")
    assert len(piped) == 4
    assert piped == json.loads(out)["token_ids"]


def test_judged_from_a_folder(run, pair: list[str], tmp_path: Path) -> None:
    constant_judge(1.0, 32, pair[1]).save_pretrained(tmp_path)
    command = ["generate", "w1 w2", *pair, "--judge", str(tmp_path), "--gamma", "3", "--json", "--max-new-tokens", "13"]
    _, out, _ = run(*command, "--rule", "judged:0.5,guard=off")
    guarded = json.loads(out)
    assert (guarded["guarded_tokens"], guarded["judged_tokens"]) == (12, [])  # its first 16 tokens are verified exactly
    _, out, _ = run(*command, "--rule", "judged:0.5,guard=off", "--strict-start", "0", "--no-strict-code")
    result = json.loads(out)
    assert result["mean_accepted_length"] == 4
    assert result["threshold"] == 0.5
    assert [t["index"] for t in result["judged_tokens"]] == [i for i, o in enumerate(result["origins"]) if o == "judge"]
    assert {"token", "text", "target_text", "target_probability", "score"} <= result["judged_tokens"][0].keys()
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
        "2,auto",
        "--limit",
        "1",
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
        ("transformers-plain", 0), ("transformers-assisted", 2), ("selfjudge-plain", 0), ("selfjudge-exact", 2),
        ("selfjudge-exact", "auto"),
    ]  # fmt: skip
    for row in result["runs"]:
        assert row["identical_to_plain"] == 1.0
        assert row["spread"][0] <= row["ratio_to_plain"] <= row["spread"][1]
    assert set(result) >= {"machine", "versions", "dtype", "runs", "date"}
    assert result["baseline"] == "transformers-plain"
    assert (result["dtype"], result["draft_dtype"]) == ("float32", "float32")  # tiny drafts are too narrow for int8
    assert {row["dtype"] for row in result["runs"]} == {"float32"}
    code, out, _ = run(
        "bench", "decode", *pair, "--gammas", "1", "--limit", "1", "--repeats", "1", "--max-new-tokens", "6"
    )
    assert code == 0
    assert "transformers-assisted" in out
    assert "× transformers-plain" in out
    _, out, _ = run("bench", "decode", *pair, "--gammas", "1", "--limit", "1", "--repeats", "1", "--no-peers", "--json")
    alone = json.loads(out)
    assert alone["baseline"] == alone["runs"][0]["name"] == "selfjudge-plain"
    assert alone["runs"][0]["spread"] is None  # of one repeat


@pytest.mark.slow
@pytest.mark.parametrize("busy", ["", "this machine is busy: speeds are not reliable (a test)"])
def test_bench_decode_ranks_nothing_on_a_busy_machine(
    run, pair: list[str], monkeypatch: pytest.MonkeyPatch, busy: str
) -> None:
    turns: list[list[float]] = []

    def describe(self: LoadWatch, given: Any = ()) -> str:
        turns.extend(given)
        return busy

    monkeypatch.setattr(LoadWatch, "describe", describe)
    command = ["bench", "decode", *pair, "--gammas", "1,auto", "--limit", "1", "--repeats", "2", "--no-peers",
               "--max-new-tokens", "6"]  # fmt: skip
    _, out, err = run(*command)
    assert ("exact (γ=" in out) is not bool(busy)
    assert out.count(busy or "this machine is busy") == bool(busy)
    assert [len(each) for each in turns] == [2, 2]  # plain and γ = 1; auto may choose another γ each time
    assert ("turn 1 of 2, this machine is busy" in err) is bool(busy)
    result = json.loads(run(*command, "--json")[1])
    assert result["busy"] == busy
    assert (result["best"] is None) is bool(busy)


def test_distill_is_killed_and_goes_on(run, checkpoints: dict[str, str], tmp_path: Path) -> None:
    """kill -9 while the student trains; the same command finishes it, and the draft works like any other."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "draft"
    prompts.write_text("".join(json.dumps({"prompt": f"w{i} w{i + 1}"}) + "\n" for i in range(12)))
    command = [
        "distill", "--target", checkpoints["target"], "--out", str(out), "--prompts", f"{prompts}:12x3", "--layers", "1",
        "--width", "64", "--max-new-tokens", "8", "--held-out", "3", "--batch-tokens", "128",
    ]  # fmt: skip
    child = Process([*command, "--minutes", "9"])
    for line in child.stderr:
        if line.startswith("training"):
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


def test_label_train_and_generate_in_a_line(run, checkpoints: dict[str, str], tmp_path: Path) -> None:
    """The main job on a tiny pair: labels with states before, judges of every kind, decoding with them by θ and by quality."""
    prompts = tmp_path / "prompts.jsonl"
    words = [" ".join(f"w{(7 * i + 3 * j) % 90 + 3}" for j in range(4 + i % 5)) for i in range(40)]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in words))
    pair = ["--target", checkpoints["target"], "--draft", checkpoints["draft"]]
    labels, judge = str(tmp_path / "labels"), str(tmp_path / "judge")
    code, _, err = run(
        "label", *pair, "--prompts", str(prompts), "--tau", "-0.5", "--suffix-length", "5", "--max-new-tokens", "24",
        "--previous", "--out", labels,
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
    ask = ["generate", words[0], *pair, "--gamma", "3", "--max-new-tokens", "16", "--strict-start", "0", "--json"]
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
    both = str(tmp_path / "both")
    code, text, err = run(
        "train", labels, "--out", both, "--features", "hidden+margin+previous",
        "--suffix-length", "2", "--acceptable", "0.25", "--json",
    )  # fmt: skip
    assert code == 0, err
    config = json.loads(text)
    assert (config["model"], config["suffix_length"], config["acceptable"]) == ("linear", 2, 0.25)
    assert config["metrics"]["acceptable_rate"] == pytest.approx(0.25, abs=0.02)
    assert run(*ask, "--judge", both)[0] == 0
    code, text, err = run("bench", "decode", *pair, "--judge", both, "--gammas", "2", "--limit", "1", "--repeats", "1",
                          "--max-new-tokens", "8", "--prompts", str(prompts), "--json")  # fmt: skip
    assert code == 0, err
    judged = next(r for r in json.loads(text)["runs"] if r["name"] == "selfjudge-judged")
    assert 0 < judged["judge_time_share"] < 1


PROBE = """
import contextlib, io, json, sys
from selfjudge.cli import main as cli
found = {}
for name, command in json.load(sys.stdin).items():
    sys.argv = ["selfjudge", *command]
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            cli.main()
        except SystemExit as stop:
            found[name] = stop.code, said.getvalue(), sorted({"torch", "transformers"} & sys.modules.keys())
print(json.dumps(found))
"""


@pytest.mark.slow
def test_what_the_command_line_tells_is_refused_without_torch(checkpoints: dict[str, str], tmp_path: Path) -> None:
    """All in one process: once one of them had imported torch, the next would show it."""
    write_inputs(tmp_path, checkpoints)
    commands = known_at_once(tmp_path, checkpoints)
    done = subprocess.run(
        [sys.executable, "-c", PROBE], input=json.dumps(commands), capture_output=True, text=True, check=True
    )
    answers = json.loads(done.stdout)
    assert answers.keys() == commands.keys()
    for name, (code, said, heavy) in answers.items():
        assert (code, said.count("\n"), heavy) == (2, 1, []), (name, said)


def test_non_finite_states_are_said_once(run, checkpoints: dict[str, str], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    broken = AutoModelForCausalLM.from_pretrained(checkpoints["target"])
    size = broken.config.vocab_size
    with torch.no_grad():  # finite itself; its logits are not, except in the pass with which an engine is tried
        states = broken(torch.tensor([[size // 3, size // 2]]), output_hidden_states=True).hidden_states[-1][0]
        broken.get_output_embeddings().weight[7] = -3e38 * states.sum(0).sign()
    broken.save_pretrained(tmp_path / "broken")
    AutoTokenizer.from_pretrained(checkpoints["target"]).save_pretrained(tmp_path / "broken")
    words = ["generate", "w1 w2", "--target", str(tmp_path / "broken"), "--draft", checkpoints["draft"], "--json"]
    process = Process(words, stdout=tmp_path / "said")
    said = process.stderr.read()
    assert process.wait() == 0, said
    assert json.loads((tmp_path / "said").read_text())["token_ids"]
    assert said.count("non-finite") == 1


def test_warnings_name_options(run, pair: list[str], tmp_path: Path) -> None:
    file = tmp_path / "asked.jsonl"
    file.write_text('{"prompt": "w5 w6"}\n')
    asked = ["--tasks", f"file:{file}", "--out", str(tmp_path / "eval"), "--max-new-tokens", "4"]
    code, _, err = run("eval", *pair, *asked, "--rules", "topk:2")
    assert code == 0
    assert "no run of exact to compare topk:2 with; add it to --rules" in err
    assert "`" not in err


def test_options_that_are_given_twice_are_named(run, pair: list[str]) -> None:
    code, text, err = run("generate", "w1", *pair, "--rule", "nope", "--rule", "exact", "--stop", "w7", "--stop", "w9",
                          "--color", "--color", "--seed", "1", "--seed", "2", "--seed", "3", "--max-new-tokens", "3")  # fmt: skip
    assert (code, bool(text)) == (0, True), err
    said = [line for line in err.splitlines() if "given" in line]
    assert said == [
        f"selfjudge: {what} times: the last one counts" for what in ("--rule is given 2", "--seed is given 3")
    ]


def test_an_unreadable_cache(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SELFJUDGE_HOME", str(tmp_path / "file"))
    code, _, err = run("generate", "hi")
    assert code == 2
    assert err.startswith("selfjudge: cannot use the cache folder")
    assert err.count("\n") == 1


def test_a_bare_command_shows_the_help(run) -> None:
    code, out, err = run()
    assert (code, err) == (0, "")
    assert out.count("\n") > 5
    assert "generate" in out


def test_the_version(run) -> None:
    code, out, err = run("--version")
    assert (code, err) == (0, "")
    assert re.fullmatch(r"selfjudge \d+\.\d+\.\d+\S*\n", out)


@pytest.mark.parametrize(("typed", "offered"), [("pu", {"pull"}), ("pull smo", {"smollm2-135m"}), ("ls ru", {"rules"})])
def test_the_shell_completes(run, monkeypatch: pytest.MonkeyPatch, typed: str, offered: set[str]) -> None:
    monkeypatch.setenv("_SELFJUDGE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"selfjudge {typed}")
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split())))
    code, out, _ = run()
    assert code == 0
    assert set(out.split()) == offered


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

    monkeypatch.setattr("selfjudge.cli.models.rule_options", full)
    code, out, err = run("ls", "rules")
    assert (code, out) == (2, "")
    assert err.startswith("selfjudge: CUDA out of memory. Tried to allocate 2.00 GiB: use a smaller --batch")
    assert err.count("\n") == 1


def test_values_out_of_range_are_refused_in_our_words(run) -> None:
    """Where typer says itself what is wrong, as 0.19 and 0.27 do, its words stay."""
    for option, value, said in (
        ("--quality", "2", "must be at most 1"), ("--max-new-tokens", "0", "must be at least 1"),
        ("--temperature", "-1", "must be at least 0"), ("--top-k", "x", "must be a valid integer"),
    ):  # fmt: skip
        code, _, err = run("generate", "hi", option, value)
        typers = "is not in the range" in err or "is not a valid" in err
        assert (code, said in err or typers, "Input should" in err) == (2, True, False), err


def test_help_carries_an_example_everywhere(run) -> None:
    for words, command in leaves(cli.program()):
        assert f"Example: selfjudge {words}" in command.help, words


def leaves(command, words: str = ""):
    """(its words, the command) of every command of the program."""
    below = getattr(command, "commands", {})
    if not below:
        yield words, command
    for name, inner in below.items():
        yield from leaves(inner, f"{words} {name}".strip())


@pytest.mark.parametrize("page", ["cli", "formats"])
def test_a_reference_page_is_what_the_program_says(
    page: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("COLUMNS", "TERM", "NO_COLOR"):  # the script sets them: afterwards they are as before
        monkeypatch.setenv(name, "")
    runpy.run_path(str(DOCS / f"make_{page}.py"), run_name="__main__")
    assert (DOCS / f"{page}.md").read_text() == capsys.readouterr().out, "run: make docs"
