"""The queue and the batches: one thread decodes, everything else only asks it to. Requests share one batch, each with
its own rule, γ and sampling, and enter it as places become free. Rules that cannot share (`RowRules`) have batches of
their own, at most OWN_BATCHES; the batches take turns, one pass or one chunk of a prompt each. The queue is first in,
first out: a request that must wait holds back those after it. Where clients have different keys each key has a queue of
its own, and the key with the fewest answers under way is next. Second answers of a share of the requests (`shadow`) are
begun while nobody waits and at most half of the places are taken."""

import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from selfjudge.decoding.answer import Answer
from selfjudge.decoding.rules_by_row import RowRules
from selfjudge.decoding.sampling import Sampling
from selfjudge.decoding.text import Batch, StepOutput
from selfjudge.engine.prefixes import open_store
from selfjudge.engine.select import PairEngines
from selfjudge.errors import first_line
from selfjudge.integrations.asgi import RefusedError
from selfjudge.integrations.server.config import ServerConfig
from selfjudge.integrations.server.jobs import FAILURES, CompletionJob, Failure, ShadowJobs, Update
from selfjudge.integrations.server.operation import MODES, Metrics
from selfjudge.integrations.server.rules import RuleChoice, Rules
from selfjudge.judge.model import Judge
from selfjudge.models.pair import Pair
from selfjudge.store.run_folder import LoadWatch
from selfjudge.tune.monitor import Shadow, watch, watch_scope
from selfjudge.tune.recipe import Recipe
from selfjudge.types import MAX_GAMMA, Notify, Tell, ignore

LOG = logging.getLogger("selfjudge.server")
CAPTURE_SECONDS = 20.0  # time for captures before the server is ready; those that are left follow while it is idle
OWN_BATCHES = 4  # of rules that share none; on CUDA each has a cache
CPU_ROWS, CUDA_ROWS = 8, 256  # answers at a time where `max_batch` names no number; on CUDA at most
CUDA_PROMPTS = (40, 40, 600)
"""Tokens of the prompts that are tried out on CUDA: short ones, whose graph is captured the second time; a long one."""


class WarmUp:
    """A batch of the server's own rule, as large as it may get, and the cycles of it that are not captured yet."""

    def __init__(self, pair: Pair, choice: RuleChoice, config: ServerConfig) -> None:
        self.pair, self.context, self.done = pair, config.max_context, False
        self._batch = choice.make_batch(pair, config)

    def try_out(self) -> None:
        """Answer prompts: what does not work ends the program here, and the first request finds everything compiled."""
        token, on_cuda = next(iter(self.pair.eos_ids), 0), self.pair.target.device.type == "cuda"
        for length in CUDA_PROMPTS if on_cuda else (1,):
            self._batch.add([token] * max(1, min(length, self.context - 3)), max_new_tokens=3)
            while len(self._batch):
                self._batch.step()
        self._batch.close()

    def capture(self, seconds: float, notify: Tell = ignore) -> None:
        """Capture cycles for about so many seconds, at least one; afterwards `done` says whether none is left."""
        try:
            self.done = self._batch.capture(seconds, notify)
        except torch.OutOfMemoryError:
            LOG.warning("not all graphs fit into the memory of the device: others are captured when they are needed")
            self.done = True


