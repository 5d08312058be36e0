"""Whole evaluations of tiny models: rows and figures by hand, comparison with exact, going on, refusals."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fake_gguf import write_model
from fake_judge import constant_judge
from runs import random_judges
from selfjudge.cli.main import app
from selfjudge.decoding.rules import Judged, TopK
from selfjudge.decoding.text import generate
from selfjudge.errors import SelfJudgeError
from selfjudge.evaluate import EvalConfig, evaluate_rules, execute
from selfjudge.evaluate.execute import TorchAnswerer
from selfjudge.judge.model import Judge
from selfjudge.models.gguf import open_model
from selfjudge.models.load import Target
from selfjudge.models.pair import Pair
from selfjudge.store import read_rows, write_rows
from selfjudge.store.run_folder import LoadWatch
from selfjudge.tasks import Task

TIMED = ("seconds", "tokens_per_second", "busy", "machine", "versions", "date")


@pytest.fixture
def asked(tmp_path: Path) -> str:
    rng = np.random.default_rng(0)
    rows = [
        {"prompt": " ".join(f"w{i}" for i in rng.integers(5, 50, rng.integers(2, 9))), "answer": "w7"} for _ in range(8)
    ]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return f"file:{tmp_path / 'mine.jsonl'}"


@pytest.fixture
def judges(tiny_pair: Pair) -> dict[str, Judge]:
    return random_judges(tiny_pair.hidden_size)


def evaluated(
    pair: Pair, out: Path, task: str, rules: list[Any], gammas: tuple[int, ...] = (3,), judges: Any = None, *,
    warn: Any = lambda text: None, **options: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    options = {"max_new_tokens": 14, "batch": 3, **options}
    config = EvalConfig(tasks=(task,), rules=tuple(rules), gammas=gammas, **options)
    return evaluate_rules(pair, out, config, judges=judges or {}, warn=warn)


def samples(folder: Path) -> list[dict[str, Any]]:
    return list(read_rows(folder / "samples.jsonl.gz"))


def lasting(summary: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in summary.items() if key not in TIMED}


def test_figures_are_those_of_the_answers(tiny_pair: Pair, asked: str, judges: Any, tmp_path: Path) -> None:
    exact, judged = evaluated(tiny_pair, tmp_path / "eval", asked, ["judged:0.4", "exact"], (3,), judges)
    assert (exact["rule"], judged["rule"]) == ("exact", "judged:0.4@mine")
    prompts = [json.loads(line)["prompt"] for line in Path(asked.removeprefix("file:")).read_text().splitlines()]
    rules = {"exact": None, "judged": Judged(judges["mine"], 0.4, special=tiny_pair.special_ids)}
    for summary, (name, rule) in zip((exact, judged), rules.items(), strict=True):
        answers = generate(tiny_pair, prompts, rule, gamma=3, max_new_tokens=14, batch=1)  # batch 1: the same tokens
        rows = samples(tmp_path / "eval" / "file:mine" / f"{summary['rule']}-g3")
        assert [row["text"] for row in rows] == [a.text for a in answers]
        assert [row["tokens"] for row in rows] == [len(a.tokens) for a in answers]
        cycles = sum(a.cycles for a in answers)
        assert summary["mean_accepted_length"] == pytest.approx(
            sum(len(a.tokens) - 1 for a in answers if a.cycles) / cycles
        )
        taken = sum(o == "judge" for a in answers for o in a.origins)
        assert summary["judged_share"] == pytest.approx(taken / sum(len(a.tokens) for a in answers))
        assert (taken > 0) == (name == "judged")
        assert summary["n"] == 8
        assert summary["measure"] == "accuracy"
        assert summary["extraction_failures"] == np.mean([row["answer"] is None for row in rows])
    assert exact["delta_m"] is exact["delta_score"] is exact["agreement"] is None
    assert judged["delta_m"] == pytest.approx(judged["mean_accepted_length"] - exact["mean_accepted_length"])
    assert judged["m_ratio"] == pytest.approx(judged["mean_accepted_length"] / exact["mean_accepted_length"])
    assert judged["delta_score"] == pytest.approx(judged["score"] - exact["score"])
    assert judged["judge"] == "mine"
    assert judged["threshold"] == 0.4
    assert sum(n for _, _, n in judged["substitutions"]) > 0
    assert not list((tmp_path / "eval").rglob("work"))


def test_lost_and_gained_are_counted_example_by_example(
    tiny_pair: Pair, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer is right if its text has an even length: rules then win some examples and lose others."""
    monkeypatch.setattr(
        "selfjudge.tasks.benchmarks.File.extract", lambda self, row, text: "w7" if len(text) % 2 == 0 else "no"
    )
    exact, null, other = evaluated(tiny_pair, tmp_path / "eval", asked, ["exact", "null", "topk:9"])
    place = tmp_path / "eval" / "file:mine"
    rows = {name: samples(place / f"{name}-g3") for name in ("exact", "null", "topk:9")}
    pairs = [(b["score"], a["score"]) for a, b in zip(rows["topk:9"], rows["exact"], strict=True)]
    lost, gained = sum(b > a for b, a in pairs), sum(b < a for b, a in pairs)
    assert (other["lost"], other["gained"]) == (lost, gained)
    assert lost + gained > 0
    assert other["delta_score"] == pytest.approx((gained - lost) / 8)
    for key, value in (("lost", lost / 8), ("gained", gained / 8), ("agreement", other["agreement"])):
        low, high = other[f"{key}_ci"]
        assert 0 <= low <= value <= high <= 1
    assert rows["null"] == [row | {"agrees": 1.0} for row in rows["exact"]]  # float32: no rounding tells batches apart
    assert (null["lost"], null["gained"], null["agreement"], null["batch"]) == (0, 0, 1.0, 1)
    assert exact["lost"] is None


