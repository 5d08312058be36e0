"""Load on `selfjudge serve`: `python benchmarks/load.py --out load.json --pair smollm2-135m --device cpu`.

Starts a server and lets 1, 8, 32 and 64 clients ask it for `--minutes` each. The clients mix judged, lossless and sampled
requests; some leave in the middle of an answer, some read slowly. Options that are not listed here go to `selfjudge serve`,
whose rule is judged unless `--rule` or `--recipe` is among them.
Every request is also asked alone, before and after: its answer under load must be the same text. In bfloat16 on a GPU
the shape of a batch changes rounding, so there the share of equal answers is a figure, not a test.

OUT is written after every level, with a table in Markdown beside it. `--in-process` needs no packages for HTTP: threads
hand their requests to the server's scheduler.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import typer
from common import say

from selfjudge.cli.options import PairOptions, Setup, with_options
from selfjudge.decoding.rule_parser import RuleRequest
from selfjudge.integrations.server.config import ServerConfig
from selfjudge.judge.model import Judge
from selfjudge.prompts.sources import BUILT_IN
from selfjudge.store import markdown_table, measured_on, write_json

MODES = ("judged", "off", "sampled")
BEHAVIOURS = ("reads", "reads", "reads", "leaves", "reads slowly")
LENGTHS = (16, 48, 96)
"""Most tokens of an answer, by prompt."""
TEMPERATURES = (0.6, 0.8, 1.0)
"""Of sampled answers, by prompt."""
MIX_ROUNDS = 2
PIECES_BEFORE_LEAVING = 3
SLOW_SECONDS = 0.2  # between two pieces
RETRY_SECONDS = 1.0  # after a refusal, as Retry-After says
PATIENCE_SECONDS = 600.0  # that a client waits for the next piece
PREFIX = "selfjudge_"


@dataclass(frozen=True)
class Question:
    """A request whose answer is always the same; `index` names prompt, length of the answer and seed."""

    index: int
    mode: str

    @property
    def prompt(self) -> str:
        """One of the built-in prompts; every fourth follows five others, as in a longer conversation."""
        several = range(self.index - 5, self.index + 1) if self.index % 4 == 3 else [self.index]
        return "\n\n".join(BUILT_IN[i % len(BUILT_IN)][1] for i in several)

    @property
    def max_tokens(self) -> int:
        return LENGTHS[self.index % len(LENGTHS)]

    @property
    def temperature(self) -> float:
        return TEMPERATURES[self.index // 3 % 3] if self.mode == "sampled" else 0.0


class RefusedError(Exception):
    """The queue is full."""


class FailedError(Exception):
    """Anything else that is not an answer."""


class Transport(Protocol):
    name: str
    pid: int
    """Of the process whose memory is the server's."""

    def stream(self, question: Question) -> Generator[str, None, int]:
        """Pieces of an answer as they come, then its number of tokens. To close it is to leave."""
        ...

    def about(self) -> dict[str, Any]:
        """What is served."""
        ...

    def totals(self) -> dict[str, float]:
        """Tokens and memory, as the server counts them."""
        ...


