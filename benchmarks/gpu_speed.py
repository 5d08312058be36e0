"""The GPU figures under results/speed/h200: `python benchmarks/gpu_speed.py --out DIR`, on a machine with CUDA.

Large batches beside transformers, answers that end at different times, and the cost of a pass: of the embedded target, and of well-known shapes
with random weights. Decoding with batch 1 is `selfjudge bench decode`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from common import say
from pass_cost import PassesConfig, bench_passes, draw_passes, pass_seconds, random_model
from transformers import PreTrainedModel

from selfjudge.decoding.admission import Request
from selfjudge.decoding.loop import decode
from selfjudge.decoding.rules import EXACT
from selfjudge.engine.draft import BatchEngines
from selfjudge.engine.select import borrow_draft, borrow_engine
from selfjudge.models.load import Draft, Target
from selfjudge.models.pair import Pair
from selfjudge.prompts.sources import BUILT_IN
from selfjudge.store import measured_on, write_json

RESULTS = Path(__file__).parents[1] / "results" / "speed"
CUDA = torch.device("cuda")
Prompts = Sequence[Sequence[int]]
Timed = tuple[float, list[list[int]]]  # seconds, and the tokens of every row


def write(file: Path, value: dict[str, Any]) -> None:
    write_json(file, value)
    say(file.name, json.dumps(value)[-1500:])


def ours(
    target: Target, draft: Draft | None, prompts: Prompts, gamma: int, count: int, eos: Sequence[int] = ()
) -> Timed:
    """Seconds and tokens of our loop, greedy; engines and what they recorded are kept between calls."""
    tokens: list[list[int]] = [[] for _ in prompts]
    torch.cuda.synchronize()
    start = time.perf_counter()
    with borrow_engine(target) as large, borrow_draft(draft, target) if draft is not None else nullcontext() as small:
        requests = [Request(prompt, count) for prompt in prompts]
        for step in decode(BatchEngines(large, small), requests, EXACT, gamma=gamma, eos_ids=eos):
            for e in step.emissions:
                tokens[e.row] += e.tokens
    torch.cuda.synchronize()
    return time.perf_counter() - start, tokens


@torch.inference_mode()
def theirs(target: PreTrainedModel, prompts: Prompts, count: int, eos: Sequence[int] = ()) -> Timed:
    """Seconds and tokens of `model.generate`, left-padded."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + [*p] for p in prompts], device=CUDA)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=CUDA)
    torch.cuda.synchronize()
    start = time.perf_counter()
    out = target.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=count, eos_token_id=list(eos) or [-1], pad_token_id=0
    )
    torch.cuda.synchronize()
    elapsed = time.perf_counter() - start
    rows = []
    for row in out[:, longest:].tolist():
        end = next((i + 1 for i, t in enumerate(row) if t in eos), len(row))
        rows.append(row[:end])
    return elapsed, rows


def many_prompts(pair: Pair) -> list[list[int]]:
    """1,024 prompts: the built-in ones, numbered."""
    return pair.encode_many([
        f"{text} (Variant {i // len(BUILT_IN)}.)"
        for i, (_, text) in zip(range(1024), itertools.cycle(BUILT_IN), strict=False)
    ])  # fmt: skip


def finishing(pair: Pair, out: Path) -> None:
    """1,024 rows that end at different times: rows in the batch and tokens per second over the run, recordings at hand."""
    prompts = many_prompts(pair)
    traces = []
    for _ in range(2):  # the first records
        trace = []
        torch.cuda.synchronize()
        start = time.perf_counter()
        with borrow_engine(pair.target_model) as engine:
            requests = [Request(prompt, 384) for prompt in prompts]
            for step in decode(BatchEngines(engine), requests, EXACT, gamma=0, eos_ids=pair.eos_ids):
                trace.append((time.perf_counter() - start, len(step.emissions)))
        traces.append(trace)
    window = 16
    rows = []
    for i in range(window + 1, len(traces[1]), window):  # step 0 is the prefill
        part = traces[1][i - window : i]
        seconds = part[-1][0] - traces[1][i - window - 1][0]
        rows.append({"step": i, "rows": part[-1][1], "ms_per_step": seconds / window * 1e3,
                     "tokens_per_second": sum(n for _, n in part) / seconds})  # fmt: skip
    result = {**measured_on(), "dtype": "bfloat16", "max_new_tokens": 384, "window_steps": window, "runs": rows,
              "seconds": [t[-1][0] for t in traces], "tokens": [sum(n for _, n in t) for t in traces]}  # fmt: skip
    write(out / "finishing.json", result)
    draw_finishing(result, out / "finishing.png")


