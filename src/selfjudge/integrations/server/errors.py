"""Refusals and failures as OpenAI's clients read them."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from selfjudge.errors import SelfJudgeError
from selfjudge.integrations.asgi import RefusedError


def add_handlers(app: FastAPI) -> None:
    """Answer every exception in OpenAI's shape."""
    for kind in (RefusedError, SelfJudgeError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _answer)


async def _answer(_: Request, error: Exception) -> Response:
    refusal = _as_refusal(error)
    retry = {"Retry-After": "1"} if refusal.status in (429, 503) else None
    headers = error.headers if isinstance(error, HTTPException) else retry
    return JSONResponse(refusal.body, refusal.status, headers)


def _as_refusal(error: Exception) -> RefusedError:
    match error:
        case RefusedError():
            return error
        case SelfJudgeError():
            return RefusedError(400, str(error))
        case HTTPException():
            return RefusedError(error.status_code, str(error.detail))
        case RequestValidationError():
            return _refuse_body(error)
    return RefusedError(500, "the server failed: its log says why")


def _refuse_body(error: RequestValidationError) -> RefusedError:
    """What pydantic complains about first."""
    first = error.errors()[0]
    kind, field = first["type"], ".".join(str(part) for part in first["loc"][1:])
    if kind == "json_invalid" or (not field and kind != "value_error"):
        return RefusedError(400, "the body must be a JSON object, sent with content-type: application/json")
    message = str(first["msg"]).removeprefix("Value error, ")
    if kind == "extra_forbidden":
        message = "this server does not know such a field"
    return RefusedError(400, f"{field}: {message}" if field else message, param=field or None)
