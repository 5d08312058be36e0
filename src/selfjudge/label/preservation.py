"""Answer preservation: which draft tokens change the answer? (AutoJudge, and AutoJudge+ for prompts without a right answer)

Left to right through a response: put the draft's token at the first mismatch, let the target finish, compare answers. If
the answer is kept, the token did not matter and the new response becomes the current one; otherwise it did and the
response stays. The searches of many prompts advance together, one continuation each in a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from selfjudge.decoding.plain import respond
from selfjudge.label.mismatch import differ, draft_tokens
from selfjudge.models.pair import Pair
from selfjudge.models.tokens import context_window

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


def search(
    pair: Pair, searches: Sequence[Search], check: Check, *, max_new_tokens: int, batch: int,
    most: int | None = None, notify: Callable[[int, int], None] = lambda done, tried: None,
) -> None:  # fmt: skip
    """Run all searches to their ends, or until each has tried `most` substitutions; their `events` tell what was found."""
    special = frozenset(pair.special_ids)
    tried = 0
    while active := [s for s in searches if not s.done]:
        stale = [s for s in active if not s.drafts]
        for one, tokens in zip(stale, draft_tokens(pair, [(s.prompt, s.response) for s in stale]), strict=True):
            one.drafts = tokens
        waiting = []
        for one in active:
            one.place = next_mismatch(one.response, one.drafts, one.place, special)
            if one.place >= len(one.response) - 1 or (most is not None and len(one.events) >= most):
                one.done = True
            else:
                waiting.append(one)
        if not waiting:
            break
        prefixes = [[*s.prompt, *s.response[: s.place], s.drafts[s.place]] for s in waiting]
        left = [max_new_tokens - s.place - 1 for s in waiting]
        found: dict[int, list[int]] = {}
        for index, tokens, _ in respond(
            pair.target, prefixes, eos_ids=pair.eos_ids, max_new_tokens=max(left), batch=batch
        ):
            found[index] = tokens[: left[index]]
        others = [(*s.response[: s.place], s.drafts[s.place], *found[i]) for i, s in enumerate(waiting)]
        texts = [str(pair.tokenizer.decode(list(other), skip_special_tokens=True)) for other in others]
        for one, other, kept in zip(waiting, others, check(waiting, texts), strict=True):
            one.events.append(Event(one.response, one.place, one.drafts[one.place], kept, len(one.prompt) + len(other)))
            if kept:
                one.response, one.drafts = other, []
            one.place += 1
        tried += len(waiting)
        notify(sum(s.done for s in searches), tried)


def next_mismatch(response: Sequence[int], drafts: Sequence[int], place: int, special: frozenset[int]) -> int:
    """The first place from `place` on where the draft differs and no special token is concerned; else the length."""
    for i in range(place, len(response)):
        if differ(response[i], drafts[i], special):
            return i
    return len(response)


def asked_target(pair: Pair, *, batch: int, unparsed: Callable[[int], None] = lambda count: None) -> Check:
    """The target itself says whether two replies mean the same; what it does not say clearly counts as different."""

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
            pair.target, [encoded[i] for i in fitting], eos_ids=pair.eos_ids, max_new_tokens=VERDICT_TOKENS, batch=batch
        ):
            index = fitting[place]
            said = str(pair.tokenizer.decode(tokens, skip_special_tokens=True)).upper()
            same, different = said.find("SAME"), said.find("DIFFERENT")
            unclear += same < 0 and different < 0
            verdicts[index] = same >= 0 and (different < 0 or same < different)
        unparsed(unclear)
        return [v or s.answer == t for v, s, t in zip(verdicts, searches, texts, strict=True)]

    return check
