"""Evaluation: rows and figures by hand, comparison with exact, resuming, refusals, factual consistency."""

from __future__ import annotations

import gzip
import itertools
import json
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from selfjudge.decoding import text as shells
from selfjudge.decoding.rules import Exact, Judged, TopK
from selfjudge.decoding.text import generate
from selfjudge.errors import SelfJudgeError
from selfjudge.evaluate import EvalConfig, evaluate_rules, execute
from selfjudge.evaluate.compare import delta_m, interval, word_overlap
from selfjudge.evaluate.config import task_label
from selfjudge.evaluate.consistency import classifier, consistency, proxy, sentences
from selfjudge.evaluate.execute import Execution, TaskExamples
from selfjudge.evaluate.pipeline import _warn_learnt
from selfjudge.evaluate.runs import Run, plan_runs
from selfjudge.judge.config import JudgeConfig
from selfjudge.judge.model import Judge
from selfjudge.models.pair import Pair
from selfjudge.store import read_rows
from selfjudge.tasks.base import Task, task
from selfjudge.tasks.livecodebench import fold, learnt_folds

TIMED = ("seconds", "tokens_per_second", "machine", "versions", "date")


@pytest.fixture
def asked(tmp_path: Path) -> str:
    rng = np.random.default_rng(0)
    rows = [
        {"prompt": " ".join(f"w{i}" for i in rng.integers(5, 50, rng.integers(2, 9))), "answer": "w7"} for _ in range(8)
    ]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return f"file:{tmp_path / 'mine.jsonl'}"


@pytest.fixture
def judges(tiny_pair: Pair) -> dict[str, list[Judge]]:
    torch.manual_seed(0)
    config = Judge.constant(0.5, tiny_pair.hidden_size).config
    return {"mine": [Judge(config, weight=torch.randn(tiny_pair.hidden_size))]}


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
    rules = {"exact": None, "judged": Judged(judges["mine"][0], 0.4, special=tiny_pair.special_ids)}
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


def test_exact_gives_the_answers_of_plain_greedy_decoding(tiny_pair: Pair, asked: str, tmp_path: Path) -> None:
    evaluated(tiny_pair, tmp_path / "eval", asked, ["exact"], (4,))
    prompts = [json.loads(line)["prompt"] for line in Path(asked.removeprefix("file:")).read_text().splitlines()]
    plain = generate(tiny_pair, prompts, gamma=0, max_new_tokens=14)
    assert [row["text"] for row in samples(tmp_path / "eval" / "file:mine" / "exact-g4")] == [a.text for a in plain]


def test_examples_show_each_token_as_target_and_judge_see_it(
    tiny_pair: Pair, asked: str, judges: Any, tmp_path: Path
) -> None:
    evaluated(tiny_pair, tmp_path / "eval", asked, ["judged:0.4"], (3,), judges, examples=2)
    shown = list(read_rows(tmp_path / "eval" / "file:mine" / "judged:0.4@mine-g3" / "examples.jsonl"))
    assert len(shown) == 2
    for example in shown:
        tokens = example["tokens"]
        assert any(token["origin"] == "judge" for token in tokens)  # those come first
        assert tokens[0]["cycle"] == 0
        assert all(b["cycle"] - a["cycle"] == (a["origin"] == "target") for a, b in itertools.pairwise(tokens))
        assert tokens[-1]["judge"] is None
        for token in tokens[:-1]:
            assert token["p"] <= token["p_choice"] + 1e-4
            if token["origin"] == "judge":
                assert token["judge"] > 0.4
                assert token["choice"] != token["text"]
            elif token["origin"] == "draft":
                assert token["choice"] == token["text"]


