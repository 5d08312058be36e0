"""Bodies of requests, as OpenAI's clients send them.

What would change an answer and is not supported is refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from selfjudge.decoding.rule_parser import RuleRequest

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "logprobs": (False,), "top_logprobs": (0,), "echo": (False,), "suffix": ("",),
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "frequency_penalty": (0, 0.0), "presence_penalty": (0, 0.0),
    "logit_bias": ({},), "modalities": (["text"],), "audio": (), "prediction": (), "web_search_options": (),
    "reasoning_effort": (), "verbosity": (),
}  # fmt: skip
"""Fields that are not supported, and the values at which they change nothing."""


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("a lone surrogate is not a character") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]
T = TypeVar("T")
First = Annotated[T, Field(fail_fast=True)]
"""A list that is refused at its first wrong element: errors of a million elements would take seconds."""


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class DecodeOptions(Strict):
    """The field `selfjudge`: how this request is decoded; None is the server's own setting."""

    rule: Annotated[Text, Field(max_length=64)] | None = None
    theta: float | Literal["F", "R", "Youden"] | None = None
    quality: float | None = None
    price: float | None = None
    gamma: int | Literal["auto"] | None = None
    off: bool = False
    judged_tokens: bool = False
    """Whether the answer lists the tokens that were accepted against the target's choice."""
    tokens: bool = False
    """Whether a stream says of every token where it comes from."""

    def rule_request(self) -> RuleRequest:
        return RuleRequest(self.rule, None, self.theta, self.quality, self.price, self.gamma)


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool = False


class TextPart(Strict):
    type: Literal["text"]
    text: Text


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | First[list[TextPart]]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """As chat templates want it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class Request(Strict):
    """What both endpoints have in common."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    selfjudge: DecodeOptions | None = None

    # accepted and without effect
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    parallel_tool_calls: Any = None

    # refused, see UNSUPPORTED
    n: Any = None
    logprobs: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    logit_bias: Any = None

    @model_validator(mode="after")
    def _supported(self) -> Request:
        for name, neutral in UNSUPPORTED.items():
            value = getattr(self, name, None)
            if value is not None and not any(type(value) is type(s) and value == s for s in neutral):
                raise ValueError(f"{name} is not supported by this server: leave it out")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        if self.selfjudge is not None and self.selfjudge.tokens and not self.stream:
            raise ValueError("selfjudge.tokens needs stream: true")
        return self

    @field_validator("temperature")
    @classmethod
    def _not_tiny(cls, value: float | None) -> float | None:
        if value is not None and 0 < value < 0.01:
            raise ValueError("temperature is 0 (greedy) or at least 0.01")
        return value

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @field_validator("stop")
    @classmethod
    def _stop_lengths(cls, value: str | list[str] | None) -> str | list[str] | None:
        if any(not 0 < len(s) <= 512 for s in ([value] if isinstance(value, str) else value or [])):
            raise ValueError("stop strings have 1 to 512 characters")
        return value

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens


class ChatRequest(Request):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    top_logprobs: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None

    @model_validator(mode="after")
    def _same_limit(self) -> ChatRequest:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens are the same limit: give one")
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens


class TextRequest(Request):
    """POST /v1/completions: one prompt, as text or as token ids."""

    prompt: Text | First[list[int]] | First[list[Text]] | First[list[First[list[int]]]]

    best_of: Any = None
    echo: Any = None
    suffix: Any = None

    @property
    def single_prompt(self) -> str | list[int]:
        """The prompt; a list of one counts as one."""
        value: Any = self.prompt
        several = isinstance(value, list) and value and not isinstance(value[0], int)
        return value[0] if several else value  # type: ignore[no-any-return]

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_prompt(cls, value: Any) -> Any:
        if isinstance(value, list) and len(value) > 1 and isinstance(value[0], str | list):
            raise ValueError("a request has one prompt: send several requests, they are decoded together")
        return value

    @model_validator(mode="after")
    def _not_empty(self) -> TextRequest:
        if not self.single_prompt:
            raise ValueError("the prompt is empty: give at least one token")
        return self
