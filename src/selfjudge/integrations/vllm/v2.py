"""vLLM's second model runner (`vllm.v1.worker.gpu`): GPUs with Triton; heads in 0.26, draft models from 0.31.

Its rejection sampler gets the logits of all rows. A request with k drafts owns k + 1 of them, and row i predicts the
token that row i + 1 has read. Approved drafts are marked on the logits that are verified, after penalties and bans and
before temperature: by the last of a list of logits processors, or where there is no list by the last ban of 0.26."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import ExecuteModelState
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from selfjudge.decoding.rules import AcceptanceRule
from selfjudge.integrations.vllm.approval import StepDrafts, Verification
from selfjudge.integrations.vllm.signatures import exactly, has, lacks, takes


def check() -> None:
    """Refuse a vLLM whose second runner is not the known one."""
    has(ExecuteModelState, "input_batch", "hidden_states")
    has(
        InputBatch, "num_reqs", "num_draft_tokens", "input_ids", "positions", "logits_indices", "cu_num_logits_np",
        "expanded_idx_mapping", "expanded_local_pos", "idx_mapping_np", "idx_mapping",
    )  # fmt: skip
    verified = ("logits", "input_batch", "draft_logits")
    rows = ("expanded_idx_mapping", "idx_mapping_np", "pos", "input_ids", "expanded_local_pos", "skip_top_k_top_p")
    if find_spec("vllm.v1.worker.gpu.sample.logits_processor") is None:
        lacks(Sampler, "_requires_logits_processing")  # 0.27 leaves bans out where no request has any
        takes(RejectionSampler.__call__, verified)
        takes(Sampler.apply_sampling_params, ("logits", *rows))
        takes(BadWordsState.add_request, ("req_idx", "sampling_params"))
        takes(BadWordsState.apply_bad_words, ("logits", *rows[:2], *rows[3:5]))
        return
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcessor

    takes(RejectionSampler.__call__, (*verified, "invalid_drafts"))
    takes(
        Sampler.apply_sampling_params,
        ("logits", rows[0], "idx_mapping", *rows[1:5], "seq_lens_upper_bound_np", rows[5]),
    )
    takes(LogitsProcessor.add_request, ("req_idx", "sampling_params"))
    takes(LogitsProcessor.apply, ("logits", "ctx"))
    takes(LogitsProcessor.apply_staged_writes, ())
    has(LogitsContext, "expanded_idx_mapping", "expanded_local_pos", "input_ids")


class SecondRunnerSampler(RejectionSampler):
    """vLLM's rejection sampler, in which an approved draft is accepted."""

    adapter: SecondRunnerAdapter

    def __call__(self, logits: Tensor, input_batch: Any, *more: Any) -> Any:
        adapter, verification, mark = self.adapter, self.adapter.verification, self.adapter.mark
        hidden, adapter.hidden = adapter.hidden, None
        if hidden is None:
            return super().__call__(logits, input_batch, *more)
        rows = verification.last.rows((np.diff(input_batch.cu_num_logits_np) - 1).tolist(), logits.device)
        ids, positions = (x[input_batch.logits_indices] for x in (input_batch.input_ids, input_batch.positions))
        requests, n = input_batch.idx_mapping[: input_batch.num_reqs].long(), rows.predicting
        step = StepDrafts(requests, ids[rows.newest], positions[rows.newest], ids[n + 1], hidden, logits, n)
        rules = [mark.rules[slot] for slot in input_batch.idx_mapping_np[: input_batch.num_reqs].tolist()]
        slots, approved = requests[rows.owner], verification.approve(rules, rows, step)
        if approved is not None:
            mark.begin(slots, rows.place, approved)
        try:
            output = super().__call__(logits, input_batch, *more)
        finally:
            mark.open = False
        flags = None if approved is None else mark.flags[:, slots, rows.place]
        verification.finish(rows, output.num_sampled, flags)  # vLLM makes a new `num_sampled` in every step
        return output


