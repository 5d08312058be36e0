"""How good a draft is for its target: agreement and accepted length by kind of prompt, and what a step of it costs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from selfjudge.bench.config import DraftBenchConfig
from selfjudge.bench.passes import head_seconds, pass_seconds
from selfjudge.decoding.loop import decode
from selfjudge.decoding.plain import respond
from selfjudge.decoding.rules import EXACT
from selfjudge.engine.select import borrowed, borrowed_draft, common_kind, draft_features
from selfjudge.errors import SelfJudgeError
from selfjudge.label.mismatch import draft_tokens
from selfjudge.models.eagle import EagleHead
from selfjudge.models.pair import Pair
from selfjudge.store import machine, versions

CONTEXT = 300  # cached tokens when a pass is timed


def bench_draft(
    pair: Pair,
    prompts: Mapping[str, Sequence[Sequence[int]]],
    config: DraftBenchConfig | None = None,
    *,
    notify: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Agreement and pooled m for every set of prompts and for all of them together; costs and predicted speed-up."""
    if pair.draft is None:
        raise SelfJudgeError(f"no draft ships for {pair.target_id}: name one with `draft`")
    config = config or DraftBenchConfig()
    config.check()
    target_seconds = {
        tokens: pass_seconds(pair.target, 1, tokens, CONTEXT, repeats=config.repeats)
        for tokens in (1, *(g + 1 for g in config.gammas))
    }
    if isinstance(pair.draft, EagleHead):
        draft_seconds = head_seconds(pair.draft, pair.target, CONTEXT, repeats=config.repeats)
    else:
        draft_seconds = pass_seconds(pair.draft, 1, 1, CONTEXT, repeats=config.repeats)
    counts = {name: _count(pair, name, ids, config, notify) for name, ids in prompts.items()}
    runs = [_row(name, count) for name, count in counts.items()]
    total: Counter[str] = Counter()
    for count in counts.values():
        total.update(count)
    runs.append(_row("all", total))
    for row in runs:
        for (
            gamma
        ) in config.gammas:  # m tokens for γ draft steps and one pass of γ+1 tokens, against m passes of one token
            cycle = gamma * draft_seconds + target_seconds[gamma + 1]
            row[f"predicted_speedup_gamma_{gamma}"] = row[f"m_gamma_{gamma}"] * target_seconds[1] / cycle
    return {
        "pair": pair.name,
        "machine": machine(),
        "versions": versions(),
        "date": time.strftime("%Y-%m-%d"),
        "device": str(pair.target.device),
        "dtype": pair.dtype,
        "max_new_tokens": config.max_new_tokens,
        "draft_kind": pair.draft_kind,
        "draft_parameters": sum(p.numel() for p in pair.draft.parameters()),
        "draft_pass_milliseconds": draft_seconds * 1e3,
        "context": CONTEXT,
        "target_pass_milliseconds": {str(t): s * 1e3 for t, s in target_seconds.items()},
        "draft_over_target": draft_seconds / target_seconds[1],
        "runs": runs,
    }


def _count(
    pair: Pair, name: str, prompts: Sequence[Sequence[int]], config: DraftBenchConfig, notify: Callable[[str], None]
) -> Counter[str]:
    """What a set of prompts adds to the sums: prompts, answer tokens, agreement, and tokens and cycles for each γ."""
    notify(f"{name}: agreement")
    hits, seen = agreement(pair, prompts, max_new_tokens=config.max_new_tokens, batch=config.batch)
    sums = Counter(n=len(prompts), hits=hits, seen=seen)
    for gamma in config.gammas:
        notify(f"{name}: γ = {gamma}")
        tokens, cycles = accepted(pair, prompts, gamma=gamma, max_new_tokens=config.max_new_tokens, batch=config.batch)
        sums[f"tokens_{gamma}"], sums[f"cycles_{gamma}"] = tokens, cycles
    return sums


def _row(name: str, sums: Counter[str]) -> dict[str, Any]:
    gammas = [key.removeprefix("cycles_") for key in sums if key.startswith("cycles_")]
    return {
        "prompts": name,
        "n": sums["n"],
        "top1": sums["hits"] / max(1, sums["seen"]),
        "answer_tokens": sums["seen"],
        **{f"m_gamma_{g}": sums[f"tokens_{g}"] / max(1, sums[f"cycles_{g}"]) for g in gammas},
    }


def accepted(
    pair: Pair, prompts: Sequence[Sequence[int]], *, gamma: int, max_new_tokens: int, batch: int
) -> tuple[int, int]:
    """Tokens and cycles of greedy speculative decoding, over all prompts; prefill's token belongs to no cycle."""
    assert pair.draft is not None
    kind = common_kind(pair.target, pair.draft, "auto")
    tokens = cycles = 0
    order = sorted(prompts, key=len, reverse=True)
    features = draft_features(pair.draft)
    with (
        borrowed(pair.target, features=features, kind=kind) as target,
        borrowed_draft(pair.draft, pair.target, kind=kind) as draft,
    ):
        for start in range(0, len(order), batch):
            for step in decode(
                target,
                draft,
                order[start : start + batch],
                EXACT,
                gamma=gamma,
                max_new_tokens=max_new_tokens,
                eos_ids=pair.eos_ids,
            ):
                if step.cycle:
                    cycles += len(step.emissions)
                    tokens += sum(len(e.tokens) for e in step.emissions)
    return tokens, cycles


def agreement(pair: Pair, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, batch: int) -> tuple[int, int]:
    """At how many tokens of the target's greedy answers the draft, given all before, agrees; of how many."""
    assert pair.draft is not None
    answers = respond(pair.target, prompts, eos_ids=pair.eos_ids, max_new_tokens=max_new_tokens, batch=batch)
    sequences = [(prompts[index], answer) for index, answer, _ in answers]
    proposals = draft_tokens(pair, sequences)
    hits = sum(
        d == y
        for drafts, (_, answer) in zip(proposals, sequences, strict=True)
        for d, y in zip(drafts, answer, strict=True)
    )
    return hits, sum(len(answer) for _, answer in sequences)
