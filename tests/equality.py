"""Equality of two float32 paths, with the one exception that arithmetic allows: a near-tie of the two best tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import transformers as hf

from selfjudge.models.pair import Pair

NEAR_TIE = 1e-4


def assert_same_tokens(pair: Pair, prompt: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """True where the answers part at a near-tie, False where they are equal; any other difference fails."""
    if list(one) == list(other):
        return False
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    with torch.inference_mode():
        logits = pair.target(torch.tensor([[*prompt, *one[:at]]])).logits[0, -1]
    best = logits.topk(2).values
    gap = float(best[0] - best[1])
    assert gap < NEAR_TIE, f"answers differ at token {at} where the best logits are {gap:.6f} apart"
    return True


@torch.inference_mode()
def assert_greedy(pair: Pair, prompt: Sequence[int], answer: Sequence[int], count: int) -> int:
    """The near-ties among the tokens of an answer, all of which must be what the target likes best after those before.

    That is greedy decoding of up to `count` tokens, checked at every token by one pass of transformers instead of by one
    for each.
    """
    *inside, last = answer
    assert not pair.eos_ids & set(inside)
    assert len(answer) == count or last in pair.eos_ids
    logits = pair.target(torch.tensor([[*prompt, *inside]]), logits_to_keep=len(answer)).logits[0]
    gaps = logits.max(-1).values - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    worst = int(gaps.argmax())
    assert gaps[worst] < NEAR_TIE, f"token {worst} is {float(gaps[worst]):.6f} below the best"
    return int((gaps > 0).sum())


_answers: dict[tuple[object, ...], list[int]] = {}


@torch.inference_mode()
def greedy(model: hf.PreTrainedModel, prompt: list[int], count: int, eos: list[int] | None = None) -> list[int]:
    """What transformers' model says token by token, in half of the time of its `generate`; asked once for the same
    weights, whatever engine it is compared with."""
    weights = hash(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    key = (str(model.config), weights, tuple(prompt), count, tuple(eos or ()))
    if key not in _answers:
        tokens, new, cache = list[int](), prompt, None
        while len(tokens) < count and not (tokens and tokens[-1] in (eos or ())):
            output = model(torch.tensor([new]), past_key_values=cache, use_cache=True)
            cache, new = output.past_key_values, [int(output.logits[0, -1].argmax())]
            tokens += new
        _answers[key] = tokens
    return _answers[key]
