"""Records → charts as data; `draw` makes pictures of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from selfjudge.report.records import (
    Interval,
    Results,
    Run,
    by_task,
    named,
    rule_order,
    several,
    timed,
    title,
    usual_gamma,
)
from selfjudge.report.table import distinct, slug
from selfjudge.report.tables import suffix_groups

IN_VIEW = 15.0
"""Points of score below `exact` that a trade-off shows: what loses more would press all else into a corner."""


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    label: str = ""
    """What it is, for whoever points at it."""
    tag: str = ""
    """Written beside it."""


@dataclass(frozen=True)
class Series:
    name: str
    style: int
    points: tuple[Point, ...]
    marked: bool = True


@dataclass(frozen=True)
class Lines:
    """Points joined in their order."""

    id: str
    title: str
    x: str
    y: str
    series: tuple[Series, ...]
    task: str = ""
    log_x: bool = False
    unit: bool = False
    """Both axes from 0 to 1, with the diagonal."""
    level: float | None = None
    """The y of `exact`."""
    band: Interval | None = None
    """And its interval."""
    floor: float | None = None
    """Points below it are out of view; lines run on to the edge."""

    def sees(self, point: Point) -> bool:
        return self.floor is None or point.y >= self.floor

    @property
    def styles(self) -> dict[str, int]:
        """Style by name, for a legend."""
        return {series.name: series.style for series in self.series}

    @property
    def description(self) -> str:
        """The chart in words, for those who do not see it."""
        lines = (
            f"{s.name}: "
            + " to ".join(f"{number(p.x, 2)}, {number(p.y, 2)}" for p in dict.fromkeys((s.points[0], s.points[-1])))
            for s in self.series
            if s.points
        )
        return f"{self.y} against {self.x}. " + "; ".join(lines)


@dataclass(frozen=True)
class Bars:
    """Rows of stacked segments: (label, ((segment, value), …)); segments are named by `names` and styled in their order."""

    id: str
    title: str
    x: str
    rows: tuple[tuple[str, tuple[float, ...]], ...]
    names: tuple[str, ...]
    task: str = ""
    shares: bool = False

    @property
    def styles(self) -> dict[str, int]:
        """Style by name, for a legend; one kind of bar needs none."""
        return {name: style for style, name in enumerate(self.names, 1)} if len(self.names) > 1 else {}

    @property
    def description(self) -> str:
        """The chart in words, for those who do not see it."""
        rows = ((label, zip(self.names, values, strict=True)) for label, values in self.rows)
        return "; ".join(f"{label}: " + ", ".join(f"{name} {value:.3g}" for name, value in row) for label, row in rows)


Chart = Lines | Bars


def number(value: float, digits: int = 10) -> str:
    """A tick: 12, 0.25, 7.5M."""
    value = round(value, digits)
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}".replace("-", "−")


def styles(names: Iterable[str]) -> dict[str, int]:
    """A style for each name; `exact` is always 0."""
    others = [name for name in dict.fromkeys(names) if name != "exact"]
    return {"exact": 0, **{name: number for number, name in enumerate(others, 1)}}


def charts(results: Results) -> dict[str, list[Chart]]:
    """Section → its charts; sections without data are left out."""
    runs = results.runs
    made: dict[str, list[Chart]] = {
        "trade-off": list(trade_offs(runs)), "gamma": list(gammas(runs)), "two-stage": list(two_stages(runs)),
        "suffix-length": list(suffixes(runs)), "roc": list(rocs(results)), "study": list(learning(results)),
        "labelling": list(label_rates(results)), "time": list(time_splits(runs)),
    }  # fmt: skip
    ids = iter(distinct(chart.id for charts in made.values() for chart in charts))
    return {name: [replace(chart, id=next(ids)) for chart in charts] for name, charts in made.items() if charts}


def _where(pair: str, task: str, runs: Sequence[Run]) -> tuple[str, str]:
    """(title, part of an id) of a facet."""
    pairs = several(r.pair for r in runs)
    return title(task) + (f", {pair}" if pairs else ""), slug(pair if pairs else "", task)


def _score(run: Run) -> str:
    return f"{run.measure}, points"


def _point(run: Run) -> Point:
    assert run.m is not None
    tag = run.option if run.judge and named(run) else ""
    label = f"{run.rule}, γ = {run.gamma}: m {run.m:.2f}, {run.measure} {100 * run.score:.1f}"
    return Point(run.m, 100 * run.score, label, tag)


def _curves(runs: Iterable[Run], name: Callable[[Run], str], style: dict[str, int]) -> tuple[Series, ...]:
    """Score against m, a line for each name."""
    grouped: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        if run.m is not None:
            grouped[name(run)].append(run)
    return tuple(
        Series(key, style[key], tuple(_point(r) for r in sorted(mine, key=lambda r: (r.m, r.option))))
        for key, mine in grouped.items()
    )


def _trade_off(
    name: str, heading: str, chosen: Sequence[Run], series: tuple[Series, ...], runs: Sequence[Run]
) -> Lines:
    """Score against m, with the level of `exact` where it was run."""
    one = chosen[0]
    exact = next(
        (
            r
            for r in runs
            if r.name == "exact" and (r.pair, r.task, r.gamma, r.fold) == (one.pair, one.task, one.gamma, one.fold)
        ),
        None,
    )
    made = Lines(
        name, heading, "m", _score(one), series, one.task, level=100 * exact.score if exact else None,
        band=(100 * exact.score_ci[0], 100 * exact.score_ci[1]) if exact and exact.score_ci else None,
    )  # fmt: skip
    if made.level is None:
        return made
    clipped = replace(made, floor=made.level - IN_VIEW)
    seen = [clipped.sees(p) for s in series for p in s.points]
    if all(seen) or sum(seen) < 2:
        return made
    return replace(clipped, title=f"{heading}; {seen.count(False)} below, out of view")


def trade_offs(runs: Sequence[Run]) -> Iterable[Lines]:
    """Score against m at each task's usual γ: a line a method, a point a threshold. A judge alone has charts of its own."""
    style = styles(r.method for r in sorted(runs, key=rule_order))
    for (pair, task), mine in by_task(runs).items():
        gamma = usual_gamma(mine)
        chosen = [r for r in mine if r.gamma == gamma and r.m is not None and not r.fold and r.name != "judge_only"]
        if several(r.rule for r in chosen):
            heading, part = _where(pair, task, runs)
            yield _trade_off(
                slug("trade-off", part), f"{heading}, γ = {gamma}", chosen, _curves(chosen, _method, style), mine
            )


