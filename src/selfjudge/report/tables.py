"""Records → tables: every table of the report, each empty where there is no data for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from selfjudge.report.intervals import Errors, around, error_of, m_errors, mean_error
from selfjudge.report.making import features, judges, labelling, provenances
from selfjudge.report.order import PAPER, by_task, named, rule_order, several, task_order, timed, title, usual_gamma
from selfjudge.report.records import Results, Run
from selfjudge.report.substitutions import GROUPS, group
from selfjudge.report.table import (
    Column,
    Row,
    Table,
    distinct,
    fixed,
    interval,
    percent,
    points,
    quoted,
    signed,
    signed_points,
    slug,
    text,
)

PAIRS_SHOWN = 4
"""Substitutions named in each group."""


class Against:
    """Finds each run's `exact` and the errors of its Δm."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.exact = {(r.pair, r.task, r.gamma, r.fold): r for r in runs if r.name == "exact"}

    def errors(self, run: Run) -> Errors:
        base = self.exact.get((run.pair, run.task, run.gamma, run.fold))
        return m_errors(run, base) if base is not None and base is not run and run.delta_m is not None else Errors()


def tables(results: Results) -> list[Table]:
    """Every table there is data for, in the order of the page."""
    against = Against(results.runs)
    made = [
        *averages(results.runs, against),
        *(per_task(pair, task, runs, against, several(r.pair for r in results.runs)) for (pair, task), runs in by_task(results.runs).items()),
        *two_stage(results.runs), *suffix_lengths(results.runs), *judges(results.judges), *features(results),
        *labelling(results), *times(results.runs), *substituted(results.runs), *failures(results.runs), *provenances(results),
    ]  # fmt: skip
    full = [table for table in made if table.rows]
    return [replace(table, id=name) for table, name in zip(full, distinct(t.id for t in full), strict=True)]


def averages(runs: Sequence[Run], against: Against) -> list[Table]:
    """Averages over the paper's tasks, one table a pair: every rule at every γ that covers all of its tasks."""
    made = []
    for pair in sorted({run.pair for run in runs}):
        mine = [r for r in runs if r.pair == pair and r.task in PAPER and not r.fold]
        tasks = sorted({r.task for r in mine}, key=task_order)
        if len(tasks) < 2:
            continue
        swept = {r.method for r in mine if named(r)}
        rules: dict[str, list[Run]] = defaultdict(list)
        for run in sorted(mine, key=rule_order):
            if named(run) or run.method not in swept:
                rules[run.rule].append(run)
        rows = [_average(chosen, against) for each in rules.values() for chosen in _sets(each) if len(chosen) > 1]
        heads = [
            Column(
                title(t),
                _cell_of(t, "m"),
                _cell_of(t, "score"),
                help="m, then score in points and its change",
                joint=" / ",
            )
            for t in tasks
        ]
        columns = (
            Column("rule", lambda r: r["rule"], numeric=False), Column("γ", lambda r: r["gammas"]), *heads,
            Column("mean Δm", lambda r: signed(r["delta_m"]), lambda r: interval(r["delta_m_ci"], signed), help="against exact, same task and γ"),
            Column("mean m ratio", lambda r: fixed(r["m_ratio"]), lambda r: interval(r["m_ratio_ci"], fixed)),
            Column("mean Δtask", lambda r: signed_points(r["delta_score"]), lambda r: interval(r["delta_ci"], signed_points), help="points"),
            Column("tasks", lambda r: str(len(r["tasks"]))),
        )  # fmt: skip
        partial = any(len(row["tasks"]) < len(tasks) for row in rows)
        made.append(
            Table(
                slug("averages", pair if several(r.pair for r in runs) else ""),
                "Average over tasks" + (f", {pair}" if several(r.pair for r in runs) else ""), columns, tuple(rows),
                "The mean is over " + ", ".join(map(title, tasks)) + "."
                + (" Rows with fewer tasks are not comparable with the others." if partial else "")
                + ("" if set(tasks) == set(PAPER) else f" The paper's average is over {', '.join(map(title, PAPER))}: not all were run."),
            )
        )  # fmt: skip
    return made


def _cell_of(task: str, what: str) -> Callable[[Row], str]:
    def show(row: Row) -> str:
        one = row["tasks"].get(task)
        if one is None:
            return "–" if what == "m" else ""
        if what == "m":
            return fixed(one["m"])
        change = "" if one["delta_score"] is None else f" ({signed_points(one['delta_score'])})"
        return f"{points(one['score'])}{change}"

    return show


