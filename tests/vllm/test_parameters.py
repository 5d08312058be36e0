"""The column of our table of parameters that is about vLLM, by its protocol classes."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

protocol = pytest.importorskip("vllm.entrypoints.openai.chat_completion.protocol")


def test_what_vllm_ignores_is_what_its_classes_do_not_have() -> None:
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    table = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "make_parameters.py"))
    known = {*protocol.ChatCompletionRequest.model_fields, *CompletionRequest.model_fields} - {
        "user"
    }  # says it is ignored
    assert protocol.ChatCompletionRequest.model_config["extra"] == "allow"
    assert set(table["all_parameters"]()) - known == table["VLLM_IGNORES"]
