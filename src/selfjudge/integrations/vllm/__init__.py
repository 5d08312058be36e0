"""Judged verification inside vLLM, on its official hooks (docs/vllm.md):

    --worker-cls selfjudge.integrations.vllm.JudgeWorker --additional-config '{"selfjudge": {"judge": FOLDER}}'

Importing this package imports no vLLM; asking it for `JudgeWorker` does.
"""

from __future__ import annotations

from typing import Any

WORKER = "selfjudge.integrations.vllm.JudgeWorker"

__all__ = ["WORKER", "JudgeWorker"]


def __getattr__(name: str) -> Any:
    if name == "JudgeWorker":
        from selfjudge.integrations.vllm.worker import JudgeWorker

        return JudgeWorker
    raise AttributeError(name)
