"""The whole line on one target, step by step: `python benchmarks/whole_line.py --target FOLDER --draft HEAD --work DIR --out FILE`.

Every step is a command of `selfjudge` in a process of its own, as a user would call it, with small limits: loading from
files that are not in memory, `generate`, `distill --kind eagle3`, `serve` with real requests, `label`, `train`, `eval`, `tune`.
FILE gets, after every step, its seconds, those of loading, and its peak memory on host and device. A step that runs
longer than `--budget` is ended and says so. A second call leaves out what FILE has already. `--table FILE` prints it.

Host memory is `anonymous` (the process's own) and `resident` (with mapped files, which the system can drop). Device
memory is `allocated` and `reserved` by torch, and `used` on the whole device, by anybody.
The time of the whole recipe of `distill` follows from a part: seconds a prompt, an answer token and a step, times those
that made the head that ships.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import say

from selfjudge.errors import SelfJudgeError
from selfjudge.store import markdown_table, measured_on, read_json, read_tensors, weight_files, write_json

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "results" / "drafts" / "qwen2.5-coder-1.5b" / "eagle3-run.json"
"""What made the head that ships: so many prompts, answers and steps are what a head takes."""
TAIL = 400  # characters of an error that are kept
GIGA = 1e9


class Watch:
    """Peak memory of this process, and seconds of its parts; written to a file twice a second, for the step may be ended."""

    def __init__(self, file: Path, begun: float) -> None:
        self.file, self.begun = file, begun
        self.figures: dict[str, float] = {}
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()

    def _look(self) -> None:
        written = 0.0
        while not self.done.wait(0.02):
            self.look()
            if time.monotonic() - written > 0.5:
                written = time.monotonic()
                self.write()

    def look(self) -> None:
        for name, kilobytes in read_status().items():
            self.raise_to(f"host_{name}", kilobytes * 1024)
        torch = sys.modules.get("torch")
        if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
            # the allocator's own counts: a call of CUDA from this thread would spoil a graph that is being captured
            self.raise_to("device_allocated", torch.cuda.max_memory_allocated(0))
            self.raise_to("device_reserved", torch.cuda.max_memory_reserved(0))

    def raise_to(self, name: str, value: float) -> None:
        self.figures[name] = max(value, self.figures.get(name, 0))

    def write(self) -> None:
        write_json(self.file, dict(self.figures))

    def close(self) -> None:
        self.done.set()
        self.thread.join()
        self.look()
        self.write()

    def time_loading(self) -> None:
        """Note the seconds of imports, of loading a pair, and the memory that this took."""
        from selfjudge.models.pair import Pair

        self.figures["import_seconds"] = time.monotonic() - self.begun
        load = Pair.load

        def timed(*args: Any, **options: Any) -> Pair:
            begun = time.monotonic()
            pair = load(*args, **options)
            self.figures["load_seconds"] = self.figures.get("load_seconds", 0) + time.monotonic() - begun
            self.look()
            self.figures |= {
                f"load_{name}": v for name, v in self.figures.items() if name.startswith(("host", "device"))
            }
            return pair

        Pair.load = timed  # type: ignore[method-assign]


def read_status() -> dict[str, int]:
    """Kilobytes of this process's memory: its own, where the system tells, and the most that was resident so far."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    own = {"anonymous": int(lines["RssAnon"].split()[0])} if "RssAnon" in lines else {}
    return {**own, "resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}


def run_inside(file: Path, begun: float, arguments: list[str]) -> None:
    """A command of `selfjudge` in this process, watched; it was begun at that time of the system's clock."""
    watch = Watch(file, begun)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        watch.time_loading()
        sys.argv = ["selfjudge", *arguments]
        runpy.run_module("selfjudge", run_name="__main__")
    finally:
        watch.close()


@dataclass(frozen=True)
class Step:
    """One command of the line."""

    name: str
    arguments: list[str]
    cold: bool = False
    """Whether the target's files are dropped from the system's cache first."""
    read: Callable[[Any], dict[str, Any]] = lambda result: {}
    """What is kept of the JSON that the command prints."""
    folder: Path | None = None
    """Of a distillation: what it has written is read, whether it ended or was ended."""
    budget: float = 1.0
    """Its share of `--budget`."""
    serve: int = 0
    """Requests at a time to the server that the command starts."""


def line_of(o: argparse.Namespace) -> list[Step]:
    """The steps, each with limits that keep it short."""
    pair = ["--target", str(o.target), "--draft", str(o.draft), *(["--device", o.device] if o.device else [])]
    alone = [*pair[:2], *pair[4:]]
    work, small = o.work, o.small
    prompts, tokens = (4, 24) if small else (32, 160)
    first = ["generate", "Hello", "--max-new-tokens", "1", "--json", *pair]
    asked = ["generate", "Write a Python function that says whether a word is a palindrome.", "--max-new-tokens", str(tokens), "--json", *pair]  # fmt: skip
    label = ["label", "--prompts", f"arithmetic:{8 * prompts}", "--tau", "-1.4",
             "--max-new-tokens", str(tokens), "--out", str(work / "labels"), "--json", *pair]  # fmt: skip
    distill = ["distill", "--kind", "eagle3", *alone, "--out", str(work / "head"), "--data-minutes", "30", "--held-out", "16", "--json",
               "--prompts", f"self:{12 if small else 1300}", "--steps", "3" if small else "16",
               *(["--max-new-tokens", "24", "--draft-vocab", "1024", "--batch-tokens", "512"] if small else [])]  # fmt: skip
    judge = str(work / "judge")
    made = (work / "judge" / "config.json").exists()  # else what comes after goes on without it
    judged = (
        ["--judge", f"line={judge}", "--rules", "exact margin:0.5 judged:q0.9@line"]
        if made
        else ["--rules", "exact margin:0.5"]
    )
    families = ["--judge", judge] if made else ["--families", "margin,topk"]
    evaluate = ["eval", "--tasks", "arithmetic", "--limit", str(2 * prompts), *judged, "--gammas", "4", "--max-new-tokens", str(tokens),
                "--out", str(work / "eval"), "--json", *pair]  # fmt: skip
    tune = ["tune", "--tasks", "arithmetic", "--limit", str(6 * prompts), "--epsilon", "0.3" if small else "0.1", *families, "--max-new-tokens", str(tokens),
            "--minutes", "1", "--out", str(work / "tuned"), "--json", *pair]  # fmt: skip
    return [
        Step("load", first, cold=True),
        Step("generate", asked, read=read_answer),
        Step("distill", distill, folder=work / "head", budget=1.6),
        Step("serve", ["serve", "--port", "0", *pair], serve=2 if small else 8),
        Step("label", label, read=lambda r: {"rows": r.get("rows"), "prompts": r.get("prompts")}),
        Step("train", ["train", str(work / "labels"), "--acceptable", "0.4", "--out", judge, "--json"]),
        Step(
            "eval", evaluate, read=lambda rows: {"tokens_per_second": {r["rule"]: r["tokens_per_second"] for r in rows}}
        ),
        Step("tune", tune, read=lambda r: {key: r["recipe"][key] for key in ("rule", "gamma") if key in r["recipe"]}),
    ]


def read_answer(result: dict[str, Any]) -> dict[str, Any]:
    return {
        name: result[name] for name in ("tokens_per_second", "mean_accepted_length", "gamma_mean") if name in result
    }


def read_distillation(folder: Path, seconds: float) -> dict[str, Any]:
    """What a part of a distillation took, and what the whole recipe would take; also of one that was ended in between.

    The evaluations, the answers to held-out prompts, loading and writing are in the `rest`, which is counted once.
    """
    work = folder / "work"
    spent = {file.stem: read_json(file).get("seconds", 0.0) for file in sorted(work.glob("*.json"))}
    answers = {name: s for name, s in spent.items() if name.startswith("answers-") and name != "answers-00000"}
    tokens = 0
    for name in answers:
        arrays, _ = read_tensors(work / f"{name}.safetensors")
        tokens += int((arrays["lengths"] - arrays["prompt_lengths"]).sum())
    written = sum(source.get("written", 0) for source in read_json(work / "prompts.json")["yields"].values())
    _, training = read_tensors(work / "train.safetensors")
    history = training["history"] or [{"step": 0, "seconds": 0.0}]
    steps = training["step"] - history[0]["step"]
    each = {
        "prompt": spent["prompts"] / written,
        "answer_token": sum(answers.values()) / tokens,
        "step": (training["seconds"] - history[0]["seconds"]) / steps,
    }
    rest = seconds - spent["prompts"] - sum(answers.values()) - training["seconds"]
    recipe = read_json(RECIPE)
    counts = {
        "prompt": sum(source.get("written", 0) for source in recipe["sources"]),
        "answer_token": recipe["training"]["answer_tokens"],
        "step": recipe["training"]["steps"],
    }
    return {
        "part": {"prompts": written, "answer_tokens": tokens, "steps": training["step"], "evaluations": len(training["history"])},
        "seconds_of": {**spent, "training": training["seconds"], "rest": rest},
        "seconds_per": each,
        "recipe": counts,
        "whole_recipe_minutes": (rest + sum(each[name] * counts[name] for name in each)) / 60,
    }  # fmt: skip


def drop_files(folder: Path) -> None:
    """Drop the weights of a checkpoint from the system's cache."""
    for file in weight_files(folder):
        handle = os.open(file, os.O_RDONLY)
        with contextlib.suppress(OSError):  # not every system can
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


class DeviceWatch:
    """Peak memory of the whole device, as nvidia-smi reads it; 0 where there is none."""

    def __init__(self) -> None:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-lms", "200"]
        self.peak, self.process = 0.0, None
        with contextlib.suppress(OSError):
            self.process = subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):
                self.peak = max(self.peak, float(line) * 2**20)

    def close(self) -> dict[str, float]:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        return {"device_used": self.peak} if self.peak else {}


