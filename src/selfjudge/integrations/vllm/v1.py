"""vLLM's first model runner (`vllm.v1.worker.gpu_model_runner`): CPUs, and draft models on GPUs up to 0.30.
Logits, drafts and hidden states are in `execute_model_state` before sampling begins: the rules are asked there, on the
target's own rows. The rejection sampler then works on a copy of the logits, where approved drafts are marked."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu_model_runner import ExecuteModelState

from selfjudge.decoding.rules import AcceptanceRule
from selfjudge.integrations.vllm.approval import Verification, count_step
from selfjudge.integrations.vllm.plan import DraftRows
from selfjudge.integrations.vllm.signatures import exactly, has, takes
from selfjudge.models.device import send


def check() -> None:
    """Refuse a vLLM whose first runner is not the known one."""
    takes(RejectionSampler.forward, ("metadata", "draft_probs", "logits", "sampling_metadata"))
    takes(RejectionSampler.apply_logits_processors, ("logits", "sampling_metadata", "metadata"))
    has(ExecuteModelState, "logits", "spec_decode_metadata", "sample_hidden_states")
    has(SpecDecodeMetadata, "draft_token_ids", "num_draft_tokens", "target_logits_indices", "logits_indices")


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


class KnownRequest(NamedTuple):
    """A request of the batch."""

    params: Any  # its `SamplingParams`
    rule: AcceptanceRule | None
    slot: int  # of its guards


class FirstRunnerAdapter:
    """Connects a runner and its sampler, whose class is replaced by `FirstRunnerSampler`; holds the current step."""

    def __init__(self, runner: Any, verification: Verification) -> None:
        has(runner, "execute_model_state", "input_batch", "requests", "rejection_sampler", "input_ids", "positions")
        self.runner, self.verification = runner, verification
        exactly(runner.rejection_sampler, RejectionSampler)
        runner.rejection_sampler.__class__ = FirstRunnerSampler  # its attributes stay as this version made them
        runner.rejection_sampler.adapter = self
        self._free = list(range(len(verification.guards.state)))  # slots that no request has
        self._known: dict[str, KnownRequest] = {}
        self._slots = torch.zeros(0, dtype=torch.long, device=verification.guards.state.device)  # [R] of the batch
        self._rows: DraftRows | None = None  # None outside of a step (profiling runs)
        self._approved: Tensor | None = None
        self._flags: Tensor | None = None

    def before_step(self, scheduler_output: Any) -> None:
        """Nothing: this runner keeps the prompts of its requests."""

    @torch.inference_mode()
    def before_sampling(self) -> None:
        """Ask the rules about the drafts that are about to be verified."""
        self._rows = self._approved = self._flags = None
        state = self.runner.execute_model_state
        if state is None or (drafts := state.spec_decode_metadata) is None:
            return
        tokens, rules, ask = drafts.draft_token_ids, self._requested(), self.verification
        self._rows = rows = ask.last.rows(drafts.num_draft_tokens, tokens.device)
        if not any(rules):  # all requests are lossless
            return
        newest = drafts.logits_indices[rows.newest]
        buffers = self.runner.input_ids, self.runner.positions  # some versions keep a copy on the host beside them
        ids, positions = (getattr(buffer, "gpu", buffer)[newest] for buffer in buffers)
        plan = ask.last.plan(rules, rows)
        exact = ask.guards.find_exact(self._slots, ids, positions, tokens, rows, max(plan.sizes, default=0))
        hidden, logits, at = state.sample_hidden_states, state.logits, drafts.target_logits_indices
        self._approved = ask.agree(ask.approval(hidden, logits, at, tokens, plan, exact))

    def mark(self, logits: Tensor, drafts: Tensor) -> None:
        """Mark the approved drafts on the logits that are verified."""
        if self._approved is not None:
            self._flags = self.verification.approval.mark(logits, drafts, self._approved)

    def after_sampling(self, sampled: Tensor) -> None:
        """Follow and count the tokens of the step."""
        if self._rows is not None:
            emitted = (sampled >= 0).sum(1)
            self.verification.guards.advance(emitted)
            self.verification.counts.total += count_step(self._rows, emitted, self._flags)
        self._rows = self._approved = self._flags = None

    def _requested(self) -> list[AcceptanceRule | None]:
        """The rules of the batch; looked up when the batch changes."""
        requests = self.runner.requests
        params = {name: requests[name].sampling_params for name in self.runner.input_batch.req_ids}
        known = self._known
        if list(params) != list(known) or any(known[name].params is not own for name, own in params.items()):
            staying = {name: own for name, own in known.items() if own.params is params.get(name)}
            self._free += [own.slot for name, own in known.items() if name not in staying]
            self._known = {name: staying.get(name) or self._enter(requests[name]) for name in params}
            self._slots = send([own.slot for own in self._known.values()], self._slots.device, torch.long)
        return [own.rule for own in self._known.values()]

    def _enter(self, request: Any) -> KnownRequest:
        """Give a slot to a request that is new in the batch."""
        own = KnownRequest(request.sampling_params, self.verification.rules(request.sampling_params), self._free.pop())
        self.verification.guards.enter(own.slot, own.rule, request.prompt_token_ids)
        return own
