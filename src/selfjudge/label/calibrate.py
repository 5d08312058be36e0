"""τ: the score below which a token is rejected, from tokens that are known to be critical.

On prompts with a checkable answer the search (methods.py) finds the draft tokens that change the answer. τ is the
score under which the share `reject_recall` of them lies. It belongs to one suffix length. The evidence keeps every
position's log-probability, so that τ can be computed again for another."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfjudge.errors import SelfJudgeError
from selfjudge.label.checks import AnswerCheck
from selfjudge.label.config import LabelConfig
from selfjudge.label.folder import Row
from selfjudge.label.methods import score_events, search_critical_tokens
from selfjudge.label.score import Scorer, Scores, sum_scores
from selfjudge.store import read_tensors, write_tensors
from selfjudge.types import Notify

WEAK = 0.9  # share of critical mismatches from which the target is called too weak to tell
FEWEST = 20  # critical tokens that a quantile is taken of
ACCEPTABLE_RATE = 0.15  # where there is no such quantile: the share of mismatches that is accepted
EVIDENCE = ("log_p", "original", "substituted", "highest")


def calibrate(
    check: AnswerCheck, config: LabelConfig, responses: Sequence[Row], scorer: Scorer, evidence: Path, notify: Notify
) -> dict[str, Any]:
    """Search and score the critical tokens of responses to a task; τ and how it was found. Arrays go to `evidence`."""
    pair, task = check.pair, check.task
    originals = check.find_originals(responses)
    if not originals:
        raise SelfJudgeError(
            f"no response to {task.name} has an answer to preserve: raise `max_new_tokens` or give `tau`"
        )
    events = search_critical_tokens(
        pair, config, originals, notify=lambda share: notify("τ: searching critical tokens", share)
    )
    if not events:
        raise SelfJudgeError(f"the draft never differs from the target on {task.name}: there is nothing to judge")
    scored = score_events(scorer, events)
    scores = Scores.join([each for _, _, each in scored], scorer.suffix_length, pair.hidden_size)
    arrays = {name: getattr(scores, name) for name in EVIDENCE}
    arrays["critical"] = np.asarray([not event.kept for event in events], np.uint8)
    write_tensors(evidence, arrays, {"task": task.name, "prompts": len(originals)})
    tau = compute_tau(evidence, config.suffix_length, config.reject_recall)
    return {"task": task.name, "prompts": len(originals), **tau}


def read_evidence(file: Path) -> dict[str, NDArray[Any]]:
    """The arrays of `calibration.safetensors`; a file with other arrays is an error."""
    arrays, _ = read_tensors(file)
    shapes = {name: array.shape for name, array in arrays.items() if array.dtype.kind in "fu"}
    rows, suffix = shapes.get("critical", ()), shapes.get("original", ())
    expected = {"log_p": (*rows, 2), "original": suffix, "substituted": suffix, "highest": suffix}
    is_valid = len(rows) == 1 and rows[0] and len(suffix) == 2 and suffix[:1] == rows
    if not is_valid or any(shapes.get(name) != shape for name, shape in expected.items()):
        raise SelfJudgeError(f"{file} is not the evidence of a calibration: label again")
    return arrays


def compute_tau(
    evidence: Path, suffix_length: int, reject_recall: float, *, gap: int = 0, score: str = "likelihood"
) -> dict[str, Any]:
    """τ for a score with this suffix length and gap (see `sum_scores`), from stored evidence."""
    arrays = read_evidence(evidence)
    scores = sum_scores(arrays, suffix_length, gap=gap, score=score)
    finite = np.isfinite(scores)
    scores, is_critical = scores[finite], arrays["critical"].astype(bool)[finite]
    critical = scores[is_critical]
    share = len(critical) / max(1, len(scores))
    weak = share > WEAK or len(critical) < FEWEST
    if weak:
        tau = float(np.quantile(scores, 1 - ACCEPTABLE_RATE))
    else:  # the smallest score that at least this share of the critical tokens does not exceed
        tau = float(np.quantile(critical, reject_recall, method="inverted_cdf"))
    return {
        "tau": tau,
        "suffix_length": suffix_length,
        "score": "mean" if score == "confidence" else "sum",
        "reject_recall": reject_recall,
        "mismatches": len(scores),
        "critical": len(critical),
        "critical_share": share,
        "acceptable_rate": float((scores > tau).mean()),
        "fallback": f"acceptable rate {ACCEPTABLE_RATE:.0%}" if weak else None,
    }
