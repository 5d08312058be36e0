"""Labelled rows for training: small columns in memory, hidden states shard by shard, or kept where they fit.

Three parts, split by prompt: a prompt, in whatever folder and however often it is labelled, belongs to one of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selfjudge.errors import SelfJudgeError
from selfjudge.judge.config import LOOKAHEAD, LOWEST, columns
from selfjudge.label.calibrate import tau_of, total
from selfjudge.label.folder import finished, read_shards
from selfjudge.label.pipeline import shipped_tau
from selfjudge.store import read_rows, read_tensors

PARTS = ("fit", "select", "holdout")
SHARES = (0.7, 0.15, 0.15)
KEPT_BYTES = 2 << 30  # features up to this size stay in memory
CHUNK_BYTES = 128 << 20  # of a piece of them in float32
GPU_SPARE = 8 << 30  # of its memory is left free when features are kept there
FEATURE_ARRAYS = ("hidden_draft", "hidden_target", "lookahead")


@dataclass(frozen=True)
class _Shard:
    file: Path
    start: int
    stop: int


class Rows:
    """Rows of one or several label folders; labels are the stored ones until `relabelled`.

    Rows whose draft token is the target's most likely one after all (in bfloat16, ties between two passes) belong to no part: alignment
    accepts those.
    """

    def __init__(
        self, folders: Sequence[Path], *, seed: int = 0, notify: Callable[[str, float], None] | None = None
    ) -> None:
        if not folders:
            raise SelfJudgeError("name at least one folder of labels")
        self.folders = list(folders)
        self.manifests = [finished(folder) for folder in self.folders]
        _one_pair(self.folders, self.manifests)
        self.hidden_size = int(self.manifests[0]["hidden_size"])
        self.taus: list[float | None] = [m["tau"] for m in self.manifests]
        self.suffix_lengths: list[int] = [m["suffix_length"] for m in self.manifests]
        tell = notify or (lambda stage, share: None)
        kept: list[dict[str, NDArray[Any]]] = []
        parts: dict[str, list[NDArray[Any]]] = {key: [] for key in ("labels", "log_p", "prompts", "sources", "aligned")}
        self._suffix: list[tuple[NDArray[Any], NDArray[Any]]] = []
        self._owner: list[int] = []
        size, n, self._shards = 0, 0, list[_Shard]()
        known: dict[str, int] = {}
        sources: dict[str, int] = {}
        count = sum(len(m["shards"]) for m in self.manifests)
        self.lookahead = True
        for number, (folder, manifest) in enumerate(zip(self.folders, self.manifests, strict=True)):
            keys = {row["prompt_id"]: _key(row["prompt_ids"]) for row in read_rows(folder / "responses.jsonl")}
            for shard, (rows, arrays) in zip(manifest["shards"], read_shards(folder), strict=True):
                self._shards.append(_Shard(folder / list(shard["files"])[1], n, n + len(rows)))
                self._owner.append(number)
                n += len(rows)
                parts["labels"].append(np.asarray([row["label"] for row in rows], np.int8))
                parts["log_p"].append(arrays["log_p"])
                parts["prompts"].append(np.asarray([known.setdefault(keys[r["prompt_id"]], len(known)) for r in rows]))
                parts["sources"].append(np.asarray([sources.setdefault(r["source"], len(sources)) for r in rows]))
                parts["aligned"].append(arrays["rank"] == 0 if "rank" in arrays else np.zeros(len(rows), bool))
                self._suffix.append((arrays["original"], arrays["substituted"]))
                self.lookahead &= "lookahead" in arrays
                feature: dict[str, NDArray[Any]] = {k: v for k, v in arrays.items() if k in FEATURE_ARRAYS}
                _finite(self._shards[-1].file, feature, arrays["log_p"])
                size += sum(array.nbytes for array in feature.values())
                if size <= KEPT_BYTES:
                    kept.append(feature)
                else:
                    kept.clear()
                tell("reading labels", len(self._shards) / count)
        if not n:
            raise SelfJudgeError(f"{self.folders[0]} holds no labels: the draft never differed from the target")
        self.labels, self.log_p, self.prompts, codes, aligned = (np.concatenate(found) for found in parts.values())
        self.sources = np.asarray(list(sources))[codes.astype(int)]
        self.n_prompts = len(known)
        self.part = np.where(aligned, -1, _split(list(known), seed)[self.prompts.astype(int)])
        self.aligned: NDArray[np.bool_] = aligned.astype(bool)
        self._on_gpu: dict[tuple[int, str], Tensor] = {}
        self._kept: list[dict[str, NDArray[Any]]] | None = kept if size <= KEPT_BYTES else None

    def relabelled(
        self, suffix_length: int | None = None, tau: float | None = None, *, mean: bool = False, gap: int = 0,
        acceptable: float | None = None,
    ) -> Rows:  # fmt: skip
        """The same rows with labels from the stored scores: over another suffix or without its first tokens, with another τ or one
        that calls this share of the mismatches acceptable, by the mean of the tokens."""
        other = copy(self)
        other.suffix_lengths, other.labels = [], self.labels.copy()
        for folder, manifest in zip(self.folders, self.manifests, strict=True):
            if manifest["method"] != "selfjudge":
                raise SelfJudgeError(f"{folder} holds {manifest['method']} labels: those do not follow from scores")
            length = manifest["suffix_length"] if suffix_length is None else suffix_length
            if length > manifest["suffix_length"]:
                raise SelfJudgeError(
                    f"{folder} holds scores of {manifest['suffix_length']} tokens, not {length}: label with --suffix-length {length}"
                )
            if gap and gap >= length:
                raise SelfJudgeError(f"--suffix-gap {gap} leaves nothing of a suffix of {length} tokens")
            other.suffix_lengths.append(length)
        scores = [
            total(self.log_p[shard.start : shard.stop], *suffix, other.suffix_lengths[owner], mean=mean, gap=gap)
            for shard, owner, suffix in zip(self._shards, self._owner, self._suffix, strict=True)
        ]
        if acceptable is not None:  # one τ for all folders; rows of which none is used are refused by `check`
            used = np.concatenate(scores)[self.used]
            tau = float(np.quantile(used, 1 - acceptable)) if len(used) else 0.0
        taus = [
            tau if tau is not None else _tau(folder, manifest, length, mean, gap)
            for folder, manifest, length in zip(self.folders, self.manifests, other.suffix_lengths, strict=True)
        ]
        for shard, owner, found in zip(self._shards, self._owner, scores, strict=True):
            other.labels[shard.start : shard.stop] = found > taus[owner]
        other.taus = [*taus]
        return other

    def only(self, sources: Sequence[str]) -> Rows:
        """The same rows, of which those of other sources belong to no part."""
        if unknown := sorted(set(sources) - set(self.sources)):
            known = ", ".join(sorted(set(self.sources)))
            raise SelfJudgeError(f"no labels come from {', '.join(unknown)}; the sources are: {known}")
        other, mine = copy(self), np.isin(self.sources, list(sources))
        other.part, other.aligned = np.where(mine, self.part, -1), self.aligned & mine
        other.n_prompts = len(np.unique(self.prompts[mine]))
        return other

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def used(self) -> NDArray[np.bool_]:
        """Which rows belong to any part."""
        found: NDArray[np.bool_] = self.part >= 0
        return found

    def of(self, part: str) -> NDArray[np.bool_]:
        """Which rows belong to a part."""
        found: NDArray[np.bool_] = self.part == PARTS.index(part)
        return found

    def check(self, features: str, originals: bool = False) -> None:
        """Refuse rows that no judge can be trained on."""
        if "lookahead" in features and not self.lookahead:
            raise SelfJudgeError("these labels hold no look-ahead: label with --lookahead")
        if "lookahead" in features and originals:
            raise SelfJudgeError("no look-ahead is stored for the target's own tokens: use --originals off with it")
        if self.n_prompts < 3:
            raise SelfJudgeError(f"{self.n_prompts} prompts cannot be split in three: label more prompts")
        used = self.labels[self.used]
        if len(used) == 0:
            raise SelfJudgeError(f"{self.folders[0]} holds no mismatch that alignment would refuse: label more prompts")
        if used.min() == used.max():
            which = "acceptable" if used[0] else "unacceptable"
            raise SelfJudgeError(f"all {len(used)} labels are {which}: there is nothing to learn; choose another τ")
        for name in PARTS:
            mine = self.labels[self.of(name)]
            if len(mine) == 0 or mine.min() == mine.max():
                kinds = "no rows" if len(mine) == 0 else "labels of one kind only"
                raise SelfJudgeError(f"the part {name!r} has {kinds}: {self.n_prompts} prompts are too few, label more")

    def chunks(
        self, chosen: NDArray[np.bool_], features: str, *, originals: bool = False, device: torch.device | None = None,
        generator: torch.Generator | None = None,
    ) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
        """(x [m, H + columns] float32, labels [m]) of the chosen rows, a bounded piece at a time; with `originals` also
        the target's own tokens at the same places, which are acceptable. With a `generator`, in random order."""
        order = list(range(len(self._shards)))
        if generator is not None:
            order = torch.randperm(len(order), generator=generator).tolist()
        most = max(1, CHUNK_BYTES // (4 * (self.hidden_size + columns(features))))
        waiting: list[tuple[Tensor, Tensor]] = []
        filled = 0
        for number in order:
            shard = self._shards[number]
            inside = np.flatnonzero(chosen[shard.start : shard.stop])
            if not len(inside):
                continue
            for made in self._of_shard(number, inside, features, originals, device):
                waiting.append(made)
                filled += len(made[1])
            if filled >= most:
                yield from _pieces(waiting, most, device, generator)
                waiting, filled = [], 0
        if waiting:
            yield from _pieces(waiting, most, device, generator)

    def _of_shard(
        self, number: int, inside: NDArray[Any], features: str, originals: bool, device: torch.device | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        shard = self._shards[number]
        needed = ["hidden_draft", *(["hidden_target"] * originals), *(["lookahead"] * ("lookahead" in features))]
        arrays = self._arrays(number, needed, device)
        place = arrays["hidden_draft"].device
        rows = torch.from_numpy(inside).to(place)
        log_p = torch.from_numpy(self.log_p[shard.start : shard.stop][inside]).to(place)
        labels = torch.from_numpy(self.labels[shard.start : shard.stop][inside].astype(np.float32)).to(place)
        margins = (log_p[:, 1:] - log_p[:, :1]).clamp_max(0)
        ahead = None
        if "lookahead" in features:
            ahead = torch.from_numpy(_ahead(arrays["lookahead"].cpu().numpy(), shard.start)).to(place)[rows]
        yield _columns(arrays["hidden_draft"][rows], margins, ahead, features), labels
        if originals:
            none = None if ahead is None else torch.zeros_like(ahead)
            found = _columns(arrays["hidden_target"][rows], torch.zeros_like(margins), none, features)
            yield found, torch.ones(len(found), device=place)

    def _arrays(self, number: int, names: Sequence[str], device: torch.device | None) -> dict[str, Tensor]:
        """Features of a shard: from memory, from the GPU where there is room to keep them, or read."""
        shard = self._shards[number]
        if device is None or device.type != "cuda":
            stored = self._kept[number] if self._kept is not None else read_tensors(shard.file, names)[0]
            return {name: torch.from_numpy(stored[name]) for name in names}
        found: dict[str, Tensor] = {}
        for name in names:
            if (tensor := self._on_gpu.get((number, name))) is None:
                stored = self._kept[number] if self._kept is not None else read_tensors(shard.file, [name])[0]
                tensor = torch.from_numpy(stored[name]).to(device)
                if tensor.nbytes < torch.cuda.mem_get_info(device)[0] - GPU_SPARE:
                    self._on_gpu[number, name] = tensor
            found[name] = tensor
        return found


def _columns(hidden: Tensor, margins: Tensor, ahead: Tensor | None, features: str) -> Tensor:
    parts = [hidden.float()]
    if "margin" in features:
        parts.append(margins.clamp_min(LOWEST).float())
    if ahead is not None:
        parts.append(ahead.clamp_min(LOWEST).float())
    return torch.cat(parts, 1)


def _pieces(
    waiting: list[tuple[Tensor, Tensor]], most: int, device: torch.device | None, generator: torch.Generator | None
) -> Iterator[tuple[Tensor, Tensor]]:
    x, labels = (torch.cat(parts) for parts in zip(*waiting, strict=True))
    if generator is not None:
        order = torch.randperm(len(x), generator=generator).to(x.device)
        x, labels = x[order], labels[order]
    for a, b in zip(x.split(most), labels.split(most), strict=True):
        yield (a, b) if device is None else (a.to(device), b.to(device))


def _finite(file: Path, arrays: dict[str, NDArray[Any]], log_p: NDArray[Any]) -> None:
    good = ~np.isnan(log_p).any(1)
    for name in ("hidden_draft", "hidden_target"):
        good &= np.isfinite(arrays[name]).all(1)
    if not good.all():
        raise SelfJudgeError(f"{file} has {int((~good).sum())} rows with features that are no numbers: label again")


def _ahead(log_p: NDArray[Any], seed: int) -> NDArray[np.float32]:
    """[n, 2K] what a judge would see of the drafts that follow: a block ends somewhere, so each row loses the last 0 to K."""
    there = ~np.isnan(log_p)
    seen = np.random.default_rng(seed).integers(0, LOOKAHEAD + 1, (len(log_p), 1))
    there &= np.arange(LOOKAHEAD) < seen
    return np.concatenate([np.where(there, log_p, 0), there], 1).astype(np.float32)


def _one_pair(folders: Sequence[Path], manifests: Sequence[dict[str, Any]]) -> None:
    """One target for all: by checksum, by name where there is none."""
    first = manifests[0]
    for folder, manifest in zip(folders[1:], manifests[1:], strict=True):
        known = manifest.get("target_sha256") and first.get("target_sha256")
        same = ("target_sha256" if known else "target", "hidden_size")
        if differing := [key for key in same if manifest.get(key) != first.get(key)]:
            said = ", ".join(f"{key} {manifest.get(key)!r} and {first.get(key)!r}" for key in differing)
            raise SelfJudgeError(f"{folder} and {folders[0]} are of different targets ({said}): a judge has one")


def _tau(folder: Path, manifest: dict[str, Any], length: int, mean: bool, gap: int) -> float:
    """τ for these scores: the stored one where they are the stored scores, else from the folder's evidence, else the shipped one."""
    if length == manifest["suffix_length"] and not mean and not gap:
        return float(manifest["tau"])
    evidence = folder / "calibration.safetensors"
    if evidence.is_file():
        recall = (manifest.get("tau_evidence") or {}).get("reject_recall", 0.9)
        return float(tau_of(evidence, length, recall, mean=mean, gap=gap)["tau"])
    shipped = None if mean or gap else shipped_tau(manifest["target"], manifest["draft_sha256"], length)
    if shipped is None:
        raise SelfJudgeError(f"{folder} holds no evidence to find τ for these scores: give --tau or --acceptable")
    return float(shipped["tau"])


def _key(ids: Sequence[int]) -> str:
    return hashlib.sha256(np.asarray(ids, np.int64).tobytes()).hexdigest()


def _split(keys: Sequence[str], seed: int) -> NDArray[np.int8]:
    """Which part each prompt belongs to: sorted by a hash of its tokens and the seed, cut by shares."""
    order = sorted(range(len(keys)), key=lambda i: hashlib.sha256(f"{seed}:{keys[i]}".encode()).digest())
    part = np.empty(len(keys), np.int8)
    first = max(1, min(round(SHARES[0] * len(keys)), len(keys) - 2))
    second = max(first + 1, min(round((SHARES[0] + SHARES[1]) * len(keys)), len(keys) - 1))
    for place, index in enumerate(order):
        part[index] = 0 if place < first else 1 if place < second else 2
    return part
