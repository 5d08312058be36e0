"""A tiny pair in vLLM: both model runners, two ranks, every kind of request, against the torch loop."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import TINY_GAMMA, Answers, greedy, run, started, tiny_engine

from selfjudge.decoding.rule_parser import RuleRequest
from selfjudge.decoding.rules import AcceptanceRule, Exact, Judged
from selfjudge.decoding.text import generate
from selfjudge.judge.model import Judge
from selfjudge.models.pair import Pair

PROMPTS = ["w1 w5 w26", "w2 w5 w26 w40", "w3", "w9 w50 w7 w7 w7", "w11 w12"]
TOKENS, SHORT = 20, 12
ALLOWED = [*range(4), *range(4, 61, 2)]  # special tokens, and every other word
SAMPLES, SAMPLED = 1500, 3


def ours(pair: Pair, rule: AcceptanceRule, tokens: int = TOKENS) -> list[list[int]]:
    answers = generate(pair, PROMPTS, rule, gamma=TINY_GAMMA, max_new_tokens=tokens, raw=True)
    return [list(answer.tokens) for answer in answers]


RULES = [
    [{"rule": "margin:4"}, {"rule": "margin", "price": 1.5}, {"rule": "topk:3"}, {"rule": "fly:0.05,1"}, {"price": 0.5}],
    [{"price": 0}, {"rule": "judged:0.3,confirm=1"}, {"rule": "typical"}, {"rule": "margin:price=2"}, {"rule": "relaxed"}],
]  # fmt: skip
"""What the requests of two batches ask for."""


def runs(pair: Pair, tokens: int = TOKENS) -> list[dict[str, Any]]:
    prompts = [pair.encode(prompt, raw=True) for prompt in PROMPTS]
    wishes = [{}, {"off": True}, {"theta": 0.25}, {"quality": 1.0}, {"theta": "nonsense"}]
    return [
        {"prompts": prompts, "params": greedy(tokens)},
        {"prompts": prompts, "params": greedy(tokens, off=True)},
        {"prompts": prompts, "params": [greedy(tokens, **wish) for wish in wishes]},
        {"prompts": prompts, "params": {**greedy(tokens), "logprobs": 0}},
        {"prompts": prompts, "params": greedy(tokens, theta=0.0)},
        {"prompts": prompts, "params": {**greedy(tokens, theta=0.0), "allowed_token_ids": ALLOWED}},
        {"prompts": prompts, "params": {**greedy(tokens, theta=0.0), "temperature": 0.7, "seed": 1}},
        *({"prompts": prompts, "params": [greedy(tokens, **wish) for wish in wishes]} for wishes in RULES),
        {"prompts": prompts, "params": {**greedy(tokens, rule="topk:3"), "temperature": 0.01, "seed": 1}},
        {"prompts": prompts, "params": greedy(tokens, theta=0.0, strict_start=9, strict_code=True)},
    ]


def wished(judge: Judge, wish: dict[str, Any]) -> AcceptanceRule:
    text, price = wish.get("rule", "judged"), wish.get("price")
    rule = RuleRequest(text, price=price).resolve((), judge)
    return replace(rule, guard=True)  # type: ignore[call-arg]


def check(pair: Pair, judge: Judge, answers: Answers, length: int = TOKENS) -> None:
    """What `runs` asked for, said by the torch loop; with these weights no score comes near θ and no choice near a tie."""
    say = partial(ours, pair, tokens=length)
    exact = say(Exact())
    judged = {theta: say(Judged(judge, theta)) for theta in (0.25, 0.5, 0.75)}
    plain, off, mixed, logprobs, always, allowed, sampled, *others, warm, strict = answers[:11]
    assert strict["tokens"] == say(Judged(judge, 0.0, strict_start=9, strict_code=True))
    assert strict["tokens"] not in (exact, say(Judged(judge, 0.0)))
    assert warm["counts"][0]["judged_tokens"] == 0  # a greedy rule with a temperature: lossless
    relaxed = 0
    for wishes, answer in zip(RULES, others, strict=True):
        wanted = [say(wished(judge, wish))[i] for i, wish in enumerate(wishes)]
        assert answer["tokens"] == wanted
        relaxed += sum(wanted[i] != exact[i] for i in range(len(wanted)))
    assert relaxed > 2  # the rules had something to do
    assert judged[0.5] != exact
    assert plain["tokens"] == judged[0.5]
    assert off["tokens"] == exact
    rows = (judged[0.5], exact, judged[0.25], judged[0.75], exact)
    assert mixed["tokens"] == [row[i] for i, row in enumerate(rows)]
    for counts in plain["counts"]:
        assert counts["judged_tokens"] > 0
        assert counts["tokens"] > counts["aligned_tokens"] >= counts["cycles"] > 0
    for counts in off["counts"]:
        assert counts["judged_tokens"] == 0
        assert counts["tokens"] == counts["aligned_tokens"]
    assert always["tokens"] == say(Judged(judge, 0.0))
    assert always["tokens"] != say(Judged(judge, 0.0, guard=False))  # the guard had something to do
    assert not {token for tokens in always["tokens"] for token in tokens} <= set(ALLOWED)
    assert {token for tokens in allowed["tokens"] for token in tokens} <= set(ALLOWED)  # what is banned stays banned
    for counts in sampled["counts"]:
        assert counts["judged_tokens"] > 0
        assert counts["tokens"] > counts["aligned_tokens"]
    assert logprobs["tokens"] == judged[0.5]
    for prompt, tokens, said in zip(PROMPTS, logprobs["tokens"], logprobs["logprobs"], strict=True):
        ids = torch.tensor([[*pair.encode(prompt, raw=True), *tokens]])
        with torch.no_grad():
            rows = pair.target(ids).logits[0, -len(tokens) - 1 : -1].log_softmax(-1)
        assert said == pytest.approx(rows.gather(1, ids[0, -len(tokens) :, None]).squeeze(1).tolist(), abs=1e-3)


@pytest.fixture(scope="session")
def first_runner(tiny: Path, tiny_pair: Pair) -> Answers:
    many = [tiny_pair.encode(PROMPTS[0], raw=True)] * SAMPLES
    sampled = {"temperature": 1.0, "max_tokens": SAMPLED, "ignore_eos": True}
    off = {"extra_args": {"selfjudge": {"off": True}}}
    more = [
        {"prompts": many, "params": sampled | off},
        {"prompts": many[:40], "params": sampled | {"temperature": 0.7, "max_tokens": TOKENS, "top_p": 0.9}},
    ]
    return run(tiny_engine(tiny), [*runs(tiny_pair), *more])


def test_the_first_model_runner_says_what_the_torch_loop_says(
    tiny: Path, tiny_pair: Pair, first_runner: Answers
) -> None:
    check(tiny_pair, Judge.from_pretrained(tiny / "hidden"), first_runner)


def test_the_second_model_runner_says_the_same_through_tritons_interpreter(tiny: Path, tiny_pair: Pair) -> None:
    """Shorter answers: the interpreter is slow."""
    answers = run(tiny_engine(tiny), runs(tiny_pair, SHORT), v2=True)
    check(tiny_pair, Judge.from_pretrained(tiny / "hidden"), answers, SHORT)


@pytest.mark.parametrize("v2", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_margins_and_states_before_are_those_of_the_own_request(tiny: Path, tiny_pair: Pair, v2: bool) -> None:
    features = "hidden+margin+previous"
    answers = run(tiny_engine(tiny, features), runs(tiny_pair), v2=v2)
    check(tiny_pair, Judge.from_pretrained(tiny / features), answers)


def test_ranks_that_disagree_follow_the_first(tiny: Path, tiny_pair: Pair) -> None:
    """Two ranks, one of which has its judge upside down: both say what the first one's judge says."""
    engine = tiny_engine(tiny, tensor_parallel_size=2, worker_cls="disagreeing.DisagreeingWorker")
    said, answers = started(engine, runs(tiny_pair), False, VLLM_CPU_OMP_THREADS_BIND="0|1")
    assert answers, said[-4000:]
    assert all(len(answer["counts"]) == 2 for answer in answers)
    check(tiny_pair, Judge.from_pretrained(tiny / "hidden"), answers)


