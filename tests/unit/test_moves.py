"""Rows that stay where they are, are not copied when others leave and enter, whatever cache holds them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from conftest import tiny_head, tiny_model
from equality import greedy
from proposals import prompts_of, requests_of
from selfjudge.decoding.admission import AdmissionQueue, settle
from selfjudge.decoding.loop import decode
from selfjudge.decoding.rules import EXACT, SpeculativeSampling
from selfjudge.decoding.sampling import Sampling
from selfjudge.engine.cuda.engine import CudaEngine
from selfjudge.engine.draft import Backlog, BatchEngines
from selfjudge.engine.select import make_draft, make_engine

TARGET, SMALL = tiny_model(seed=1), tiny_model(seed=2)
ROWS = 8


class Written(TorchDispatchMode):
    """Counts the writes into tensors, and their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.bytes = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("index_copy_", "index_put_", "copy_"):
            values = args[3] if func.overloadpacket.__name__ == "index_copy_" else result
            self.calls, self.bytes = self.calls + 1, self.bytes + values.nbytes
            self.largest = max(self.largest, values.nbytes)
        return result


def filled() -> CudaEngine:
    """An engine of some rows, each with its own keys, values and length."""
    engine = CudaEngine(TARGET)
    engine.reserve(ROWS, 40)
    engine._cache.normal_()
    engine.lengths.copy_(torch.arange(3, 3 + ROWS))
    return engine


def contents(engine: CudaEngine) -> list[Tensor]:
    return [tensor.clone() for tensor in (engine.lengths, engine.keys.movedim(1, 0), engine.values.movedim(1, 0))]


@given(st.sets(st.integers(0, 40)), st.randoms())
def test_only_rows_behind_the_others_move(kept: set[int], random: Any) -> None:
    given = random.sample(sorted(kept), len(kept))
    places = settle(given)
    assert sorted(places) == sorted(kept)
    assert all(row == place for place, row in enumerate(places) if place in kept)
    assert settle(range(len(kept))) == list(range(len(kept)))


@pytest.mark.parametrize(
    "rows",
    [
        [0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2], [0, 7, 2, 3, 4, 5, 6], [7, 6, 5, 4, 3, 2, 1, 0], [1, 2, 0], [5, 5, 5, 0, 5],
        [3, 4, 5, 6, 7], [1, 1, 1, 1, 1, 1, 1, 1], [],
    ],
    ids=str,
)  # fmt: skip
def test_a_static_cache_selects_any_rows_and_copies_those_that_move(rows: list[int]) -> None:
    engine = filled()
    expected, row_bytes = [tensor[rows] for tensor in contents(engine)], engine.cache_bytes // ROWS
    moved = sum(place != row for place, row in enumerate(rows))
    with Written() as written:
        engine.select(rows)
    assert all(map(torch.equal, contents(engine), expected))
    assert written.bytes == moved * (row_bytes + engine.lengths.itemsize)
    assert written.calls <= (0 if not moved else 2 if moved <= 2 else 1 + len(engine.weights.layers))
    assert written.largest <= max(1, engine.cache_bytes // len(engine.weights.layers)), "no second cache"


def test_rows_named_twice_need_not_have_been_there() -> None:
    engine = filled()
    engine.use_rows(2)
    first = contents(engine)
    engine.select([1, 0, 1, 1, 0])
    assert all(map(torch.equal, contents(engine), [tensor[[1, 0, 1, 1, 0]] for tensor in first]))


def test_a_backlog_moves_rows_as_its_engine_does() -> None:
    backlog = Backlog(torch.device("cpu"), hidden=16)
    backlog.reserve(ROWS)
    for tensor in backlog.tensors():
        tensor.copy_(torch.randint(1, 9, tensor.shape))
    for rows in ([0, 1, 7, 3, 4, 5], [2, 0, 0], [1, 1, 2, 0]):
        expected = [tensor[rows] for tensor in backlog.tensors()]
        moved = sum(place != row for place, row in enumerate(rows))
        with Written() as written:
            backlog.select(rows)
        assert all(map(torch.equal, backlog.tensors(), expected))
        assert written.bytes == moved * sum(tensor[0].nbytes for tensor in backlog.tensors())


@pytest.mark.quick("exact-head")
@pytest.mark.parametrize("draft", ["model", "head"])
@pytest.mark.parametrize("rule", [EXACT, SpeculativeSampling(Sampling(0.9))], ids=lambda rule: rule.name)
def test_of_a_live_batch_as_many_rows_move_as_have_left(draft: str, rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, each of them moved all."""
    moves: list[tuple[int, int, int]] = []
    original = CudaEngine.select

    def select(self: CudaEngine, rows: list[int]) -> None:
        if self is engines.target:
            moves.append(
                (sum(place != row for place, row in enumerate(rows)), len(self.lengths) - len(rows), len(rows))
            )
        original(self, rows)

    monkeypatch.setattr(CudaEngine, "select", select)
    proposer = make_draft(SMALL if draft == "model" else tiny_head(TARGET), TARGET, kind="cuda")
    engines = BatchEngines(make_engine(TARGET, kind="cuda", features=proposer.features), proposer)
    requests = requests_of(prompts_of(range(3, 13)), [5 + 4 * (i % 4) for i in range(10)])
    queue = AdmissionQueue(6, 60)
    queue.waiting.extend(requests[1:])
    tokens: dict[int, list[int]] = {}
    for step in decode(engines, requests[:1], rule, gamma=2, queue=queue):
        for emission in step.emissions:
            tokens.setdefault(emission.row, []).extend(emission.tokens)
    assert any(moved and moved < kept for moved, _, kept in moves)
    assert all(moved <= left for moved, left, _ in moves)
    for i, request in enumerate(requests):
        if rule is EXACT:
            assert tokens[i] == greedy(TARGET, request.prompt, request.max_new_tokens)
            continue
        alone = BatchEngines(engines.target.aside(), engines.draft and engines.draft.aside())
        expected = [t for step in decode(alone, [request], rule, gamma=2) for e in step.emissions for t in e.tokens]
        assert tokens[i] == expected
