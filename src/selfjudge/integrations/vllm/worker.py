"""The worker: a subclass of vLLM's own worker for this platform, whose sampler asks our rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.triton_utils import HAS_TRITON
from vllm.utils.import_utils import resolve_obj_by_qualname

from selfjudge.decoding.rule_parser import rule_text
from selfjudge.errors import SelfJudgeError
from selfjudge.integrations.vllm import config
from selfjudge.integrations.vllm.approval import Approval, Counts, Verification
from selfjudge.integrations.vllm.plan import RequestGuards
from selfjudge.integrations.vllm.signatures import adapter_of

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker as Base
else:
    _WORKERS = {"cpu": "cpu_worker.CPUWorker", "xpu": "xpu_worker.XPUWorker"}
    Base = resolve_obj_by_qualname(f"vllm.v1.worker.{_WORKERS.get(current_platform.device_type, 'gpu_worker.Worker')}")

logger = init_logger("vllm.selfjudge")  # vLLM shows its own loggers


class JudgeWorker(Base):
    """vLLM's worker with our rules (`config.read_settings`). It refuses to start where they could not decide."""

    _adapter: Any = None
    _counts: Counts | None = None
    _reports = False

    def __init__(self, vllm_config: Any, *args: Any, **options: Any) -> None:
        self._settings, self._judge = config.load(vllm_config)
        _fix_expand_kernel()
        super().__init__(vllm_config, *args, **options)

    def load_model(self, *args: Any, **options: Any) -> None:
        super().load_model(*args, **options)
        runner = self.model_runner
        if getattr(runner, "rejection_sampler", None) is None:
            if get_pp_group().is_last_rank:
                raise SelfJudgeError(f"{type(runner).__qualname__} of this vLLM does not verify drafts: no rule works")
            return  # the last stage of the pipeline decides
        device = torch.device(runner.device)
        tokenizer = cached_tokenizer_from_config(self.model_config)
        special = config.guarded_ids(self.model_config, tokenizer)
        gamma = self.speculative_config.num_speculative_tokens
        self._rules = rules = config.RequestRules(self._settings, self._judge, special, gamma)
        group = get_tp_group()
        served = self.model_config.served_model_name
        name = served[0] if isinstance(served, (list, tuple)) else served
        self._counts = Counts(device, str(name), str(self.parallel_config.data_parallel_rank))

        def agree(said: Tensor) -> Tensor:
            """What the first rank says counts: one bit that differs would let ranks decode different texts."""
            return said if group.world_size == 1 else group.broadcast(said.float(), src=0).to(said.dtype)

        approval = Approval(self._judge, special, device)
        adapter = adapter_of(type(runner.rejection_sampler).__module__)
        slots = self.vllm_config.scheduler_config.max_num_seqs
        guards = RequestGuards(tokenizer, getattr(runner, "max_num_reqs", slots), device)
        self._adapter = adapter(runner, Verification(approval, self._counts, rules, guards, agree))
        decides = "exact" if rules.default is None else rule_text(rules.default)
        logger.info("Rule %s decides, %d tokens are guarded", decides, len(special))

    def compile_or_warm_up_model(self) -> Any:
        """What vLLM tries out is not counted, and nothing is said about it."""
        compiled = super().compile_or_warm_up_model()
        if self._counts is not None:
            self._counts.settle().zero_()
            self._rules.warn, self._reports = logger.warning, get_tp_group().rank_in_group == 0
        return compiled

    def sample_tokens(self, grammar_output: Any) -> Any:
        if self._adapter is not None:
            self._adapter.before_sampling()
        return super().sample_tokens(grammar_output)

    def execute_model(self, scheduler_output: Any) -> Any:
        if self._adapter is not None:
            self._adapter.before_step(scheduler_output)
        if self._counts is not None and self._reports:
            self._counts.report(idle=scheduler_output.total_num_scheduled_tokens == 0)
        return super().execute_model(scheduler_output)

    def selfjudge_counts(self) -> dict[str, int] | None:
        """For `collective_rpc`: what the rules did so far; None on ranks that do not sample."""
        return None if self._counts is None else self._counts.read(show=self._reports)


def expand(
    output_ptr: Tensor, input_ptr: Tensor, cu_num_tokens_ptr: Tensor, replace_from: float, replace_to: float, *_: Any
) -> None:
    """What vLLM's `expand_kernel` should do: write each request's value for each of its drafts."""
    ends = cu_num_tokens_ptr.long()
    values = torch.where(input_ptr == replace_from, replace_to, input_ptr).to(output_ptr.dtype)
    output_ptr.copy_(values.repeat_interleave(torch.diff(ends, prepend=ends.new_zeros(1))))


def _fix_expand_kernel() -> None:
    """Replace a kernel of vLLM 0.20 to 0.32 that loses temperature, top-k and top-p of drafted requests on a CPU."""
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    if HAS_TRITON or current_platform.device_type != "cpu":
        return
    expanded = expand_batch_to_tokens(torch.tensor([0.5, 0.25]), torch.tensor([1, 3], dtype=torch.int32), 3)
    if expanded.tolist() == [0.5, 0.25, 0.25]:
        return
    try:
        from vllm.triton_utils.dispatcher import register_kernels
    except ImportError:
        logger.warning("this vLLM ignores the temperature of drafted requests on a CPU: decode greedily, or use 0.31")
        return
    register_kernels({"vllm.v1.sample.rejection_sampler.expand_kernel": expand})
