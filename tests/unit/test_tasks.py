"""Tasks: their files, splits and prompts; on made-up data always, on the published data where it is at hand."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from selfjudge.errors import SelfJudgeError
from selfjudge.tasks import NAMES, Task, task

MADE_UP: dict[str, dict[str, list[dict[str, Any]]]] = {
    "gsm8k": {
        "train.jsonl": [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(5)],
        "test.jsonl": [{"question": f"What is {n} − 1?", "answer": f"#### {n - 1}"} for n in range(4)],
    },
    "mbpp": {
        "mbpp.jsonl": [
            {"task_id": n, "text": f"Write f{n}.", "code": "", "test_list": [f"assert f{n}() == {n}", "assert False"]}
            for n in (1, 10, 11, 510, 511, 600, 601, 974, 975)
        ]
    },
    "dolly": {
        "databricks-dolly-15k.sha256-sorted.jsonl": [
            {"instruction": f"Say {n % 1010}.", "context": "  " if n % 2 else f"Context {n % 1010}.", "response": "", "category": ""}
            for n in range(1030)
        ]
    },
    "cnn_dailymail": {"test_first500.jsonl": [{"id": f"a{n}", "article": f"Story {n}.", "highlights": ""} for n in range(3)]},
}  # fmt: skip


def write(folder: Path, *, zipped: bool) -> Path:
    for name, files in MADE_UP.items():
        (folder / name).mkdir(parents=True)
        for file, rows in files.items():
            content = "\n".join(json.dumps(row) for row in rows).encode() + b"\n\n"
            path = folder / name / (f"{file}.gz" if zipped else file)
            path.write_bytes(gzip.compress(content) if zipped else content)
    return folder


@pytest.fixture
def made_up(tmp_path: Path) -> Path:
    return write(tmp_path / "data", zipped=False)


@pytest.fixture(params=NAMES)
def published(request: pytest.FixtureRequest) -> Task:
    folder = Path(os.environ.get("SELFJUDGE_DATA") or Path(__file__).parents[3] / "shared" / "data")
    if not (folder / request.param).is_dir():
        pytest.skip(f"no data in {folder}")
    return task(request.param, folder)


@pytest.mark.parametrize("name", NAMES)
def test_plain_and_gzipped_files_are_the_same(tmp_path: Path, name: str) -> None:
    plain = task(name, write(tmp_path / "plain", zipped=False))
    zipped = task(name, write(tmp_path / "zipped", zipped=True))
    for split in plain.splits:
        rows = plain.examples(split)
        assert rows
        assert rows == zipped.examples(split)
        assert len({row["id"] for row in rows}) == len(rows)
        assert plain.examples(split, 2) == rows[:2]


def test_prompts(made_up: Path) -> None:
    first = {name: task(name, made_up).examples("test")[0] for name in NAMES}
    asked = {name: task(name, made_up).prompt(row) for name, row in first.items()}
    assert asked == {
        "gsm8k": 'What is 0 − 1?\nReason step by step, then end with "The final answer is [answer]".',
        "mbpp": "Write f11.\nYour code should pass this test:\nassert f11() == 11",
        "dolly": "Say 30.\n\nContext 30.",
        "cnn_dailymail": "Summarize the following article in a few sentences.\n\nStory 0.",
    }
    assert task("dolly").prompt({"instruction": "Sing.", "context": " "}) == "Sing."


def test_the_authors_splits_of_mbpp(made_up: Path) -> None:
    found = {split: [row["task_id"] for row in task("mbpp", made_up).examples(split)] for split in task("mbpp").splits}
    assert found == {"test": [11, 510], "validation": [511, 600], "train": [601, 974]}


def test_dolly_trains_on_nothing_that_its_test_asks(made_up: Path) -> None:
    one = task("dolly", made_up)
    train, test = one.examples("train"), one.examples("test")
    assert len(test) == 1000
    assert [row["instruction"] for row in train] == [
        f"Say {n}." for n in range(20, 30)
    ]  # 0 … 19 occur again at the end


def test_the_folder_comes_from_the_environment(made_up: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SELFJUDGE_DATA", str(made_up))
    assert len(task("gsm8k").examples("train")) == 5
    assert task("gsm8k", made_up / "elsewhere").data == made_up / "elsewhere"


def _corrupt(folder: Path) -> None:
    content = bytearray((folder / "gsm8k" / "test.jsonl.gz").read_bytes())
    content[20:40] = b"\xff" * 20
    (folder / "gsm8k" / "test.jsonl.gz").write_bytes(content)


def _truncated(folder: Path) -> None:
    path = folder / "gsm8k" / "test.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-20])


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda data: task("no-such-task", data), "unknown task 'no-such-task'; tasks are: gsm8k"),
        (lambda data: task("gsm8k", data).examples("validation"), "no split 'validation'; it has: train, test"),
        (lambda data: task("cnn_dailymail", data).examples("train"), "no split 'train'"),
        (lambda data: task("gsm8k", data / "nowhere").examples("test"), "nowhere/gsm8k/test.jsonl or"),
        (lambda data: task("gsm8k").examples("test"), "--data DIR or set SELFJUDGE_DATA"),
        (lambda data: [_truncated(data), task("gsm8k", data).examples("test")], "cannot read"),
        (lambda data: [_corrupt(data), task("gsm8k", data).examples("test")], "cannot read"),
        (
            lambda data: [(data / "gsm8k" / "test.jsonl").write_text('{"a": 1}\n{"b"'), task("gsm8k", data).examples("test")],
            "cannot read",
        ),
        (lambda data: [(data / "gsm8k" / "test.jsonl").write_bytes(b"\xff\xfe"), task("gsm8k", data).examples("test")], "cannot read"),
    ],
)  # fmt: skip
def test_refusals(ask: Callable[[Path], object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SELFJUDGE_DATA", raising=False)
    folder = write(tmp_path / "data", zipped=True)
    with pytest.raises(SelfJudgeError, match=message) as caught:
        ask(folder)
    assert "\n" not in str(caught.value)


def test_published_rows(published: Task) -> None:
    prompts: dict[str, set[str]] = {}
    ids: list[str] = []
    for split in published.splits:
        rows = published.examples(split)
        assert len(rows) >= 90
        ids += [row["id"] for row in rows]
        prompts[split] = {published.prompt(row) for row in rows}
        assert all(text.strip() for text in prompts[split])
    assert len(set(ids)) == len(ids)
    for split, asked in prompts.items():
        assert split == "test" or not asked & prompts["test"]
