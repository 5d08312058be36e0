"""What decides a distilled draft. Light: the command line makes its options from this."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from selfjudge.errors import SelfJudgeError
from selfjudge.prompts.sources import Source, limited
from selfjudge.store import sha256
from selfjudge.types import check_settings, setting

HEAD = 64  # width of an attention head of the draft
KINDS = ("layers", "eagle3")
PROMPTS = {
    "layers": ("self:20000x3",),
    "eagle3": (
        "self:12000x2", "self-code:6000", "self-math:4000", "self-choices:3000", "self-writing:4000",
        "self-extraction:3000", "self-translation:3000", "self-chats:4000", "self-summaries:2000",
    ),
}  # fmt: skip
"""What a draft learns from if nothing is named: a head is worth most where its prompts are broad."""
ANSWERS = {"layers": 3, "eagle3": 1}  # per prompt
RATE = {"layers": 4e-3, "eagle3": 2e-3}
BATCH_TOKENS = {"layers": 65536, "eagle3": 32768}
EVALUATIONS = {"layers": (10, 4), "eagle3": (16, 8)}  # and how many of them without a gain end the training


@dataclass(frozen=True)
class Shape:
    """How large the draft is."""

    layers: int = 4
    width: int = 384
    inner: int | None = None
    """Width of the feed-forward layers; 8/3 of `width` if not given."""

    def __post_init__(self) -> None:
        if self.layers < 1 or self.width < HEAD or self.width % HEAD or (self.inner is not None and self.inner < 1):
            size = "×".join(str(n) for n in (self.layers, self.width, self.inner) if n is not None)
            raise SelfJudgeError(f"a draft needs `layers` and a `width` that is a multiple of {HEAD}, not {size}")


@dataclass(frozen=True)
class Schedule:
    """How long a draft is trained, and how fast."""

    minutes: float
    steps: int | None = None
    """Train for so many steps instead of minutes: such a training can be repeated."""
    rate: float = 4e-3
    batch_tokens: int = 65536
    evaluations: int = 10
    patience: int = 4
    """Evaluations without a gain after which training ends."""
    seed: int = 0


@dataclass(frozen=True)
class DistillConfig:
    """What decides the draft; a run is resumed only with the same settings (those in `FREE` may differ)."""

    kind: str = setting(
        "layers", "layers: a small model; eagle3: a head that reads the target's states.", choices=KINDS
    )
    layers: int = setting(4, "Layers of the draft (kind layers).", minimum=1)
    width: int = setting(384, f"Width of the draft, a multiple of {HEAD} (kind layers).", minimum=HEAD)
    inner: int | None = setting(None, "Width of its feed-forward layers; 8/3 of the width if not given.", minimum=1)
    draft_vocab: int = setting(16384, "Tokens that a head can propose, the most frequent (kind eagle3).", minimum=2)
    unroll: int = setting(5, "Steps that a head is trained to draft in a row (kind eagle3).", minimum=1, maximum=20)
    free_embeddings: bool = setting(False, "Learn embeddings instead of projections of the target's.")
    minutes: float = setting(8.0, "Minutes of training, after the data is made.", above=0)
    steps: int | None = setting(None, "Steps of training instead, so that the clock has no say.", minimum=1)
    data_minutes: float | None = setting(
        None, "Minutes after which no more answers are asked for (kind eagle3); all if not given.", above=0
    )
    prompts: tuple[str, ...] = setting(
        (), "self, self-summaries …, a task or a file, each as NAME[:COUNT[xANSWERS]]; several times."
    )
    max_new_tokens: int = setting(256, "Most new tokens of an answer.", minimum=1)
    max_prompt_tokens: int = setting(1536, "Longer prompts are left out.", minimum=1)
    held_out: int = setting(256, "Prompts kept for measuring agreement; at most half of them.", minimum=1)
    top_k: int = setting(16, "Of the target's probabilities, kept per token.", minimum=1)
    rate: float | None = setting(None, "Highest learning rate; 0.004, for eagle3 0.002.", above=0)
    batch: int = setting(1024, "Answers at a time, where memory allows.", minimum=1)
    batch_tokens: int | None = setting(None, "Tokens of a training step; 65536, for eagle3 32768.", minimum=1)
    seed: int = setting(0, "Seed of prompts, answers and training.")

    @property
    def shape(self) -> Shape:
        return Shape(self.layers, self.width, self.inner)

    @property
    def sources(self) -> list[Source]:
        return [Source.parse(text, answers=ANSWERS[self.kind]) for text in self.prompts or PROMPTS[self.kind]]

    @property
    def schedule(self) -> Schedule:
        rate, tokens = self.rate or RATE[self.kind], self.batch_tokens or BATCH_TOKENS[self.kind]
        return Schedule(self.minutes, self.steps, rate, tokens, *EVALUATIONS[self.kind], self.seed)

    def check(self) -> None:
        """Refuse what cannot work before any model is loaded."""
        check_settings(self)
        _ = self.shape
        if weighted := [source.name for source in self.sources if source.weight is not None]:
            raise SelfJudgeError(f"{weighted[0]} has a weight: distill takes counts, such as {weighted[0]}:1000x2")
        limited(self.sources, None)  # refuses a source that is named twice

    def as_settings(self) -> dict[str, Any]:
        """The settings as `settings.json` keeps them, with checksums of the prompt files."""
        files = [Path(source.name).expanduser() for source in self.sources]
        return {
            **asdict(self),
            "prompts": list(self.prompts or PROMPTS[self.kind]),
            "rate": self.schedule.rate,
            "batch_tokens": self.schedule.batch_tokens,
            "prompt files": {str(file): sha256(file) for file in files if file.is_file()},
        }


FREE = ("minutes", "steps", "batch", "data_minutes")
"""Settings that may differ when a run is resumed: more training is fine, and memory decides the batch."""
