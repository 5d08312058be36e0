"""The figures of docs/which-engine.md and docs/vllm.md are those of the files that they name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[2]
VLLM = ROOT / "results" / "vllm"


def read_runs(file: Path, mode: str) -> list[dict[str, Any]]:
    return list(json.loads(file.read_text())["modes"][mode]["runs"])


def measured(run: str, mode: str, setting: str, choose: Callable[[Sequence[float]], float]) -> list[str]:
    """Tokens/s of GSM8K at 1 and at 64 prompts."""
    runs = [
        row for row in read_runs(VLLM / f"h200-qwen2.5-coder-1.5b-{run}.json", mode)
        if row["setting"] == setting and row["task"] == "gsm8k"
    ]  # fmt: skip
    return [f"{choose([row['tokens_per_second'] for row in runs if row['batch'] == n]):,.0f}" for n in (1, 64)]


def test_the_speeds_are_what_was_measured() -> None:
    text = (ROOT / "docs" / "which-engine.md").read_text()
    rows = [
        [cell.strip() for cell in row.split("|")[2:5]] for row in text.splitlines() if re.search(r"prompts? \|", row)
    ]
    ours, worker, head = map(list, zip(*rows, strict=True))
    assert ours == measured("head", "ours", "auto", max)
    assert worker == measured("worker", "recipe", "off", median)
    assert head == measured("worker", "head", "head", median)


def test_the_speeds_over_http_are_what_was_measured() -> None:
    text = (ROOT / "docs" / "which-engine.md").read_text()
    servers = json.loads((ROOT / "results" / "load" / "h200-http.json").read_text())["servers"]
    for clients in (1, 64):
        row = next(row for row in text.splitlines() if re.search(rf"\b{clients} clients? \|", row))
        for name, cell in (("ours", 2), ("vllm", 4)):
            runs = servers[name]["rows"]
            rate = next(r["tokens_per_second"] for r in runs if (r["task"], r["clients"]) == ("gsm8k", clients))
            assert row.split("|")[cell].strip() == f"{rate:,.0f}"


def test_what_a_rule_costs_inside_vllm_is_what_was_measured() -> None:
    page = (ROOT / "docs" / "vllm.md").read_text()
    for file, size in (("h200-qwen2.5-coder-1.5b-worker.json", "1.5 B"), ("h200-8b-head.json", "8.4 B")):
        shares = [row["worker_share"] for row in read_runs(VLLM / file, "recipe") if row["setting"] != "off"]
        assert f"{100 * min(shares):.0f} to {100 * max(shares):.0f} %" in page.partition(f" at {size}")[0]
