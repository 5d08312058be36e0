"""τ: the score below which a token is refused, from tokens that are known to be critical.

On prompts with a checkable answer the search (preservation.py) finds the draft tokens that change the answer. τ is the score
under which the share `reject_recall` of them lies. It belongs to one suffix length: the evidence keeps every position's
log-probability, so that it can be computed again for another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfjudge.decoding.plain import respond
from selfjudge.errors import SelfJudgeError
from selfjudge.label.preservation import Check, Event, Search, search
from selfjudge.label.score import Case, Scorer, Scores, suffix_term
from selfjudge.models.pair import Pair
from selfjudge.models.tokens import context_window
from selfjudge.prompts.sources import Asked
from selfjudge.store import read_tensors, write_tensors
from selfjudge.tasks.base import Task

WEAK = 0.9  # share of critical mismatches from which the target is called too weak to tell
FEWEST = 20  # critical tokens that a quantile is taken of
ACCEPTABLE_RATE = 0.15  # where there is no such quantile: the share of mismatches that is accepted


def extracted(task: Task) -> Check:
    """A task's own check: the answer found in the text is that of the original response."""

    def check(searches: Sequence[Search], texts: Sequence[str]) -> list[bool]:
        rows = [s.row or {} for s in searches]
        found = task.extract_many(rows, texts)
        return [
            answer is not None and task.same(row, s.answer, answer)
            for s, row, answer in zip(searches, rows, found, strict=True)
        ]

    return check


def begin(
    pair: Pair, task: Task, asked: Sequence[Asked], prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]
) -> list[Search]:
    """Searches of the prompts whose original response has an answer to preserve."""
    texts = [str(pair.tokenizer.decode(list(tokens), skip_special_tokens=True)) for tokens in responses]
    answers = task.extract_many([one.row or {} for one in asked], texts)
    return [
        Search(ids, tuple(tokens), str(one.prompt), one.id, one.row, answer)
        for one, ids, tokens, answer in zip(asked, prompts, responses, answers, strict=True)
        if answer is not None and task.is_scorable(one.row or {}, answer)
    ]


def scored(scorer: Scorer, searches: Sequence[Search]) -> list[tuple[Search, Event, Scores, int]]:
    """Every event with its scores, against the response it was tried in, and its row there."""
    cases, owners = [], []
    for one in searches:
        groups: dict[tuple[int, ...], list[Event]] = {}
        for event in one.events:
            groups.setdefault(event.response, []).append(event)
        for response, events in groups.items():
            cases.append(Case(one.prompt, response, [e.place for e in events], [e.draft for e in events]))
            owners.append((one, events))
    return [
        (one, event, scores, row)
        for (one, events), scores in zip(owners, scorer(cases), strict=True)
        for row, event in enumerate(events)
    ]


def calibrate(
    pair: Pair, task: Task, asked: Sequence[Asked], *, suffix_length: int, reject_recall: float, max_new_tokens: int,
    batch: int, evidence: Path, notify: Callable[[str, float], None],
) -> dict[str, Any]:  # fmt: skip
    """Search, score the critical tokens, and τ with what speaks for it; per-position log-probabilities go to `evidence`."""
    notify("τ: the target answers", 0.0)
    found: dict[int, list[int]] = {}
    prompts = pair.encode_many([one.prompt for one in asked])
    fitting = [i for i, ids in enumerate(prompts) if len(ids) < context_window(pair.target)]
    for place, tokens, finish in respond(
        pair.target, [prompts[i] for i in fitting], eos_ids=pair.eos_ids, max_new_tokens=max_new_tokens, batch=batch
    ):
        if finish == "eos":
            found[fitting[place]] = tokens
    kept = sorted(found)
    searches = begin(pair, task, [asked[i] for i in kept], [prompts[i] for i in kept], [found[i] for i in kept])
    if not searches:
        raise SelfJudgeError(
            f"no response to {task.name} has an answer to preserve: raise --max-new-tokens, calibrate on another task or give --tau"
        )
    search(
        pair, searches, extracted(task), max_new_tokens=max_new_tokens, batch=batch,
        notify=lambda done, tried: notify("τ: searching critical tokens", done / len(searches)),
    )  # fmt: skip
    rows = scored(Scorer(pair.target, suffix_length=suffix_length), searches)
    if not rows:
        raise SelfJudgeError(f"the draft never differs from the target on {task.name}: there is nothing to judge")
    arrays = {
        "critical": np.asarray([not event.kept for _, event, _, _ in rows], np.uint8),
        "log_p": np.stack([scores.log_p[row] for _, _, scores, row in rows]),
        "original": np.stack([scores.original[row] for _, _, scores, row in rows]),
        "substituted": np.stack([scores.substituted[row] for _, _, scores, row in rows]),
    }
    write_tensors(evidence, arrays, {"task": task.name, "prompts": len(searches)})
    return {"task": task.name, "prompts": len(searches), **tau_of(evidence, suffix_length, reject_recall)}


def tau_of(
    evidence: Path, suffix_length: int, reject_recall: float, *, mean: bool = False, gap: int = 0
) -> dict[str, Any]:
    """τ for a suffix length and gap, by sum or by mean over the tokens that are scored, from stored evidence."""
    arrays, _ = read_tensors(evidence)
    scores = total(arrays["log_p"], arrays["original"], arrays["substituted"], suffix_length, mean=mean, gap=gap)
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
        "tau": tau, "suffix_length": suffix_length, "score": "mean" if mean else "sum", "reject_recall": reject_recall,
        "mismatches": len(scores), "critical": len(critical), "critical_share": share,
        "acceptable_rate": float((scores > tau).mean()),
        "fallback": f"acceptable rate {ACCEPTABLE_RATE:.0%}" if weak else None,
    }  # fmt: skip


def total(
    log_p: NDArray[Any], original: NDArray[Any], substituted: NDArray[Any], suffix_length: int, *, mean: bool = False,
    gap: int = 0,
) -> NDArray[np.float32]:  # fmt: skip
    """[K] the score over at most `suffix_length` tokens, of which the first `gap` are passed over; with `mean`, divided by the
    number of tokens that it sums."""
    found = log_p[:, 1] - log_p[:, 0] + suffix_term(original, substituted, suffix_length, gap)
    if mean:
        found = found / (1 + (~np.isnan(original[:, gap:suffix_length])).sum(1))
    scores: NDArray[np.float32] = found.astype(np.float32)
    return scores
