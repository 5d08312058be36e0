"""The hub of models: asked without noise, and only where it answers at once."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any

from selfjudge.errors import first_line

PATIENCE = 4.0
"""Seconds in which the hub must answer; its own client tries for half a minute."""
VALID = 30.0
"""Seconds for which its answer, or its silence, is believed."""
_last: tuple[float, str | None] = (-VALID, None)  # when it was asked, and why it did not answer


def unreachable() -> str | None:
    """Why the hub does not answer; None if it does, or must not be asked (HF_HUB_OFFLINE)."""
    global _last
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return None
    if time.monotonic() - _last[0] >= VALID:
        reason = None
        try:
            get_session().head(constants.ENDPOINT, timeout=PATIENCE)
        except Exception as error:  # whatever a proxy, a resolver or a certificate does
            reason = f"{constants.ENDPOINT} cannot be reached: {first_line(error)}"
        _last = time.monotonic(), reason
    return _last[1]


def hub_options() -> dict[str, Any]:
    """Options of a look-up: where the hub does not answer, only local copies are looked at."""
    return {} if unreachable() is None else {"local_files_only": True}


@contextlib.contextmanager
def quiet_hub() -> Iterator[None]:
    """Silence the messages of the hub's client: what went wrong is said once, by whoever asked it."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
