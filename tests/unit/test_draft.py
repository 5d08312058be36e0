"""Drafts of both kinds over cycles of changing length: whatever came before, they propose as if they had read the text
at once."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from conftest import REFERENCE, tiny_head, tiny_model
from equality import greedy
from proposals import ARBITRARY, check_proposals, cycles, head_logits, model_logits, prompts_of, requests_of
from selfjudge.decoding import loop, prefill
from selfjudge.decoding.admission import AdmissionQueue
from selfjudge.decoding.loop import decode
from selfjudge.decoding.rules import EXACT
from selfjudge.engine import draft as drafts, select
from selfjudge.engine.cuda import engine as cuda
from selfjudge.engine.select import make_draft, make_engine
from selfjudge.errors import SelfJudgeError
from selfjudge.types import Gamma

GAMMAS = [3, 0, 0, 5, 1, 0, 2, 2, *[0] * 9, 4, 0, 4]


@pytest.fixture(params=["auto", "cuda", REFERENCE])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(drafts, "BACKLOG", 12)
    for name, tokens in (("PASS_TOKENS", 9), ("CAPTURED_TOKENS", 0)):
        monkeypatch.setattr(cuda, name, tokens)  # prompts are read as long ones are
    monkeypatch.setattr(prefill, "PASS_TOKENS", 9)
    return request.param


def test_a_draft_that_is_the_target_is_never_refused(kind: str) -> None:
    model, prompts = tiny_model(seed=3), prompts_of([3, 11, 1, 7])
    for prompt, row in zip(prompts, cycles(model, model, prompts, GAMMAS, kind=kind), strict=True):
        assert [len(emitted) for _, emitted in row] == [1, *(gamma + 1 for gamma in GAMMAS)]
        tokens = [token for _, emitted in row for token in emitted]
        assert tokens == greedy(model, prompt, len(tokens))


@pytest.mark.quick("auto-eagle3", "cuda-layers")
@pytest.mark.parametrize("draft_kind", ["layers", "eagle3"])
def test_after_many_plain_cycles_the_oldest_tokens_are_left_out(
    kind: str, draft_kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafts, "BACKLOG", 5)
    model, prompts = tiny_model(seed=3), prompts_of([3, 11, 1, 7])
    draft = model if draft_kind == "layers" else tiny_head(model)
    for prompt, row in zip(prompts, cycles(model, draft, prompts, [2, *[0] * 9, 4, 0, 3], kind=kind), strict=True):
        if draft_kind == "layers":
            assert [len(emitted) for _, emitted in row[:11]] == [1, 3, *[1] * 9]
        tokens = [token for _, emitted in row for token in emitted]
        assert tokens == greedy(model, prompt, len(tokens))


def test_a_model_proposes_what_it_would_say_after_the_text(kind: str) -> None:
    target, draft, prompts = tiny_model(seed=1), tiny_model(seed=2), prompts_of([3, 11, 7])
    made = cycles(target, draft, prompts, GAMMAS, ARBITRARY, kind=kind)
    check_proposals(made, prompts, partial(model_logits, draft))


# a target of five layers, whose three states differ; one of two, where two of them are the same
@pytest.mark.quick("auto-llama-4-True", "cuda-qwen2-2-False")
@pytest.mark.parametrize(
    ("model", "layers", "normed"),
    [("qwen2", 2, False), ("llama", 4, True), pytest.param("llama", 5, False, marks=pytest.mark.slow)],
)
def test_a_head_proposes_what_it_would_from_scratch(kind: str, model: str, layers: int, normed: bool) -> None:
    check_head(kind, model, layers, normed)


@pytest.mark.parametrize("kind", ["reference"], indirect=True)
def test_a_head_of_a_target_that_the_reference_engine_alone_runs(kind: str) -> None:
    check_head(kind, "qwen2-mixed-window", 4, normed=False)


def check_head(kind: str, model: str, layers: int, normed: bool) -> None:
    target, prompts = tiny_model(model, seed=1, num_hidden_layers=layers), prompts_of([3, 11, 1, 7])
    head = tiny_head(target, norm_before_residual=normed)
    made = cycles(target, head, prompts, GAMMAS, ARBITRARY, kind=kind)
    check_proposals(made, prompts, partial(head_logits, head, target))


@pytest.mark.quick("auto-1", "cuda-5")
@pytest.mark.parametrize("chunk", [1, pytest.param(2, marks=pytest.mark.slow), 5])
def test_a_head_reads_a_prompt_in_chunks(kind: str, chunk: int) -> None:
    target, (prompt,) = tiny_model(seed=1, num_hidden_layers=4), prompts_of([11])
    head = tiny_head(target)
    whole, pieces = (cycles(target, head, [prompt], GAMMAS, ARBITRARY, kind=kind, chunk=size) for size in (96, chunk))
    assert whole == pieces


@pytest.mark.quick("cpu-*-lengths2", "cpu-0-lengths0", "cuda-2-lengths0")
@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [1, 6, 1]])
@pytest.mark.parametrize("first", [2, 0, None])
@pytest.mark.parametrize("kind", ["cpu", "cuda", REFERENCE], indirect=True)
def test_a_head_of_prompts_of_one_token(
    kind: str, lengths: list[int], first: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head has no entries for them. Where γ is chosen, it reads prompts when it drafts, or when others enter."""
    plan = iter([first, 0, 0, *[2] * 60])
    monkeypatch.setattr(loop, "measure_costs", lambda *_: None)
    monkeypatch.setattr(loop.BatchGamma, "time_choices", lambda *_: None)  # the plan needs no costs
    monkeypatch.setattr(loop.GammaController, "choose", lambda *_: next(plan))
    monkeypatch.setattr(loop.GammaController, "draft_on", lambda *_: True)
    target = tiny_model(seed=3, num_hidden_layers=4)
    head, prompts = tiny_head(target), prompts_of([*lengths, 1, 1])
    engine = make_engine(target, features=head.config.aux_layers, kind=kind)
    engines, queue = drafts.BatchEngines(engine, make_draft(head, target, kind=kind)), AdmissionQueue(4, 60)
    requests = requests_of(prompts, [*[20, 1, 20][: len(lengths)], 20, 9])
    tokens = [list[int]() for _ in requests]
    gamma: Gamma = 3 if first is None else "auto"
    for number, step in enumerate(decode(engines, requests[: len(lengths)], EXACT, gamma=gamma, queue=queue)):
        for emission in step.emissions:
            tokens[emission.row] += emission.tokens
        for request in {2: requests[-2:-1], 4: requests[-1:]}.get(number, ()):
            queue.put(request)
    for request, answer in zip(requests, tokens, strict=True):
        assert answer == greedy(target, request.prompt, request.max_new_tokens)