def gammas(runs: Sequence[Run]) -> Iterable[Lines]:
    """m and score against γ, for rules that were run at several."""
    known: dict[tuple[str, str, str], list[Run]] = defaultdict(list)
    for run in sorted(runs, key=rule_order):
        if run.m is not None and not run.fold:
            known[run.pair, run.task, run.rule].append(run)
    swept = {key: mine for key, mine in known.items() if several(r.gamma for r in mine)}
    style = styles(rule for _, _, rule in swept)
    for pair, task in by_task(r for mine in swept.values() for r in mine):
        heading, part = _where(pair, task, runs)
        here = {rule: mine for (p, t, rule), mine in swept.items() if (p, t) == (pair, task)}
        for what in ("m", "score"):
            yield Lines(
                slug("gamma", part, what), heading, "γ", "m" if what == "m" else _score(next(iter(here.values()))[0]),
                tuple(
                    Series(rule, style[rule], tuple(_at_gamma(r, what) for r in sorted(mine, key=lambda r: r.gamma)))
                    for rule, mine in here.items()
                ),
                task,
            )  # fmt: skip


def _at_gamma(run: Run, what: str) -> Point:
    whole = _point(run)
    return Point(run.gamma, whole.x if what == "m" else whole.y, whole.label)


def two_stages(runs: Sequence[Run]) -> Iterable[Lines]:
    """judge_only and judged of the same judge, where the former was run."""
    alone = {(r.pair, r.task, r.gamma, r.judge) for r in runs if r.name == "judge_only"}
    chosen = [
        r for r in sorted(runs, key=rule_order)
        if (r.pair, r.task, r.gamma, r.judge) in alone and r.name in ("judged", "judge_only") and r.m is not None
    ]  # fmt: skip
    style = styles(r.method for r in chosen)
    for (pair, task), mine in by_task(chosen).items():
        gamma = usual_gamma(mine)
        here = [r for r in mine if r.gamma == gamma]
        if several(r.name for r in here):
            heading, part = _where(pair, task, runs)
            yield _trade_off(
                slug("two-stage", part), f"{heading}, γ = {gamma}", here, _curves(here, _method, style), runs
            )


