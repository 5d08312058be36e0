"""Print docs/formats.md: the text of `PAGE`, and a table of each schema; `make docs` writes it and a test compares.

Keys and types come from the schemas that files are read through. What a key means stands here; one without is an error.
"""

from __future__ import annotations

import types
import typing
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

from selfjudge.judge.config import JudgeConfig
from selfjudge.models.eagle import EagleFile
from selfjudge.store import artefacts, markdown_table
from selfjudge.store.schema import Pattern, Range

SHA = "checksum of its weights; another model is refused"
DELTA = "against `exact`, paired by example"
PROMPTS = {
    "prompt": "the user's message", "messages": "or a conversation: objects with `role` and `content`",
    "answer": "the right answer: it can be scored", "check": "or Python that raises where `answer` (the text) is wrong",
    "id": "by its place in the file if not given", "split": "one prompt of five, by hash, is test if not given",
}  # fmt: skip
RESPONSES = {
    "prompt_id": "the same in all files of the folder", "source": "which `--prompts`", "prompt_ids": "tokens",
    "response_ids": "the target's greedy answer", "finish": "`eos` or `length`",
}  # fmt: skip
LABELS = {
    "prompt_id": "of its response", "source": "which `--prompts`", "position": "in prompt and response",
    "target_token": "the target's choice", "draft_token": "what was put in its place", "score": "s; more is more acceptable",
    "label": "1 is acceptable", "kept": "`consequences`: whether the answer was kept, or the similarity",
    "control": "`consequences`: whether the target's own token kept it; null where it was not tried",
    "margin": "log p(target's token) − log p(draft's)",
}  # fmt: skip
MANIFEST = {
    "format_version": "", "target": "name, path or hub id", "draft": "the same", "target_sha256": SHA, "draft_sha256": SHA,
    "dtype": "of the models", "hidden_size": "width of a state", "hidden_dtype": "of the stored states",
    "layer": "which states", "norm": "and after which norm", "method": "of the labels", "suffix_length": "N",
    "tau": "null for methods without", "tau_evidence": "how it was found", "rows": "labels", "acceptable": "of them",
    "prompts": "that have a label", "target_tokens": "read and written to make the labels, each as if alone", "response_tokens": "in all responses",
    "yields": "what became of the prompts",
    "outcome": "what kept means", "controls": "tried", "controls_kept": "of them", "shards": "rows and checksums of each part",
    "files": "checksums",
}  # fmt: skip
JUDGE = {
    "hidden_size": "of the target", "target": "that it is for", "draft": "it was labelled with; another is fine",
    "target_sha256": SHA, "draft_sha256": "for the record", "layer": "", "norm": "", "features": "what it reads",
    "model": "", "label_method": "", "suffix_length": "N", "suffix_gap": "tokens of the suffix passed over",
    "score": "of the labels", "tau": "", "acceptable": "share of the mismatches that τ was chosen by",
    "margin_limit": "no say beyond so many nats", "sources": "of its prompts",
    "quality_curve": "share of bad substitutions rejected, and the θ that does so", "thresholds": "F, R and others",
    "metrics": "ROC-AUC, labels, acceptable rate", "format_version": "",
}  # fmt: skip
HEAD = {
    "format_version": "", "kind": "", "target": "that it is for", "target_sha256": SHA, "hidden_size": "of the target",
    "intermediate_size": "of the layer", "heads": "of attention", "kv_heads": "", "head_dim": "", "rope_parameters": "",
    "eps": "of the norms", "aux_layers": "whose inputs it reads", "vocab_size": "of the target",
    "draft_vocab_size": "tokens it can propose", "norm_before_residual": "of public heads", "metrics": "held-out agreement",
}  # fmt: skip
SUMMARY = {
    "task": "", "rule": "with its judge: `judged:F@mine`", "gamma": "", "n": "examples", "score": "the task's measure",
    "pair": "", "judge": "its name",
    "judge_id": "digest of its weights, features and margin limit", "measure": "accuracy, pass_rate, rougeL …", "score_ci": "95 %, bootstrap",
    "scores": "all measures", "delta_score": DELTA, "delta_ci": "95 %", "delta_scores": "of the other measures",
    "delta_scores_ci": "", "agreement": "share with the answer of `exact`, or of its words", "agreement_ci": "95 %",
    "lost": "examples that score less than with `exact`", "gained": "more", "lost_ci": "of the share", "gained_ci": "",
    "mean_accepted_length": "m, Σ tokens / Σ cycles", "delta_m": DELTA, "delta_m_ci": "95 %, bootstrap",
    "m_ratio": "m over that of `exact`", "m_ratio_ci": "", "drafts_accepted": "a cycle", "judged_share": "of the tokens",
    "tokens_per_second": "of decoding; the first part is left out", "extraction_failures": "share without an answer",
    "cut_off": "share that ended at the limit", "threshold": "θ", "label_method": "of the judge", "features": "of the judge",
    "suffix_length": "of its labels", "label_prompts": "of its labels", "batch": "",
    "max_new_tokens": "", "seconds": "by phase", "substitutions": "target's token, what was taken, how often", "dtype": "",
    "machine": "", "versions": "", "date": "", "commit": "",
}  # fmt: skip
SAMPLES = {
    "id": "of the example", "tokens": "emitted in cycles", "cycles": "", "answer": "as extracted", "score": "", "scores": "",
    "finish": "", "emitted": "all tokens", "drafts_accepted": "", "judged": "tokens", "text": "not with `--compact`",
    "agrees": "with `exact`",
}  # fmt: skip
TOKENS = {
    "origin": "", "text": "", "choice": "the target's", "p": "of the token", "p_choice": "of the target's",
    "judge": "its score", "cycle": "0 is prefill",
}  # fmt: skip
RECIPE = {
    "format_version": "", "pair": "", "target": "", "draft": "", "target_sha256": SHA, "draft_sha256": SHA,
    "judge_sha256": "null where the rule has none", "prompts_sha256": "of the calibration prompts", "rule": "as text",
    "gamma": "", "judge": "folder beside it", "certificate": "file beside it", "engine": "it was certified with",
    "dtype": "", "draft_dtype": "", "flags": "the same as options of `selfjudge`, and of vLLM",
}  # fmt: skip
CERTIFICATE = {
    "format_version": "", "pair": "", "task": "", "measure": "what is certified", "rule": "that was chosen", "gamma": "",
    "n": "prompts", "epsilon": "the most that may be lost", "delta": "probability of a false certificate",
    "certified": "false: `exact` was chosen", "mean_difference": "rule − `exact`: negative is lost", "mean_difference_ci": "",
    "lost": "answers", "gained": "answers", "exact": "how `exact` itself does: answers, mean score, answers that were not found",
    "families": "of rules, that shared δ", "evidence": "the bet", "overlap": "words of `exact` lost: mean and bound",
    "candidates": "every rule tried, below", "prompts_sha256": "", "engine": "", "dtype": "", "versions": "", "date": "",
    "stopped": "whether the time was up",
}  # fmt: skip
CANDIDATES = {
    "rule": "", "family": "", "gamma": "", "n_used": "prompts", "refuted": "", "why": "it ended", "mean_difference": "",
    "lost": "", "gained": "", "mean_accepted_length": "", "tokens_per_second": "", "speed_ratio": "to `exact`",
    "speed_ci": "95 %", "needed_prompts": "to settle it",
}  # fmt: skip
RUN = {
    "argv": "the command", "commit": "of this package", "time": "", "versions": "", "machine": "", "seconds": "",
    "rows_per_hour": "of labels", "tasks": "of an evaluation", "runs": "of an evaluation", "earlier": "calls that went on",
    "target": "of a distillation",
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
    plain = {
        str: "text",
        int: "whole number",
        float: "number",
        bool: "true or false",
        Any: "anything",
        type(None): "null",
    }
    if kind in plain:
        return plain[kind]
    origin, parts = get_origin(kind), get_args(kind)
    if origin is typing.Annotated:
        return limited(parts[0], parts[1])
    if origin in (Union, types.UnionType):
        return " or ".join(map(described, parts))
    if origin is typing.Literal:
        return " or ".join(f"`{part}`" for part in parts)
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
        return " or ".join(f"`{choice}`" for choice in get_args(limit))
    assert isinstance(limit, Range)
    if kind is float and limit.high == 1 and limit.low >= 0:
        return "0 to 1"
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
    rows = [
        [f"`{key}`", f"{kind}, optional" if optional else kind, meanings[key]]
        for key, (kind, optional) in ((key, declared[key]) for key in meanings)
    ]
    return markdown_table(["key", "", "what it is"], rows, "lll")


page = (Path(__file__).parent / "formats.in.md").read_text(encoding="utf-8")
for schema_name in SCHEMAS:
    page = page.replace(f"{{{schema_name}}}", table(schema_name))
print(page, end="")
