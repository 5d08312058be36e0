"""The queue and the batches: one thread decodes, everything else only asks it to.

Requests with the same choice of rule share a batch and enter it as places become free. Batches of different choices take
turns, one pass each. Nobody overtakes: a request that must wait for a place holds back those that came later.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from selfjudge.decoding.text import Answer, Batch
from selfjudge.integrations.server.metrics import Metrics
from selfjudge.integrations.server.rules import Choice, Rules
from selfjudge.models.pair import Pair
from selfjudge.types import Generation

LOG = logging.getLogger("selfjudge.server")

Failure = Literal["cancelled", "timeout", "shutdown", "error"]


@dataclass(frozen=True)
class Limits:
    """What the server takes at most."""

    batch: int = 8
    """Answers decoded at a time, all choices together."""
    batches: int = 4
    """Batches at a time, that is different choices; static engines keep a cache for each."""
    queue: int = 64
    """Requests that wait for a place."""
    context: int = 4096
    """Tokens of a prompt and its answer."""
    tokens: int = 1024
    """Tokens of an answer."""
    body: int = 1 << 20
    """Bytes of a request."""
    seconds: float = 600.0
    """From the arrival of a request to the end of its answer."""
    grace: float = 30.0
    """Seconds that running answers have to end in when the server is told to stop."""


@dataclass(frozen=True)
class Update:
    """News of a job; the last one has a result or a failure."""

    text: str = ""
    result: Generation | None = None
    failure: Failure | None = None


@dataclass(eq=False)
class Job:
    """An answer somebody waits for. `send` is called by the decoding thread and must not block."""

    prompt: Sequence[int]
    choice: Choice
    max_new_tokens: int
    send: Callable[[Update], None]
    stop: Sequence[str] = ()
    seed: int = 0
    streamed: bool = False
    arrived: float = field(default_factory=time.perf_counter)
    over: bool = False
    given_up: Failure | None = None


class FullError(Exception):
    """The queue is full."""


class ClosedError(Exception):
    """The server is about to stop."""


class _Live:
    """A batch under way and whose answers it makes."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.jobs: dict[Answer, Job] = {}

    def answer(self, job: Job) -> Answer | None:
        return next((answer for answer, other in self.jobs.items() if other is job), None)


