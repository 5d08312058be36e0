"""The loop on tiny models: equality with transformers, the cycle's invariants, limits, distributions."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
import transformers as hf
from scipy.stats import chisquare

from conftest import CONFIGS, REFERENCE, VOCAB, tiny_head, tiny_model
from equality import greedy
from fake_judge import constant_judge
from proposals import requests_of
from selfjudge.decoding import loop
from selfjudge.decoding.admission import AdmissionQueue, Request
from selfjudge.decoding.cycle import Cycle, CycleSize
from selfjudge.decoding.gamma import GammaController, LiveRows
from selfjudge.decoding.loop import decode
from selfjudge.decoding.rules import AcceptanceRule, Exact, Judged, Margin, SpeculativeSampling, TopK
from selfjudge.decoding.sampling import Sampling
from selfjudge.engine.base import Engine
from selfjudge.engine.cuda import engine as cuda
from selfjudge.engine.draft import BatchEngines
from selfjudge.engine.select import make_draft, make_engine
from selfjudge.errors import SelfJudgeError
from selfjudge.models.eagle import EagleHead
from selfjudge.models.load import as_draft
from selfjudge.types import Step

KIND = "reference"


@pytest.fixture(autouse=True, params=["auto", "cuda", REFERENCE])
def engine_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test runs on the fastest engine of this machine and on the static one, which runs the same steps as torch
    operations where there is no GPU, and falls back to the reference engine where it does not know a model."""
    monkeypatch.setitem(globals(), "KIND", request.param)
    return request.param


def kind_for(model: hf.PreTrainedModel) -> str:
    return "reference" if KIND == "cuda" and cuda.why_not(model) else KIND


def engine_of(
    model: hf.PreTrainedModel, draft: hf.PreTrainedModel | EagleHead | None = None, **options: bool
) -> Engine:
    """The engine of a model, as the target of a draft."""
    return make_engine(model, features=as_draft(draft).features, kind=kind_for(model), **options)


def engines_of(
    target: hf.PreTrainedModel, draft: hf.PreTrainedModel | EagleHead | None = None, **options: bool
) -> BatchEngines:
    small = None if draft is None else make_draft(draft, target, kind=kind_for(target))
    return BatchEngines(engine_of(target, draft, **options), small)


def run(
    target: hf.PreTrainedModel,
    draft: hf.PreTrainedModel | EagleHead | None,
    prompts: list[list[int]],
    rule: AcceptanceRule | None = None,
    max_new_tokens: int | list[int] = 256,
    seeds: list[int] | None = None,
    **options: object,
) -> tuple[list[list[int]], list[Step]]:
    rule = rule or Exact()
    engines = engines_of(target, draft, hidden=rule.judge is not None)
    steps = list(decode(engines, requests_of(prompts, max_new_tokens, seeds), rule, **options))  # type: ignore[arg-type]
    tokens: list[list[int]] = [[] for _ in prompts]
    for step in steps:
        for emission in step.emissions:
            tokens[emission.row] += emission.tokens
    return tokens, steps


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=random).tolist() for n in lengths]


