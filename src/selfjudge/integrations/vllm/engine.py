"""One `vllm.LLM` at a time: the next one starts when the last is gone."""

from __future__ import annotations

import gc
import os
from collections.abc import Hashable, Mapping
from typing import Any


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
            from vllm import LLM

            self._llm, self._key = LLM(**options), key
        return self._llm

    def close(self) -> None:
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
        self._llm = None
        gc.collect()
