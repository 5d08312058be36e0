"""The playground's page and what stands in front of vLLM's server, without a browser and without vLLM."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from fake_certificate import certificate
from selfjudge.integrations.server.playground import FACTS, MIDDLEWARE, Playground, describe, headers, page
from selfjudge.report.certificate import describe_claim, describe_result
from selfjudge.tune.recipe import Recipe


async def _models(scope: Any, receive: Any, send: Any) -> None:
    """Answers as vLLM does: 401 without a key, else its models in two pieces."""
    if not scope["headers"]:
        await send({"type": "http.response.start", "status": 401, "headers": [(b"x-own", b"1")]})
        await send({"type": "http.response.body", "body": b'{"error":"Unauthorized"}'})
        return
    body = json.dumps({"object": "list", "data": [{"id": "tiny"}]}).encode()
    head = [(b"Content-Length", str(len(body)).encode()), (b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": body[:9], "more_body": True})
    await send({"type": "http.response.body", "body": body[9:]})


def get(app: Any, path: str, method: str = "GET", key: bool = True) -> tuple[int, dict[bytes, bytes], bytes]:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": [(b"authorization", b"x")] if key else []}
    asyncio.run(app(scope, None, send))
    return sent[0]["status"], dict(sent[0]["headers"]), b"".join(m.get("body", b"") for m in sent[1:])


def test_the_page_is_whole_and_its_policy_allows_nothing_else() -> None:
    text = page()
    assert "/*STYLE*/" not in text
    assert "/*SCRIPT*/" not in text
    assert not re.search(r'\b(?:src|href)="(?!#|data:)', text)
    assert not re.search(r"\son\w+=\"|style=\"", text)
    policy = headers()["content-security-policy"]
    for tag, kind in (("script", "script-src"), ("style", "style-src")):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}'" in policy
    assert "unsafe" not in policy
    script = text.split("<script>")[1]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|localStorage", script)


def test_in_front_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"backend": "vllm", "rule": "judged", "gamma": 5}
    monkeypatch.setenv(FACTS, json.dumps(facts))
    app = Playground(_models)
    status, head, body = get(app, "/", key=False)
    assert (status, body.decode()) == (200, page())
    assert head[b"content-security-policy"].decode() == headers()["content-security-policy"]
    assert head[b"content-type"] == b"text/html; charset=utf-8"
    status, head, body = get(app, "/v1/models")
    assert json.loads(body)["data"] == [{"id": "tiny", "selfjudge": facts}]
    assert (status, head[b"content-length"]) == (200, str(len(body)).encode())
    status, head, body = get(app, "/v1/models", key=False)  # what needs a key says nothing without one
    assert (status, body, head[b"x-own"]) == (401, b'{"error":"Unauthorized"}', b"1")
    assert get(app, "/v1/other")[2] == get(_models, "/v1/other")[2]
    assert get(app, "/", method="POST")[2] == get(_models, "/")[2]
    module, _, name = MIDDLEWARE.rpartition(".")
    assert (module, name) == (Playground.__module__, Playground.__name__)


def test_a_recipe_is_described_by_its_certificate() -> None:
    recipe = Recipe(Path("somewhere/my-recipe"), {}, certificate())
    assert describe(recipe) == {
        "name": "my-recipe",
        "finding": describe_result(certificate()),
        "claim": describe_claim(certificate()),
    }
