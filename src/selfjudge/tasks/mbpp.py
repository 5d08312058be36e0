"""MBPP: short Python functions from a sentence and a test (Austin et al. 2021), with the authors' splits."""

from __future__ import annotations

from typing import TypedDict

from selfjudge.tasks.base import Row
from selfjudge.tasks.code import CodeTask
from selfjudge.tasks.sandbox.runner import Trial

_IDS = {"test": range(11, 511), "validation": range(511, 601), "train": range(601, 975)}


class MbppRow(TypedDict):
    task_id: int
    text: str
    test_list: list[str]


class Mbpp(CodeTask):
    name = "mbpp"
    columns = MbppRow
    summary = "short Python functions from a sentence and a test"
    licence = "CC-BY-4.0"
    splits = tuple(_IDS)
    new_tokens = 512
    hub = ("google-research-datasets/mbpp", "full")

    def rows(self, split: str) -> list[Row]:
        rows = self.load("mbpp.jsonl", split)
        return [{"id": f"mbpp-{row['task_id']}", **row} for row in rows if row["task_id"] in _IDS[split]]

    def prompt(self, row: Row) -> str:
        return f"{row['text']}\nYour code should pass this test:\n{row['test_list'][0]}"

    def tests(self, row: Row) -> list[Trial]:
        setup = row.get("test_setup_code") or ""
        return [Trial("assert", f"{setup}\n{test}") for test in row["test_list"]]


TASK = Mbpp
