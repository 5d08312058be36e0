"""Consequences: put the draft's token at one mismatch, let the answer be finished, see whether it is kept.

Substitutions are independent: each is the only one in the target's own response. Places are drawn evenly over responses
and, within each, over margins. At a tenth of them the target's own token is put in again: what such a control loses is
the noise of the method. The answer is finished by the target alone, or under a judged rule (on-policy).
"""

from __future__ import annotations

import hashlib
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch

from selfjudge.decoding.admission import Request
from selfjudge.decoding.plain import respond
from selfjudge.decoding.rules import AcceptanceRule
from selfjudge.decoding.text import answer_requests
from selfjudge.engine.teacher_forced import logit_rows, logits_of, teacher_forced
from selfjudge.label.config import LabelConfig
from selfjudge.label.folder import Labels, Row
from selfjudge.label.methods import label_arrays, label_row, searches_by_source
from selfjudge.label.mismatch import find_mismatches
from selfjudge.label.preservation import Check, Search
from selfjudge.label.score import Case, Scorer, Scores
from selfjudge.models.pair import Pair

CONTROL_EVERY = 10  # places
MARGINS = (0.5, 1.0, 2.0, 4.0, 8.0)  # nats that part the groups that places are drawn from
PROGRAMS_AT_A_TIME = 256  # that are tested together; an error waits for those that have begun
SIMILAR_TOKENS = 32  # after the substitution, that a similarity compares
JUDGED_ROWS = 512  # most rows of a batch under a judged rule, which holds two models' caches


@dataclass(frozen=True)
class Substitution:
    """A token put at a place of a response."""

    search: Search
    place: int
    token: int

    @property
    def prefix(self) -> list[int]:
        """Prompt and response up to the token."""
        return [*self.search.prompt, *self.search.response[: self.place], self.token]


@dataclass(frozen=True)
class Outcome:
    """How far new responses keep the original ones."""

    check: Check | None
    """Of their texts, 1 where the answer or the meaning is kept; the similarity of their tokens if None."""
    runs_programs: bool = False

    def compare(
        self, pair: Pair, substitutions: Sequence[Substitution], others: Sequence[tuple[int, ...]]
    ) -> list[float]:
        """From 0 to 1."""
        if self.check is None:
            return similarities(substitutions, others)
        texts = [str(pair.tokenizer.decode(list(tokens), skip_special_tokens=True)) for tokens in others]
        return [float(kept) for kept in self.check([s.search for s in substitutions], texts)]


def label_by_consequences(
    pair: Pair,
    config: LabelConfig,
    responses: Sequence[Row],
    scorer: Scorer,
    policy: AcceptanceRule | None,
    data: Path | None,
    notify: Callable[[float], None],
) -> Labels:
    """A token is acceptable if the answer is kept after it. `policy` finishes the answers, the target alone if None.

    Rows have `kept` (from 0 to 1), `control` (was the answer kept after the target's own token? None where that was not
    tried), `margin` in nats and `policy` besides what all methods store.
    """
    searches, outcomes, unclear = _start(pair, config, responses, data)
    if pair.target.device.type == "cuda":
        pair.target_model.release()  # the scorer needs the memory of its engine
    cases = draw_cases(pair, searches, config)
    all_scores = scorer(cases)
    drafts = [
        Substitution(search, place, token)
        for search, case in zip(searches, cases, strict=True)
        for place, token in zip(case.places, case.drafts, strict=True)
    ]
    tried = [*drafts, *(replace(s, token=s.search.response[s.place]) for s in drafts[::CONTROL_EVERY])]
    wanted = [outcome for outcome, case in zip(outcomes, cases, strict=True) for _ in case.places]
    others, kept = finish_and_compare(pair, config, tried, [*wanted, *wanted[::CONTROL_EVERY]], policy, notify)
    controls = [int(k >= config.similarity) for k in kept[len(drafts) :]]
    rows = [
        row | {"kept": round(k, 4), "control": None, "policy": config.policy, "label": int(k >= config.similarity)}
        for row, k in zip(_rows(config, responses, searches, cases, all_scores), kept[: len(drafts)], strict=True)
    ]
    for row, control in zip(rows[::CONTROL_EVERY], controls, strict=True):
        row["control"] = control
    mask = np.isfinite([row["score"] for row in rows]) if rows else np.zeros(0, bool)
    arrays = label_arrays(all_scores, config, pair.hidden_size)
    counts = {
        # as if each were read alone
        "target_tokens": sum(len(s.search.prompt) + len(other) for s, other in zip(tried, others, strict=True)),
        "searched": len(searches),
        "left_out": len(responses) - len(searches),
        "unclear_verdicts": sum(unclear),
        "not_finite": int((~mask).sum()),
        "controls": len(controls),
        "controls_kept": sum(controls),
    }
    finite = [row for row, is_finite in zip(rows, mask, strict=True) if is_finite]
    return Labels(finite, {name: array[mask] for name, array in arrays.items()}, counts)


