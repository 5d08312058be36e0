"""The OpenAI-compatible server, started by the short form and driven by the real client."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import GAMMA, fetched, served
from openai import OpenAI

from browser import CHROMIUM, Browser
from selfjudge.decoding.rule_parser import RuleRequest
from selfjudge.integrations.server.playground import FACTS, MIDDLEWARE
from selfjudge.integrations.vllm.approval import COUNTERS
from selfjudge.integrations.vllm.config import MULTIPROCESS
from selfjudge.integrations.vllm.serve import command

QUESTION = [{"role": "user", "content": "Why is the sky blue?"}]
FLAGS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "8", "--generation-config", "vllm")  # fmt: skip


@pytest.fixture(scope="module")
def address(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "metrics").mkdir()
    flags = ["--middleware", MIDDLEWARE, *FLAGS]
    own = RuleRequest(quality=0.5, judge=str(small / "judge"), strict_start=0, strict_code=False)
    flags += ["--served-model-name", "small"]
    asked = command(str(small / "target"), str(small / "draft"), own, gamma=GAMMA, more=flags)
    facts = json.dumps({"backend": "vllm", "rule": "judged", "gamma": GAMMA, "judge": True})
    with served(asked, folder, **{MULTIPROCESS: str(folder / "metrics"), FACTS: facts}) as url:
        yield url


@pytest.fixture(scope="module")
def client(address: str) -> OpenAI:
    return OpenAI(base_url=f"{address}/v1", api_key="none")


def ask(client: OpenAI, **asked: object) -> str:
    extra = {"extra_body": {"vllm_xargs": asked}} if asked else {}
    reply = client.chat.completions.create(model="small", messages=QUESTION, temperature=0, max_tokens=24, **extra)
    return str(reply.choices[0].message.content)


def counters(address: str) -> dict[str, float]:
    """The judge's counters as `/metrics` shows them."""
    found = {}
    for line in (fetched(f"{address}/metrics") or "").splitlines():
        name, _, value = line.rpartition(" ")
        for counter in COUNTERS:
            if name.startswith(f"selfjudge:{counter}_total"):
                assert 'model_name="small"' in name
                found[counter] = float(value)
    return found


def test_judged_and_lossless_requests_share_a_server(client: OpenAI) -> None:
    judged, lossless, always = (
        ask(client),
        ask(client, selfjudge='{"off": true}'),
        ask(client, selfjudge='{"theta": 0}'),
    )
    assert len({judged, lossless, always}) == 3
    assert ask(client, selfjudge='{"theta": 1.0}') == lossless
    assert ask(client, selfjudge='{"quality": 0.5}') == judged
    assert ask(client, selfjudge="nonsense") == lossless
    streamed = client.chat.completions.create(
        model="small", messages=QUESTION, temperature=0, max_tokens=24, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == judged


def test_the_counters_are_among_the_metrics(client: OpenAI, address: str) -> None:
    before = counters(address)
    ask(client, selfjudge='{"theta": 0}')
    after = before
    for _ in range(300):  # the worker reports when it has nothing else to do
        after = counters(address)
        if after.get("tokens", 0) >= before.get("tokens", 0) + 23:
            break
        time.sleep(0.5)
    new = {name: after[name] - before.get(name, 0) for name in COUNTERS}
    assert new["tokens"] == new["cycles"] * (GAMMA + 1) >= 23
    assert new["judged_tokens"] > 0
    assert new["cycles"] <= new["aligned_tokens"] < new["tokens"]
    assert "vllm:spec_decode_num_accepted_tokens_total" in (fetched(f"{address}/metrics") or "")


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine (Debian: apt-get install chromium)")
def test_the_playground_streams_both_answers(address: str, client: OpenAI, tmp_path: Path) -> None:
    """In a browser, before the real server: the lossless answer beside the judged one, each as the API says it."""
    browser = Browser(tmp_path)
    try:
        browser.open(f"{address}/")
        browser.wait("document.getElementById('server').textContent.includes('vLLM')")
        browser.run("document.getElementById('length').value = 24")
        browser.run("document.querySelector('[name=measure][value=quality]').click()")
        browser.run("document.getElementById('amount').value = 0.5")
        asked = browser.run("JSON.stringify(chosen())")
        browser.run(f"document.getElementById('question').value = {json.dumps(QUESTION[0]['content'])}")
        browser.run("document.getElementById('question').focus()")
        browser.press("Enter")
        browser.wait("state.running === null && document.querySelectorAll('.card').length === 2")
        shown = browser.run("[...document.querySelectorAll('.card .text')].map(e => e.textContent)")
        judged = browser.run(
            "[...document.querySelectorAll('.card')].map(c => c.querySelectorAll('.token.judge').length)"
        )
        assert (
            browser.run("[...document.querySelectorAll('.card .error')].map(e => e.textContent).filter(t => t)") == []
        )
        assert browser.complaints == []
    finally:
        browser.close()
    assert shown == [ask(client, selfjudge='{"off": true}'), ask(client, selfjudge=asked)]
    assert judged[0] == 0
    assert judged[1] > 0


def test_the_command_names_the_checkpoints_of_the_pair() -> None:
    words = command("smollm2-135m", None, RuleRequest(theta="F"), gamma=2, more=["--tensor-parallel-size", "2"])
    model = Path(words[words.index("--model") + 1])
    assert (model / "config.json").is_file()
    assert words[-2:] == ["--tensor-parallel-size", "2"]
