"""Answer preservation (AutoJudge, and AutoJudge+ for prompts without a right answer): which tokens change the answer?

Left to right through a response: put the draft's token at the first mismatch, let the target finish, compare answers.
If the answer is kept, the token did not matter and the new response becomes the current one. Otherwise the token is
critical and the response stays. The searches of many prompts advance together, one continuation each in a batch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from selfjudge.label.checks import Original, Substitution, compare_answers, continue_responses
from selfjudge.label.config import LabelConfig
from selfjudge.label.folder import Labels, Row
from selfjudge.label.mismatch import differ, make_labels, predict_draft_tokens
from selfjudge.label.score import Case, Scorer, Scores
from selfjudge.models.pair import Pair
from selfjudge.types import Tell, ignore


@dataclass(frozen=True)
class Event:
    """A substitution that was tried."""

    substitution: Substitution
    kept: bool  # whether the answer was preserved: then the token is unimportant
    tokens: int  # number of tokens that the target read and wrote to find out


@dataclass
class Search:
    """The state of one response's search."""

    original: Original
    response: tuple[int, ...]
    place: int = 0
    drafts: list[int] = field(default_factory=list)
    """The draft's tokens along the current response; empty when it changed."""
    events: list[Event] = field(default_factory=list)
    done: bool = False


def search_critical_tokens(
    pair: Pair, config: LabelConfig, originals: Sequence[Original], *, most: int | None = None, notify: Tell = ignore
) -> list[Event]:
    """Run the searches of all responses to their ends, or until each has tried `most` substitutions."""
    searches = [Search(original, original.response) for original in originals]
    while waiting := _advance(pair, searches, most):
        tried = [Substitution(s.original, s.response, s.place, s.drafts[s.place]) for s in waiting]
        responses = continue_responses(pair, config, tried)
        kept = compare_answers(tried, responses)
        for search, substitution, response, is_kept in zip(waiting, tried, responses, kept, strict=True):
            search.events.append(Event(substitution, is_kept, len(search.original.prompt) + len(response)))
            search.place += 1
            if is_kept:
                search.response, search.drafts = response, []
        notify(sum(s.done for s in searches) / len(searches))
    return [event for search in searches for event in search.events]


def _advance(pair: Pair, searches: Sequence[Search], most: int | None) -> list[Search]:
    """Move every search to its next mismatch; returns those that are not done."""
    special = frozenset(pair.special_ids)
    active = [s for s in searches if not s.done]
    changed = [s for s in active if not s.drafts]
    sequences = [(s.original.prompt, s.response) for s in changed]
    for search, drafts in zip(changed, predict_draft_tokens(pair, sequences), strict=True):
        search.drafts = drafts
    for search in active:
        search.place = find_next_mismatch(search.response, search.drafts, search.place, special)
        search.done = search.place >= len(search.response) - 1 or len(search.events) == most
    return [s for s in active if not s.done]


def find_next_mismatch(response: Sequence[int], drafts: Sequence[int], place: int, special: frozenset[int]) -> int:
    """The first place from `place` on where the draft differs and no special token is concerned; else the length."""
    places = range(place, len(response))
    return next((i for i in places if differ(response[i], drafts[i], special)), len(response))


def score_events(scorer: Scorer, events: Sequence[Event]) -> list[tuple[Row, Case, Scores]]:
    """The responses that the events were tried in, as cases with their scores; their places are the events in order."""
    rows, cases = [], []
    for (original, response), group in groupby(events, lambda e: (e.substitution.original, e.substitution.response)):
        tried = [event.substitution for event in group]
        rows.append(original.row)
        cases.append(Case(original.prompt, response, [s.place for s in tried], [s.token for s in tried]))
    return list(zip(rows, cases, scorer(cases), strict=True))


def label_by_preservation(
    pair: Pair, config: LabelConfig, originals: Sequence[Original], scorer: Scorer, notify: Tell
) -> Labels:
    """A token is acceptable if the answer is preserved; on open prompts (autojudge+) the target compares the meanings.

    A position counts in the response that the search had reached."""
    events = search_critical_tokens(pair, config, originals, most=config.substitutions, notify=notify)
    verdicts: list[Row] = [{"label": int(event.kept)} for event in events]
    counts = {"target_tokens": sum(event.tokens for event in events)}
    return make_labels(pair, config, score_events(scorer, events), verdicts, counts)
