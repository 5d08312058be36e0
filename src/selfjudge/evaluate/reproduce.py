"""The paper's tables and figures for a pair: label by three methods, train, evaluate every rule, report. Stages are cached.

<out>/labels/<method>   judges/<name>   eval/   report.html
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from selfjudge.errors import SelfJudgeError
from selfjudge.evaluate.consistency import Entails
from selfjudge.evaluate.pipeline import EvalConfig, evaluate, examples_of, runs_of
from selfjudge.judge.model import Judge
from selfjudge.label.calibrate import shipped_tau
from selfjudge.label.config import LabelConfig
from selfjudge.label.folder import info
from selfjudge.label.pipeline import label_pair
from selfjudge.models.pair import Pair
from selfjudge.prompts.sources import Source
from selfjudge.tasks.livecodebench import FOLDS, learnt_folds
from selfjudge.train.config import TrainConfig
from selfjudge.train.pipeline import train_judge

Notify = Callable[[str, float], None]
PAPER_PAIRS = {
    "llama-3.1-8b": ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"),
    "qwen2.5-7b": ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct"),
    "llama-3.1-70b": ("meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
}
"""The paper's own pairs. None of them was run here."""
FREE_RULES = ("exact", "topk:2", "relaxed", "margin:0.5", "fly:0.15,6")
CODE = "livecodebench/all"
"""All problems; those of a fold are decoded with judges that were labelled on the others."""
SWEEP = ("q0.98", "q0.95", "q0.9", "q0.8", "q0.7")


def _folds(each: int) -> tuple[str, ...]:
    return tuple(f"livecodebench/fold-{k}:{each}" for k in range(FOLDS))


@dataclass(frozen=True)
class Preset:
    """How much of everything."""

    summary: str
    prompts: tuple[str, ...]
    auto: tuple[str, ...]
    auto_plus: tuple[str, ...]
    tasks: tuple[str, ...]
    limit: int | None = None
    sweep_tasks: tuple[str, ...] = ()
    """Tasks on which thresholds, γ and N are swept."""
    gamma: int = 10
    gammas: tuple[int, ...] = ()
    """Other γ, for `exact` and the main judges on the first task."""
    task_gammas: tuple[tuple[str, int], ...] = ()
    """Tasks with a γ of their own."""
    label_tokens: int = 512
    """Most tokens of an answer that is labelled."""
    eval_tokens: int | None = None
    """Most tokens of an answer that is evaluated; the task's own number if not given."""
    calibrate_prompts: int = 100
    substitutions: int | None = 30
    originals: bool = False


PRESETS = {
    "quick": Preset(
        "a look at the whole line on one small machine: little of everything, needs no data",
        ("self:30", "arithmetic:30"), ("arithmetic:6",), ("arithmetic:3", "self:4"), ("arithmetic",), limit=16, sweep_tasks=("arithmetic",),
        gamma=4, label_tokens=96, eval_tokens=96, calibrate_prompts=6, substitutions=6,
    ),
    "full": Preset(
        "every method on every task; one GPU",
        ("gsm8k:700", *_folds(75), "dolly:700", "self:500"), ("gsm8k:210",), ("gsm8k:100", "dolly:360"),
        ("gsm8k", "math500", "mmlu", "cnn_dailymail", CODE), limit=1319, sweep_tasks=("gsm8k", "mmlu"), gammas=(5, 20),
    ),
    "paper": Preset(
        "the paper's own settings: 500 GSM8K, 220 LiveCodeBench and 500 Dolly prompts, originals as acceptable rows, γ = 20 and 15",
        ("gsm8k:500", *_folds(55), "dolly:500"), ("gsm8k:500",), ("gsm8k:500", "dolly:500"),
        ("gsm8k", "math500", "mmlu", "cnn_dailymail", CODE), gamma=20, task_gammas=(("mmlu", 15),), sweep_tasks=("gsm8k", "mmlu"), substitutions=None,
        originals=True,
    ),
}  # fmt: skip


