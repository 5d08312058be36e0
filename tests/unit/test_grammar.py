"""Answers under grammars: what they are, on every engine, and that speculation changes none of them."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import torch

import selfjudge
from conftest import VOCAB, tiny_head, tiny_model
from editing import greedy_under
from selfjudge.decoding.admission import Request
from selfjudge.decoding.grammar import Grammar, compile_grammar, grammar_text, json_rule
from selfjudge.decoding.loop import decode
from selfjudge.decoding.rules import Exact, Margin, SpeculativeSampling
from selfjudge.decoding.sampling import Sampling
from selfjudge.decoding.text import Batch
from selfjudge.engine.draft import BatchEngines
from selfjudge.engine.select import make_draft, make_engine
from selfjudge.errors import SelfJudgeError
from selfjudge.models.load import as_draft
from selfjudge.models.pair import Pair
from spelling import save_spellers

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        "b": {"enum": ["red", "blue", "green"]},
        "c": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 4}]},
    },
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}
END = 2
PROMPTS = ['{"a": [true', "what is it?", "x"]


@pytest.fixture(scope="module")
def speller(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair.load(*save_spellers(tmp_path_factory.mktemp("spellers")), device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def grammar(speller: Pair) -> Grammar:
    return compile_grammar(speller, grammar_text("json", SCHEMA))


@pytest.fixture(scope="module")
def expected(speller: Pair, grammar: Grammar) -> list[list[int]]:
    prompts = [speller.encode(text, raw=True) for text in PROMPTS]
    return [cut(greedy_under(speller.target, prompt, 100, grammar.begin())) for prompt in prompts]  # type: ignore[arg-type]


def cut(tokens: list[int], end: int = END) -> list[int]:
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


@pytest.mark.quick("auto-small", "auto-head")
@pytest.mark.parametrize(
    ("kind", "draft"),
    [
        ("auto", "small"), ("auto", "head"), ("cuda", "same"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("auto", "same"), ("cuda", "small"), ("cuda", "head"), ("reference", "small"))),
    ],
)  # fmt: skip
def test_exact_under_a_grammar_is_plain_decoding_under_it(
    speller: Pair, grammar: Grammar, expected: list[list[int]], kind: str, draft: str
) -> None:
    target = speller.target
    model = {"same": target, "small": tiny_model(seed=2), "head": tiny_head(target)}[draft]
    prompts = [speller.encode(text, raw=True) for text in PROMPTS]
    for gamma in (0, 5):
        engine = make_engine(target, features=as_draft(model).features, kind=kind)
        engines = BatchEngines(engine, make_draft(model, target, kind=kind))
        requests = [Request(prompt, 100, edits=(grammar.begin(),)) for prompt in prompts]
        answers: list[list[int]] = [[] for _ in prompts]
        for step in decode(engines, requests, Exact(), gamma=gamma, eos_ids=[END]):
            for emission in step.emissions:
                answers[emission.row] += emission.tokens
        assert answers == expected
    for answer in expected:
        assert answer[-1] == END
        jsonschema_rs.validate(SCHEMA, json.loads(speller.tokenizer.decode(answer[:-1])))


@pytest.mark.quick("auto-*")
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("kind", ["auto", "reference"])
def test_drafts_follow_the_grammar(speller: Pair, grammar: Grammar, kind: str, sampled: bool) -> None:
    """A draft that is the target itself is right wherever it says what it may."""
    target, gamma = speller.target, 3
    engines = BatchEngines(make_engine(target, kind=kind), make_draft(target, target, kind=kind))
    rule = SpeculativeSampling(Sampling(1.3)) if sampled else Exact()
    for text in PROMPTS:
        request = Request(speller.encode(text, raw=True), 100, edits=(grammar.begin(),))
        steps = list(decode(engines, [request], rule, gamma=gamma, eos_ids=[END]))
        length = sum(len(emission.tokens) for step in steps for emission in step.emissions)
        assert steps[-1].cycle == math.ceil((length - 1) / (gamma + 1))


@pytest.mark.quick("40-True", "-2-False")
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("extra", [40, -2])
def test_a_draft_may_have_another_vocabulary(
    speller: Pair, grammar: Grammar, expected: list[list[int]], extra: int, sampled: bool
) -> None:
    draft = tiny_model(seed=2, vocab_size=VOCAB + extra)
    engines = BatchEngines(make_engine(speller.target), make_draft(draft, speller.target))
    request = Request(speller.encode(PROMPTS[1], raw=True), 100, edits=(grammar.begin(),))
    rule = SpeculativeSampling(Sampling(0.01)) if sampled else Exact()
    steps = decode(engines, [request], rule, gamma=3, eos_ids=[END])
    assert [t for step in steps for emission in step.emissions for t in emission.tokens] == expected[1]


def test_a_grammar_ends_its_answer(speller: Pair, grammar: Grammar) -> None:
    with pytest.raises(SelfJudgeError, match="`ignore_eos` does not go with a grammar"):
        Batch(speller, gamma=3).add([5, 6], edits=(grammar.begin(),), ignore_eos=True)


def test_a_draft_sees_the_tokens_that_are_allowed(speller: Pair, grammar: Grammar) -> None:
    edit = grammar.begin()
    edit.advance(speller.encode('{"a": [', raw=True))
    t, f, r, letter = (speller.encode(text, raw=True)[0] for text in "tfrz")

    def allowed(drafts: list[int], ids: torch.Tensor | None = None) -> list[int]:
        logits = torch.zeros(VOCAB if ids is None else len(ids))
        edit.draft(logits, drafts, ids)
        kept = logits.isfinite().nonzero()[:, 0]
        return (kept if ids is None else ids[kept]).tolist()

    assert {t, f} <= set(allowed([]))
    assert letter not in allowed([])
    assert allowed([t]) == [r]
    assert allowed([letter]) == list(range(VOCAB))  # comes after a draft that is refused
    assert allowed([], torch.tensor([letter, t, END])) == [t]
    edit.advance(speller.encode('true], "b": "red", "c": null}', raw=True))
    assert allowed([]) == [END]
    assert allowed([END]) == list(range(VOCAB))


def test_rows_after_a_refused_draft_or_the_end_are_left_alone(speller: Pair, grammar: Grammar) -> None:
    edit, logits = grammar.begin(), torch.zeros(4, VOCAB)
    brace, letter, quote = (speller.encode(text, raw=True)[0] for text in ("{", "z", '"'))
    edit.edit(logits, [brace, letter, quote])
    assert logits[0, brace] == logits[1, quote] == 0
    assert logits[0, letter] == logits[1, letter] == -math.inf
    assert not logits[2:].any()
    again = torch.zeros(1, VOCAB)
    edit.edit(again, [])
    assert torch.equal(again[0], logits[0])  # the state has not changed
    edit.advance(speller.encode('{"a": [true], "b": "red", "c": null}', raw=True))
    last = torch.zeros(2, VOCAB)
    edit.edit(last, [END])
    assert last[0].isfinite().nonzero().tolist() == [[END]]
    edit.advance([END])
    assert not edit.matcher.is_error()


@pytest.mark.quick("rule2")
@pytest.mark.parametrize("rule", ["margin:50", "topk:9", Margin(50.0)])
def test_relaxed_rules_verify_constrained_answers_exactly(speller: Pair, rule: str) -> None:
    for prompt in PROMPTS:
        options = {"raw": True, "schema": SCHEMA, "max_new_tokens": 120}
        plain = selfjudge.generate(speller, prompt, gamma=0, **options)
        strict = {} if isinstance(rule, Margin) else {"strict_code": False, "strict_start": 0}
        assert selfjudge.generate(speller, prompt, rule, gamma=4, **options, **strict).tokens == plain.tokens
        free = selfjudge.generate(speller, prompt, rule, gamma=4, raw=True, max_new_tokens=60, **strict)
        assert "judge" in free.origins


def test_sampled_answers_fit(speller: Pair) -> None:
    options = {"raw": True, "schema": SCHEMA, "max_new_tokens": 120, "sampling": selfjudge.Sampling(1.5)}
    answers = selfjudge.generate(speller, ["x"] * 8, **options)
    assert len({answer.text for answer in answers}) > 4
    for answer in answers:
        jsonschema_rs.validate(SCHEMA, json.loads(answer.text))


@pytest.mark.parametrize(
    ("kind", "value", "pattern"),
    [
        ("regex", "[a-c]{2}-[0-9]{3}", "[a-c]{2}-[0-9]{3}"),
        ("choice", ["yes", "no", 'say "a/b"'], 'yes|no|say "a/b"'),
        ("grammar", 'start: WORD "." WORD\nWORD: /[a-z]{3}/', r"[a-z]{3}\.[a-z]{3}"),
        ("grammar", 'root ::= "a" ("b" | "c") "d"', "a[bc]d"),
    ],
)
def test_kinds_of_grammars(speller: Pair, kind: str, value: object, pattern: str) -> None:
    pieces = selfjudge.stream(speller, "x", raw=True, grammar=grammar_text(kind, value))
    assert re.fullmatch(pattern, "".join(piece.text for piece in pieces))


def test_an_answer_cut_by_its_limit_says_so(speller: Pair) -> None:
    answer = selfjudge.generate(speller, "x", raw=True, schema=SCHEMA, max_new_tokens=3)
    assert (answer.finish, len(answer.tokens)) == ("length", 3)


IMPOSSIBLE = {
    "contradiction": ({"type": "string", "minLength": 3, "maxLength": 2}, "greater than maxLength"),
    "loop": ({"$ref": "#"}, "no answer can fit it"),
    "unknown type": ({"type": "strin"}, "Invalid type"),
    "unsupported": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "elsewhere": ({"$ref": "https://example.org/schema"}, "not present"),
    "many": ({"enum": [f"{i:05}" for i in range(200_000)]}, "too"),
}


@pytest.mark.quick("contradiction", "elsewhere", "loop", "un*")
@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_schemas_that_cannot_be_used_are_refused(speller: Pair, name: str) -> None:
    schema, said = IMPOSSIBLE[name]
    with pytest.raises(SelfJudgeError, match=said) as refused:
        selfjudge.generate(speller, "x", raw=True, schema=schema)
    assert "\n" not in str(refused.value)


def test_a_grammar_too_complex_for_an_answer_ends_it_with_an_error(speller: Pair) -> None:
    with pytest.raises(SelfJudgeError, match=r"given up in the middle of an answer: lexer error"):
        selfjudge.generate(speller, "x", raw=True, grammar=grammar_text("regex", "(?:a?){2000}a{2000}"))


@pytest.mark.parametrize("grammar", ["start: x", 'root ::= "a', "start: @other"])
def test_grammars_that_cannot_be_read_are_refused(speller: Pair, grammar: str) -> None:
    with pytest.raises(SelfJudgeError, match="grammar"):
        selfjudge.generate(speller, "x", raw=True, grammar=grammar)


@pytest.mark.parametrize(
    ("regex", "said"), [("(a", "unclosed group"), ("(?=a)b", "look-around"), (r"(a)\1", "backreferences")]
)
def test_a_regular_expression_that_cannot_be_read_is_refused_with_its_error(
    speller: Pair, regex: str, said: str
) -> None:
    with pytest.raises(SelfJudgeError, match=said) as refused:
        compile_grammar(speller, grammar_text("regex", regex))
    assert "\n" not in str(refused.value)


def test_one_of_schema_and_grammar(speller: Pair) -> None:
    with pytest.raises(SelfJudgeError, match="leave out one of"):
        selfjudge.generate(speller, "x", raw=True, schema=SCHEMA, grammar="start: /a/")


def test_without_strict_a_schema_may_say_more_than_can_be_enforced(speller: Pair) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "maxItems": 2, "format": "x"}
    text = grammar_text("json", schema, strict=False)
    assert len(json.loads(selfjudge.generate(speller, "x", raw=True, grammar=text).text)) <= 2


def test_the_command_reads_a_schema(speller: Pair, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from selfjudge.cli.main import app

    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    models = ["--target", speller.target_id, "--draft", speller.draft_id]
    result = CliRunner().invoke(app, ["generate", "x", "--schema", str(file), "--json", *models])
    assert result.exit_code == 0, result.output
    jsonschema_rs.validate(SCHEMA, json.loads(json.loads(result.stdout)["text"]))


ENDLESS: list[dict[str, Any]] = [
    {"$ref": "#"}, {"type": "object", "properties": {"a": {"$ref": ""}}, "required": ["a"]}, {"type": "object", "required": ["a"], "additionalProperties": {"$ref": "#"}},
    {"type": "array", "minItems": 1, "items": {"$ref": "#"}}, {"type": "array", "minItems": 2, "prefixItems": [True, {"$ref": "#"}]},
    {"anyOf": [{"$ref": "#/$defs/a~1b"}, False], "$defs": {"a/b": {"allOf": [{"$ref": "#/$defs/c"}]}, "c": {"type": ["array"], "minItems": 1, "items": {"$ref": "#"}}}},
]  # fmt: skip
ENDING: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": {"$ref": "#"}}}, {"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, {"type": "array", "items": {"$ref": "#"}},
    {"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, {"$ref": "#/$defs/nothing"}, {"required": 3}, {"anyOf": [{"$ref": "#"}, {"const": 1}]},
    {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/a"}]}, "b": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/c"}}, "c": {"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}},
    {"type": "object", "required": ["ab"], "patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": False},
    {"$ref": "#top", "$defs": {"a": {"$anchor": "top", "type": "integer"}}}, {"$ref": "other.json#/$defs/a", "$defs": {"a": {"$ref": "#"}}},
    {"$ref": "#/$defs/0", "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} if i < 100 else {} for i in range(101)}},
]  # fmt: skip


def test_schemas_that_recurse_without_end_are_told_from_those_that_end() -> None:
    for schema in ENDLESS:
        with pytest.raises(SelfJudgeError, match="recurses without end"):
            json_rule(schema)
    for schema in ENDING:
        assert json_rule(schema)
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"allOf": [deep]}
    with pytest.raises(SelfJudgeError, match="too deeply"):
        json_rule(deep)


@pytest.mark.parametrize("multiples", [[99_999_999], [9973, 9967], [0.0099991, 3], [0, 1000003]])
def test_schemas_that_would_be_compiled_for_hours_are_refused(speller: Pair, multiples: list[float]) -> None:
    schema = {"allOf": [{"type": "number", "multipleOf": number} for number in multiples]}
    with pytest.raises(SelfJudgeError, match="multipleOf"):
        compile_grammar(speller, grammar_text("json", schema))
    fits = {
        "type": "object",
        "properties": {str(n): {"type": "number", "multipleOf": n} for n in (0.01, 5, 60, 1e9, 365)},
    }
    assert compile_grammar(speller, grammar_text("json", fits))
