"""Which drafts the judge approves, as a mask over flat rows and as a mark on their logits; does not import vLLM.

vLLM verifies the drafts of all requests as one flat list of n rows; request `owner[i]` owns row i.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from selfjudge.judge.features import token_features
from selfjudge.judge.model import Judge
from selfjudge.ops.argmax import argmax_checked
from selfjudge.ops.judge_score import approvals

Agree = Callable[[Tensor], Tensor]
"""Makes all ranks of a tensor-parallel group hold the same mask."""
MARK = 1.0e4
"""Above every logit and far from what float32 cannot hold, at any sensible temperature."""


class Approval:
    """The judge and the guard of special tokens, on one device."""

    def __init__(self, judge: Judge, special: Sequence[int], device: torch.device) -> None:
        self.judge = judge.to(device)
        self.special = torch.tensor(list(special), dtype=torch.long, device=device)
        self.fused = self.judge.fused() if device.type == "cuda" else None

    def __call__(
        self, hidden: Tensor, logits: Tensor, at: Tensor, drafts: Tensor, theta: float | Tensor, owner: Tensor
    ) -> Tensor:
        """[n] which drafts the judge approves, as the rule `judged` does.

        Row `at[i]` of the target's logits [m, V] predicts draft i; the row after it of the states [m, H] has read that
        draft. Never where there is no draft (−1), at special tokens, or where numbers are broken.
        """
        if self.fused is not None:
            return approvals(self.fused, hidden, logits, at, drafts, theta, self.special)
        before, hidden, logits = hidden[at], hidden[at + 1], logits[at]
        drafted, drafts = drafts >= 0, drafts.long().clamp_min(0)
        choice, broken = argmax_checked(logits)
        x = token_features(hidden, before, logits, drafts, self.judge.config.features, owner, choice)
        score = self.judge.within_limit(self.judge.score(x), logits, drafts, choice)
        regular = ~broken & hidden.isfinite().all(-1)
        return (score > theta) & drafted & regular & ~self._special(drafts) & ~self._special(choice)

    def mark(self, logits: Tensor, drafts: Tensor, approved: Tensor) -> Tensor:
        """Raise approved drafts above all other logits of the rows [n, V] they are verified with, in place.

        A greedy check then finds the draft to be the most likely token; a random one finds its probability to be 1.
        Banned tokens (−inf) stay banned. The guard applies to the most likely token of these rows, too.
        Returns flags [2, n]: which drafts were raised, and which were the most likely token before.
        """
        if self.fused is not None:
            from selfjudge.integrations.vllm.approval_triton import mark

            return mark(logits, drafts, approved, self.special, MARK)
        choice, _ = argmax_checked(logits)
        drafted, drafts = drafts >= 0, drafts.long().clamp_min(0)
        at = logits.gather(1, drafts[:, None]).squeeze(1)
        raised = approved & drafted & (at > -math.inf) & ~self._special(choice)
        logits.scatter_(1, drafts[:, None], torch.where(raised, MARK, at)[:, None])
        return torch.stack([raised, drafted & (choice == drafts)])

    def warm_up(self, vocabulary: int, dtype: torch.dtype) -> None:
        """Compile the kernels before the first request, for rows of this width."""
        if self.fused is None:
            return
        device = self.special.device
        states = torch.zeros((2, self.judge.config.hidden_size), dtype=dtype, device=device)
        logits = torch.zeros((2, vocabulary), dtype=dtype, device=device)
        first = torch.zeros(1, dtype=torch.int32, device=device)
        for theta in (1.0, torch.ones(1, device=device)):  # the same for all requests, and one for each
            refused = self(states, logits, first, first, theta, first)
        self.mark(logits[:1].float(), first, refused)

    def _special(self, tokens: Tensor) -> Tensor:
        """[n] which tokens are special; `torch.isin` would sort, and wait for the device."""
        return (tokens[:, None] == self.special).any(-1)


@dataclass(frozen=True)
class Rows:
    """Which of R requests owns each of n flat rows."""

    owner: Tensor
    """[n] the request of each row."""
    place: Tensor
    """[n] its index within the request's block."""
    counts: Tensor
    """[R] drafts of each request."""

    @classmethod
    def of(cls, counts: Tensor, total: int) -> Rows:
        """From the drafts of each request [R] on the device, and their sum on the host: nothing waits."""
        requests = torch.arange(len(counts), device=counts.device)
        owner = torch.repeat_interleave(requests, counts, output_size=total)
        first = counts.cumsum(0) - counts
        return cls(owner, torch.arange(total, device=counts.device) - first[owner], counts)

    @cached_property
    def predicting(self) -> Tensor:
        """[n] the rows of logits that predict a draft, where each request owns one more row, its last."""
        return torch.arange(len(self.owner), device=self.owner.device) + self.owner

    def leading(self, flags: Tensor) -> Tensor:
        """[R] how many flags [n] of each request's block are true before the first false one."""
        stops = torch.where(flags, self.counts[self.owner], self.place)
        return self.counts.scatter_reduce(0, self.owner, stops, "amin")


class LastRows:
    """The rows of a step. Most steps have those of the step before: then nothing is computed."""

    def __init__(self) -> None:
        self._last: tuple[list[int], Rows] | None = None

    def __call__(self, counts: list[int], device: torch.device) -> Rows:
        if self._last is None or self._last[0] != counts:
            on_device = torch.tensor(counts).to(device, non_blocking=True)
            self._last = counts, Rows.of(on_device, sum(counts))
        return self._last[1]
