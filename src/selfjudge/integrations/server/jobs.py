"""What the endpoints hand to the scheduler, and what comes back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from selfjudge.integrations.asgi import RefusedError
from selfjudge.integrations.server.rules import BatchKey
from selfjudge.types import Generation, Piece

Failure = Literal["cancelled", "timeout", "shutdown", "error"]
FAILURES: dict[Failure, tuple[int, str]] = {
    "cancelled": (499, "the client has gone"),
    "timeout": (504, "the answer took too long"),
    "shutdown": (503, "the server is about to stop"),
    "error": (500, "decoding failed: the server's log says why"),
}


class FullError(RefusedError):
    """The queue is full."""


class ClosedError(RefusedError):
    """The server is about to stop."""


@dataclass(frozen=True)
class Update:
    """What is new about a job; the last update has a result or a failure."""

    text: str = ""
    pieces: Sequence[Piece] = ()
    """The tokens of the text, where the job asked for them."""
    cycle: int = 0
    """The pass that they are from; 0 is a prefill."""
    result: Generation | None = None
    failure: Failure | None = None


@dataclass(eq=False)
class CompletionJob:
    """An answer to be decoded. `send` is called by the decoding thread and must not block."""

    prompt: Sequence[int]
    choice: BatchKey
    max_new_tokens: int
    send: Callable[[Update], None]
    stop: Sequence[str] = ()
    seed: int = 0
    streamed: bool = False
    detailed: bool = False
    """Whether updates carry tokens: all of them, also those without text of their own."""
    key: int = 0
    """The number of the client's API key."""
    arrived: float = field(default_factory=time.perf_counter)
    shadowed: bool = False
    """Whether it is decoded a second time, exactly."""
    over: bool = False
    given_up: Failure | None = None
