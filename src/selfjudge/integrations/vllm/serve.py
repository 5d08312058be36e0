"""The short form of `vllm serve` with our worker: makes all its flags from the name of a pair."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from selfjudge.errors import SelfJudgeError
from selfjudge.integrations.vllm.config import KEY, MULTIPROCESS, WORKER, RequestRules, WorkerConfig
from selfjudge.integrations.vllm.engine import choose_runner
from selfjudge.judge.config import JudgeConfig
from selfjudge.judge.hub import shipped_judge
from selfjudge.models.catalogue import draft_for
from selfjudge.models.pull import served_reference
from selfjudge.types import MAX_GAMMA, default_gamma


def command(
    target: str = "smollm2-135m",
    draft: str | None = None,
    worker: WorkerConfig | None = None,
    *,
    gamma: int | None = None,
    more: Sequence[str] = (),
) -> list[str]:
    """What to run: vLLM's OpenAI-compatible server with target, draft and rule; `more` flags of vLLM go last.

    Target and draft are hub ids, checkpoint folders or the name of an embedded pair. An embedded pair brings its draft
    and, where one ships, its judge. A draft may be an EAGLE-3 head in any format.
    """
    gamma = default_gamma("cuda") if gamma is None else gamma
    if not 1 <= gamma <= MAX_GAMMA:
        raise SelfJudgeError(f"`gamma` must lie between 1 and {MAX_GAMMA} with vLLM, not {gamma}")
    draft = draft_for(target, draft)
    worker = worker or WorkerConfig()
    own = worker.own.named()  # which rule is meant does not depend on what ships
    if own.judge is None and (shipped := shipped_judge(target)) is not None:
        own = replace(own, judge=str(shipped))
    if own.judge is None and own.needs_judge:
        raise SelfJudgeError(f"no judge ships for {target}: name one with `judge`")
    worker = replace(worker, own=own)
    # what does not exist is refused here: better than in a worker's traceback
    RequestRules(worker, None if own.judge is None else JudgeConfig.from_pretrained(own.judge), (), gamma)
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", served_reference(target), "--served-model-name", target),
        *("--speculative-config", json.dumps(speculation(target, draft, gamma))),
        *("--worker-cls", WORKER, "--additional-config", json.dumps({KEY: worker.as_json()})),
        "--no-trust-remote-code",
        *more,
    ]


def speculation(target: str, draft: str, gamma: int) -> dict[str, Any]:
    """vLLM's speculative config of a draft; a head must be named as one."""
    from selfjudge.models.export import exported_head  # imports torch: what is wrong is said before

    if (head := exported_head(target, draft, steps=gamma)) is not None:
        return {"method": "eagle3", "model": str(head), "num_speculative_tokens": gamma}
    return {"model": served_reference(draft), "num_speculative_tokens": gamma}


def main(arguments: Sequence[str]) -> None:
    """Become the server of a `command`, with the rules' counters among vLLM's metrics."""
    if find_spec("vllm") is None:
        raise SelfJudgeError("vLLM is not installed here: pip install vllm (or selfjudge[vllm])")
    if MULTIPROCESS not in os.environ:  # counted in the worker, shown by the server
        os.environ[MULTIPROCESS] = tempfile.mkdtemp(prefix="selfjudge-metrics-")
    choose_runner()
    os.execv(arguments[0], list(arguments))  # noqa: S606
