"""Settings of a distillation. Imports no torch: the command line makes its options from this."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from selfjudge.errors import expect
from selfjudge.prompts.sources import Source, apply_limit, hash_files
from selfjudge.store import read_json
from selfjudge.types import check_settings, setting

KINDS = read_json(Path(__file__).with_name("kinds.json"))
"""Defaults of each kind of draft: prompts, answers to each, schedule. A head gains most from broad prompts."""
HEAD_DIM = 64  # columns of an attention head of the student
FREE = ("minutes", "steps", "batch", "data_minutes")
"""Settings that may differ when a run is resumed: more training is fine, and memory decides the batch."""


@dataclass(frozen=True)
class Schedule:
    """How long a draft is trained, and how fast."""

    minutes: float = 8.0
    steps: int | None = None  # steps of training instead of minutes: such a training can be repeated
    rate: float = 4e-3
    batch_tokens: int = 65536
    evaluations: int = 10
    patience: int = 4  # evaluations without a gain after which training ends
    seed: int = 0


@dataclass(frozen=True)
class DistillConfig:
    """Settings of a distillation; a run is resumed only with the same (those in `FREE` may differ)."""

    kind: str = setting("layers", "A small model, or a head that reads the target's states.", choices=tuple(KINDS))
    layers: int = setting(4, "Layers of the draft (kind layers).", minimum=1)
    width: int = setting(384, f"Width of the draft, a multiple of {HEAD_DIM} (kind layers).", minimum=HEAD_DIM)
    inner: int | None = setting(None, "Width of its feed-forward layers; 8/3 of the width if not given.", minimum=1)
    draft_vocab: int = setting(16384, "Tokens that a head can propose, the most frequent (kind eagle3).", minimum=2)
    unroll: int = setting(5, "Steps that a head is trained to draft in a row (kind eagle3).", minimum=1, maximum=20)
    minutes: float = setting(8.0, "Minutes of training, after the data is made.", above=0)
    steps: int | None = setting(None, "Steps of training instead of minutes: the result can be repeated.", minimum=1)
    data_minutes: float | None = setting(None, "Ask for no more answers after so many minutes (eagle3).", above=0)
    prompts: tuple[str, ...] = setting((), "self, self-summaries …, a task or a file, as NAME[:COUNT[xANSWERS]].")
    max_new_tokens: int = setting(256, "Most new tokens of an answer.", minimum=1)
    max_prompt_tokens: int = setting(1536, "Longer prompts are left out.", minimum=1)
    held_out: int = setting(256, "Prompts kept for measuring agreement; at most half of them.", minimum=1)
    top_k: int = setting(16, "Largest probabilities of the target that are kept for each token.", minimum=1)
    rate: float | None = setting(None, "Highest learning rate; 0.004, for eagle3 0.002.", above=0)
    batch: int = setting(1024, "Answers at a time, where memory allows.", minimum=1)
    batch_tokens: int | None = setting(None, "Tokens of a training step; 65536, for eagle3 32768.", minimum=1)
    seed: int = setting(0, "Seed of prompts, answers and training.")

    @property
    def sources(self) -> list[Source]:
        default = KINDS[self.kind]
        return [Source.parse(text, answers=default["answers"]) for text in self.prompts or default["prompts"]]

    @property
    def schedule(self) -> Schedule:
        default = Schedule(**KINDS[self.kind]["schedule"])
        rate, tokens = self.rate or default.rate, self.batch_tokens or default.batch_tokens
        return replace(default, minutes=self.minutes, steps=self.steps, rate=rate, batch_tokens=tokens, seed=self.seed)

    def check(self) -> None:
        """Refuse what cannot work before any model is loaded."""
        check_settings(self)
        expect(self.width % HEAD_DIM == 0, "width", f"a multiple of {HEAD_DIM}", self.width)
        apply_limit(self.sources, None)  # refuses a source that is named twice

    def as_settings(self) -> dict[str, Any]:
        """The settings as `settings.json` keeps them, with checksums of the prompt files."""
        return {
            **asdict(self),
            "prompts": list(self.prompts or KINDS[self.kind]["prompts"]),
            "rate": self.schedule.rate,
            "batch_tokens": self.schedule.batch_tokens,
            "prompt files": hash_files(self.sources),
        }
