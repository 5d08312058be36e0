"""What cycles cost on this machine: a small grid, measured at first use and kept in the cache folder.
A table belongs to two models of one shape and dtype on one engine, device and version (`BatchEngines.shape`). Answers
only show whether it still holds. Times of a busy machine are used and not kept."""

import hashlib
import json
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import accumulate
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from selfjudge.errors import SelfJudgeError
from selfjudge.store import home, read_json, write_json

SLOPE = 0.1  # guess where nothing was measured, as a share of a pass: one more token of a row, and a draft step
RECENT = 24  # cycles of one size that are compared with the table
CONTRADICTION = 1.4  # ratio of two sizes to the table, relative to one another, from which the table does not hold

MEASURING = "measuring what steps cost here, once on this machine …"
_listeners: list[Callable[[str], None]] = []


@contextmanager
def watch_measuring(say: Callable[[str], None]) -> Iterator[None]:
    """Say `MEASURING` when a model is measured meanwhile."""
    _listeners.append(say)
    try:
        yield
    finally:
        _listeners.remove(say)


def say_measuring() -> None:
    """Tell whoever waits for an answer why it takes longer."""
    for say in tuple(_listeners):
        say(MEASURING)


class CostTable:
    """Seconds of cycles by rows and drafts, and of their draft steps."""

    def __init__(self, shape: str = "") -> None:
        """`shape` names models, engine, device and versions: the table begins as it was kept; without one it is not."""
        self.shape = shape
        self.cycles: dict[int, dict[int, tuple[float, float]]] = {}  # rows → drafts → seconds of drafting, of the rest
        self.stale = False  # whether answers contradict the table: it is measured again before the next batch, once
        self.rough = False  # whether some was measured beside other programs: good enough to choose by, not to show
        self.unmeasurable = False  # whether the context window is too short for a measurement
        self._renewed = False
        self._kept: set[int] = set()  # rows that are in the file, or may be written to it
        self._ratios: dict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))
        self._lists: dict[tuple[int, int], list[float]] = {}
        self._load()

    def covers(self, rows: int) -> bool:
        """Whether about as many rows were measured, and the figures hold."""
        if self.unmeasurable:
            return True
        return not self.stale and any(max(rows, known) <= 2 * min(rows, known) for known in self.cycles)

    def list_untimed(self, most: int) -> list[int]:
        """The numbers of rows up to so many that batches shrink to, and that were not measured."""
        return [rows for rows in (1 << n for n in range(most.bit_length())) if rows not in self.cycles]

    def begin(self, rows: int) -> None:
        """Begin to measure so many rows; a table that does not hold begins anew."""
        if self.stale:
            self.cycles.clear()
            self._kept.clear()
            self._renewed = True
        self.stale = False
        self.drop(rows)

    def drop(self, rows: int) -> None:
        self.cycles.pop(rows, None)
        self._kept.discard(rows)
        self._lists.clear()

    def add(self, rows: int, drafts: int, seconds: tuple[float, float]) -> None:
        """Note the seconds of drafting and of the rest of a cycle."""
        self.cycles.setdefault(rows, {})[drafts] = seconds
        self._lists.clear()

    def smooth(self, rows: int) -> None:
        """Replace disturbed times by lines of median slope over the drafts; plain cycles (another kernel) stay."""
        cells = {drafts: seconds for drafts, seconds in self.cycles[rows].items() if drafts}
        self.rough = True
        for part in (0, 1):
            points = [(drafts, seconds[part]) for drafts, seconds in cells.items()]
            slopes = [(y1 - y0) / (x1 - x0) for i, (x0, y0) in enumerate(points) for x1, y1 in points[i + 1 :]]
            slope = max(0.0, median(slopes)) if slopes else 0.0
            start = max(0.0, median(y - slope * x for x, y in points))
            for drafts in cells:
                old = self.cycles[rows][drafts]
                self.add(rows, drafts, (old[0], start + slope * drafts) if part else (start + slope * drafts, old[1]))

    def seconds(self, rows: int, most: int) -> list[float]:
        """Seconds of cycles of 0 … `most` drafts, rising: one that took longer than a later one met a busy machine."""
        if (rows, most) not in self._lists:
            times = [sum(self._estimate(rows, drafts)) for drafts in range(most + 1)]
            self._lists[rows, most] = [*accumulate(reversed(times), min)][::-1]
        return self._lists[rows, most]

    def _estimate(self, rows: int, drafts: int) -> tuple[float, float]:
        """Drafting and the rest: measured, or between what was; beyond it by the number of tokens."""
        if not self.cycles:
            return SLOPE * drafts, 1.0 + SLOPE * (drafts + rows - 1)
        if rows in self.cycles:
            return _between(self.cycles[rows], drafts)
        known = sorted(self.cycles)
        right = min(max(1, sum(r < rows for r in known)), len(known) - 1)
        if len(known) == 1 or rows < known[0]:
            return self._by_tokens(known[0], rows, drafts)
        low, high = known[right - 1], known[right]
        share = (rows - low) / (high - low)
        (d0, p0), (d1, p1) = self._estimate(low, drafts), self._estimate(high, drafts)
        return d0 + share * max(0.0, d1 - d0), p0 + share * max(0.0, p1 - p0)

    def _by_tokens(self, known: int, rows: int, drafts: int) -> tuple[float, float]:
        """From one measured number of rows: a pass of as many tokens, and draft steps in the same proportion."""
        passes = {known * (d + 1): (0.0, seconds[1]) for d, seconds in self.cycles[known].items()}
        step, one = _between(self.cycles[known], 1)[0], passes[known][1]
        share = _between(passes, rows)[1] / one
        return drafts * step * share, _between(passes, rows * (drafts + 1))[1]

    def watch(self, rows: int, drafts: int, seconds: float) -> None:
        """Compare a cycle of an answer with the table. A busy machine is slower by one factor; a table that does not
        hold is wrong by several. After a second measurement it is the answers that differ: their contexts are long."""
        if self._renewed or drafts not in self.cycles.get(rows, {}):
            return
        ratios = self._ratios[rows, drafts]
        ratios.append(seconds / sum(self.cycles[rows][drafts]))
        if len(ratios) == RECENT:
            sizes = [median(r) for (b, _), r in self._ratios.items() if b == rows and len(r) == RECENT]
            self.stale = self.stale or max(sizes) > CONTRADICTION * min(sizes)

    def _load(self) -> None:
        """Read what was measured earlier. A file that is damaged or of another machine counts as none."""
        if not self.shape:
            return
        try:
            record = read_json(self._path)
            if record.get("shape") != self.shape:
                return
            read = {
                _whole(rows): {_whole(drafts): _pair(seconds) for drafts, seconds in cells.items()}
                for rows, cells in record["cycles"].items()
            }
        except (SelfJudgeError, KeyError, TypeError, ValueError, AttributeError):
            return  # there is none, or it is damaged: it is measured
        self.cycles = {rows: cells for rows, cells in read.items() if 0 in cells and len(cells) > 2}
        self._kept = set(self.cycles)

    def save(self, rows: int) -> None:
        """Keep what was measured of so many rows for the next process, beside what others have kept."""
        if not self.shape:
            return
        self._kept.add(rows)
        known = CostTable("" if self._renewed else self.shape).cycles | {kept: self.cycles[kept] for kept in self._kept}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._path, {"shape": self.shape, "cycles": known})
        except (OSError, SelfJudgeError) as error:
            warnings.warn(f"speeds are measured again next time: {self._path} cannot be written: {error}", stacklevel=2)

    @property
    def _path(self) -> Path:
        return home() / "costs" / f"{hashlib.sha256(self.shape.encode()).hexdigest()[:16]}.json"


