"""The HTTP surface: OpenAI's chat completions, completions and models, health and metrics; the playground's page.
Headers, API key and size of the body are checked before every request. Every exception is answered in OpenAI's shape.
"""

import asyncio
import hmac
import logging
import re
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI, HTTPException as UnreadableBody, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.exceptions import HTTPException

from selfjudge.engine.select import PairEngines
from selfjudge.errors import SelfJudgeError
from selfjudge.integrations import asgi
from selfjudge.integrations.asgi import ASGI, HostNames, RefusedError, refuse
from selfjudge.integrations.server.completions import Completion, Encoder
from selfjudge.integrations.server.playground import headers, page
from selfjudge.integrations.server.scheduler import Scheduler
from selfjudge.integrations.server.schema import COMPLAINTS, ChatRequest, TextRequest
from selfjudge.store import parse_json

ENDPOINTS = {"/", "/health", "/ready", "/metrics", "/v1/models", "/v1/completions", "/v1/chat/completions"}
NOT_FOUND = f"there is no such path here; there are: {', '.join(sorted(ENDPOINTS))}"
PROBES = ("/health", "/ready", "/metrics")  # asked by machines all day: only their failures are logged
OPEN = ("/", "/health", "/ready")  # need no key: the playground's page asks for it itself
SHORT_BODY = 1 << 16  # bytes of a body that is read within milliseconds; a longer one is read aside
BODY_SECONDS = 30.0  # time that a client has to send the body of its request
ACCESS = logging.getLogger("selfjudge.access")
REQUEST_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)


def make_app(scheduler: Scheduler, recipe: Mapping[str, str] | None) -> ASGI:
    """The application, guarded. `recipe` is what `playground.describe` says of the recipe in use."""
    app, answer = FastAPI(title="selfjudge", docs_url=None, redoc_url=None), Endpoints(scheduler, recipe)
    app.router.route_class = StrictRoute
    scheduler.metrics.gauge("event_loop_tasks", lambda: len(asyncio.all_tasks()))
    for kind in (RefusedError, SelfJudgeError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _answer)
    app.get("/", include_in_schema=False)(answer.playground)
    app.get("/health")(answer.health)
    app.get("/ready")(answer.ready)
    app.get("/metrics")(answer.metrics)
    app.get("/v1/models")(answer.models)
    app.get("/v1/models/{name:path}")(answer.model)
    app.post("/v1/chat/completions")(answer.chat)
    app.post("/v1/completions")(answer.completions)
    guarded = Guard(app, scheduler)
    if not (origins := scheduler.config.cors_origin):
        return guarded
    shown = ["x-request-id", "retry-after"]
    return CORSMiddleware(guarded, origins, allow_methods=["GET", "POST"], allow_headers=["*"], expose_headers=shown)


