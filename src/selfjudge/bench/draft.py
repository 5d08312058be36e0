"""How good a draft is for its target: agreement and accepted length by kind of prompt, and what a step of it costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from selfjudge.bench.passes import pass_seconds
from selfjudge.decoding.loop import decode
from selfjudge.decoding.plain import respond
from selfjudge.decoding.rules import EXACT
from selfjudge.engine.select import borrowed, common_kind
from selfjudge.errors import SelfJudgeError
from selfjudge.label.mismatch import draft_tokens
from selfjudge.models.pair import Pair
from selfjudge.store import machine, versions

CONTEXT = 300  # cached tokens when a pass is timed


def bench_draft(
    pair: Pair,
    prompts: Mapping[str, Sequence[Sequence[int]]],
    *,
    gammas: Sequence[int] = (5, 10),
    max_new_tokens: int = 256,
    batch: int = 64,
    repeats: int = 20,
    notify: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Top-1 agreement and pooled m for every set of prompts and for all of them together; costs and predicted speed-up."""
    if pair.draft is None:
        raise SelfJudgeError(f"{pair.target_id} brings no draft of its own: name one with --draft")
    tell = notify or (lambda text: None)
    target_seconds = {
        t: pass_seconds(pair.target, 1, t, CONTEXT, repeats=repeats) for t in (1, *(g + 1 for g in gammas))
    }
    draft_seconds = pass_seconds(pair.draft, 1, 1, CONTEXT, repeats=repeats)
    runs: list[dict[str, Any]] = []
    pooled: dict[int, list[int]] = {gamma: [0, 0] for gamma in gammas}
    agreed = [0, 0]
    for name, asked in prompts.items():
        tell(f"{name}: agreement")
        row: dict[str, Any] = {"prompts": name, "n": len(asked)}
        hits, seen = agreement(pair, asked, max_new_tokens=max_new_tokens, batch=batch)
        agreed[0], agreed[1] = agreed[0] + hits, agreed[1] + seen
        row["top1"], row["answer_tokens"] = hits / max(1, seen), seen
        for gamma in gammas:
            tell(f"{name}: γ = {gamma}")
            tokens, cycles = accepted(pair, asked, gamma=gamma, max_new_tokens=max_new_tokens, batch=batch)
            pooled[gamma][0] += tokens
            pooled[gamma][1] += cycles
            row[f"m_gamma_{gamma}"] = tokens / max(1, cycles)
        runs.append(row)
    runs.append({
        "prompts": "all", "n": sum(r["n"] for r in runs), "top1": agreed[0] / max(1, agreed[1]), "answer_tokens": agreed[1],
        **{f"m_gamma_{g}": t / max(1, c) for g, (t, c) in pooled.items()},
    })  # fmt: skip
    plain = target_seconds[1]
    for row in runs:
        for gamma in gammas:  # m tokens for γ draft steps and one pass of γ+1 tokens, against m passes of one token
            cycle = gamma * draft_seconds + target_seconds[gamma + 1]
            row[f"predicted_speedup_gamma_{gamma}"] = row[f"m_gamma_{gamma}"] * plain / cycle
    return {
        "pair": pair.name, "machine": machine(), "versions": versions(), "date": time.strftime("%Y-%m-%d"),
        "device": str(pair.target.device), "dtype": pair.dtype, "max_new_tokens": max_new_tokens,
        "draft_parameters": sum(p.numel() for p in pair.draft.parameters()),
        "draft_pass_milliseconds": draft_seconds * 1e3, "context": CONTEXT,
        "target_pass_milliseconds": {str(t): s * 1e3 for t, s in target_seconds.items()},
        "draft_over_target": draft_seconds / plain, "runs": runs,
    }  # fmt: skip


def accepted(
    pair: Pair, prompts: Sequence[Sequence[int]], *, gamma: int, max_new_tokens: int, batch: int
) -> tuple[int, int]:
    """Tokens and cycles of greedy speculative decoding, summed over all prompts; prefill's token belongs to no cycle."""
    assert pair.draft is not None
    kind = common_kind(pair.target, pair.draft, "auto")
    tokens = cycles = 0
    order = sorted(prompts, key=len, reverse=True)
    with borrowed(pair.target, kind=kind) as target, borrowed(pair.draft, kind=kind) as draft:
        for start in range(0, len(order), batch):
            for step in decode(
                target, draft, order[start : start + batch], EXACT, gamma=gamma, max_new_tokens=max_new_tokens,
                eos_ids=pair.eos_ids,
            ):  # fmt: skip
                if step.cycle:
                    cycles += len(step.emissions)
                    tokens += sum(len(e.tokens) for e in step.emissions)
    return tokens, cycles


def agreement(pair: Pair, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, batch: int) -> tuple[int, int]:
    """At how many tokens of the target's greedy answers the draft, given all before, would have said the same; of how many."""
    assert pair.draft is not None
    answers = respond(pair.target, prompts, eos_ids=pair.eos_ids, max_new_tokens=max_new_tokens, batch=batch)
    sequences = [(prompts[index], answer) for index, answer, _ in answers]
    said = draft_tokens(pair, sequences)
    hits = sum(
        d == y for drafts, (_, answer) in zip(said, sequences, strict=True) for d, y in zip(drafts, answer, strict=True)
    )
    return hits, sum(len(answer) for _, answer in sequences)