def kept_tables() -> list[dict[str, Any]]:
    """All tables in the cache folder; damaged files are left out."""
    tables = []
    for path in sorted((home() / "costs").glob("*.json")):
        with suppress(SelfJudgeError, KeyError, ValueError, TypeError):
            shape = str(read_json(path)["shape"])
            described = json.loads(shape)
            f"{described['device']} {described['target']['dtype']} {described['target']['parameters']:d}"  # it has them
            tables.append({"shape": described, "cycles": CostTable(shape).cycles})
    return [table for table in tables if table["cycles"]]


def _between(points: Mapping[int, tuple[float, float]], x: int) -> tuple[float, float]:
    """Both values between the points around x, or extrapolate from the nearest two; from one by `SLOPE`."""
    known = sorted(points)
    if len(known) == 1:
        draft, rest = points[known[0]]
        return draft * x / max(1, known[0]), rest * (1 + SLOPE * max(0, x - known[0]))
    right = min(max(1, sum(k < x for k in known)), len(known) - 1)
    low, high = known[right - 1], known[right]
    share = (x - low) / (high - low)
    a, b = points[low], points[high]
    return tuple(max(0.2 * u, u + share * (v - u)) for u, v in zip(a, b, strict=True))  # type: ignore[return-value]


def _whole(text: str) -> int:
    if not text.isdecimal() or len(text) > 6:
        raise ValueError(f"{text!r} is not a number of rows or drafts")
    return int(text)


def _pair(value: Any) -> tuple[float, float]:
    draft, rest = (float(part) for part in value)
    if not (isfinite(draft) and isfinite(rest) and 0 <= draft < 1e4 and 0 < rest < 1e4):
        raise ValueError("seconds out of range")
    return draft, rest
