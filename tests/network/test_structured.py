"""Structured answers and tool calls over HTTP: OpenAI's own client, bad input, and SmolLM2 under many schemas."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from typing import Any

import jsonschema_rs
import openai
import pytest

import selfjudge
from selfjudge.models.pair import Pair
from servers import Server
from spelling import CITY, Paint, Weather, name_spellers

TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "the weather", "parameters": CITY, "strict": True},
    },
    {"type": "function", "function": {"name": "now"}},
]
PAINT = {
    "type": "object",
    "properties": {"hue": {"enum": ["red", "blue"]}, "shiny": {"type": "boolean"}, "coats": {"enum": [1, 2, 3]}},
    "required": ["hue", "shiny", "coats"], "additionalProperties": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def server(start: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    return start(*name_spellers(tmp_path_factory.mktemp("spellers"), "tiny"))


def ask(server: Server, prompt: str = "paint it", **options: Any) -> Any:
    options = {"max_tokens": 200, "temperature": 0, **options}
    return server.client().chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": prompt}], **options
    )


def as_schema(schema: Any, strict: bool = True) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "paint", "schema": schema, "strict": strict}}


def test_answers_fit_their_schema_under_every_rule_and_temperature(server: Server) -> None:
    plain = ask(server, response_format=as_schema(PAINT), extra_body={"selfjudge": {"gamma": 0}}).choices[0]
    jsonschema_rs.validate(PAINT, json.loads(plain.message.content))
    assert plain.finish_reason == "stop"
    for own in (
        {},
        {"rule": "margin:90", "strict_code": False, "strict_start": 0},
        {"rule": "topk:k=9,strict_code=off"},
    ):
        text = ask(server, response_format=as_schema(PAINT), extra_body={"selfjudge": own}).choices[0].message.content
        assert text == plain.message.content
    for choice in ask(server, response_format=as_schema(PAINT), temperature=1.5, n=4).choices:
        jsonschema_rs.validate(PAINT, json.loads(choice.message.content))
    stream = ask(server, response_format=as_schema(PAINT), stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == plain.message.content
    cut = ask(server, response_format=as_schema(PAINT), max_tokens=3).choices[0]
    assert cut.finish_reason == "length"


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_json": PAINT}, r"\{.*\}"), ({"guided_json": json.dumps(PAINT)}, r"\{.*\}"),
        ({"guided_regex": "[a-c]{3}"}, "[a-c]{3}"), ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'root ::= "a" | "b"'}, "a|b"), ({"structured_outputs": {"json": PAINT}}, r"\{.*\}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"), ({"response_format": as_schema(PAINT, False)}, r"\{.*\}"),
    ],
)  # fmt: skip
def test_forms_of_both_endpoints(server: Server, fields: dict[str, Any], pattern: str) -> None:
    chat = ask(server, extra_body=fields).choices[0].message.content
    text = (
        server.client()
        .completions.create(model="tiny", prompt="paint", max_tokens=200, extra_body=fields)
        .choices[0]
        .text
    )
    assert re.fullmatch(pattern, chat, re.DOTALL), chat
    assert re.fullmatch(pattern, text, re.DOTALL), text


def test_any_json_object(server: Server) -> None:
    for fields in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        answer = ask(server, extra_body=fields).choices[0]
        assert answer.message.content.startswith("{")
        assert answer.finish_reason == "length" or isinstance(json.loads(answer.message.content), dict)


def test_the_client_parses_models(server: Server) -> None:
    messages: Any = [{"role": "user", "content": "paint it"}]
    completions = server.client().chat.completions
    parsed = (
        completions.parse(model="tiny", messages=messages, response_format=Paint, max_tokens=200)
        .choices[0]
        .message.parsed
    )
    assert isinstance(parsed, Paint)
    tools = [openai.pydantic_function_tool(Weather, name="weather")]
    message = (
        completions.parse(model="tiny", messages=messages, tools=tools, tool_choice="required", max_tokens=200)
        .choices[0]
        .message
    )
    assert message.tool_calls
    assert isinstance(message.tool_calls[0].function.parsed_arguments, Weather)
    with pytest.raises(openai.LengthFinishReasonError):
        completions.parse(model="tiny", messages=messages, response_format=Paint, max_tokens=2)


def check_calls(calls: Any) -> None:
    for call in calls:
        assert call.type == "function"
        arguments = json.loads(call.function.arguments)
        if call.function.name == "weather":
            jsonschema_rs.validate(CITY, arguments)
        else:
            assert (call.function.name, arguments) == ("now", {})


def test_tools_are_called(server: Server) -> None:
    whole = ask(server, tools=TOOLS, tool_choice="required", parallel_tool_calls=False).choices[0]
    assert (whole.finish_reason, whole.message.content, len(whole.message.tool_calls)) == ("tool_calls", None, 1)
    check_calls(whole.message.tool_calls)
    named = ask(
        server, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "now"}}, parallel_tool_calls=False
    ).choices[0]
    assert (named.finish_reason, named.message.tool_calls[0].function.name) == ("stop", "now")
    several = ask(server, tools=TOOLS, tool_choice="required", temperature=1, n=6, seed=3, max_tokens=300).choices
    assert {len(choice.message.tool_calls) for choice in several} - {1}
    for choice in several:
        check_calls(
            choice.message.tool_calls if choice.finish_reason == "tool_calls" else choice.message.tool_calls[:-1]
        )
    none = ask(server, tools=TOOLS, tool_choice="none", max_tokens=20).choices[0]
    assert none.message.tool_calls is None
    assert none.message.content == ask(server, max_tokens=20).choices[0].message.content
    free = ask(server, tools=TOOLS, max_tokens=20).choices[0]
    assert free.message.content or free.message.tool_calls


def test_calls_are_streamed(server: Server) -> None:
    options = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    whole = ask(server, **options).choices[0].message.tool_calls[0].function
    name, pieces, finish = "", [], None
    for chunk in ask(server, stream=True, **options):
        (choice,) = chunk.choices
        finish = choice.finish_reason or finish
        for call in choice.delta.tool_calls or ():
            assert call.index == 0
            name += call.function.name or ""
            pieces.append(call.function.arguments)
    assert (name, "".join(pieces), finish) == (whole.name, whole.arguments, "tool_calls")
    assert len(pieces) > 2
    with server.client().chat.completions.stream(
        model="tiny", messages=[{"role": "user", "content": "paint it"}], max_tokens=200, temperature=0, **options
    ) as stream:
        final = stream.get_final_completion().choices[0].message.tool_calls
    assert final
    assert final[0].function.arguments == whole.arguments


def test_results_of_tools_are_read(server: Server) -> None:
    messages: Any = [{"role": "user", "content": "how is it?"}]
    create, options = server.client().chat.completions.create, {"model": "tiny", "max_tokens": 100, "temperature": 0}
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    message = (
        create(messages=messages, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, **options)
        .choices[0]
        .message
    )
    messages.append(message)
    messages.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"})
    read = create(messages=messages, **options)
    city = json.loads(message.tool_calls[0].function.arguments)["city"]
    told = server.client().completions.create(prompt=f"how is it? {city} sunny -", **options)
    assert read.choices[0].message.content == told.choices[0].text
    assert read.usage.prompt_tokens == told.usage.prompt_tokens


def tool(name: Any = "f", **more: Any) -> Any:
    return {"type": "function", "function": {"name": name, **more}}


DEEP: Any = {"type": "string"}
for _ in range(40):
    DEEP = {"type": "array", "items": DEEP}
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": as_schema({"type": "string", "minLength": 3, "maxLength": 1})}, "response_format", "greater than maxLength"),
    ({"response_format": as_schema({"$ref": "#"})}, "response_format", "no answer can fit it"),
    ({"response_format": as_schema({"type": "array", "uniqueItems": True})}, "response_format", "uniqueItems"),
    ({"response_format": as_schema({"allOf": [{"$ref": "#"}, {"type": "string"}]})}, "response_format", "recurses without end"),
    ({"response_format": as_schema({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]})}, "response_format", "recurses without end"),
    ({"guided_json": {"$defs": {"x": {"type": "array", "minItems": 2, "items": {"anyOf": [{"$ref": "#/$defs/y"}, {"$ref": "#/$defs/x"}]}}, "y": {"$ref": "#/$defs/x"}}, "$ref": "#/$defs/x"}}, "guided_json", "recurses without end"),
    ({"tools": [tool(strict=True, parameters={"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {"$ref": "#"}}, "required": ["b"]}}, "required": ["a"]})]}, "tools", "recurses without end"),
    ({"guided_json": {"type": "integer", "multipleOf": 99_999_999}}, "guided_json", "multipleOf"),
    ({"guided_json": {"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 9967}]}}, "guided_json", "multipleOf"),
    ({"guided_grammar": 'start: %json {"type": "integer", "multiple\\u004ff" : 99999999}'}, "guided_grammar", "multipleOf"),
    ({"guided_grammar": '{"grammars":[{"json_schema":{"multipleOf":99999999}}]}'}, "guided_grammar", "multipleOf"),
    ({"n": 1000}, "n", "at most 128"),
    ({"tools": [tool(f"f{i}") for i in range(10_000)]}, "tools", "at most 128"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema"),
    ({"response_format": {**as_schema({"type": "array"}), "type": "json_object"}}, "response_format", "no other type"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "must be"),
    ({"response_format": as_schema([1])}, "response_format.json_schema.schema", "must be a valid dictionary"),
    ({"guided_json": "{"}, "guided_json", "not JSON"), ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
    ({"guided_regex": "(" * 5000 + "a" + ")" * 5000}, "guided_regex", "invalid regex"),
    ({"guided_choice": []}, "guided_choice", "at least 1"), ({"guided_choice": ["a"] * 2000}, "guided_choice", "at most 1024"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar", "nothing"),
    ({"guided_json": PAINT, "guided_choice": ["a"]}, "guided_choice", "second form"),
    ({"guided_regex": "a", "min_tokens": 2}, "min_tokens", "does not go with"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "does not go with"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name", "is missing"),
    ({"tools": [tool("")]}, "tools.0.function.name", "match"), ({"tools": [tool("a b")]}, "tools.0.function.name", "match"),
    ({"tools": [tool(), tool()]}, "tools", "twice"), ({"tools": [tool(f"f{i}") for i in range(1500)]}, "tools", "at most 128"),
    ({"tools": [tool(parameters={"type": "string"})]}, "tools", "must be an object"),
    ({"tools": [tool(strict=True, parameters={"type": "object", "properties": {"a": {"not": {}}}})]}, "tools", "not"),
    ({"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "needs tools"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"), ({"tools": [tool()], "guided_regex": "a"}, "tools", "JSON schemas"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0", "tool_call_id"),
    ({"messages": [{"role": "assistant"}, {"role": "user", "content": "x"}]}, "messages.0", "needs content"),
]  # fmt: skip


def test_bad_input_is_refused_by_name_while_others_decode(server: Server) -> None:
    answers: list[str] = []
    expected = ask(server, max_tokens=100).choices[0].message.content
    other = threading.Thread(target=lambda: answers.append(ask(server, max_tokens=100).choices[0].message.content))
    other.start()
    for body, param, said in BAD:
        status, _, answer = server.send(
            "POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], **body}
        )
        assert status == 400, (body, answer)
        assert said in answer["error"]["message"], (body, answer)
        assert (answer["error"]["param"] or "").startswith(param), (body, answer)
    other.join()
    assert answers == [expected]
    assert ask(server, response_format=as_schema(DEEP), max_tokens=60).choices[0].message.content.startswith("[")


def test_a_grammar_that_grows_too_complex_ends_with_an_error(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "guided_regex": "(?:a?){2000}a{2000}"}
    status, _, answer = server.send("POST", "/v1/chat/completions", body)
    assert (status, "given up" in answer["error"]["message"]) == (400, True)
    assert "given up" in server.send("POST", "/v1/chat/completions", {**body, "stream": True})[2]
    assert ask(server, max_tokens=5).usage.completion_tokens == 5


@pytest.mark.slow
def test_smollm2_writes_the_same_json_with_and_without_drafts(shipped: Pair) -> None:
    prompt = "Who wrote Hamlet, and when? Answer as JSON."
    schema = {
        "type": "object",
        "properties": {"author": {"type": "string"}, "year": {"type": "integer"}},
        "required": ["author", "year"],
        "additionalProperties": False,
    }
    plain, *others = (
        selfjudge.generate(shipped, prompt, rule, gamma=gamma, schema=schema, max_new_tokens=64)
        for rule, gamma in (("exact", 0), ("exact", 3), ("judged", 5))
    )
    jsonschema_rs.validate(schema, json.loads(plain.text))
    assert {other.tokens for other in others} == {plain.tokens}
    assert plain.finish == "eos"


def smollm2_schemas() -> list[dict[str, Any]]:
    """Three dozen schemas: each kind of field, alone, in a list, beside others and nested."""
    fields: list[dict[str, Any]] = [
        {"type": "string", "maxLength": 12}, {"type": "integer", "minimum": 0, "maximum": 500}, {"type": "boolean"},
        {"enum": ["red", "green", 3, None]}, {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"}, {"type": "string", "format": "date"},
        {"anyOf": [{"type": "null"}, {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 9}]}, {"const": "v1"}, {"type": "string", "format": "uuid"},
    ]  # fmt: skip
    schemas = []
    for i, field in enumerate(fields):
        other = fields[(i + 1) % len(fields)]
        for properties, required in (
            ({"value": field}, ["value"]), ({"values": {"type": "array", "items": field, "minItems": 1, "maxItems": 3}}, ["values"]),
            ({"a": field, "b": other}, ["b"]), ({"inner": {"type": "object", "properties": {"x": field}, "required": ["x"], "additionalProperties": False}, "z": other}, ["inner", "z"]),
        ):  # fmt: skip
            schemas.append(
                {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
            )
    return schemas


@pytest.mark.slow
@pytest.mark.parametrize("prompt", ["Describe a hotel as JSON.", "Write a JSON record for a test.", "Hello!"])
def test_smollm2_fits_every_schema(shipped: Pair, prompt: str) -> None:
    finished = 0
    for schema in smollm2_schemas():
        plain, drafted = (
            selfjudge.generate(shipped, prompt, schema=schema, gamma=gamma, max_new_tokens=160) for gamma in (0, 4)
        )
        assert drafted.tokens == plain.tokens
        if plain.finish == "eos":
            finished += 1
            jsonschema_rs.validate(schema, json.loads(plain.text))
    assert finished >= 34


@pytest.mark.slow
def test_smollm2_calls_tools(start: Callable[..., Server]) -> None:
    """Its template knows no tools: it reads about them in a system message. What it calls is its own choice."""
    client = start("--pair", "smollm2-135m").client()
    messages: Any = [{"role": "user", "content": "What is the weather in Rome?"}]
    options: Any = {"model": "smollm2-135m", "messages": messages, "tools": TOOLS, "temperature": 0, "max_tokens": 120}
    needed = client.chat.completions.create(tool_choice="required", parallel_tool_calls=False, **options).choices[0]
    check_calls(needed.message.tool_calls)
    free = client.chat.completions.create(**options).choices[0]
    assert free.message.content or free.message.tool_calls
    check_calls(free.message.tool_calls or () if free.finish_reason != "length" else ())
