"""A made-up certificate, answers to show with it, and a folder with a recipe. The numbers mean nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from selfjudge.judge.model import Judge
from selfjudge.models.pair import Pair
from selfjudge.store import sha256

RULE = "margin:0.5,guard=on"


def certificate(certified: bool = True, **more: Any) -> dict[str, Any]:
    """As `tune` writes it."""

    def candidate(rule: str, family: str, used: int, refuted: bool, why: str) -> dict[str, Any]:
        return {
            "rule": rule, "family": family, "gamma": 3, "n_used": used, "refuted": refuted, "why": why,
            "mean_difference": -0.004 if used else None, "lost": 30, "gained": 14, "needed_prompts": None,
            "mean_accepted_length": 2.5 if used else None, "tokens_per_second": 80.0 if used else None,
            "speed_ratio": 1.12 if used else None, "speed_ci": [1.07, 1.16] if used else None,
        }  # fmt: skip

    return {
        "format_version": 1, "pair": "some-pair", "task": "gsm8k", "measure": "score", "measure_words": "the task's score",
        "rule": RULE if certified else "exact", "gamma": 3, "n": 4000, "epsilon": 0.03, "delta": 0.05, "certified": certified,
        "mean_difference": -0.004 if certified else None, "mean_difference_ci": [-0.013, 0.005] if certified else None,
        "lost": 30, "gained": 14,
        "evidence": {
            "delta": 0.0125, "refuted_at": 300, "p_value": 0.011, "goal": 4.38,
            "log_capital": [[1, 0.01], [150, 2.0], [300, 4.5]], "lost_bound": 0.012,
        } if certified else {},
        "speed_measure": "tokens_per_second", "speed_ratio": 1.12 if certified else None,
        "speed_ci": [1.07, 1.16] if certified else None, "exact_gamma": 3, "exact_over_plain": 1.7,
        "families": ["margin", "topk"], "candidates": [
            candidate(RULE, "margin", 4000, True, "certified after 300 prompts"),
            candidate("margin:1,guard=on", "margin", 96, False, "not certified: the loss shown by 96 prompts is above ε; more prompts of the same kind will not certify it"),
            candidate("topk:2,guard=on", "topk", 0, False, "not tried: a stricter rule of its family is not certified"),
        ],
        "speeds": [], "target_sha256": "f" * 64, "draft_sha256": "e" * 64, "prompts_sha256": "a" * 64, "max_new_tokens": 64,
        "batch": 8, "seed": 0, "engine": "cpu", "dtype": "float32", "machine": {"cpu": "Some Processor"},
        "versions": {"torch": "2.11.0"}, "commit": None, "date": "2026-11-16", "stopped": False,
        "flags": {"selfjudge": f"--pair some-pair --rule {RULE} --gamma 3", "vllm": None},
        **more,
    }  # fmt: skip


def example(text: str = "four") -> dict[str, Any]:
    """An answer that was lost, that of `exact` beside it."""

    def answer(rule: str, origin: str, score: float) -> dict[str, Any]:
        tokens = [
            {"text": "It is ", "origin": "draft", "choice": "It is ", "p": 0.9, "p_choice": 0.9, "judge": None, "cycle": 0},
            {"text": text, "origin": origin, "choice": "five", "p": 0.4, "p_choice": 0.5, "judge": 0.8, "cycle": 0},
        ]  # fmt: skip
        return {"rule": rule, "score": score, "answer": text, "prompt": f"What? {text}", "tokens": tokens}

    return {
        "kind": "lost", "id": f"q-{text}", "difference": -1.0,
        "answers": [answer("exact", "target", 1.0), answer(RULE, "judge", 0.0)],
    }  # fmt: skip


def recipe_folder(
    folder: Path, pair: Pair, judge: Judge | None = None, rule: str = RULE, engine: str = "cpu", **more: Any
) -> Path:
    """As a finished run of `tune` leaves it; `more` goes into the certificate."""
    folder.mkdir(parents=True)
    rule = rule if judge is None else "judged:0.5"
    if judge is not None:
        judge.save_pretrained(folder / "judge")
    recipe = {
        "format_version": 1, "pair": pair.name, "target": pair.target_id, "draft": pair.draft_id,
        "target_sha256": pair.target_sha256, "draft_sha256": pair.draft_sha256,
        "judge_sha256": None if judge is None else sha256(folder / "judge" / "model.safetensors"),
        "prompts_sha256": "a" * 64, "rule": rule, "gamma": 3, "judge": None if judge is None else "judge",
        "certificate": "certificate.json", "engine": engine, "dtype": "float32", "draft_dtype": None,
        "flags": {"selfjudge": "", "vllm": None},
    }  # fmt: skip
    (folder / "recipe.json").write_text(json.dumps(recipe))
    (folder / "certificate.json").write_text(json.dumps(certificate(**{"rule": rule, "candidates": [], **more})))
    return folder
