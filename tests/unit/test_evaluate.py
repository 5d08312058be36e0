"""Evaluation: what is run, its parts, intervals, factual consistency."""

from __future__ import annotations

import gzip
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from fake_judge import constant_judge
from runs import drafted_by, prompts_file, random_judges
from selfjudge.cli import main as cli
from selfjudge.cli.options import Setup
from selfjudge.decoding.rules import Exact, Judged, TopK
from selfjudge.decoding.text import generate
from selfjudge.errors import SelfJudgeError
from selfjudge.evaluate import EvalConfig
from selfjudge.evaluate.compare import bootstrap_interval, compare_lengths, compute_overlap
from selfjudge.evaluate.config import RuleRun, TaskExamples, make_label, plan_runs
from selfjudge.evaluate.consistency import load_classifier, make_proxy, measure_consistency, split_sentences
from selfjudge.evaluate.execute import Evaluation, Execution, TorchAnswerer, make_example_row, trace_again
from selfjudge.evaluate.pipeline import _warn_learnt, evaluate_rules
from selfjudge.judge.config import JudgeConfig, prompt_key, write_training_prompts
from selfjudge.judge.model import Judge
from selfjudge.models.pair import Pair
from selfjudge.store import read_rows
from selfjudge.tasks import load_task


@pytest.fixture
def judges(tiny_pair: Pair) -> dict[str, Judge]:
    return random_judges(tiny_pair.hidden_size)


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
        ({"gammas": (3, 500)}, "`gammas` must be at most 32, not 500"),
        ({"tasks": ()}, "`tasks` names no task"),
        ({"rules": ()}, "`rules` names no rule"),
        ({"tasks": ("nothing",)}, "unknown task 'nothing'"),
    ):
        with pytest.raises(SelfJudgeError, match=message):
            EvalConfig(**{"tasks": ("arithmetic",), **wrong}).check()


def test_parts_hold_all_rows_in_order(tiny_pair: Pair, tmp_path: Path) -> None:
    (run,) = plan_runs(["exact"], [3], {}, ())
    rows = [{"id": f"q{i}"} for i in range(40)]
    evaluation = Evaluation(tiny_pair, TorchAnswerer(tiny_pair), tmp_path, EvalConfig(batch=3))
    parts = Execution(evaluation, TaskExamples("gsm8k", load_task("gsm8k"), rows), run).parts()
    assert list(parts) == [f"part-{number:05d}" for number in range(14)]
    assert [len(part) for part in parts.values()] == [3] * 13 + [1]
    assert [row for part in parts.values() for row in part] == rows


