"""The judge's score as one kernel, whose parts vLLM's worker uses, too. CUDA only."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Weights(NamedTuple):
    """What the kernel reads of a judge; the inner ones are None for a linear judge."""

    weight: Tensor
    bias: Tensor
    inner_weight: Tensor | None
    inner_bias: Tensor | None
    margin: bool
    """Whether it reads log p(d) − log p(most likely), in the column after the state at the draft."""
    previous: bool
    """Whether it reads the state at the token before, in the last columns."""
    lowest: float
    """The lower bound of that margin."""
    limit: float
    """The score is 0 where the margin is below −limit; inf for none."""


def scores(judge: Weights, hidden: Tensor, logits: Tensor, choice: Tensor, drafts: Tensor) -> Tensor:
    """[B, γ] P(acceptable) of the drafts of blocks; NaN where the state is broken.

    States [B, γ+1, H], logits [B, γ+1, V], their most likely tokens [B, γ+1], drafts [B, γ].
    """
    from selfjudge.ops import judge_score_triton

    with torch.cuda.device(hidden.device):  # kernels are launched on the current device
        return judge_score_triton.scores(judge, hidden, logits, choice, drafts)
