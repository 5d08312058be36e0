"""A share of the requests is answered a second time, exactly, to watch a certificate (`tune.monitor`).

This is what both servers share: who is chosen, what is compared, counted and kept. Prompts and answers are held until
both answers are there; nothing of them is kept unless a file is named for it.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from selfjudge.tune.monitor import FIGURES, OUTCOMES, WAITING, Monitor, compute_loss, keep

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


class Shadow:
    """Chooses requests, compares their two answers, and says once when the certificate is refuted.

    Each request that `choose` took ends with one call of `end`.
    """

    def __init__(
        self, monitor: Monitor, share: float, file: Path | None, log: logging.Logger, registry: CollectorRegistry
    ) -> None:
        from prometheus_client import Counter, Gauge

        self.monitor, self.share, self.file, self.log = monitor, share, file, log
        self._outcomes = Counter("selfjudge_shadow_requests_total", OUTCOMES, ["outcome"], registry=registry)
        self._figures = {
            name: Gauge(f"selfjudge_{name}", about, multiprocess_mode="mostrecent", registry=registry)
            for name, about in FIGURES.items()
        }
        self.on_refuted: Callable[[], None] = lambda: None
        self._chosen = 0  # requests that lack one of their two answers
        self._lock = threading.Lock()
        self._show()

    def choose(self) -> bool:
        """Toss a coin for a request: whether it is answered both ways."""
        if self.monitor.refuted or random.random() >= self.share:  # noqa: S311
            return False
        with self._lock:
            chosen = self._chosen < WAITING
            self._chosen += chosen
        if not chosen:  # whatever its answer would be: to skip by that would be biased
            self._outcomes.labels("skipped").inc()
        return chosen

    def compare(self, prompt: object, exact: str, shown: str) -> float:
        """The difference of the two answers to a request; they are kept where a file is named."""
        difference = compute_loss(exact, shown)
        if self.file is not None:
            row = {"time": int(time.time()), "prompt": prompt, "exact": exact, "shown": shown, "difference": difference}
            keep(self.file, row)
        return difference

    def end(self, difference: float | None) -> None:
        """Count a request by the difference of its answers; None where one is missing."""
        refuted = difference is not None and self.monitor.observe(difference)
        if refuted:
            self.log.warning(self.monitor.verdict)
            self.on_refuted()
        self._show()
        with self._lock:
            self._chosen -= 1
        self._outcomes.labels("failed" if difference is None else "counted").inc()

    def _show(self) -> None:
        for name, value in self.monitor.figures().items():
            self._figures[name].set(value)
