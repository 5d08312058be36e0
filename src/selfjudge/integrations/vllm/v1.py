"""vLLM's first model runner (`vllm.v1.worker.gpu_model_runner`): CPUs, and draft models on GPUs up to 0.30.

Logits, drafts and hidden states are in `execute_model_state` before sampling begins: the rules are asked there, on the
target's own rows. The rejection sampler then works on a copy of the logits, where approved drafts are marked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu_model_runner import ExecuteModelState

from selfjudge.decoding.rules import AcceptanceRule
from selfjudge.integrations.vllm.approval import Agree, Approval
from selfjudge.integrations.vllm.config import RequestRules
from selfjudge.integrations.vllm.counts import Counts
from selfjudge.integrations.vllm.guards import RequestGuards
from selfjudge.integrations.vllm.plan import DraftRows, LastPlan
from selfjudge.integrations.vllm.signatures import exactly, has, holds, takes


def check() -> None:
    """Refuse a vLLM whose first runner is not the known one."""
    takes(RejectionSampler.forward, ("metadata", "draft_probs", "logits", "sampling_metadata"))
    takes(RejectionSampler.apply_logits_processors, ("logits", "sampling_metadata", "metadata"))
    holds(ExecuteModelState, "logits", "spec_decode_metadata", "sample_hidden_states")
    holds(SpecDecodeMetadata, "draft_token_ids", "num_draft_tokens", "target_logits_indices", "logits_indices")


class FirstRunnerSampler(RejectionSampler):
    """vLLM's rejection sampler, in which an approved draft is accepted."""

    adapter: FirstRunnerAdapter

    def apply_logits_processors(self, logits: Tensor, sampling_metadata: Any, metadata: Any) -> Tensor:
        logits = super().apply_logits_processors(logits, sampling_metadata, metadata)
        self.adapter.mark(logits, metadata.draft_token_ids)
        return logits

    def forward(self, metadata: Any, draft_probs: Tensor | None, logits: Tensor, sampling_metadata: Any) -> Any:
        output = super().forward(metadata, draft_probs, logits, sampling_metadata)
        self.adapter.after_sampling(output.sampled_token_ids)
        return output


class FirstRunnerAdapter:
    """Connects a runner and its sampler, whose class is replaced by `FirstRunnerSampler`; holds the current step."""

    def __init__(
        self, runner: Any, approval: Approval, counts: Counts, rules: RequestRules, agree: Agree, guards: RequestGuards
    ) -> None:
        has(runner, "execute_model_state", "input_batch", "requests", "rejection_sampler", "input_ids", "positions")
        self.runner, self.approval, self.counts, self.rules, self.agree = runner, approval, counts, rules, agree
        exactly(runner.rejection_sampler, RejectionSampler)
        runner.rejection_sampler.__class__ = FirstRunnerSampler  # its attributes stay as this version made them
        runner.rejection_sampler.adapter = self
        self._last = LastPlan()
        self.guards = guards
        self._free = list(range(len(guards.state)))
        self._slots: dict[str, int] = {}
        self._slot_column = torch.zeros(0, dtype=torch.long, device=guards.state.device)
        """[R] the slots of the requests of the batch."""
        self._names: list[str] = []
        self._params: list[Any] = []
        self._known: dict[str, tuple[Any, AcceptanceRule | None]] = {}
        self._begin(None)

    def _begin(self, rows: DraftRows | None) -> None:
        self._rows = rows  # None outside of a step (profiling runs)
        self._approved: Tensor | None = None
        """[n] which drafts the rules approved; None where all requests are lossless."""
        self._flags: Tensor | None = None  # [2, n] what `Approval.mark` returned

    def before_step(self, scheduler_output: Any) -> None:
        """Nothing: this runner keeps the prompts of its requests."""

    def before_sampling(self) -> None:
        """Ask the rules about the drafts that are about to be verified."""
        state = self.runner.execute_model_state
        if state is None or state.spec_decode_metadata is None:
            self._begin(None)
            return
        drafts, rules = state.spec_decode_metadata, self._requested()
        rows = self._last.rows(drafts.num_draft_tokens, drafts.draft_token_ids.device)
        self._begin(rows)
        if any(rules):
            plan = self._last.plan(rules, rows)
            at, tokens = drafts.target_logits_indices, drafts.draft_token_ids
            newest = drafts.logits_indices[rows.first + torch.arange(len(rules), device=tokens.device)]
            ids, positions = (_on_device(getattr(self.runner, name))[newest] for name in ("input_ids", "positions"))
            most = max(drafts.num_draft_tokens, default=0)
            exact = self.guards.find_exact(self._slot_column, ids, positions, tokens, rows, most)
            approved = self.approval(state.sample_hidden_states, state.logits, at, tokens, plan, exact)
            self._approved = self.agree(approved)

    def mark(self, logits: Tensor, drafts: Tensor) -> None:
        """Mark the approved drafts on the logits that are verified."""
        if self._approved is not None:
            self._flags = self.approval.mark(logits, drafts, self._approved)

    def after_sampling(self, sampled: Tensor) -> None:
        """Count the step; vLLM makes new tensors in every step."""
        if self._rows is not None:
            self.guards.advance((sampled >= 0).sum(1))
            self.counts.add(self._rows, sampled, self._flags)
        self._begin(None)

    def _requested(self) -> list[AcceptanceRule | None]:
        """The rules of the batch; looked up when the batch changes."""
        names, requests = self.runner.input_batch.req_ids, self.runner.requests
        params = [requests[name].sampling_params for name in names]
        if names != self._names or params != self._params:
            before, self._known = self._known, {}
            for name, current in zip(names, params, strict=True):
                last = before.get(name)
                self._known[name] = last if last and last[0] is current else (current, self.rules(current))
            self._assign(names)
            self._names, self._params = list(names), params
        return [rule for _, rule in self._known.values()]

    def _assign(self, names: Sequence[str]) -> None:
        """Give slots to the requests of a batch; those that have left it lose theirs."""
        for name in set(self._slots) - set(names):
            self._free.append(self._slots.pop(name))
        for name in names:
            if name not in self._slots:
                self._slots[name] = self._free.pop()
                self.guards.enter(self._slots[name], self._known[name][1], self.runner.requests[name].prompt_token_ids)
        self._slot_column = torch.tensor([self._slots[name] for name in names]).to(self._slot_column.device)


def _on_device(buffer: Any) -> Tensor:
    """The tensor of a buffer that may have a copy on the host."""
    tensor: Tensor = getattr(buffer, "gpu", buffer)
    return tensor
