"""JSON under schemas: how many answers fit, whether drafts change any, m, and what the masks cost.

    python benchmarks/structured.py --pair smollm2-135m --schemas 200 --prompts 5 --out results/structured-smollm2.json

Every schema is answered by plain decoding and by `exact` with drafts. Seconds are
processor time: use one thread (OMP_NUM_THREADS=1). Also: what bad input costs the event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import random
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jsonschema_rs
import llguidance
import torch

import selfjudge
from selfjudge.decoding.cycle import Cycle
from selfjudge.decoding.edits import VerifiedLogits
from selfjudge.decoding.grammar import Grammar
from selfjudge.decoding.rule_parser import RuleRequest
from selfjudge.integrations.server.api import make_app
from selfjudge.integrations.server.config import ServerConfig
from selfjudge.integrations.server.scheduler import start_scheduler
from selfjudge.store import parse_json

TOPICS = (
    "a hotel",
    "a film",
    "a recipe",
    "a city",
    "a train journey",
    "a bug report",
    "a patient",
    "an invoice",
    "a football match",
    "a book",
)
NAMES = (
    "name",
    "title",
    "kind",
    "status",
    "price",
    "count",
    "date",
    "tags",
    "notes",
    "owner",
    "address",
    "rating",
    "active",
    "items",
    "code",
)
PROMPTS = (
    "Describe {} as JSON.", "Invent {} and write its data as JSON.", "Write a JSON record of {} for a test.",
    "Give me an example of {}. Answer in JSON alone.", "I need structured data about {}. No explanations, JSON.",
)  # fmt: skip


def make_schema(dice: random.Random, depth: int = 0) -> dict[str, Any]:
    """An object with two to five fields, some nested, some optional."""
    names = dice.sample(NAMES, dice.randint(2, 5 if depth == 0 else 3))
    fields = {name: make_field(dice, depth) for name in names}
    needed = [name for name in names if dice.random() < 0.8] or names[:1]
    return {"type": "object", "properties": fields, "required": needed, "additionalProperties": False}


def make_field(dice: random.Random, depth: int) -> dict[str, Any]:
    kinds: list[Any] = [
        lambda: {"type": "string", "maxLength": dice.choice([12, 30, 60])},
        lambda: {"type": "integer", "minimum": 0, "maximum": dice.choice([9, 100, 5000])},
        lambda: {"type": "boolean"},
        lambda: {"enum": dice.sample(["red", "green", "open", "closed", "low", "high", "unknown"], 3)},
        lambda: {
            "type": "string",
            "pattern": dice.choice([r"^[A-Z]{2}-[0-9]{4}$", r"^[a-z]{3,8}$", r"^\+?[0-9]{6,9}$"]),
        },
        lambda: {"type": "string", "format": dice.choice(["date", "uuid", "ipv4", "time"])},
        lambda: {"anyOf": [{"type": "null"}, {"type": "integer", "maximum": 99, "minimum": 0}]},
        lambda: {"const": dice.choice(["v1", "test"])},
    ]
    if depth < 2:
        kinds += [
            lambda: {"type": "array", "items": make_field(dice, depth + 1), "minItems": 1, "maxItems": 3},
            lambda: make_schema(dice, depth + 1),
        ]
    return dice.choice(kinds)()


class Clock:
    """Seconds of processor time that this thread spends in a method, so that other programs do not count."""

    def __init__(self, owner: type, name: str) -> None:
        self.seconds, inner = 0.0, getattr(owner, name)

        def timed(*arguments: Any, **more: Any) -> Any:
            start = time.thread_time()
            try:
                return inner(*arguments, **more)
            finally:
                self.seconds += time.thread_time() - start

        setattr(owner, name, timed)


def run(
    pair: selfjudge.Pair, cases: list[tuple[dict[str, Any], str]], gamma: int | str, longest: int, minutes: float
) -> dict[str, Any]:
    """Answers every case twice, or as many as begin within so many minutes."""
    until = time.monotonic() + 60 * minutes
    clocks = Clock(Grammar, "edit"), Clock(Grammar, "draft"), Clock(VerifiedLogits, "edit"), Clock(Cycle, "run")
    spent = [0.0] * len(clocks)
    counts = dict.fromkeys(("answers", "finished", "valid", "equal_to_plain"), 0)
    lengths, cycles = [], 0
    for schema, prompt in cases:
        if time.monotonic() > until:
            break
        options: Any = {"schema": schema, "max_new_tokens": longest}
        plain = selfjudge.generate(pair, prompt, gamma=0, **options)
        for clock in clocks:
            clock.seconds = 0.0
        answer = selfjudge.generate(pair, prompt, gamma=gamma, **options)
        lengths.append(answer.mean_accepted_length)
        cycles += answer.cycles
        spent = [before + clock.seconds for before, clock in zip(spent, clocks, strict=True)]
        counts["answers"] += 1
        counts["equal_to_plain"] += answer.tokens == plain.tokens
        if answer.finish != "length":
            counts["finished"] += 1
            counts["valid"] += jsonschema_rs.is_valid(schema, parse_json(answer.text))
    masks, drafts, edits, whole = spent
    return {
        **counts, "mean_accepted_length": statistics.mean(lengths), "cycles": cycles, "seconds_per_cycle": whole / cycles,
        "mask_share_of_cycle": masks / whole, "draft_mask_share_of_cycle": drafts / whole, "mask_and_argmax_share_of_cycle": edits / whole,
    }  # fmt: skip


def list_bad_bodies() -> dict[str, dict[str, Any]]:
    """What nobody should send."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    nested: dict[str, Any] = {"type": "string"}
    for _ in range(40):
        nested = {"type": "array", "items": nested}
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": nested}}
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    links = {str(i): {"type": "array", "minItems": 1, "items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(400)}
    return {
        "10,000 tools": {"tools": [tool] * 10_000}, "tools without names": {"tools": [{"type": "function", "function": {}}] * 128},
        "impossible schema": {"guided_json": {"type": "string", "minLength": 2, "maxLength": 1}}, "recursive schema": {"guided_json": {"$ref": "#"}},
        "endless schema": {"guided_json": endless}, "400 references": {"guided_json": {"$defs": links, "$ref": "#/$defs/0"}},
        "huge multipleOf": {"guided_json": {"type": "integer", "multipleOf": 99_999_999}}, "regex bomb": {"guided_regex": "(" * 5000 + "a" + ")" * 5000},
        "regex of many states": {"guided_regex": "(?:a?){2000}a{2000}"}, "deep schema": {"response_format": schema},
        "schema of 900 kB": {"guided_json": {"enum": [f"{i:06}" for i in range(90_000)]}}, "n = 1,000": {"n": 1000},
    }  # fmt: skip


def time_bad_input(pair: selfjudge.Pair) -> dict[str, dict[str, float]]:
    """Of every bad body its status, the processor time of the event loop's thread, and the longest time for which the
    loop did nothing else, waiting for other threads included: the server's application, without sockets."""
    config = ServerConfig(default_rule=RuleRequest("exact", gamma=2), max_context=1024, max_tokens=64)
    scheduler = start_scheduler(pair, None, config)
    app = make_app(scheduler, None)

    async def ask(body: bytes) -> int:
        path, headers = "/v1/chat/completions", [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
                 "headers": [*headers, (b"content-length", str(len(body)).encode())], "http_version": "1.1"}  # fmt: skip
        messages, status, over = [{"type": "http.request", "body": body, "more_body": False}], 0, asyncio.Event()

        async def receive() -> Any:
            if not messages:
                await over.wait()
                return {"type": "http.disconnect"}
            return messages.pop()

        async def send(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)

        await app(scope, receive, send)
        over.set()
        return status

    async def time_one(body: bytes) -> tuple[int, float, float]:
        longest, task, cpu = 0.0, asyncio.ensure_future(ask(body)), time.thread_time()
        last = time.perf_counter()
        while not task.done():
            await asyncio.sleep(0.0005)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        return task.result(), time.thread_time() - cpu, longest

    figures = {}
    for name, body in list_bad_bodies().items():
        data = json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 16, **body}).encode()
        runs = [asyncio.run(time_one(data)) for _ in range(5)]
        figures[name] = {
            "status": runs[0][0], "processor_seconds": statistics.median(run[1] for run in runs), "longest_seconds": min(run[2] for run in runs),
        }  # fmt: skip
    scheduler.stop()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default="smollm2-135m")
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=5, choices=range(1, 6))
    parser.add_argument("--gamma", default="auto", type=lambda text: text if text == "auto" else int(text))
    parser.add_argument("--max-new-tokens", type=int, default=300)
    parser.add_argument("--minutes", type=float, default=math.inf, help="leave out what has not begun by then")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    dice, pair = random.Random(0), selfjudge.Pair.load(options.pair)  # noqa: S311
    schemas = [(make_schema(dice), dice.choice(TOPICS)) for _ in range(options.schemas)]
    cases = [(schema, prompt.format(topic)) for prompt in PROMPTS[: options.prompts] for schema, topic in schemas]
    result = {
        "pair": options.pair, "dtype": pair.dtype, "device": pair.target.device.type, "gamma": options.gamma,
        "max_new_tokens": options.max_new_tokens, "schemas": options.schemas, "prompts": options.prompts,
        **run(pair, cases, options.gamma, options.max_new_tokens, options.minutes), "event_loop": time_bad_input(pair),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads", "date": datetime.now(UTC).date().isoformat(),
        "versions": {"torch": torch.__version__, "llguidance": llguidance.__version__ if hasattr(llguidance, "__version__") else llguidance.get_version()},
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
