"""What a judge reads: the target's hidden state at a draft token, and log-probabilities of the same pass."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from selfjudge.judge.config import LOOKAHEAD, LOWEST
from selfjudge.types import Block


def block_features(block: Block, features: str) -> Tensor:
    """[B, γ, D] what a judge reads of a Block; row i is the state at d_i, what was said of d_i, the state before."""
    assert block.hidden is not None
    choice = None if block.argmax is None else block.argmax[0][:, :-1]
    at, before = block.hidden[:, 1:], block.hidden[:, :-1]
    return token_features(at, before, block.target_logits[:, :-1], block.draft_tokens, features, choice=choice)


def token_features(
    hidden: Tensor, before: Tensor, logits: Tensor, drafts: Tensor, features: str, owner: Tensor | None = None,
    choice: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """States at drafts and at the tokens before [..., H], rows that predict drafts [..., V], drafts [...] → [..., D].

    The last axis of `drafts` is a block, or several one after another: `owner` [...] then says which. `choice` [...]
    are the most likely tokens, if they are known.
    """
    hidden = hidden.float()
    if features == "hidden":
        return hidden
    parts = [margins(logits, drafts, choice)[..., None]]
    if "lookahead" in features:
        at = logits.gather(-1, drafts[..., None]).squeeze(-1).float()
        parts.append(lookahead_columns(at - logits.float().logsumexp(-1), owner))
    parts = [part.clamp_min(LOWEST) for part in parts]
    if "previous" in features:
        parts.append(before.float())
    return torch.cat([hidden, *parts], -1)


def margins(logits: Tensor, drafts: Tensor, choice: Tensor | None = None) -> Tensor:
    """[...] log p(d) − log p(most likely token) of the drafts [...], from the rows [..., V] that predict them."""
    at = logits.gather(-1, drafts[..., None]).squeeze(-1).float()
    best = logits.amax(-1) if choice is None else logits.gather(-1, choice[..., None]).squeeze(-1)
    return at - best.float()  # Δ log p = Δ logit


def lookahead_columns(log_p: Tensor, owner: Tensor | None = None) -> Tensor:
    """[..., γ] log-probabilities of the drafts → [..., γ, 2K]: those of the K drafts after each, 0 past the end of its
    block, and which there are."""
    block = torch.zeros_like(log_p, dtype=torch.long) if owner is None else owner

    def after(x: Tensor, fill: int) -> Tensor:
        return F.pad(x, (0, LOOKAHEAD), value=fill).unfold(-1, LOOKAHEAD, 1)[..., 1:, :]

    there = after(block, -1) == block[..., None]
    return torch.cat([torch.where(there, after(log_p, 0), 0), there.to(log_p.dtype)], -1)
