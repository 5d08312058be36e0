"""Answers and states that come from a remote engine, and what such an engine is told; without vLLM."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from conftest import tiny_model
from fake_judge import constant_judge
from selfjudge.decoding.plain import respond
from selfjudge.decoding.rule_parser import RuleRequest
from selfjudge.decoding.rules import EXACT
from selfjudge.decoding.sampling import Sampling
from selfjudge.engine.teacher_forced import teacher_forced
from selfjudge.errors import SelfJudgeError
from selfjudge.evaluate.config import RuleRun
from selfjudge.integrations.vllm.backend import EngineStep, VllmAnswerer, join_steps, read_step, request_options
from selfjudge.integrations.vllm.config import RequestRules
from selfjudge.label.methods import compute_margins
from selfjudge.label.score import Case
from selfjudge.models.load import Target
from selfjudge.models.pair import Pair

RULES = ("margin:0.5,guard=on", "margin:price=0.2,guard=on", "topk:3,guard=on", "fly:0.3,2,guard=on", "judged:0.4", "judged:price=0.1")  # fmt: skip


class Engine:
    """The same model, asked as a remote engine is."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.asked: list[dict[str, Any]] = []

    def respond(self, prompts: Any, **options: Any) -> Any:
        self.asked.append(options)
        yield from ((i, [7, 8], "length") for i in range(len(prompts)))

    @torch.no_grad()
    def states(self, sequences: Any, counts: Any) -> list[torch.Tensor]:
        whole = [self.model.base_model(torch.tensor([ids])).last_hidden_state[0] for ids in sequences]
        return [rows[-count:] for rows, count in zip(whole, counts, strict=True)]


def test_a_remote_engine_answers_and_reads(tiny_pair: Pair) -> None:
    cases = [Case([5, 6, 7], [8, 9, 10, 11], [1, 2], [20, 21]), Case([5], [6, 7], [0], [30])]
    here = compute_margins(tiny_pair, cases)
    engine = Engine(tiny_pair.target)
    there = Target(tiny_model(seed=1), remote=engine)
    pair: Any = SimpleNamespace(target=there.module, target_model=there)
    for one, other in zip(here, compute_margins(pair, cases), strict=True):
        assert one == pytest.approx(other, abs=1e-4)
    rows = [(i, rows.shape) for part, rows in teacher_forced(there, [([5], [6, 7]), ([5, 6], [7])]) for i in [part]]
    assert rows == [([0, 1], (3, 32))]
    answers = list(respond(there, [[5], [6]], eos_ids={2}, max_new_tokens=[3, 4], sampling=Sampling(0.7), seeds=[1, 2]))
    assert answers == [(0, [7, 8], "length"), (1, [7, 8], "length")]
    assert engine.asked[0]["max_new_tokens"] == [3, 4]
    assert engine.asked[0]["seeds"] == [1, 2]


@pytest.mark.parametrize("text", RULES)
def test_a_request_is_decoded_by_the_rule_that_is_meant(text: str) -> None:
    judge = constant_judge(0.5, 32)
    rule = RuleRequest(text, strict_start=0, strict_code=False).resolve((0, 2), judge)
    rules = RequestRules(RuleRequest(judge="somewhere"), judge, (0, 2), 5)
    built = rules.requested({"selfjudge": request_options(rule)})
    assert type(built) is type(rule)
    assert repr(built) == repr(rule)


def test_lossless_rules_say_off_and_others_are_refused() -> None:
    assert request_options(RuleRequest("exact").resolve()) == {"off": True}
    with pytest.raises(SelfJudgeError, match="guard=on"):
        request_options(RuleRequest("topk:3").resolve())
    with pytest.raises(SelfJudgeError, match="answers greedily"):
        request_options(RuleRequest("sampling").resolve(sampling=Sampling(0.5)))


class Outputs(SimpleNamespace):
    """What vLLM gives a request in a step; unlike tuples, it can be referred to weakly."""


def output_of(tokens: list[int], ranks: list[int], finish: str | None = None) -> Outputs:
    logprobs = [{token: SimpleNamespace(rank=rank)} for token, rank in zip(tokens, ranks, strict=True)]
    return Outputs(token_ids=tokens, logprobs=logprobs, finish_reason=finish)


def test_log_probabilities_are_dropped_as_an_answer_goes_on(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[weakref.ref[Outputs]] = []
    alive: list[int] = []

    class Engine:
        def add_request(self, *_: Any) -> None: ...

        def has_unfinished_requests(self) -> bool:
            return len(given) < 6

        def step(self) -> Iterator[SimpleNamespace]:
            alive.append(sum(one() is not None for one in given))
            output = output_of([5 + len(given)], [1])
            given.append(weakref.ref(output))
            yield SimpleNamespace(request_id="0", outputs=[output])

    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(
        sys.modules, "vllm.sampling_params", SimpleNamespace(RequestOutputKind=SimpleNamespace(DELTA=2))
    )
    answerer = VllmAnswerer(tiny_pair, "somewhere")
    monkeypatch.setattr(answerer, "_engine", SimpleNamespace(sampling_params=lambda *_, **__: None))
    monkeypatch.setattr(answerer, "_start", lambda *_: SimpleNamespace(llm_engine=Engine()))
    (answer,), _ = answerer.answer(["w1"], RuleRun("exact", 2, EXACT), 6, [0])
    assert answer.tokens == (5, 6, 7, 8, 9, 10)
    assert max(alive) <= 1  # the step that was just given


def test_steps_become_cycles_and_ranks_become_origins(tiny_pair: Pair) -> None:
    def step(tokens: list[int], ranks: list[int], finish: str | None = None, *, lossless: bool = False) -> EngineStep:
        return read_step(output_of(tokens, ranks, finish), lossless=lossless)

    steps = step([5], [1]), step([6, 7, 8], [1, 4, 1]), step([], []), step([9, 2], [1, 1], "stop")
    made = join_steps(tiny_pair, 3, steps)
    assert made.tokens == (5, 6, 7, 8, 9, 2)
    assert made.origins == ("target", "draft", "judge", "target", "draft", "target")
    assert (made.cycles, made.finish, made.prompt_tokens) == (2, "eos", 3)
    assert made.text == "w1 w2 w3 w4 w5"
    tied = join_steps(tiny_pair, 1, [step([6, 7], [2, 1], "length", lossless=True)])
    assert tied.origins == ("draft", "target")  # the lower of two equal tokens is the target's choice all the same
    assert tied.finish == "length"