class Http:
    """A server process and a connection for every request."""

    name = "http"

    def __init__(self, arguments: list[str]) -> None:
        command = [sys.executable, "-m", "selfjudge", "serve", "--port", "0", *arguments]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.pid = self.process.pid
        assert self.process.stderr is not None
        for line in self.process.stderr:
            print(line, end="", file=sys.stderr)
            if line.startswith("serving"):
                break
        else:
            raise SystemExit(self.process.wait() or 1)
        self.port = int(line.split(":")[-1].split("/")[0])
        threading.Thread(target=lambda: [print(line, end="", file=sys.stderr) for line in self.process.stderr or ()],
                         daemon=True).start()  # fmt: skip

    @classmethod
    def at(cls, port: int, pid: int) -> Http:
        """A server that somebody else has started and ends."""
        found = cls.__new__(cls)
        found.port, found.pid = port, pid
        return found

    @property
    def headers(self) -> dict[str, str]:
        key = os.environ.get("SELFJUDGE_API_KEY")
        return {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})

    def stream(self, question: Question) -> Generator[str, None, int]:
        body = {
            "messages": [{"role": "user", "content": question.prompt}], "max_tokens": question.max_tokens,
            "temperature": question.temperature, "seed": question.index, "stream": True,
            "stream_options": {"include_usage": True}, "selfjudge": {"off": question.mode == "off"},
        }  # fmt: skip
        with contextlib.closing(self._connect()) as connection:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), self.headers)
            response = connection.getresponse()
            if response.status == 429:
                raise RefusedError
            if response.status != 200:
                raise FailedError(f"{response.status}: {response.read(300).decode(errors='replace')}")
            tokens = None
            for line in response:
                data = line.decode().removeprefix("data: ").strip()
                if not data:
                    continue
                if data == "[DONE]":
                    break
                event = json.loads(data)
                if "error" in event:
                    raise FailedError(event["error"]["message"])
                if event["usage"]:
                    tokens = event["usage"]["completion_tokens"]
                for choice in event["choices"]:
                    if text := choice["delta"].get("content"):
                        yield text
            if tokens is None:
                raise FailedError("the stream ended before the answer did")
            return int(tokens)

    def about(self) -> dict[str, Any]:
        model = json.loads(self._get("/v1/models"))["data"][0]
        return {"pair": model["id"], **model["selfjudge"]}

    def totals(self) -> dict[str, float]:
        """Sums over all labels but `kind`."""
        sums: Counter[str] = Counter()
        for line in self._get("/metrics").splitlines():
            name, _, value = line.rpartition(" ")
            if name.startswith((PREFIX + "tokens_total", PREFIX + "device_memory_bytes")):
                kind = name.partition('kind="')[2].partition('"')[0]
                sums[name.removeprefix(PREFIX).partition("{")[0] + (f"_{kind}" if kind else "")] += float(value)
        return dict(sums)

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_SECONDS)

    def _get(self, path: str) -> str:
        with contextlib.closing(self._connect()) as connection:
            connection.request("GET", path, headers=self.headers)
            return connection.getresponse().read().decode()

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class InProcess:
    """The server's scheduler in this process, without HTTP. The clients share its processor time and its memory."""

    name = "in-process"

    def __init__(self, arguments: list[str], questions: list[Question]) -> None:
        from selfjudge.integrations.server.scheduler import start_scheduler

        self.pid = os.getpid()
        pair, judge, config = served(arguments)
        self.scheduler = start_scheduler(pair, judge, config)
        prompts = sorted({question.prompt for question in questions})
        self.prompts = dict(zip(prompts, pair.encode_many(prompts), strict=True))

    def stream(self, question: Question) -> Generator[str, None, int]:
        from selfjudge.decoding.sampling import Sampling
        from selfjudge.integrations.asgi import RefusedError as ServerRefusal
        from selfjudge.integrations.server.jobs import CompletionJob, Update

        sampling = Sampling(question.temperature) if question.temperature else None
        choice = self.scheduler.rules.choose(sampling=sampling, off=question.mode == "off")
        updates: queue.SimpleQueue[Update] = queue.SimpleQueue()
        options = {"seed": question.index, "streamed": True}
        job = CompletionJob(self.prompts[question.prompt], choice, question.max_tokens, updates.put, options)
        try:
            self.scheduler.submit(job)
        except ServerRefusal:
            raise RefusedError from None
        try:
            while (update := updates.get(timeout=PATIENCE_SECONDS)).result is None:
                if update.failure:
                    raise FailedError(update.failure)
                yield update.text
            if update.text:
                yield update.text
            return len(update.result.tokens)
        finally:
            self.scheduler.cancel(job, "cancelled")

    def about(self) -> dict[str, Any]:
        pair, rules = self.scheduler.pair, self.scheduler.rules
        return {
            "pair": pair.name, "rule": rules.own.text, "theta": rules.choose().rule.theta, "gamma": rules.own.gamma,
            "device": pair.target.device.type, "dtype": pair.dtype,
        }  # fmt: skip

    def totals(self) -> dict[str, float]:
        device = self.scheduler.pair.target.device
        found = self.scheduler.metrics.registry.restricted_registry([f"{PREFIX}tokens_total"]).collect()
        figures = {"tokens_total": sum(sample.value for metric in found for sample in metric.samples)}
        if device.type == "cuda":
            figures["device_memory_bytes_allocated"] = torch.cuda.memory_allocated(device)
            figures["device_memory_bytes_reserved"] = torch.cuda.memory_reserved(device)
        return figures

    def close(self) -> None:
        self.scheduler.stop()


