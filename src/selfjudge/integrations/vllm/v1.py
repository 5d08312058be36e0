"""vLLM's first model runner (`vllm.v1.worker.gpu_model_runner`): CPUs, and draft models on GPUs up to 0.30.

Logits, drafts and hidden states lie in `execute_model_state` before sampling begins: the judge is asked there, on the
target's own rows. The rejection sampler then works on a copy of them, where approved drafts get their mark.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu_model_runner import ExecuteModelState

from selfjudge.integrations.vllm.approval import Agree, Approval, Rows
from selfjudge.integrations.vllm.config import OFF, Thresholds
from selfjudge.integrations.vllm.counts import Counts
from selfjudge.integrations.vllm.signatures import exactly, has, holds, takes


def check() -> None:
    """Refuse a vLLM whose first runner is not the known one."""
    takes(RejectionSampler.forward, ("metadata", "draft_probs", "logits", "sampling_metadata"))
    takes(RejectionSampler.apply_logits_processors, ("logits", "sampling_metadata", "metadata"))
    holds(ExecuteModelState, "logits", "spec_decode_metadata", "sample_hidden_states")
    holds(SpecDecodeMetadata, "draft_token_ids", "num_draft_tokens", "target_logits_indices")


class JudgeSampler(RejectionSampler):
    """vLLM's rejection sampler, in which an approved draft is accepted."""

    approval: Approval
    counts: Counts
    asked: tuple[Rows, Tensor | None] | None = None
    """The rows of this step and which of them the judge approved, if a request wants to know; None outside of a step
    (profiling runs)."""
    marked: tuple[Tensor, Tensor] | None = None

    def apply_logits_processors(self, logits: Tensor, sampling_metadata: Any, metadata: Any) -> Tensor:
        logits = super().apply_logits_processors(logits, sampling_metadata, metadata)
        if self.asked is not None and self.asked[1] is not None:
            self.marked = self.approval.mark(logits, metadata.draft_token_ids, self.asked[1])
        return logits

    def forward(self, metadata: Any, draft_probs: Tensor | None, logits: Tensor, sampling_metadata: Any) -> Any:
        output = super().forward(metadata, draft_probs, logits, sampling_metadata)
        self.count(output.sampled_token_ids)
        return output

    def count(self, sampled: Tensor) -> None:
        """What became of this step's drafts, from the tokens that were sampled [R, γ+1], −1 where there is none."""
        if self.asked is not None:
            rows, _ = self.asked
            accepted = (sampled >= 0).sum(1) - 1  # the last is no draft
            if self.marked is None:
                self.counts.add_lossless(rows, accepted)
            else:
                self.counts.add(rows, accepted, *self.marked)
        self.asked = self.marked = None


class Adapter:
    """Between a runner and its sampler."""

    def __init__(self, runner: Any, approval: Approval, counts: Counts, thresholds: Thresholds, agree: Agree) -> None:
        has(runner, "execute_model_state", "input_batch", "requests", "rejection_sampler")
        self.runner, self.approval, self.thresholds, self.agree = runner, approval, thresholds, agree
        self.sampler = runner.rejection_sampler
        exactly(self.sampler, RejectionSampler)
        self.sampler.__class__ = JudgeSampler  # keeps whatever this version's constructor has made
        self.sampler.approval, self.sampler.counts = approval, counts
        self._known: dict[str, tuple[Any, float]] = {}
        self._last: tuple[list[int], Rows] | None = None
        self._mixed: tuple[Rows, list[float], Tensor] | None = None

    def before_sampling(self) -> None:
        """Ask the judge about the drafts that are about to be verified."""
        self.sampler.asked = self.sampler.marked = None
        state = self.runner.execute_model_state
        if state is None or state.spec_decode_metadata is None:
            return
        drafts = state.spec_decode_metadata
        rows, thresholds = self._rows(drafts), self._wishes()
        if all(theta == OFF for theta in thresholds):
            self.sampler.asked = rows, None
            return
        approved = self.approval(
            state.sample_hidden_states,
            state.logits,
            drafts.target_logits_indices,
            drafts.draft_token_ids,
            self._each(thresholds, rows),
            rows.owner,
        )
        self.sampler.asked = rows, self.agree(approved)

    def _rows(self, drafts: Any) -> Rows:
        """The rows of this step, which mostly are those of the last one: then nothing is computed."""
        if self._last is None or self._last[0] != drafts.num_draft_tokens:
            counts = torch.tensor(drafts.num_draft_tokens).to(drafts.draft_token_ids.device, non_blocking=True)
            self._last = drafts.num_draft_tokens, Rows.of(counts, len(drafts.draft_token_ids))
        return self._last[1]

    def _wishes(self) -> list[float]:
        """θ of each request of the batch, read once."""
        known, self._known = self._known, {}
        for name in self.runner.input_batch.req_ids:
            params = self.runner.requests[name].sampling_params
            found = known.get(name)
            self._known[name] = found if found and found[0] is params else (params, self.thresholds(params))
        return [theta for _, theta in self._known.values()]

    def _each(self, thresholds: list[float], rows: Rows) -> float | Tensor:
        """One θ for all, or [n] where requests differ, as in the last step while nothing changes."""
        if len(set(thresholds)) == 1:
            return thresholds[0]
        if self._mixed is None or self._mixed[0] is not rows or self._mixed[1] != thresholds:
            found = torch.tensor(thresholds).to(rows.owner.device, non_blocking=True)[rows.owner]
            self._mixed = rows, thresholds, found
        return self._mixed[2]
