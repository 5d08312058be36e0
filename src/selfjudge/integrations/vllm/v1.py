"""vLLM's first model runner (`vllm.v1.worker.gpu_model_runner`): CPUs, and draft models on GPUs up to 0.30.

Logits, drafts and hidden states are in `execute_model_state` before sampling begins: the rules are asked there, on the
target's own rows. The rejection sampler then works on a copy of the logits, where approved drafts are marked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu_model_runner import ExecuteModelState

from selfjudge.decoding.rules import AcceptanceRule
from selfjudge.integrations.vllm.approval import Agree, Approval
from selfjudge.integrations.vllm.config import RequestRules
from selfjudge.integrations.vllm.counts import Counts
from selfjudge.integrations.vllm.plan import LastPlan, LastRows, Rows
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
    """[n] which drafts the rules approved; None where all requests are lossless."""
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

    def __init__(self, runner: Any, approval: Approval, counts: Counts, rules: RequestRules, agree: Agree) -> None:
        has(runner, "execute_model_state", "input_batch", "requests", "rejection_sampler")
        self.runner, self.approval, self.rules, self.agree = runner, approval, rules, agree
        self.step, sampler = Verification(), runner.rejection_sampler
        exactly(sampler, RejectionSampler)
        sampler.__class__ = JudgeSampler  # its attributes stay as this version's constructor made them
        sampler.approval, sampler.counts, sampler.step = approval, counts, self.step
        self._rows, self._plan = LastRows(), LastPlan()
        self._params: list[Any] = []
        self._known: dict[str, tuple[Any, AcceptanceRule | None]] = {}

    def before_sampling(self) -> None:
        """Ask the rules about the drafts that are about to be verified."""
        step, state = self.step, self.runner.execute_model_state
        step.clear()
        if state is None or state.spec_decode_metadata is None:
            return
        drafts, rules = state.spec_decode_metadata, self._requested()
        step.rows = rows = self._rows(drafts.num_draft_tokens, drafts.draft_token_ids.device)
        if not any(rules):
            return
        approved = self.approval(
            state.sample_hidden_states,
            state.logits,
            drafts.target_logits_indices,
            drafts.draft_token_ids,
            self._plan(rules, rows, self.rules.gamma),
        )
        step.approved = self.agree(approved)

    def _requested(self) -> list[AcceptanceRule | None]:
        """The rules of the batch; looked up when the batch changes."""
        names, requests = self.runner.input_batch.req_ids, self.runner.requests
        params = [requests[name].sampling_params for name in names]
        if params != self._params:
            before, self._known = self._known, {}
            for name, current in zip(names, params, strict=True):
                last = before.get(name)
                self._known[name] = last if last and last[0] is current else (current, self.rules(current))
            self._params = params
        return [rule for _, rule in self._known.values()]
