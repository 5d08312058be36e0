"""Second answers beside the first, in the scheduler and in front of vLLM's server, without HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from conftest import total
from fake_certificate import recipe_folder
from selfjudge.decoding.grammar import compile_grammar
from selfjudge.decoding.rule_parser import RuleRequest
from selfjudge.integrations.server.config import ServerConfig
from selfjudge.integrations.server.jobs import CompletionJob, ShadowJobs, Update
from selfjudge.integrations.server.operation import Metrics
from selfjudge.integrations.server.rules import Rules
from selfjudge.integrations.server.scheduler import LOG, Scheduler
from selfjudge.integrations.vllm import shadow as middleware
from selfjudge.models.pair import Pair
from selfjudge.tune.monitor import WAITING, DriftMonitor, Monitor, Shadow
from selfjudge.types import Generation
from spelling import save_spellers

Begin = Callable[..., Scheduler]


@pytest.fixture
def begin(tiny_pair: Pair) -> Iterator[Begin]:
    """Schedulers under topk:9, which changes nearly all words, that decode all requests both ways."""
    begun: list[Scheduler] = []

    def one(
        bound: float, n: int = 40, share: float = 1.0, drift: DriftMonitor | None = None, pair: Pair = tiny_pair
    ) -> Scheduler:
        rules, metrics = Rules(pair, None, RuleRequest("topk:9", gamma=2, strict_start=0)), Metrics()
        scheduler = Scheduler(pair, rules, ServerConfig(max_context=90, max_batch=8), metrics)
        shadow = Shadow(Monitor(bound, 0.05, n), share, LOG, metrics.registry, drift)
        scheduler.shadow = ShadowJobs(shadow, rules, metrics)
        begun.append(scheduler)
        return scheduler

    yield one
    for scheduler in begun:
        if scheduler._thread.is_alive():
            scheduler.stop()


def ask(scheduler: Scheduler, word: int, off: bool = False, trace: bool = False, **how: Any) -> queue.Queue[Update]:
    updates: queue.Queue[Update] = queue.Queue()
    choice = scheduler.rules.choose(RuleRequest(**how), off=off, trace=trace)
    scheduler.submit(CompletionJob((5, word), choice, 14, updates.put))
    return updates


def result(updates: queue.Queue[Update]) -> Generation:
    while (update := updates.get(timeout=600)).result is None:
        assert update.failure is None
    return update.result


def settled(scheduler: Scheduler, count: int) -> None:
    """Wait until so many requests have both answers."""
    for _ in range(3000):
        if total(scheduler.metrics, "shadow_requests_total") >= count:
            return
        assert scheduler._thread.is_alive()
        scheduler._thread.join(0.01)
    raise AssertionError(scheduler.metrics.text())


def outcomes(scheduler: Scheduler, outcome: str) -> float:
    return total(scheduler.metrics, "shadow_requests_total", outcome=outcome)


def test_a_bad_rule_is_switched_off_and_says_so_once(begin: Begin, caplog: pytest.LogCaptureFixture) -> None:
    scheduler = begin(0.02)
    scheduler.start()
    first = result(ask(scheduler, 6))
    assert "judge" in first.origins
    for i in range(1, 40):
        result(ask(scheduler, 6 + i % 50))
        settled(scheduler, i)
        if scheduler.rules.refuted:
            break
    assert scheduler.rules.refuted
    (line,) = [record for record in caplog.records if record.name == "selfjudge.server"]
    assert line.levelno == logging.WARNING
    assert "does not hold for these requests" in line.message
    assert "selfjudge_shadow_switched_off 1.0" in scheduler.metrics.text().splitlines()
    exact = result(ask(scheduler, 6))
    assert exact.tokens == result(ask(scheduler, 6, off=True)).tokens != first.tokens
    assert result(ask(scheduler, 6, rule="topk:9")).tokens == first.tokens  # who asks for it gets it
    counted = total(scheduler.metrics, "shadow_requests_total")
    result(ask(scheduler, 7))
    assert total(scheduler.metrics, "shadow_requests_total") == counted  # nothing is decoded twice any more


@pytest.mark.slow
def test_requests_unlike_the_calibration_switch_a_rule_off(begin: Begin, caplog: pytest.LogCaptureFixture) -> None:
    """No answer is decoded twice: what all of them show is enough. Requests with a rule of their own do not count."""
    scheduler = begin(0.99, share=0.0, drift=DriftMonitor({"passes_per_token": (0.0, 0.02)}, 0.05))
    scheduler.start()
    for i in range(12):
        result(ask(scheduler, 6 + i, rule="topk:8"))
    assert scheduler.shadow is not None
    assert scheduler.shadow.shadow.drift is not None
    assert scheduler.shadow.shadow.drift.bets["passes_per_token"][0].count == 0
    for i in range(150):
        result(ask(scheduler, 6 + i % 50))
        if scheduler.rules.refuted:
            break
    assert scheduler.rules.refuted
    (line,) = [record for record in caplog.records if record.name == "selfjudge.server"]
    assert "requests are unlike those of the certificate: passes_per_token is " in line.message
    assert "judge" not in result(ask(scheduler, 6)).origins
    assert "selfjudge_shadow_switched_off 1.0" in scheduler.metrics.text().splitlines()


def test_requests_under_a_grammar_do_not_count(begin: Begin, tmp_path: Path) -> None:
    """Such an answer is verified exactly, whatever the server's rule is."""
    pair = Pair.load(*save_spellers(tmp_path), device="cpu", dtype="float32")
    scheduler = begin(0.99, share=0.0, drift=DriftMonitor({"judged_share": (0.9, 1.0)}, 0.05), pair=pair)
    scheduler.start()
    assert scheduler.shadow is not None
    assert scheduler.shadow.shadow.drift is not None
    grammar = compile_grammar(pair, "start: /[a-z ]*/")
    for i in range(3):
        updates: queue.Queue[Update] = queue.Queue()
        choice = scheduler.rules.choose(RuleRequest().strictly())
        scheduler.submit(CompletionJob((5, 6 + i), choice, 14, updates.put, {"edits": (grammar.begin(),)}))
        assert "judge" not in result(updates).origins
    assert scheduler.shadow.shadow.drift.bets["judged_share"][0].count == 0
    assert "judge" in result(ask(scheduler, 6)).origins
    for _ in range(3000):
        if count := scheduler.shadow.shadow.drift.bets["judged_share"][0].count:
            break
        scheduler._thread.join(0.01)
    assert count == 1


