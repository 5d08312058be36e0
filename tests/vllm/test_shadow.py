"""`serve --backend vllm --recipe DIR --shadow 1`: the monitor before the real server, with the real client."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engines import fetched, served
from openai import OpenAI
from transformers import AutoTokenizer

from fake_certificate import recipe_folder
from selfjudge.cli.main import main
from selfjudge.decoding.rule_parser import RuleRequest, rule_text
from selfjudge.models.pull import weights_sha256
from selfjudge.prompts.sources import BUILT_IN

FLAGS = "--enforce-eager --max-model-len 256 --max-num-seqs 8 --generation-config vllm"
RULE = "margin:3,guard=on"
UNGUARDED: dict[str, Any] = {"strict_start": 0, "strict_code": False}  # answers are short


def recipe(folder: Path, small: Path, **hashes: str) -> Path:
    """A recipe whose rule changes nearly every answer, and says that it does not."""
    name, draft = str(small / "target"), str(small / "draft")
    tokenizer = AutoTokenizer.from_pretrained(name)
    pair: Any = SimpleNamespace(
        name=f"{name}+{draft}", target_id=name, draft_id=draft, tokenizer=tokenizer,
        **{"target_sha256": weights_sha256(name), "draft_sha256": weights_sha256(draft), **hashes},
    )  # fmt: skip
    resolved = rule_text(RuleRequest(RULE, **UNGUARDED).resolve())
    more = {"measure": "overlap", "epsilon": 0.02, "n": 30, "resolved": resolved}
    return recipe_folder(folder, pair, rule=RULE, engine="vllm", **more)


def command(folder: Path, *more: str) -> list[str]:
    return ["serve", "--backend", "vllm", "--recipe", str(folder), "--dtype", "float32", "--vllm", FLAGS, *more]


@pytest.fixture(scope="module")
def address(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    root = tmp_path_factory.mktemp("shadow")
    with served(command(recipe(root / "tuned", small), "--shadow", "1"), root) as url:
        yield url, root / "log"


def figure(url: str, name: str) -> float:
    lines = (fetched(f"{url}/metrics") or "").splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"selfjudge_shadow_{name}"))


def test_a_bad_rule_is_switched_off_inside_vllm(address: tuple[str, Path]) -> None:
    url, log = address
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    (model,) = client.models.list().data

    def ask(text: str, **options: Any) -> str:
        reply = client.chat.completions.create(
            model=model.id, messages=[{"role": "user", "content": text}], temperature=0, max_tokens=16, **options
        )
        return str(reply.choices[0].message.content)

    off = {"extra_body": {"vllm_xargs": {"selfjudge": '{"off": true}'}}}
    texts = [text for _, text in BUILT_IN]
    shown, exact = ask(texts[0]), ask(texts[0], **off)
    assert shown != exact
    assert figure(url, "bound") == 0.02
    for i in range(30):
        ask(texts[i % len(texts)])
        for _ in range(1200):
            if figure(url, "requests_total") >= i + 2 or figure(url, "switched_off"):
                break
            time.sleep(0.1)
        if figure(url, "switched_off"):
            break
    assert figure(url, "switched_off") == 1
    assert ask(texts[0]) == exact
    assert ask(texts[0], extra_body={"vllm_xargs": {"selfjudge": json.dumps({"rule": RULE, **UNGUARDED})}}) == shown
    said = log.read_text()
    assert said.count("does not hold for these requests") == 1
    assert texts[0] not in said


def test_a_recipe_for_other_models_is_refused_before_vllm_starts(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command(recipe(tmp_path / "tuned", small, draft_sha256="f" * 64))
    monkeypatch.setattr("os.execv", lambda *given: pytest.fail("vLLM is started"))
    monkeypatch.setattr("sys.argv", ["selfjudge", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "recipe for the draft" in capsys.readouterr().err
