"""Every acceptance rule on hand-made blocks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import transformers as hf

from fake_judge import constant_judge
from selfjudge.decoding.rule_parser import RULES, RuleRequest
from selfjudge.decoding.rules import (
    AcceptanceRule,
    Exact,
    FLy,
    Judged,
    JudgeOnly,
    Margin,
    Relaxed,
    SpeculativeSampling,
    TopK,
    Typical,
)
from selfjudge.decoding.sampling import Sampling, sample
from selfjudge.errors import SelfJudgeError
from selfjudge.judge.config import JudgeConfig
from selfjudge.judge.model import Judge
from selfjudge.ops import argmax_checked
from selfjudge.types import Block

H = 3


def block(drafts: list[int], rows: list[list[float]], **extra: torch.Tensor) -> Block:
    """One row; `rows` are probabilities: row i predicts drafts[i], the last the bonus token."""
    logits = torch.tensor([rows]).log()
    hidden = extra.pop("hidden", torch.zeros(1, len(rows), H))
    return Block(torch.tensor([drafts], dtype=torch.long).reshape(1, -1), logits, hidden, **extra)


def verdict(rule, b: Block) -> tuple[int, int, list[bool]]:
    v = rule(b)
    return int(v.n_accepted[0]), int(v.next_token[0]), v.judged[0].tolist()


# target prefers 0, then 1, then 2 in every row unless said otherwise
ROWS = [[0.6, 0.3, 0.1], [0.6, 0.3, 0.1], [0.6, 0.3, 0.1]]


def test_exact_stops_at_the_first_mismatch_and_corrects_it() -> None:
    assert verdict(Exact(), block([0, 1], ROWS)) == (1, 0, [False, False])
    assert verdict(Exact(), block([1, 0], ROWS)) == (0, 0, [False, False])


def test_exact_emits_the_bonus_token_of_the_last_row() -> None:
    rows = [*ROWS[:2], [0.1, 0.1, 0.8]]
    assert verdict(Exact(), block([0, 0], rows)) == (2, 2, [False, False])


def test_gamma_zero_is_plain_greedy() -> None:
    assert verdict(Exact(), block([], [[0.1, 0.7, 0.2]])) == (0, 1, [])


def test_topk_reads_the_row_that_predicts_the_token() -> None:
    # d_1 = 2 is the least likely of its own row, the most likely of the row after: reading one row late accepts it
    rows = [[0.6, 0.3, 0.1], [0.1, 0.3, 0.6], [0.6, 0.3, 0.1]]
    b = block([2, 2], rows)
    assert verdict(TopK(2), b) == (0, 0, [False, False])
    late = sum(int(torch.tensor(rows[i + 1]).topk(2).indices.eq(2).any()) for i in range(1))
    assert late == 1  # what the off-by-one would have accepted
    assert verdict(TopK(2), block([1, 2], rows)) == (2, 0, [True, False])


def test_topk_1_is_exact_and_large_k_accepts_everything() -> None:
    for drafts in ([0, 1], [1, 1], [2, 0]):
        assert verdict(TopK(1), block(drafts, ROWS)) == verdict(Exact(), block(drafts, ROWS))
        assert verdict(TopK(3), block(drafts, ROWS))[0] == 2


def test_relaxed_needs_rank_and_gap() -> None:
    assert verdict(Relaxed(k=2, delta=0.35), block([1, 1], ROWS))[0] == 2
    assert verdict(Relaxed(k=2, delta=0.25), block([1, 1], ROWS))[0] == 0  # gap 0.3
    assert verdict(Relaxed(k=1, delta=1.0), block([1, 1], ROWS))[0] == 0


def test_typical_threshold_follows_the_entropy() -> None:
    sure = [[0.98, 0.01, 0.01]] * 3
    flat = [[0.4, 0.35, 0.25]] * 3
    rule = Typical(epsilon=0.3, delta=0.5)
    threshold = min(0.3, 0.5 * math.exp(sum(p * math.log(p) for p in flat[0])))
    assert 0.16 < threshold < 0.25
    assert verdict(rule, block([2, 2], flat))[0] == 2
    assert verdict(rule, block([1, 1], sure))[0] == 0


def test_typical_always_accepts_the_most_likely_token() -> None:
    torch.manual_seed(0)
    logits = torch.randn(64, 5, 17) * 3
    drafts = logits[:, :-1].argmax(-1)
    assert Typical(epsilon=1.0, delta=0.99)(Block(drafts, logits)).n_accepted.eq(4).all()


def test_margin_is_a_log_probability_gap() -> None:
    gap = math.log(0.6 / 0.3)
    assert verdict(Margin(gap + 0.01), block([1, 1], ROWS))[0] == 2
    assert verdict(Margin(gap - 0.01), block([1, 1], ROWS))[0] == 0
    assert verdict(Margin(0.0), block([0, 1], ROWS)) == verdict(Exact(), block([0, 1], ROWS))


def test_fly_needs_uncertainty_and_a_matching_window() -> None:
    flat, sure = [0.4, 0.35, 0.25], [0.98, 0.01, 0.01]
    rule = FLy(entropy=0.5, window=2)
    assert verdict(rule, block([1, 0, 0], [flat, sure, sure, sure])) == (3, 0, [True, False, False])
    assert verdict(rule, block([1, 0, 1], [flat, sure, sure, sure]))[0] == 0  # a second mismatch in the window
    assert verdict(rule, block([1, 0, 0], [sure, sure, sure, sure]))[0] == 0  # the target was sure
    assert verdict(rule, block([0, 1, 0], [sure, flat, sure, sure]))[0] == 1  # the window leaves the block
    with pytest.raises(SelfJudgeError, match="`gamma` > 6"):
        FLy().check(5)


def test_judge_accepts_above_theta_and_reads_the_state_at_the_draft() -> None:
    judge = Judge(constant_judge(0.5, H).config, weight=torch.tensor([1.0, 0.0, 0.0]))
    hidden = torch.zeros(1, 3, H)
    hidden[0, 1, 0] = 5.0  # the state at d_1 speaks for it; d_2 stays at 0.5
    b = block([1, 1], ROWS, hidden=hidden)
    assert verdict(Judged(judge, 0.5), b) == (1, 0, [True, False])
    assert verdict(Judged(judge, 0.49), b) == (2, 0, [True, True])


def test_a_judge_has_no_say_beyond_its_margin_limit() -> None:
    rows = [[0.6, 0.3, 0.1], [0.9, 0.09, 0.01], [0.6, 0.3, 0.1]]
    always, far = constant_judge(1.0, H), math.log(0.9 / 0.09)
    limited = Judge(replace(always.config, margin_limit=far - 0.01), bias=always.bias)
    assert verdict(Judged(limited, 0.0), block([1, 1], rows)) == (1, 0, [True, False])
    assert limited(block([1, 1], rows))[0].tolist() == [1.0, 0.0]
    assert verdict(JudgeOnly(limited, 0.0), block([0, 0], rows))[0] == 2  # the target's own token is within any limit
    wider = Judge(replace(always.config, margin_limit=far + 0.01), bias=always.bias)
    assert verdict(Judged(wider, 0.0), block([1, 1], rows))[0] == 2
    known = block([1, 1], rows, argmax=argmax_checked(torch.tensor([rows]).log()))
    assert torch.equal(limited(known), limited(block([1, 1], rows)))


def test_what_the_judge_accepts_may_need_confirmation() -> None:
    always = constant_judge(1.0, H)
    rows = [[0.6, 0.3, 0.1]] * 5
    rule = Judged(always, 0.5, confirm=2)
    assert verdict(rule, block([1, 0, 0, 1], rows)) == (3, 0, [True, False, False, False])  # the last has no window
    assert verdict(rule, block([1, 0, 1, 0], rows))[0] == 0  # a second mismatch in the window
    assert verdict(Judged(always, 0.5), block([1, 0, 1, 0], rows))[0] == 4
    rule.check(3)
    for wrong in (lambda: rule.check(2), lambda: Judged(always, 0.5, confirm=-1), lambda: JudgeOnly(always, confirm=1)):
        with pytest.raises(SelfJudgeError, match="confirm"):
            wrong()
    assert RuleRequest("judged:0.4,confirm=3", always).resolve().confirm == 3


def test_thresholds_are_named_as_the_judge_names_them() -> None:
    judge = Judge(JudgeConfig(H, thresholds={"F": 0.4, "R": 0.7, "Youden": 0.3}))
    assert [RuleRequest(f"judged:{name}", judge).resolve().theta for name in ("F", "R", "Youden")] == [0.4, 0.7, 0.3]


def test_judged_at_theta_one_is_the_base_rule_bit_for_bit() -> None:
    torch.manual_seed(0)
    always = constant_judge(1.0, H)
    for base in (Exact(), SpeculativeSampling(Sampling(0.8, top_p=0.9))):
        b = Block(
            torch.randint(0, 9, (200, 4)), torch.randn(200, 5, 9), torch.randn(200, 5, H),
            base.sampling.warp(torch.randn(200, 4, 9)) if base.sampling else None, torch.rand(200, 5),
        )  # fmt: skip
        for rule in (Judged(always, 1.0, base), Judged(constant_judge(0.0, H), 0.0, base)):
            one, other = rule(b), base(b)
            assert torch.equal(one.n_accepted, other.n_accepted)
            assert torch.equal(one.next_token, other.next_token)
            assert not one.judged.any()


class Counting(Judge):
    """Accepts everything, and counts how often it was asked."""

    asked = 0

    def score(self, x: torch.Tensor) -> torch.Tensor:
        self.asked += 1
        return torch.ones(x.shape[:-1])


@pytest.mark.parametrize(("drafts", "asked"), [([0, 0], 0), ([0, 1], 1), ([1, 0], 1)])
def test_a_judge_is_asked_only_where_a_draft_differs(drafts: list[int], asked: int) -> None:
    judge = Counting(JudgeConfig(H))
    b = block(drafts, ROWS)
    b = replace(b, argmax=argmax_checked(b.target_logits))
    assert verdict(Judged(judge, 0.5), b) == (2, 0, [d == 1 for d in drafts])
    assert judge.asked == asked
    judge.asked = 0
    assert verdict(JudgeOnly(judge, 0.5), b)[0] == 2
    assert judge.asked == 1
    assert not Judged(judge, 0.5, SpeculativeSampling()).settled(b)


def test_judge_only_may_refuse_an_aligned_draft() -> None:
    b = block([0, 0], ROWS)
    assert verdict(JudgeOnly(constant_judge(0.0, H), 0.5), b)[0] == 0
    assert verdict(JudgeOnly(constant_judge(1.0, H), 0.5), block([2, 2], ROWS))[0] == 2


@pytest.mark.parametrize(("drafts", "choice"), [([2, 0], 0), ([1, 0], 2)])
def test_guard_leaves_special_tokens_to_alignment(drafts: list[int], choice: int) -> None:
    """Token 2 is special: as a draft, and as the target's own choice."""
    rows = [[0.6, 0.3, 0.1] if choice == 0 else [0.1, 0.3, 0.6], *ROWS[:2]]
    always = constant_judge(1.0, H)
    assert verdict(Judged(always, 0.5, special=(2,)), block(drafts, rows))[0] == 0
    assert verdict(Judged(always, 0.5, special=()), block(drafts, rows))[0] == 2
    assert verdict(Judged(always, 0.5, guard=False, special=(2,)), block(drafts, rows))[0] == 2
    assert verdict(TopK(3, special=(2,)), block(drafts, rows))[0] == 2  # unguarded, as published
    assert verdict(TopK(3, guard=True, special=(2,)), block(drafts, rows))[0] == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_rows_fall_back_to_alignment_and_say_so(bad: float) -> None:
    b = block([1, 1], ROWS)
    b.target_logits[0, 0, 2] = bad
    v = Judged(constant_judge(1.0, H), 0.5)(b)
    assert bool(v.non_finite)
    assert int(v.n_accepted[0]) == 0
    assert int(v.next_token[0]) == (0 if math.isnan(bad) else 2)
    b = block([1, 1], ROWS)
    b.hidden[0, 1] = bad
    judge = Judge(constant_judge(0.5, H).config, weight=torch.ones(H))
    for scores in (None, judge(b)):
        v = Judged(judge, 0.1)(Block(b.draft_tokens, b.target_logits, b.hidden, scores=scores))
        assert bool(v.non_finite)
        assert int(v.n_accepted[0]) == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_non_finite_rows_when_sampling(bad: float, temperature: float) -> None:
    """One bad logit, and a row of nothing else: a token comes out, and not the last of the vocabulary by accident."""
    rule = SpeculativeSampling(Sampling(temperature))
    logits = torch.tensor([[[0.0, 8.0, 0.0, -20.0]]]).repeat(200, 1, 1)
    logits[:, 0, 0] = bad
    u = torch.linspace(0, 0.999, 200)[:, None]
    v = rule(Block(torch.zeros(200, 0, dtype=torch.long), logits, uniforms=u))
    assert bool(v.non_finite)
    assert set(v.next_token.tolist()) == ({0} if bad == math.inf else set(v.next_token.tolist()) - {0, 3})
    logits[:] = math.nan
    v = rule(Block(torch.zeros(200, 0, dtype=torch.long), logits, uniforms=u))
    assert set(v.next_token.tolist()) == {0, 1, 2, 3}  # nothing is known: every token alike


