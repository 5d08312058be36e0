"""Settings of a labelling run, and the τ that ship with embedded pairs. Imports no torch, as the command line does."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from selfjudge.errors import SelfJudgeError
from selfjudge.models.catalogue import EMBEDDED
from selfjudge.prompts.sources import Source, apply_limit, check_readable, hash_files
from selfjudge.store import RunFolder, read_json
from selfjudge.store.schema import LabelManifest, TauFile
from selfjudge.tasks import is_task, load_task
from selfjudge.tasks.benchmarks import CodeTask
from selfjudge.tasks.sandbox.runner import check_isolation
from selfjudge.types import check_settings, setting

METHODS = ("selfjudge", "autojudge", "autojudge+", "consequences")
BACKENDS = ("torch", "vllm")


@dataclass(frozen=True)
class LabelConfig:
    """Settings of a labelling run; it is resumed only with the same ones (`allow_unsafe` may differ)."""

    prompts: tuple[str, ...] = setting((), "self, self-summaries, a task or a file, as NAME[:COUNT]; else self:500.")
    limit: int | None = setting(None, "Prompts in all; sources without a count share them evenly.", minimum=1)
    method: str = setting("selfjudge", "What makes a token acceptable: see docs/train.md.", choices=METHODS)
    suffix_length: int = setting(20, "N: tokens after the substitution that are scored.", minimum=0)
    tau: float | None = setting(None, "Score above which a token is acceptable.")
    calibrate: str | None = setting(None, "Find τ on this task's critical tokens; arithmetic needs no data.")
    calibrate_prompts: int = setting(100, "Prompts for finding τ.", minimum=1)
    reject_recall: float = setting(0.9, "Share of the critical tokens that τ must reject.", above=0, maximum=1)
    substitutions: int | None = setting(None, "Most draft tokens tried in a response (not selfjudge).", minimum=1)
    max_new_tokens: int = setting(256, "Maximum new tokens of a response (default 256).", minimum=1)
    max_prompt_tokens: int = setting(1536, "Maximum tokens of a prompt; longer ones are left out.", minimum=1)
    batch: int | None = setting(None, "Responses at a time: 64, on CUDA 1024.", minimum=1)
    hidden_dtype: str = setting("float32", "Type of the stored hidden states.", choices=("float32", "float16"))
    previous: bool = setting(False, "Also store the state before each token, for features hidden+margin+previous.")
    allow_unsafe: bool = setting(False, "Run generated code even where it cannot be isolated.")
    seed: int = setting(0, "Seed of the prompts that the target writes.")
    backend: str = setting("torch", "What runs the target: this process, or vLLM (docs/vllm.md).", choices=BACKENDS)

    def check(self) -> None:
        """Refuse what cannot work before any model is loaded."""
        check_settings(self)
        sources = self.sources
        if self.calibrate is not None and not is_checkable(self.calibrate):
            raise SelfJudgeError(f"{self.calibrate} has no checkable answers to calibrate τ on")
        if wrong := [source.name for source in sources if source.answers > 1]:
            raise SelfJudgeError(f"a label needs one answer a prompt: leave out xANSWERS of {wrong[0]}")
        if self.tau is not None and self.calibrate is not None:
            raise SelfJudgeError("give `tau` or `calibrate`, not both")
        if self.method != "selfjudge" and (self.tau is not None or self.calibrate is not None):
            raise SelfJudgeError(f"`method` {self.method} has no τ: leave out `tau` and `calibrate`")
        if self.method == "autojudge" and (wrong := [s.name for s in sources if not is_checkable(s.name)]):
            raise SelfJudgeError(f"{wrong[0]} has no checkable answers: `method` autojudge+ takes such prompts")

    def claim(self, out: Path, data: Path | None, resume: bool, target: str, draft_sha256: str | None) -> RunFolder:
        """The folder of a run, once what would fail late is refused: files of others, prompts that cannot be read, a τ
        that cannot be had, code that cannot be run. A hash of None means that the draft is not known yet."""
        folder = RunFolder(out, done="manifest.json", schema=LabelManifest)
        if folder.claim(resume=resume):
            return folder
        search = [Source(self.calibrate, self.calibrate_prompts)] if self.calibrate is not None else []
        check_readable([*self.sources, *search], data)
        if self.takes_shipped_tau:
            require_tau(target, draft_sha256, self.suffix_length)
        checked = search if self.method == "selfjudge" else self.sources
        programs = any(is_task(source.name) and isinstance(load_task(source.name), CodeTask) for source in checked)
        if programs and not self.allow_unsafe:
            check_isolation()
        return folder

    @property
    def takes_shipped_tau(self) -> bool:
        """Whether τ is needed and neither given nor searched for."""
        return self.method == "selfjudge" and self.tau is None and self.calibrate is None

    @property
    def sources(self) -> list[Source]:
        """The sources of prompts, with counts that add up to `limit`."""
        return apply_limit([Source.parse(text) for text in self._prompts], self.limit)

    @property
    def _prompts(self) -> tuple[str, ...]:
        return self.prompts or ("self" if self.limit else "self:500",)

    @property
    def batch_size(self) -> int:
        """`batch`, or what a CPU takes; `label_pair` chooses by the device."""
        return self.batch or 64

    def as_settings(self) -> dict[str, Any]:
        """The settings as `settings.json` keeps them, with checksums of the prompt files."""
        return {**asdict(self), "prompts": self._prompts, "prompt files": hash_files(self.sources)}


def is_checkable(name: str) -> bool:
    """Whether a source of prompts is a task whose answers can be compared."""
    return is_task(name) and load_task(name).checkable


def refuse_quantised(dtype: str | None) -> None:
    """Refuse weights whose rounding would decide labels."""
    if dtype in ("int8", "q4"):
        raise SelfJudgeError(f"labels are made in full precision: `dtype` {dtype} cannot be used")


def require_tau(target: str, draft_sha256: str | None, suffix_length: int) -> dict[str, Any]:
    """The τ that ships with a pair; where there is none, the error says how to find one."""
    if (shipped := find_shipped_tau(target, draft_sha256, suffix_length)) is None:
        raise SelfJudgeError("no τ is known for this pair and suffix length: give `calibrate` arithmetic, or `tau`")
    return shipped


def find_shipped_tau(target: str, draft_sha256: str | None, suffix_length: int) -> dict[str, Any] | None:
    """The τ that ships for this draft and suffix length. A hash of None (a draft not yet loaded) stands for the pair's
    own draft, which has no τ if it is a head."""
    embedded = EMBEDDED.get(target)
    if draft_sha256 is None and embedded is not None and embedded.head is not None:
        return None
    file = embedded.draft / "tau.json" if embedded is not None and embedded.draft is not None else None
    if file is None or not file.is_file():
        return None
    shipped = read_json(file, TauFile)
    if draft_sha256 not in (None, shipped["draft_sha256"]) or str(suffix_length) not in shipped["tau"]:
        return None
    return {**shipped["tau"][str(suffix_length)], "shipped": True}