def test_what_was_interrupted_goes_on_to_the_same_summary(
    tiny_pair: Pair, asked: str, judges: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = ["exact", "judged:0.4"]
    whole = evaluated(tiny_pair, tmp_path / "whole", asked, rules, (3,), judges)
    calls = 0

    def dies(*given: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:  # the second part of the second rule
            raise KeyboardInterrupt
        return generate(*given, **options)

    monkeypatch.setattr(execute, "generate", dies)
    with pytest.raises(KeyboardInterrupt):
        evaluated(tiny_pair, tmp_path / "torn", asked, rules, (3,), judges)
    assert not (tmp_path / "torn" / "file:mine" / "judged:0.4@mine-g3" / "summary.json").exists()
    again = evaluated(tiny_pair, tmp_path / "torn", asked, rules, (3,), judges)
    assert calls == 5 + 2  # only what was missing
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
    added = evaluated(tiny_pair, out, asked, ["topk:9"], compact=True)
    own = {row["id"]: row["text"] for row in samples(out / "file:mine" / "exact-g3")}
    agrees = [row["agrees"] for row in samples(out / "file:mine" / "topk:9-g3")]
    assert added[0]["agreement"] == pytest.approx(np.mean(agrees))
    assert 0 < added[0]["agreement"] < 1
    assert len(own) == 8
    assert added[0]["measure"] is added[0]["score"] is added[0]["delta_score"] is None
    assert all("text" not in row for row in samples(out / "file:mine" / "topk:9-g3"))
    assert agrees == [round(value, 5) for value in agrees]
    with pytest.raises(SelfJudgeError, match="was begun with another max_new_tokens"):
        evaluated(tiny_pair, out, asked, ["exact"], max_new_tokens=9)
    evaluated(tiny_pair, out, asked, ["judged:0.4"], (3,), judges)
    other = {"mine": [Judge.constant(0.9, tiny_pair.hidden_size)]}
    with pytest.raises(SelfJudgeError, match="another judge or threshold"):
        evaluated(tiny_pair, out, asked, ["judged:0.4"], (3,), other)


def test_results_that_were_thinned_out_can_be_gone_on_with(
    tiny_pair: Pair, asked: str, judges: Any, tmp_path: Path
) -> None:
    """Kept results may lack examples, and rows of runs that need no more."""
    out = tmp_path / "eval"
    evaluated(tiny_pair, out, asked, ["exact", "judged:0.4", "topk:9"], (3,), judges)
    place = out / "file:mine"
    for run in place.glob("*-g3"):
        (run / "examples.jsonl").unlink()
    (place / "topk:9-g3" / "samples.jsonl.gz").unlink()
    rules = ["exact", "judged:0.4", "judged:theta=0.4", "topk:9"]
    found = evaluated(tiny_pair, out, asked, rules, (3,), judges, compact=True)
    assert [s["rule"] for s in found] == ["exact", "judged:0.4@mine", "judged:theta=0.4@mine", "topk:9"]
    assert found[1]["score"] == found[2]["score"]
    assert sorted(f.name for f in (place / "judged:theta=0.4@mine-g3").iterdir()) == [
        "samples.jsonl.gz",
        "summary.json",
    ]


@pytest.mark.parametrize("spec", ["exact", "judged:0.4", "sampling"])
def test_a_batch_of_64_gives_what_single_prompts_give(tiny_pair: Pair, judges: Any, tmp_path: Path, spec: str) -> None:
    rng = np.random.default_rng(1)
    prompts = [" ".join(f"w{i}" for i in rng.integers(5, 50, rng.integers(2, 30))) for _ in range(64)]
    file = tmp_path / "many.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": prompt, "answer": "w7"}) for prompt in prompts))
    made = {}
    for batch in (64, 1):
        out = tmp_path / f"batch-{batch}"
        (found,) = evaluated(tiny_pair, out, f"file:{file}", [spec], (3,), judges, max_new_tokens=12, batch=batch)
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


