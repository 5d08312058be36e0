"""A few built-in prompts of different kinds, so that demo and bench need no data."""

from __future__ import annotations

from pathlib import Path

from selfjudge.store import read_rows

BUILT_IN = tuple((row["kind"], row["prompt"]) for row in read_rows(Path(__file__).with_name("builtin.jsonl")))
"""Kind and text of each."""
