"""Records → tables: every table of the report, each empty where there is no data for it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from selfjudge.report.equal_m import equal_m
from selfjudge.report.intervals import Errors, around, error_of, m_errors, mean_error
from selfjudge.report.records import (
    PAPER,
    JudgeCard,
    LabelRun,
    Results,
    Run,
    Study,
    by_task,
    named,
    rule_order,
    several,
    task_order,
    timed,
    title,
    usual_gamma,
)
from selfjudge.report.substitutions import GROUPS, group
from selfjudge.report.table import (
    FOLD,
    GAMMA,
    RULE,
    Column,
    Row,
    Table,
    distinct,
    fixed,
    percent,
    points,
    quoted,
    rule_name,
    same_answer,
    signed,
    signed_points,
    slug,
    thousandths,
    whole,
    word_column,
)

PAIRS_SHOWN = 4
"""Substitutions named in each group."""
TASK = word_column("task", lambda row: title(row["task"]))

PER_TASK = [
    "pair",
    "task",
    "rule",
    "ships",
    "both",
    "method",
    "threshold",
    "gamma",
    "fold",
    "n",
    "mean_accepted_length",
    "delta_m",
    "delta_m_ci",
    "m_ratio",
    "measure",
    "score",
    "score_ci",
    "delta_score",
    "delta_ci",
    "scores",
    "delta_scores",
    "delta_scores_ci",
    "agreement",
    "agreement_ci",
    "lost",
    "gained",
    "drafts_accepted",
    "judged_share",
    "tokens_per_second",
    "extraction_failures",
    "cut_off",
]
"""What a row of a per-task table takes from its run."""


def tables(results: Results) -> dict[str, list[Table]]:
    """Section → its tables; only what there is data for."""
    runs = results.runs
    against = Against(runs)
    sections = {
        "averages": averages(runs, against),
        "task": per_tasks(runs, against),
        "equal-m": equal_m(runs),
        "two-stage": [two_stage(runs)],
        "suffix-length": [suffix_lengths(runs)],
        "roc": [judges(results.judges)],
        "study": [features(results.studies)],
        "labelling": [labelling(results.labels)],
        "time": [times(runs)],
        "substitutions": [substituted(runs)],
        "extraction": [failures(runs)],
        "provenance": [provenances(results)],
    }
    full = {name: [table for table in section if table.rows] for name, section in sections.items()}
    ids = iter(distinct(table.id for section in full.values() for table in section))
    return {name: [replace(table, id=next(ids)) for table in section] for name, section in full.items() if section}


class Against:
    """Finds each run's `exact` and the errors of its Δm."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.exact = {(r.pair, r.task, r.gamma, r.fold): r for r in runs if r.name == "exact"}

    def errors(self, run: Run) -> Errors:
        """As eval stored them, else from the samples."""
        base = self.exact.get((run.pair, run.task, run.gamma, run.fold))
        if base is None or base is run or run.delta_m is None:
            return Errors()
        errors = m_errors(run, base)
        return errors if run.delta_m_ci is None else replace(errors, delta_m=error_of(run.delta_m_ci))


def _of(run: Run, *names: str) -> dict[str, Any]:
    """Fields and properties of a run by name."""
    return {name: getattr(run, name) for name in names}


def _pair_column(runs: Iterable[Run]) -> list[Column]:
    return [word_column("pair", "pair")] if several(r.pair for r in runs) else []


def averages(runs: Sequence[Run], against: Against) -> list[Table]:
    """Averages over the paper's tasks, one table a pair: every rule at every γ that covers all of its tasks."""
    found = []
    pairs = sorted({run.pair for run in runs})
    for pair in pairs:
        scored = sorted((r for r in runs if r.pair == pair and r.task in PAPER and not r.fold), key=rule_order)
        tasks = sorted({r.task for r in scored}, key=task_order)
        if len(tasks) < 2:
            continue
        swept = {r.method for r in scored if named(r)}
        rules: dict[str, list[Run]] = defaultdict(list)
        for run in scored:
            if named(run) or run.method not in swept:
                rules[run.rule].append(run)
        rows = [average(chosen, against) for each in rules.values() for chosen in _sets(each) if len(chosen) > 1]
        note = "The mean is over " + ", ".join(map(title, tasks)) + "."
        if any(len(row["tasks"]) < len(tasks) for row in rows):
            note += " Rows with fewer tasks are not comparable with the others."
        if set(tasks) != set(PAPER):
            note += f" The paper's average is over {', '.join(map(title, PAPER))}: not all were run."
        name, heading = slug("averages", pair if len(pairs) > 1 else ""), f", {pair}" if len(pairs) > 1 else ""
        found.append(Table(name, f"Average over tasks{heading}", _average_columns(tasks), tuple(rows), note))
    return found