def test_compact_results_that_were_thinned_out_can_be_gone_on_with(
    tiny_pair: Pair, asked: str, judges: Any, tmp_path: Path
) -> None:
    """Compaction changes the rows of `exact`, not which run it is; comparisons stand where rows are gone."""
    out = tmp_path / "eval"
    first = evaluated(tiny_pair, out, asked, ["exact", "topk:9"], (3, 2), judges, compact=True)
    place = out / "file:mine"
    rows = (place / "topk:9-g3" / "samples.jsonl.gz").read_bytes()
    again = evaluated(tiny_pair, out, asked, ["exact", "topk:9"], (3, 2), judges, compact=True)
    first = json.loads(json.dumps(first))
    assert again == first
    assert (place / "topk:9-g3" / "samples.jsonl.gz").read_bytes() == rows
    for gone in ("topk:9-g3", "exact-g2"):  # rows of a rule, and of the `exact` that another was compared with
        (place / gone / "samples.jsonl.gz").unlink()
    more = evaluated(tiny_pair, out, asked, ["exact", "topk:9", "judged:0.4"], (3, 2), judges, compact=True)
    assert [s for s in more if s["rule"] != "judged:0.4@mine"] == first
    late = {s["gamma"]: s for s in more if s["rule"] == "judged:0.4@mine"}
    assert late[3]["delta_m"] is not None
    assert late[2]["delta_m"] is None  # the rows at that γ are gone: compared with those of the other
    assert late[2]["delta_score"] is not None
    (place / "exact-g3" / "samples.jsonl.gz").unlink()
    said: list[str] = []
    (alone,) = evaluated(tiny_pair, out, asked, ["topk:8"], warn=said.append)
    assert alone["delta_score"] is None
    assert said == ["file:mine: no run of exact has kept its rows: topk:8 is not compared anew"]


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


def test_rules_that_cannot_be_are_refused(judges: Any) -> None:
    for specs, known, message in (
        (["judged:F"], {}, "needs a judge"), (["judged:0.4@you"], judges, "names an unknown judge; judges are: mine"),
        (["topk:2@mine"], judges, "does not use a judge"), (["nothing"], {}, "unknown rule"), (["fly"], {}, "`gamma` > 6"),
        (["judged:F"], judges, "no threshold 'F'"),
    ):  # fmt: skip
        with pytest.raises(SelfJudgeError, match=message):
            plan_runs(specs, [4], known, ())
    twice = {"a": judges["mine"], "b": judges["mine"]}
    assert [run.name for run in plan_runs(["judged:0.3"], [4], twice, ())] == ["judged:0.3@a", "judged:0.3@b"]
    for wrong, message in (
        ({"limit": 0}, "`limit` must be at least 1, not 0"),
        ({"batch": 0}, "`batch` must be at least 1, not 0"),
        ({"max_new_tokens": 0}, "`max_new_tokens` must be at least 1, not 0"),
        ({"gammas": (3, 500)}, "`gammas` must be at most 20, not 500"),
        ({"tasks": ()}, "`tasks` names no task"),
        ({"rules": ()}, "`rules` names no rule"),
        ({"tasks": ("nothing",)}, "unknown task 'nothing'"),
    ):
        with pytest.raises(SelfJudgeError, match=message):
            EvalConfig(**{"tasks": ("arithmetic",), **wrong}).check()


def test_a_judge_for_each_fold_decides_the_problems_of_that_fold(tiny_pair: Pair, tmp_path: Path) -> None:
    made = [Judge.constant(k / 10, tiny_pair.hidden_size) for k in range(4)]
    (run,) = plan_runs(["judged:0.5"], [3], {"folds": made}, ())
    rows = [{"id": f"q{i}", "question_id": f"q{i}"} for i in range(40)]
    examples = TaskExamples("livecodebench", task("livecodebench"), rows)
    execution = Execution(tiny_pair, examples, run, tmp_path, EvalConfig(batch=3), None)
    seen = []
    for number, part in enumerate(execution.parts()):
        assert part.name == f"part-{number:05d}"
        assert len(part.rows) <= 3
        for row in part.rows:
            assert part.rule is run.rules[fold(row)] is run.rule_for(examples.task, row)
            seen.append(row["id"])
    assert sorted(seen) == sorted(row["id"] for row in rows)


def test_intervals_cover_the_mean_and_paired_ones_are_narrow() -> None:
    rng = np.random.default_rng(1)
    scores = rng.integers(0, 2, 400).astype(float)
    low, high = interval(scores)
    assert low < scores.mean() < high
    assert high - low == pytest.approx(2 * 1.96 * scores.std() / 20, rel=0.15)
    assert interval(np.zeros(50)) == (0.0, 0.0)
    assert interval(scores) == interval(scores)  # the same every time


def test_word_overlap_and_labels() -> None:
    assert word_overlap("a b c d", "a b c d") == 1
    assert word_overlap("a b c d", "a b x d") == 0.75
    assert task_label("livecodebench/all") == "livecodebench-all"
    assert task_label("file:/some/where/mine.jsonl") == "file:mine"


# factual consistency


def test_sentences() -> None:
    text = 'He said "Go." Then he left. It cost 3.5 million!\n- A point\n2. Another one\n\n***'
    assert sentences(text) == ['He said "Go."', "Then he left.", "It cost 3.5 million!", "A point", "Another one"]
    assert sentences("") == []


def test_consistency_is_the_mean_over_sentences() -> None:
    seen: list[tuple[str, str]] = []

    def entails(pairs: Any) -> list[float]:
        seen.extend(pairs)
        return [1.0 if "yes" in sentence else -0.5 for _, sentence in pairs]

    assert consistency(entails, ["S", "T", "U"], ["A yes. B no.", "", "C yes."]) == [0.25, None, 1.0]
    assert seen == [("S", "A yes."), ("S", "B no."), ("U", "C yes.")]


@pytest.fixture
def nli(checkpoints: dict[str, str], tmp_path: Path) -> Path:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoints["target"])
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = BertConfig(
        vocab_size=len(tokenizer) + 5, **shape, num_labels=3, initializer_range=2.0,
        id2label={0: "CONTRADICTION", 1: "NEUTRAL", 2: "ENTAILMENT"},
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(tmp_path / "nli")
    tokenizer.save_pretrained(tmp_path / "nli")
    return tmp_path / "nli"


def test_a_classifier_gives_entailment_less_contradiction(nli: Path) -> None:
    entails = classifier(str(nli))
    pairs = [("w5 w6 w7", "w8"), ("w9", "w10 w11 w12"), ("w5 w6 w7", "w9 w9")]
    found = entails(pairs)
    model = BertForSequenceClassification.from_pretrained(nli).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(nli)
    for pair, value in zip(pairs, found, strict=True):
        with torch.no_grad():
            p = model(**tokenizer(*pair, return_tensors="pt")).logits[0].softmax(-1)
        assert value == pytest.approx(float(p[2] - p[0]), abs=1e-4)
    assert found[0] != pytest.approx(found[1], abs=1e-2)


def test_models_that_are_no_classifiers_are_refused(nli: Path, tmp_path: Path) -> None:
    with pytest.raises(SelfJudgeError, match="cannot load the NLI model"):
        classifier(str(tmp_path / "nothing"))
    config = json.loads((nli / "config.json").read_text())
    config |= {"id2label": {"0": "good", "1": "bad", "2": "ugly"}, "label2id": {"good": 0, "bad": 1, "ugly": 2}}
    (nli / "config.json").write_text(json.dumps(config))
    with pytest.raises(SelfJudgeError, match="is not an NLI model: its labels are good, bad, ugly"):
        classifier(str(nli))


def test_the_proxy_is_the_targets_own_word(tiny_pair: Pair) -> None:
    found = proxy(tiny_pair)([("w5 w6", "w7"), ("w8", "w9 w10")])
    assert len(found) == 2
    assert all(-1 <= value <= 1 for value in found)
    assert found == pytest.approx(
        [*proxy(tiny_pair)([("w5 w6", "w7")]), *proxy(tiny_pair)([("w8", "w9 w10")])], abs=1e-5
    )


def test_rows_are_gzipped_the_same_every_time(tmp_path: Path) -> None:
    from selfjudge.store import write_rows

    for name in ("a.jsonl.gz", "b.jsonl.gz"):
        write_rows(tmp_path / name, [{"x": 1}, {"y": "ü"}])
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()
    with gzip.open(tmp_path / "a.jsonl.gz", "rt", encoding="utf-8") as file:
        assert [json.loads(line) for line in file] == [{"x": 1}, {"y": "ü"}]
    (tmp_path / "torn.jsonl.gz").write_bytes((tmp_path / "a.jsonl.gz").read_bytes()[:-9])
    with pytest.raises(SelfJudgeError, match="cannot read"):
        list(read_rows(tmp_path / "torn.jsonl.gz"))


def test_a_runs_identity_knows_judge_and_threshold(tiny_pair: Pair, judges: Any) -> None:
    def identity(spec: str, made: Any) -> str:
        return plan_runs([spec], [3], made, ())[0].identity

    assert identity("judged:0.4", judges) == identity("judged:0.4", judges)
    other = {"mine": [Judge.constant(0.5, tiny_pair.hidden_size)]}
    assert len({identity("judged:0.4", judges), identity("judged:0.5", judges), identity("judged:0.4", other)}) == 3
    assert isinstance(plan_runs(["exact"], [3], {}, ())[0], Run)


def test_two_names_of_one_rule_are_decoded_once(
    tiny_pair: Pair, asked: str, judges: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = []
    monkeypatch.setattr(execute, "generate", lambda *a, **k: counted.append(a[2]) or generate(*a, **k))
    (judge,) = judges["mine"]
    judge.config.thresholds.update(F=0.4, R=0.4)
    rules = ["exact", "judged:F", "judged:R", "judged:0.4,confirm=1"]
    found = json.loads(json.dumps(evaluated(tiny_pair, tmp_path / "eval", asked, rules, (3,), judges)))
    assert len(counted) == 3 * 3  # three parts of exact, of one threshold, of what is confirmed
    assert [s["rule"] for s in found] == ["exact", *(f"{rule}@mine" for rule in rules[1:])]
    once, again = ({k: v for k, v in s.items() if k not in ("rule", "run_sha256")} for s in found[1:3])
    assert once == again
    folder = tmp_path / "eval" / "file:mine"
    assert samples(folder / "judged:F@mine-g3") == samples(folder / "judged:R@mine-g3")
    assert evaluated(tiny_pair, tmp_path / "eval", asked, rules, (3,), judges) == found
    assert len(counted) == 9
    twins = {"mine": [judge], "other": [Judge(replace(judge.config, suffix_length=5), weight=judge.weight)]}
    both = evaluated(tiny_pair, tmp_path / "twins", asked, ["judged:F"], (3,), twins)
    assert [(s["judge"], s["suffix_length"]) for s in both] == [("mine", None), ("other", 5)]  # each is named


def test_what_is_taken_over_leaves_no_work_and_no_times(
    tiny_pair: Pair, asked: str, judges: Any, tmp_path: Path
) -> None:
    judges["mine"][0].config.thresholds.update(F=0.4, R=0.4)
    evaluated(tiny_pair, tmp_path, asked, ["judged:F"], (3,), judges)
    left = tmp_path / "file:mine" / "judged:R@mine-g3" / "work"
    left.mkdir(parents=True)
    (left / "part-00000.jsonl").write_text("half a li")
    timed, taken = evaluated(tiny_pair, tmp_path, asked, ["judged:F", "judged:R"], (3,), judges, times=False)
    assert timed["tokens_per_second"] > 0
    assert (taken["tokens_per_second"], taken["seconds"]) == (None, {})
    assert not left.exists()


def test_judges_that_have_seen_the_problems_are_named() -> None:
    assert learnt_folds(("gsm8k", "livecodebench")) == {1, 2, 3}
    assert learnt_folds(("livecodebench/train-2", "self")) == {0, 1, 3}
    assert learnt_folds(("livecodebench/fold-1", "livecodebench/fold-3")) == {1, 3}
    rows = [{"id": f"q{i}", "question_id": f"q{i}"} for i in range(40)]

    def said(*sources: tuple[str, ...], asked: list[Any] = rows) -> list[str]:
        made = [Judge(JudgeConfig(hidden_size=4, sources=names)) for names in sources]
        found: list[str] = []
        examples = TaskExamples("livecodebench", task("livecodebench"), asked)
        _warn_learnt(examples, plan_runs(["exact", "judged:0.5"], [3], {"mine": made}, ()), found.append)
        return found

    assert "the judge mine was trained on problems" in said(("livecodebench",))[0]
    assert not said(("livecodebench",), asked=[row for row in rows if fold(row) == 0])
    others = [tuple(f"livecodebench/fold-{j}" for j in range(4) if j != k) for k in range(4)]
    assert not said(*others)
    assert said(*reversed(others))
    assert not said(("gsm8k",))


def test_delta_m_has_an_interval_that_is_paired_by_prompt(tiny_pair: Pair, asked: str, tmp_path: Path) -> None:
    exact, other = evaluated(tiny_pair, tmp_path, asked, ["exact", "topk:9"])
    assert exact["delta_m_ci"] is exact["m_ratio_ci"] is None
    low, high = other["delta_m_ci"]
    assert low < other["delta_m"] < high
    low, high = other["m_ratio_ci"]
    assert low < other["m_ratio"] < high
    file = tmp_path / "file:mine" / "topk:9-g3" / "summary.json"
    older = {key: value for key, value in json.loads(file.read_text()).items() if not key.endswith("m_ci")}
    file.write_text(json.dumps(older))  # as a version without the interval left it
    assert evaluated(tiny_pair, tmp_path, asked, ["topk:9"])[0]["delta_m_ci"] == other["delta_m_ci"]


def test_the_interval_of_delta_m_follows_the_pairs() -> None:
    rng = np.random.default_rng(0)
    cycles = rng.integers(5, 50, 300)
    exact = [{"emitted": int(2 * c + rng.integers(-3, 4)), "cycles": int(c)} for c in cycles]
    twice = [{"emitted": 2 * row["emitted"], "cycles": row["cycles"]} for row in exact]
    found = delta_m(twice, exact)
    assert found["m_ratio"] == pytest.approx(2)
    assert found["m_ratio_ci"] == pytest.approx((2, 2))  # the same on every prompt
    low, high = found["delta_m_ci"]
    assert low < found["delta_m"] < high
    nothing = [{"emitted": 0, "cycles": 0}]
    assert set(delta_m(nothing, nothing).values()) == {None}


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
    monkeypatch.setattr("selfjudge.tasks.file.File.requires", ("math-verify",))
    (answers,) = evaluated(tiny_pair, tmp_path / "answers", asked, ["exact"])
    assert answers["agreement_measure"] == "same_answer"
    assert answers["versions"]["math-verify"] == version("math-verify")
    file = Path(asked.removeprefix("file:"))
    file.write_text(file.read_text().replace(', "answer": "w7"', ""))
    (words,) = evaluated(tiny_pair, tmp_path / "words", asked, ["exact"])
    assert (words["agreement_measure"], words["measure"], words["n_scored"]) == ("word_overlap", None, 0)


def test_rules_may_be_objects(tiny_pair: Pair, asked: str, judges: Any, tmp_path: Path) -> None:
    judged = Judged(judges["mine"][0], 0.4, special=tiny_pair.special_ids)
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
    judges = {"mine": Judge.constant(0.5, tiny_pair.hidden_size)}
    summaries = evaluate_rules(tiny_pair, tmp_path / "with", config, judges=judges)
    assert [s["rule"] for s in summaries] == ["exact", "judged@mine"]


def test_times_can_be_left_out(tiny_pair: Pair, asked: str, tmp_path: Path) -> None:
    (found,) = evaluated(tiny_pair, tmp_path, asked, ["exact"], times=False)
    assert (found["tokens_per_second"], found["seconds"]) == (None, {})
    assert found["mean_accepted_length"] > 1


def test_all_rules_draft_with_the_same_weights(
    tiny_pair: Pair, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shells, "int8_draft", lambda *_: pytest.fail("rules are not comparable"))
    evaluated(tiny_pair, tmp_path, asked, ["exact"])
    with pytest.raises(pytest.fail.Exception):
        generate(tiny_pair, ["w5"], gamma=3, max_new_tokens=2)


def test_rule_objects_are_told_from_each_other() -> None:
    class Mine(TopK):
        """A rule that is not a dataclass of its own."""

        def __init__(self, depth: int) -> None:
            super().__init__(2)
            object.__setattr__(self, "depth", depth)

    one, two, exact = Mine(1), Mine(2), Exact()
    runs = plan_runs([one, two, exact], [3], {}, ())
    assert runs[0].name == "exact"
    assert len({run.name for run in runs}) == len({run.identity for run in runs}) == 3
    judges = [Judge.constant(p, 4) for p in (0.2, 0.8)]
    with pytest.raises(SelfJudgeError, match="two rules are called judged"):
        plan_runs([Judged(judge, 0.5) for judge in judges], [3], {}, ())
