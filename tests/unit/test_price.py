"""Priced acceptance: what the recursion optimises, by trying everything; refusals; the same rule wherever it is asked for."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from conftest import REFERENCE
from fake_judge import constant_judge
from selfjudge.decoding.rule_parser import RuleRequest, resolve_rule
from selfjudge.decoding.rules import EXACT, AcceptanceRule, Judged, JudgeOnly, Margin, SpeculativeSampling
from selfjudge.decoding.sampling import Sampling
from selfjudge.decoding.text import generate
from selfjudge.errors import SelfJudgeError
from selfjudge.integrations.server.rules import Rules
from selfjudge.judge.config import JudgeConfig
from selfjudge.judge.model import Judge
from selfjudge.models.pair import Pair
from selfjudge.ops import worth_taking
from selfjudge.types import Block

H = 3
EIGHTHS = st.integers(0, 24).map(lambda n: n / 8)  # sums of them are exact
HARMS = st.one_of(EIGHTHS, st.just(math.inf))
BLOCKS = st.lists(st.tuples(HARMS, st.booleans()), min_size=1, max_size=6)  # harm of each draft, whether it is aligned


def walk(accepted: tuple[bool, ...] | list[bool]) -> int:
    """Drafts before the first that is not accepted."""
    return next((i for i, taken in enumerate(accepted) if not taken), len(accepted))


def value(drafts: list[tuple[float, bool]], k: int, price: float) -> float:
    """Of the walk that accepts k drafts: the price of every token, the target's own included, less the harm."""
    return price * (k + 1) - sum(harm for harm, aligned in drafts[:k] if not aligned)


def scan(drafts: list[tuple[float, bool]], price: float) -> list[bool]:
    """Which drafts stand."""
    harm, aligned = torch.tensor([[h for h, _ in drafts]]), torch.tensor([[a for _, a in drafts]])
    taken: list[bool] = (aligned | worth_taking(harm, aligned, price))[0].tolist()
    return taken


@settings(max_examples=60)
@given(drafts=BLOCKS, price=EIGHTHS)
def test_no_other_set_of_drafts_is_worth_more(drafts: list[tuple[float, bool]], price: float) -> None:
    """Over all sets that hold the aligned drafts: the walk is worth the most, and is the shortest that is.

    From every place on: the recursion decides each draft as if the walk had reached it.
    """
    accepted = scan(drafts, price)
    for start in range(len(drafts)):
        rest = drafts[start:]
        sets = [s for s in product((False, True), repeat=len(rest)) if all(s[i] for i, (_, a) in enumerate(rest) if a)]
        best = max(value(rest, walk(s), price) for s in sets)
        k = walk(accepted[start:])
        assert value(rest, k, price) == best
        assert k == min(walk(s) for s in sets if value(rest, walk(s), price) == best)


@settings(max_examples=60)
@given(drafts=BLOCKS, prices=st.tuples(EIGHTHS, EIGHTHS).map(sorted))
def test_a_higher_price_accepts_what_a_lower_one_does(drafts: list[tuple[float, bool]], prices: list[float]) -> None:
    lower, higher = (scan(drafts, price) for price in prices)
    assert all(taken or not before for before, taken in zip(lower, higher, strict=True))


@given(drafts=BLOCKS)
def test_without_a_price_alignment_alone_decides(drafts: list[tuple[float, bool]]) -> None:
    assert scan(drafts, 0.0) == [aligned for _, aligned in drafts]
    assert scan(drafts, 100.0) == [aligned or harm < math.inf for harm, aligned in drafts]


def test_a_block_of_nothing() -> None:
    empty = torch.zeros(2, 0)
    assert worth_taking(empty, empty.bool(), 0.5).shape == (2, 0)


def linear_judge() -> Judge:
    torch.manual_seed(1)
    return Judge(JudgeConfig(H, thresholds={"R": 0.5}), torch.randn(H))


def random_blocks(rows: int = 300) -> Block:
    """Blocks with ties of logits, broken rows and broken states."""
    torch.manual_seed(0)
    logits = (torch.randn(rows, 5, 7) * 2).round()
    drafts = torch.where(torch.rand(rows, 4) < 0.5, logits[:, :-1].argmax(-1), torch.randint(0, 7, (rows, 4)))
    hidden = torch.randn(rows, 5, H)
    logits[0, 1, 2], logits[1, 0, 3], hidden[2, 2, 0] = math.nan, math.inf, math.inf
    return Block(drafts, logits, hidden)


@pytest.mark.parametrize("rule", [Margin(price=0.0), Judged(linear_judge(), price=0.0)], ids=["margin", "judged"])
def test_price_zero_is_exact_bit_for_bit(rule: AcceptanceRule) -> None:
    blocks = random_blocks()
    priced, exact = rule(blocks), EXACT(blocks)
    assert torch.equal(priced.n_accepted, exact.n_accepted)
    assert torch.equal(priced.next_token, exact.next_token)
    assert not priced.judged.any()


