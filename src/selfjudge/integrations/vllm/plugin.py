"""Entry point of vLLM's general plugins: does nothing unless the variable SELFJUDGE_VLLM is set.

It holds the settings as JSON, for programs that start vLLM themselves and take no flags for it:

    SELFJUDGE_VLLM='{"judge": "judge"}' python -m some.program
"""

from __future__ import annotations

import functools
import os
from typing import Any

from selfjudge.integrations.vllm.config import KEY, WORKER, parse_object

VARIABLE = "SELFJUDGE_VLLM"


def register() -> None:
    """Wrap `EngineArgs.create_engine_config`, so that every engine of this process that names no worker takes ours."""
    text = os.environ.get(VARIABLE)
    if not text:
        return
    settings = parse_object(text, VARIABLE)
    from vllm.engine.arg_utils import EngineArgs

    if not hasattr(EngineArgs.create_engine_config, KEY):
        EngineArgs.create_engine_config = _judged(EngineArgs.create_engine_config, settings)


def _judged(create: Any, settings: dict[str, Any]) -> Any:
    @functools.wraps(create)
    def create_engine_config(self: Any, *args: Any, **options: Any) -> Any:
        if self.worker_cls == "auto":
            self.worker_cls = WORKER
            self.additional_config = {KEY: settings, **(self.additional_config or {})}
        return create(self, *args, **options)

    setattr(create_engine_config, KEY, True)
    return create_engine_config
