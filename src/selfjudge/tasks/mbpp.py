"""MBPP: short Python functions from a sentence and a test (Austin et al. 2021), with the authors' splits."""

from __future__ import annotations

from selfjudge.tasks import Row, Task, read_jsonl

_IDS = {"test": range(11, 511), "validation": range(511, 601), "train": range(601, 975)}


class Mbpp(Task):
    name = "mbpp"
    summary = "short Python functions from a sentence and a test"
    licence = "CC-BY-4.0"
    splits = tuple(_IDS)

    def rows(self, split: str) -> list[Row]:
        rows = read_jsonl(self.file("mbpp.jsonl"))
        return [{"id": f"mbpp-{row['task_id']}", **row} for row in rows if row["task_id"] in _IDS[split]]

    def prompt(self, row: Row) -> str:
        return f"{row['text']}\nYour code should pass this test:\n{row['test_list'][0]}"


TASK = Mbpp
