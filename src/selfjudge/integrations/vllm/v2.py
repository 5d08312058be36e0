"""vLLM's second model runner (`vllm.v1.worker.gpu`): GPUs with Triton; heads in 0.26, draft models from 0.31.
A request with k drafts owns k + 1 rows of logits; row i predicts the token that row i + 1 has read. Approved drafts are
marked after penalties and bans, before temperature: by the last logits processor or, in 0.26, by the last ban."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import ExecuteModelState
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from selfjudge.decoding.rules import AcceptanceRule, Judged, Margin
from selfjudge.decoding.rules_by_row import MARGIN, Code, encode
from selfjudge.errors import SelfJudgeError
from selfjudge.integrations.vllm.approval import Verification, choose_mark
from selfjudge.integrations.vllm.approval_triton import RequestTable
from selfjudge.integrations.vllm.plan import Plan
from selfjudge.integrations.vllm.signatures import exactly, has, takes, unknown


def check() -> None:
    """Refuse a vLLM whose second runner is not the known one."""
    has(ExecuteModelState, "input_batch", "hidden_states")
    has(InputBatch, "num_reqs", "input_ids", "positions", "logits_indices", "cu_num_logits_np", "cu_num_logits")
    has(InputBatch, "idx_mapping_np", "idx_mapping")
    verified = ("logits", "input_batch", "draft_logits")
    rows = ("expanded_idx_mapping", "idx_mapping_np", "pos", "input_ids", "expanded_local_pos", "skip_top_k_top_p")
    if find_spec("vllm.v1.worker.gpu.sample.logits_processor") is None:
        if hasattr(Sampler, "_requires_logits_processing"):
            unknown("bans are left out where no request has any")  # 0.27
        takes(RejectionSampler.__call__, verified)
        takes(Sampler.apply_sampling_params, ("logits", *rows))
        takes(BadWordsState.add_request, ("req_idx", "sampling_params"))
        takes(BadWordsState.apply_bad_words, ("logits", *rows[:2], *rows[3:5]))
        return
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor

    takes(RejectionSampler.__call__, (*verified, "invalid_drafts"))
    more = (rows[0], "idx_mapping", *rows[1:5], "seq_lens_upper_bound_np", rows[5])
    takes(Sampler.apply_sampling_params, ("logits", *more))
    takes(LogitsProcessor.add_request, ("req_idx", "sampling_params"))
    takes(LogitsProcessor.apply, ("logits", "ctx"))


class SecondRunnerSampler(RejectionSampler):
    """vLLM's rejection sampler, in which an approved draft is accepted."""

    adapter: SecondRunnerAdapter

    def __call__(self, logits: Tensor, input_batch: Any, *more: Any) -> Any:
        marks, hidden, self.adapter.hidden = self.adapter.marks, self.adapter.hidden, None
        if hidden is not None:
            marks.decide(hidden, logits, input_batch)
        output = super().__call__(logits, input_batch, *more)
        if hidden is not None:
            marks.finish(input_batch, output.num_sampled)
        return output


class MarkProcessor:
    """Marks approved drafts on the logits that are verified, as a logits processor where there is a list of them. Keeps
    the rules by request slot, and what the rules said of the rows of this step."""

    def __init__(self, verification: Verification, slots: int, gamma: int) -> None:
        self.verification, self.approval = verification, verification.approval
        self.prompts: deque[Sequence[int] | None] = deque()  # of requests about to be added, in order
        self.rules: list[AcceptanceRule | None] = [None] * slots
        of = verification.guards.structure, self.approval.special, verification.counts.total
        self.table = RequestTable(slots, gamma + 1, *of)
        self.said: Tensor | None = None  # what rules said of this step's rows; None outside of one, or if lossless
        self._marked = False  # whether rows of this step were marked
        self._slots, self._asked = b"", list[AcceptanceRule | None]()

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        rule, prompt = self.verification.rules(sampling_params), self.prompts.popleft() if self.prompts else None
        self.enter(req_idx, rule, prompt)
        return rule is not None

    def enter(self, req_idx: int, rule: AcceptanceRule | None, prompt: Sequence[int] | None) -> None:
        self.rules[req_idx] = rule
        code = encode(rule) or Code(MARGIN, 0.0)  # any, where it has none
        self.table.new[req_idx] = [*self.verification.guards.begin(rule, prompt), *code]
        self._slots = b""

    def apply_staged_writes(self) -> None:
        """Nothing: the table is written to when a step needs it."""

    def decide(self, hidden: Tensor, logits: Tensor, batch: Any) -> None:
        """Ask the rules about the drafts of a batch; `hidden` are the states of all tokens of the step."""
        slots, self.said = batch.idx_mapping_np[: batch.num_reqs].tobytes(), None
        if slots != self._slots:  # most steps have the requests of the step before
            self._slots, asked = slots, [self.rules[slot] for slot in batch.idx_mapping_np[: batch.num_reqs].tolist()]
            self._asked, plan = asked if any(asked) else [], Plan(asked)
            self._weights = self.approval.weights if plan.judged else None
            self._fused = plan.codes is not None and plan.judged == (self._weights is not None)
            self._ahead = self._fused and plan.looks_ahead
        if not self._asked:
            return
        self._marked, self._batch = False, batch
        self.table.decide(batch, hidden if self._weights else logits, logits, self._weights, fused=self._fused)
        if not self._fused:
            self._ask(hidden[batch.logits_indices], logits, batch)
        self.said = self.verification.agree(self.table.said)

    def _ask(self, states: Tensor, logits: Tensor, batch: Any) -> None:
        """Ask rules without a code; the last row of a request counts as one that predicts a missing draft."""
        n, table, last = len(logits), self.table, self.verification.last
        rows = last.rows(np.diff(batch.cu_num_logits_np).tolist(), logits.device)
        at, exact = torch.arange(n, device=logits.device).clamp_max(n - 2), table.said[0, :n] == -math.inf
        approved = self.approval(states, logits, at, table.drafts[:n], last.plan(self._asked, rows), exact)
        table.said[0, :n] = torch.where(approved, 0.0, math.inf)

    def apply(self, logits: Tensor, ctx: Any) -> Tensor:
        """Called for all rows of a step, or for some of its requests after others."""
        if self.said is not None:
            requests, batch, self._marked = range(self._batch.num_reqs), self._batch, True
            if ctx is not None and len(logits) != batch.cu_num_logits_np[-1]:
                first = batch.idx_mapping_np.tolist().index(ctx.idx_mapping_np[0])
                requests = range(first, first + len(ctx.idx_mapping_np))
            self.table.mark(batch, self.said, logits, choose_mark(logits), requests, ahead=self._ahead)
        return logits

    def finish(self, batch: Any, emitted: Tensor) -> None:
        """The requests of the batch got so many tokens."""
        if self.said is None:
            self.verification.counts.note(emitted, batch.cu_num_logits_np)
            return
        self.said = None
        if not self._marked:
            raise SelfJudgeError("this vLLM verifies drafts without a chance to mark those that a rule accepts")
        self.table.finish(batch, emitted)


