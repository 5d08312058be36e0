"""A share of the requests is decoded a second time, exactly, while the engine has little to do (`tune.monitor`).

Requests under the server's own rule alone are chosen. Where nothing was substituted, the answer is that of `exact`, and
nothing is decoded again. Prompts and answers are held until both answers are there; nothing of them is kept unless a
file is named for it.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from dataclasses import replace
from functools import partial
from pathlib import Path

from selfjudge.integrations.server.metrics import Metrics
from selfjudge.integrations.server.rules import RuleOptions, Rules
from selfjudge.integrations.server.scheduler import Job, Update
from selfjudge.tune.monitor import FIGURES, WAITING, Monitor, keep, lost
from selfjudge.types import Generation

LOG = logging.getLogger("selfjudge.server")


class Shadow:
    """Chooses requests, makes the jobs of their second answers, and compares."""

    def __init__(self, monitor: Monitor, rules: Rules, metrics: Metrics, share: float, file: Path | None) -> None:
        self.monitor, self.rules, self.metrics, self.share, self.file = monitor, rules, metrics, share, file
        self.waiting: deque[Job] = deque()
        """Jobs that an idle engine may take."""
        self._own = rules.choose(RuleOptions(), None)
        self._exact = replace(rules.choose(RuleOptions(off=True, gamma=self._own.gamma), None), background=True)
        self._chosen = 0  # requests of which no two answers are there yet
        self._lock = threading.Lock()
        for name, about in FIGURES.items():
            metrics.gauge(name, about, partial(self._figure, name))
        metrics.gauge("shadow_waiting", "Requests that wait to be decoded again.", lambda: len(self.waiting))

    def _figure(self, name: str) -> float:
        return self.monitor.figures()[name]

    def choose(self, job: Job) -> None:
        """Toss a coin for a request of the server's own rule: whether it will be decoded both ways."""
        if self.monitor.refuted or replace(job.choice, trace=False) != self._own:
            return
        if random.random() >= self.share:  # noqa: S311
            return
        with self._lock:
            job.watched = self._chosen < WAITING
            self._chosen += job.watched
        if not job.watched:  # whatever its answer would be: to skip by that would be biased
            self.metrics.add("shadow_requests_total", outcome="skipped")

    def first(self, job: Job, result: Generation | None) -> None:
        """The answer that the client got; None where it came to nothing."""
        if result is None or self.monitor.refuted:
            self._end(None)
        elif "judge" not in result.origins:
            self._end(0.0)
        else:
            send = partial(self._second, job, result.text)
            self.waiting.append(
                Job(job.prompt, self._exact, job.max_new_tokens, send, job.stop, streamed=bool(job.stop))
            )

    def _second(self, job: Job, shown: str, update: Update) -> None:
        if update.failure:
            self._end(None)
        elif update.result is not None:
            difference = lost(update.result.text, shown)
            if self.file is not None:
                prompt = self.rules.pair.tokenizer.decode(list(job.prompt))
                texts = {"prompt": prompt, "exact": update.result.text, "shown": shown}
                keep(self.file, {"time": int(time.time()), **texts, "difference": difference})
            self._end(difference)

    def _end(self, difference: float | None) -> None:
        with self._lock:
            self._chosen -= 1
        self.metrics.add("shadow_requests_total", outcome="failed" if difference is None else "counted")
        if difference is not None and self.monitor.observe(difference):
            LOG.warning(self.monitor.verdict)
            self.rules.switch_to_exact()
            self.waiting.clear()
