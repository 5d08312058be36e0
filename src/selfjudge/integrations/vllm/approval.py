"""Which drafts the rules of requests accept, as a mask over flat rows and as a mark on their logits.

Does not import vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from selfjudge.decoding.rules import AcceptanceRule, Judged, Margin
from selfjudge.integrations.vllm.plan import NAN, DraftRows, Plan
from selfjudge.judge.model import Judge
from selfjudge.ops.argmax import argmax_checked, has_triton
from selfjudge.types import Block

Agree = Callable[[Tensor], Tensor]
"""Makes all ranks of a tensor-parallel group hold the same mask."""
MARK = 1.0e4
"""Above every logit and far from what float32 cannot hold, at any sensible temperature."""


class Approval:
    """Decides about drafts by the rules of their requests, on one device; special tokens are left to the target."""

    def __init__(self, judge: Judge | None, special: Sequence[int], device: torch.device) -> None:
        self.judge = None if judge is None else judge.to(device)
        self.special = torch.tensor(list(special), dtype=torch.long, device=device)
        self.fused = device.type == "cuda" and has_triton()
        self.weights = None if judge is None or not self.fused else judge.kernel_weights()

    def __call__(self, hidden: Tensor, logits: Tensor, at: Tensor, drafts: Tensor, plan: Plan) -> Tensor:
        """[n] which drafts their rules accept, as the rules do in our own loop.

        Row `at[i]` of the target's logits [m, V] predicts draft i; the row after it of the states [m, H] has read that
        draft. Never where there is no draft (−1), at special tokens, or where numbers are non-finite. Where alignment
        accepts a draft anyway, the mask may say either.
        """
        if not len(drafts):  # a step of prompts alone
            return drafts >= 0
        if self.fused and plan.codes is not None and (self.weights is not None or not plan.judged):
            from selfjudge.integrations.vllm.approval_triton import approvals

            return approvals(self.weights, hidden, logits, at, drafts, plan, self.special)
        before, states, logits = hidden[at], hidden[at + 1], logits[at]
        drafted, drafts = drafts >= 0, drafts.long().clamp_min(0)
        choice, non_finite = argmax_checked(logits)
        scores = None
        if plan.judged:
            assert self.judge is not None
            scores = self.judge.score_drafts(states, before, logits, drafts, choice)
        has_say = drafted & ~non_finite & ~self._special(drafts) & ~self._special(choice)
        approved = torch.zeros_like(drafted)
        for rule, (requests, own, block_of) in plan.members.items():
            if scores is not None and isinstance(rule, Judged) and rule.price is None and not rule.confirm:
                accepted = scores > rule.theta  # of sampled requests, too: whatever alignment says
            else:
                known = Block(
                    drafts, logits, scores=None if rule.judge is None else scores, argmax=(choice, non_finite)
                )
                judged = rule(_blocks(known, drafted, requests, plan)).judged
                accepted = judged[block_of[plan.rows.owner], plan.rows.place]
            approved = approved | (own & has_say & accepted)
        return approved

    def mark(self, logits: Tensor, drafts: Tensor, approved: Tensor) -> Tensor:
        """Raise approved drafts above all other logits of the rows [n, V] they are verified with, in place.

        A greedy check then finds the draft to be the most likely token; a random one finds its probability to be 1.
        Banned tokens (−inf) stay banned. The guard applies to the most likely token of these rows, too.
        Returns flags [2, n]: which drafts were raised, and which were the most likely token before.
        """
        if self.fused:
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
        if not self.fused:
            return
        device = self.special.device
        width = 1 if self.judge is None else self.judge.config.hidden_size
        states = torch.zeros((2, width), dtype=dtype, device=device)
        logits = torch.zeros((2, vocabulary), dtype=dtype, device=device)
        first = torch.zeros(1, dtype=torch.int32, device=device)
        rows = DraftRows.of(torch.ones(1, dtype=torch.long, device=device), 1)
        asked: list[AcceptanceRule] = [Margin(0.0), Margin(price=0.0)]  # with and without a look ahead
        if self.judge is not None:
            asked += [Judged(self.judge, 1.0), Judged(self.judge, price=0.0)]
        for rule in asked:
            approved = self(states, logits, first, first, Plan([rule], rows, 1))
        self.mark(logits[:1].float(), first, approved)

    def _special(self, tokens: Tensor) -> Tensor:
        """[n] which tokens are special; `torch.isin` would sort, and wait for the device."""
        return (tokens[:, None] == self.special).any(-1)


def _blocks(flat: Block, drafted: Tensor, requests: Tensor, plan: Plan) -> Block:
    """The flat rows of these requests as one Block. A missing draft becomes a token that is not the target's, in a row
    that counts as non-finite: every rule rejects it, as every walk ends there."""
    assert flat.argmax is not None
    index, outside = (part[requests] for part in plan.index)
    missing = outside[:, :-1] | ~drafted[index[:, :-1]]
    choice, non_finite = (part[index] for part in flat.argmax)
    non_finite[:, :-1] |= missing
    another = (choice[:, :-1] + 1) % flat.target_logits.shape[-1]
    drafts = torch.where(missing, another, flat.draft_tokens[index[:, :-1]])
    scores = None if flat.scores is None else torch.where(missing, NAN, flat.scores[index[:, :-1]])
    return Block(drafts, flat.target_logits[index], scores=scores, argmax=(choice, non_finite))
