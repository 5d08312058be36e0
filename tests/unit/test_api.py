"""The public names: rules as text or object, one prompt or many, judged tokens, one default for γ and θ."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import selfjudge
from conftest import REFERENCE
from selfjudge import (
    AcceptanceRule,
    Block,
    Exact,
    Generation,
    Judge,
    JudgeConfig,
    Judged,
    Margin,
    Pair,
    Sampling,
    SelfJudgeError,
    TopK,
    generate,
    resolve_rule,
    stream,
)

PROMPTS = ["w1 w2", "w3 w4 w5", "w6"]


@pytest.fixture(scope="module")
def judge(tiny_pair: Pair) -> Judge:
    torch.manual_seed(0)
    config = JudgeConfig(
        hidden_size=tiny_pair.hidden_size, thresholds={"F": 0.2, "R": 0.6}, quality_curve=((0.5, 0.3), (0.9, 0.7))
    )
    return Judge(config, torch.randn(tiny_pair.hidden_size), 0.1)


def test_dir_shows_the_public_names() -> None:
    assert {
        "Pair",
        "Judge",
        "generate",
        "stream",
        "decode",
        "AcceptanceRule",
        "Judged",
        "Margin",
        "Block",
        "Verdict",
    } <= set(dir(selfjudge))
    assert all(hasattr(selfjudge, name) for name in selfjudge.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = selfjudge.nothing


def test_a_string_gives_one_generation_and_a_list_a_list(tiny_pair: Pair) -> None:
    many = generate(tiny_pair, PROMPTS, gamma=2, max_new_tokens=8)
    one = generate(tiny_pair, PROMPTS[1], gamma=2, max_new_tokens=8)
    chat = generate(tiny_pair, [{"role": "user", "content": PROMPTS[1]}], gamma=2, max_new_tokens=8)
    assert isinstance(one, Generation)
    assert isinstance(chat, Generation)
    assert one.tokens == chat.tokens == many[1].tokens
    assert generate(tiny_pair, []) == []


def test_a_rule_is_text_or_an_object(tiny_pair: Pair, judge: Judge) -> None:
    options = {"gamma": 3, "max_new_tokens": 20}
    bare = {**options, "strict_start": 0, "strict_code": False}
    for text, rule in (("exact", Exact()), ("topk:3", TopK(3)), ("margin:2", Margin(2.0))):
        assert [g.tokens for g in generate(tiny_pair, PROMPTS, text, **bare)] == [
            g.tokens for g in generate(tiny_pair, PROMPTS, rule, **options)
        ]
    by_text = generate(tiny_pair, PROMPTS[0], "judged", judge=judge, theta=0.3, **bare)
    by_object = generate(tiny_pair, PROMPTS[0], Judged(judge, 0.3), **options)
    assert by_text.tokens == by_object.tokens
    assert by_text.judged_share > 0
    with pytest.raises(SelfJudgeError, match="a rule object is complete"):
        generate(tiny_pair, PROMPTS[0], Exact(), judge=judge)
    with pytest.raises(SelfJudgeError, match="rule 'exact' does not use a judge: leave out `judge`"):
        generate(tiny_pair, PROMPTS[0], "exact", judge=judge)
    with pytest.raises(SelfJudgeError, match="needs a judge"):
        generate(tiny_pair, PROMPTS[0], "judged")
    with pytest.raises(SelfJudgeError, match="leave out one of `quality` and `theta`"):
        generate(tiny_pair, PROMPTS[0], judge=judge, theta=0.3, quality=0.9)


def test_one_default_for_gamma_and_theta(tiny_pair: Pair, judge: Judge) -> None:
    assert resolve_rule(tiny_pair) is resolve_rule(tiny_pair, "exact")
    assert resolve_rule(tiny_pair, judge=judge).theta == pytest.approx(0.6)  # type: ignore[attr-defined]  # R
    assert resolve_rule(tiny_pair, judge=judge, theta="F").theta == pytest.approx(0.2)  # type: ignore[attr-defined]
    assert resolve_rule(tiny_pair, judge=judge, quality=0.9).theta == pytest.approx(0.7)  # type: ignore[attr-defined]
    assert resolve_rule(tiny_pair, sampling=Sampling(0.7)).name == "sampling"
    assert resolve_rule(tiny_pair, "topk:2") is resolve_rule(tiny_pair, "topk:2")  # engines find their recordings
    three = generate(tiny_pair, PROMPTS[0], TopK(60), max_new_tokens=17, gamma=3)
    assert (three.cycles, three.gamma_mean) == (4, 3.0)  # 17 tokens less the first, 4 a cycle
    with pytest.raises(SelfJudgeError, match="`gamma` must be a whole number or auto, not 'maybe'"):
        generate(tiny_pair, PROMPTS[0], gamma="maybe")  # type: ignore[arg-type]
    with pytest.raises(SelfJudgeError, match=r"`gamma` must lie between 0 .* and 32, not 500"):
        generate(tiny_pair, PROMPTS[0], gamma=500)


@pytest.mark.parametrize("engine", ["auto", "cuda", REFERENCE])
def test_judged_tokens_say_what_the_target_wanted(tiny_pair: Pair, judge: Judge, engine: str) -> None:
    """Against a fresh forward pass over the whole answer."""
    rule = Judged(judge, 0.3)
    answers = generate(tiny_pair, PROMPTS, rule, gamma=4, max_new_tokens=24, engine=engine)
    assert sum(len(a.judged_tokens) for a in answers) > 5
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = [*tiny_pair.encode(prompt), *answer.tokens]
        with torch.inference_mode():
            output = tiny_pair.target(torch.tensor([ids]), output_hidden_states=True)
        first = len(ids) - len(answer.tokens)
        assert [t.index for t in answer.judged_tokens] == [i for i, o in enumerate(answer.origins) if o == "judge"]
        for token in answer.judged_tokens:
            p = output.logits[0, first + token.index - 1].softmax(-1)
            assert (token.token, token.text) == (answer.tokens[token.index], tiny_pair.tokenizer.decode([token.token]))
            assert token.target_token == int(p.argmax()) != token.token
            assert token.target_text == tiny_pair.tokenizer.decode([token.target_token])
            assert token.target_probability == pytest.approx(float(p.max()), abs=1e-4)
            assert token.probability == pytest.approx(float(p[token.token]), abs=1e-4)
            state = output.hidden_states[-1][0, first + token.index]
            assert token.score == pytest.approx(float(judge.score(state)), abs=1e-4)
            assert token.score > 0.3
    assert not any(a.judged_tokens for a in generate(tiny_pair, PROMPTS, rule, max_new_tokens=24, trace=False))
    unscored = generate(tiny_pair, PROMPTS[0], TopK(20), gamma=4, max_new_tokens=24, engine=engine).judged_tokens
    assert unscored
    assert all(t.score is None for t in unscored)


def test_a_stream_shows_judged_tokens_as_they_come(tiny_pair: Pair, judge: Judge) -> None:
    rule = Judged(judge, 0.3)
    answer = stream(tiny_pair, PROMPTS[0], rule, gamma=4, max_new_tokens=24)
    pieces = list(answer)
    whole = generate(tiny_pair, PROMPTS[0], rule, gamma=4, max_new_tokens=24)
    assert tuple(p.judged for p in pieces if p.judged) == answer.generation.judged_tokens == whole.judged_tokens
    assert [p.judged is not None for p in pieces] == [o == "judge" for o in whole.origins]


def test_a_new_rule_is_one_class(tiny_pair: Pair) -> None:
    @dataclass(frozen=True, eq=False)
    class Unsure(AcceptanceRule):
        """Accept whatever the draft says where the target's best token has less than half of the probability."""

        name = "unsure"
        summary = "the target is unsure"

        def accepts(self, block: Block, logits: Tensor, aligned: Tensor) -> Tensor:
            return aligned | (logits.softmax(-1).amax(-1) < 0.5)

    answers = generate(tiny_pair, PROMPTS, Unsure(), gamma=3, max_new_tokens=24)
    judged = [t for a in answers for t in a.judged_tokens]
    assert judged
    assert all(t.target_probability < 0.5 for t in judged)


