"""The demo on a tiny pair: rows as they come, nothing lost on Ctrl-C, a page at the end."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from fake_labels import label_folder, straight
from selfjudge.bench import demo
from selfjudge.bench.config import DemoConfig
from selfjudge.bench.demo import ACCEPTABLE, SideBySide, answer_question, make_judge, same_start
from selfjudge.cli import main as cli
from selfjudge.cli.options import PairOptions
from selfjudge.errors import SelfJudgeError
from selfjudge.label.folder import read_manifest
from selfjudge.models.pair import Pair
from selfjudge.report.demo import demo_page, describe_gain, gain_table, mark_substitutions
from selfjudge.store.run_folder import LoadWatch
from selfjudge.train.config import TrainConfig
from selfjudge.train.pipeline import load_rows

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run_demo(
    tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Call the demo on the tiny pair; returns (exit code, stdout, stderr)."""
    monkeypatch.setattr(PairOptions, "load", lambda self, **_: tiny_pair)
    monkeypatch.setattr(PairOptions, "shipped_judge", None)

    def call(*options: str) -> tuple[int, str, str]:
        page = str(tmp_path / "demo.html")
        arguments = ["--no-labels", "--limit", "1", "--max-new-tokens", "6", "--out", page, *options]
        monkeypatch.setattr(sys, "argv", ["selfjudge", "demo", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        streams = capsys.readouterr()
        return int(stop.value.code or 0), streams.out, streams.err

    return call


def test_rows_a_page_and_the_tokens_of_the_first_answer(run_demo: Run, tmp_path: Path) -> None:
    code, out, err = run_demo("--json")
    assert (code, err) == (0, "")  # a pipe is told of what lasts
    result = json.loads(out)
    assert [(row["rule"], row["gamma"]) for row in result["rows"]] == [
        ("plain", 0),
        ("exact", "auto"),
        ("topk:2", "auto"),
    ]
    assert [row["same_start_as_plain"] for row in result["rows"][:2]] == [1.0, 1.0]
    for row in result["rows"]:
        assert "".join(token["text"] for token in row["tokens"]).split()
        for token in row["tokens"]:
            assert token["origin"] in ("draft", "judge", "target")
            assert ("choice" in token and 0 < token["p_choice"] <= 1) == (token["origin"] == "judge")
            assert token.get("judge") is None
    assert "topk:2" in (tmp_path / "demo.html").read_text()


def test_a_judge_is_made_although_hardly_any_of_a_few_labels_is_acceptable(
    tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a small machine: ten prompts, 185 labels, 9 % of them acceptable."""

    def few_labels(pair: Pair, out: Path, *_: object, **__: object) -> dict[str, Any]:
        label_folder(out, prompts=10, each=18, signal=lambda hidden, margin: straight(hidden, margin) - 3.5)
        return read_manifest(out)

    monkeypatch.setattr("selfjudge.bench.demo.label_pair", few_labels)
    judge, own = make_judge(tiny_pair, tmp_path, 1, lambda stage, share: None)
    assert 0 < own["acceptable"] < 0.15
    assert "why_not" not in own
    assert own["auc"] > 0.5
    assert judge is not None
    labels = tmp_path / "labels"
    for seed in range(10):  # however the prompts are split
        load_rows([labels], TrainConfig(acceptable=ACCEPTABLE, seed=seed))
    with pytest.raises(SelfJudgeError, match="too few, label more"):  # by the labels as they are
        load_rows([labels], TrainConfig(seed=2))


def test_how_much_of_an_answer_comes_before_it_parts_from_another() -> None:
    assert same_start((1, 2, 3), (1, 2, 3)) == 1
    assert same_start((1, 2, 9, 4), (1, 2, 3, 4)) == 0.5  # what follows does not count
    assert same_start((1, 2), (1, 2, 3, 4)) == same_start((1, 2, 3, 4), (1, 2)) == 0.5
    assert same_start((9,), (1, 2)) == 0


def test_the_quick_demo_is_never_longer_than_asked(run_demo: Run) -> None:
    assert DemoConfig(quick=True).as_asked == DemoConfig(quick=True, turns=2, limit=2, max_new_tokens=48, labels=False)
    assert DemoConfig(quick=True, limit=1, max_new_tokens=6).as_asked.max_new_tokens == 6
    assert DemoConfig(limit=20).as_asked == DemoConfig(limit=20)
    code, out, _ = run_demo("--quick", "--json")
    assert (code, json.loads(out)["prompts"]) == (0, 1)


def test_a_row_is_printed_before_the_next_rule_answers(
    run_demo: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []
    answer = SideBySide._answer

    def watched(self: SideBySide, *given: Any) -> None:
        seen.append(capsys.readouterr().out)
        answer(self, *given)

    monkeypatch.setattr(SideBySide, "_answer", watched)
    assert run_demo()[0] == 0
    assert "exact" not in seen[0]
    assert "plain" in seen[1]
    assert "exact" not in seen[1]
    assert "exact" in seen[2]


def test_an_interrupt_loses_nothing(run_demo: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answer = SideBySide._answer

    def interrupted(self: SideBySide, turn: int, name: str) -> None:
        if name == "topk:2":
            raise KeyboardInterrupt
        answer(self, turn, name)

    monkeypatch.setattr(SideBySide, "_answer", interrupted)
    code, out, err = run_demo()
    assert code == 130
    assert "exact" in out
    assert "interrupted" in err
    assert "exact" in (tmp_path / "demo.html").read_text()
    code, out, _ = run_demo("--json")
    assert code == 130
    assert [row["rule"] for row in json.loads(out)["rows"]] == ["plain", "exact"]


def test_a_failure_prints_no_half_result(run_demo: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answer = SideBySide._answer

    def failing(self: SideBySide, turn: int, name: str) -> None:
        if name == "topk:2":
            raise SelfJudgeError("the disk is full")
        answer(self, turn, name)

    monkeypatch.setattr(SideBySide, "_answer", failing)
    code, out, err = run_demo("--json")
    assert (code, out) == (2, "")
    assert err.endswith("selfjudge: the disk is full\n")
    assert not (tmp_path / "demo.html").exists()


@pytest.fixture
def with_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The question on the large pair, for which the tiny one stands; short, and relaxed without a judge."""
    monkeypatch.delenv("SELFJUDGE_PAIR")
    relaxed = {"plain": ("exact", 0), "exact": ("exact", "auto"), "topk:20": ("topk:20,strict_start=0", 3)}
    monkeypatch.setattr(demo, "RULES", relaxed)
    monkeypatch.setattr(demo, "MOST_TOKENS", 12)


def test_the_gain_comes_first_and_the_last_lines_say_it(run_demo: Run, with_gain: None, tmp_path: Path) -> None:
    code, out, _ = run_demo("--turns", "2")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("the demo takes qwen2.5-coder-1.5b (1.1 GB, ")
    assert "busy ones may take twice" in lines[0]
    assert "--quick" in lines[1]
    assert "--small" in lines[1]
    assert out.index("little to gain") < out.index("Rules side by side")
    assert out.index("turn 1: plain ") < out.index("turn 2: plain ") < out.index("Rules side by side")
    assert re.search(r"^exact .* 100\.0\s% *$", out, re.M)
    assert [line.partition(":")[0] for line in lines[-3:]] == ["Gained", "Cost", "Next"]
    assert re.search(r"exact wrote the same 12 tokens in \d+ passes of the large model instead of 12", lines[-3])
    assert "|" in out.split("[accepted|what the target wanted]")[1]  # a substitution, marked
    page = (tmp_path / "demo.html").read_text()
    assert page.index("What speculation gains") < page.index("Rules side by side")
    assert "tokens per pass (m)" in page


def test_substitutions_are_marked_on_their_line() -> None:
    tokens = [["He", "target", None], [" has", "judge", " had"], [".\n\n", "judge", "."], ["So", "draft", None]]
    tokens = [dict(zip(("text", "origin", "choice"), token, strict=True)) for token in tokens]
    assert mark_substitutions(tokens) == "He[ has| had][.↵↵|.]\n\nSo"


def test_the_gain_as_json(run_demo: Run, with_gain: None) -> None:
    code, out, _ = run_demo("--turns", "2", "--json")
    assert code == 0
    found = json.loads(out)["gain"]
    plain, exact, relaxed = found["rows"]
    assert [len(row["seconds"]) for row in found["rows"]] == [2, 2, 2]
    assert (plain["passes"], plain["mean_accepted_length"], plain["speed_over_plain"]) == (12, 1, 1)
    assert exact["same_answer_as_plain"] == exact["same_start_as_plain"] == 1
    assert exact["example"] == plain["example"]
    assert relaxed["judged"] == sum(token["origin"] == "judge" for token in relaxed["tokens"]) > 0
    assert all(t["choice"] and 0 < t["p_choice"] <= 1 for t in relaxed["tokens"] if t["origin"] == "judge")


def test_a_relaxed_rule_drafts_as_much_as_exact_and_every_token_counts(
    tiny_pair: Pair, with_gain: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        demo, "RULES", {"plain": ("exact", 0), "exact": ("exact", 3), "topk:20": ("topk:20,strict_start=0", None)}
    )
    monkeypatch.setattr(LoadWatch, "describe", lambda *_: "")  # it would be said with every turn
    said: list[tuple[str, float]] = []
    run = answer_question(tiny_pair, DemoConfig(turns=1), lambda stage, share: said.append((stage, share)))
    assert [(turn, name) for turn, name, _ in run.measure()] == [(1, "plain"), (1, "exact"), (1, "topk:20")]
    assert [row["gamma_mean"] for row in run.result["rows"]][1:] == [3, 3]
    assert "topk:20 drafts as much per step as exact did" in gain_table(run.result).note
    plain = [(stage, share) for stage, share in said if stage.startswith("turn 1 of 1: plain")]
    assert plain[0] == ("turn 1 of 1: plain", 0)
    assert plain[-1] == ("turn 1 of 1: plain, 12 of at most 12 tokens", pytest.approx(1 / 3))
    assert [stage for stage, _ in said][-1].endswith(f"{len(run.answers['topk:20'][0].tokens)} of 12 tokens")
    shares = [share for stage, share in said if stage.startswith("turn")]
    assert shares == sorted(shares)
    run.answers["exact"] = [replace(run.answers["exact"][0], drafted=0)]
    assert run._like_exact() == 1  # plain decoding was the cheapest: one draft is the least


def test_a_slow_machine_is_told_of_a_shorter_way(
    run_demo: Run, with_gain: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "this is slow here" not in run_demo("--turns", "2")[1]
    monkeypatch.setattr("selfjudge.cli.bench.SLOW", 0)
    slow = r"^turn 1: plain .*\nthis is slow here: up to 0 min more for this question\. Ctrl-C keeps what is done"
    assert re.search(slow + ", and --quick takes less than half as long$", run_demo("--turns", "2")[1], re.M)
    assert re.search(slow + "$", run_demo("--quick")[1], re.M)


def test_the_small_demo_leaves_the_large_model_out(run_demo: Run, with_gain: None) -> None:
    code, out, _ = run_demo("--small")
    assert code == 0
    assert "gain" not in json.loads(run_demo("--small", "--json")[1])
    assert "1.1 GB" not in out
    assert out.splitlines()[-1].startswith('Next: selfjudge generate "your question" --pair ')


@pytest.mark.parametrize("answers", [2, 4], ids=["two answers", "half of the second turn"])
def test_an_interrupt_during_the_gain_keeps_its_answers(
    answers: int, run_demo: Run, with_gain: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measure = SideBySide.measure

    def interrupted(self: SideBySide) -> Iterator[tuple[int, str, float]]:
        yield from islice(measure(self), answers)
        raise KeyboardInterrupt

    monkeypatch.setattr(SideBySide, "measure", interrupted)
    code, out, err = run_demo()
    assert code == 130
    assert "interrupted" in err
    assert re.search(r"^turn 1: exact .* × as fast as plain$", out, re.M)
    assert "Gained: exact wrote" in out
    assert "What speculation gains" in (tmp_path / "demo.html").read_text()


def test_speeds_of_a_busy_machine_are_said_to_be_so(
    run_demo: Run, with_gain: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither a factor nor a ranking, but what does not depend on the clock."""
    busy = "this machine is busy: speeds are not reliable (other programs took 1.5 of 2 cores)"
    monkeypatch.setattr(LoadWatch, "describe", lambda self, turns=(): busy)
    code, out, _ = run_demo("--turns", "1")
    assert code == 0
    assert out.count(busy) == 3  # below either table, and in what was gained
    assert re.search(r"^exact +[\d.]+ .* busy +busy ", out, re.M)
    assert re.search(r"^exact +[\d.]+ +[\d.]+ .* busy +busy +100", out, re.M)
    gained, cost = out.splitlines()[-3:-1]
    assert busy in gained
    assert "×" not in gained + cost
    assert "passes" in gained
    page = (tmp_path / "demo.html").read_text()
    assert page.count(busy) == 1
    assert page.count('<td class="number">busy') == 12  # both speeds of three rules in either table


def gain_of(seconds: dict[str, list[float]], busy: str) -> dict[str, Any]:
    """What the question gave, with these seconds of the turns; every answer has ten tokens."""
    known = {"passes": 5, "judged": 0, "same_answer_as_plain": 1.0, "tokens": 10 * [{"text": "a", "origin": "draft"}]}
    speeds = {"tokens_per_second": 10.0, "speed_over_plain": 2.0, "mean_accepted_length": 2.0, "gamma_mean": 3.0}
    known |= {"busy": busy, "judged_share": 0.0, "same_start_as_plain": 1.0}
    rows = [{"rule": name, "seconds": each, **known, **speeds} for name, each in seconds.items()]
    return {"pair": "tiny", "prompt": "?", "dtype": "q4", "draft_dtype": "q4", "busy": busy, "rows": rows}


def test_turns_of_a_busy_machine_show_no_speed() -> None:
    turns = {"plain": [48.0, 40.0, 40.0], "exact": [24.0, 25.0, 16.0], "judged:q0.95": [32.0, 27.0, 36.0]}
    found = gain_of(turns, "this machine is busy: speeds are not reliable")
    table = gain_table(found)
    (ratio,) = [column for column in table.columns if column.head == "× plain"]
    assert [ratio.show(row) for row in table.rows] == ["busy"] * 3
    gained, cost = describe_gain({"gain": found, "rows": []})
    assert gained.endswith("; this machine is busy: speeds are not reliable.")
    assert "×" not in gained + cost
    page = demo_page({"gain": found, "rows": []})
    assert page.count("this machine is busy") == 1
    found = gain_of(turns, "")
    assert [ratio.show(row) for row in gain_table(found).rows] == ["2.00"] * 3
