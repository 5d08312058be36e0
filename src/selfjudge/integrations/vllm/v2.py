"""vLLM's second model runner (`vllm.v1.worker.gpu`): GPUs with Triton; heads in 0.26, draft models from 0.31.

Its rejection sampler gets the logits of all rows. A request with k drafts owns k + 1 of them, and row i predicts the
token that row i + 1 has read. Approved drafts are marked on the logits that are verified, after penalties and bans and
before temperature: by the last of a list of logits processors, or where there is no list by the last ban of 0.26."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import ExecuteModelState
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from selfjudge.decoding.rules import AcceptanceRule, Judged
from selfjudge.decoding.rules_by_row import encode
from selfjudge.errors import SelfJudgeError
from selfjudge.integrations.vllm.approval import MARK, Verification
from selfjudge.integrations.vllm.approval_triton import approvals, mark
from selfjudge.integrations.vllm.signatures import exactly, has, lacks, takes
from selfjudge.integrations.vllm.step_triton import RequestTable

if TYPE_CHECKING:
    from numpy.typing import NDArray


def check() -> None:
    """Refuse a vLLM whose second runner is not the known one."""
    has(ExecuteModelState, "input_batch", "hidden_states")
    has(
        InputBatch, "num_reqs", "input_ids", "positions", "logits_indices", "cu_num_logits_np",
        "cu_num_logits", "idx_mapping_np", "idx_mapping",
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
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor

    takes(RejectionSampler.__call__, (*verified, "invalid_drafts"))
    takes(
        Sampler.apply_sampling_params,
        ("logits", rows[0], "idx_mapping", *rows[1:5], "seq_lens_upper_bound_np", rows[5]),
    )
    takes(LogitsProcessor.add_request, ("req_idx", "sampling_params"))
    takes(LogitsProcessor.apply, ("logits", "ctx"))
    takes(LogitsProcessor.apply_staged_writes, ())


class SecondRunnerSampler(RejectionSampler):
    """vLLM's rejection sampler, in which an approved draft is accepted."""

    adapter: SecondRunnerAdapter

    def __call__(self, logits: Tensor, input_batch: Any, *more: Any) -> Any:
        self.adapter.before_verifying(logits, input_batch)
        output = super().__call__(logits, input_batch, *more)
        self.adapter.after_verifying(input_batch, output.num_sampled)
        return output


class Asked(NamedTuple):
    """What the requests of a step ask."""

    rules: list[AcceptanceRule | None]
    coded: bool  # whether all their rules have kernels
    judged: bool
    looks_ahead: bool  # whether a draft's fate depends on those after it


