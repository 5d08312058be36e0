"""Mismatches: where the draft, reading the target's response, would have said something else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile

import torch
from torch import Tensor

from selfjudge.decoding.plain import respond
from selfjudge.engine.teacher_forced import Sequences, head_choices, logit_rows, logits_of, teacher_forced
from selfjudge.label.score import Case
from selfjudge.models.eagle import EagleHead
from selfjudge.models.pair import Pair
from selfjudge.models.tokens import context_window

NOTHING = "there is no mismatch to label: the draft says what the target says (is it the same model?)"


@torch.no_grad()
def draft_tokens(pair: Pair, sequences: Sequences) -> list[list[int]]:
    """The draft's most likely token at every place of every response; past its context window it has no say."""
    window = pair.window
    tokens_of: list[list[int]] = [list(response) for _, response in sequences]
    seen = [(prompt, response[: max(0, window - len(prompt))]) for prompt, response in sequences]
    readable = [i for i, (_, response) in enumerate(seen) if response]
    for part, choices in _choices(pair, [seen[i] for i in readable]):
        tokens, at = choices.tolist(), 0
        for i in (readable[p] for p in part):
            size = len(seen[i][1])
            tokens_of[i][:size] = tokens[at : at + size]
            at += size
    return tokens_of


def _choices(pair: Pair, sequences: Sequences) -> Iterator[tuple[list[int], Tensor]]:
    """Indices of sequences and, for all tokens of their answers in that order, what the draft would say there [R]."""
    draft, vocabulary = pair.draft, pair.target.get_output_embeddings().weight.shape[0]
    assert draft is not None
    if isinstance(draft, EagleHead):
        yield from head_choices(draft, pair.target, sequences)
        return
    for part, hidden in teacher_forced(draft, sequences):
        pieces = hidden.split(logit_rows(draft))
        yield part, torch.cat([logits_of(draft, piece)[:, :vocabulary].argmax(-1) for piece in pieces])


def mismatches(
    response: Sequence[int], drafts: Sequence[int], special: frozenset[int], *, suffix_length: int, cut: bool
) -> list[int]:
    """Places that can be labelled: tokens differ, none is special, and not the last one.

    In a response that the length limit `cut`, places with fewer than `suffix_length` tokens after them are left out.
    """
    end = len(response) - 1
    if cut:
        end = min(end, len(response) - suffix_length)
    return [i for i in range(max(0, end)) if differ(response[i], drafts[i], special)]


def differ(own: int, draft: int, special: frozenset[int]) -> bool:
    """Do the two say something else, and neither a special token? Those are the guard's."""
    return own != draft and own not in special and draft not in special


def find_mismatches(
    pair: Pair, responses: Sequence[tuple[Sequence[int], Sequence[int], bool]], suffix_length: int
) -> list[Case]:
    """What can be labelled in each response: prompt, response, and whether the length limit cut it."""
    special = frozenset(pair.special_ids)
    drafts = draft_tokens(pair, [(prompt, response) for prompt, response, _ in responses])
    cases = []
    for (prompt, response, cut), choices in zip(responses, drafts, strict=True):
        places = mismatches(response, choices, special, suffix_length=suffix_length, cut=cut)
        cases.append(Case(prompt, response, places, [choices[i] for i in places]))
    return cases


def with_lookahead(pair: Pair, cases: Sequence[Case], count: int, *, batch: int) -> list[Case]:
    """The same cases with what the draft would say next: `count` tokens, fewer at the end of its window."""
    draft = pair.standalone_draft("`lookahead`").causal_lm
    window = min(context_window(draft), context_window(pair.target) - count)
    draft_size, target_size = (m.get_input_embeddings().weight.shape[0] for m in (draft, pair.target))
    starts = [
        (number, k, [*case.prompt, *case.response[:place], token])
        for number, case in enumerate(cases)
        for k, (place, token) in enumerate(zip(case.places, case.drafts, strict=True))
    ]
    fitting = [start for start in starts if len(start[2]) < window and max(start[2]) < draft_size]
    ahead: list[list[list[int]]] = [[[] for _ in case.places] for case in cases]
    for index, tokens, _ in respond(
        draft, [ids for _, _, ids in fitting], eos_ids=(), max_new_tokens=count, batch=batch
    ):
        number, k, _ = fitting[index]
        ahead[number][k] = list(takewhile(lambda token: token < target_size, tokens))  # a draft may have more tokens
    return [replace(case, ahead=tokens) for case, tokens in zip(cases, ahead, strict=True)]