def test_judge_only_corrects_from_the_target_where_alignment_would_accept() -> None:
    """The judge refuses a draft on which both models agree: the residual is empty there, the target's own choice is not."""
    rule = JudgeOnly(constant_judge(0.0, H), 0.5, SpeculativeSampling(Sampling(1.0)))
    logits = torch.tensor([[[9.0, 0.0, 0.0], [9.0, 0.0, 0.0]]]).repeat(100, 1, 1)
    q = logits[:, :1] + torch.tensor([0.5, 0.0, 0.0])  # the draft is even surer: max(0, p − q) has only the tail
    u = torch.stack([torch.full((100,), 0.1), torch.linspace(0, 0.99, 100)], 1)
    v = rule(Block(torch.zeros(100, 1, dtype=torch.long), logits, torch.zeros(100, 2, H), q, u))
    assert v.n_accepted.eq(0).all()
    assert (v.next_token == 0).float().mean() > 0.95


def test_a_judge_may_have_parameters() -> None:
    class Learned(Judge):
        def __init__(self) -> None:
            super().__init__(constant_judge(0.5, H).config)
            self.layer = torch.nn.Linear(H, 1)

        def score(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.layer(hidden).squeeze(-1).sigmoid()

    judge = Learned()
    with torch.no_grad():
        judge.layer.weight.copy_(torch.tensor([[4.0, 0.0, 0.0]]))
        judge.layer.bias.zero_()
    with torch.inference_mode():
        hidden = torch.zeros(1, 3, H)
        hidden[0, 1, 0], hidden[0, 2, 0] = 1.0, -1.0  # the state at the first draft is liked, that at the second is not
    with torch.no_grad():
        said = Judged(judge, 0.5)(block([1, 1], ROWS, hidden=hidden))
    assert said.judged.tolist() == [[True, False]]
    assert said.n_accepted.tolist() == [1]


def test_minus_infinity_is_a_ban_and_not_an_error() -> None:
    b = block([0, 0], ROWS)
    b.target_logits[..., 2] = -math.inf
    assert not bool(Exact()(b).non_finite)


def test_warp_agrees_with_transformers() -> None:
    torch.manual_seed(0)
    logits = torch.randn(50, 37) * 2
    cases = [(0.7, 0, 1.0, 0.0), (1.3, 5, 1.0, 0.0), (1.0, 0, 0.8, 0.0), (0.6, 9, 0.6, 0.0), (1.0, 0, 1e-6, 0.0)]
    for temperature, top_k, top_p, min_p in [*cases, (0.8, 0, 1.0, 0.1), (1.2, 9, 0.9, 0.3), (1.0, 0, 1.0, 1.0)]:
        expected = logits / temperature
        if top_k:
            expected = hf.TopKLogitsWarper(top_k)(None, expected)
        if top_p < 1:
            expected = hf.TopPLogitsWarper(top_p)(None, expected)
        if min_p:
            expected = hf.MinPLogitsWarper(min_p)(None, expected)
        assert torch.equal(Sampling(temperature, top_p, top_k, min_p).warp(logits), expected)


def test_sample_never_picks_a_token_of_probability_zero() -> None:
    p = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0]).expand(1000, -1)
    u = torch.cat([torch.rand(996), torch.tensor([0.0, 0.5, 0.99999994, 0.49999997])])
    assert set(sample(p, u).tolist()) == {1, 3}