def _sets(runs: Sequence[Run]) -> list[list[Run]]:
    """One rule's runs → sets of one run a task: by γ where a γ covers all its tasks, else each task at its own γ."""
    tasks = {r.task for r in runs}
    gammas = {g: [r for r in runs if r.gamma == g] for g in sorted({r.gamma for r in runs})}
    whole = [chosen for chosen in gammas.values() if len(chosen) == len(tasks)]
    if whole:
        return whole
    if len(runs) == len(tasks):
        return [list(runs)]
    most = max(len(chosen) for chosen in gammas.values())
    return [chosen for chosen in gammas.values() if len(chosen) == most]


def _average(runs: Sequence[Run], against: Against) -> Row:
    known = [against.errors(r) for r in runs]
    delta_m, ratio = _mean([r.delta_m for r in runs]), _mean([r.m_ratio for r in runs])
    delta = _mean([r.delta_score for r in runs])
    is_exact = runs[0].name == "exact"
    return {
        "rule": runs[0].rule, "method": runs[0].method, "gammas": ", ".join(str(g) for g in sorted({r.gamma for r in runs})),
        "tasks": {r.task: {"m": r.m, "score": r.score, "delta_m": r.delta_m, "delta_score": r.delta_score} for r in runs},
        "delta_m": delta_m, "delta_m_ci": around(delta_m, mean_error([e.delta_m for e in known])),
        "m_ratio": None if is_exact else ratio, "m_ratio_ci": None if is_exact else around(ratio, mean_error([e.m_ratio for e in known])),
        "delta_score": delta, "delta_ci": around(delta, mean_error([error_of(r.delta_ci) for r in runs])),
    }  # fmt: skip


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def per_task(pair: str, task: str, runs: Sequence[Run], against: Against, pairs: bool) -> Table:
    rows = []
    for run in runs:
        errors = against.errors(run)
        rows.append({
            "pair": pair, "task": task, "rule": run.rule, "method": run.method, "threshold": run.threshold, "gamma": run.gamma, "fold": run.fold, "n": run.n,
            "mean_accepted_length": run.m, "delta_m": run.delta_m, "delta_m_ci": around(run.delta_m, errors.delta_m),
            "m_ratio": run.m_ratio if run.name != "exact" else None, "m_ratio_ci": around(run.m_ratio, errors.m_ratio),
            "measure": run.measure, "score": run.score, "score_ci": run.score_ci, "delta_score": run.delta_score, "delta_ci": run.delta_ci,
            "scores": dict(run.scores), "delta_scores": dict(run.delta_scores), "delta_scores_ci": dict(run.delta_scores_ci), "agreement": run.agreement, "drafts_accepted": run.drafts_accepted, "judged_share": run.judged_share,
            "tokens_per_second": run.tokens_per_second, "extraction_failures": run.extraction_failures, "cut_off": run.cut_off,
        })  # fmt: skip
    measure = runs[0].measure
    others = sorted({name for run in runs for name in run.scores} - {measure})
    columns = [
        Column("rule", lambda r: r["rule"], lambda r: "" if r["threshold"] is None else f"θ {r['threshold']:.3f}", numeric=False),
        Column("γ", lambda r: str(r["gamma"])),
        *([Column("fold", lambda r: r["fold"])] if several(r.fold for r in runs) else []),
        Column("n", lambda r: f"{r['n']:,}"),
        Column("m", lambda r: fixed(r["mean_accepted_length"]), help="tokens per target pass"),
        Column("Δm", lambda r: signed(r["delta_m"]), lambda r: interval(r["delta_m_ci"], signed), help="against exact"),
        Column("m ratio", lambda r: fixed(r["m_ratio"]), lambda r: interval(r["m_ratio_ci"], fixed), help="m over that of exact"),
        Column(measure, lambda r: points(r["score"]), lambda r: interval(r["score_ci"], points), help="points"),
        Column("Δtask", lambda r: signed_points(r["delta_score"]), lambda r: interval(r["delta_ci"], signed_points), help="points against exact"),
        *(Column(name, _other(name), _change(name), help="points, and their change against exact") for name in others),
        Column("same answer", lambda r: percent(r["agreement"]), help="as exact; of open tasks the share of matching words"),
        Column("drafts/cycle", lambda r: fixed(r["drafts_accepted"]), help="drafted tokens accepted in a cycle"),
        Column("judged", lambda r: percent(r["judged_share"]), help="tokens taken against the target's choice"),
        Column("cut off", lambda r: percent(r["cut_off"]), help="answers that ended at the length limit"),
        Column("tokens/s", lambda r: fixed(r["tokens_per_second"], 0 if (r["tokens_per_second"] or 0) >= 100 else 1)),
    ]  # fmt: skip
    return Table(slug("task", pair if pairs else "", task), title(task) + (f", {pair}" if pairs else ""), tuple(columns), tuple(rows))  # fmt: skip


