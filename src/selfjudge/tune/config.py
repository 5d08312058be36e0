"""The settings of `tune`. This module loads no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from selfjudge.errors import SelfJudgeError
from selfjudge.evaluate.config import EvalConfig
from selfjudge.tasks.base import FILE, Task
from selfjudge.tune.candidates import FAMILIES
from selfjudge.types import MAX_GAMMA, check_settings, setting

MEASURES = ("auto", "score", "same_answer", "overlap")
CPU_BATCH, CUDA_BATCH = 8, 256
"""Default batch sizes by device."""
FILE_TOKENS = 256
"""Maximum new tokens of an answer to a prompt of a file, as in `generate`."""
FREE = ("minutes",)
"""Settings that may differ when a run is resumed."""


@dataclass(frozen=True)
class TuneConfig:
    """What is to be certified, on which prompts, and which rules are tried."""

    tasks: tuple[str, ...] = setting((), "Tasks to calibrate on, with a split if it is not `test`: `gsm8k/train`.")
    prompts: Path | None = setting(
        None, "Your own prompts instead: jsonl with `prompt` or `messages`, and `answer` or `check` if there is one."
    )
    epsilon: float = setting(0.03, "The most that may be lost: 0.03 is 3 points of the score.", above=0)
    delta: float = setting(0.05, "The certificate is wrong with at most this probability.", above=0)
    limit: int | None = setting(None, "Prompts to use, drawn at random; all if not given.", minimum=1)
    families: tuple[str, ...] = setting(FAMILIES, "Families of rules to try.", choices=FAMILIES)
    measure: str = setting(
        "auto",
        "What must be kept: score, same_answer or overlap (of words, with exact); auto is the score if prompts have"
        " one, else overlap.",
        choices=MEASURES,
    )
    gamma: int | None = setting(None, "Draft tokens per cycle; measured if not given.", minimum=1, maximum=MAX_GAMMA)
    max_new_tokens: int | None = setting(
        None, "Maximum new tokens of an answer; the task's own number if not given, for a file 256.", minimum=1
    )
    batch: int | None = setting(None, "Prompts at a time: 8, on CUDA 256.", minimum=1)
    minutes: float | None = setting(
        None,
        "Time limit in minutes: the run ends with what is certified by then. If not given: 12 on a CPU, else none.",
        above=0,
    )
    seed: int = setting(0, "Seed of the prompts' order.")
    times: bool = setting(
        True, "Measure tokens/s; without, tokens per target pass choose. Not on a machine that does other work."
    )
    examples: int = setting(5, "Lost and gained answers of each kind that the certificate shows.", minimum=0)
    data: Path | None = setting(None, "Folder with the benchmarks' files; SELFJUDGE_DATA if not given.")
    allow_unsafe: bool = setting(False, "Run generated code even if it cannot be isolated.")

    def check(self) -> None:
        """Refuse what cannot work, before a model is loaded."""
        check_settings(self)
        for name in ("epsilon", "delta"):
            if not getattr(self, name) < 1:
                raise SelfJudgeError(f"`{name}` must be less than 1, not {getattr(self, name)}")
        if bool(self.tasks) == (self.prompts is not None):
            raise SelfJudgeError("prompts come from `tasks` or from `prompts`: give one of the two")
        if not self.families:
            raise SelfJudgeError(f"`families` names no family; there are: {', '.join(FAMILIES)}")
        if len(set(self.families)) < len(self.families):
            raise SelfJudgeError("`families` names a family twice: give each once")
        self.evaluation.check()

    def answer_tokens(self, tasks: Iterable[Task]) -> int:
        """Maximum new tokens of an answer to prompts of these tasks."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        return FILE_TOKENS if self.prompts is not None else max(task.new_tokens for task in tasks)

    @property
    def evaluation(self) -> EvalConfig:
        """The settings with which evaluation loads the same examples."""
        tasks = self.tasks if self.prompts is None else (f"{FILE}{self.prompts}",)
        return EvalConfig(tasks=tasks, data=self.data, allow_unsafe=self.allow_unsafe)
