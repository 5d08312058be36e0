"""Candidates, calibration prompts, measures, recipes and the words of a certificate, without a run."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fake_certificate import certificate, page_text, recipe_folder, tamper
from fake_judge import constant_judge
from runs import drafted_by
from selfjudge.decoding.rule_parser import RuleRequest
from selfjudge.errors import SelfJudgeError
from selfjudge.judge.config import JudgeConfig, prompt_key, write_training_prompts
from selfjudge.judge.model import Judge
from selfjudge.models.catalogue import draft_folder
from selfjudge.models.pair import Pair
from selfjudge.prompts.sources import find_learnt
from selfjudge.report.certificate import (
    certificate_page,
    describe_baseline,
    describe_claim,
    describe_doubt,
    describe_result,
    describe_verdict,
)
from selfjudge.tune.calibration import (
    CalibrationPrompt,
    LossMeasure,
    check_calibration,
    choose_measure,
    hash_prompts,
    limit_prompts,
    load_calibration,
    refuse_learnt,
    remark,
)
from selfjudge.tune.certify import Claim, describe_evidence
from selfjudge.tune.config import TuneConfig
from selfjudge.tune.families import FAMILIES, list_families, split_by_gamma
from selfjudge.tune.recipe import Recipe
from selfjudge.tune.verify import unpack

JUDGE = JudgeConfig(hidden_size=4, quality_curve=((0.5, 0.2), (0.9, 0.6), (0.95, 0.6), (0.98, 1.0)))


def as_text(known: dict[str, Any]) -> str:
    return page_text(certificate_page(known, []))


def rows(path: Path, *given: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    return path


def flat(groups: list[list[CalibrationPrompt]]) -> list[CalibrationPrompt]:
    return [prompt for group in groups for prompt in group]


def strictness(rule: str) -> float:
    """Larger accepts more."""
    built = RuleRequest(rule).resolve((), JUDGE)
    if built.price is not None:
        return built.price
    sign = {"judged": -1, "fly": -1}.get(built.name, 1)
    option = {"judged": "theta", "fly": "entropy", "margin": "threshold", "topk": "k"}[built.name]
    return sign * float(getattr(built, option))


def test_families_are_ordered_from_strict_to_loose() -> None:
    for family, rules in list_families(FAMILIES, JUDGE).items():
        values = [strictness(rule) for rule in rules]
        assert values == sorted(set(values)), family
    assert [rule for rule in list_families(["judged"], JUDGE)["judged"] if "q0.98" in rule] == []  # its θ is 1: exact


def test_all_candidates_are_guarded() -> None:
    for rules in list_families(FAMILIES, JUDGE).values():
        for rule in rules:
            assert RuleRequest(rule).resolve((), JUDGE).guard  # type: ignore[attr-defined]


def test_a_judge_without_a_quality_curve_is_tried_by_threshold() -> None:
    families = list_families(["judged"], JudgeConfig(hidden_size=4))
    assert families["judged"][0] == "judged:0.95"
    with pytest.raises(SelfJudgeError, match="the family judged needs a judge"):
        list_families(["judged"], None)


def test_a_family_that_does_not_work_with_gamma_falls_away_before_delta_is_shared() -> None:
    families = list_families(FAMILIES, JUDGE)
    kept, refused = split_by_gamma(families, 2, JUDGE)
    assert list(kept) == ["margin", "priced", "judged", "topk"]
    assert {family for family, _, _ in refused} == {"fly"}
    assert {rule for _, rule, _ in refused} == set(families["fly"])
    assert "needs `gamma` > 2, not 2" in refused[0][2]
    assert split_by_gamma(families, 3, JUDGE) == (families, [])
    with pytest.raises(SelfJudgeError, match="needs `gamma` > 2"):
        split_by_gamma(list_families(["fly"], None), 2, None)


def test_judged_is_left_out_of_all_families_where_there_is_no_judge() -> None:
    assert list(list_families(FAMILIES, None)) == ["margin", "priced", "fly", "topk"]


def test_named_rules_are_one_family_guarded_as_others_are(tmp_path: Path) -> None:
    named = ("margin:price=0.2", "topk:3,guard=off", "judged:q0.9", "margin:0.5", "margin:price=0.2")
    rules = ("margin:price=0.2,guard=on", "topk:3,guard=off", "judged:q0.9", "margin:0.5,guard=on")
    assert list_families(FAMILIES, JUDGE, named) == {"rules": rules}
    assert rules[0] in list_families(["priced"], None)["priced"]
    file = rows(tmp_path / "mine.jsonl", *({"prompt": f"w{i}"} for i in range(40)))
    config = TuneConfig(prompts=file, epsilon=0.1, rules=named)
    check_calibration(config, JUDGE)
    assert (config.uses_judge, replace(config, rules=("margin:1",)).uses_judge) == (True, False)
    with pytest.raises(SelfJudgeError, match="rule 'judged' needs a judge and none ships"):
        check_calibration(config, None)
    with pytest.raises(SelfJudgeError, match="needs `gamma` > 2"):
        check_calibration(replace(config, rules=("margin:1", "fly:0.3,2"), gamma=2), None)
    with pytest.raises(
        SelfJudgeError, match=r"over 1 family: at least .* are needed, .*; give more prompts or a larger"
    ):
        check_calibration(replace(config, epsilon=0.05), JUDGE)


def test_so_few_prompts_are_refused_by_themselves(tmp_path: Path) -> None:
    file = rows(tmp_path / "mine.jsonl", *({"prompt": f"w{i % 30}"} for i in range(40)))  # ten are repeated
    config = TuneConfig(prompts=file, epsilon=0.3, families=("margin",))
    check_calibration(config, None)
    with pytest.raises(
        SelfJudgeError,
        match=r"^10 of 40 prompts are repeated: each counts once; 30 prompts cannot certify `epsilon` 0\.1 .* 1 family:"
        " at least 39 are needed, 4 of",
    ):
        check_calibration(replace(config, epsilon=0.1), None)
    with pytest.raises(SelfJudgeError, match=r"; 5 prompts cannot certify `epsilon` 0\.3"):
        check_calibration(replace(config, limit=5), None)
    with pytest.raises(SelfJudgeError, match="1 family: at least 35 are needed; give more prompts or a larger"):
        check_calibration(replace(config, epsilon=0.1, times=False), None)


@pytest.mark.parametrize(("epsilon", "needed"), [(0.1, 58), (0.03, 200)])
def test_the_page_says_as_many_prompts_as_the_refusal(tmp_path: Path, epsilon: float, needed: int) -> None:
    """Whatever the device: the number is enough for all."""
    words = {0.1: f"with five families {needed} for ε = 0.1", 0.03: f"and {needed} for 0.03."}
    assert words[epsilon] in (Path(__file__).parents[2] / "docs" / "tune.md").read_text()
    config = TuneConfig(prompts=rows(tmp_path / "mine.jsonl", *({"prompt": f"w{i}"} for i in range(9))))
    with pytest.raises(SelfJudgeError, match=f"5 families: at least {needed} are needed"):
        check_calibration(replace(config, epsilon=epsilon), JUDGE)


def test_families_that_gamma_excludes_need_no_prompts(tmp_path: Path) -> None:
    file = rows(tmp_path / "mine.jsonl", *({"prompt": f"w{i}"} for i in range(40)))
    config = TuneConfig(prompts=file, epsilon=0.1, families=("margin", "fly"), times=False)
    with pytest.raises(SelfJudgeError, match="over 2 families: at least 42 are needed; give more prompts, fewer `fam"):
        check_calibration(config, None)
    check_calibration(replace(config, gamma=2), None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epsilon": 0.0}, "`epsilon` must be more than 0"),
        ({"epsilon": 1.0}, "`epsilon` must be less than 1"),
        ({"delta": 1.5}, "`delta` must be less than 1"),
        ({"delta": float("nan")}, "`delta` must be a finite number"),
        ({"families": ()}, "`families` names no family"),
        ({"families": ("margin", "margin")}, "names a family twice"),
        ({"families": ("magic",)}, "unknown `families` 'magic'"),
        ({"rules": ()}, "`rules` names one rule or more"),
        ({"rules": "margin:1"}, "`rules` must be a tuple"),
        ({"rules": ("margin:1",), "families": ("topk",)}, "instead of `families`: give one of the two"),
        ({"rules": ("margin:1", "magic")}, "unknown rule 'magic'"),
        ({"rules": ("margin:1", "exact")}, "`rules`: exact must be relaxed"),
        ({"rules": ("margin:1,strict_code=off",)}, "`strict_code` are for all"),
        ({"tasks": ()}, "give one of the two"),
        ({"prompts": Path("x.jsonl")}, "give one of the two"),
        ({"minutes": 0.0}, "`minutes` must be more than 0"),
        ({"measure": "taste"}, "unknown `measure`"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SelfJudgeError, match=message):
        replace(TuneConfig(tasks=("arithmetic",)), **settings).check()


def test_prompts_come_in_an_order_of_their_own_and_repeated_ones_count_once(tmp_path: Path) -> None:
    file = rows(tmp_path / "mine.jsonl", *({"prompt": f"w{i % 7}!", "answer": i} for i in range(10)))
    said: list[str] = []
    config = TuneConfig(prompts=file)
    prompts = flat(load_calibration(config, said.append))
    assert sorted(prompt.id for prompt in prompts) == [f"mine-{i}" for i in range(1, 8)]
    assert said == ["3 of 10 prompts are repeated: each counts once"]
    assert [p.id for p in prompts] == [p.id for p in flat(load_calibration(config, said.append))]
    other = flat(load_calibration(config, said.append, salt="another pair"))
    assert [p.id for p in prompts] != [p.id for p in other]
    assert hash_prompts(prompts) != hash_prompts(other)


def test_prompts_of_a_group_and_near_duplicates_stay_together(tmp_path: Path) -> None:
    story = (
        "{} walks to the market in the old town and buys {} fresh eggs for a cake. How many eggs are in the bag now?"
    )
    asked = [{"prompt": story.format("Ann", 3)}, {"prompt": story.format("Ann", 3) + " Think first."}]
    asked += [{"prompt": f"What is {i} + {3 * i}?", "group": f"g{i // 2}"} for i in range(6)]
    said: list[str] = []
    config = TuneConfig(prompts=rows(tmp_path / "mine.jsonl", *asked, {"prompt": "Who wrote Faust?", "group": None}))
    groups = load_calibration(config, said.append)
    assert sorted(sorted(int(p.id[5:]) for p in group) for group in groups) == [[1, 2], [3, 4], [5, 6], [7, 8], [9]]
    assert said == [
        "9 prompts have 6 groups by their `group`: each group counts once",
        "1 of 9 prompts are near-duplicates of others (`similar`: 70% or more of their 3-word pieces in common): 5 groups are left,"
        " each counts once",
    ]
    assert len(load_calibration(replace(config, similar=1.0), print)) == 6
    for limit in range(1, 9):
        kept = limit_prompts(groups, limit)
        assert flat(kept) == flat(groups)[:limit]
    assert limit_prompts(groups, None) == groups
    with pytest.raises(SelfJudgeError, match="`similar` must be"):
        replace(config, similar=1.5).check()


def test_a_system_message_that_one_prompt_lacks_joins_nothing(tmp_path: Path) -> None:
    system = {"role": "system", "content": "You are a careful assistant who answers in one short and polite sentence."}
    topics = [{"role": "user", "content": f"Who was {name}?"} for name in ("Goethe", "Byron", "Lorca", "Basho")]
    rows = [{"messages": [*([system] if i else []), topic]} for i, topic in enumerate(topics)]
    file = tmp_path / "systems.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(load_calibration(TuneConfig(prompts=file), print)) == 4


def test_a_repeated_prompt_joins_all_groups_that_it_is_in(tmp_path: Path) -> None:
    rows = [("w1", "a"), ("w2", "b"), ("w1", "b"), ("w3", "a"), ("w4", None)]
    file = tmp_path / "repeated.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt, "group": group}) + "\n" for prompt, group in rows))
    assert sorted(map(len, load_calibration(TuneConfig(prompts=file), print))) == [1, 3]


def test_sums_that_differ_in_a_sign_are_different_prompts(tmp_path: Path) -> None:
    asked = ("What is 4 + 2?", "What is 4 - 2?", "What is 4 − 2?", "What is (4 * 2) + 1?", "What is 4 * (2 + 1)?")
    twins = ("what is 4 + 2", "What is:  4 + 2.")
    file = rows(tmp_path / "mine.jsonl", *({"prompt": text, "answer": 1} for text in (*asked, *twins)))
    prompts = flat(load_calibration(TuneConfig(prompts=file), lambda text: None))
    assert sorted(prompt.prompt for prompt in prompts) == sorted(asked)


def test_the_checksum_knows_the_answers(tmp_path: Path) -> None:
    first, second = (
        flat(load_calibration(TuneConfig(prompts=rows(tmp_path / "mine.jsonl", {"prompt": "w1", "answer": a})), print))
        for a in (1, 2)
    )
    assert hash_prompts(first) != hash_prompts(second)


def test_what_is_measured_follows_from_the_prompts(tmp_path: Path) -> None:
    def measure(wanted: str, *given: dict[str, Any]) -> str:
        prompts = flat(load_calibration(TuneConfig(prompts=rows(tmp_path / "mine.jsonl", *given)), print))
        return choose_measure(wanted, prompts).name

    scored, checked, bare = {"prompt": "w1", "answer": 7}, {"prompt": "w2", "check": "assert answer"}, {"prompt": "w3"}
    assert measure("auto", scored, checked) == "score"
    assert measure("auto", bare) == "overlap"
    assert measure("overlap", scored) == "overlap"
    assert measure("same_answer", scored) == "same_answer"
    for wanted in ("auto", "score"):
        with pytest.raises(SelfJudgeError, match="1 of 2 prompts have neither answer nor check"):
            measure(wanted, scored, bare)
    with pytest.raises(SelfJudgeError, match="needs prompts whose answers can be found"):
        measure("same_answer", bare)


def test_differences(tmp_path: Path) -> None:
    asked = rows(tmp_path / "m.jsonl", {"prompt": "w1", "answer": 7})
    ((prompt,),) = load_calibration(TuneConfig(prompts=asked), print)

    def sample(score: float, answer: str | None, text: str, judged: int = 1) -> dict[str, Any]:
        return {"score": score, "answer": answer, "text": text, "judged": judged}

    right, wrong = sample(1.0, "7", "the answer is 7"), sample(0.0, "8", "the answer is 8")
    assert LossMeasure("score").compare(prompt, right, wrong) == 1.0
    assert LossMeasure("score").compare(prompt, wrong, right) == -1.0
    assert LossMeasure("same_answer").compare(prompt, right, wrong) == 1.0
    assert LossMeasure("same_answer").compare(prompt, right, sample(1.0, "7.0", "so 7.0")) == 0.0
    nothing = sample(0.0, None, "words")
    assert LossMeasure("same_answer").compare(prompt, nothing, sample(0.0, None, "others")) == 0.0
    assert LossMeasure("same_answer").compare(prompt, nothing, right) == 1.0
    assert LossMeasure("overlap").compare(prompt, right, wrong) == pytest.approx(0.25)
    for name in ("score", "same_answer", "overlap"):  # no substitution: nothing is looked at
        assert LossMeasure(name).compare(prompt, right, sample(0.0, None, "", judged=0)) == 0.0


def test_a_prompt_that_draft_or_judge_was_trained_on_is_refused_with_its_name(tiny_pair: Pair, tmp_path: Path) -> None:
    file = rows(tmp_path / "mine.jsonl", {"prompt": "w1 w2", "id": "seen"}, {"prompt": "w3", "id": "new"})
    config = TuneConfig(prompts=file)
    prompts = flat(load_calibration(config, print))
    Judge(JudgeConfig(hidden_size=tiny_pair.hidden_size, target="x")).save_pretrained(tmp_path / "judge")
    judge, pair = Judge.from_pretrained(tmp_path / "judge"), drafted_by(tiny_pair, tmp_path / "draft")
    said: list[str] = []
    refuse_learnt(pair, prompts, judge, config, said.append)
    assert [text.partition(" does not keep its training prompts: it cannot be checked")[0] for text in said] == [
        "the draft", "the judge",
    ]  # fmt: skip
    for name in ("draft", "judge"):
        write_training_prompts(tmp_path / name, [prompt_key(ids) for ids in pair.encode_many(["w1 w2", "w9"])])
        with pytest.raises(SelfJudgeError, match=f"the {name} was trained on 1 of these prompts, such as 'seen'"):
            refuse_learnt(pair, prompts, judge, config, said.append)
        write_training_prompts(tmp_path / name, [prompt_key(pair.encode("w9"))])
    said.clear()
    refuse_learnt(pair, prompts, judge, config, said.append)
    assert said == []


@pytest.mark.parametrize(
    ("task", "learnt"), [("gsm8k/train", 3), ("gsm8k/train[3:]", 0), ("gsm8k/test+train[1:]", 2), ("gsm8k", 0)]
)
def test_what_ships_names_the_tasks_that_it_was_trained_on(
    task: str, learnt: int, tiny_pair: Pair, tmp_path: Path
) -> None:
    """Keys of so many prompts would be larger than the draft; those of a part of a split are found all the same."""
    (tmp_path / "gsm8k").mkdir()
    for split, first in (("train", 1), ("test", 30)):
        asked = ({"question": f"w{first + i}", "answer": f"#### {i}"} for i in range(5))
        rows(tmp_path / "gsm8k" / f"{split}.jsonl", *asked)
    pair, config = drafted_by(tiny_pair, tmp_path / "draft"), TuneConfig(tasks=(task,), data=tmp_path)
    (tmp_path / "draft" / "prompts.json").write_text('{"prompts": [], "sources": ["gsm8k:3x2", "mbpp:9"]}')
    prompts = flat(load_calibration(config, print))
    ((name, places),) = find_learnt(pair, {}, [prompt.prompt for prompt in prompts], config.tasks, config.data)
    assert name == "the draft"
    assert sorted(prompts[i].id for i in places or ()) == [f"gsm8k-train-{i}" for i in range(3 - learnt, 3)]
    if learnt:
        with pytest.raises(SelfJudgeError, match=f"the draft was trained on {learnt} of these prompts"):
            refuse_learnt(pair, prompts, None, config, print)


def test_the_drafts_that_ship_say_what_they_were_trained_on() -> None:
    root = Path(__file__).parents[2]
    records = {
        "qwen2.5-coder-1.5b/eagle3": "eagle3-run",
        "qwen2.5-coder-1.5b/draft": "run",
        "smollm2-135m/draft": "run",
    }
    for reference, record in records.items():
        folder = draft_folder(reference)
        assert folder is not None
        run = json.loads((root / "results/drafts" / reference.partition("/")[0] / f"{record}.json").read_text())
        sources = [source for source in run["settings"]["prompts"] if not source.startswith("self")]
        assert json.loads((folder / "prompts.json").read_text()) == {"prompts": [], "sources": sources}
    judge = Judge.from_pretrained("smollm2-135m")
    assert judge.folder is not None
    named = json.loads((judge.folder / "prompts.json").read_text())["sources"]
    assert {*named, "self"} == set(judge.config.sources)


def test_a_recipe_is_refused_for_other_models(tiny_pair: Pair, tmp_path: Path) -> None:
    said: list[str] = []
    recipe = Recipe.load(recipe_folder(tmp_path / "tuned", tiny_pair))
    recipe.check_pair(tiny_pair, said.append)
    assert said == []
    for role in ("target", "draft"):
        other = replace(getattr(tiny_pair, f"{role}_model"), sha256="f" * 64)
        with pytest.raises(SelfJudgeError, match=f"recipe for the {role}"):
            recipe.check_pair(replace(tiny_pair, **{f"{role}_model": other}), said.append)
    other = copy.deepcopy(tiny_pair.tokenizer)
    other.chat_template = "{{ messages }}"
    with pytest.raises(SelfJudgeError, match="recipe for another tokenizer or chat template"):
        recipe.check_pair(replace(tiny_pair, tokenizer=other), said.append)
    int8 = replace(tiny_pair.target_model, int8=True)
    recipe.check_pair(replace(tiny_pair, target_model=int8), said.append)
    assert len(said) == 1
    assert "not covered" in said[0]


def test_a_recipe_is_refused_where_its_files_do_not_belong_together(tiny_pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(SelfJudgeError, match=r"has no recipe\.json: selfjudge tune makes one"):
        Recipe.load(tmp_path)
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "settings.json").write_text("{}")
    with pytest.raises(SelfJudgeError, match="give `resume`"):
        Recipe.load(tmp_path / "begun")
    judge = Judge(JudgeConfig(hidden_size=tiny_pair.hidden_size, target=tiny_pair.target_id))
    folder = recipe_folder(tmp_path / "tuned", tiny_pair, judge=judge)
    assert Recipe.load(folder).judge == folder / "judge"
    constant_judge(0.3, tiny_pair.hidden_size).save_pretrained(folder / "judge")
    with pytest.raises(SelfJudgeError, match="is not the file that this recipe was certified with"):
        Recipe.load(folder)
    other = recipe_folder(tmp_path / "other", tiny_pair)
    tamper(other, "certificate.json", lambda content: content.update(rule="margin:9"), sealed=True)
    with pytest.raises(SelfJudgeError, match="certificate is of another rule"):
        Recipe.load(other)


def test_a_certificate_with_a_binomial_bound_of_an_early_end_still_holds(tiny_pair: Pair, tmp_path: Path) -> None:
    """Earlier versions stated one there."""
    known = certificate()
    claim = Claim(known["epsilon"], known["evidence"]["delta"], 5000)
    evidence = describe_evidence(claim, unpack(known["candidates"][2]["differences"]), known["delta"])
    assert "lost_bound" not in evidence
    assert "binomial" not in as_text(certificate(groups="5000*1", evidence=evidence))
    assert "exact binomial bound" in as_text(known)
    stated = {"groups": "5000*1", "evidence": {**evidence, "lost_bound": 0.01}}
    Recipe.load(recipe_folder(tmp_path / "tuned", tiny_pair, **stated))


def test_the_finding_is_one_sentence() -> None:
    assert describe_result(certificate()) == (
        "margin:0.5,guard=on (γ = 3): +12 % [+7, +16] tokens/s, −0.4 [−1.3, +0.5] points, certified ≤ 3."
    )
    assert describe_result(certificate(certified=False)) == "Nothing here beats exact. Use exact (γ = 3)."
    assert "the time was up" in describe_result(certificate(certified=False, stopped=True))
    slow = describe_result(certificate(certified=False, exact_over_plain=1.0, gamma=0))
    assert slow == "Nothing here beats plain decoding. Use no drafts (γ = 0)."
    agreement = describe_result(certificate(measure="overlap"))
    assert "points of agreement (words in common with exact)" in agreement
    assert "tokens per target pass" in describe_result(certificate(speed_measure="mean_accepted_length"))
    assert "On prompts like these 4,000, at most 3.0 points are lost" in describe_claim(certificate())
    assert "1.90 × plain speed" in describe_claim(certificate())


@pytest.mark.parametrize(
    ("more", "verdict"),
    [
        ({}, "You gain 12 % in speed over exact. You lose at most 3 answers in 100, 19 times out of 20."),
        ({"delta": 0.03, "epsilon": 0.025}, "You lose at most 2.5 answers in 100, with 97 % confidence."),
        ({"measure": "same_answer"}, "At most 3 answers in 100 differ from those of exact, 19 times out of 20."),
        ({"measure": "overlap"}, "At most 3 % of the words differ from those of exact, 19 times out of 20."),
        ({"speed_measure": "mean_accepted_length"}, "12 % in tokens per target pass; the speed is not known. You"),
        ({"candidates": [{"differences": "9*0 0.25 -1"}]}, "You lose at most 3 points of 100, 19 times out of 20."),
    ],
)
def test_the_verdict_needs_no_statistics(more: dict[str, Any], verdict: str) -> None:
    assert verdict in describe_verdict(certificate(**more))


@pytest.mark.parametrize(
    ("interval", "how"),
    [
        ([0.9, 0.98], "slower (−6 % [−10, −2]"),
        ([0.97, 1.05], "not shown to be faster"),
        ([1.01, 1.03], "hardly faster"),
    ],
)
def test_a_certified_rule_that_does_not_pay_is_named_with_its_gain(interval: list[float], how: str) -> None:
    rows = certificate()["candidates"]
    rows[0] |= {"speed_ratio": sum(interval) / 2, "speed_ci": interval}
    rows = [row | ({} if row is rows[0] else {"refuted": False}) for row in rows]
    found = certificate(certified=False, candidates=rows)
    assert f"Nothing here beats exact: margin:0.1,guard=on is certified, but {how}" in describe_result(found)
    assert describe_result(found).endswith("tokens/s). Use exact (γ = 3).")
    assert describe_verdict(found) == describe_result(found)


def test_the_page_begins_with_exact_and_plain_and_ends_its_verdict_with_one_command() -> None:
    exact = {"n": 60, "score": 0.62, "without_answer": 3, "tokens_per_second": 14.23, "plain_tokens_per_second": 9.8}
    known = certificate(exact=exact)
    begin = (
        "Exact decoding scores 62.0 of 100 points on 60 prompts at 14.2 tokens/s;"
        " plain decoding, with the same answers, at 9.8 tokens/s."
    )
    assert describe_baseline(known) == begin
    agreement = certificate(measure="overlap", exact={**exact, "score": None, "plain_tokens_per_second": None})
    assert describe_baseline(agreement).endswith(", at 14.2 tokens/s.")
    assert describe_baseline(certificate()) == "Rules are compared with exact on 4,000 prompts by the task's score."
    text, page = as_text(known), certificate_page(known, [])
    order = [begin, "You gain 12 %", "−0.4 [−1.3, +0.5] points", "selfjudge serve --recipe .", "Inside vLLM"]
    for shown in (text, page):
        places = [shown.index(words) for words in order]
        assert places == sorted(places)
    (box,) = re.findall(r'<pre class="commands">(.*?)</pre>', page)
    assert box == "selfjudge serve --recipe ."
    plain = as_text(certificate(rule="exact", resolved="exact", certified=False, gamma=0))
    assert "Inside vLLM" not in plain


def test_unreliable_speeds_are_said_instead_of_a_ranking() -> None:
    busy = "this machine is busy: speeds are not reliable (other programs took 1.5 of 2 cores)"
    doubt: dict[str, Any] = {"unreliable": busy, "speed_measure": "mean_accepted_length", "exact_over_plain": None}
    again = f" Speeds were not compared: {busy}. Run it again with --resume: the answers are kept."
    assert describe_result(certificate(**doubt)) == (
        "margin:0.5,guard=on (γ = 3): +12 % [+7, +16] tokens per target pass, −0.4 [−1.3, +0.5] points,"
        f" certified ≤ 3.{again}"
    )
    assert "plain speed" not in describe_claim(certificate(**doubt))
    nothing = certificate(certified=False, **doubt)
    assert describe_result(nothing) == f"Nothing here beats exact. Use exact (γ = 3). Speeds are not stated: {busy}."
    assert describe_claim(nothing) == "Exact decoding loses nothing. No relaxed rule was tested."
    tested = {**nothing, "candidates": [{**nothing["candidates"][0], "n_used": 9}]}
    assert "No relaxed rule was certified to lose at most 3.0 points" in describe_claim(tested)
    certified = {**nothing, "candidates": certificate()["candidates"]}
    certified["candidates"][0] |= {"speed_ratio": 1.02, "speed_ci": [1.01, 1.04]}
    certified["candidates"][1:] = []
    assert describe_result(certified) == (
        "Nothing here beats exact: margin:0.1,guard=on is certified, but hardly faster (+2 % [+1, +4] tokens per target"
        f" pass). Use exact (γ = 3).{again}"
    )
    assert "none is surely ahead in tokens per target pass and gains 5 % or more." in describe_claim(certified)
    timed = {**certified, "unreliable": "", "speed_measure": "tokens_per_second"}
    assert "none is surely faster and gains 3 % or more." in describe_claim(timed)
    assert "Nothing to gain for some-pair" in as_text(certified)
    text = as_text(certificate(**doubt))
    assert text.count(busy) == 1
    assert "m × exact" in text
    assert "in turn" not in text
    assert "answered the same batches in turn" in as_text(certificate())


def test_it_is_said_where_there_is_little_to_lose() -> None:
    def said(**exact: Any) -> str:
        return describe_doubt(certificate(exact={"n": 60, "score": 0.6, "without_answer": 3, **exact}))

    assert said() == said(score=None) == describe_doubt(certificate()) == ""
    assert "exact itself scores 5.0 of 100 points and 3 of its 60 outputs contain no extractable answer" in said(
        score=0.05
    )
    assert "exact itself scores 5.0 of 100 points. Its answers are extracted, and wrong" in said(
        score=0.05, without_answer=0
    )
    assert "Let prompts ask for an answer that can be extracted" in said(without_answer=40)
    assert "40 of its 60 outputs contain no extractable answer" in said(without_answer=40)
    assert "39 of these were cut off at the length limit: raise --max-new-tokens" in said(without_answer=40, cut_off=39)
    assert "cut off" not in said(without_answer=40, cut_off=1)
    poor = certificate(exact={"n": 60, "score": 0.0, "without_answer": None})
    text, page = as_text(poor), certificate_page(poor, [])
    assert text.index("There is little to lose here") < text.index("margin:0.5")  # above the finding
    assert page.index("There is little to lose here") < page.index("What is claimed")
    assert page.count("There is little to lose here") == 1


def test_a_certificate_for_nothing_does_not_look_like_one() -> None:
    nothing = certificate(certified=False)
    for text in (as_text(nothing), certificate_page(nothing, [])):
        assert "Nothing certified for some-pair" in text
        assert "Certificate for" not in text
    page = certificate_page(nothing, [])
    assert page.count("Rules that were tried") == 1  # its heading
    untried = [row["rule"] for row in nothing["candidates"]]
    (folded,) = re.findall(r'<details class="untried"><summary>(.*?)</summary><p>(.*?)</p>', page)
    assert folded[0] == f"{len(untried)} rules were not tried"
    assert all(rule in folded[1] for rule in untried)
    assert "<tbody>" not in page


def test_the_certificate_names_what_it_is_bound_to() -> None:
    text = as_text(certificate())
    assert "Families (margin, topk) have equal shares" in text
    assert "Families (margin) have equal shares" in as_text(certificate(families=["margin"]))
    words = (
        "f" * 64,
        "topk:5",
        "not tried",
        "selfjudge serve --recipe .",
        "certified after 300 prompts",
        "Attempt 1 on",
    )
    for word in words:
        assert word in text
    grouped = as_text(certificate(groups="3998*1 2"))
    assert "On groups of prompts like these 4,000" in grouped
    assert "in the mean over groups of equal weight" in grouped


@pytest.mark.parametrize(
    ("outcome", "unit", "said"),
    [
        ({"certified": True}, "prompt", "certified after 1 prompt"),
        ({"needed": 3}, "group", "not certified: 1 group is too few for the loss shown, about 3 would be enough"),
        ({"stopped": True}, "prompt", "undecided: the time was up after 1 prompt"),
    ],
)
def test_one_observation_is_called_so(outcome: dict[str, Any], unit: str, said: str) -> None:
    usual = {"needed": None, "tried": True, "certified": False, "stopped": False, "decision": {"refuted_at": 1}}
    assert remark("why", usual | outcome, 1, unit) == said


def test_one_minute_is_called_so() -> None:
    said = remark("late", {"minutes": 1.0, "max_new_tokens": 5}, 1.2, 4)
    assert said.startswith("1 minute may be too few: if answers have 5 tokens, there is time for about 1 prompt, under")
