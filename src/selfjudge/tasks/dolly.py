"""Dolly: 15,011 instructions written by people (Databricks 2023), sorted by hash; the last 1,000 are the test split."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import TypedDict

from selfjudge.tasks.base import Row, Task, numbered, without_test_questions

TEST_ROWS = 1000


class DollyRow(TypedDict):
    instruction: str
    context: str


class Dolly(Task):
    name = "dolly"
    columns = DollyRow
    summary = "instructions written by people, some with a passage to work on"
    licence = "CC-BY-SA-3.0"
    splits = ("train", "test")
    new_tokens = 512
    hub = ("databricks/databricks-dolly-15k", None)

    def rows(self, split: str) -> list[Row]:
        rows = numbered("dolly", self.load("databricks-dolly-15k.sha256-sorted.jsonl", split))
        test = rows[-TEST_ROWS:]
        # a few instructions occur twice
        return test if split == "test" else without_test_questions(self, rows[:-TEST_ROWS], test)

    def from_hub(self, split: str) -> list[Row]:
        """One split there, in another order: sorted as the file is."""
        columns = ("instruction", "context", "response", "category")
        rows = [{name: row[name] for name in columns} for row in super().from_hub("train")]
        return sorted(rows, key=lambda row: sha256(json.dumps(row).encode()).digest())

    def prompt(self, row: Row) -> str:
        return f"{row['instruction']}\n\n{row['context']}" if row["context"].strip() else str(row["instruction"])


TASK = Dolly
