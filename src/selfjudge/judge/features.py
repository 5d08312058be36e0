"""What a judge reads: the target's hidden state at a draft token, and log-probabilities of the same pass."""

from __future__ import annotations

import torch
from torch import Tensor

from selfjudge.judge.config import LOWEST
from selfjudge.types import Block


def block_features(block: Block, features: str) -> Tensor:
    """[B, γ, D] what a judge reads of a Block: for each d_i the state at it, its margin and the state before it."""
    assert block.hidden is not None
    choice = None if block.argmax is None else block.argmax[0][:, :-1]
    at, before = block.hidden[:, 1:], block.hidden[:, :-1]
    return token_features(at, before, block.target_logits[:, :-1], block.draft_tokens, features, choice=choice)


def token_features(
    hidden: Tensor, before: Tensor, logits: Tensor, drafts: Tensor, features: str, choice: Tensor | None = None
) -> Tensor:
    """States at drafts and at the tokens before [..., H], rows that predict drafts [..., V], drafts [...] → [..., D].

    `choice` [...] are the target's most likely tokens, if they are known.
    """
    margin = margins(logits, drafts, choice) if "margin" in features else None
    return join_features(features, hidden, margin, before)


def join_features(features: str, hidden: Tensor, margin: Tensor | None, before: Tensor | None) -> Tensor:
    """[..., D] the columns that `features` names, from states [..., H] and margins [...]; what it does not name may be
    None."""
    parts = [hidden.float()]
    if "margin" in features:
        assert margin is not None
        parts.append(margin.float().clamp_min(LOWEST)[..., None])
    if "previous" in features:
        assert before is not None
        parts.append(before.float())
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def margins(logits: Tensor, drafts: Tensor, choice: Tensor | None = None) -> Tensor:
    """[...] log p(d) − log p(most likely token) of the drafts [...], from the rows [..., V] that predict them."""
    at = logits.gather(-1, drafts[..., None]).squeeze(-1).float()
    best = logits.amax(-1) if choice is None else logits.gather(-1, choice[..., None]).squeeze(-1)
    return at - best.float()  # Δ log p = Δ logit
