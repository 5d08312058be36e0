"""Answers for asyncio: what each task gets, who leaves when, and that the event loop goes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager, nullcontext
from queue import SimpleQueue
from typing import Any

import pytest
import torch

import selfjudge
from equality import greedy
from selfjudge import AsyncBatch, AsyncStream, Pair, Sampling, SelfJudgeError, generate
from selfjudge.decoding.rules import Exact, Judged, Margin, SpeculativeSampling
from selfjudge.decoding.text import Batch, share_rules
from selfjudge.judge.config import JudgeConfig
from selfjudge.judge.model import Judge
from spelling import save_spellers

PROMPTS = ["w1 w2", "w3 w4 w5", "w6", "w7 w8 w9 w10", "w11"]


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(), 600)  # however busy the machine is

    asyncio.run(limited())


async def rows_of(batch: AsyncBatch) -> int:
    """The rows that are decoded or wait, after whatever the thread was asked before."""
    counted = asyncio.get_running_loop().create_future()
    batch._asked.put(lambda: counted.get_loop().call_soon_threadsafe(counted.set_result, len(batch._batch)))
    return int(await counted)


@asynccontextmanager
async def held(monkeypatch: pytest.MonkeyPatch, passes: int = 6) -> AsyncIterator[threading.Event]:
    """After so many passes the decoding thread waits for the event."""
    step, go, left = Batch.step, threading.Event(), [passes]

    def slow(self: Batch, crowded: bool = False) -> Any:
        left[0] -= 1
        if left[0] < 0:
            go.wait()
        return step(self, crowded)

    with monkeypatch.context() as patch:
        patch.setattr(Batch, "step", slow)
        try:
            yield go
        finally:
            go.set()


def test_answers_are_those_given_alone(tiny_pair: Pair) -> None:
    """Many tasks, five rows at a time, unlike rules, lengths, temperatures, γ and stop strings."""
    bare = {"strict_start": 0, "strict_code": False}
    asked: list[tuple[Any, dict[str, Any]]] = [
        (None, {}), ("margin:2", bare), ("exact", {"gamma": 0}), (None, {"sampling": Sampling(0.8), "seed": 3}), ("margin:price=1.5", {**bare, "gamma": 4}),
        (None, {"sampling": Sampling(1.3, top_p=0.9), "seed": 4, "gamma": 2}), ("exact", {"max_new_tokens": 3}), (None, {"raw": True}),
    ]  # fmt: skip
    jobs = [
        (prompt, rule, {"max_new_tokens": 24, **own})
        for number, prompt in enumerate(PROMPTS)
        for rule, own in asked[number % 2 :: 2]
    ]

    async def test() -> None:
        async with AsyncBatch(tiny_pair, gamma=3, rows=5, length=90) as batch:
            answers = await asyncio.gather(*(batch.generate(prompt, rule, **own) for prompt, rule, own in jobs))
            stopped = answers[0].text.split()[4]
            cut = await batch.generate(PROMPTS[0], stop=[stopped], max_new_tokens=24)
            assert cut.text == answers[0].text[: answers[0].text.index(stopped)]
            assert await rows_of(batch) == 0
        for (prompt, rule, own), answer in zip(jobs, answers, strict=True):
            alone = generate(tiny_pair, prompt, rule, **{"gamma": 3, **own})
            assert (answer.tokens, answer.text, answer.finish) == (alone.tokens, alone.text, alone.finish), (rule, own)

    run(test)


@pytest.mark.quick("exact-9", "judged-10")
@pytest.mark.parametrize("gamma", [9, 10])
@pytest.mark.parametrize("name", ["exact", "sampling", "judged"])
def test_beside_a_row_of_many_drafts_another_leaves_gamma_open(tiny_pair: Pair, name: str, gamma: int) -> None:
    """Of its own accord a row drafts at most 8 tokens, or with `confirm=8` 9."""
    judge = Judge(JudgeConfig(tiny_pair.hidden_size, thresholds={"R": 0.5}), torch.ones(tiny_pair.hidden_size))
    rules = {"exact": Exact(), "sampling": SpeculativeSampling(Sampling(0.9)), "judged": Judged(judge, 0.3, confirm=8)}
    batch = Batch(tiny_pair, rows=2, length=90, shared=share_rules(tiny_pair, judge))
    first = batch.add([5, 6, 7], max_new_tokens=50, rule=Margin(2.0), gamma=gamma, ignore_eos=True)
    other = batch.add([8, 9], max_new_tokens=20, rule=rules[name], ignore_eos=True)
    while len(batch):
        batch.step()
    assert first.generation().gamma == gamma
    assert len(other.generation().tokens) == 20
    if name == "exact":
        assert other.tokens == greedy(tiny_pair.target, [8, 9], 20)


def test_a_stream_gives_pieces_and_then_the_generation(tiny_pair: Pair) -> None:
    async def test() -> None:
        async with AsyncBatch(tiny_pair, "topk:3,strict_start=0", gamma=2) as batch:
            stream = batch.stream(PROMPTS[0], max_new_tokens=20)
            with pytest.raises(SelfJudgeError, match="not finished"):
                _ = stream.generation
            pieces = [piece async for piece in stream]
            alone = generate(tiny_pair, PROMPTS[0], "topk:3,strict_start=0", gamma=2, max_new_tokens=20)
            assert stream.generation.tokens == tuple(piece.token for piece in pieces) == alone.tokens
            assert "".join(piece.text for piece in pieces) == alone.text
            with pytest.raises(SelfJudgeError, match="all answers of this batch have one rule"):
                await batch.generate(PROMPTS[0], "exact")

    run(test)


def test_schemas_and_what_becomes_of_one_that_is_given_up(tmp_path_factory: pytest.TempPathFactory) -> None:
    pair = Pair.load(*save_spellers(tmp_path_factory.mktemp("spellers")), device="cpu", dtype="float32")
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}

    async def test() -> None:
        async with AsyncBatch(pair, gamma=2) as batch:
            fits, broken, free = await asyncio.gather(
                batch.generate("paint", schema=schema), batch.generate("paint", grammar="start: /(a?){2000}a{2000}/"),
                batch.generate("paint", max_new_tokens=20), return_exceptions=True,
            )  # fmt: skip
            assert isinstance(fits, selfjudge.Generation)
            assert fits.tokens == generate(pair, "paint", gamma=2, schema=schema).tokens
            assert "given up in the middle" in str(broken)
            assert isinstance(free, selfjudge.Generation)
            assert free.tokens == generate(pair, "paint", gamma=2, max_new_tokens=20).tokens

    run(test)


def test_unseeded_samples_differ_and_seeded_ones_do_not(tiny_pair: Pair) -> None:
    async def test() -> None:
        async with AsyncBatch(tiny_pair, sampling=Sampling(1.5)) as batch:
            drawn = await asyncio.gather(*(batch.generate("w1", max_new_tokens=16) for _ in range(4)))
            assert len({answer.tokens for answer in drawn}) > 1
            fixed = await asyncio.gather(*(batch.generate("w1", max_new_tokens=16, seed=5) for _ in range(3)))
            assert len({answer.tokens for answer in fixed}) == 1

    run(test)


@pytest.mark.parametrize("how", ["task", "loop", "stream"])
def test_who_is_cancelled_leaves_and_others_stay(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    async def test() -> None:
        async with AsyncBatch(tiny_pair, gamma=2) as batch, held(monkeypatch) as go:
            other = asyncio.create_task(batch.generate(PROMPTS[1], max_new_tokens=40))
            first = asyncio.Event()

            async def read(stream: AsyncStream) -> None:
                async with aclosing(stream) if how == "stream" else nullcontext():
                    async for _ in stream:
                        first.set()
                        if how != "task":
                            break

            task = asyncio.create_task(read(batch.stream(PROMPTS[0], max_new_tokens=60)))
            await first.wait()
            if how == "task":
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                await task
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            go.set()
            while await rows_of(batch) > 1:
                await asyncio.sleep(0)
            assert (await other).tokens == generate(tiny_pair, PROMPTS[1], gamma=2, max_new_tokens=40).tokens
            assert await rows_of(batch) == 0

    run(test)


def test_who_is_cancelled_while_waiting_never_enters(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with AsyncBatch(tiny_pair, gamma=2, rows=1) as batch, held(monkeypatch, 1) as go:
            tasks = [asyncio.create_task(batch.generate(prompt, max_new_tokens=30)) for prompt in PROMPTS]
            await asyncio.sleep(0.05)
            for task in tasks[1:4]:
                task.cancel()
            go.set()
            first, *given_up, last = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(result, asyncio.CancelledError) for result in given_up)
            for result, prompt in ((first, PROMPTS[0]), (last, PROMPTS[4])):
                assert isinstance(result, selfjudge.Generation)
                assert result.tokens == generate(tiny_pair, prompt, gamma=2, max_new_tokens=30).tokens

    run(test)


@pytest.mark.quick(
    "-None-options0-*",
    "w1-topk*",
    "w1-nothing*",
    "*options3-*",
    "*options6-*",
    "*options8-*",
    "*options14-*",
    "w1-judged*",
)
@pytest.mark.parametrize(
    ("prompt", "rule", "options", "said"),
    [
        ("", None, {}, "the prompt is empty"), ("w1", "topk:2", {"max_new_tokens": 9}, "needs a batch of its own"), ("w1", "nothing", {}, "unknown rule"),
        ("w1", None, {}, "at most 80 tokens"), ("w1", None, {"max_new_tokens": 0}, "at least 1"), ("w1", None, {"gamma": 20, "max_new_tokens": 9}, "γ = 20"),
        ("w1", None, {"stop": None, "max_new_tokens": 9}, "`stop`"), ("w1", None, {"stop": [5], "max_new_tokens": 9}, "`stop`"), ("w1", None, {"gamma": "fast"}, "`gamma` must be a whole number or auto"),
        ("w1", None, {"max_new_tokens": None}, "`max_new_tokens` must be a whole number, at least 1, not None"), ("w1", None, {"max_new_tokens": "64"}, "not '64'"),
        ("w1", None, {"sampling": Sampling(), "seed": 1.5, "max_new_tokens": 9}, "`seed` must be a whole number, not 1.5"), ("w1", None, {"gamma": 2.5}, "not 2.5"),
        ("w1", None, {"stop": [""], "max_new_tokens": 9}, "`stop`"), ("w1", None, {"engine": "cpu"}, "`engine` is the same"), ("w1", "judged", {}, "needs a judge"),
    ],
)  # fmt: skip
def test_who_asks_for_what_is_not_possible_harms_nobody(
    tiny_pair: Pair, prompt: str, rule: str | None, options: dict[str, Any], said: str
) -> None:
    async def test() -> None:
        async with AsyncBatch(tiny_pair, gamma=2, length=80) as batch:
            other = asyncio.create_task(batch.generate(PROMPTS[1], max_new_tokens=16))
            with pytest.raises(SelfJudgeError, match=said):
                await batch.generate(prompt, rule, **options)
            assert (await other).tokens == generate(tiny_pair, PROMPTS[1], gamma=2, max_new_tokens=16).tokens

    run(test)


def test_a_pass_that_fails_takes_its_answers_along(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    step, broken = Batch.step, [True]

    def fail(self: Batch, crowded: bool = False) -> Any:
        output = step(self, crowded)
        if broken and len(self) == 2:
            broken.clear()
            raise RuntimeError("the device is gone\nfor good")
        return output

    monkeypatch.setattr(Batch, "step", fail)

    async def test() -> None:
        async with AsyncBatch(tiny_pair, gamma=2) as batch:
            lost = await asyncio.gather(
                *(batch.generate(p, max_new_tokens=30) for p in PROMPTS[:2]), return_exceptions=True
            )
            assert {str(error) for error in lost} == {"decoding failed: the device is gone"}
            again = await batch.generate(PROMPTS[0], max_new_tokens=30)
            assert again.tokens == generate(tiny_pair, PROMPTS[0], gamma=2, max_new_tokens=30).tokens

    run(test)


def test_whatever_goes_wrong_the_thread_goes_on(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start of an answer, which alone is lost, and where a batch without answers is closed."""
    close, add, broken = Batch.close, Batch.add, [True]

    def fail(self: Batch) -> None:
        close(self)
        if broken:
            broken.clear()
            raise RuntimeError("the device is gone")

    def refuse(self: Batch, prompt: Any, **options: Any) -> Any:
        if len(prompt) == 3:
            raise TypeError("not this one\nfor good")
        return add(self, prompt, **options)

    monkeypatch.setattr(Batch, "close", fail)
    monkeypatch.setattr(Batch, "add", refuse)

    async def test() -> None:
        async with AsyncBatch(tiny_pair, gamma=2) as batch:
            good, bad = await asyncio.gather(
                batch.generate("w1 w2 w3 w4", raw=True, max_new_tokens=30), batch.generate("w1 w2 w3", raw=True), return_exceptions=True,
            )  # fmt: skip
            assert isinstance(good, selfjudge.Generation)
            assert isinstance(bad, SelfJudgeError)
            assert str(bad) == "the answer could not be started: not this one"
        assert not broken

    run(test)


