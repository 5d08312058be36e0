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
class DistillConfig:
    """What decides the draft; a run is resumed only with the same settings (those in `FREE` may differ)."""

    layers: int = setting(4, "Layers of the draft.", minimum=1)
    width: int = setting(384, f"Width of the draft, a multiple of {HEAD}.", minimum=HEAD)
    inner: int | None = setting(None, "Width of its feed-forward layers; 8/3 of the width if not given.", minimum=1)
    free_embeddings: bool = setting(False, "Learn embeddings instead of projections of the target's.")
    minutes: float = setting(8.0, "Minutes of training, after the data is made.", above=0)
    steps: int | None = setting(None, "Steps of training instead, so that the clock has no say.", minimum=1)
    prompts: tuple[str, ...] = setting(
        ("self:20000x3",), "self, self-summaries, a task or a file, each as NAME[:COUNT[xANSWERS]]; several times."
    )
    max_new_tokens: int = setting(256, "Most new tokens of an answer.", minimum=1)
    max_prompt_tokens: int = setting(1536, "Longer prompts are left out.", minimum=1)
    held_out: int = setting(256, "Prompts kept for measuring agreement; at most half of them.", minimum=1)
    top_k: int = setting(16, "Of the target's probabilities, kept per token.", minimum=1)
    rate: float = setting(4e-3, "Highest learning rate.", above=0)
    batch: int = setting(1024, "Answers at a time, where memory allows.", minimum=1)
    batch_tokens: int = setting(65536, "Tokens of a training step.", minimum=1)
    seed: int = setting(0, "Seed of prompts, answers and training.")

    @property
    def shape(self) -> Shape:
        return Shape(self.layers, self.width, self.inner)

    @property
    def sources(self) -> list[Source]:
        return [Source.parse(text, answers=3) for text in self.prompts]

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
            "prompts": list(self.prompts),
            "prompt files": {str(file): sha256(file) for file in files if file.is_file()},
        }


FREE = ("minutes", "steps", "batch")
"""Settings that may differ when a run is resumed: more training is fine, and memory decides the batch."""
