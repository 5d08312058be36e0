"""From the body of a request to its response: token ids, a job of the scheduler, an answer whole or streamed."""

import asyncio
import contextlib
import copy
import json
import secrets
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from selfjudge.decoding.sampling import Sampling
from selfjudge.errors import SelfJudgeError
from selfjudge.integrations.asgi import RefusedError, error_body
from selfjudge.integrations.server.config import BYTES_PER_TOKEN
from selfjudge.integrations.server.jobs import FAILURES, CompletionJob, Update
from selfjudge.integrations.server.scheduler import Scheduler
from selfjudge.integrations.server.schema import ChatRequest, SelfJudgeOptions, TextRequest
from selfjudge.models.pair import Pair
from selfjudge.types import PHASES, Generation

SHORT_BYTES = 1 << 12  # size of a prompt that is encoded within milliseconds
MESSAGE_BYTES = BYTES_PER_TOKEN  # what a message counts for besides its text: the template adds a token at least
COMPLETION_TOKENS = 16  # length of a text completion that names none, as at OpenAI


class Encoder:
    """Encodes prompts in two threads, so that no short prompt waits behind a long one.

    Each thread has a tokenizer of its own: two threads must not share one."""

    def __init__(self, pair: Pair) -> None:
        self.vocabulary = pair.target.get_output_embeddings().weight.shape[0]
        self._pairs = [replace(pair, tokenizer=copy.deepcopy(pair.tokenizer)) for _ in range(2)]
        self._threads = [ThreadPoolExecutor(1, "tokenize") for _ in range(2)]

    async def encode(self, prompt: str | list[dict[str, str]], size: int) -> list[int]:
        """Token ids of a text, or of messages through the chat template; `size` in bytes."""
        pair, thread = self._pairs[size > SHORT_BYTES], self._threads[size > SHORT_BYTES]
        raw = isinstance(prompt, str)
        return await asyncio.get_running_loop().run_in_executor(thread, lambda: pair.encode(prompt, raw=raw))


