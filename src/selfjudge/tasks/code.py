"""Base of the tasks that ask for a program: its answer is the set of tests that it passes."""

from __future__ import annotations

from collections.abc import Sequence

from selfjudge.tasks.base import Row, Task
from selfjudge.tasks.sandbox.runner import Limits, ProgramTest, map_on_cores, passes_test
from selfjudge.tasks.scoring.answers import find_code


class CodeTask(Task):
    """The answer found in a text is a string such as `0,2`: the numbers of the passed tests; empty if none passes."""

    checkable = True
    runs_programs = True
    limits = Limits()
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
        return passes_test(*job, prelude=self.prelude, limits=self.limits, allow_unsafe=self.allow_unsafe)

    def is_scorable(self, row: Row, answer: str | None) -> bool:
        """A program that passes no test has nothing to preserve: any other that fails would equal it."""
        return bool(answer)

    def rate(self, row: Row, answer: str | None) -> dict[str, float]:
        passed = len(answer.split(",")) if answer else 0
        tests = len(self.tests(row))
        return {"pass_rate": float(passed == tests), "tests_passed": passed / tests}
