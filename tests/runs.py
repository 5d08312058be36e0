"""What tests of runs share: prompts for tiny models, and all that a run leaves behind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from pathlib import Path

import numpy as np
import torch

from fake_judge import constant_judge
from selfjudge.judge.model import Judge
from selfjudge.label.checks import OutcomeCheck, Substitution
from selfjudge.label.config import LabelConfig
from selfjudge.models.load import Draft
from selfjudge.models.pair import Pair


def prompts_file(path: Path, count: int) -> Path:
    """A file of random prompts in the words of the tiny tokenizer."""
    rng = np.random.default_rng(0)
    lines = [
        json.dumps({"prompt": " ".join(f"w{i}" for i in rng.integers(5, 50, rng.integers(2, 12)))})
        for _ in range(count)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def drafted_by(pair: Pair, folder: Path) -> Pair:
    """The pair, as if its draft came from this folder."""
    folder.mkdir(exist_ok=True)
    return replace(pair, draft_model=Draft(None, str(folder)))


def content(folder: Path) -> dict[str, bytes]:
    """Every file but those that name a time."""
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name not in ("run.json", ".lock")
    }


def label_settings(asked: str, **options: object) -> LabelConfig:
    """A labelling of a second on a file of prompts."""
    return replace(LabelConfig(prompts=(asked,), tau=-8.0, max_new_tokens=24, batch=5), **options)  # type: ignore[arg-type]


def similar(one: Sequence[int], other: Sequence[int], place: int) -> bool:
    """Whether at least half of the 32 tokens after a place match."""
    after = slice(place + 1, place + 33)
    return SequenceMatcher(None, one[after], other[after], autojunk=False).ratio() >= 0.5


class SimilarReplies(OutcomeCheck):
    """An answer is kept where what follows the substitution is similar."""

    def __call__(self, substitutions: Sequence[Substitution], responses: Sequence[Sequence[int]]) -> list[bool]:
        return [similar(s.response, reply, s.place) for s, reply in zip(substitutions, responses, strict=True)]


def random_judges(hidden_size: int) -> dict[str, Judge]:
    """A judge called `mine` that accepts some tokens."""
    torch.manual_seed(0)
    return {"mine": Judge(constant_judge(0.5, hidden_size).config, weight=torch.randn(hidden_size))}


def full_disk(tensors: object, path: Path, *_: object) -> None:
    """What a writer does that runs out of space half-way."""
    Path(path).write_bytes(b"half of it")
    raise OSError(28, "No space left on device")