def served(arguments: list[str]) -> tuple[Any, Any, Any]:
    """Pair, judge and config that these options of `selfjudge serve` name."""

    loaded: list[tuple[Any, Any, Any]] = []

    @with_options
    def command(*, models: PairOptions, request: RuleRequest, config: ServerConfig) -> None:
        own = replace(request.named(), judge=None)
        pair = Setup(models, request).load(needs_draft=request.gamma != 0)
        judge = pair.judge if request.judge is None else Judge.from_pretrained(request.judge)
        loaded.append((pair, judge, replace(config, default_rule=own)))

    app = typer.Typer()
    app.command()(command)
    app(arguments, standalone_mode=False)
    return loaded[0]


@dataclass
class Asked:
    """What became of one request."""

    question: Question
    behaviour: str
    text: str = ""
    tokens: int = 0
    first: float | None = None
    """Seconds from the request to the first piece."""
    gaps: list[float] = field(default_factory=list)
    """Seconds between two pieces."""
    failure: str | None = None
    refused: int = 0

    @property
    def complete(self) -> bool:
        return self.failure is None and self.behaviour != "leaves"


def ask(transport: Transport, question: Question, behaviour: str = "reads", until: float = float("inf")) -> Asked:
    """Ask until the answer is there; after `until`, on `time.perf_counter`, refusals are not tried again."""
    asked = Asked(question, behaviour)
    while True:
        try:
            _read(transport, asked)
            return asked
        except RefusedError:
            asked.refused += 1
            if time.perf_counter() + RETRY_SECONDS > until:
                asked.failure = "refused"
                return asked
            time.sleep(RETRY_SECONDS)
        except (FailedError, OSError, http.client.HTTPException, queue.Empty) as error:
            asked.failure = f"{type(error).__name__}: {error}"
            return asked


def _read(transport: Transport, asked: Asked) -> None:
    begun = time.perf_counter()
    last, pieces = begun, 0
    with contextlib.closing(transport.stream(asked.question)) as stream:
        while True:
            try:
                piece = next(stream)
            except StopIteration as end:
                asked.tokens = end.value
                return
            now = time.perf_counter()
            if asked.first is None:
                asked.first = now - begun
            else:
                asked.gaps.append(now - last)
            last, pieces, asked.text = now, pieces + 1, asked.text + piece
            if asked.behaviour == "leaves" and pieces == PIECES_BEFORE_LEAVING:
                return
            if asked.behaviour == "reads slowly":
                time.sleep(SLOW_SECONDS)
                last = time.perf_counter()


def requests(
    client: int, questions: list[Question], behaviours: tuple[str, ...] = BEHAVIOURS
) -> Iterator[tuple[Question, str]]:
    """What a client asks, without end; all clients together ask everything in every way."""
    for turn in itertools.count():
        number = 7 * client + turn
        yield questions[number % len(questions)], behaviours[(client + turn) % len(behaviours)]


def memory(transport: Transport) -> dict[str, float]:
    """Megabytes: the server process's resident memory, and the device's where there is one."""
    text = Path(f"/proc/{transport.pid}/status").read_text()
    resident = next(int(line.split()[1]) for line in text.splitlines() if line.startswith("VmRSS"))
    figures = {"rss_mb": round(resident * 1024 / 1e6, 1)}
    for name, value in transport.totals().items():
        if name.startswith("device_memory_bytes_"):
            figures[f"device_{name.rpartition('_')[2]}_mb"] = round(value / 1e6, 1)
    return figures


def percentiles(seconds: list[float]) -> dict[str, float] | None:
    """p50 and p99 in milliseconds."""
    if len(seconds) < 2:
        return None
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {"p50_ms": round(cuts[49] * 1e3, 2), "p99_ms": round(cuts[98] * 1e3, 2), "n": len(seconds)}


