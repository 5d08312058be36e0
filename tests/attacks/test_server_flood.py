"""Clients that flood the server with prompts or connections, and requests that a proxy could read otherwise."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from selfjudge.integrations.server.schema import ChatRequest, TextRequest
from servers import Server, endless_pair, servers

CONNECTIONS = 8
WAITING = 4  # of each key
SLOW_TEMPLATE = (
    "{% for m in messages %}{% if 'w9' in m['content'] %}{% for i in range(12000) %}{% for j in range(300) %}"
    "{% endfor %}{% endfor %}w1 {% else %}{{ m['content'] }} {% endif %}{% endfor %}w0"
)
KEYS = [{"authorization": "Bearer one"}, {"authorization": "Bearer two"}]
LONG = "w9" + " " * 5000  # its encoding takes long
ASK = {"messages": [{"role": "user", "content": "w1 w2"}], "max_tokens": 3}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(checkpoints: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two keys, two answers at a time, a tokenizer that is slow with some prompts."""
    root = tmp_path_factory.mktemp("flood")
    pair = endless_pair(checkpoints, root)
    settings = root / "target" / "chat_template.jinja"
    settings.write_text(SLOW_TEMPLATE)
    limits = ["--max-batch", "2", "--max-queue", str(2 * WAITING), "--max-tokens", "4000", "--header-timeout", "1"]
    limits += ["--max-connections", str(CONNECTIONS), "--allowed-host", "judge.example", "--allowed-host", "*.lan"]
    with servers() as begin:
        yield begin(*pair, *limits, SELFJUDGE_API_KEY="one, two")


@pytest.fixture(autouse=True)
def idle(server: Server) -> Iterator[None]:
    yield
    for name in ("encoding", "queue_depth", "running"):
        wait_for(server, name, 0)


def metric(server: Server, name: str) -> float:
    lines = server.send("GET", "/metrics", headers=KEYS[1])[2].splitlines()
    return float(next(line for line in lines if line.startswith(f"selfjudge_{name} ")).split()[1])


def wait_for(server: Server, name: str, value: float) -> None:
    for _ in range(1200):
        if metric(server, name) == value:
            return
        time.sleep(0.01)
    raise AssertionError(f"{name} is {metric(server, name)}, not {value}: {server.log}")


