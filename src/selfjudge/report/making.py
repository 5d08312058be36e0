"""Records → tables of what was made before decoding: judges, labels, studies; and what everything was measured on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from selfjudge.report.records import JudgeCard, Provenance, Results
from selfjudge.report.table import Column, Table, figure, fixed, percent, share, text


def judges(cards: Sequence[JudgeCard]) -> list[Table]:
    rows = []
    for card in cards:
        config = card.config
        metrics = config.get("metrics") if isinstance(config.get("metrics"), dict) else {}
        assert isinstance(metrics, dict)
        for name in ("F", "R"):
            if isinstance(theta := config["thresholds"].get(name), int | float):
                rows.append({
                    "judge": card.name, "target": config.get("target"), "model": config.get("model"), "features": config.get("features"),
                    "label_method": config.get("label_method"), "suffix_length": config.get("suffix_length"), "tau": config.get("tau"),
                    "labels": metrics.get("n_labels"), "auc": metrics.get("auc_mismatch"), "threshold": name, "theta": theta,
                    "accepts_acceptable": metrics.get(f"{name}_accepts_acceptable"), "accepts_unacceptable": metrics.get(f"{name}_accepts_unacceptable"),
                })  # fmt: skip
    columns = (
        Column("judge", lambda r: r["judge"], numeric=False), Column("kind", lambda r: text(r["model"]), numeric=False),
        Column("reads", lambda r: text(r["features"]), numeric=False), Column("labels by", lambda r: text(r["label_method"]), numeric=False),
        Column("N", lambda r: text(r["suffix_length"])), Column("τ", lambda r: figure(r["tau"], 2)),
        Column("labels", lambda r: figure(r["labels"], 0)), Column("ROC-AUC", lambda r: figure(r["auc"], 3), help="holdout mismatches"),
        Column("threshold", lambda r: r["threshold"], numeric=False), Column("θ", lambda r: figure(r["theta"], 3)),
        Column("acceptable taken", lambda r: share(r["accepts_acceptable"]), help="of the holdout's acceptable mismatches"),
        Column("unacceptable taken", lambda r: share(r["accepts_unacceptable"]), help="of the holdout's unacceptable mismatches"),
    )  # fmt: skip
    return [Table("judges", "Judges and their thresholds", columns, tuple(rows))]


def features(results: Results) -> list[Table]:
    rows = [{"study": s.name, "target": s.target, **row} for s in results.studies for row in s.features]
    columns = (
        Column("study", lambda r: r["study"], numeric=False), Column("reads", lambda r: r["features"], numeric=False),
        Column("linear", lambda r: fixed(r["linear"], 3)), Column("MLP", lambda r: fixed(r["mlp"], 3)),
    )  # fmt: skip
    return [
        Table("features", "ROC-AUC by what the judge reads", columns, tuple(rows), "On mismatches of held-out prompts.")
    ]


def labelling(results: Results) -> list[Table]:
    rows = [
        {
            "pair": run.pair, "method_of_labels": run.method, "prompts": run.prompts, "labels": run.rows, "acceptable": run.acceptable,
            "labels_per_hour": run.rows_per_hour, "tau_seconds": run.tau_seconds, "target_tokens_per_label": run.target_tokens_per_label,
            "machine": run.provenance.machine, "dtype": run.provenance.dtype,
        }
        for run in results.labels
    ]  # fmt: skip
    columns = (
        Column("pair", lambda r: r["pair"], numeric=False), Column("method", lambda r: r["method_of_labels"], numeric=False),
        Column("prompts", lambda r: figure(r["prompts"], 0)), Column("labels", lambda r: f"{r['labels']:,}"),
        Column("acceptable", lambda r: percent(r["acceptable"])), Column("labels/hour", lambda r: fixed(r["labels_per_hour"], 0)), Column("τ, s", lambda r: fixed(r["tau_seconds"], 1), help="seconds spent on finding τ, not in labels/hour"),
        Column("target tokens/label", lambda r: fixed(r["target_tokens_per_label"], 1)),
        Column("measured on", lambda r: r["machine"], lambda r: r["dtype"], numeric=False),
    )  # fmt: skip
    return [Table("labelling", "Labels per hour", columns, tuple(rows))]


def provenances(results: Results) -> list[Table]:
    """Who measured what: runs with the same answers are one row."""
    found: dict[tuple[Any, ...], int] = defaultdict(int)
    for run in results.runs:
        found["evaluation", run.pair, run.batch, run.max_new_tokens, run.provenance] += 1
    for label in results.labels:
        found["labels", label.pair, None, None, label.provenance] += 1
    for study in results.studies:
        found["study", study.target, None, None, study.provenance] += 1
    rows = []
    for (what, pair, batch, limit, made), count in found.items():
        assert isinstance(made, Provenance)
        rows.append({
            "what": what, "pair": pair, "runs": count, "machine": made.machine, "dtype": made.dtype, "batch": batch, "max_new_tokens": limit,
            "versions": made.versions, "date": made.date, "commit": made.commit,
        })  # fmt: skip
    columns = (
        Column("what", lambda r: r["what"], numeric=False), Column("pair", lambda r: r["pair"], numeric=False), Column("runs", lambda r: str(r["runs"])),
        Column("machine", lambda r: r["machine"] or "–", numeric=False, wide=True), Column("dtype", lambda r: r["dtype"] or "–", numeric=False),
        Column("batch", lambda r: text(r["batch"])), Column("new tokens", lambda r: text(r["max_new_tokens"]), help="most an answer may have"),
        Column("versions", lambda r: r["versions"] or "–", numeric=False, wide=True), Column("date", lambda r: r["date"] or "–"),
        Column("commit", lambda r: r["commit"] or "–"),
    )  # fmt: skip
    return [Table("provenance", "Machines, versions, dates", columns, tuple(rows))]