def test_errors_name_arguments_not_options(tiny_pair: Pair) -> None:
    for call, argument in (
        (lambda: generate(tiny_pair, PROMPTS, batch=0), "`batch`"),
        (lambda: generate(tiny_pair, PROMPTS, max_new_tokens=0), "`max_new_tokens`"),
        (lambda: Sampling(temperature=math.nan), "`temperature`"),
        (lambda: Sampling(0.001), "`temperature`"),
        (lambda: generate(tiny_pair, PROMPTS, "topk", sampling=Sampling(0.7)), "`temperature`"),
        (lambda: generate(replace(tiny_pair, draft_model=None), PROMPTS), "`gamma`"),
    ):
        with pytest.raises(SelfJudgeError) as caught:
            call()
        assert argument in str(caught.value)
        assert "--" not in str(caught.value)


@pytest.mark.parametrize("rule", [None, "exact", "sampling", "topk:3"])
def test_temperature_0_is_greedy(tiny_pair: Pair, rule: str | None) -> None:
    how: dict[str, Any] = {"gamma": 3, "max_new_tokens": 24}
    greedy = generate(tiny_pair, PROMPTS[0], "exact" if rule == "sampling" else rule, **how)
    assert generate(tiny_pair, PROMPTS[0], rule, sampling=Sampling(0, top_p=0.9), **how).tokens == greedy.tokens
    logits = torch.tensor([[0.1, 2.0, -1.0]])
    assert Sampling(0).warp(logits).softmax(-1).tolist() == [[0.0, 1.0, 0.0]]


def test_a_rule_that_gives_no_mask_is_refused_by_name(tiny_pair: Pair) -> None:
    @dataclass(frozen=True)
    class Likely(AcceptanceRule):
        name = "likely"

        def accepts(self, block: Block, logits: Tensor, aligned: Tensor) -> Tensor:
            return aligned.float()

    with pytest.raises(SelfJudgeError, match=r"rule 'likely': `accepts` must give a bool for each draft.*not float32"):
        generate(tiny_pair, "w5 w6", rule=Likely(), gamma=3, max_new_tokens=4)
