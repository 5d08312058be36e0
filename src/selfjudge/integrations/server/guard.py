"""Checked before every request: its headers, the API key and the size of the body. Counts what was answered."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from selfjudge.integrations.server.metrics import Metrics

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGI = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

KINDS = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error", 504: "timeout"}
OPEN = ("/", "/health")  # need no key: the playground's page asks for it itself
BODY_SECONDS = 30.0  # that a client has to send its request in


def error_body(status: int, message: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    readable = " ".join(message.encode("utf-8", "replace").decode().split())  # one line, no lone surrogates
    kind = KINDS.get(status, "invalid_request_error")
    return {"error": {"message": readable[:1000], "type": kind, "param": param, "code": code}}


class Guard:
    """An ASGI application around another one."""

    def __init__(self, app: ASGI, *, keys: Sequence[str], max_bytes: int, metrics: Metrics) -> None:
        self.app, self.metrics, self.max_bytes = app, metrics, max_bytes
        self.keys = [f"Bearer {key}".encode() for key in keys]
        self.known = {"/", "/health", "/metrics", "/v1/models", "/v1/completions", "/v1/chat/completions"}

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                endpoint = scope["path"] if scope["path"] in self.known else "other"
                mode = scope.get("state", {}).get("mode")  # known once a completion was accepted
                labels = {"endpoint": endpoint, "status": str(message["status"]), **({"mode": mode} if mode else {})}
                self.metrics.add("requests_total", **labels)
            await send(message)

        headers = dict(scope["headers"])
        if (problem := _ambiguous(scope["headers"])) is not None:
            await refuse(counted, 400, problem)
            return
        sent = headers.get(b"authorization", b"")
        known = [number for number, key in enumerate(self.keys) if hmac.compare_digest(sent, key)]
        scope.setdefault("state", {}).update(key=known[0] if known else 0, arrived=time.perf_counter())
        if self.keys and not known and scope["path"] not in OPEN:
            await refuse(counted, 401, "wrong or missing API key: send it as a bearer token", "invalid_api_key")
            return
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await self._body(headers, receive)
        except TimeoutError:
            await refuse(counted, 408, "the request did not arrive in time")
            return
        if body is None:
            await refuse(counted, 413, f"the request has more than {self.max_bytes} bytes", "request_too_large")
            return
        pending = [body]

        async def replay() -> Message:
            return pending.pop() if pending else await receive()

        await self.app(scope, replay, counted)

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> Message | None:
        """The whole body as one message, or what came instead of it; None if it is too large."""
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > self.max_bytes:
            return None
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return message
            body += message.get("body", b"")
            if len(body) > self.max_bytes:
                return None
            if not message.get("more_body", False):
                return {"type": "http.request", "body": bytes(body), "more_body": False}


def _ambiguous(headers: Sequence[tuple[bytes, bytes]]) -> str | None:
    """Why a proxy and we could read this request differently, if so."""
    names = [name for name, _ in headers]
    if b"content-length" in names and b"transfer-encoding" in names:
        return "a request has a content-length or a transfer-encoding, not both"
    if names.count(b"authorization") > 1:
        return "a request has one authorization header"
    return None


async def refuse(send: Send, status: int, message: str, code: str | None = None) -> None:
    """Answer with an error."""
    content = json.dumps(error_body(status, message, code)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    headers.append((b"connection", b"close"))  # the body, or the rest of it, is not read
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
