"""Batches whose rows have rules of their own: every answer is what its rule alone gives, and the sampled ones are right."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy.stats import chisquare

from conftest import REFERENCE, VOCAB, tiny_head, tiny_model
from equality import greedy
from proposals import prompts_of
from selfjudge.decoding import cycle as cycle_module, loop
from selfjudge.decoding.admission import AdmissionQueue, Request
from selfjudge.decoding.cycle import Cycle
from selfjudge.decoding.edits import LogitsEdit
from selfjudge.decoding.guards import StructureTable
from selfjudge.decoding.loop import decode
from selfjudge.decoding.rules import EXACT, AcceptanceRule, Judged, JudgeOnly, Margin, SpeculativeSampling, TopK
from selfjudge.decoding.rules_by_row import RowRules, find_level, list_settings
from selfjudge.decoding.sampling import RowSampling, Sampling
from selfjudge.engine.cuda import engine as cuda
from selfjudge.engine.draft import BatchEngines
from selfjudge.engine.select import make_draft, make_engine
from selfjudge.judge.config import JudgeConfig
from selfjudge.judge.model import Judge
from selfjudge.models.load import as_draft
from selfjudge.types import Block, Emission, Step

KINDS = ("reference", "cpu", "cuda")
SPECIAL = (7, 11)
STRUCTURE = StructureTable([("word", "```", "\n", "{")[i % 31 % 7 % 4] for i in range(VOCAB)])


def _judge(hidden: int = 32) -> Judge:
    random = torch.Generator().manual_seed(1)
    return Judge(JudgeConfig(hidden, thresholds={"R": 0.5}), torch.randn(hidden, generator=random))


JUDGE = _judge()
STRICT: dict[str, Any] = {"strict_start": 5, "strict_code": True, "structure": STRUCTURE}
RULES: list[AcceptanceRule] = [
    EXACT,
    Margin(2.0),
    Margin(price=1.5, special=SPECIAL),
    Margin(2.0, **STRICT),
    Judged(JUDGE, 0.3, special=SPECIAL),
    Judged(JUDGE, price=1.0),
    Judged(JUDGE, 0.2, confirm=1, strict_start=7),
    Judged(JUDGE, 0.1, special=SPECIAL, **STRICT),
    SpeculativeSampling(Sampling(0.9)),
    SpeculativeSampling(Sampling(1.3, top_p=0.8, top_k=9)),
    SpeculativeSampling(Sampling(1.1, min_p=0.05)),
    Judged(JUDGE, 0.6, SpeculativeSampling(Sampling(0.8))),
]
SHARED = RowRules(JUDGE, SPECIAL, structure=STRUCTURE)


def _engines(kind: str, draft_kind: str = "layers", target: Any = None) -> BatchEngines:
    target = target or tiny_model(seed=1)
    draft: Any = (
        tiny_head(target) if draft_kind == "eagle3" else tiny_model(seed=1, vocab_size=target.config.vocab_size)
    )
    if draft_kind == "layers":
        random = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in draft.parameters():  # it agrees often, not always
                p.add_(torch.randn(p.shape, generator=random) * 0.05 * p.std().nan_to_num(0.0))
    engine = make_engine(target, hidden=True, features=as_draft(draft).features, kind=kind)
    return BatchEngines(engine, make_draft(draft, target, kind=kind))


Answers = dict[int, list[Emission]]


def _decode(
    engines: BatchEngines,
    arriving: dict[int, Sequence[Request]],
    rule: AcceptanceRule,
    *,
    rows: int = 4,
    gamma: int = 5,
) -> Answers:
    """What each request got; those of step −1 are there from the start, others enter later."""
    queue, answers = AdmissionQueue(rows, 90), defaultdict(list)
    for number, step in enumerate(decode(engines, arriving[-1], rule, gamma=gamma, queue=queue)):
        for emission in step.emissions:
            answers[emission.row].append(emission)
        for request in arriving.get(number, ()):
            queue.put(request)
    return answers


def _tokens(emissions: Sequence[Emission]) -> tuple[list[int], list[str], int]:
    tokens = [token for e in emissions for token in e.tokens]
    return tokens, [origin for e in emissions for origin in e.origins], sum(e.guarded for e in emissions)


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "measure_costs", lambda *_: None)
    monkeypatch.setattr(loop.BatchGamma, "time_choices", lambda *_: None)


def _alone(engines: BatchEngines, request: Request, gamma: int) -> tuple[list[int], list[str], int]:
    """The answer under its rule as that of the whole batch."""
    rule = request.rule or EXACT
    bare = request._replace(rule=None, gamma=None)
    return _tokens(_decode(engines, {-1: [bare]}, rule, gamma=gamma)[0])


@pytest.mark.quick("layers-cpu", "eagle3-cpu")
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("kind", ["cpu", "cuda", REFERENCE])
@pytest.mark.parametrize("draft_kind", ["layers", "eagle3"])
def test_every_answer_is_that_of_its_rule_alone(kind: str, draft_kind: str) -> None:
    """All rules, unlike γ, at most four at a time; sampled answers by their seeds, and origins and guards as well."""
    gammas = [3, 4, 2, 5, 3, 4, 5, 2, 3, 4, 0, 5]
    prompts = prompts_of([4, 19, 7, 1, 12, 5, 9, 3, 6, 8, 2, 11])
    requests = [
        Request(prompt, 12 + i, 40 + i, structured=i == 7, rule=rule, gamma=gamma)
        for i, (prompt, rule, gamma) in enumerate(zip(prompts, RULES, gammas, strict=True))
    ]
    arriving = {-1: requests[:1], 0: requests[1:3], 2: requests[3:6], 7: requests[6:9], 9: requests[9:]}
    together, fresh = _decode(_engines(kind, draft_kind), arriving, SHARED), _engines(kind, draft_kind)
    assert len(together) == len(requests)
    judged = 0
    for i, request in enumerate(requests):
        assert _tokens(together[i]) == _alone(fresh, request, gammas[i]), request.rule
        assert {e.gamma for e in together[i]} == {gammas[i]}
        judged += _tokens(together[i])[1].count("judge")
    assert judged > (10 if draft_kind == "layers" else 0)


@pytest.mark.quick("cpu")
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_leave_gamma_open_get_one_of_their_own_beside_others(kind: str) -> None:
    """Under relaxed rules it stays what it was at first; lossless rows follow the cycles, and nobody's tokens change."""
    prompts = prompts_of([4, 9, 7, 12, 5])
    requests = [Request(p, 24, i, rule=RULES[r]) for i, (p, r) in enumerate(zip(prompts, (0, 1, 4, 8, 0), strict=True))]
    together = _decode(_engines(kind), {-1: requests[:1], 3: requests[1:4], 6: requests[4:]}, SHARED)
    fresh = _engines(kind)
    for i, request in enumerate(requests):
        gammas = {e.gamma for e in together[i][1:]}
        if request.rule is EXACT:
            assert gammas == {-1}
            assert _tokens(together[i])[0] == greedy(tiny_model(seed=1), request.prompt, 24)
        else:
            (gamma,) = gammas
            assert _tokens(together[i]) == _alone(fresh, request, gamma)


