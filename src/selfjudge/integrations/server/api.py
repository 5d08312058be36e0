"""The HTTP surface: OpenAI's chat completions, completions and models, health and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from selfjudge.decoding.rules import Sampling
from selfjudge.errors import EMPTY_PROMPT, SelfJudgeError
from selfjudge.integrations.server.guard import ASGI, Guard, error_body
from selfjudge.integrations.server.metrics import Metrics
from selfjudge.integrations.server.rules import Asked, Rules
from selfjudge.integrations.server.scheduler import ClosedError, Failure, FullError, Job, Limits, Scheduler, Update
from selfjudge.integrations.server.schema import ChatRequest, TextRequest
from selfjudge.integrations.server.schema import Request as Body
from selfjudge.models.pair import Pair
from selfjudge.types import Generation

FAILED: dict[Failure, tuple[int, str]] = {
    "cancelled": (499, "the client has gone"),
    "timeout": (504, "the answer took too long"),
    "shutdown": (503, "the server is about to stop"),
    "error": (500, "decoding failed: the server's log says why"),
}


class RefusedError(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        self.status, self.body = status, error_body(status, message, code, param)


@dataclass(frozen=True)
class Service:
    """Everything that the endpoints need."""

    name: str
    pair: Pair
    """With a tokenizer of its own: the decoding thread uses the other."""
    rules: Rules
    limits: Limits
    metrics: Metrics
    scheduler: Scheduler
    temperature: float = 0.0
    """Where a request names none."""
    tokenizing: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "tokenize"))
    since: int = field(default_factory=lambda: int(time.time()))

    async def encode(self, prompt: Any, *, raw: bool) -> list[int]:
        """Token ids of a prompt, made beside the event loop."""
        if isinstance(prompt, list) and raw:
            size = self.pair.target.get_output_embeddings().weight.shape[0]
            if not all(0 <= token < size for token in prompt):
                raise RefusedError(400, f"token ids lie between 0 and {size - 1}", param="prompt")
            return prompt
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.tokenizing, lambda: self.pair.encode(prompt, raw=raw))

    def job(self, body: Body, prompt: Sequence[int], usual: int | None) -> tuple[Job, asyncio.Queue[Update]]:
        """A job for a request, or RefusedError. `usual` is the length of an answer where the request names none."""
        if body.model not in (None, self.name):
            raise RefusedError(
                404, f"there is no model {body.model!r} here, only {self.name!r}", "model_not_found", "model"
            )
        room = self.limits.context - len(prompt)
        asked = body.most_tokens
        if room < 1 or (asked is not None and min(asked, self.limits.tokens) > room):
            raise RefusedError(
                400, f"the prompt has {len(prompt)} tokens and prompt and answer together at most {self.limits.context}:"
                " shorten the prompt or lower max_tokens", "context_length_exceeded",
                "messages" if isinstance(body, ChatRequest) else "prompt",
            )  # fmt: skip
        if asked is not None and asked > self.limits.tokens:
            raise RefusedError(400, f"max_tokens is at most {self.limits.tokens}, not {asked}", param="max_tokens")
        temperature = self.temperature if body.temperature is None else body.temperature
        sampling = None
        if temperature > 0:
            sampling = Sampling(temperature, 1.0 if body.top_p is None else body.top_p, body.top_k or 0)
        extension = Asked(**body.selfjudge.model_dump()) if body.selfjudge else Asked()
        choice = self.rules.choose(extension, sampling)
        updates: asyncio.Queue[Update] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def send(update: Update) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended, and nobody waits any more
                loop.call_soon_threadsafe(updates.put_nowait, update)

        job = Job(
            prompt, choice, asked or min(usual or self.limits.tokens, self.limits.tokens, room), send, tuple(body.stops),
            secrets.randbits(62) if body.seed is None else body.seed, bool(body.stream or body.stops),
        )  # fmt: skip
        return job, updates

    def figures(self, job: Job, result: Generation) -> dict[str, Any]:
        """The field `selfjudge` of a response."""
        return {
            "rule": job.choice.rule,
            "theta": getattr(self.rules.build(job.choice), "theta", None),
            "gamma": job.choice.gamma,
            "cycles": result.cycles,
            "mean_accepted_length": result.mean_accepted_length,
            "judged_share": result.judged_share,
        }


@dataclass(frozen=True)
class Shape:
    """How an endpoint words its answers."""

    prefix: str
    whole: str
    part: str
    choice: Callable[[str], dict[str, Any]]
    delta: Callable[[str], dict[str, Any]]
    first: dict[str, Any] | None = None


CHAT = Shape(
    "chatcmpl-", "chat.completion", "chat.completion.chunk",
    lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    lambda text: {"delta": {"content": text} if text else {}},
    {"delta": {"role": "assistant", "content": ""}},
)  # fmt: skip
TEXT = Shape("cmpl-", "text_completion", "text_completion", lambda text: {"text": text}, lambda text: {"text": text})


def make_app(service: Service, api_key: str | None) -> ASGI:
    """The application, guarded."""
    app = FastAPI(title="selfjudge", docs_url=None, redoc_url=None)
    scheduler, metrics, limits = service.scheduler, service.metrics, service.limits
    metrics.gauge("event_loop_tasks", "Tasks of the event loop.", lambda: len(asyncio.all_tasks()))

    @app.get("/health")
    async def health() -> Response:
        """Whether requests are welcome."""
        if scheduler.closed or not scheduler.alive:
            return JSONResponse({"status": "stopping" if scheduler.closed else "broken"}, 503)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def figures() -> Response:
        """Figures for Prometheus."""
        return PlainTextResponse(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models")
    async def models() -> Response:
        """The one model there is."""
        return JSONResponse({"object": "list", "data": [_model(service)]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """The model of that name."""
        if name != service.name:
            raise RefusedError(
                404, f"there is no model {name!r} here, only {service.name!r}", "model_not_found", "model"
            )
        return JSONResponse(_model(service))

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatRequest) -> Response:
        """Answer a conversation."""
        messages = [message.plain() for message in body.messages]
        if not any(message["content"].strip() for message in messages):
            raise RefusedError(400, EMPTY_PROMPT, param="messages")
        return await respond(request, body, await service.encode(messages, raw=False), CHAT, None)

    @app.post("/v1/completions")
    async def completions(request: Request, body: TextRequest) -> Response:
        """Continue a text."""
        return await respond(request, body, await service.encode(body.one_prompt, raw=True), TEXT, 16)

    async def respond(request: Request, body: Body, prompt: list[int], shape: Shape, usual: int | None) -> Response:
        job, updates = service.job(body, prompt, usual)
        try:
            scheduler.submit(job)
        except FullError:
            raise RefusedError(429, f"{limits.queue} requests wait already: try again later", "queue_full") from None
        except ClosedError:
            raise RefusedError(503, "the server is about to stop") from None
        watch = asyncio.ensure_future(_watch(request, scheduler, job, limits.seconds))
        head = {
            "id": shape.prefix + secrets.token_hex(12),
            "object": shape.part if body.stream else shape.whole,
            "created": int(time.time()),
            "model": service.name,
        }
        if body.stream:
            usage = bool(body.stream_options and body.stream_options.include_usage)
            events = _events(service, job, updates, watch, shape, head, usage)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        try:
            while (update := await updates.get()).result is None:
                if update.failure:
                    raise RefusedError(*FAILED[update.failure])
        finally:
            watch.cancel()
            scheduler.cancel(job, "cancelled")
        result = update.result
        choice = {"index": 0, **shape.choice(result.text), "logprobs": None, "finish_reason": _finish(result)}
        more = {"usage": _usage(result), "selfjudge": service.figures(job, result)}
        return JSONResponse({**head, "choices": [choice], **more})

    @app.exception_handler(RefusedError)
    async def refused(_: Request, error: RefusedError) -> Response:
        retry = {"Retry-After": "1"} if error.status in (429, 503) else None
        return JSONResponse(error.body, error.status, retry)

    @app.exception_handler(SelfJudgeError)
    async def wrong(_: Request, error: SelfJudgeError) -> Response:
        return JSONResponse(error_body(400, str(error)), 400)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        found = error.errors()[0]
        where = ".".join(str(part) for part in found["loc"][1:])
        message = str(found["msg"]).removeprefix("Value error, ")
        if found["type"] == "extra_forbidden":
            message = "this server knows no such field"
        elif found["type"] == "json_invalid" or (not where and found["type"] != "value_error"):
            where, message = "", "the body must be a JSON object, sent with content-type: application/json"
        return JSONResponse(error_body(400, f"{where}: {message}" if where else message, param=where or None), 400)

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Response:
        return JSONResponse(error_body(error.status_code, str(error.detail)), error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> Response:
        return JSONResponse(error_body(500, "the server failed: its log says why"), 500)

    return Guard(app, api_key=api_key, most_bytes=limits.body, metrics=metrics)


async def _watch(request: Request, scheduler: Scheduler, job: Job, seconds: float) -> None:
    """Give the job up when the client goes away or the time is over."""
    try:
        async with asyncio.timeout(seconds):
            while (await request.receive())["type"] != "http.disconnect":
                pass
    except TimeoutError:
        scheduler.cancel(job, "timeout")
    else:
        scheduler.cancel(job, "cancelled")


async def _events(
    service: Service,
    job: Job,
    updates: asyncio.Queue[Update],
    watch: asyncio.Future[None],
    shape: Shape,
    head: dict[str, Any],
    usage: bool,
) -> AsyncIterator[str]:
    """Server-sent events of one answer."""

    def event(choice: dict[str, Any] | None, finish: str | None = None, **more: Any) -> str:
        empty: dict[str, Any] = {"usage": None} if usage else {}
        choices = [] if choice is None else [{"index": 0, **choice, "logprobs": None, "finish_reason": finish}]
        return f"data: {json.dumps({**head, 'choices': choices, **empty, **more}, ensure_ascii=False)}\n\n"

    try:
        if shape.first is not None:
            yield event(shape.first)
        while True:
            update = await updates.get()
            if update.text:
                yield event(shape.delta(update.text))
            if update.failure:
                yield f"data: {json.dumps(error_body(*FAILED[update.failure]))}\n\n"
                return
            if update.result is not None:
                figures = service.figures(job, update.result)
                yield event(shape.delta(""), _finish(update.result), selfjudge=figures)
                if usage:
                    yield event(None, usage=_usage(update.result))
                yield "data: [DONE]\n\n"
                return
    finally:
        watch.cancel()
        service.scheduler.cancel(job, "cancelled")


def _finish(result: Generation) -> str:
    return "length" if result.finish == "length" else "stop"


def _usage(result: Generation) -> dict[str, int]:
    made = len(result.tokens)
    return {
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": made,
        "total_tokens": result.prompt_tokens + made,
    }


def _model(service: Service) -> dict[str, Any]:
    own = {"rule": service.rules.rule, "theta": service.rules.theta, "gamma": service.rules.gamma}
    context = {"max_model_len": service.limits.context}
    return {
        "id": service.name,
        "object": "model",
        "created": service.since,
        "owned_by": "selfjudge",
        **context,
        "selfjudge": own,
    }
