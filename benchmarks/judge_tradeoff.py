"""What judges gain and what they cost: `python benchmarks/judge_tradeoff.py --pair P --judge DIR... --data DIR --out DIR`.

Answers held-out prompts with `exact`, with each judge over its thresholds, and with rules that use no judge (margin, topk, fly, accepting at
random) over theirs. For each: m, the target's mean log-likelihood of the answers, and agreement with its own greedy answer.
Writes `tradeoff.json` and a figure: at equal m, which rule keeps more? `ahead` of a judged run says by how much it lies above
the margin rule and above chance; between their points straight lines are drawn, from `exact` on.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from common import say
from torch import Tensor

from selfjudge.decoding.rules import EXACT, AcceptanceRule, FLy, Judged, Margin, TopK
from selfjudge.decoding.text import generate
from selfjudge.engine.teacher_forced import Sequences, log_probabilities, teacher_forced
from selfjudge.evaluate.compare import compute_overlap
from selfjudge.judge.config import JudgeConfig, shipped_judge
from selfjudge.judge.model import Judge
from selfjudge.models.pair import Pair
from selfjudge.store import measured_on, write_json
from selfjudge.tasks import Task, load_task
from selfjudge.types import pooled_figures


class Chance(Judge):
    """Scores that have nothing to do with the token: uniform on [0, 1], a hash of the hidden state."""

    def __init__(self, hidden_size: int) -> None:
        random = torch.Generator().manual_seed(0)
        super().__init__(JudgeConfig(hidden_size=hidden_size), weight=torch.randn(hidden_size, generator=random))

    def score(self, x: Tensor) -> Tensor:
        return (torch.sin((x.float() @ self.weight).double() * 7919.0) * 43758.5453).frac().abs().float()


def rules(judges: dict[str, Judge], pair: Pair, gamma: int) -> list[tuple[str, float | str, AcceptanceRule]]:
    """(name, threshold, rule): the first judge over all of its thresholds, the others over some."""
    special = pair.special_ids
    chance = Chance(pair.hidden_size)
    all_rules: list[tuple[str, float | str, AcceptanceRule]] = [("exact", "", EXACT)]
    for number, (name, judge) in enumerate(judges.items()):
        some = (0.95, 0.9, 0.8, 0.7)
        thetas: dict[float | str, float] = {
            q: judge.quality(q) for q in (some if number else sorted((*some, 0.98, 0.6)))
        }
        thetas["F"] = judge.threshold("F")
        if judge.threshold("R") != judge.threshold("F"):
            thetas["R"] = judge.threshold("R")
        all_rules += [
            (f"judged@{name}", value, Judged(judge, theta, special=special)) for value, theta in thetas.items()
        ]
    name, judge = next(iter(judges.items()))
    for window in (w for w in (2, 4, 6) if w < gamma):
        for quality in (0.9, 0.8, 0.6, 0.4):
            rule = Judged(judge, judge.quality(quality), confirm=window, special=special)
            all_rules.append((f"judged, confirm {window}@{name}", quality, rule))
    all_rules += [("margin", t, Margin(t, guard=True, special=special)) for t in (0.1, 0.25, 0.5, 0.75, 1.0, 1.5)]
    all_rules += [("random", p, Judged(chance, 1 - p, special=special)) for p in (0.03, 0.06, 0.1, 0.15, 0.2, 0.3)]
    all_rules += [("topk", k, TopK(k, guard=True, special=special)) for k in (2, 3, 5)]
    for window in (w for w in (2, 6) if w < gamma):
        for entropy in (0.05, 0.15):
            all_rules.append(("fly", f"{entropy}, {window}", FLy(entropy, window, guard=True, special=special)))
    return all_rules


def agreement(benchmark: Task, rows: Sequence[Any], texts: Sequence[str], own: Sequence[str]) -> float:
    """Share of answers that are the target's own, where it gives one; on open prompts, how much of the wording is (by matching words)."""
    if benchmark.checkable:
        answers, expected = benchmark.extract_many(rows, texts), benchmark.extract_many(rows, own)
        answered = [(r, a, b) for r, a, b in zip(rows, answers, expected, strict=True) if b is not None]
        return sum(benchmark.same(*each) for each in answered) / max(1, len(answered))
    ratios = [compute_overlap(a, b) for a, b in zip(texts, own, strict=True)]
    return sum(ratios) / len(ratios)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", default="smollm2-135m")
    parser.add_argument("--judge", type=Path, nargs="*", default=[], help="folders; the pair's own if none is given")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", default=["gsm8k", "dolly"])
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument(
        "--skip", type=int, default=0, help="test rows to leave out first, so that a choice is made on others"
    )
    parser.add_argument("--gamma", type=int, default=10)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--only", nargs="*", default=[], help="rules to measure, all if not given")
    parser.add_argument("--device", default=None)
    return parser.parse_args()


