"""Reproduce the paper's tables and figures for a pair: label by three methods, train, evaluate every rule, report.

<out>/labels/<method>   judges/<name>   eval/   report.html

Stages that are finished are not run again."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from selfjudge.errors import SelfJudgeError
from selfjudge.evaluate.config import Preset, ReproduceConfig, check_examples
from selfjudge.evaluate.pipeline import evaluate_rules
from selfjudge.judge.model import Judge
from selfjudge.label.config import LabelConfig, find_shipped_tau
from selfjudge.label.folder import summarise_labels
from selfjudge.label.pipeline import label_pair
from selfjudge.models.pair import Pair
from selfjudge.train.config import TrainConfig
from selfjudge.train.pipeline import train_judge
from selfjudge.types import Notify, Warn, ignore

FREE_RULES = ("exact", "topk:2", "relaxed", "margin:0.5", "fly:0.15,6")  # rules that need no judge
SWEEP = ("q0.98", "q0.95", "q0.9", "q0.8", "q0.7")
SUFFIX_LENGTHS = (0, 5, 10)
Plan = list[tuple[str, list[str], tuple[int, ...]]]  # evaluations: a task, its rules, and γ


def reproduce_paper(
    pair: Pair, out: Path, config: ReproduceConfig, *, notify: Notify = ignore, warn: Warn = ignore
) -> dict[str, Any]:
    """Run the stages that are not yet finished below `out`; returns the report's tables."""
    from selfjudge.report.page import report

    config.check()
    preset = config.choose_preset()
    settings = config.evaluation
    check_examples(settings)  # missing data is found before hours of labelling
    folders = label_by_all_methods(pair, out / "labels", preset, config, notify=notify, warn=warn)
    device = "cpu" if pair.target.device.type == "mps" else str(pair.target.device)  # fitting needs float64
    judges = train_judges(folders, out / "judges", preset, device=device, notify=notify, warn=warn)
    for task, rules, gammas in plan_evaluations(preset, list(judges)):
        one = replace(settings, tasks=(task,), rules=tuple(rules), gammas=gammas)
        evaluate_rules(pair, out / "eval", one, judges=judges, notify=_prefix_stages("evaluating", notify), warn=warn)
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
                train_judge([labels], folder, settings, device=device, notify=_prefix_stages(f"judge {name}", notify))
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


def _prefix_stages(name: str, notify: Notify) -> Notify:
    return lambda stage, share: notify(f"{name}: {stage}", share)
