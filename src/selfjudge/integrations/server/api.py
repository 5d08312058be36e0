"""The HTTP surface: OpenAI's chat completions, completions and models, health and metrics; the playground's page."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from selfjudge.errors import EMPTY_PROMPT
from selfjudge.integrations.asgi import ASGI
from selfjudge.integrations.server.answers import CHAT, TEXT, respond
from selfjudge.integrations.server.errors import RefusedError, add_handlers
from selfjudge.integrations.server.guard import Guard
from selfjudge.integrations.server.playground import headers, page
from selfjudge.integrations.server.schema import ChatRequest, TextRequest
from selfjudge.integrations.server.service import Service

COMPLETION_TOKENS = 16  # of a text completion that names no length, as at OpenAI


def make_app(service: Service) -> ASGI:
    """The application, guarded."""
    app = FastAPI(title="selfjudge", docs_url=None, redoc_url=None)
    scheduler, metrics = service.scheduler, service.scheduler.metrics
    metrics.gauge("event_loop_tasks", "Tasks of the event loop.", lambda: len(asyncio.all_tasks()))
    add_handlers(app)

    @app.get("/", include_in_schema=False)
    async def playground() -> Response:
        """The page for people."""
        return Response(page(), media_type="text/html", headers=headers())

    @app.get("/health")
    async def health() -> Response:
        """Whether requests are welcome."""
        if scheduler.closed or not scheduler.alive:
            return JSONResponse({"status": "stopping" if scheduler.closed else "broken"}, 503)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics_text() -> Response:
        """Figures for Prometheus."""
        return PlainTextResponse(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models")
    async def models() -> Response:
        """The one model there is."""
        return JSONResponse({"object": "list", "data": [service.model()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """The model of that name."""
        service.check_model(name)
        return JSONResponse(service.model())

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatRequest) -> Response:
        """Answer a conversation."""
        messages = [message.plain() for message in body.messages]
        if not any(message["content"].strip() for message in messages):
            raise RefusedError(400, EMPTY_PROMPT, param="messages")
        key: int = request.state.key
        job, updates = service.job(body, await service.encode(messages, key, raw=False), key, None)
        return await respond(service, request, body, job, updates, CHAT)

    @app.post("/v1/completions")
    async def completions(request: Request, body: TextRequest) -> Response:
        """Continue a text."""
        key: int = request.state.key
        prompt = await service.encode(body.single_prompt, key, raw=True)
        job, updates = service.job(body, prompt, key, COMPLETION_TOKENS)
        return await respond(service, request, body, job, updates, TEXT)

    return Guard(app, keys=service.config.keys, max_bytes=service.config.max_body, metrics=metrics)
