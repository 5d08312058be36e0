"""What tests of runs share: prompts for tiny models, and all that a run leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np


def prompts_file(path: Path, count: int) -> Path:
    """A file of random prompts in the words of the tiny tokenizer."""
    rng = np.random.default_rng(0)
    lines = [
        json.dumps({"prompt": " ".join(f"w{i}" for i in rng.integers(5, 50, rng.integers(2, 12)))})
        for _ in range(count)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def content(folder: Path) -> dict[str, bytes]:
    """Every file but those that name a time."""
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name not in ("run.json", ".lock")
    }
