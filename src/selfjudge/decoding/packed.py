"""What a cycle hands over to the host: all of it in one integer tensor, so that one copy brings it there."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selfjudge.types import Block, JudgedToken, Verdict


@dataclass(frozen=True, slots=True)
class Packed:
    """The outcome of a cycle in a tensor."""

    table: Tensor
    """[B, 3+2γ] or, with a trace, [B, 3+6γ]: accepted drafts, next token, non-finite; then γ columns of each part."""
    drafted: int
    """γ: draft tokens of each row."""
    traced: bool

    @classmethod
    def pack(cls, block: Block, verdict: Verdict, *, traced: bool = False) -> Packed:
        n, following = verdict.n_accepted[:, None], verdict.next_token[:, None]
        head = [n, following, verdict.non_finite.long().expand_as(n)]
        parts = [block.draft_tokens, verdict.judged.long(), *(_trace(block, verdict) if traced else ())]
        return cls(torch.cat(head + parts, 1), block.gamma, traced)

    def unpack(self) -> CycleOutcome:
        """The columns of a table that has reached the host."""
        table: NDArray[np.int64] = self.table.cpu().numpy()
        parts = table[:, 3:].reshape(len(table), 6 if self.traced else 2, self.drafted)
        trace = parts[:, 2:] if self.traced else None
        return CycleOutcome(table[:, 0], table[:, 1], table[:, 2], parts[:, 0], parts[:, 1], trace)


@dataclass(frozen=True, slots=True)
class CycleOutcome:
    """The outcome of a cycle on the host."""

    accepted: NDArray[Any]
    """[B] accepted drafts."""
    next_token: NDArray[Any]
    """[B] the target's token after them."""
    non_finite: NDArray[Any]
    """[B] 1 where a non-finite logit or hidden state was met."""
    drafts: NDArray[Any]
    """[B, γ] draft tokens."""
    judged: NDArray[Any]
    """[B, γ] 1 where the draft was accepted although the alignment rule rejects it."""
    trace: NDArray[Any] | None
    """[B, 4, γ] see `_trace`."""

    def judged_tokens(self, row: int, tokens: int) -> tuple[JudgedToken, ...]:
        """The judged ones among the first `tokens` of a row, where they were traced."""
        if self.trace is None:
            return ()
        choice, *bits = self.trace[row]
        p, p_choice, score = (part.astype(np.int32).view(np.float32).tolist() for part in bits)
        drafts, choices = self.drafts[row].tolist(), choice.tolist()
        return tuple(
            JudgedToken(j, drafts[j], "", p[j], choices[j], "", p_choice[j], None if math.isnan(score[j]) else score[j])
            for j in np.flatnonzero(self.judged[row, : min(tokens, self.accepted[row])]).tolist()
        )


def _trace(block: Block, verdict: Verdict) -> list[Tensor]:
    """[B, γ] each: the target's choice; as bits of float32 p of the draft, p of the choice, the judge's score."""
    assert block.argmax is not None
    choice = block.argmax[0][:, :-1]
    if choice.device.type == "cpu" and not verdict.judged.any():
        return [torch.zeros_like(choice)] * 4  # nobody will look
    probabilities = block.target_logits[:, :-1].softmax(-1, dtype=torch.float32)
    p, p_choice = probabilities.gather(-1, torch.stack([block.draft_tokens, choice], -1)).unbind(-1)
    score = torch.full_like(p, math.nan) if block.scores is None else block.scores.float()
    return [choice, *(part.view(torch.int32).long() for part in (p, p_choice, score))]
