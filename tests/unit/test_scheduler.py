"""Queue and batches without HTTP: who comes first, who goes, and what a failure takes along."""

from __future__ import annotations

import asyncio
import json
import queue
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conftest import total
from selfjudge.decoding import adjust, text
from selfjudge.decoding.adjust import LogProbabilities
from selfjudge.decoding.rule_parser import RuleRequest
from selfjudge.decoding.sampling import Sampling
from selfjudge.decoding.text import Batch, StepOutput, generate
from selfjudge.errors import SelfJudgeError
from selfjudge.integrations.asgi import RefusedError
from selfjudge.integrations.server import scheduler as scheduler_module
from selfjudge.integrations.server.api import Endpoints
from selfjudge.integrations.server.config import ServerConfig
from selfjudge.integrations.server.jobs import CompletionJob, Update
from selfjudge.integrations.server.operation import Metrics
from selfjudge.integrations.server.rules import Rules
from selfjudge.integrations.server.scheduler import Scheduler, WarmUp, start_scheduler
from selfjudge.models.pair import Pair
from selfjudge.store import run_folder

Begin = Callable[..., Scheduler]


@pytest.fixture
def begin(tiny_pair: Pair) -> Iterator[Begin]:
    """Schedulers that end with the test."""
    begun: list[Scheduler] = []

    def one(**limits: int | str) -> Scheduler:
        rules = Rules(tiny_pair, None, RuleRequest("exact", gamma=2))
        begun.append(
            Scheduler(tiny_pair, rules, ServerConfig(**{"max_context": 90, "max_batch": 8, **limits}), Metrics())
        )
        return begun[-1]

    yield one
    for scheduler in begun:
        if scheduler._thread.is_alive():
            scheduler.stop()


ALONE = "topk:1,strict_start=0"  # `exact` under another name, which does not share a batch


def job(
    scheduler: Scheduler, gamma: int = 2, tokens: int = 20, prompt: tuple[int, ...] = (5, 6), rule: str = "exact"
) -> tuple[CompletionJob, queue.Queue]:
    updates: queue.Queue[Update] = queue.Queue()
    choice = scheduler.rules.choose(RuleRequest(rule, gamma=gamma))
    return CompletionJob(prompt, choice, tokens, updates.put), updates


def last(updates: queue.Queue) -> Update:
    while True:
        update: Update = updates.get(timeout=600)
        if update.result is not None or update.failure:
            return update