def test_a_good_rule_is_not(begin: Begin, caplog: pytest.LogCaptureFixture) -> None:
    scheduler = begin(0.99)
    scheduler.start()
    for i in range(12):
        result(ask(scheduler, 6 + i))
    settled(scheduler, 12)
    assert not scheduler.rules.refuted
    assert not caplog.records
    assert outcomes(scheduler, "counted") == 12
    monitor = scheduler.shadow.shadow.monitor  # type: ignore[union-attr]
    assert 0 < monitor.loss < 0.99
    assert total(scheduler.metrics, "generations_total") == 12  # second answers are not those of clients
    assert scheduler.busy == 0


def test_requests_with_a_rule_of_their_own_are_left_alone(begin: Begin) -> None:
    scheduler = begin(0.5)
    scheduler.start()
    for how in ({"off": True}, {"rule": "topk:2"}, {"gamma": 3}):
        result(ask(scheduler, 6, **how))
    result(ask(scheduler, 6, trace=True))  # the server's own rule, with a report
    settled(scheduler, 1)
    assert total(scheduler.metrics, "shadow_requests_total") == 1
    none = begin(0.5, share=0.0)
    none.start()
    result(ask(none, 6))
    assert total(none.metrics, "shadow_requests_total") == 0


def test_second_answers_wait_for_a_calm_engine_and_never_hold_up_the_end(begin: Begin) -> None:
    scheduler = begin(0.99)
    shadow = scheduler.shadow
    assert shadow is not None
    updates = [ask(scheduler, 6 + i) for i in range(WAITING + 4)]  # no thread yet: all are chosen before any is decoded
    assert outcomes(scheduler, "skipped") == 4
    assert scheduler._second_answer() is None
    shadow.waiting.append(CompletionJob((5, 6), shadow._exact, 80, lambda update: None))
    assert scheduler._second_answer() is None  # others wait
    scheduler.start()
    for one in updates:
        result(one)
    scheduler.close()
    assert scheduler._second_answer() is None  # about to stop
    scheduler.stop()
    assert not scheduler._thread.is_alive()


