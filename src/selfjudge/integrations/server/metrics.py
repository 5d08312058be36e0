"""Figures of a running server, in the text format that Prometheus reads."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from selfjudge.tune.monitor import OUTCOMES

PREFIX = "selfjudge_"
BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
MODES = ("judged", "off")
"""Values of the label `mode`: whether a draft could be accepted against the target's choice."""

COUNTERS = {
    "requests_total": "HTTP requests by endpoint and status; completions also by mode.",
    "generations_total": "Answers by mode and by how they ended: stop, length, cancelled, timeout, shutdown or error.",
    "prompt_tokens_total": "Tokens of the prompts of these answers, by mode.",
    "tokens_total": "Tokens of these answers by mode and origin: draft (aligned), judge (against alignment) or target.",
    "cycles_total": "Verification passes by mode, counted for every answer that took part.",
    "drafted_tokens_total": "Draft tokens of these answers by mode, accepted or not.",
    "shadow_requests_total": OUTCOMES,
}
HISTOGRAMS = {
    "time_to_first_token_seconds": "From the arrival of a request to its first token, by mode.",
    "request_seconds": "From the arrival of a request to its last token, by mode.",
}


@dataclass
class _Histogram:
    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    sum: float = 0.0


class Metrics:
    """Counters, histograms and gauges; any thread may count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, dict[str, float]] = {name: defaultdict(float) for name in COUNTERS}
        self._histograms: dict[str, dict[str, _Histogram]] = {name: defaultdict(_Histogram) for name in HISTOGRAMS}
        self._gauges: dict[str, tuple[str, dict[str, Callable[[], float]]]] = {}

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        """Count; the values of labels come from the program, never from a client."""
        with self._lock:
            self._counts[name][_text(labels)] += amount

    def observe(self, name: str, seconds: float, **labels: str) -> None:
        with self._lock:
            histogram = self._histograms[name][_text(labels)]
            histogram.counts[bisect_left(BUCKETS, seconds)] += 1
            histogram.sum += seconds

    def gauge(self, name: str, about: str, value: Callable[[], float], **labels: str) -> None:
        """A figure that is asked for when the metrics are."""
        self._gauges.setdefault(name, (about, {}))[1][_text(labels)] = value

    def total(self, name: str, **labels: str) -> float:
        """A counter's sum over all labels, or over those that have these values."""
        wanted = set(filter(None, _text(labels).split(",")))
        with self._lock:
            return sum(count for key, count in self._counts[name].items() if wanted <= set(key.split(",")))

    def text(self) -> str:
        lines: list[str] = []

        def head(name: str, kind: str, about: str) -> None:
            lines.extend((f"# HELP {PREFIX}{name} {about}", f"# TYPE {PREFIX}{name} {kind}"))

        for name, (about, values) in self._gauges.items():
            head(name, "gauge", about)
            lines.extend(f"{PREFIX}{name}{_braces(labels)} {value():g}" for labels, value in values.items())
        with self._lock:
            for name, about in COUNTERS.items():
                head(name, "counter", about)
                lines.extend(
                    f"{PREFIX}{name}{_braces(labels)} {count:g}" for labels, count in self._counts[name].items()
                )
            for name, about in HISTOGRAMS.items():
                head(name, "histogram", about)
                for labels, histogram in self._histograms[name].items():
                    lines.extend(_histogram_lines(PREFIX + name, labels, histogram))
        return "\n".join(lines) + "\n"


def _histogram_lines(name: str, labels: str, histogram: _Histogram) -> list[str]:
    lines, below = [], 0
    for bound, count in zip((*BUCKETS, "+Inf"), histogram.counts, strict=True):
        below += count
        bucket = ",".join(filter(None, [labels, f'le="{bound}"']))
        lines.append(f"{name}_bucket{_braces(bucket)} {below}")
    return [*lines, f"{name}_sum{_braces(labels)} {histogram.sum:.6f}", f"{name}_count{_braces(labels)} {below}"]


def _text(labels: dict[str, str]) -> str:
    return ",".join(f'{key}="{value}"' for key, value in labels.items())


def _braces(labels: str) -> str:
    return f"{{{labels}}}" if labels else ""
