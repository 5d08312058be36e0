"""A user's own prompts: jsonl with `prompt` or `messages`, and `answer` where there is a right one.

Rows without an answer are decoded like the others and not scored.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from selfjudge.errors import SelfJudgeError
from selfjudge.store import read_rows
from selfjudge.store.artefacts import TaskRow
from selfjudge.tasks.base import FILE, Prompt, Row, Task, plain
from selfjudge.tasks.scoring.answers import boxed, final_number, final_words, same_number, same_words, tagged

TEST_SHARE = 5  # one prompt of five


class File(Task):
    """Rows with a `split` keep it; the others are split by the hash of their prompt's words."""

    summary = "your own prompts, with answers or without"
    licence = "given by the user"
    splits = ("train", "test", "all")

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.name = f"{FILE}{path}"
        self.path = path

    @property
    def checkable(self) -> bool:  # type: ignore[override]
        """Whether any row has an answer."""
        return any("answer" in row for row in self.rows("all"))

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
        split = row.get("split") or ("train" if sha256(plain(prompt).encode()).digest()[0] % TEST_SHARE else "test")
        return {**row, "id": str(row.get("id", f"{self.path.stem}-{number}")), "split": split}

    def prompt(self, row: Row) -> Prompt:
        prompt: Prompt = row["messages"] if "messages" in row else row["prompt"]
        return prompt

    def gold(self, row: Row) -> str | None:
        return str(row["answer"]) if "answer" in row else None

    def extract(self, row: Row, text: str) -> str | None:
        """[answer] tags, \\boxed{}, "the answer is …"; else, if the right answer is a number, the last number."""
        number = same_number(self.gold(row), self.gold(row))
        return tagged(text) or boxed(text) or (final_number(text) if number else final_words(text))

    def same(self, row: Row, a: str | None, b: str | None) -> bool:
        return same_words(a, b)

    def is_scorable(self, row: Row, answer: str | None) -> bool:
        return answer is not None and "answer" in row

    def rate(self, row: Row, answer: str | None) -> dict[str, float]:
        return super().rate(row, answer) if "answer" in row else {}


TASK = File
