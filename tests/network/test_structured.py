"""Structured answers of SmolLM2: schemas and tools."""

from __future__ import annotations

import json

import jsonschema_rs

import selfjudge
from selfjudge.models.pair import Pair


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
