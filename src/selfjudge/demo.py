"""`selfjudge demo`: the main job on the embedded pair, side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from selfjudge.accept import EXACT, AcceptanceRule, TopK
from selfjudge.models.pair import Pair
from selfjudge.shells import generate
from selfjudge.types import Generation, pooled_mean_accepted_length

Notify = Callable[[str], None]


def side_by_side(
    pair: Pair,
    prompts: Sequence[str],
    *,
    gamma: int,
    max_new_tokens: int,
    batch: int,
    notify: Notify,
) -> list[dict[str, Any]]:
    """Answer the prompts plainly, with `exact` and with `topk`; one row of figures for each."""
    configurations: list[tuple[str, AcceptanceRule, int]] = [
        ("plain", EXACT, 0),
        ("exact", EXACT, gamma),
        ("topk:2", TopK(special=pair.special_ids), gamma),
    ]
    notify("warming up …")  # the first pass may compile a kernel
    generate(pair, prompts[:1], gamma=gamma, max_new_tokens=2)
    rows: list[dict[str, Any]] = []
    plain: list[Generation] = []
    for name, rule, g in configurations:
        notify(f"{name}: answering {len(prompts)} prompts …")
        start = time.perf_counter()
        answers = generate(pair, prompts, rule, gamma=g, max_new_tokens=max_new_tokens, batch=batch)
        elapsed = time.perf_counter() - start
        plain = plain or answers
        total = sum(len(a.tokens) for a in answers)
        rows.append({
            "rule": name,
            "gamma": g,
            "mean_accepted_length": pooled_mean_accepted_length(answers),
            "judged_share": sum(a.judged_share * len(a.tokens) for a in answers) / total,
            "tokens_per_second": total / elapsed,
            "speed_over_plain": total / elapsed / rows[0]["tokens_per_second"] if rows else 1.0,
            "same_answer_as_plain": sum(a.tokens == b.tokens for a, b in zip(answers, plain, strict=True)) / len(prompts),
            "example": answers[0].text,
        })  # fmt: skip
    return rows