@pytest.mark.quick("cuda")
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("kind", KINDS)
def test_a_cycle_is_that_of_what_its_rows_need(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`exact` rows alone take the cycle of an `exact` batch: the same rule object, no judge, no random numbers."""
    used, run_cycle, asked = [], Cycle.run, Counter[str]()

    def watched(self: Cycle, uniforms: Any, *rest: Any) -> Any:
        used.append((self.rule, uniforms is not None))
        return run_cycle(self, uniforms, *rest)

    def counted(self: Judge, block: Block) -> Any:
        asked["judge"] += 1
        return Judge.score_drafts(self, block.hidden[:, 1:], block.hidden[:, :-1], block.target_logits[:, :-1], block.draft_tokens)  # fmt: skip  # type: ignore[index]

    monkeypatch.setattr(Cycle, "run", watched)
    monkeypatch.setattr(Judge, "forward", counted)
    prompts = prompts_of([4, 9, 7, 5])
    first = [Request(prompts[0], 60, rule=EXACT, gamma=3), Request(prompts[1], 40, rule=EXACT, gamma=2)]
    later = [Request(prompts[2], 8, rule=RULES[4], gamma=3), Request(prompts[3], 8, 5, rule=RULES[8], gamma=3)]
    _decode(_engines(kind), {-1: first, 4: later[:1], 8: later[1:]}, SHARED)
    rules = [rule for rule, _ in used]
    assert rules[0] is EXACT is rules[-1]
    assert {SHARED.at(1), SHARED.at(2)} & set(rules)
    assert set(rules) <= {EXACT, SHARED.at(1), SHARED.at(2)}
    assert not any(drawn for rule, drawn in used if rule is EXACT and rules.index(EXACT) == 0 and len(used) < 4)
    assert 0 < asked["judge"] < len(used)


def _count_operations(run: Callable[[], object]) -> int:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    with Watch() as watch:
        run()
    return watch.count


@pytest.mark.quick("cuda")
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("kind", ["reference", "cuda"])
def test_exact_rows_alone_cost_no_operation_more(kind: str) -> None:
    """Counted over whole answers: entering rows write their settings once; no cycle has more than those of `exact`."""
    prompts = prompts_of([4, 9])

    def count(rule: AcceptanceRule, new: int) -> int:
        engines = _engines(kind)
        requests = [Request(p, new, rule=None if rule is EXACT else EXACT, gamma=3) for p in prompts]
        return _count_operations(lambda: list(decode(engines, requests, rule, gamma=3)))

    short, long = (([count(rule, new) for rule in (EXACT, SHARED)]) for new in (5, 11))
    assert long[0] - short[0] > 100
    assert long[1] - short[1] <= long[0] - short[0]


def test_rows_with_edits_and_traces_keep_theirs_to_themselves() -> None:
    class Ban(LogitsEdit):
        def __init__(self) -> None:
            self.followed: list[int] = []

        def edit(self, logits: torch.Tensor, drafts: Sequence[int]) -> None:
            logits[:, 10:20] = -math.inf

        def advance(self, tokens: Sequence[int]) -> None:
            self.followed += tokens

    edit: LogitsEdit = Ban()
    prompts = prompts_of([4, 9, 7])
    requests = [
        Request(prompts[0], 30, rule=RULES[4], gamma=3, trace=True),
        Request(prompts[1], 30, rule=RULES[1], gamma=3, edits=(edit,), trace=False),
        Request(prompts[2], 30, rule=EXACT, gamma=3, trace=False),
    ]
    queue, made = AdmissionQueue(4, 90), defaultdict(list)
    for step in decode(_engines("cpu"), requests, SHARED, gamma=5, trace=True, queue=queue):
        for emission in step.emissions:
            made[emission.row].append(emission)
    tokens, origins, _ = _tokens(made[1])
    assert not set(range(10, 20)) & set(tokens)
    assert edit.followed == tokens  # type: ignore[attr-defined]
    assert "judge" in origins
    assert [len(e.judged) for e in made[0]] == [e.origins.count("judge") for e in made[0]]
    assert any(e.judged for e in made[0])
    assert not any(e.judged for row in (1, 2) for e in made[row])
    assert _tokens(made[2])[0] == greedy(tiny_model(seed=1), prompts[2], 30)


def _block(seed: int, gamma: int, size: int = 13, hidden: int = 6) -> tuple[Block, Judge]:
    """A block of a row for each rule; drafts are right two times in three."""
    random = torch.Generator().manual_seed(seed)
    rows = len(_rules(hidden))
    logits = torch.randn(rows, gamma + 1, size, generator=random) * 2
    choice = logits.argmax(-1)
    drafts = torch.where(
        torch.rand(rows, gamma, generator=random) < 0.66,
        choice[:, :-1],
        torch.randint(size, (rows, gamma), generator=random),
    )
    judge = _judge(hidden)
    block = Block(
        drafts, logits, torch.randn(rows, gamma + 1, hidden, generator=random),
        torch.randn(rows, gamma, size, generator=random), torch.rand(rows, gamma + 1, generator=random),
        argmax=(choice, torch.zeros_like(choice, dtype=torch.bool)),
        exact_only=torch.rand(rows, gamma, generator=random) < 0.1,
    )  # fmt: skip
    return block, judge


def _rules(hidden: int) -> list[AcceptanceRule]:
    judge = _judge(hidden)
    return [replace(rule, judge=judge) if rule.judge is not None else rule for rule in RULES]  # type: ignore[type-var]


@given(st.integers(0, 10_000), st.integers(0, 5), st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_verdict_of_a_row_is_that_of_its_rule(seed: int, gamma: int, limited: bool) -> None:
    block, judge = _block(seed, gamma)
    rules = _rules(6)
    shared = RowRules(judge, SPECIAL)
    rules = [replace(rule, judge=judge) if rule.judge is not None else rule for rule in rules]  # type: ignore[type-var]
    numbers = list_settings(rules)
    limits = torch.arange(len(rules)) % (gamma + 1) if limited else None
    own = shared.sampled(numbers)
    mixed = replace(block, settings=numbers, limits=limits, scores=judge(block) if gamma else None)
    assert block.draft_logits is not None
    mixed = replace(mixed, draft_logits=block.draft_logits[own.rows])
    verdict = shared(mixed)
    for i, rule in enumerate(rules):
        row = {
            name: None if getattr(block, name) is None else getattr(block, name)[i : i + 1]
            for name in ("draft_tokens", "target_logits", "hidden", "draft_logits", "uniforms", "exact_only")
        }
        if rule.judge is None:
            row["hidden"] = None
        alone = Block(**row, limits=None if limits is None else limits[i : i + 1])  # type: ignore[arg-type]
        wanted = rule(replace(alone, scores=rule.judge(alone)) if rule.judge is not None and gamma else alone)
        assert verdict.n_accepted[i] == wanted.n_accepted[0], rule
        assert verdict.next_token[i] == wanted.next_token[0], rule
        assert torch.equal(verdict.judged[i], wanted.judged[0]), rule


def test_a_judge_that_cannot_say_takes_nothing_from_rows_that_do_not_ask_it() -> None:
    block, judge = _block(1, 4)
    numbers = list_settings([Margin(1e9)] * len(RULES))
    scores = torch.full(block.draft_tokens.shape, math.nan)
    verdict = RowRules(judge, level=1)(replace(block, settings=numbers, scores=scores, exact_only=None))
    assert verdict.n_accepted.tolist() == [4] * len(RULES)


def test_what_fits_and_what_does_not() -> None:
    assert all(SHARED.fits(rule) for rule in RULES)
    other = _judge()
    for rule in (
        TopK(3),
        JudgeOnly(JUDGE, 0.5),
        Judged(other, 0.5),
        Judged(JUDGE, 0.5, special=(1,)),
        Margin(1.0, strict_code=True, structure=StructureTable(["a"])),
    ):
        assert not SHARED.fits(rule), rule
    assert [find_level([rule]) for rule in (EXACT, Margin(1.0), RULES[8], RULES[9])] == [0, 1, 2, 3]
    assert find_level(RULES) == 3
    assert SHARED.at(0) is EXACT
    assert SHARED.at(3) is SHARED
    assert SHARED.at(1) is SHARED.at(1)


@given(
    st.lists(
        st.none()
        | st.builds(
            Sampling,
            st.floats(0.1, 3.0),
            st.sampled_from([1.0, 0.9, 0.3]),
            st.integers(0, 15),
            st.sampled_from([0.0, 0.1]),
        ),
        min_size=1,
        max_size=5,
    ),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_rows_sample_as_their_own_settings_say(samplings: list[Sampling | None], all_rows: bool) -> None:
    logits = torch.randn(len(samplings), 3, 11, generator=torch.Generator().manual_seed(0)) * 3
    columns = torch.tensor([RowSampling.list_columns(sampling) for sampling in samplings])
    own = RowSampling(columns, filtered=True)
    if all_rows:  # as where the host does not know which rows sample
        own.rows, own._sampled, own._columns = slice(None), columns[:, 0] > 0, columns
    mixed = own.put(logits, own.warp(logits[own.rows]))
    for row, sampling in enumerate(samplings):
        wanted = logits[row] if sampling is None else sampling.warp(logits[row])
        assert torch.equal(mixed[row].softmax(-1), wanted.softmax(-1)), sampling


def _chain(
    target: Any, prompt: list[int], sampling: Sampling, length: int, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """All sequences, and the probability that the target itself gives each."""
    sequences = torch.cartesian_prod(*[torch.arange(size)] * length)
    with torch.inference_mode():
        full = torch.cat([torch.tensor(prompt).expand(len(sequences), -1), sequences], 1)
        logits = target(full).logits[:, len(prompt) - 1 : -1]
    p = sampling.warp(logits).softmax(-1).gather(-1, sequences[..., None]).squeeze(-1).prod(1)
    return sequences, p.double()


@pytest.mark.quick("cpu")
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("kind", KINDS)
def test_sampled_rows_of_a_mixed_batch_have_the_targets_distribution(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two temperatures, of which one has filters, among greedy and judged rows with other γ."""
    monkeypatch.setattr(cuda, "SLOTS", 16)  # as many as they need: the rows are many and short
    size, length, prompt, rows = 5, 3, [3, 4, 1], 220
    target = tiny_model(seed=11, vocab_size=size, initializer_range=0.15)
    judge = Judge(JUDGE.config, JUDGE.weight)
    samplings = (Sampling(0.7), Sampling(1.3, 0.9, 4))
    rules = [*(SpeculativeSampling(s) for s in samplings), Judged(judge, 0.3), EXACT]
    order = [0, 1, 2, 0, 1, 3] * rows
    requests = [Request(prompt, length, i, rule=rules[r], gamma=(2, 1, 3, 2)[r]) for i, r in enumerate(order)]
    engines = _engines(kind, target=target)
    made: Counter[tuple[int, ...]] = Counter()
    tokens = defaultdict(list)
    for step in decode(engines, requests, RowRules(judge), gamma=3):
        for emission in step.emissions:
            tokens[emission.row] += emission.tokens
    for which, sampling in enumerate(samplings):
        made = Counter(tuple(tokens[i]) for i, r in enumerate(order) if r == which)
        sequences, p = _chain(target, prompt, sampling, length, size)
        observed = torch.tensor([made[tuple(s)] for s in sequences.tolist()], dtype=torch.float64)
        assert observed[p == 0].sum() == 0
        expected = p * observed.sum()
        large = expected >= 5
        cells = torch.cat([observed[large], observed[~large].sum()[None]])
        wanted = torch.cat([expected[large], expected[~large].sum()[None]])
        keep = wanted > 0
        assert chisquare(cells[keep], wanted[keep] * cells[keep].sum() / wanted[keep].sum()).pvalue > 1e-3


def test_steps_are_those_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row with γ = 0 among rows with drafts is plain: one token a pass, from the target."""
    assert 3 + list_settings([EXACT]).shape[1] == cycle_module.ROW_STATE
    prompts = prompts_of([4, 9])
    requests = [Request(prompts[0], 12, rule=EXACT, gamma=0), Request(prompts[1], 12, rule=RULES[1], gamma=4)]
    steps: list[Step] = list(decode(_engines("cpu"), requests, SHARED, gamma=5))
    plain = [e for step in steps for e in step.emissions if e.row == 0]
    assert [len(e.tokens) for e in plain] == [1] * 12
    assert max(len(e.tokens) for step in steps for e in step.emissions if e.row == 1) > 2
