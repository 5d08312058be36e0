"""Runs the application under uvicorn: limits on connections, signals, and an end in order."""

import asyncio
import contextlib
import gc
import json
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from http import HTTPStatus

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from selfjudge.integrations.asgi import RefusedError
from selfjudge.integrations.server.api import make_app
from selfjudge.integrations.server.config import ServerConfig
from selfjudge.integrations.server.operation import configure_log
from selfjudge.integrations.server.playground import describe
from selfjudge.integrations.server.scheduler import Scheduler
from selfjudge.tune.recipe import Recipe


class Connection(H11Protocol):
    """uvicorn's connection, with time limits for the head of a request and for the reader of an answer, and a limit on
    the number of connections. Where there are too many, a new one takes the place of the one that has waited longest
    for a head: clients that send no request keep nobody out. If all have a request under way it gets a 503."""

    limits: ServerConfig
    _surplus = False
    _head_timer: asyncio.TimerHandle | None = None
    _read_timer: asyncio.TimerHandle | None = None
    _waiting_since: float | None = None  # time on the event loop's clock; None while a request is under way

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            waiting = [c for c in self.connections if isinstance(c, Connection) and c._waiting_since is not None]
            if waiting:
                min(waiting, key=lambda connection: connection._waiting_since or 0.0)._give_up()
            self._surplus = not waiting
        self._waiting_since = self.loop.time()
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        most = self.limits.max_connections
        if self._surplus and len(self.connections) > most:
            self._refuse(503, f"{most} connections are open already: try again later")
            return
        super().data_received(data)
        self._check_chunk()
        if self.conn.their_state is not h11.IDLE:
            self._end_wait()
        elif self._head_timer is None and not self.transport.is_closing():  # the next request on this connection
            self._start_timer()

    def _check_chunk(self) -> None:
        """Refuse a chunk by its size: a client that announces more than it sends would be waited for."""
        size = getattr(self.conn._reader, "_bytes_in_chunk", 0)
        if size > self.limits.max_body and self.conn.our_state is h11.SEND_RESPONSE:
            if size < 1 << 63:
                self._refuse(413, f"the request has more than {self.limits.max_body} bytes")
            else:
                self._refuse(400, "a chunk of the request has a size that no request can have")

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(400, "the request is not valid HTTP")
        else:
            self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE:
            self._waiting_since = self.loop.time()  # uvicorn closes the connection if nothing comes

    def pause_writing(self) -> None:
        super().pause_writing()
        self._read_timer = self.loop.call_later(self.limits.timeout, self.transport.abort)  # the client reads nothing

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._read_timer is not None:
            self._read_timer.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_wait()
        self.resume_writing()
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        seconds = self.limits.header_timeout
        late = f"the head of the request did not arrive within {seconds:g} seconds"
        self._head_timer = self.loop.call_later(seconds, self._refuse, 408, late)

    def _end_wait(self) -> None:
        self._waiting_since, self._surplus = None, False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        """Make room for another connection, now."""
        self._end_wait()
        self.connections.discard(self)
        self.transport.abort()

    def _refuse(self, status: int, message: str) -> None:
        """Answer without a request, and close."""
        self._end_wait()
        self.connections.discard(self)
        content = json.dumps(RefusedError(status, message).body).encode()
        retry = "Retry-After: 1\r\n" if status == 503 else ""
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\nConnection: close\r\n"
            f"{retry}Content-Length: {len(content)}\r\n\r\n"
        )
        self.transport.write(head.encode() + content)
        self.transport.close()


class Server(uvicorn.Server):
    """Leaves signals to us: uvicorn would raise them again at the end, and the exit code would not be 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(scheduler: Scheduler, recipe: Recipe | None, listener: socket.socket, notify: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT: then refuse new requests, finish those that run, and return. `notify` gets
    four lines once requests are welcome: where the API is, where the playground, what rule decides, and `ready`."""
    try:
        asyncio.run(run(scheduler, recipe, listener, notify))
    finally:
        scheduler.stop()
        listener.close()


async def run(
    scheduler: Scheduler, recipe: Recipe | None, listener: socket.socket, notify: Callable[[str], None]
) -> None:
    """Serve until a signal; a second one ends the server at once."""
    configure_log(scheduler.config.log_format)
    config = uvicorn.Config(
        make_app(scheduler, None if recipe is None else describe(recipe)),
        http=type("LimitedConnection", (Connection,), {"limits": scheduler.config}),  # h11, whatever else is installed
        ws="none",
        log_config=None,
        access_log=False,  # the guard's has request ids
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=5,
        h11_max_incomplete_event_size=1 << 16,
    )
    server = Server(config)
    connections = server.server_state.connections
    scheduler.metrics.gauge("connections", lambda: len(connections))
    loop = asyncio.get_running_loop()
    stopping: list[asyncio.Task[None]] = []

    def stop() -> None:
        if stopping:
            server.should_exit = server.force_exit = True
        else:
            stopping.append(loop.create_task(_drain(server, scheduler)))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    sys.setswitchinterval(5e-4)  # the decoding thread asks for the interpreter after each call into torch
    gc.collect()
    gc.freeze()  # else every full collection looks at all that is loaded, for tenths of a second
    listener.listen(128)  # whoever reads the line may connect at once
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    notify(f"serving {scheduler.config.name} at http://{shown}:{port}/v1")
    notify(f"playground at http://{shown}:{port}/")
    notify(f"requests that name no rule: {scheduler.rules.choose()}")
    captured = scheduler.warm_up is None or scheduler.warm_up.done
    notify("ready" if captured else "ready; the other graphs are captured while it is idle")
    await server.serve(sockets=[listener])


async def _drain(server: uvicorn.Server, scheduler: Scheduler) -> None:
    """Refuse new jobs, wait at most `grace` seconds for those that are there, then end the server."""
    scheduler.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(scheduler.config.grace):
            while scheduler.busy:
                await asyncio.sleep(0.02)
    await asyncio.to_thread(scheduler.stop)
    server.should_exit = True
