"""Mismatches: where the draft, reading the target's response, would have said something else."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from selfjudge.forced import Sequences, forced, logits_of
from selfjudge.models.pair import Pair

LOGIT_ROWS = 1024  # rows of logits at a time


@torch.no_grad()
def draft_tokens(pair: Pair, sequences: Sequences) -> list[list[int]]:
    """The draft's most likely token at every place of every response."""
    assert pair.draft is not None
    vocabulary = pair.target.get_output_embeddings().weight.shape[0]
    found: list[list[int]] = [[] for _ in sequences]
    for part, hidden in forced(pair.draft, sequences):
        said = [logits_of(pair.draft, piece)[:, :vocabulary].argmax(-1) for piece in hidden.split(LOGIT_ROWS)]
        tokens, at = torch.cat(said).tolist(), 0
        for i in part:
            size = len(sequences[i][1])
            found[i] = tokens[at : at + size]
            at += size
    return found


def mismatches(
    response: Sequence[int], drafts: Sequence[int], special: frozenset[int], *, suffix_length: int, cut: bool
) -> list[int]:
    """Places that can be labelled: tokens differ, none is special, and not the last one.

    In a response that the length limit `cut`, places with fewer than `suffix_length` tokens after them are left out.
    """
    end = len(response) - 1
    if cut:
        end = min(end, len(response) - suffix_length)
    return [
        i for i in range(max(0, end)) if drafts[i] != response[i] and not {drafts[i], response[i]} & special
    ]  # fmt: skip
