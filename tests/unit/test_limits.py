"""Rows of a batch that verify different numbers of drafts: a limited row is the same row with a shorter block."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import REFERENCE, VOCAB, tiny_head, tiny_model
from equality import greedy
from proposals import ARBITRARY, check_proposals, cycles, head_logits, model_logits, prompts_of
from selfjudge.decoding.capture import capture_cycles, time_cycle
from selfjudge.decoding.cycle import Cycle, CycleSize, find_cycle
from selfjudge.decoding.rule_parser import RULES
from selfjudge.decoding.rules import (
    EXACT,
    AcceptanceRule,
    FLy,
    Judged,
    JudgeOnly,
    Margin,
    Relaxed,
    SpeculativeSampling,
    TopK,
    Typical,
)
from selfjudge.decoding.rules_baselines import Divergence, LogitRatio, RegretBudget, TwoThresholds
from selfjudge.decoding.sampling import Sampling
from selfjudge.engine.cpu.engine import CpuEngine
from selfjudge.engine.cuda.engine import CudaEngine
from selfjudge.engine.draft import BatchEngines
from selfjudge.engine.reference import ReferenceEngine
from selfjudge.engine.select import make_draft, make_engine
from selfjudge.judge.config import JudgeConfig
from selfjudge.judge.model import Judge
from selfjudge.ops import argmax_checked
from selfjudge.types import Block

H, V, GAMMA, ROWS = 3, 7, 5, 28
KINDS = ["cpu", "cuda", REFERENCE]
WARPED = SpeculativeSampling(Sampling(0.8, top_p=0.9))


def linear_judge(hidden: int = H) -> Judge:
    random = torch.Generator().manual_seed(1)
    return Judge(JudgeConfig(hidden, thresholds={"R": 0.5}), torch.randn(hidden, generator=random))


JUDGE = linear_judge()
EVERY_RULE = [
    EXACT,
    SpeculativeSampling(),
    WARPED,
    TopK(2),
    TopK(3, guard=True, special=(1, 2)),
    Relaxed(3, 0.4),
    Typical(),
    Margin(1.0),
    Margin(price=0.8, special=(1,)),
    FLy(0.3, 2),
    Judged(JUDGE, 0.4, special=(2,)),
    Judged(JUDGE, 0.4, confirm=2),
    Judged(JUDGE, price=0.5, special=(2,)),
    Judged(JUDGE, 0.5, WARPED),
    JudgeOnly(JUDGE, 0.3, special=(2,)),
    JudgeOnly(JUDGE, 0.4, WARPED),
    Divergence(0.12, 0.95),
    LogitRatio(0.6),
    RegretBudget(6.0, 1.5, 2),
    TwoThresholds(0.15),
    TwoThresholds(0.4, 0.6, WARPED),
]


def random_block(rule: AcceptanceRule, seed: int, finite: bool) -> Block:
    """Rows that are aligned for a while, with ties of logits; non-finite numbers in some cells unless `finite`."""
    torch.manual_seed(seed)
    logits = (torch.randn(ROWS, GAMMA + 1, V) * 2).round()
    best = logits[:, :-1].argmax(-1)
    drafts = torch.where(torch.rand(ROWS, GAMMA) < 0.7, best, torch.randint(0, V, (ROWS, GAMMA)))
    hidden = torch.randn(ROWS, GAMMA + 1, H)
    if not finite:
        for value in (math.nan, math.inf):
            logits[torch.rand(logits.shape) < 0.005] = value
            hidden[torch.rand(hidden.shape) < 0.005] = value
    q = torch.randn(ROWS, GAMMA, V) + torch.nn.functional.one_hot(drafts, V) * 2
    if rule.reads_draft:
        return Block(drafts, logits, hidden, logits[:, :-1].nan_to_num(posinf=9.0) + 0.4 * q)
    if rule.sampling is None:
        return Block(drafts, logits, hidden)
    q = rule.sampling.warp(q)
    return Block(drafts, logits, hidden, q, torch.rand(ROWS, GAMMA + 1))


def cut(block: Block, row: int, length: int) -> Block:
    """One row with its first `length` drafts alone; the last random number stays that of the token after them."""
    u, q = block.uniforms, block.draft_logits
    own = slice(row, row + 1)
    return Block(
        block.draft_tokens[own, :length],
        block.target_logits[own, : length + 1],
        None if block.hidden is None else block.hidden[own, : length + 1],
        None if q is None else q[own, :length],
        None if u is None else torch.cat([u[own, :length], u[own, -1:]], 1),
        None if block.scores is None else block.scores[own, :length],
        None if block.argmax is None else (block.argmax[0][own, : length + 1], block.argmax[1][own, : length + 1]),
    )


def test_every_rule_is_here() -> None:
    assert {rule.name for rule in EVERY_RULE} == set(RULES)


@pytest.mark.quick("non-finite-*")
@pytest.mark.parametrize("rule", EVERY_RULE, ids=lambda rule: rule.name)
@pytest.mark.parametrize("finite", [True, False], ids=["finite", "non-finite"])
def test_a_limited_row_gets_the_verdict_of_a_shorter_block(rule: AcceptanceRule, finite: bool) -> None:
    for seed, (scored, known) in enumerate(((False, False), (True, True), (False, True))):
        block = random_block(rule, seed, finite)
        if known:
            block = replace(block, argmax=argmax_checked(block.target_logits))
        if scored and rule.judge is not None:
            block = replace(block, scores=rule.judge(block))
        limits = torch.randint(0, GAMMA + 1, (ROWS,))
        verdict = rule(replace(block, limits=limits))
        alone = [rule(cut(block, row, length)) for row, length in enumerate(limits.tolist())]
        assert verdict.n_accepted.tolist() == [int(v.n_accepted) for v in alone]
        assert verdict.next_token.tolist() == [int(v.next_token) for v in alone]
        assert bool(verdict.non_finite) == any(bool(v.non_finite) for v in alone)
        for row, length in enumerate(limits.tolist()):
            assert verdict.judged[row].tolist() == [*alone[row].judged[0].tolist(), *[False] * (GAMMA - length)]
        assert {0, 1, 2} <= set(verdict.n_accepted.tolist())
        assert (verdict.n_accepted == limits).any()
        assert ((verdict.n_accepted < limits) & (limits < GAMMA)).any()


@pytest.mark.parametrize("rule", EVERY_RULE, ids=lambda rule: rule.name)
def test_what_lies_beyond_the_limits_does_not_matter(rule: AcceptanceRule) -> None:
    """Neither numbers that are non-finite nor drafts that match."""
    block = random_block(rule, 7, finite=True)
    limits = torch.randint(0, GAMMA + 1, (ROWS,))
    beyond = torch.arange(GAMMA + 1) > limits[:, None]
    logits, hidden = block.target_logits.clone(), block.hidden.clone()
    logits[beyond], hidden[beyond] = math.nan, math.inf
    other = replace(block, target_logits=logits, hidden=hidden, limits=limits)
    drafts = torch.where(beyond[:, 1:], logits[:, :-1].nan_to_num(0).argmax(-1), block.draft_tokens)
    one, two = rule(replace(block, limits=limits)), rule(replace(other, draft_tokens=drafts))
    assert torch.equal(one.n_accepted, two.n_accepted)
    assert torch.equal(one.next_token, two.next_token)
    assert torch.equal(one.judged, two.judged)
    assert not two.non_finite


def test_a_limit_of_all_drafts_is_no_limit() -> None:
    for rule in EVERY_RULE:
        block = random_block(rule, 3, finite=False)
        one, two = rule(block), rule(replace(block, limits=torch.full((ROWS,), GAMMA)))
        assert torch.equal(one.n_accepted, two.n_accepted)
        assert torch.equal(one.next_token, two.next_token)
        assert torch.equal(one.judged, two.judged)
        assert torch.equal(one.non_finite, two.non_finite)


class Counting(Judge):
    asked = 0

    def score(self, x: Tensor) -> Tensor:
        self.asked += 1
        return torch.ones(x.shape[:-1])


def test_a_judge_is_not_asked_about_drafts_beyond_the_limits() -> None:
    judge, logits = Counting(JudgeConfig(H)), torch.randn(1, 4, V)
    drafts = logits[:, :-1].argmax(-1)
    drafts[0, 2] = logits[0, 2].argmin()
    block = Block(drafts, logits, torch.zeros(1, 4, H), argmax=argmax_checked(logits))
    assert Judged(judge, 0.5)(replace(block, limits=torch.tensor([2]))).n_accepted.tolist() == [2]
    assert judge.asked == 0
    assert Judged(judge, 0.5)(replace(block, limits=torch.tensor([3]))).n_accepted.tolist() == [3]
    assert judge.asked == 1


@pytest.mark.quick("4-*")
@torch.inference_mode()
@pytest.mark.parametrize(("kind", "model_kind"), [*((kind, "llama") for kind in ("reference", "cpu", "cuda")), ("reference", "mistral-window"), ("cuda", "qwen2")])  # fmt: skip
@pytest.mark.parametrize("rows", [1, 4])
def test_the_first_tokens_of_each_row(kind: str, model_kind: str, rows: int) -> None:
    """Logits, states and features of every row are those of a fresh forward; what a row did not take left no trace."""
    model, layers = tiny_model(model_kind, seed=4, num_hidden_layers=3), (0, 2, 2)
    features = () if model_kind == "mistral-window" else layers
    engine, random = make_engine(model, hidden=True, features=features, kind=kind), torch.Generator().manual_seed(0)
    texts = prompts_of([5, 9, 2, 7][:rows])
    counts, width = torch.tensor([len(text) for text in texts]), max(map(len, texts))
    engine.reserve(rows, 90)
    engine.prefill(torch.tensor([[0] * (width - len(text)) + text for text in texts]), counts)
    for _ in range(7):
        tokens = torch.randint(3, VOCAB, (rows, 5), generator=random)
        counts = torch.randint(1, 6, (rows,), generator=random)
        output = engine.extend_first(tokens, counts)
        assert output.logits.shape == (rows, 5, VOCAB)
        for row, count in enumerate(counts.tolist()):
            texts[row] += tokens[row, :count].tolist()
            fresh = model(torch.tensor([texts[row]]), use_cache=False, output_hidden_states=True)
            states = fresh.hidden_states
            pairs = [(output.logits, fresh.logits), (output.hidden, states[-1])]
            if features:
                pairs.append((output.features, torch.cat([states[i] for i in features], -1)))
            for found, wanted in pairs:
                assert found is not None
                torch.testing.assert_close(found[row, :count], wanted[0, -count:], atol=2e-4, rtol=1e-4)
                assert torch.isfinite(found[row]).all()
        rejected = (torch.rand(rows, generator=random) * counts).long()
        engine.rewind(rejected)
        texts = [text[: len(text) - n] for text, n in zip(texts, rejected.tolist(), strict=True)]


def test_only_what_rows_take_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []

    def counted(name: str, original: Any, size: Any) -> Any:
        def wrapped(self: object, *arguments: Any, **options: Any) -> Any:
            computed.append(size(*arguments))
            return original(self, *arguments, **options)

        return wrapped

    monkeypatch.setattr(CpuEngine, "_pass", counted("_pass", CpuEngine._pass, lambda cells, *_: len(cells)))
    forward = counted("_forward", CudaEngine._forward, lambda x, *_: x.shape[0] * x.shape[1])
    monkeypatch.setattr(CudaEngine, "_forward", forward)
    run = counted("_pass", ReferenceEngine._pass, lambda tokens, *_: tokens.numel())
    monkeypatch.setattr(ReferenceEngine, "_pass", run)
    model, tokens, counts = tiny_model(), torch.ones(3, 6, dtype=torch.long), torch.tensor([1, 4, 2])
    for kind, wanted in (("cpu", 7), ("reference", 12), ("cuda", 18)):
        engine = make_engine(model, kind=kind)
        engine.reserve(3, 40)
        computed.clear()
        engine.extend_first(tokens, counts)
        assert computed == [wanted], kind


LIMITS = [0, 1, 4, 2]
ROW_RULES = [
    EXACT,
    TopK(3),
    Margin(2.0),
    Margin(price=1.5),
    FLy(0.2, 1),
    Judged(linear_judge(32), 0.3),
    Judged(linear_judge(32), price=1.0),
    SpeculativeSampling(Sampling(0.9)),
    Divergence(0.5),
    LogitRatio(0.5),
    RegretBudget(4.0, 1.0, 3),
    TwoThresholds(0.05, 0.9, SpeculativeSampling(Sampling(0.9))),
]


# every rule on the quickest engine; on the others those that read the most, and the one that draws; of two rules that
# differ in their verdicts alone, one has the head
@pytest.mark.quick("cpu-*-layers*", "cpu-judged-eagle3", "cuda-sampling-eagle3", "cuda-exact-layers")
@pytest.mark.parametrize(
    ("kind", "rule", "draft_kind"),
    [
        *(("cpu", rule, "layers") for rule in ROW_RULES),
        *(("cpu", ROW_RULES[i], "eagle3") for i in (0, 3, 5, 7, 9)),
        *(("cuda", ROW_RULES[i], "eagle3") for i in (6, 7, 8)),
        *(("cuda", ROW_RULES[i], "layers") for i in (0, 10)),
        *(pytest.param("reference", ROW_RULES[i], "layers", marks=pytest.mark.slow) for i in (6, 7, 8)),
        *(pytest.param("reference", ROW_RULES[i], "eagle3", marks=pytest.mark.slow) for i in (0, 10)),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_row_with_a_limit_answers_as_it_would_alone_with_that_gamma(
    kind: str, draft_kind: str, rule: AcceptanceRule
) -> None:
    target, prompts = tiny_model(seed=1, num_hidden_layers=3), prompts_of([3, 11, 1, 7])
    draft = _similar(target) if draft_kind == "layers" else tiny_head(target, draft_vocab_size=50)
    together = cycles(target, draft, prompts, [4] * 5, rule, kind=kind, limits=LIMITS)
    for row, limit in enumerate(LIMITS):
        (alone,) = cycles(target, draft, [prompts[row]], [limit] * 5, rule, kind=kind, seeds=[row])
        assert [emitted for _, emitted in together[row]] == [emitted for _, emitted in alone]
    if draft_kind == "layers":  # a random head is seldom right
        assert {len(emitted) for row in together for _, emitted in row} >= {1, 2, 3}


def _similar(model: Any) -> Any:
    """A draft that agrees often, not always."""
    draft = tiny_model(seed=1, num_hidden_layers=model.config.num_hidden_layers)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in draft.parameters():
            p.add_(torch.randn(p.shape, generator=random) * 0.05 * p.std().nan_to_num(0.0))
    return draft


@pytest.mark.quick("cpu-eagle3", "cuda-layers")
@pytest.mark.parametrize("draft_kind", ["layers", "eagle3"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_keep_up_with_limited_rows(kind: str, draft_kind: str) -> None:
    """Whatever a row accepted below its limit, the next proposals are those of its text from scratch."""
    target, prompts = tiny_model(seed=1, num_hidden_layers=4), prompts_of([3, 11, 1, 7])
    head = tiny_head(target)
    draft = head if draft_kind == "eagle3" else tiny_model(seed=2)
    logits = partial(head_logits, head, target) if draft_kind == "eagle3" else partial(model_logits, draft)
    gammas = [3, 0, 0, 5, 1, 0, 2, 2, 4, 0, 4]
    check_proposals(cycles(target, draft, prompts, gammas, ARBITRARY, kind=kind, limits=[2, 4, 0, 3]), prompts, logits)


def _cycle(kind: str, gamma: int = 3, *, limited: bool = False) -> Cycle:
    model = tiny_model(seed=3)
    engine, draft = make_engine(model, kind=kind), make_draft(model, model, kind=kind)
    for cache in (engine, draft):
        cache.reserve(2, 80)
    prompts = torch.tensor(prompts_of([4, 4]))
    draft.read(prompts, torch.tensor([4, 4]), None)
    first = engine.prefill(prompts, torch.tensor([4, 4])).logits[:, -1].argmax(-1)
    draft.enter(first)
    return find_cycle(BatchEngines(engine, draft), EXACT, CycleSize(gamma, limited), trace=False, first=first)


def test_limits_that_do_not_fit_a_captured_cycle() -> None:
    with pytest.raises(ValueError, match="needs them"):
        _cycle("cuda", limited=True).run(None)
    with pytest.raises(ValueError, match="only if it is captured with them"):
        _cycle("cuda").run(None, [1, 1])


def test_a_cycle_of_limited_rows_is_captured_before_its_first_run() -> None:
    cycle = _cycle("cuda", limited=True)
    kept = cycle.target.captured_cycles
    (same,) = capture_cycles(BatchEngines(cycle.target, cycle.draft), EXACT, 2, [CycleSize(3, limited=True)])
    assert same is cycle
    assert cycle.captured is not None
    assert min(time_cycle(cycle, 1)) >= 0
    found = [cycle.run(None, limits)[0].unpack().accepted.tolist() for limits in ([1, 2], [3, 0], [0, 1])]
    assert found == [[1, 2], [3, 0], [0, 1]]
    assert list(kept.values()) == [cycle]


@pytest.mark.parametrize("kind", ["reference", "cpu"])
def test_limits_hold_for_one_cycle(kind: str) -> None:
    """The draft is the target, so that every draft that is verified is accepted."""
    cycle = _cycle(kind)
    found = [cycle.run(None, limits)[0].unpack().accepted.tolist() for limits in ([1, 0], None, torch.tensor([3, 2]))]
    assert found == [[1, 0], [3, 3], [3, 2]]


@pytest.mark.parametrize("kind", ["reference", "cpu"])
def test_limits_may_be_set_while_the_draft_proposes(kind: str) -> None:
    """By what the draft thinks of its own proposals; where drafting ends early, they end with it."""
    cycle = _cycle(kind)
    asked = []

    def draft_on(q: Any) -> bool:
        asked.append(list(q()))
        cycle.limit([1, 3])
        return len(asked) < 2

    cycle.draft_on = draft_on
    packed, _ = cycle.run(None)
    assert packed.drafted == 2
    assert packed.unpack().accepted.tolist() == [1, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_limited_cycles_give_the_targets_own_answer(kind: str) -> None:
    """With captured cycles of several numbers of tokens on one engine."""
    target, prompts = tiny_model(seed=1), prompts_of([3, 11, 1, 7])
    random = torch.Generator().manual_seed(5)
    limits = [torch.randint(0, 5, (4,), generator=random).tolist() for _ in range(9)]
    for row, prompt in zip(
        cycles(target, _similar(target), prompts, [4] * 9, kind=kind, limits=limits), prompts, strict=True
    ):
        tokens = [token for _, emitted in row for token in emitted]
        assert tokens == greedy(target, prompt, len(tokens))