def _change(name: str) -> Callable[[Row], str]:
    def show(row: Row) -> str:
        if name not in row["delta_scores"]:
            return ""
        return f"{signed_points(row['delta_scores'][name])} {interval(row['delta_scores_ci'].get(name), signed_points)}"

    return show


def _other(name: str) -> Callable[[Row], str]:
    return lambda row: points(row["scores"].get(name))


def two_stage(runs: Sequence[Run]) -> list[Table]:
    """`judge_only` against `judged`: same pair, task, γ, judge and threshold."""
    alone = {(r.pair, r.task, r.gamma, r.judge, r.option, r.fold): r for r in runs if r.name == "judge_only"}
    rows = []
    for (pair, task), mine in by_task(runs).items():
        for both in (r for r in mine if r.name == "judged"):
            only = alone.get((pair, task, both.gamma, both.judge, both.option, both.fold))
            if only is not None:
                rows.append({
                    "pair": pair, "task": task, "judge": both.judge, "option": both.option, "gamma": both.gamma, "rule": both.rule, "method": both.method,
                    "m_judged": both.m, "m_judge_only": only.m, "score_judged": both.score, "score_judge_only": only.score,
                    "delta_m": None if both.m is None or only.m is None else both.m - only.m, "delta_score": both.score - only.score,
                })  # fmt: skip
    columns = (
        *_pair_column(runs),
        Column("task", lambda r: title(r["task"]), numeric=False), Column("judge", lambda r: r["judge"], numeric=False),
        Column("θ", lambda r: r["option"]), Column("γ", lambda r: str(r["gamma"])),
        Column("m, judged", lambda r: fixed(r["m_judged"])), Column("m, judge_only", lambda r: fixed(r["m_judge_only"])),
        Column("difference", lambda r: signed(r["delta_m"])),
        Column("score, judged", lambda r: points(r["score_judged"])), Column("score, judge_only", lambda r: points(r["score_judge_only"])),
        Column("difference", lambda r: signed_points(r["delta_score"]), help="points"),
    )  # fmt: skip
    return [Table("two-stage", "Two stages or the judge alone", columns, tuple(rows))]


def _pair_column(runs: Iterable[Run]) -> list[Column]:
    return [Column("pair", lambda r: r["pair"], numeric=False)] if several(r.pair for r in runs) else []


def suffix_groups(runs: Sequence[Run]) -> dict[tuple[Any, ...], list[Run]]:
    """Judged runs whose judges' labels differ in N and in nothing else that is known, at thresholds that several N have."""
    found: dict[tuple[Any, ...], list[Run]] = defaultdict(list)
    for run in runs:
        if run.name == "judged" and run.suffix_length is not None:
            labels = run.label_method, run.label_prompts or 0
            found[run.pair, run.task, run.gamma, run.features, run.fold, *labels].append(run)
    kept: dict[tuple[Any, ...], list[Run]] = {}
    for key, mine in sorted(found.items(), key=lambda item: (item[0][0], task_order(item[0][1]), item[0][2:])):
        lengths: dict[str, set[int | None]] = defaultdict(set)
        for run in mine:
            lengths[run.option].add(run.suffix_length)
        if shared := [run for run in mine if len(lengths[run.option]) > 1]:
            kept[key] = sorted(shared, key=lambda r: (r.suffix_length or 0, rule_order(r)))
    return kept


def suffix_lengths(runs: Sequence[Run]) -> list[Table]:
    rows = [
        {
            "pair": r.pair, "task": r.task, "gamma": r.gamma, "suffix_length": r.suffix_length, "rule": r.rule, "method": r.method,
            "mean_accepted_length": r.m, "delta_m": r.delta_m, "score": r.score, "delta_score": r.delta_score, "delta_ci": r.delta_ci,
        }
        for mine in suffix_groups(runs).values()
        for r in mine
    ]  # fmt: skip
    columns = (
        *_pair_column(runs),
        Column("task", lambda r: title(r["task"]), numeric=False), Column("N", lambda r: str(r["suffix_length"])),
        Column("rule", lambda r: r["rule"], numeric=False), Column("γ", lambda r: str(r["gamma"])),
        Column("m", lambda r: fixed(r["mean_accepted_length"])), Column("Δm", lambda r: signed(r["delta_m"])),
        Column("score", lambda r: points(r["score"])),
        Column("Δtask", lambda r: signed_points(r["delta_score"]), lambda r: interval(r["delta_ci"], signed_points)),
    )  # fmt: skip
    return [Table("suffix-length", "Suffix length N, by decoding", columns, tuple(rows))]


