"""What operators see of a running server: figures in the text format of Prometheus, and a log for people or as JSON."""

import json
import logging
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from selfjudge.store import read_asset

PREFIX = "selfjudge_"
BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
MODES = ("judged", "off")  # values of the label `mode`: whether a draft could be accepted against the target's choice

DECLARED = json.loads(read_asset(__package__, "metrics.json"))  # what there is to count, and what each name means


class Metrics:
    """Counters, histograms and gauges of one server, by names without their prefix; any thread may count."""

    def __init__(self) -> None:
        disable_created_metrics()  # the time of each counter's first value, which nobody asked for
        self.registry = CollectorRegistry()
        self._counters = {
            name: Counter(PREFIX + name, declared["about"], declared["labels"], registry=self.registry)
            for name, declared in DECLARED["counters"].items()
        }
        self._histograms = {}
        for name, declared in DECLARED["histograms"].items():
            steps = declared.get("steps") or [declared["unit"] * seconds for seconds in BUCKETS]
            histogram = Histogram(PREFIX + name, declared["about"], ["mode"], buckets=steps, registry=self.registry)
            self._histograms[name] = histogram
        self._gauges: dict[str, Gauge] = {}

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        """Count; the values of labels come from the program, never from a client."""
        self._counters[name].labels(**labels).inc(amount)

    def observe(self, name: str, value: float, mode: str) -> None:
        self._histograms[name].labels(mode).observe(value)

    def gauge(self, name: str, value: Callable[[], float], **labels: str) -> None:
        """A figure that is computed when the metrics are read."""
        if name not in self._gauges:
            self._gauges[name] = Gauge(PREFIX + name, DECLARED["gauges"][name], list(labels), registry=self.registry)
        gauge = self._gauges[name].labels(**labels) if labels else self._gauges[name]
        gauge.set_function(value)

    def text(self) -> str:
        return str(generate_latest(self.registry), "utf-8")


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {"time": self.formatTime(record), "level": record.levelname, "logger": record.name}
        line |= {"message": record.getMessage(), **getattr(record, "fields", {})}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure_log(form: str) -> None:
    """Write what this program, and the packages that it uses, have to say to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger().addHandler(handler)
    logging.getLogger("selfjudge").setLevel(logging.INFO)
