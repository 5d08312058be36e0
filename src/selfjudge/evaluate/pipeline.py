"""Evaluation: tasks × rules × γ → what is gained and what is paid, example by example, against `exact`.

<out>/settings.json                     what all runs in the folder share
<out>/run.json                          who made it
<out>/<task>/task.json                  which examples
<out>/<task>/<rule>-g<γ>/
    samples.jsonl.gz                    one row an example
    examples.jsonl                      a few answers token by token, for the report's viewer
    summary.json                        written last: its existence means done
    work/part-00000.jsonl               `batch` answers each; they go once the summary is there
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from selfjudge.evaluate.compare import compare_with_exact, find_exact
from selfjudge.evaluate.config import EvalConfig, RuleRun, TaskExamples, plan_runs
from selfjudge.evaluate.consistency import Entails, load_entailment
from selfjudge.evaluate.execute import Answerer, Evaluation, Execution, TorchAnswerer
from selfjudge.judge.model import Judge
from selfjudge.models.pair import Pair
from selfjudge.store import RunFolder, keep_settings, provenance, read_json, write_json
from selfjudge.store.schema import FinishedSummary, RunRecord, TaskRecord
from selfjudge.tasks import split_of
from selfjudge.types import Notify, Warn, default_gamma, ignore

SHARED = ("limit", "max_new_tokens", "batch", "seed")  # settings that all runs of a folder have in common


def evaluate_rules(
    pair: Pair,
    out: Path | str,
    config: EvalConfig,
    *,
    judges: Mapping[str, Judge] | None = None,
    answerer: Answerer | None = None,
    notify: Notify = ignore,
    warn: Warn = ignore,
) -> list[dict[str, Any]]:
    """Run what is not yet done in the folder `out`; the summaries of all runs of `config`, in order.

    `judges` by name; if None, the one that ships for the pair. The models run in this process, unless an `answerer` is
    handed in."""
    config.check()
    tasks = [TaskExamples.load(name, config) for name in config.tasks]
    answerer = answerer or TorchAnswerer(pair)
    config = replace(
        config,
        batch=config.batch or (256 if answerer.device == "cuda" else 8),
        gammas=config.gammas or (default_gamma(answerer.device),),
    )
    if judges is None:
        judges = {"shipped": pair.judge} if pair.judge is not None else {}
    runs = plan_runs(config.choose_rules(bool(judges)), config.gammas, judges, pair)
    out = Path(out)
    entails, nli = _load_entailment(pair, out, tasks, config.nli, warn)
    evaluation = Evaluation(pair, answerer, out, replace(config, nli=nli), entails)
    if pair.target_model.file is not None:
        warn("q4 weights: likelihoods are of substituted tokens in the first batch; `dtype` float32 has those of all")
    elif not pair.target_model.full_precision:
        warn("the target is not in this process: examples have no likelihoods, and substitutions are not counted")
    with RunFolder(out).working(_shared_settings(evaluation)):
        write_json(out / "run.json", _provenance(evaluation.config, runs, out / "run.json"))
        summaries: list[dict[str, Any]] = []
        for number, examples in enumerate(tasks):
            keep_settings(out / examples.label / "task.json", _identify(examples, nli))
            _warn_unscored(examples, warn)
            _warn_learnt(examples, runs, warn)
            executions = [Execution(evaluation, examples, run) for run in runs]
            for stage, share in _answer_by_turns(executions):
                notify(f"{examples.label}, {stage}", (number + share) / len(tasks))
            summaries += [_compare(execution, warn) for execution in executions]
        return summaries


def _answer_by_turns(executions: Sequence[Execution]) -> Iterator[tuple[str, float]]:
    """Answer what is not done: a part of every run in turn, so that a machine that slows down slows down all of them.

    Yields the run of each part and the share that is done. Runs that take another start of the engine come later."""
    shares = {execution: 0.0 for execution in executions if not execution.done}
    judge = next((execution.run.judge for execution in shares if execution.run.judge), None)
    groups: dict[Any, dict[Execution, Iterator[float]]] = {}
    for execution in shares:
        run = execution.run
        start = (run.gamma, run.judge or judge) if execution.answerer.one_gamma else None
        groups.setdefault(start, {})[execution] = execution.answer_rows()
    for group in groups.values():
        while group:
            for execution, parts in list(group.items()):
                yield execution.run.folder, sum(shares.values()) / len(shares)
                shares[execution] = next(parts, 1.0)
                if shares[execution] == 1.0:
                    del group[execution]


def _compare(execution: Execution, warn: Warn) -> dict[str, Any]:
    """The summary of a finished run, compared with `exact` on the same task."""
    run, folder, examples = execution.run, execution.folder, execution.examples
    if run.name != "exact":
        if (exact := find_exact(folder.parent, run.gamma)) is not None:
            return compare_with_exact(folder, exact, examples)
        warn(f"{examples.label}: no run of exact to compare {run.name} with; add it to `rules`")
    return read_json(folder / "summary.json", FinishedSummary)


def _shared_settings(evaluation: Evaluation) -> dict[str, Any]:
    """Runs of our own engines may share a folder; those of another engine need one of their own."""
    pair, answerer = evaluation.pair, evaluation.answerer
    return {
        **({} if isinstance(answerer, TorchAnswerer) else {"engine": answerer.engine}),
        **{name: getattr(evaluation.config, name) for name in SHARED},
        "target": pair.target_sha256 or pair.target_id,
        "draft": pair.draft_sha256 or pair.draft_id,
        "dtype": pair.dtype,
    }


def _identify(examples: TaskExamples, nli: str) -> dict[str, Any]:
    """What runs on one task must share: they are compared example by example."""
    prompts = "".join(f"{row['id']}:{examples.task.prompt(row)}\n" for row in examples.rows)
    digest = hashlib.sha256(prompts.encode("utf-8", "replace")).hexdigest()
    identity = {"task": examples.name, "examples": len(examples.rows), "rows_sha256": digest}
    return {**identity, "nli": nli} if examples.has_stories else identity


def _load_entailment(
    pair: Pair, out: Path, tasks: Sequence[TaskExamples], nli: str, warn: Warn
) -> tuple[Entails | None, str]:
    """What measures factual consistency, and its name; `auto` means what the folder was begun with, if anything."""
    with_stories = [examples for examples in tasks if examples.has_stories]
    if not with_stories:
        return None, "off"
    begun = out / with_stories[0].label / "task.json"
    if nli == "auto" and begun.is_file():
        nli = read_json(begun, TaskRecord).get("nli", nli)
    return load_entailment(pair, nli, warn)


def _provenance(config: EvalConfig, runs: Sequence[RuleRun], file: Path) -> dict[str, Any]:
    """Who asks for what now, and what was asked of this folder before, oldest first."""
    last = read_json(file, RunRecord) if file.is_file() else {}
    kept = {key: last.get(key) for key in ("argv", "commit", "time", "tasks", "runs")}
    return provenance(
        tasks=list(config.tasks),
        runs=[run.folder for run in runs],
        settings={name: getattr(config, name) for name in (*SHARED, "nli")},
        earlier=[*last.get("earlier", []), kept] if last else [],
    )


def _warn_unscored(examples: TaskExamples, warn: Warn) -> None:
    """Say how many rows of a user's file have no answer to score by."""
    if not examples.task.checkable:
        return
    with_answer = sum(examples.task.gold(row) is not None for row in examples.rows)
    if with_answer < len(examples.rows):
        warn(f"{examples.label}: {with_answer} of {len(examples.rows)} rows have an answer; the score is of those")


def _warn_learnt(examples: TaskExamples, runs: Sequence[RuleRun], warn: Warn) -> None:
    """Warn of judges trained on a benchmark, if another split of it than `test` is evaluated."""
    split = split_of(examples.name)
    if split in (None, "test"):
        return
    benchmark = examples.name.partition("/")[0]
    judges = {run.judge: run.rule.judge for run in runs if run.judge and run.rule.judge is not None}
    for name, judge in judges.items():
        if any(source.partition("/")[0] == benchmark for source in judge.config.sources):
            warn(f"the judge {name} was trained on {benchmark}: {split} may hold prompts that it has seen, unlike test")
