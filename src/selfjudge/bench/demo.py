"""`selfjudge demo`: the whole line on the embedded pair: labels, a judge, decoding side by side, what it costs in quality."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from selfjudge.decoding.plain import respond
from selfjudge.decoding.rules import EXACT, AcceptanceRule, Judged, TopK
from selfjudge.decoding.text import generate
from selfjudge.engine.select import supports_int8_draft
from selfjudge.errors import SelfJudgeError
from selfjudge.evaluate.likelihood import likelihoods, mean_log_likelihood, substitutions
from selfjudge.judge.model import Judge
from selfjudge.label.pipeline import LabelConfig, label
from selfjudge.models.pair import Pair
from selfjudge.train.config import TrainConfig
from selfjudge.train.pipeline import train_judge
from selfjudge.types import Generation, pooled_judged_share, pooled_mean_accepted_length

Notify = Callable[[str], None]
WRITTEN = 24  # prompts that the target writes for the demo's own labels
QUALITY = 0.9  # share of the unacceptable tokens that the judges shown must reject
OWN, SHIPPED = "judged, made just now", "judged, shipped"


def own_judge(pair: Pair, folder: Path, notify: Notify) -> tuple[Judge | None, dict[str, Any]]:
    """A small labelling run and a judge from it. So few labels may not do: then there is none, and it is said why."""

    told = ("", 0.0)

    def update(stage: str, share: float) -> None:
        nonlocal told
        if stage.split(":")[0] != told[0] or share - told[1] >= 0.1 or share >= 1:  # a pipe shows every line
            told = stage.split(":")[0], share
            notify(f"{stage} ({share:.0%})")

    begun = time.perf_counter()
    settings = LabelConfig(prompts=(f"self:{WRITTEN}",), max_new_tokens=64, suffix_length=10)
    try:
        made = label(pair, folder / "labels", settings, notify=update, warn=notify)
    except SelfJudgeError as error:
        return None, {"labels": 0, "label_seconds": time.perf_counter() - begun, "why_not": str(error)}
    found = {"labels": made["rows"], "acceptable": made["acceptable"] / made["rows"], "tau": made["tau"]}
    found["label_seconds"] = time.perf_counter() - begun
    try:
        begun = time.perf_counter()
        config = train_judge([folder / "labels"], folder / "judge", TrainConfig(model="linear"), notify=update)
    except SelfJudgeError as error:
        return None, {**found, "why_not": str(error)}
    found |= {"auc": config["metrics"]["auc_mismatch"], "auc_of": config["metrics"]["n_holdout"]}
    found["train_seconds"] = time.perf_counter() - begun
    return Judge.from_pretrained(folder / "judge"), found


def side_by_side(
    pair: Pair, prompts: Sequence[str], judges: dict[str, Judge], *, gamma: int, max_new_tokens: int, batch: int,
    notify: Notify,
) -> dict[str, Any]:  # fmt: skip
    """Answer the prompts plainly, with `exact`, with `topk` and with every judge; one row of figures for each."""
    assert pair.draft is not None
    if supports_int8_draft(pair.draft):  # the fastest way to draft, for all rules alike
        pair = replace(pair, draft_int8=True)
    special = pair.special_ids
    configurations: list[tuple[str, AcceptanceRule, int]] = [
        ("plain", EXACT, 0),
        ("exact", EXACT, gamma),
        ("topk:2", TopK(special=special), gamma),
        *((name, Judged(judge, judge.quality(QUALITY), special=special), gamma) for name, judge in judges.items()),
    ]
    notify("warming up …")  # the first pass may compile a kernel
    generate(pair, prompts[:1], gamma=gamma, max_new_tokens=2)
    encoded = [pair.encode(prompt) for prompt in prompts]
    rows: list[dict[str, Any]] = []
    plain: list[Generation] = []
    changed: list[tuple[str, str, int]] = []
    for name, rule, g in configurations:
        notify(f"{name}: answering {len(prompts)} prompts …")
        start = time.perf_counter()
        answers = generate(pair, prompts, rule, gamma=g, max_new_tokens=max_new_tokens, batch=batch)
        elapsed = time.perf_counter() - start
        plain = plain or answers
        seen = likelihoods(pair, [(e, a.tokens) for e, a in zip(encoded, answers, strict=True)])
        if rule.judge is not None:
            changed = substitutions(pair, answers, seen) or changed
        total = sum(len(a.tokens) for a in answers)
        rows.append({
            "rule": name,
            "gamma": g,
            "mean_accepted_length": pooled_mean_accepted_length(answers),
            "judged_share": pooled_judged_share(answers),
            "tokens_per_second": total / elapsed,
            "speed_over_plain": total / elapsed / rows[0]["tokens_per_second"] if rows else 1.0,
            "same_answer_as_plain": sum(a.tokens == b.tokens for a, b in zip(answers, plain, strict=True)) / len(prompts),
            "log_likelihood": mean_log_likelihood(seen),
            "example": answers[0].text,
        })  # fmt: skip
    notify("the draft alone …")
    return {
        "rows": rows, "draft_log_likelihood": _draft_alone(pair, encoded, max_new_tokens), "substitutions": changed,
        "draft_int8": pair.draft_int8,
    }  # fmt: skip


def _draft_alone(pair: Pair, encoded: Sequence[Sequence[int]], max_new_tokens: int) -> float:
    """How likely the target finds the draft's own greedy answers: what quality would be if everything were accepted."""
    assert pair.draft is not None
    said = respond(pair.draft, encoded, eos_ids=pair.eos_ids, max_new_tokens=max_new_tokens)
    answers = {index: answer for index, answer, _ in said}
    return mean_log_likelihood(likelihoods(pair, [(e, answers[i]) for i, e in enumerate(encoded)]))