def level(
    transport: Transport,
    clients: int,
    seconds: float,
    questions: list[Question],
    behaviours: tuple[str, ...] = BEHAVIOURS,
) -> tuple[list[Asked], dict[str, Any]]:
    """So many clients for so long; those that wait for an answer at the end get it."""
    asked: list[Asked] = []
    tokens, begun = transport.totals().get("tokens_total", 0), time.perf_counter()
    until = begun + seconds

    def client(number: int) -> None:
        for question, behaviour in requests(number, questions, behaviours):
            if time.perf_counter() >= until:
                return
            asked.append(ask(transport, question, behaviour, until))

    threads = [threading.Thread(target=client, args=(i,), daemon=True) for i in range(clients)]
    samples = [memory(transport)]
    for thread in threads:
        thread.start()
    for share in range(1, 11):
        time.sleep(max(0.0, begun + seconds * share / 10 - time.perf_counter()))
        samples.append(memory(transport))
    for thread in threads:
        thread.join()
    took = time.perf_counter() - begun
    memories = {"start": samples[0], "middle": samples[5], "end": memory(transport)}
    memories["every_tenth"] = [sample["rss_mb"] for sample in samples]
    made = transport.totals().get("tokens_total", 0) - tokens
    return asked, {"seconds": round(took, 1), "tokens_per_second": round(made / took, 2), "memory": memories}


def figures(clients: int, asked: list[Asked], alone: dict[Question, str]) -> dict[str, Any]:
    """What one level's requests say together."""
    failures = [one.failure for one in asked if one.failure not in (None, "refused")]
    compared = [one for one in asked if one.failure is None]
    different = [one for one in compared if not same(one, alone)]
    first = [one.first for one in asked if one.first is not None]
    steps = [gap for one in asked if one.behaviour == "reads" for gap in one.gaps]
    return {
        "clients": clients,
        "requests": len(asked),
        "by_kind": dict(sorted(Counter(f"{one.question.mode}, {one.behaviour}" for one in asked).items())),
        "refused": sum(one.refused for one in asked),
        "failed": len(failures),
        "failures": sorted(set(failures))[:5],
        "first_token": percentiles(first),
        "step": percentiles(steps),
        "compared": len(compared),
        "equal": len(compared) - len(different),
        "different": sorted({(one.question.index, one.question.mode) for one in different})[:20],
    }


def same(one: Asked, alone: dict[Question, str]) -> bool:
    expected = alone[one.question]
    return one.text == expected if one.complete else expected.startswith(one.text)


def ask_alone(transport: Transport, questions: list[Question]) -> tuple[dict[Question, str], dict[str, Any]]:
    """Every question by itself, nothing else being decoded."""
    begun = time.perf_counter()
    asked = [ask(transport, question) for question in questions]
    seconds = time.perf_counter() - begun
    for one in asked:
        if one.failure:
            raise SystemExit(f"{one.question}, asked alone: {one.failure}")
    tokens = sum(one.tokens for one in asked)
    row = {
        "requests": len(asked), "seconds": round(seconds, 1), "tokens_per_second": round(tokens / seconds, 2),
        "first_token": percentiles([one.first for one in asked if one.first is not None]),
        "step": percentiles([gap for one in asked for gap in one.gaps]),
    }  # fmt: skip
    return {one.question: one.text for one in asked}, row


def table(report: dict[str, Any]) -> str:
    head = ["clients", "requests", "requests/s", "tokens/s", "first token p50 / p99, ms", "step p50 / p99, ms", "refused",
            "failed", "equal to alone", "memory at start / middle / end, MB"]  # fmt: skip
    rows = []
    for row in report["levels"]:
        times = [
            " / ".join(f"{row[key][p]:.0f}" for p in ("p50_ms", "p99_ms")) if row[key] else "–"
            for key in ("first_token", "step")
        ]
        kinds = [k for k in row["memory"]["start"] if k in ("rss_mb", "device_allocated_mb")]
        used = "; ".join(" / ".join(f"{row['memory'][at][k]:.0f}" for at in ("start", "middle", "end"))
                         + (" on the device" if k != "rss_mb" else "") for k in kinds)  # fmt: skip
        rows.append([row["clients"], row["requests"], row["requests_per_second"], row["tokens_per_second"], *times,
                     row["refused"], row["failed"], f"{row['equal']} of {row['compared']}", used])  # fmt: skip
    return markdown_table(head, rows, "r" * len(head)) + "\n"


