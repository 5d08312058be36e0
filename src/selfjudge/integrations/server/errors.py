"""Refusals and failures as OpenAI's clients read them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from selfjudge.errors import SelfJudgeError
from selfjudge.integrations.asgi import error_body
from selfjudge.integrations.server.jobs import Failure

FAILURES: dict[Failure, tuple[int, str]] = {
    "cancelled": (499, "the client has gone"),
    "timeout": (504, "the answer took too long"),
    "shutdown": (503, "the server is about to stop"),
    "error": (500, "decoding failed: the server's log says why"),
}


class RefusedError(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        self.status, self.body = status, error_body(status, message, code, param)


def add_handlers(app: FastAPI) -> None:
    """Answer every exception in OpenAI's shape."""

    @app.exception_handler(RefusedError)
    async def refused(_: Request, error: RefusedError) -> Response:
        retry = {"Retry-After": "1"} if error.status in (429, 503) else None
        return JSONResponse(error.body, error.status, retry)

    @app.exception_handler(SelfJudgeError)
    async def wrong_value(_: Request, error: SelfJudgeError) -> Response:
        return JSONResponse(error_body(400, str(error)), 400)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        where, message = _described(error.errors()[0])
        return JSONResponse(error_body(400, f"{where}: {message}" if where else message, param=where or None), 400)

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Response:
        return JSONResponse(error_body(error.status_code, str(error.detail)), error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> Response:
        return JSONResponse(error_body(500, "the server failed: its log says why"), 500)


def _described(first: dict[str, Any]) -> tuple[str, str]:
    """The field that pydantic complains about first, and what is wrong with it."""
    where = ".".join(str(part) for part in first["loc"][1:])
    if first["type"] == "extra_forbidden":
        return where, "this server does not know such a field"
    if first["type"] == "json_invalid" or (not where and first["type"] != "value_error"):
        return "", "the body must be a JSON object, sent with content-type: application/json"
    return where, str(first["msg"]).removeprefix("Value error, ")
