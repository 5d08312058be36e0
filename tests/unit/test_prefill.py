"""Prompts read in chunks: by the order of events, nobody waits for a long one, and nobody's tokens change."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from conftest import REFERENCE, VOCAB, tiny_head, tiny_model
from selfjudge.decoding import loop
from selfjudge.decoding.admission import AdmissionQueue, BatchRows, Request
from selfjudge.decoding.gamma import GammaController, LiveRows
from selfjudge.decoding.loop import decode
from selfjudge.decoding.prefill import Prefill
from selfjudge.decoding.rules import AcceptanceRule, Exact, SpeculativeSampling
from selfjudge.decoding.sampling import Sampling
from selfjudge.decoding.text import Batch, generate
from selfjudge.engine.base import Output
from selfjudge.engine.cuda import engine as cuda
from selfjudge.engine.draft import BatchEngines, EagleDraft, ModelDraft
from selfjudge.engine.select import make_draft, make_engine
from selfjudge.models.load import as_draft
from selfjudge.models.pair import Pair
from selfjudge.types import Step

MODELS = tiny_model(seed=1), tiny_model(seed=2)
SAMPLED = SpeculativeSampling(Sampling(0.9))


@pytest.fixture(params=["auto", "cuda", REFERENCE])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def engines(kind: str, chunk: int) -> BatchEngines:
    target = make_engine(MODELS[0], kind=kind)
    target.chunk = chunk
    return BatchEngines(target, make_draft(MODELS[1], MODELS[0], kind=kind))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def alone(kind: str, request: Request, rule: AcceptanceRule, gamma: int) -> list[Step]:
    """Without a queue: the prompt is read at once."""
    return list(decode(engines(kind, 4), [request], rule, gamma=gamma))


def tokens_of(steps: Sequence[Step], row: int) -> list[int]:
    return [token for step in steps for e in step.emissions if e.row == row for token in e.tokens]


@dataclass
class Trial:
    """A batch whose first request is there from the start; others arrive, and some leave, after steps of a number."""

    kind: str
    first: Request
    rule: AcceptanceRule = field(default_factory=Exact)
    gamma: int = 0
    chunk: int = 4
    rows: int = 3
    arrivals: dict[int, list[Request]] = field(default_factory=dict)
    leave: dict[int, set[int]] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)

    def run(self, most: int = 400) -> list[Step]:
        queue, steps = AdmissionQueue(self.rows, 90), []
        for step in decode(
            engines(self.kind, self.chunk),
            [self.first],
            self.rule,
            gamma=self.gamma,
            queue=queue,
            cancelled=self.cancelled,
        ):
            for request in self.arrivals.get(len(steps), ()):
                queue.put(request)
            self.cancelled |= self.leave.get(len(steps), set())
            steps.append(step)
            assert len(steps) < most
        return steps


def first_step(steps: Sequence[Step], row: int) -> int:
    return next(i for i, step in enumerate(steps) if any(e.row == row for e in step.emissions))


def last_step(steps: Sequence[Step], row: int) -> int:
    return max(i for i, step in enumerate(steps) if any(e.row == row for e in step.emissions))


@pytest.mark.quick("auto-sampled", "cuda-exact")
@pytest.mark.parametrize(
    ("rule", "gamma"), [(Exact(), 0), (Exact(), 3), (SAMPLED, 2)], ids=["plain", "exact", "sampled"]
)
def test_a_short_prompt_does_not_wait_for_a_long_one(kind: str, rule: AcceptanceRule, gamma: int) -> None:
    """The first prompt of the batch is long; a short one arrives after its first chunk."""
    long, short = Request(prompt_of(60), 5, seed=7), Request(prompt_of(4, seed=1), 4, seed=8)
    steps = Trial(kind, long, rule, gamma, arrivals={0: [short]}).run()
    by_itself = alone(kind, short, rule, gamma)
    assert not steps[0].emissions
    assert last_step(steps, 1) < first_step(steps, 0)  # it has come and gone
    assert last_step(steps, 1) <= 2 * len(by_itself)  # a chunk for each of its steps at most
    assert tokens_of(steps, 1) == tokens_of(by_itself, 0)
    assert tokens_of(steps, 0) == tokens_of(alone(kind, long, rule, gamma), 0)


def test_live_rows_go_on_between_chunks(kind: str) -> None:
    live, long = Request(prompt_of(3), 30), Request(prompt_of(50, seed=1), 2)
    steps = Trial(kind, live, arrivals={2: [long]}).run()
    entered = first_step(steps, 1)
    chunks = [i for i, step in enumerate(steps[:entered]) if not step.emissions]
    assert len(chunks) == 12  # the thirteenth ends the prompt
    assert all(b - a == 2 for a, b in pairwise(chunks))
    assert all(step.cycle == 0 and not any(step.seconds.values()) for step in steps if not step.emissions)
    assert steps[entered].seconds["target"] > 0


def test_a_long_prompt_is_not_starved_by_short_ones(kind: str) -> None:
    long, short = Request(prompt_of(40), 1), Request(prompt_of(3, seed=1), 1)
    steps = Trial(kind, long, arrivals={i: [short] for i in range(60)}, rows=4).run()
    assert first_step(steps, 0) <= 2 * 10


def test_who_leaves_between_chunks_frees_the_place_at_once(kind: str) -> None:
    long, waits = Request(prompt_of(60), 3), Request(prompt_of(4, seed=1), 2)
    trial = Trial(kind, long, rows=1, arrivals={0: [waits, waits, waits]}, leave={2: {0, 2}})
    steps = trial.run()
    assert [[e.row for e in step.emissions] for step in steps] == [[], [], [], [1], [1], [3], [3]]
    assert not trial.cancelled


def short_request(seed: int) -> Request:
    return Request(prompt_of(2, seed), 24)


def answers_of(steps: Sequence[Step]) -> dict[int, list[int]]:
    answers: dict[int, list[int]] = {}
    for emission in (e for step in steps for e in step.emissions):
        answers.setdefault(emission.row, []).extend(emission.tokens)
    return answers


@cache
def short_answers() -> dict[int, list[int]]:
    """Of a batch that nobody enters."""
    return answers_of(list(decode(engines("cuda", 4), [short_request(seed) for seed in range(70)], Exact(), gamma=0)))


def enter_beside(live: int, arrivals: Sequence[int]) -> list[int]:
    """After which cycle each request entered that arrived after a cycle, beside so many live rows; tokens are checked."""
    queue, cycle, entered = AdmissionQueue(99, 90), 0, {}
    requests = [short_request(seed) for seed in range(live + len(arrivals))]
    queue.waiting.extend(requests[1:live])
    left, steps = list(zip(arrivals, requests[live:], strict=True)), []
    for step in decode(engines("cuda", 256), requests[:1], Exact(), gamma=0, queue=queue):
        steps.append(step)
        cycle = max(cycle, step.cycle)
        entered |= {e.row: cycle for e in step.emissions if not step.cycle}
        while left and left[0][0] == cycle:
            queue.put(left.pop(0)[1])
    assert answers_of(steps) == {row: short_answers()[row] for row in range(len(requests))}
    return [entered[row] for row in range(live, len(requests))]


def test_prompts_wait_a_few_cycles_for_others_beside_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for 8 live rows ends the waiting, or the eighth cycle; who comes after a pause does not wait."""
    monkeypatch.setattr(cuda, "SLOTS", 32)  # as many as they need
    arrivals = [6, 7, 8, 9, 10, 11, 12, 13, 14]
    assert enter_beside(48, arrivals) == [8, 8, 14, 14, 14, 14, 14, 14, 22]
    assert enter_beside(64, [6, 7, 12, 13, 26]) == [8, 8, 16, 16, 27]
    assert enter_beside(12, [6, 7, 8, 9, 20]) == [7, 8, 9, 10, 21]  # beside few rows nobody waits


