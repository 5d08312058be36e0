"""τ: the score below which a token is refused, from tokens that are known to be critical.

On prompts with a checkable answer the search (preservation.py) finds the draft tokens that change the answer. τ is the
score under which the share `reject_recall` of them lies. It belongs to one suffix length. The evidence keeps every
position's log-probability, so that τ can be computed again for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfjudge.decoding.plain import respond
from selfjudge.errors import SelfJudgeError
from selfjudge.label.config import LabelConfig
from selfjudge.label.preservation import Search, score_events, search, start_searches, task_check
from selfjudge.label.score import Scorer, suffix_term
from selfjudge.models.pair import Pair
from selfjudge.models.tokens import context_window
from selfjudge.prompts.sources import PromptRecord, Source, load_prompts
from selfjudge.store import read_tensors, write_tensors
from selfjudge.tasks.base import Task
from selfjudge.tasks.registry import load_task
from selfjudge.types import Notify

WEAK = 0.9  # share of critical mismatches from which the target is called too weak to tell
FEWEST = 20  # critical tokens that a quantile is taken of
ACCEPTABLE_RATE = 0.15  # where there is no such quantile: the share of mismatches that is accepted


def calibrate(
    pair: Pair, config: LabelConfig, scorer: Scorer, data: Path | None, evidence: Path, notify: Notify
) -> dict[str, Any]:
    """Search and score critical tokens; τ and what speaks for it. Log-probabilities by position go to `evidence`."""
    assert config.calibrate is not None
    source = load_task(config.calibrate, data, allow_unsafe=config.allow_unsafe)
    records = load_prompts(Source(config.calibrate, config.calibrate_prompts), data)
    notify("τ: the target answers", 0.0)
    searches = _answered(pair, config, source, records)
    if not searches:
        raise SelfJudgeError(
            f"no response to {source.name} has an answer to preserve:"
            " raise `max_new_tokens`, `calibrate` on another task or give `tau`"
        )
    search(
        pair,
        searches,
        task_check(source),
        max_new_tokens=config.max_new_tokens,
        batch=config.batch_size,
        notify=lambda done, tried: notify("τ: searching critical tokens", done / len(searches)),
    )
    events = score_events(scorer, searches)
    if not events:
        raise SelfJudgeError(f"the draft never differs from the target on {source.name}: there is nothing to judge")
    arrays = {
        name: np.stack([getattr(scores, name)[row] for _, _, scores, row in events])
        for name in ("log_p", "original", "substituted", "highest")
    }
    arrays["critical"] = np.asarray([not event.kept for _, event, _, _ in events], np.uint8)
    write_tensors(evidence, arrays, {"task": source.name, "prompts": len(searches)})
    tau = tau_of(evidence, config.suffix_length, config.reject_recall)
    return {"task": source.name, "prompts": len(searches), **tau}


def _answered(pair: Pair, config: LabelConfig, source: Task, records: Sequence[PromptRecord]) -> list[Search]:
    """Searches of the prompts that the target answers to the end, in the order of the prompts."""
    encoded = pair.encode_many([record.prompt for record in records])
    fitting = [i for i, ids in enumerate(encoded) if len(ids) < context_window(pair.target)]
    prompts = [encoded[i] for i in fitting]
    answers = respond(
        pair.target_model, prompts, eos_ids=pair.eos_ids, max_new_tokens=config.max_new_tokens, batch=config.batch_size
    )
    ended = sorted((i, tokens) for i, tokens, finish in answers if finish == "eos")
    return start_searches(
        pair,
        source,
        [records[fitting[i]] for i, _ in ended],
        [prompts[i] for i, _ in ended],
        [tokens for _, tokens in ended],
    )


def read_evidence(file: Path) -> dict[str, NDArray[Any]]:
    """The arrays of `calibration.safetensors`; others are refused."""
    arrays, _ = read_tensors(file)
    shapes = {name: array.shape for name, array in arrays.items() if array.dtype.kind in "fu"}
    rows = shapes.get("critical", ())
    suffix = shapes.get("original", ())
    right = shapes.get("log_p") == (*rows, 2) and shapes.get("substituted") == suffix and len(suffix) == 2
    right &= shapes.get("highest", suffix) == suffix
    if not (len(rows) == 1 and rows[0] and right and suffix[:1] == rows):
        raise SelfJudgeError(f"{file} is not the evidence of a calibration: label again")
    return arrays


def tau_of(
    evidence: Path,
    suffix_length: int,
    reject_recall: float,
    *,
    mean: bool = False,
    gap: int = 0,
    after: str = "substituted",
) -> dict[str, Any]:
    """τ for a suffix length and gap, by sum or by mean over the tokens that are scored, from stored evidence.

    `after` names what is scored after the substitution: `substituted`, or `highest` for the score `confidence`.
    """
    arrays = read_evidence(evidence)
    if after not in arrays:
        raise SelfJudgeError(f"{evidence} holds no evidence for `score` confidence: give `tau` or `acceptable`")
    scores = total(arrays["log_p"], arrays["original"], arrays[after], suffix_length, mean=mean, gap=gap)
    finite = np.isfinite(scores)
    scores, of_critical = scores[finite], arrays["critical"].astype(bool)[finite]
    critical = scores[of_critical]
    share = len(critical) / max(1, len(scores))
    weak = share > WEAK or len(critical) < FEWEST
    if weak:
        tau = float(np.quantile(scores, 1 - ACCEPTABLE_RATE))
    else:  # the smallest score that at least this share of the critical tokens does not exceed
        tau = float(np.quantile(critical, reject_recall, method="inverted_cdf"))
    return {
        "tau": tau,
        "suffix_length": suffix_length,
        "score": "mean" if mean else "sum",
        "reject_recall": reject_recall,
        "mismatches": len(scores),
        "critical": len(critical),
        "critical_share": share,
        "acceptable_rate": float((scores > tau).mean()),
        "fallback": f"acceptable rate {ACCEPTABLE_RATE:.0%}" if weak else None,
    }


def total(
    log_p: NDArray[Any],
    original: NDArray[Any],
    substituted: NDArray[Any],
    suffix_length: int,
    *,
    mean: bool = False,
    gap: int = 0,
) -> NDArray[np.float32]:
    """[K] the score over at most `suffix_length` tokens without the first `gap`.

    With `mean`, it is divided by the number of tokens that it sums.
    """
    scores = log_p[:, 1] - log_p[:, 0] + suffix_term(original, substituted, suffix_length, gap)
    if mean:
        scores = scores / (1 + (~np.isnan(original[:, gap:suffix_length])).sum(1))
    return np.asarray(scores, np.float32)