def test_closing_from_another_event_loop_while_an_answer_is_asked_for(tiny_pair: Pair) -> None:
    class Slow(SimpleQueue[Callable[[], None]]):
        """Before the first thing is asked for, the batch is closed as far as it can be."""

        closing: threading.Thread | None = None

        def put(self, item: Callable[[], None], block: bool = True, timeout: float | None = None) -> None:
            if self.closing is None and threading.current_thread() is threading.main_thread():
                self.closing = threading.Thread(target=asyncio.run, args=(batch.aclose(),))
                self.closing.start()
                self.closing.join(0.3)
            super().put(item)

    batch = AsyncBatch(tiny_pair, gamma=2)
    slow = Slow()
    old, batch._asked = batch._asked, slow
    old.put(lambda: None)

    async def test() -> None:
        with pytest.raises(SelfJudgeError, match="the batch is closed"):
            await asyncio.wait_for(batch.generate(PROMPTS[0]), 600)
        assert slow.closing is not None
        slow.closing.join()
        assert not batch._thread.is_alive()

    run(test)


@pytest.mark.parametrize("rule", ["sglang", "topk:3,strict_start=0"])
def test_a_seed_needs_a_fixed_gamma_where_the_batch_has_one_rule(tiny_pair: Pair, rule: str) -> None:
    sampling = {"sampling": Sampling(1.5)} if rule == "sglang" else {}

    async def ask(batch: AsyncBatch, **options: Any) -> selfjudge.Generation:
        return await batch.generate("w1", max_new_tokens=12, **options)

    async def test() -> None:
        async with AsyncBatch(tiny_pair, rule, gamma=2, **sampling) as batch:  # type: ignore[arg-type]
            assert (await ask(batch, seed=5)).tokens == (await ask(batch, seed=5)).tokens
        async with AsyncBatch(tiny_pair, rule, **sampling) as batch:  # type: ignore[arg-type]
            await ask(batch)
            if sampling:
                with pytest.raises(SelfJudgeError, match="give `gamma` to the batch"):
                    await ask(batch, seed=5)
            else:
                await ask(batch, seed=5)  # it draws nothing

    run(test)


