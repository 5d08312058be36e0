"""The embedded pair in vLLM, float32: the judge that ships against the torch loop, lossless requests against plain vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from engines import GAMMA, WORKER, Answers, greedy, run

from selfjudge.decoding.plain import respond
from selfjudge.decoding.rules import Judged
from selfjudge.decoding.text import generate
from selfjudge.judge.config import shipped_judge
from selfjudge.judge.model import Judge
from selfjudge.models.pair import Pair
from selfjudge.models.pull import checkpoint_folder
from selfjudge.prompts.sources import BUILT_IN
from selfjudge.types import Block

PROMPTS = [text for _, text in BUILT_IN][:6]
TOKENS = 32
QUALITY = 0.5
NEAR_TIE = 1e-4  # of logits
NEAR_THETA = 1e-3


def folder(which: str) -> str:
    return str(checkpoint_folder({"target": "smollm2-135m", "draft": "smollm2-135m/draft"}[which]))


def engine(**options: Any) -> dict[str, Any]:
    return {"model": folder("target"), "max_model_len": 256, **options}


def speculation() -> dict[str, Any]:
    return {"speculative_config": {"model": folder("draft"), "num_speculative_tokens": GAMMA}}


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair.load("smollm2-135m", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def judge() -> Judge:
    shipped = shipped_judge("smollm2-135m")
    assert shipped is not None
    return Judge.from_pretrained(shipped)


@pytest.fixture(scope="module")
def prompts(pair: Pair) -> list[list[int]]:
    return [pair.encode(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def judged(prompts: list[list[int]]) -> Answers:
    settings = {
        "judge": str(shipped_judge("smollm2-135m")),
        "quality": QUALITY,
        "strict_start": 0,
        "strict_code": False,
    }
    always = {"extra_args": {"selfjudge": {"theta": 0.0}}}
    return run(
        engine(worker_cls=WORKER, additional_config={"selfjudge": settings}, **speculation()),
        [
            {"prompts": prompts, "params": greedy(TOKENS)},
            {"prompts": prompts, "params": greedy(TOKENS, off=True)},
            {"prompts": prompts, "params": greedy(1 + 4 * (GAMMA + 1), theta=0.0)},
            {"prompts": prompts, "params": {"temperature": 0.8, "top_p": 0.9, "max_tokens": 1 + 4 * (GAMMA + 1), **always}},
        ],
    )  # fmt: skip


def parts(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two answers part."""
    if list(one) == list(other):
        return None
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@torch.no_grad()
def doubt(
    pair: Pair, judge: Judge, theta: float, prompt: Sequence[int], one: Sequence[int], other: Sequence[int]
) -> bool:
    """Whether the answers part where arithmetic decides: a near-tie of the target or of the draft, or a score near θ."""
    at = parts(one, other)
    assert at is not None
    prefix = [*prompt, *one[:at]]
    gaps = []
    for model in (pair.target, pair.draft):
        best = model(torch.tensor([prefix])).logits[0, -1].topk(2).values
        gaps.append(float(best[0] - best[1]))
    scores = []
    for token in (one[at], other[at]):
        ids = torch.tensor([[*prefix, token]])
        found = pair.target(ids, output_hidden_states=True)
        block = Block(ids[:, -1:], found.logits[:, -2:], found.hidden_states[-1][:, -2:])
        scores.append(float(judge(block)))
    return min(gaps) < NEAR_TIE or min(abs(score - theta) for score in scores) < NEAR_THETA


def test_the_judge_that_ships_decides_as_in_the_torch_loop(
    pair: Pair, judge: Judge, prompts: list[list[int]], judged: Answers, capsys: pytest.CaptureFixture
) -> None:
    theta = judge.quality(QUALITY)
    ours = generate(pair, PROMPTS, Judged(judge, theta), gamma=GAMMA, max_new_tokens=TOKENS)
    assert any(origin == "judge" for answer in ours for origin in answer.origins)
    parted = 0
    for prompt, answer, theirs in zip(prompts, ours, judged[0]["tokens"], strict=True):
        if parts(answer.tokens, theirs) is not None:
            parted += 1
            assert doubt(pair, judge, theta, prompt, answer.tokens, theirs)
    with capsys.disabled():
        print(f"\n[{len(PROMPTS)} judged answers of up to {TOKENS} tokens, {parted} part where arithmetic decides]")
    assert parted <= len(PROMPTS) // 3
    (counts,) = judged[0]["counts"]
    assert counts["judged_tokens"] >= sum(o == "judge" for a in ours for o in a.origins) - parted * TOKENS
    assert counts["judged_tokens"] > 0


@pytest.fixture(scope="module")
def plain(prompts: list[list[int]]) -> list[list[int]]:
    (answers,) = run(engine(), [{"prompts": prompts, "params": greedy(TOKENS)}])
    tokens: list[list[int]] = answers["tokens"]
    return tokens


def test_lossless_requests_are_plain_vllm(judged: Answers, plain: list[list[int]]) -> None:
    assert judged[1]["tokens"] == plain
    assert judged[0]["tokens"] != plain


@pytest.mark.slow
def test_lossless_requests_are_vllms_own_speculation(prompts: list[list[int]], judged: Answers) -> None:
    speculative = run(engine(**speculation()), [{"prompts": prompts, "params": greedy(TOKENS)}])
    assert judged[1]["tokens"] == speculative[0]["tokens"]


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_judge_that_accepts_everything_fills_every_block(judged: Answers, temperature: float) -> None:
    (counts,) = judged[3 if temperature else 2]["counts"]
    assert counts["tokens"] == counts["cycles"] * (GAMMA + 1)
    assert counts["aligned_tokens"] < counts["tokens"]


@pytest.mark.slow
def test_the_distilled_draft_is_a_model_vllm_runs(pair: Pair, prompts: list[list[int]]) -> None:
    assert pair.draft is not None
    ours = {i: tokens for i, tokens, _ in respond(pair.draft, prompts, eos_ids=pair.eos_ids, max_new_tokens=TOKENS)}
    (theirs,) = run({"model": folder("draft"), "max_model_len": 256}, [{"prompts": prompts, "params": greedy(TOKENS)}])
    for i, tokens in enumerate(theirs["tokens"]):
        if (at := parts(ours[i], tokens)) is not None:
            with torch.no_grad():
                best = pair.draft(torch.tensor([[*prompts[i], *tokens[:at]]])).logits[0, -1].topk(2).values
            assert float(best[0] - best[1]) < NEAR_TIE
