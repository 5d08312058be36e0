"""GSM8K: grade-school word problems (Cobb et al. 2021)."""

from __future__ import annotations

from selfjudge.tasks import Row, Task, numbered, read_jsonl


class Gsm8k(Task):
    name = "gsm8k"
    summary = "grade-school word problems; the last number is the answer"
    licence = "MIT"
    splits = ("train", "test")

    def rows(self, split: str) -> list[Row]:
        return numbered(f"gsm8k-{split}", read_jsonl(self.file(f"{split}.jsonl")))

    def prompt(self, row: Row) -> str:
        return f'{row["question"]}\nReason step by step, then end with "The final answer is [answer]".'


TASK = Gsm8k
