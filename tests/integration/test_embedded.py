"""The embedded pair: real weights, compared token for token with transformers."""

from __future__ import annotations

import pytest
from equality import assert_same_tokens

from selfjudge.accept import Exact, Judged, Sampling, SpeculativeSampling
from selfjudge.bench import transformers_tokens
from selfjudge.judge import Judge
from selfjudge.models.pair import Pair
from selfjudge.prompts import BUILT_IN
from selfjudge.shells import generate, stream

PROMPTS = [text for _, text in BUILT_IN]


def compare(pair: Pair, prompts: list[str], tokens: int, batches: list[int], capsys: pytest.CaptureFixture) -> None:
    reference = [transformers_tokens(pair, p, tokens) for p in prompts]
    for batch in batches:
        answers = generate(pair, prompts, gamma=4, max_new_tokens=tokens, batch=batch)
        ties = sum(
            assert_same_tokens(pair, pair.encode(p), r, a.tokens)
            for p, r, a in zip(prompts, reference, answers, strict=True)
        )
        with capsys.disabled():
            print(f"\n[batch {batch}: {len(prompts)} answers of up to {tokens} tokens, {ties} part at a near-tie]")
        assert ties <= len(prompts) // 5


def test_exact_equals_transformers(embedded: Pair, capsys: pytest.CaptureFixture) -> None:
    compare(embedded, PROMPTS[:4], 40, [1, 4], capsys)


@pytest.mark.slow
def test_exact_equals_transformers_on_many_prompts(embedded: Pair, capsys: pytest.CaptureFixture) -> None:
    compare(embedded, PROMPTS[:22], 128, [1, 8], capsys)


def test_the_draft_is_of_use(embedded: Pair) -> None:
    answers = generate(embedded, PROMPTS[:4], gamma=4, max_new_tokens=40, batch=4)
    accepted = sum(o == "draft" for a in answers for o in a.origins)
    assert accepted > 40  # of 160 tokens; a draft materialised wrongly agrees on next to none


def test_a_refusing_judge_is_exact_and_the_guard_holds_back_an_accepting_one(embedded: Pair) -> None:
    prompt, size = PROMPTS[4:5], embedded.hidden_size
    exact = generate(embedded, prompt, Exact(), gamma=3, max_new_tokens=24)[0]
    never = Judged(Judge.constant(0.0, size), 0.5, special=embedded.special_ids)
    assert generate(embedded, prompt, never, gamma=3, max_new_tokens=24)[0].tokens == exact.tokens
    always = Judged(Judge.constant(1.0, size), 0.5, special=embedded.special_ids)
    relaxed = generate(embedded, prompt, always, gamma=3, max_new_tokens=24)[0]
    assert relaxed.mean_accepted_length > exact.mean_accepted_length
    assert relaxed.judged_share > 0


def test_sampling_is_repeatable(embedded: Pair) -> None:
    rule = SpeculativeSampling(Sampling(0.8, top_p=0.9))
    one, two = (generate(embedded, PROMPTS[1:2], rule, gamma=3, max_new_tokens=16, seed=s)[0].tokens for s in (1, 1))
    assert one == two
    assert generate(embedded, PROMPTS[1:2], rule, gamma=3, max_new_tokens=16, seed=2)[0].tokens != one


def test_stream_is_generate(embedded: Pair) -> None:
    (whole,) = generate(embedded, PROMPTS[1:2], gamma=3, max_new_tokens=24)
    answer = stream(embedded, PROMPTS[1], gamma=3, max_new_tokens=24)
    assert "".join(piece.text for piece in answer) == whole.text
    assert answer.generation.tokens == whole.tokens
