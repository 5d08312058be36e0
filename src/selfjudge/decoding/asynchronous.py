"""Answers for asyncio: a `Batch` in a thread of its own, which any number of tasks ask at once."""

from __future__ import annotations

import asyncio
import copy
import secrets
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any, Unpack

from selfjudge.decoding.answer import Answer
from selfjudge.decoding.grammar import check_edits
from selfjudge.decoding.rules import AcceptanceRule
from selfjudge.decoding.text import AnswerOptions, Batch, Decoding, DecodingOptions, prepare, share_rules, shares
from selfjudge.errors import SelfJudgeError, first_line
from selfjudge.models.pair import Pair, Prompt
from selfjudge.types import Generation, Piece

OF_ROW = {"gamma", "trace"}  # options of decoding that go with the rule of the batch, too


class AsyncBatch(AbstractAsyncContextManager):
    """Answers that are decoded together, for asyncio; the event loop goes on meanwhile.

    >>> async with AsyncBatch(pair) as batch:  # doctest: +SKIP
    ...     one, other = await asyncio.gather(batch.generate("Hello"), batch.generate("Hi", "judged", quality=0.9))
    ...     async for piece in batch.stream("Why is the sky blue?", max_new_tokens=64):
    ...         print(piece.text, end="")

    A request whose task is cancelled, or whose stream is closed, leaves before the next pass. One that is not possible
    raises in its own task. Where a pass fails, all that are decoded get a SelfJudgeError; the batch takes new ones."""

    def __init__(
        self,
        pair: Pair,
        rule: str | AcceptanceRule | None = None,
        *,
        rows: int = 8,
        length: int = 4096,
        prefix_cache: str | None = None,
        **options: Unpack[DecodingOptions],
    ) -> None:
        """As for `Batch`; requests may name another rule if this and theirs are exact, margin, judged or sampling."""
        own = Decoding(pair, rule, **options)
        fits = shares(shared := share_rules(pair, own.rule.judge or pair.judge), own.rule, own.gamma)
        limits: Any = {"rows": rows, "length": length, "prefix_cache": prefix_cache, "engine": own.engines.kind}
        self._shared, self._pair, self._rule, self._gamma = shared if fits else None, pair, own.rule, own.gamma
        self._batch = Batch(pair, own.rule, gamma=own.gamma, trace=own.trace, shared=self._shared, **limits)
        self._options = {name: options[name] for name in OF_ROW & options.keys()}  # type: ignore[literal-required]
        self._encode = replace(pair, tokenizer=copy.deepcopy(pair.tokenizer)).encode  # two threads must not share one
        self._reading = ThreadPoolExecutor(1, "read prompts")
        self._closed, self._closing = False, threading.Lock()
        self._asked: SimpleQueue[Callable[[], None]] = SimpleQueue()  # what is done between two passes
        self._told: dict[Answer, Callable[[object], None]] = {}
        self._thread = threading.Thread(target=self._work, name="decode", daemon=True)
        self._thread.start()

    async def generate(
        self, prompt: Prompt, rule: str | AcceptanceRule | None = None, **options: Unpack[AnswerOptions]
    ) -> Generation:
        """Answer a prompt; rule and options as for `selfjudge.generate`, but sampled anew unless there is a `seed`."""
        stream = self.stream(prompt, rule, **options)
        async for _ in stream:
            pass
        return stream.generation

    def stream(
        self, prompt: Prompt, rule: str | AcceptanceRule | None = None, **options: Unpack[AnswerOptions]
    ) -> AsyncStream:
        """Answer a prompt token by token, from the first `async for` on."""
        results: list[Generation] = []
        return AsyncStream(self._pieces(prompt, rule, {**options}, results), results)

    async def aclose(self) -> None:
        """Give up the answers that are left, whose tasks get a SelfJudgeError, and end the thread."""
        with self._closing:
            self._closed = True
        self._asked.put(lambda: None)
        await asyncio.to_thread(self._thread.join)
        self._reading.shutdown(wait=False)

    async def __aexit__(self, *raised: object) -> None:
        await self.aclose()

    async def _pieces(
        self, prompt: Prompt, rule: str | AcceptanceRule | None, options: dict[str, Any], results: list[Generation]
    ) -> AsyncGenerator[Piece]:
        """The pieces of an answer, which is then added to the results; it is given up when this is closed."""
        loop, news = asyncio.get_running_loop(), asyncio.Queue[Any]()

        def tell(update: object) -> None:
            with suppress(RuntimeError):  # the event loop has ended, and nobody waits any more
                loop.call_soon_threadsafe(news.put_nowait, update)

        def begin() -> None:
            try:
                self._told[self._batch.add(**request)] = tell
            except SelfJudgeError as error:
                tell(error)
            except Exception as error:
                tell(SelfJudgeError(f"the answer could not be started: {first_line(error)}"))

        def drop() -> None:
            for answer in [answer for answer, other in self._told.items() if other is tell]:
                del self._told[answer]
                self._batch.drop(answer)

        with self._open():
            reading = loop.run_in_executor(self._reading, self._read, prompt, rule, options)
        request = await reading
        with self._open():
            self._asked.put(begin)
        try:
            while not results:
                update = await news.get()
                if isinstance(update, SelfJudgeError):
                    raise update
                if isinstance(update, Answer):
                    check_edits(request["edits"])
                    results.append(update.generation())
                else:
                    for piece in update:
                        yield piece
        finally:
            self._asked.put(drop)

    @contextmanager
    def _open(self) -> Iterator[None]:
        """The batch is not closed meanwhile: the thread does what it is asked here."""
        with self._closing:
            if self._closed:
                raise SelfJudgeError("the batch is closed")
            yield

    def _read(self, prompt: Prompt, rule: str | AcceptanceRule | None, options: dict[str, Any]) -> dict[str, Any]:
        """What `Batch.add` is told of a request."""
        stop, seed = options.pop("stop", ()), options.get("seed")
        named = options.keys() & DecodingOptions.__annotations__.keys()
        if "engine" in named:
            raise SelfJudgeError("`engine` is the same for all answers: give it to the batch")
        rule = self._rule if rule is None and named <= OF_ROW else rule
        decoding, (request,) = prepare(self._pair, [prompt], rule, {**self._options, **options}, self._encode)
        given = {"max_new_tokens": request.max_new_tokens, "edits": request.edits, "stop": stop}
        if self._shared is not None or rule is not self._rule or named:
            given |= {"rule": decoding.rule, "gamma": decoding.gamma, "trace": decoding.trace}
        elif decoding.gamma != self._gamma:
            raise SelfJudgeError("a `seed` repeats an answer only where γ is fixed: give `gamma` to the batch")
        return {"prompt": request.prompt, "seed": secrets.randbits(62) if seed is None else seed, **given}

    def _work(self) -> None:
        while not self._closed:
            try:
                if self._told and self._asked.empty():
                    self._step()
                    continue
                if not self._told:
                    self._batch.close()  # rows that were given up leave, and the engines are free
                self._asked.get()()
            except Exception as error:
                self._fail(f"decoding failed: {first_line(error)}")
        while not self._asked.empty():
            self._asked.get()()
        self._fail("the batch is closed")

    def _step(self) -> None:
        for answer, pieces in self._batch.step():
            if (tell := self._told.get(answer)) is not None:
                tell(pieces)
                if answer.finish is not None or answer.out_of_memory:
                    del self._told[answer]
                    tell(answer)

    def _fail(self, why: str) -> None:
        """Give up all answers."""
        for tell in self._told.values():
            tell(SelfJudgeError(why))
        self._told.clear()
        with suppress(Exception):  # they are given up in any case
            self._batch.close()


@dataclass(frozen=True, eq=False)
class AsyncStream:
    """The pieces of one answer, to iterate over; afterwards `generation` holds the finished answer.
    Cancelling its task or closing the stream (`contextlib.aclosing`) gives the answer up."""

    _pieces: AsyncGenerator[Piece]
    _results: list[Generation]  # the pieces' generator does not know this object: it ends with the loop that it is in

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self._pieces

    async def aclose(self) -> None:
        await self._pieces.aclose()

    @property
    def generation(self) -> Generation:
        if not self._results:
            raise SelfJudgeError("the answer is not finished: read the whole stream first")
        return self._results[0]