class Completion:
    """One request to a completion endpoint."""

    def __init__(
        self, scheduler: Scheduler, encoder: Encoder, request: Request, body: ChatRequest | TextRequest
    ) -> None:
        self.scheduler, self.config, self.encoder = scheduler, scheduler.config, encoder
        self.request, self.body, self.options = request, body, body.selfjudge or SelfJudgeOptions()
        self.chat = isinstance(body, ChatRequest)
        self.updates: asyncio.Queue[Update] = asyncio.Queue()
        kind = ("chat.completion.chunk" if body.stream else "chat.completion") if self.chat else "text_completion"
        number = ("chatcmpl-" if self.chat else "cmpl-") + secrets.token_hex(12)
        self.head = {"id": number, "object": kind, "created": int(time.time()), "model": self.config.name}

    async def respond(self) -> Response:
        """Decode, and answer whole or as server-sent events."""
        self.job = self._make_job(await self._encode())
        self.request.state.mode = self.job.choice.mode  # for the guard's count
        self.scheduler.submit(self.job)
        self.watch = asyncio.ensure_future(self._watch_client())
        if not self.body.stream:
            return JSONResponse(await self._whole())
        return StreamingResponse(self._events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def _encode(self) -> list[int]:
        """Token ids of the prompt. Meanwhile the request holds a place in the queue."""
        prompt: str | list[dict[str, str]]
        if isinstance(self.body, ChatRequest):
            prompt = [message.plain() for message in self.body.messages]
            size = sum(len(message["content"].encode()) + MESSAGE_BYTES for message in prompt)
        elif isinstance(self.body.prompt, list):
            last = self.encoder.vocabulary - 1
            if not all(0 <= token <= last for token in self.body.prompt):
                raise RefusedError(400, f"token ids lie between 0 and {last}", param="prompt")
            return self.body.prompt
        else:
            prompt = self.body.prompt
            size = len(prompt.encode())
        if size > self.config.prompt_bytes:
            limit = self.config.prompt_bytes
            raise self._too_long(f"the prompt has {size} bytes, and this server takes {limit}: shorten it")
        with self.scheduler.reserve(self.request.state.key):
            return await self.encoder.encode(prompt, size)

    def _make_job(self, prompt: list[int]) -> CompletionJob:
        loop, body = asyncio.get_running_loop(), self.body

        def send(update: Update) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended, and nobody waits any more
                loop.call_soon_threadsafe(self.updates.put_nowait, update)

        temperature = self.config.temperature if body.temperature is None else body.temperature
        top_p = 1.0 if body.top_p is None else body.top_p
        try:
            sampling = Sampling(temperature, top_p, body.top_k or 0) if temperature else None
        except SelfJudgeError as error:  # above 0 and too small to divide by
            raise RefusedError(400, str(error), param="temperature") from None
        options = self.options
        trace = options.judged_tokens or options.tokens
        seeded = body.seed is not None
        choice = self.scheduler.rules.choose(
            options.rule_request(), sampling, off=options.off, trace=trace, seeded=seeded
        )
        return CompletionJob(
            prompt,
            max_new_tokens=self._limit_length(len(prompt)),
            choice=choice,
            send=send,
            stop=body.stop,
            seed=secrets.randbits(62) if body.seed is None else body.seed,
            streamed=bool(body.stream or body.stop),
            detailed=options.tokens,
            key=self.request.state.key,
            arrived=self.request.state.arrived,  # encoding the prompt counts
        )

    def _limit_length(self, prompt_tokens: int) -> int:
        """The most tokens of the answer: the request's limit, else the endpoint's default, else the server's limit."""
        most, room = self.config.max_tokens, self.config.max_context - prompt_tokens
        wanted = self.body.max_tokens or self.body.max_completion_tokens
        if room < 1 or (wanted is not None and min(wanted, most) > room):
            raise self._too_long(
                f"the prompt has {prompt_tokens} tokens, and prompt and answer together may have"
                f" {self.config.max_context}: shorten the prompt or lower max_tokens"
            )
        if wanted is not None and wanted > most:
            raise RefusedError(400, f"max_tokens is at most {most}, not {wanted}", param="max_tokens")
        return wanted or min(most if self.chat else COMPLETION_TOKENS, most, room)

    def _too_long(self, message: str) -> RefusedError:
        return RefusedError(400, message, "context_length_exceeded", "messages" if self.chat else "prompt")

    async def _watch_client(self) -> None:
        """Give the job up when the client goes away or the time is over."""
        waited = time.perf_counter() - self.job.arrived
        try:
            async with asyncio.timeout(self.config.timeout - waited):
                while (await self.request.receive())["type"] != "http.disconnect":
                    pass
        except TimeoutError:
            self.scheduler.cancel(self.job, "timeout")
        else:
            self.scheduler.cancel(self.job, "cancelled")

    def _end(self) -> None:
        """Stop watching the client; a job that is not over is given up."""
        self.watch.cancel()
        self.scheduler.cancel(self.job, "cancelled")

    async def _whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        try:
            while (update := await self.updates.get()).result is None:
                if update.failure:
                    raise RefusedError(*FAILURES[update.failure])
        finally:
            self._end()
        result = update.result
        message = {"role": "assistant", "content": result.text, "refusal": None}
        choice = self._choice("message", message, _finish(result))
        return {**self.head, "choices": [choice], "usage": _usage(result), "selfjudge": self._describe(result)}

    async def _events(self) -> AsyncIterator[str]:
        """The answer as server-sent events."""
        usage = bool(self.body.stream_options and self.body.stream_options.include_usage)
        head = {**self.head, "usage": None} if usage else self.head
        try:
            if self.chat:
                yield _event(head, choices=[self._choice("delta", {"role": "assistant", "content": ""})])
            while True:
                update = await self.updates.get()
                if update.text or update.pieces:
                    new = self._choice("delta", {"content": update.text} if update.text else {})
                    yield _event(head, choices=[new], **_describe_tokens(update))
                if update.failure:
                    yield _event(error_body(*FAILURES[update.failure]))
                    return
                if (result := update.result) is not None:
                    last = self._choice("delta", {}, _finish(result))
                    yield _event(head, choices=[last], selfjudge=self._describe(result))
                    if usage:
                        yield _event(head, choices=[], usage=_usage(result))
                    yield "data: [DONE]\n\n"
                    return
        finally:
            self._end()

    def _choice(self, name: str, message: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        """The one choice of a response; `name` is that of a chat's message."""
        content = {name: message} if self.chat else {"text": message.get("content", "")}
        return {"index": 0, **content, "logprobs": None, "finish_reason": finish}

    def _describe(self, result: Generation) -> dict[str, Any]:
        """The field `selfjudge` of a response."""
        # by the time of its own passes: the clock stands still while answers of other settings have their turn
        seconds = sum(result.seconds.get(phase, 0.0) for phase in PHASES)
        described: dict[str, Any] = {
            **self.job.choice.as_json(),
            "gamma": self.job.choice.gamma if result.gamma is None else result.gamma,
            "gamma_mean": result.gamma_mean,
            "cycles": result.cycles,
            "mean_accepted_length": result.mean_accepted_length,
            "judged_share": result.judged_share,
            "guarded_tokens": result.guarded_tokens,
            "tokens_per_second": len(result.tokens) / seconds if seconds else None,
            "speed_over_plain": result.speed_over_plain,
            "busy": self.job.load.describe(),
        }
        if self.options.judged_tokens:
            described["judged_tokens"] = [asdict(token) for token in result.judged_tokens]
        return described


def _describe_tokens(update: Update) -> dict[str, Any]:
    """The field `selfjudge` of a chunk whose tokens were asked for."""
    if not update.pieces:
        return {}
    tokens = []
    for piece in update.pieces:
        judged = asdict(piece.judged) if piece.judged else {}
        tokens.append({**judged, "token": piece.token, "text": piece.text, "origin": piece.origin})
    return {"selfjudge": {"cycle": update.cycle, "tokens": tokens}}


def _event(data: dict[str, Any], **more: Any) -> str:
    return f"data: {json.dumps({**data, **more}, ensure_ascii=False)}\n\n"


def _finish(result: Generation) -> str:
    return "length" if result.finish == "length" else "stop"


def _usage(result: Generation) -> dict[str, int]:
    prompt, completion = result.prompt_tokens, len(result.tokens)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