def main() -> None:
    o = options()
    pair = Pair.load(o.pair, device=o.device, full_precision=True)
    shipped = shipped_judge(o.pair)
    if not o.judge and shipped is None:
        raise SystemExit(f"no judge ships for {o.pair}: give --judge")
    judges = {folder.name: Judge.from_pretrained(folder) for folder in o.judge or [shipped]}
    result: dict[str, Any] = {
        "pair": pair.name, **measured_on(), "dtype": pair.dtype,
        "gamma": o.gamma, "max_new_tokens": o.max_new_tokens, "batch": o.batch, "skip": o.skip, "limit": o.limit, "runs": [],
        "judges": {
            name: {"thresholds": dict(c.thresholds), "features": c.features, "model": c.model, "tau": c.tau, "labels": c.label_method,
                   "suffix_length": c.suffix_length, "suffix_gap": c.suffix_gap, "auc_mismatch": c.metrics["auc_mismatch"], "acceptable_rate": c.metrics["acceptable_rate"]}
            for name, judge in judges.items() for c in [judge.config]
        },
    }  # fmt: skip
    for name in o.tasks:
        benchmark = load_task(name, o.data)
        rows = benchmark.examples("test", o.skip + o.limit)[o.skip :]
        if not rows:
            raise SystemExit(f"{name} has no test rows after the first {o.skip}")
        prompts = [benchmark.prompt(row) for row in rows]
        encoded = pair.encode_many(prompts)
        own: list[str] = []
        for rule, value, built in rules(judges, pair, o.gamma):
            if o.only and rule.split("@")[0].split(",")[0] not in ("exact", *o.only):
                continue
            begun = time.monotonic()
            answers = generate(
                pair, prompts, built, gamma=o.gamma, max_new_tokens=o.max_new_tokens, batch=o.batch, trace=False
            )
            seconds = time.monotonic() - begun
            texts = [a.text for a in answers]
            own = own or texts
            log_p = measure_log_likelihood(pair, [(e, a.tokens) for e, a in zip(encoded, answers, strict=True)])
            total, pooled = sum(len(a.tokens) for a in answers), pooled_figures(answers)
            result["runs"].append({
                "task": name, "rule": rule, "value": value, "theta": getattr(built, "theta", None), "n": len(rows),
                "mean_accepted_length": pooled["mean_accepted_length"], "tokens": total, "seconds": seconds,
                "judged_share": pooled["judged_share"],
                "log_likelihood": log_p / total, "agreement": agreement(benchmark, rows, texts, own),
                **({"score": _mean(benchmark, rows, texts)} if benchmark.checkable else {}),
            })  # fmt: skip
            last = result["runs"][-1]
            say(f"{name} {rule} {value}: m {last['mean_accepted_length']:.3f}",
                f"log-likelihood {last['log_likelihood']:.4f} agreement {last['agreement']:.3f}")  # fmt: skip
            write_json(o.out / "tradeoff.json", result)
        compare([run for run in result["runs"] if run["task"] == name])
        write_json(o.out / "tradeoff.json", result)
    draw(o.out / "tradeoff.png", result["runs"], o.tasks)


@torch.no_grad()
def measure_log_likelihood(pair: Pair, sequences: Sequences) -> float:
    """The target's log-probability of all answers together."""
    answered = [(prompt, answer) for prompt, answer in sequences if answer]
    total = 0.0
    for part, hidden in teacher_forced(pair.target_model, answered):
        tokens = torch.tensor([token for i in part for token in answered[i][1]], device=hidden.device)
        total += float(log_probabilities(pair.target, hidden, tokens)[0].double().sum())
    return total


def compare(runs: list[dict[str, Any]]) -> None:
    """Give every judged run its lead at equal m; nothing where the other rule was not measured on both sides."""
    for run in (r for r in runs if r["rule"].startswith("judged")):
        run["ahead"] = {}
        for other in ("margin", "random"):
            curve = sorted(
                (r for r in runs if r["task"] == run["task"] and r["rule"] in ("exact", other)), key=lambda r: r["mean_accepted_length"]
            )  # fmt: skip
            m = run["mean_accepted_length"]
            for low, high in pairwise(curve):
                near, far = low["mean_accepted_length"], high["mean_accepted_length"]
                if near <= m < far:
                    share = (m - near) / (far - near)
                    run["ahead"][other] = {
                        key: run[key] - (low[key] + share * (high[key] - low[key])) for key in ("log_likelihood", "agreement")
                    }  # fmt: skip


def _mean(benchmark: Task, rows: Sequence[Any], texts: Sequence[str]) -> float:
    scores = [benchmark.score(row, text) for row, text in zip(rows, texts, strict=True)]
    key = next(iter(scores[0]))
    return sum(score[key] for score in scores) / len(scores)


def draw(file: Path, runs: list[dict[str, Any]], tasks: Sequence[str]) -> None:
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4 * len(tasks)), layout="constrained")
    axes = figure.subplots(len(tasks), 2, squeeze=False)
    marks = {"exact": "*", "random": "x", "margin": "s", "topk": "^", "fly": "v"}
    names = list(dict.fromkeys(r["rule"] for r in runs))
    colours = dict(zip(names, colormaps["tab20"].colors, strict=False))  # type: ignore[attr-defined]
    for line, name in zip(axes, tasks, strict=True):
        for axis, key in zip(line, ("log_likelihood", "agreement"), strict=True):
            for rule in names:
                points = sorted(
                    (r["mean_accepted_length"], r[key]) for r in runs if r["task"] == name and r["rule"] == rule
                )
                style = {"linestyle": "none"} if rule in ("fly", "exact") else {}
                axis.plot(
                    [m for m, _ in points],
                    [v for _, v in points],
                    marker=marks.get(rule, "o"),
                    label=rule,
                    color=colours[rule],
                    **style,
                )
            axis.set(title=name, xlabel="m", ylabel=key.replace("_", " "))
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right center")
    figure.savefig(file, dpi=100)


if __name__ == "__main__":
    main()
