"""Figures of a running server, in the text format that Prometheus reads."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable

PREFIX = "selfjudge_"
BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

COUNTERS = {
    "requests_total": "HTTP requests by endpoint and status.",
    "generations_total": "Answers by how they ended: stop, length, cancelled, timeout, shutdown or error.",
    "prompt_tokens_total": "Tokens of the prompts of these answers.",
    "tokens_total": "Tokens of these answers by origin: draft (aligned), judge (against alignment) or target.",
    "cycles_total": "Verification passes, counted for every answer that took part.",
}
HISTOGRAMS = {
    "time_to_first_token_seconds": "From the arrival of a request to its first token.",
    "request_seconds": "From the arrival of a request to its last token.",
}


class Metrics:
    """Counters, histograms and gauges; any thread may count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, dict[str, float]] = {name: defaultdict(float) for name in COUNTERS}
        self._buckets = {name: [0] * (len(BUCKETS) + 1) for name in HISTOGRAMS}
        self._sums = dict.fromkeys(HISTOGRAMS, 0.0)
        self._gauges: dict[str, tuple[str, Callable[[], float]]] = {}

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        """Count; the values of labels come from the program, never from a client."""
        key = ",".join(f'{k}="{v}"' for k, v in labels.items())
        with self._lock:
            self._counts[name][f"{{{key}}}" if key else ""] += amount

    def observe(self, name: str, seconds: float) -> None:
        with self._lock:
            self._buckets[name][bisect_left(BUCKETS, seconds)] += 1
            self._sums[name] += seconds

    def gauge(self, name: str, about: str, value: Callable[[], float]) -> None:
        """A figure that is asked for when the metrics are."""
        self._gauges[name] = about, value

    def total(self, name: str) -> float:
        with self._lock:
            return sum(self._counts[name].values())

    def text(self) -> str:
        lines: list[str] = []

        def head(name: str, kind: str, about: str) -> None:
            lines.extend((f"# HELP {PREFIX}{name} {about}", f"# TYPE {PREFIX}{name} {kind}"))

        for name, (about, value) in self._gauges.items():
            head(name, "gauge", about)
            lines.append(f"{PREFIX}{name} {value():g}")
        with self._lock:
            for name, about in COUNTERS.items():
                head(name, "counter", about)
                lines.extend(f"{PREFIX}{name}{labels} {count:g}" for labels, count in self._counts[name].items())
            for name, about in HISTOGRAMS.items():
                head(name, "histogram", about)
                below = 0
                for bound, count in zip((*BUCKETS, "+Inf"), self._buckets[name], strict=True):
                    below += count
                    lines.append(f'{PREFIX}{name}_bucket{{le="{bound}"}} {below}')
                lines.append(f"{PREFIX}{name}_sum {self._sums[name]:.6f}")
                lines.append(f"{PREFIX}{name}_count {below}")
        return "\n".join(lines) + "\n"