def test_the_end(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks that are left get an error, also those whose prompt is still read; the thread ends; nothing new is taken."""

    async def test() -> None:
        async with held(monkeypatch) as go:
            batch = AsyncBatch(tiny_pair, gamma=2)
            left = [asyncio.create_task(batch.generate(prompt, max_new_tokens=60)) for prompt in PROMPTS[:3]]
            await asyncio.sleep(0.05)
            late = asyncio.create_task(batch.generate(PROMPTS[3]))
            closing = asyncio.create_task(batch.aclose())
            await asyncio.sleep(0)
            go.set()
            await closing
            results = await asyncio.gather(*left, late, return_exceptions=True)
            assert {str(error) for error in results} == {"the batch is closed"}
            assert not batch._thread.is_alive()
            with pytest.raises(SelfJudgeError, match="closed"):
                await batch.generate(PROMPTS[0])
            await batch.aclose()

    run(test)


def test_the_event_loop_goes_on(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a pass lasts, and while a prompt becomes token ids."""
    reading, encode = threading.Event(), Pair.encode

    def slow(self: Pair, prompt: Any, **options: Any) -> list[int]:
        if prompt == PROMPTS[1]:
            reading.wait()
        return encode(self, prompt, **options)

    monkeypatch.setattr(Pair, "encode", slow)

    async def test() -> None:
        async with AsyncBatch(tiny_pair, gamma=2) as batch, held(monkeypatch, 0) as go:
            tasks = [asyncio.create_task(batch.generate(prompt, max_new_tokens=8)) for prompt in PROMPTS[:2]]
            for _ in range(1000):
                await asyncio.sleep(0)
            assert not any(task.done() for task in tasks)
            reading.set()
            go.set()
            assert [answer.finish for answer in await asyncio.gather(*tasks)] == ["length", "length"]

    run(test)


def test_several_event_loops_ask_one_batch(tiny_pair: Pair) -> None:
    batch, texts = AsyncBatch(tiny_pair, gamma=2), list[tuple[int, ...]]()

    async def ask() -> None:
        answers = await asyncio.gather(*(batch.generate(prompt, max_new_tokens=12) for prompt in PROMPTS))
        texts.append(answers[2].tokens)

    threads = [threading.Thread(target=run, args=(ask,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run(batch.aclose)
    assert texts == [generate(tiny_pair, PROMPTS[2], gamma=2, max_new_tokens=12).tokens] * 3
