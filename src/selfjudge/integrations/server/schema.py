"""Bodies of requests of OpenAI's and vLLM's clients. What would change an answer and is unknown is refused by name."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import fields
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, field_validator, model_validator

from selfjudge.decoding.rule_parser import STRICT, RuleRequest
from selfjudge.decoding.sampling import Sampling
from selfjudge.errors import EMPTY_PROMPT
from selfjudge.integrations.asgi import RefusedError
from selfjudge.integrations.server.config import ServerConfig
from selfjudge.store import parse_json, read_asset

_FIELDS = json.loads(read_asset(__package__, "openai.json"))
IGNORED: dict[str, str] = _FIELDS["ignored"]  # fields of OpenAI's API that are accepted and change nothing, and why
UNSUPPORTED: dict[str, list[Any]] = _FIELDS["unsupported"]  # and the values at which they change nothing
COMPLAINTS: dict[str, str] = _FIELDS["complaints"]
"""Kinds of pydantic's complaints that its own words describe by its classes, or otherwise than our settings do."""

MOST_ANSWERS = 128  # prompts of a request, answers to each, and both together
MOST_TOKENS = 1024  # tokens that `logit_bias` and `stop_token_ids` may name
MOST_TOOLS, MOST_CHOICES = 128, 1024
ANY_OBJECT = {"type": "object"}


def _within(config: type, name: str) -> Any:
    """The range that a config declares for a field."""
    limits = next(f.metadata for f in fields(config) if f.name == name)
    return Field(ge=limits["minimum"], gt=limits["above"], le=limits["maximum"])


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else [] if value is None else value


def _list_prompts(value: Any) -> Any:
    """A list of prompts, also where there is one alone; each is a text or a list of token ids."""
    several = isinstance(value, list) and value and isinstance(value[0], str | list)
    prompts = value if several else [value]
    if len(prompts) > MOST_ANSWERS:
        raise ValueError(f"a request has at most {MOST_ANSWERS} prompts")
    if any(prompt in ("", []) for prompt in prompts):
        raise ValueError("the prompt is empty: give at least one token")
    return prompts


def _read_bias(value: Any) -> Any:
    """Token ids and numbers; JSON has keys of text alone."""
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > MOST_TOKENS:
        raise ValueError(f"must be an object of token ids and numbers, with at most {MOST_TOKENS} tokens")
    for token, bias in value.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise ValueError(f"{token[:20]!r} is not a token id")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise ValueError(f"the bias of token {token} must lie between -100 and 100")
    return {int(token): float(bias) for token, bias in value.items()}