@pytest.mark.parametrize("kind", ["cpu", "reference"])
def test_a_head_that_has_read_prompts_of_one_token_sees_nothing_of_them(kind: str) -> None:
    target = tiny_model(seed=3)
    empty, fresh = (make_draft(tiny_head(target), target, kind=kind).engine for _ in range(2))
    states = torch.randn(3, 2, 96, generator=torch.Generator().manual_seed(1))
    empty.append(torch.tensor([[4], [5], [6]]), states[:, :1], torch.zeros(3, dtype=torch.long), keep=0)
    empty.select([0, 2])
    tokens, own = torch.tensor([[7, 9], [8, 9]]), states[[0, 2]]
    for column in (slice(1), slice(1, 2)):
        one, other = (engine.append(tokens[:, column], own[:, column]).logits for engine in (empty, fresh))
        torch.testing.assert_close(one, other)


def test_a_head_that_the_engine_cannot_run_is_refused() -> None:
    select._warn_once.cache_clear()  # the warning comes once
    target = tiny_model(seed=1, hidden_size=24, num_attention_heads=4, num_key_value_heads=4)
    head = tiny_head(target)
    with pytest.raises(SelfJudgeError, match="the cpu engine cannot run this head: its heads are 6 wide"):
        make_draft(head, target, kind="cpu")
    with pytest.raises(SelfJudgeError, match="int8 weights need the cpu engine, not reference"):
        make_draft(head, target, kind="reference", int8=True)
    with pytest.warns(UserWarning, match="using the reference engine: its heads are 6 wide"):
        made = cycles(target, head, prompts_of([5]), [2, 2], ARBITRARY)
    assert len(made[0]) == 3


def test_states_that_cannot_be_read_are_refused() -> None:
    with pytest.raises(SelfJudgeError, match="'gpt2' cannot be read"):
        make_engine(tiny_model("gpt2"), features=(0, 1, 1))


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["reference", "cpu", "cuda"])
def test_features_are_the_inputs_of_layers(kind: str) -> None:
    model, layers = tiny_model(seed=4, num_hidden_layers=5), (1, 3, 4)
    engine = make_engine(model, features=layers, kind=kind)
    tokens, counts = torch.tensor(prompts_of([9, 9])), torch.tensor([9, 4])
    engine.reserve(2, 40)
    features = [engine.prefill(tokens, counts).features, engine.extend(tokens[:, :3]).features]
    for row, count in enumerate(counts.tolist()):
        text = torch.cat([tokens[row, 9 - count :], tokens[row, :3]])
        states = model(text[None], output_hidden_states=True).hidden_states
        wanted = torch.cat([states[i][0] for i in layers], -1)
        assert all(f is not None for f in features)
        torch.testing.assert_close(features[0][row, 9 - count :], wanted[:count], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(features[1][row], wanted[count:], rtol=1e-4, atol=1e-4)


def test_a_row_of_the_backlog_that_is_selected_twice_becomes_two() -> None:
    backlog = drafts.Backlog(torch.device("cpu"))
    backlog.reserve(2)
    backlog.enter(torch.tensor([7, 8]))
    backlog.select([1, 0, 1])
    assert backlog.tokens[:, -1].tolist() == [8, 7, 8]
