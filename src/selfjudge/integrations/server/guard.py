"""Checked before every request: its headers, the API key and the size of the body. Counts what was answered."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Sequence

from selfjudge.integrations.asgi import ASGI, Message, Receive, Scope, Send, left, read_body, refuse, replay
from selfjudge.integrations.server.metrics import Metrics

ENDPOINTS = {"/", "/health", "/metrics", "/v1/models", "/v1/completions", "/v1/chat/completions"}
OPEN = ("/", "/health")  # need no key: the playground's page asks for it itself
BODY_SECONDS = 30.0  # time that a client has to send the body of its request


class Guard:
    """An ASGI application around another one."""

    def __init__(self, app: ASGI, *, keys: Sequence[str], max_bytes: int, metrics: Metrics) -> None:
        self.app, self.metrics, self.max_bytes = app, metrics, max_bytes
        self.keys = [f"Bearer {key}".encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                endpoint = scope["path"] if scope["path"] in ENDPOINTS else "other"
                mode = scope["state"].get("mode", "")  # known once a completion was accepted
                self.metrics.add("requests_total", endpoint=endpoint, status=str(message["status"]), mode=mode)
            await send(message)

        headers = dict(scope["headers"])
        sent = headers.get(b"authorization", b"")
        known = [number for number, key in enumerate(self.keys) if hmac.compare_digest(sent, key)]
        scope.setdefault("state", {}).update(key=known[0] if known else 0, arrived=time.perf_counter())
        if (problem := _find_ambiguity(scope["headers"])) is not None:
            await refuse(counted, 400, problem)
            return
        if self.keys and not known and scope["path"] not in OPEN:
            await refuse(counted, 401, "wrong or missing API key: send it as a bearer token", "invalid_api_key")
            return
        try:
            async with asyncio.timeout(BODY_SECONDS):
                messages = await self._read(headers, receive)
        except TimeoutError:
            await refuse(counted, 408, "the request did not arrive in time")
            return
        if messages is None:
            await refuse(counted, 413, f"the request has more than {self.max_bytes} bytes", "request_too_large")
            return
        await self.app(scope, replay(messages, receive), counted)

    async def _read(self, headers: dict[bytes, bytes], receive: Receive) -> list[Message] | None:
        """The messages of a request; None if it is too large."""
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > self.max_bytes:
            return None
        messages, body = await read_body(receive, self.max_bytes)
        return messages if body is not None or left(messages) else None


def _find_ambiguity(headers: Sequence[tuple[bytes, bytes]]) -> str | None:
    """Why a proxy and this server could read a request differently, if so."""
    names = [name for name, _ in headers]
    if b"content-length" in names and b"transfer-encoding" in names:
        return "a request has a content-length or a transfer-encoding, not both"
    if names.count(b"authorization") > 1:
        return "a request has one authorization header"
    return None
