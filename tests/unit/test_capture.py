"""Captures and timings of cycles between answers, on the static engine with torch's operations."""

from __future__ import annotations

import gc
import threading
from contextlib import nullcontext
from itertools import count
from typing import Any
from weakref import WeakSet

import pytest
import torch

from conftest import tiny_head, tiny_model
from proposals import ARBITRARY, answers_between_captures, prompts_of, requests_of
from selfjudge.decoding import batch_gamma, capture
from selfjudge.decoding.admission import AdmissionQueue, BatchRows, Request
from selfjudge.decoding.batch_gamma import BatchGamma
from selfjudge.decoding.capture import capture_cycles, time_cycle
from selfjudge.decoding.cycle import CycleSize, find_cycle, is_captured
from selfjudge.decoding.gamma import STATIC_CHOICES, PairStatistics
from selfjudge.decoding.loop import decode, find_statistics
from selfjudge.decoding.prefill import Prefill, PrefillGroup
from selfjudge.decoding.rules import EXACT, AcceptanceRule, SpeculativeSampling
from selfjudge.decoding.sampling import Sampling
from selfjudge.decoding.text import Batch, share_rules
from selfjudge.engine.base import Output
from selfjudge.engine.cuda import engine as cuda_engine
from selfjudge.engine.cuda.engine import CudaEngine
from selfjudge.engine.draft import BatchEngines, Drafter
from selfjudge.engine.select import make_draft, make_engine
from selfjudge.models.pair import Pair
from selfjudge.types import Gamma

TARGET, SMALL = tiny_model(seed=1), tiny_model(seed=2)


def make_engines() -> BatchEngines:
    return BatchEngines(make_engine(TARGET, kind="cuda"), make_draft(SMALL, TARGET, kind="cuda"))