class _Timid(GammaController):
    """Five drafts, but no more once the draft model gave what it has proposed a probability below `least_q`."""

    least_q = 1.0

    def choose(self, rows: int, behind: int = 0, live: LiveRows | None = None) -> int:
        self._draft_probabilities, self.log_q = [], np.zeros(rows)
        return 5

    def draft_on(self, q: Callable[[], Iterable[float]]) -> bool:
        self.log_q += np.log(list(q()))
        return bool((self.log_q >= np.log(self.least_q)).any())


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller that chooses by its own will needs no costs."""
    monkeypatch.setattr(loop, "measure_costs", lambda *_: None)
    monkeypatch.setattr(loop.BatchGamma, "time_choices", lambda self, rows, costs: None)


@pytest.mark.usefixtures("unmeasured")
def test_early_ends_stay_on_when_a_row_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "GammaController", _Timid)
    target, draft = tiny_model(seed=1), tiny_model(seed=1)
    prompts = prompts_of([90, 3])  # the context window ends the first row after a few tokens
    _, steps = run(target, draft, prompts, gamma="auto", max_new_tokens=40)
    alone = [s.emissions[0] for s in steps if len(s.emissions) == 1]
    assert len(alone) > 5
    if not engine_of(target).static:
        assert max(len(e.tokens) for e in alone) == 2  # never more than one draft


@pytest.mark.quick("auto")
@pytest.mark.usefixtures("unmeasured")
def test_an_unsure_draft_ends_its_proposal_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "GammaController", _Timid)
    target, draft = tiny_model(seed=1), tiny_model(seed=1)
    with torch.no_grad():
        for p in draft.parameters():
            p.add_(torch.randn_like(p) * 0.05 * p.std().nan_to_num(0.0))
    prompts = prompts_of([3, 11, 7])
    found = []
    for least in (1e-9, 0.2, 1.0):
        monkeypatch.setattr(_Timid, "least_q", least)
        tokens, steps = run(target, draft, prompts, gamma="auto", max_new_tokens=20)
        found.append((tokens, steps))
        assert tokens == [greedy(target, p, 20) for p in prompts]
    passes = [len(steps) for _, steps in found]
    if engine_of(target).static:
        assert passes[0] == passes[1] == passes[2]
    else:
        assert passes[0] <= passes[1] <= passes[2]
        assert passes[0] < passes[2]
        assert max(len(e.tokens) for s in found[2][1] for e in s.emissions) == 2  # one draft and the target's token


# what rules and the loop decide, whatever engine gives the logits
loop_alone = pytest.mark.parametrize("engine_kind", ["auto"], indirect=True)

# the other architectures fall back to the reference engine, wherever they are asked for
ENGINES = [("reference", kind) for kind in sorted(CONFIGS)] + [
    (engine, kind) for engine in ("auto", "cuda") for kind in ("llama", "qwen2")
]
RARE = ("gemma2", "gemma3", "mistral-window")  # of these the slow tests are enough


@pytest.mark.quick("quick-reference-*", "quick-auto-llama", "quick-cuda-qwen2")
@pytest.mark.parametrize(
    ("engine_kind", "kind"),
    [pytest.param(*e, marks=pytest.mark.slow if e[1] in RARE else ()) for e in ENGINES],
    indirect=["engine_kind"],
)
@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["quick", "full"])
def test_exact_equals_transformers_in_a_ragged_batch(kind: str, full: bool) -> None:
    target, draft = tiny_model(kind, seed=1), tiny_model(kind, seed=1)
    with torch.no_grad():  # a draft that agrees often, not always
        for p in draft.parameters():
            p.add_(torch.randn_like(p) * 0.05 * p.std().nan_to_num(0.0))
    prompts, count = (prompts_of([3, 11, 1, 7, 20]), 30) if full else (prompts_of([3, 11, 1, 20]), 20)
    for gamma in (0, 1, 4) if full or kind in ("llama", "mistral-window") else (4,):
        tokens, steps = run(target, draft, prompts, gamma=gamma, max_new_tokens=count)
        assert tokens == [greedy(target, p, count) for p in prompts]
        if gamma:
            accepted = Counter(o for s in steps for e in s.emissions for o in e.origins)
            assert accepted["draft"] > 10  # the draft was of use
            assert accepted["target"] > 10  # and not always right


@pytest.mark.quick("reference-*", "auto-llama", "cuda-llama")
@pytest.mark.parametrize(
    ("engine_kind", "kind"),
    [
        pytest.param(*e, marks=pytest.mark.slow if e[1] in RARE else ())
        for e in ENGINES
        if e[1] != "gpt2" and e not in (("cuda", "qwen2"), ("reference", "qwen2"))
    ],
    indirect=["engine_kind"],
)
def test_exact_with_a_head_equals_transformers_in_a_ragged_batch(kind: str) -> None:
    target, prompts = tiny_model(kind, seed=1), prompts_of([3, 11, 1, 20])
    tokens, steps = run(target, tiny_head(target, draft_vocab_size=50), prompts, gamma=4, max_new_tokens=24)
    assert tokens == [greedy(target, p, 24) for p in prompts]
    assert any(o == "draft" for s in steps for e in s.emissions for o in e.origins)


@pytest.mark.quick("auto-llama", "cuda-qwen2", "reference-*")
@pytest.mark.parametrize(("engine_kind", "kind"), ENGINES, indirect=["engine_kind"])
def test_draft_equal_to_target_accepts_everything(kind: str) -> None:
    model = tiny_model(kind, seed=3)
    _, steps = run(model, model, prompts_of([2, 9]), gamma=4, max_new_tokens=1 + 5 * 4)
    cycles = steps[1:]
    assert len(cycles) == 4
    assert all(e.origins == ("draft",) * 4 + ("target",) for s in cycles for e in s.emissions)


@loop_alone
def test_prefill_belongs_to_no_cycle() -> None:
    model = tiny_model(seed=3)
    _, steps = run(model, model, prompts_of([4]), gamma=2, max_new_tokens=7)
    assert steps[0].cycle == 0
    assert len(steps[0].emissions[0].tokens) == 1
    assert [s.cycle for s in steps] == [0, 1, 2]


@loop_alone
def test_a_judge_that_always_refuses_is_exact() -> None:
    target, draft = tiny_model(seed=1), tiny_model(seed=2)
    prompts = prompts_of([5, 8, 3])
    never = Judged(constant_judge(0.0, 32), 0.5, special=(2,))
    answers = [run(target, draft, prompts, rule, gamma=3, max_new_tokens=20)[0] for rule in (never, Exact())]
    assert answers[0] == answers[1]


@pytest.mark.quick("auto")
def test_a_judge_that_always_accepts_emits_the_drafts_own_continuation() -> None:
    target, draft = tiny_model(seed=1), tiny_model(seed=2)
    always = Judged(constant_judge(1.0, 32), 0.5, special=())
    prompts = prompts_of([5, 8, 3])
    _, steps = run(target, draft, prompts, always, gamma=3, max_new_tokens=1 + 4 * 5)
    text = [list(p) for p in prompts]
    for step in steps:
        for e in step.emissions:
            if step.cycle:
                assert len(e.tokens) == 4
                assert list(e.tokens[:3]) == greedy(draft, text[e.row], 3)
                assert e.tokens[3] == greedy(target, text[e.row] + list(e.tokens[:3]), 1)[0]
            text[e.row] += e.tokens
    assert any("judge" in e.origins for s in steps for e in s.emissions)


def test_a_judge_beside_a_head_reads_the_same_states() -> None:
    """Hidden states are given beside the features, and a judge that always accepts takes every proposal."""
    target, prompts = tiny_model(seed=1), prompts_of([5, 8, 3])
    always = Judged(constant_judge(1.0, 32), 0.5, special=())
    _, steps = run(target, tiny_head(target), prompts, always, gamma=3, max_new_tokens=1 + 4 * 5)
    assert all(len(e.tokens) == 4 for s in steps[1:] for e in s.emissions)
    assert not any(s.non_finite for s in steps)


@pytest.mark.quick("auto")
def test_judged_tokens_stay_in_the_context_of_what_follows() -> None:
    """After a judged acceptance the target continues from that token, at every later cycle."""
    target, draft = tiny_model(seed=1), tiny_model(seed=2)
    prompts = prompts_of([4, 6])
    tokens, steps = run(target, draft, prompts, TopK(8), gamma=4, max_new_tokens=25)
    rank_of = {}
    for b, prompt in enumerate(prompts):
        with torch.inference_mode():
            logits = target(torch.tensor([prompt + tokens[b]])).logits[0, len(prompt) - 1 : -1]
        chosen = torch.tensor(tokens[b])
        rank_of[b] = (logits > logits.gather(1, chosen[:, None])).sum(1).tolist()
    origins = {b: [o for s in steps for e in s.emissions if e.row == b for o in e.origins] for b in (0, 1)}
    for b, ranks in rank_of.items():
        for rank, origin in zip(ranks, origins[b], strict=True):
            assert rank < 8
            assert (rank == 0) == (origin != "judge")


class _Wilful(GammaController):
    """Any γ at any time, whatever it learns: the loop must get along with it."""

    def choose(self, rows: int, behind: int = 0, live: LiveRows | None = None) -> int:
        super().choose(rows, behind, live)
        self.turn = getattr(self, "turn", 0) + 1
        return (4, 0, 1, 0, 0, 3, 2, 8)[self.turn % 8] if self.turn < 30 else 3 * (self.turn % 2)


@pytest.fixture(params=[True, False], ids=["wilful", "auto"])
def chosen_gamma(request: pytest.FixtureRequest, engine_kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        request.getfixturevalue("unmeasured")
        monkeypatch.setattr(loop, "GammaController", _Wilful)
    elif engine_kind == "reference":
        pytest.skip("its costs are measured as those of the fastest engine are")


@pytest.mark.quick("auto-wilful", "cuda-wilful")
@pytest.mark.usefixtures("chosen_gamma")
def test_a_gamma_that_changes_changes_no_token() -> None:
    target, draft = tiny_model(seed=1), tiny_model(seed=1)
    with torch.no_grad():
        for p in draft.parameters():
            p.add_(torch.randn_like(p) * 0.05 * p.std().nan_to_num(0.0))
    prompts = prompts_of([3, 11, 1, 20])
    tokens, steps = run(target, draft, prompts, gamma="auto", max_new_tokens=40)
    assert tokens == [greedy(target, p, 40) for p in prompts]
    if loop.GammaController is _Wilful:  # by its own measure a busy machine may decode plainly
        assert len({step.drafted for step in steps[1:]}) > 1
        assert any("draft" in e.origins for s in steps for e in s.emissions)


@pytest.mark.quick("auto-auto")
@pytest.mark.usefixtures("chosen_gamma")
def test_rows_come_and_go_while_gamma_changes() -> None:
    target, draft = tiny_model(seed=1), tiny_model(seed=2)
    prompts, queue = prompts_of([4, 19, 7, 1, 12]), AdmissionQueue(3, 60)
    tokens: dict[int, list[int]] = {}
    steps = decode(engines_of(target, draft), [Request(prompts[0], 20)], Exact(), gamma="auto", queue=queue)
    for number, step in enumerate(steps):
        for emission in step.emissions:
            tokens.setdefault(emission.row, []).extend(emission.tokens)
        for i in {0: [1, 2], 5: [3], 9: [4]}.get(number, ()):
            queue.put(Request(prompts[i], 5 * i + 6))
    assert [tokens[i] for i in range(5)] == [
        greedy(target, p, 20 if i == 0 else 5 * i + 6) for i, p in enumerate(prompts)
    ]


@pytest.fixture
def random_limits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let every row verify a random number of the drafts, another one in each cycle; returns those numbers."""
    random, used, run_cycle, find = np.random.default_rng(4), [], Cycle.run, loop.find_cycle

    def with_limits(engines: BatchEngines, rule: AcceptanceRule, size: CycleSize, **options: object) -> Cycle:
        limited = size.gamma > 0 and engines.target.static
        return find(engines, rule, CycleSize(size.gamma, limited), **options)  # type: ignore[arg-type]

    def limited(self: Cycle, uniforms: torch.Tensor | None, limits: object = None, edits: object = ()) -> object:
        if not self.gamma:
            return run_cycle(self, uniforms)
        limits = random.integers(0, self.gamma + 1, len(self.last))
        used.extend(limits.tolist())
        return run_cycle(self, uniforms, limits)

    monkeypatch.setattr(Cycle, "run", limited)
    monkeypatch.setattr(loop, "find_cycle", with_limits)
    return used