class Stream:
    """An answer that goes on until it is closed."""

    def __init__(self, server: Server, key: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
        body = json.dumps({**ASK, "max_tokens": 4000, "stream": True, "selfjudge": {"off": True, "gamma": 0}})
        self.connection.request("POST", CHAT, body, {"content-type": "application/json", **KEYS[key]})
        self.response = self.connection.getresponse()
        assert self.response.status == 200, self.response.read()

    def close(self) -> None:
        self.response.close()
        self.connection.close()


def raw(server: Server, data: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=600)
    connection.sendall(data)
    return connection


def rest(connection: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    received = b""
    try:
        while piece := connection.recv(4096):
            received += piece
    except ConnectionResetError:
        pass
    connection.close()
    return received


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_encoded(server: Server) -> None:
    for path, body in (
        (CHAT, {**ASK, "messages": [{"role": "user", "content": "w9 " * 300_000}]}),
        (CHAT, {**ASK, "messages": [{"role": "user", "content": "w9"}] * 5_000}),
        ("/v1/completions", {"prompt": "é" * 40_000}),
    ):
        status, _, answer = server.send("POST", path, body, KEYS[0])
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert f"bytes, and this server takes {16 * 4096}" in answer["error"]["message"]


def test_prompts_being_encoded_hold_places_and_keep_no_short_prompt_waiting(server: Server) -> None:
    ended: list[str] = []

    def ask(key: int, content: str, name: str) -> Any:
        status, headers, answer = server.send(
            "POST", CHAT, {**ASK, "messages": [{"role": "user", "content": content}]}, KEYS[key]
        )
        ended.append(name)
        return status, headers, answer

    threads = [threading.Thread(target=ask, args=(0, LONG, "long")) for _ in range(WAITING)]
    for thread in threads:
        thread.start()
    wait_for(server, "encoding", WAITING)
    status, headers, answer = ask(0, "w1", "one too many")
    assert (status, answer["error"]["code"]) == (429, "queue_full")
    assert f"{WAITING} requests with this key wait" in answer["error"]["message"]
    assert int(headers["retry-after"]) >= 1
    assert ask(1, "w1", "short")[0] == 200
    for thread in threads:
        thread.join()
    assert ended[-1] == "long"  # in one thread with them it would be the last
    assert ended.count("long") == WAITING


def test_one_key_cannot_keep_another_waiting(server: Server) -> None:
    flood = [Stream(server, 0) for _ in range(1 + WAITING)]  # one runs, though two could
    try:
        status, _, answer = server.send("POST", CHAT, ASK, KEYS[0])
        assert (status, answer["error"]["code"]) == (429, "queue_full")
        assert server.send("POST", CHAT, ASK, KEYS[1])[0] == 200
        assert (metric(server, "running"), metric(server, "queue_depth")) == (1, WAITING)
    finally:
        for stream in flood:
            stream.close()


def test_connections_without_a_request_keep_nobody_out_and_are_closed(server: Server) -> None:
    half = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
    connections = [raw(server, half if i % 2 else b"") for i in range(6 * CONNECTIONS)]
    assert metric(server, "connections") <= CONNECTIONS
    assert server.send("POST", CHAT, ASK, KEYS[0])[0] == 200
    answers = [rest(connection) for connection in connections]
    assert any(answer.startswith(b"HTTP/1.1 408 ") for answer in answers)
    assert all(answer == b"" or b" 408 " in answer.split(b"\r\n")[0] for answer in answers)
    assert metric(server, "connections") == 1  # this one


@pytest.mark.quick("")
@pytest.mark.parametrize("first", [b"", b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"])
def test_a_head_that_comes_byte_by_byte_is_not_waited_for(server: Server, first: bytes) -> None:
    connection = raw(server, first + b"GET /health HTTP/1.1\r\nhost: localhost\r\n")
    stop = threading.Event()

    sent = 0

    def trickle() -> None:
        nonlocal sent
        while sent < 300 and not stop.wait(0.1):
            try:
                connection.sendall(b"x-more: 1\r\n")
            except OSError:
                return
            sent += 1

    thread = threading.Thread(target=trickle)
    thread.start()
    received = rest(connection)
    stop.set()
    thread.join()
    assert b"408 Request Timeout" in received
    assert received.count(b'{"status":"ok"}') == bool(first)
    assert sent < 300  # the server did not wait until the client had nothing more to say


def test_more_requests_than_connections(server: Server) -> None:
    streams = [Stream(server, 0) for _ in range(WAITING + 1)]
    try:
        streams += [Stream(server, 1) for _ in range(CONNECTIONS - len(streams))]
        status, headers, answer = server.send("GET", "/health")
        assert status == 503
        assert int(headers["retry-after"]) >= 1
        assert answer["error"]["message"].startswith(f"{CONNECTIONS} connections are open already")
    finally:
        for stream in streams:
            stream.close()


def post(*headers: str, body: bytes = b"") -> bytes:
    return "\r\n".join([f"POST {CHAT} HTTP/1.1", "host: localhost", *headers, "", ""]).encode() + body


def test_requests_with_two_meanings_are_refused(server: Server) -> None:
    body = json.dumps(ASK).encode()
    chunked = f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"
    key, kind, length = "authorization: Bearer one", "content-type: application/json", f"content-length: {len(body)}"
    assert rest(raw(server, post(key, kind, length, "connection: close", body=body))).startswith(b"HTTP/1.1 200 ")
    for request, message in (
        (post(key, kind, length, "transfer-encoding: chunked", body=chunked), b"not both"),
        (post(key, kind, "transfer-encoding: chunked", "content-length: 3", body=chunked), b"not both"),
        (post("authorization: Bearer no", kind, key, length, body=body), b"one authorization header"),
        (post(key, key, kind, length, body=body), b"one authorization header"),
    ):
        answer = rest(raw(server, request))
        assert answer.startswith(b"HTTP/1.1 400 "), (request, answer)
        assert message in answer
    refused = rest(raw(server, post(kind, "content-length: 100000", body=b"{")))  # the rest is not waited for
    assert refused.startswith(b"HTTP/1.1 401 ")
    assert b"connection: close" in refused


@pytest.mark.parametrize(
    ("size", "status"),
    [
        ("1" + "0" * 16, 400),
        ("f" * 17, 400),
        ("f" * 20, 400),
        ("f" * 21, 400),
        ("-1", 400),
        ("f" * 16, 400),
        ("200000", 413),
        ("7" + "0" * 15, 413),
    ],
)
def test_a_chunk_that_no_client_can_send_is_refused_at_once(server: Server, size: str, status: int) -> None:
    """The connection stays open on the client's side: who waits for the rest of the chunk does not answer."""
    body = f"{size}\r\n{json.dumps(ASK)}\r\n0\r\n\r\n".encode()
    headers = ["authorization: Bearer one", "content-type: application/json", "transfer-encoding: chunked"]
    for parts in ([post(*headers) + body], [post(*headers), body]):
        connection = raw(server, parts[0])
        for part in parts[1:]:
            connection.sendall(part)
        head, _, answer = rest(connection).partition(b"\r\n\r\n")
        assert head.startswith(f"HTTP/1.1 {status} ".encode()), (head, answer)
        assert set(json.loads(answer)["error"]) == {"message", "type", "param", "code"}
    assert server.send("GET", "/health")[0] == 200
    assert not any("Traceback" in line for line in server.log)


def get(path: str, *headers: str, version: str = "1.1") -> bytes:
    return "\r\n".join([f"GET {path} HTTP/{version}", *headers, "connection: close", "", ""]).encode()


def test_a_name_of_another_machine_is_not_answered_whatever_the_key(server: Server) -> None:
    """A page's own name may point at this machine, and a browser may have the key. Tested without a key elsewhere."""
    key = "authorization: Bearer one"
    for host in ("localhost", f"127.0.0.1:{server.port}", "[::1]:80", "10.9.8.7", "judge.example:443", "a.lan"):
        assert rest(raw(server, get("/v1/models", f"host: {host}", key))).startswith(b"HTTP/1.1 200 ")
        assert rest(raw(server, get("/v1/models", f"host: {host}"))).startswith(b"HTTP/1.1 401 ")
    for host in ("evil.example", f"evil.example:{server.port}", "localhost.evil.example", "", "10.9.8.7.evil.example"):
        for path, *headers in (["/v1/models", key], ["/v1/models"], ["/health"], ["/"], ["/metrics", key]):
            answer = rest(raw(server, get(path, f"host: {host}", *headers)))
            assert answer.startswith(b"HTTP/1.1 421 "), answer
            assert f"the name {host!r}" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_requests_without_a_host_and_with_a_whole_address(server: Server) -> None:
    key = "authorization: Bearer one"
    assert b" 200 " in rest(raw(server, get("/v1/models", key, version="1.0"))).split(b"\r\n")[0]  # as health checks do
    assert b" 421 " in rest(raw(server, get("/health", "host: evil.example", version="1.0"))).split(b"\r\n")[0]
    for headers in ([], ["host: localhost", "host: evil.example"], ["host: evil.example", "host: localhost"]):
        assert b" 400 " in rest(raw(server, get("/v1/models", key, *headers))).split(b"\r\n")[0]
    for host, status in (("evil.example", b" 421 "), ("localhost", b" 404 ")):  # this server is not a proxy
        answer = rest(raw(server, get("http://evil.example/v1/models", f"host: {host}", key)))
        assert status in answer.split(b"\r\n")[0], answer


def test_a_list_of_wrong_elements_is_refused_at_the_first() -> None:
    for request, body in (
        (TextRequest, {"prompt": [1.5] * 1000}),
        (TextRequest, {"prompt": [5] * 1000 + ["x"]}),
        (TextRequest, {"prompt": [[1.5] * 1000]}),
        (TextRequest, {"prompt": [[1]] * 1000}),
        (ChatRequest, {"messages": [{"role": "x"}] * 1000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "x"}] * 1000}]}),
    ):
        with pytest.raises(ValidationError) as refused:
            request.model_validate(body)
        assert refused.value.error_count() < 10