@pytest.mark.quick("model-sampling")
@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("model", SpeculativeSampling(Sampling(0.9))),
        ("head", ARBITRARY),
        pytest.param("model", ARBITRARY, marks=pytest.mark.slow),
        pytest.param("head", SpeculativeSampling(Sampling(0.9)), marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_captures_and_timings_between_steps_do_not_change_answers(rule: AcceptanceRule, kind: str) -> None:
    draft = SMALL if kind == "model" else tiny_head(TARGET)
    plain, among = (answers_between_captures(TARGET, draft, rule, captures=c) for c in (False, True))
    assert among == plain
    assert [len(answer) for answer in plain] == [25, 8, 20, 3, 12, 17]


def test_the_state_of_all_rows_is_as_before() -> None:
    engines = make_engines()
    for _ in decode(engines, requests_of(prompts_of([9, 4, 20]), 6), EXACT, gamma=2):
        pass
    engines.reserve(3, 40)
    tokens = torch.tensor(prompts_of([3, 3, 3]))
    engines.target.extend(tokens)
    assert engines.draft is not None
    engines.draft.read(tokens, torch.tensor([3, 2, 3]), None)
    kept = [tensor for cache in engines.caches for tensor in cache.state()]
    values = [tensor.clone() for tensor in kept]
    keys = engines.target.keys[:, :, :, :3].clone()  # type: ignore[attr-defined]
    backlog = engines.draft.backlog.max_missing
    for rows in (1, 2, 3):
        for cycle in capture_cycles(engines, ARBITRARY, rows, map(CycleSize, (0, 1, 4))):
            last = cycle.last.clone()
            time_cycle(cycle, 3)
            assert torch.equal(cycle.last, last)
    now = [tensor for cache in engines.caches for tensor in cache.state()]
    assert all(a.data_ptr() == b.data_ptr() and a.shape == b.shape for a, b in zip(kept, now, strict=True))
    assert all(map(torch.equal, now, values))
    assert torch.equal(engines.target.keys[:, :, :, :3], keys)  # type: ignore[attr-defined]
    assert engines.draft.backlog.max_missing == backlog


def test_a_captured_cycle_is_found_by_the_loop_and_not_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engines, captures = make_engines(), []
    original = CudaEngine.capture
    monkeypatch.setattr(CudaEngine, "capture", lambda *a: captures.append(1) or original(*a))
    engines.reserve(2, 40)
    cycles = capture_cycles(engines, EXACT, 2, map(CycleSize, (0, 2)))
    assert [cycle.gamma for cycle in cycles] == [0, 2]
    assert capture_cycles(engines, EXACT, 2, map(CycleSize, (2, 0))) == cycles[::-1]
    assert all(is_captured(engines, EXACT, CycleSize(gamma), trace=True, rows=2) for gamma in (0, 2))
    assert not is_captured(engines, EXACT, CycleSize(2), trace=False, rows=1)
    steps = list(decode(engines, requests_of(prompts_of([5, 6]), 7), EXACT, gamma=2))
    assert sum(map(len, (e.tokens for step in steps for e in step.emissions))) == 14
    rows = {len(cycle.last) for cycle in engines.target.captured_cycles.values()}
    assert len(captures) == 2 + (1 in rows)  # one row may have outlived the other


def test_a_cycle_that_is_about_to_run_keeps_its_tokens() -> None:
    engines = make_engines()
    engines.reserve(2, 40)
    cycle = find_cycle(engines, EXACT, CycleSize(2), trace=False, first=torch.tensor([7, 8]))
    assert capture_cycles(engines, EXACT, 2, map(CycleSize, (2,))) == [cycle]
    assert cycle.last.tolist() == [[7], [8]]
    assert cycle.captured is not None


def test_what_cannot_be_captured_or_timed_is_refused() -> None:
    engines = make_engines()
    engines.reserve(2, 40)
    with pytest.raises(ValueError, match="fewer than 4 rows"):
        capture_cycles(engines, EXACT, 4, map(CycleSize, (1,)))
    assert len(engines.target.state()[0]) == 2
    assert isinstance(engines.draft, Drafter)
    assert len(engines.draft.backlog.missing) == 2
    cycle = find_cycle(engines, EXACT, CycleSize(1), trace=False, first=torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match="only a captured cycle"):
        time_cycle(cycle)
    with pytest.raises(ValueError, match="only static engines"):
        capture_cycles(BatchEngines(make_engine(TARGET, kind="reference")), EXACT, 1, map(CycleSize, (0,)))


@pytest.fixture
def pair(checkpoints: dict[str, str]) -> Pair:
    """One whose engines have captured nothing."""
    return Pair.load(checkpoints["target"], checkpoints["draft"], device="cpu", dtype="float32")


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each capture so far."""
    rows: list[int] = []
    original = CudaEngine.capture

    def capture(self: CudaEngine, functions: Any, state: Any) -> Any:
        rows.append(len(state[0]))
        return original(self, functions, state)

    monkeypatch.setattr(CudaEngine, "capture", capture)
    return rows


def answer(batch: Batch) -> list[list[int]]:
    answers = [batch.add(prompt, max_new_tokens=n) for prompt, n in zip(prompts_of([4, 9, 2]), (9, 5, 12), strict=True)]
    while len(batch):
        batch.step()
    batch.close()
    return [list(one.tokens) for one in answers]


@pytest.mark.quick("auto")
@pytest.mark.parametrize("gamma", [0, 2, "auto"])
def test_a_batch_finds_what_was_captured_before_it(captures: list[int], gamma: Gamma, pair: Pair) -> None:
    alone = answer(Batch(pair, "exact", rows=3, length=60, gamma=gamma, engine="reference"))
    batch = Batch(pair, "exact", rows=3, length=60, gamma=gamma, engine="cuda")
    gammas, timed = (len(STATIC_CHOICES) + 1, 2) if gamma == "auto" else (1, 0)
    shares: list[float] = []
    assert not batch.capture(0.0, shares.append)
    assert not batch.capture(0.0, shares.append)
    both = [1 / (1 + 3 * gammas + timed), 1 / (3 * gammas + timed)]  # passes over prompts; the cycles of a row
    assert (captures, shares) == ([1] * gammas, both)  # at least one at a time
    assert batch.capture(600.0)
    assert sorted(set(captures)) == [1, 2, 3]
    assert len(captures) == 3 * gammas
    assert batch.capture(0.0)
    assert answer(batch) == alone
    assert answer(Batch(pair, "exact", rows=3, length=60, gamma=gamma, engine="cuda")) == alone
    assert len(captures) == 3 * gammas


@pytest.mark.quick("None")
@pytest.mark.parametrize("fixed", [None, 5])
def test_auto_captures_no_gamma_that_does_not_run(captures: list[int], fixed: int | None) -> None:
    """A machine whose table is known, and on which drafts cost nothing: no γ loses what a capture takes."""
    engines = make_engines()
    costs = find_statistics(engines).costs
    for rows in (1, 2, 4, 8):
        for gamma in range(9):
            costs.add(rows, gamma, (0.0, 1e-9))
    requests = requests_of(prompts_of([9, 4, 20, 3, 5, 6, 2, 8]), [4, 12, 10, 3, 5, 3, 16, 4])
    for gamma in ("auto",) if fixed is None else (fixed, "auto"):
        drafted = [step.drafted for step in decode(engines, requests, EXACT, gamma=gamma) if step.cycle]
    assert captures == [8, 4, 2, 1]
    assert 0 not in drafted
    assert fixed is None or set(drafted) == {fixed}
    for _ in decode(engines, requests[1:] + requests[:1], EXACT):  # what is learned makes others likely
        pass
    assert len(captures) == 4
    list(decode(engines, requests, EXACT, gamma=7))
    assert captures[4:] == [8, 4, 2, 1]  # a γ that is asked for


def test_engines_that_capture_nothing_are_done_at_once(captures: list[int], pair: Pair) -> None:
    assert Batch(pair, "exact", engine="reference").capture(0.0)
    assert captures == []


def test_no_more_is_captured_than_an_engine_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "CAPTURED_CYCLES", 2)
    engines = make_engines()
    engines.reserve(5, 40)
    assert capture.list_uncaptured(engines, EXACT, 5, 2, PairStatistics()) == [(1, CycleSize(2)), (2, CycleSize(2))]
    capture_cycles(engines, EXACT, 1, map(CycleSize, (2,)))
    assert capture.list_uncaptured(engines, EXACT, 5, 2, PairStatistics()) == [(2, CycleSize(2))]


def test_what_reads_prompts_keeps_its_cache_and_graphs() -> None:
    """Prompts of other sizes let a small cache grow, and a large one is made beside it."""
    engine = CudaEngine(TARGET)

    def read(rows: int, length: int) -> CudaEngine:
        aside = engine.aside(rows, length)
        aside.reserve(rows, length)
        engine.keep_aside(aside)
        return aside

    first = read(4, 200)
    assert read(1, 500) is first
    version = first.version
    assert all(read(*size) is first for size in ((2, 100), (4, 500), (3, 400)))
    assert (first.version, len(first.lengths), first.rows_held(500)) == (version, 3, 4)
    large = read(64, 500)
    assert large is not first
    assert read(1, 30) in (first, large)
    assert (first.version, read(4, 500).version) == (version, version)
    beside = {read(n, 700) for n in (70, 90, 110, 130)}
    assert len(engine.asides) == cuda_engine.ASIDES >= len(beside)


def test_passes_over_usual_prompts_are_captured_before_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    engines, shapes, prefill = make_engines(), [], CudaEngine.prefill

    def note(self: CudaEngine, tokens: torch.Tensor, counts: torch.Tensor) -> Output:
        shapes.append(tuple(tokens.shape))
        return prefill(self, tokens, counts)

    monkeypatch.setattr(CudaEngine, "prefill", note)
    capture.capture_prompts(engines, 5, 200)
    assert sorted(set(shapes)) == [(rows, tokens) for rows in (1, 2, 4, 8) for tokens in (64, 128)]
    assert len(shapes) == 4 * len(set(shapes))  # twice each, by target and draft
    assert engines.has_asides
    assert engines.aside(4, 128).target.rows_held(128) == 8  # what was captured is found by prompts of these sizes


@pytest.mark.quick("8-600-300")
@pytest.mark.parametrize(("rows", "prompt", "limit"), [(16, 700, 100), (8, 600, 300), (4, 3000, 300)])
def test_captured_passes_survive_a_longer_prompt(rows: int, prompt: int, limit: int) -> None:
    engines = BatchEngines(CudaEngine(TARGET))
    capture.capture_prompts(engines, rows, 4096)
    (warm,) = engines.target.asides  # type: ignore[attr-defined]
    version = warm.version
    group = PrefillGroup([(0, Request([5] * prompt, limit))], torch.device("cpu"))
    group.begin(engines, 11, aside=True)
    engines.keep_aside(group.engines)
    assert warm.version == version


def test_engines_that_read_prompts_survive_a_larger_cache() -> None:
    engine = CudaEngine(TARGET)
    engine.reserve(4, 500)
    aside = engine.aside(4, 128)
    aside.reserve(4, 128)
    engine.keep_aside(aside)
    engine.reserve(4, 2000)
    assert engine.asides == [aside]


def test_a_cancelled_prompt_gives_its_engine_back(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = BatchEngines(CudaEngine(TARGET))
    prefill, queue = Prefill(engines, 3), AdmissionQueue(4, 60)
    queue.waiting.append(Request(list(range(3, 9)) * 6, 5))
    prefill.make_room(queue, 50)
    prefill.admit(queue, BatchRows.new((), ()), set())
    monkeypatch.setattr(CudaEngine, "chunk", 8)
    prefill.read(1, False)
    assert prefill.groups[0].unread
    prefill.cancel({0})
    assert engines.target.asides  # type: ignore[attr-defined]


@pytest.mark.parametrize("rows", [4, pytest.param(256, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rule", ["exact", "margin:1"])
def test_idle_captures_end(rule: str, rows: int, tiny_pair: Pair) -> None:
    """Three levels × nine sizes × eight γ are 216 cycles, all of which an engine keeps; the fewer of few rows as well."""
    batch = Batch(tiny_pair, rule, rows=rows, length=60, gamma="auto", engine="cuda", shared=share_rules(tiny_pair))
    assert any(batch.capture(0.0) for _ in range(300))


def test_whoever_captures_learns_that_there_is_no_memory_to_time(
    tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server then ends its captures; an answer goes on without a table."""

    def run_out(*_: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(batch_gamma, "time_cycle", run_out)
    batch = Batch(tiny_pair, "exact", rows=7, length=61, gamma="auto", engine="cuda")
    with batch._decoding.engines.borrow() as engines:
        monkeypatch.setattr(find_statistics(engines).costs, "cycles", {})
    with pytest.raises(torch.OutOfMemoryError):
        assert [batch.capture(0.0) for _ in range(2)]
    assert answer(batch) == answer(Batch(tiny_pair, "exact", rows=3, length=61, gamma=0, engine="cuda"))


def test_cycles_are_timed_before_all_are_captured(tiny_pair: Pair) -> None:
    """Else a first request that comes before the last capture finds no table, and waits for it."""
    batch = Batch(tiny_pair, "exact", rows=5, length=62, gamma="auto", engine="cuda")
    with batch._decoding.engines.borrow() as engines:
        costs = find_statistics(engines).costs
    costs.cycles.clear()
    for _ in range(6):
        assert not batch.capture(0.0)
    assert costs.cycles


@pytest.mark.quick("True")
@pytest.mark.parametrize("served", [False, True])
def test_a_server_does_not_time_cycles_again_while_it_answers(served: bool, captures: list[int]) -> None:
    engines = make_engines()
    engines.reserve(4, 60)
    statistics = find_statistics(engines)
    chooser = BatchGamma(engines, EXACT, 5, statistics=statistics, served=served)
    chooser.time_choices(2, statistics.costs)
    made = len(captures)
    statistics.costs.stale = True  # cycles took other times than the table says
    chooser.time_choices(4, statistics.costs)
    assert set(statistics.costs.cycles) == ({2, 4} if served else {4})
    statistics.costs.stale = True
    chooser.time_choices(4, statistics.costs)
    assert statistics.costs.stale is False
    assert len(captures) == 2 * made  # graphs are kept
    assert statistics.costs.list_untimed(9) == ([1, 8] if served else [1, 2, 8])


class FakeDevice:
    """Streams and graphs without a GPU; no two captures at a time, and pools as torch has them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.modes: set[str] = set()
        device, pools, handles = self, dict[int, WeakSet[Any]](), count()

        class Stream:
            def wait_stream(self, other: object) -> None:
                device.log.append("wait")

            def synchronize(self) -> None:
                pass

        class Graph:
            def capture_begin(self, pool: int, capture_error_mode: str = "global") -> None:
                device.modes.add(capture_error_mode)
                assert pool not in pools or len(pools[pool]), "all graphs of this pool are gone"
                pools.setdefault(pool, WeakSet()).add(self)
                self.handle = pool
                device.log.append("begin")

            def capture_end(self) -> None:
                device.log.append("end")

            def pool(self) -> int:
                return self.handle

            def replay(self) -> None:
                pass

        stream = Stream()
        patch.setattr(cuda_engine, "_side_stream", lambda _: stream)
        patch.setattr(torch.cuda, "current_stream", lambda _: stream)
        patch.setattr(torch.cuda, "stream", lambda _: nullcontext())
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
        patch.setattr(torch.cuda, "CUDAGraph", Graph)
        self.pools = pools

    def engine(self) -> CudaEngine:
        engine = CudaEngine(TARGET)
        engine.device = torch.device("cuda")
        return engine


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    return FakeDevice(monkeypatch)


def test_graphs_share_memory_with_those_that_are_left(fake_device: FakeDevice) -> None:
    """And begin anew where none is: the first capture found no memory, or all graphs were replaced."""
    engine, runs = fake_device.engine(), iter([True, False])

    def run_out() -> None:
        if not next(runs, True):
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        engine.capture([run_out], [])
    kept = [engine.capture([run_out, run_out], []), engine.capture([run_out], [])]
    assert sorted(map(len, fake_device.pools.values())) == [0, 3]
    kept.clear()
    gc.collect()
    kept.append(engine.capture([run_out], []))
    assert sorted(map(len, fake_device.pools.values())) == [0, 0, 1]
    assert fake_device.log.count("begin") == fake_device.log.count("end") == 5


def test_threads_capture_one_after_the_other(fake_device: FakeDevice) -> None:
    first, second = fake_device.engine(), fake_device.engine()
    begun = threading.Event()
    other = threading.Thread(target=lambda: second.capture([begun.set], []))

    def meanwhile() -> None:
        if not other.ident:
            other.start()
        begun.wait(0.1)

    first.capture([meanwhile], [])
    other.join()
    alone = ["wait", "begin", "end", "wait"]
    assert fake_device.log == alone * 2
    assert fake_device.modes == {"thread_local"}  # other threads may take memory meanwhile
