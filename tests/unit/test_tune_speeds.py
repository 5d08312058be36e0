"""The choice of γ: what is timed, what is estimated, and how well."""

from __future__ import annotations

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
from selfjudge.tune.speeds import Clock, choose_gamma, count_accepted_drafts


def plan(rule: str, gamma: int) -> RuleRun:
    return plan_runs([rule], [gamma], {}, ())[0]


def test_gamma_is_where_relaxed_rules_are_fastest_and_exact_is_compared_at_its_own_best() -> None:
    def speed(rule: str, gamma: int, rate: float) -> dict[str, Any]:
        return {"rule": rule, "gamma": gamma, "tokens_per_second": rate}

    speeds = [
        speed("plain", 0, 50), speed("exact", 2, 110), speed("exact", 4, 100), speed("margin:1", 2, 100),
        speed("margin:1", 4, 130), speed("fly:0.2,2", 4, 120),
    ]  # fmt: skip
    assert choose_gamma(speeds, 3) == (4, pytest.approx(1.1))
    small = [*speeds[:4], speed("margin:1", 4, 90), speed("fly:0.2,2", 4, 120)]
    assert choose_gamma(small, 3)[0] == 2  # fly does not work there, and has no say
    assert choose_gamma([*speeds[:3], speed("fly:0.2,2", 4, 120)], 3)[0] == 4  # unless there is none but such
    assert choose_gamma([], 3) == (3, 1.0)
    assert choose_gamma([speed("plain", 0, 150), *speeds[1:]], 3) == (4, pytest.approx(1.5))  # exact with γ = 0


class Drafting(Answerer):
    """An answerer whose drafts stand with a probability of the rule's own, and whose cycles take seconds by γ alone."""

    device, engine = "cpu", "cpu"
    draft, target = 0.02, 0.1

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def answer(self, prompts: Sequence[Any], rule: AcceptanceRule, gamma: int, max_new_tokens: int, seeds: Any) -> Any:
        self.asked.append((rule.name, gamma))
        rng, answers, passes = np.random.default_rng(0), [], 0
        for _ in prompts:
            origins = ["target"]
            while len(origins) < max_new_tokens:
                stood = int(rng.geometric(1 - self.stands(rule)) - 1)
                origins += ["draft"] * min(stood, gamma) + ["target"]
                passes += 1
            answers.append(SimpleNamespace(tokens=origins, origins=origins))
        return answers, {"total": passes * (self.target + gamma * self.draft)}

    def stands(self, rule: AcceptanceRule) -> float:
        return 0.5 if rule.name == "exact" else 0.8

    def speed(self, rule: AcceptanceRule, gamma: int) -> float:
        """As it is on average."""
        stands = self.stands(rule)
        return sum(stands**i for i in range(gamma + 1)) / (self.target + gamma * self.draft)


def test_a_rule_is_timed_once_and_what_it_would_do_at_another_gamma_is_estimated() -> None:
    answerer = Drafting()
    rows = Clock(answerer, ["prompt"] * 300, plan, 48).measure(["margin:1", "fly:0.3,2"], (2, 3, 5))
    assert answerer.asked[1:] == [("exact", g) for g in (0, 2, 3, 5)] + [("margin", 5), ("fly", 5)]
    found = {(row["rule"], row["gamma"]): row for row in rows}
    assert {key for key in found if key[0] == "fly:0.3,2"} == {("fly:0.3,2", 3), ("fly:0.3,2", 5)}  # its window is 2
    for (text, gamma), row in found.items():
        rule = RuleRequest("exact" if text == "plain" else text).resolve()
        assert row["tokens_per_second"] == pytest.approx(answerer.speed(rule, gamma), rel=0.1)
        assert row.get("estimated", False) == (text[0] in "mf" and gamma < 5)
    assert choose_gamma(rows, 2)[0] == 5
    answerer.asked.clear()
    assert {row["rule"] for row in Clock(answerer, ["p"], plan, 48).measure(["margin:1"], (3,))} == {"plain", "exact"}


@given(st.lists(st.sampled_from(["draft", "judge", "target"]), max_size=30))
def test_accepted_drafts_are_those_before_each_token_of_the_target(origins: list[Any]) -> None:
    counts = count_accepted_drafts(["target", *origins])
    assert len(counts) == origins.count("target")
    cut = len(origins) - next((i for i in range(len(origins), 0, -1) if origins[i - 1] == "target"), 0)
    assert sum(counts) + len(counts) + cut == len(origins)


def test_on_cuda_a_run_that_captures_graphs_is_not_timed() -> None:
    seconds = iter([9.0, 1.0])
    answers = [SimpleNamespace(tokens=(1, 2, 3, 4), origins=["target"] * 4)]
    answerer: Any = SimpleNamespace(device="cuda", answer=lambda *a, **k: (answers, {"total": next(seconds)}))
    timing = Clock(answerer, ["a prompt"], plan, 8).time_rule("exact", 2)
    assert timing is not None
    assert timing.tokens_per_second == 4.0


@pytest.mark.parametrize(("device", "limit", "tokens"), [("cpu", 512, 48), ("cuda", 512, 256), ("cuda", 100, 100)])
def test_answers_are_timed_long_enough_for_their_device(device: str, limit: int, tokens: int) -> None:
    asked: list[int] = []
    answers = [SimpleNamespace(tokens=(1, 2), origins=["target"] * 2)]

    def answer(prompts: Any, rule: Any, gamma: int, max_new_tokens: int, seeds: Any) -> Any:
        asked.append(max_new_tokens)
        return answers, {"total": 1.0}

    clock = Clock(cast(Any, SimpleNamespace(device=device, answer=answer)), ["a prompt"], plan, limit)
    clock.time_rule("exact", 2)
    assert set(asked) == {tokens}