class MarkProcessor:
    """Marks approved drafts on the logits that are verified; one of the sampler's logits processors where it has them.

    Keeps by request slot: the rule, and of the current block [slots, γ+1] what it approved and the flags of the mark.
    """

    open = False  # whether a verification is under way

    def __init__(self, verification: Verification, slots: int, gamma: int) -> None:
        self.verification = verification
        self.prompts: deque[Sequence[int] | None] = deque()
        """Prompts of the requests that are about to be added, in their order."""
        self.rules: list[AcceptanceRule | None] = [None] * slots
        device = verification.guards.state.device
        self.approved = torch.zeros((slots, gamma + 1), dtype=torch.bool, device=device)
        self.flags = self.approved.new_zeros((3, slots, gamma + 1))

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        rule = self.rules[req_idx] = self.verification.rules(sampling_params)
        self.verification.guards.enter(req_idx, rule, self.prompts.popleft() if self.prompts else None)
        return rule is not None

    def apply_staged_writes(self) -> None:
        """Nothing of a request is kept on the device."""

    def begin(self, slots: Tensor, place: Tensor, approved: Tensor) -> None:
        self.approved.zero_()
        self.flags.zero_()
        self.approved[slots, place] = approved
        self.open = True

    def apply(self, logits: Tensor, ctx: Any) -> Tensor:
        """Called once for the batch, or for several parts of a large one."""
        self.mark(logits, ctx.expanded_idx_mapping, ctx.expanded_local_pos, ctx.input_ids)
        return logits

    def mark(self, logits: Tensor, slots: Tensor, places: Tensor, ids: Tensor) -> None:
        """Rows of whole requests: the slot of each, its place in its block and the token that it has read."""
        if self.open:
            at = slots.long(), places.long()
            # row i predicts what row i + 1 has read; the last row of a part is the last of a request
            drafts = torch.cat([ids[1:], ids.new_full((1,), -1)])
            self.flags[(slice(3), *at)] = self.verification.approval.mark(logits, drafts, self.approved[at])


class MarkingBans(BadWordsState):
    """The last ban before temperature in 0.26, which marks what is approved after it has banned what is banned."""

    marks: MarkProcessor

    def add_request(self, req_idx: int, sampling_params: Any) -> None:
        super().add_request(req_idx, sampling_params)
        self.marks.add_request(req_idx, sampling_params)

    def apply_bad_words(self, logits: Tensor, slots: Tensor, idx_mapping_np: Any, ids: Tensor, places: Tensor) -> None:
        super().apply_bad_words(logits, slots, idx_mapping_np, ids, places)
        self.marks.mark(logits, slots, places, ids)


class SecondRunnerAdapter:
    """Connects a runner and its sampler: adds a logits processor, or replaces the class of the last ban, and replaces
    the class of the rejection sampler."""

    def __init__(self, runner: Any, verification: Verification) -> None:
        has(runner, "execute_model_state", "rejection_sampler", "max_num_reqs")
        has(runner.rejection_sampler, "sampler", "num_speculative_steps")
        self.runner, self.verification = runner, verification
        self.hidden: Tensor | None = None  # [rows, H] the states of this step; None outside of a step (warm-up)
        sampler = runner.rejection_sampler
        exactly(sampler, RejectionSampler)
        self.mark = MarkProcessor(verification, runner.max_num_reqs, sampler.num_speculative_steps)
        listed = getattr(sampler.sampler, "logits_processors", None)
        if listed is not None:
            listed.append(self.mark)
        else:
            bans = sampler.sampler.bad_words_state
            exactly(bans, BadWordsState)
            bans.__class__, bans.marks = MarkingBans, self.mark
        sampler.__class__ = SecondRunnerSampler  # its attributes stay as this version's constructor made them
        sampler.adapter = self

    def before_step(self, scheduler_output: Any) -> None:
        """Note the prompts of the requests that a step adds: the sampler is not told them."""
        self.mark.prompts.clear()
        self.mark.prompts.extend(
            new.prompt_token_ids for new in scheduler_output.scheduled_new_reqs if new.sampling_params is not None
        )

    def before_sampling(self) -> None:
        """Keep the states at the rows that are about to be verified."""
        self.hidden = None
        state = self.runner.execute_model_state
        if state is not None and state.hidden_states is not None and state.input_batch.num_draft_tokens > 0:
            self.hidden = state.hidden_states[state.input_batch.logits_indices]
