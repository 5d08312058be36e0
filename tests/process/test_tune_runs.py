"""Whole runs of `tune` on a tiny pair: what is certified, going on after a break, the time, the recipe elsewhere."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from markupsafe import Markup

from fake_certificate import RESOLVED, certificate, example, page_text, recipe_folder, tamper
from remember import remember_answers
from runs import content, prompts_file, random_judges
from selfjudge.cli import main as cli
from selfjudge.cli.options import PairOptions, Setup
from selfjudge.decoding.rule_parser import OPEN_REQUEST, RuleRequest, rule_text
from selfjudge.errors import SelfJudgeError
from selfjudge.evaluate.execute import TorchAnswerer
from selfjudge.judge.model import Judge
from selfjudge.models.pair import Pair
from selfjudge.report.certificate import certificate_page, describe_baseline, describe_result
from selfjudge.store.run_folder import LoadWatch
from selfjudge.tune.certify import Claim, decide, share_delta
from selfjudge.tune.config import TuneConfig
from selfjudge.tune.pipeline import tune_pair
from selfjudge.tune.recipe import Recipe
from selfjudge.tune.trials import Tuning


@pytest.fixture(scope="module", autouse=True)
def answered_once() -> Iterator[None]:
    """Most runs here ask the same questions; what certificates look like is tried elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        remember_answers(patch)
        patch.setattr("selfjudge.report.certificate.draw", lambda chart: Markup("<svg></svg>"))
        yield


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts whose answer no tiny model finds: no rule changes a score."""
    asked = prompts_file(tmp_path_factory.mktemp("prompts") / "asked.jsonl", 30)
    rows = [{**json.loads(line), "answer": "7"} for line in asked.read_text().splitlines()]
    file = asked.with_name("scored.jsonl")
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def config(scored: Path) -> TuneConfig:
    return TuneConfig(
        prompts=scored,
        epsilon=0.3,
        families=("margin", "topk"),
        gamma=3,
        max_new_tokens=8,
        batch=5,
        times=False,
        strict_start=0,
    )


@pytest.fixture(scope="module")
def undisturbed(tiny_pair: Pair, config: TuneConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tune_pair(tiny_pair, tmp_path_factory.mktemp("tune") / "tuned", config).folder


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The rule of every batch that is decoded."""
    seen: list[str] = []
    original = TorchAnswerer.answer

    def counted(self: TorchAnswerer, prompts: Any, run: Any, *arguments: Any, **how: Any) -> Any:
        seen.append(run.rule.name)
        return original(self, prompts, run, *arguments, **how)

    monkeypatch.setattr(TorchAnswerer, "answer", counted)
    return seen


def test_the_fastest_certified_rule_is_taken(undisturbed: Path) -> None:
    recipe = Recipe.load(undisturbed)
    certificate = recipe.certificate
    assert certificate["certified"]
    assert (certificate["n"], certificate["lost"], certificate["gained"]) == (30, 0, 0)
    assert certificate["mean_difference"] == 0
    assert certificate["evidence"]["delta"] == pytest.approx(share_delta(0.05, 1) / 2)  # two families share δ
    assert (certificate["groups"], certificate["attempt"], certificate["earlier_attempts"]) == ("30*1", 1, [])
    assert certificate["exact"]["n"] == 30
    assert certificate["exact"]["score"] == 0  # a model of random weights
    assert "There is little to lose here" in page_text((undisturbed / "certificate.html").read_text())
    tried = [row for row in certificate["candidates"] if row["n_used"]]
    assert all(row["refuted"] for row in tried)
    best = max(tried, key=lambda row: row["speed_ci"][0])
    assert recipe.content["rule"] == best["rule"]
    served = rule_text(RuleRequest(best["rule"], strict_start=0, strict_code=True).resolve())
    assert recipe.rule == served  # with the guards that it was certified with
    scope = certificate["scope"]
    assert scope["structured"][0] == 0 < scope["structured"][1] < 0.3
    assert 0 < scope["passes_per_token"][0] < scope["passes_per_token"][1] <= 1
    assert best["speed_ci"][0] > 1
    assert best["n_used"] == 30
    assert all(row["n_used"] < 30 for row in tried if row is not best)  # ended as soon as decided
    assert certificate["evidence"]["log_capital"][-1][1] >= certificate["evidence"]["goal"]
    assert not (undisturbed / "work").exists()
    page = (undisturbed / "certificate.html").read_text()
    assert recipe.rule in page
    assert "selfjudge serve --recipe . --backend vllm" in page_text((undisturbed / "certificate.html").read_text())


