"""What drafts are worth: `python benchmarks/draft_speed.py --draft head=DIR --data DATA --out FILE`.

Compares drafts of one target on the test splits of six tasks; `--draft shipped` is the one that ships for it.
`accepted`: top-1 agreement and m of greedy decoding for each γ, by task. `speed`: tokens per second at batch 1 of
transformers, of our plain loop and of `exact` with each draft, on the same prompts in one run. `batches`: plain and
`exact` at growing numbers of rows. FILE is written after every part.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from common import read_task_prompts, say
from draft_quality import DraftBenchConfig, bench_draft

from selfjudge.bench.config import DecodeBenchConfig
from selfjudge.bench.decode import bench_decode, transformers_tokens
from selfjudge.decoding.text import generate
from selfjudge.models.pair import Pair, Prompt
from selfjudge.store import measured_on, write_json

TASKS = ("gsm8k", "mbpp", "livecodebench", "mmlu", "dolly", "cnn_dailymail")
PEER_GAMMA = 5  # of transformers' assisted generation


def accepted(pairs: dict[str, Pair], options: argparse.Namespace) -> dict[str, Any]:
    """Agreement, m and the cost of a step of every draft, by task."""
    config = DraftBenchConfig(gammas=(3, 5, 10), max_new_tokens=options.max_new_tokens, batch=options.prompts)
    result = {}
    for name, pair in pairs.items():
        prompts = {t: pair.encode_many(read_task_prompts(t, options.data, options.prompts)) for t in options.tasks}
        result[name] = bench_draft(pair, prompts, config, notify=lambda text, name=name: say(name, text))
    return result


def speed(pairs: dict[str, Pair], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens per second at batch 1 by task; transformers has fewer tokens to write, for it is slow and steady."""
    rows: list[dict[str, Any]] = []
    config = DecodeBenchConfig(
        gammas=tuple(options.gammas), max_new_tokens=options.max_new_tokens, repeats=options.repeats, peers=False
    )
    for benchmark in options.tasks:
        prompts = read_task_prompts(benchmark, options.data, options.speed_prompts)
        by_draft = {None: list(transformers(pairs, prompts, options))}
        by_draft |= {name: bench_decode(pair, prompts, config)["runs"] for name, pair in pairs.items()}
        for name, runs in by_draft.items():
            for run in runs:
                rows.append({"draft": name, "task": benchmark, **run})
                say(name, benchmark, run["name"], run["gamma"], f"{run['tokens_per_second']:.1f}")
    return rows


def transformers(
    pairs: dict[str, Pair], prompts: Sequence[Prompt], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """transformers alone, and assisted by the first draft that it can run."""
    if not options.peer_tokens:
        return
    pair = next(iter(pairs.values()))
    assisting = next((p for p in pairs.values() if p.draft_kind == "layers"), None)
    for name, runs, gamma in (("transformers-plain", pair, 0), ("transformers-assisted", assisting, PEER_GAMMA)):
        if runs is not None:
            transformers_tokens(runs, prompts[0], 8, gamma=gamma)
            start = time.perf_counter()
            tokens = sum(len(transformers_tokens(runs, p, options.peer_tokens, gamma=gamma)) for p in prompts)
            seconds = time.perf_counter() - start
            yield {"name": name, "gamma": gamma, "tokens": tokens, "tokens_per_second": tokens / seconds}


def batches(pairs: dict[str, Pair], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens per second of plain decoding and of `exact` with the last draft, at growing batches.

    The last of two runs, of `auto` three: recordings are at hand.
    """
    rows = []
    name, pair = list(pairs.items())[-1]
    for size, benchmark in product(options.batches, ("gsm8k", "dolly")):
        prompts = read_task_prompts(benchmark, options.data, max(size, 4))
        for gamma in (0, *options.batch_gammas):
            for _ in range(3 if gamma == "auto" else 2):
                start = time.perf_counter()
                answers = generate(
                    pair, prompts, "exact", gamma=gamma, max_new_tokens=options.max_new_tokens, batch=size
                )
                seconds = time.perf_counter() - start
            tokens = sum(len(answer.tokens) for answer in answers)
            row = {"draft": name if gamma else None, "task": benchmark, "batch": size, "gamma": gamma, "tokens": tokens}
            rows.append({**row, "seconds": seconds, "tokens_per_second": tokens / seconds})
            say(benchmark, size, name, gamma, f"{tokens / seconds:.0f}")
    return rows


def _gamma(text: str) -> int | str:
    return text if text == "auto" else int(text)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="qwen2.5-coder-1.5b")
    parser.add_argument("--draft", action="append", required=True, help="shipped, or NAME=FOLDER; several times")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", default=["accepted", "speed", "batches"])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--prompts", type=int, default=128, help="of every task, for `accepted`")
    parser.add_argument("--speed-prompts", type=int, default=4, help="of every task, for `speed`")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--gammas", type=_gamma, nargs="+", default=[3, 5, 8, "auto"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128, 512])
    parser.add_argument("--batch-gammas", type=_gamma, nargs="+", default=[2, 5, "auto"])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--peer-tokens", type=int, default=64, help="that transformers writes; 0: it is left out")
    parser.add_argument("--dtype", default=None)
    return parser.parse_args()


def main() -> None:
    chosen = options()
    pairs = {}
    for text in chosen.draft:
        name, _, folder = text.partition("=")
        pairs[name] = Pair.load(chosen.target, folder or None, dtype=chosen.dtype)
    result: dict[str, Any] = {**measured_on(), "target": chosen.target, "max_new_tokens": chosen.max_new_tokens}
    result["dtype"] = next(iter(pairs.values())).dtype
    for part, measure in (("accepted", accepted), ("speed", speed), ("batches", batches)):
        if part in chosen.parts:
            result[part] = measure(pairs, chosen)
            write_json(chosen.out, result)
            say("written:", part)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
