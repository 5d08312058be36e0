"""Write the table of parameters into docs/serving.md; a test compares.

Our column comes from the schema that requests are read through, the parameters from OpenAI's own client. vLLM's column is
compared with its protocol classes by tests/vllm; llama.cpp's was read in tools/server of its commits 006639c and 00efb3e.
"""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path
from typing import get_type_hints

from openai.types import completion_create_params as text
from openai.types.chat import completion_create_params as chat

from selfjudge.integrations.server.schema import IGNORED, UNSUPPORTED, ChatRequest, TextRequest

PAGE = Path(__file__).parent / "serving.md"
MARKS = re.compile(r"(?<=<!-- parameters -->\n).*?(?=<!-- end -->)", re.S)
VLLM_IGNORES = {
    "audio", "best_of", "function_call", "functions", "guided_choice", "guided_grammar", "guided_json", "guided_regex", "metadata", "modalities", "moderation", "prediction", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "selfjudge", "service_tier", "store", "user",
    "verbosity", "web_search_options",
}  # fmt: skip
LLAMA_CPP = {
    "chat_template_kwargs", "frequency_penalty", "ignore_eos", "logit_bias", "logprobs", "max_completion_tokens", "max_tokens",
    "messages", "min_p", "model", "n", "parallel_tool_calls", "presence_penalty", "prompt", "response_format", "seed", "stop",
    "stream", "stream_options", "temperature", "tool_choice", "tools", "top_k", "top_logprobs", "top_p",
}  # fmt: skip
LLAMA_CPP_REFUSES = {"best_of", "echo", "suffix"}
LLAMA_CPP_UNCLEAR = {"modalities"}


def openai_parameters() -> set[str]:
    """Every parameter of OpenAI's two endpoints."""
    kinds = (chat.CompletionCreateParamsNonStreaming, chat.CompletionCreateParamsStreaming)
    kinds += (text.CompletionCreateParamsNonStreaming, text.CompletionCreateParamsStreaming)  # type: ignore[assignment]
    return {name for kind in kinds for name in get_type_hints(kind)}


def all_parameters() -> list[str]:
    return sorted(openai_parameters() | {*ChatRequest.model_fields, *TextRequest.model_fields, *UNSUPPORTED, *IGNORED})


def here(name: str) -> str:
    """What this server does with a parameter."""
    if name in IGNORED:
        return f"no effect: {IGNORED[name]}"
    if name in UNSUPPORTED:
        neutral = [value for value in UNSUPPORTED[name] if value]
        return "refused, unless " + " or ".join(f"`{value}`" for value in neutral) if neutral else "refused"
    places = [place for place, kind in (("chat", ChatRequest), ("text", TextRequest)) if name in kind.model_fields]
    return {2: "works", 1: f"works ({places and places[0]})", 0: "refused: unknown"}[len(places)]


def vllm(name: str) -> str:
    return "ignored" if name in VLLM_IGNORES else "some models" if name == "suffix" else "works"


def llama_cpp(name: str) -> str:
    if name in LLAMA_CPP_UNCLEAR:
        return "?"
    return "works" if name in LLAMA_CPP else "refused" if name in LLAMA_CPP_REFUSES else "ignored"


def table() -> str:
    """Parameters that are treated alike share a row. Without blanks, as a page of words is counted."""

    def kinds(name: str) -> tuple[str, str, str]:
        return here(name), vllm(name), llama_cpp(name)

    order = sorted(all_parameters(), key=lambda name: (not here(name).startswith("works"), kinds(name), name))
    rows = [f"|{' '.join(f'`{name}`' for name in names)}|{'|'.join(kind)}|" for kind, names in groupby(order, kinds)]
    return "\n".join(["|parameter|here|vLLM|llama.cpp|", "|---|---|---|---|", *rows]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(MARKS.sub(lambda _: table(), PAGE.read_text()))
