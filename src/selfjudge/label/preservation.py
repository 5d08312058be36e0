"""Answer preservation (AutoJudge, and AutoJudge+ for prompts without a right answer): which tokens change the answer?

Left to right through a response: put the draft's token at the first mismatch, let the target finish, compare answers.
If the answer is kept, the token did not matter and the new response becomes the current one. Otherwise the token is
critical and the response stays. The searches of many prompts advance together, one continuation each in a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from selfjudge.decoding.plain import respond
from selfjudge.label.mismatch import differ, draft_tokens
from selfjudge.label.score import Case, Scorer, Scores
from selfjudge.models.pair import Pair
from selfjudge.models.tokens import context_window
from selfjudge.prompts.sources import PromptRecord
from selfjudge.tasks.base import Task

VERDICT_TOKENS = 12
SAME_QUESTION = """Two replies to the same request are given. Do they mean the same?

Request:
{request}

Reply 1:
{first}

Reply 2:
{second}

Answer with [SAME] or [DIFFERENT] only."""

Check = Callable[[Sequence["Search"], Sequence[str]], list[bool]]
"""For every search: does this text keep the answer of the original response?"""


@dataclass(frozen=True)
class Event:
    """One substitution that was tried."""

    response: tuple[int, ...]
    """The response it was tried in."""
    place: int
    draft: int
    kept: bool
    """The answer was preserved: the token is unimportant."""
    tokens: int
    """Read and written by the target to find out."""


@dataclass
class Search:
    """The state of one prompt's search."""

    prompt: Sequence[int]
    response: tuple[int, ...]
    request: str
    prompt_id: str = ""
    row: dict[str, Any] | None = None
    answer: Any = None
    """What the check compares with."""
    place: int = 0
    drafts: list[int] = field(default_factory=list)
    """The draft's tokens along the current response; empty when it changed."""
    events: list[Event] = field(default_factory=list)
    done: bool = False


def start_searches(
    pair: Pair,
    task: Task,
    records: Sequence[PromptRecord],
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
) -> list[Search]:
    """Searches of the prompts whose original response has an answer to preserve."""
    texts = [str(pair.tokenizer.decode(list(tokens), skip_special_tokens=True)) for tokens in responses]
    answers = task.extract_many([record.row or {} for record in records], texts)
    return [
        Search(ids, tuple(tokens), str(record.prompt), record.id, record.row, answer)
        for record, ids, tokens, answer in zip(records, prompts, responses, answers, strict=True)
        if answer is not None and task.is_scorable(record.row or {}, answer)
    ]


def start_open_searches(pair: Pair, responses: Sequence[dict[str, Any]]) -> list[Search]:
    """Searches of response rows whose prompts have no right answer: the whole reply is what is compared."""
    return [
        Search(
            row["prompt_ids"],
            tuple(row["response_ids"]),
            _plain_text(row["request"]),
            row["prompt_id"],
            answer=str(pair.tokenizer.decode(row["response_ids"], skip_special_tokens=True)),
        )
        for row in responses
    ]


def _plain_text(request: Any) -> str:
    return request if isinstance(request, str) else "\n".join(str(message.get("content", "")) for message in request)


def search(
    pair: Pair,
    searches: Sequence[Search],
    check: Check,
    *,
    max_new_tokens: int,
    batch: int,
    most: int | None = None,
    notify: Callable[[int, int], None] = lambda done, tried: None,
) -> None:
    """Run all searches to their ends, or until each has tried `most` substitutions; results are in their `events`."""
    special = frozenset(pair.special_ids)
    tried = 0
    while active := [s for s in searches if not s.done]:
        changed = [s for s in active if not s.drafts]
        for state, tokens in zip(changed, draft_tokens(pair, [(s.prompt, s.response) for s in changed]), strict=True):
            state.drafts = tokens
        for state in active:
            state.place = next_mismatch(state.response, state.drafts, state.place, special)
            state.done = state.place >= len(state.response) - 1 or (most is not None and len(state.events) >= most)
        if not (waiting := [s for s in active if not s.done]):
            break
        others = _continuations(pair, waiting, max_new_tokens, batch)
        texts = [str(pair.tokenizer.decode(list(other), skip_special_tokens=True)) for other in others]
        for state, other, kept in zip(waiting, others, check(waiting, texts), strict=True):
            draft, tokens_read = state.drafts[state.place], len(state.prompt) + len(other)
            state.events.append(Event(state.response, state.place, draft, kept, tokens_read))
            if kept:
                state.response, state.drafts = other, []
            state.place += 1
        tried += len(waiting)
        notify(sum(s.done for s in searches), tried)