@pytest.mark.quick("auto-eagle3", "cuda-layers")
@pytest.mark.parametrize("draft_kind", ["layers", "eagle3"])
def test_limits_change_no_token_while_rows_come_and_go(draft_kind: str, random_limits: list[int]) -> None:
    target, draft = tiny_model(seed=1), tiny_model(seed=1)
    with torch.no_grad():
        for p in draft.parameters():
            p.add_(torch.randn_like(p) * 0.05 * p.std().nan_to_num(0.0))
    prompts, queue, counts = prompts_of([4, 19, 7, 1, 12, 90]), AdmissionQueue(3, 96), [20, 11, 30, 21, 26, 6]
    engines = engines_of(target, draft if draft_kind == "layers" else tiny_head(target, draft_vocab_size=50))
    tokens: dict[int, list[int]] = {}
    origins: Counter[str] = Counter()
    for number, step in enumerate(decode(engines, [Request(prompts[0], 20)], Exact(), gamma=4, queue=queue)):
        for emission in step.emissions:
            tokens.setdefault(emission.row, []).extend(emission.tokens)
            origins.update(emission.origins)
        for i in {0: [1, 2], 5: [3], 9: [4, 5]}.get(number, ()):
            queue.put(Request(prompts[i], counts[i]))
    assert [tokens[i] for i in range(6)] == [greedy(target, p, n) for p, n in zip(prompts, counts, strict=True)]
    assert set(random_limits) == {0, 1, 2, 3, 4}
    assert origins["draft"] > (5 if draft_kind == "layers" else 0)  # a random head is seldom right