def suffixes(runs: Sequence[Run]) -> Iterable[Lines]:
    """A line an N; several judges of one N are lines of their own."""
    grouped = suffix_groups(runs)
    every = sorted((r for mine in grouped.values() for r in mine), key=lambda r: r.suffix_length or 0)
    judges: dict[int | None, set[str]] = defaultdict(set)
    for run in every:
        judges[run.suffix_length].add(run.judge)

    def length(run: Run) -> str:
        return f"N = {run.suffix_length}" + (f", {run.judge}" if len(judges[run.suffix_length]) > 1 else "")

    style = styles(map(length, every))
    for number, ((pair, task, gamma, features, _, method, _), mine) in enumerate(grouped.items()):
        heading, part = _where(pair, task, runs)
        which = ", ".join(filter(None, (f"γ = {gamma}", method, features)))
        if series := _curves(mine, length, style):
            yield _trade_off(slug("suffix-length", part, str(number)), f"{heading}, {which}", mine, series, runs)


def _method(run: Run) -> str:
    return run.method


def rocs(results: Results) -> Iterable[Lines]:
    cards = [card for card in results.judges if card.roc is not None]
    series = []
    for number, card in enumerate(cards, 1):
        roc = card.roc
        assert roc is not None
        name = card.name + ("" if roc.auc is None else f", AUC {roc.auc:.3f}")
        curve = tuple(Point(x, y) for x, y in zip(roc.fpr, roc.tpr, strict=True))
        series.append(Series(name, number, curve, marked=False))
        marks = tuple(Point(*at, f"{card.name}, {mark}", mark) for mark, at in roc.marks.items())
        series += [Series(name, number, (mark,)) for mark in marks]
    if series:
        yield Lines(
            "roc", "ROC of the judges on holdout mismatches", "unacceptable tokens accepted", "acceptable tokens accepted",
            tuple(series), unit=True,
        )  # fmt: skip


def learning(results: Results) -> Iterable[Lines]:
    for number, study in enumerate(results.studies):
        series = tuple(
            Series(label, style, tuple(
                Point(row["labels"] or 0, y, f"{label}, {row['labels']:,.0f} labels: {y:.3f}")
                for row in study.learning_curve if row["labels"] and (y := row[kind]) is not None
            ))
            for style, (kind, label) in enumerate((("linear", "linear"), ("mlp", "MLP")), 1)
        )  # fmt: skip
        if any(s.points for s in series):
            yield Lines(
                slug("learning-curve", str(number) if number else ""), f"Learning curve, {study.target}", "labels",
                "ROC-AUC, holdout mismatches", tuple(s for s in series if s.points), log_x=True,
            )  # fmt: skip


def label_rates(results: Results) -> Iterable[Bars]:
    grouped: dict[tuple[str, str], list[tuple[str, tuple[float, ...]]]] = defaultdict(list)
    for run in results.labels:
        grouped[run.pair, run.provenance.machine].append((run.method, (run.rows_per_hour,)))
    for (pair, machine), rows in grouped.items():
        heading = ", ".join(filter(None, (pair, machine)))
        yield Bars(slug("labelling", pair, machine), heading, "labels per hour", tuple(rows), ("labels per hour",))


def time_splits(runs: Sequence[Run]) -> Iterable[Bars]:
    names = ("draft", "target", "judge", "rule", "other")
    for (pair, task), mine in by_task(runs).items():
        chosen = timed(mine)
        rows = tuple(
            (r.rule + (f", fold {r.fold}" if r.fold else ""), tuple(r.phases.get(n, 0.0) / sum(r.phases.values()) for n in names))
            for r in chosen
        )  # fmt: skip
        if rows:
            heading, part = _where(pair, task, runs)
            yield Bars(slug("time", part), f"{heading}, γ = {chosen[0].gamma}", "share of the time", rows, names, task, shares=True)  # fmt: skip
