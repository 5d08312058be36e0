"""Evaluation: tasks × rules × γ → what is gained and what is paid, example by example, against `exact`.
<out>/settings.json, run.json           what all runs in the folder share; who made it
<out>/<task>/task.json                  which examples
<out>/<task>/<rule>-g<γ>/
    samples.jsonl.gz, examples.jsonl    one row an example; a few answers by token, for the report's viewer
    summary.json                        written last: its existence means done
    work/part-00000.jsonl               `batch` answers each; they go once the summary is there

`reproduce` makes the paper's tables and figures for a pair, in labels/<method>, judges/<name>, eval/ and report.html.
Finished stages are not run again."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from selfjudge.errors import SelfJudgeError
from selfjudge.evaluate.compare import compare_with_exact, find_exact
from selfjudge.evaluate.config import EvalConfig, Preset, ReproduceConfig, TaskExamples, load_examples, plan_runs
from selfjudge.evaluate.consistency import Entails, load_entailment
from selfjudge.evaluate.execute import Answerer, Evaluation, Execution, TorchAnswerer
from selfjudge.judge.model import Judge
from selfjudge.label.config import LabelConfig, find_shipped_tau
from selfjudge.label.folder import summarise_labels
from selfjudge.label.pipeline import label_pair
from selfjudge.models.pair import Pair
from selfjudge.prompts.sources import find_learnt
from selfjudge.store import RunFolder, keep_settings, provenance, read_json, write_json
from selfjudge.store.schema import FinishedSummary, RunRecord, TaskRecord
from selfjudge.train.config import TrainConfig
from selfjudge.train.pipeline import train_judge
from selfjudge.types import Notify, Warn, check_config, default_gamma, ignore, prefix_stages

FREE_RULES = ("exact", "topk:2", "relaxed", "margin:0.5", "fly:0.15,6")  # rules that need no judge
SWEEP = ("q0.98", "q0.95", "q0.9", "q0.8", "q0.7")
SUFFIX_LENGTHS = (0, 5, 10)
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
    """Run what is not yet done in the folder `out`; returns the summaries of all runs of `config`, in order. `judges`
    are given by name; None means the pair's own. Models run in this process unless an `answerer` is given."""
    check_config(config, EvalConfig)
    tasks = load_examples(config)
    answerer = answerer or TorchAnswerer(pair)
    config = replace(
        config,
        batch=config.batch or (256 if answerer.device == "cuda" else 8),
        gammas=config.gammas or (default_gamma(answerer.device),),
    )
    if judges is None:
        judges = {"shipped": pair.judge} if pair.judge is not None else {}
    runs = plan_runs(config.choose_rules(bool(judges)), config.gammas, judges, pair)
    used = {f"the judge {run.judge}": run.rule.judge for run in runs if run.judge and run.rule.judge is not None}
    out = Path(out)
    entails, nli = _load_entailment(pair, out, tasks, config.nli, warn)
    evaluation = Evaluation(pair, answerer, out, replace(config, nli=nli), entails)
    if not isinstance(answerer, TorchAnswerer):
        warn(f"{answerer.engine} does not say what the target wanted: substitutions are not counted")
    with RunFolder(out).working(_shared_settings(evaluation)):
        write_json(out / "run.json", _provenance(evaluation.config, [run.folder for run in runs], out / "run.json"))
        summaries: list[dict[str, Any]] = []
        for number, examples in enumerate(tasks):
            keep_settings(out / examples.label / "task.json", _identify(examples, nli))
            _warn_unscored(examples, warn)
            _warn_learnt(pair, examples, used, config.data, warn)
            executions = [Execution(evaluation, examples, run) for run in runs]
            for stage, share in _answer_by_turns(executions):
                notify(f"{examples.label}, {stage}", (number + share) / len(tasks))
            summaries += [_compare(execution, warn) for execution in executions]
        return summaries


def _answer_by_turns(executions: Sequence[Execution]) -> Iterator[tuple[str, float]]:
    """Answer a part of every run in turn, so that a slower machine slows down all; yields each part's run and share
    done. Runs that take another start of the engine come later."""
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


