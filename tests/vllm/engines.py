"""What the tests ask of engines, each in a process of its own."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from multiprocessing import forkserver, get_context
from pathlib import Path
from typing import Any

import pytest
from engine import command, work

HERE = Path(__file__).parent
WORKER = "selfjudge.integrations.vllm.JudgeWorker"
ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""For commands that are many on few cores: processes that wait for each other are busy, too."""
GAMMA = 4  # of the embedded pair
TINY_GAMMA = 3
Answers = list[dict[str, Any]]


def environment(**more: str) -> dict[str, str]:
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    quiet = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
    common = {"VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": os.pathsep.join(paths), **own_core()}
    return {**os.environ, **quiet, **common, **more}


def own_core() -> dict[str, str]:
    """A core for the engines of each of several test workers: two that share cores wait for each other's threads."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if not worker:
        return {}
    cores = sorted(os.sched_getaffinity(0))
    return {"VLLM_CPU_OMP_THREADS_BIND": str(cores[int(worker) % len(cores)])}


def started(engine: dict[str, Any], runs: list[dict[str, Any]], v2: bool, **variables: str) -> tuple[str, Answers]:
    """What the engine said on stderr, and its answers; none where it did not start."""
    if engine.get("tensor_parallel_size", 1) == 1:
        variables |= ONE_PROCESS
    with tempfile.TemporaryDirectory() as name:
        job, answers, log = (Path(name) / file for file in ("job.json", "answers.json", "log"))
        job.write_text(json.dumps({"engine": engine, "runs": runs, "v2": v2}))
        if v2:  # vLLM must find Triton when it is imported
            command = [sys.executable, str(HERE / "engine.py"), str(job), str(answers)]
            with log.open("w") as said:
                subprocess.run(
                    command, env=environment(**variables), stdout=said, stderr=said, timeout=900, check=False
                )
        else:
            process = _forks().Process(target=work, args=(job, answers, log, environment(**variables)))
            process.start()
            process.join(900)
            process.kill()
            process.join()
        return log.read_text(), json.loads(answers.read_text()) if answers.exists() else []


@cache
def _forks() -> Any:
    """Where engines come from: forks of a process that has imported vLLM, which takes as long as a tiny engine's work."""
    context = get_context("forkserver")
    context.set_forkserver_preload([
        "vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker", "selfjudge.integrations.vllm", "selfjudge.cli.main",
        "selfjudge.evaluate.pipeline", "selfjudge.tune.pipeline", "vllm.v1.attention.backends.cpu_attn",
        "vllm.model_executor.layers.quantization.online.base",
    ])  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in environment().items():
            patch.setenv(variable, value)
        forkserver.ensure_running()
    return context


def call(words: Sequence[str], folder: Path | None = None, **variables: str) -> str:
    """What `selfjudge WORDS` prints, run in a folder by a fork that has imported vLLM."""
    with tempfile.TemporaryDirectory() as name:
        out, log = (Path(name) / file for file in ("out", "log"))
        given = (list(words), folder or Path(name), out, log, environment(**ONE_PROCESS, **variables))
        process = _forks().Process(target=command, args=given)
        process.start()
        process.join(1800)
        process.kill()
        process.join()
        assert process.exitcode == 0, f"{shlex.join(words)}\n{log.read_text()[-4000:]}"
        return out.read_text()


def run(engine: dict[str, Any], runs: list[dict[str, Any]], *, v2: bool = False, **variables: str) -> Answers:
    said, answers = started(engine, runs, v2, **variables)
    assert answers, said[-4000:]
    return answers


def greedy(tokens: int, **asked: Any) -> dict[str, Any]:
    """Sampling parameters; `asked` goes to the judge."""
    return {"temperature": 0, "max_tokens": tokens, **({"extra_args": {"selfjudge": asked}} if asked else {})}


def tiny_engine(tiny: Path, features: str = "hidden", **options: Any) -> dict[str, Any]:
    return {
        "model": str(tiny / "target"), "max_model_len": 64, "worker_cls": WORKER,
        "speculative_config": {"model": str(tiny / "draft"), "num_speculative_tokens": TINY_GAMMA},
        "additional_config": {"selfjudge": {"judge": str(tiny / features), "strict_start": 0, "strict_code": False}},
        **options,
    }  # fmt: skip


@contextmanager
def served(words: Sequence[str], folder: Path, *, fresh: bool = False, **variables: str) -> Iterator[str]:
    """The address of the server of `selfjudge WORDS`, or of a command of vLLM, on a free port, once it answers.

    It is a fork that has imported vLLM, unless it is to be `fresh`; what it says goes to the file `log` of the folder.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    log, address = folder / "log", f"http://127.0.0.1:{port}"
    log.touch()
    server = _forks().Process(
        target=command, args=([*words, "--port", port], folder, log, log, environment(**variables), fresh)
    )
    server.start()
    try:
        for _ in range(1200):
            assert server.is_alive(), f"{shlex.join(words)}\n{log.read_text()[-4000:]}"
            if fetched(f"{address}/health") is not None:
                break
            time.sleep(0.5)
        else:
            pytest.fail(f"no answer of the server after ten minutes\n{log.read_text()[-4000:]}")
        yield address
    finally:
        server.terminate()
        server.join(60)
        server.kill()


def fetched(url: str) -> str | None:
    try:
        with urllib.request.urlopen(url, timeout=120) as reply:
            return str(reply.read().decode())
    except OSError:
        return None
