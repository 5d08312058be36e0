"""Labels of draft tokens by likelihood (selfjudge) or by a preserved answer (autojudge, autojudge+)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from selfjudge.label.checks import find_originals
from selfjudge.label.config import LabelConfig
from selfjudge.label.folder import Labels, Row
from selfjudge.label.mismatch import find_mismatches
from selfjudge.label.preservation import score_events, search_critical_tokens
from selfjudge.label.score import Case, Scorer, Scores
from selfjudge.models.pair import Pair


class Candidate(NamedTuple):
    """A draft token at one place of a response, with its scores."""

    response: Row
    """Row of the target's original response."""
    case: Case
    scores: Scores
    """Scores of all places of the case."""
    k: int
    """Index of the place in the case."""

    @property
    def prefix(self) -> np.float32:
        """Prefix term of the score."""
        return np.float32(self.scores.prefix[self.k])

    @property
    def suffix(self) -> np.float32:
        """Suffix term of the score."""
        return np.float32(self.scores.suffix[self.k])


def label_by_likelihood(
    pair: Pair,
    config: LabelConfig,
    responses: Sequence[Row],
    scorer: Scorer,
    tau: float,
    notify: Callable[[float], None],
) -> Labels:
    """A token is acceptable if its score is above τ."""
    texts = [(row["prompt_ids"], row["response_ids"], row["finish"] == "length") for row in responses]
    cases = find_mismatches(pair, texts, config.suffix_length)
    candidates = [
        Candidate(response, case, scores, k)
        for response, case, scores in zip(responses, cases, scorer(cases, notify), strict=True)
        for k in range(len(case.places))
    ]
    return make_labels(pair, config, candidates, ({"label": int(c.prefix + c.suffix > tau)} for c in candidates), {})


def label_by_preservation(
    pair: Pair,
    config: LabelConfig,
    responses: Sequence[Row],
    scorer: Scorer,
    data: Path | None,
    notify: Callable[[float], None],
) -> Labels:
    """A token is acceptable if the answer is preserved; on open prompts (autojudge+) the target compares the meanings.

    A position counts in the response that the search had reached: the row names its revision, 0 being the original.
    """
    originals = find_originals(pair, config, responses, data)
    events = search_critical_tokens(pair, config, originals, most=config.substitutions, notify=notify)
    candidates: list[Candidate] = []
    verdicts: list[Row] = []
    revisions: dict[str, dict[tuple[int, ...], int]] = {}
    for event, (case, scores, k) in zip(events, score_events(scorer, events), strict=True):
        original = event.substitution.original
        numbers = revisions.setdefault(original.row["prompt_id"], {original.response: 0})
        revision = numbers.setdefault(event.substitution.response, len(numbers))
        candidates.append(Candidate(original.row, case, scores, k))
        verdicts.append({"label": int(event.kept), "revision": revision})
    counts = {
        "target_tokens": sum(event.tokens for event in events),
        "searched": len(originals),
        "left_out": len(responses) - len(originals),
        "unclear_verdicts": sum(check.unclear for check in {original.check for original in originals}),
    }
    changed = [
        {"prompt_id": name, "revision": number, "response_ids": list(tokens)}
        for name, numbers in revisions.items()
        for tokens, number in numbers.items()
        if number
    ]
    return make_labels(pair, config, candidates, verdicts, counts, changed)


def make_labels(
    pair: Pair,
    config: LabelConfig,
    candidates: Sequence[Candidate],
    verdicts: Iterable[Row],
    counts: dict[str, int],
    revisions: Sequence[Row] = (),
) -> Labels:
    """Rows and row-aligned arrays of the candidates whose scores are finite; the others are counted.

    `verdicts` have the label of each candidate and whatever else the method stores.
    """
    rows: list[Row] = []
    kept: list[tuple[Scores, int]] = []
    for candidate, verdict in zip(candidates, verdicts, strict=True):
        case, place = candidate.case, candidate.case.places[candidate.k]
        prefix, suffix = float(candidate.prefix), float(candidate.suffix)
        if not np.isfinite(prefix + suffix):
            continue
        kept.append((candidate.scores, candidate.k))
        rows.append(
            {
                "prompt_id": candidate.response["prompt_id"],
                "source": candidate.response["source"],
                "position": len(case.prompt) + place,
                "target_token": case.response[place],
                "draft_token": case.drafts[candidate.k],
                "prefix_score": round(prefix, 5),
                "suffix_score": round(suffix, 5),
                "score": round(prefix + suffix, 5),
                "method": config.method,
                **verdict,
            }
        )
    arrays = vars(Scores.gather(kept, config.suffix_length, pair.hidden_size)).copy()
    for name in ("hidden_target", "hidden_draft", "hidden_before"):
        arrays[name] = arrays[name].astype(config.hidden_dtype)
    if not config.previous:
        del arrays["hidden_before"]
    return Labels(rows, arrays, {**counts, "not_finite": len(candidates) - len(rows)}, list(revisions))