def _average_columns(tasks: Sequence[str]) -> tuple[Column, ...]:
    def m_of(task: str) -> Callable[[Row], Any]:
        return lambda row: row["tasks"].get(task, {}).get("m")

    def score_of(task: str) -> Callable[[Row], str]:
        def show(row: Row) -> str:
            cell = row["tasks"].get(task)
            if cell is None:
                return ""
            return points(cell["score"]) + (
                "" if cell["delta_score"] is None else f" ({signed_points(cell['delta_score'])})"
            )

        return show

    about = "m, then score in points and its change"
    return (
        RULE,
        Column("γ", "gammas"),
        *(Column(title(task), m_of(task), fixed, score_of(task), about, joint=" / ") for task in tasks),
        Column("mean Δm", "delta_m", signed, "delta_m_ci", "against exact, same task and γ"),
        Column("mean m ratio", "m_ratio", fixed, "m_ratio_ci"),
        Column("mean Δtask", "delta_score", signed_points, "delta_ci", "points"),
        Column("tasks", lambda row: len(row["tasks"])),
    )


def _sets(runs: Sequence[Run]) -> list[list[Run]]:
    """One rule's runs → sets of one run a task: by γ where a γ covers all its tasks, else each task at its own γ."""
    tasks = {r.task for r in runs}
    gammas = [[r for r in runs if r.gamma == gamma] for gamma in sorted({r.gamma for r in runs})]
    if covering := [chosen for chosen in gammas if len(chosen) == len(tasks)]:
        return covering
    if len(runs) == len(tasks):
        return [list(runs)]
    most = max(map(len, gammas))
    return [chosen for chosen in gammas if len(chosen) == most]