def test_sampling_without_the_judge_draws_from_the_target(tiny_pair: Pair, first_runner: Answers) -> None:
    """The second and third token of many answers, verified drafts among them, against the target's exact distribution."""
    prompt = tiny_pair.encode(PROMPTS[0], raw=True)
    contexts, weights = torch.tensor([prompt]), torch.ones(1, dtype=torch.float64)
    tokens = torch.tensor(first_runner[-2]["tokens"])
    for place in range(SAMPLED):
        with torch.no_grad():
            p = tiny_pair.target(contexts).logits[:, -1].double().softmax(-1) * weights[:, None]
        expected = p.sum(0) * SAMPLES
        seen = torch.bincount(tokens[:, place], minlength=len(expected)).double()
        often = expected >= 5
        table = torch.stack([torch.cat([x[often], x[~often].sum()[None]]) for x in (seen, expected)])
        chi2, degrees = float(((table[0] - table[1]) ** 2 / table[1]).sum()), table.shape[1] - 1
        assert chi2 < degrees + 5 * math.sqrt(2 * degrees), f"token {place}"
        contexts = torch.cat(
            [contexts.repeat_interleave(p.shape[1], 0), torch.arange(p.shape[1]).repeat(len(p))[:, None]], 1
        )
        weights = p.flatten()


def test_sampling_with_the_judge_takes_more_drafts(first_runner: Answers) -> None:
    (counts,) = first_runner[-1]["counts"]
    assert counts["judged_tokens"] > 0
    assert len({tuple(tokens) for tokens in first_runner[-1]["tokens"]}) > 20
