"""What the endpoints hand to the scheduler and what comes back, and the jobs of second answers."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

from selfjudge.decoding.adjust import LogProbabilities
from selfjudge.decoding.grammar import Grammar
from selfjudge.decoding.rule_parser import RuleRequest
from selfjudge.integrations.server.operation import Metrics
from selfjudge.integrations.server.rules import RuleChoice, Rules
from selfjudge.store.run_folder import LoadWatch
from selfjudge.tune.monitor import Shadow, compute_loss, measure_answer
from selfjudge.types import Generation, Piece

Failure = Literal["cancelled", "timeout", "shutdown", "memory", "error"]
FAILURES: dict[Failure, tuple[int, str]] = {
    "cancelled": (499, "the client has gone"),
    "timeout": (504, "the answer took too long"),
    "shutdown": (503, "the server is about to stop"),
    "memory": (503, "the device has no memory for this request: shorten it, or try again later"),
    "error": (500, "decoding failed: the server's log says why"),
}


class Update(NamedTuple):
    """What is new about a job; the last update has a result or a failure."""

    text: str = ""
    pieces: Sequence[Piece] = ()  # the tokens of the text, where the job asked for them
    cycle: int = 0  # the pass that they are from; 0 is a prefill
    result: Generation | None = None
    failure: Failure | None = None


@dataclass(eq=False)
class CompletionJob:
    """An answer to be decoded. `send` is called by the decoding thread and must not block."""

    prompt: Sequence[int]
    choice: RuleChoice
    max_new_tokens: int
    send: Callable[[Update], None]
    options: Mapping[str, Any] = field(default_factory=dict)  # more of what `Batch.add` is told
    logprobs: LogProbabilities | None = None  # one of the edits, whose notes are for the client
    echoed: bool = False  # whether the log-probabilities of the prompt are noted, too
    detailed: bool = False  # whether updates carry tokens: all of them, also those without text of their own
    key: int = 0  # the number of the client's API key
    arrived: float = field(default_factory=time.perf_counter)
    begun: float = 0.0  # time of its first token
    load: LoadWatch | None = None  # watches the machine from the beginning of its decoding on
    shadowed: bool = False  # whether it is decoded a second time, exactly
    background: bool = False  # whether it is such a second answer, for which nobody waits
    over: bool = False
    given_up: Failure | None = None


class ShadowJobs:
    """Makes the jobs of second answers, which the scheduler takes while the engine has little to do. Requests under the
    server's own rule alone are chosen. Where nothing was substituted, the answer is that of `exact`, and nothing is
    decoded again. From the moment the certificate is refuted the server decodes exactly."""

    def __init__(self, shadow: Shadow, rules: Rules, metrics: Metrics) -> None:
        self.shadow, self.rules = shadow, rules
        shadow.on_refuted = self._switch_off
        self.waiting: deque[CompletionJob] = deque()  # jobs that an idle engine may take
        self._own = rules.choose()
        self._exact = rules.choose(RuleRequest(gamma=self._own.gamma), off=True)
        metrics.gauge("shadow_waiting", lambda: len(self.waiting))

    def choose(self, job: CompletionJob) -> None:
        """Decide whether a job will be decoded both ways."""
        plain = not any(map(job.options.get, ("edits", "stop_ids", "ignore_eos")))  # a second answer has none of these
        job.shadowed = plain and replace(job.choice, trace=False) == self._own and self.shadow.choose()

    def notice(self, job: CompletionJob, result: Generation) -> None:
        """An answer under the server's own rule, chosen or not. Where a grammar constrains it, no rule acts."""
        formed = any(isinstance(edit, Grammar) for edit in job.options.get("edits", ()))
        if self.shadow.drift is not None and not formed and replace(job.choice, trace=False) == self._own:
            prompt = str(self.rules.pair.tokenizer.decode(job.prompt))
            judged = result.origins.count("judge")
            self.shadow.notice(measure_answer(prompt, len(result.tokens) - 1, result.cycles, judged))

    def take_first(self, job: CompletionJob, result: Generation | None) -> None:
        """The answer that the client got; None where there is none."""
        if result is None or self.shadow.monitor.refuted:
            self.shadow.end(None)
        elif "judge" not in result.origins:
            self.shadow.end(0.0)
        else:
            send, options = partial(self._take_second, result.text), {"stop": job.options.get("stop", ())}
            again = CompletionJob(job.prompt, self._exact, job.max_new_tokens, send, options)
            self.waiting.append(replace(again, key=job.key, background=True))

    def _take_second(self, shown: str, update: Update) -> None:
        if update.failure:
            self.shadow.end(None)
        elif update.result is not None:
            self.shadow.end(compute_loss(update.result.text, shown))

    def _switch_off(self) -> None:
        self.rules.refuted = True
        self.waiting.clear()
