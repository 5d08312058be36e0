"""From the body of a request to its response: token ids, a job of the scheduler, an answer whole or streamed."""

import asyncio
import contextlib
import copy
import json
import random
import re
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from inspect import signature
from itertools import product
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

from selfjudge.decoding.adjust import LogProbabilities
from selfjudge.decoding.grammar import Grammar, check_edits, compile_grammar
from selfjudge.decoding.rules import FLy
from selfjudge.decoding.sampling import Sampling
from selfjudge.decoding.text import row_seed
from selfjudge.errors import SelfJudgeError
from selfjudge.integrations.asgi import Receive, RefusedError, Scope, Send, make_id
from selfjudge.integrations.server.config import BYTES_PER_TOKEN
from selfjudge.integrations.server.jobs import FAILURES, CompletionJob, Failure, Update
from selfjudge.integrations.server.parameters import TokenTexts, choose_sampling, make_edits, read_grammar
from selfjudge.integrations.server.rules import RuleChoice
from selfjudge.integrations.server.scheduler import Scheduler
from selfjudge.integrations.server.schema import (
    ChatRequest,
    CompletionRequest,
    NamedTool,
    SelfJudgeOptions,
    TextRequest,
)
from selfjudge.integrations.server.tools import CallReader, ToolFormat
from selfjudge.models.pair import Pair
from selfjudge.types import PHASES, Generation

SHORT_BYTES = 1 << 12  # size of a prompt that is encoded within milliseconds
COMPLETION_TOKENS = 16  # length of a text completion that names none, as at OpenAI
BLANK = "\0"  # stands for the text in the event that is made once for all texts of a job

Fields = dict[str, Any]  # of a JSON object
_dump = json.JSONEncoder(ensure_ascii=False).encode  # one encoder for all: `json.dumps` would make one each time


class Updates:
    """What is new about the jobs of a request, for one reader; texts that wait come as one."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, Update]] = deque()
        self._reader: asyncio.Future[None] | None = None
        self.tell: Callable[[int, str], bool] | None = None  # takes a text at once where it can, while the reader waits

    def put(self, number: int, update: Update) -> None:
        waits = None if self._reader is None or self._reader.done() else self._reader
        plain = not (update.pieces or update.result or update.failure)
        if waits and plain and self.tell and self.tell(number, update.text):
            return
        last, before = self._waiting[-1] if self._waiting else (-1, update)
        if last == number and not (before.pieces or update.pieces or update.failure):
            self._waiting[-1] = number, update._replace(text=before.text + update.text)
        else:
            self._waiting.append((number, update))
        if waits:
            waits.set_result(None)

    async def get(self) -> tuple[int, Update]:
        """The next update, with the number of its job."""
        if not self._waiting:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._waiting.popleft()


class Encoder:
    """Encodes prompts in two threads, so that no short prompt waits behind a long one. Each thread has a tokenizer of
    its own: two threads must not share one."""

    def __init__(self, pair: Pair) -> None:
        self.vocabulary = pair.target.get_output_embeddings().weight.shape[0]
        self.texts = TokenTexts(pair.tokenizer)
        given = signature(pair.tokenizer.apply_chat_template).parameters  # what the method itself takes
        self.variables = {*re.findall(r"[^\W\d]\w*", str(pair.tokenizer.chat_template))} - {*given, "messages"}
        own = [replace(pair, tokenizer=copy.deepcopy(pair.tokenizer)) for _ in range(2)]
        self._threads = [(one, ThreadPoolExecutor(1, "tokenize")) for one in own]
        self.pair, self.tool_format, self._compiling = pair, ToolFormat.of(pair), ThreadPoolExecutor(2, "grammar")
        self._sent: deque[tuple[Updates, int, Update]] = deque()
        with contextlib.suppress(SelfJudgeError):  # the first grammar of a pair takes a second, as nothing else runs
            compile_grammar(pair, "start: /a/")

    def send(self, updates: Updates, number: int, update: Update) -> None:
        """Take what is new about a job, in the decoding thread, until `flush` is called."""
        self._sent.append((updates, number, update))

    def flush(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wake the event loop, once for all that was sent."""
        if self._sent:
            with contextlib.suppress(RuntimeError):  # the event loop has ended, and nobody waits any more
                loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        while self._sent:
            updates, number, update = self._sent.popleft()
            updates.put(number, update)

    async def encode(self, prompt: str | list[Fields], size: int, template: Fields | None = None) -> list[int]:
        """Token ids of a text, or of messages through the chat template with its variables; `size` in bytes."""
        pair, thread = self._threads[size > SHORT_BYTES]
        encode = partial(pair.encode, prompt, raw=isinstance(prompt, str), variables=template)
        return await asyncio.get_running_loop().run_in_executor(thread, encode)

    async def compile(self, body: CompletionRequest) -> Grammar | None:
        """The grammar of a request's answers."""
        if body.form is None:
            return None
        read = partial(read_grammar, self.pair, body, self.tool_format)
        return await asyncio.get_running_loop().run_in_executor(self._compiling, read)


