"""Bodies of requests, as OpenAI's clients send them.

What would change an answer and is not supported is refused by name."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from selfjudge.decoding.rule_parser import STRICT, RuleRequest
from selfjudge.decoding.sampling import Sampling
from selfjudge.errors import EMPTY_PROMPT
from selfjudge.integrations.server.config import ServerConfig
from selfjudge.store import read_asset

_FIELDS = json.loads(read_asset(__package__, "openai.json"))
IGNORED: list[str] = _FIELDS["ignored"]  # fields of OpenAI's API that are accepted and change nothing
UNSUPPORTED: dict[str, list[Any]] = _FIELDS["unsupported"]
"""Fields that are not supported, and the values at which they change nothing."""
COMPLAINTS: dict[str, str] = _FIELDS["complaints"]
"""Kinds of pydantic's complaints that its own words describe by its classes, or otherwise than our settings do."""


def _within(config: type, name: str) -> Any:
    """The range that a config declares for a field."""
    limits = next(f.metadata for f in fields(config) if f.name == name)
    return Field(ge=limits["minimum"], gt=limits["above"], le=limits["maximum"])


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else [] if value is None else value


def _single_prompt(value: Any) -> Any:
    """The prompt itself; a list of one prompt counts as that prompt."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise ValueError("a request has one prompt: send several requests, they are decoded together")
        value = value[0]
    if value in ("", []):
        raise ValueError("the prompt is empty: give at least one token")
    return value


T = TypeVar("T")
StopString = Annotated[str, Field(min_length=1, max_length=512)]
FailFast = Annotated[T, Field(fail_fast=True)]
"""A list that is refused at its first wrong element: errors of a million elements would take seconds."""


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


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


class ChatMessage(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | FailFast[list[TextPart]]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """As chat templates want it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class CompletionRequest(Strict):
    """What both endpoints have in common."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, _within(ServerConfig, "temperature")] | None = None
    top_p: Annotated[float, _within(Sampling, "top_p")] | None = None
    top_k: Annotated[int, _within(Sampling, "top_k")] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Annotated[
        list[StopString], Field(max_length=16), BeforeValidator(_as_list, json_schema_input_type=str | list[str] | None)
    ] = Field(default_factory=list)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
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
                raise ValueError(f"{name} is not supported by this server: leave it out")
        return {name: value for name, value in body.items() if name not in IGNORED and name not in UNSUPPORTED}

    @model_validator(mode="after")
    def _fits_together(self) -> CompletionRequest:
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            raise ValueError("max_tokens and max_completion_tokens are the same limit: give one")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        if self.selfjudge is not None and self.selfjudge.tokens and not self.stream:
            raise ValueError("selfjudge.tokens needs stream: true")
        return self


class ChatRequest(CompletionRequest):
    """POST /v1/chat/completions"""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]

    @field_validator("messages")
    @classmethod
    def _say_something(cls, messages: list[ChatMessage]) -> list[ChatMessage]:
        if not any(message.plain()["content"].strip() for message in messages):
            raise ValueError(EMPTY_PROMPT)
        return messages


class TextRequest(CompletionRequest):
    """POST /v1/completions: one prompt, as text or as token ids."""

    prompt: Annotated[
        str | FailFast[list[int]],
        BeforeValidator(_single_prompt, json_schema_input_type=str | list[int] | list[str] | list[list[int]]),
    ]