def test_what_the_target_wanted_is_said_of_every_example_and_what_is_timed_is_not_traced(
    tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Judged answers are decoded once more."""
    asked = prompts_file(tmp_path / "asked.jsonl", 6)
    both = EvalConfig(tasks=(f"file:{asked}",), rules=("exact", "topk:20"), gammas=(3,), batch=3, max_new_tokens=12)
    config = replace(both, examples=6)
    traced: list[bool] = []
    original = TorchAnswerer.answer

    def answer(self: TorchAnswerer, *given: Any, trace: bool = False, **how: Any) -> Any:
        traced.append(trace)
        return original(self, *given, trace=trace, **how)

    monkeypatch.setattr(TorchAnswerer, "answer", answer)
    _, relaxed = evaluate_rules(tiny_pair, tmp_path / "timed", config)
    assert traced == [False, False, False, False, True]
    traced.clear()
    evaluate_rules(tiny_pair, tmp_path / "single", replace(config, batch=6))
    assert traced == [False, False, True]  # the only part is the one that is timed
    folder = Path("file:asked", "topk:20-g3")
    rows = {kind: list(read_rows(tmp_path / kind / folder / "examples.jsonl")) for kind in ("timed", "single")}
    wanted = [t for row in rows["timed"] for t in row["tokens"] if t["origin"] == "judge"]
    assert wanted
    assert all(0 < t["p"] <= t["p_choice"] and t["choice"] != t["text"] and t["judge"] is None for t in wanted)
    assert not any("choice" in t for row in rows["timed"] for t in row["tokens"] if t["origin"] != "judge")
    assert rows["timed"] == rows["single"]
    assert sum(n for _, _, n in relaxed["substitutions"]) == len(wanted)


def test_an_example_behind_the_first_part_has_the_targets_choice(
    tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompts_file(tmp_path / "asked.jsonl", 6)
    original = TorchAnswerer.answer

    def answer(self: TorchAnswerer, prompts: Any, *given: Any, **how: Any) -> Any:
        answers, seconds = original(self, prompts, *given, **how)
        exact = generate(tiny_pair, prompts, gamma=3, max_new_tokens=12)
        return [e if p in shown else a for a, e, p in zip(answers, exact, prompts, strict=True)], seconds

    monkeypatch.setattr(TorchAnswerer, "answer", answer)
    examples = TaskExamples.load(f"file:{asked}", EvalConfig())
    shown = [examples.task.prompt(row) for row in examples.rows[:3]]  # the first part has no judged token
    config = EvalConfig(tasks=(f"file:{asked}",), rules=("exact", "topk:20"), gammas=(3,), batch=3, max_new_tokens=12)
    evaluate_rules(tiny_pair, tmp_path / "out", config)
    rows = list(read_rows(tmp_path / "out" / "file:asked" / "topk:20-g3" / "examples.jsonl"))
    judged = [t for row in rows for t in row["tokens"] if t["origin"] == "judge"]
    assert judged
    assert all(t["choice"] for t in judged)


def test_a_gamma_that_is_named_twice_is_one(tiny_pair: Pair, tmp_path: Path) -> None:
    asked = prompts_file(tmp_path / "asked.jsonl", 3)
    config = EvalConfig(tasks=(f"file:{asked}",), rules=("exact",), gammas=(3, 2, 3), batch=1, max_new_tokens=4)
    assert [summary["gamma"] for summary in evaluate_rules(tiny_pair, tmp_path / "out", config)] == [3, 2]


def test_answers_that_are_traced_once_more_stay_as_they_were(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[bool, int]] = []
    original = TorchAnswerer.answer

    def answer(self: TorchAnswerer, prompts: Any, *given: Any, trace: bool, batch: int) -> Any:
        calls.append((trace, batch))
        return original(self, prompts, *given, trace=trace, batch=batch)

    monkeypatch.setattr(TorchAnswerer, "answer", answer)
    answerer = TorchAnswerer(tiny_pair)
    other = generate(tiny_pair, "w1 w2", max_new_tokens=2)  # as if rounding had made it another one
    run = RuleRun("topk:20", 3, TopK(20))
    assert trace_again(answerer, [other], 1, ["w3 w4"], run, 12, [0]) == [other]
    calls.clear()
    plain = generate(tiny_pair, ["w1 w2", "w3 w4", "w5 w6"], TopK(20), gamma=3, max_new_tokens=12, trace=False)
    traced = trace_again(answerer, plain, 2, ["w1 w2", "w3 w4", "w5 w6"], run, 12, range(3))
    assert calls == [(True, 2)]
    assert [answer.tokens for answer in traced] == [answer.tokens for answer in plain]
    assert any(answer.judged_tokens for answer in traced)


@pytest.mark.parametrize(
    ("task", "more", "floats"), [("arithmetic", (), False), ("story", (), True), ("story", ("--nli", "off"), False)]
)
def test_weights_are_those_that_serve_has_unless_the_target_judges_summaries(
    task: str, more: tuple[str, ...], floats: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[bool] = []

    def load(self: Setup, *, needs_draft: bool = True, full_precision: bool = False) -> Pair:
        asked.append(full_precision)
        raise SelfJudgeError("enough")

    monkeypatch.setattr(Setup, "load", load)
    monkeypatch.setattr(TaskExamples, "has_stories", task == "story")
    words = ("--tasks", "arithmetic", "--limit", "2", "--rules", "exact", "--out", str(tmp_path / "eval"), *more)
    monkeypatch.setattr(sys, "argv", ["selfjudge", "eval", *words])
    with pytest.raises(SystemExit):
        cli.main()
    assert asked == [floats]


def test_intervals_cover_the_mean_and_paired_ones_are_narrow() -> None:
    rng = np.random.default_rng(1)
    scores = rng.integers(0, 2, 400).astype(float)
    low, high = bootstrap_interval(scores)
    assert low < scores.mean() < high
    assert high - low == pytest.approx(2 * 1.96 * scores.std() / 20, rel=0.15)
    assert bootstrap_interval(np.zeros(50)) == (0.0, 0.0)
    assert bootstrap_interval(scores) == bootstrap_interval(scores)  # the same every time


def test_word_overlap_and_labels() -> None:
    assert compute_overlap("a b c d", "a b c d") == 1
    assert compute_overlap("a b c d", "a b x d") == 0.75
    assert make_label("livecodebench/all") == "livecodebench-all"
    assert make_label("file:/some/where/mine.jsonl") == "file:mine"


# factual consistency


def test_sentences() -> None:
    text = 'He said "Go." Then he left. It cost 3.5 million!\n- A point\n2. Another one\n\n***'
    assert split_sentences(text) == ['He said "Go."', "Then he left.", "It cost 3.5 million!", "A point", "Another one"]
    assert split_sentences("") == []


def test_consistency_is_the_mean_over_sentences() -> None:
    seen: list[tuple[str, str]] = []

    def entails(pairs: Any) -> list[float]:
        seen.extend(pairs)
        return [1.0 if "yes" in sentence else -0.5 for _, sentence in pairs]

    assert measure_consistency(entails, ["S", "T", "U"], ["A yes. B no.", "", "C yes."]) == [0.25, None, 1.0]
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
    entails = load_classifier(str(nli))
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
        load_classifier(str(tmp_path / "nothing"))
    config = json.loads((nli / "config.json").read_text())
    config |= {"id2label": {"0": "good", "1": "bad", "2": "ugly"}, "label2id": {"good": 0, "bad": 1, "ugly": 2}}
    (nli / "config.json").write_text(json.dumps(config))
    with pytest.raises(SelfJudgeError, match="is not an NLI model: its labels are good, bad, ugly"):
        load_classifier(str(nli))


def test_the_proxy_is_the_targets_own_word(tiny_pair: Pair) -> None:
    found = make_proxy(tiny_pair)([("w5 w6", "w7"), ("w8", "w9 w10")])
    assert len(found) == 2
    assert all(-1 <= value <= 1 for value in found)
    assert found == pytest.approx(
        [*make_proxy(tiny_pair)([("w5 w6", "w7")]), *make_proxy(tiny_pair)([("w8", "w9 w10")])], abs=1e-5
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
    other = {"mine": constant_judge(0.5, tiny_pair.hidden_size)}
    assert len({identity("judged:0.4", judges), identity("judged:0.5", judges), identity("judged:0.4", other)}) == 3
    assert isinstance(plan_runs(["exact"], [3], {}, ())[0], RuleRun)


def test_a_null_is_exact_in_other_batches() -> None:
    exact, null = plan_runs(["null", "exact"], [3], {}, ())
    assert (exact.name, null.name) == ("exact", "null")
    assert isinstance(null.rule, Exact)
    assert [run.batch(8) for run in (exact, null)] == [8, 4]
    assert (exact.batch(1), null.batch(1)) == (1, 2)
    assert exact.identity != null.identity


def test_drafts_and_judges_that_have_seen_the_problems_are_named(tiny_pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "gsm8k").mkdir()
    for split, first in (("train", 1), ("test", 30)):
        asked = [{"question": f"w{first + i}", "answer": f"#### {i}"} for i in range(5)]
        (tmp_path / "gsm8k" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    Judge(JudgeConfig(hidden_size=tiny_pair.hidden_size, target="x")).save_pretrained(tmp_path / "judge")
    pair = drafted_by(tiny_pair, tmp_path / "draft")
    judges = {"the judge mine": Judge.from_pretrained(tmp_path / "judge")}

    def said(name: str) -> list[str]:
        found: list[str] = []
        examples = TaskExamples.load(name, EvalConfig(data=tmp_path))
        _warn_learnt(pair, examples, judges, tmp_path, found.append)
        return found

    assert said("gsm8k/train") == []  # neither says anything
    (tmp_path / "draft" / "prompts.json").write_text('{"prompts": [], "sources": ["gsm8k"]}')
    examples = TaskExamples.load("gsm8k/train", EvalConfig(data=tmp_path))
    (ids,) = pair.encode_many([examples.task.prompt(examples.rows[4])])
    write_training_prompts(tmp_path / "judge", [prompt_key(ids)])
    assert said("gsm8k/train[3:]") == [
        "gsm8k-train-3-: the draft was trained on 2 of these 2 prompts, as far as it says",
        "gsm8k-train-3-: the judge mine was trained on 1 of these 2 prompts, as far as it says",
    ]
    assert said("gsm8k") == []


def test_the_interval_of_delta_m_follows_the_pairs() -> None:
    rng = np.random.default_rng(0)
    cycles = rng.integers(5, 50, 300)
    exact = [{"emitted": int(2 * c + rng.integers(-3, 4)), "cycles": int(c)} for c in cycles]
    twice = [{"emitted": 2 * row["emitted"], "cycles": row["cycles"]} for row in exact]
    found = compare_lengths(twice, exact)
    assert found["m_ratio"] == pytest.approx(2)
    assert found["m_ratio_ci"] == pytest.approx((2, 2))  # the same on every prompt
    low, high = found["delta_m_ci"]
    assert low < found["delta_m"] < high
    nothing = [{"emitted": 0, "cycles": 0}]
    assert set(compare_lengths(nothing, nothing).values()) == {None}


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
    judges = [constant_judge(p, 4) for p in (0.2, 0.8)]
    with pytest.raises(SelfJudgeError, match="two rules are called judged"):
        plan_runs([Judged(judge, 0.5) for judge in judges], [3], {}, ())


@pytest.mark.parametrize("limit", [None, 4.0])
@pytest.mark.parametrize("features", ["hidden", "hidden+margin", "hidden+margin+previous"])
def test_shown_scores_are_those_of_the_decoder(tiny_pair: Pair, features: str, limit: float | None) -> None:
    judge = Judge(JudgeConfig(hidden_size=tiny_pair.hidden_size, features=features, margin_limit=limit))
    judge.weight.copy_(torch.randn(judge.weight.shape, generator=torch.Generator().manual_seed(1)))
    prompt = "w1 w2 w3"
    answer = generate(tiny_pair, prompt, Judged(judge, 0.0), gamma=4, max_new_tokens=24, trace=True)
    assert answer.judged_tokens
    shown = make_example_row(tiny_pair, prompt, answer)
    (ids,) = tiny_pair.encode_many([prompt])
    with torch.no_grad():
        seen = tiny_pair.target(torch.tensor([[*ids, *answer.tokens]]), output_hidden_states=True)
    hidden, logits = seen.hidden_states[-1][0], seen.logits[0]
    for judged in answer.judged_tokens:
        row, token = len(ids) + judged.index, shown["tokens"][judged.index]
        log_p, draft = logits[row - 1].log_softmax(-1), torch.tensor(judged.token)
        score = judge.score_drafts(hidden[row], hidden[row - 1], logits[row - 1], draft)
        assert token["judge"] == pytest.approx(float(score), abs=1e-3)
        assert token["choice"] == tiny_pair.tokenizer.decode([int(log_p.argmax())])
        assert token["p"] == pytest.approx(float(log_p[judged.token].exp()), abs=1e-3)
        assert token["p_choice"] == pytest.approx(float(log_p.max().exp()), abs=1e-3)
    if limit is not None:  # what was accepted lies within it
        assert all(judged.score > 0 for judged in answer.judged_tokens if judged.score is not None)
