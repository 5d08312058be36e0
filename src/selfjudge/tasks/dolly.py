"""Dolly: 15,011 instructions written by people (Databricks 2023), sorted by hash; the last 1,000 are the test split."""

from __future__ import annotations

import json
from hashlib import sha256

from selfjudge.tasks.base import Row, Task

TEST_ROWS = 1000


class Dolly(Task, columns={"instruction": str, "context": str}):
    name = "dolly"
    summary = "instructions written by people, some with a passage to work on"
    licence = "CC-BY-SA-3.0"
    splits = ("train", "test")
    file = "databricks-dolly-15k.sha256-sorted.jsonl"
    row_id = "{index}"
    hub = ("databricks/databricks-dolly-15k", None)

    def rows(self, split: str) -> list[Row]:
        rows = super().rows(split)
        train, test = rows[:-TEST_ROWS], rows[-TEST_ROWS:]
        return test if split == "test" else self.drop_test_questions(train, test)  # a few instructions occur twice

    def load_from_hub(self, split: str) -> list[Row]:
        """The hub's only split, sorted as the file is."""
        columns = ("instruction", "context", "response", "category")
        rows = [{name: row[name] for name in columns} for row in super().load_from_hub("train")]
        return sorted(rows, key=lambda row: sha256(json.dumps(row).encode()).digest())

    def prompt(self, row: Row) -> str:
        return f"{row['instruction']}\n\n{row['context']}" if row["context"].strip() else str(row["instruction"])