def test_rule_texts() -> None:
    assert RuleRequest("topk").resolve().k == 2
    assert RuleRequest("topk:3").resolve((1,)).special == (1,)
    relaxed = RuleRequest("relaxed:k=5,delta=0.2,guard=on").resolve()
    assert (relaxed.k, relaxed.delta, relaxed.guard) == (5, 0.2, True)
    judge = constant_judge(0.5, H)
    assert RuleRequest("judged:0.4", judge).resolve().theta == 0.4
    assert RuleRequest("judged", judge, 0.7).resolve(sampling=Sampling(0.5)).sampling.temperature == 0.5
    assert set(RULES) >= {"exact", "sampling", "topk", "relaxed", "typical", "margin", "fly", "judged", "judge_only"}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nope", "unknown rule 'nope'; rules are: exact, "), ("margn", "unknown rule 'margn': do you mean margin"), ("topk:x", "k must be a whole number, not 'x'"), ("topk:2,1,3", "at most"), ("topk:z=1", "no option"),
        ("topk:0", "at least 1"), ("relaxed:delta=2", "delta"), ("judged", "needs a judge"), ("fly:window=0", "window"),
        ("margin:-1", "at least 0"), ("typical:epsilon=0", "epsilon"), ("topk:guard=maybe", "guard must be on or off"),
    ],
)  # fmt: skip
def test_rule_texts_refuses(spec: str, message: str) -> None:
    with pytest.raises(SelfJudgeError, match=message):
        RuleRequest(spec).resolve()


