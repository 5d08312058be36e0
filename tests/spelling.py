"""Tiny models whose tokens are characters and a few pieces of JSON, so that answers can follow grammars."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import transformers as hf
from pydantic import BaseModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from conftest import VOCAB, tiny_model

CHARACTERS = '{}":,[]ĠĊ<>/;_-.0123456789abcdefghijklmnoprstuvwxyz'
MERGES = [("t", "r"), ("tr", "u"), ("tru", "e"), ('"', ":"), ('":', "Ġ"), ("{", '"')]
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}-"
TOOL_TEMPLATE = (
    "{% if tools %}{{ tools[0]['function']['name'] }} <tool_call> {% endif %}{% for m in messages %}{{ m['content'] }}"
    "{% if m['tool_calls'] %}{{ m['tool_calls'][0]['function']['arguments']['city'] }}{% endif %} {% endfor %}-"
)
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["rome", "oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}


class Paint(BaseModel):
    hue: Literal["red", "blue"]
    shiny: bool


class Weather(BaseModel):
    city: Literal["rome", "oslo"]


def spelling_tokenizer(
    template: str = TEMPLATE, markers: Sequence[str] = (), added: Sequence[str] = ()
) -> hf.PreTrainedTokenizerFast:
    """`markers` are special tokens, which have no text; `added` ones have it."""
    words = ["<pad>", "<s>", "</s>", *CHARACTERS, *("".join(pair) for pair in MERGES)]
    assert len(words) < VOCAB
    inner = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=MERGES))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    made = hf.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", bos_token="<s>", pad_token="<pad>")
    made.add_special_tokens({"additional_special_tokens": [*markers]})
    made.add_tokens([*added])
    made.chat_template = template
    return made


def save_spellers(
    root: Path, template: str = TEMPLATE, markers: Sequence[str] = (), added: Sequence[str] = ()
) -> tuple[str, str]:
    """Folders of a target and a draft."""
    tokenizer = spelling_tokenizer(template, markers, added)
    for seed, name in enumerate(("target", "draft"), 1):
        size = max(VOCAB, len(tokenizer))
        tiny_model(seed=seed, max_position_embeddings=512, vocab_size=size).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return str(root / "target"), str(root / "draft")


def name_spellers(root: Path, name: str) -> list[str]:
    """Options of a server that calls such a pair by this name; its template knows tools."""
    target, draft = save_spellers(root, TOOL_TEMPLATE)
    return ["--target", target, "--draft", draft, "--name", name, "--gamma", "3", "--max-context", "500"]