def _start(
    pair: Pair, config: LabelConfig, responses: Sequence[Row], data: Path | None
) -> tuple[list[Search], list[Outcome], Sequence[int]]:
    """The responses that have something to keep, how each is compared, and a list of unclear verdicts to come."""
    searches: list[Search] = []
    outcomes: list[Outcome] = []
    unclear: list[int] = []
    for source in searches_by_source(pair, config, responses, data, unclear.append):
        searches += source.searches
        by_similarity = source.is_open and config.outcome == "similarity"
        outcomes += [Outcome(None if by_similarity else source.check, source.runs_programs)] * len(source.searches)
    return searches, outcomes, unclear


def _rows(
    config: LabelConfig,
    responses: Sequence[Row],
    searches: Sequence[Search],
    cases: Sequence[Case],
    all_scores: Sequence[Scores],
) -> Iterator[Row]:
    """What all methods store of each place, and its margin; the label is not known yet."""
    owners = {row["prompt_id"]: row for row in responses}
    for search, case, scores in zip(searches, cases, all_scores, strict=True):
        terms = zip(scores.prefix().tolist(), scores.suffix(config.suffix_length).tolist(), strict=True)
        for k, (prefix, suffix) in enumerate(terms):
            row = label_row(owners[search.prompt_id], case, k, (prefix, suffix), 0, config.method)
            yield row | {"margin": round(-prefix, 5)}


def draw_cases(pair: Pair, searches: Sequence[Search], config: LabelConfig) -> list[Case]:
    """The mismatches of each response that are tried: at most `config.substitutions`, all where that is None."""
    window = pair.window
    found = find_mismatches(pair, [(s.prompt, s.response, False) for s in searches], config.suffix_length)
    cases = [_only(case, [k for k, p in enumerate(case.places) if len(case.prompt) + p + 1 < window]) for case in found]
    if config.substitutions is None:
        return cases
    return [
        _only(case, draw(margins, config.substitutions, _random(f"{config.seed}:{search.prompt_id}")))
        for search, case, margins in zip(searches, cases, margins_of(pair, cases), strict=True)
    ]


def _random(text: str) -> np.random.Generator:
    """Random numbers that follow from a text, whatever else is drawn."""
    return np.random.default_rng(int.from_bytes(hashlib.sha256(text.encode()).digest()))


def draw(margins: Sequence[float], most: int, rng: np.random.Generator) -> list[int]:
    """At most `most` indices, ascending: in turn from each group of like margin, at random within it."""
    groups: dict[int, list[int]] = {}
    for index, margin in enumerate(margins):
        groups.setdefault(bisect(MARGINS, margin), []).append(index)
    mixed = [rng.permutation(groups[key]).tolist() for key in rng.permutation(sorted(groups)).tolist()]
    in_turn = [index for layer in zip_longest(*mixed) for index in layer if index is not None]
    return sorted(in_turn[:most])


@torch.no_grad()
def margins_of(pair: Pair, cases: Sequence[Case]) -> list[list[float]]:
    """By how many nats the target prefers its own token to the draft's, at every place of every case."""
    margins: list[list[float]] = [[] for _ in cases]
    model = pair.target
    for part, hidden in teacher_forced(pair.target_model, [(case.prompt, case.response) for case in cases]):
        starts = np.cumsum([0, *(len(cases[i].response) for i in part)]).tolist()
        rows = [start + place for i, start in zip(part, starts, strict=False) for place in cases[i].places]
        tokens = [
            (cases[i].response[place], token)
            for i in part
            for place, token in zip(cases[i].places, cases[i].drafts, strict=True)
        ]
        states = hidden[torch.tensor(rows, dtype=torch.long, device=hidden.device)]
        both = torch.tensor(tokens, dtype=torch.long, device=hidden.device).reshape(-1, 2)
        step = logit_rows(model)
        found = [
            logits_of(model, piece).float().gather(1, ids)
            for piece, ids in zip(states.split(step), both.split(step), strict=True)
        ]
        flat = iter(torch.cat(found).diff(dim=1).neg().squeeze(1).tolist())  # Δ log p = Δ logit
        for i in part:
            margins[i] = [next(flat) for _ in cases[i].places]
    return margins


