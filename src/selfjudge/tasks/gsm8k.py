"""GSM8K: grade-school word problems (Cobb et al. 2021)."""

from __future__ import annotations

from typing import TypedDict

from selfjudge.tasks.base import Row, Task, numbered
from selfjudge.tasks.scoring.answers import final_number, numbers, same_number


class GsmRow(TypedDict):
    question: str
    answer: str


class Gsm8k(Task):
    name = "gsm8k"
    columns = GsmRow
    summary = "grade-school word problems; the last number is the answer"
    licence = "MIT"
    splits = ("train", "test")
    new_tokens = 512
    checkable = True
    hub = ("openai/gsm8k", "main")

    def rows(self, split: str) -> list[Row]:
        return numbered(f"gsm8k-{split}", self.load(f"{split}.jsonl", split))

    def prompt(self, row: Row) -> str:
        return f'{row["question"]}\nReason step by step, then end with "The final answer is [answer]".'

    def gold(self, row: Row) -> str | None:
        return next(iter(numbers(row["answer"].rpartition("####")[2])), None)

    def extract(self, row: Row, text: str) -> str | None:
        return final_number(text)

    def same(self, row: Row, a: str | None, b: str | None) -> bool:
        return same_number(a, b)


TASK = Gsm8k