T = TypeVar("T")
FailFast = Annotated[T, Field(fail_fast=True)]  # at the first wrong element: errors of a million take seconds
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
_from_text = BeforeValidator(lambda value: parse_json(value) if isinstance(value, str) else value)  # of vLLM's clients
Schema = Annotated[dict[str, Any] | None, _from_text]
Choices = Annotated[FailFast[list[str]], Field(min_length=1, max_length=MOST_CHOICES)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
StopString = Annotated[str, Field(min_length=1, max_length=512)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class SchemaFormat(Strict):
    name: Name
    description: str | None = None
    content: Schema = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None


class StructuredOutputs(Strict):
    """vLLM's field of that name."""

    content: Schema = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


class FunctionSpec(Strict):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(Strict):
    type: Literal["function"]
    function: FunctionSpec

    def plain(self) -> dict[str, Any]:
        """As chat templates want it."""
        return self.model_dump(exclude_none=True, exclude={"function": {"strict"}})


class FunctionName(Strict):
    name: Name


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


class CalledFunction(Strict):
    name: str
    arguments: str


class ToolCall(Strict):
    """A call that an earlier answer has made."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        """As chat templates want it: with arguments as an object, where they are one."""
        arguments: Any = self.function.arguments
        with suppress(ValueError):
            arguments = parse_json(arguments or "{}")
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


class AnswerForm(NamedTuple):
    """What the answers of a request look like; the first field is the parameter that asks for it."""

    param: str
    kind: str  # of `grammar_text`
    value: Any
    strict: bool = True


class SelfJudgeOptions(Strict):
    """The field `selfjudge`: how this request is decoded; None is the server's own setting."""

    rule: Annotated[str, Field(max_length=64)] | None = None
    theta: float | Literal["F", "R", "Youden"] | None = None
    quality: float | None = None
    price: float | None = None
    gamma: int | Literal["auto"] | None = None
    strict_start: int | None = None
    strict_code: bool | None = None
    off: bool = False
    judged_tokens: bool = False  # whether the answer lists the tokens that were accepted against the target's choice
    tokens: bool = False  # whether a stream says of every token where it comes from

    def rule_request(self) -> RuleRequest:
        names = ("rule", "theta", "quality", "price", "gamma", *STRICT)
        return RuleRequest(**{name: getattr(self, name) for name in names})


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool = False


class TextPart(Strict):
    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, part: Any) -> Any:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise ValueError(f"this model reads text alone: leave out the part of type {kind[:30]!r}")
        return part


class ChatMessage(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | FailFast[list[TextPart]] | None = None
    name: str | None = None
    tool_calls: FailFast[list[ToolCall]] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None  # what answers have and clients send back; here it is never set
    annotations: list[None] | None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _has_content(self) -> ChatMessage:
        answers = self.role == "assistant"
        if self.content is None and not (answers and self.tool_calls):
            raise ValueError("a message needs content")
        if (self.tool_call_id is not None) is not (self.role == "tool") or (self.tool_calls and not answers):
            raise ValueError("tool_call_id belongs to messages of role tool, tool_calls to those of role assistant")
        return self

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())

    def plain(self) -> dict[str, Any]:
        """As chat templates want it."""
        called = {"tool_calls": [call.plain() for call in self.tool_calls]} if self.tool_calls else {}
        answered = {"tool_call_id": self.tool_call_id, "name": self.name} if self.role == "tool" else {}
        return {"role": "system" if self.role == "developer" else self.role, "content": self.text, **called, **answered}


class CompletionRequest(Strict):
    """What both endpoints have in common."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, _within(ServerConfig, "temperature")] | None = None
    top_p: Annotated[float, _within(Sampling, "top_p")] | None = None
    top_k: Annotated[int, _within(Sampling, "top_k")] | None = None
    min_p: Annotated[float, _within(Sampling, "min_p")] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: Annotated[
        dict[int, float] | None, PlainValidator(_read_bias, json_schema_input_type=dict[str, float] | None)
    ] = None
    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Annotated[
        list[StopString], Field(max_length=16), BeforeValidator(_as_list, json_schema_input_type=str | list[str] | None)
    ] = Field(default_factory=list)
    stop_token_ids: Annotated[
        FailFast[list[int]],
        Field(max_length=MOST_TOKENS),
        BeforeValidator(_as_list, json_schema_input_type=list[int] | None),
    ] = Field(default_factory=list)
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    selfjudge: SelfJudgeOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_unused(cls, body: Any) -> Any:
        """Refuse fields that are not supported, unless they change nothing."""
        if not isinstance(body, dict):
            return body
        for name, neutral in UNSUPPORTED.items():
            value = body.get(name)
            if value is not None and not any(type(value) is type(same) and value == same for same in neutral):
                raise RefusedError(400, f"{name} is not supported by this server: leave it out", param=name)
        return {name: value for name, value in body.items() if name not in IGNORED and name not in UNSUPPORTED}

    @model_validator(mode="after")
    def _fits_together(self) -> CompletionRequest:
        for name, refused, why in self._conflicts():
            if refused:
                raise RefusedError(400, f"{name} {why}", param=name)
        return self

    def _conflicts(self) -> list[tuple[str, bool, str]]:
        """Fields that may not fit together: the one that is named, whether it is refused, and why."""
        origins, wanted, forms = self.selfjudge is not None and self.selfjudge.tokens, self.response_format, self.forms
        unfit = wanted is not None and (wanted.type == "json_schema") is (wanted.json_schema is None)
        formed, limits = (
            "does not go with a schema, a grammar or tools",
            {self.max_tokens, self.max_completion_tokens, None},
        )
        return [
            ("max_tokens", len(limits) > 2, "and max_completion_tokens are the same limit: give one"),
            ("stream_options", self.stream_options is not None and not self.stream, "needs stream: true"),
            ("selfjudge.tokens", origins and not self.stream, "needs stream: true"),
            ("min_tokens", bool(self.min_tokens and self.stop), "does not know of stop strings: give stop_token_ids"),
            ("min_tokens", bool(self.min_tokens) and self.form is not None, formed),
            ("ignore_eos", bool(self.ignore_eos) and self.form is not None, formed),
            ("response_format", unfit, "of type json_schema needs json_schema, which goes with no other type"),
            (forms[-1].param if forms else "", len(forms) > 1, "is a second form of the answer: give one"),
        ]

    @property
    def forms(self) -> list[AnswerForm]:
        """All forms that are asked for; at most one is not refused."""
        wanted = self.response_format
        outputs = {} if self.structured_outputs is None else self.structured_outputs.model_dump(by_alias=True)
        forms = [AnswerForm("structured_outputs", "json", ANY_OBJECT)] if outputs.pop("json_object", False) else []
        if wanted is not None and wanted.type == "json_object":
            forms.append(AnswerForm("response_format", "json", ANY_OBJECT))
        elif wanted is not None and wanted.type == "json_schema" and (named := wanted.json_schema) is not None:
            forms.append(AnswerForm("response_format", "json", named.content or {}, bool(named.strict)))
        forms += [AnswerForm("structured_outputs", kind, value) for kind, value in outputs.items()]
        guided = ("json", "regex", "choice", "grammar")
        forms += [AnswerForm(f"guided_{kind}", kind, getattr(self, f"guided_{kind}")) for kind in guided]
        return [form for form in forms if form.value is not None]

    @property
    def form(self) -> str | None:
        """The parameter whose grammar constrains the answer; None: its text is free."""
        return "tools" if self.usable_tools else next((form.param for form in self.forms), None)

    @property
    def usable_tools(self) -> list[ToolSpec]:
        """The tools that the answer may call."""
        return []

    @property
    def wanted_logprobs(self) -> int | None:
        """How many of the most likely tokens are listed at each place; None where no log-probabilities are wanted."""
        return None


class ChatRequest(CompletionRequest):
    """POST /v1/chat/completions"""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[FailFast[list[ToolSpec]], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Annotated[dict[str, str | int | float | bool | None], Field(max_length=16)] | None = None

    def _conflicts(self) -> list[tuple[str, bool, str]]:
        names, usable = [tool.function.name for tool in self.tools or []], bool(self.usable_tools)
        needed, other = self.tool_choice not in (None, "none", "auto"), any(form.kind != "json" for form in self.forms)
        return [
            *super()._conflicts(),
            ("tools", len({*names}) < len(names), "name a function twice"),
            ("tool_choice", needed and not usable, "needs tools, and names one of them"),
            ("tools", usable and other, "go with JSON schemas, not with other grammars"),
            ("top_logprobs", bool(self.top_logprobs) and not self.logprobs, "needs logprobs: true"),
        ]

    @property
    def usable_tools(self) -> list[ToolSpec]:
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        tools = [] if self.tool_choice == "none" else self.tools or []
        return [tool for tool in tools if named in (None, tool.function.name)]

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @field_validator("messages")
    @classmethod
    def _say_something(cls, messages: list[ChatMessage]) -> list[ChatMessage]:
        if not any(message.text.strip() for message in messages):
            raise ValueError(EMPTY_PROMPT)
        return messages


class TextRequest(CompletionRequest):
    """POST /v1/completions: prompts as text or as token ids."""

    prompt: Annotated[
        list[str | FailFast[list[int]]],
        Field(fail_fast=True),
        BeforeValidator(_list_prompts, json_schema_input_type=str | list[int] | list[str] | list[list[int]]),
    ]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None

    def _conflicts(self) -> list[tuple[str, bool, str]]:
        answers, streamed = len(self.prompt) * (self.n or 1), bool(self.echo and self.stream)
        many = f"times prompts is {answers}, and a request has at most {MOST_ANSWERS} answers"
        return [
            *super()._conflicts(),
            ("n", answers > MOST_ANSWERS, many),
            ("echo", streamed and self.logprobs is not None, "with logprobs does not stream"),
        ]

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs
