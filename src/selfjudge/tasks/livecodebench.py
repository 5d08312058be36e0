"""LiveCodeBench: programming contests (Jain et al. 2025). 679 of 880 problems, public tests only.

Passing the public tests is easier than the benchmark's own measure: figures are not comparable with published ones.
"""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Literal

from selfjudge.tasks.base import Row, load_hub_rows
from selfjudge.tasks.code import CodeTask
from selfjudge.tasks.sandbox.runner import ProgramTest

_TEST_SHARE = 4  # one problem of four
_FILES = ("release_v1_public_tests.jsonl", "derived_v5_window_279_sample_tests.jsonl")
_HUB = "livecodebench/code_generation_lite"
_ASK = (
    "You will be given a question (problem specification) and will generate a correct Python program that matches the"
    " specification and passes all tests."
)
_STDIN = (
    "Read the inputs from stdin solve the problem and write the answer to stdout (do not directly test on the sample"
    " inputs). Enclose your code within delimiters as follows. Ensure that when the python program runs, it reads the"
    " inputs, runs the algorithm and writes output to STDOUT.\n```python\n# YOUR CODE HERE\n```\n\n"
)
_CALL = (
    "You will use the following starter code to write the solution to the problem and enclose your code within"
    " delimiters.\n```python\n{}\n```\n\n"
)
_PRELUDE = (  # contest sites import these; starter code needs typing
    "\n".join(
        f"from {name} import *"
        for name in ["typing", "math", "collections", "heapq", "bisect", "itertools", "functools", "string", "operator"]
    )
    + "\nimport math, collections, heapq, bisect, itertools, functools, re, string, random, sys, operator"
)


class LiveCodeBench(CodeTask, columns={"question_id": str, "question_content": str, "starter_code": str}):
    name = "livecodebench"
    summary = "programming contests, public tests only"
    licence = "CC"
    splits = ("train", "test", "all")
    new_tokens = 1024
    hub = (_HUB, None)
    prelude = _PRELUDE

    def rows(self, split: str) -> list[Row]:
        """The hash of a problem's name decides its split: the same whatever other problems are at hand."""
        files = ("",) if self.folder is None else _FILES
        rows = [self._row(row) for file in files for row in self.load(file, "test")]
        return rows if split == "all" else [row for row in rows if _in_test(row) == (split == "test")]

    def load_from_hub(self, split: str) -> list[Row]:
        """All 880 problems of release 5; read as plain files, for `datasets` runs no loading scripts any more."""
        files = [f"hf://datasets/{_HUB}/test{number}.jsonl" for number in ("", 2, 3, 4, 5)]
        return load_hub_rows(self.name, "json", data_files=files, split="train")

    def _row(self, row: Row) -> Row:
        """Both files' columns, made the same."""
        if "sample_tests_parsed" in row:
            tests, function = row["sample_tests_parsed"], row["func_name"]
        else:
            tests, function = json.loads(row["public_test_cases"]), json.loads(row["metadata"]).get("func_name")
        return {
            "id": f"livecodebench-{row['question_id']}",
            "question_id": row["question_id"],
            "question": row["question_content"],
            "starter_code": row["starter_code"],
            "function": function,
            "tests": [{"input": test["input"], "output": test["output"]} for test in tests],
        }

    def prompt(self, row: Row) -> str:
        """As LiveCodeBench asks."""
        how = _CALL.format(row["starter_code"]) if row["starter_code"] else _STDIN
        return f"{_ASK}\n\nQuestion: {row['question']}\n\n{how}"

    def needs(self, row: Row) -> str:
        return f"def {row['function']}" if row["function"] else ""

    def tests(self, row: Row) -> list[ProgramTest]:
        function = row["function"] or ""
        kind: Literal["call", "stdin"] = "call" if function else "stdin"
        return [ProgramTest(kind, test["input"], test["output"], function) for test in row["tests"]]


def _in_test(row: Row) -> bool:
    return sha256(row["question_id"].encode()).digest()[0] % _TEST_SHARE == 0