def _provenance(config: EvalConfig, runs: Sequence[str], file: Path) -> dict[str, Any]:
    """Who asks for what now, and what was asked of this folder before, oldest first."""
    last = read_json(file, RunRecord) if file.is_file() else {}
    kept = {key: last.get(key) for key in ("argv", "commit", "time", "tasks", "runs")}
    return provenance(
        tasks=list(config.tasks),
        runs=runs,
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


def _warn_learnt(
    pair: Pair, examples: TaskExamples, judges: Mapping[str, Judge], data: Path | None, warn: Warn
) -> None:
    """Warn of a draft and of judges that were trained on some of the examples."""
    prompts = [examples.task.prompt(row) for row in examples.rows]
    for name, learnt in find_learnt(pair, judges, prompts, [examples.name], data):
        if learnt:
            count = f"{len(learnt):,} of these {len(prompts):,} prompts"
            warn(f"{examples.label}: {name} was trained on {count}, as far as it says")


Plan = list[tuple[str, list[str], tuple[int, ...]]]  # evaluations: a task, its rules, and γ


def reproduce_paper(
    pair: Pair, out: Path | str, config: ReproduceConfig, *, notify: Notify = ignore, warn: Warn = ignore
) -> dict[str, Any]:
    """Run the stages that are not yet finished below `out`; returns the report's tables."""
    from selfjudge.report.page import report

    check_config(config, ReproduceConfig)
    preset, out = config.choose_preset(), Path(out)
    settings = config.evaluation
    load_examples(settings)  # missing data is found before hours of labelling
    folders = label_by_all_methods(pair, out / "labels", preset, config, notify=notify, warn=warn)
    device = "cpu" if pair.target.device.type == "mps" else str(pair.target.device)  # fitting needs float64
    judges = train_judges(folders, out / "judges", preset, device=device, notify=notify, warn=warn)
    for task, rules, gammas in plan_evaluations(preset, list(judges)):
        one = replace(settings, tasks=(task,), rules=tuple(rules), gammas=gammas)
        evaluate_rules(pair, out / "eval", one, judges=judges, notify=prefix_stages("evaluating", notify), warn=warn)
    return report([out], out / "report.html")


def plan_evaluations(preset: Preset, judges: Sequence[str]) -> Plan:
    """All rules on all tasks, then sweeps over θ and N, then other γ."""
    lengths = [name for name in judges if name.startswith("n=")]
    methods = [name for name in judges if name not in lengths]
    gammas = dict.fromkeys(preset.tasks, preset.gamma) | preset.task_gammas
    free = FREE_RULES if preset.gamma > 6 else FREE_RULES[:-1]  # fly looks 6 drafts ahead
    judged = [f"judged:{theta}@{name}" for name in methods for theta in ("F", "R")]
    plan: Plan = [(task, [*free, *judged, "judge_only:F@selfjudge"], (gammas[task],)) for task in preset.tasks]
    thresholds = [f"judged:{theta}@{name}" for name in methods for theta in SWEEP]
    swept = ["exact", *thresholds, *(f"judged:q0.9@{name}" for name in lengths), "margin:0.25", "margin:1"]
    plan += [(task, swept, (gammas[task],)) for task in preset.sweep_tasks]
    if preset.gammas:
        main = [f"judged:F@{name}" for name in ("selfjudge", "autojudge") if name in judges]
        plan.append((preset.tasks[0], ["exact", *main, "judged:R@selfjudge"], preset.gammas))
    return plan


def label_by_all_methods(
    pair: Pair, out: Path, preset: Preset, config: ReproduceConfig, *, notify: Notify, warn: Warn
) -> dict[str, Path]:
    """Label folders by method. A method without prompts is left out; so is one that finds no label, with a warning."""
    folders: dict[str, Path] = {}
    shipped = find_shipped_tau(pair.target_id, pair.draft_sha256, 20)
    calibrate = None if shipped else ("gsm8k" if any(p.startswith("gsm8k") for p in preset.prompts) else "arithmetic")
    prompts = {"selfjudge": preset.prompts, "autojudge": preset.auto, "autojudge+": preset.auto_plus}
    for method, sources in prompts.items():
        if not sources:
            continue
        name = method.replace("+", "-plus")
        by_likelihood = method == "selfjudge"
        settings = LabelConfig(
            prompts=sources, method=method, max_new_tokens=preset.label_tokens, batch=config.batch,
            hidden_dtype="float16", calibrate=calibrate if by_likelihood else None,
            calibrate_prompts=preset.calibrate_prompts,
            substitutions=None if by_likelihood else preset.substitutions, allow_unsafe=config.allow_unsafe,
        )  # fmt: skip
        try:
            label_pair(pair, out / name, settings, data=config.data, resume=True, notify=notify, warn=warn)
        except SelfJudgeError as error:
            if by_likelihood:
                raise
            warn(f"{method}: {error}; it is left out")
            continue
        folders[name] = out / name
    return folders


def train_judges(
    folders: Mapping[str, Path], out: Path, preset: Preset, *, device: str, notify: Notify, warn: Warn
) -> dict[str, Judge]:
    """Judges by name. One that cannot be trained is left out, with a warning."""
    judges: dict[str, Judge] = {}
    for name, (labels, settings) in _plan_judges(folders, preset).items():
        folder = out / name
        if not (folder / "config.json").is_file():
            try:
                train_judge([labels], folder, settings, device=device, notify=prefix_stages(f"judge {name}", notify))
            except SelfJudgeError as error:
                if name == "selfjudge":
                    raise
                warn(f"judge {name}: {error}; it is left out")
                continue
        judges[name] = Judge.from_pretrained(folder)
    return judges


def _plan_judges(folders: Mapping[str, Path], preset: Preset) -> dict[str, tuple[Path, TrainConfig]]:
    """Labels and settings of every judge: one a method, one with the paper's features, one as released if the preset
    wants it, one of self-written prompts alone and, if N is swept, one for each N."""
    own = folders["selfjudge"]
    wanted = {
        "selfjudge": (own, TrainConfig(originals=preset.originals)),
        "paper": (own, TrainConfig(features="hidden", originals=True)),
    }
    if preset.released:
        wanted["released"] = own, TrainConfig(as_released=True)
    if "self" in summarise_labels(own)["sources"]:
        wanted["self-written"] = own, TrainConfig(sources=("self",))
    for method in ("autojudge", "autojudge-plus"):
        if method in folders:
            wanted[method] = folders[method], TrainConfig()
    lengths = SUFFIX_LENGTHS if preset.sweep_tasks else ()
    return wanted | {f"n={n}": (own, TrainConfig(suffix_length=n)) for n in lengths}
