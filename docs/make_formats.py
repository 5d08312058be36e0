"""Print docs/formats.md: the text of formats.in.md, and a table of each schema; `make docs` writes it and a test compares.

Keys and types come from the schemas that files are read through. What a key means stands here; one without is an error.
"""

from __future__ import annotations

import types
import typing
from dataclasses import MISSING, fields, is_dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

from selfjudge.judge.config import JudgeConfig
from selfjudge.models.eagle import EagleFile
from selfjudge.store import artefacts, markdown_table
from selfjudge.store.schema import Pattern, Range

SHA = "checksum of its weights; another model is refused"
INTERVAL = "95 % interval"
# keys that follow each other with one type and one meaning share a row
PROMPTS = {
    "prompt": "the user's message", "messages": "or a conversation: objects with `role` and `content`",
    "answer": "the right answer", "check": "or Python that raises where `answer` (the text) is wrong",
    "id": "its place in the file if not given", "group": "prompts that depend on one another: one observation of a certificate",
    "split": "by hash if not given: one prompt of five is test",
}  # fmt: skip
RESPONSES = {
    "prompt_id": "the same in all files", "source": "which `--prompts`", "prompt_ids": "",
    "response_ids": "the target's greedy answer", "finish": "`eos` or `length`",
}  # fmt: skip
LABELS = {
    "prompt_id": "its response", "source": "which `--prompts`", "position": "in prompt and response",
    "target_token": "the target's choice", "draft_token": "what replaced it", "score": "more is more acceptable",
    "label": "1 is acceptable",
    "control": "`consequences`: whether the target's own token kept it", "margin": "log p(target's token) − log p(draft's)",
}  # fmt: skip
MANIFEST = {
    "format_version": "", "target": "name, path or hub id", "draft": "name, path or hub id", "target_sha256": SHA, "draft_sha256": SHA,
    "method": "how labels were made", "dtype": "the models' weights", "hidden_dtype": "the stored states", "hidden_size": "width of a state",
    "layer": "", "norm": "", "suffix_length": "N", "tau": "", "tau_evidence": "how it was found",
    "rows": "labels", "acceptable": "acceptable labels", "prompts": "prompts with a label",
    "target_tokens": "tokens read and written for labels", "response_tokens": "tokens of all responses", "yields": "what became of the prompts",
    "controls": "controls tried", "controls_kept": "controls kept", "shards": "rows and checksums of each part", "files": "",
}  # fmt: skip
JUDGE = {
    "format_version": "", "hidden_size": "width of the target's states", "target": "", "draft": "the labels' draft; another is fine",
    "target_sha256": SHA, "draft_sha256": "for the record", "layer": "", "norm": "", "features": "what it reads",
    "model": "", "label_method": "", "suffix_length": "N", "suffix_gap": "tokens of the suffix passed over",
    "score": "the labels' score", "tau": "", "acceptable": "share of the mismatches that τ was chosen by",
    "margin_limit": "no say beyond so many nats", "sources": "its prompts' sources",
    "quality_curve": "bad substitutions rejected, and the θ that does so", "thresholds": "F, R and others",
    "metrics": "ROC-AUC, labels, acceptable rate",
}  # fmt: skip
HEAD = {
    "format_version": "", "kind": "", "target": "", "target_sha256": SHA, "hidden_size": "the target's",
    "vocab_size": "the target's", "draft_vocab_size": "tokens it can propose", "aux_layers": "whose inputs it reads",
    "intermediate_size": "its layer's", "heads": "its layer's", "kv_heads": "its layer's", "head_dim": "its layer's",
    "rope_parameters": "", "eps": "the norms' ε", "norm_before_residual": "public heads", "metrics": "held-out agreement",
}  # fmt: skip
SUMMARY = {
    "task": "", "rule": "with its judge: `judged:F@mine`", "gamma": "", "n": "examples", "score": "by the task's measure",
    "measure": "accuracy, pass_rate, rougeL …", "scores": "all measures", "score_ci": INTERVAL,
    "delta_score": "against `exact`, paired by example", "delta_m": "against `exact`, paired by example",
    "delta_ci": INTERVAL, "delta_m_ci": INTERVAL, "m_ratio_ci": INTERVAL, "delta_scores": "the same by other measures",
    "delta_scores_ci": INTERVAL, "agreement": "share with the answer of `exact`, or of its words",
    "agreement_ci": INTERVAL, "lost_ci": INTERVAL, "gained_ci": INTERVAL,
    "lost": "examples that score less than with `exact`", "gained": "more",
    "mean_accepted_length": "m, Σ tokens / Σ cycles", "m_ratio": "m over that of `exact`", "drafts_accepted": "per cycle",
    "judged_share": "share of judged tokens", "tokens_per_second": "decoding, without the first part",
    "busy": "why that is not reliable, if so",
    "extraction_failures": "share without an answer", "cut_off": "share cut off at the limit", "threshold": "θ",
    "judge": "its name", "judge_id": "digest of its weights, features and margin limit",
    "label_method": "the judge's", "features": "the judge's", "suffix_length": "the judge's",
    "label_prompts": "the judge's", "substitutions": "target's token, what was taken, how often",
    "seconds": "by phase", "batch": "", "max_new_tokens": "", "pair": "", "dtype": "", "date": "", "commit": "",
    "machine": "", "versions": "",
}  # fmt: skip
SAMPLES = {
    "id": "the example", "answer": "as extracted", "score": "", "scores": "", "finish": "", "tokens": "emitted in cycles",
    "emitted": "all tokens", "cycles": "", "drafts_accepted": "", "judged": "tokens", "text": "not in rows kept without", "agrees": "with `exact`",
}  # fmt: skip
TOKENS = {
    "origin": "", "text": "", "choice": "the target's", "p": "probability of the token", "p_choice": "probability of the choice",
    "judge": "its score", "cycle": "0 is prefill",
}  # fmt: skip
RECIPE = {
    "format_version": "", "pair": "", "target": "", "draft": "", "target_sha256": SHA, "draft_sha256": SHA,
    "tokenizer_sha256": "vocabulary, splitting and chat template", "prompts_sha256": "the calibration prompts", "rule": "as it was tried",
    "resolved": "the same with all its numbers", "gamma": "", "judge": "", "engine": "it was certified with",
    "dtype": "it was certified with", "draft_dtype": "", "flags": "the same as options of `selfjudge`, and of vLLM",
    "files": "SHA-256 of each file beside it", "digest": "SHA-256 of all other keys, which a signature signs",
}  # fmt: skip
CERTIFICATE = {
    "format_version": "", "pair": "", "task": "", "measure": "what is certified", "rule": "the chosen one",
    "resolved": "the same with all its numbers", "gamma": "", "n": "observations: groups of prompts",
    "epsilon": "the most that may be lost", "delta": "probability of a false certificate",
    "certified": "false: `exact` was chosen", "mean_difference": "rule − `exact`: negative is lost", "mean_difference_ci": INTERVAL,
    "lost": "answers", "gained": "answers", "exact": "how `exact` itself does: answers, mean score, answers not found",
    "groups": "prompts of each group: `997*1 3`", "similar": "share of common pieces that makes near-duplicates",
    "attempt": "on these prompts", "earlier_attempts": "dates",
    "speed_measure": "", "speed_ratio": "over `exact`", "speed_ci": INTERVAL, "exact_over_plain": "speed of `exact` over plain decoding",
    "unreliable": "why speeds were not compared, if so",
    "families": "families of rules that shared δ", "evidence": "the bet", "overlap": "words of `exact` lost: each prompt, mean and bound",
    "candidates": "every rule tried, below", "target_sha256": "", "draft_sha256": "", "tokenizer_sha256": "", "prompts_sha256": "",
    "engine": "", "dtype": "", "draft_dtype": "", "date": "", "versions": "", "stopped": "whether the time was up",
}  # fmt: skip
CANDIDATES = {
    "rule": "", "family": "", "gamma": "", "n_used": "prompts", "refuted": "", "why": "why it ended",
    "differences": "`exact` − rule of each prompt, in order: `466*0 1 -0.25`", "mean_difference": "",
    "lost": "", "gained": "", "mean_accepted_length": "", "tokens_per_second": "", "speed_ratio": "over `exact`",
    "speed_ci": INTERVAL, "needed_prompts": "observations that would settle it",
}  # fmt: skip
RUN = {
    "argv": "the command", "commit": "this package's", "time": "", "versions": "", "machine": "", "seconds": "",
    "rows_per_hour": "labels", "tasks": "an evaluation's", "runs": "an evaluation's", "earlier": "calls that went on",
    "target": "a distillation's",
}  # fmt: skip
SCHEMAS: dict[str, tuple[Any, dict[str, str]]] = {
    "prompts": (artefacts.TaskRow, PROMPTS), "responses": (artefacts.Response, RESPONSES), "labels": (artefacts.LabelRow, LABELS),
    "manifest": (artefacts.LabelManifest, MANIFEST), "judge": (JudgeConfig, JUDGE), "head": (EagleFile, HEAD),
    "summary": (artefacts.EvaluationSummary, SUMMARY), "samples": (artefacts.ScoredSample, SAMPLES), "tokens": (artefacts.ExampleToken, TOKENS),
    "recipe": (artefacts.RecipeFile, RECIPE), "certificate": (artefacts.Certificate, CERTIFICATE), "candidates": (artefacts.CertificateCandidate, CANDIDATES),
    "run": (artefacts.RunRecord, RUN),
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
    hints = get_type_hints(schema, vars(artefacts) if is_typeddict(schema) else None, include_extras=True)
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


page = (Path(__file__).parent / "formats.in.md").read_text(encoding="utf-8")
for schema_name in SCHEMAS:
    page = page.replace(f"{{{schema_name}}}", table(schema_name))
print(page, end="")
