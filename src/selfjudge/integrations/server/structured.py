"""Fields of requests that say what form answers have: schemas, grammars and tools, as OpenAI and vLLM name them."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from selfjudge.decoding.grammar import Grammar, compile_grammar, grammar_text, json_rule
from selfjudge.errors import SelfJudgeError
from selfjudge.integrations.asgi import RefusedError
from selfjudge.integrations.server.tools import TEXT, ToolFormat
from selfjudge.models.pair import Pair
from selfjudge.store import parse_json

T = TypeVar("T")
FailFast = Annotated[T, Field(fail_fast=True)]
"""A list that is refused at its first wrong element: errors of a million elements would take seconds."""
MOST_TOOLS, MOST_CHOICES = 128, 1024
ANY_OBJECT = {"type": "object"}


def _at_most(length: int) -> BeforeValidator:
    """Refuses a longer list before its elements are read."""

    def check(value: Any) -> Any:
        if isinstance(value, list) and len(value) > length:
            raise ValueError(f"must have at most {length} elements, not {len(value)}")
        return value

    return BeforeValidator(check)


def _read_schema(value: Any) -> Any:
    return parse_json(value) if isinstance(value, str) else value  # vLLM's clients may send text


Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
Schema = Annotated[dict[str, Any] | None, BeforeValidator(_read_schema)]
Choices = Annotated[FailFast[list[str]], Field(min_length=1), _at_most(MOST_CHOICES)]


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


class StructuredFields(Strict):
    """Of both endpoints."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    @property
    def forms(self) -> list[AnswerForm]:
        """All forms that are asked for; at most one is not refused."""
        wanted, outputs = self.response_format, self.structured_outputs or StructuredOutputs.model_construct()
        forms = [AnswerForm("structured_outputs", "json", ANY_OBJECT)] if outputs.json_object else []
        if wanted is not None and wanted.type == "json_object":
            forms.append(AnswerForm("response_format", "json", ANY_OBJECT))
        elif wanted is not None and wanted.type == "json_schema" and (named := wanted.json_schema) is not None:
            forms.append(AnswerForm("response_format", "json", named.content or {}, bool(named.strict)))
        for kind in ("json", "regex", "choice", "grammar"):
            value = outputs.content if kind == "json" else getattr(outputs, kind)
            forms += [AnswerForm("structured_outputs", kind, value)] if value is not None else []
            value = getattr(self, f"guided_{kind}")
            forms += [AnswerForm(f"guided_{kind}", kind, value)] if value is not None else []
        return forms

    @property
    def is_formed(self) -> bool:
        """Whether a grammar constrains the answer."""
        return bool(self.forms)

    def form_conflicts(self) -> list[tuple[str, bool, str]]:
        """Fields that do not fit together, as `_fits_together` wants them."""
        forms, wanted = self.forms, self.response_format
        lacks = wanted is not None and wanted.type == "json_schema" and wanted.json_schema is None
        second = forms[-1].param if forms else ""
        return [
            ("response_format", lacks, "of type json_schema needs json_schema"),
            (second, len(forms) > 1, "is a second form of the answer: give one"),
        ]


class ToolFields(StructuredFields):
    """Of chats."""

    tools: Annotated[FailFast[list[ToolSpec]], _at_most(MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    @property
    def usable_tools(self) -> list[ToolSpec]:
        """The tools that the answer may call."""
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        tools = [] if self.tool_choice == "none" else self.tools or []
        return [tool for tool in tools if named in (None, tool.function.name)]

    @property
    def template_tools(self) -> list[dict[str, Any]]:
        """What the chat template is told about them."""
        return [tool.plain() for tool in self.usable_tools]

    @property
    def is_formed(self) -> bool:
        return bool(self.forms or self.usable_tools)

    def form_conflicts(self) -> list[tuple[str, bool, str]]:
        names, needed = (
            [tool.function.name for tool in self.tools or []],
            self.tool_choice not in (None, "none", "auto"),
        )
        other = any(form.kind != "json" for form in self.forms)
        return [
            *super().form_conflicts(),
            ("tools", len({*names}) < len(names), "name a function twice"),
            ("tool_choice", needed and not self.usable_tools, "needs tools, and names one of them"),
            ("tools", bool(self.usable_tools) and other, "go with JSON schemas, not with other grammars"),
        ]


def read_grammar(pair: Pair, body: StructuredFields, written: ToolFormat | None) -> Grammar | None:
    """The grammar that a request asks for; compiles it, for up to seconds. `written` is how tools are called."""
    form = body.forms[0] if body.forms else None
    tools = body.usable_tools if isinstance(body, ToolFields) else []
    try:
        if not tools:
            text = None if form is None else grammar_text(form.kind, form.value, strict=form.strict)
            return None if text is None else compile_grammar(pair, text)
        if written is None:
            raise SelfJudgeError("tools: how this model's chat template has them called is not known here")
        assert isinstance(body, ToolFields)
        content = TEXT if form is None else json_rule(form.value, strict=form.strict)
        functions, several = [tool.function.model_dump() for tool in tools], body.parallel_tool_calls is not False
        free = body.tool_choice in (None, "auto")
        return compile_grammar(pair, written.grammar(functions, content if free else None, several))
    except SelfJudgeError as error:
        raise RefusedError(400, str(error), param="tools" if tools else form and form.param) from None
