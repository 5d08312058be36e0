"""Time to the first token of every turn of a chat: `python benchmarks/chat_turns.py --out chat.json --pair smollm2-135m`.

Starts `selfjudge serve` once with its prefix cache and once without, and lets one client hold chats of ten turns. Every
message of the user has the same number of words, no two chats have one in common. Options that are not listed here go to
`selfjudge serve`. Medians are over chats; `ratio` is turn 10 over turn 1, `ratio_of_least` that of the fastest ones.
`busy` says what else ran meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from common import say
from load import Http

from selfjudge.store import measured_on, write_json
from selfjudge.store.run_folder import LoadWatch

NOUNS = ["river", "stone", "garden", "window", "letter", "forest", "winter", "bridge", "candle", "island", "market"]


def ask(server: Http, messages: list[dict[str, str]], tokens: int) -> tuple[float, str, dict[str, Any]]:
    """Seconds to the first token, the text and the usage of an answer."""
    body = {
        "messages": messages, "max_tokens": tokens, "stream": True, "stream_options": {"include_usage": True},
        "temperature": 0, "ignore_eos": True,
    }  # fmt: skip
    text, usage, first = "", {}, 0.0
    with contextlib.closing(server._connect()) as connection:
        begun = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", json.dumps(body), server.headers)
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(response.read().decode())
        for line in response:
            data = line.decode().removeprefix("data: ").strip()
            if not data or data == "[DONE]":
                continue
            event = json.loads(data)
            usage = event["usage"] or usage
            for choice in event["choices"]:
                if piece := choice["delta"].get("content"):
                    first = first or time.perf_counter() - begun
                    text += piece
    return first, text, usage


def chat(server: Http, seed: int, o: argparse.Namespace) -> list[dict[str, float]]:
    """One chat: for each turn the seconds to its first token, its tokens and how many of them were read."""
    words, messages, turns = random.Random(seed), [], []  # noqa: S311
    for _ in range(o.turns):
        messages.append({"role": "user", "content": " ".join(words.choices(NOUNS, k=o.words)) + "?"})
        first, text, usage = ask(server, messages, o.tokens)
        messages.append({"role": "assistant", "content": text})
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        turns.append({"first": first, "prompt": usage["prompt_tokens"], "read": usage["prompt_tokens"] - cached})
    return turns


def measure(arguments: list[str], o: argparse.Namespace) -> dict[str, Any]:
    server = Http(arguments)
    try:
        chat(server, -1, o)  # the first chat compiles and measures
        watch = LoadWatch()
        chats = [chat(server, seed, o) for seed in range(o.chats)]
        busy = watch.describe()
    finally:
        server.close()
    turns = [
        {
            "first_ms": round(1000 * statistics.median(turn["first"] for turn in column), 1),
            "least_first_ms": round(1000 * min(turn["first"] for turn in column), 1),
            "prompt_tokens": statistics.median(turn["prompt"] for turn in column),
            "tokens_read": statistics.median(turn["read"] for turn in column),
        }
        for column in zip(*chats, strict=True)
    ]
    ratios = sorted(turns[-1]["first"] / turns[0]["first"] for turns in chats)
    return {
        "turns": turns, "busy": busy, "ratio": round(statistics.median(ratios), 3),
        "ratio_of_least": round(turns[-1]["least_first_ms"] / turns[0]["least_first_ms"], 3),
        "ratio_least_and_most": [round(ratios[0], 3), round(ratios[-1], 3)],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    for name, default in (("turns", 10), ("chats", 8), ("words", 60), ("tokens", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    o, arguments = parser.parse_known_args()
    report = {**measured_on(), "options": arguments, "chats": o.chats, "words": o.words, "answer_tokens": o.tokens}
    for name, options in (("with_prefix_cache", []), ("without", ["--prefix-cache", "0"])):
        report[name] = measure([*arguments, *options], o)
        say(f"{name}: {json.dumps(report[name])}")
        write_json(o.out, report)


if __name__ == "__main__":
    sys.exit(main())
