"""Records → charts as data; `draw` makes pictures of them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from selfjudge.report import records
from selfjudge.report.formats import change, fixed, gain, points
from selfjudge.report.records import EvalRun, Interval, group_by_task
from selfjudge.report.tables import Row

MOST_METHODS = 5  # number of methods in one chart; the tables have all
FIRST = ("exact", "judged", "margin", "fly", "topk")  # rules that a chart draws first, one method of each


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    label: str = ""  # text that is shown when the point is pointed at
    tag: str = ""  # text beside the point
    interval: Interval | None = None  # confidence interval of y


@dataclass(frozen=True)
class Series:
    name: str
    style: int
    points: tuple[Point, ...]
    marked: bool = True


@dataclass(frozen=True)
class Chart:
    """Lines, each through its points in their order."""

    id: str
    title: str
    x: str
    y: str
    series: tuple[Series, ...]
    task: str = ""
    level: float | None = None  # the y of a horizontal line, such as that of `exact`

    @property
    def description(self) -> str:
        """The chart in words, for screen readers."""
        ends = ((s.name, dict.fromkeys((s.points[0], s.points[-1]))) for s in self.series if s.points)
        lines = (f"{name}: {' to '.join(f'{fixed(p.x)}, {fixed(p.y)}' for p in points)}" for name, points in ends)
        return f"{self.y} against {self.x}. {'; '.join(lines)}"


@dataclass(frozen=True)
class Kept:
    """What a chart draws against the gain in m: what a rule keeps of `exact`, as keys of a row."""

    title: str
    value: str
    interval: str
    of_exact: float  # its value for `exact`

    def describe(self, row: Row) -> str:
        kept = change(row["delta_score"], row["delta_ci"], row["few"])
        if self is SAME_ANSWER:
            kept = f"{points(row['agreement'])} % the same"
        return f"{row['rule']}: {gain(row['m_ratio'])} m, {kept}"

    def place(self, row: Row) -> Point:
        """A rule; the judge's own thresholds have their names beside them."""
        if row["m_ratio"] is None or row[self.value] is None:
            return Point(0.0, self.of_exact, row["rule"])
        tag = next((name for name in ("F", "R") if f":{name}@" in row["rule"]), "")
        ends = None if row["few"] else row[self.interval]
        interval = None if ends is None else (100 * ends[0], 100 * ends[1])
        return Point(100 * (row["m_ratio"] - 1), 100 * row[self.value], self.describe(row), tag, interval)

    def chart(self, name: str, title: str, series: Iterable[Series], task: str = "") -> Chart:
        return Chart(name, title, "gain in m against exact, %", self.title, tuple(series), task, self.of_exact)


SCORE = Kept("change of the score, points", "delta_score", "delta_ci", 0.0)
SAME_ANSWER = Kept("same answer, %", "agreement", "agreement_ci", 100.0)
SECTIONS = {"trade-off": SCORE, "agreement": SAME_ANSWER}


def make_charts(runs: Sequence[EvalRun], section: str) -> Iterable[Chart]:
    """A chart for each task that has the figures, at its usual γ: a line a method, a point a threshold."""
    kept = SECTIONS[section]
    paired = [r for r in runs if _is_paired(r, kept)]
    styles = {"exact": 0}  # the same in all charts
    for (pair, task), every in group_by_task(paired).items():
        gamma = records.usual_gamma(every)
        here = [r for r in every if r.gamma == gamma]
        methods = _choose_methods(here)
        if len(methods) > 1 and "exact" in methods:
            rows = {method: [r.row() for r in here if r.method == method] for method in methods}
            title, part = records.name_task(pair, task, runs)
            named = next((r.row() for r in here if r.method == methods[1] and r.is_named), rows[methods[1]][0])
            heading = f"{title}, γ = {gamma}: {kept.describe(named)}"
            series = []
            for method, own in rows.items():  # one that has no style yet gets the next
                places = sorted(map(kept.place, own), key=lambda point: point.x)
                series.append(Series(method, styles.setdefault(method, len(styles)), tuple(places)))
            yield kept.chart(records.slug(section, part), heading, series, task)


def _is_paired(run: EvalRun, kept: Kept) -> bool:
    is_score = kept is SAME_ANSWER and run.measure == records.MATCHING_WORDS  # the same answer is the score already
    if is_score or run.m is None or run.kind in ("judge_only", "null"):
        return False
    return run.kind == "exact" or None not in (run.m_ratio, getattr(run, kept.value))


def _choose_methods(runs: Sequence[EvalRun]) -> list[str]:
    """At most MOST_METHODS: one of each rule (or the method) in `FIRST`, then those with most runs."""
    count = Counter(r.method for r in runs)
    rules = {r.method: r.kind for r in runs}
    chosen = []
    for rule in FIRST:
        same_rule = [rule] if rule in count else [method for method in count if rules[method] == rule]
        chosen += sorted(same_rule, key=lambda method: -count[method])[:1]
    others = sorted(count, key=lambda method: -count[method])
    return list(dict.fromkeys([*chosen, *others]))[:MOST_METHODS]