def test_exact_gives_the_answers_of_plain_greedy_decoding(tiny_pair: Pair, asked: str, tmp_path: Path) -> None:
    evaluated(tiny_pair, tmp_path / "eval", asked, ["exact"], (4,))
    prompts = [json.loads(line)["prompt"] for line in Path(asked.removeprefix("file:")).read_text().splitlines()]
    plain = generate(tiny_pair, prompts, gamma=0, max_new_tokens=14)
    assert [row["text"] for row in samples(tmp_path / "eval" / "file:mine" / "exact-g4")] == [a.text for a in plain]


def test_examples_show_each_token_as_target_and_judge_see_it(
    tiny_pair: Pair, asked: str, judges: Any, tmp_path: Path
) -> None:
    evaluated(tiny_pair, tmp_path / "eval", asked, ["judged:0.4"], (3,), judges, examples=2, times=False)
    shown = list(read_rows(tmp_path / "eval" / "file:mine" / "judged:0.4@mine-g3" / "examples.jsonl"))
    assert len(shown) == 2
    for example in shown:
        tokens = example["tokens"]
        assert any(token["origin"] == "judge" for token in tokens)  # those come first
        assert tokens[0]["cycle"] == 0
        assert all(b["cycle"] - a["cycle"] == (a["origin"] == "target") for a, b in itertools.pairwise(tokens))
        for token in tokens:
            if token["origin"] == "judge":
                assert 0 < token["p"] <= token["p_choice"] + 1e-4
                assert token["judge"] > 0.4
                assert token["choice"] != token["text"]
            else:
                assert token.keys() == {"text", "origin", "cycle"}