@pytest.mark.parametrize("price", [0.3, 1.0])
def test_the_harm_is_the_margin_or_the_judges_surprise(price: float) -> None:
    """Block by block against the recursion in plain Python; broken numbers have no say."""
    blocks, judge = random_blocks(), linear_judge()
    best, choice = blocks.target_logits[:, :-1].nan_to_num(-math.inf, 1e30, -math.inf).max(-1)
    at = blocks.target_logits[:, :-1].gather(-1, blocks.draft_tokens[..., None]).squeeze(-1)
    aligned = blocks.draft_tokens == choice
    for rule, harms in ((Margin(price=price), best - at), (Judged(judge, price=price), -judge(blocks).log())):
        verdict = rule(blocks)
        for i in range(3, len(harms)):
            worth, wanted = price, []
            for harm, same in zip(reversed(harms[i].tolist()), reversed(aligned[i].tolist()), strict=True):
                wanted.append(same or worth > harm)
                worth = price + worth - (0 if same else harm) if wanted[-1] else price
            assert int(verdict.n_accepted[i]) == walk(wanted[::-1])
        assert not verdict.judged[0, 1]  # a NaN in its row
        assert not verdict.judged[1, 0]
        assert not (verdict.judged[2, 1] and rule.judge)  # the state at that draft is broken


def test_one_draft_is_priced_as_a_margin_is_limited() -> None:
    """U_2 = π: with a block of one draft the price is the threshold."""
    blocks = random_blocks()
    short = Block(blocks.draft_tokens[:, :1], blocks.target_logits[:, :2], blocks.hidden[:, :2])
    priced, limited = Margin(price=0.9)(short), Margin(0.9, guard=True)(short)
    assert torch.equal(priced.n_accepted, limited.n_accepted)
    assert priced.judged.any()


def test_a_shorter_block_is_worth_what_it_has() -> None:
    """Where drafting ended early, γ is the block's: what was not drafted is worth nothing."""
    rows = torch.zeros(1, 4, 5)
    rows[..., 0] = 1.0  # a margin of 1
    drafts = torch.tensor([[3, 0, 0]])
    rule = Margin(price=0.4)
    for gamma, accepted in ((3, 3), (2, 0), (1, 0)):
        assert int(rule(Block(drafts[:, :gamma], rows[:, : gamma + 1])).n_accepted) == accepted


def test_a_special_token_that_is_not_aligned_ends_what_counts() -> None:
    """The guard decides there, and what comes before knows: the drafts after it are worth nothing."""
    rows = torch.zeros(1, 5, 5)
    rows[..., 0] = 1.0
    drafts = torch.tensor([[3, 4, 0, 0]])
    assert int(Margin(price=0.7, guard=False)(Block(drafts, rows)).n_accepted) == 4
    assert int(Margin(price=0.7, special=(4,))(Block(drafts, rows)).n_accepted) == 0  # 0.7 < 1: not worth it
    assert int(Margin(price=1.1, special=(4,))(Block(drafts, rows)).n_accepted) == 1
    always = constant_judge(1.0, H)
    block = Block(drafts, rows, torch.zeros(1, 5, H))
    assert int(Judged(always, price=0.1, special=(4,))(block).n_accepted) == 1  # harm 0


def test_the_guard_is_on_with_a_price() -> None:
    assert Margin(price=0.1).guard
    assert not Margin(price=0.1, guard=False).guard
    assert not Margin(0.5).guard
    assert not Margin().guard
    assert Margin().threshold == 0.7
    assert RuleRequest("margin:price=0.2,guard=off").resolve().guard is False