class MarkingBans(BadWordsState):
    """The last ban before temperature in 0.26, which marks what is approved after it has banned what is banned."""

    marks: MarkProcessor

    def add_request(self, req_idx: int, sampling_params: Any) -> None:
        super().add_request(req_idx, sampling_params)
        self.marks.add_request(req_idx, sampling_params)

    def apply_bad_words(self, logits: Tensor, *more: Any) -> None:
        super().apply_bad_words(logits, *more)
        self.marks.apply(logits, None)


class SecondRunnerAdapter:
    """Connects a runner and its sampler, whose class it replaces; adds a logits processor or replaces the last ban."""

    def __init__(self, runner: Any, verification: Verification) -> None:
        has(runner, "execute_model_state", "rejection_sampler", "max_num_reqs", "vocab_size", "dtype")
        has(runner.rejection_sampler, "sampler", "num_speculative_steps")
        self.runner = runner
        self.hidden: Tensor | None = None  # [tokens, H] the states of this step; None outside of a step (warm-up)
        sampler = runner.rejection_sampler
        exactly(sampler, RejectionSampler)
        self.marks = MarkProcessor(verification, runner.max_num_reqs, sampler.num_speculative_steps)
        self.listed = hasattr(sampler.sampler, "logits_processors")
        if self.listed:
            sampler.sampler.logits_processors.append(self.marks)
        else:
            bans = sampler.sampler.bad_words_state
            exactly(bans, BadWordsState)
            bans.__class__, bans.marks = MarkingBans, self.marks
        sampler.__class__ = SecondRunnerSampler  # its attributes stay as this version's constructor made them
        sampler.adapter = self
        if self.marks.table.lines.is_cuda:
            self._warm_up()

    def _warm_up(self) -> None:
        """Compile the kernels before the first request, for rows as they will be."""
        marks, device, judge = self.marks, self.marks.table.lines.device, self.marks.approval.judge
        rows, zero = torch.arange(2, device=device), torch.zeros(1, dtype=torch.int32, device=device)
        batch = SimpleNamespace(
            num_reqs=1, idx_mapping_np=np.zeros(1, np.int32), logits_indices=rows, positions=rows,
            cu_num_logits=2 * rows.int(), cu_num_logits_np=np.array([0, 2]), input_ids=rows.int(),
        )  # fmt: skip
        states = torch.zeros((2, judge.config.hidden_size if judge else 1), dtype=self.runner.dtype, device=device)
        logits = torch.zeros((2, self.runner.vocab_size), dtype=self.runner.dtype, device=device)
        judged = [Judged(judge, 1.0), Judged(judge, price=0.0)] if judge else []
        rules = [Margin(0.0), Margin(price=0.0), *judged, None]
        for slots, rule in product((zero, zero.long()), rules):  # int32 in 0.26, later int64
            batch.idx_mapping = slots
            marks.enter(0, rule, [])
            marks.decide(states, logits, batch)
            marks.apply(logits.float() if self.listed else logits.clone(), None)  # as the sampler has them
            marks.finish(batch, zero + 1)
        marks.verification.counts.settle().zero_()

    def before_step(self, scheduler_output: Any) -> None:
        """Note the prompts of the requests that a step adds: the sampler is not told them."""
        if new := scheduler_output.scheduled_new_reqs:
            self.marks.prompts = deque(one.prompt_token_ids for one in new if one.sampling_params is not None)

    def before_sampling(self) -> None:
        """Keep the states of the step."""
        state = self.runner.execute_model_state
        self.hidden = None if state is None else state.hidden_states
