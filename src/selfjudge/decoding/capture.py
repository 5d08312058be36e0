"""Captures and timings of cycles between answers, unnoticed by the rows.
Static engines only. Like rejected drafts they write only to cache slots after a row's tokens, and everything else is
put back. So a batch may have live rows meanwhile, and another number of rows than the cycle."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from statistics import median

import torch

from selfjudge.decoding.cycle import CAPTURED_CYCLES, Cycle, CycleSize, PhaseTimer, find_cycle, is_captured, kept_cycle
from selfjudge.decoding.gamma import GammaPolicy, PairStatistics
from selfjudge.decoding.rules import AcceptanceRule
from selfjudge.decoding.rules_by_row import RowRules
from selfjudge.engine.base import ASIDE_TOKENS, RowCache
from selfjudge.engine.draft import BatchEngines
from selfjudge.types import Gamma

PROMPT_ROWS, PROMPT_TOKENS = 16, 512  # of the largest pass over prompts that is captured before any is read


def capture_cycles(
    engines: BatchEngines, rule: AcceptanceRule, rows: int, sizes: Iterable[CycleSize], *, trace: bool = False
) -> list[Cycle]:
    """Capture each missing cycle for so many rows, for which `reserve` made room; return all in the order given."""
    cycles = []
    with _first_rows(engines.caches, rows):
        for size in sizes:
            cycle = kept_cycle(engines, rule, size, trace=trace, rows=rows)
            if cycle is None:
                first = torch.zeros(rows, dtype=torch.long, device=engines.target.device)
                cycle = find_cycle(engines, rule, size, trace=trace, first=first)
            if cycle.captured is None:
                cycle.capture()
            cycles.append(cycle)
    return cycles


def capture_prompts(engines: BatchEngines, rows: int, length: int) -> None:
    """Let the engines that read prompts beside a batch of so many rows capture passes of the usual shapes."""
    rows, longest, length = min(1 << (rows - 1).bit_length(), PROMPT_ROWS), length, min(length, PROMPT_TOKENS)
    room = max(length, min(longest, ASIDE_TOKENS // rows - 2))  # a cache that need not grow, and so keeps its graphs
    aside = engines.aside(rows, room)
    for size in (1 << n for n in range(rows.bit_length())):
        for width in (64 << n for n in range((length // 64).bit_length())):
            tokens = torch.zeros(size, width, dtype=torch.long, device=aside.target.device)
            counts = torch.full((size,), width, device=tokens.device)
            for _ in range(2):  # a shape is captured when it recurs
                aside.reserve(rows, room)
                aside.reserve(size, width)
                output = aside.target.prefill(tokens, counts)
                if aside.draft is not None:
                    aside.draft.read(tokens, counts, output.features)
    for engine in aside.static_engines:
        engine.usual = True
    engines.keep_aside(aside)


def list_uncaptured(
    engines: BatchEngines,
    rule: AcceptanceRule,
    rows: int,
    gamma: Gamma,
    statistics: PairStatistics,
    *,
    trace: bool = False,
) -> list[tuple[int, CycleSize]]:
    """Each number of rows up to `rows` with each uncaptured size of cycle; no more in all than an engine keeps."""
    all_rows = sorted({min(engines.target.bucket(n), rows) for n in range(1, rows + 1)})
    usual = [(n, size) for n in all_rows for size in list_sizes(gamma, rule, statistics)][:CAPTURED_CYCLES]
    return [(n, size) for n, size in usual if not is_captured(engines, rule, size, trace=trace, rows=n)]


def list_sizes(gamma: Gamma, rule: AcceptanceRule, statistics: PairStatistics) -> list[CycleSize]:
    """Every size of cycle that a static engine may use for a batch of this γ."""
    choices = (gamma,) if gamma != "auto" else (0, *GammaPolicy(statistics, rule).choices)
    limited = rule.depends_on_gamma and (gamma == "auto" or isinstance(rule, RowRules))  # rows of unlike γ
    return [CycleSize(drafts, limited and drafts > 0) for drafts in choices]


@torch.no_grad()
def time_cycle(cycle: Cycle, repeats: int = 5) -> tuple[float, float]:
    """Replay a captured cycle; return the median seconds of drafting and of the rest, as after one with drafts."""
    if cycle.captured is None:
        raise ValueError("only a captured cycle can be timed")
    with _first_rows(BatchEngines(cycle.target, cycle.draft).caches, len(cycle.last)):
        state = cycle.state()
        saved = [tensor.clone() for tensor in state]
        timers = [PhaseTimer(cycle.target.device) for _ in range(repeats)]
        for timer in timers:  # without waiting in between: the device would idle until the host starts the next phase
            cycle.run_phases(timer)
            for tensor, value in zip(state, saved, strict=True):
                tensor.copy_(value)
        seconds = [timer.seconds() for timer in timers]
    return median(s["draft"] for s in seconds), median(sum(s.values()) - s["draft"] for s in seconds)


@contextmanager
def _first_rows(caches: Iterable[RowCache], rows: int) -> Iterator[None]:
    """Let static caches work on their first `rows` rows, and then on as many as before."""
    used: list[tuple[RowCache, int]] = []
    try:
        for cache in caches:
            if not cache.static:
                raise ValueError("only static engines capture cycles")
            used.append((cache, cache.use_rows(rows)))
            if len(cache.state()[0]) < rows:
                raise ValueError(f"the caches have room for fewer than {rows} rows: reserve them first")
        yield
    finally:
        for cache, before in used:
            cache.use_rows(before)