def reproduce(
    pair: Pair, out: Path, preset: Preset, *, data: Path | None = None, batch: int = 64, limit: int | None = None,
    device: str | None = None, entails: Entails | None = None, nli: str = "off", allow_unsafe: bool = False,
    notify: Notify = lambda stage, share: None, warn: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:  # fmt: skip
    """Run what is not yet done below `out`; the report's tables."""
    from selfjudge.report.pipeline import report

    settings = EvalConfig(preset.limit if limit is None else limit, preset.eval_tokens, batch, nli=nli)
    settings.check()
    for name in preset.tasks:  # what is wrong with them is better known before hours of labelling
        examples_of(name, settings.limit, data, allow_unsafe)
    folders = _labels(pair, out / "labels", preset, data, batch, allow_unsafe, notify, warn)
    judges, folded = _judges(folders, out / "judges", preset, device, notify, warn)

    def run(tasks: Sequence[str], rules: Sequence[str], gammas: Sequence[int]) -> None:
        known = judges
        if CODE in tasks:  # judges that have seen its problems take no part
            known = unseen(judges, folded)
            rules = [rule for rule in rules if rule.partition("@")[2] in ("", *known)]
        runs = runs_of(rules, gammas, known, pair.special_ids)
        evaluate(
            pair, out / "eval", tasks, runs, settings, data=data, allow_unsafe=allow_unsafe, entails=entails,
            notify=_named("evaluating", notify), warn=warn,
        )  # fmt: skip

    free = [rule for rule in FREE_RULES if not rule.startswith("fly") or preset.gamma > 6]
    main = [name for name in judges if not name.startswith("n=")]
    own = [f"judged:{theta}@{name}" for name in main for theta in ("F", "R")]
    own_gamma = dict(preset.task_gammas)
    for name in preset.tasks:
        run([name], [*free, *own, "judge_only:F@selfjudge"], [own_gamma.get(name, preset.gamma)])
    sweep = [f"judged:{theta}@{name}" for name in main for theta in SWEEP]
    lengths = [f"judged:q0.9@{name}" for name in judges if name.startswith("n=")]
    for name in preset.sweep_tasks:
        run([name], ["exact", *sweep, *lengths, "margin:0.25", "margin:1"], [own_gamma.get(name, preset.gamma)])
    if preset.gammas:
        named = [f"judged:F@{name}" for name in ("selfjudge", "autojudge") if name in judges]
        run(preset.tasks[:1], ["exact", *named, "judged:R@selfjudge"], preset.gammas)
    return report([out], out / "report.html")


def _labels(
    pair: Pair, out: Path, preset: Preset, data: Path | None, batch: int, allow_unsafe: bool, notify: Notify,
    warn: Callable[[str], None],
) -> dict[str, Path]:  # fmt: skip
    """Label folders by method; a method that finds nothing to label is left out, and that is said."""
    found: dict[str, Path] = {}
    shipped = shipped_tau(pair.target_id, pair.draft_sha256, 20)
    calibrate = None if shipped else ("gsm8k" if any(p.startswith("gsm8k") for p in preset.prompts) else "arithmetic")
    for method, prompts in (
        ("selfjudge", preset.prompts),
        ("autojudge", preset.auto),
        ("autojudge+", preset.auto_plus),
    ):
        folder = out / method.replace("+", "-plus")
        settings = LabelConfig(
            prompts=prompts, method=method, max_new_tokens=preset.label_tokens, batch=batch, hidden_dtype="float16",
            calibrate=calibrate if method == "selfjudge" else None, calibrate_prompts=preset.calibrate_prompts,
            substitutions=None if method == "selfjudge" else preset.substitutions, allow_unsafe=allow_unsafe,
        )  # fmt: skip
        settings.check()
        try:
            label_pair(pair, folder, settings, data=data, resume=True, notify=notify, warn=warn)
        except SelfJudgeError as error:
            if method == "selfjudge":
                raise
            warn(f"{method}: {error}; it is left out")
            continue
        found[method.replace("+", "-plus")] = folder
    return found


def _judges(
    folders: dict[str, Path], out: Path, preset: Preset, device: str | None, notify: Notify, warn: Callable[[str], None]
) -> tuple[dict[str, list[Judge]], dict[str, list[Judge]]]:
    """Judges by name: one a method, one of self-written prompts alone, the paper's features, and one for each N.

    Beside them those that take the place of some on LiveCodeBench: one for each fold, labelled on the others.
    """
    own = [folders["selfjudge"]]
    wanted: dict[str, tuple[list[Path], TrainConfig]] = {
        "selfjudge": (own, TrainConfig(originals=preset.originals)),
        "paper": (own, TrainConfig(features="hidden", model="linear", originals=True)),
    }
    there = info(folders["selfjudge"])["sources"]
    names = [name for name in (Source.parse(prompt).name for prompt in preset.prompts) if name in there]
    folds = [f"livecodebench/fold-{k}" for k in range(FOLDS)] if CODE in preset.tasks else []
    wanted |= {
        f"{name}-{fold.rpartition('/')[2]}": (own, replace(settings, sources=tuple(n for n in names if n != fold)))
        for name, (_, settings) in wanted.items()
        for fold in folds
    }
    if "self" in names:
        wanted["self-written"] = own, TrainConfig(sources=("self",))
    for method in ("autojudge", "autojudge-plus"):
        if method in folders:
            wanted[method] = [folders[method]], TrainConfig()
    wanted |= {f"n={n}": (own, TrainConfig(suffix_length=n)) for n in (0, 5, 10)}
    found: dict[str, Judge] = {}
    for name, (labels, settings) in wanted.items():
        folder = out / name
        if not (folder / "config.json").is_file():
            try:
                train_judge(labels, folder, settings, device=device, notify=_named(f"judge {name}", notify))
            except SelfJudgeError as error:
                if name == "selfjudge":
                    raise
                warn(f"judge {name}: {error}; it is left out")
                continue
        found[name] = Judge.from_pretrained(folder)
    by_fold = {
        name: [found[f"{name}-fold-{k}"] for k in range(FOLDS)]
        for name in ("selfjudge", "paper") if folds and all(f"{name}-fold-{k}" in found for k in range(FOLDS))
    }  # fmt: skip
    return {name: [judge] for name, judge in found.items() if "-fold-" not in name}, by_fold


def unseen(judges: Mapping[str, list[Judge]], folded: Mapping[str, list[Judge]]) -> dict[str, list[Judge]]:
    """The judges that may decide about LiveCodeBench: one for each fold, or one that was labelled with nothing of it."""
    others = {name: found for name, found in judges.items() if not learnt_folds(found[0].config.sources)}
    return {**others, **folded}


def _named(name: str, notify: Notify) -> Notify:
    return lambda stage, share: notify(f"{name}: {stage}", share)
