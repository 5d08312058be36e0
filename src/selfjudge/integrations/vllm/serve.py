"""The short form of `vllm serve` with a judge: one pair in, all flags out."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from selfjudge.errors import SelfJudgeError
from selfjudge.integrations.vllm import WORKER
from selfjudge.integrations.vllm.config import KEY, chosen_threshold
from selfjudge.integrations.vllm.counts import MULTIPROCESS
from selfjudge.judge.model import Judge
from selfjudge.models.catalogue import EMBEDDED
from selfjudge.models.pull import pull


def command(
    target: str = "smollm2-135m",
    draft: str | None = None,
    *,
    judge: str | Path | None = None,
    theta: float | str | None = None,
    quality: float | None = None,
    gamma: int = 5,
    host: str = "127.0.0.1",
    port: int = 8000,
    more: Sequence[str] = (),
) -> list[str]:
    """What to run: vLLM's OpenAI-compatible server with target, draft and judge; `more` flags of vLLM go last.

    Target and draft are hub ids, checkpoint folders or the name of an embedded pair, which brings its draft and, where
    one ships, its judge.
    """
    if gamma < 1:
        raise SelfJudgeError(f"vLLM verifies drafts of at least one token: gamma must be 1 or more, not {gamma}")
    embedded = EMBEDDED.get(target)
    if draft is None and embedded is not None and embedded.draft is not None:
        draft = f"{target}/draft"
    if draft is None:
        raise SelfJudgeError(f"{target} brings no draft of its own: name one with --draft")
    if judge is None and embedded is not None:
        judge = embedded.judge
    if judge is None:
        raise SelfJudgeError(f"no judge ships for {target}: give --judge FOLDER")
    settings: dict[str, object] = {"judge": str(judge)}
    settings |= {k: v for k, v in (("theta", theta), ("quality", quality)) if v is not None}
    found = Judge.from_pretrained(judge)  # what is wrong with it is better said here than by a worker
    found.threshold("R") if len(settings) == 1 else chosen_threshold(found, theta, quality)
    return [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server",
        "--model", _checkpoint(target), "--served-model-name", target,
        "--speculative-config", json.dumps({"model": _checkpoint(draft), "num_speculative_tokens": gamma}),
        "--worker-cls", WORKER, "--additional-config", json.dumps({KEY: settings}),
        "--host", host, "--port", str(port), *more,
    ]  # fmt: skip


def _checkpoint(reference: str) -> str:
    """What vLLM loads: the folder of an embedded model, else what was given."""
    name = reference.removesuffix("/draft")
    if name not in EMBEDDED:
        return reference
    return str(pull(name, verify=False) / ("draft" if reference.endswith("/draft") else "target"))


def main(arguments: Sequence[str]) -> None:
    """Become the server `arguments` describes (a `command`), with the judge's counters among vLLM's metrics."""
    if find_spec("vllm") is None:
        raise SelfJudgeError("vLLM is not installed here: pip install vllm (or selfjudge[vllm])")
    if MULTIPROCESS not in os.environ:  # the judge counts in the worker, /metrics is answered by the server
        os.environ[MULTIPROCESS] = tempfile.mkdtemp(prefix="selfjudge-metrics-")
    os.execv(arguments[0], list(arguments))  # noqa: S606
