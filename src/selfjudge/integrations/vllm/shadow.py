"""The monitor (`tune.monitor`) in front of vLLM's server: an ASGI middleware, named by vLLM's `--middleware`.
A share of the greedy requests that name no rule is asked again with `off`, once at most half of the engine's places are
taken. After a refutation, requests that name no rule are sent on with `off`. A request of more than LARGEST bytes may
name one: it is passed on as it comes, not asked again, and refused after a refutation. vLLM gives a middleware no
settings, so they come from the variable SELFJUDGE_SHADOW."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from typing import Any

from selfjudge.errors import SelfJudgeError
from selfjudge.integrations import asgi
from selfjudge.integrations.asgi import ASGI, Message, Receive, Reply, Scope, Send, left, read_body, replay
from selfjudge.integrations.server.config import ServerConfig
from selfjudge.integrations.vllm.config import KEY, parse_object, read_options
from selfjudge.tune.monitor import Shadow, compute_loss, measure_answer, watch, watch_scope
from selfjudge.tune.recipe import Recipe

VARIABLE = "SELFJUDGE_SHADOW"
MIDDLEWARE = "selfjudge.integrations.vllm.shadow.ShadowMiddleware"
ENDPOINTS = (("POST", "/v1/chat/completions"), ("POST", "/v1/completions"))
LARGEST = ServerConfig.max_body
EVERY = 0.2  # seconds between two looks at a busy engine
PLACES = 8  # of an engine that does not say how many it has

LOG = logging.getLogger("vllm.selfjudge")  # vLLM shows its own loggers


def load_settings() -> tuple[Recipe, float]:
    """What `selfjudge serve --shadow` wrote to the variable: recipe and share of the requests."""
    settings = parse_object(os.environ.get(VARIABLE, ""), VARIABLE)
    if settings.keys() != {"recipe", "load", "share"}:
        raise SelfJudgeError(f"{VARIABLE} does not hold what `selfjudge serve --shadow` writes there")
    return Recipe.load(settings["recipe"]).at(settings["load"]), float(settings["share"])


class ShadowMiddleware:
    """See the module's docstring."""

    def __init__(self, app: ASGI, registry: Any = None) -> None:
        from prometheus_client import REGISTRY  # which vLLM shows

        recipe, share = load_settings()
        self.app, self.under_way = app, 0
        self.shadow = Shadow(watch(recipe), share, LOG, registry or REGISTRY, watch_scope(recipe))
        self._second: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (scope["method"], scope["path"]) not in ENDPOINTS:
            await self.app(scope, receive, send)
            return
        messages, body = await read_body(receive, LARGEST)
        refuted = self.shadow.monitor.refuted
        if body is None and not left(messages) and refuted:
            large = asgi.RefusedError(413, f"the request has more than {LARGEST} bytes", "request_too_large")
            await asgi.refuse(send, large)
            return
        request = _open_request(body or b"")
        if request is not None:
            if not _constrained(request):  # else every rule is exact
                self.shadow.notice(measure_answer(_prompt(request), 0, 0, 0))
            if refuted:
                scope, messages = _lossless(scope, request)
        chosen = request is not None and _comparable(request) and self.shadow.choose()
        first = Reply(send)
        self.under_way += 1
        try:
            await self.app(scope, replay(messages, receive), first if chosen else send)
        finally:
            self.under_way -= 1
            if request is not None and chosen:
                task = asyncio.create_task(self._ask_again(scope, request, _text(first)))
                self._second.add(task)
                task.add_done_callback(self._second.discard)

    async def _ask_again(self, scope: Scope, request: dict[str, Any], shown: str | None) -> None:
        """Ask the same without a rule, when there is time, and compare."""
        difference = None
        try:
            config = getattr(getattr(scope.get("app"), "state", None), "vllm_config", None)
            places = int(getattr(getattr(config, "scheduler_config", None), "max_num_seqs", PLACES))
            while shown is not None and self.under_way > places // 2:
                await asyncio.sleep(EVERY)
            if shown is None or self.shadow.monitor.refuted:
                return
            alone = {key: value for key, value in request.items() if key not in ("stream", "stream_options")}
            scope, messages = _lossless(scope, alone)
            second = Reply()
            await self.app(scope, replay(messages, asyncio.Future), second)
            if (exact := _text(second)) is not None:
                difference = await asyncio.to_thread(compute_loss, exact, shown)
        finally:
            self.shadow.end(difference)


