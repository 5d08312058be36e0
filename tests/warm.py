"""The program as a process that starts at once: a fork of one that has imported what commands need.

Signals, sockets, environment and exit codes are those of any process; `python -m selfjudge` itself takes seconds to start.
"""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from multiprocessing import forkserver, get_context, resource_tracker, util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

IMPORTED = (
    "torch", "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama",
    "transformers.generation.utils", "selfjudge.cli.main", "selfjudge.distill.pipeline", "selfjudge.evaluate.pipeline",
    "selfjudge.integrations.server.run", "selfjudge.models.pair", "selfjudge.tune.pipeline",
    "encodings.idna", "llguidance.hf", "pydantic.v1", "uvicorn.lifespan.off",
)  # fmt: skip
"""Modules that every fork has from its start."""


def _fork_parent(executable: str, arguments: Sequence[str], kept: Sequence[int]) -> int:
    """In place of a fresh interpreter: a fork of this one, which has imported nearly all; it keeps nothing of pytest's."""
    if pid := os.fork():
        return pid
    try:
        import torch

        torch.set_num_threads(1)
        sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
        logging.getLogger().handlers.clear()
        for name in logging.root.manager.loggerDict:
            for handler in logging.getLogger(name).handlers:
                if isinstance(handler, logging.StreamHandler):
                    handler.setStream(sys.stderr)
        first = 3
        for number in (*sorted(kept), os.sysconf("SC_OPEN_MAX")):
            os.closerange(first, number)
            first = number + 1
        gc.freeze()  # collections in forks need not touch what all share
        exec(arguments[-1], {})
    except Exception:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)


@cache
def forks() -> Any:
    """Where forks come from: one process for all tests of a worker, which computes on one thread. The first call comes
    before the first test, so that forks know nothing of what tests did."""
    context, start_fresh = get_context("forkserver"), util.spawnv_passfds
    context.set_forkserver_preload(list(IMPORTED))
    resource_tracker.ensure_running()
    util.spawnv_passfds = _fork_parent
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = start_fresh
    return context


def _work(arguments: list[str], variables: dict[str, str], stderr: Connection, stdout: Path) -> None:
    os.environ.clear()
    os.environ.update(variables)
    with stdout.open("w") as said:
        os.dup2(said.fileno(), 1)
    os.dup2(stderr.fileno(), 2)
    stderr.close()
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.argv = ["selfjudge", *arguments]
    from selfjudge.cli.main import main

    main()


class Process:
    """`selfjudge ARGUMENTS`, with the part of `subprocess.Popen` that tests use; what it prints goes to a file."""

    def __init__(self, arguments: Sequence[str], stdout: Path = Path(os.devnull), **variables: str) -> None:
        context = forks()
        reader, writer = context.Pipe(duplex=False)
        given = (list(arguments), {**os.environ, "OMP_NUM_THREADS": "1", **variables}, writer, stdout)
        self._process = context.Process(target=_work, args=given)
        self._process.start()
        writer.close()
        self.pid: int = self._process.pid
        self.stderr = os.fdopen(os.dup(reader.fileno()), encoding="utf-8", errors="replace")
        reader.close()

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("selfjudge", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()
