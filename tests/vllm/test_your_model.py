"""The commands of docs/vllm.md's path, read from the page, on a tiny target: its name and the counts alone differ."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from engines import call, served
from openai import OpenAI

from selfjudge.models.pull import checkpoint_folder
from selfjudge.store import read_json

PAGE = Path(__file__).parents[2] / "docs" / "vllm.md"
ENGINE = {"enforce_eager": True, "max_model_len": 512, "max_num_seqs": 8}
SMALLER = {
    "doctor": [],
    "distill": [
        "--prompts", "others.jsonl:8", "--max-new-tokens", "16", "--held-out", "2", "--steps", "2", "--batch-tokens", "256",
    ],
    "bench": ["--limit", "1", "--max-new-tokens", "12", "--repeats", "1"],
    "tune": [
        "--epsilon", "0.9", "--limit", "10", "--max-new-tokens", "6", "--gamma", "3",
        "--engine-options", json.dumps(ENGINE),
    ],
    "serve": ["--vllm", "--enforce-eager --max-model-len 512 --max-num-seqs 8"],
    "label": ["--max-new-tokens", "160", "--calibrate-prompts", "3"],
    "train": [],
}  # fmt: skip
"""What is added to a command, so that a CPU can do it."""
FIRST = 5
"""Commands of the path's first block; the second makes a judge."""


def commands(model: str) -> list[list[str]]:
    """The words of the path's commands, in their order, with a folder as `MODEL`."""
    (path,) = re.findall(r"^## The path\n(.*?)^## ", PAGE.read_text(), re.M | re.S)
    blocks = re.findall(r"^```\n(.*?)^```", path, re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    assert sum(line.startswith("MODEL=") for line in lines) == 1
    found = [shlex.split(line, comments=True) for line in lines if line.startswith("selfjudge ")]
    other = {"$MODEL": model, "self:2000": "self:6"}
    return [[other.get(word, word) for word in words[1:]] + SMALLER[words[1]] + families(words) for words in found]


def families(words: list[str]) -> list[str]:
    """Options of `tune` for one family of rules, and the judge's."""
    return ["--families", "margin,judged" if "--judge" in words else "margin"] if words[1] == "tune" else []


def follow(model: str, folder: Path, *, fresh: bool = False) -> str:
    """Run the page's first block, from a target to a server, in a folder: what the server said."""
    said = ""
    rows: list[dict[str, Any]] = [{"prompt": f"What is {i} + {i + 3}?", "answer": str(2 * i + 3)} for i in range(40)]
    for name, question in (("mine", "What is"), ("others", "How much is")):  # a draft must not have seen what tune asks
        asked_of = ({**row, "prompt": row["prompt"].replace("What is", question)} for row in rows)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked_of))
    for words in commands(model)[:FIRST]:
        if words[0] == "serve":
            with served(words, folder, fresh=fresh) as address:
                client = OpenAI(base_url=f"{address}/v1", api_key="none")
                (served_model,) = client.models.list().data
                asked: Any = [{"role": "user", "content": "What is 2 + 2?"}]
                reply = client.chat.completions.create(model=served_model.id, messages=asked, max_tokens=8)
                said = reply.choices[0].message.content or ""
        else:
            call(words, folder)
    return said


def test_the_pages_commands_lead_from_a_target_to_a_server(small: Path, tmp_path: Path) -> None:
    assert follow(str(small / "target"), tmp_path)
    assert read_json(tmp_path / "tuned" / "recipe.json")["engine"] == "vllm"


@pytest.mark.slow
def test_a_judge_of_ones_own_is_tried_too(tmp_path: Path) -> None:
    """All of the page, on the embedded target."""
    target = str(checkpoint_folder("smollm2-135m"))
    assert follow(target, tmp_path, fresh=True)
    for words in commands(target)[FIRST:]:
        call(words, tmp_path)
    assert read_json(tmp_path / "tuned-judge" / "recipe.json")["engine"] == "vllm"
    tried = read_json(tmp_path / "tuned-judge" / "certificate.json")["candidates"]
    assert any(row["family"] == "judged" and row["n_used"] for row in tried)


def test_the_path_tunes_and_serves_inside_vllm() -> None:
    found = commands("MODEL")
    names = [words[0] for words in found]
    assert (names[:FIRST], names[FIRST:]) == (
        ["doctor", "distill", "bench", "tune", "serve"],
        ["label", "train", "tune"],
    )
    for words in found:
        if words[0] in ("tune", "serve"):
            assert words[1:3] == ["--backend", "vllm"]
