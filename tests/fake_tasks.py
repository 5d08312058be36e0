"""Made-up data files of every task, and the published ones where they are at hand."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from selfjudge.tasks import Task, load_task

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
    "cnn_dailymail": {"test_first500.jsonl": [{"id": f"a{n}", "article": f"Story {n}.", "highlights": f"The story {n}."} for n in range(3)]},
    "math500": {
        "test.jsonl": [{"problem": f"What is {n}/2?", "answer": f"\\frac{{{n}}}{{2}}", "unique_id": f"test/{n}.json"} for n in range(3)]
    },
    "mmlu": {
        f"{split}.jsonl": [
            {"subject": "bird_watching", "question": f"{split} {n}?", "choices": ["a", "b", "c", "d"], "answer": n % 4}
            for n in range(6)
        ]
        for split in ("dev", "test")
    },
    "livecodebench": {
        "release_v1_public_tests.jsonl": [
            {
                "question_id": f"q{n}", "question_content": f"Add {n}.", "starter_code": "class Solution:\n    def add(self, a: List[int]) -> int:\n        ",
                "public_test_cases": json.dumps([{"input": "[1]", "output": f"{n + 1}", "testtype": "functional"}]), "metadata": '{"func_name": "add"}',
            }
            for n in range(20)
        ],
        "derived_v5_window_279_sample_tests.jsonl": [
            {
                "question_id": f"r{n}", "question_content": f"Double {n}.", "starter_code": "", "func_name": None,
                "sample_tests_parsed": [{"input": "3", "output": "6", "testtype": "stdin"}, {"input": "4", "output": "8", "testtype": "stdin"}],
            }
            for n in range(20)
        ],
    },
}  # fmt: skip


def write(folder: Path, *, zipped: bool) -> Path:
    for name, files in MADE_UP.items():
        (folder / name).mkdir(parents=True)
        for file, rows in files.items():
            content = "\n".join(json.dumps(row) for row in rows).encode() + b"\n\n"
            path = folder / name / (f"{file}.gz" if zipped else file)
            path.write_bytes(gzip.compress(content) if zipped else content)
    return folder


def at_hand(name: str) -> Task:
    """A task with its published data, in SELFJUDGE_DATA or in shared/data beside the checkout; skips if there is none."""
    folder = Path(os.environ.get("SELFJUDGE_DATA") or Path(__file__).parents[2] / "shared" / "data")
    if name != "arithmetic" and not (folder / name).is_dir():
        pytest.skip(f"no data in {folder}")
    return load_task(name, folder)
