"""What the endpoints share: prompts become token ids, requests become jobs, results become fields of a response."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from selfjudge.decoding.sampling import Sampling
from selfjudge.integrations.server.config import ServerConfig
from selfjudge.integrations.server.errors import RefusedError
from selfjudge.integrations.server.rules import RuleOptions, Rules
from selfjudge.integrations.server.scheduler import Job, Scheduler, Update
from selfjudge.integrations.server.schema import ChatRequest, Request
from selfjudge.models.pair import Pair
from selfjudge.types import Generation


@dataclass(frozen=True)
class Service:
    """Everything that the endpoints need."""

    name: str
    pair: Pair
    """With a tokenizer of its own: the decoding thread uses the other."""
    scheduler: Scheduler
    tokenizing: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "tokenize"))
    since: int = field(default_factory=lambda: int(time.time()))

    @property
    def rules(self) -> Rules:
        return self.scheduler.rules

    @property
    def config(self) -> ServerConfig:
        return self.scheduler.config

    async def encode(self, prompt: Any, *, raw: bool) -> list[int]:
        """Token ids of a prompt; the tokenizer runs in a thread of its own."""
        if isinstance(prompt, list) and raw:
            size = self.pair.target.get_output_embeddings().weight.shape[0]
            if not all(0 <= token < size for token in prompt):
                raise RefusedError(400, f"token ids lie between 0 and {size - 1}", param="prompt")
            return prompt
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.tokenizing, lambda: self.pair.encode(prompt, raw=raw))

    def check_model(self, name: str | None) -> None:
        if name not in (None, self.name):
            message = f"there is no model {name!r} here, only {self.name!r}"
            raise RefusedError(404, message, "model_not_found", "model")

    def job(
        self, request: Request, prompt: Sequence[int], default_length: int | None
    ) -> tuple[Job, asyncio.Queue[Update]]:
        """A job for a request and the queue of its updates, or RefusedError."""
        self.check_model(request.model)
        length = self._length(request, len(prompt), default_length)
        options = RuleOptions() if request.selfjudge is None else request.selfjudge.plain()
        choice = self.rules.choose(options, self._sampling(request))
        updates: asyncio.Queue[Update] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def send(update: Update) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended, and nobody waits any more
                loop.call_soon_threadsafe(updates.put_nowait, update)

        seed = secrets.randbits(62) if request.seed is None else request.seed
        streamed = bool(request.stream or request.stops)
        return Job(prompt, choice, length, send, tuple(request.stops), seed, streamed), updates

    def _length(self, request: Request, prompt_tokens: int, default: int | None) -> int:
        """The most tokens of the answer: the request's limit, else the endpoint's default, else the server's limit."""
        most, room, wanted = self.config.max_tokens, self.config.max_context - prompt_tokens, request.token_limit
        if room < 1 or (wanted is not None and min(wanted, most) > room):
            raise RefusedError(
                400,
                f"the prompt has {prompt_tokens} tokens, and prompt and answer together may have"
                f" {self.config.max_context}: shorten the prompt or lower max_tokens",
                "context_length_exceeded",
                "messages" if isinstance(request, ChatRequest) else "prompt",
            )
        if wanted is not None and wanted > most:
            raise RefusedError(400, f"max_tokens is at most {most}, not {wanted}", param="max_tokens")
        return wanted or min(default or most, most, room)

    def _sampling(self, request: Request) -> Sampling | None:
        temperature = self.config.temperature if request.temperature is None else request.temperature
        if temperature == 0:
            return None
        return Sampling(temperature, 1.0 if request.top_p is None else request.top_p, request.top_k or 0)

    def statistics(self, job: Job, result: Generation) -> dict[str, Any]:
        """The field `selfjudge` of a response."""
        statistics: dict[str, Any] = {
            "rule": job.choice.rule,
            "theta": getattr(self.rules.build(job.choice), "theta", None),
            "gamma": job.choice.gamma,
            "cycles": result.cycles,
            "mean_accepted_length": result.mean_accepted_length,
            "judged_share": result.judged_share,
        }
        if job.choice.trace:
            statistics["judged_tokens"] = [asdict(token) for token in result.judged_tokens]
        return statistics

    def model(self) -> dict[str, Any]:
        """The one model as `/v1/models` lists it."""
        rules, pair = self.rules, self.pair
        return {
            "id": self.name,
            "object": "model",
            "created": self.since,
            "owned_by": "selfjudge",
            "max_model_len": self.config.max_context,
            "selfjudge": {
                "rule": rules.rule,
                "theta": rules.theta,
                "gamma": rules.gamma,
                "device": pair.target.device.type,
                "dtype": pair.dtype,
            },
        }