def test_requests_that_mean_the_same_give_the_same_rule() -> None:
    config = JudgeConfig(H, thresholds={"F": 0.2, "R": 0.6}, quality_curve=((0.5, 0.4), (0.9, 0.6)))
    judge = Judge(config, torch.zeros(H))
    same = [RuleRequest("judged"), RuleRequest("judged:R"), RuleRequest(theta=0.6), RuleRequest(theta="0.6"),
            RuleRequest(quality=0.9), RuleRequest("judged:q0.9", gamma=3)]  # fmt: skip
    assert len({request.resolve((1,), judge) for request in same}) == 1
    assert RuleRequest("judged:F").resolve((1,), judge) is not same[0].resolve((1,), judge)
    for request in (*same, RuleRequest("margin", price=0.1), RuleRequest("fly:0.2,window=2"), RuleRequest(price=0.3)):
        assert RuleRequest(str(request)).resolve((1,), judge) is request.resolve((1,), judge)
    assert RuleRequest(theta="F").resolve((), config).theta == 0.2  # to check, without weights


def test_a_request_completed_by_the_own_one_of_a_server() -> None:
    margin, judged = RuleRequest("margin", price=0.2, gamma=4), RuleRequest("judged", quality=0.9)
    assert RuleRequest().inherit(margin) == margin
    assert RuleRequest(gamma=2).inherit(margin) == RuleRequest("margin", price=0.2, gamma=2)
    assert RuleRequest(price=0.1).inherit(margin) == RuleRequest("margin", price=0.1, gamma=4)
    assert RuleRequest("judged").inherit(margin) == RuleRequest("judged", gamma=4)
    assert RuleRequest("judged:confirm=1").inherit(judged) == RuleRequest("judged:confirm=1", quality=0.9)
    assert RuleRequest("judged:0.3").inherit(judged) == RuleRequest("judged:0.3")
    assert RuleRequest(theta=0.3).inherit(RuleRequest("exact")).text == "judged"
    named = RuleRequest("judged:theta=q0.9,confirm=1,strict_start=16,strict_code=True", gamma=5)  # as recipes write it
    looser = RuleRequest(strict_start=0, strict_code=False).inherit(named)
    assert str(looser) == "judged:theta=q0.9,confirm=1,strict_start=0,strict_code=False"
    assert str(RuleRequest(strict_start=2).inherit(named)) == (
        "judged:theta=q0.9,confirm=1,strict_start=2,strict_code=True"
    )
    assert str(RuleRequest(theta=0.3).inherit(named)) == ("judged:confirm=1,theta=0.3,strict_start=16,strict_code=True")
    assert str(RuleRequest().inherit(named)) == named.rule
    strict = RuleRequest("margin:0.5,strict_start=4")
    assert str(RuleRequest("topk:3").inherit(strict)) == "topk:3,strict_start=4"
    assert str(RuleRequest("topk:3,strict_start=1").inherit(strict)) == "topk:3,strict_start=1"
    assert str(RuleRequest(rule="topk:3", strict_start=2).inherit(strict)) == "topk:3,strict_start=2"
    with pytest.raises(SelfJudgeError, match="does not use a judge"):
        RuleRequest(theta=0.3).inherit(margin)


def test_greedy_rules_take_no_temperature() -> None:
    with pytest.raises(SelfJudgeError, match="greedy"):
        RuleRequest("exact").resolve(sampling=Sampling(0.7))
    for wrong in ({"temperature": 0.001}, {"top_p": 0.0}, {"top_k": -1}, {"min_p": 1.5}, {"temperature": math.nan}):
        with pytest.raises(SelfJudgeError):
            Sampling(**wrong)


def test_a_relaxed_rule_says_what_it_accepts() -> None:
    class Silent(AcceptanceRule):
        name = "silent"
        summary = "says nothing"

    logits = torch.zeros(1, 3, 8)
    with pytest.raises(NotImplementedError, match="'silent' does not define `accepts`"):
        Silent()(Block(torch.tensor([[1, 2]]), logits))