def test_a_finished_run_returns_at_once(
    tiny_pair: Pair, config: TuneConfig, undisturbed: Path, decoded: list[str]
) -> None:
    before = content(undisturbed)
    assert tune_pair(tiny_pair, undisturbed, config).content == Recipe.load(undisturbed).content
    assert decoded == []
    assert content(undisturbed) == before


@pytest.mark.parametrize("after", [9, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1, 4))])
def test_broken_off_and_gone_on_with_it_ends_in_the_same_bytes(
    tiny_pair: Pair, config: TuneConfig, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    original, calls = TorchAnswerer.answer, 0

    def breaking(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise KeyboardInterrupt
        return original(*arguments, **options)

    out = tmp_path / "tuned"
    with monkeypatch.context() as patch:
        patch.setattr(TorchAnswerer, "answer", breaking)
        with pytest.raises(KeyboardInterrupt):
            tune_pair(tiny_pair, out, config)
    assert not (out / "recipe.json").exists()
    tune_pair(tiny_pair, out, config)
    assert content(out) == content(undisturbed)


@pytest.mark.slow
def test_a_call_answers_several_batches_and_each_is_kept(
    tiny_pair: Pair, config: TuneConfig, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are refilled: a call takes more prompts the more were tested; the parts stay a batch each."""
    original, asked = TorchAnswerer.answer, list[tuple[str, int, int | None]]()

    def answer(self: TorchAnswerer, prompts: Any, run: Any, *more: Any, **how: Any) -> Any:
        asked.append((run.rule.name, len(prompts), how["batch"]))
        if len(asked) > 4:
            raise KeyboardInterrupt
        return original(self, prompts, run, *more, **how)

    out, slow = tmp_path / "tuned", replace(config, epsilon=0.2)
    with monkeypatch.context() as patch:
        patch.setattr(TorchAnswerer, "answer", answer)
        with pytest.raises(KeyboardInterrupt):
            tune_pair(tiny_pair, out, slow)
    assert asked[:4] == [("exact", 5, 5), ("margin", 5, 5), ("exact", 10, 5), ("margin", 10, 5)]
    parts = sorted((out / "work").glob("*.jsonl"))
    assert [part.name[-8:-6] for part in parts] == ["00", "01", "02"] * 2
    assert {len(part.read_text().splitlines()) for part in parts} == {5}
    tune_pair(tiny_pair, out, slow)
    monkeypatch.setenv("SELFJUDGE_LEDGER", str(tmp_path / "other"))  # a first attempt, too
    whole = tune_pair(tiny_pair, tmp_path / "whole", slow)
    assert content(out) == content(whole.folder)


def test_a_call_takes_what_the_time_and_the_bet_leave() -> None:
    trial: Any = SimpleNamespace(certified=False, claim=Claim(0.1, 0.05, 400), observations=[0.0] * 24)
    tuning: Any = SimpleNamespace(job=SimpleNamespace(sizes=[1] * 400, batch=8), pace=1.0)
    soonest = decide(trial.claim, trial.observations).soonest
    assert soonest is not None

    def count(number: int, seconds: float) -> int:
        return Tuning._count_parts(tuning, trial, number, time.monotonic() + seconds)

    assert count(3, 1e6) == 4
    assert count(20, 1e6) == max(1, -(-soonest // 8) - 20)
    assert count(3, 8.5) == 2  # two seconds each, in half of the time
    assert count(3, 0.0) == 1
    tuning.pace = math.inf
    assert count(3, 1e6) == 1  # how long a batch takes is not known yet
    trial.certified, tuning.pace = True, 1.0
    assert count(49, 1e6) == 1
    assert count(30, 1e6) == 20


def test_killed_while_the_answers_are_removed_the_next_call_removes_them(
    tiny_pair: Pair, config: TuneConfig, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaking(folder: Path, **options: Any) -> None:
        next(folder.glob("*.jsonl")).unlink()
        raise KeyboardInterrupt

    out = tmp_path / "tuned"
    with monkeypatch.context() as patch:
        patch.setattr("selfjudge.tune.pipeline.shutil.rmtree", breaking)
        with pytest.raises(KeyboardInterrupt):
            tune_pair(tiny_pair, out, config)
    assert list((out / "work").iterdir())
    tune_pair(tiny_pair, out, config)
    assert content(out) == content(undisturbed)


def test_when_the_time_is_up_it_says_what_stays_open_and_goes_on_later(
    tiny_pair: Pair, config: TuneConfig, undisturbed: Path, tmp_path: Path
) -> None:
    out = tmp_path / "tuned"
    short = tune_pair(tiny_pair, out, replace(config, minutes=1e-9))
    assert short.rule == "exact"
    assert short.certificate["stopped"]
    assert "the time was up" in short.certificate["candidates"][0]["why"]
    assert tune_pair(tiny_pair, out, replace(config, minutes=1e-9)).rule == "exact"
    later = tune_pair(tiny_pair, out, config)
    assert (later.rule, later.gamma) == (Recipe.load(undisturbed).rule, 3)
    assert not later.certificate["stopped"]


def test_agreement_is_certified_where_nothing_can_be_scored(
    tiny_pair: Pair, config: TuneConfig, scored: Path, tmp_path: Path
) -> None:
    recipe = tune_pair(tiny_pair, tmp_path / "t", replace(config, prompts=scored.with_name("asked.jsonl")))
    certificate = recipe.certificate
    assert certificate["measure"] == "overlap"
    for row in certificate["candidates"]:
        if row["n_used"] and not row["refuted"]:
            assert row["mean_difference"] < 0
            assert "not certified" in row["why"]
    if not certificate["certified"]:
        assert "Nothing here beats exact" in page_text((tmp_path / "t" / "certificate.html").read_text())


def cheap_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten drafts of one row take as long as the pass that verifies them; every row takes as long again."""

    def costs(self: TorchAnswerer, prompts: Any, most: int) -> list[float]:
        return [len(prompts) * (1 + 0.1 * drafts) for drafts in range(most + 1)]

    monkeypatch.setattr(TorchAnswerer, "costs", costs)


@pytest.mark.slow
def test_each_rule_has_its_own_gamma_at_each_load(
    tiny_pair: Pair, config: TuneConfig, tmp_path: Path, decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are chosen on prompts set aside. One certificate has a row for each load, and is verified whole."""
    monkeypatch.setattr(LoadWatch, "describe", lambda self, turns=(): "")  # whatever else this machine does

    def costs(self: TorchAnswerer, prompts: Any, most: int) -> list[float]:  # of many rows drafts cost much
        return [1 + (0.01 if len(prompts) == 1 else 0.5) * drafts for drafts in range(most + 1)]

    monkeypatch.setattr(TorchAnswerer, "costs", costs)
    said: list[str] = []
    timed = replace(config, times=True, gamma=None, families=("margin", "priced", "fly"), epsilon=0.5, load=(4, 1))
    recipe = tune_pair(tiny_pair, tmp_path / "t", timed, warn=said.append)
    certificate = recipe.certificate
    assert len(said) == 2  # the draft does not say what it was trained on; what so many prompts can certify
    speeds = {(row["load"], row["rule"], row["gamma"]): row["tokens_per_second"] for row in certificate["speeds"]}
    assert {gamma for _, rule, gamma in speeds if rule == "exact"} == {1, 2, 3, 5, 8}
    assert {load for load, *_ in speeds} == {1, 4}
    tested = [row for row in certificate["candidates"] if row["n_used"]]
    assert tested
    for row in tested:
        for load in row["loads"]:
            own = {gamma: rate for (at, rule, gamma), rate in speeds.items() if (at, rule) == (load, row["rule"])}
            assert max(own, key=lambda gamma: own[gamma]) == row["gamma"]
    assert max(row["gamma"] for row in tested if 1 in row["loads"]) > 1  # drafts are cheap there
    assert max(row["n_used"] for row in certificate["candidates"]) <= 27  # three were set aside
    assert (recipe.loads, recipe.content["load"]) == ([4, 1], 4)
    assert [row["load"] for row in certificate["more_loads"]] == [1]
    for load, fitting in ((1, 1), (3, 4), (100, 4)):
        own = Recipe.load(recipe.folder).at(load)
        assert (own.content["load"], own.certificate["load"], own.loads[0]) == (fitting, fitting, fitting)
        assert sorted(own.loads) == [1, 4]
        (row,) = [row for row in (certificate, *certificate["more_loads"]) if row["load"] == fitting]
        assert (own.content["rule"], own.gamma) == (row["rule"], row["gamma"])
        request = Setup.of(recipe.folder, PairOptions(), OPEN_REQUEST, load).request
        assert (request.rule, request.gamma) == (own.rule, own.gamma)
    page = (recipe.folder / "certificate.html").read_text()
    assert "requests at a time" in page
    tune_pair(tiny_pair, tmp_path / "short", replace(timed, minutes=1e-9), warn=said.append)
    assert "1e-09 minutes may be too few" in said[-1]


def test_rules_that_cannot_gain_are_not_tested(
    tiny_pair: Pair, config: TuneConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where drafts cost as much as passes, plain decoding is left, and no prompt is spent on a rule."""
    monkeypatch.setattr(LoadWatch, "describe", lambda self, turns=(): "")
    monkeypatch.setattr(TorchAnswerer, "costs", lambda self, prompts, most: [1 + 9.0 * d for d in range(most + 1)])
    recipe = tune_pair(tiny_pair, tmp_path / "t", replace(config, times=True, gamma=None, epsilon=0.35))
    certificate = recipe.certificate
    assert (recipe.rule, certificate["families"]) == ("exact", [])
    assert {row["n_used"] for row in certificate["candidates"]} == {0}
    assert "not expected to be faster" in certificate["candidates"][0]["why"]
    assert describe_baseline(certificate).startswith("No rule was tested: none is expected to be faster than exact")
    assert Recipe.load(recipe.folder).gamma == recipe.gamma


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers take a second; those of margins half of that."""
    original = TorchAnswerer.answer

    def answer(self: TorchAnswerer, prompts: Any, run: Any, *more: Any, **how: Any) -> Any:
        answers, seconds = original(self, prompts, run, *more, **how)
        return answers, {**seconds, "total": 0.5 if run.rule.name == "margin" else 1.0}

    monkeypatch.setattr(TorchAnswerer, "answer", answer)


@pytest.mark.slow
def test_speeds_of_a_busy_machine_are_measured_again_later(
    tiny_pair: Pair,
    config: TuneConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    timed: None,
    decoded: list[str],
) -> None:
    """Until then expected speeds choose, and nothing is called slow. The bets stay what they are."""
    busy = "this machine is busy: speeds are not reliable (a test)"
    monkeypatch.setattr(LoadWatch, "describe", lambda self, turns=(): busy)
    cheap_drafts(monkeypatch)
    timing = replace(config, times=True, gamma=None, epsilon=0.35, max_new_tokens=24)
    first = tune_pair(tiny_pair, tmp_path / "t", timing)
    found = first.certificate
    assert (found["unreliable"], found["speed_measure"]) == (busy, "expected_tokens_per_second")
    assert (found["exact"]["tokens_per_second"], found["exact"]["plain_tokens_per_second"]) == (None, None)
    assert found["certified"]
    best = max((row for row in found["candidates"] if row["refuted"]), key=lambda row: row["speed_ci"][0])
    assert found["rule"] == best["rule"]
    assert all(row["tokens_per_second"] is None for row in found["candidates"])
    assert f"Speeds were not compared: {busy}. Run it again" in (first.folder / "certificate.html").read_text()
    assert (first.folder / "work").is_dir()
    decoded.clear()
    tune_pair(tiny_pair, tmp_path / "t", timing)
    assert set(decoded) == {"exact", *(rule.partition(":")[0] for rule in chosen_rules(found))}
    monkeypatch.setattr(LoadWatch, "describe", lambda self, turns=(): "")
    second = tune_pair(tiny_pair, tmp_path / "t", timing)
    later = second.certificate
    assert (later["unreliable"], later["speed_measure"]) == ("", "tokens_per_second")
    assert second.rule.startswith("margin")
    assert later["speed_ratio"] > 1.5
    assert later["exact_over_plain"] is not None
    compared = [row for row in later["candidates"] if row["tokens_per_second"] is not None]
    assert [row["rule"] for row in compared if row["speed_ci"] is None] == []
    assert 1 <= len(compared) <= 2
    for row, other in zip(found["candidates"], later["candidates"], strict=True):
        assert (row["rule"], row["refuted"], row["gamma"]) == (other["rule"], other["refuted"], other["gamma"])
    assert not (second.folder / "work").exists()
    decoded.clear()
    assert tune_pair(tiny_pair, tmp_path / "t", timing).content == second.content
    assert decoded == []


@pytest.mark.parametrize(
    ("seconds", "gamma", "finding"),
    [
        ({"plain": 2.0, "margin": 0.98, "topk": 0.99}, 3, "Nothing here beats exact: margin:"),
        pytest.param(
            {"plain": 0.5, "margin": 0.98, "topk": 0.99},
            0,
            "Nothing here beats plain decoding: margin:",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_rule_that_hardly_gains_is_not_taken(
    tiny_pair: Pair,
    config: TuneConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seconds: dict[str, float],
    gamma: int,
    finding: str,
) -> None:
    """Where plain decoding is the fastest, the recipe makes no drafts."""
    original = TorchAnswerer.answer

    def answer(self: TorchAnswerer, prompts: Any, run: Any, *more: Any, **how: Any) -> Any:
        answers, _ = original(self, prompts, run, *more, **how)
        tokens = sum(len(answer.tokens) for answer in answers)
        return answers, {"total": tokens * seconds.get(run.rule.name if run.gamma else "plain", 1.0)}

    monkeypatch.setattr(TorchAnswerer, "answer", answer)
    monkeypatch.setattr(LoadWatch, "describe", lambda self, turns=(): "")
    recipe = tune_pair(tiny_pair, tmp_path / "t", replace(config, times=True, epsilon=0.35))
    assert any(row["refuted"] for row in recipe.certificate["candidates"])
    assert (recipe.rule, recipe.gamma, recipe.certificate["certified"]) == ("exact", gamma, False)
    assert describe_result(recipe.certificate).startswith(finding)
    assert f"Use {'exact' if gamma else 'no drafts'} (γ = {gamma})." in page_text(
        (recipe.folder / "certificate.html").read_text()
    )
    assert Setup.of(recipe.folder, PairOptions(), OPEN_REQUEST).request.gamma == gamma


def chosen_rules(certificate: dict[str, Any]) -> list[str]:
    """The certified rules that were compared: those with the largest expected speeds."""
    certified = [row for row in certificate["candidates"] if row["refuted"]]
    return [row["rule"] for row in sorted(certified, key=lambda row: row["speed_ci"][0], reverse=True)[:2]]


def test_progress_is_the_share_of_the_time_where_that_is_larger() -> None:
    """So the time that is said to be left is never longer than the limit."""
    said: list[float] = []
    for minutes in (3.0, float("inf"), 0.5):
        begun = time.monotonic() - 90
        run: Any = SimpleNamespace(
            begun=begun,
            deadline=begun + 60 * minutes,
            tested_until=0.0,
            job=SimpleNamespace(prompts=[None] * 4),
            notify=lambda _, share: said.append(share),
            _decode_next=lambda trial, until: False,
        )
        Tuning._test(run, SimpleNamespace(rule="margin:1", gamma=3, differences=[], stopped=False), 1, 100)
    assert 0.5 <= said[0] <= 1
    assert said[1:] == [0.01, 1.0]


@pytest.mark.slow
def test_a_family_that_gamma_excludes_has_no_share_of_delta(
    tiny_pair: Pair, config: TuneConfig, tmp_path: Path, decoded: list[str]
) -> None:
    said: list[str] = []
    small = replace(config, gamma=2, families=("margin", "fly"))
    certificate = tune_pair(tiny_pair, tmp_path / "t", small, warn=said.append).certificate
    assert "confidence over 1 family" in said[1]
    assert said[2] == (
        "γ = 2: rules of the family fly are not tested (fly with window 2 needs `gamma` > 2, not 2:"
        " no mismatch could be confirmed)"
    )
    assert certificate["families"] == ["margin"]
    assert certificate["evidence"]["delta"] == share_delta(small.delta, 1)
    flies = [row for row in certificate["candidates"] if row["family"] == "fly"]
    assert len(flies) == 4
    assert all("not tried: fly with window 2" in row["why"] for row in flies)
    assert "fly" not in decoded
    assert "Families (margin) have equal shares" in page_text((tmp_path / "t" / "certificate.html").read_text())


def test_named_rules_are_tested_in_their_order_under_the_whole_delta(
    tiny_pair: Pair, config: TuneConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoadWatch, "describe", lambda self, turns=(): "")
    cheap_drafts(monkeypatch)
    rules, out = ("topk:3", "margin:price=0.4", "margin:0.1"), tmp_path / "t"
    named = replace(config, families=TuneConfig().families, rules=rules, gamma=None, times=True, load=(4, 1))
    said: list[str] = []
    tune_pair(tiny_pair, out, named, warn=said.append)
    assert any("confidence over 1 family" in line for line in said)
    assert not any("no judge" in line for line in said)
    certificate = Recipe.load(out).certificate
    assert certificate["families"] == ["rules"]
    tried = [row["rule"] for row in certificate["candidates"]]
    assert list(dict.fromkeys(tried)) == [f"{rule},guard=on" for rule in rules]
    assert {tuple(row["loads"]) for row in certificate["candidates"]} <= {(4, 1), (4,), (1,)}
    tested = [row for row in certificate["candidates"] if row["n_used"]]
    assert [row["rule"] for row in tested] == tried[: len(tested)]
    assert all(row["refuted"] for row in tested)  # no score of this model changes
    assert certificate["evidence"] is None or certificate["evidence"]["delta"] == share_delta(named.delta, 1)
    assert "were named for this run" in page_text((out / "certificate.html").read_text())
    for others in (rules[::-1], rules[:2]):
        with pytest.raises(SelfJudgeError, match="begun with another rules:"):
            tune_pair(tiny_pair, out, replace(named, rules=others))
    with pytest.raises(SelfJudgeError, match="begun with another families:"):
        tune_pair(tiny_pair, out, replace(named, rules=None))
    again = tune_pair(tiny_pair, tmp_path / "again", replace(named, rules=rules[::-1]))
    assert again.certificate["attempt"] == 2  # on the same prompts: the ledger knows them


def test_a_judged_recipe_carries_its_judge(
    tiny_pair: Pair, config: TuneConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    judge = random_judges(tiny_pair.hidden_size)["mine"]
    judge.config = replace(judge.config, target=tiny_pair.target_id)
    said: list[str] = []
    monkeypatch.setattr(Judge, "cpu", lambda _: pytest.fail("a judge that captured graphs may read has moved"))
    recipe = tune_pair(tiny_pair, tmp_path / "t", replace(config, families=("judged",)), judge=judge, warn=said.append)
    assert any("cannot be checked" in line for line in said)
    assert recipe.rule.startswith("judged:")
    assert recipe.judge is not None
    monkeypatch.setattr(sys, "argv", ["selfjudge", "generate", "w5 w6", "--recipe", str(recipe.folder), "--json"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["rule"], answer["gamma"]) == (recipe.rule, 3)


def test_another_engine_or_other_prompts_are_refused(
    tiny_pair: Pair, config: TuneConfig, scored: Path, tmp_path: Path
) -> None:
    out = tmp_path / "t"
    tune_pair(tiny_pair, out, replace(config, minutes=1e-9))
    settings = json.loads((out / "settings.json").read_text())
    (out / "settings.json").write_text(json.dumps({**settings, "engine": "cuda"}))
    with pytest.raises(SelfJudgeError, match="begun with another engine"):
        tune_pair(tiny_pair, out, config)
    (out / "settings.json").write_text(json.dumps(settings))
    for name in ("groups", "tokenizer", "judge"):
        (out / "settings.json").write_text(json.dumps({**settings, name: "another"}))
        with pytest.raises(SelfJudgeError, match=f"begun with another {name}:"):
            tune_pair(tiny_pair, out, config)
    (out / "settings.json").write_text(json.dumps(settings))
    with pytest.raises(SelfJudgeError, match=r"begun with another .*prompts_sha256"):
        tune_pair(tiny_pair, out, replace(config, prompts=scored.with_name("asked.jsonl"), measure="overlap"))
    with pytest.raises(SelfJudgeError, match=r"cannot certify `epsilon` 0\.05"):
        tune_pair(tiny_pair, tmp_path / "new", replace(config, epsilon=0.05))
    assert not (tmp_path / "new").exists()


def test_groups_of_prompts_are_one_observation_each(
    tiny_pair: Pair, config: TuneConfig, scored: Path, tmp_path: Path
) -> None:
    rows = [json.loads(line) for line in scored.read_text().splitlines()]
    file = tmp_path / "grouped.jsonl"
    file.write_text("".join(json.dumps({**row, "group": i // 2}) + "\n" for i, row in enumerate(rows)))
    said: list[str] = []
    with pytest.raises(SelfJudgeError, match=r"15 prompts cannot certify `epsilon` 0\.2"):
        tune_pair(tiny_pair, tmp_path / "few", replace(config, prompts=file, epsilon=0.2))
    loose = replace(config, prompts=file, epsilon=0.6, families=("margin",))
    recipe = tune_pair(tiny_pair, tmp_path / "t", loose, warn=said.append)
    assert "30 prompts have 15 groups by their `group`: each group counts once" in said
    assert any(line.startswith("30 prompts in 15 groups, at most 60 points lost") for line in said)
    certificate = Recipe.load(recipe.folder).certificate
    assert certificate["groups"] == "15*2"
    best = next(row for row in certificate["candidates"] if row["rule"] == certificate["rule"])
    assert (certificate["n"], best["n_used"], best["differences"]) == (15, 30, "30*0")
    assert certificate["evidence"]["refuted_at"] <= 15
    assert "On groups of prompts like these 15" in page_text((recipe.folder / "certificate.html").read_text())


@pytest.mark.slow
def test_a_second_attempt_on_the_same_prompts_spends_its_own_share(
    tiny_pair: Pair, config: TuneConfig, tmp_path: Path
) -> None:
    small = replace(config, families=("margin",))
    tune_pair(tiny_pair, tmp_path / "first", replace(small, minutes=1e-9))
    assert tune_pair(tiny_pair, tmp_path / "first", small).certificate["attempt"] == 1  # resumed
    tune_pair(tiny_pair, tmp_path / "first", small)  # finished
    said: list[str] = []
    again = tune_pair(tiny_pair, tmp_path / "again", replace(small, epsilon=0.5, limit=20), warn=said.append)
    assert any(line.startswith("attempt 2 on these prompts (the last one on 20") for line in said)
    certificate = again.certificate
    assert (certificate["attempt"], len(certificate["earlier_attempts"])) == (2, 1)
    assert certificate["evidence"]["delta"] == share_delta(0.05, 2)
    assert "Attempt 2 on these prompts" in page_text((again.folder / "certificate.html").read_text())
    with pytest.raises(
        SelfJudgeError, match=r"^attempt 3 on these prompts .* 30 prompts cannot certify `epsilon` 0\.2"
    ):
        tune_pair(tiny_pair, tmp_path / "third", replace(small, epsilon=0.2))
    assert not (tmp_path / "third").exists()


def test_a_folder_keeps_its_attempt_when_the_ledger_is_removed(
    tiny_pair: Pair, config: TuneConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = replace(config, families=("margin",), epsilon=0.5, minutes=1e-9)
    monkeypatch.setenv("SELFJUDGE_LEDGER", str(tmp_path / "ledger.jsonl"))
    tune_pair(tiny_pair, tmp_path / "first", small)
    assert tune_pair(tiny_pair, tmp_path / "second", small).certificate["attempt"] == 2
    (tmp_path / "ledger.jsonl").unlink()
    assert tune_pair(tiny_pair, tmp_path / "second", replace(small, minutes=None)).certificate["attempt"] == 2


def test_another_judge_is_no_resumption_and_one_without_a_target_is_refused(
    tiny_pair: Pair, config: TuneConfig, tmp_path: Path
) -> None:
    judge = random_judges(tiny_pair.hidden_size)["mine"]
    judged = replace(config, families=("judged",), minutes=1e-9)
    judge.config = replace(judge.config, target="", target_sha256="")
    with pytest.raises(SelfJudgeError, match="this judge names no target"):
        tune_pair(tiny_pair, tmp_path / "t", judged, judge=judge)
    assert not (tmp_path / "t").exists()
    judge.config = replace(judge.config, target=tiny_pair.target_id)
    tune_pair(tiny_pair, tmp_path / "t", judged, judge=judge)
    tune_pair(tiny_pair, tmp_path / "t", judged, judge=judge)
    with pytest.raises(SelfJudgeError, match="begun with another judge:"):
        tune_pair(tiny_pair, tmp_path / "t", judged, judge=Judge(judge.config, weight=2 * judge.weight))


def test_what_does_not_hold_is_neither_signed_nor_returned(
    tiny_pair: Pair, config: TuneConfig, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signed: list[Path] = []
    monkeypatch.setattr("selfjudge.tune.pipeline.sign", lambda folder, *_: signed.append(folder))
    monkeypatch.setattr("selfjudge.tune.config.read_key", lambda file, kind: None)
    copied = Path(shutil.copytree(undisturbed, tmp_path / "finished"))
    tune_pair(tiny_pair, copied, replace(config, sign=tmp_path / "key"))
    assert signed == [copied]
    tamper(copied, "certificate.json", lambda content: content.update(lost=1), sealed=True)
    with pytest.raises(SelfJudgeError, match="lost of the certificate does not follow"):
        tune_pair(tiny_pair, copied, replace(config, sign=tmp_path / "key"))
    assert signed == [copied]


def test_a_run_signs_its_recipe(tiny_pair: Pair, config: TuneConfig, undisturbed: Path, tmp_path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "key")], check=True)
    signing = replace(config, sign=tmp_path / "key")
    recipe = tune_pair(tiny_pair, tmp_path / "t", signing)
    assert [*recipe.verify(tmp_path / "key.pub")][-1] == f"signed with {tmp_path / 'key.pub'}"
    copied = Path(shutil.copytree(undisturbed, tmp_path / "finished"))
    assert [*tune_pair(tiny_pair, copied, signing).verify(tmp_path / "key.pub")]
    with pytest.raises(SelfJudgeError, match="is not a private Ed25519 key"):
        tune_pair(tiny_pair, tmp_path / "u", replace(config, sign=tmp_path / "key.pub"))


def test_a_recipe_elsewhere(
    checkpoints: dict[str, str],
    tiny_pair: Pair,
    scored: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    folder = str(recipe_folder(tmp_path / "tuned", tiny_pair))

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["selfjudge", *words])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code, *capsys.readouterr()  # type: ignore[return-value]

    code, out, _ = run(
        "eval", "--tasks", f"file:{scored}", "--limit", "4", "--max-new-tokens", "8", "--recipe", folder,
        "--out", str(tmp_path / "eval"), "--json",
    )  # fmt: skip
    assert code == 0
    assert [(row["rule"], row["gamma"]) for row in json.loads(out)] == [("exact", 3), (RESOLVED, 3)]
    code, out, _ = run(
        "bench", "decode", "--recipe", folder, "--no-peers", "--repeats", "1", "--limit", "1", "--max-new-tokens", "8",
        "--prompts", str(scored), "--json",
    )  # fmt: skip
    assert code == 0
    assert [(row["name"], row["gamma"]) for row in json.loads(out)["runs"]][-1] == ("selfjudge-recipe", 3)
    plain = str(recipe_folder(tmp_path / "plain", tiny_pair, rule="exact", certified=False, gamma=0))
    code, out, _ = run("generate", "w5", "--recipe", plain, "--max-new-tokens", "8", "--json")
    assert (code, json.loads(out)["gamma"], set(json.loads(out)["origins"])) == (0, 0, {"target"})
    code, out, _ = run(
        "bench", "decode", "--recipe", plain, "--no-peers", "--repeats", "1", "--limit", "1", "--max-new-tokens", "8",
        "--prompts", str(scored), "--json",
    )  # fmt: skip
    assert (code, {row["gamma"] for row in json.loads(out)["runs"]}) == (0, {0})
    code, _, err = run("generate", "w5", "--recipe", folder, "--draft", checkpoints["padded-draft"])
    assert code == 2
    assert "recipe for the" in err


def test_hostile_texts_stay_texts() -> None:
    hostile = "</script><script>window.hacked = 1</script>"
    page = certificate_page(certificate(task=hostile), [example(hostile)])
    assert hostile not in page
    assert "&lt;/script&gt;" in page
    assert certificate_page(certificate(certified=False), []).count("<script") == 2