def _continuations(pair: Pair, waiting: Sequence[Search], max_new_tokens: int, batch: int) -> list[tuple[int, ...]]:
    """Each response with the draft's token in its place, as the target goes on from there."""
    prefixes = [[*s.prompt, *s.response[: s.place], s.drafts[s.place]] for s in waiting]
    left = [max_new_tokens - s.place - 1 for s in waiting]
    others: list[tuple[int, ...]] = [()] * len(waiting)
    for i, tokens, _ in respond(pair.target_model, prefixes, eos_ids=pair.eos_ids, max_new_tokens=left, batch=batch):
        others[i] = (*prefixes[i][len(waiting[i].prompt) :], *tokens)
    return others


def next_mismatch(response: Sequence[int], drafts: Sequence[int], place: int, special: frozenset[int]) -> int:
    """The first place from `place` on where the draft differs and no special token is concerned; else the length."""
    for i in range(place, len(response)):
        if differ(response[i], drafts[i], special):
            return i
    return len(response)


def score_events(scorer: Scorer, searches: Sequence[Search]) -> list[tuple[Search, Event, Scores, int]]:
    """Every event with its scores, against the response it was tried in, and its row there."""
    cases, owners = [], []
    for state in searches:
        groups: dict[tuple[int, ...], list[Event]] = {}
        for event in state.events:
            groups.setdefault(event.response, []).append(event)
        for response, events in groups.items():
            cases.append(Case(state.prompt, response, [e.place for e in events], [e.draft for e in events]))
            owners.append((state, events))
    return [
        (state, event, scores, row)
        for (state, events), scores in zip(owners, scorer(cases), strict=True)
        for row, event in enumerate(events)
    ]


def task_check(task: Task) -> Check:
    """A task's own check: the answer found in the text is that of the original response."""

    def check(searches: Sequence[Search], texts: Sequence[str]) -> list[bool]:
        rows = [s.row or {} for s in searches]
        answers = task.extract_many(rows, texts)
        return [
            answer is not None and task.same(row, s.answer, answer)
            for s, row, answer in zip(searches, rows, answers, strict=True)
        ]

    return check


def meaning_check(pair: Pair, *, batch: int, unparsed: Callable[[int], None] = lambda count: None) -> Check:
    """The target itself says whether two replies mean the same; an unclear verdict counts as different."""

    def check(searches: Sequence[Search], texts: Sequence[str]) -> list[bool]:
        questions = [
            SAME_QUESTION.format(request=s.request, first=s.answer, second=text)
            for s, text in zip(searches, texts, strict=True)
        ]
        verdicts = [False] * len(questions)
        encoded = pair.encode_many(questions)
        fitting = [i for i, ids in enumerate(encoded) if len(ids) + VERDICT_TOKENS <= context_window(pair.target)]
        unclear = len(encoded) - len(fitting)  # too long to be asked
        for place, tokens, _ in respond(
            pair.target_model,
            [encoded[i] for i in fitting],
            eos_ids=pair.eos_ids,
            max_new_tokens=VERDICT_TOKENS,
            batch=batch,
        ):
            index = fitting[place]
            verdict = str(pair.tokenizer.decode(tokens, skip_special_tokens=True)).upper()
            same, different = verdict.find("SAME"), verdict.find("DIFFERENT")
            unclear += same < 0 and different < 0
            verdicts[index] = same >= 0 and (different < 0 or same < different)
        unparsed(unclear)
        return [v or s.answer == t for v, s, t in zip(verdicts, searches, texts, strict=True)]

    return check