def average(runs: Sequence[Run], against: Against) -> Row:
    """One rule's runs, one a task, as a row: their means, with intervals."""
    errors = [against.errors(r) for r in runs]
    delta_m, delta = _mean([r.delta_m for r in runs]), _mean([r.delta_score for r in runs])
    ratio = None if runs[0].name == "exact" else _mean([r.m_ratio for r in runs])
    return {
        **_of(runs[0], "rule", "method", "ships", "both"),
        "gammas": ", ".join(str(gamma) for gamma in sorted({r.gamma for r in runs})),
        "tasks": {r.task: _of(r, "m", "score", "delta_m", "delta_score") for r in runs},
        "delta_m": delta_m,
        "delta_m_ci": around(delta_m, mean_error([e.delta_m for e in errors])),
        "m_ratio": ratio,
        "m_ratio_ci": around(ratio, mean_error([e.m_ratio for e in errors])),
        "delta_score": delta,
        "delta_ci": runs[0].delta_ci
        if len(runs) == 1
        else around(delta, mean_error([error_of(r.delta_ci) for r in runs])),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def per_tasks(runs: Sequence[Run], against: Against) -> list[Table]:
    pairs = several(r.pair for r in runs)
    return [
        Table(
            slug("task", pair if pairs else "", task),
            title(task) + (f", {pair}" if pairs else ""),
            _per_task_columns(chosen),
            tuple(_per_task(run, against.errors(run)) for run in chosen),
        )
        for (pair, task), chosen in by_task(runs).items()
    ]


def _per_task(run: Run, errors: Errors) -> Row:
    row = _of(run, *PER_TASK)
    row["delta_m_ci"] = run.delta_m_ci or around(run.delta_m, errors.delta_m)
    row["m_ratio"] = run.m_ratio if run.name != "exact" else None
    row["m_ratio_ci"] = around(run.m_ratio, errors.m_ratio)
    return row


def _per_task_columns(runs: Sequence[Run]) -> tuple[Column, ...]:
    measure = runs[0].measure
    others = sorted({name for run in runs for name in run.scores} - {measure})
    return (
        word_column("rule", rule_name, below=lambda r: "" if r["threshold"] is None else f"θ {r['threshold']:.3f}"),
        GAMMA,
        *([FOLD] if several(r.fold for r in runs) else []),
        Column("n", "n", whole),
        Column("m", "mean_accepted_length", fixed, help="tokens per target pass"),
        Column("Δm", "delta_m", signed, "delta_m_ci", "against exact"),
        Column("m ratio", "m_ratio", fixed, "m_ratio_ci", "m over that of exact"),
        Column(measure, "score", points, "score_ci", "points"),
        Column(f"Δ {measure}", "delta_score", signed_points, "delta_ci", "points against exact"),
        *(_other_measure(name) for name in others),
        same_answer("agreement_ci"),
        Column("lost / gained", _lost_and_gained, help="examples that score less than with exact, and more"),
        Column("drafts/cycle", "drafts_accepted", fixed, help="drafted tokens accepted in a cycle"),
        Column("judged", "judged_share", percent, help="tokens taken against the target's choice"),
        Column("cut off", "cut_off", percent, help="answers that ended at the length limit"),
        Column("tokens/s", "tokens_per_second", lambda rate: fixed(rate, 0 if (rate or 0) >= 100 else 1)),
    )


def _lost_and_gained(row: Row) -> str | None:
    return None if row["lost"] is None else f"{row['lost']:,} / {row['gained']:,}"


def _other_measure(name: str) -> Column:
    def change(row: Row) -> str:
        if name not in row["delta_scores"]:
            return ""
        ends = row["delta_scores_ci"].get(name)
        interval = "" if ends is None else f" [{signed_points(ends[0])}, {signed_points(ends[1])}]"
        return signed_points(row["delta_scores"][name]) + interval

    return Column(name, lambda row: row["scores"].get(name), points, change, "points, and their change against exact")


def two_stage(runs: Sequence[Run]) -> Table:
    """`judge_only` against `judged`: same pair, task, γ, judge and threshold."""
    alone = {(r.pair, r.task, r.gamma, r.judge, r.option, r.fold): r for r in runs if r.name == "judge_only"}
    rows = []
    for both in (r for chosen in by_task(runs).values() for r in chosen if r.name == "judged"):
        only = alone.get((both.pair, both.task, both.gamma, both.judge, both.option, both.fold))
        if only is not None:
            rows.append(
                _of(both, "pair", "task", "judge", "option", "gamma", "rule", "method", "measure")
                | {"m_judged": both.m, "m_judge_only": only.m}
                | {"score_judged": both.score, "score_judge_only": only.score, "delta_score": both.score - only.score}
                | {"delta_m": None if both.m is None or only.m is None else both.m - only.m}
            )
    columns = (
        *_pair_column(runs),
        TASK,
        word_column("judge", "judge"),
        Column("θ", "option"),
        GAMMA,
        Column("m, judged", "m_judged", fixed),
        Column("m, judge_only", "m_judge_only", fixed),
        Column("difference", "delta_m", signed),
        word_column("measure", "measure"),
        Column("judged", "score_judged", points, help="points"),
        Column("judge_only", "score_judge_only", points, help="points"),
        Column("difference", "delta_score", signed_points, help="points"),
    )
    return Table("two-stage", "Two stages or the judge alone", columns, tuple(rows))


def suffix_groups(runs: Sequence[Run]) -> dict[tuple[Any, ...], list[Run]]:
    """Judged runs whose judges' labels differ in N alone, as far as is known, at thresholds that several N have."""
    grouped: dict[tuple[Any, ...], list[Run]] = defaultdict(list)
    for run in runs:
        if run.name == "judged" and run.suffix_length is not None:
            labels = run.label_method, run.label_prompts or 0
            grouped[run.pair, run.task, run.gamma, run.features, run.fold, *labels].append(run)
    compared: dict[tuple[Any, ...], list[Run]] = {}
    for key in sorted(grouped, key=lambda key: (key[0], task_order(key[1]), key[2:])):
        lengths: dict[str, set[int | None]] = defaultdict(set)
        for run in grouped[key]:
            lengths[run.option].add(run.suffix_length)
        if shared := [run for run in grouped[key] if len(lengths[run.option]) > 1]:
            compared[key] = sorted(shared, key=lambda r: (r.suffix_length or 0, rule_order(r)))
    return compared


def suffix_lengths(runs: Sequence[Run]) -> Table:
    shown = [
        "pair",
        "task",
        "gamma",
        "suffix_length",
        "rule",
        "method",
        "mean_accepted_length",
        "delta_m",
        "measure",
        "score",
        "delta_score",
        "delta_ci",
    ]
    rows = [_of(run, *shown) for compared in suffix_groups(runs).values() for run in compared]
    columns = (
        *_pair_column(runs),
        TASK,
        Column("N", "suffix_length"),
        RULE,
        GAMMA,
        Column("m", "mean_accepted_length", fixed),
        Column("Δm", "delta_m", signed),
        word_column("measure", "measure"),
        Column("score", "score", points, help="points"),
        Column("change", "delta_score", signed_points, "delta_ci", "points against exact"),
    )
    return Table("suffix-length", "Suffix length N, by decoding", columns, tuple(rows))


def judges(cards: Sequence[JudgeCard]) -> Table:
    rows = []
    for card in cards:
        config, metrics = card.config, card.config.get("metrics", {})
        about = {
            key: config.get(key) for key in ("target", "model", "features", "label_method", "suffix_length", "tau")
        }
        thresholds = config["thresholds"]
        same = thresholds.get("F") == thresholds.get("R")
        for name in ("F",) if same else ("F", "R"):
            if (theta := thresholds.get(name)) is not None:
                shares = {
                    f"accepts_{kind}": metrics.get(f"{name}_accepts_{kind}") for kind in ("acceptable", "unacceptable")
                }
                known = {"labels": metrics.get("n_labels"), "auc": metrics.get("auc_mismatch")}
                which = {"threshold": "F = R" if same else name, "theta": theta}
                rows.append({"judge": card.label, **about, **known, **which, **shares})
    columns = (
        word_column("judge", "judge"),
        word_column("kind", "model"),
        word_column("reads", "features"),
        word_column("labels by", "label_method"),
        Column("N", "suffix_length"),
        Column("τ", "tau", fixed),
        Column("labels", "labels", whole),
        Column("ROC-AUC", "auc", thousandths, help="holdout mismatches"),
        word_column("threshold", "threshold"),
        Column("θ", "theta", thousandths),
        Column("acceptable taken", "accepts_acceptable", percent, help="of the holdout's acceptable mismatches"),
        Column("unacceptable taken", "accepts_unacceptable", percent, help="of the holdout's unacceptable mismatches"),
    )
    return Table("judges", "Judges and their thresholds", columns, tuple(rows))


def features(studies: Sequence[Study]) -> Table:
    rows = tuple({"study": study.name, "target": study.target, **row} for study in studies for row in study.features)
    columns = (
        word_column("study", "study"),
        word_column("reads", "features"),
        Column("linear", "linear", thousandths),
        Column("MLP", "mlp", thousandths),
    )
    return Table("features", "ROC-AUC by what the judge reads", columns, rows, "On mismatches of held-out prompts.")


def labelling(label_runs: Sequence[LabelRun]) -> Table:
    rows = tuple(
        {
            "pair": run.pair,
            "method_of_labels": run.method,
            "prompts": run.prompts,
            "labels": run.rows,
            "acceptable": run.acceptable,
            "labels_per_hour": run.rows_per_hour,
            "tau_seconds": run.tau_seconds,
            "target_tokens_per_label": run.target_tokens_per_label,
            "machine": run.provenance.machine,
            "dtype": run.provenance.dtype,
        }
        for run in label_runs
    )
    columns = (
        word_column("pair", "pair"),
        word_column("method", "method_of_labels"),
        Column("prompts", "prompts", whole),
        Column("labels", "labels", whole),
        Column("acceptable", "acceptable", percent),
        Column("labels/hour", "labels_per_hour", whole),
        Column("τ, s", "tau_seconds", lambda s: fixed(s, 1), help="seconds spent on finding τ, not in labels/hour"),
        Column("target tokens/label", "target_tokens_per_label", lambda tokens: fixed(tokens, 1)),
        word_column("measured on", "machine", below=lambda row: row["dtype"]),
    )
    return Table("labelling", "Labels per hour", columns, rows)


def times(runs: Sequence[Run]) -> Table:
    rows = tuple(
        _of(run, "pair", "task", "rule", "method", "gamma", "batch")
        | {"seconds": run.phases, "total": sum(run.phases.values())}
        for chosen in by_task(runs).values()
        for run in timed(chosen)
    )

    def share(phase: str) -> Callable[[Row], float | None]:
        return lambda row: row["seconds"][phase] / row["total"] if phase in row["seconds"] else None

    columns = (
        *_pair_column(runs),
        TASK,
        RULE,
        GAMMA,
        Column("batch", "batch"),
        Column("seconds", "total", lambda seconds: fixed(seconds, 1)),
        *(Column(phase, share(phase), percent) for phase in ("draft", "target", "judge", "rule", "other")),
    )
    return Table("time", "Time by phase", columns, rows, "Shares of the time spent decoding.")


def typical(runs: Sequence[Run]) -> list[Run]:
    """Of each method with substitutions one run at the usual γ: F, else the one with most of them."""
    gamma = usual_gamma(runs)
    best: dict[str, Run] = {}
    for run in (r for r in runs if r.gamma == gamma and r.substitutions):
        other = best.get(run.method)
        if other is None or (run.option == "F", _count(run)) > (other.option == "F", _count(other)):
            best[run.method] = run
    return list(best.values())


def _count(run: Run) -> int:
    return sum(count for _, _, count in run.substitutions)


def substituted(runs: Sequence[Run]) -> Table:
    rows = tuple(
        _of(run, "pair", "task", "rule", "method", "gamma") | {"count": _count(run), "groups": _groups(run)}
        for chosen in by_task(runs).values()
        for run in typical(chosen)
    )

    def share(name: str) -> Callable[[Row], float | None]:
        return lambda row: row["groups"].get(name, {}).get("share")

    def frequent(name: str) -> Callable[[Row], str]:
        return lambda row: ",\n".join(
            f"{quoted(choice)} → {quoted(taken)}\N{NO-BREAK SPACE}×\N{NO-BREAK SPACE}{count}"
            for choice, taken, count in row["groups"].get(name, {}).get("most_frequent", ())
        )

    columns = (
        *_pair_column(runs),
        word_column("task and rule", lambda row: title(row["task"]), below=lambda row: row["rule"]),
        Column("count", "count", whole),
        *(word_column(name, share(name), form=percent, below=frequent(name), wide=True) for name in GROUPS),
    )
    note = (
        "Target’s choice → what was taken, and how often. Groups are guessed from the two tokens alone, by short lists"
        " of words and by comparing letters; counts are of the pairs that the run stored."
    )
    return Table("substitutions", "Frequent judged substitutions", columns, rows, note)


def _groups(run: Run) -> dict[str, dict[str, Any]]:
    grouped: dict[str, list[tuple[str, str, int]]] = {name: [] for name in GROUPS}
    for choice, taken, count in sorted(run.substitutions, key=lambda s: (-s[2], s[:2])):
        grouped[group(choice, taken)].append((choice, taken, count))
    total = max(1, _count(run))
    counts = {name: sum(count for *_, count in pairs) for name, pairs in grouped.items()}
    return {
        name: {"count": n, "share": n / total, "most_frequent": [list(pair) for pair in grouped[name][:PAIRS_SHOWN]]}
        for name, n in counts.items()
        if n
    }


def failures(runs: Sequence[Run]) -> Table:
    """Answers from which nothing could be extracted: rules down, tasks across, each at its usual γ."""
    known = [r for r in runs if r.extraction_failures is not None]
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    order: dict[tuple[str, str], Any] = {}
    for (pair, _), chosen in by_task(known).items():
        gamma = usual_gamma(chosen)
        for r in (r for r in chosen if r.gamma == gamma and not r.fold):
            row = rows.setdefault((pair, r.rule), _of(r, "pair", "rule", "method") | {"shares": {}})
            row["shares"][r.task] = r.extraction_failures
            order.setdefault((pair, r.rule), (pair, rule_order(r)))

    def share(task: str) -> Callable[[Row], float | None]:
        return lambda row: row["shares"].get(task)

    tasks = sorted({r.task for r in known}, key=task_order)
    columns = (*_pair_column(known), RULE, *(Column(title(task), share(task), percent) for task in tasks))
    note = "Share of the examples, at the γ that most runs of the task have."
    ordered = tuple(rows[key] for key in sorted(rows, key=order.__getitem__))
    return Table("extraction", "Answers that could not be extracted", columns, ordered, note)


def provenances(results: Results) -> Table:
    """Who measured what: runs with the same answers are one row."""
    counts: Counter[tuple[Any, ...]] = Counter()
    for run in results.runs:
        counts["evaluation", run.pair, run.batch, run.max_new_tokens, run.provenance] += 1
    for label in results.labels:
        counts["labels", label.pair, None, None, label.provenance] += 1
    for study in results.studies:
        counts["study", study.target, None, None, study.provenance] += 1
    rows = tuple(
        {"what": what, "pair": pair, "runs": count, "batch": batch, "max_new_tokens": limit, **asdict(provenance)}
        for (what, pair, batch, limit, provenance), count in counts.items()
    )
    columns = (
        word_column("what", "what"),
        word_column("pair", "pair"),
        Column("runs", "runs"),
        word_column("machine", "machine", wide=True),
        word_column("dtype", "dtype"),
        Column("batch", "batch"),
        Column("new tokens", "max_new_tokens", help="most an answer may have"),
        word_column("versions", "versions", wide=True),
        Column("date", "date"),
        Column("commit", "commit"),
    )
    return Table("provenance", "Machines, versions, dates", columns, rows)