def options() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a .json file; the table gets the suffix .md")
    parser.add_argument("--minutes", type=float, default=10.0, help="of every level")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--prompts", type=int, default=12, help="different ones; each is asked in three modes")
    parser.add_argument("--in-process", action="store_true", help="without HTTP, where fastapi and uvicorn are missing")
    parser.add_argument("--mix", action="store_true", help="compare lossless clients with a third of each mode instead")
    options, arguments = parser.parse_known_args()
    own_rule = any(argument.partition("=")[0] in ("--rule", "--recipe") for argument in arguments)
    return options, arguments if own_rule else ["--rule", "judged", *arguments]


def measure(transport: Transport, o: argparse.Namespace, arguments: list[str], questions: list[Question]) -> None:
    say("every request alone")
    alone, row = ask_alone(transport, questions)
    report: dict[str, Any] = {
        **measured_on(), "transport": transport.name, "options": arguments, **transport.about(), "minutes": o.minutes,
        "mix": {
            "modes": MODES, "behaviours": BEHAVIOURS, "temperature": TEMPERATURES, "max_tokens": LENGTHS,
            "questions": len(questions), "slow_seconds": SLOW_SECONDS,
        },
        "alone": row, "levels": [], "alone_after": None,
    }  # fmt: skip
    for clients in o.clients:
        say(f"{clients} clients for {o.minutes:g} minutes")
        asked, timing = level(transport, clients, 60 * o.minutes, questions)
        row = {**figures(clients, asked, alone), **timing}
        row["requests_per_second"] = round(len(asked) / timing["seconds"], 3)
        report["levels"].append(row)
        write(report, o.out)
        say(json.dumps(row))
    again, row = ask_alone(transport, questions)
    report["alone_after"] = {**row, "equal": sum(again[q] == alone[q] for q in questions), "memory": memory(transport)}
    write(report, o.out)
    print(table(report), end="")


def compare_mix(transport: Transport, o: argparse.Namespace, questions: list[Question]) -> None:
    """Tokens per second of equal lossless clients and of a third each of judged, lossless and sampled ones, by turns."""
    made: dict[str, list[float]] = {"lossless": [], "mixed": []}
    report: dict[str, Any] = {**measured_on(), "transport": transport.name, **transport.about(), "levels": []}
    for clients in o.clients:
        for turn in range(2 * MIX_ROUNDS):
            name = ("lossless", "mixed")[turn % 2]
            own = [question for question in questions if name == "mixed" or question.mode == "off"]
            asked, timing = level(transport, clients, 60 * o.minutes, own, ("reads",))
            failures = sorted({one.failure for one in asked if one.failure not in (None, "refused")})
            made[name].append(timing["tokens_per_second"])
            say(f"{clients} {name} clients: {timing['tokens_per_second']} tokens/s {failures or ''}")
        means = {name: round(statistics.mean(speeds[-MIX_ROUNDS:]), 2) for name, speeds in made.items()}
        rounds = {f"{name}_rounds": speeds[-MIX_ROUNDS:] for name, speeds in made.items()}
        report["levels"].append(
            {"clients": clients, **means, "ratio": round(means["mixed"] / means["lossless"], 3), **rounds}
        )
        o.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(o.out, report)
        print(json.dumps(report["levels"][-1]))


def write(report: dict[str, Any], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, report)
    out.with_suffix(".md").write_text(table(report))


def main() -> None:
    o, arguments = options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server ends with us
    questions = [Question(index, mode) for index in range(o.prompts) for mode in MODES]
    transport = InProcess(arguments, questions) if o.in_process else Http(arguments)
    try:
        if o.mix:
            compare_mix(transport, o, questions)
        else:
            measure(transport, o, arguments, questions)
    finally:
        transport.close()


if __name__ == "__main__":
    main()
