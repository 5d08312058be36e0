"""Dolly: 15,011 instructions written by people (Databricks 2023), sorted by hash; the last 1,000 are the test split."""

from __future__ import annotations

from selfjudge.tasks import Row, Task, numbered, read_jsonl

TEST_ROWS = 1000


class Dolly(Task):
    name = "dolly"
    summary = "instructions written by people, some with a passage to work on"
    licence = "CC-BY-SA-3.0"
    splits = ("train", "test")

    def rows(self, split: str) -> list[Row]:
        rows = numbered("dolly", read_jsonl(self.file("databricks-dolly-15k.sha256-sorted.jsonl")))
        test = rows[-TEST_ROWS:]
        if split == "test":
            return test
        asked = {self.prompt(row) for row in test}  # a few instructions occur twice
        return [row for row in rows[:-TEST_ROWS] if self.prompt(row) not in asked]

    def prompt(self, row: Row) -> str:
        return f"{row['instruction']}\n\n{row['context']}" if row["context"].strip() else str(row["instruction"])


TASK = Dolly
