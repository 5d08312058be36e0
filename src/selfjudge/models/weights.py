"""Weights as they are loaded: all of the model's, none of another's, every one finite."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from selfjudge.errors import SelfJudgeError

DERIVED = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Ends of names that old checkpoints carry although the model computes them."""


def check_weights(model: PreTrainedModel, loading: Mapping[str, Iterable[Any]], source: Path | str) -> None:
    """Refuse a checkpoint whose tensors are not the model's, or not finite: transformers would invent missing ones."""
    for what, problem in (
        ("missing_keys", "lacks"),
        ("unexpected_keys", "has unknown"),
        ("mismatched_keys", "has other"),
    ):
        names = [name if isinstance(name, str) else name[0] for name in loading.get(what, ())]
        if wrong := sorted(name for name in names if not name.endswith(DERIVED)):
            raise SelfJudgeError(f"{source} {problem} weights of this model ({len(wrong)}: {wrong[0]} …)")
    check_finite(model.named_parameters(), source)


def check_finite(weights: Iterable[tuple[str, Tensor]], source: Path | str) -> None:
    """Refuse weights that are not finite."""
    for name, weight in weights:
        if not bool(weight.isfinite().all()):
            raise SelfJudgeError(f"{source} has weights that are not finite ({name})")
