"""The figures of docs/which-engine.md and docs/vllm.md are those of the files that they name."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def measured(run: str, mode: str, setting: str) -> list[str]:
    """Tokens/s of the better repeat: GSM8K at 1 and at 64 prompts, Dolly at 64."""
    modes = json.loads((ROOT / "results" / "vllm" / f"h200-qwen2.5-coder-1.5b-{run}.json").read_text())["modes"]
    runs = [row for row in modes[mode]["runs"] if row["setting"] == setting]
    return [
        f"{max(row['tokens_per_second'] for row in runs if (row['task'], row['batch']) == wanted):,.0f}"
        for wanted in (("gsm8k", 1), ("gsm8k", 64), ("dolly", 64))
    ]


def test_the_speeds_are_what_was_measured() -> None:
    text = (ROOT / "docs" / "which-engine.md").read_text()
    rows = [
        [cell.strip() for cell in row.split("|")[2:5]] for row in text.splitlines() if re.search(r"at a time \|", row)
    ]
    ours, worker, head = map(list, zip(*rows, strict=True))
    assert ours == measured("head", "ours", "auto")
    assert worker == measured("worker", "recipe", "off")
    assert head == measured("head", "head", "head")
    plain = measured("head", "plain", "plain")
    assert f"{plain[0]}, {plain[1]} and {plain[2]}" in text
    page = (ROOT / "docs" / "vllm.md").read_text()
    assert f"{worker[0]} against {measured('worker', 'head', 'head')[0]} tokens/s" in page
