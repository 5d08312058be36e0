"""MMLU: multiple-choice questions of 57 subjects (Hendrycks et al. 2021), with chain of thought."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import Literal

from selfjudge.tasks.base import Row, Task, normalise_words

_ANSWER = re.compile(r"(?i:answer is):?\s*\**\s*(?:\\boxed\{)?\s*(?:\(\s*([A-Da-d])\s*\)|([A-D])(?![\w']))")
_BOXED = re.compile(r"\\boxed\{\s*(?:\\text\{)?\s*\(?([A-D])\)?\s*\}")  # models that learnt from MATH
_COLUMNS = {"subject": str, "question": str, "choices": tuple[str, str, str, str], "answer": Literal[0, 1, 2, 3]}


class Mmlu(Task, columns=_COLUMNS):
    name = "mmlu"
    summary = "multiple-choice questions of 57 subjects, with chain of thought"
    licence = "MIT"
    splits = ("dev", "test")
    checkable = True
    hub = ("cais/mmlu", "all")

    def examples(self, split: str, limit: int | None = None) -> list[Row]:
        """With a limit: always the same sample, with a share of every subject; a smaller one is part of a larger."""
        rows = super().examples(split)
        if limit is None or limit >= len(rows):
            return rows
        sizes, seen = Counter(row["subject"] for row in rows), defaultdict[str, int](int)
        depth = []
        for place, row in enumerate(rows):
            depth.append(((seen[row["subject"]] + 0.5) / sizes[row["subject"]], place))
            seen[row["subject"]] += 1
        return [rows[place] for _, place in sorted(depth)[:limit]]

    def rows(self, split: str) -> list[Row]:
        rows = super().rows(split)
        # five questions occur in both splits
        return rows if split == "test" else self.drop_test_questions(rows, self.rows("test"))

    def prompt(self, row: Row) -> str:
        choices = "\n".join(f"({letter}) {choice}" for letter, choice in zip("ABCD", row["choices"], strict=True))
        return (
            f"Here is a multiple-choice question about {row['subject'].replace('_', ' ')}.\n\n"
            f"{row['question']}\n{choices}\n\n"
            'Reason step by step, then end with "The answer is (X)", where X is the letter of the right choice.'
        )

    def question(self, row: Row) -> str:
        # the same question occurs in several subjects
        return normalise_words(f"{row['question']} {' '.join(row['choices'])}")

    def gold(self, row: Row) -> str | None:
        return "ABCD"[row["answer"]]

    def extract(self, row: Row, text: str) -> str | None:
        if answers := _ANSWER.findall(text):
            return str(answers[-1][0] or answers[-1][1]).upper()
        boxed: list[str] = _BOXED.findall(text)
        return boxed[-1] if boxed else None
