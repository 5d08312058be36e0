"""The settings of `tune`. Loads no torch."""

from dataclasses import dataclass
from pathlib import Path

from selfjudge.decoding.guards import STRICT_CODE, STRICT_START
from selfjudge.errors import SelfJudgeError, expect
from selfjudge.evaluate.config import EvalConfig, needs_judge
from selfjudge.tasks import FILE
from selfjudge.tune.families import FAMILIES, name_rules
from selfjudge.tune.independence import SIMILAR
from selfjudge.tune.recipe import read_key
from selfjudge.types import MAX_GAMMA, check_settings, setting

GAMMAS = {"cpu": (1, 2, 3, 5, 8), "cuda": (1, 2, 3, 5, 8, 12, 20, 32)}  # draft lengths to choose from, by device
LOADS = {"cpu": (1,), "cuda": (1, 8, 64)}  # rows at a time that γ is chosen for, by device, if none are given
MOST_LOADS = 8
MEASURES = ("auto", "score", "same_answer", "overlap")
BATCHES = {"cpu": 8, "cuda": 256}  # default batch sizes by device
CPU_MINUTES = 12.0  # time limit on a CPU, if none is given
FILE_TOKENS = 256  # maximum new tokens of an answer to a prompt of a file, as in `generate`
FREE = ("minutes",)  # settings that may differ when a run is resumed


@dataclass(frozen=True)
class TuneConfig:
    """What is to be certified, on which prompts, and which rules are tried."""

    tasks: tuple[str, ...] = setting((), "Tasks to calibrate on, with a split if it is not `test`: `gsm8k/train`.")
    prompts: Path | None = setting(None, "Your own prompts instead: jsonl with answer, check and group, if any.")
    epsilon: float = setting(0.03, "The most that may be lost: 0.03 is 3 points of the score.", above=0)
    delta: float = setting(0.05, "The certificate is wrong with at most this probability.", above=0)
    limit: int | None = setting(None, "Prompts to use, drawn by a hash; all if not given.", minimum=1)
    families: tuple[str, ...] = setting(FAMILIES, "Families of rules to try.", choices=FAMILIES)
    rules: tuple[str, ...] | None = setting(
        None, "Rules to test instead of families, in this order until one fails. Choose it before you see results."
    )
    measure: str = setting("auto", "What must be kept; auto: the score, else overlap.", choices=MEASURES)
    gamma: int | None = setting(None, "Draft tokens per cycle; else each load's best.", minimum=1, maximum=MAX_GAMMA)
    load: tuple[int, ...] = setting((), "Requests at a time: a row of the recipe each; 1, on CUDA 1,8,64.", minimum=1)
    strict_start: int = setting(STRICT_START, "First tokens of an answer that rules verify exactly.", minimum=0)
    strict_code: bool = setting(STRICT_CODE, "Verify code and structure exactly.")
    max_new_tokens: int | None = setting(None, "Maximum new tokens; the task's, for a file 256.", minimum=1)
    batch: int | None = setting(None, "Prompts at a time: 8, on CUDA 256.", minimum=1)
    minutes: float | None = setting(None, "Time limit; on a CPU 12 if not given, else none.", above=0)
    similar: float = setting(SIMILAR, "Prompts with so many 3-word pieces in common count as one.", above=0, maximum=1)
    times: bool = setting(True, "Measure tokens/s; without, tokens per target pass choose.")
    examples: int = setting(5, "Lost and gained answers of each kind that the certificate shows.", minimum=0)
    sign: Path | None = setting(None, "Sign the recipe with this Ed25519 key, as `ssh-keygen -t ed25519` makes one.")
    data: Path | None = setting(None, "Folder with the benchmarks' files; SELFJUDGE_DATA if not given.")
    allow_unsafe: bool = setting(False, "Run generated code even if it cannot be isolated.")

    def check(self) -> None:
        """Refuse what cannot work, before a model is loaded."""
        check_settings(self)
        for name, value in {"epsilon": self.epsilon, "delta": self.delta}.items():
            expect(value < 1, name, "less than 1", value)
        if bool(self.tasks) == (self.prompts is not None):
            raise SelfJudgeError("prompts come from `tasks` or from `prompts`: give one of the two")
        if self.rules is not None and (not name_rules(self.rules) or tuple(self.families) != FAMILIES):
            raise SelfJudgeError("`rules` names one rule or more, tested instead of `families`: give one of the two")
        if not self.families:
            raise SelfJudgeError(f"`families` names no family; there are: {', '.join(FAMILIES)}")
        if len(set(self.families)) < len(self.families):
            raise SelfJudgeError("`families` names a family twice: give each once")
        if len(set(self.load)) < len(self.load) or len(self.load) > MOST_LOADS:
            raise SelfJudgeError(f"`load` takes up to {MOST_LOADS} different numbers, not {len(self.load)}")
        if self.sign is not None:
            read_key(self.sign, "private")
        self.evaluation.check()

    @property
    def uses_judge(self) -> bool:
        """Whether a rule that is tried may use a judge."""
        return "judged" in self.families if self.rules is None else any(map(needs_judge, self.rules))

    @property
    def evaluation(self) -> EvalConfig:
        """The settings with which evaluation loads the same examples."""
        tasks = self.tasks if self.prompts is None else (f"{FILE}{self.prompts}",)
        return EvalConfig(tasks=tasks, data=self.data, allow_unsafe=self.allow_unsafe)
