"""Which prompts a judge was trained on, as hashes beside its weights: what it may not be measured on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from selfjudge.judge.hub import find_judge
from selfjudge.store import read_json, write_json
from selfjudge.store.artefacts import TrainingPrompts

FILE = "prompts.json"
DIGITS = 16  # of a key are kept


def prompt_key(ids: Sequence[int]) -> str:
    """The name of a prompt, by its token ids: the same in all label folders."""
    return hashlib.sha256(np.asarray(ids, np.int64).tobytes()).hexdigest()


def write_training_prompts(folder: Path, keys: Iterable[str]) -> None:
    """Keep the keys of the prompts that a judge was trained, selected or measured with."""
    write_json(folder / FILE, {"prompts": sorted({key[:DIGITS] for key in keys})})


def read_training_prompts(source: str | Path) -> frozenset[str] | None:
    """The first digits of those keys, of a judge by embedded name, folder or hub id; None if it does not keep them."""
    file = find_judge(source) / FILE
    return frozenset(read_json(file, TrainingPrompts)["prompts"]) if file.is_file() else None
