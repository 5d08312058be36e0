"""The hub of models: asked without noise, and not at all where it does not answer."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from typing import Any

from selfjudge.errors import first_line

PATIENCE = 4.0
"""Seconds in which the hub must answer."""
SILENCE_VALID, ANSWER_VALID = 60.0, 10.0
"""Seconds for which its silence, or its answer, is believed."""
_known: tuple[float, str | None] = (-1.0, None)  # until when, and what `unreachable` says


def unreachable() -> str | None:
    """Why the hub does not answer; None if it does, or is not to be asked (HF_HUB_OFFLINE).

    Its own client tries for half a minute. Names are looked up without a limit, hence the thread.
    """
    global _known
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return None
    if time.monotonic() > _known[0]:
        reason = _ask(constants.ENDPOINT)
        _known = time.monotonic() + (SILENCE_VALID if reason else ANSWER_VALID), reason
    return _known[1]


def _ask(address: str) -> str | None:
    from huggingface_hub import get_session

    answers: SimpleQueue[str | None] = SimpleQueue()

    def ask() -> None:
        try:
            get_session().head(address, timeout=PATIENCE)
            answers.put(None)
        except Exception as error:  # whatever a proxy, a resolver or a certificate does
            answers.put(first_line(error))

    threading.Thread(target=ask, daemon=True).start()
    try:
        reason = answers.get(timeout=PATIENCE)
    except Empty:
        reason = f"no answer in {PATIENCE:.0f} s"
    return None if reason is None else f"{address} cannot be reached: {reason}"


def hub_options() -> dict[str, Any]:
    """Options of a look-up: where the hub does not answer, local copies alone are looked at."""
    return {} if unreachable() is None else {"local_files_only": True}


@contextlib.contextmanager
def quiet_hub() -> Iterator[None]:
    """Silence the hub's own words on every retry: what went wrong is said once, by whoever asked it."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