def test_prices_as_text() -> None:
    judge = linear_judge()
    assert (RuleRequest("margin:price=0.2").resolve().price, RuleRequest("margin", price=0.3).resolve().price) == (
        0.2,
        0.3,
    )
    judged = RuleRequest("judged:price=0.1", judge).resolve()
    assert (judged.price, judged.theta) == (0.1, None)
    assert RuleRequest("judged", judge, price=0.4).resolve().price == 0.4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda j: Margin(0.5, price=0.1), "a price replaces the threshold"),
        (lambda j: Margin(price=-0.1), "margin: `price` must be at least 0, not -0.1"),
        (lambda j: Margin(price=math.inf), "margin: `price` must be a finite number, not inf"),
        (lambda j: Judged(j, price=math.nan), "judged: `price` must be a finite number, not nan"),
        (lambda j: Judged(j, 0.5, price=0.1), "a price replaces θ"),
        (lambda j: Judged(j, confirm=2, price=0.1), "a price weighs what follows: leave out confirm"),
        (lambda j: Judged(j, None, SpeculativeSampling(), price=0.1), "greedy decoding: leave out `temperature`"),
        (lambda j: JudgeOnly(j, price=0.1), "a price goes with rule judged"),
        (lambda j: RuleRequest("margin:0.5,price=0.1").resolve(), "a price replaces the threshold"),
        (lambda j: RuleRequest("judged:F,price=0.1", j).resolve(), "a price replaces θ"),
        (lambda j: RuleRequest("judged", j, "R", price=0.1).resolve(), "a price replaces θ"),
        (lambda j: RuleRequest("margin:price=0.1", price=0.2), "margin:price=0.1 names a price already"),
        (lambda j: RuleRequest("topk", price=0.2), "rule 'topk' has no price: `price` goes with rule margin or judged"),
        (lambda j: RuleRequest("judged", j, price=0.2).resolve(sampling=Sampling(0.7)), "leave out `temperature`"),
    ],
)
def test_prices_that_make_no_sense_are_refused(wrong: Any, message: str) -> None:
    with pytest.raises(SelfJudgeError, match=message):
        wrong(linear_judge())


PROMPTS = ["w1 w5 w26", "w9 w8 w7 w6 w5", "w3"]


@pytest.mark.parametrize("engine", [REFERENCE, "cpu"])
def test_in_the_loop(tiny_pair: Pair, engine: str) -> None:
    judge = Judge(JudgeConfig(tiny_pair.hidden_size), torch.randn(tiny_pair.hidden_size))

    def tokens(rule: str | AcceptanceRule, **options: Any) -> list[tuple[int, ...]]:
        made = generate(tiny_pair, PROMPTS, rule, gamma=4, max_new_tokens=20, engine=engine, raw=True, **options)
        return [answer.tokens for answer in made]

    exact = tokens("exact")
    assert tokens("margin:price=0") == tokens("judged", judge=judge, price=0.0) == exact
    assert tokens("margin", price=3.0, strict_start=0, strict_code=False) == tokens(Margin(price=3.0)) != exact
    with pytest.raises(SelfJudgeError, match="a rule object is complete"):
        tokens(Margin(), price=0.1)


def test_a_price_means_judged_where_no_rule_is_named(tiny_pair: Pair) -> None:
    judge = Judge(JudgeConfig(tiny_pair.hidden_size))
    rule = resolve_rule(tiny_pair, judge=judge, price=0.25)
    assert (rule.name, rule.price) == ("judged", 0.25)
    with pytest.raises(SelfJudgeError, match="needs a judge"):
        resolve_rule(tiny_pair, price=0.25)


def test_a_threshold_or_a_price_means_judged_where_the_server_is_lossless(tiny_pair: Pair) -> None:
    judge = Judge(JudgeConfig(tiny_pair.hidden_size, thresholds={"R": 0.5}))
    lossless = Rules(tiny_pair, judge, RuleRequest("exact", gamma=3))
    chosen = [lossless.choose(RuleRequest(**options)).rule for options in ({}, {"theta": 0.3}, {"price": 0.1})]
    assert [(rule.name, rule.theta, rule.price) for rule in chosen] == [
        ("exact", None, None), ("judged", 0.3, None), ("judged", None, 0.1),
    ]  # fmt: skip
    margin = Rules(tiny_pair, judge, RuleRequest("margin", gamma=3))
    assert margin.choose(RuleRequest(price=0.1)).rule.name == "margin"


def test_a_request_of_the_server_has_its_own_price(tiny_pair: Pair) -> None:
    judge = Judge(JudgeConfig(tiny_pair.hidden_size, thresholds={"R": 0.5}))
    rules = Rules(tiny_pair, judge, RuleRequest("judged", price=0.2, gamma=3))

    def built(off: bool = False, **options: Any) -> Any:
        return rules.choose(RuleRequest(**options), off=off).rule

    assert (built().price, built().theta) == (0.2, None)
    assert (built(price=0.1).price, built(price=0.1).theta) == (0.1, None)
    assert (built(theta=0.3).price, built(theta=0.3).theta) == (None, 0.3)
    assert (built(rule="judged").price, built(rule="judged").theta) == (None, 0.5)
    assert built(rule="margin", price=0.3).price == 0.3
    assert built(rule="margin:price=0.3").price == 0.3
    assert built(off=True).name == "exact"
    assert built(rule="topk:2").price is None
    for wrong in (
        {"off": True, "price": 0.1},
        {"rule": "topk", "price": 0.1},
        {"price": -1.0},
        {"theta": 0.1, "price": 1.0},
    ):
        with pytest.raises(SelfJudgeError):
            built(**wrong)
    with pytest.raises(SelfJudgeError, match="greedy decoding"):
        rules.choose(sampling=Sampling(0.7))
