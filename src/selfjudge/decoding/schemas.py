"""What makes a JSON schema unusable and llguidance does not notice, or only after hours."""

import json
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from selfjudge.errors import SelfJudgeError

MOST_MULTIPLE = 20_000  # least common multiple of all `multipleOf`: its states are enumerated, here in 0.2 s
MOST_ROUNDS = 50  # of looking for an end: each takes what the one before has found


def list_schemas(text: str) -> Iterator[Any]:
    """The schemas in a grammar, either in Lark or as llguidance's own JSON."""
    if text.startswith('{"grammars"'):
        with suppress(ValueError, AttributeError, TypeError):  # llguidance says what is wrong with it
            for part in json.loads(text)["grammars"]:
                yield part.get("json_schema")
                yield from list_schemas(part.get("lark_grammar") or "")
    for found in re.finditer(r"%json\s*", text):
        with suppress(ValueError):
            yield json.JSONDecoder().raw_decode(text, found.end())[0]


def check_multiples(schema: Any) -> None:
    """Refuse what would be compiled for ever."""
    whole, left = 1, [schema]
    while left:
        node = left.pop()
        left += node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        number = node.get("multipleOf") if isinstance(node, dict) else None
        if isinstance(number, (int, float)):
            digits = Decimal(str(number)).normalize().as_tuple().digits  # powers of ten cost nothing
            whole = math.lcm(whole, int("".join(map(str, digits))) or 1)
            if whole > MOST_MULTIPLE:
                raise SelfJudgeError(f"multipleOf: the least common multiple of all is above {MOST_MULTIPLE}")


def check_end(schema: Any) -> None:
    """Refuse a schema that recurses in every value, so that none ends."""
    known: set[str] = set()  # references that some value with an end fits
    asked: set[str] = set()  # in this round

    def ends(node: Any) -> bool:
        if not isinstance(node, dict) or "enum" in node or "const" in node:
            return node is not False
        kinds, least, first = node.get("type", "null"), node.get("minItems", 0), node.get("prefixItems", [])
        rest, fields = node.get("additionalProperties", True), node.get("properties", {})
        inner = {
            "object": [fields.get(name, rest) for name in node.get("required", ())],
            "array": [*first[:least], *([node.get("items", True)] if least > len(first) else [])],
        }
        alternatives = [node[key] for key in ("anyOf", "oneOf") if node.get(key)]
        return (
            any(all(map(ends, inner.get(kind, ()))) for kind in ([kinds] if isinstance(kinds, str) else kinds))
            and all(map(ends, node.get("allOf", ())))
            and all(any(map(ends, several)) for several in alternatives)
            and ("$ref" not in node or followed(node["$ref"]))
        )

    def followed(reference: str) -> bool:
        if reference not in known and reference not in asked:
            asked.add(reference)
            node = schema
            with suppress(LookupError, ValueError, TypeError):  # what leads nowhere is not ours to refuse
                for part in unquote(reference).removeprefix("#").split("/")[1:]:
                    part = part.replace("~1", "/").replace("~0", "~")
                    node = node[int(part) if isinstance(node, list) else part]
                if not ends(node):
                    return False
            known.add(reference)
        return reference in known

    for _ in range(MOST_ROUNDS):
        before = len(known)
        asked.clear()
        if ends(schema):
            return
        if len(known) == before:
            raise SelfJudgeError("the schema recurses without end: no answer can fit it")