class EventStream(StreamingResponse):
    """Events pass by the layers of the application, which need the head alone; texts whose reader waits by h11, too."""

    def __init__(self, completion: "Completion") -> None:
        super().__init__(completion.events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.completion = completion

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        direct: Send = scope["state"]["send"]
        cycle = getattr(direct, "__self__", None)
        if isinstance(cycle, RequestResponseCycle) and scope["http_version"] == "1.1" and not self.completion.readers:
            self.completion.updates.tell = partial(self._tell, cycle)  # h11 sends chunks here
        async for text in self.body_iterator:
            await direct({"type": "http.response.body", "body": str(text).encode(), "more_body": True})
        await direct({"type": "http.response.body", "body": b"", "more_body": False})

    def _tell(self, cycle: RequestResponseCycle, number: int, text: str) -> bool:
        """Send a text as a chunk, unless the client reads too slowly."""
        if cycle.flow.write_paused:
            return False
        if not cycle.disconnected:
            event = self.completion.tell_text(number, text).encode()
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(event), event))
        return True


class Completion:
    """One request to a completion endpoint."""

    def __init__(
        self, scheduler: Scheduler, encoder: Encoder, request: Request, body: ChatRequest | TextRequest
    ) -> None:
        self.scheduler, self.config, self.encoder = scheduler, scheduler.config, encoder
        self.request, self.body, self.options = request, body, body.selfjudge or SelfJudgeOptions()
        self.chat = isinstance(body, ChatRequest)
        self.told, self.offsets = Counter[int](), Counter[int]()  # tokens and characters told with log-probabilities
        self.updates = Updates()
        self.templates: dict[int, list[str]] = {}  # of the events of each job: what stands around its text
        kind = ("chat.completion.chunk" if body.stream else "chat.completion") if self.chat else "text_completion"
        number = ("chatcmpl-" if self.chat else "cmpl-") + make_id()
        self.head = {"id": number, "object": kind, "created": int(time.time()), "model": self.config.name}

    async def respond(self) -> Response:
        """Decode, and answer whole or as server-sent events."""
        sampling, n = choose_sampling(self.body, self.config.temperature), self.body.n or 1
        with self.scheduler.reserve(self.request.state.key):
            self.grammar = await self.encoder.compile(self.body)
            self.prompts = await self._encode()
        self.copies = 1 if sampling else n  # choices that share a job: greedy answers are all the same
        asked = enumerate(product(self.prompts, range(n // self.copies)))
        self.jobs = [self._make_job(number, prompt, sampling, copy) for number, (prompt, copy) in asked]
        written = self.encoder.tool_format
        self.readers = [CallReader(written) for _ in self.jobs] if written and self.body.usable_tools else []
        self.request.state.mode = self.jobs[0].choice.mode  # for the guard's count
        self.scheduler.flush = partial(self.encoder.flush, asyncio.get_running_loop())
        self.scheduler.submit(*self.jobs)
        self.watch = asyncio.ensure_future(self._watch_client())
        if not self.body.stream:
            return JSONResponse(await self._whole())
        return EventStream(self)

    async def _encode(self) -> list[list[int]]:
        """Token ids of the prompts."""
        if isinstance(self.body, TextRequest):
            return [await self._encode_prompt(prompt) for prompt in self.body.prompt]
        messages = [message.plain() for message in self.body.messages]
        tools = [tool.plain() for tool in self.body.usable_tools]
        if self.encoder.tool_format is not None:
            messages = self.encoder.tool_format.messages(messages, tools)
        more = [tools, *(message.get("tool_calls", "") for message in messages)]
        size = sum(len(message["content"].encode()) for message in messages) + len(str(more))
        size += BYTES_PER_TOKEN * len(messages)  # for each the template adds a token at least
        template = self.body.chat_template_kwargs or {}
        for name in template.keys() - self.encoder.variables:
            raise RefusedError(400, f"the chat template has no variable {name[:50]!r}", param="chat_template_kwargs")
        return [await self._encode_text(messages, size, {**template, "tools": tools or None})]

    async def _encode_prompt(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return await self._encode_text(prompt, len(prompt.encode()))
        last = self.encoder.vocabulary - 1
        if not all(0 <= token <= last for token in prompt):
            raise RefusedError(400, f"token ids lie between 0 and {last}", param="prompt")
        return prompt

    async def _encode_text(self, prompt: str | list[Fields], size: int, template: Fields | None = None) -> list[int]:
        if size > self.config.prompt_bytes:
            limit = self.config.prompt_bytes
            raise self._too_long(f"the prompt has {size} bytes, and this server takes {limit}: shorten it")
        try:
            return await self.encoder.encode(prompt, size, template)
        except SelfJudgeError as error:
            raise RefusedError(400, str(error), param="messages" if self.chat else "prompt") from None

    def _make_job(self, number: int, prompt: list[int], sampling: Sampling | None, copy: int) -> CompletionJob:
        body, top = self.body, self.body.wanted_logprobs
        noted = None if top is None else LogProbabilities(top)
        edits = make_edits(body, prompt, [*self.scheduler.pair.eos_ids], self.encoder.vocabulary)
        last = () if self.grammar is None else (self.grammar.begin(),)
        seed = random.getrandbits(62) if body.seed is None else row_seed(body.seed, copy) if copy else body.seed
        return CompletionJob(
            prompt,
            max_new_tokens=self._limit_length(len(prompt)),
            choice=self._choose_rule(sampling, edited=bool(edits)),
            send=partial(self.encoder.send, self.updates, number),
            options={
                "stop": body.stop,
                "stop_ids": body.stop_token_ids,
                "ignore_eos": bool(body.ignore_eos),
                "edits": (*edits, *last) if noted is None else (noted, *edits, *last),
                "seed": seed,
                "streamed": bool(body.stream),
            },
            logprobs=noted,
            echoed=isinstance(body, TextRequest) and bool(body.echo),
            detailed=self.options.tokens or noted is not None,
            key=self.request.state.key,
            arrived=self.request.state.arrived,  # encoding the prompt counts
        )

    def _choose_rule(self, sampling: Sampling | None, *, edited: bool) -> RuleChoice:
        """The rule of this request. One that is blind to edited logits is refused, or replaced where none is named."""
        options, seeded = self.options, self.body.seed is not None
        trace = options.judged_tokens or options.tokens
        choose = partial(self.scheduler.rules.choose, sampling=sampling, trace=trace, seeded=seeded)
        try:
            asked = options.rule_request() if self.grammar is None else options.rule_request().strictly()
            choice = choose(asked, off=options.off)
            blind = choice.rule.judge is not None or isinstance(choice.rule, FLy)  # accepts drafts without their logits
            if edited and blind:
                if asked.is_open:
                    return choose(asked, off=True)
                raise SelfJudgeError(
                    f"the rule {choice.rule.name} passes over logits, and so over penalties, `logit_bias` and"
                    " `min_tokens`: leave these out, or name another rule"
                )
        except SelfJudgeError as error:
            raise RefusedError(400, str(error), param="selfjudge" if self.body.selfjudge else "temperature") from None
        return choice

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
        limit = wanted or min(most if self.chat else COMPLETION_TOKENS, most, room)
        if (self.body.min_tokens or 0) > limit:
            raise RefusedError(400, f"min_tokens is more than max_tokens, {limit} for this request", param="min_tokens")
        return limit

    def _too_long(self, message: str) -> RefusedError:
        return RefusedError(400, message, "context_length_exceeded", "messages" if self.chat else "prompt")

    async def _watch_client(self) -> None:
        """Give the jobs up when the client goes away or the time is over."""
        waited = time.perf_counter() - self.jobs[0].arrived
        why: Failure = "cancelled"
        try:
            async with asyncio.timeout(self.config.timeout - waited):
                while (await self.request.receive())["type"] != "http.disconnect":
                    pass
        except TimeoutError:
            why = "timeout"
        self._cancel(why)

    def _cancel(self, why: Failure) -> None:
        for job in self.jobs:
            self.scheduler.cancel(job, why)

    def _end(self) -> None:
        """Stop watching the client; jobs that are not over are given up."""
        self.watch.cancel()
        self.updates.tell = None
        self._cancel("cancelled")

    async def _next(self) -> tuple[int, Update]:
        """What is new about one of the jobs, by its number, or a RefusedError."""
        number, update = await self.updates.get()
        if update.failure:
            raise RefusedError(*FAILURES[update.failure])
        if update.result is not None:
            try:
                check_edits(self.jobs[number].options["edits"])
            except SelfJudgeError as error:
                raise RefusedError(400, str(error), param=self.body.form) from None
        return number, update

    async def _whole(self) -> Fields:
        """The answers in one piece."""
        results: dict[int, Generation] = {}
        try:
            while len(results) < len(self.jobs):
                number, update = await self._next()
                if update.result is not None:
                    results[number] = update.result
        finally:
            self._end()
        choices: list[Fields] = []
        for number, result in sorted(results.items()):
            message, job, described = self._message(number, result), self.jobs[number], self._describe(number, result)
            logprobs = self._read_logprobs(number, len(result.tokens) + job.echoed * len(job.prompt))
            made = self._choices(number, message, self._finish(number, result), logprobs)
            choices += [{**choice, "selfjudge": described} for choice in made]
        more = {"selfjudge": choices[0].pop("selfjudge")} if len(choices) == 1 else {}  # several speak for themselves
        return {**self.head, "choices": choices, "usage": self._usage(results.values()), **more}

    async def events(self) -> AsyncIterator[str]:
        """The answers as server-sent events."""
        if usage := bool(self.body.stream_options and self.body.stream_options.include_usage):
            self.head["usage"] = None
        results: list[Generation] = []
        try:
            for number in range(len(self.jobs)):
                echo = self._echo(number)
                if self.chat or echo:
                    yield self._tell(number, {"role": "assistant", "content": echo})
            while len(results) < len(self.jobs):
                number, update = await self._next()
                results += [] if update.result is None else [update.result]
                told = self._tell_update(number, update)
                if len(results) == len(self.jobs):  # the end of an answer is one message
                    told += _event(self.head, choices=[], usage=self._usage(results)) if usage else ""
                    told += "data: [DONE]\n\n"
                yield told
        except RefusedError as error:
            yield _event(error.body)
        finally:
            self._end()

    def _tell_update(self, number: int, update: Update) -> str:
        """Events that say what an update says."""
        if update.result is None and not (self.readers or update.pieces):
            return self.tell_text(number, update.text)
        events = []
        if update.text or update.pieces:
            delta, *others = self._deltas(number, update.text) or [{}]
            more = _describe_tokens(update) if self.options.tokens else {}
            logprobs = self._read_logprobs(number, len(update.pieces))
            events = [self._tell(number, delta, logprobs=logprobs, **more)]
            events += [self._tell(number, other) for other in others]
        if (result := update.result) is not None:
            events += [self._tell(number, delta) for delta in self._deltas(number, "", last=True)]
            described = self._describe(number, result)
            events.append(self._tell(number, {}, self._finish(number, result), selfjudge=described))
        return "".join(events)

    def _message(self, number: int, result: Generation) -> Fields:
        """The message of an answer, put together from what would be streamed."""
        content = None if self.readers else self._echo(number)
        message: Fields = {"role": "assistant", "content": content, "refusal": None}
        for delta in self._deltas(number, result.text, last=True):
            if "content" in delta:
                message["content"] = (message["content"] or "") + delta["content"]
            for new in delta.get("tool_calls", ()):
                calls, function = message.setdefault("tool_calls", []), new.pop("function")
                if new.pop("index") == len(calls):
                    calls.append({**new, "function": function})
                else:
                    calls[-1]["function"]["arguments"] += function["arguments"]
        return message

    def _deltas(self, number: int, text: str, *, last: bool = False) -> list[Fields]:
        """What new text adds to the message of a job."""
        if self.readers:
            return [*self.readers[number].read(text, last=last)]
        return [{"content": text}] if text else []

    def _finish(self, number: int, result: Generation) -> str:
        """Why an answer has ended; a tool that the client named was no choice of the model, as OpenAI sees it."""
        if result.finish == "length":
            return "length"
        called = self.readers and self.readers[number].calls
        return "tool_calls" if called and not isinstance(getattr(self.body, "tool_choice", None), NamedTool) else "stop"

    def _tell(
        self, number: int, delta: Fields, finish: str | None = None, logprobs: Fields | None = None, **more: Any
    ) -> str:
        """Events that say what is new about a job, one for each of its choices."""
        choices = self._choices(number, delta, finish, logprobs)
        return "".join(_event(self.head, choices=[choice], **more) for choice in choices)

    def tell_text(self, number: int, text: str) -> str:
        """The same where a text is all that is new: only the text is encoded each time."""
        if number not in self.templates:
            self.templates[number] = self._tell(number, {"content": BLANK}).split(_dump(BLANK))
        return _dump(text).join(self.templates[number])

    def _choices(self, number: int, message: Fields, finish: str | None, logprobs: Fields | None) -> list[Fields]:
        """The choices of a response that a job is for."""
        name = "delta" if self.body.stream else "message"
        content = {name: message} if self.chat else {"text": message.get("content", "")}
        choice = {**content, "logprobs": logprobs, "finish_reason": finish}
        return [{"index": index, **choice} for index in range(number * self.copies, (number + 1) * self.copies)]

    def _echo(self, number: int) -> str:
        """The prompt of a job, where the answer is to begin with it."""
        if isinstance(self.body, ChatRequest) or not self.body.echo:
            return ""
        prompt = self.body.prompt[number * len(self.prompts) // len(self.jobs)]
        return prompt if isinstance(prompt, str) else self.encoder.texts.join(prompt)

    def _read_logprobs(self, number: int, tokens: int) -> Fields | None:
        """The log-probabilities of the next tokens of a job, if they are wanted."""
        if (noted := self.jobs[number].logprobs) is None:
            return None
        begin = self.told[number]
        entries = noted.noted[begin : begin + tokens]
        self.told[number] += len(entries)
        if self.chat:
            return self.encoder.texts.for_chat(entries)
        described = self.encoder.texts.for_text(entries, self.offsets[number])
        self.offsets[number] += sum(map(len, described["tokens"]))
        return described

    def _usage(self, results: Collection[Generation]) -> Fields:
        """Each prompt counts once, with the mean of what its answers found in the cache; each choice counts."""
        prompt, cached = sum(map(len, self.prompts)), sum(result.cached_tokens for result in results)
        completion = self.copies * sum(len(result.tokens) for result in results)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached * len(self.prompts) // len(self.jobs)},
        }

    def _describe(self, number: int, result: Generation) -> Fields:
        """The field `selfjudge` of an answer."""
        job = self.jobs[number]
        # by the time of its own passes: the clock stands still while answers of other settings have their turn
        seconds = sum(result.seconds.get(phase, 0.0) for phase in PHASES)
        described: Fields = {
            **job.choice.as_json(),
            "gamma": job.choice.gamma if result.gamma is None else result.gamma,
            "gamma_mean": result.gamma_mean,
            "cycles": result.cycles,
            "mean_accepted_length": result.mean_accepted_length,
            "judged_share": result.judged_share,
            "guarded_tokens": result.guarded_tokens,
            "tokens_per_second": len(result.tokens) / seconds if seconds else None,
            "speed_over_plain": result.speed_over_plain,
            "busy": job.load and job.load.describe(),
        }
        if self.options.judged_tokens:
            described["judged_tokens"] = [asdict(token) for token in result.judged_tokens]
        return described


def _describe_tokens(update: Update) -> Fields:
    """The field `selfjudge` of a chunk whose tokens were asked for."""
    tokens = [
        {**(asdict(one.judged) if one.judged else {}), "token": one.token, "text": one.text, "origin": one.origin}
        for one in update.pieces
    ]
    return {"selfjudge": {"cycle": update.cycle, "tokens": tokens}} if tokens else {}


def _event(data: Fields, **more: Any) -> str:
    return f"data: {_dump({**data, **more})}\n\n"
