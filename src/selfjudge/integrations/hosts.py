"""By which names a server may be asked, for our server and in front of vLLM's.

A page elsewhere can have a name of its own point at this machine (DNS rebinding): what the page then asks would count
as coming from this server's own pages. Such requests carry that name in their Host header, and are refused."""

import json
import os
import re
import socket
from collections.abc import Iterable
from contextlib import suppress
from fnmatch import fnmatchcase
from ipaddress import ip_address

from selfjudge.integrations.asgi import ASGI, Receive, RefusedError, Scope, Send, refuse

VARIABLE = "SELFJUDGE_ALLOWED_HOSTS"  # the variable that has, in front of vLLM, the allowed names as JSON
MIDDLEWARE = "selfjudge.integrations.hosts.HostGuard"  # for vLLM's `--middleware`
ALLOWED = re.compile(r"[\w.*-]+|\[?[0-9a-fA-F]*:[\w:.%]*\]?")
"""A name, with `*` for any part of it, or an address; without a port."""
_HOST = re.compile(r"(\[[^]]*\]|[^:]*)(:\d*)?")


class HostNames:
    """The names of this machine, and those that `allowed` adds."""

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
        self.app, self.names = app, HostNames(json.loads(os.environ.get(VARIABLE, "[]")))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self.names.find_foreign(scope) if scope["type"] in ("http", "websocket") else None
        if problem is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await refuse(send, RefusedError(421, problem))
        else:
            await send({"type": "websocket.close", "code": 1008, "reason": problem})
