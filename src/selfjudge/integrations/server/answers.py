"""Answers of the completion endpoints, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from selfjudge.integrations.asgi import error_body
from selfjudge.integrations.server.errors import FAILURES, RefusedError
from selfjudge.integrations.server.jobs import CompletionJob, Update
from selfjudge.integrations.server.scheduler import Scheduler
from selfjudge.integrations.server.schema import Request as Body
from selfjudge.integrations.server.service import Service
from selfjudge.types import Generation


@dataclass(frozen=True)
class Format:
    """The fields of an endpoint's answers."""

    id_prefix: str
    whole: str
    """The `object` of a whole answer."""
    chunk: str
    """The `object` of a chunk of a stream."""
    choice: Callable[[str], dict[str, Any]]
    delta: Callable[[str], dict[str, Any]]
    first: dict[str, Any] | None = None
    """What a stream begins with."""


CHAT = Format(
    "chatcmpl-",
    "chat.completion",
    "chat.completion.chunk",
    lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    lambda text: {"delta": {"content": text} if text else {}},
    {"delta": {"role": "assistant", "content": ""}},
)
TEXT = Format("cmpl-", "text_completion", "text_completion", lambda text: {"text": text}, lambda text: {"text": text})


@dataclass(frozen=True)
class Exchange:
    """A job under way for one request."""

    service: Service
    body: Body
    job: CompletionJob
    updates: asyncio.Queue[Update]
    format: Format
    watch: asyncio.Future[None]
    head: dict[str, Any]

    def end(self) -> None:
        """Stop watching the client; a job that is not over is given up."""
        self.watch.cancel()
        self.service.scheduler.cancel(self.job, "cancelled")

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        try:
            while (update := await self.updates.get()).result is None:
                if update.failure:
                    raise RefusedError(*FAILURES[update.failure])
        finally:
            self.end()
        result = update.result
        choice = {"index": 0, **self.format.choice(result.text), "logprobs": None, "finish_reason": _finish(result)}
        return {**self.head, "choices": [choice], "usage": _usage(result), "selfjudge": self._statistics(result)}

    async def events(self) -> AsyncIterator[str]:
        """The answer as server-sent events."""
        usage = bool(self.body.stream_options and self.body.stream_options.include_usage)
        no_usage: dict[str, Any] = {"usage": None} if usage else {}

        def event(choice: dict[str, Any] | None, finish: str | None = None, **more: Any) -> str:
            choices = [] if choice is None else [{"index": 0, **choice, "logprobs": None, "finish_reason": finish}]
            return _event({**self.head, "choices": choices, **no_usage, **more})

        try:
            if self.format.first is not None:
                yield event(self.format.first)
            while True:
                update = await self.updates.get()
                if update.text or update.pieces:
                    yield event(self.format.delta(update.text), **_tokens(update))
                if update.failure:
                    yield _event(error_body(*FAILURES[update.failure]))
                    return
                if update.result is not None:
                    statistics = self._statistics(update.result)
                    yield event(self.format.delta(""), _finish(update.result), selfjudge=statistics)
                    if usage:
                        yield event(None, usage=_usage(update.result))
                    yield "data: [DONE]\n\n"
                    return
        finally:
            self.end()

    def _statistics(self, result: Generation) -> dict[str, Any]:
        options = self.body.selfjudge
        listed = options is not None and options.judged_tokens
        return self.service.statistics(self.job, result, judged_tokens=listed)


async def respond(
    service: Service, request: Request, body: Body, job: CompletionJob, updates: asyncio.Queue[Update], form: Format
) -> Response:
    """Put the job in the queue and answer the request."""
    request.state.mode = job.choice.mode  # for the guard's count
    job.arrived = request.state.arrived  # encoding the prompt counts
    with service.refusing():
        service.scheduler.submit(job)
    head = {
        "id": form.id_prefix + secrets.token_hex(12),
        "object": form.chunk if body.stream else form.whole,
        "created": int(time.time()),
        "model": service.name,
    }
    waited = time.perf_counter() - job.arrived
    watch = asyncio.ensure_future(_watch(request, service.scheduler, job, service.config.timeout - waited))
    exchange = Exchange(service, body, job, updates, form, watch, head)
    if not body.stream:
        return JSONResponse(await exchange.whole())
    return StreamingResponse(exchange.events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


async def _watch(request: Request, scheduler: Scheduler, job: CompletionJob, seconds: float) -> None:
    """Give the job up when the client goes away or the time is over."""
    try:
        async with asyncio.timeout(seconds):
            while (await request.receive())["type"] != "http.disconnect":
                pass
    except TimeoutError:
        scheduler.cancel(job, "timeout")
    else:
        scheduler.cancel(job, "cancelled")


def _tokens(update: Update) -> dict[str, Any]:
    """The field `selfjudge` of a chunk whose tokens were asked for."""
    if not update.pieces:
        return {}
    tokens = [
        {
            **(asdict(piece.judged) if piece.judged else {}),
            "token": piece.token,
            "text": piece.text,
            "origin": piece.origin,
        }
        for piece in update.pieces
    ]
    return {"selfjudge": {"cycle": update.cycle, "tokens": tokens}}


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


def _finish(result: Generation) -> str:
    return "length" if result.finish == "length" else "stop"


def _usage(result: Generation) -> dict[str, int]:
    prompt, completion = result.prompt_tokens, len(result.tokens)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
