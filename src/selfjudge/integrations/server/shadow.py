"""Second answers in our own server: jobs that the scheduler takes while the engine has little to do.

Requests under the server's own rule alone are chosen. Where nothing was substituted, the answer is that of `exact`, and
nothing is decoded again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from functools import partial

from selfjudge.decoding.rule_parser import RuleRequest
from selfjudge.integrations.server.jobs import CompletionJob, Update
from selfjudge.integrations.server.metrics import Metrics
from selfjudge.integrations.server.rules import Rules
from selfjudge.integrations.shadow import Shadow
from selfjudge.types import Generation


class ShadowJobs:
    """Makes the jobs of second answers; decodes exactly from the moment the certificate is refuted."""

    def __init__(self, shadow: Shadow, rules: Rules, metrics: Metrics) -> None:
        self.shadow, self.rules = shadow, rules
        shadow.on_refuted = self._switch_off
        self.waiting: deque[CompletionJob] = deque()
        """Jobs that an idle engine may take."""
        self._own = rules.choose()
        self._exact = replace(rules.choose(RuleRequest(gamma=self._own.gamma), off=True), background=True)
        metrics.gauge("shadow_waiting", "Requests that wait to be decoded again.", lambda: len(self.waiting))

    def choose(self, job: CompletionJob) -> None:
        """Decide whether a job will be decoded both ways."""
        job.shadowed = replace(job.choice, trace=False) == self._own and self.shadow.choose()

    def take_first(self, job: CompletionJob, result: Generation | None) -> None:
        """The answer that the client got; None where there is none."""
        if result is None or self.shadow.monitor.refuted:
            self.shadow.end(None)
        elif "judge" not in result.origins:
            self.shadow.end(0.0)
        else:
            send = partial(self._take_second, job, result.text)
            self.waiting.append(
                CompletionJob(job.prompt, self._exact, job.max_new_tokens, send, job.stop, streamed=bool(job.stop))
            )

    def _take_second(self, job: CompletionJob, shown: str, update: Update) -> None:
        if update.failure:
            self.shadow.end(None)
        elif update.result is not None:
            prompt = self.rules.pair.tokenizer.decode(list(job.prompt))
            self.shadow.end(self.shadow.compare(prompt, update.result.text, shown))

    def _switch_off(self) -> None:
        self.rules.refuted = True
        self.waiting.clear()
