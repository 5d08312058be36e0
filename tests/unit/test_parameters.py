"""Every parameter of OpenAI's two endpoints works, is refused by name, or is said to have no effect; the page says which."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from selfjudge.decoding.adjust import TokenLogprobs
from selfjudge.integrations.asgi import RefusedError
from selfjudge.integrations.server.parameters import TokenTexts
from selfjudge.integrations.server.schema import IGNORED, UNSUPPORTED, ChatRequest, TextRequest

TABLE = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "make_parameters.py"))
CHAT = {"messages": [{"role": "user", "content": "w1"}]}
TEXT = {"prompt": "w1"}
BOTH: dict[str, Any] = {
    "frequency_penalty": 0.5, "ignore_eos": True, "logit_bias": {"5": 1}, "max_completion_tokens": 3, "max_tokens": 3, "min_p": 0.1,
    "min_tokens": 2, "model": "x", "n": 2, "presence_penalty": 0.5, "repetition_penalty": 1.1, "seed": 1, "selfjudge": {"off": True},
    "stop": ["w9"], "stop_token_ids": [5], "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.5, "top_k": 3,
    "top_p": 0.5, "response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}, "guided_json": {},
    "guided_regex": "a", "guided_choice": ["a"], "guided_grammar": "start: /a/",
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "f"}}
VALUES: dict[type, dict[str, Any]] = {
    ChatRequest: {
        **BOTH,
        **CHAT,
        "logprobs": True,
        "top_logprobs": 3,
        "chat_template_kwargs": {"shout": True},
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    },
    TextRequest: {**BOTH, "logprobs": 3, "echo": True, "prompt": ["w1", "w2"]},
}
"""A value that is not the default, for each parameter that works."""
NEEDS = {"stream_options": {"stream": True}, "top_logprobs": {"logprobs": True}, "tool_choice": {"tools": [TOOL]}}


def test_the_page_holds_the_table() -> None:
    """If it fails: `python docs/make_parameters.py`."""
    assert TABLE["MARKS"].search(TABLE["PAGE"].read_text())[0] == TABLE["table"]()


def test_every_parameter_of_openai_is_decided() -> None:
    known = {*VALUES[ChatRequest], *VALUES[TextRequest], *UNSUPPORTED, *IGNORED}
    assert TABLE["openai_parameters"]() <= known == {*TABLE["all_parameters"]()}
    assert not {*UNSUPPORTED} & {*IGNORED}
    assert not {*UNSUPPORTED, *IGNORED} & {*ChatRequest.model_fields, *TextRequest.model_fields}


@pytest.mark.parametrize(("kind", "least"), [(ChatRequest, CHAT), (TextRequest, TEXT)])
def test_what_works_is_read_and_has_no_effect_where_it_says_so(kind: Any, least: dict[str, Any]) -> None:
    assert VALUES[kind].keys() == kind.model_fields.keys()
    default = kind.model_validate(least)
    for name, value in VALUES[kind].items():
        body = kind.model_validate({**least, **NEEDS.get(name, {}), name: value})
        assert getattr(body, name) is not None
        assert name == "messages" or getattr(body, name) != getattr(default, name)
        kind.model_validate({**least, name: None}) if name not in ("messages", "prompt", *NEEDS) else None
    for name in IGNORED:
        assert kind.model_validate({**least, name: "x"}) == default
    for name, neutral in UNSUPPORTED.items():
        for value in (None, *neutral):
            assert kind.model_validate({**least, name: value}) == default
        with pytest.raises(RefusedError) as refused:
            kind.model_validate({**least, name: {"other": 1}})
        assert refused.value.body["error"]["param"] == name


TEXT_OF_ALL_KINDS = "naïve 東京 🙂  two\n\tlines"


def test_the_bytes_of_tokens_together_are_those_of_the_text() -> None:
    """Vocabularies of bytes, and of pieces with bytes for the rest; also where a character has several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({"<｜eos▁｜>": 0, **{c: i + 1 for i, c in enumerate(alphabet)}}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    bytewise = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<｜eos▁｜>")
    pieces = {"<unk>": 0, "▁": 1, "t": 2, "w": 3, "o": 4, **{f"<0x{i:02X}>": 5 + i for i in range(256)}}
    inner = Tokenizer(models.BPE(pieces, [], byte_fallback=True, unk_token="<unk>"))
    inner.normalizer = normalizers.Replace(" ", "▁")
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    for tokenizer in (bytewise, PreTrainedTokenizerFast(tokenizer_object=inner)):
        texts, ids = TokenTexts(tokenizer), tokenizer(TEXT_OF_ALL_KINDS)["input_ids"]
        assert len(ids) > len(TEXT_OF_ALL_KINDS)
        assert b"".join(map(texts.read, ids)).decode() == TEXT_OF_ALL_KINDS == texts.join(ids)
        assert any(texts.text(token) == "\ufffd" for token in ids)
    assert TokenTexts(bytewise).text(0) == "<｜eos▁｜>"
    chat = TokenTexts(bytewise).for_chat([TokenLogprobs(ids[0], -0.5, ((ids[0], -0.5), (1, -2.0)))])
    assert [len(entry["top_logprobs"]) for entry in chat["content"]] == [2]
