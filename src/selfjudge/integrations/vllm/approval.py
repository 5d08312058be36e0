"""Which drafts rules accept, as a mask over flat rows and as a mark on their logits; does not import vLLM. Counts are
kept on the device and shown as Prometheus counters; no step waits for one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selfjudge.decoding.rules import Judged
from selfjudge.integrations.vllm.config import RequestRules
from selfjudge.integrations.vllm.plan import DraftRows, LastPlan, Plan, RequestGuards
from selfjudge.judge.model import Judge
from selfjudge.models.device import send
from selfjudge.ops import argmax_checked, has_triton
from selfjudge.types import Block

COUNTERS = {
    "cycles": "Verified blocks of drafts.",
    "tokens": "Tokens emitted by them: accepted drafts and the target's own token after.",
    "aligned_tokens": "Tokens the same blocks would have emitted losslessly.",
    "judged_tokens": "Drafts that a rule accepted although they were not the target's most likely token.",
}
EVERY = 1.0  # seconds between two reads of the device's counts


def choose_mark(logits: Tensor) -> float:
    """A number above every logit; divided by vLLM's least temperature, 0.01, it fits their dtype, as 0.26 needs it."""
    return 640.0 if logits.dtype == torch.float16 else 1.0e4


@cache
def _counters() -> list[Any]:
    from prometheus_client import Counter

    return [Counter(f"selfjudge:{name}", text, ["model_name", "engine"]) for name, text in COUNTERS.items()]


def count_step(rows: DraftRows, emitted: Tensor, flags: Tensor | None) -> Tensor:
    """The counters [4] of a step that gave requests so many tokens [R]: accepted drafts and one more. Flags [3, n] are
    those of `Approval.mark`: accepted drafts that were not marked count as aligned. None if all are lossless."""
    drafted, accepted = rows.counts > 0, emitted - 1
    accepted_here = aligned = rows.place < accepted[rows.owner]
    cycles = drafted.sum()
    judged = torch.zeros_like(cycles)
    if flags is not None:
        aligned = torch.where(flags[2], flags[1], accepted_here)
        judged = (accepted_here & flags[0] & ~aligned).sum()
    return torch.stack([cycles, (accepted * drafted).sum() + cycles, rows.leading(aligned).sum() + cycles, judged])


class Counts:
    """Totals of one engine, counted on the device; `report` shows them to Prometheus, `read` returns them."""

    def __init__(self, device: torch.device, *labels: str) -> None:
        self.total = torch.zeros(len(COUNTERS), dtype=torch.long, device=device)
        self._labels = labels
        self._shown = [0] * len(COUNTERS)
        self._copy = torch.zeros_like(self.total, device="cpu", pin_memory=device.type == "cuda")
        self._copied, self._idle, self._thread = time.monotonic(), False, ThreadPoolExecutor(1)
        self._noted: list[tuple[Tensor, Any]] = []

    def note(self, emitted: Tensor, ends: Any) -> None:
        """A lossless step gave so many tokens [R] to requests, whose rows end there [R + 1]: counted later."""
        self._noted.append((emitted, ends))
        if len(self._noted) >= 256:
            self.settle()

    def settle(self) -> Tensor:
        """The totals with all that was noted."""
        if self._noted:
            (emitted, ends), self._noted = zip(*self._noted, strict=True), []
            drafted = send(np.concatenate([np.diff(one) > 1 for one in ends]), self.total.device)
            tokens = (torch.cat(emitted) * drafted).sum()
            self.total[:3] += torch.stack([drafted.sum(), tokens, tokens])
        return self.total

    def read(self, *, show: bool = False) -> dict[str, int]:
        """The totals now; waits for the device."""
        totals = self.settle().cpu()
        if show:
            self._thread.submit(self._show, totals, None).result()
        return dict(zip(COUNTERS, totals.tolist(), strict=True))

    def report(self, *, idle: bool) -> None:
        """Called every step. Copies the totals once a second and when the engine becomes idle; a thread waits then."""
        rests, self._idle = idle and not self._idle, idle
        if rests or time.monotonic() - self._copied > EVERY:
            self._copied = time.monotonic()
            self._copy.copy_(self.settle(), non_blocking=True)
            copied = torch.cuda.current_stream().record_event() if self.total.is_cuda else None
            self._thread.submit(self._show, self._copy, copied)

    def _show(self, totals: Tensor, copied: torch.Event | None) -> None:
        if copied is not None:
            copied.synchronize()
        before, self._shown = self._shown, totals.tolist()  # read once: the next copy may arrive meanwhile
        for counter, old, new in zip(_counters(), before, self._shown, strict=True):
            counter.labels(*self._labels).inc(max(0, new - old))