def test_nobody_overtakes(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch of rules that share none: the second such rule waits for the first, and holds back later requests."""
    monkeypatch.setattr(scheduler_module, "OWN_BATCHES", 1)
    scheduler = begin(max_batch=4)
    order: list[tuple[int, ...]] = []
    add = Batch.add
    monkeypatch.setattr(Batch, "add", lambda self, prompt, **o: order.append(tuple(prompt)) or add(self, prompt, **o))
    rules = ("exact", ALONE, "topk:1,strict_start=1", "exact", ALONE)
    jobs = [job(scheduler, prompt=(5, 6 + i), rule=rule) for i, rule in enumerate(rules)]
    for one, _ in jobs:
        scheduler.submit(one)
    scheduler.start()
    for (_, updates), i in zip(jobs, range(5), strict=True):
        result = last(updates).result
        assert result is not None
        assert result.tokens == generate_ids(scheduler.pair, (5, 6 + i))
    assert order == [(5, 6 + i) for i in range(5)]
    assert scheduler.busy == 0


def generate_ids(pair: Pair, prompt: tuple[int, ...]) -> tuple[int, ...]:
    (made,) = generate(pair, [pair.tokenizer.decode(list(prompt))], gamma=2, max_new_tokens=20, raw=True)
    return made.tokens


def test_requests_of_unlike_rules_share_a_batch(begin: Begin) -> None:
    """Rules, γ, temperatures and traces; each answer is what it is in a batch of its own."""
    scheduler, made = begin(max_batch=8), []
    asked = [("exact", 2, None), ("margin:2", 3, None), ("margin:price=1.5", 4, None), (None, 3, Sampling(0.8)),
             ("exact", 0, None), (None, 2, Sampling(1.2, top_p=0.8)), ("margin:3,strict_start=0", "auto", None)]  # fmt: skip
    for i, (rule, gamma, sampling) in enumerate(asked):
        updates: queue.Queue[Update] = queue.Queue()
        choice = scheduler.rules.choose(RuleRequest(rule, gamma=gamma), sampling, trace=i % 2 == 0)
        made.append((CompletionJob((5, 6 + i), choice, 20, updates.put, {"seed": i}), updates))
        scheduler.submit(made[-1][0])
    assert scheduler._prepare()
    assert len(scheduler._batches) == 1
    scheduler.start()
    for (one, updates), (rule, gamma, sampling) in zip(made, asked, strict=True):
        result = last(updates).result
        assert result is not None
        gamma = result.gamma if gamma == "auto" else gamma
        batch = Batch(scheduler.pair, rule or "sampling", gamma=gamma, sampling=sampling)
        alone = batch.add(one.prompt, max_new_tokens=20, **one.options)
        while len(batch):
            batch.step()
        assert result.tokens == tuple(alone.tokens), one.choice
        assert result.gamma == gamma


def test_a_prompt_whose_log_probabilities_are_read_holds_up_no_answer(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers go on between the passes that read it, and one after the other is read."""
    monkeypatch.setattr(adjust, "PROMPT_CHUNK", 8)
    scheduler, noted = begin(), [LogProbabilities() for _ in range(2)]
    progress: list[list[int]] = []
    choice = scheduler.rules.choose(RuleRequest("exact", gamma=0))
    long = CompletionJob(
        (5, 6), choice, 40, lambda _: progress.append([len(one.noted) for one in noted]), detailed=True
    )
    echoed = []
    for one in noted:
        updates: queue.Queue[Update] = queue.Queue()
        own = CompletionJob((7, *range(10, 49)), choice, 3, updates.put, {"edits": (one,)}, logprobs=one, echoed=True)
        echoed.append((own, updates))
    for own in (long, *(own for own, _ in echoed)):
        scheduler.submit(own)
    scheduler.start()
    for own, updates in echoed:
        assert last(updates).result is not None
        assert own.logprobs is not None
        assert [entry.token for entry in own.logprobs.noted[:40]] == [*own.prompt]
    for which in range(2):
        assert len({counts[which] for counts in progress} & {9, 17, 25, 33}) > 1  # a pass may read the other prompt
    assert not any(0 < first < 40 and second for first, second in progress)


def test_a_prompt_is_read_no_further_once_its_client_has_gone(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adjust, "PROMPT_CHUNK", 8)
    scheduler, noted = begin(), LogProbabilities()
    own, updates = job(scheduler, prompt=(7, *range(10, 49)))
    own = replace(own, options={"edits": (noted,)}, logprobs=noted, echoed=True)
    advance = noted.advance

    def leave(tokens: tuple[int, ...]) -> None:
        advance(tokens)
        scheduler.cancel(own, "cancelled")

    monkeypatch.setattr(noted, "advance", leave)
    scheduler.submit(own)
    scheduler.start()
    assert last(updates).failure == "cancelled"
    assert len(noted.noted) == 9


def test_an_answer_without_memory_to_begin_with_says_so(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Batch, "add", fail)
    scheduler = begin()
    one, updates = job(scheduler)
    scheduler.submit(one)
    scheduler.start()
    assert last(updates).failure == "memory"


def test_a_batch_that_fails_takes_its_own_answers_along(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = begin()
    step = Batch.step

    def sometimes(self: Batch, crowded: bool = False) -> StepOutput:
        if self._decoding.shared is None and self._answers:
            raise MemoryError("no room")
        return step(self, crowded)

    monkeypatch.setattr(Batch, "step", sometimes)
    good, bad = job(scheduler), job(scheduler, rule=ALONE)
    for one, _ in (good, bad):
        scheduler.submit(one)
    scheduler.start()
    assert last(bad[1]).failure == "error"
    assert last(good[1]).result is not None
    monkeypatch.setattr(Batch, "step", step)
    again = job(scheduler, rule=ALONE)
    scheduler.submit(again[0])
    assert last(again[1]).result is not None
    assert scheduler._thread.is_alive()
    assert scheduler.busy == 0


def test_a_device_that_runs_nothing_more_ends_decoding(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pass would fail: the probes must not say that all is well."""

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    for method in ("add", "step"):
        scheduler = begin(max_batch=2)
        one, updates = job(scheduler)
        scheduler.submit(one)
        with monkeypatch.context() as patch:
            patch.setattr(Batch, method, fail)
            patch.setattr(torch, "ones", fail)
            scheduler.start()
            assert last(updates).failure == "error"
            scheduler._thread.join(600)
        assert "an illegal memory access" in str(scheduler.broken)


@pytest.mark.parametrize("where", ["_turn", "_next", "_end"])
def test_an_error_that_ends_decoding_ends_every_request(
    begin: Begin, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Those that are decoded, those that wait, and later ones; the probes say why."""
    scheduler = begin(max_batch=2)
    flushed: list[int] = []
    scheduler.flush = lambda: flushed.append(1)
    jobs = [job(scheduler, prompt=(5, 6 + i)) for i in range(4)]
    for one, _ in jobs:
        scheduler.submit(one)

    def fail(*_: Any, **__: Any) -> None:
        flushed.clear()
        raise KeyError("no such row\nat all")

    monkeypatch.setattr(scheduler, where, fail)
    scheduler.start()
    assert [last(updates).failure for _, updates in jobs] == ["error"] * 4
    scheduler._thread.join(600)
    assert flushed
    assert scheduler.busy == 0
    assert total(scheduler.metrics, "generations_total", finish="error") == 4
    for late in (lambda: scheduler.submit(job(scheduler)[0]), scheduler.reserve().__enter__):
        with pytest.raises(
            RefusedError, match="decoding has ended, start the server again: KeyError: 'no such row"
        ) as no:
            late()
        assert (no.value.status, no.value.body["error"]["type"]) == (503, "server_error")
    endpoints = Endpoints(scheduler, None)
    for probe in (endpoints.health, endpoints.ready):
        answer = asyncio.run(probe())
        assert (answer.status_code, json.loads(bytes(answer.body))) == (
            503,
            {"status": "broken", "error": str(no.value)},
        )


def test_what_a_key_has_read_is_found_by_this_key_alone(begin: Begin) -> None:
    scheduler = begin()
    scheduler.pair.target_model.kept.pop("prefixes", None)
    scheduler.start()
    cached, tokens = [], []
    for key in (1, 1, 2, 1, 2):
        one, updates = job(scheduler, prompt=tuple(range(10, 50)))
        one.key = key
        scheduler.submit(one)
        result = last(updates).result
        assert result is not None
        cached.append(result.cached_tokens)
        tokens.append(result.tokens)
    assert cached == [0, 31, 0, 31, 31]
    assert tokens == tokens[:1] * 5
    assert total(scheduler.metrics, "cached_prompt_tokens_total") == 93


def test_without_a_prefix_cache_all_prompts_are_read(begin: Begin) -> None:
    scheduler = begin(prefix_cache="0")
    scheduler.start()
    for _ in range(2):
        one, updates = job(scheduler, prompt=tuple(range(10, 50)))
        scheduler.submit(one)
        result = last(updates).result
        assert result is not None
        assert result.cached_tokens == 0
    with pytest.raises(SelfJudgeError, match="`prefix_cache` is a share"):
        ServerConfig(prefix_cache="much").check()


def test_who_gives_up_leaves_the_queue_or_the_batch(begin: Begin) -> None:
    scheduler = begin(max_queue=2)
    jobs = [job(scheduler, tokens=80) for _ in range(2)]
    for one, _ in jobs:
        scheduler.submit(one)
    with pytest.raises(RefusedError, match="wait already"):
        scheduler.submit(job(scheduler)[0])
    scheduler.cancel(jobs[0][0], "cancelled")  # it waits still: there is no thread yet
    assert last(jobs[0][1]).failure == "cancelled"
    assert scheduler.busy == 1
    scheduler.start()
    scheduler.cancel(jobs[1][0], "timeout")
    assert last(jobs[1][1]).failure in ("timeout", None)  # unless it was faster
    scheduler.cancel(jobs[1][0], "cancelled")  # what is over is over
    assert jobs[1][1].empty()


def test_the_end_gives_up_what_is_left(begin: Begin) -> None:
    scheduler = begin(max_batch=1)
    jobs = [job(scheduler, tokens=80) for _ in range(3)]
    for one, _ in jobs:
        scheduler.submit(one)
    scheduler.start()
    scheduler.stop()
    assert not scheduler._thread.is_alive()
    assert last(jobs[2][1]).failure == "shutdown"
    assert all(one.over for one, _ in jobs)
    with pytest.raises(RefusedError, match="about to stop"):
        scheduler.submit(job(scheduler)[0])


@pytest.mark.parametrize("rule", ["exact", ALONE], ids=["one batch", "two batches"])
def test_a_long_prompt_lets_short_ones_pass(begin: Begin, rule: str) -> None:
    """Both wait before the thread starts; the long one comes first, and wants no more tokens."""
    scheduler, order = begin(), []
    jobs = []
    for name, prompt, own in (("long", (5, 6) * 40, "exact"), ("short", (5, 6), rule)):
        new, updates = job(scheduler, tokens=1, prompt=prompt, rule=own)
        new.send = lambda update, name=name, updates=updates: (order.append(name), updates.put(update))
        jobs.append((new, updates))
        scheduler.submit(new)
    scheduler.start()
    assert all(last(updates).result is not None for _, updates in jobs)
    assert list(dict.fromkeys(order)) == ["short", "long"]


def test_metrics_are_what_prometheus_reads() -> None:
    metrics = Metrics()
    metrics.add("requests_total", endpoint="/health", status="200", mode="")
    metrics.add("requests_total", 2, endpoint="/health", status="503", mode="")
    for seconds in (0.003, 0.3, 1000.0):
        metrics.observe("request_seconds", seconds, "off")
    metrics.gauge("running", lambda: 3)
    lines = metrics.text().splitlines()
    assert 'selfjudge_requests_total{endpoint="/health",mode="",status="503"} 2.0' in lines
    assert 'selfjudge_request_seconds_bucket{le="0.25",mode="off"} 1.0' in lines
    assert 'selfjudge_request_seconds_bucket{le="+Inf",mode="off"} 3.0' in lines
    assert "selfjudge_running 3.0" in lines
    assert not [line for line in lines if "_created" in line]
    assert total(metrics, "requests_total") == 3
    assert total(metrics, "requests_total", status="503") == 2


def test_metrics_tell_judged_from_off(begin: Begin) -> None:
    scheduler = begin()
    scheduler.start()
    made = {}
    for mode, rule in (("judged", "topk:9,strict_start=0"), ("off", "exact")):
        updates: queue.Queue[Update] = queue.Queue()
        scheduler.submit(CompletionJob((5, 6), scheduler.rules.choose(RuleRequest(rule)), 20, updates.put))
        made[mode] = last(updates).result
    count = partial(total, scheduler.metrics)
    lines = scheduler.metrics.text().splitlines()
    for mode, result in made.items():
        assert count("generations_total", mode=mode) == 1
        assert count("tokens_total", mode=mode) == len(result.tokens)
        assert count("tokens_total", mode=mode, origin="judge") == result.origins.count("judge")
        assert count("cycles_total", mode=mode) == result.cycles
        assert f'selfjudge_mean_accepted_length{{mode="{mode}"}} {result.mean_accepted_length}' in lines
        assert f'selfjudge_request_seconds_count{{mode="{mode}"}} 1.0' in lines
    assert made["off"].judged_share == 0 < made["judged"].judged_share


def test_keys_take_turns_and_leave_each_other_a_place(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four jobs of the first key are there before the second asks; the first may hold two of three places."""
    scheduler = begin(api_key="a,b", max_batch=3, max_queue=8)
    order: list[int] = []
    add = Batch.add
    monkeypatch.setattr(Batch, "add", lambda self, prompt, **o: order.append(prompt[1]) or add(self, prompt, **o))
    jobs = [job(scheduler, prompt=(5, 10 + i)) for i in range(4)] + [job(scheduler, prompt=(5, 20)) for _ in range(2)]
    for one, _ in jobs:
        one.key = int(one.prompt[1] >= 20)
        scheduler.submit(one)
    with pytest.raises(RefusedError, match="wait already"):
        scheduler.submit(replace(jobs[0][0]))
    scheduler.start()
    for _, updates in jobs:
        assert last(updates).result is not None
    assert order[:3] == [10, 20, 11]
    assert sorted(order) == [10, 11, 12, 13, 20, 20]
    assert order.index(12) < order.index(13)


def test_requests_that_share_a_batch_wait_for_no_rule_that_has_its_own(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "OWN_BATCHES", 1)
    scheduler = begin()
    alone, other, shared = (job(scheduler, rule=rule) for rule in (ALONE, "topk:1,strict_start=1", "exact"))
    for waiting, allowed in ((other, None), (shared, shared[0])):
        scheduler.submit(waiting[0])
        assert scheduler._next([alone[0]]) is allowed
        scheduler._queue.clear()


def test_a_request_that_is_being_encoded_holds_a_place(begin: Begin) -> None:
    scheduler = begin(max_queue=2)
    with scheduler.reserve(), scheduler.reserve():
        with pytest.raises(RefusedError, match="wait already"), scheduler.reserve():
            pass
        with pytest.raises(RefusedError, match="wait already"):
            scheduler.submit(job(scheduler)[0])
    for _ in range(2):
        scheduler.submit(job(scheduler)[0])
    scheduler.close()
    with pytest.raises(RefusedError, match="about to stop"), scheduler.reserve():
        pass


def test_the_load_is_looked_at_once_an_answer(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the beginning of the decoding, not of the waiting; never by token."""
    scheduler, reads = begin(), []
    run_folder._read_at.cache_clear()
    monkeypatch.setattr("selfjudge.store.run_folder._read_clocks", lambda: (reads.append(1), (0.0, 0.0, 0.0))[1])
    asked, updates = job(scheduler, tokens=30)
    scheduler.submit(asked)
    assert asked.load is None
    scheduler.start()
    assert last(updates).result.cycles > 5
    assert asked.load is not None
    assert len(reads) == 1


def test_all_rows_of_a_pass_are_flushed_together(begin: Begin) -> None:
    """So that the event loop is woken once for them, and never without news."""
    scheduler, sent, flushed = begin(), [], []
    scheduler.flush = lambda: flushed.append(len(sent))
    for number in range(3):
        asked, _ = job(scheduler, tokens=12)
        asked.options, asked.send = {"streamed": True}, partial(lambda n, update: sent.append((n, update)), number)
        scheduler.submit(asked)
    scheduler.start()
    while sum(update.result is not None for _, update in list(sent)) < 3:
        time.sleep(0.01)
    scheduler.stop()
    assert flushed[-1] == len(sent)
    assert len(set(flushed)) < len(sent)


def test_a_greedy_rule_and_a_temperature_are_refused_at_the_start(tiny_pair: Pair) -> None:
    greedy = ServerConfig(default_rule=RuleRequest("margin:1"), temperature=0.7, max_batch=1)
    with pytest.raises(SelfJudgeError, match="rule 'margin' is greedy: `temperature` goes with sampling"):
        start_scheduler(tiny_pair, None, greedy)


def test_a_server_captures_passes_over_prompts(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although what it tries out first has left engines aside."""
    tiny_pair.target_model.release()  # other tests have captured
    calls: list[Any] = []
    monkeypatch.setattr(text, "capture_prompts", lambda *given: calls.append(given))
    start_scheduler(tiny_pair, None, ServerConfig(engine="cuda", max_context=1024, max_batch=4)).stop()
    assert calls


def test_captures_that_are_left_follow_while_it_is_idle(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for requests, and a failure ends them alone."""
    scheduler = begin(engine="cuda", max_batch=2)
    scheduler.pair.target_model.release()  # other tests have captured
    scheduler.warm_up = WarmUp(scheduler.pair, scheduler.rules.choose(), scheduler.config)
    scheduler.warm_up.try_out()
    seen: list[bool] = []
    capture = WarmUp.capture

    def counted(self: WarmUp, *rest: float) -> None:
        seen.append(scheduler.busy > 0)
        capture(self, *rest)

    monkeypatch.setattr(WarmUp, "capture", counted)
    early, updates = job(scheduler)
    scheduler.submit(early)
    scheduler.start()
    answer = last(updates).result
    assert answer is not None
    wait_for(lambda: scheduler.warm_up.done)
    assert seen == [False] * 4  # passes over prompts, the cycle of two rows and those of rows that sample were left
    late, updates = job(scheduler)
    scheduler.submit(late)
    again = last(updates).result
    assert again is not None
    assert again.tokens == answer.tokens
    assert len(seen) == 4


def test_a_capture_that_fails_is_the_last(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = begin(engine="cuda", max_batch=2)
    scheduler.warm_up = WarmUp(scheduler.pair, scheduler.rules.choose(), scheduler.config)
    monkeypatch.setattr(Batch, "capture", lambda *_: 1 / 0)
    scheduler.start()
    wait_for(lambda: scheduler.warm_up.done)
    asked, updates = job(scheduler)
    scheduler.submit(asked)
    assert last(updates).failure is None
    assert scheduler._thread.is_alive()


def test_captures_that_find_no_memory_do_not_end_the_server(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = begin(engine="cuda", max_batch=2)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(Batch, "capture", full)
    scheduler.warm_up = WarmUp(scheduler.pair, scheduler.rules.choose(), scheduler.config)
    scheduler.start()
    wait_for(lambda: scheduler.warm_up.done)
    asked, updates = job(scheduler)
    scheduler.submit(asked)
    assert last(updates).failure is None


def wait_for(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + 600
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(("fitting", "chosen"), [(256, 256), (255, 128), (130, 128), (64, 64), (9, 8), (3, 8), (0, 8)])
def test_rows_on_cuda_are_a_power_of_two_that_fits(monkeypatch: pytest.MonkeyPatch, fitting: int, chosen: int) -> None:
    """On a pair that says it is on a GPU, with engines that have memory for so many rows."""
    engines = SimpleNamespace(limit_rows=lambda rows, length: min(rows, fitting))
    monkeypatch.setattr(
        scheduler_module,
        "PairEngines",
        lambda *args, **how: SimpleNamespace(borrow=lambda hidden: nullcontext(engines)),
    )
    monkeypatch.setattr(scheduler_module, "open_store", lambda model, limit: None)
    choice: Any = SimpleNamespace(gamma=3, rule=SimpleNamespace(judge=None))
    for device, rows in (("cuda", chosen), ("cpu", 8)):
        pair: Any = SimpleNamespace(target=SimpleNamespace(device=SimpleNamespace(type=device)), target_model=None)
        assert scheduler_module._choose_rows(pair, choice, ServerConfig(), 4096) == rows
