"""Lines of the log, for people or as JSON; each request has an id and leaves a line."""

import json
import logging
import re
import secrets
import time
from typing import Any
from urllib.parse import quote

from selfjudge.integrations import asgi

ACCESS = logging.getLogger("selfjudge.access")
PROBES = ("/health", "/ready", "/metrics")  # asked by machines all day: only their failures are logged
REQUEST_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {"time": self.formatTime(record), "level": record.levelname, "logger": record.name}
        line |= {"message": record.getMessage(), **getattr(record, "fields", {})}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure_log(form: str) -> None:
    """Write what this program, and the packages that it uses, have to say to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger().addHandler(handler)
    logging.getLogger("selfjudge").setLevel(logging.INFO)


class RequestLog:
    """An ASGI application around another one: responses carry the id that the client sent, or a new one."""

    def __init__(self, app: asgi.ASGI) -> None:
        self.app = app

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        begun, status, state = time.perf_counter(), 499, scope.setdefault("state", {})  # 499: the client has gone
        named = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        number = named if REQUEST_ID.fullmatch(named) else f"req-{secrets.token_hex(12)}"

        async def identified(message: asgi.Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", number.encode())]}
            await send(message)

        try:
            await self.app(scope, receive, identified)
        finally:
            seconds, path = round(time.perf_counter() - begun, 4), quote(scope["path"])
            line = {"request_id": number, "method": scope["method"], "path": path, "status": status, "seconds": seconds}
            if status >= 400 or path not in PROBES:
                words = f"{scope['method']} {path} {status} {seconds} s {number}"
                ACCESS.info(words, extra={"fields": {**line, "mode": state.get("mode", "")}})
