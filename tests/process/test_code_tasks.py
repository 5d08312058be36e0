"""Tasks that ask for programs: solutions run in the sandbox."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fake_tasks import at_hand, write
from selfjudge.tasks import load_task


@pytest.fixture
def made_up(tmp_path: Path) -> Path:
    return write(tmp_path / "data", zipped=False)


def test_published_code_passes() -> None:
    published = at_hand("mbpp")
    rows = published.examples("test", 4)
    fenced = [f"```python\n{row['code']}\n```" for row in rows]
    assert [published.score(row, text) for row, text in zip(rows, fenced, strict=True)] == [
        {"pass_rate": 1.0, "tests_passed": 1.0}
    ] * 4


def test_programs_that_solve(made_up: Path) -> None:
    one = load_task("livecodebench", made_up, allow_unsafe=True)
    call = next(row for row in one.examples("all") if row["function"])
    stdin = next(row for row in one.examples("all") if not row["function"])
    n = int(call["tests"][0]["output"]) - 1
    good = f"```python\nclass Solution:\n    def add(self, a: List[int]) -> int:\n        return sum(a) + {n}\n```"
    half = "```python\nprint(6 if input() == '3' else 1)\n```"
    rows, texts = (
        [call, stdin, stdin, stdin, stdin],
        [good, "```python\nprint(2 * int(input()))\n```", half, "```\nno\n```", "?"],
    )
    answers = one.extract_many(rows, texts)
    assert answers == ["0", "0,1", "0", "", None]
    assert [one.is_scorable(row, answer) for row, answer in zip(rows, answers, strict=True)] == [
        True,
        True,
        True,
        False,
        False,
    ]
    assert [one.score(row, text) for row, text in zip(rows, texts, strict=True)] == [
        {"pass_rate": rate, "tests_passed": share} for rate, share in ((1, 1), (1, 1), (0, 0.5), (0, 0), (0, 0))
    ]
    assert not one.same(stdin, answers[1], answers[2])
    assert one.gold(stdin) == "0,1"
    mbpp = load_task("mbpp", made_up, allow_unsafe=True)
    row = {**mbpp.examples("test")[0], "test_setup_code": "limit = 11"}
    assert mbpp.extract(row, "```python\ndef f11():\n    return limit\n```") == "0"


def test_a_users_own_checks_run_in_the_sandbox(tmp_path: Path) -> None:
    rows = [
        {"prompt": "w1", "check": "import json\nassert len(json.loads(answer)) == 2"},
        {"prompt": "w2", "check": "raise SystemExit(0)"},  # ends before its test is over: not passed
        {"prompt": "w3", "answer": "7"},
        {"prompt": "w4", "check": None},
    ]
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    mine = load_task(f"file:{file}", allow_unsafe=True)
    loaded = mine.examples("all")
    assert mine.extract_many(loaded, ["[1, 2]", "", "the answer is 7", "?"]) == ["passed", "failed", "7", None]
    assert mine.extract_many(loaded[:1] * 2, ["'''\"\\", "[1]"]) == ["failed", "failed"]
    texts = ["[1, 2]", "", "the answer is 8", "?"]
    scores = [mine.score(row, text) for row, text in zip(loaded, texts, strict=True)]
    assert scores == [{"accuracy": 1.0}, {"accuracy": 0.0}, {"accuracy": 0.0}, {}]
    assert [mine.is_scorable(row, "passed") for row in loaded] == [True, True, True, False]