def test_what_was_interrupted_goes_on_to_the_same_summary(
    tiny_pair: Pair, asked: str, judges: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = ["exact", "judged:0.4"]
    whole = evaluated(tiny_pair, tmp_path / "whole", asked, rules, (3,), judges)
    calls = 0

    def dies(*given: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:  # the third part of the first rule
            raise KeyboardInterrupt
        return generate(*given, **options)

    monkeypatch.setattr(execute, "generate", dies)
    with pytest.raises(KeyboardInterrupt):
        evaluated(tiny_pair, tmp_path / "torn", asked, rules, (3,), judges)
    assert not (tmp_path / "torn" / "file:mine" / "judged:0.4@mine-g3" / "summary.json").exists()
    again = evaluated(tiny_pair, tmp_path / "torn", asked, rules, (3,), judges)
    assert calls == 5 + 2 + 1  # only what was missing, and judged answers once more to be traced
    assert [lasting(s) for s in again] == [lasting(s) for s in whole]
    for run in ("exact-g3", "judged:0.4@mine-g3"):
        one, other = (tmp_path / name / "file:mine" / run for name in ("whole", "torn"))
        assert samples(one) == samples(other)
        assert (one / "samples.jsonl.gz").read_bytes() == (other / "samples.jsonl.gz").read_bytes()


def test_rules_may_be_added_and_other_settings_are_refused(
    tiny_pair: Pair, asked: str, judges: Any, tmp_path: Path
) -> None:
    out = tmp_path / "eval"
    file = Path(asked.removeprefix("file:"))
    file.write_text(file.read_text().replace(', "answer": "w7"', ""))  # open prompts: agreement is that of the words
    evaluated(tiny_pair, out, asked, ["exact"])
    added = evaluated(tiny_pair, out, asked, ["topk:9"])
    own = {row["id"]: row["text"] for row in samples(out / "file:mine" / "exact-g3")}
    agrees = [row["agrees"] for row in samples(out / "file:mine" / "topk:9-g3")]
    assert added[0]["agreement"] == pytest.approx(np.mean(agrees))
    assert 0 < added[0]["agreement"] < 1
    assert len(own) == 8
    assert added[0]["measure"] is added[0]["score"] is added[0]["delta_score"] is None
    with pytest.raises(SelfJudgeError, match="was begun with another max_new_tokens"):
        evaluated(tiny_pair, out, asked, ["exact"], max_new_tokens=9)
    evaluated(tiny_pair, out, asked, ["judged:0.4"], (3,), judges)
    other = {"mine": constant_judge(0.9, tiny_pair.hidden_size)}
    with pytest.raises(SelfJudgeError, match="another judge or threshold"):
        evaluated(tiny_pair, out, asked, ["judged:0.4"], (3,), other)


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", ["judged:0.4", *(pytest.param(rule, marks=pytest.mark.slow) for rule in ("exact", "sampling"))]
)
def test_a_batch_of_64_gives_what_single_prompts_give(tiny_pair: Pair, judges: Any, tmp_path: Path, spec: str) -> None:
    rng = np.random.default_rng(1)
    prompts = [" ".join(f"w{i}" for i in rng.integers(5, 50, rng.integers(2, 30))) for _ in range(64)]
    file = tmp_path / "many.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": prompt, "answer": "w7"}) for prompt in prompts))
    made = {}
    for batch in (64, 1):
        out = tmp_path / f"batch-{batch}"
        (found,) = evaluated(tiny_pair, out, f"file:{file}", [spec], (3,), judges, max_new_tokens=8, batch=batch)
        rows = samples(out / "file:many" / f"{found['rule']}-g3")
        made[batch] = (found["mean_accepted_length"], found["judged_share"], rows)
    assert made[64] == made[1]
    assert len({row["tokens"] for row in made[1][2]} | {row["cycles"] for row in made[1][2]}) > 3  # a ragged batch
    assert (made[1][1] > 0) == spec.startswith("judged")


