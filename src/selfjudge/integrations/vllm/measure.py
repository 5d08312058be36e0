"""What steps cost in vLLM's engine: timed with its own dummy runs, once for a pair on a machine.

Passes are timed by their number of tokens; a step of some rows and drafts is put together from them. Scheduling and
sampling are not part of it."""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group

from selfjudge.decoding.costs import CostTable
from selfjudge.errors import SelfJudgeError, first_line
from selfjudge.store.load import LoadWatch

ROWS = (1, 8, 64, 256)
DRAFTS = (0, 1, 2, 3, 5, 8)
REPEATS = 2
BUDGET = 5.0  # seconds after which no more rows are begun


def keep_costs(worker: Any, shape: str, say: Callable[[str], None]) -> None:
    """Measure what steps cost in a worker that is ready, unless it is known, and keep it for the next start."""
    known = CostTable(shape)
    known.load()
    if known.cycles:
        return
    watch, begun = LoadWatch(), time.perf_counter()
    try:
        table = measure_steps(worker, shape)
    except Exception as error:  # a dummy run of another version may raise anything: the engine works all the same
        say(f"what steps cost cannot be measured in this vLLM, γ stays the default: {first_line(error)}")
        return
    if get_tp_group().rank_in_group:
        return
    if busy := watch.describe():
        say(f"what steps cost is measured at the next start: {busy}")
        return
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for rows in table.cycles:
            table.save(rows)
    done = f"what steps cost was measured in {time.perf_counter() - begun:.1f} s: the next start chooses γ by it"
    say(str(heard[0].message) if heard else done)


@torch.inference_mode()
def measure_steps(worker: Any, shape: str = "") -> CostTable:
    """Time the steps of a worker; all ranks of a tensor-parallel engine run the same passes."""
    runner, parallel = worker.model_runner, worker.parallel_config
    if parallel.pipeline_parallel_size > 1 or parallel.data_parallel_size > 1:
        raise SelfJudgeError("it has pipeline or data parallelism")
    passes = (SecondRunnerPasses if hasattr(runner, "speculator") else FirstRunnerPasses)(runner)
    table, group, begun = CostTable(shape), get_tp_group(), time.perf_counter()
    for rows in ROWS:
        in_time = time.perf_counter() - begun < BUDGET
        if rows > passes.max_rows or not (in_time if group.world_size == 1 else group.broadcast_object(in_time)):
            break
        try:
            for drafts in DRAFTS:
                if passes.pad(rows * (drafts + 1)) <= passes.max_tokens:
                    table.add(rows, drafts, passes.time_step(rows, drafts))
        except torch.OutOfMemoryError:
            table.drop(rows)
            break
    return table


class FirstRunnerPasses:
    """Passes of both models in vLLM's first model runner."""

    def __init__(self, runner: Any) -> None:
        _accepts(runner._dummy_run, "num_tokens", "uniform_decode", "force_attention", "skip_eplb")
        _accepts(runner.drafter.dummy_run, "num_tokens", "use_cudagraphs")
        self.runner, self.draft_config = runner, runner.speculative_config.draft_model_config
        self.max_rows: int = runner.scheduler_config.max_num_seqs
        self.max_tokens: int = min(runner.max_num_tokens, self.max_rows * runner.uniform_decode_query_len)
        self.seconds = cache(self._time)

    def pad(self, tokens: int) -> int:
        """The tokens of the pass that stands for one of so many."""
        return tokens

    def time_step(self, rows: int, drafts: int) -> tuple[float, float]:
        """Seconds of drafting and of the target's pass. The draft model reads what the target has read, even where
        nothing is drafted; each further draft is a pass of one token a row."""
        tokens = rows * (drafts + 1)
        more = (drafts - 1) * self.seconds(self.draft, rows, rows) if drafts > 1 else 0.0
        return self.seconds(self.draft, tokens, rows) + more, self.seconds(self.verify, tokens)

    def verify(self, tokens: int) -> None:
        with _changed(self.runner.drafter, "num_speculative_tokens", 0):  # the target alone
            hidden, _ = self.runner._dummy_run(tokens, uniform_decode=True, force_attention=True, skip_eplb=True)
        self.runner.model.compute_logits(hidden[:tokens])

    def draft(self, tokens: int, rows: int) -> None:
        drafter, config = self.runner.drafter, self.draft_config
        with _changed(drafter, "num_speculative_tokens", 1):
            drafter.dummy_run(tokens, use_cudagraphs=not config.enforce_eager)
        states = torch.zeros(rows, config.get_hidden_size(), dtype=config.dtype, device=self.runner.device)
        drafter.model.compute_logits(states)

    def _time(self, run: Callable[..., None], *sizes: int) -> float:
        """The shortest of a few runs, after one that counts for nothing."""
        times = []
        for _ in range(REPEATS + 1):
            begun = time.perf_counter()
            run(*sizes)
            if self.runner.device.type != "cpu":
                torch.accelerator.synchronize()
            times.append(time.perf_counter() - begun)
        return min(times[1:])


class SecondRunnerPasses(FirstRunnerPasses):
    """The same in the second one, whose dummy runs verify and draft blocks of the engine's own γ."""

    def __init__(self, runner: Any) -> None:
        _accepts(runner._dummy_run, "num_tokens", "uniform_decode", "skip_eplb")
        self.runner, self.block, self.max_rows = runner, int(runner.decode_query_len), runner.max_num_reqs
        self.max_tokens = min(runner.max_num_tokens, self.max_rows * self.block)
        self.seconds = cache(self._time)

    def pad(self, tokens: int) -> int:
        return -(-tokens // self.block) * self.block

    def time_step(self, rows: int, drafts: int) -> tuple[float, float]:
        """Drafting is what a run takes longer with the draft than without it."""
        blocks = rows * self.block
        drafting = max(0.0, self.seconds(self.draft, blocks) - self.seconds(self.verify, blocks))
        tokens = self.pad(rows * (drafts + 1))
        return drafting * max(1, drafts) / (self.block - 1), self.seconds(self.verify, tokens)

    def verify(self, tokens: int) -> None:
        with _changed(self.runner, "speculator", None):
            self.draft(tokens)

    def draft(self, tokens: int, rows: int = 0) -> None:
        hidden, _ = self.runner._dummy_run(tokens, uniform_decode=True, skip_eplb=True)
        self.runner.model.compute_logits(hidden[:tokens])


@contextmanager
def _changed(thing: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute that has another value meanwhile."""
    before = getattr(thing, name)
    setattr(thing, name, value)
    try:
        yield
    finally:
        setattr(thing, name, before)


def _accepts(function: Callable[..., Any], *names: str) -> None:
    """Refuse a function that lacks one of these parameters."""
    if missing := set(names) - set(inspect.signature(function).parameters):
        raise SelfJudgeError(f"{function.__qualname__} has no {', '.join(sorted(missing))}")
