"""The playground: one page at `/` that shows an answer as it is decoded. It needs no other file and no other host. Our
own server answers `/` itself. In front of vLLM's server the page comes from `Playground`, an ASGI middleware."""

from __future__ import annotations

import json
import os
from functools import cache
from typing import TYPE_CHECKING

from selfjudge.integrations.asgi import ASGI, Receive, Reply, Scope, Send, send_response
from selfjudge.store import hash_source, read_asset

if TYPE_CHECKING:
    from selfjudge.tune.recipe import Recipe

FACTS = "SELFJUDGE_PLAYGROUND"  # the variable that has, in front of vLLM, the field `selfjudge` of a model as JSON
MIDDLEWARE = "selfjudge.integrations.server.playground.Playground"  # for vLLM's `--middleware`


@cache
def page() -> str:
    """The whole page. It says nothing about the server: that comes from `/v1/models`, which may need a key."""
    return read_asset(__package__, "playground.html").replace("/*STYLE*/", _style()).replace("/*SCRIPT*/", _script())


@cache
def headers() -> dict[str, str]:
    """Headers of the page: only its own script and style sheet run, and it talks to this server alone."""
    hashes = {"script": hash_source(_script()), "style": hash_source(_style())}
    declared = json.loads(read_asset(__package__, "headers.json"))
    return {name: value.format(**hashes) for name, value in declared.items()}


def describe(recipe: Recipe) -> dict[str, str]:
    """What the page says about the recipe in use: its name, what came out, and what is claimed."""
    from selfjudge.report.certificate import describe_claim, describe_result

    name, certificate = recipe.folder.resolve().name, recipe.certificate
    return {"name": name, "finding": describe_result(certificate), "claim": describe_claim(certificate)}


class Playground:
    """Answers `/` in front of another application, and adds to its models how their answers are decoded."""

    def __init__(self, app: ASGI) -> None:
        self.app, self.facts = app, json.loads(os.environ.get(FACTS, "{}"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        where = (scope.get("method"), scope.get("path")) if scope["type"] == "http" else None
        if where == ("GET", "/"):
            await send_response(send, 200, page().encode(), {**headers(), "content-type": "text/html; charset=utf-8"})
        elif where == ("GET", "/v1/models"):
            await self._send_models(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _send_models(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply()
        await self.app(scope, receive, reply)
        start, body = reply.messages[0], reply.body
        if start["status"] == 200:
            models = json.loads(body)
            for model in models.get("data", ()):
                model["selfjudge"] = self.facts
            body = json.dumps(models).encode()
        kept = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in start["headers"]}
        await send_response(send, start["status"], body, kept)


def _style() -> str:
    """The report's colours, controls and tokens, then what is the playground's own."""
    return read_asset("selfjudge.report", "page.css") + read_asset(__package__, "playground.css")


def _script() -> str:
    return "".join(read_asset(__package__, f"{name}.js") for name in ("server", "answer", "settings", "playground"))
