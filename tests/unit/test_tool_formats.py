"""Tool calls: what grammars of the formats allow, and how answers are read back, whole and in pieces."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from selfjudge.decoding.grammar import compile_grammar, json_rule
from selfjudge.decoding.text import generate
from selfjudge.errors import SelfJudgeError
from selfjudge.integrations.server.tools import HERMES, LLAMA, MISTRAL, TEXT, CallReader, ToolFormat
from selfjudge.models.pair import Pair
from spelling import TEMPLATE, save_spellers

WEATHER = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
NOW = {"name": "now", "parameters": None}
ROME, TIME = '{"city": "rome"}', "{}"
CALLS = {
    "hermes": (HERMES, '<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>', '\n<tool_call>\n{"name": "now", "arguments": %s}\n</tool_call>'),
    "llama": (LLAMA, '{"name": "weather", "parameters": %s}', '; {"name": "now", "parameters": %s}'),
    "mistral": (MISTRAL, '[TOOL_CALLS][{"name": "weather", "arguments": %s}', ', {"name": "now", "arguments": %s}'),
}  # fmt: skip


@pytest.fixture(scope="module")
def speller(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair.load(*save_spellers(tmp_path_factory.mktemp("spellers")), device="cpu", dtype="float32")


def write(name: str, *arguments: str) -> str:
    _, first, second = CALLS[name]
    return (
        first % arguments[0]
        + (second % arguments[1] if len(arguments) > 1 else "")
        + ("]" if name == "mistral" else "")
    )


def allows(pair: Pair, grammar: str, text: str) -> bool:
    """Whether a grammar allows a whole answer, character by character or as the tokenizer has it."""
    matcher = compile_grammar(pair, grammar).begin().matcher
    tokens = pair.encode(text, raw=True)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    "name", ["hermes", "llama"]
)  # the tiny tokenizer has no capitals, which Mistral's marker needs
def test_grammars_of_formats(speller: Pair, name: str) -> None:
    known, tools = CALLS[name][0], [WEATHER, NOW]
    one, two = write(name, ROME), write(name, ROME, TIME)
    wrong = [write(name, "{}"), one.replace("weather", "whether"), one[:-1], write(name, ROME, '{"a": 1}')]
    free, needed = known.grammar(tools, TEXT, True), known.grammar(tools, None, True)
    single, json_too = known.grammar(tools, None, False), known.grammar(tools, json_rule({"enum": [5, "x"]}), True)
    for text, expected in (
        (one, (True, True, True, True)), (two, (True, True, False, True)), ("hello < there", (True, False, False, False)),
        ('"x"', (True, False, False, True)), *((text, (False, False, False, False)) for text in wrong),
    ):  # fmt: skip
        assert tuple(allows(speller, grammar, text) for grammar in (free, needed, single, json_too)) == expected, text
    for text in (one, two):  # a line end after a call is no other call: a model that writes it may end there
        ended = tuple(allows(speller, grammar, text + "\n") for grammar in (free, needed, single))
        assert ended == (name == "hermes", name == "hermes", False), text
    assert read(known, [two + "\n"])[1] == [("weather", ROME), ("now", TIME)]
    assert allows(speller, free, "well\n" + one) == (name == "hermes" or not one.startswith("<"))


@pytest.mark.parametrize("template", [TEMPLATE, "{% if tools %}<tool_call>{% endif %}"])
def test_markers_that_are_tokens_with_a_text(tmp_path: Path, template: str) -> None:
    """As Qwen has them: no other tokens may spell them."""
    pair = Pair.load(*save_spellers(tmp_path, template, added=["<tool_call>", "</tool_call>"]), device="cpu")
    known = ToolFormat.of(pair)
    assert known is not None
    calls = write("hermes", ROME, TIME)
    for content, text in ((None, calls), (TEXT, calls), (TEXT, "well\n" + calls), (TEXT, "hello")):
        assert allows(pair, known.grammar([WEATHER, NOW], content, True), text)
    answer = generate(pair, "x", raw=True, grammar=known.grammar([NOW], None, False), max_new_tokens=99)
    assert answer.finish == "eos"
    content, [(name, arguments)] = read(known, [answer.text])
    assert (content, name, json.loads(arguments)) == ("", "now", {})


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("before", ["", "let me look.\n", "a < b, [1, {"])
def test_calls_are_read_back_however_the_text_is_cut(name: str, before: str) -> None:
    known = CALLS[name][0]
    nested = r'{"city": "a \"}] \\", "more": {"x": [1, {}]}}'
    calls = write(name, nested, TIME)
    if before and known.at_start:
        assert read(known, [before + calls]) == (before + calls, [])  # not at the start: text
        return
    for cuts in (range(0), range(1, 999), range(1, 999, 3), range(7, 999, 11)):
        points = [0, *(cut for cut in cuts if cut < len(before + calls)), len(before + calls)]
        pieces = [(before + calls)[a:b] for a, b in itertools.pairwise(points)]
        assert read(known, pieces) == (before, [("weather", nested), ("now", TIME)])


def read(known: ToolFormat, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    reader, content = CallReader(known), ""
    calls: list[dict[str, Any]] = []
    for number, piece in enumerate(pieces, 1):
        for delta in reader.read(piece, last=number == len(pieces)):
            content += delta.get("content", "")
            for new in delta.get("tool_calls", ()):
                if "id" in new:
                    assert (new["index"], new["type"], new["function"]["arguments"]) == (len(calls), "function", "")
                    assert len(new["id"]) == 9
                    assert new["id"].isalnum()
                    calls.append(new["function"])
                else:
                    assert set(new) == {"index", "function"}
                    assert new["index"] == len(calls) - 1
                    calls[-1]["arguments"] += new["function"]["arguments"]
    return content, [(call["name"], call["arguments"]) for call in calls]


@pytest.mark.parametrize("known", [HERMES, LLAMA, MISTRAL])
def test_text_without_calls_is_told_as_it_comes(known: ToolFormat) -> None:
    reader, text = CallReader(known), "1 < 2 [a] {x} <tool but no call <tool_call"
    told = [delta["content"] for character in text for delta in reader.read(character)]
    assert len("".join(told)) > len(text) - 12  # only what may begin a call waits
    rest = [delta["content"] for delta in reader.read("", last=True)]
    assert "".join(told + rest) == text


def test_arguments_are_streamed_while_they_are_written() -> None:
    reader, calls = CallReader(HERMES), write("hermes", ROME)
    at = calls.index('"rome')
    early = [*reader.read(calls[:at])]
    assert early[0]["tool_calls"][0]["function"] == {"name": "weather", "arguments": ""}
    assert early[1]["tool_calls"][0]["function"] == {"arguments": '{"city": '}


@pytest.mark.parametrize(
    ("template", "known"),
    [
        (TEMPLATE, HERMES),
        ("{% if tools %}<tool_call>{% endif %}", HERMES),
        ('{% if tools %}<|python_tag|>{"name": x, "parameters": y}{% endif %}', LLAMA),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]", MISTRAL),
        ("{% if tools %}something else{% endif %}", None),
    ],
)
def test_the_format_follows_from_the_template(tmp_path: Path, template: str, known: ToolFormat | None) -> None:
    pair = Pair.load(*save_spellers(tmp_path, template), device="cpu")
    found = ToolFormat.of(pair)
    assert (found and found.marker) == (known and known.marker)
    if found is not None:
        assert found.native is (template != TEMPLATE)


def test_a_marker_that_is_a_special_token_has_no_text(tmp_path: Path) -> None:
    folders = save_spellers(tmp_path, "{% if tools %}[TOOL_CALLS]{% endif %}", markers=["[TOOL_CALLS]"])
    pair = Pair.load(*folders, device="cpu", dtype="float32")
    known = ToolFormat.of(pair)
    assert known is not None
    assert known.tokens == {"[TOOL_CALLS]": pair.tokenizer.convert_tokens_to_ids("[TOOL_CALLS]")}
    assert not known.shown
    for content, expected in ((TEXT, (True, True, True)), (None, (True, False, False))):
        grammar = known.grammar([WEATHER, NOW], content, True)
        texts = (write("mistral", ROME, TIME), "hello " + write("mistral", ROME), "hello [a")
        assert tuple(allows(pair, grammar, text) for text in texts) == expected
    assert read(known, ["hi ", write("mistral", ROME).removeprefix("[TOOL_CALLS]")]) == ("hi ", [("weather", ROME)])


def test_templates_without_tools_read_about_them() -> None:
    known = ToolFormat(**{**vars(HERMES), "native": False})
    call = {"id": "abc", "type": "function", "function": {"name": "weather", "arguments": {"city": "rome"}}}
    messages = [
        {"role": "system", "content": "be kind"}, {"role": "user", "content": "how is it?"},
        {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "sunny", "tool_call_id": "abc"},
    ]  # fmt: skip
    told = known.messages(messages, [{"type": "function", "function": WEATHER}])
    assert [message["role"] for message in told] == ["system", "user", "assistant", "user"]
    assert told[0]["content"].startswith("be kind\n\n# Tools")
    assert json.dumps(WEATHER) in told[0]["content"]
    assert told[2]["content"] == f'<tool_call>\n{{"name": "weather", "arguments": {ROME}}}\n</tool_call>'
    assert told[3]["content"] == "<tool_response>\nsunny\n</tool_response>"
    assert known.messages(messages[:2], []) == messages[:2]
    assert HERMES.messages(messages, []) is messages


def test_parameters_are_an_object() -> None:
    with pytest.raises(SelfJudgeError, match="parameters of tool f must be an object"):
        HERMES.grammar([{"name": "f", "parameters": {"type": "string"}}], None, True)
