"""GSM8K: grade-school word problems (Cobb et al. 2021)."""

from __future__ import annotations

from selfjudge.tasks.base import Row, Task
from selfjudge.tasks.scoring.answers import find_final_number, find_numbers, same_number


class Gsm8k(Task, columns={"question": str, "answer": str}):
    name = "gsm8k"
    summary = "grade-school word problems; the last number is the answer"
    licence = "MIT"
    splits = ("train", "test")
    checkable = True
    hub = ("openai/gsm8k", "main")

    def prompt(self, row: Row) -> str:
        return f'{row["question"]}\nReason step by step, then end with "The final answer is [answer]".'

    def gold(self, row: Row) -> str | None:
        return next(iter(find_numbers(row["answer"].rpartition("####")[2])), None)

    def extract(self, row: Row, text: str) -> str | None:
        return find_final_number(text)

    def same(self, row: Row, a: str | None, b: str | None) -> bool:
        return same_number(a, b)