def _comparable(request: dict[str, Any]) -> bool:
    """Whether a request is greedy and has one answer in words."""
    if _constrained(request) or request.get("tools") or request.get("n") not in (None, 1):
        return False
    in_words = isinstance(request.get("prompt", ""), str) or "messages" in request
    return in_words and bool(request.get("temperature") == 0)


def _constrained(request: dict[str, Any]) -> bool:
    """Whether a grammar constrains the answer; tools do if one must be called."""
    if any(request[name] for name in request if name == "structured_outputs" or name.startswith("guided_")):
        return True
    chosen = request.get("tools") and request.get("tool_choice") not in (None, "auto", "none")
    return bool(chosen) or request.get("response_format") not in (None, {"type": "text"})


def _prompt(request: dict[str, Any]) -> str:
    """The text of a request: its prompt, the text parts of its messages, and its tools, which chat templates show."""
    messages = [message for message in _as_list(request.get("messages")) if isinstance(message, dict)]
    contents = [request.get("prompt"), *(message.get("content") for message in messages)]
    parts = [part for content in contents for part in _as_list(content)]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    tools = json.dumps(request["tools"]) if request.get("tools") else None
    return "\n".join(text for text in (*texts, tools) if isinstance(text, str))


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _text(reply: Reply) -> str | None:
    """The text of a response; None unless it is whole."""
    start, *rest = reply.messages or [{}]
    if start.get("status") != 200 or not rest or rest[-1].get("more_body", False):
        return None
    types = [value for name, value in start.get("headers", ()) if name.lower() == b"content-type"]
    if not any(b"event-stream" in value for value in types):
        return _first_text(_parse(reply.body), "message")
    events = [line.removeprefix(b"data:").strip() for line in reply.body.splitlines()]
    if b"[DONE]" not in events:
        return None
    return "".join(_first_text(_parse(event), "delta") or "" for event in events if event.startswith(b"{"))


def _first_text(reply: dict[str, Any] | None, part: str) -> str | None:
    """The text of the first choice: of a chat its message or delta, of a completion its text."""
    choice: dict[str, Any] = next(iter((reply or {}).get("choices") or ()), {})
    text = choice.get("text") if "text" in choice else (choice.get(part) or {}).get("content")
    return text if isinstance(text, str) else None


def _parse(body: bytes) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError, SelfJudgeError):
        return parse_object(body.decode(), "the body")
    return None


def _extras(request: dict[str, Any]) -> dict[str, Any]:
    """What a request says besides OpenAI's fields; vLLM refuses what is not an object."""
    extras = request.get("vllm_xargs")
    return extras if isinstance(extras, dict) else {} if extras is None else {KEY: ""}


def _open_request(body: bytes) -> dict[str, Any] | None:
    """A request that leaves its rule to the engine; None for others."""
    request = _parse(body)
    with contextlib.suppress(SelfJudgeError):
        return None if request is None or read_options(_extras(request)) else request
    return None


def _lossless(scope: Scope, request: dict[str, Any]) -> tuple[Scope, list[Message]]:
    """The scope and the messages of a request, changed to be decoded losslessly."""
    body = json.dumps({**request, "vllm_xargs": {**_extras(request), KEY: '{"off": true}'}}).encode()
    headers = [(k, v) for k, v in scope["headers"] if k not in (b"content-length", b"transfer-encoding")]
    changed = {**scope, "headers": [*headers, (b"content-length", str(len(body)).encode())]}
    return changed, [{"type": "http.request", "body": body, "more_body": False}]
