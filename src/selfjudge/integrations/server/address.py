"""Where the server listens. Imports no torch: an address that cannot be had is refused at once."""

from __future__ import annotations

import errno
import socket

from selfjudge.errors import SelfJudgeError, first_line


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to that address, before the models are loaded; missing packages are noticed here, too."""
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise SelfJudgeError(f"serving needs {error.name}: pip install 'selfjudge[serve]'") from None
    if not 0 <= port < 1 << 16:
        raise SelfJudgeError(f"cannot listen on {host}:{port}: ports lie between 0 and 65535")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        hint = "; choose another `port`" if error.errno == errno.EADDRINUSE else ""
        raise SelfJudgeError(f"cannot listen on {host}:{port}: {first_line(error)}{hint}") from None
    return listener
