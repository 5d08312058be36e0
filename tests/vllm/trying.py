"""A worker whose vLLM tries itself out before the first request, as on a GPU, with what Triton's interpreter can do."""

from __future__ import annotations

import sys
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu.warmup import warmup_kernels

from selfjudge.integrations.vllm import JudgeWorker
from vllm import SamplingParams

compile_alone = CPUWorker.compile_or_warm_up_model


def compile_and_try(self: Any) -> Any:
    compiled = compile_alone(self)
    warmup_kernels(self.model_runner, self.execute_model, lambda grammar: self.sample_tokens(None))
    assert self._counts.read()["cycles"] > 0
    return compiled


CPUWorker.compile_or_warm_up_model = compile_and_try
SamplingParams.for_sampler_warmup = lambda: SamplingParams(temperature=0.9)


class TryingWorker(JudgeWorker):
    def compile_or_warm_up_model(self) -> Any:
        compiled = super().compile_or_warm_up_model()
        print("counted before the first request:", sum(self._counts.read().values()), file=sys.stderr)
        return compiled
