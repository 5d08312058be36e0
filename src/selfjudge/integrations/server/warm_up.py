"""Before the first request: answers are tried out and, on CUDA, kernels compiled and the graphs of cycles captured."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch

from selfjudge.decoding.text import Batch
from selfjudge.integrations.server.config import ServerConfig
from selfjudge.integrations.server.rules import BatchKey
from selfjudge.models.pair import Pair
from selfjudge.types import Notify

LOG = logging.getLogger("selfjudge.server")
CAPTURE_SECONDS = 20.0
"""Time for captures before the server is ready; those that are left follow while it is idle."""
CUDA_PROMPTS = (40, 40, 600)
"""Tokens of the prompts that are tried out on CUDA: short ones, whose graph is captured the second time; a long one."""


class WarmUp:
    """A batch of the server's own rule, as large as it may get, and the cycles of it that are not captured yet."""

    def __init__(self, pair: Pair, choice: BatchKey, config: ServerConfig) -> None:
        self.pair, self.context, self.done = pair, config.max_context, False
        self._batch = Batch(
            pair,
            choice.rule,
            gamma=choice.gamma,
            rows=config.max_batch,
            length=config.max_context,
            engine=config.engine,
            trace=choice.trace,
        )

    def try_out(self) -> None:
        """Answer prompts: what does not work ends the program here, and the first request finds everything compiled."""
        token, on_cuda = next(iter(self.pair.eos_ids), 0), self.pair.target.device.type == "cuda"
        for length in CUDA_PROMPTS if on_cuda else (1,):
            self._batch.add([token] * max(1, min(length, self.context - 3)), max_new_tokens=3)
            while len(self._batch):
                self._batch.step()
        self._batch.close()

    def capture(self, seconds: float, notify: Callable[[float], None] = lambda share: None) -> None:
        """Capture cycles for about so many seconds, at least one; afterwards `done` says whether none is left."""
        try:
            self.done = self._batch.capture(seconds, notify)
        except torch.OutOfMemoryError:
            LOG.warning("not all graphs fit into the memory of the device: others are captured when they are needed")
            self.done = True


def warm_up(pair: Pair, choice: BatchKey, config: ServerConfig, notify: Notify) -> WarmUp:
    """Try out answers under the server's own rule, and capture its cycles for at most CAPTURE_SECONDS."""
    made = WarmUp(pair, choice, config)
    made.try_out()
    made.capture(CAPTURE_SECONDS, partial(notify, "capturing graphs"))
    return made