class Scheduler:
    """See the module's docstring."""

    shadow: ShadowJobs | None = None  # who decodes a share of the requests again; set before the start
    warm_up: WarmUp | None = None  # cycles that are captured while nobody waits; set before the start
    flush: Callable[[], None] = staticmethod(ignore)  # called once jobs were sent what is new

    def __init__(self, pair: Pair, rules: Rules, config: ServerConfig, metrics: Metrics) -> None:
        self.pair, self.rules, self.config, self.metrics = pair, rules, config, metrics
        self._state = threading.Condition()  # guards all that follows
        self._queue: deque[CompletionJob] = deque()
        self._batches: dict[RowRules | RuleChoice, Batch] = {}  # by the key of choices
        self._jobs: dict[Answer, CompletionJob] = {}  # those that are being decoded
        self._encoding: Counter[int] = Counter()  # requests whose prompt becomes token ids now, by key
        self._open = set[CompletionJob]()  # those that are not over, but for second answers
        self._later, self._cycles = Counter[str](), Counter[str]()  # by mode: tokens after the first, and cycles
        self.closed = self._stopping = False
        self.broken: str | None = None  # why decoding has ended by itself
        self._thread = threading.Thread(target=self._work, name="decode", daemon=True)
        metrics.gauge("queue_depth", lambda: len(self._queue))
        metrics.gauge("encoding", self._encoding.total)
        metrics.gauge("running", lambda: len(self._open) - len(self._queue))
        metrics.gauge("batches", lambda: len(self._batches))
        self._gamma, self._mean_length = dict.fromkeys(MODES, 0), dict.fromkeys(MODES, 0.0)
        for mode in MODES:
            metrics.gauge("mean_accepted_length", partial(self._mean_length.__getitem__, mode), mode=mode)
            metrics.gauge("gamma", partial(self._gamma.__getitem__, mode), mode=mode)

    def start(self) -> None:
        self._thread.start()

    @property
    def full(self) -> bool:
        """Whether no request finds a place, not even to wait."""
        with self._state:
            return len(self._queue) + self._encoding.total() >= self.config.max_queue

    @property
    def busy(self) -> int:
        """Jobs that are not over."""
        with self._state:
            return len(self._open)

    @contextlib.contextmanager
    def reserve(self, key: int = 0) -> Iterator[None]:
        """A place in the queue for a request that is not a job yet, or a RefusedError."""
        with self._state:
            self._check_room(key)
            self._encoding[key] += 1
        try:
            yield
        finally:
            with self._state:
                self._encoding[key] -= 1

    def submit(self, *jobs: CompletionJob) -> None:
        """Put the jobs of a request in the queue, all of them, or raise a RefusedError."""
        with self._state:
            self._check_room(jobs[0].key, len(jobs))
            for job in jobs:
                if self.shadow is not None:
                    self.shadow.choose(job)
                self._queue.append(job)
                self._open.add(job)
            self._state.notify()

    def _check_room(self, key: int, jobs: int = 1) -> None:
        if self.broken is not None:
            raise RefusedError(503, self.broken)
        if self.closed:
            raise RefusedError(*FAILURES["shutdown"])
        share = max(1, self.config.max_queue // max(1, len(self.config.keys)))  # of each key
        if jobs > share:
            raise RefusedError(400, f"{jobs} answers at once, and {share} may wait here: ask for fewer", param="n")
        if self._encoding[key] + sum(job.key == key for job in self._queue) + jobs > share:
            whose = " with this key" if len(self.config.keys) > 1 else ""
            raise RefusedError(429, f"{share} requests{whose} wait already: try again later", "queue_full")

    def cancel(self, job: CompletionJob, why: Failure) -> None:
        """Give up a job: at once if it waits, before the next pass if it is being decoded; nothing if it is over."""
        with self._state:
            if job.over or job.given_up:
                return
            job.given_up = why
            if job in self._queue:
                self._queue.remove(job)
                self._end(job, None, why)

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
        try:
            while self._prepare():
                if self._captures and not self._batches:
                    self._capture()
                self._advance()
        except BaseException as error:
            self._break(error)

    @property
    def _captures(self) -> bool:
        """Whether cycles are left to capture."""
        return self.warm_up is not None and not self.warm_up.done

    def _capture(self) -> None:
        assert self.warm_up is not None
        try:
            self.warm_up.capture(0.0)
        except Exception:
            LOG.exception("a cycle could not be captured")
            self.warm_up.done = True

    def _break(self, error: BaseException) -> None:
        """Decoding ends by an error: all jobs fail, and no other is taken."""
        LOG.critical("decoding has ended", exc_info=error)
        with self._state:
            self.broken = f"decoding has ended, start the server again: {type(error).__name__}: {first_line(error)}"
            failed = [*self._open]
            self._queue.clear()
            self._open.clear()
        for job in failed:
            job.over = True
            job.send(Update(failure="error"))
            self._count(job, None, "error")
        self.flush()

    def _advance(self) -> None:
        """One pass of every batch, without the answers that were given up."""
        for answer, job in list(self._jobs.items()):
            if job.given_up or self._stopping:
                self._batches[job.choice.key].drop(answer)
                self._end(self._jobs.pop(answer), answer, job.given_up or "shutdown")
        for key in list(self._batches):
            self._turn(key)
            self.flush()

    def _second_answer(self) -> CompletionJob | None:
        """The next job of `shadow`, if there is time for it: one at a time, while others have half of the places."""
        calm = not self._queue and len(self._jobs) <= self.config.max_batch // 2
        if self.shadow is None or not self.shadow.waiting or self.closed or not calm:
            return None
        return None if any(job.background for job in self._jobs.values()) else self.shadow.waiting.popleft()

    def _prepare(self) -> bool:
        """Wait for work and admit jobs that wait; False when it is time to stop."""
        with self._state:
            second = self._second_answer()
            while not (self._queue or self._jobs or self._stopping or second or self._captures):
                self._state.wait()
            if self._stopping and not self._jobs:
                return False
            entering = [] if second is None else [second]
            while (job := self._next(entering)) is not None:
                self._queue.remove(job)
                entering.append(job)
                if job.echoed:  # others may enter before the next prompt is read
                    break
        for job in entering:
            self._enter(job)
        return True

    def _next(self, entering: Sequence[CompletionJob]) -> CompletionJob | None:
        """The job that enters after these: the first of the key that has the fewest answers, if there is room for it.
        With several keys none may hold the last places: each other key finds one."""
        if not self._queue or len(self._jobs) + len(entering) >= self.config.max_batch:
            return None
        under_way = [*self._jobs.values(), *entering]
        held = Counter(job.key for job in under_way if not job.background)
        places = max(1, self.config.max_batch - max(0, len(self.config.keys) - 1))  # of one key
        first = {job.key: job for job in reversed(self._queue)}
        fitting = [job for job in self._queue if first[job.key] is job and held[job.key] < places]
        if not fitting:
            return None
        job = min(fitting, key=lambda candidate: held[candidate.key])
        own = {one.choice.key for one in (job, *under_way) if one.choice.shared is None}
        return job if job.choice.shared is not None or len(own) <= OWN_BATCHES else None

    def _enter(self, job: CompletionJob) -> None:
        try:
            if job.logprobs is not None and job.echoed:
                with PairEngines(self.pair, self.config.engine, drafts=False).borrow() as engines:
                    for _ in job.logprobs.read_prompt(engines.target, job.prompt):
                        self._advance()
                        if job.given_up or self._stopping:
                            break
            if (batch := self._batches.get(job.choice.key)) is None:
                batch = job.choice.make_batch(self.pair, self.config)
            own = {"streamed": False, "by_step": not job.detailed, "salt": job.key, **job.options, **job.choice.of_row}
            answer = batch.add(job.prompt, max_new_tokens=job.max_new_tokens, **own)
        except Exception as error:
            LOG.exception("an answer could not be started")
            self._check_device()
            self._end(job, None, "memory" if isinstance(error, torch.OutOfMemoryError) else "error")
            return
        if not job.background:
            self.metrics.observe("queue_seconds", time.perf_counter() - job.arrived, mode=job.choice.mode)
        job.load, self._jobs[answer], self._batches[job.choice.key] = LoadWatch(often=True), job, batch

    def _step(self, key: RowRules | RuleChoice) -> StepOutput:
        """One pass of one batch; answers of a batch that fails are lost, and the server goes on."""
        try:
            return self._batches[key].step(crowded=len(self._batches) > 1)
        except Exception as error:
            LOG.exception("a batch failed")
            self._check_device()
            failure: Failure = "memory" if isinstance(error, torch.OutOfMemoryError) else "error"
            for answer in [answer for answer, job in self._jobs.items() if job.choice.key == key]:
                self._end(self._jobs.pop(answer), answer, failure)
            return []

    def _check_device(self) -> None:
        """Raise if the device runs nothing more, as after an illegal access: then no other batch can go on."""
        torch.ones(1, device=self.pair.target.device).cpu()

    def _turn(self, key: RowRules | RuleChoice) -> None:
        """One pass of one batch: tell its jobs what is new."""
        for answer, pieces in self._step(key):
            job = self._jobs.get(answer)
            if job is None:
                continue
            if answer.out_of_memory:
                self._end(self._jobs.pop(answer), answer, "memory")
                continue
            if answer.cycles:
                self._gamma[job.choice.mode] = answer.gamma
            elif not job.background:
                job.begun = time.perf_counter()
                self.metrics.observe("time_to_first_token_seconds", job.begun - job.arrived, mode=job.choice.mode)
            text = "".join(piece.text for piece in pieces)
            if text or job.detailed:
                job.send(Update(text, pieces if job.detailed else (), answer.cycles))
            if answer.finish is not None:
                self._end(self._jobs.pop(answer), answer, None)
        if not any(job.choice.key == key for job in self._jobs.values()):
            self._batches.pop(key).close()

    def _end(self, job: CompletionJob, answer: Answer | None, failure: Failure | None) -> None:
        """Count a job that is over, and send its last update."""
        result = answer.generation() if answer is not None and failure is None else None
        if not job.background:
            finish = failure or ("length" if result is not None and result.finish == "length" else "stop")
            self._count(job, answer, finish)
        with self._state:
            self._open.discard(job)
        job.over = True
        job.send(Update(result=result, failure=failure))
        self.flush()
        if result is not None and self.shadow is not None:
            self.shadow.notice(job, result)
        if job.shadowed and self.shadow is not None:
            self.shadow.take_first(job, result)

    def _count(self, job: CompletionJob, answer: Answer | None, finish: str) -> None:
        mode, now = job.choice.mode, time.perf_counter()
        self.metrics.add("generations_total", mode=mode, finish=finish)
        self.metrics.observe("request_seconds", now - job.arrived, mode=mode)
        if answer is not None:
            later = max(0, len(answer.tokens) - 1)
            if answer.cycles and later:
                self.metrics.observe("time_between_tokens_seconds", (now - job.begun) / later, mode=mode)
                self.metrics.observe("accepted_length", later / answer.cycles, mode=mode)
            self.metrics.add("prompt_tokens_total", answer.prompt_tokens, mode=mode)
            self.metrics.add("cached_prompt_tokens_total", answer.cached, mode=mode)
            self.metrics.add("cycles_total", answer.cycles, mode=mode)
            self.metrics.add("drafted_tokens_total", answer.drafted, mode=mode)
            for origin in ("draft", "judge", "target"):
                self.metrics.add("tokens_total", answer.origins.count(origin), mode=mode, origin=origin)
            self._later[mode] += later
            self._cycles[mode] += answer.cycles
            self._mean_length[mode] = self._later[mode] / max(1, self._cycles[mode])


def _choose_rows(pair: Pair, choice: RuleChoice, config: ServerConfig, context: int) -> int:
    """Answers at a time: on CUDA the power of two for which there is memory for whole contexts."""
    if pair.target.device.type != "cuda":
        return CPU_ROWS
    own = PairEngines(pair, config.engine, drafts=choice.gamma != 0)
    own.prefixes = open_store(pair.target_model, config.prefix_cache)
    with own.borrow(hidden=choice.rule.judge is not None) as engines:
        rows = engines.limit_rows(CUDA_ROWS, context + MAX_GAMMA + 1)
    return max(CPU_ROWS, 1 << rows.bit_length() >> 1)


def start_scheduler(
    pair: Pair, judge: Judge | None, config: ServerConfig, recipe: Recipe | None = None, notify: Notify = ignore
) -> Scheduler:
    """What the server decodes with, tried out and started; needs none of the packages for HTTP. `recipe` is the one
    that rule and γ of the config come from; `shadow` watches its certificate. `notify` is told of captures."""
    config.check()
    monitor = watch(recipe) if config.shadow else None
    if judge is not None:
        judge.config.check_target(pair.target_id, pair.target_sha256, pair.hidden_size)
    rules = Rules(pair, judge, config.default_rule)
    rules.choose(sampling=Sampling(config.temperature))  # refuses a rule that is greedy
    context = min(config.max_context, pair.window)
    config = replace(config, max_batch=config.max_batch or _choose_rows(pair, rules.choose(), config, context))
    most = min(config.max_tokens, context - 1)
    config = replace(config, name=config.name or pair.name, max_context=context, max_tokens=most)
    scheduler = Scheduler(pair, rules, config, Metrics())
    scheduler.warm_up = WarmUp(pair, rules.choose(), config)
    scheduler.warm_up.try_out()
    scheduler.warm_up.capture(CAPTURE_SECONDS, partial(notify, "capturing graphs"))
    if monitor is not None:
        assert recipe is not None
        shadow = Shadow(monitor, config.shadow, LOG, scheduler.metrics.registry, watch_scope(recipe))
        scheduler.shadow = ShadowJobs(shadow, rules, scheduler.metrics)
    if pair.target.device.type == "cuda":
        scheduler.metrics.gauge("device_memory_bytes", torch.cuda.memory_allocated, kind="allocated")
        scheduler.metrics.gauge("device_memory_bytes", torch.cuda.memory_reserved, kind="reserved")
    scheduler.start()
    return scheduler