class Approval:
    """Decides about drafts by the rules of their requests, on one device; special tokens are left to the target."""

    def __init__(self, judge: Judge | None, special: Sequence[int], device: torch.device) -> None:
        self.judge = None if judge is None else judge.to(device)
        whole = 1 << (len(special) - 1).bit_length() if special else 0  # kernels read a power of two
        self.special = torch.tensor([special[i % len(special)] for i in range(whole)], dtype=torch.long, device=device)
        self.fused = device.type == "cuda" and has_triton()
        self.weights = None if judge is None else judge.kernel_weights()

    def __call__(
        self, hidden: Tensor, logits: Tensor, at: Tensor, drafts: Tensor, plan: Plan, exact: Tensor | None = None
    ) -> Tensor:
        """[n] which drafts their rules accept, as in our own loop. Row `at[i]` of the target's logits [m, V] predicts
        draft i; the row after it of the states [m, H] has read that draft. Never those in `exact` [n], missing drafts
        (−1), special tokens and non-finite rows. Where alignment accepts a draft anyway, the mask may say either."""
        drafted = drafts >= 0
        if not len(drafts):  # a step of prompts alone
            return drafted
        if self.fused and plan.codes is not None and (self.weights is not None or not plan.judged):
            from selfjudge.integrations.vllm.approval_triton import approvals

            weights = self.weights if plan.judged else None
            return approvals(weights, hidden, logits, at, drafts, plan, exact, self.special)
        before, states, logits = hidden[at], hidden[at + 1], logits[at]
        choice, non_finite = argmax_checked(logits)
        # a missing draft is a token that is not the target's, in a row that counts as non-finite: all rules reject it
        drafts = torch.where(drafted, drafts.long(), (choice + 1) % logits.shape[-1])
        non_finite = non_finite | ~drafted
        exact = torch.zeros_like(drafted) if exact is None else exact
        scores = torch.full_like(drafts, math.nan, dtype=torch.float32)
        if plan.judged:
            assert self.judge is not None
            scores = self.judge.score_drafts(states, before, logits, drafts, choice).masked_fill(~drafted, math.nan)
        accepted, first = [], 0
        for rule, size in zip(plan.rules, plan.sizes, strict=True):
            here, first = slice(first, first + size), first + size
            if rule is None or not size:
                accepted.append(torch.zeros_like(drafted[here]))
            elif isinstance(rule, Judged) and rule.price is None and not rule.confirm:
                accepted.append(scores[here] > rule.theta)  # of sampled requests, too: whatever alignment says
            else:
                with_last = torch.arange(here.start, first + 1, device=at.device).clamp_max(first - 1)
                block = Block(
                    drafts[None, here],
                    logits[None, with_last],  # no rule looks at the row after the last draft
                    scores=scores[None, here] if rule.judge else None,
                    argmax=(choice[None, with_last], non_finite[None, with_last]),
                    exact_only=exact[None, here],
                )
                accepted.append(rule(block).judged[0])
        return torch.cat(accepted) & ~(non_finite | self._special(drafts) | self._special(choice) | exact)

    def mark(self, logits: Tensor, drafts: Tensor, approved: Tensor) -> Tensor:
        """Raise approved drafts above all other logits of the rows [n, V] they are verified with, in place: they become
        the most likely tokens, with a probability of 1. Banned tokens (−inf) stay banned, and the guard applies to the
        most likely token of these rows. Returns flags [3, n]: raised, most likely before, and a draft at all."""
        if self.fused:
            from selfjudge.integrations.vllm.approval_triton import mark

            return mark(logits, drafts, approved, self.special, choose_mark(logits))
        choice, _ = argmax_checked(logits)
        drafted, drafts = drafts >= 0, drafts.long().clamp_min(0)
        at = logits.gather(1, drafts[:, None]).squeeze(1)
        raised = approved & drafted & (at > -math.inf) & ~self._special(choice)
        logits.scatter_(1, drafts[:, None], torch.where(raised, choose_mark(logits), at)[:, None])
        return torch.stack([raised, drafted & (choice == drafts), drafted])

    def _special(self, tokens: Tensor) -> Tensor:
        """[n] which tokens are special; `torch.isin` would sort, and wait for the device."""
        return (tokens[:, None] == self.special).any(-1)


@dataclass
class Verification:
    """What an adapter asks about the drafts of each step, and where it notes what came of them."""

    approval: Approval
    counts: Counts
    rules: RequestRules
    guards: RequestGuards
    agree: Callable[[Tensor], Tensor]  # makes all ranks of a tensor-parallel group hold the same mask
    last: LastPlan = field(default_factory=LastPlan)
