"""Drafts over cycles of changing length: whatever γ was before, they know all tokens that stand."""

from __future__ import annotations

import pytest
import torch

from conftest import VOCAB, tiny_model
from equality import greedy
from selfjudge.decoding.cycle import find_cycle
from selfjudge.decoding.rules import Exact
from selfjudge.engine import draft as drafts
from selfjudge.engine.base import Engine
from selfjudge.engine.draft import Draft, LayersDraft
from selfjudge.engine.select import make_engine

GAMMAS = [3, 0, 0, 5, 1, 0, 2, 2, *[0] * 9, 4, 0, 4]


@pytest.fixture(params=["reference", "auto", "cuda"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(drafts, "BACKLOG", 12)
    return request.param


def prompts_of(lengths: list[int]) -> list[list[int]]:
    random = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCAB, (n,), generator=random).tolist() for n in lengths]


def cycles(target: Engine, draft: Draft, prompts: list[list[int]], gammas: list[int]) -> list[list[list[int]]]:
    """The tokens of each row and cycle, prefill's first, with drafts of the given lengths."""
    rule, counts = Exact(), [len(prompt) for prompt in prompts]
    padded = torch.tensor([[0] * (max(counts) - len(prompt)) + prompt for prompt in prompts])
    target.reserve(len(prompts), 96)
    draft.reserve(len(prompts), 96)
    output = target.prefill(padded, torch.tensor(counts))
    draft.read(padded, torch.tensor(counts), output.features)
    last = output.logits[:, -1].argmax(-1)
    draft.enter(last)
    emitted = [[[token]] for token in last.tolist()]
    for gamma in gammas:
        cycle = find_cycle(target, draft, rule, gamma, trace=False, first=last)
        table = cycle.run(None)[0].tolist()
        last = cycle.last[:, 0].clone()
        for row, packed in zip(emitted, table, strict=True):
            row.append([*packed[: packed[-3]], packed[-2]])
    return emitted


def test_a_draft_that_is_the_target_is_never_refused_whatever_gamma_was_before(kind: str) -> None:
    model, prompts = tiny_model(seed=3), prompts_of([3, 11, 1, 7])
    made = cycles(make_engine(model, kind=kind), LayersDraft(make_engine(model, kind=kind)), prompts, GAMMAS)
    for prompt, row in zip(prompts, made, strict=True):
        assert [len(tokens) for tokens in row] == [1, *(gamma + 1 for gamma in GAMMAS)]
        tokens = [token for part in row for token in part]
        assert tokens == greedy(model, prompt, len(tokens))


def test_a_draft_that_is_refused_now_and_then_keeps_up(kind: str) -> None:
    """What it proposes after any history is what it would propose with the same text as a prompt."""
    target, model, prompts = tiny_model(seed=1), tiny_model(seed=1), prompts_of([3, 11, 7])
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05 * p.std().nan_to_num(0.0))
    made = cycles(make_engine(target, kind=kind), LayersDraft(make_engine(model, kind=kind)), prompts, GAMMAS)
    for prompt, row in zip(prompts, made, strict=True):
        text = [*prompt, *row[0]]
        assert text[len(prompt) :] == greedy(target, prompt, 1)
        for gamma, tokens in zip(GAMMAS, row[1:], strict=True):
            wanted, own = greedy(target, text, gamma + 1), greedy(model, text, gamma) if gamma else []
            k = next((i for i, (a, b) in enumerate(zip(own, wanted, strict=False)) if a != b), gamma)
            assert tokens == wanted[: k + 1]
            text += tokens


def test_after_many_plain_cycles_the_oldest_tokens_are_left_out(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "BACKLOG", 5)
    model, prompts = tiny_model(seed=3), prompts_of([3, 11, 1, 7])
    draft = LayersDraft(make_engine(model, kind=kind))
    made = cycles(make_engine(model, kind=kind), draft, prompts, [2, *[0] * 9, 4, 0, 3])
    for prompt, row in zip(prompts, made, strict=True):
        assert [len(tokens) for tokens in row[:11]] == [1, 3, *[1] * 9]
        tokens = [token for part in row for token in part]
        assert tokens == greedy(model, prompt, len(tokens))