def draw_finishing(result: dict[str, Any], file: Path) -> None:
    """Milliseconds a step and rows that still answer, against steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = result["runs"]
    figure, left = plt.subplots(figsize=(7, 4))
    left.plot([r["step"] for r in rows], [r["ms_per_step"] for r in rows], marker="o", label="milliseconds per step")
    left.set_xlabel("step")
    left.set_ylabel("milliseconds per step")
    left.set_ylim(bottom=0)
    right = left.twinx()
    right.plot([r["step"] for r in rows], [r["rows"] for r in rows], "k:", label="rows still answering")
    right.set_ylabel("rows still answering (dotted)")
    right.set_ylim(bottom=0)
    before, after = max(itertools.pairwise(rows), key=lambda pair: pair[0]["ms_per_step"] - pair[1]["ms_per_step"])
    figure.suptitle(
        f"Once half of 1,024 answers have ended, a step falls from {before['ms_per_step']:.1f} to {after['ms_per_step']:.1f} ms"
        f"\nSmolLM2-135M, {result['machine'].get('gpu')}, {result['date']}",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def big_batches(pair: Pair, float32: Pair, out: Path) -> None:
    """Plain decoding of many prompts at a time, and whether the answers of a sample are those of transformers in float32."""
    prompts = many_prompts(pair)
    runs = []
    for batch in (64, 256, 1024):
        for name, function in (("selfjudge-plain", lambda p: ours(pair.target_model, None, p, 0, 128, pair.eos_ids)),
                               ("transformers-plain", lambda p: theirs(pair.target, p, 128, pair.eos_ids))):  # fmt: skip
            function(prompts[:batch])  # warm-up
            seconds, rows = function(prompts[:batch])
            total = sum(map(len, rows))
            runs.append(
                {
                    "name": name,
                    "batch": batch,
                    "tokens": total,
                    "seconds": seconds,
                    "tokens_per_second": total / seconds,
                }
            )
    sample = prompts[:64]
    own = ours(float32.target_model, None, sample, 0, 96, pair.eos_ids)[1]
    peer = theirs(float32.target, sample, 96, pair.eos_ids)[1]
    gaps = []
    for prompt, a, b in zip(sample, own, peer, strict=True):
        if a != b:
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            with torch.inference_mode():
                best = float32.target(torch.tensor([[*prompt, *a[:at]]], device=CUDA)).logits[0, -1].topk(2).values
            gaps.append(float(best[0] - best[1]))
    write(out / "batch.json", {**measured_on(), "dtype": "bfloat16", "max_new_tokens": 128, "runs": runs,
                         "float32_sample": {"answers": len(sample), "identical": len(sample) - len(gaps), "gaps": gaps}})  # fmt: skip


def shapes(out: Path) -> None:
    """Passes and cycles of models too large to ship, with random weights; speed-ups projected with the embedded pair's m."""
    result: dict[str, Any] = {
        **measured_on(),
        "dtype": "bfloat16",
        "note": "random weights: only times mean something",
        "runs": [],
    }
    trace = json.loads((RESULTS / "cpu-2core" / "acceptance.json").read_text())["runs"]
    lengths = {r["gamma"]: r["mean_accepted_length"] for r in trace if r["name"] == "selfjudge-exact"}
    for target_name, draft_name in (("qwen2.5-1.5b", "qwen-draft-8x320"), ("llama-3.1-8b", "llama-3.2-1b")):
        target = Target(random_model(target_name, CUDA, torch.bfloat16))
        draft = Draft(random_model(draft_name, CUDA, torch.bfloat16))
        prompt = [torch.randint(1000, (300,)).tolist()]
        for _ in range(3):  # the second time a prompt of that length comes its pass is recorded
            seconds, _ = ours(target, None, prompt, 0, 256)
        theirs(target.module, prompt, 8)
        slow, _ = theirs(target.module, prompt, 32)
        row: dict[str, Any] = {
            "target": target_name, "draft": draft_name, "plain_tokens_per_second": 256 / seconds,
            "transformers_tokens_per_second": 32 / slow,
            "pass_ms": {t: pass_seconds(target, 1, t, 300, repeats=50) * 1e3 for t in (1, 6, 11)},
            "draft_pass_ms": pass_seconds(draft, 1, 1, 300, repeats=50) * 1e3,
        }  # fmt: skip
        for gamma, m in lengths.items():
            seconds, _ = ours(target, draft, prompt, gamma, 64)
            with borrow_engine(target) as large, borrow_draft(draft, target) as small:
                requests = [Request(ids, 128) for ids in prompt]
                cycles = list(decode(BatchEngines(large, small), requests, EXACT, gamma=gamma))[1:]
            cycle = sum(sum(s.seconds.values()) for s in cycles) / len(cycles)
            row[f"cycle_ms_gamma_{gamma}"] = cycle * 1e3
            row[f"projected_tokens_per_second_gamma_{gamma}"] = m / cycle
            row[f"projected_speedup_gamma_{gamma}"] = m / cycle * row["pass_ms"][1] / 1e3  # over plain passes
        result["runs"].append(row)
        del target, draft
        torch.cuda.empty_cache()
    result["projection"] = f"m of the embedded pair on the built-in prompts {lengths} over the measured cycle time"
    write(out / "shapes.json", result)


def passes(pair: Pair, out: Path) -> None:
    """Cost against tokens per pass, context and batch."""
    single = PassesConfig(contexts=(100, 300, 1000, 3000), repeats=30)
    batched = PassesConfig(batches=(1, 4, 16, 64, 256, 1024), tokens=(1, 6), repeats=20)
    small = bench_passes(pair.target, "smollm2-135m", single)
    by_batch = bench_passes(pair.target, "smollm2-135m", batched)
    small["runs"] += [r for r in by_batch["runs"] if r["batch"] > 1]
    write(out / "passes-smollm2-135m.json", small)
    draw_passes(by_batch, out / "passes-smollm2-135m.png")
    model = random_model("qwen2.5-1.5b", CUDA, torch.bfloat16)
    large = bench_passes(model, "shape:qwen2.5-1.5b", single)
    write(out / "passes-qwen2.5-1.5b-shape.json", large)
    draw_passes(large, out / "passes-qwen2.5-1.5b-shape.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    o = parser.parse_args()
    o.out.mkdir(parents=True, exist_ok=True)
    pair = Pair.load("smollm2-135m", device="cuda")
    shapes(o.out)
    passes(pair, o.out)
    finishing(pair, o.out)
    big_batches(pair, Pair.load("smollm2-135m", device="cuda", dtype="float32"), o.out)


if __name__ == "__main__":
    main()
