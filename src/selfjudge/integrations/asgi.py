"""ASGI messages, and errors as OpenAI's clients read them: for our server and our middlewares in front of vLLM's."""

import json
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGI = Callable[[Scope, Receive, Send], Awaitable[None]]

KINDS = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error", 504: "timeout"}


class RefusedError(Exception):
    """A request that is answered with an error, which OpenAI's clients read."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        readable = " ".join(message.encode("utf-8", "replace").decode().split())  # one line, no lone surrogates
        kind = KINDS.get(status, "invalid_request_error")
        self.status = status
        self.body = {"error": {"message": readable[:1000], "type": kind, "param": param, "code": code}}


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
