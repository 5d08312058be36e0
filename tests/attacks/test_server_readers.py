"""Clients that read their answers slowly, or not at all."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import uvicorn

from selfjudge.integrations.server.config import ServerConfig
from selfjudge.integrations.server.run import Connection
from servers import Server, endless_pair, servers

READERS = 20
NAME = "tiny" * 500  # is in every event of a stream: few tokens fill the buffers
PROMPT = {"prompt": "w1 w2", "max_tokens": 300, "selfjudge": {"off": True, "gamma": 0}}


@pytest.fixture(scope="module")
def server(checkpoints: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pair = endless_pair(checkpoints, tmp_path_factory.mktemp("readers"))
    with servers() as begin:
        yield begin(*pair, "--max-batch", str(READERS), "--name", NAME)


def connect(port: int) -> socket.socket:
    """A connection that holds little: few bytes are under way before the server must wait."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
    connection.settimeout(600)
    connection.connect(("127.0.0.1", port))
    return connection


def ask(port: int) -> socket.socket:
    body = json.dumps({**PROMPT, "stream": True}).encode()
    connection = connect(port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
    connection.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)
    return connection


def read(connection: socket.socket, at_a_time: int = 4096) -> bytes:
    received = b""
    with connection:
        while piece := connection.recv(at_a_time):
            received += piece
    return received


def text_of(response: bytes) -> str:
    lines = [line for line in response.decode().splitlines() if line.startswith("data: ")]
    assert lines.pop() == "data: [DONE]"
    return "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines)


def test_others_are_answered_while_readers_sleep(server: Server) -> None:
    expected = server.send("POST", "/v1/completions", PROMPT)[2]["choices"][0]["text"]
    process, tasks = psutil.Process(server.process.pid), server.metric("event_loop_tasks")
    answers, memory = server.metric("generations_total"), process.memory_info().rss
    readers = [ask(server.port) for _ in range(READERS)]
    server.wait_for("generations_total", answers + READERS)  # decoding waits for no reader
    assert server.metric("event_loop_tasks") >= tasks + READERS  # buffers are full: none of the responses is over
    assert server.send("POST", "/v1/completions", PROMPT)[2]["choices"][0]["text"] == expected
    assert process.memory_info().rss - memory < 60e6
    for connection in readers[10:]:
        connection.close()
    assert {text_of(read(connection, 64 + 500 * i)) for i, connection in enumerate(readers[:10])} == {expected}
    server.wait_for("connections", 1)
    assert server.metric("event_loop_tasks") <= tasks + 2
    assert not any("Traceback" in line for line in server.log)


def test_a_client_that_never_reads_is_cut_off() -> None:
    """Else a few of them would hold all connections for good."""
    length, ended = 10_000_000, threading.Event()

    async def application(_: Any, __: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % length)]})
        for _ in range(length // 10_000):
            await send({"type": "http.response.body", "body": b"x" * 10_000, "more_body": True})
        ended.set()

    limits = ServerConfig(header_timeout=60.0, max_connections=4, max_body=1000, timeout=0.5)
    limited = type("Limited", (Connection,), {"limits": limits})
    config = uvicorn.Config(application, http=limited, ws="none", lifespan="off")
    serving = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: asyncio.run(serving.serve(sockets=[listener])), daemon=True)
        thread.start()
        with connect(listener.getsockname()[1]) as client:
            client.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert ended.wait(600)  # what is sent to a connection that is gone waits for nobody
        serving.should_exit = True
        thread.join()