@pytest.mark.quick("auto-eagle3-600")
@pytest.mark.parametrize("rows", [600, pytest.param(3_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("head", [False, True], ids=["layers", "eagle3"])
def test_limits_leave_the_distribution_alone(rows: int, head: bool, random_limits: list[int]) -> None:
    assert _fit(SpeculativeSampling(Sampling(1.2, 0.9, 3)), rows, head=head) > 1e-3
    assert {0, 1, 2} <= set(random_limits)


@loop_alone
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("rule", [Exact(), TopK(3)], ids=lambda rule: rule.name)
@pytest.mark.parametrize("ends_by", ["eos", "length"])
def test_drafts_after_the_end_of_an_answer_are_worth_nothing(
    rule: AcceptanceRule, ends_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft is the target, so every draft is accepted; the block of six begins with the second token."""
    model, prompt, counted = tiny_model(seed=1), prompts_of([7])[0], []
    monkeypatch.setattr(loop.GammaController, "choose", lambda self, *given: 6)
    monkeypatch.setattr(loop.RequestGamma, "choose", lambda self, rows, most, **how: 6)
    for policy in (loop.GammaController, loop.RequestGamma):
        monkeypatch.setattr(policy, "observe", lambda self, used, *rest, **more: counted.append(used.tolist()))
    monkeypatch.setattr(loop.GammaController, "draft_on", None)
    tokens = greedy(model, prompt, 8)
    assert tokens[4] not in tokens[:4]
    eos, limit = ([tokens[4]], 8) if ends_by == "eos" else ([], 5)
    emitted = [e.tokens for step in decode(engines_of(model, model), [Request(prompt, limit)], rule, eos_ids=eos)
               for e in step.emissions]  # fmt: skip
    assert [token for piece in emitted for token in piece] == tokens[:5]
    assert counted == [[4]]


@pytest.fixture
def gammas(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What requests get when they enter, one after the other."""
    left = [3, 1, 0, 5, 2, 4]
    given = iter(left)
    monkeypatch.setattr(loop.RequestGamma, "choose", lambda self, rows, most, **how: next(given))
    return left


RELAXED = (TopK(3), Margin(1.0), SpeculativeSampling(Sampling(1.0)), Judged(constant_judge(0.7, 32), 0.5, special=()))


@pytest.mark.quick("auto-sampling", "auto-judged")
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    ("engine_kind", "rule"),
    [
        *(("auto", rule) for rule in RELAXED),
        ("cuda", RELAXED[2]),
        *(pytest.param("cuda", rule, marks=pytest.mark.slow) for rule in (RELAXED[0], RELAXED[1], RELAXED[3])),
        *(pytest.param("reference", rule, marks=pytest.mark.slow) for rule in RELAXED[2:]),
    ],
    indirect=["engine_kind"],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_request_keeps_the_gamma_it_entered_with(rule: AcceptanceRule, gammas: list[int]) -> None:
    """Six requests over three places, each with another γ: every answer is what this γ alone gives."""
    target, draft = tiny_model(seed=1), tiny_model(seed=1)
    with torch.no_grad():
        for p in draft.parameters():
            p.add_(torch.randn_like(p) * 0.05 * p.std().nan_to_num(0.0))
    prompts, queue = prompts_of([4, 19, 7, 1, 12, 9]), AdmissionQueue(3, 96)
    requests = [Request(prompt, 14 + 3 * i, seed=i) for i, prompt in enumerate(prompts)]
    tokens: dict[int, list[int]] = {}
    used: dict[int, set[int]] = {}
    engines = engines_of(target, draft, hidden=rule.judge is not None)
    for number, step in enumerate(decode(engines, requests[:1], rule, queue=queue)):
        for emission in step.emissions:
            tokens.setdefault(emission.row, []).extend(emission.tokens)
            if step.cycle:
                used.setdefault(emission.row, set()).add(emission.gamma)
        if number < 5:
            queue.put(requests[number + 1])
    assert sorted(map(len, used.values())) == [1] * 6
    assert len(set.union(*used.values())) > 3
    for i, request in enumerate(requests):
        gamma = used[i].pop()
        (alone,), _ = run(target, draft, [prompts[i]], rule, request.max_new_tokens, [i], gamma=gamma)
        assert tokens[i] == alone, (i, gamma)


@pytest.mark.usefixtures("unmeasured")
def test_judged_tokens_are_traced_whatever_gamma_is(gammas: list[int]) -> None:
    target, draft = tiny_model(seed=1), tiny_model(seed=2)
    always = Judged(constant_judge(1.0, 32), 0.5, special=())
    _, steps = run(target, draft, prompts_of([5, 8]), always, max_new_tokens=40, trace=True)
    emissions = [e for s in steps for e in s.emissions]
    assert sum(len(e.judged) for e in emissions) == sum(e.origins.count("judge") for e in emissions) > 10


@pytest.mark.quick("auto")
def test_several_end_tokens_and_rows_that_finish_early() -> None:
    target, draft = tiny_model(seed=5), tiny_model(seed=6)
    prompts = prompts_of([3, 9, 6, 12])
    free = [greedy(target, p, 25) for p in prompts]
    ends = [free[0][4], free[1][17]]  # the rows end at different times, for different reasons
    tokens, steps = run(target, draft, prompts, gamma=3, max_new_tokens=25, eos_ids=ends)
    assert tokens == [greedy(target, p, 25, ends) for p in prompts]
    finish = {e.row: e.finish for s in steps for e in s.emissions if e.finish}
    assert finish[0] == "eos"
    assert set(finish) == {0, 1, 2, 3}
    assert len(steps[-1].emissions) < len(prompts)


@pytest.mark.quick("auto")
def test_the_context_window_limits_the_answer() -> None:
    for kind in ("llama", "gpt2"):
        target, draft = tiny_model(kind, seed=1), tiny_model(kind, seed=1)
        prompts = prompts_of([90, 60])
        tokens, steps = run(target, draft, prompts, gamma=5, max_new_tokens=20)
        assert [len(t) for t in tokens] == [6, 20]
        assert {e.finish for s in steps for e in s.emissions} == {None, "length"}
        assert tokens[0] == greedy(target, prompts[0], 6)


@pytest.mark.parametrize("engine_kind", ["reference", "auto"], indirect=True)  # a static engine keeps its recordings
def test_a_cycle_and_its_logits_go_with_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without waiting for a garbage collection: a server would hold logits of hundreds of megabytes till then."""
    made, begin = [], Cycle.__init__

    def noted(self: Cycle, *args: object, **options: object) -> None:
        made.append(weakref.ref(self))
        begin(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Cycle, "__init__", noted)
    gc.disable()
    try:
        run(tiny_model(seed=1), tiny_model(seed=2), prompts_of([4, 5, 6]), gamma=2, max_new_tokens=[4, 8, 12])
        assert len(made) == 3
        assert not any(cycle() for cycle in made)
    finally:
        gc.enable()


def test_cancelled_rows_leave_the_batch() -> None:
    model = tiny_model(seed=1)
    cancelled: set[int] = set()
    rows = []
    for step in decode(
        engines_of(model, model), requests_of(prompts_of([4, 5, 6]), 20), Exact(), gamma=2, cancelled=cancelled
    ):
        rows.append([e.row for e in step.emissions])
        if step.cycle == 2:
            cancelled.add(1)
    assert rows[2] == [0, 1, 2]
    assert rows[3:] == [[0, 2]] * len(rows[3:])
    assert len(rows) == 8  # ⌈19 / 3⌉ cycles and the prefill


@pytest.mark.quick("auto-eagle3-*", "cuda-layers-*")
@pytest.mark.parametrize(
    ("engine_kind", "draft_kind", "rule", "gamma"),
    [
        *(
            (engine, draft, SpeculativeSampling(Sampling(0.9)), 3)
            for engine, draft in (("auto", "layers"), ("auto", "eagle3"), ("cuda", "layers"))
        ),
        *(
            pytest.param(engine, draft, rule, gamma, marks=pytest.mark.slow)
            for engine, draft in (("cuda", "eagle3"), ("reference", "layers"), ("reference", "eagle3"))
            for rule, gamma in ((Exact(), 0), (SpeculativeSampling(Sampling(0.9)), 3), (TopK(4), 3))
        ),
    ],
    indirect=["engine_kind"],
    ids=lambda v: getattr(v, "name", str(v)),
)
def test_rows_that_enter_get_what_they_would_get_alone(rule: AcceptanceRule, gamma: int, draft_kind: str) -> None:
    """Rows come and go at different times, with their own limits; at most three at a time."""
    target = tiny_model(seed=1)
    draft = tiny_model(seed=2) if draft_kind == "layers" else tiny_head(target)
    prompts, limits = prompts_of([4, 19, 7, 1, 12, 5, 9, 3]), [15, 5, 12, 1, 7, 10, 3, 9]
    alone = [
        greedy(target, p, n, [7])
        if isinstance(rule, Exact)
        else run(target, draft, [p], rule, gamma=gamma, max_new_tokens=n, seeds=[s], eos_ids=[7])[0][0]
        for s, (p, n) in enumerate(zip(prompts, limits, strict=True))
    ]
    waiting = [Request(p, n, s) for s, (p, n) in enumerate(zip(prompts, limits, strict=True))]
    queue = AdmissionQueue(rows=3, length=60)
    tokens: dict[int, list[int]] = {}
    most = prefills = 0
    steps = decode(engines_of(target, draft), waiting[:1], rule, gamma=gamma, eos_ids=[7], queue=queue)
    for number, step in enumerate(steps):
        prefills += step.cycle == 0
        most = max(most, len(step.emissions))
        for emission in step.emissions:
            tokens.setdefault(emission.row, []).extend(emission.tokens)
        for i in {0: [1, 2, 3, 4], 3: [5], 5: [6, 7]}.get(number, ()):
            queue.put(waiting[i])
    assert [tokens[i] for i in range(len(prompts))] == alone
    assert most == 3
    assert prefills > 2


@pytest.mark.quick("auto-3", "cuda-0")
@pytest.mark.parametrize("gamma", [0, 3])
def test_a_batch_that_has_emptied_takes_in_who_waits(gamma: int) -> None:
    target, draft = tiny_model(seed=1), tiny_model(seed=2)
    prompts, queue = prompts_of([30, 4, 6, 5]), AdmissionQueue(3, 60)
    tokens: list[list[int]] = [[] for _ in prompts]
    steps = decode(engines_of(target, draft), [Request(prompts[0], 9)], Exact(), gamma=gamma, queue=queue)
    for step in steps:
        for emission in step.emissions:
            tokens[emission.row] += emission.tokens
            if emission.finish and emission.row in (0, 2):  # the batch is empty now
                for new in [1, 2] if emission.row == 0 else [3]:
                    queue.put(Request(prompts[new], 1 if new == 1 else 12))
    assert tokens == [greedy(target, p, n) for p, n in zip(prompts, [9, 1, 12, 12], strict=True)]


@loop_alone
def test_the_queue_refuses_rows_that_would_not_fit() -> None:
    with pytest.raises(SelfJudgeError, match="at most 20 tokens"):
        AdmissionQueue(2, 20).put(Request([5] * 15, 6))


def test_a_row_may_be_cancelled_before_it_enters() -> None:
    model = tiny_model(seed=1)
    cancelled, queue = set(), AdmissionQueue(2, 60)
    rows = []
    for step in decode(
        engines_of(model, model), requests_of(prompts_of([4]), 20), Exact(), gamma=2, cancelled=cancelled, queue=queue
    ):
        rows.append([e.row for e in step.emissions])
        if step.cycle == 1 and len(rows) == 2:
            for prompt in prompts_of([5, 6]):
                queue.put(Request(prompt, 10))
            cancelled.add(1)
    assert [2] in rows  # takes the place that row 1 gave up
    assert sum(1 in r for r in rows) <= 1
    assert not cancelled


@pytest.mark.quick("auto--5", "auto-3")
@pytest.mark.parametrize("extra", [-5, 3])
def test_draft_vocabulary_of_another_size(extra: int) -> None:
    """Ids beyond the shorter matrix are padding: never proposed, never needed."""
    target, draft = tiny_model(seed=1), tiny_model(seed=1, vocab_size=VOCAB + extra)
    prompts = [[t % (VOCAB - 5) for t in p] for p in prompts_of([4, 9])]
    exact, sampled = (
        run(target, draft, prompts, rule, gamma=3, max_new_tokens=15)[0]
        for rule in (Exact(), SpeculativeSampling(Sampling(0.7)))
    )
    assert all(t < VOCAB for row in exact + sampled for t in row)
    assert exact == [greedy(target, p, 15) for p in prompts]


@pytest.mark.quick("auto")
def test_a_rows_random_numbers_do_not_depend_on_its_neighbours() -> None:
    target, draft = tiny_model(seed=1), tiny_model(seed=2)
    prompts, rule = prompts_of([4, 9, 7]), SpeculativeSampling(Sampling(0.9, top_p=0.95))
    together, _ = run(target, draft, prompts, rule, gamma=3, max_new_tokens=12, seeds=[7, 8, 9])
    alone = [
        run(target, draft, [p], rule, gamma=3, max_new_tokens=12, seeds=[s])[0][0]
        for p, s in zip(prompts, [7, 8, 9], strict=True)
    ]
    assert together == alone
    other, _ = run(target, draft, prompts, rule, gamma=3, max_new_tokens=12, seeds=[1, 2, 3])
    assert other != together


class _NoResidual(SpeculativeSampling):
    """The classic mistake: correct with p itself instead of norm(max(0, p − q))."""

    def following(self, block, logits, choice, aligned, n):  # type: ignore[no-untyped-def]
        from selfjudge.decoding.sampling import sample

        p = self.sampling.warp(logits).softmax(-1)
        return sample(p[torch.arange(len(n)), n], block.uniforms[:, -1])


def _fit(
    rule: SpeculativeSampling, rows: int, length: int = 4, batch: int = 6_000, head: bool = False, **options: object
) -> float:
    """p-value of the joint distribution of `length` tokens against the target's own chain."""
    size = 5
    target, draft = (tiny_model(seed=s, vocab_size=size, initializer_range=0.15) for s in (11, 12))
    if head:
        draft = tiny_head(target, draft_vocab_size=3)
    prompt = [3, 4, 1]
    tokens = []
    for start in range(0, rows, batch):
        seeds = list(range(start, min(start + batch, rows)))
        tokens += run(
            target, draft, [prompt] * len(seeds), rule, max_new_tokens=length, seeds=seeds, **{"gamma": 2, **options}
        )[0]
    counts = Counter(map(tuple, tokens))
    sequences = torch.cartesian_prod(*[torch.arange(size)] * length)
    with torch.inference_mode():
        full = torch.cat([torch.tensor(prompt).expand(len(sequences), -1), sequences], 1)
        logits = target(full).logits[:, len(prompt) - 1 : -1]
    p = rule.sampling.warp(logits).softmax(-1).gather(-1, sequences[..., None]).squeeze(-1).prod(1).double()
    observed = torch.tensor([counts[tuple(s)] for s in sequences.tolist()], dtype=torch.float64)
    assert observed[p == 0].sum() == 0  # nothing that the filters exclude
    expected = p * rows
    large = expected >= 5  # the usual condition of the test; the rest is one cell
    observed = torch.cat([observed[large], observed[~large].sum()[None]])
    expected = torch.cat([expected[large], expected[~large].sum()[None]])
    keep = expected > 0
    return float(chisquare(observed[keep], expected[keep] * observed[keep].sum() / expected[keep].sum()).pvalue)


# few rows on every engine; the full size tells finer differences
SIZES = [600, pytest.param(3_000, marks=pytest.mark.slow)]


@pytest.mark.quick("auto-layers-600", "cuda-eagle3-600")
@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("head", [False, True], ids=["layers", "eagle3"])
def test_sampling_has_the_targets_distribution(rows: int, head: bool) -> None:
    assert _fit(SpeculativeSampling(Sampling(1.2, 0.9, 3)), rows, head=head) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("engine_kind", ["auto"], indirect=True)
@pytest.mark.parametrize("sampling", [Sampling(0.7), Sampling(1.0), Sampling(1.0, top_p=0.8)])
@pytest.mark.parametrize("head", [False, True], ids=["layers", "eagle3"])
def test_other_samplings_have_the_targets_distribution(sampling: Sampling, head: bool) -> None:
    """Temperature, top-p and top-k are applied to logits, whatever engine they come from."""
    assert _fit(SpeculativeSampling(sampling), 3_000, head=head) > 1e-3


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("engine_kind", ["auto"], indirect=True)
@pytest.mark.parametrize("rows", [120, pytest.param(600, marks=pytest.mark.slow)])
def test_ending_a_proposal_early_leaves_the_distribution_alone(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop is the same on every engine, and rows must be decoded one by one."""
    monkeypatch.setattr(loop, "GammaController", _Timid)
    monkeypatch.setattr(_Timid, "least_q", 0.25)
    assert _fit(SpeculativeSampling(Sampling(1.0)), rows, length=2, batch=1, gamma="auto") > 1e-3


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    ("engine_kind", "rows"),
    [("auto", 600), *(pytest.param(engine, 3_000, marks=pytest.mark.slow) for engine in ("auto", "cuda"))],
    indirect=["engine_kind"],
)
def test_a_gamma_that_changes_leaves_the_distribution_alone(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "GammaController", _Wilful)
    assert _fit(SpeculativeSampling(Sampling(1.2, 0.9, 3)), rows, gamma="auto") > 1e-3


@pytest.mark.parametrize("engine_kind", ["auto"], indirect=True)
@pytest.mark.parametrize("rows", SIZES[1:])
def test_the_goodness_of_fit_test_catches_a_wrong_correction(rows: int) -> None:
    """At the very size that every engine is tried with; the engine makes no difference to the test's power."""
    for sampling in (Sampling(0.7), Sampling(1.2, 0.9, 3)):
        assert _fit(_NoResidual(sampling), rows) < 1e-6


@loop_alone
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": -1}, "`gamma` must lie between 0"), ({"max_new_tokens": 0}, "at least 1"),
        ({"prompts": [[]]}, "empty"), ({"prompts": []}, "no prompt"), ({"prompts": [[5] * 96]}, "context window"),
        ({"draft": None}, "needs a draft"),
    ],
)  # fmt: skip
def test_impossible_requests(options: dict, message: str) -> None:
    model = tiny_model()
    arguments = {"prompts": [[4, 5]], "draft": model, "gamma": 2, **options}
    with pytest.raises(SelfJudgeError, match=message):
        run(model, arguments.pop("draft"), arguments.pop("prompts"), **arguments)


def test_broken_weights_end_in_a_verdict_not_a_crash() -> None:
    """A NaN in one row of the head: alignment decides, the step says so."""
    target, draft = tiny_model(seed=1), tiny_model(seed=2)
    with torch.no_grad():
        target.get_output_embeddings().weight[7] = torch.nan
    tokens, steps = run(target, draft, prompts_of([4]), Judged(constant_judge(1.0, 32), 0.5), gamma=2, max_new_tokens=9)
    assert len(tokens[0]) == 9
    assert 7 not in tokens[0]
    assert all(s.non_finite for s in steps)
    assert all(o != "judge" for s in steps for e in s.emissions for o in e.origins)
