"""Any OpenAI-compatible server under so many clients at a time: `python benchmarks/serve_speed.py --url http://127.0.0.1:8000 --name ours --out FILE`.

Every client asks the next prompt as soon as it has its answer; answers are greedy and streamed. Of each level FILE gets tokens/s,
and p50 and p99 of the time to the first token, of the time a token takes after it, and of the wait between two events.
Servers are measured one after the other with the same prompts, and all of them are written to FILE by name. Tokens are
counted by the servers themselves. Clients live in processes of their own, so that reading is not what limits a server.
The first level is run once before it is timed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from common import read_task_prompts, say

from selfjudge.store import measured_on, read_json, write_json


@dataclass
class Answer:
    """What one client saw of one request."""

    tokens: int = 0
    prompt_tokens: int = 0
    first: float = 0.0
    """Seconds from the request to the first text."""
    last: float = 0.0
    """Seconds from the request to the last text."""
    gaps: list[float] = field(default_factory=list)
    """Seconds between two events with text."""
    failure: str | None = None


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="of the server, without a path")
    parser.add_argument("--name", required=True, help="of this measurement in FILE")
    parser.add_argument("--about", default="", help="what runs there, in words")
    parser.add_argument("--model", help="what the request calls it; the first that the server lists if not given")
    parser.add_argument(
        "--extra",
        type=json.loads,
        nargs="+",
        default=[{}],
        help="further fields of a request, as JSON; several by turns",
    )
    parser.add_argument("--data", type=Path)
    parser.add_argument("--tasks", nargs="+", default=["gsm8k"], help="test splits, prompts files or `built-in`")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--rounds", type=int, default=2, help="requests of each client, but --least of all")
    parser.add_argument("--least", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--processes", type=int, default=4, help="that the clients share")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


async def post(host: str, port: int, body: dict[str, Any]) -> Answer:
    """Send one request on a connection of its own and read its events."""
    answer, text = Answer(), json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    begun = before = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    try:
        writer.write(f"{head}Content-Length: {len(text)}\r\nConnection: close\r\n\r\n".encode() + text)
        status = await reader.readline()
        if b" 200" not in status:
            answer.failure = (status + await reader.read(500)).decode(errors="replace")
            return answer
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                continue  # chunk sizes, blank lines, comments, the end
            event = json.loads(line[6:])
            if "error" in event:
                answer.failure = str(event["error"])
            now = time.perf_counter()
            if any(choice["delta"].get("content") for choice in event.get("choices", ())):
                if answer.first:
                    answer.gaps.append(now - before)
                else:
                    answer.first = now - begun
                answer.last, before = now - begun, now
            if usage := event.get("usage"):
                answer.tokens, answer.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
    finally:
        writer.close()
    if not answer.tokens and not answer.failure:
        answer.failure = "the stream ended before the answer did"
    return answer


async def ask_all(host: str, port: int, bodies: Sequence[dict[str, Any]], clients: int) -> list[Answer]:
    waiting = list(reversed(bodies))
    answers: list[Answer] = []

    async def client() -> None:
        while waiting:
            answers.append(await post(host, port, waiting.pop()))

    await asyncio.gather(*(client() for _ in range(clients)))
    return answers


def ask_in_process(host: str, port: int, bodies: Sequence[dict[str, Any]], clients: int) -> list[Answer]:
    return asyncio.run(ask_all(host, port, bodies, clients))


def percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """p50 and p99 in milliseconds."""
    if len(seconds) < 2:
        return None
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {"p50_ms": round(cuts[49] * 1e3, 2), "p99_ms": round(cuts[98] * 1e3, 2)}


def measure(pool: ProcessPoolExecutor, o: argparse.Namespace, prompts: list[str], clients: int) -> dict[str, Any]:
    place = urlsplit(o.url)
    host, port = place.hostname or "127.0.0.1", place.port or 80
    count = max(o.least, o.rounds * clients)
    common = {
        "model": o.model, "max_tokens": o.max_new_tokens, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    bodies = [
        {**common, **o.extra[i % len(o.extra)], "messages": [{"role": "user", "content": prompts[i % len(prompts)]}]}
        for i in range(count)
    ]
    shares = min(o.processes, clients)
    begun = time.perf_counter()
    jobs = [
        pool.submit(ask_in_process, host, port, bodies[i::shares], clients // shares + (i < clients % shares))
        for i in range(shares)
    ]
    answers = [answer for job in jobs for answer in job.result()]
    seconds = time.perf_counter() - begun
    done = [answer for answer in answers if not answer.failure]
    tokens = sum(answer.tokens for answer in done)
    return {
        "clients": clients, "requests": len(answers), "failed": len(answers) - len(done),
        "failures": sorted({answer.failure for answer in answers if answer.failure})[:3],
        "seconds": round(seconds, 3), "tokens": tokens, "tokens_per_second": round(tokens / seconds, 1),
        "prompt_tokens": sum(answer.prompt_tokens for answer in done),
        "first_token": percentiles([answer.first for answer in done]),
        "each_token": percentiles([(a.last - a.first) / (a.tokens - 1) for a in done if a.tokens > 1]),
        "between_events": percentiles([gap for answer in done for gap in answer.gaps]),
    }  # fmt: skip


def first_model(url: str) -> str:
    from urllib.request import urlopen

    with urlopen(f"{url}/v1/models") as reply:  # noqa: S310 (the server that the caller names)
        return str(json.load(reply)["data"][0]["id"])


def main() -> None:
    o = options()
    o.model = o.model or first_model(o.url)
    most = max(o.least, o.rounds * max(o.clients))
    tasks = {Path(name).stem: [str(p) for p in read_task_prompts(name, o.data, most)] for name in o.tasks}
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(o.processes, mp_context=get_context("spawn")) as pool:
        measure(pool, o, next(iter(tasks.values())), o.clients[0])
        for repeat in range(o.repeats):
            for clients in o.clients:
                for task, prompts in tasks.items():
                    rows.append({"task": task, "repeat": repeat, **measure(pool, o, prompts, clients)})
                    say(f"{o.name}: {rows[-1]}")
                    then = read_json(o.out) if o.out.is_file() else {"servers": {}}
                    about = {"about": o.about, "model": o.model, "extra": o.extra, **measured_on(), "rows": rows}
                    write_json(
                        o.out, {"max_new_tokens": o.max_new_tokens, "servers": {**then["servers"], o.name: about}}
                    )


if __name__ == "__main__":
    main()