def test_other_measures_are_compared_as_well(
    tiny_pair: Pair, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rate, rng = Task.rate, np.random.default_rng(0)
    monkeypatch.setattr(Task, "rate", lambda *given: {**rate(*given), "chance": rng.random()})
    out = tmp_path / "eval"
    exact, other = evaluated(tiny_pair, out, asked, ["exact", "topk:9"])
    assert (exact["delta_scores"], exact["delta_scores_ci"]) == ({}, {})
    assert set(other["delta_scores"]) == set(other["delta_scores_ci"]) == {"chance"}
    moved = other["scores"]["chance"] - exact["scores"]["chance"]
    assert other["delta_scores"]["chance"] == pytest.approx(moved)
    low, high = other["delta_scores_ci"]["chance"]
    assert moved != 0
    assert low < moved < high


def test_a_folder_says_all_that_was_asked_of_it(tiny_pair: Pair, asked: str, judges: Any, tmp_path: Path) -> None:
    out = tmp_path / "eval"
    for rules in (["exact"], ["exact", "topk:9"], ["exact", "judged:0.4"]):
        evaluated(tiny_pair, out, asked, rules, (3,), judges)
    told = json.loads((out / "run.json").read_text())
    assert told["runs"] == ["exact-g3", "judged:0.4@mine-g3"]
    assert [before["runs"] for before in told["earlier"]] == [["exact-g3"], ["exact-g3", "topk:9-g3"]]


def test_results_that_were_thinned_out_can_be_gone_on_with(
    tiny_pair: Pair, asked: str, judges: Any, tmp_path: Path
) -> None:
    """Rows of `exact` without texts are still that run; a comparison stays if the run's rows are gone."""
    out = tmp_path / "eval"
    first = evaluated(tiny_pair, out, asked, ["exact", "topk:9"], (3, 2), judges)
    place = out / "file:mine"
    for file in place.rglob("samples.jsonl.gz"):
        rows = samples(file.parent)
        write_rows(file, ({key: value for key, value in row.items() if key != "text"} for row in rows))
    rows = (place / "topk:9-g3" / "samples.jsonl.gz").read_bytes()
    again = evaluated(tiny_pair, out, asked, ["exact", "topk:9"], (3, 2), judges)
    first = json.loads(json.dumps(first))
    assert again == first
    assert (place / "topk:9-g3" / "samples.jsonl.gz").read_bytes() == rows
    for gone in ("topk:9-g3", "topk:9-g2", "exact-g2"):
        (place / gone / "samples.jsonl.gz").unlink()
        (place / gone / "examples.jsonl").unlink()
    more = evaluated(tiny_pair, out, asked, ["exact", "topk:9", "judged:0.4"], (3, 2), judges)
    assert [s for s in more if s["rule"] != "judged:0.4@mine"] == first
    late = {s["gamma"]: s for s in more if s["rule"] == "judged:0.4@mine"}
    assert late[3]["delta_m"] is not None
    assert late[2]["delta_m"] is None  # the rows at that γ are gone: compared with those of the other
    assert late[2]["delta_score"] is not None
    (place / "exact-g3" / "samples.jsonl.gz").unlink()
    said: list[str] = []
    (alone,) = evaluated(tiny_pair, out, asked, ["topk:8"], warn=said.append)
    assert alone["delta_score"] is None
    assert said == ["file:mine: no run of exact to compare topk:8 with; add it to `rules`"]


def test_exact_may_come_later_and_other_examples_are_refused(tiny_pair: Pair, asked: str, tmp_path: Path) -> None:
    out = tmp_path / "eval"
    file = Path(asked.removeprefix("file:"))
    evaluated(tiny_pair, out, asked, ["topk:9"])
    evaluated(tiny_pair, out, asked, ["exact"], (2,))
    (other,) = evaluated(tiny_pair, out, asked, ["topk:9"])
    assert other["delta_score"] is not None
    assert other["delta_m"] is None  # another γ
    both = evaluated(tiny_pair, out, asked, ["exact", "topk:9"])
    assert both[1]["delta_m"] == pytest.approx(both[1]["mean_accepted_length"] - both[0]["mean_accepted_length"])
    whole = evaluated(tiny_pair, tmp_path / "new", asked, ["exact", "topk:9"])
    assert [lasting(s) for s in both] == [lasting(s) for s in whole]
    file.write_text(file.read_text().replace("w5", "w6", 1))
    with pytest.raises(SelfJudgeError, match="begun with another rows_sha256"):
        evaluated(tiny_pair, out, asked, ["exact"])
    file.write_text('{"prompt": "w5", "id": "a"}\n{"prompt": "w6", "id": "a"}\n')
    with pytest.raises(SelfJudgeError, match="two examples with the same id"):
        evaluated(tiny_pair, tmp_path / "twins", asked, ["exact"])
    with pytest.raises(SelfJudgeError, match="two of the tasks have the same name"):
        evaluate_rules(tiny_pair, tmp_path / "twice", EvalConfig(tasks=(asked, asked)))


def test_without_exact_nothing_is_compared_and_that_is_said(tiny_pair: Pair, asked: str, tmp_path: Path) -> None:
    said: list[str] = []
    found = evaluated(tiny_pair, tmp_path / "eval", asked, ["topk:2"], warn=said.append)
    assert found[0]["delta_score"] is found[0]["agreement"] is None
    assert "no run of exact" in said[0]


def test_delta_m_has_an_interval_that_is_paired_by_prompt(tiny_pair: Pair, asked: str, tmp_path: Path) -> None:
    exact, other = evaluated(tiny_pair, tmp_path, asked, ["exact", "topk:9"])
    assert exact["delta_m_ci"] is exact["m_ratio_ci"] is None
    low, high = other["delta_m_ci"]
    assert low < other["delta_m"] < high
    low, high = other["m_ratio_ci"]
    assert low < other["m_ratio"] < high


def test_rows_without_an_answer_are_decoded_and_not_scored(tiny_pair: Pair, asked: str, tmp_path: Path) -> None:
    whole, _ = evaluated(tiny_pair, tmp_path / "whole", asked, ["exact", "topk:9"])
    assert (whole["n"], whole["n_scored"]) == (8, 8)
    file = Path(asked.removeprefix("file:"))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows[:3]:
        del row["answer"]
    file.write_text("\n".join(map(json.dumps, rows)))
    said: list[str] = []
    exact, other = evaluated(tiny_pair, tmp_path / "part", asked, ["exact", "topk:9"], warn=said.append)
    assert said == ["file:mine: 5 of 8 rows have an answer; the score is of those"]
    made = samples(tmp_path / "part" / "file:mine" / "topk:9-g3")
    assert [row["score"] for row in made[:3]] == [None] * 3
    assert (other["n"], other["n_scored"], other["measure"]) == (8, 5, "accuracy")
    assert other["score"] == np.mean([row["score"] for row in made[3:]])
    assert other["extraction_failures"] == np.mean([row["answer"] is None for row in made[3:]])
    assert other["delta_score"] == pytest.approx(other["score"] - exact["score"])
    assert all("agrees" not in row for row in made[:3])
    assert [row["text"] for row in samples(tmp_path / "part" / "file:mine" / "exact-g3")] == [
        row["text"] for row in samples(tmp_path / "whole" / "file:mine" / "exact-g3")
    ]


def test_a_measure_is_named_and_versions_of_scorers_are_recorded(
    tiny_pair: Pair, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("selfjudge.tasks.benchmarks.File.requires", ("math-verify",))
    (answers,) = evaluated(tiny_pair, tmp_path / "answers", asked, ["exact"])
    assert answers["agreement_measure"] == "same_answer"
    assert answers["versions"]["math-verify"] == version("math-verify")
    file = Path(asked.removeprefix("file:"))
    file.write_text(file.read_text().replace(', "answer": "w7"', ""))
    (words,) = evaluated(tiny_pair, tmp_path / "words", asked, ["exact"])
    assert (words["agreement_measure"], words["measure"], words["n_scored"]) == ("word_overlap", None, 0)


def test_rules_may_be_objects(tiny_pair: Pair, asked: str, judges: Any, tmp_path: Path) -> None:
    judged = Judged(judges["mine"], 0.4, special=tiny_pair.special_ids)
    by_text = evaluated(tiny_pair, tmp_path / "text", asked, ["exact", "topk:9", "judged:0.4"], (3,), judges)
    by_object = evaluated(tiny_pair, tmp_path / "object", asked, [TopK(9), judged, "exact"])
    assert [s["rule"].partition(":")[0] for s in by_object] == ["exact", "topk", "judged"]
    for one, other in zip(by_text, by_object, strict=True):
        assert one["mean_accepted_length"] == other["mean_accepted_length"]
        assert one["delta_score"] == other["delta_score"]


def test_gamma_and_batch_have_the_defaults_of_the_device(tiny_pair: Pair, asked: str, tmp_path: Path) -> None:
    config = EvalConfig(tasks=(asked,), limit=2, max_new_tokens=3)
    (found,) = evaluate_rules(tiny_pair, tmp_path, config)
    assert (found["gamma"], found["batch"]) == (3, 8)


def test_without_rules_exact_runs_and_judged_where_there_is_a_judge(
    tiny_pair: Pair, asked: str, tmp_path: Path
) -> None:
    config = EvalConfig(tasks=(asked,), limit=2, max_new_tokens=3)
    summaries = evaluate_rules(tiny_pair, tmp_path / "without", config)
    assert [s["rule"] for s in summaries] == ["exact"]
    judges = {"mine": constant_judge(0.5, tiny_pair.hidden_size)}
    summaries = evaluate_rules(tiny_pair, tmp_path / "with", config, judges=judges)
    assert [s["rule"] for s in summaries] == ["exact", "judged@mine"]


def test_times_can_be_left_out(tiny_pair: Pair, asked: str, tmp_path: Path) -> None:
    (found,) = evaluated(tiny_pair, tmp_path, asked, ["exact"], times=False)
    assert (found["tokens_per_second"], found["busy"], found["seconds"]) == (None, "", {})
    assert found["mean_accepted_length"] > 1


def test_rules_take_turns_and_a_busy_machine_is_said(
    tiny_pair: Pair, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rule answers a part before any answers the next; `null` has smaller parts."""
    turns: list[tuple[str, int]] = []

    def noted(pair: Pair, prompts: Any, rule: Any, **options: Any) -> Any:
        turns.append((rule.name, options["gamma"]))
        return generate(pair, prompts, rule, **options)

    monkeypatch.setattr(execute, "generate", noted)
    quiet, busy = (9.0, 9.0, 9.0), (9.0, 1e4, 9.0)  # seconds of the clock, of all programs, of this one
    monkeypatch.setattr(LoadWatch, "usage", property(lambda self: busy if turns[-1][0] == "topk" else quiet))
    exact, topk, null = evaluated(tiny_pair, tmp_path / "runs", asked, ["exact", "topk:3", "null"], (3,))
    assert turns[:8] == ([("exact", 3), ("topk", 3), ("exact", 3)] * 3)[:8]
    assert turns[8:] == [("topk", 3), *[("exact", 3)] * 6]  # once more, untimed, to be traced
    assert exact["busy"] == null["busy"] == ""
    assert topk["busy"].startswith("this machine is busy: speeds are not reliable (other programs took")
    shown = CliRunner().invoke(app, ["report", str(tmp_path / "runs"), "--out", str(tmp_path / "report.html")])
    assert shown.exit_code == 0, shown.output
    page = (tmp_path / "report.html").read_text()
    assert page.count(topk["busy"]) == 1
    assert page.count(">busy<") == 1


def test_what_another_start_of_the_engine_takes_comes_later(tiny_pair: Pair, asked: str, tmp_path: Path) -> None:
    turns: list[tuple[str, int]] = []

    class OneGamma(TorchAnswerer):
        one_gamma = True

        def answer(self, prompts: Any, run: Any, *more: Any, **how: Any) -> Any:
            turns.append((run.rule.name, run.gamma))
            return super().answer(prompts, run, *more, **how)

    config = EvalConfig(tasks=(asked,), rules=("exact", "topk:3"), gammas=(2, 3), max_new_tokens=6, batch=4)
    evaluate_rules(tiny_pair, tmp_path / "runs", config, judges={}, answerer=OneGamma(tiny_pair))
    assert turns == [(rule, gamma) for gamma in (2, 3) for _ in range(2) for rule in ("exact", "topk")]


def test_weights_that_stay_in_a_file_show_what_floats_show(
    tiny_pair: Pair, asked: str, judges: Any, tmp_path: Path
) -> None:
    write_model(tiny_pair.target, tmp_path / "m.gguf", {})
    blocks = replace(tiny_pair, target_model=Target(open_model(tmp_path / "m.gguf")))
    said: list[str] = []
    rules = ["exact", "judged:0.4"]
    found = evaluated(blocks, tmp_path / "blocks", asked, rules, (3,), judges, warn=said.append)
    whole = evaluated(tiny_pair, tmp_path / "whole", asked, rules, (3,), judges)
    assert said == []
    for one, other in zip(found, whole, strict=True):
        assert (one["dtype"], one["draft_dtype"]) == ("q4", "float32")
        assert one["substitutions"] == other["substitutions"]
        assert one["mean_accepted_length"] == other["mean_accepted_length"]  # its floats are those of the model
        assert one["judged_share"] == other["judged_share"]
    assert found[1]["substitutions"]
    rows, others = (
        {row["id"]: row["tokens"] for row in read_rows(next((tmp_path / out).glob("*/judged*")) / "examples.jsonl")}
        for out in ("blocks", "whole")
    )
    traced = 0
    for name in rows:
        for token, other in zip(rows[name], others[name], strict=True):
            assert token.keys() == other.keys()
            assert (token["origin"], token.get("choice")) == (other["origin"], other.get("choice"))
            if "choice" in token:
                traced += 1
                for key in ("p", "p_choice", "judge"):
                    assert token[key] == pytest.approx(other[key], abs=2e-3)
    assert traced
