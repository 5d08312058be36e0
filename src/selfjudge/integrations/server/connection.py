"""Connections before their request is there: how long a client may take for its head, and how many may be open."""

from __future__ import annotations

import asyncio
import json

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from selfjudge.integrations.asgi import error_body
from selfjudge.integrations.server.config import ServerConfig

REASONS = {408: "Request Timeout", 503: "Service Unavailable"}


class Connection(H11Protocol):
    """uvicorn's connection, with a time limit for the head of a request and a limit on their number.

    Where there are too many, a new one takes the place of the one that has waited longest for a head: clients that
    send no request keep nobody out. If all have a request under way the new one is answered with 503.
    """

    header_timeout: float
    max_connections: int
    _surplus = False
    _head_timer: asyncio.TimerHandle | None = None
    _waiting_since: float | None = None
    """On the event loop's clock; None while a request is under way."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            others = [one for one in self.connections if isinstance(one, Connection) and one._waiting_since is not None]
            if others:
                min(others, key=lambda one: one._waiting_since or 0.0)._give_up()
            self._surplus = not others
        self._waiting_since = self.loop.time()
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        if self._surplus and len(self.connections) > self.max_connections:
            self._refuse(503, f"{self.max_connections} connections are open already: try again later")
            return
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._end_wait()
        elif self._head_timer is None and not self.transport.is_closing():  # the next request on this connection
            self._start_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE:
            self._waiting_since = self.loop.time()  # uvicorn closes the connection if nothing comes

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_wait()
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.header_timeout, self._head_is_late)

    def _end_wait(self) -> None:
        self._waiting_since, self._surplus = None, False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._refuse(408, f"the head of the request did not arrive within {self.header_timeout:g} seconds")

    def _give_up(self) -> None:
        """Leave the place to another connection, now."""
        self._end_wait()
        self.connections.discard(self)
        self.transport.abort()

    def _refuse(self, status: int, message: str) -> None:
        """Answer without a request, and close."""
        self._end_wait()
        self.connections.discard(self)
        content = json.dumps(error_body(status, message)).encode()
        retry = "Retry-After: 1\r\n" if status == 503 else ""
        head = (
            f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Type: application/json\r\nConnection: close\r\n"
            f"{retry}Content-Length: {len(content)}\r\n\r\n"
        )
        self.transport.write(head.encode() + content)
        self.transport.close()


def connection_class(config: ServerConfig) -> type[Connection]:
    """For uvicorn, which makes the connections itself."""

    class Limited(Connection):
        header_timeout = config.header_timeout
        max_connections = config.max_connections

    return Limited
