"""The choice of γ: what is timed, what is estimated, and how well."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, strategies as st

from selfjudge.decoding.rule_parser import RuleRequest
from selfjudge.decoding.rules import AcceptanceRule
from selfjudge.evaluate.config import RuleRun, plan_runs
from selfjudge.evaluate.execute import Answerer
from selfjudge.store.load import LoadWatch
from selfjudge.tune.speeds import Clock, Comparison, choose_gamma, count_accepted_drafts
from selfjudge.tune.trials import TuneResult, find_exact_gamma


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else this machine does."""
    monkeypatch.setattr(LoadWatch, "usage", property(lambda self: (9.0, 0.0, 0.0)))


def plan(rule: str, gamma: int) -> RuleRun:
    return plan_runs([rule], [gamma], {}, ())[0]


def test_gamma_is_where_relaxed_rules_are_fastest() -> None:
    def speed(rule: str, gamma: int, rate: float) -> dict[str, Any]:
        return {"rule": rule, "gamma": gamma, "tokens_per_second": rate}

    speeds = [
        speed("plain", 0, 50), speed("exact", 2, 110), speed("exact", 4, 100), speed("margin:1", 2, 100),
        speed("margin:1", 4, 130), speed("fly:0.2,2", 4, 120),
    ]  # fmt: skip
    assert choose_gamma(speeds, 3) == 4
    small = [*speeds[:4], speed("margin:1", 4, 90), speed("fly:0.2,2", 4, 120)]
    assert choose_gamma(small, 3) == 2  # fly does not work there, and has no say
    assert choose_gamma([*speeds[:3], speed("fly:0.2,2", 4, 120)], 3) == 4  # unless there is none but such
    assert choose_gamma([], 3) == 3
    assert find_exact_gamma(speeds, 3) == 2
    assert find_exact_gamma([], 3) == 3


class Drafting(Answerer):
    """An answerer whose drafts stand with a probability of the rule's own, and whose cycles take seconds by γ alone."""

    device, engine = "cpu", "cpu"
    draft, target = 0.02, 0.1

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.batches: list[Any] = []
        self.slower = 1.0
        """Factor by which the machine has slowed down."""

    def answer(self, prompts: Sequence[Any], rule: AcceptanceRule, gamma: int, max_new_tokens: int, seeds: Any) -> Any:
        self.asked.append((rule.name, gamma))
        self.batches.append(prompts)
        rng, answers, passes = np.random.default_rng(0), [], 0
        for _ in prompts:
            origins = ["target"]
            while len(origins) < max_new_tokens:
                stood = int(rng.geometric(1 - self.stands(rule)) - 1)
                origins += ["draft"] * min(stood, gamma) + ["target"]
                passes += 1
            answers.append(SimpleNamespace(tokens=origins, origins=origins))
        return answers, {"total": self.slower * passes * (self.target + gamma * self.draft)}

    def stands(self, rule: AcceptanceRule) -> float:
        return 0.5 if rule.name == "exact" else 0.8

    def speed(self, rule: AcceptanceRule, gamma: int) -> float:
        """As it is on average."""
        stands = self.stands(rule)
        return sum(stands**i for i in range(gamma + 1)) / (self.target + gamma * self.draft)


def test_a_rule_is_timed_at_one_gamma_by_turns_and_what_it_would_do_at_another_is_estimated() -> None:
    answerer = Drafting()
    rows, busy = Clock(answerer, plan, 48).measure(["prompt"] * 300, ["margin:1", "fly:0.3,2"], (2, 3, 5))
    turn = [*(("exact", g) for g in (0, 2, 3, 5)), ("margin", 5), ("fly", 5)]
    assert answerer.asked[1:] == turn + turn[::-1]  # the first warms up
    assert busy == ""
    found = {(row["rule"], row["gamma"]): row for row in rows}
    assert {key for key in found if key[0] == "fly:0.3,2"} == {("fly:0.3,2", 3), ("fly:0.3,2", 5)}  # its window is 2
    for (text, gamma), row in found.items():
        rule = RuleRequest("exact" if text == "plain" else text).resolve()
        assert row["tokens_per_second"] == pytest.approx(answerer.speed(rule, gamma), rel=0.1)
        assert row.get("estimated", False) == (text[0] in "mf" and gamma < 5)
    assert choose_gamma(rows, 2) == 5
    rows, _ = Clock(answerer, plan, 48).measure(["p"], ["margin:1"], (3,))
    assert {row["rule"] for row in rows} == {"plain", "exact"}


def test_times_of_the_same_work_that_differ_choose_no_gamma(monkeypatch: pytest.MonkeyPatch) -> None:
    answerer = Drafting()
    original = answerer.answer

    def slowing(*given: Any) -> Any:
        answerer.slower *= 1.2
        return original(*given)

    monkeypatch.setattr(answerer, "answer", slowing)
    _, busy = Clock(answerer, plan, 48).measure(["p"] * 8, ["margin:1"], (2, 3, 5))
    assert "times of the same answer differ by" in busy


RULES = [("exact", 3), ("margin:1", 5), ("fly:0.3,2", 5)]


