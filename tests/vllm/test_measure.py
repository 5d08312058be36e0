"""What the worker says of what steps cost: once, in one line, whatever happens; without an engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from selfjudge.decoding.costs import kept_costs
from selfjudge.integrations.vllm import measure
from selfjudge.integrations.vllm.measure import DRAFTS, ROWS, keep_costs, measure_steps

GAMMA = 5


class FakeModel:
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class FakeDrafter:
    num_speculative_tokens, model = GAMMA, FakeModel()

    def __init__(self) -> None:
        self.passes: list[int] = []

    def dummy_run(self, num_tokens: int, use_cudagraphs: bool = True) -> None:
        self.passes += [num_tokens] * self.num_speculative_tokens


class FakeRunner:
    """vLLM's first runner, as far as it is measured; notes the tokens of all passes."""

    device, model, max_num_tokens, uniform_decode_query_len = torch.device("cpu"), FakeModel(), 2048, GAMMA + 1
    scheduler_config = SimpleNamespace(max_num_seqs=64)
    speculative_config = SimpleNamespace(
        draft_model_config=SimpleNamespace(enforce_eager=True, dtype=torch.float32, get_hidden_size=lambda: 4)
    )

    def __init__(self) -> None:
        self.drafter, self.passes = FakeDrafter(), []

    def _dummy_run(
        self, num_tokens: int, uniform_decode: bool = False, force_attention: bool = False, skip_eplb: bool = False
    ) -> Any:
        assert uniform_decode
        self.drafter.dummy_run(num_tokens)
        self.passes.append(num_tokens)
        return torch.zeros(num_tokens, 4), None


def worker(runner: Any, **parallel: int) -> Any:
    sizes = {"pipeline_parallel_size": 1, "data_parallel_size": 1, **parallel}
    return SimpleNamespace(model_runner=runner, parallel_config=SimpleNamespace(**sizes))


@pytest.fixture
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A quiet machine with an empty cache folder, and one rank."""
    monkeypatch.setenv("SELFJUDGE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(measure, "get_tp_group", lambda: SimpleNamespace(rank_in_group=0, world_size=1))
    monkeypatch.setattr(measure.LoadWatch, "describe", lambda self: "")
    return tmp_path / "home"


def test_target_and_draft_are_timed_apart(quiet: Path) -> None:
    runner = FakeRunner()
    table = measure_steps(worker(runner))
    assert list(table.cycles) == [rows for rows in ROWS if rows <= 64]
    assert list(table.cycles[8]) == [*DRAFTS]
    assert list(table.cycles[64]) == [0, 1, 2, 3, 5]  # 64 × 9 tokens are more than this engine ever verifies
    wanted = {rows * (drafts + 1) for rows, cells in table.cycles.items() for drafts in cells}
    assert set(runner.passes) == set(runner.drafter.passes) == wanted
    assert runner.drafter.passes.count(9) == measure.REPEATS + 1  # none of them during a pass of the target
    assert runner.drafter.num_speculative_tokens == GAMMA


def test_a_table_is_measured_once(quiet: Path) -> None:
    said: list[str] = []
    keep_costs(worker(FakeRunner()), "shape", said.append)
    assert kept_costs("shape")[1].keys() == {*DRAFTS}
    runner = FakeRunner()
    keep_costs(worker(runner), "shape", said.append)
    assert runner.passes == []
    (line,) = said
    assert line.startswith("what steps cost was measured in ")


def test_slow_passes_end_it_after_the_first_row(quiet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr(measure.time, "perf_counter", lambda: float(next(clock)))
    assert list(measure_steps(worker(FakeRunner())).cycles) == [1]


def test_rows_that_do_not_fit_into_memory_are_left_out(quiet: Path) -> None:
    runner = FakeRunner()

    def dummy_run(num_tokens: int, use_cudagraphs: bool = True) -> None:
        if num_tokens > 100:
            raise torch.OutOfMemoryError("out of memory")

    runner.drafter.dummy_run = dummy_run  # type: ignore[method-assign]
    assert list(measure_steps(worker(runner)).cycles) == [1, 8]


def lack_parameter(runner: Any, parallel: dict[str, int]) -> None:
    runner.drafter.dummy_run = lambda num_tokens: None


def lack_drafter(runner: Any, parallel: dict[str, int]) -> None:
    del runner.drafter


def fail(runner: Any, parallel: dict[str, int]) -> None:
    runner.drafter.dummy_run = lambda num_tokens, use_cudagraphs: 1 / 0


def split(runner: Any, parallel: dict[str, int]) -> None:
    parallel["pipeline_parallel_size"] = 2


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lack_parameter, "has no use_cudagraphs"),
        (lack_drafter, "has no attribute 'drafter'"),
        (fail, "division by zero"),
        (split, "pipeline or data parallelism"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    quiet: Path, change: Callable[[Any, dict[str, int]], None], why: str
) -> None:
    said: list[str] = []
    runner, parallel = FakeRunner(), dict[str, int]()
    change(runner, parallel)
    keep_costs(worker(runner, **parallel), "shape", said.append)
    (line,) = said
    assert line.startswith("what steps cost cannot be measured in this vLLM, γ stays the default: ")
    assert why in line
    assert not (quiet / "costs").exists()


def test_times_of_a_busy_machine_are_not_kept(quiet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(measure.LoadWatch, "describe", lambda self: "this machine is busy")
    keep_costs(worker(FakeRunner()), "shape", said.append)
    assert said == ["what steps cost is measured at the next start: this machine is busy"]
    assert not kept_costs("shape")


def test_a_folder_that_cannot_be_written_is_one_line(quiet: Path) -> None:
    said: list[str] = []
    quiet.mkdir()
    (quiet / "costs").write_text("a file", "utf-8")
    keep_costs(worker(FakeRunner()), "shape", said.append)
    (line,) = said
    assert "speeds are measured again next time" in line
