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
from selfjudge.integrations.vllm.config import Thresholds
from selfjudge.integrations.vllm.counts import Counts
from selfjudge.integrations.vllm.signatures import exactly, has, holds, takes


def check() -> None:
    """Refuse a vLLM whose first runner is not the known one."""
    takes(RejectionSampler.forward, ("metadata", "draft_probs", "logits", "sampling_metadata"))
    takes(RejectionSampler.apply_logits_processors, ("logits", "sampling_metadata", "metadata"))
    holds(ExecuteModelState, "logits", "spec_decode_metadata", "sample_hidden_states")
    holds(SpecDecodeMetadata, "draft_token_ids", "num_draft_tokens", "cu_num_draft_tokens", "target_logits_indices")


class JudgeSampler(RejectionSampler):
    """vLLM's rejection sampler, in which an approved draft is accepted."""

    approval: Approval
    counts: Counts
    asked: tuple[Rows, Tensor] | None = None
    """The rows of this step and which of them the judge approved; None outside of a step (profiling runs)."""
    marked: tuple[Tensor, Tensor] | None = None

    def apply_logits_processors(self, logits: Tensor, sampling_metadata: Any, metadata: Any) -> Tensor:
        logits = super().apply_logits_processors(logits, sampling_metadata, metadata)
        if self.asked is not None:
            self.marked = self.approval.mark(logits, metadata.draft_token_ids, self.asked[1])
        return logits

    def forward(self, metadata: Any, draft_probs: Tensor | None, logits: Tensor, sampling_metadata: Any) -> Any:
        output = super().forward(metadata, draft_probs, logits, sampling_metadata)
        if self.asked is not None and self.marked is not None:
            rows, _ = self.asked
            self.counts.add(rows, (output.sampled_token_ids >= 0).sum(1) - 1, *self.marked)  # the last is no draft
        self.asked = self.marked = None
        return output


class Adapter:
    """Between a runner and its sampler."""

    def __init__(self, runner: Any, approval: Approval, counts: Counts, thresholds: Thresholds, agree: Agree) -> None:
        has(runner, "execute_model_state", "input_batch", "requests", "rejection_sampler")
        self.runner, self.approval, self.thresholds, self.agree = runner, approval, thresholds, agree
        self.sampler = runner.rejection_sampler
        exactly(self.sampler, RejectionSampler)
        self.sampler.__class__ = JudgeSampler  # keeps whatever this version's constructor has made
        self.sampler.approval, self.sampler.counts = approval, counts

    def before_sampling(self) -> None:
        """Ask the judge about the drafts that are about to be verified."""
        self.sampler.asked = self.sampler.marked = None
        state = self.runner.execute_model_state
        if state is None or state.spec_decode_metadata is None:
            return
        drafts = state.spec_decode_metadata
        ends = drafts.cu_num_draft_tokens.long()
        rows = Rows.of(torch.diff(ends, prepend=ends.new_zeros(1)), len(drafts.draft_token_ids))
        predicts = drafts.target_logits_indices
        approved = self.approval(
            state.sample_hidden_states[predicts + 1],  # the row after the one that predicts a draft is the draft's own
            state.logits[predicts],
            drafts.draft_token_ids,
            self._theta(rows),
            rows.owner,
        )
        self.sampler.asked = rows, self.agree(approved)

    def _theta(self, rows: Rows) -> float | Tensor:
        """One θ for all, or [n] where requests differ."""
        requests = self.runner.requests
        found = [self.thresholds(requests[name].sampling_params) for name in self.runner.input_batch.req_ids]
        if len(set(found)) == 1:
            return found[0]
        return torch.tensor(found).to(rows.owner.device, non_blocking=True)[rows.owner]
