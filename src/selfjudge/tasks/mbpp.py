"""MBPP: short Python functions from a sentence and a test (Austin et al. 2021), with the authors' splits."""

from __future__ import annotations

from selfjudge.tasks.base import Row
from selfjudge.tasks.code import CodeTask
from selfjudge.tasks.sandbox.runner import ProgramTest

_IDS = {"test": range(11, 511), "validation": range(511, 601), "train": range(601, 975)}


class Mbpp(CodeTask, columns={"task_id": int, "text": str, "test_list": list[str]}):
    name = "mbpp"
    summary = "short Python functions from a sentence and a test"
    licence = "CC-BY-4.0"
    splits = tuple(_IDS)
    file = "mbpp.jsonl"
    row_id = "{task_id}"
    hub = ("google-research-datasets/mbpp", "full")

    def rows(self, split: str) -> list[Row]:
        return [row for row in super().rows(split) if row["task_id"] in _IDS[split]]

    def prompt(self, row: Row) -> str:
        return f"{row['text']}\nYour code should pass this test:\n{row['test_list'][0]}"

    def tests(self, row: Row) -> list[ProgramTest]:
        setup = row.get("test_setup_code") or ""
        return [ProgramTest("assert", f"{setup}\n{test}") for test in row["test_list"]]
