"""A made-up but consistent tree of results as `eval` writes them, with hostile texts in it.

Every figure of a summary follows from the samples beside it. The numbers mean nothing.
"""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

HOSTILE = (
    '</script><script>window.hacked = "script"</script>',
    "<img src=x onerror=\"window.hacked = 'img'\">",
    "<!-- <script> -->",
    "&lt;b&gt; \" ' ` ${window.hacked = 1} | pipe [link](javascript:alert(1))",
    "line\u2028separator, \u202eright to left, 👩‍👩‍👧, \x00\x07",
)
MEASURES = {"cnn_dailymail": "rouge_l", "livecodebench": "pass_rate"}
SAID = (
    " The total number of apples is 12 . So she has 3 times as many :\n\n 12 × 3 = 36 . Therefore , the final answer is 36 ."
    " First , we calculate the price of each item and add a tip of 15 % ."
)  # fmt: skip
WORDS = SAID.split(" ")
SWAPS = [
    [" the", " a", 41], [" So", " Therefore", 22], ["\n", "\n\n", 19], [" calculate", " find", 17], [" number", " numbers", 11],
    [":", ".", 9], [" The", " the", 8], [" 12", " 13", 3], [" First", " To", 6], [" Paris", " London", 2], [HOSTILE[0], HOSTILE[1], 1],
]  # fmt: skip
MACHINE = {"system": "Linux", "arch": "x86_64", "cpus": 16, "cpu": "Some Processor", "gpu": "Some GPU"}
VERSIONS = {"python": "3.12.3", "selfjudge": "0.1.0", "torch": "2.11.0", "transformers": "5.17.0"}


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def write_run(
    folder: Path, task: str, rule: str, gamma: int, samples: list[dict[str, Any]], exact: list[dict[str, Any]] | None, /, **more: Any
) -> dict[str, Any]:  # fmt: skip
    """One run: samples as given, a summary that follows from them."""
    place = folder / task / f"{rule}-g{gamma}"
    place.mkdir(parents=True)
    with gzip.open(place / "samples.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in samples)
    n = len(samples)
    score, m = sum(s["score"] for s in samples) / n, pooled(samples)
    delta = None if exact is None else score - sum(s["score"] for s in exact) / n
    spread = 0.9 / n**0.5
    gain, ratio = (None, None) if exact is None else (m - pooled(exact), m / pooled(exact))
    measure = MEASURES.get(task, "accuracy")
    judged = sum(s["judged"] for s in samples)
    summary = {
        "pair": "smollm2-135m", "task": task, "rule": rule, "judge": rule.partition("@")[2] or None, "judge_id": None, "label_method": None, "features": None,
        "suffix_length": None, "threshold": None, "gamma": gamma, "batch": 64, "n": n, "measure": measure, "score": score,
        "score_ci": [score - spread, score + spread], "scores": {measure: score}, "delta_score": delta,
        "delta_ci": None if delta is None else [delta - spread / 2, delta + spread / 2],
        "agreement": sum(s["agrees"] or 0 for s in samples) / n, "mean_accepted_length": m, "delta_m": gain,
        "delta_m_ci": None if gain is None else [gain - 0.2, gain + 0.2],
        "m_ratio": ratio, "m_ratio_ci": None if ratio is None else [ratio - 0.06, ratio + 0.06], "drafts_accepted": m - 1, "judged_share": judged / sum(s["tokens"] for s in samples),
        "tokens_per_second": 900 * m, "extraction_failures": sum(s["answer"] is None for s in samples) / n,
        "seconds": {"draft": 3.1, "target": 6.2 / m, "judge": 0.11 if "judge" in rule else 0.0, "rule": 0.2, "total": 3.5 + 6.2 / m},
        "substitutions": SWAPS if judged else [], "max_new_tokens": 512, "dtype": "bfloat16", "machine": MACHINE, "versions": VERSIONS,
        "date": "2026-11-15", **more,
    }  # fmt: skip
    write_json(place / "summary.json", summary)
    return summary


def pooled(samples: list[dict[str, Any]]) -> float:
    return sum(s["tokens"] - 1 for s in samples) / sum(s["cycles"] for s in samples)


def write_examples(place: Path, dice: random.Random, gamma: int, bold: float) -> None:
    """Answers with all kinds of origins, and one that attacks the page."""
    rows = []
    for number in range(4):
        hostile = number == 3
        tokens: list[dict[str, Any]] = []
        cycle, room = 0, 1
        words = list(HOSTILE) * 2 if hostile else WORDS * 3
        for word in words:
            if room == 0:
                cycle, room = cycle + 1, dice.randint(1, gamma + 1)
            room -= 1
            origin = "target" if room == 0 else "judge" if dice.random() < bold else "draft"
            text = word if hostile else f" {word}" if word.strip() and tokens else word
            choice = dice.choice(SWAPS)[0] if origin == "judge" else text
            p = dice.random()
            tokens.append({
                "text": text, "origin": origin, "choice": choice, "p": p * 0.4 if origin == "judge" else 0.5 + p / 2, "p_choice": 0.5 + p / 2,
                "judge": dice.random() if origin == "judge" else None, "cycle": cycle,
            })  # fmt: skip
        prompt = (
            HOSTILE[0] if hostile else "A farmer has 12 apples. How many are three times as many?\nThink step by step."
        )
        rows.append({
            "id": HOSTILE[1] if hostile else f"test-{number}", "prompt": prompt, "text": "".join(t["text"] for t in tokens),
            "score": float(number % 2), "tokens": tokens,
        })  # fmt: skip
    (place / "examples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_eval(folder: Path, tasks: tuple[str, ...] = ("gsm8k", "math500", "mmlu", "cnn_dailymail", "livecodebench", "arithmetic"), n: int = 60, seed: int = 0) -> Path:  # fmt: skip
    """An evaluation with a θ sweep, several γ, judges of several N, judge_only, and one run that was not finished."""
    dice = random.Random(seed)
    write_json(folder / "run.json", {"argv": ["selfjudge", "eval"], "commit": "0123456789abcdef", "time": "2026-11-15T10:00:00Z", "versions": VERSIONS, "machine": MACHINE})  # fmt: skip
    about = {"label_method": "selfjudge", "features": "hidden+margin", "suffix_length": 20}
    for task in tasks:
        base = {"gsm8k": 0.46, "math500": 0.22, "mmlu": 0.35, "cnn_dailymail": 0.24, "livecodebench": 0.12}.get(
            task, 0.6
        )
        rules: list[tuple[str, float, dict[str, Any]]] = [
            ("exact", 0.0, {}),
            ("topk:2", 0.7, {}),
            ("topk:4", 0.95, {}),
            ("fly", 0.3, {}),
        ]
        for option, bold in (("F", 0.12), ("R", 0.05), ("0.1", 0.5), ("0.2", 0.35), ("0.35", 0.2), ("0.6", 0.08)):
            theta = {"F": 0.45, "R": 0.7}.get(option) or float(option)
            rules.append((f"judged:{option}@selfjudge", bold, {**about, "threshold": theta}))
            rules.append((f"judged:{option}@autojudge", bold * 0.9, {"label_method": "autojudge", "features": "hidden+margin", "threshold": theta}))  # fmt: skip
        if task in ("gsm8k", "mmlu"):
            rules += [
                (f"judge_only:{o}@selfjudge", bold, {**about, "threshold": t})
                for o, t, bold in (("F", 0.45, 0.09), ("R", 0.7, 0.03))
            ]
            rules += [
                (f"judged:{o}@n{length}", bold, {**about, "suffix_length": length, "threshold": 0.5})
                for length in (0, 5, 10)
                for o, bold in (("F", 0.1 + length / 100), ("R", 0.03 + length / 200))
            ]
        for gamma in (5, 10, 15) if task == "gsm8k" else (10,):
            exact = None
            luck = [dice.random() for _ in range(n)]
            effort = [dice.randint(20, 60) for _ in range(n)]
            for rule, bold, more in (
                rules if gamma == 10 else [r for r in rules if r[0] in ("exact", "topk:2", "judged:F@selfjudge")]
            ):
                samples = [
                    {
                        "id": f"{task}-{i}", "answer": None if dice.random() < 0.05 else "36", "score": float(luck[i] < base - 0.16 * bold),
                        "scores": {}, "tokens": effort[i] * 4, "cycles": max(1, round(effort[i] * 4 / (1.6 + 0.12 * gamma + 1.9 * bold + 0.2 * dice.random()))),
                        "drafts_accepted": effort[i] * 2, "judged": int(effort[i] * 4 * bold * 0.3), "agrees": float(dice.random() > bold),
                    }
                    for i in range(n)
                ]  # fmt: skip
                if task == "cnn_dailymail":
                    share = sum(s["score"] for s in samples) / n
                    more = {
                        **more,
                        "scores": {"rouge_1": share + 0.1, "rouge_2": share / 2, "rouge_l": share, "consistency": 0.4},
                    }
                write_run(folder, task, rule, gamma, samples, exact, **more)
                exact = exact or samples
                if gamma == 10 and (rule == "exact" or rule.startswith(("judged:F", "topk"))):
                    write_examples(folder / task / f"{rule}-g{gamma}", dice, gamma, bold)
    (folder / tasks[0] / "margin:0.5-g10").mkdir()
    return folder


def demo_result() -> dict[str, Any]:
    """What `selfjudge demo --json` prints, with the tokens of the first answer; one rule has none."""
    words = [
        {
            "text": word if i else word.strip(),
            "origin": "target" if i % 4 == 3 else "draft",
            "choice": word,
            "p_choice": 0.5,
        }
        for i, word in enumerate(WORDS)
    ]
    grass = {"origin": "judge", "choice": " grass", "p_choice": 0.625, "judge": 0.81}
    judged = [token | grass if i % 5 == 1 else token for i, token in enumerate(words)]
    hostile = [{"text": text, "origin": "judge", "choice": HOSTILE[1]} for text in HOSTILE]
    same = {
        "uses_judge": False,
        "gamma": 3,
        "gamma_mean": 3.0,
        "tokens_per_second": 50.0,
        "speed_over_plain": 1.5,
        "same_answer_as_plain": 1.0,
        "same_start_as_plain": 1.0,
    }
    rows: list[dict[str, Any]] = [
        {"rule": "plain", "mean_accepted_length": None, "judged_share": 0.0, **same, "gamma": 0, "gamma_mean": 0.0, "speed_over_plain": 1.0, "tokens": words},
        {"rule": "exact", "mean_accepted_length": 2.1, "judged_share": 0.0, **same, "tokens": words},
        {"rule": "topk:2", "mean_accepted_length": 2.8, "judged_share": 0.1, **same, "example": HOSTILE[0]},
        {"rule": "judged, shipped", "mean_accepted_length": 2.6, "judged_share": 0.05, **same, "uses_judge": True, "speed_over_plain": 1.8,
         "tokens_per_second": 60.0, "same_answer_as_plain": 0.25, "same_start_as_plain": 0.4, "tokens": judged + hostile},
    ]  # fmt: skip
    return {"prompt": HOSTILE[3], "rows": rows, "dtype": "q4", "draft_dtype": HOSTILE[0]}


def samples(lengths: list[tuple[int, int]], scores: list[float]) -> list[dict[str, Any]]:
    return [
        {"id": str(i), "answer": "1", "score": s, "scores": {}, "tokens": t, "cycles": c, "drafts_accepted": 0, "judged": 1, "agrees": s}
        for i, ((t, c), s) in enumerate(zip(lengths, scores, strict=True))
    ]  # fmt: skip
