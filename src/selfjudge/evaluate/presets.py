"""How much of everything `reproduce` runs. This module loads no torch."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from selfjudge.evaluate.config import EvalConfig
from selfjudge.store import read_json
from selfjudge.types import check_settings, setting

_DECLARED = read_json(Path(__file__).with_name("presets.json"))
PAPER_PAIRS = _DECLARED.pop("pairs")  # target and draft of the paper's own pairs


@dataclass(frozen=True)
class Preset:
    """What is labelled, trained and evaluated."""

    prompts: tuple[str, ...]  # prompts labelled by likelihood (SelfJudge)
    auto: tuple[str, ...]  # prompts labelled by preserved answers (AutoJudge)
    auto_plus: tuple[str, ...]  # prompts labelled by the target's own verdict (AutoJudge+)
    tasks: tuple[str, ...]
    limit: int | None = None
    sweep_tasks: tuple[str, ...] = ()  # tasks on which thresholds and N are swept
    gamma: int = 10
    gammas: tuple[int, ...] = ()  # other γ, for `exact` and the main judges on the first task
    task_gammas: dict[str, int] = field(default_factory=dict)  # tasks with a γ of their own
    label_tokens: int = 512  # maximum new tokens of an answer that is labelled
    eval_tokens: int | None = None  # maximum new tokens of an answer that is evaluated; the task's own number if None
    calibrate_prompts: int = 100  # prompts to find τ with, if none ships with the pair
    substitutions: int | None = 30
    originals: bool = False
    released: bool = False  # whether a judge is also trained as in the authors' code, which differs from the paper


def _with_tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


PRESETS = {name: Preset(**_with_tuples(values)) for name, values in _DECLARED.items()}
"""quick: little of everything on one small machine, needs no data; full: every method on every task, one GPU;
paper: the paper's own settings; released: the method as in the authors' code, beside that of the paper."""


@dataclass(frozen=True)
class ReproduceConfig:
    """What `reproduce` runs, and on what."""

    preset: str = setting("quick", "How much is run; paper has the paper's settings.", choices=tuple(PRESETS))
    prompts: tuple[str, ...] = setting((), "Prompts to label by likelihood, such as arithmetic:30, not the preset's.")
    tasks: tuple[str, ...] = setting((), "Tasks to evaluate on instead of the preset's.")
    limit: int | None = setting(None, "Examples of each task instead of the preset's number.", minimum=1)
    max_new_tokens: int | None = setting(None, "Most new tokens of an answer, not the preset's.", minimum=1)
    calibrate_prompts: int | None = setting(None, "Prompts to find τ with, if none ships.", minimum=1)
    batch: int | None = setting(None, "Prompts at a time; as label and eval choose if not given.", minimum=1)
    nli: str = setting("auto", "Factual consistency by: an NLI model, proxy (the target itself), off, or auto.")
    data: Path | None = setting(None, "Folder with the benchmarks' files; SELFJUDGE_DATA if not given.")
    allow_unsafe: bool = setting(False, "Run generated code even if it cannot be isolated.")

    def check(self) -> None:
        """Refuse what cannot work, before a model is loaded."""
        check_settings(self)
        self.evaluation.check()

    @property
    def evaluation(self) -> EvalConfig:
        """The settings that all evaluations of the preset share."""
        preset = self.choose_preset()
        return EvalConfig(
            tasks=preset.tasks, limit=preset.limit, max_new_tokens=preset.eval_tokens, batch=self.batch,
            nli=self.nli, data=self.data, allow_unsafe=self.allow_unsafe,
        )  # fmt: skip

    def choose_preset(self) -> Preset:
        """The preset, with the given settings in place of its own."""
        preset = PRESETS[self.preset]
        tasks = self.tasks or preset.tasks
        return replace(
            preset,
            prompts=self.prompts or preset.prompts,
            tasks=tasks,
            sweep_tasks=tuple(task for task in preset.sweep_tasks if task in tasks),
            limit=self.limit or preset.limit,
            label_tokens=self.max_new_tokens or preset.label_tokens,
            eval_tokens=self.max_new_tokens or preset.eval_tokens,
            calibrate_prompts=self.calibrate_prompts or preset.calibrate_prompts,
        )