def compare(answerer: Drafting, notify: Any = lambda stage, share: None, **more: Any) -> Comparison:
    options: dict[str, Any] = {"tokens": 64, "deadline": float("inf"), **more}
    return Clock(answerer, plan, 48, notify).compare([[f"{i}"] * 300 for i in range(3)], RULES, **options)


def finish(comparison: Comparison) -> TuneResult:
    """A run that takes no relaxed rule."""
    return TuneResult([], None, 3, [], ["margin"], comparison)


def test_rules_are_compared_with_exact_and_plain_decoding_by_turns() -> None:
    """Each turn is one batch for all, `exact` first and last."""
    answerer, shares = Drafting(), []
    found = compare(answerer, lambda stage, share: shares.append(share))
    assert shares == [i / 20 for i in range(20)]
    turn = [("exact", 3), ("exact", 0), ("margin", 5), ("fly", 5), ("exact", 3)]
    assert answerer.asked[1:] == (turn + turn[::-1]) * 2
    assert [batch[0] for batch in answerer.batches[1:]] == [name for name in "0120" for _ in turn]
    assert (found.busy, found.doubt) == ("", "")
    exact, plain = found.timings["exact"], found.timings["plain"]
    assert finish(found).baseline == (exact.tokens_per_second, plain.tokens_per_second)
    assert finish(found).exact_over_plain == pytest.approx(exact.tokens_per_second / plain.tokens_per_second)
    assert not finish(found).plain_wins
    speed = found.compare("margin:1")
    assert speed is not None
    assert speed[0] == pytest.approx(found.timings["margin:1"].tokens_per_second / exact.tokens_per_second)
    assert speed[1][0] <= speed[0] <= speed[1][1]
    assert found.compare("margin:2") is None
    answerer.draft = 1.0
    slow = compare(answerer)  # drafts that cost much: plain decoding is what a rule must beat
    assert finish(slow).exact_over_plain == 1
    assert finish(slow).plain_wins
    ratio = slow.timings["margin:1"].tokens_per_second / slow.timings["plain"].tokens_per_second
    assert slow.compare("margin:1") == (pytest.approx(ratio), pytest.approx((ratio, ratio), rel=0.1))


def test_from_fewer_turns_nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100))
    monkeypatch.setattr("selfjudge.tune.speeds.time", SimpleNamespace(monotonic=lambda: next(now)))
    found = compare(Drafting(), deadline=3)
    assert found.doubt == "the time was up after 3 of 4 turns: too few to compare speeds"
    assert found.compare("margin:1") is None


def test_a_busy_machine_compares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    answerer = Drafting()
    original, count = answerer.answer, itertools.count()

    def disturbed(*given: Any) -> Any:
        answerer.slower = 2.0 if next(count) == 10 else 1.0  # the last of the second turn
        return original(*given)

    monkeypatch.setattr(answerer, "answer", disturbed)
    found = compare(answerer)
    assert found.doubt == found.busy
    assert "times of the same answer differ by 67%" in found.busy
    assert found.compare("margin:1") is None
    busy = "this machine is busy: speeds are not reliable (a test)"
    monkeypatch.setattr(LoadWatch, "describe", lambda self, turns=(): busy)
    assert compare(Drafting()).doubt == busy


@given(st.lists(st.sampled_from(["draft", "judge", "target"]), max_size=30))
def test_accepted_drafts_are_those_before_each_token_of_the_target(origins: list[Any]) -> None:
    counts = count_accepted_drafts(["target", *origins])
    assert len(counts) == origins.count("target")
    cut = len(origins) - next((i for i in range(len(origins), 0, -1) if origins[i - 1] == "target"), 0)
    assert sum(counts) + len(counts) + cut == len(origins)


def test_on_cuda_a_run_that_captures_graphs_is_not_timed() -> None:
    seconds = iter([9.0, 9.0, 2.0, 1.0, 1.0, 2.0])
    answers = [SimpleNamespace(tokens=(1, 2, 3, 4), origins=["target"] * 4)]
    answerer: Any = SimpleNamespace(
        device="cuda", one_gamma=False, answer=lambda *a, **k: (answers, {"total": next(seconds)})
    )
    rows, _ = Clock(answerer, plan, 8).measure(["a prompt"], [], (2,))
    assert [row["tokens_per_second"] for row in rows] == [2.0, 4.0]


@pytest.mark.parametrize(("device", "limit", "tokens"), [("cpu", 512, 32), ("cuda", 512, 256), ("cuda", 100, 100)])
def test_answers_are_timed_long_enough_for_their_device(device: str, limit: int, tokens: int) -> None:
    asked: list[int] = []
    answers = [SimpleNamespace(tokens=(1, 2), origins=["target"] * 2)]

    def answer(prompts: Any, rule: Any, gamma: int, max_new_tokens: int, seeds: Any) -> Any:
        asked.append(max_new_tokens)
        return answers, {"total": 1.0}

    answerer = cast(Any, SimpleNamespace(device=device, one_gamma=True, answer=answer))
    Clock(answerer, plan, limit).measure(["a prompt"], [], (2,))
    assert set(asked[1:]) == {tokens}