def finish_and_compare(
    pair: Pair,
    config: LabelConfig,
    substitutions: Sequence[Substitution],
    outcomes: Sequence[Outcome],
    policy: AcceptanceRule | None,
    notify: Callable[[float], None],
) -> tuple[list[tuple[int, ...]], list[float]]:
    """The new responses and how far each keeps the original. Programs may be tested while others are written."""
    others: list[tuple[int, ...]] = [()] * len(substitutions)
    kept = [0.0] * len(substitutions)
    early = {i for i, outcome in enumerate(outcomes) if outcome.runs_programs and has_free_cores(pair)}
    late = [i for i in range(len(substitutions)) if i not in early]
    written = 0

    def write(group: Sequence[int]) -> None:
        nonlocal written
        if not group:
            return

        def progress(share: float) -> None:
            notify((written + share * len(group)) / len(substitutions))

        found = continuations(pair, config, [substitutions[i] for i in group], policy, progress)
        for i, other in zip(group, found, strict=True):
            others[i] = other
        written += len(group)

    def compare(group: Sequence[int]) -> list[float]:
        return outcomes[group[0]].compare(pair, [substitutions[i] for i in group], [others[i] for i in group])

    with _program_thread() as thread:
        write(sorted(early))
        parts = [part for group in _by_outcome(sorted(early), outcomes) for part in _split(group, PROGRAMS_AT_A_TIME)]
        tested = [(part, thread.submit(compare, part)) for part in parts]
        write(late)
        compared = [(group, compare(group)) for group in _by_outcome(late, outcomes)]
        compared += [(part, future.result()) for part, future in tested]
    for group, values in compared:
        for i, value in zip(group, values, strict=True):
            kept[i] = value
    return others, kept


def has_free_cores(pair: Pair) -> bool:
    """Whether programs and the engine do not take each other's time: a time limit might decide a label."""
    return str(pair.target.device.type) == "cuda"


@contextmanager
def _program_thread() -> Iterator[ThreadPoolExecutor]:
    """A thread for programs. After an error it ends with the part that it has begun."""
    thread = ThreadPoolExecutor(1)
    try:
        yield thread
    finally:
        thread.shutdown(cancel_futures=True)


def _by_outcome(places: Sequence[int], outcomes: Sequence[Outcome]) -> list[list[int]]:
    groups: dict[Outcome, list[int]] = {}
    for i in places:
        groups.setdefault(outcomes[i], []).append(i)
    return list(groups.values())


def _split(items: list[int], size: int) -> list[list[int]]:
    return [items[k : k + size] for k in range(0, len(items), size)]


def continuations(
    pair: Pair,
    config: LabelConfig,
    substitutions: Sequence[Substitution],
    policy: AcceptanceRule | None,
    notify: Callable[[float], None] = lambda share: None,
) -> list[tuple[int, ...]]:
    """Each response with its substitution, as it is finished from there."""
    prefixes = [s.prefix for s in substitutions]
    limits = [config.max_new_tokens - s.place - 1 for s in substitutions]
    new: list[Sequence[int]] = [()] * len(substitutions)
    if policy is None:
        done = 0
        for i, tokens, _ in respond(
            pair.target_model, prefixes, eos_ids=pair.eos_ids, max_new_tokens=limits, batch=config.batch_size
        ):
            new[i], done = tokens, done + 1
            notify(done / len(substitutions))
    else:
        order = sorted(range(len(prefixes)), key=lambda i: len(prefixes[i]))  # neighbours of like length
        batch = min(config.batch_size, JUDGED_ROWS)
        for start in range(0, len(order), batch):
            part = order[start : start + batch]
            requests = [Request(prefixes[i], limits[i]) for i in part]
            answers = answer_requests(pair, requests, policy, batch=batch, gamma=config.gamma, trace=False)
            for i, answer in zip(part, answers, strict=True):
                new[i] = answer.tokens
            notify((start + len(part)) / len(order))
    return [(*s.search.response[: s.place], s.token, *tokens) for s, tokens in zip(substitutions, new, strict=True)]


def similarities(substitutions: Sequence[Substitution], others: Sequence[tuple[int, ...]]) -> list[float]:
    """Share of matching tokens among those right after each substitution, as `difflib` finds them."""

    def ratio(s: Substitution, other: tuple[int, ...]) -> float:
        after = slice(s.place + 1, s.place + 1 + SIMILAR_TOKENS)
        return SequenceMatcher(None, s.search.response[after], other[after], autojunk=False).ratio()

    return [ratio(s, other) for s, other in zip(substitutions, others, strict=True)]


def _only(case: Case, chosen: Sequence[int]) -> Case:
    """A case of the chosen places alone."""
    return replace(case, places=[case.places[k] for k in chosen], drafts=[case.drafts[k] for k in chosen])
