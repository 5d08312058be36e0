"""Print docs/formats.md: the text of templates/formats.md.in, and a table of each schema; `make docs` writes it and a test compares.

Keys, types and meanings come from the schemas that files are read through: `store/formats.json`, and a dataclass whose
meanings stand here.
"""

from __future__ import annotations

import types
import typing
from dataclasses import MISSING, fields, is_dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

from selfjudge.judge.config import JudgeConfig
from selfjudge.store import markdown_table, schema as schemas
from selfjudge.store.schema import Pattern, Range

SHA = "checksum of its weights; another model is refused"
# keys that follow each other with one type and one meaning share a row
JUDGE = {
    "format_version": "", "hidden_size": "width of the target's states", "target": "", "draft": "the labels' draft; another is fine",
    "target_sha256": SHA, "draft_sha256": "for the record", "layer": "", "norm": "", "features": "what it reads",
    "model": "", "label_method": "", "suffix_length": "N", "suffix_gap": "tokens of the suffix passed over",
    "score": "the labels' score", "tau": "", "acceptable": "share of the mismatches that τ was chosen by",
    "margin_limit": "no say beyond so many nats", "sources": "its prompts' sources",
    "quality_curve": "bad substitutions rejected, and the θ that does so", "thresholds": "F, R and others",
    "metrics": "ROC-AUC, labels, acceptable rate", "labels_sha256": "of the label files it was trained on",
}  # fmt: skip
FORMATS = schemas.read_formats()
NAMES = {
    "prompts": "TaskRow", "responses": "Response", "labels": "LabelRow", "manifest": "LabelManifest", "summary": "EvaluationSummary",
    "samples": "ScoredSample", "tokens": "ExampleToken", "recipe": "RecipeFile", "certificate": "Certificate",
    "candidates": "CertificateCandidate", "run": "RunRecord", "head": "HeadFile",
}  # fmt: skip
"""Each table of the page that has the keys of a schema of formats.json."""
SCHEMAS: dict[str, tuple[Any, dict[str, str]]] = {
    **{name: (getattr(schemas, schema), {key: about for key, (_, _, about) in FORMATS[schema].items()}) for name, schema in NAMES.items()},
    "judge": (JudgeConfig, JUDGE),
}  # fmt: skip


def described(kind: Any) -> str:
    """A type in words: `count`, `0 to 1`, `list of text`."""
    plain = {str: "text", int: "integer", float: "number", bool: "boolean", Any: "anything", type(None): "null"}
    if kind in plain:
        return plain[kind]
    origin, parts = get_origin(kind), get_args(kind)
    if origin is typing.Annotated:
        return limited(parts[0], parts[1])
    if origin in (Union, types.UnionType):
        return "/".join(map(described, parts))
    if origin is typing.Literal:
        return "/".join(f"`{part}`" for part in parts)
    if origin is tuple and parts[-1] is not Ellipsis:
        return f"[{', '.join(map(described, parts))}]"
    if origin in (list, tuple):
        return f"list of {described(parts[0])}"
    if is_typeddict(kind):
        return "object"
    return "object" if not parts else f"object of {described(parts[-1])}"


def limited(kind: Any, limit: Any) -> str:
    """A type with what its values must be."""
    if isinstance(limit, Pattern):
        return limit.name
    if get_origin(limit) is typing.Literal:
        return "/".join(f"`{choice}`" for choice in get_args(limit))
    assert isinstance(limit, Range)
    if kind is float and limit.high == 1 and limit.low >= 0:
        return "0–1"
    return "count" if kind is int else described(kind)


def keys(schema: Any) -> dict[str, tuple[str, bool]]:
    """Key → its type in words, and whether it may be absent."""
    hints = get_type_hints(schema, vars(schemas) if is_typeddict(schema) else None, include_extras=True)
    if is_dataclass(schema):
        known = {f.name: f.default is not MISSING or f.default_factory is not MISSING for f in fields(schema)}
        return {name: (described(hints[name]), known[name]) for name in known}
    optional = {n for n, kind in hints.items() if get_origin(kind) is NotRequired or not schema.__total__}
    kinds = {name: get_args(kind)[0] if get_origin(kind) is NotRequired else kind for name, kind in hints.items()}
    return {name: (described(kinds[name]), name in optional) for name in hints}


def table(name: str) -> str:
    schema, meanings = SCHEMAS[name]
    declared = keys(schema)
    if differing := set(declared) ^ set(meanings):
        raise SystemExit(f"{name}: {', '.join(sorted(differing))} must be in the schema and here")
    rows = []
    for (meaning, (kind, optional)), same in groupby(meanings, lambda key: (meanings[key], declared[key])):
        names = ", ".join(f"`{key}`{'?' if optional else ''}" for key in same)
        rows.append([names, f"{kind}: {meaning}" if meaning else kind])
    return markdown_table(["key", "what it is"], rows, "ll")


page = (Path(__file__).parent / "templates" / "formats.md.in").read_text(encoding="utf-8")
for schema_name in SCHEMAS:
    page = page.replace(f"{{{schema_name}}}", table(schema_name))
print(page, end="")
