"""MATH-500: competition problems (Hendrycks et al. 2021; Lightman et al. 2023). There is no training split."""

from __future__ import annotations

from selfjudge.tasks.base import Row, Task
from selfjudge.tasks.scoring.answers import find_boxed, find_tagged
from selfjudge.tasks.scoring.latex import same_maths


class Math500(Task, columns={"unique_id": str, "problem": str, "answer": str}):
    name = "math500"
    summary = "competition mathematics; answers compared as formulas"
    licence = "MIT"
    splits = ("test",)
    row_id = "{unique_id}"
    new_tokens = 1024
    checkable = True
    hub = ("HuggingFaceH4/MATH-500", None)
    requires = ("math-verify",)

    def prompt(self, row: Row) -> str:
        return f"{row['problem']}\nReason step by step, then give the final answer between [answer] and [/answer]."

    def gold(self, row: Row) -> str | None:
        return str(row["answer"])

    def extract(self, row: Row, text: str) -> str | None:
        between_tags = find_tagged(text)
        return find_boxed(text) if between_tags is None else find_boxed(between_tags) or between_tags

    def same(self, row: Row, a: str | None, b: str | None) -> bool:
        return a is not None and b is not None and same_maths(a, b)