def test_prompts_that_wait_together_are_read_together(kind: str) -> None:
    prefill, queue = Prefill(engines(kind, 64), 1), AdmissionQueue(16, 40)
    for i in range(7):
        queue.put(Request(prompt_of(6, seed=i), 2))
    prefill.make_room(queue, 8)
    prefill.admit(queue, BatchRows.new((), ()), set())
    assert [group.numbers for group in prefill.groups] == [list(range(7))]


def test_a_captured_pass_over_four_prompts_reads_three(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of the next power of two rows, on a CPU by a capture that fills the same tensors at every replay."""

    def capture(
        _: cuda.CudaEngine, functions: Sequence[Callable[[], None]], state: Sequence[torch.Tensor]
    ) -> list[Any]:
        assert len(functions) == 1
        saved = [tensor.clone() for tensor in state]
        functions[0]()
        outputs = inspect.getclosurevars(functions[0]).nonlocals["outputs"]
        for tensor, value in zip(state, saved, strict=True):
            tensor.copy_(value)
        kept = outputs[-1]

        def replay() -> None:
            before = engine.use_rows(len(kept.logits))
            functions[0]()
            engine.use_rows(before)
            kept.logits.copy_(outputs[-1].logits)
            kept.features.copy_(outputs[-1].features)

        return [replay]

    monkeypatch.setattr(cuda.CudaEngine, "captures", True)
    monkeypatch.setattr(cuda.CudaEngine, "capture", capture)
    engine, plain = (cuda.CudaEngine(MODELS[0], features=(0, 1)).aside(3, 40) for _ in range(2))
    for lengths in ([5, 9, 7], [8, 3, 6, 11], [4, 12, 2], [7], [6, 1, 9]):
        prompts = [prompt_of(length, seed=length) for length in lengths]
        tokens = torch.tensor([[0] * (max(lengths) - len(p)) + p for p in prompts])
        counts, step = torch.tensor(lengths), torch.tensor([[5, 6]] * len(lengths))
        engine.reserve(len(lengths), 40)
        plain.reserve(len(lengths), 40)
        ours, theirs = engine.prefill(tokens, counts), plain.extend(tokens, counts, keep=1)
        torch.testing.assert_close(ours.logits, theirs.logits)
        for row, length in enumerate(lengths):
            torch.testing.assert_close(ours.features[row, -length:], theirs.features[row, -length:])
        assert engine.lengths.tolist() == plain.lengths.tolist() == lengths
        torch.testing.assert_close(engine.extend(step).logits, plain.extend(step).logits)
    assert [key for key, captured in engine._prefills.items() if captured] == [(4, 64)]


def test_a_capture_without_memory_leaves_the_rows_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(cuda.CudaEngine, "captures", True)
    monkeypatch.setattr(cuda.CudaEngine, "capture", capture)
    engine, tokens, counts = cuda.CudaEngine(MODELS[0]), torch.tensor([[5, 6, 7]] * 3), torch.tensor([3, 2, 1])
    engine.reserve(4, 100)
    engine.use_rows(3)
    engine.prefill(tokens, counts)
    with pytest.raises(torch.OutOfMemoryError):
        engine.prefill(tokens, counts)
    assert len(engine.lengths) == 3


def test_a_large_group_leaves_the_engine_with_the_usual_graphs_to_others() -> None:
    engine = cuda.CudaEngine(MODELS[0])
    engine.reserve(64, 200)
    for rows, usual in ((16, True), (17, False)):
        other = engine.aside(rows, 1022 if usual else 100)
        other.reserve(rows, 1022 if usual else 100)
        other.usual = usual
        engine.keep_aside(other)
    assert len(engine.asides) == 2
    assert engine.aside(3, 100).usual


def test_chunks_are_longer_while_nobody_else_is_there(kind: str) -> None:
    long, later = Request(prompt_of(80), 1), Request(prompt_of(40, seed=1), 1)
    by_itself = first_step(Trial(kind, long).run(), 0)
    assert by_itself == 80 // 16 - 1
    assert first_step(Trial(kind, long, arrivals={0: [later]}).run(), 1) > by_itself


@pytest.mark.parametrize("gamma", [0, 3])
def test_without_a_queue_prompts_are_read_at_once(kind: str, gamma: int) -> None:
    steps = alone(kind, Request(prompt_of(60), 5), Exact(), gamma)
    assert all(step.emissions for step in steps)


request_plan = st.tuples(
    st.integers(0, 25), st.integers(1, 45), st.integers(1, 7), st.one_of(st.none(), st.integers(0, 40))
)


@pytest.mark.quick("auto-2", "cuda-0")
@pytest.mark.parametrize("gamma", [0, 2])
@settings(max_examples=4)
@given(plan=st.lists(request_plan, min_size=1, max_size=6), chunk=st.integers(1, 9), rows=st.integers(1, 4))
def test_whatever_arrives_and_leaves_tokens_are_those_alone(
    kind: str, gamma: int, plan: list[tuple[int, int, int, int | None]], chunk: int, rows: int
) -> None:
    """Sampled, so that every row also needs its own random numbers."""
    requests = [Request(prompt_of(length, i), limit, seed=i) for i, (_, length, limit, _) in enumerate(plan)]
    order = [0, *sorted(range(1, len(plan)), key=lambda i: plan[i][0])]  # the loop numbers them as they arrive
    trial = Trial(kind, requests[0], SAMPLED, gamma, chunk, rows)
    for row, i in enumerate(order):
        arrives, _, _, leaves = plan[i]
        if row:
            trial.arrivals.setdefault(arrives, []).append(requests[i])
        if leaves is not None:
            trial.leave.setdefault(leaves if i == 0 else leaves + arrives, set()).add(row)
    steps = trial.run()
    for row, i in enumerate(order):
        got, expected = tokens_of(steps, row), tokens_of(alone(kind, requests[i], SAMPLED, gamma), 0)
        arrived = row == 0 or plan[i][0] < len(steps)
        if plan[i][3] is None and arrived:
            assert got == expected
        assert got == expected[: len(got)]
    assert max(len(step.emissions) for step in steps) <= rows


def test_answers_count_the_same_cycles(tiny_pair: Pair) -> None:
    """Of prompts in chunks: `Batch` reads 8 tokens at a time on a CPU."""
    prompts = [" ".join(f"w{n % 50}" for n in range(length)) for length in (60, 5)]
    expected = [generate(tiny_pair, prompt, gamma=2, max_new_tokens=12, raw=True) for prompt in prompts]
    batch = Batch(tiny_pair, gamma=2, length=90)
    answers = [batch.add(tiny_pair.encode(prompt, raw=True), max_new_tokens=12) for prompt in prompts]
    finished = []
    while len(batch):
        finished += [answer for answer, _ in batch.step() if answer.finish]
    batch.close()
    assert finished[0] is answers[1]
    for answer, generation in zip(answers, expected, strict=True):
        made = answer.generation()
        assert (made.tokens, made.cycles, made.text) == (generation.tokens, generation.cycles, generation.text)
        assert 0 < made.seconds["target"] <= made.seconds["total"]


# ------------------------------------------------------------------------------- drafts that read prompts when they draft


class Later(GammaController):
    """Three drafts once so many cycles were plain."""

    plain = 5

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        self.cycles = 0

    def choose(self, rows: int, behind: int = 0, live: LiveRows | None = None) -> int:
        super().choose(rows, behind, live)
        self.cycles += 1
        return 3 if self.cycles > self.plain else 0

    def draft_on(self, q: object) -> bool:
        return True


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of prompts that the draft has read, one number for each pass."""
    counted: list[int] = []
    for kind, name in ((ModelDraft, "read"), (EagleDraft, "read"), (EagleDraft, "_read_postponed")):
        original = getattr(kind, name)

        def reading(self, tokens, counts, features, original=original):  # type: ignore[no-untyped-def]
            counted.append(int(counts.sum()))
            original(self, tokens, counts, features)

        monkeypatch.setattr(kind, name, reading)
    monkeypatch.setattr(loop, "measure_costs", lambda *_: None)
    monkeypatch.setattr(loop, "GammaController", Later)
    return counted


def draft_engines(kind: str, draft: str) -> BatchEngines:
    """The target itself as a draft, or a head."""
    small = tiny_head(MODELS[0]) if draft == "head" else MODELS[0]
    target = make_engine(MODELS[0], kind=kind, features=as_draft(small).features)
    target.chunk = 4
    return BatchEngines(target, make_draft(small, MODELS[0], kind=kind))


def drafted(steps: Sequence[Step]) -> list[tuple[int, int, int]]:
    """Row, drafts and accepted drafts of every cycle."""
    return [(e.row, s.drafted, len(e.tokens)) for s in steps if s.cycle for e in s.emissions]


def test_postponed_prompts_keep_the_features_of_their_tokens_alone() -> None:
    draft, features, prompts = draft_engines("auto", "head").draft, torch.rand(3, 50, 96), [[5] * n for n in (3, 50, 7)]
    assert isinstance(draft, EagleDraft)
    draft.reserve(3, 60)
    draft.postpone(prompts, [features])
    for row, (tokens, states) in enumerate(draft.postponed):
        assert states is not None
        assert torch.equal(states, features[row, -len(tokens) :])
        assert states.untyped_storage().nbytes() == len(prompts[row]) * 96 * 4


@pytest.mark.parametrize("draft", ["model", "head"])
@pytest.mark.parametrize("kind", ["auto", REFERENCE])
def test_a_draft_reads_prompts_when_it_drafts(
    monkeypatch: pytest.MonkeyPatch, read: list[int], kind: str, draft: str
) -> None:
    """Then it proposes what it would have proposed, had it read them at once; and never where nothing is drafted."""
    outputs: list[Output] = []
    for drafter in (ModelDraft, EagleDraft):
        propose = drafter.propose
        watched = lambda *a, propose=propose: outputs.append(propose(*a)) or outputs[-1]  # noqa: E731
        monkeypatch.setattr(drafter, "propose", watched)
    requests = [Request(prompt_of(n, n), 24) for n in (20, 3, 9)]
    late = list(decode(draft_engines(kind, draft), requests, Exact()))
    assert read == [sum(len(r.prompt) for r in requests)]
    assert drafted(late)[-1][1] == 3
    with monkeypatch.context() as patch:
        patch.setattr(Prefill, "postpones", lambda self, alive: False)
        early = list(decode(draft_engines(kind, draft), requests, Exact()))
    assert drafted(late) == drafted(early)
    proposals, half = [output.logits for output in outputs], len(outputs) // 2
    torch.testing.assert_close(proposals[:half], proposals[half:])
    assert [tokens_of(late, row) for row in range(3)] == [tokens_of(early, row) for row in range(3)]
    if draft == "model":
        assert max(tokens for *_, tokens in drafted(late)) == 4  # it is the target itself
    monkeypatch.setattr(Later, "plain", 1000)
    read.clear()
    plain = list(decode(draft_engines(kind, draft), requests, Exact()))
    assert read == []
    assert [tokens_of(plain, row) for row in range(3)] == [tokens_of(early, row) for row in range(3)]


@pytest.mark.quick("0-auto-model", "12-auto-head", "3-auto-model", "1000-auto-head")
@pytest.mark.parametrize("draft", ["model", "head"])
@pytest.mark.parametrize("kind", ["auto", REFERENCE])
@pytest.mark.parametrize("plain", [0, 3, 12, 1000])
def test_rows_that_enter_late_are_read_with_the_others(
    monkeypatch: pytest.MonkeyPatch, read: list[int], kind: str, draft: str, plain: int
) -> None:
    """Beside rows for which it drafts, the draft reads chunk by chunk; else it reads all of them when it first drafts."""
    monkeypatch.setattr(Later, "plain", plain)
    requests = [Request(prompt_of(n, n), limit) for n, limit in ((5, 24), (18, 30), (2, 4), (11, 9))]
    queue = AdmissionQueue(3, 90)
    queue.waiting.extend(requests[1:3])
    steps = []
    for step in decode(draft_engines(kind, draft), requests[:1], Exact(), queue=queue):
        steps.append(step)
        if len(steps) == 12:
            queue.put(requests[3])
    expected = [list(decode(draft_engines(kind, draft), [request], Exact(), gamma=0)) for request in requests]
    assert [tokens_of(steps, row) for row in range(4)] == [tokens_of(alone, 0) for alone in expected]
    assert bool(read) == (plain < 1000)
    if draft == "model" and plain < 1000:
        assert max(tokens for *_, tokens in drafted(steps)) == 4
