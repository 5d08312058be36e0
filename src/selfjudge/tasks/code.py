"""Benchmarks that ask for a program: its answer is the set of tests that it passes."""

import json
from collections.abc import Sequence
from hashlib import sha256
from typing import Literal

from selfjudge.tasks.base import Row, Task, load_hub_rows
from selfjudge.tasks.sandbox.runner import ProgramTest, map_on_cores, passes_test
from selfjudge.tasks.scoring import find_code


class CodeTask(Task):
    """The answer found in a text is a string such as `0,2`: the numbers of the passed tests; empty if none passes."""

    checkable = True
    prelude = ""

    def tests(self, row: Row) -> list[ProgramTest]:
        raise NotImplementedError

    def needs(self, row: Row) -> str:
        """Words of the block that is the program: one that defines what the tests call, not an example of its use."""
        return "def "

    def gold(self, row: Row) -> str | None:
        return ",".join(map(str, range(len(self.tests(row)))))

    def extract(self, row: Row, text: str) -> str | None:
        return self.extract_many([row], [text])[0]

    def extract_many(self, rows: Sequence[Row], texts: Sequence[str]) -> list[str | None]:
        codes = [find_code(text, self.needs(row)) for row, text in zip(rows, texts, strict=True)]
        jobs = [
            (i, code, number, test)
            for i, (row, code) in enumerate(zip(rows, codes, strict=True))
            if code is not None
            for number, test in enumerate(self.tests(row))
        ]
        # a text that occurs twice runs once, and all tests of all texts share the cores
        wanted = list(dict.fromkeys((code, test) for _, code, _, test in jobs))
        passes = dict(zip(wanted, map_on_cores(self._passes, wanted), strict=True))
        passed: list[list[int]] = [[] for _ in rows]
        for i, code, number, test in jobs:
            if passes[code, test]:
                passed[i].append(number)
        return [None if code is None else ",".join(map(str, p)) for code, p in zip(codes, passed, strict=True)]

    def _passes(self, job: tuple[str, ProgramTest]) -> bool:
        return passes_test(*job, prelude=self.prelude, allow_unsafe=self.allow_unsafe)

    def is_scorable(self, row: Row, answer: str | None) -> bool:
        """A program that passes no test has nothing to preserve: any other that fails would equal it."""
        return bool(answer)

    def rate(self, row: Row, answer: str | None) -> dict[str, float]:
        passed = len(answer.split(",")) if answer else 0
        tests = len(self.tests(row))
        return {"pass_rate": float(passed == tests), "tests_passed": passed / tests}


_IDS = {"test": range(11, 511), "validation": range(511, 601), "train": range(601, 975)}


class Mbpp(CodeTask, name="mbpp", columns={"task_id": int, "text": str, "test_list": list[str]}):
    """Short Python functions from a sentence and a test (Austin et al. 2021), with the authors' splits."""

    def rows(self, split: str) -> list[Row]:
        return [row for row in super().rows(split) if row["task_id"] in _IDS[split]]

    def prompt(self, row: Row) -> str:
        return f"{row['text']}\nYour code should pass this test:\n{row['test_list'][0]}"

    def tests(self, row: Row) -> list[ProgramTest]:
        setup = row.get("test_setup_code") or ""
        return [ProgramTest("assert", f"{setup}\n{test}") for test in row["test_list"]]


class LiveCodeBench(
    CodeTask, name="livecodebench", columns={"question_id": str, "question_content": str, "starter_code": str}
):
    """Programming contests (Jain et al. 2025). 679 of 880 problems, public tests only.

    Passing the public tests is easier than the benchmark's own measure: figures are not comparable with published ones.
    """

    ask: str
    stdin: str
    call: str

    def rows(self, split: str) -> list[Row]:
        """The hash of a problem's name decides its split: the same whatever other problems are at hand."""
        files = ("release_v1_public_tests.jsonl", "derived_v5_window_279_sample_tests.jsonl")
        read = self.load_from_hub("test") if self.folder is None else [r for file in files for r in self.load(file, "")]
        rows = [self._row(row) for row in read]
        in_test = [sha256(row["question_id"].encode()).digest()[0] % 4 == 0 for row in rows]
        return [row for row, test in zip(rows, in_test, strict=True) if split == "all" or test == (split == "test")]

    def load_from_hub(self, split: str) -> list[Row]:
        """All 880 problems of release 5; read as plain files, for `datasets` runs no loading scripts any more."""
        files = [f"hf://datasets/livecodebench/code_generation_lite/test{number}.jsonl" for number in ("", 2, 3, 4, 5)]
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
        how = self.call.format(row["starter_code"]) if row["starter_code"] else self.stdin
        return f"{self.ask}\n\nQuestion: {row['question']}\n\n{how}"

    def needs(self, row: Row) -> str:
        return f"def {row['function']}" if row["function"] else ""

    def tests(self, row: Row) -> list[ProgramTest]:
        function = row["function"] or ""
        kind: Literal["call", "stdin"] = "call" if function else "stdin"
        return [ProgramTest(kind, test["input"], test["output"], function) for test in row["tests"]]