class MarkProcessor:
    """Marks approved drafts on the logits that are verified; one of the sampler's logits processors where it has them.

    Keeps the rules by request slot, and what the rules said of the rows of this step."""

    def __init__(self, verification: Verification, slots: int, gamma: int) -> None:
        self.verification, self.approval = verification, verification.approval
        self.weights = None if self.approval.judge is None else self.approval.judge.kernel_weights()
        self.prompts: deque[Sequence[int] | None] = deque()
        """Prompts of the requests that are about to be added, in their order."""
        self.rules: list[AcceptanceRule | None] = [None] * slots
        guards = verification.guards
        self.table = RequestTable(slots, slots * (gamma + 1), guards.structure, guards.state.device)
        self.approved: Tensor | None = None
        """[rows] what is accepted in this step; None outside of a step, or where all requests are lossless."""
        self._marked = 0  # rows, so far
        self._slots, self._asked = b"", Asked([], coded=True, judged=False, looks_ahead=False)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        rule, prompt = self.verification.rules(sampling_params), self.prompts.popleft() if self.prompts else None
        self.enter(req_idx, rule, prompt)
        return rule is not None

    def enter(self, req_idx: int, rule: AcceptanceRule | None, prompt: Sequence[int] | None) -> None:
        self.rules[req_idx] = rule
        self.table.enter(req_idx, self.verification.guards.begin(rule, prompt), encode(rule))
        self._slots = b""

    def apply_staged_writes(self) -> None:
        """Nothing: the table is written to when a step needs it."""

    def decide(self, hidden: Tensor, logits: Tensor, batch: Any) -> None:
        """Ask the rules about the drafts of a batch; `hidden` are the states of all tokens of the step."""
        asked, self.approved, self._marked = self._look_up(batch.idx_mapping_np[: batch.num_reqs]), None, 0
        if not any(asked.rules):
            return
        n, table = len(logits), self.table
        table.prepare(batch)
        states = hidden[batch.logits_indices] if asked.judged else logits
        drafts = table.drafts[:n]
        if asked.coded and (self.weights is not None or not asked.judged):
            blocks = (batch.cu_num_logits, table.counts[: batch.num_reqs], table.price, table.window)
            approved = approvals(
                self.weights if asked.judged else None, states, logits, table.rows[:n], drafts, table.value,
                table.limit, self.approval.special, blocks if asked.looks_ahead else None,
            )  # fmt: skip
        else:  # the last row of a request counts as one that predicts a missing draft
            last = self.verification.last
            rows = last.rows(np.diff(batch.cu_num_logits_np).tolist(), logits.device)
            at, exact = table.rows[:n].clamp_max(n - 2), table.limit[:n] == -math.inf
            approved = self.approval(states, logits, at, drafts, last.plan(asked.rules, rows), exact)
        self.approved = self.verification.agree(approved)

    def apply(self, logits: Tensor, ctx: Any) -> Tensor:
        """Called once for the rows of a step, or for one part of them after the other."""
        if self.approved is not None:
            part = slice(self._marked, self._marked + len(logits))
            self._marked = part.stop
            drafts, flags = self.table.drafts[part], self.table.flags[:, part]
            mark(logits, drafts, self.approved[part], self.approval.special, MARK, flags)
        return logits

    def finish(self, batch: Any, emitted: Tensor) -> None:
        """The requests of the batch got so many tokens."""
        marked, self.approved = self.approved is not None, None
        if marked and self._marked != len(batch.logits_indices):
            raise SelfJudgeError(f"vLLM verified {len(batch.logits_indices)} rows, and {self._marked} could be marked")
        self.table.finish(batch, emitted, self.verification.counts.total, marked=marked)

    def _look_up(self, slots: NDArray[np.int32]) -> Asked:
        """What the requests in these slots ask; most steps have the requests of the step before."""
        if (key := slots.tobytes()) != self._slots:
            rules = [self.rules[slot] for slot in slots.tolist()]
            codes = [encode(rule) for rule in rules]
            known = [code for code in codes if code is not None]
            self._slots, self._asked = (
                key,
                Asked(
                    rules,
                    coded=len(known) == len(codes),
                    judged=any(isinstance(rule, Judged) for rule in rules),
                    looks_ahead=any(code.price < math.inf or code.window for code in known),
                ),
            )
        return self._asked


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
    """Connects a runner and its sampler: adds a logits processor, or replaces the class of the last ban, and replaces
    the class of the rejection sampler."""

    def __init__(self, runner: Any, verification: Verification) -> None:
        has(runner, "execute_model_state", "rejection_sampler", "max_num_reqs")
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

    def warm_up(self, vocabulary: int, dtype: torch.dtype) -> None:
        """Compile the kernels before the first request, for rows of this width."""
        marks, device = self.marks, self.marks.table.lines.device
        rows, zero = torch.arange(2, device=device), torch.zeros(1, dtype=torch.int32, device=device)
        batch = SimpleNamespace(
            num_reqs=1, idx_mapping=zero, idx_mapping_np=np.zeros(1, np.int32), logits_indices=rows, positions=rows,
            cu_num_logits=2 * rows.int(), input_ids=rows.int(),
        )  # fmt: skip
        judge = marks.approval.judge
        states = torch.zeros((2, 1 if judge is None else judge.config.hidden_size), dtype=dtype, device=device)
        logits = torch.zeros((2, vocabulary), dtype=dtype, device=device)
        for rule in [*marks.approval.kinds, None]:
            marks.enter(0, rule, [])
            marks.decide(states, logits, batch)
            marks.apply(logits.float() if self.listed else logits.clone(), None)  # as the sampler has them
            marks.finish(batch, zero + 1)
        marks.verification.counts.total.zero_()

    def before_step(self, scheduler_output: Any) -> None:
        """Note the prompts of the requests that a step adds: the sampler is not told them."""
        self.marks.prompts.clear()
        self.marks.prompts.extend(
            new.prompt_token_ids for new in scheduler_output.scheduled_new_reqs if new.sampling_params is not None
        )

    def before_sampling(self) -> None:
        """Keep the states of the step."""
        state = self.runner.execute_model_state
        self.hidden = None if state is None else state.hidden_states

    def before_verifying(self, logits: Tensor, batch: Any) -> None:
        if self.hidden is not None:
            self.marks.decide(self.hidden, logits, batch)

    def after_verifying(self, batch: Any, emitted: Tensor) -> None:
        if self.hidden is not None:
            self.marks.finish(batch, emitted)
        self.hidden = None
