"""`--gamma auto` beside every fixed γ, by kind of prompt or by batch size: `python benchmarks/gamma_auto.py --dtype q4`.

All choices answer the same prompts under `exact`, by turns within a repeat, so that a machine that slows down slows down
all of them. The first round is not timed: there everything is compiled, recorded and learned that is so once.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from common import say
from grown_target import grow

from selfjudge.decoding.text import generate
from selfjudge.models.pair import Pair
from selfjudge.prompts.sources import BUILT_IN, read_prompts
from selfjudge.store import measured_on, write_json
from selfjudge.types import Gamma, pooled_figures


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pair", default="smollm2-135m")
    parser.add_argument("--grown", type=int, help="layers of a larger target with the same function (grown_target.py)")
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("--gammas", default="0,1,2,3,5", help="the fixed ones")
    parser.add_argument("--prompts", type=Path, help="prompts file instead of the built-in ones")
    parser.add_argument("--batches", default="1", help="rows at a time; each has a prompt of its own")
    parser.add_argument("--each", type=int, default=2, help="built-in prompts of each kind")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def groups(o: argparse.Namespace) -> dict[str, list[str]]:
    """Prompts by kind, or the first so many of a file."""
    if o.prompts:
        texts = read_prompts(o.prompts)
        return {f"{rows} rows": (texts * (1 + rows // len(texts)))[:rows] for rows in map(int, o.batches.split(","))}
    kinds: dict[str, list[str]] = defaultdict(list)
    for kind, text in BUILT_IN:
        if len(kinds[kind]) < o.each:
            kinds[kind].append(text)
    return dict(kinds)


def measure(pair: Pair, asked: dict[str, list[str]], o: argparse.Namespace) -> list[dict[str, Any]]:
    choices: list[Gamma] = [*map(int, o.gammas.split(",")), "auto"]
    seconds: dict[tuple[str, Gamma], list[float]] = defaultdict(list)
    answers: dict[tuple[str, Gamma], Any] = {}
    for repeat in range(o.repeats + 1):
        for name, prompts in asked.items():
            say(f"repeat {repeat}: {name}")
            for gamma in choices if repeat % 2 else reversed(choices):
                start = time.perf_counter()
                batch = len(prompts) if o.prompts else 1
                made = generate(pair, prompts, gamma=gamma, max_new_tokens=o.max_new_tokens, batch=batch, trace=False)
                if repeat:
                    seconds[name, gamma].append(time.perf_counter() - start)
                answers[name, gamma] = made
    rows = []
    for name in asked:
        tokens = {g: sum(len(a.tokens) for a in answers[name, g]) for g in choices}
        speed = {g: median(tokens[g] / s for s in seconds[name, g]) for g in choices}
        best = max(speed[g] for g in choices if g != "auto")
        rows.append({
            "prompts": name,
            "count": len(asked[name]),
            "tokens_per_second": {str(g): round(s, 2) for g, s in speed.items()},
            "auto_over_plain": speed["auto"] / speed[0],
            "auto_over_best_fixed": speed["auto"] / best,
            "gamma_mean": pooled_figures(answers[name, "auto"])["gamma_mean"],
            "mean_accepted_length": {str(g): pooled_figures(answers[name, g])["mean_accepted_length"] for g in choices},
            "same_tokens_as_plain": sum(
                a.tokens == b.tokens for a, b in zip(answers[name, "auto"], answers[name, 0], strict=True)
            ) / len(asked[name]),
        })  # fmt: skip
        say(f"{name}: {rows[-1]}")
    return rows


def main() -> None:
    o = options()
    pair = Pair.load(o.pair, device=o.device, dtype=o.dtype)
    if o.grown:
        pair = grow(pair, o.grown)
    about = {"pair": pair.name, "device": str(pair.target.device), "dtype": pair.dtype, "rule": "exact"}
    rows = measure(pair, groups(o), o)
    sizes = {"repeats": o.repeats, "max_new_tokens": o.max_new_tokens}
    write_json(o.out, {**measured_on(), **about, **sizes, "rows": rows})


if __name__ == "__main__":
    main()
