"""Label folders without a model: random features whose labels a known signal decides."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from selfjudge.errors import SelfJudgeError
from selfjudge.judge.config import JudgeConfig
from selfjudge.label.folder import Labels, read_shards, write_shard
from selfjudge.store import RunFolder, sha256, write_json, write_rows, write_tensors
from selfjudge.train.dataset import LabelledRows

HIDDEN, SUFFIX, TAU = 12, 6, -4.0
WIDTH = HIDDEN + 1  # of hidden+margin
Floats = NDArray[np.float64]
Signal = Callable[[Floats, Floats], Floats]
"""What a row's score is made of: (hidden [n, H], margin [n]) → [n]; τ is added."""


def straight(hidden: Floats, margin: Floats) -> Floats:
    """A plane through three directions of the hidden state, and the margin."""
    return 2 * hidden[:, 0] - hidden[:, 1] + hidden[:, 2] + margin + 1


def label_folder(
    path: Path, *, prompts: int = 60, each: int = 10, hidden: int = HIDDEN, shards: int = 4, seed: int = 0,
    signal: Signal = straight, noise: float = 1.0, name: str = "p", first: int = 0,
    evidence: int = 0, method: str = "selfjudge", suffix: int = SUFFIX, change: Callable[[dict[str, NDArray[Any]]], object] | None = None,
    **manifest: Any,
) -> Path:  # fmt: skip
    """A label folder: prompts `first` … `first + prompts`, `each` rows a prompt, `evidence` tokens to find τ from."""
    rng = np.random.default_rng(seed)
    asked = range(first, first + prompts)
    write_rows(path / "responses.jsonl", (
        {"prompt_id": f"{name}-{i}", "source": f"s{i % 2}", "prompt_ids": [1, i, 7], "response_ids": [5, 2], "finish": "eos"}
        for i in asked
    ))  # fmt: skip
    made = []
    for number, part in enumerate(np.array_split(np.asarray(asked, int), shards)):
        arrays = scored(rng, len(part) * each, hidden, signal, noise, suffix)
        if change:
            change(arrays)
        scores = [by_hand(arrays, k, suffix) for k in range(len(part) * each)]
        rows = [
            {"prompt_id": f"{name}-{i}", "source": f"s{i % 2}", "position": 3, "target_token": 5, "draft_token": 6,
             "score": round(s, 5) if math.isfinite(s) else -1e6, "label": int(s > TAU), "method": method}
            for i, s in zip(np.repeat(part, each), scores, strict=True)
        ]  # fmt: skip
        labels = Labels(rows, arrays, {"acceptable": sum(row["label"] for row in rows)})
        made.append(write_shard(RunFolder(path), number, labels, ""))
    files = ["responses.jsonl"]
    if evidence:
        found = scored(rng, evidence, 1, straight, noise)
        arrays = {k: found[k] for k in ("log_p", "original", "substituted", "highest")}
        write_tensors(path / "calibration.safetensors", arrays | {"critical": rng.integers(0, 2, evidence, np.uint8)})
        files.append("calibration.safetensors")
    write_json(path / "manifest.json", {
        "format_version": 1, "target": "t", "draft": "d", "target_sha256": "a" * 64, "draft_sha256": "b" * 64,
        "dtype": "float32", "hidden_size": hidden, "hidden_dtype": "float32", "layer": "final", "norm": "post_final_norm",
        "method": method, "suffix_length": suffix, "tau": TAU if method == "selfjudge" else None, "tau_evidence": {},
        "rows": sum(m["rows"] for m in made), "acceptable": sum(m["acceptable"] for m in made), "prompts": prompts,
        "yields": {}, "target_tokens": 0, "response_tokens": 0, "shards": made,
        "files": {name: sha256(path / name) for name in files}, **manifest,
    })  # fmt: skip
    return path


def scored(
    rng: np.random.Generator, n: int, hidden: int, signal: Signal, noise: float, suffix: int = SUFFIX
) -> dict[str, NDArray[Any]]:
    """Arrays of a shard whose scores are `signal` + noise + τ; some responses end within the suffix."""
    states = np.concatenate([rng.normal(0, 1, (n, hidden)), np.zeros((n, 3))], 1)
    margin = -rng.exponential(1.5, n)
    best = -rng.exponential(0.5, n)
    wanted = signal(states, margin) + rng.normal(0, noise, n) + TAU - margin
    original = -rng.exponential(0.5, (n, suffix))
    shares = rng.dirichlet(np.ones(suffix), n)
    ended = np.arange(suffix) >= rng.integers(2, 2 * suffix, n)[:, None]
    shares = np.where(ended, 0, shares)
    shares /= shares.sum(1, keepdims=True)
    substituted = original + shares * wanted[:, None]
    original[ended], substituted[ended] = np.nan, np.nan
    states = states[:, :hidden] * np.linspace(0.5, 3, hidden) + np.linspace(-2, 5, hidden)  # columns of many scales
    made = {
        "hidden_draft": states, "hidden_target": states + rng.normal(1, 1, (n, hidden)), "original": original,
        "log_p": np.stack([best, best + margin], 1), "substituted": substituted,
        "highest": np.maximum(substituted, original - 0.5),
    }  # fmt: skip
    return {k: v.astype(np.float32) for k, v in made.items()} | {"rank": np.ones(n, np.int32)}


def by_hand(arrays: dict[str, NDArray[Any]], k: int, length: int) -> float:
    """The score of row k over `length` tokens, token by token."""
    found = float(arrays["log_p"][k, 1]) - float(arrays["log_p"][k, 0])
    for old, new in itertools.islice(zip(arrays["original"][k], arrays["substituted"][k], strict=True), length):
        if not math.isnan(old):
            found += float(new) - float(old)
    return found


def config_of(rows: LabelledRows, features: str = "hidden") -> JudgeConfig:
    return JudgeConfig(hidden_size=rows.hidden_size, features=features)


def everything(rows: LabelledRows, chosen: NDArray[np.bool_], features: str, **options: Any) -> tuple[Tensor, Tensor]:
    found = list(rows.chunks(chosen, features, **options))
    return torch.cat([piece.x for piece in found]), torch.cat([piece.labels for piece in found])


def flipped(rows: LabelledRows, *parts: str) -> LabelledRows:
    for part in parts:
        rows.labels[rows.of(part)] ^= 1
    return rows


def all_arrays(one: Path) -> dict[str, NDArray[Any]]:
    found = [arrays for _, arrays in read_shards(one)]
    return {k: np.concatenate([arrays[k] for arrays in found]) for k in found[0]}


def one_line(error: pytest.ExceptionInfo[SelfJudgeError]) -> None:
    assert "\n" not in str(error.value)