@contextlib.contextmanager
def running(step: Step, work: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """The process of a step and the file of its peaks; ended on the way out."""
    peaks = work / f"{step.name}.json"
    peaks.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--inside", str(peaks), str(time.monotonic()), *step.arguments]
    output, errors = peaks.with_suffix(".out").open("w"), peaks.with_suffix(".err").open("w")
    with output, errors, subprocess.Popen(command, stdout=output, stderr=errors, text=True) as process:
        try:
            yield process, peaks
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(8)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def run_step(step: Step, o: argparse.Namespace) -> dict[str, Any]:
    """One step; what FILE says of it."""
    if step.cold:
        drop_files(o.target)
    row: dict[str, Any] = {"command": f"selfjudge {shorten(step.arguments, o)}"}
    begun, budget, device = time.monotonic(), o.budget * step.budget, DeviceWatch()
    with running(step, o.work) as (process, peaks):
        try:
            if step.serve:
                row |= ask_server(process, peaks.with_suffix(".err"), step.serve, begun, budget)
                process.terminate()
            row["exit"] = process.wait(max(1.0, budget - (time.monotonic() - begun)))
        except subprocess.TimeoutExpired:
            row |= {"exit": None, "ended_after": budget}
        row["seconds"] = time.monotonic() - begun
    if row["exit"] not in (0, 143, None):
        row["error"] = shorten(peaks.with_suffix(".err").read_text()[-TAIL:].split(), o)
    try:
        if step.folder is not None:
            row |= read_distillation(step.folder, row["seconds"])
        elif row["exit"] == 0 and not step.serve:
            row |= step.read(json.loads(peaks.with_suffix(".out").read_text()))
    except (ValueError, KeyError, TypeError, ZeroDivisionError, OSError, SelfJudgeError) as error:
        row["unread"] = shorten([type(error).__name__, *str(error).split()], o)
    figures = (read_json(peaks) if peaks.exists() else {}) | device.close()
    seconds = {name: value for name, value in figures.items() if name.endswith("seconds")}
    return {
        **row,
        **seconds,
        "gigabytes": {name: round(v / GIGA, 3) for name, v in figures.items() if name not in seconds},
    }


def shorten(arguments: list[str], o: argparse.Namespace) -> str:
    """A command without the paths of this machine."""
    words = " ".join(repr(word) if " " in word else word for word in arguments)
    for path, name in ((o.draft, "HEAD"), (o.target, "TARGET"), (o.work, "WORK")):
        words = words.replace(str(path), name)
    return words


def ask_server(
    process: subprocess.Popen[str], errors: Path, at_once: int, begun: float, budget: float
) -> dict[str, Any]:
    """Wait until it serves; ask one request, then several at a time, twice; seconds and tokens of each."""
    from load import Http

    while not (said := [line for line in errors.read_text().splitlines() if line.startswith("serving")]):
        if process.poll() is not None or time.monotonic() - begun > budget:
            raise subprocess.TimeoutExpired("serve", budget)
        time.sleep(0.05)
    ready = time.monotonic() - begun
    http = Http.at(int(said[0].split(":")[-1].split("/")[0]), process.pid)
    levels = [ask_at_once(http, count, budget - (time.monotonic() - begun)) for count in (1, 1, at_once, at_once)]
    return {"ready_seconds": ready, "levels": levels}


def ask_at_once(http: Any, count: int, patience: float) -> dict[str, Any]:
    """Ask so many requests at the same time, and wait at most so many seconds."""
    from load import Asked, Question, ask

    asked: list[Asked] = []

    def client(question: Question) -> None:
        asked.append(ask(http, question))

    threads = [
        threading.Thread(target=client, args=(Question(index, "off"),), daemon=True) for index in range(2, 2 + count)
    ]
    begun = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.1, patience - (time.monotonic() - begun)))
    seconds, tokens = time.monotonic() - begun, sum(one.tokens for one in asked)
    first = sorted(one.first for one in asked if one.first is not None)
    return {
        "requests": count, "failed": count - sum(one.failure is None for one in asked), "seconds": seconds, "tokens": tokens,
        "tokens_per_second": tokens / seconds, "first_token_seconds": first[len(first) // 2] if first else None,
    }  # fmt: skip


def table(report: dict[str, Any]) -> str:
    """Seconds and peak memory of each step."""
    rows = []
    for name, row in report["steps"].items():
        memory = row["gigabytes"]
        rest = "failed" if "error" in row else "ended" if "ended_after" in row else f"{row['seconds']:.0f}"
        rows.append([
            name, rest, f"{row['load_seconds']:.1f}" if "load_seconds" in row else "–",
            *(f"{memory[key]:.1f}" if key in memory else "–" for key in ("host_anonymous", "host_resident", "device_allocated", "device_reserved")),
        ])  # fmt: skip
    head = ["step", "seconds", "of them loading", "host, own", "host, with files", "device, allocated", "reserved"]
    return markdown_table(head, rows, "lrrrrrr")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, help="a checkpoint folder, such as grown_target.py writes")
    parser.add_argument("--draft", type=Path, help="its head; FOLDER/head if not given")
    parser.add_argument("--work", type=Path, help="a folder for what the steps write")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", nargs="+", default=None, help="names, or their beginnings; all if none is given")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds after which a step is ended")
    parser.add_argument("--total", type=float, default=1e9, help="begin no step after so many seconds")
    parser.add_argument("--device")
    parser.add_argument("--small", action="store_true", help="a few prompts and tokens, to try the script")
    parser.add_argument("--table", type=Path, help="print the table of this file, and do nothing else")
    o = parser.parse_args()
    if o.table is None and (o.target is None or o.work is None or o.out is None):
        parser.error("--target, --work and --out are needed")
    if o.target is not None:
        o.draft = o.draft or o.target / "head"
    return o


def main() -> None:
    o = options()
    if o.table:
        print(table(read_json(o.table)))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the step ends with us
    o.work.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = read_json(o.out) if o.out.exists() else {**measured_on(), "steps": {}}
    config = read_json(o.target / "config.json")
    shards = weight_files(o.target)
    report |= {
        "target": {"shards": len(shards), "gigabytes": sum(file.stat().st_size for file in shards) / GIGA,
                   **{key: config[key] for key in ("model_type", "hidden_size", "num_hidden_layers", "dtype") if key in config}}
    }  # fmt: skip
    begun = time.monotonic()
    for index in range(len(line_of(o))):
        step = line_of(o)[index]  # what it asks for depends on what the steps before have made
        wanted = o.steps is None or any(step.name.startswith(name) for name in o.steps)
        done = report["steps"].get(step.name, {}).get("exit") in (0, 143)
        if not wanted or done:
            continue
        if time.monotonic() - begun > o.total:
            say(f"no time left for {step.name}")
            continue
        row = report["steps"][step.name] = run_step(step, o)
        write_json(o.out, report)
        say(step.name, json.dumps({k: v for k, v in row.items() if k != "command"})[:600])
    print(table(report))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        run_inside(Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
    else:
        main()
