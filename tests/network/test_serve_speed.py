"""`benchmarks/serve_speed.py` against a real server: it counts what the server says, and names what failed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from servers import Server

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "serve_speed.py"


@pytest.mark.slow
def test_clients_are_timed_and_failures_are_named(
    start: Callable[..., Server], endless: list[str], tmp_path: Path
) -> None:
    server = start(*endless, "--gamma", "2", "--max-tokens", "8")
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text("".join(json.dumps({"prompt": f"w{i}"}) + "\n" for i in range(3)))
    call = [sys.executable, str(SCRIPT), "--url", server.url, "--tasks", str(prompts), "--out", str(out)]
    sizes = ["--clients", "1", "3", "--rounds", "2", "--least", "2", "--processes", "2"]
    for name, tokens in (("ours", "6"), ("too-long", "9")):
        subprocess.run([*call, *sizes, "--name", name, "--max-new-tokens", tokens], check=True, capture_output=True)
    servers = json.loads(out.read_text())["servers"]
    one, three = servers["ours"]["rows"]
    assert (one["requests"], three["requests"]) == (2, 6)
    assert (one["tokens"], three["tokens"], three["failed"]) == (12, 36, 0)
    assert three["first_token"]["p50_ms"] > 0
    assert three["each_token"]["p99_ms"] >= three["each_token"]["p50_ms"] > 0
    for row in servers["too-long"]["rows"]:
        assert (row["failed"], row["tokens"]) == (row["requests"], 0)
        assert "400" in row["failures"][0]
