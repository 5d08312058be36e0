"""Names by which a server may be asked: those of this machine and those that were allowed, whoever listens."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import socket
from typing import Any

import pytest
from typer.testing import CliRunner

from selfjudge.cli.main import app
from selfjudge.errors import SelfJudgeError
from selfjudge.integrations.asgi import HOST_GUARD, HOSTS_VARIABLE, HostNames
from selfjudge.integrations.server.config import ServerConfig
from selfjudge.integrations.server.playground import FACTS

OWN = [
    "localhost", "LocalHost.", "localhost:8000", "127.0.0.1", "127.8.9.10:80", "[::1]", "[::1]:8000", "[::ffff:127.0.0.1]",
    "10.0.0.7", "192.168.1.20:8000", "[::2]", "[2001:DB8:0::7]:8000", "[fe80::1%eth0]",
]  # fmt: skip
FOREIGN = [
    "", ":8000", "evil.example", "evil.example:8000", "localhost.evil.example", "evil.localhost", "127.0.0.1.evil.example",
    "localhost@evil.example", "evil.example#localhost", "localhost,evil.example", "localhost:80:80", "localhost:x",
    "10.0.0.7.evil.example", "10.0.0", "127.0.0.1:8000/", "[::1", "::1", "2130706433", "0x7f.1", "é", "*",
]  # fmt: skip


def scope(*hosts: str, server: Any = ("127.0.0.1", 8000), kind: str = "http") -> dict[str, Any]:
    headers = [(b"x-forwarded-host", b"localhost"), *((b"host", host.encode("latin-1")) for host in hosts)]
    return {"type": kind, "headers": headers, "server": server, "path": "/v1/models"}


def answers(names: HostNames, *hosts: str, **options: Any) -> bool:
    return names.find_foreign(scope(*hosts, **options)) is None


@pytest.mark.parametrize("host", [*OWN, socket.gethostname(), f"{socket.gethostname().upper()}:8000"])
def test_names_of_this_machine_and_addresses_are_answered(host: str) -> None:
    assert answers(HostNames([]), host)
    assert answers(HostNames([]), host, server=None)


@pytest.mark.parametrize("host", FOREIGN)
def test_other_names_are_not(host: str) -> None:
    for allowed in ([], ["judge.example"]):
        assert not answers(HostNames(allowed), host)
        assert not answers(HostNames(allowed), "localhost", host)  # one of two is enough
    assert not answers(HostNames([]), host, server=None)


def test_no_name_is_no_foreign_name() -> None:
    """HTTP/1.0 has requests without a Host, as health checks send them; no browser does."""
    assert answers(HostNames([]))


def test_allowed_names_are_added() -> None:
    names = HostNames(["Judge.example", "*.lan", "[2001:db8::9]", "0.0.0.0"])
    for host in (*OWN, "judge.example:443", "JUDGE.example.", "a.b.lan", "[2001:db8::9]:1", "0.0.0.0:8000"):
        assert answers(names, host)
    for host in ("evil.example", "judge.example.evil.example", "lan", "xjudge.example", ""):
        assert not answers(names, host)
    assert all(answers(HostNames(["*"]), host) for host in ("evil.example", "10.0.0.7:80", "[::2]"))


@pytest.mark.parametrize("name", ["http://judge.example", "judge.example:8000", "a b", "", "judge.example/"])
def test_an_allowed_name_has_no_scheme_and_no_port(name: str) -> None:
    ServerConfig(allowed_host=("judge.example", "*", "*.lan", "10.0.0.7", "2001:db8::7", "[::1]")).check()
    with pytest.raises(SelfJudgeError, match="`allowed_host` must be a name without scheme or port"):
        ServerConfig(allowed_host=(name,)).check()


def test_serve_puts_the_guard_in_front_of_vllm(monkeypatch: pytest.MonkeyPatch, checkpoints: dict[str, str]) -> None:
    called: list[str] = []
    monkeypatch.setattr("selfjudge.integrations.vllm.serve.main", called.extend)
    for variable in (HOSTS_VARIABLE, FACTS):
        monkeypatch.setenv(variable, "")
    models = ["--target", checkpoints["target"], "--draft", checkpoints["draft"]]
    command = ["serve", "--backend", "vllm", *models, "--allowed-host", "judge.example", "--allowed-host", "*.lan"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert HOST_GUARD in called
    assert called[called.index("--allowed-origins") + 1] == "[]"
    assert json.loads(os.environ[HOSTS_VARIABLE]) == ["judge.example", "*.lan", "127.0.0.1"]


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_the_same_in_front_of_vllm(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    async def application(_: Any, __: Any, send: Any) -> None:
        await send({"type": "answer"})

    def sent(host: str) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            messages.append(message)

        asyncio.run(guard(scope(host, kind=kind), None, send))
        return messages

    monkeypatch.setenv(HOSTS_VARIABLE, json.dumps(["judge.example"]))
    module, _, name = HOST_GUARD.rpartition(".")
    guard = getattr(importlib.import_module(module), name)(application)
    assert sent("localhost:8000") == sent("judge.example") == [{"type": "answer"}]
    first, *rest = sent("evil.example")
    if kind == "http":
        assert first["status"] == 421
        assert "'evil.example': allow it with --allowed-host" in json.loads(rest[0]["body"])["error"]["message"]
    else:
        assert (first["type"], first["code"]) == ("websocket.close", 1008)
