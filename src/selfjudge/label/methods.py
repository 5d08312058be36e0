"""What makes a draft token acceptable: likelihood (selfjudge), or a preserved answer (autojudge, autojudge+)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from selfjudge.judge.config import LOOKAHEAD
from selfjudge.label.config import LabelConfig
from selfjudge.label.folder import Arrays, Labels, Row
from selfjudge.label.mismatch import find_mismatches, with_lookahead
from selfjudge.label.preservation import (
    Check,
    Search,
    meaning_check,
    score_events,
    search,
    start_open_searches,
    start_searches,
    task_check,
)
from selfjudge.label.score import Case, Scorer, Scores
from selfjudge.models.pair import Pair
from selfjudge.prompts.sources import PromptRecord
from selfjudge.tasks.registry import is_task, load_task


def label_by_likelihood(
    pair: Pair,
    config: LabelConfig,
    responses: Sequence[Row],
    scorer: Scorer,
    tau: float,
    notify: Callable[[float], None],
) -> Labels:
    """A token is acceptable if its score is above τ; rows whose score is not a number are left out and counted."""
    texts = [(row["prompt_ids"], row["response_ids"], row["finish"] == "length") for row in responses]
    cases = find_mismatches(pair, texts, config.suffix_length)
    if config.lookahead:
        cases = with_lookahead(pair, cases, LOOKAHEAD, batch=config.batch_size)
    all_scores = scorer(cases, notify)
    rows: list[Row] = []
    finite: list[bool] = []
    for response, case, scores in zip(responses, cases, all_scores, strict=True):
        terms = np.stack([scores.prefix(), scores.suffix(config.suffix_length)], 1)
        for k, (prefix, suffix) in enumerate(terms.tolist()):
            finite.append(bool(np.isfinite(terms[k].sum())))
            if finite[-1]:
                label = int(terms[k].sum() > tau)
                rows.append(label_row(response, case, k, (prefix, suffix), label, config.method))
    arrays = label_arrays(all_scores, config, pair.hidden_size)
    mask = np.asarray(finite, bool)
    return Labels(rows, {name: array[mask] for name, array in arrays.items()}, {"not_finite": len(mask) - len(rows)})


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
    searches, unclear = _search(pair, config, responses, data, notify)
    if pair.target.device.type == "cuda":
        pair.target_model.release()
    owners = {row["prompt_id"]: row for row in responses}
    rows, parts = [], []
    revisions: dict[str, dict[tuple[int, ...], int]] = {}
    for owner, event, scores, k in score_events(scorer, searches):
        response = owners[owner.prompt_id]
        numbers = revisions.setdefault(owner.prompt_id, {tuple(response["response_ids"]): 0})
        revision = numbers.setdefault(event.response, len(numbers))
        own = Scores(**{f.name: getattr(scores, f.name)[k : k + 1] for f in fields(Scores)})
        terms = float(own.prefix()[0]), float(own.suffix(config.suffix_length)[0])
        if not np.isfinite(sum(terms)):
            continue
        case = Case(response["prompt_ids"], event.response, [event.place], [event.draft])
        rows.append({**label_row(response, case, 0, terms, int(event.kept), config.method), "revision": revision})
        parts.append(own)
    counts = {
        "target_tokens": sum(event.tokens for s in searches for event in s.events),
        "searched": len(searches),
        "left_out": len(responses) - len(searches),
        "unclear_verdicts": unclear,
    }
    changed = [
        {"prompt_id": name, "revision": number, "response_ids": list(tokens)}
        for name, numbers in revisions.items()
        for tokens, number in numbers.items()
        if number
    ]
    return Labels(rows, label_arrays(parts, config, pair.hidden_size), counts, changed)


def _search(
    pair: Pair, config: LabelConfig, responses: Sequence[Row], data: Path | None, notify: Callable[[float], None]
) -> tuple[list[Search], int]:
    """The searches of all finished responses, source by source, and how many verdicts on meanings were unclear."""
    searches: list[Search] = []
    unclear: list[int] = []
    for source in searches_by_source(pair, config, responses, data, unclear.append):

        def progress(done: int, tried: int, before: int = len(searches)) -> None:
            notify((before + done) / len(responses))

        search(
            pair,
            source.searches,
            source.check,
            max_new_tokens=config.max_new_tokens,
            batch=config.batch_size,
            most=config.substitutions,
            notify=progress,
        )
        searches += source.searches
    return searches, sum(unclear)


class Source(NamedTuple):
    """The responses to the prompts of one source."""

    searches: list[Search]
    """Of those that are finished and have an answer."""
    check: Check
    """How answers are compared."""
    is_open: bool
    """Whether there is no right answer."""
    runs_programs: bool
    """Whether the check runs programs, and no model."""


def searches_by_source(
    pair: Pair, config: LabelConfig, responses: Sequence[Row], data: Path | None, unparsed: Callable[[int], None]
) -> Iterator[Source]:
    """The responses, source by source. `unparsed` hears how many verdicts of the target on meanings were unclear."""
    for name in sorted({row["source"] for row in responses}):
        part = [row for row in responses if row["source"] == name and row["finish"] == "eos"]
        if is_task(name) and load_task(name).checkable:
            source = load_task(name, data, allow_unsafe=config.allow_unsafe)
            records = [PromptRecord(row["prompt_id"], name, row["request"], row["row"]) for row in part]
            prompts, answers = ([row[key] for row in part] for key in ("prompt_ids", "response_ids"))
            searches = start_searches(pair, source, records, prompts, answers)
            yield Source(searches, task_check(source), is_open=False, runs_programs=source.runs_programs)
        else:
            check = meaning_check(pair, batch=config.batch_size, unparsed=unparsed)
            yield Source(start_open_searches(pair, part), check, is_open=True, runs_programs=False)


def label_row(response: Row, case: Case, k: int, terms: tuple[float, float], label: int, method: str) -> Row:
    """The label of the k-th place of a case; `terms` are the prefix and the suffix term of its score."""
    place = case.places[k]
    return {
        "prompt_id": response["prompt_id"],
        "source": response["source"],
        "position": len(case.prompt) + place,
        "target_token": case.response[place],
        "draft_token": case.drafts[k],
        "prefix_score": round(terms[0], 5),
        "suffix_score": round(terms[1], 5),
        "score": round(sum(terms), 5),
        "label": label,
        "method": method,
    }


def label_arrays(all_scores: Sequence[Scores], config: LabelConfig, hidden_size: int) -> Arrays:
    """Scores and states of all rows, row-aligned."""
    lookahead = LOOKAHEAD if config.lookahead else 0
    empty = Scores.empty(config.suffix_length, hidden_size, lookahead)
    arrays: dict[str, Any] = {
        f.name: np.concatenate([getattr(empty, f.name), *(getattr(scores, f.name) for scores in all_scores)])
        for f in fields(Scores)
    }
    for name in ("hidden_target", "hidden_draft", "hidden_before"):
        arrays[name] = arrays[name].astype(config.hidden_dtype)
    for name, is_kept in (("lookahead", config.lookahead), ("hidden_before", config.previous)):
        if not is_kept:
            del arrays[name]
    return arrays
