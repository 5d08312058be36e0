"""ASGI messages, errors as OpenAI's clients read them, and names of hosts: for our server and in front of vLLM's."""

import json
import os
import random
import re
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from ipaddress import ip_address
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGI = Callable[[Scope, Receive, Send], Awaitable[None]]

KINDS = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error", 504: "timeout"}
HOSTS_VARIABLE = "SELFJUDGE_ALLOWED_HOSTS"  # the variable that has, in front of vLLM, the allowed names as JSON
HOST_GUARD = "selfjudge.integrations.asgi.HostGuard"  # for vLLM's `--middleware`
ALLOWED = re.compile(r"[\w.*-]+|\[?[0-9a-fA-F]*:[\w:.%]*\]?")  # a name, `*` for any part, or an address; no port
_HOST = re.compile(r"(\[[^]]*\]|[^:]*)(:\d*)?")


class RefusedError(Exception):
    """A request that is answered with an error, which OpenAI's clients read."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        readable = " ".join(message.encode("utf-8", "replace").decode().split())  # one line, no lone surrogates
        kind = KINDS.get(status, "invalid_request_error")
        self.status = status
        self.body = {"error": {"message": readable[:1000], "type": kind, "param": param, "code": code}}


def make_id() -> str:
    """24 hex digits that nobody else has; asking the system for them would hand the interpreter to another thread."""
    return f"{random.getrandbits(96):024x}"


async def refuse(send: Send, error: RefusedError) -> None:
    """Answer with an error."""
    headers = {"content-type": "application/json", "connection": "close"}  # the rest of the request is not read
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    await send_response(send, error.status, json.dumps(error.body).encode(), headers)


async def send_response(send: Send, status: int, body: bytes, headers: Mapping[str, str]) -> None:
    """Send a whole response."""
    pairs = {**headers, "content-length": str(len(body))}.items()
    encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})


async def read_body(receive: Receive, limit: int) -> tuple[list[Message], bytes | None]:
    """The messages of a request and its body; None where the client left before its end, or after `limit` bytes."""
    messages, body = [], bytearray()
    while True:
        messages.append(await receive())
        body += messages[-1].get("body", b"")
        if left(messages) or len(body) > limit:
            return messages, None
        if not messages[-1].get("more_body", False):
            return messages, bytes(body)


def left(messages: Sequence[Message]) -> bool:
    """Whether the client has left after these messages."""
    return str(messages[-1]["type"]) != "http.request"


def replay(messages: Sequence[Message], rest: Receive) -> Receive:
    """Give messages that were read once more, then what comes after them."""
    pending = deque(messages)

    async def receive() -> Message:
        return pending.popleft() if pending else await rest()

    return receive


class Reply:
    """Collects the messages of a response, which also go to `send`."""

    def __init__(self, send: Send | None = None) -> None:
        self.send = send
        self.messages: list[Message] = []

    async def __call__(self, message: Message) -> None:
        if self.send is not None:
            await self.send(message)
        self.messages.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)


class HostNames:
    """The names by which a server may be asked: those of this machine, and those that `allowed` adds. A page elsewhere
    can have its own name point at this machine (DNS rebinding), and would count as one of this server's."""

    def __init__(self, allowed: Iterable[str]) -> None:
        own = socket.gethostname()
        self.patterns = [name.strip("[]").lower() for name in ("localhost", own, own.partition(".")[0], *allowed)]

    def find_foreign(self, scope: Scope) -> str | None:
        """What is wrong with the Host header of a request, if anything; HTTP/1.0 may leave it out."""
        for named in [value.decode("latin-1") for header, value in scope["headers"] if header == b"host"]:
            found = _HOST.fullmatch(named)
            if found is None or not self._is_own(found[1].strip("[]").lower()):
                return f"this server does not answer to the name {named[:100]!r}: allow it with --allowed-host"
        return None

    def _is_own(self, host: str) -> bool:
        """Whether a name is allowed, or is an address: nobody can have that point elsewhere."""
        with suppress(ValueError):
            return bool(ip_address(host))
        return any(fnmatchcase(host.removesuffix("."), pattern) for pattern in self.patterns)


class HostGuard:
    """An ASGI application in front of vLLM's."""

    def __init__(self, app: ASGI) -> None:
        self.app, self.names = app, HostNames(json.loads(os.environ.get(HOSTS_VARIABLE, "[]")))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self.names.find_foreign(scope) if scope["type"] in ("http", "websocket") else None
        if problem is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await refuse(send, RefusedError(421, problem))
        else:
            await send({"type": "websocket.close", "code": 1008, "reason": problem})
