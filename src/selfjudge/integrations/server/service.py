"""What the endpoints share: prompts become token ids, requests become jobs, results become fields of a response."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from selfjudge.decoding.rule_parser import RuleRequest
from selfjudge.decoding.sampling import Sampling
from selfjudge.engine.select import PairEngines
from selfjudge.integrations.server.config import BYTES_PER_TOKEN, ServerConfig
from selfjudge.integrations.server.errors import FAILURES, RefusedError
from selfjudge.integrations.server.jobs import CompletionJob, Update
from selfjudge.integrations.server.rules import Rules
from selfjudge.integrations.server.scheduler import ClosedError, FullError, Scheduler
from selfjudge.integrations.server.schema import ChatRequest, DecodeOptions, Request
from selfjudge.models.pair import Pair
from selfjudge.types import PHASES, Generation

SHORT_BYTES = 1 << 12  # of a prompt that is encoded within milliseconds
MESSAGE_BYTES = BYTES_PER_TOKEN  # what a message counts for beside its text: the template adds a token at least


class Lane:
    """A thread that encodes prompts, with a tokenizer of its own: two threads must not share one."""

    def __init__(self, pair: Pair) -> None:
        self.pair = replace(pair, tokenizer=copy.deepcopy(pair.tokenizer))
        self.thread = ThreadPoolExecutor(1, "tokenize")


@dataclass(frozen=True)
class Service:
    """Everything that the endpoints need."""

    name: str
    pair: Pair
    scheduler: Scheduler
    recipe: Mapping[str, str] | None = None
    """What `playground.describe` says of the recipe in use."""
    lanes: tuple[Lane, Lane] = field(init=False)
    """Encode short and long prompts, so that no short one waits behind a long one."""
    since: int = field(default_factory=lambda: int(time.time()))

    @property
    def rules(self) -> Rules:
        return self.scheduler.rules

    @property
    def config(self) -> ServerConfig:
        return self.scheduler.config

    def __post_init__(self) -> None:
        object.__setattr__(self, "lanes", (Lane(self.pair), Lane(self.pair)))

    async def encode(self, prompt: Any, key: int, *, raw: bool) -> list[int]:
        """Token ids of a prompt, encoded beside decoding. Meanwhile the request holds a place in the queue."""
        if isinstance(prompt, list) and raw:
            size = self.pair.target.get_output_embeddings().weight.shape[0]
            if not all(0 <= token < size for token in prompt):
                raise RefusedError(400, f"token ids lie between 0 and {size - 1}", param="prompt")
            return prompt
        size = _bytes_of(prompt)
        if size > self.config.prompt_bytes:
            raise RefusedError(
                400,
                f"the prompt has {size} bytes, and this server takes {self.config.prompt_bytes}: shorten it",
                "context_length_exceeded",
                "prompt" if raw else "messages",
            )
        lane = self.lanes[size > SHORT_BYTES]
        with self.refusing(), self.scheduler.place(key):
            return await asyncio.get_running_loop().run_in_executor(
                lane.thread, lambda: lane.pair.encode(prompt, raw=raw)
            )

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Answer what the scheduler refuses."""
        try:
            yield
        except FullError:
            whose = " with this key" if len(self.config.keys) > 1 else ""
            message = f"{self.config.queue_share} requests{whose} wait already: try again later"
            raise RefusedError(429, message, "queue_full") from None
        except ClosedError:
            raise RefusedError(*FAILURES["shutdown"]) from None

    def check_model(self, name: str | None) -> None:
        if name not in (None, self.name):
            message = f"there is no model {name!r} here, only {self.name!r}"
            raise RefusedError(404, message, "model_not_found", "model")

    def job(
        self, request: Request, prompt: Sequence[int], key: int, default_length: int | None
    ) -> tuple[CompletionJob, asyncio.Queue[Update]]:
        """A job for a request and the queue of its updates, or RefusedError."""
        self.check_model(request.model)
        length = self._length(request, len(prompt), default_length)
        options = request.selfjudge or DecodeOptions()
        trace = options.judged_tokens or options.tokens
        choice = self.rules.choose(options.rule_request(), self._sampling(request), off=options.off, trace=trace)
        updates: asyncio.Queue[Update] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def send(update: Update) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended, and nobody waits any more
                loop.call_soon_threadsafe(updates.put_nowait, update)

        seed = secrets.randbits(62) if request.seed is None else request.seed
        streamed = bool(request.stream or request.stops)
        job = CompletionJob(prompt, choice, length, send, tuple(request.stops), seed, streamed, options.tokens, key)
        return job, updates

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

    def statistics(self, job: CompletionJob, result: Generation, *, judged_tokens: bool) -> dict[str, Any]:
        """The field `selfjudge` of a response."""
        statistics: dict[str, Any] = {
            **job.choice.as_json(),
            "gamma_mean": result.gamma_mean,
            "cycles": result.cycles,
            "mean_accepted_length": result.mean_accepted_length,
            "judged_share": result.judged_share,
            "tokens_per_second": _tokens_per_second(result),
        }
        if judged_tokens:
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
                "backend": "torch",
                **rules.choose().as_json(),
                "theta": rules.theta,
                "gamma_exact": rules.choose(off=True).gamma,
                "gamma_relaxed": rules.choose(RuleRequest("topk")).gamma,
                "judge": rules.judge is not None,
                "max_tokens": self.config.max_tokens,
                "recipe": self.recipe,
                "refuted": rules.refuted,
                "device": pair.target.device.type,
                "dtype": pair.dtype,
                "draft_dtype": PairEngines(pair, self.config.engine).draft_dtype,
            },
        }


def _tokens_per_second(result: Generation) -> float | None:
    """By the time of its own passes: the clock stands still while answers of other settings have their turn."""
    seconds = sum(result.seconds.get(phase, 0.0) for phase in PHASES)
    return len(result.tokens) / seconds if seconds else None


def _bytes_of(prompt: str | list[dict[str, str]]) -> int:
    """Bytes of a text, or of messages with what their template adds at least."""
    if isinstance(prompt, str):
        return len(prompt.encode())
    return sum(len(message["content"].encode()) + MESSAGE_BYTES for message in prompt)
