"""Runs the application under uvicorn and ends it in order."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn

from selfjudge.integrations.server.api import make_app
from selfjudge.integrations.server.connection import connection_class
from selfjudge.integrations.server.scheduler import Scheduler
from selfjudge.integrations.server.service import Service


class Server(uvicorn.Server):
    """Leaves signals to us: uvicorn would raise them again at the end, and the exit code would not be 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def run(service: Service, listener: socket.socket, notify: Callable[[str], None] | None) -> None:
    """Serve until a signal; a second one ends the server at once."""
    config = uvicorn.Config(
        make_app(service),
        http=connection_class(service.config),  # named, so that no other parser is chosen because it is installed
        ws="none",
        log_level="warning",
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=5,
        h11_max_incomplete_event_size=1 << 16,
    )
    server = Server(config)
    connections = server.server_state.connections
    service.scheduler.metrics.gauge("connections", "Connections that are open.", lambda: len(connections))
    loop = asyncio.get_running_loop()
    stopping: list[asyncio.Task[None]] = []

    def stop() -> None:
        if stopping:
            server.should_exit = server.force_exit = True
        else:
            stopping.append(loop.create_task(_drain(server, service.scheduler, service.config.grace)))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    if notify:
        listener.listen(128)  # whoever reads the line may connect at once
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        notify(f"serving {service.name} at http://{shown}:{port}/v1")
        notify(f"playground at http://{shown}:{port}/")
        notify(f"requests that name no rule: {service.rules.choose()}")
    await server.serve(sockets=[listener])


async def _drain(server: uvicorn.Server, scheduler: Scheduler, grace: float) -> None:
    """Refuse new jobs, wait at most `grace` seconds for those that are there, then end the server."""
    scheduler.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(grace):
            while scheduler.busy:
                await asyncio.sleep(0.02)
    await asyncio.to_thread(scheduler.stop)
    server.should_exit = True
