"""A user's own prompts: jsonl with `prompt` or `messages`, and `answer` or `check` where an answer can be scored.

A `check` is Python that must run through with the text as `answer`: `assert "42" in answer`. It runs in the sandbox.
Rows with neither are decoded like the others and not scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path

from selfjudge.errors import SelfJudgeError
from selfjudge.store import read_rows
from selfjudge.store.artefacts import TaskRow
from selfjudge.tasks.base import FILE, Prompt, Row, Task, normalise_words
from selfjudge.tasks.sandbox.runner import ProgramTest, map_on_cores, passes_test
from selfjudge.tasks.scoring import (
    find_boxed,
    find_final_number,
    find_final_words,
    find_tagged,
    same_number,
    same_words,
)

TEST_SHARE = 5  # one prompt of five
PASSED, FAILED = "passed", "failed"
"""Extracted answers of a text that has a check."""


class File(Task):
    """Rows with a `split` keep it; the others are split by the hash of their prompt's words."""

    summary = "your own prompts, with answers or without"
    licence = "given by the user"
    splits = ("train", "test", "all")

    def __init__(self, path: Path, *, allow_unsafe: bool = False) -> None:
        super().__init__(allow_unsafe=allow_unsafe)
        self.name = f"{FILE}{path}"
        self.path = path

    @cached_property
    def checkable(self) -> bool:  # type: ignore[override]
        """Whether any row has an answer or a check."""
        return any(_scorable(row) for row in self.rows("all"))

    @property
    def runs_programs(self) -> bool:  # type: ignore[override]
        return any("check" in row for row in self.rows("all"))

    def prepare(self) -> None:
        self.rows("all")

    def rows(self, split: str) -> list[Row]:
        if not self.path.is_file():
            raise SelfJudgeError(f"{self.path} does not exist")
        rows = [self._row(number, row) for number, row in enumerate(read_rows(self.path, TaskRow), 1)]
        return rows if split == "all" else [row for row in rows if row["split"] == split]

    def _row(self, number: int, row: Row) -> Row:
        row = {key: value for key, value in row.items() if value is not None}
        prompt = row.get("messages", row.get("prompt"))
        if not prompt:
            raise SelfJudgeError(f'{self.path}, line {number}: expected a JSON object with "prompt" or "messages"')
        by_hash = "train" if sha256(normalise_words(prompt).encode()).digest()[0] % TEST_SHARE else "test"
        return {**row, "id": str(row.get("id", f"{self.path.stem}-{number}")), "split": row.get("split") or by_hash}

    def prompt(self, row: Row) -> Prompt:
        prompt: Prompt = row["messages"] if "messages" in row else row["prompt"]
        return prompt

    def gold(self, row: Row) -> str | None:
        if "check" in row:
            return PASSED
        return str(row["answer"]) if "answer" in row else None

    def extract(self, row: Row, text: str) -> str | None:
        """[answer] tags, \\boxed{}, "the answer is …"; else, if the right answer is a number, the last number."""
        if "check" in row:
            test = ProgramTest("assert", row["check"])
            return PASSED if passes_test(f"answer = {text!r}", test, allow_unsafe=self.allow_unsafe) else FAILED
        number = same_number(self.gold(row), self.gold(row))
        found = find_tagged(text) or find_boxed(text)
        return found or (find_final_number(text) if number else find_final_words(text))

    def extract_many(self, rows: Sequence[Row], texts: Sequence[str]) -> list[str | None]:
        return map_on_cores(lambda pair: self.extract(*pair), zip(rows, texts, strict=True))

    def same(self, row: Row, a: str | None, b: str | None) -> bool:
        return same_words(a, b)

    def is_scorable(self, row: Row, answer: str | None) -> bool:
        return answer is not None and _scorable(row)

    def rate(self, row: Row, answer: str | None) -> dict[str, float]:
        return super().rate(row, answer) if _scorable(row) else {}


def _scorable(row: Row) -> bool:
    return "answer" in row or "check" in row
