"""vLLM's first model runner (`vllm.v1.worker.gpu_model_runner`): CPUs, and draft models on GPUs up to 0.30.

Logits, drafts and hidden states are in `execute_model_state` before sampling begins: the judge is asked there, on the
target's own rows. The rejection sampler then works on a copy of the logits, where approved drafts are marked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu_model_runner import ExecuteModelState

from selfjudge.integrations.vllm.approval import Agree, Approval, LastRows, Rows
from selfjudge.integrations.vllm.config import OFF, Thresholds
from selfjudge.integrations.vllm.counts import Counts
from selfjudge.integrations.vllm.signatures import exactly, has, holds, takes


def check() -> None:
    """Refuse a vLLM whose first runner is not the known one."""
    takes(RejectionSampler.forward, ("metadata", "draft_probs", "logits", "sampling_metadata"))
    takes(RejectionSampler.apply_logits_processors, ("logits", "sampling_metadata", "metadata"))
    holds(ExecuteModelState, "logits", "spec_decode_metadata", "sample_hidden_states")
    holds(SpecDecodeMetadata, "draft_token_ids", "num_draft_tokens", "target_logits_indices")


@dataclass
class Verification:
    """What is known of the current step. Not kept in the sampler itself: setting attributes of a module is slow."""

    rows: Rows | None = None
    """None outside of a step (profiling runs)."""
    approved: Tensor | None = None
    """[n] which drafts the judge approved; None where all requests are lossless."""
    flags: Tensor | None = None
    """[2, n] what `Approval.mark` returned."""

    def clear(self) -> None:
        self.rows = self.approved = self.flags = None


class JudgeSampler(RejectionSampler):
    """vLLM's rejection sampler, in which an approved draft is accepted."""

    approval: Approval
    counts: Counts
    step: Verification

    def apply_logits_processors(self, logits: Tensor, sampling_metadata: Any, metadata: Any) -> Tensor:
        logits = super().apply_logits_processors(logits, sampling_metadata, metadata)
        step = self.step
        if step.approved is not None:
            step.flags = self.approval.mark(logits, metadata.draft_token_ids, step.approved)
        return logits

    def forward(self, metadata: Any, draft_probs: Tensor | None, logits: Tensor, sampling_metadata: Any) -> Any:
        output = super().forward(metadata, draft_probs, logits, sampling_metadata)
        step = self.step
        if step.rows is not None:
            self.counts.add(step.rows, output.sampled_token_ids, step.flags)  # vLLM makes new tensors in every step
        step.clear()
        return output


class Adapter:
    """Connects a runner and its sampler: the class of the sampler object is replaced by `JudgeSampler`."""

    def __init__(self, runner: Any, approval: Approval, counts: Counts, thresholds: Thresholds, agree: Agree) -> None:
        has(runner, "execute_model_state", "input_batch", "requests", "rejection_sampler")
        self.runner, self.approval, self.thresholds, self.agree = runner, approval, thresholds, agree
        self.step, sampler = Verification(), runner.rejection_sampler
        exactly(sampler, RejectionSampler)
        sampler.__class__ = JudgeSampler  # its attributes stay as this version's constructor made them
        sampler.approval, sampler.counts, sampler.step = approval, counts, self.step
        self._rows = LastRows()
        self._params: list[Any] = []
        self._known: dict[str, tuple[Any, float]] = {}
        self._theta: float | list[float] = OFF
        self._mixed: tuple[Rows, list[float], Tensor] | None = None

    def before_sampling(self) -> None:
        """Ask the judge about the drafts that are about to be verified."""
        step, state = self.step, self.runner.execute_model_state
        step.clear()
        if state is None or state.spec_decode_metadata is None:
            return
        drafts, theta = state.spec_decode_metadata, self._thresholds()
        step.rows = rows = self._rows(drafts.num_draft_tokens, drafts.draft_token_ids.device)
        if theta == OFF:
            return
        approved = self.approval(
            state.sample_hidden_states,
            state.logits,
            drafts.target_logits_indices,
            drafts.draft_token_ids,
            self._row_thresholds(theta, rows) if isinstance(theta, list) else theta,
            rows.owner,
        )
        step.approved = self.agree(approved)

    def _thresholds(self) -> float | list[float]:
        """θ of all requests of the batch, or of each where they differ; computed when the batch changes."""
        names, requests = self.runner.input_batch.req_ids, self.runner.requests
        params = [requests[name].sampling_params for name in names]
        if params != self._params:
            before, self._known = self._known, {}
            for name, current in zip(names, params, strict=True):
                last = before.get(name)
                self._known[name] = last if last and last[0] is current else (current, self.thresholds(current))
            thresholds = [theta for _, theta in self._known.values()]
            self._params, self._theta = params, thresholds[0] if len(set(thresholds)) == 1 else thresholds
        return self._theta

    def _row_thresholds(self, thresholds: list[float], rows: Rows) -> Tensor:
        """[n] the θ of each row; computed when rows or thresholds change."""
        if self._mixed is None or self._mixed[0] is not rows or self._mixed[1] is not thresholds:
            theta = torch.tensor(thresholds).to(rows.owner.device, non_blocking=True)[rows.owner]
            self._mixed = rows, thresholds, theta
        return self._mixed[2]
