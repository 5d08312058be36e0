"""The published rules for comparison, by hand: JuDi's KL, MARS, ASD's budget, SGLang's thresholds."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from conftest import tiny_head, tiny_model
from proposals import cycles, prompts_of, requests_of
from selfjudge.decoding.loop import decode
from selfjudge.decoding.rule_parser import RuleRequest
from selfjudge.decoding.rules import EXACT, AcceptanceRule, SpeculativeSampling
from selfjudge.decoding.rules_baselines import Divergence, LogitRatio, RegretBudget, TwoThresholds
from selfjudge.decoding.sampling import Sampling
from selfjudge.engine.draft import BatchEngines
from selfjudge.engine.select import make_draft, make_engine
from selfjudge.errors import SelfJudgeError
from selfjudge.types import Block


def block_of(drafts: list[list[int]], logits: list[list[list[float]]], **extra: torch.Tensor) -> Block:
    """`logits[b][i]` predicts drafts[b][i]; the last row of each predicts the token after them."""
    return Block(torch.tensor(drafts), torch.tensor(logits), **extra)


def accepted(rule: AcceptanceRule, block: Block) -> list[int]:
    return rule(block).n_accepted.tolist()


P = [[0.5, 0.3, 0.2]] * 3
"""The target prefers 0 everywhere."""
LOG_P = [[math.log(p) for p in row] for row in P]


def test_kl_is_of_the_target_from_the_draft_and_leaves_confident_targets_alone() -> None:
    q = [[0.3, 0.5, 0.2], [0.1, 0.8, 0.1]]
    kl = [sum(p * math.log(p / r) for p, r in zip(P[0], row, strict=True)) for row in q]
    assert kl == pytest.approx([0.10217, 0.64910], abs=1e-5)
    block = block_of([[1, 1]], [LOG_P], draft_logits=torch.tensor([q]).log())
    assert accepted(Divergence(0.11), block) == [1]
    assert accepted(Divergence(0.10), block) == [0]
    assert accepted(Divergence(0.65), block) == [2]
    assert accepted(Divergence(0.11, confident=0.49), block) == [0]  # the target is sure at p(top) = 0.5
    reverse = sum(r * math.log(r / p) for p, r in zip(P[0], q[1], strict=True))
    assert reverse < 0.6
    assert accepted(Divergence(0.6), block) == [1]


def test_kl_of_a_draft_that_knows_some_tokens_is_over_these() -> None:
    q = torch.tensor([[[0.4, 0.6, 0.0]]]).log()
    kl = 0.625 * math.log(0.625 / 0.4) + 0.375 * math.log(0.375 / 0.6)
    block = block_of([[1]], [LOG_P[:2]], draft_logits=q)
    assert accepted(Divergence(kl + 1e-4), block) == [1]
    assert accepted(Divergence(kl - 1e-4), block) == [0]


def test_mars_takes_the_second_choice_where_the_ratio_of_logits_is_near_1() -> None:
    rows = [[[10.0, 9.5, 9.4], [10.0, 9.5, 9.4]]] * 2
    assert accepted(LogitRatio(0.9), block_of([[1], [2]], rows)) == [1, 0]  # the third is as near, and no candidate
    assert accepted(LogitRatio(0.95), block_of([[1], [0]], rows)) == [0, 1]  # the ratio must exceed it
    signs = [[[1.0, -1.0, -3.0]] * 2, [[-1.0, -1.05, -3.0]] * 2]
    assert accepted(LogitRatio(0.0), block_of([[1], [1]], signs)) == [0, 0]


def test_asd_weighs_regret_by_what_it_saves_and_counts_mismatches() -> None:
    row = [3.0, 2.5, 2.0, 0.0]  # regret 0, 0.5, 1, 3
    logits = [[row] * 5]
    assert accepted(RegretBudget(8, 0.25, 2), block_of([[1, 0, 0, 0]], logits)) == [4]  # 0.5 / 4
    assert accepted(RegretBudget(8, 0.25, 2), block_of([[2, 0, 0, 0]], logits)) == [4]  # 1 / 4
    assert accepted(RegretBudget(8, 0.25, 2), block_of([[3, 0, 0, 0]], logits)) == [0]  # 3 / 4
    assert accepted(RegretBudget(8, 0.25, 2), block_of([[0, 2, 0, 0]], logits)) == [1]  # 1 / 3
    assert accepted(RegretBudget(8, 0.25, 2), block_of([[0, 0, 1, 0]], logits)) == [4]  # 0.5 / 2
    assert accepted(RegretBudget(8, 9, 2), block_of([[1, 1, 0, 1]], logits)) == [3]  # a third mismatch
    assert accepted(RegretBudget(1.4, 9, 4), block_of([[1, 0, 2, 0]], logits)) == [2]  # 0.5 + 1 > 1.4
    limited = block_of([[2, 0, 0, 0]], logits, limits=torch.tensor([3]))
    assert accepted(RegretBudget(8, 0.25, 2), limited) == [0]  # 1 / 3 of three drafts


def test_asd_spends_what_is_emitted_and_no_more() -> None:
    row = [3.0, 2.5, 2.0, 0.0]
    block = block_of([[1, 0, 2, 3]] * 2, [[row] * 5] * 2, spent=torch.tensor([0.0, 0.75]))
    verdict = RegretBudget(2.0, 9, 4)(block)
    assert verdict.n_accepted.tolist() == [3, 2]
    assert verdict.spent is not None
    assert verdict.spent.tolist() == [1.5, 1.25]


def test_sglang_has_a_threshold_of_its_own_for_each_number() -> None:
    block = block_of([[1, 2]], [LOG_P])
    assert accepted(TwoThresholds(0.29), block) == [1]
    assert accepted(TwoThresholds(0.31), block) == [0]
    assert accepted(TwoThresholds(0.19), block) == [2]
    assert accepted(TwoThresholds(1.0, 0.25), block) == [1]  # the smaller of the two decides
    sampled = SpeculativeSampling(Sampling(1.0))
    q = torch.tensor([[[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]]).log()
    drawn = replace(block, draft_logits=q, uniforms=torch.tensor([[0.4, 0.4, 0.0]]))
    assert accepted(TwoThresholds(1.0, 1.0, sampled), drawn) == [0]  # u < p/q: 0.4 < 0.3
    assert accepted(TwoThresholds(1.0, 0.7, sampled), drawn) == [1]  # 0.4 · 0.7 < 0.3, not < 0.2
    assert accepted(TwoThresholds(0.19, 1.0, sampled), drawn) == [2]


STRICT = [Divergence(0.0), LogitRatio(1.0), RegretBudget(0.0), RegretBudget(rate=0.0), RegretBudget(mismatches=0),
          TwoThresholds(1.0)]  # fmt: skip
LOOSE = [Divergence(1e6, 1.0), RegretBudget(1e6, 1e6, 99), TwoThresholds(1e-9)]


@pytest.fixture(scope="module")
def models() -> tuple[object, object]:
    target = tiny_model(seed=1, num_hidden_layers=2)
    return target, tiny_model(seed=2)


@pytest.mark.parametrize("rule", STRICT, ids=lambda rule: rule.name)
@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.slow)])
def test_the_strictest_setting_is_exact(models: tuple, rule: AcceptanceRule, kind: str) -> None:
    prompts = prompts_of([3, 9, 1])
    found = cycles(*models, prompts, [4] * 6, rule, kind=kind)
    assert found == cycles(*models, prompts, [4] * 6, EXACT, kind=kind)


@pytest.mark.parametrize("rule", LOOSE, ids=lambda rule: rule.name)
def test_the_loosest_setting_accepts_every_draft(models: tuple, rule: AcceptanceRule) -> None:
    for row in cycles(*models, prompts_of([3, 9]), [4] * 4, rule, kind="cpu"):
        assert [len(emitted) for _, emitted in row] == [1, 5, 5, 5, 5]


def test_an_answer_does_not_spend_beyond_its_budget_whatever_its_company(models: tuple) -> None:
    """One request in a batch that rows enter and leave: its answer is the one that it gets alone, and its budget ends."""
    target, draft = models
    rule = RegretBudget(3.0, 9.0, 9)
    requests = requests_of(prompts_of([5, 8, 2]), [28, 7, 16])

    def answers(kind: str, wanted: list) -> list[tuple[list[int], int]]:
        engines = BatchEngines(make_engine(target, kind=kind), make_draft(draft, target, kind=kind))
        tokens, judged = [[] for _ in wanted], [0] * len(wanted)
        for step in decode(engines, wanted, rule, gamma=4):
            for emission in step.emissions:
                tokens[emission.row] += emission.tokens
                judged[emission.row] += emission.origins.count("judge")
        return list(zip(tokens, judged, strict=True))

    for kind in ("cpu", "cuda"):
        together = answers(kind, requests)
        assert together == [answers(kind, [request])[0] for request in requests]
        assert 0 < together[0][1] < 20
    (long, _), *_ = together
    with torch.no_grad():
        ids = torch.tensor([[*requests[0].prompt, *long]])
        logits = target(ids).logits[0, len(requests[0].prompt) - 1 : -1]
    regret = logits.amax(-1) - logits.gather(1, torch.tensor(long)[:, None])[:, 0]
    assert 0 < float(regret.sum()) <= 3.0 + 1e-3


def test_kl_reads_the_logits_of_a_head_with_its_own_vocabulary() -> None:
    target = tiny_model(seed=1, num_hidden_layers=3)
    head = tiny_head(target, draft_vocab_size=50)
    found = [cycles(target, head, prompts_of([3, 9]), [3] * 6, Divergence(2.0), kind=k) for k in ("cpu", "cuda")]
    assert found[0] == found[1]
    loose = cycles(target, head, prompts_of([3, 9]), [3] * 6, Divergence(1e6, 1.0), kind="cpu")
    assert all(len(emitted) == 4 for row in loose for _, emitted in row[1:])


def test_texts_of_the_published_rules() -> None:
    built = RuleRequest("kl:0.1").resolve()
    assert isinstance(built, Divergence)
    assert (built.threshold, built.confident) == (0.1, 0.9)
    assert RuleRequest("mars:0.8").resolve().ratio == 0.8
    asd = RuleRequest("asd:2,mismatches=1").resolve()
    assert (asd.budget, asd.rate, asd.mismatches) == (2.0, 0.25, 1)
    assert RuleRequest("sglang:0.2,0.9").resolve().acc == 0.9
    assert RuleRequest("sglang").resolve(sampling=Sampling(0.7)).sampling == Sampling(0.7)
    for text in ("kl", "mars", "asd"):
        with pytest.raises(SelfJudgeError, match="is greedy"):
            RuleRequest(text).resolve(sampling=Sampling(0.7))
    for text in ("mars:2", "asd:-1", "sglang:0", "kl:-0.1"):
        with pytest.raises(SelfJudgeError, match="must be"):
            RuleRequest(text).resolve()