class Scheduler:
    """See the module's docstring."""

    def __init__(self, pair: Pair, rules: Rules, limits: Limits, metrics: Metrics, engine: str = "auto") -> None:
        self.pair, self.rules, self.limits, self.metrics, self.engine = pair, rules, limits, metrics, engine
        self._state = threading.Condition()  # guards all that follows
        self._queue: deque[Job] = deque()
        self._live: dict[Choice, _Live] = {}  # changed by the decoding thread alone
        self._given_up: list[Job] = []
        self._running = 0
        self._prefilled = 0  # tokens that prefill yielded, which belong to no cycle
        self.closed = self._stopping = False
        self._thread = threading.Thread(target=self._work, name="decode", daemon=True)
        metrics.gauge("queue_depth", "Requests that wait for a place.", lambda: len(self._queue))
        metrics.gauge("running", "Answers being decoded.", lambda: self._running)
        metrics.gauge("batches", "Batches being decoded, one for each choice of rule.", lambda: len(self._live))
        metrics.gauge("mean_accepted_length", "Tokens per verification pass, over all answers so far.", self._mean)

    def _mean(self) -> float:
        cycles = self.metrics.total("cycles_total")
        return (self.metrics.total("tokens_total") - self._prefilled) / cycles if cycles else 0.0

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def busy(self) -> int:
        """Jobs that are not over."""
        with self._state:
            return len(self._queue) + self._running

    def submit(self, job: Job) -> None:
        """Put a job in the queue, or raise FullError or ClosedError."""
        with self._state:
            if self.closed:
                raise ClosedError
            if len(self._queue) >= self.limits.queue:
                raise FullError
            self._queue.append(job)
            self._state.notify()

    def cancel(self, job: Job, why: Failure) -> None:
        """Give up a job: at once if it waits, before the next pass if it is being decoded; nothing if it is over."""
        with self._state:
            if job.over or job.given_up:
                return
            job.given_up = why
            if job in self._queue:
                self._queue.remove(job)
                self._end(job, None, why)
            else:
                self._given_up.append(job)
                self._state.notify()

    def close(self) -> None:
        """Take no more jobs."""
        with self._state:
            self.closed = True

    def stop(self, seconds: float = 30.0) -> None:
        """Give up what is left and end the thread."""
        with self._state:
            self.closed = self._stopping = True
            for job in list(self._queue):
                self.cancel(job, "shutdown")
            self._state.notify()
        self._thread.join(seconds)

    def _work(self) -> None:
        while self._prepare():
            for choice in list(self._live):
                self._turn(choice)

    def _prepare(self) -> bool:
        """Wait for something to do, take out who gave up, let in who waits; False when it is time to stop."""
        with self._state:
            while not (self._queue or self._live or self._stopping):
                self._state.wait()
            if self._stopping and not self._live:
                return False
            given_up, self._given_up = self._given_up, []
            if self._stopping:
                given_up = [job for live in self._live.values() for job in live.jobs.values()]
            entering: list[Job] = []
            while self._queue and self._running + len(entering) < self.limits.batch:
                choices = {*self._live, *(job.choice for job in entering), self._queue[0].choice}
                if len(choices) > self.limits.batches:
                    break
                entering.append(self._queue.popleft())
            self._running += len(entering)
        for job in entering:
            self._enter(job)
        for job in given_up:
            live = self._live.get(job.choice)
            if not job.over and live is not None and (answer := live.answer(job)) is not None:
                live.batch.drop(answer)
                self._leave(live, answer, job.given_up or "shutdown")
        return True

    def _enter(self, job: Job) -> None:
        live = self._live.get(job.choice)
        try:
            if live is None:
                live = _Live(Batch(
                    self.pair, self.rules.build(job.choice), gamma=job.choice.gamma, rows=self.limits.batch,
                    length=self.limits.context, engine=self.engine,
                ))  # fmt: skip
            answer = live.batch.add(
                job.prompt, max_new_tokens=job.max_new_tokens, stop=job.stop, seed=job.seed, streamed=job.streamed
            )
        except Exception:
            LOG.exception("an answer could not be begun")
            with self._state:
                self._running -= 1
            self._end(job, None, "error")
            return
        live.jobs[answer] = job
        with self._state:
            self._live[job.choice] = live

    def _turn(self, choice: Choice) -> None:
        """One pass of one batch."""
        live = self._live[choice]
        try:
            taken = live.batch.step()
        except Exception:  # out of memory, say: these answers are lost, the server goes on
            LOG.exception("a batch failed")
            for answer in list(live.jobs):
                self._leave(live, answer, "error")
            taken = []
        for answer, pieces in taken:
            job = live.jobs.get(answer)
            if job is None:
                continue
            if answer.cycles == 0:
                self.metrics.observe("time_to_first_token_seconds", time.perf_counter() - job.arrived)
            if text := "".join(piece.text for piece in pieces):
                job.send(Update(text))
            if answer.finish is not None:
                self._leave(live, answer, None)
        if not live.jobs:
            with self._state:
                del self._live[choice]
            live.batch.close()

    def _leave(self, live: _Live, answer: Answer, failure: Failure | None) -> None:
        job = live.jobs.pop(answer)
        with self._state:
            self._running -= 1
        self._end(job, answer, failure)

    def _end(self, job: Job, answer: Answer | None, failure: Failure | None) -> None:
        job.over = True
        result = answer.generation() if answer is not None and failure is None else None
        finish = failure or ("length" if result is not None and result.finish == "length" else "stop")
        self.metrics.add("generations_total", finish=finish)
        self.metrics.observe("request_seconds", time.perf_counter() - job.arrived)
        if answer is not None:
            self.metrics.add("prompt_tokens_total", answer.prompt_tokens)
            self.metrics.add("cycles_total", answer.cycles)
            for origin in ("draft", "judge", "target"):
                self.metrics.add("tokens_total", answer.origins.count(origin), origin=origin)
            self._prefilled += bool(answer.tokens)
        job.send(Update(result=result, failure=failure))