class Endpoints:
    """What is answered at each path."""

    def __init__(self, scheduler: Scheduler, recipe: Mapping[str, str] | None) -> None:
        self.scheduler, self.recipe, self.name = scheduler, recipe, scheduler.config.name
        self.encoder, self.since = Encoder(scheduler.pair), int(time.time())

    async def playground(self) -> Response:
        """The page for people."""
        return Response(page(), media_type="text/html", headers=headers())

    async def health(self) -> Response:
        """Whether requests are welcome, or why they are not."""
        if (why := self.scheduler.broken) is not None:
            return JSONResponse({"status": "broken", "error": why}, 503)
        return JSONResponse({"status": "stopping"}, 503) if self.scheduler.closed else JSONResponse({"status": "ok"})

    async def ready(self) -> Response:
        """Whether a request would find a place; health does not ask for one."""
        health = await self.health()
        return JSONResponse({"status": "full"}, 503) if health.status_code == 200 and self.scheduler.full else health

    async def metrics(self) -> Response:
        """Figures for Prometheus."""
        return Response(self.scheduler.metrics.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def models(self) -> Response:
        """The one model there is."""
        return JSONResponse({"object": "list", "data": [self._describe_model()]})

    async def model(self, name: str) -> Response:
        """The model of that name."""
        self._check_model(name)
        return JSONResponse(self._describe_model())

    async def chat(self, request: Request, body: ChatRequest) -> Response:
        """Answer a conversation."""
        self._check_model(body.model)
        return await Completion(self.scheduler, self.encoder, request, body).respond()

    async def completions(self, request: Request, body: TextRequest) -> Response:
        """Continue a text."""
        self._check_model(body.model)
        return await Completion(self.scheduler, self.encoder, request, body).respond()

    def _check_model(self, wanted: str | None) -> None:
        if wanted not in (None, self.name):
            message = f"there is no model {wanted!r} here, only {self.name!r}"
            raise RefusedError(404, message, "model_not_found", "model")

    def _describe_model(self) -> dict[str, Any]:
        """The model, and how requests are decoded that name nothing."""
        rules, pair, config = self.scheduler.rules, self.scheduler.pair, self.scheduler.config
        own = rules.choose()
        decoding = {
            "backend": "torch",
            **own.as_json(),
            "judge": rules.judge is not None,
            "uses_judge": own.rule.judge is not None,
            "refuted": rules.refuted,
            "device": pair.target.device.type,
            "dtype": pair.dtype,
            "draft_dtype": PairEngines(pair, config.engine).draft_dtype,
            "max_tokens": config.max_tokens,
            "recipe": self.recipe,
        }
        return {
            "id": self.name,
            "object": "model",
            "created": self.since,
            "owned_by": "selfjudge",
            "max_model_len": config.max_context,
            "selfjudge": decoding,
        }


async def _answer(_: Request, error: Exception) -> Response:
    match error:
        case RefusedError():
            refusal = error
        case SelfJudgeError():
            refusal = RefusedError(400, str(error))
        case HTTPException():
            refusal = RefusedError(error.status_code, NOT_FOUND if error.status_code == 404 else str(error.detail))
        case RequestValidationError():
            refusal = _refuse_fields(error)
        case _:
            refusal = RefusedError(500, "the server failed: its log says why")
    retry = {"Retry-After": "1"} if refusal.status in (429, 503) else None
    headers = error.headers if isinstance(error, HTTPException) else retry
    return JSONResponse(refusal.body, refusal.status, headers)


def _refuse_fields(error: RequestValidationError) -> RefusedError:
    """What pydantic says about the innermost field that is wrong, in our words."""
    complaints = [(_find_path(one, error.body), one) for one in error.errors()]
    path = max((path for path, _ in complaints), key=len)
    field, said = ".".join(path), [_describe(one) for one_path, one in complaints if one_path == path]
    message = " or ".join(dict.fromkeys(said)).replace(" or must be ", " or ")
    if not path and complaints[0][1]["type"] != "value_error":
        message = "the body must be a JSON object, sent with content-type: application/json"
    return RefusedError(400, f"{field}: {message}" if field else message, param=field or None)


def _find_path(complaint: Mapping[str, Any], body: Any) -> tuple[str, ...]:
    """The names of fields in a location of pydantic's, which has those of types in it, too."""
    path, location = [], complaint["loc"][1:]
    for part in location:
        if part in body if isinstance(body, dict) else isinstance(body, list) and isinstance(part, int):
            path.append(str(part))
            body = body[part] if isinstance(body, dict) or part < len(body) else None
    return (*path, *map(str, location[-1:] if complaint["type"] == "missing" else ()))


def _describe(complaint: Mapping[str, Any]) -> str:
    if complaint["type"] in COMPLAINTS:
        return COMPLAINTS[complaint["type"]].format(**complaint.get("ctx", {}))
    words = str(complaint["msg"]).removeprefix("Value error, ").replace(" after validation", "")
    return re.sub(r"^\w+ should ", "must ", words)


class StrictRequest(Request):
    async def json(self) -> Any:
        """The body, read as strictly as our files."""
        try:
            text = (await self.body()).decode()
            return await asyncio.to_thread(parse_json, text) if len(text) > SHORT_BODY else parse_json(text)
        except UnicodeDecodeError:
            raise UnreadableBody(400, "the body must be a JSON object in UTF-8") from None
        except ValueError as error:
            raise UnreadableBody(400, f"the body must be a JSON object: {error}") from None


class StrictRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(StrictRequest(request.scope, request.receive))

        return handle_strictly


class Guard:
    """An ASGI application around another one: what it answers is counted, logged and has a request id, sent or new."""

    def __init__(self, app: ASGI, scheduler: Scheduler) -> None:
        self.app, self.metrics, self.max_bytes = app, scheduler.metrics, scheduler.config.max_body
        self.names = HostNames(scheduler.config.allowed_host)
        self.keys = [f"Bearer {key}".encode() for key in scheduler.config.keys]

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        begun, status, path = time.perf_counter(), 499, scope["path"]  # 499: the client has gone
        state = scope.setdefault("state", {})  # has a `mode` once a completion was accepted
        state["send"] = send
        named = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        number = named if REQUEST_ID.fullmatch(named) else f"req-{asgi.make_id()}"

        async def noted(message: asgi.Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status, endpoint = message["status"], path if path in ENDPOINTS else "other"
                message = {**message, "headers": [*message["headers"], (b"x-request-id", number.encode())]}
                self.metrics.add("requests_total", endpoint=endpoint, status=str(status), mode=state.get("mode", ""))
            await send(message)

        try:
            await self._pass_on(scope, receive, noted)
        finally:
            if status >= 400 or path not in PROBES:
                seconds = round(time.perf_counter() - begun, 4)
                line = {"method": scope["method"], "path": quote(path), "status": status, "seconds": seconds}
                words = "{method} {path} {status} {seconds} s".format(**line)
                fields = {"request_id": number, **line, "mode": state.get("mode", "")}
                ACCESS.info(f"{words} {number}", extra={"fields": fields})

    async def _pass_on(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """Let the application answer, unless the request is refused by its head or for its size."""
        try:
            self._check(scope)
            async with asyncio.timeout(BODY_SECONDS):
                messages = await self._read(scope, receive)
        except RefusedError as error:
            await refuse(send, error)
        except TimeoutError:
            await refuse(send, RefusedError(408, "the request did not arrive in time"))
        else:
            await self.app(scope, asgi.replay(messages, receive), send)

    def _check(self, scope: asgi.Scope) -> None:
        """Refuse a request by its head; notes which key it has and when it came."""
        names = [name for name, _ in scope["headers"]]
        sent = dict(scope["headers"]).get(b"authorization", b"")
        known = [number for number, key in enumerate(self.keys) if hmac.compare_digest(sent, key)]
        scope["state"].update(key=known[0] if known else 0, arrived=time.perf_counter())
        if b"content-length" in names and b"transfer-encoding" in names:  # a proxy could read it differently
            raise RefusedError(400, "a request has a content-length or a transfer-encoding, not both")
        if names.count(b"authorization") > 1:
            raise RefusedError(400, "a request has one authorization header")
        if (problem := self.names.find_foreign(scope)) is not None:
            raise RefusedError(421, problem)
        if self.keys and not known and scope["path"] not in OPEN:
            raise RefusedError(401, "wrong or missing API key: send it as a bearer token", "invalid_api_key")

    async def _read(self, scope: asgi.Scope, receive: asgi.Receive) -> list[asgi.Message]:
        """The messages of a request."""
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) <= self.max_bytes:
            messages, body = await asgi.read_body(receive, self.max_bytes)
            if body is not None or asgi.left(messages):
                return messages
        raise RefusedError(413, f"the request has more than {self.max_bytes} bytes", "request_too_large")
