"""Settings timed by turns, for `bench`, `demo` and `tune`: what slows a machine down slows down all of them."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from selfjudge.store.run_folder import LoadWatch
from selfjudge.types import Notify

T = TypeVar("T")


class Turns(Generic[T]):
    """`seconds` of each setting by turn, and the `load` of the machine meanwhile."""

    def __init__(
        self, settings: Sequence[T], count: int, notify: Notify, deadline: float = math.inf, both_ways: bool = False
    ) -> None:
        """No turn begins after the deadline. With `both_ways` every second one goes backwards."""
        self.count, self.notify, self.deadline, self.both_ways = count, notify, deadline, both_ways
        self.seconds: dict[T, list[float]] = {setting: [] for setting in settings}
        self.load, self._stage = LoadWatch(), ""

    def run(
        self, work: Callable[[int, T], float | None], warm_up: Callable[[T], object], cold: Sequence[T]
    ) -> Iterator[tuple[int, T]]:
        """Warm up the `cold` settings, then do the work of all; yield each turn, from 0, and setting once it is done.
        Work may return seconds that its engine counted. A machine that is busy from the start is named at once."""
        for number, setting in enumerate(cold if time.monotonic() < self.deadline else ()):
            self.notify(f"warm-up: {setting}", number / len(cold))
            warm_up(setting)
        busy = self.load.describe() and ", this machine is busy"
        self.load = LoadWatch()
        for turn in range(self.count):
            if time.monotonic() >= self.deadline:
                return
            for setting in list(self.seconds)[:: -1 if self.both_ways and turn % 2 else 1]:
                self._stage = f"turn {turn + 1} of {self.count}{busy}: {setting}"
                self.report()
                begun = time.perf_counter()
                counted = work(turn, setting)
                self.seconds[setting].append(time.perf_counter() - begun if counted is None else counted)
                yield turn, setting

    def report(self, more: str = "", share: float = 0.0) -> None:
        """Say what is timed, with `more` words, where `share` of it is done."""
        done = sum(map(len, self.seconds.values())) + share
        self.notify(f"{self._stage}{more}", done / (self.count * len(self.seconds)))