def test_nothing_of_a_request_is_kept(
    begin: Begin, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.DEBUG)
    scheduler = begin(0.02)
    scheduler.start()
    for i in range(40):
        result(ask(scheduler, 6 + i))
        settled(scheduler, i + 1)
        if scheduler.rules.refuted:
            break
    assert scheduler.rules.refuted
    shadow = scheduler.shadow
    assert shadow is not None
    assert not list(tmp_path.iterdir())
    assert not shadow.waiting
    words = [f"w{i}" for i in range(2, 57)]
    shown = " ".join([scheduler.metrics.text(), *(record.getMessage() for record in caplog.records)]).split()
    assert not set(words) & set(shown)


class App:
    """vLLM's server as far as the middleware sees it: answers with other words where a rule decides."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.status = 200

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        while int(dict(scope["headers"])[b"content-length"]) > len(body):
            body += (await receive())["body"]
        request = json.loads(body)
        self.requests.append(request)
        off = "off" in (request.get("vllm_xargs") or {}).get("selfjudge", "")
        words = ["the", "same", "words"] if off else ["the", "other", "ones"]
        stream = request.get("stream")
        kind = b"text/event-stream" if stream else b"application/json"
        await send({"type": "http.response.start", "status": self.status, "headers": [(b"content-type", kind)]})
        parts = [json.dumps({"choices": [{"message": {"content": " ".join(words)}}]})]
        if stream:
            chunks = [{"choices": [{"delta": {"content": f"{word} "}}]} for word in words]
            parts = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"]
        for i, part in enumerate(parts):
            body = {"type": "http.response.body", "body": part.encode(), "more_body": i + 1 < len(parts)}
            await send(body)


class Front:
    """The middleware before such a server."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, share: float = 1.0):
        settings = {"recipe": str(folder), "load": 1, "share": share}
        monkeypatch.setenv(middleware.VARIABLE, json.dumps(settings))
        self.app, self.registry = App(), CollectorRegistry()
        self.layer = middleware.ShadowMiddleware(self.app, self.registry)
        self.monitor = self.layer.shadow.monitor

    def outcomes(self) -> dict[str, float]:
        metrics = self.registry.restricted_registry(["selfjudge_shadow_requests_total"]).collect()
        return {sample.labels["outcome"]: sample.value for metric in metrics for sample in metric.samples}

    async def post(self, path: str = "/v1/chat/completions", **request: Any) -> str:
        """The body of the response, once all second answers are there."""
        body = json.dumps({"messages": [{"role": "user", "content": "a secret"}], "temperature": 0, **request}).encode()
        halves = [{"type": "http.request", "body": body[:9], "more_body": True},
                  {"type": "http.request", "body": body[9:], "more_body": False}]  # fmt: skip
        sent: list[Any] = []

        async def receive() -> Any:
            return halves.pop(0) if halves else {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"content-length", str(len(body)).encode())]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
        await self.layer(scope, receive, send)
        while self.layer._second:
            await asyncio.sleep(0)
        return b"".join(message.get("body", b"") for message in sent).decode()


@pytest.fixture
def recipe(tiny_pair: Pair, tmp_path: Path) -> Path:
    return recipe_folder(tmp_path / "tuned", tiny_pair, measure="overlap", epsilon=0.05, n=12)