def times(runs: Sequence[Run]) -> list[Table]:
    rows = [
        {"pair": pair, "task": task, "rule": r.rule, "method": r.method, "gamma": r.gamma, "seconds": r.phases, "total": sum(r.phases.values()), "batch": r.batch}
        for (pair, task), mine in by_task(runs).items()
        for r in timed(mine)
    ]  # fmt: skip
    columns = (
        *_pair_column(runs),
        Column("task", lambda r: title(r["task"]), numeric=False), Column("rule", lambda r: r["rule"], numeric=False), Column("γ", lambda r: str(r["gamma"])),
        Column("batch", lambda r: text(r["batch"])), Column("seconds", lambda r: fixed(r["total"], 1)),
        *(Column(phase, _phase(phase)) for phase in ("draft", "target", "judge", "rule", "other")),
    )  # fmt: skip
    return [Table("time", "Time by phase", columns, tuple(rows), "Shares of the time spent decoding.")]


def _phase(phase: str) -> Callable[[Row], str]:
    return lambda row: percent(row["seconds"][phase] / row["total"]) if phase in row["seconds"] else "–"


def typical(runs: Sequence[Run]) -> list[Run]:
    """Of each method with substitutions one run at the usual γ: F, else the one with most of them."""
    gamma = usual_gamma(runs)
    found: dict[str, Run] = {}
    for run in (r for r in runs if r.gamma == gamma and r.substitutions):
        best = found.get(run.method)
        if best is None or (run.option == "F", _count(run)) > (best.option == "F", _count(best)):
            found[run.method] = run
    return list(found.values())


def _count(run: Run) -> int:
    return sum(n for _, _, n in run.substitutions)


def substituted(runs: Sequence[Run]) -> list[Table]:
    rows = []
    for (pair, task), mine in by_task(runs).items():
        for run in typical(mine):
            grouped: dict[str, list[tuple[str, str, int]]] = {name: [] for name in GROUPS}
            for choice, taken, count in sorted(run.substitutions, key=lambda s: (-s[2], s[:2])):
                grouped[group(choice, taken)].append((choice, taken, count))
            groups = {
                name: {"count": n, "share": n / max(1, _count(run)), "most_frequent": [list(s) for s in found[:PAIRS_SHOWN]]}
                for name, found in grouped.items() if (n := sum(n for *_, n in found))
            }  # fmt: skip
            rows.append({"pair": pair, "task": task, "rule": run.rule, "method": run.method, "gamma": run.gamma, "count": _count(run), "groups": groups})  # fmt: skip
    columns = (
        *_pair_column(runs),
        Column("task and rule", lambda r: title(r["task"]), lambda r: r["rule"], numeric=False), Column("count", lambda r: f"{r['count']:,}"), *(Column(name, *_of_group(name), numeric=False, wide=True) for name in GROUPS),
    )  # fmt: skip
    note = (
        "Target’s choice → what was taken, and how often. Groups are guessed from the two tokens alone, by short lists of words and by"
        " comparing letters; counts are of the pairs that the run stored."
    )
    return [Table("substitutions", "Frequent judged substitutions", columns, tuple(rows), note)]


def _of_group(name: str) -> tuple[Callable[[Row], str], Callable[[Row], str]]:
    def share(row: Row) -> str:
        return percent(row["groups"][name]["share"]) if name in row["groups"] else "–"

    def pairs(row: Row) -> str:
        found = row["groups"].get(name, {}).get("most_frequent", ())
        return ",\n".join(f"{quoted(a)} → {quoted(b)}\N{NO-BREAK SPACE}×\N{NO-BREAK SPACE}{n}" for a, b, n in found)

    return share, pairs


def failures(runs: Sequence[Run]) -> list[Table]:
    """Answers from which nothing could be extracted: rules down, tasks across, each at its usual γ."""
    known = [r for r in runs if r.extraction_failures is not None]
    made: dict[tuple[str, str], dict[str, Any]] = {}
    tasks = sorted({r.task for r in known}, key=task_order)
    for (pair, _), mine in by_task(known).items():
        gamma = usual_gamma(mine)
        for r in (r for r in mine if r.gamma == gamma and not r.fold):
            row = made.setdefault(
                (pair, r.rule), {"pair": pair, "rule": r.rule, "method": r.method, "order": rule_order(r), "shares": {}}
            )
            row["shares"][r.task] = r.extraction_failures
    rows = [
        {k: v for k, v in row.items() if k != "order"}
        for row in sorted(made.values(), key=lambda row: (row["pair"], row["order"]))
    ]
    columns = (
        *_pair_column(known), Column("rule", lambda r: r["rule"], numeric=False), *(Column(title(t), _failure(t)) for t in tasks)
    )  # fmt: skip
    return [
        Table(
            "extraction",
            "Answers that could not be extracted",
            columns,
            tuple(rows),
            "Share of the examples, at the γ that most runs of the task have.",
        )
    ]


def _failure(task: str) -> Callable[[Row], str]:
    return lambda row: percent(row["shares"].get(task))
