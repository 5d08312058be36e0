"""Grammars: an answer is text that a JSON schema, a regular expression, a list of choices or a grammar allows.
llguidance compiles them to one kind of parser over the bytes of the vocabulary. A row's parser follows the drafts of a
block, masks the logits after each, and goes back: the answer is that of plain decoding under the grammar. Relaxed rules
verify such an answer exactly throughout (`Request.structured`)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np
import torch
from torch import Tensor

from selfjudge.decoding.edits import LogitsEdit, RowEdits
from selfjudge.errors import SelfJudgeError, expect, first_line
from selfjudge.models.pair import Pair

if TYPE_CHECKING:
    from llguidance import LLMatcher

WHITESPACE = r" |\n[ \t]{0,24}"
"""Between the tokens of JSON: without a limit small models write nothing else. Before 1.8 llguidance knew no limit."""
LIMITS = {"step_lexer_fuel": 100_000, "step_max_items": 20_000, "max_lexer_states": 20_000, "max_grammar_size": 100_000}
"""What llguidance may spend: about a second for a grammar, 10 ms for a mask, and 40 MB for the states of an answer."""
MOST_MULTIPLE = 20_000  # states that `multipleOf` may have, which are listed while a grammar is compiled: 0.2 s
MOST_ROUNDS = 10  # of looking for an end in a schema: each takes what the one before has found


def json_rule(schema: Mapping[str, Any], *, strict: bool = True) -> str:
    """JSON of a schema as a part of a Lark grammar; unless `strict`, keywords that cannot be enforced are ignored."""
    options = {"whitespace_pattern": WHITESPACE, "lenient": not strict}
    try:
        check_end(schema)
        return f"%json {json.dumps({**schema, 'x-guidance': options})}"
    except RecursionError:
        raise SelfJudgeError("the schema is nested too deeply") from None


def check_end(schema: Mapping[str, Any]) -> None:
    """Refuse a schema that recurses in every value, so that none ends. What is malformed is left to llguidance."""
    search = _EndSearch(schema)
    with suppress(LookupError, ValueError, TypeError, AttributeError):
        for _ in range(MOST_ROUNDS):
            before = len(search.known)
            search.asked.clear()
            if search.ends(schema):
                return
            if len(search.known) == before:
                raise SelfJudgeError("the schema recurses without end: no answer can fit it")


class _EndSearch:
    """Rounds over a schema, for values that end."""

    def __init__(self, schema: Any) -> None:
        self.schema = schema
        self.known: set[str] = set()  # references that a value with an end fits
        self.asked: set[str] = set()  # in this round

    def ends(self, node: Any) -> bool:
        if not isinstance(node, dict) or "enum" in node or "const" in node:
            return node is not False
        kinds = node.get("type", "null")  # where none is named, a value that is neither object nor array fits
        return (
            any(
                all(map(self.ends, _list_needed(node, kind))) for kind in ([kinds] if isinstance(kinds, str) else kinds)
            )
            and all(map(self.ends, node.get("allOf", ())))
            and all(any(map(self.ends, node[key])) for key in ("anyOf", "oneOf") if node.get(key))
            and ("$ref" not in node or self._leads_to_end(node["$ref"]))
        )

    def _leads_to_end(self, reference: str) -> bool:
        if reference not in self.known and reference not in self.asked:
            self.asked.add(reference)
            document, *parts = unquote(reference or "#").split("/")
            node = {"#": self.schema}[document]  # raises a KeyError for an anchor, and for another document
            for part in parts:
                node = node[int(part) if isinstance(node, list) else part.replace("~1", "/").replace("~0", "~")]
            if self.ends(node):
                self.known.add(reference)
        return reference in self.known


def _list_needed(node: Mapping[str, Any], kind: str) -> list[Any]:
    """The schemas of what every object or array of a schema has in it."""
    if kind == "object":
        rest = "patternProperties" in node or node.get("additionalProperties", True)  # a pattern may fit the name
        return [node.get("properties", {}).get(name, rest) for name in node.get("required", ())]
    least, first = node.get("minItems", 0) if kind == "array" else 0, node.get("prefixItems", [])
    return [*first[:least], *([node.get("items", True)] if least > len(first) else [])]


def _check_multiples(text: str) -> None:
    """Refuse a grammar that would be compiled for hours. Its schemas may be JSON in JSON."""
    plain, whole = re.sub(r"\\+u00([2-7][\da-fA-F])", lambda found: chr(int(found[1], 16)), text), 1
    for number in re.findall(r'"multipleOf\\*"(?:\s|\\+[nrt])*:(?:\s|\\+[nrt])*([\d.]+)', plain):
        digits = number.replace(".", "").strip("0")[:20]  # powers of ten cost nothing
        whole = math.lcm(whole, int(digits or 1))
        if whole > MOST_MULTIPLE:
            raise SelfJudgeError(f"multipleOf: the least common multiple of all is above {MOST_MULTIPLE}")


def grammar_text(kind: str, value: Any, *, strict: bool = True) -> str:
    """Text for `compile_grammar` of a `json` schema, `regex`, `choice`s, `grammar` (Lark, GBNF) or earlier result."""
    if kind == "json":
        return f"start: {json_rule(value, strict=strict)}"
    if kind == "grammar" and value.startswith('{"grammars":'):
        return str(value)
    try:
        return str(_library().grammar_from(kind, json.dumps(value) if kind == "choice" else value))
    except ValueError as error:
        raise SelfJudgeError(f"the grammar cannot be read: {first_line(error)}") from None


def compile_grammar(pair: Pair, text: str) -> Grammar:
    """Compile a grammar for a pair, in up to seconds; a SelfJudgeError says why no answer can follow it."""
    grammar: Grammar = pair.target_model.keep("grammars", lambda: _compiler(_library(), pair))(text)
    return grammar


def read_form(pair: Pair, options: Any) -> Grammar | None:
    """Take `schema` and `grammar` out of the options; what they say together."""
    schema, grammar = options.pop("schema", None), options.pop("grammar", None)
    if schema is not None and grammar is not None:
        raise SelfJudgeError("an answer follows a schema or a grammar: leave out one of `schema` and `grammar`")
    expect(isinstance(schema, Mapping | None), "schema", "a JSON schema as a dictionary", schema)
    expect(isinstance(grammar, str | None), "grammar", "text", grammar)
    if schema is None and grammar is None:
        return None
    return compile_grammar(pair, grammar_text("grammar", grammar) if schema is None else grammar_text("json", schema))


def _library() -> Any:
    try:
        import llguidance.hf
    except ImportError:
        raise SelfJudgeError("grammars and schemas need llguidance: pip install llguidance") from None
    return llguidance


def _compiler(library: Any, pair: Pair) -> Any:
    """A function from text to a `Grammar`."""
    size = max(pair.target.get_output_embeddings().weight.shape[0], len(pair.tokenizer))
    try:
        tokenizer = library.hf.from_tokenizer(pair.tokenizer, n_vocab=size, eos_token=sorted(pair.eos_ids))
    except Exception as error:  # whatever the library says about a tokenizer that it does not know
        raise SelfJudgeError(f"grammars are not possible with this tokenizer: {first_line(error)}") from None
    limits = library.LLParserLimits(**LIMITS, verbose_errors=False)

    @lru_cache(64)
    def compile_text(text: str) -> Grammar:
        _check_multiples(text)
        matcher = library.LLMatcher(tokenizer, text, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # finds out whether there is a first token
        if matcher.is_error():
            raise SelfJudgeError(f"the grammar or schema cannot be used: {_reason(matcher)}")
        return Grammar(matcher, pair.eos_ids)

    return compile_text


def _reason(matcher: LLMatcher) -> str:
    """Why a matcher has failed, in a line; what is wrong with a regular expression stands on a later one."""
    first, *others = matcher.get_error().split("\n")
    why = next((line.removeprefix("error:") for line in others if line.startswith("error:")), "")
    return "no answer can fit it" if first == "NoExtensionBias" else f"{first[:200]}{why[:100]}"


@dataclass(frozen=True, eq=False)
class Grammar(LogitsEdit):
    """A compiled grammar, and from `begin` on the edit of logits that allows one answer its tokens alone."""

    matcher: LLMatcher
    eos_ids: frozenset[int]
    masks: dict[tuple[int, ...], bytes | None] = field(default_factory=dict)  # after drafts of this cycle

    def begin(self) -> Grammar:
        """The edit of one answer, which begins where this one is."""
        return Grammar(self.matcher.deep_copy(), self.eos_ids)

    def edit(self, logits: Tensor, drafts: Sequence[int]) -> None:
        """Mask the rows up to the first draft that the grammar refuses: no row after it can be reached."""
        masks: list[bytes] = []
        for i in range(len(drafts) + 1):
            if (mask := self._mask((*drafts[:i],))) is None:
                break
            masks.append(mask)
        logits[: len(masks)] += _unpack(masks, logits)[:, : logits.shape[-1]]

    def draft(self, logits: Tensor, drafts: Sequence[int], ids: Tensor | None) -> None:
        """Mask what the grammar refuses after these drafts."""
        if (mask := self._mask((*drafts,))) is not None:
            added = _unpack([mask], logits)[0] if ids is None else _unpack([mask], logits)[0, ids]
            logits[: len(added)] += added[: len(logits)]  # either vocabulary may be padded

    def _mask(self, drafts: tuple[int, ...]) -> bytes | None:
        """The bits of what may follow these drafts; None where one of them is refused or ends the answer."""
        if drafts not in self.masks:
            matcher, mask = self.matcher, None
            if self.eos_ids.isdisjoint(drafts) and matcher.validate_tokens([*drafts]) == len(drafts):
                matcher.consume_tokens([*drafts])
                mask = matcher.compute_bitmask()
                matcher.rollback(len(drafts))
            self.masks[drafts] = mask
        return self.masks[drafts]

    def advance(self, tokens: Sequence[int]) -> None:
        self.masks.clear()
        self.matcher.consume_tokens([token for token in tokens if token not in self.eos_ids])  # an error stays


def check_edits(edits: RowEdits) -> None:
    """Refuse an answer whose grammar was given up: it ended there."""
    for edit in edits:
        if isinstance(edit, Grammar) and edit.matcher.is_error():
            reason = _reason(edit.matcher)
            raise SelfJudgeError(f"the schema or grammar was given up in the middle of an answer: {reason}")


def _unpack(masks: Sequence[bytes], logits: Tensor) -> Tensor:
    """[masks, V or more] what masks add to logits."""
    packed = torch.from_numpy(np.frombuffer(b"".join(masks), np.uint8).astype(np.int32)).to(logits.device)
    return torch.nn.functional.embedding(packed, _byte_table(logits.dtype, logits.device)).view(len(masks), -1)


@lru_cache(8)
def _byte_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """[256, 8] what the bits of a mask's byte add to eight logits, the lowest first: 0 where set, −∞ elsewhere."""
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return torch.zeros(256, 8, dtype=dtype).masked_fill_(bits == 0, -math.inf).to(device)