def test_vllm_requests_are_asked_twice_until_the_certificate_is_refuted(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    front = Front(recipe, monkeypatch)

    async def traffic() -> str:
        for i in range(40):
            assert "other" in await front.post(stream=bool(i % 2), stream_options={"include_usage": True})
            if front.monitor.refuted:
                break
        before = len(front.app.requests)
        last = await front.post()
        assert len(front.app.requests) == before + 1  # no second answer any more
        assert "other" in await front.post(vllm_xargs={"selfjudge": '{"theta": 0.5}'})
        for nothing in ("{}", '{"off": false}'):  # leaves the rule to the engine, too
            await front.post(vllm_xargs={"selfjudge": nothing})
            assert front.app.requests[-1]["vllm_xargs"] == {"selfjudge": '{"off": true}'}
        return last

    assert "same" in asyncio.run(traffic())
    assert front.monitor.loss == pytest.approx(2 / 3)
    second = front.app.requests[1]
    assert second["vllm_xargs"] == {"selfjudge": '{"off": true}'}
    assert "stream" not in second
    (line,) = [record for record in caplog.records if record.name == "vllm.selfjudge"]
    assert "secret" not in line.message
    assert front.registry.get_sample_value("selfjudge_shadow_switched_off") == 1
    assert front.outcomes() == {"counted": front.monitor.count}


def test_vllm_requests_that_cannot_be_compared_pass_untouched(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    front = Front(recipe, monkeypatch)
    alone = [
        {"temperature": 0.7}, {"n": 2}, {"tools": [{"type": "function"}]}, {"vllm_xargs": {"selfjudge": '{"off": true}'}},
        {"path": "/v1/embeddings"}, {"response_format": {"type": "json_object"}}, {"guided_regex": "[a-z]+"},
        {"structured_outputs": {"choice": ["a", "b"]}}, {"vllm_xargs": {"selfjudge": "{"}}, {"vllm_xargs": []},
    ]  # fmt: skip
    for request in alone:
        before = len(front.app.requests)
        asyncio.run(front.post(**request))
        assert len(front.app.requests) == before + 1, request
    assert not front.outcomes()
    front.app.status = 429
    asyncio.run(front.post(response_format={"type": "text"}, structured_outputs=None))
    assert front.outcomes() == {"failed": 1}
    assert front.monitor.count == 0
    nobody = Front(recipe, monkeypatch, share=0.0)
    asyncio.run(nobody.post())
    assert len(nobody.app.requests) == 1


@pytest.mark.parametrize(
    ("request_", "structured"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Write a function."}]}]}, 1),
        ({"messages": [{"role": "user", "content": "Hi"}], "tools": [{"type": "function", "name": "f"}]}, 1),
        ({"prompt": ["Write a program."]}, 1),
        ({"prompt": "Answer in JSON."}, 1),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}, {"text": "Hi"}]}, 3]}, 0),
        ({"prompt": [1, 2]}, 0),
        ({"messages": 5}, 0),
    ],
)
def test_the_kind_of_a_request_is_seen_in_all_its_parts(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, request_: dict[str, Any], structured: float
) -> None:
    front, noticed = Front(recipe, monkeypatch, share=0.0), []
    monkeypatch.setattr(front.layer.shadow, "notice", noticed.append)
    asyncio.run(front.post(**{"messages": None, **request_}))
    assert noticed == [{"structured": structured}]


def test_requests_under_a_grammar_say_nothing_of_the_traffic(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rule is exact there. Tools that may be left alone constrain nothing."""
    front, noticed, tools = Front(recipe, monkeypatch, share=0.0), [], [{"type": "function", "name": "f"}]
    monkeypatch.setattr(front.layer.shadow, "notice", noticed.append)
    for request in (
        {"response_format": {"type": "json_object"}}, {"guided_regex": "[a-z]+"}, {"structured_outputs": {"choice": ["a", "b"]}},
        {"tools": tools, "tool_choice": "required"}, {"tools": tools, "tool_choice": {"type": "function", "function": {"name": "f"}}},
    ):  # fmt: skip
        asyncio.run(front.post(**request))
    assert not noticed
    for request in (
        {},
        {"response_format": {"type": "text"}},
        {"tools": tools},
        {"tools": tools, "tool_choice": "auto"},
    ):
        asyncio.run(front.post(**request))
    assert len(noticed) == 4


def test_the_middleware_wants_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", "[]", '{"folder": 1}'):
        monkeypatch.setenv(middleware.VARIABLE, value)
        with pytest.raises(middleware.SelfJudgeError, match=middleware.VARIABLE):
            middleware.load_settings()


def test_a_large_request_is_passed_on_unread_and_refused_once_its_rule_is(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "LARGEST", 300)
    front, large = Front(recipe, monkeypatch), "w" * 300
    assert "other" in asyncio.run(front.post(user=large))
    assert front.app.requests[0]["user"] == large
    assert len(front.app.requests) == 1
    assert not front.outcomes()
    front.monitor.refuted = True
    refused = json.loads(asyncio.run(front.post(user=large)))
    assert refused["error"]["message"] == "the request has more than 300 bytes"
    assert len(front.app.requests) == 1
    assert "same" in asyncio.run(front.post(user="w"))


def test_a_client_that_leaves_before_the_end_of_its_request(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    front = Front(recipe, monkeypatch)
    messages = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
    coming, seen = iter(messages), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.extend([await receive(), await receive()])

    async def receive() -> Any:
        return next(coming)

    async def send(message: Any) -> None:
        raise AssertionError(message)

    front.layer.app = app
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    asyncio.run(front.layer(scope, receive, send))
    assert seen == messages
    assert not front.outcomes()
