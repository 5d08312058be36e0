"""The server as its clients meet it: a real process, OpenAI's own client, raw bytes, signals."""

from __future__ import annotations

import asyncio
import dataclasses
import http.client
import json
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fake_certificate import recipe_folder
from selfjudge.decoding.rule_parser import RuleRequest
from selfjudge.decoding.rules import EXACT, SpeculativeSampling
from selfjudge.decoding.sampling import Sampling
from selfjudge.decoding.text import generate
from selfjudge.errors import SelfJudgeError
from selfjudge.integrations.server.completions import Updates
from selfjudge.integrations.server.config import listen
from selfjudge.integrations.server.jobs import Update
from selfjudge.judge.model import Judge
from selfjudge.models.pair import Pair
from selfjudge.tune.recipe import Recipe
from selfjudge.types import Generation, Piece
from servers import WINDOW, Server, save


@pytest.fixture(scope="module")
def pair(endless: list[str]) -> Pair:
    return Pair.load(endless[1], endless[3], device="cpu")


@pytest.fixture(scope="module")
def judge(endless: list[str]) -> Judge:
    return Judge.from_pretrained(endless[5])


@pytest.fixture(scope="module")
def server(start: Callable[..., Server], endless: list[str]) -> Server:
    return start(*endless, "--max-batch", "4", "--max-tokens", "2000", "--max-body", "100000")


def words(seed: int, count: int) -> str:
    return " ".join(f"w{(11 * seed + 7 * i) % 50}" for i in range(count))


def ask(server: Server, prompt: str, **options: Any) -> Any:
    options = {"max_tokens": 40, "temperature": 0, **options}
    return server.client().chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": prompt}], **options
    )


def agrees(answer: Any, expected: Generation) -> None:
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].finish_reason == ("length" if expected.finish == "length" else "stop")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
        expected.prompt_tokens,
        len(expected.tokens),
    )
    assert answer.selfjudge["mean_accepted_length"] == expected.mean_accepted_length
    assert answer.selfjudge["judged_share"] == expected.judged_share


def expected(pair: Pair, judge: Judge, prompt: str, how: dict[str, Any], **options: Any) -> Generation:
    """What `generate` says, by the field `selfjudge` of the request."""
    how = dict(how)
    gamma = how.pop("gamma", 3)
    name = "exact" if how.get("off") or gamma == 0 else how.get("rule", "judged")
    rule = RuleRequest(name, theta=how.get("theta"), quality=how.get("quality")).resolve(pair, judge)
    return generate(pair, [prompt], rule, gamma=gamma, max_new_tokens=options.pop("max_new_tokens", 40), **options)[0]


HOW: list[dict[str, Any]] = [
    {}, {"off": True}, {"theta": "F"}, {"theta": 0.2}, {"quality": 0.9}, {"rule": "topk:3"}, {"gamma": 1},
    {"off": True, "gamma": 0}, {"rule": "exact", "gamma": 5}, {"gamma": 0}, {"rule": "margin:1", "gamma": 0},
]  # fmt: skip


def test_greedy_answers_are_those_of_generate(server: Server, pair: Pair, judge: Judge) -> None:
    shares = []
    for i, how in enumerate(HOW):
        answer = ask(server, words(i, 3 + i), extra_body={"selfjudge": how})
        agrees(answer, expected(pair, judge, words(i, 3 + i), how))
        shares.append(answer.selfjudge["judged_share"])
    assert shares[1] == 0 < shares[0]
    assert ask(server, "w1").selfjudge["theta"] == 0.6  # R is what serving defaults to
    (model,) = server.send("GET", "/v1/models")[2]["data"]
    assert (model["selfjudge"]["uses_judge"], model["selfjudge"]["theta"]) == (True, 0.6)
    assert any(re.fullmatch(r"requests that name no rule: judged, θ = 0\.6, γ = \w+\n", line) for line in server.log)
    assert "ready\n" in server.log


def test_lossless_and_relaxed_requests_side_by_side(server: Server, pair: Pair, judge: Judge) -> None:
    """Two of every choice of rule at once, more choices than batches and more requests than places."""
    requests = [(words(i, 2 + i % 9), HOW[i % len(HOW)]) for i in range(2 * len(HOW))]

    async def all_at_once() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            return await asyncio.gather(*(
                client.chat.completions.create(
                    model="tiny", messages=[{"role": "user", "content": prompt}], max_tokens=10 + i,
                    extra_body={"selfjudge": how},
                )
                for i, (prompt, how) in enumerate(requests)
            ))  # fmt: skip

    for i, (answer, (prompt, how)) in enumerate(zip(asyncio.run(all_at_once()), requests, strict=True)):
        agrees(answer, expected(pair, judge, prompt, how, max_new_tokens=10 + i))
    server.wait_until_idle()


