"""The HTTP surface: OpenAI's chat completions, completions and models, health and metrics; the playground's page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from selfjudge.decoding.rule_parser import RuleRequest
from selfjudge.engine.select import PairEngines
from selfjudge.integrations.asgi import ASGI, RefusedError
from selfjudge.integrations.server.completions import Completion, Encoder
from selfjudge.integrations.server.errors import add_handlers
from selfjudge.integrations.server.guard import Guard
from selfjudge.integrations.server.playground import headers, page
from selfjudge.integrations.server.scheduler import Scheduler
from selfjudge.integrations.server.schema import ChatRequest, TextRequest


def make_app(name: str, scheduler: Scheduler, recipe: Mapping[str, str] | None = None) -> ASGI:
    """The application, guarded. `recipe` is what `playground.describe` says of the recipe in use."""
    app = FastAPI(title="selfjudge", docs_url=None, redoc_url=None)
    config, metrics = scheduler.config, scheduler.metrics
    encoder, since = Encoder(scheduler.pair), int(time.time())
    metrics.gauge("event_loop_tasks", "Tasks of the event loop.", lambda: len(asyncio.all_tasks()))
    add_handlers(app)

    def describe_model() -> dict[str, Any]:
        facts = {**_describe_decoding(scheduler), "max_tokens": config.max_tokens, "recipe": recipe}
        return {
            "id": name,
            "object": "model",
            "created": since,
            "owned_by": "selfjudge",
            "max_model_len": config.max_context,
            "selfjudge": facts,
        }

    def check_model(wanted: str | None) -> None:
        if wanted not in (None, name):
            message = f"there is no model {wanted!r} here, only {name!r}"
            raise RefusedError(404, message, "model_not_found", "model")

    async def complete(request: Request, body: ChatRequest | TextRequest) -> Response:
        check_model(body.model)
        return await Completion(name, scheduler, encoder, request, body).respond()

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
        return JSONResponse({"object": "list", "data": [describe_model()]})

    @app.get("/v1/models/{wanted:path}")
    async def model(wanted: str) -> Response:
        """The model of that name."""
        check_model(wanted)
        return JSONResponse(describe_model())

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatRequest) -> Response:
        """Answer a conversation."""
        return await complete(request, body)

    @app.post("/v1/completions")
    async def completions(request: Request, body: TextRequest) -> Response:
        """Continue a text."""
        return await complete(request, body)

    return Guard(app, keys=config.keys, max_bytes=config.max_body, metrics=metrics)


def _describe_decoding(scheduler: Scheduler) -> dict[str, Any]:
    """How requests are decoded that name nothing, for the field `selfjudge` of the model."""
    rules, pair = scheduler.rules, scheduler.pair
    return {
        "backend": "torch",
        **rules.choose().as_json(),
        "theta": rules.theta,
        "gamma_exact": rules.choose(off=True).gamma,
        "gamma_relaxed": rules.choose(RuleRequest("topk")).gamma,
        "judge": rules.judge is not None,
        "refuted": rules.refuted,
        "device": pair.target.device.type,
        "dtype": pair.dtype,
        "draft_dtype": PairEngines(pair, scheduler.config.engine).draft_dtype,
    }
