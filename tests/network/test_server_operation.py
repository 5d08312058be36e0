"""What operators ask of a server: readiness, ids of requests, lines of the log, pages of other origins, histograms."""

from __future__ import annotations

import http.client
import json
import logging
import re
import shutil
import time
from collections.abc import Callable
from typing import Any

import pytest

from selfjudge.errors import SelfJudgeError
from selfjudge.integrations.server.config import ServerConfig
from selfjudge.integrations.server.operation import JsonLines
from selfjudge.models.pair import Pair
from servers import Server

GOOD = {"messages": [{"role": "user", "content": "w1"}], "max_tokens": 20, "selfjudge": {"off": True}}
SITE = "https://app.example:8443"
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def options(endless: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The endless pair, whose chat template has a variable."""
    folder = tmp_path_factory.mktemp("template") / "target"
    shutil.copytree(endless[1], folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if shout %}w9{% else %}w0{% endif %}"
    )
    return ["--target", str(folder), "--draft", endless[3], "--name", "tiny", "--gamma", "3"]


@pytest.fixture(scope="module")
def server(start: Callable[..., Server], options: list[str]) -> Server:
    limits = ["--max-batch", "1", "--max-queue", "1", "--max-tokens", "4000"]
    return start(
        *options, *limits, "--log-format", "json", "--cors-origin", SITE, "--cors-origin", "http://localhost:3000"
    )


def lines(server: Server, **wanted: Any) -> list[dict[str, Any]]:
    """The lines of the log that have these values; waits until there is one."""
    limit = time.monotonic() + 60
    found: list[dict[str, Any]] = []
    while not found and time.monotonic() < limit:
        found = [one for one in map(json.loads, server.log[:]) if wanted.items() <= one.items()]
        time.sleep(0.02)
    return found


def test_every_request_has_an_id_and_a_line_in_the_log(server: Server) -> None:
    for number in ("trace-1/a:b", "x" * 128):
        assert server.send("POST", CHAT, GOOD, {"x-request-id": number})[1]["x-request-id"] == number
        (line,) = lines(server, request_id=number)
        assert {line[key] for key in ("level", "method", "path", "mode")} == {"INFO", "POST", CHAT, "off"}
        assert line["status"] == 200
        assert line["seconds"] > 0
    made = set()
    for sent in ("", "two words", "x" * 129, "naïve"):
        status, headers, _ = server.send("POST", CHAT, {**GOOD, "n": 0}, {"x-request-id": sent.encode("latin-1")})  # type: ignore[dict-item]
        assert status == 400
        assert re.fullmatch(r"req-[0-9a-f]{24}", headers["x-request-id"])
        made.add(headers["x-request-id"])
        assert lines(server, request_id=headers["x-request-id"])[0]["status"] == 400
    assert len(made) == 4
    server.send("GET", "/a%0Ab%22")
    assert lines(server, path="/a%0Ab%22")[0]["status"] == 404
    server.send("GET", "/health")
    server.send("GET", "/", headers={"x-request-id": "last"})
    assert lines(server, request_id="last")
    assert not [one for one in map(json.loads, server.log) if one.get("path") == "/health"]
    assert lines(server, message="ready")


def test_a_stream_whose_client_goes_has_its_line(server: Server) -> None:
    stream = server.client().chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "w1"}], stream=True, max_tokens=4000,
        extra_headers={"x-request-id": "gone"},
    )  # fmt: skip
    next(iter(stream))
    stream.close()
    assert lines(server, request_id="gone")[0]["status"] == 200
    server.wait_until_idle()


def test_ready_says_whether_there_is_a_place(server: Server) -> None:
    assert server.send("GET", "/ready")[::2] == (200, {"status": "ok"})

    def begin() -> Any:
        return server.client().chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "w1"}], stream=True, max_tokens=4000,
            extra_body={"selfjudge": {"gamma": 0}},
        )  # fmt: skip

    running = begin()
    next(iter(running))
    server.wait_for("running", 1)
    waiting = begin()
    server.wait_for("queue_depth", 1)
    assert server.send("GET", "/ready")[::2] == (503, {"status": "full"})
    assert server.send("GET", "/health")[0] == 200
    for stream in (waiting, running):
        stream.close()
    server.wait_until_idle()
    assert server.send("GET", "/ready")[0] == 200


def test_pages_of_named_origins_may_ask(server: Server) -> None:
    asks = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-request-id",
    }
    for origin in (SITE, "http://localhost:3000"):
        status, headers, _ = server.send("OPTIONS", CHAT, headers={"origin": origin, **asks})
        assert (status, headers["access-control-allow-origin"]) == (200, origin)
        assert {"authorization", "content-type", "x-request-id"} <= {
            name.strip().lower() for name in headers["access-control-allow-headers"].split(",")
        }
        status, headers, _ = server.send("POST", CHAT, GOOD, {"origin": origin})
        assert (status, headers["access-control-allow-origin"]) == (200, origin)
        assert "x-request-id" in headers["access-control-expose-headers"]
        refused = server.send("POST", CHAT, {}, {"origin": origin})
        assert (refused[0], refused[1]["access-control-allow-origin"]) == (400, origin)
    for origin in ("https://app.example", "https://evil.example", "null"):
        assert server.send("OPTIONS", CHAT, headers={"origin": origin, **asks})[0] == 400
        assert "access-control-allow-origin" not in server.send("POST", CHAT, GOOD, {"origin": origin})[1]


@pytest.mark.parametrize(
    "origin", ["*", "app.example", "https://app.example/", "https://app.example/path", "https://*.example", ""]
)
def test_origins_are_named_one_by_one(origin: str) -> None:
    with pytest.raises(SelfJudgeError, match="cors_origin"):
        ServerConfig(cors_origin=(origin,)).check()


def test_variables_of_the_chat_template(server: Server, options: list[str]) -> None:
    pair = Pair.load(options[1], options[3], device="cpu")
    assert pair.encode("w1", variables={"shout": True}) != pair.encode("w1")
    body = {**GOOD, "logprobs": True}
    plain, loud, calm = (
        server.send("POST", CHAT, {**body, **more})[2]["choices"][0]["logprobs"]
        for more in ({}, {"chat_template_kwargs": {"shout": True}}, {"chat_template_kwargs": {"shout": False}})
    )
    assert plain == calm != loud
    for wrong in (
        {"shuot": True},
        {"messages": "x"},
        {"tokenize": True},
        {"chat_template": "x"},
        {"add_generation_prompt": False},
    ):
        status, _, answer = server.send("POST", CHAT, {**GOOD, "chat_template_kwargs": wrong})
        assert (status, answer["error"]["param"]) == (400, "chat_template_kwargs"), answer
    nested = {"chat_template_kwargs": {"shout": [1]}}
    assert server.send("POST", CHAT, {**GOOD, **nested})[2]["error"]["param"] == "chat_template_kwargs.shout"


def test_histograms_count_every_answer(server: Server) -> None:
    server.wait_until_idle()
    names = (
        "queue_seconds",
        "time_to_first_token_seconds",
        "time_between_tokens_seconds",
        "request_seconds",
        "accepted_length",
    )
    before = {name: server.metric(f"{name}_count", mode="off") for name in names}
    total = server.metric("accepted_length_sum")
    answer = server.send("POST", CHAT, GOOD)[2]
    server.wait_until_idle()
    for name in names:
        assert server.metric(f"{name}_count", mode="off") == before[name] + 1
    m = (answer["usage"]["completion_tokens"] - 1) / answer["selfjudge"]["cycles"]
    assert server.metric("accepted_length_sum") - total == pytest.approx(m)
    assert m == answer["selfjudge"]["mean_accepted_length"]
    assert server.metric("accepted_length_bucket", le="33.0") == server.metric("accepted_length_count")


def test_an_exception_is_one_line_of_json() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        record = logging.LogRecord("selfjudge.x", logging.ERROR, "", 1, "failed: %s", ("π",), (ValueError, error, None))
    line = JsonLines().format(record)
    assert "\n" not in line
    assert json.loads(line)["message"] == "failed: π"
    assert "two\nlines" in json.loads(line)["exception"]


def test_a_log_for_people_and_eight_answers_at_a_time_on_a_cpu(
    start: Callable[..., Server], options: list[str]
) -> None:
    """What a server does that is told nothing."""
    server = start(*options, "--max-tokens", "4000")
    body = {**GOOD, "max_tokens": 4000, "stream": True, "selfjudge": {"gamma": 0}}
    streams = [http.client.HTTPConnection("127.0.0.1", server.port) for _ in range(9)]
    for stream in streams:
        stream.request("POST", CHAT, json.dumps(body), {"content-type": "application/json"})
    server.wait_for("queue_depth", 1)
    assert server.metric("running") == 8
    for stream in streams:
        stream.close()
    server.wait_until_idle()
    server.send("GET", "/v1/models", headers={"x-request-id": "mine"})
    limit = time.monotonic() + 60
    while not any(line.endswith(" mine\n") for line in server.log) and time.monotonic() < limit:
        time.sleep(0.02)
    (line,) = [line for line in server.log if line.endswith(" mine\n")]
    assert re.fullmatch(r"[\d-]+ [\d:,]+ INFO GET /v1/models 200 [\d.]+ s mine\n", line)
