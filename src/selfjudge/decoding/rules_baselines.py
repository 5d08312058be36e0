"""Published relaxed rules, for comparison: JuDi, MARS, ASD, SGLang. Docstrings define each and say what differs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from selfjudge.decoding.rules import EXACT, AcceptanceRule, Layered, compute_margin, gather_tokens, rank_drafts
from selfjudge.types import Block, LazyModule, setting

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch")


@dataclass(frozen=True, eq=False)
class Divergence(AcceptanceRule):
    """KL(p_i ‖ q_i) < threshold, unless the target is confident: p_i(top) > confident leaves it to `exact`.
    JuDi (arXiv 2601.04766), as its code has it: KL of the target from the draft, in nats, at temperature 1. One
    difference: where a draft knows only some tokens, p_i is cut to these; the KL over all tokens would be infinite."""

    name = "kl"
    summary = "the target's distribution is near the draft's: KL(p ‖ q) below the threshold (JuDi)"
    reads_draft = True

    threshold: float = setting(0.3, "Largest divergence in nats", minimum=0)
    confident: float = setting(0.9, "Probability of the target's choice above which alignment decides", minimum=0)
    guard: bool = False
    special: tuple[int, ...] = ()

    def accepts(self, block: Block, logits: Tensor, aligned: Tensor) -> Tensor:
        if block.draft_logits is None or not block.gamma:
            return aligned
        # one position at a time: all at once would need several times the memory of the logits
        near = [self._is_near(logits[:, i], block.draft_logits[:, i]) for i in range(block.gamma)]
        return aligned | torch.stack(near, 1)

    def _is_near(self, logits: Tensor, draft_logits: Tensor) -> Tensor:
        """[B] for logits [B, V] of both models."""
        log_p, log_q = logits.float(), draft_logits.float().log_softmax(-1)
        unsure = log_p.log_softmax(-1).amax(-1).exp() <= self.confident
        log_p = log_p.masked_fill(log_q.isneginf(), -torch.inf).log_softmax(-1)
        terms = torch.where(log_p.isneginf(), 0.0, log_p.exp() * (log_p - log_q))
        return unsure & (terms.sum(-1) < self.threshold)


@dataclass(frozen=True, eq=False)
class LogitRatio(AcceptanceRule):
    """d_i is the target's second choice, and z_i(d_i)/z_i(top) > ratio, both logits positive. MARS (arXiv 2601.15498),
    by raw logits. The paper does not say what holds for other signs, where a ratio means nothing: alignment decides."""

    name = "mars"
    summary = "the draft is the target's second choice, and its logit is near the largest one by their ratio (MARS)"

    ratio: float = setting(0.9, "Smallest ratio of the two largest logits", minimum=0, maximum=1)
    guard: bool = False
    special: tuple[int, ...] = ()

    def accepts(self, block: Block, logits: Tensor, aligned: Tensor) -> Tensor:
        best, own = logits.amax(-1).float(), gather_tokens(logits, block.draft_tokens).float()
        return aligned | ((rank_drafts(logits, block.draft_tokens) <= 1) & (own > 0) & (own > self.ratio * best))


@dataclass(frozen=True, eq=False)
class RegretBudget(AcceptanceRule):
    """A mismatch passes while the answer's regret stays within its budget; r_i = z_i(top) − z_i(d_i) is its regret.
    ASD (arXiv 2608.03447), as its code has it. All of this must hold: the regret of the whole answer is at most
    `budget`; r_i/(γ − i + 1) ≤ rate, since an early mismatch saves more drafts; the block has at most `mismatches`. A
    budget, a rate or a number of 0 is `exact`, bit for bit. The defaults are those of its stable recipe."""

    name = "asd"
    summary = "mismatches pass while their regret in logits stays within a budget of the whole answer (ASD)"

    budget: float = setting(8.0, "Largest sum of regret in an answer", minimum=0)
    rate: float = setting(0.25, "Largest regret for each draft from the mismatch on", minimum=0)
    mismatches: int = setting(2, "Most mismatches in a block", minimum=0)
    guard: bool = False
    special: tuple[int, ...] = ()

    def accepts(self, block: Block, logits: Tensor, aligned: Tensor) -> Tensor:
        if not (self.budget and self.rate and self.mismatches):
            return aligned
        regret = torch.where(aligned, 0.0, compute_margin(block, logits))
        drafts = block.gamma if block.limits is None else block.limits[:, None]
        left = drafts - torch.arange(block.gamma, device=regret.device)  # from each draft on
        total = regret.cumsum(1) if block.spent is None else regret.cumsum(1) + block.spent[:, None]
        affordable = (total <= self.budget) & ((~aligned).long().cumsum(1) <= self.mismatches)
        return aligned | (affordable & (regret <= self.rate * left))

    def spend(self, block: Block, logits: Tensor, judged: Tensor, n: Tensor) -> Tensor:
        emitted = torch.arange(block.gamma, device=n.device) < n[:, None]
        spent = torch.where(judged & emitted, compute_margin(block, logits), 0.0).sum(1)
        return spent if block.spent is None else block.spent + spent


@dataclass(frozen=True, eq=False)
class TwoThresholds(Layered):
    """p_i(d_i) ≥ single, or u < p_i(d_i)/acc: SGLang's speculative-accept-threshold-single and -acc.
    With a temperature it is SGLang's condition for a chain of drafts, on top of our lossless `sampling`, with its
    random number u; at 1 and 1 it is `sampling`, bit for bit (SGLang's own base does not use q). Greedily SGLang
    ignores both; here p_i is that of temperature 1 and u is 1, so that the smaller threshold decides."""

    name = "sglang"
    summary = "the draft's probability reaches a threshold: accept_threshold_single and _acc (SGLang)"

    single: float = setting(0.3, "Smallest probability of a draft", above=0, maximum=1)
    acc: float = setting(1.0, "Divisor of the random number", above=0, maximum=1)
    base: AcceptanceRule = EXACT
    guard: bool = False
    special: tuple[int, ...] = ()

    def accepts(self, block: Block, logits: Tensor, aligned: Tensor) -> Tensor:
        warped = logits.float() if self.sampling is None else self.sampling.warp(logits)
        p = gather_tokens(warped.softmax(-1), block.draft_tokens)
        reach = self.acc if block.uniforms is None else self.acc * block.uniforms[:, :-1]
        return aligned | (p >= self.single) | (p > reach)