def test_sampling_follows_the_seed(server: Server, pair: Pair) -> None:
    options = {"temperature": 0.9, "top_p": 0.95, "extra_body": {"selfjudge": {"off": True}}}
    answer = ask(server, "w3 w4", seed=7, **options)
    rule = SpeculativeSampling(Sampling(0.9, 0.95))
    agrees(answer, generate(pair, ["w3 w4"], rule, gamma=3, max_new_tokens=40, seed=7)[0])
    assert ask(server, "w3 w4", seed=8, **options).choices[0].message.content != answer.choices[0].message.content
    free = {ask(server, "w3 w4", **options).choices[0].message.content for _ in range(3)}
    assert len(free) == 3  # without a seed every answer is another
    assert ask(server, "w3", temperature=0.9).selfjudge["rule"] == "judged"  # on top of sampling


def test_streams_carry_the_same_text_and_usage(server: Server, pair: Pair, judge: Judge) -> None:
    made = expected(pair, judge, words(4, 6), {})
    chunks = list(ask(server, words(4, 6), stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == made.text
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-2].selfjudge["mean_accepted_length"] == made.mean_accepted_length
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(made.tokens)
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1
    assert len(chunks) > made.cycles / 2
    without = list(ask(server, words(4, 6), stream=True))
    assert without[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_events_are_framed_as_the_version_of_http_asks(server: Server, version: str) -> None:
    body = {"prompt": words(3, 4), "max_tokens": 30, "stream": True, "selfjudge": {"off": True, "gamma": 0}}
    text = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nhost: localhost\r\ncontent-length: {len(text)}\r\nconnection: close"
    with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
        connection.sendall(f"{head}\r\ncontent-type: application/json\r\n\r\n".encode() + text)
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    said, events = answer.split(b"\r\n\r\n", 1)
    assert (b"chunked" in said) == (version == "1.1")
    if version == "1.1":  # every chunk has the size that stands before it, and an empty one is the last
        read = b""
        while size := int(events[: (at := events.index(b"\r\n"))], 16):
            read, rest = read + events[at + 2 : at + 2 + size], events[at + 2 + size :]
            assert rest[:2] == b"\r\n"
            events = rest[2:]
        assert events == b"0\r\n\r\n"
        events = read
    *told, last = events.decode().split("\n\n")[:-1]
    assert last == "data: [DONE]"
    texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in told]
    plain = server.send("POST", "/v1/completions", {**body, "stream": False})[2]
    assert "".join(texts) == plain["choices"][0]["text"] != ""


def test_judged_tokens_on_request(server: Server, pair: Pair, judge: Judge) -> None:
    made = expected(pair, judge, words(4, 6), {"theta": "F"})
    wanted = [dataclasses.asdict(token) for token in made.judged_tokens]
    assert wanted
    assert all(0 < token["score"] <= 1 and 0 < token["target_probability"] <= 1 for token in wanted)
    body = {"selfjudge": {"theta": "F", "judged_tokens": True}}
    answer = ask(server, words(4, 6), extra_body=body)
    agrees(answer, made)
    *_, last = ask(server, words(4, 6), stream=True, extra_body=body)
    for found in (answer.selfjudge["judged_tokens"], last.selfjudge["judged_tokens"]):
        for token, other in zip(found, wanted, strict=True):
            assert token == {key: pytest.approx(value, abs=1e-5) for key, value in other.items()}
    assert "judged_tokens" not in ask(server, words(4, 6), extra_body={"selfjudge": {"theta": "F"}}).selfjudge
    off = ask(server, words(4, 6), extra_body={"selfjudge": {"off": True, "judged_tokens": True}})
    assert off.selfjudge["judged_tokens"] == []


def test_streams_say_of_every_token_where_it_comes_from(server: Server, pair: Pair, judge: Judge) -> None:
    made = expected(pair, judge, words(4, 6), {"theta": "F"})
    body = {"selfjudge": {"theta": "F", "tokens": True}}
    *chunks, last = ask(server, words(4, 6), stream=True, extra_body=body)
    told = [chunk.selfjudge for chunk in chunks[1:]]
    tokens = [token for chunk in told for token in chunk["tokens"]]
    assert [token["token"] for token in tokens] == list(made.tokens)
    assert [token["origin"] for token in tokens] == list(made.origins)
    assert "".join(token["text"] for token in tokens) == made.text
    assert [chunk["cycle"] for chunk in told] == list(range(made.cycles + 1))  # 0 is the prefill
    judged = [token for token in tokens if token["origin"] == "judge"]
    for token, other in zip(judged, made.judged_tokens, strict=True):
        assert token["target_text"] == other.target_text
        assert token["probability"] == pytest.approx(other.probability, abs=1e-5)
        assert token["probability"] < token["target_probability"]
    assert "judged_tokens" not in last.selfjudge
    assert last.selfjudge["tokens_per_second"] > 0
    assert last.selfjudge["busy"] == "" or "speeds are not reliable" in last.selfjudge["busy"]
    without = list(ask(server, words(4, 6), stream=True, extra_body={"selfjudge": {"theta": "F"}}))
    assert "".join(c.choices[0].delta.content or "" for c in without) == made.text
    assert len(without) <= len(chunks) + 1  # texts that wait for a busy client come as one


def test_completions_take_text_and_token_ids(server: Server, pair: Pair) -> None:
    client = server.client()
    (made,) = generate(pair, ["w5 w6"], gamma=3, max_new_tokens=16, raw=True)
    for prompt in ("w5 w6", ["w5 w6"], [9, 10], [[9, 10]]):
        answer = client.completions.create(
            model="tiny", prompt=prompt, temperature=0, extra_body={"selfjudge": {"off": True}}
        )
        assert answer.choices[0].text == made.text
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 16  # what OpenAI's endpoint makes where none is named
    stream = client.completions.create(
        model="tiny", prompt="w5 w6", temperature=0, stream=True, extra_body={"selfjudge": {"off": True}}
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == made.text


def test_stop_strings_also_across_chunks(server: Server, pair: Pair, judge: Judge) -> None:
    whole = expected(pair, judge, words(2, 4), {}).text
    stop = " ".join(whole.split()[9:12])  # three words come in more than one chunk
    for options in ({"stop": stop}, {"stop": ["never seen", stop]}):
        answer = ask(server, words(2, 4), **options)
        assert answer.choices[0].message.content == whole.split(stop)[0]
        assert answer.choices[0].finish_reason == "stop"
        pieces = [c.choices[0].delta.content or "" for c in ask(server, words(2, 4), stream=True, **options)]
        assert "".join(pieces) == whole.split(stop)[0]


@pytest.mark.parametrize("count", [16, pytest.param(32, marks=pytest.mark.slow)])
def test_many_streams_and_some_clients_that_go(server: Server, pair: Pair, judge: Judge, count: int) -> None:
    before = server.metric("generations_total", finish="cancelled")

    async def one(client: openai.AsyncOpenAI, i: int) -> str | None:
        how = HOW[i % 3]
        stream = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": words(i, 3 + i % 5)}], stream=True,
            max_tokens=1900 if i % 4 == 0 else 40, extra_body={"selfjudge": how},
        )  # fmt: skip
        text, chunks = "", 0
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            chunks += 1
            if i % 4 == 0 and chunks == 3:
                await stream.close()
                return None
        return text

    async def all_at_once() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            return await asyncio.gather(*(one(client, i) for i in range(count)))

    for i, text in enumerate(asyncio.run(all_at_once())):
        if i % 4:
            assert text == expected(pair, judge, words(i, 3 + i % 5), HOW[i % 3], max_new_tokens=40).text
    server.wait_until_idle()
    assert server.metric("generations_total", finish="cancelled") - before == count // 4  # their work was not done
    assert server.metric("event_loop_tasks") < 10


def test_a_client_that_goes_before_a_whole_answer(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    body = json.dumps({"messages": [{"role": "user", "content": "w1"}], "max_tokens": 2000})
    connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    server.wait_for("running", 1)
    before = server.metric("generations_total", finish="cancelled")
    connection.close()
    server.wait_until_idle()
    assert server.metric("generations_total", finish="cancelled") == before + 1


GOOD = {"messages": [{"role": "user", "content": "w1"}], "max_tokens": 3}
BAD: list[tuple[Any, str]] = [
    (b"", "JSON object"), (b"{", "JSON object"), (b"\xff\xfe\x00", "UTF-8"), (b"[" * 50_000, "nested too deep"), (b"[]", ""), (b"null", ""),
    (b'"text"', "JSON object"), (b"1" * 5_000, "too large"), ({}, "messages"), ({**GOOD, "messages": []}, "messages"),
    ({**GOOD, "messages": "w1"}, "messages"), ({**GOOD, "messages": [{"role": "tool", "content": "x"}]}, "role"),
    ({**GOOD, "messages": [{"role": "user", "content": " "}]}, "empty"),
    ({**GOOD, "messages": [{"role": "user", "content": "\ud800"}]}, "half a character"),
    ({**GOOD, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "messages.0.content.0: this model reads text alone: leave out the part of type 'image_url'"),
    ({**GOOD, "messages": [{"role": "user", "content": 5}]}, "messages.0.content: must be a valid string or a valid list"),
    ({**GOOD, "messages": [{"role": "user"}]}, "messages.0: a message needs content"),
    ({**GOOD, "messages": ["w1"]}, "messages.0: must be an object"),
    (b'{"max_tokens": 3, "messages": [{"role": "user", "content": "w1"}], "max_tokens": 4}', "the key 'max_tokens' twice"),
    (b'{"messages": [{"role": "user", "content": "w1", "content": "w2"}]}', "the key 'content' twice"),
    (b'{"messages": [{"role": "user", "content": "w1"}], "selfjudge": {"off": true, "o\\u0066f": false}}', "the key 'off' twice"),
    ({**GOOD, "selfjudge": {"price": 1e308}}, "`price` must be at most 1000"), ({**GOOD, "selfjudge": {"price": -1}}, "`price` must be at least 0"),
    ({**GOOD, "selfjudge": {"rule": "margin", "price": 1e308}}, "`price` must be at most 1000"),
    ({**GOOD, "selfjudge": {"rule": "margin:price=1001"}}, "`price` must be at most 1000"),
    ({**GOOD, "seed": 1 << 63}, "seed: must be less than"), ({**GOOD, "top_k": 1 << 31}, "top_k: must be at most 2147483647"),
    (b'{"messages": [{"role": "user", "content": "w1"}], "temperature": 1e999}', "not a finite number"),
    ({**GOOD, "max_tokens": 0}, "max_tokens"), ({**GOOD, "max_tokens": 2001}, "at most 2000"),
    ({**GOOD, "max_tokens": "3"}, "max_tokens"), ({**GOOD, "max_tokens": 10**30}, "too large"),
    ({**GOOD, "max_completion_tokens": 4}, "same limit"), ({**GOOD, "temperature": 3}, "temperature: must be at most 2"),
    ({**GOOD, "temperature": float("nan")}, "NaN, which is not a finite"), ({**GOOD, "temperature": 1e-9}, "0.01"),
    ({**GOOD, "top_p": 0}, "top_p"), ({**GOOD, "stop": [""]}, "stop"), ({**GOOD, "stop": ["x"] * 17}, "stop"),
    ({**GOOD, "stream_options": {"include_usage": True}}, "stream"), ({**GOOD, "n": 129}, "n: must be at most 128"),
    ({**GOOD, "logprobs": 1}, "logprobs"), ({**GOOD, "tools": [{"type": "function"}]}, "tools.0.function: is missing"),
    ({**GOOD, "frequency_penalty": 3}, "frequency_penalty: must be at most 2"), ({**GOOD, "no_such_field": 1}, "no_such_field"),
    ({**GOOD, "\ud800": 1}, ""), ({**GOOD, "selfjudge": {"thetta": 1}}, "thetta"), ({**GOOD, "selfjudge": {"tokens": True}}, "needs stream"),
    ({**GOOD, "selfjudge": {"theta": 2}}, "must lie in [0, 1]"), ({**GOOD, "selfjudge": {"theta": "Q"}}, "theta: must be a valid number or 'F', 'R' or 'Youden'"),
    ({**GOOD, "selfjudge": {"quality": -1}}, "quality"), ({**GOOD, "selfjudge": {"gamma": 33}}, "at most 32"),
    ({**GOOD, "selfjudge": {"gamma": 10**40}}, "too large"), ({**GOOD, "selfjudge": {"rule": "magic"}}, "unknown rule"),
    ({**GOOD, "selfjudge": {"rule": "topk:k=" + "9" * 40}}, "out of range"), ({**GOOD, "selfjudge": {"rule": ""}}, "unknown rule"),
    ({**GOOD, "selfjudge": {"rule": "relaxed:delta=nan"}}, "out of range"),
    ({**GOOD, "selfjudge": {"rule": "fly:window=3", "gamma": 3}}, "`gamma` > 3"),
    ({**GOOD, "selfjudge": {"rule": "magic", "gamma": 0}}, "unknown rule"),
    ({**GOOD, "selfjudge": {"rule": "exact", "theta": 0.5}}, "does not use a judge"),
    ({**GOOD, "selfjudge": {"rule": "judged:0.3", "theta": 0.5}}, "names a threshold already"),
    ({**GOOD, "selfjudge": {"off": True, "theta": 0.5}}, "`off` means"),
    ({**GOOD, "selfjudge": {"quality": 0.5, "theta": 0.5}}, "`quality` chooses"),
    ({**GOOD, "selfjudge": {"rule": "topk:2"}, "temperature": 0.7}, "is greedy"),
    ({**GOOD, "selfjudge": "off"}, "selfjudge: must be an object"),
]  # fmt: skip


VALIDATOR = r"function-|\w\[|should|validation|pydantic|Options|JSON decode|Errno|codec"
"""What a message would have of the validator's own words."""


def test_malformed_bodies(server: Server) -> None:
    for body, message in BAD:
        status, _, answer = server.send("POST", "/v1/chat/completions", body)
        assert status == 400, (body, answer)
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert answer["error"]["type"] == "invalid_request_error"
        assert message in answer["error"]["message"], (body, answer)
        assert not re.search(VALIDATOR, answer["error"]["message"]), answer
    for temperature in (1e-9, 0.005, 3):
        answer = server.send("POST", "/v1/chat/completions", {**GOOD, "temperature": temperature})[2]
        assert answer["error"]["param"] == "temperature"
    for body in (
        {"prompt": ""}, {"prompt": []}, {"prompt": ["w1", ""]}, {"prompt": [61]}, {"prompt": [-1]}, {"prompt": [True]},
        {"prompt": "w1", "echo": 1}, {"prompt": "w1", "logprobs": True}, {"prompt": "w1", "suffix": "w2"}, {"prompt": " "},
    ):  # fmt: skip
        status, _, answer = server.send("POST", "/v1/completions", body)
        assert status == 400, (body, answer)
        assert not re.search(VALIDATOR, answer["error"]["message"]), answer
    assert server.send("POST", "/v1/completions", {"prompt": "w1"}, {"content-type": "text/plain"})[0] == 400
    with pytest.raises(openai.BadRequestError, match="functions is not supported"):
        ask(server, "w1", extra_body={"functions": [{"name": "f"}]})
    assert server.send("GET", "/v1/chat/completions")[0] == 405
    for path in ("/nope", "/v1/responses", "/v1/embeddings"):
        status, _, answer = server.send("POST", path, GOOD)
        assert (status, "/v1/chat/completions" in answer["error"]["message"]) == (404, True)
    harmless = {"user": "me", "n": 1, "tools": [], "logprobs": False, "frequency_penalty": 0, "store": False}
    assert server.send("POST", "/v1/chat/completions", {**GOOD, **harmless})[0] == 200


def test_models(server: Server) -> None:
    client = server.client()
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    about = client.models.retrieve("tiny").selfjudge
    assert about["judge"] is about["uses_judge"] is True
    for call in (lambda: client.models.retrieve("a/b"), lambda: ask(server, "w1", extra_body={"model": "gpt-9"})):
        with pytest.raises(openai.NotFoundError, match="only 'tiny'"):
            call()


def test_a_page_whose_name_points_here_gets_no_answer(server: Server) -> None:
    for method, path, body in (("GET", "/", None), ("GET", "/v1/models", None), ("POST", "/v1/chat/completions", GOOD)):
        for name in ("evil.example", f"evil.example:{server.port}"):
            status, _, answer = server.send(method, path, body, {"host": name})
            assert (status, "--allowed-host" in answer["error"]["message"]) == (421, True)
        assert server.send(method, path, body, {"host": f"localhost:{server.port}"})[0] == 200
    assert server.metric("requests_total", status="421") == 6


def test_oversized_prompts_and_bodies(server: Server) -> None:
    status, _, answer = server.send("POST", "/v1/completions", {"prompt": "w1 " * (WINDOW + 1)})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    status, _, answer = server.send("POST", "/v1/completions", {"prompt": "w1 " * (WINDOW - 100), "max_tokens": 200})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    status, _, answer = server.send("POST", "/v1/completions", {"prompt": "w1 " * 40_000})
    assert (status, answer["error"]["code"]) == (413, "request_too_large")

    def chunks() -> Iterator[bytes]:
        for _ in range(200):
            yield b"x" * 1000

    try:  # no length is told in advance; the server stops listening when it has enough
        status, _, answer = server.send("POST", "/v1/completions", chunks(), encode_chunked=True)
    except (BrokenPipeError, ConnectionResetError):
        status = 413
    assert status == 413
    assert server.send("GET", "/health")[0] == 200


def test_health_and_metrics(server: Server) -> None:
    ask(server, "w1 w2", extra_body={"selfjudge": {"rule": "topk:5"}})
    ask(server, "w1 w2", extra_body={"selfjudge": {"off": True}})
    assert server.send("GET", "/health")[2] == {"status": "ok"}
    status, headers, text = server.send("GET", "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    for line in text.splitlines():
        assert line.startswith("# ") or float(line.rsplit(" ", 1)[1]) >= 0
    for mode in ("judged", "off"):
        assert 1 <= server.metric("mean_accepted_length", mode=mode) <= 6
        assert server.metric("requests_total", endpoint="/v1/chat/completions", status="200", mode=mode) > 0
        assert server.metric("generations_total", mode=mode) > 0
    assert server.metric("tokens_total", origin="judge", mode="judged") > 0
    assert server.metric("tokens_total", origin="judge", mode="off") == 0
    assert server.metric("time_to_first_token_seconds_count") > 0
    assert server.metric("request_seconds_count") == server.metric("generations_total")


def test_a_prompt_that_was_read_before_is_found(server: Server) -> None:
    before = server.metric("cached_prompt_tokens_total")
    prompt = [3 + 7 * i % 50 for i in range(70)]
    body = {"prompt": prompt, "max_tokens": 5, "selfjudge": {"off": True}}
    usages = [server.send("POST", "/v1/completions", body)[2]["usage"] for _ in range(2)]
    more = server.send("POST", "/v1/completions", {**body, "n": 2, "temperature": 1})[2]["usage"]
    assert [usage["prompt_tokens_details"] for usage in (*usages, more)] == [
        {"cached_tokens": 0}, {"cached_tokens": 63}, {"cached_tokens": 63},
    ]  # fmt: skip
    assert server.metric("cached_prompt_tokens_total") - before == 63 * 3


def test_a_queue_that_is_full_a_time_that_is_over_and_an_orderly_end(
    start: Callable[..., Server], endless: list[str]
) -> None:
    limits = ("--max-batch", "1", "--max-queue", "2", "--max-tokens", "4000")
    server, hasty = start(*endless, *limits), start(*endless, *limits, "--timeout", "1")

    def stream(tokens: int, server: Server = server) -> Any:
        return server.client().chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "w1"}], stream=True, max_tokens=tokens,
            extra_body={"selfjudge": {"off": True, "gamma": 0}},
        )  # fmt: skip

    running = stream(4000)
    next(running)
    server.wait_for("running", 1)
    waiting = [stream(20), stream(20)]
    server.wait_for("queue_depth", 2)
    with pytest.raises(openai.RateLimitError, match="2 requests wait") as full:
        ask(server, "w1")
    assert int(full.value.response.headers["retry-after"]) >= 1
    assert full.value.response.json()["error"]["type"] == "rate_limit_error"
    waiting[0].close()  # who waits and goes leaves the queue
    server.wait_for("queue_depth", 1)
    running.close()
    assert len("".join(c.choices[0].delta.content or "" for c in waiting[1]).split()) == 20
    server.wait_until_idle()

    slow = [stream(4000, hasty) for _ in range(2)]
    with pytest.raises(openai.APIError, match="took too long"):  # the last waits for 8,000 tokens, one a pass
        list(stream(4000, hasty))
    for one in slow:
        one.close()
    hasty.wait_until_idle()

    last = stream(300)
    next(last)
    server.process.send_signal(signal.SIGTERM)
    for _ in range(100):
        try:
            status, headers, _ = server.send("POST", "/v1/chat/completions", GOOD)
        except OSError:
            break  # it has ended already
        if status == 503:
            assert int(headers["retry-after"]) >= 1
            assert server.send("GET", "/health")[2] == {"status": "stopping"}
            break
    chunks = list(last)
    assert len("".join(c.choices[0].delta.content or "" for c in chunks).split()) == 300
    assert chunks[-1].choices[0].finish_reason == "length"
    assert server.process.wait(300) == 0
    assert not any("Traceback" in line for line in server.log)


@pytest.fixture(scope="module")
def byte_server(start: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    """Random models over bytes, whose answers are full of incomplete characters; behind a key; with little patience."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({"<eos>": 0, **{c: i + 1 for i, c in enumerate(alphabet)}}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")
    root = tmp_path_factory.mktemp("bytes")
    target, draft = (
        save(root / n, tokenizer, noise, vocab_size=257) for n, noise in (("target", 0.0), ("draft", 0.05))
    )
    options = ["--target", target, "--draft", draft, "--name", "tiny", "--max-tokens", "4000", "--grace", "0.2"]
    return start(*options, SELFJUDGE_API_KEY="s3cret-π\n")


def test_api_key_whole_characters_and_an_end_that_does_not_wait(byte_server: Server) -> None:
    server = byte_server
    for key in ("wrong", "s3cret", "S3cret-π", "s3cret-ππ"):
        status, headers, answer = server.send("GET", "/v1/models", headers={"authorization": f"Bearer {key}".encode()})
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert headers["www-authenticate"] == "Bearer"
    assert server.send("GET", "/metrics")[0] == server.send("POST", "/v1/completions", {"prompt": "x"})[0] == 401
    assert server.send("GET", "/health")[0] == 200
    with pytest.raises(openai.AuthenticationError, match="API key"):
        server.client("wrong").models.list()
    right = {"authorization": "Bearer s3cret-π".encode()}
    assert server.send("GET", "/v1/models", headers=right)[0] == 200

    halves = 0
    for seed in range(3):
        body = {"prompt": f"{seed} naïve 東京 🙂", "max_tokens": 100, "temperature": 1, "seed": seed}
        text = server.send("POST", "/v1/completions", body, right)[2]["choices"][0]["text"]
        _, _, events = server.send("POST", "/v1/completions", {**body, "stream": True}, right)
        lines = [line.removeprefix("data: ") for line in events.split("\n\n") if line]
        assert lines.pop() == "[DONE]"
        pieces = [json.loads(line)["choices"][0]["text"] for line in lines]
        assert "".join(pieces) == text
        assert not any(piece.endswith("\ufffd") for piece in pieces[:-2])  # the last token may leave one open
        halves += text.count("\ufffd")
    assert halves > 0  # there was something to get wrong

    responses = []
    for prompt in "uvwxyz":  # some answers may end by themselves before the signal is heard
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
        body = json.dumps({"prompt": prompt, "max_tokens": 4000, "stream": True, "selfjudge": {"gamma": 0}})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json", **right})
        responses.append(connection.getresponse())
    assert responses[-1].read(5) == b"data:"
    server.process.send_signal(signal.SIGTERM)
    rests = [response.read().decode() for response in responses]
    assert any("about to stop" in rest for rest in rests)
    assert not any("about to stop" in rest and "[DONE]" in rest for rest in rests)
    assert server.process.wait(300) == 0


FUZZ = settings(deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True)


@pytest.mark.slow
def test_no_request_that_follows_or_breaks_the_schema_makes_the_server_fail(server: Server) -> None:
    """The quick part has requests of our own making, below."""
    import schemathesis  # takes seconds: not in every worker

    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    seen: set[tuple[str, int]] = set()
    for found in schema.get_all_operations():
        operation = found.ok()
        modes = [schemathesis.GenerationMode.POSITIVE]
        if operation.body:
            modes.append(schemathesis.GenerationMode.NEGATIVE)
        for mode in modes:

            @given(case=operation.as_strategy(generation_mode=mode))
            @settings(FUZZ, max_examples=40)
            def one(case: schemathesis.Case) -> None:
                if isinstance(case.body, dict):
                    case.body.setdefault("max_tokens", 4)
                response = case.call(timeout=600)
                assert response.status_code < 500, response.text
                if response.status_code >= 400:
                    assert response.json()["error"]["message"]
                seen.add((case.path, response.status_code))

            one()
    assert {("/v1/completions", 400), ("/v1/chat/completions", 400), ("/health", 200), ("/metrics", 200)} <= seen
    server.wait_until_idle()


json_value = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["F", "exact", "judged"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.floats(0, 2), "top_p": st.floats(0, 1), "top_k": st.integers(-1, 99),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3), "stream": st.booleans(), "seed": st.integers(),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}), "n": st.integers(0, 2),
    "selfjudge": st.fixed_dictionaries({}, optional={
        "rule": st.sampled_from(["exact", "sampling", "judged", "judge_only", "topk", "relaxed", "typical", "margin", "fly"])
        | st.text(max_size=9).map("topk:".__add__), "theta": st.floats(-1, 2) | st.sampled_from(["F", "R"]),
        "quality": st.floats(0, 1), "price": st.floats(), "gamma": st.integers(-1, 8), "off": st.booleans(),
    }),
}  # fmt: skip
almost = st.fixed_dictionaries(
    {
        "messages": st.just([{"role": "user", "content": "w1 w2"}]) | json_value,
        "max_tokens": st.integers(0, 30) | json_value,
    },
    optional={name: value | json_value for name, value in FIELDS.items()},
)


@pytest.mark.parametrize("examples", [20, pytest.param(50, marks=pytest.mark.slow)])
def test_no_body_makes_the_server_fail(server: Server, examples: int) -> None:
    statuses: set[int] = set()

    @given(body=almost | json_value | st.binary(max_size=30))
    @example(body=GOOD)
    @settings(FUZZ, max_examples=examples)
    def one(body: Any) -> None:
        status, _, answer = server.send("POST", "/v1/chat/completions", body)
        assert status in (200, 400), answer
        statuses.add(status)

    one()
    assert statuses == {200, 400}
    server.wait_until_idle()
    assert server.metric("generations_total", finish="error") == 0


@pytest.mark.slow
def test_nothing_is_left_of_five_hundred_requests(server: Server) -> None:
    process = psutil.Process(server.process.pid)

    def some(count: int) -> None:
        """Whole answers, streams, streams that are left, refusals; by eight clients."""

        def client(mine: range) -> None:
            api = server.client()
            for i in mine:
                options = {"max_tokens": 5 + i % 20, "extra_body": {"selfjudge": HOW[i % len(HOW)]}}
                message = {"role": "user", "content": words(i, 1 + i % 30)}
                if i % 5 == 4:
                    server.send("POST", "/v1/chat/completions", {**GOOD, "n": 1000 + i})
                    continue
                stream = api.chat.completions.create(model="tiny", messages=[message], stream=i % 2 == 0, **options)
                if i % 2 == 0:
                    for _ in zip(stream, range(1 if i % 6 == 0 else 1000), strict=False):
                        pass
                    stream.close()

        threads = [threading.Thread(target=client, args=(range(k, count, 8),)) for k in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        server.wait_until_idle()

    some(150)
    memory, threads = process.memory_info().rss, process.num_threads()
    tasks = server.metric("event_loop_tasks")
    answers = server.metric("generations_total")
    some(500)
    assert server.metric("generations_total") - answers == 400
    assert process.memory_info().rss - memory < 40e6
    assert process.num_threads() <= threads + 1
    assert server.metric("event_loop_tasks") <= tasks + 2
    assert not any("Traceback" in line for line in server.log)


@pytest.fixture(scope="module")
def embedded_server(start: Callable[..., Server]) -> Server:
    return start("--pair", "smollm2-135m", "--device", "cpu", "--gamma", "3")


@pytest.mark.slow
def test_a_short_prompt_passes_a_long_one_that_goes_with_its_client(embedded_server: Server) -> None:
    """Whether it shares the batch of the long one or not."""
    server = embedded_server
    body = {"model": "smollm2-135m", "prompt": [5, 6, 7, 8], "max_tokens": 4, "temperature": 0}
    long = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
    long.request(
        "POST", "/v1/completions", json.dumps({**body, "prompt": [5] * 4000, "max_tokens": 1, "stream": True}),
        {"content-type": "application/json"},
    )  # fmt: skip
    server.wait_for("running", 1)
    for way in ({}, {"selfjudge": {"rule": "judged"}}):
        assert server.send("POST", "/v1/completions", {**body, **way})[0] == 200
        assert server.metric("running") == 1  # the long one is still being read
    long.close()
    server.wait_until_idle()
    assert server.metric("generations_total", finish="cancelled") == 1


@pytest.mark.slow
def test_the_embedded_pair_says_over_http_what_generate_says(embedded_server: Server, shipped: Pair) -> None:
    server = embedded_server
    judge = Judge.from_pretrained("smollm2-135m")
    prompts = ["Why is the sky blue?", "Write a haiku about rain."]
    rules = [EXACT, RuleRequest("judged", theta="R").resolve(shipped, judge)]
    for prompt, how, rule in zip(prompts, ({}, {"rule": "judged"}), rules, strict=True):
        (made,) = generate(shipped, [prompt], rule, gamma=3, max_new_tokens=24)
        answer = server.client().chat.completions.create(
            model="smollm2-135m", messages=[{"role": "user", "content": prompt}], max_tokens=24, temperature=0,
            extra_body={"selfjudge": how},
        )  # fmt: skip
        agrees(answer, made)


def test_serving_without_its_packages_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(SelfJudgeError, match=r"serving needs fastapi: pip install fastapi prometheus_client uvicorn"):
        listen("127.0.0.1", 0)


@pytest.mark.parametrize(
    ("rule", "allowed", "bad"),
    [("margin:3,guard=on", 0.02, True), pytest.param("topk:2,guard=on", 0.9, False, marks=pytest.mark.slow)],
)
def test_the_certificate_is_watched_while_serving(
    start: Callable[..., Server], endless: list[str], pair: Pair, tmp_path: Path, rule: str, allowed: float, bad: bool
) -> None:
    """A share of one: every request is decoded both ways. A bad rule is switched off, a good one is not."""
    folder = recipe_folder(tmp_path / "tuned", pair, rule=rule, measure="overlap", epsilon=allowed, n=20)
    server = start("--recipe", str(folder), "--dtype", "float32", "--name", "tiny", "--shadow", "1")
    assert any(line.startswith(f"{folder}: ") for line in server.log)  # what its certificate says
    first, rule = ask(server, words(0, 5)), Recipe.load(folder).rule
    assert first.selfjudge["rule"] == rule
    facts = server.send("GET", "/v1/models/tiny")[2]["selfjudge"]
    assert (facts["uses_judge"], facts["theta"]) == (False, None)
    asked = 1
    while not server.metric("shadow_switched_off") and asked < (40 if bad else 20):
        ask(server, words(asked, 5))
        asked += 1
        server.wait_until_idle()
    assert server.metric("shadow_switched_off") == bad
    assert server.metric("shadow_bound") == allowed
    if not bad:
        server.wait_for("shadow_requests_total", asked)
    lines = [line for line in server.log if "does not hold for these requests" in line]
    assert len(lines) == bad
    last = ask(server, words(0, 5))
    assert last.selfjudge["rule"] == ("exact" if bad else rule)
    lossless = ask(server, words(0, 5), extra_body={"selfjudge": {"off": True}})
    assert (last.choices[0].message.content == lossless.choices[0].message.content) == bad
    assert server.send("GET", "/v1/models/tiny")[2]["selfjudge"]["rule"] == last.selfjudge["rule"]
    assert sorted(path.name for path in tmp_path.rglob("*.json*")) == ["certificate.json", "recipe.json"]


def test_texts_that_wait_for_one_client_are_one_update() -> None:
    result = Generation((1,), ("target",), "abc", 0, "length", 1)
    piece = Piece("x", 1, "target")

    async def read() -> list[tuple[int, Update]]:
        updates = Updates()
        reader = asyncio.ensure_future(updates.get())
        await asyncio.sleep(0)
        for number, update in (
            (0, Update("a")), (0, Update("b")), (1, Update("c")), (1, Update("d", [piece])), (1, Update("e", [piece])),
            (0, Update("f")), (0, Update(result=result)), (1, Update("g")), (1, Update(failure="error")),
        ):  # fmt: skip
            updates.put(number, update)
        return [await reader, *[await updates.get() for _ in range(6)]]

    assert asyncio.run(read()) == [
        (0, Update("ab")), (1, Update("c")), (1, Update("d", [piece])), (1, Update("e", [piece])),
        (0, Update("f", result=result)), (1, Update("g")), (1, Update(failure="error")),
    ]  # fmt: skip


def test_only_texts_whose_reader_waits_pass_by_it() -> None:
    told: list[tuple[int, str]] = []

    def tell(number: int, text: str) -> bool:
        told.append((number, text))
        return text != "too slow"

    async def read() -> list[tuple[int, Update]]:
        updates = Updates()
        updates.tell = tell
        updates.put(0, Update("nobody waits"))
        first = await updates.get()
        reader = asyncio.ensure_future(updates.get())
        await asyncio.sleep(0)
        for text in ("a", "b", "too slow", "c"):
            updates.put(0, Update(text))
        return [first, await reader]

    assert asyncio.run(read()) == [(0, Update("nobody waits")), (0, Update("too slowc"))]
    assert told == [(0, "a"), (0, "b"), (0, "too slow")]
