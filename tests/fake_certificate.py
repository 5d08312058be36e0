"""A made-up certificate that follows from its made-up differences, answers to show with it, and a folder with a recipe."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from selfjudge.decoding.rule_parser import RuleRequest, rule_text
from selfjudge.judge.config import JudgeConfig
from selfjudge.judge.model import Judge
from selfjudge.models.pair import Pair
from selfjudge.models.tokens import hash_tokenizer
from selfjudge.tune.certify import Claim, describe_evidence, share_delta
from selfjudge.tune.families import list_families
from selfjudge.tune.recipe import make_recipe, seal_recipe
from selfjudge.tune.verify import count_changes, describe_overlap, pack

RULE = "margin:0.5,guard=on"
RESOLVED = "margin:threshold=0.5,guard=True"


def made_up(n: int) -> list[float]:
    """Differences that certify any ε: of few prompts all are gained; of many 30 are lost and 14 gained."""
    if n < 1000:
        return [-1.0] * n
    return [
        1.0 if i % (n // 30) == 7 and i < n // 30 * 30 else -1.0 if i % (n // 14) == 9 and i < n // 14 * 14 else 0.0
        for i in range(n)
    ]


def certificate(
    certified: bool = True, *, n: int = 4000, epsilon: float = 0.03, delta: float = 0.05, rule: str = RULE,
    judge: JudgeConfig | None = None, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """As `tune` writes it: the rules up to `rule` are certified, the next one of its family is not."""
    differences = made_up(n) if certified else []
    own = rule.partition(":")[0] if certified else "margin"
    families, sizes, measure = sorted({own, "topk"}), [1] * n, more.get("measure", "score")
    order = list_families([own], judge)[own]
    place = order.index(rule) if certified else 0
    claim = Claim(epsilon, share_delta(delta, 1) / len(families), n)

    def candidate(rule: str, family: str, differences: list[float], refuted: bool, why: str) -> dict[str, Any]:
        used = bool(differences)
        return {
            "rule": rule, "family": family, "gamma": 3, "loads": [1], "speed_load": 1, "n_used": len(differences), "refuted": refuted, "why": why,
            "differences": pack(differences), **count_changes(differences, sizes), "needed_prompts": None,
            "mean_accepted_length": 2.5 if used else None, "tokens_per_second": 80.0 if used else None,
            "speed_ratio": 1.12 if used else None, "speed_ci": [1.07, 1.16] if used else None,
        }  # fmt: skip

    return {
        "format_version": 3, "load": 1, "more_loads": [], "pair": "some-pair", "task": "gsm8k", "measure": measure, "measure_words": "the task's score",
        "rule": rule if certified else "exact", "resolved": RESOLVED if certified else "exact", "gamma": 3, "n": n, "epsilon": epsilon,
        "delta": delta, "certified": certified, **count_changes(differences, sizes),
        "mean_difference_ci": [-0.013, 0.005] if certified else None,
        "groups": pack(sizes), "similar": 0.7, "attempt": 1, "earlier_attempts": [],
        "evidence": describe_evidence(claim, differences, delta) if certified else None,
        "overlap": describe_overlap([0.3] * n, sizes, delta) if certified and measure != "overlap" else None,
        "speed_measure": "tokens_per_second", "speed_ratio": 1.12 if certified else None,
        "speed_ci": [1.07, 1.16] if certified else None, "exact_gamma": 3, "exact_over_plain": 1.7,
        "families": families, "candidates": [
            *(candidate(tried, own, differences, certified, "certified after 300 prompts") for tried in order[: place + 1]),
            *(candidate(tried, own, [1.0] * 9 if certified else [], False, "not certified: the loss shown by 96 prompts is above ε; more prompts of the same kind will not certify it") for tried in order[place + 1 : place + 2]),
            candidate("topk:5,guard=on", "topk", [], False, "not tried: a rule before it is not certified"),
        ],
        "speeds": [], "target_sha256": "f" * 64, "draft_sha256": "e" * 64, "tokenizer_sha256": "b" * 64, "prompts_sha256": "a" * 64,
        "max_new_tokens": 64, "batch": 8, "engine": "cpu", "dtype": "float32", "draft_dtype": None, "machine": {"cpu": "Some Processor"},
        "versions": {"torch": "2.11.0"}, "commit": None, "date": "2026-11-16", "stopped": False,
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
    rule = rule if judge is None or rule != RULE else "judged:0.5"
    if judge is not None:
        judge.save_pretrained(folder / "judge")
    resolved = rule_text(RuleRequest(rule).resolve((), None if judge is None else judge.config))
    content = certificate(**{
        "pair": pair.name, "rule": rule, "resolved": resolved, "engine": engine, "target_sha256": pair.target_sha256,
        "draft_sha256": pair.draft_sha256, "judge": None if judge is None else judge.config, **({"tokenizer_sha256": hash_tokenizer(pair.tokenizer)} if hasattr(pair, "tokenizer") else {}), **more,
    })  # fmt: skip
    (folder / "certificate.json").write_text(json.dumps(content))
    recipe = make_recipe(content, pair, None if judge is None else "judge")
    (folder / "recipe.json").write_text(json.dumps(seal_recipe(recipe, folder)))
    return folder


def tamper(folder: Path, file: str, change: Callable[[dict[str, Any]], Any], *, sealed: bool = False) -> None:
    """Change a JSON file of a recipe's folder; `sealed`: by somebody who also writes all its hashes anew."""
    content = json.loads((folder / file).read_text())
    change(content)
    (folder / file).write_text(json.dumps(content))
    if sealed:
        recipe = json.loads((folder / "recipe.json").read_text())
        bare = {key: value for key, value in recipe.items() if key not in ("files", "digest")}
        (folder / "recipe.json").write_text(json.dumps(seal_recipe(bare, folder)))


def page_text(page: str) -> str:
    """What a reader of a page sees, without tags."""
    return html.unescape(re.sub(r"<[^>]+>", "", page))
