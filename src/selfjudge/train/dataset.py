"""Labelled rows for training: small columns in memory, hidden states shard by shard, or kept where they fit.

Three parts, split by prompt: a prompt, in whatever folder and however often it is labelled, belongs to one of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selfjudge.errors import SelfJudgeError
from selfjudge.judge.config import LOOKAHEAD, LOWEST, feature_width
from selfjudge.judge.training_prompts import prompt_key
from selfjudge.label.calibrate import tau_of, total
from selfjudge.label.folder import finished, read_responses, read_shards
from selfjudge.label.tau import shipped_tau
from selfjudge.store import read_tensors
from selfjudge.types import Notify

PARTS = ("fit", "select", "holdout")
SHARES = (0.7, 0.15, 0.15)
KEPT_BYTES = 2 << 30  # features up to this size stay in memory
CHUNK_BYTES = 128 << 20  # of a piece of them in float32
GPU_SPARE = 8 << 30  # of its memory is left free when features are kept there
HIDDEN_ARRAYS = {"hidden_draft", "hidden_target", "hidden_before"}
FEATURE_ARRAYS = {*HIDDEN_ARRAYS, "lookahead"}

Arrays = dict[str, NDArray[Any]]


class Piece(NamedTuple):
    """Some rows to learn from."""

    x: Tensor
    """[m, D] what the judge reads."""
    labels: Tensor
    """[m] 1 for acceptable."""
    weights: Tensor
    """[m] how much each counts."""


@dataclass(frozen=True)
class _Shard:
    """Rows `start` to `stop`, of folder number `folder`; their features lie in `file`."""

    folder: int
    file: Path
    start: int
    stop: int
    original: NDArray[Any]
    substituted: NDArray[Any]
    highest: NDArray[Any] | None
    """None in labels of earlier versions."""

    def after(self, score: str) -> NDArray[Any]:
        """What a score compares with `original`."""
        if score == "likelihood":
            return self.substituted
        if self.highest is None:
            raise SelfJudgeError(f"{self.file.parent} holds no scores for `score` {score}: label again")
        return self.highest


@dataclass(eq=False)
class Rows:
    """Rows of one or several label folders; labels are the stored ones until `relabel`.

    Some draft tokens are the target's most likely one after all (in bfloat16, ties between two passes). Alignment
    accepts those, so their rows belong to no part.
    """

    folders: list[Path]
    manifests: list[dict[str, Any]]
    hidden_size: int
    taus: list[float | None]
    """By folder."""
    suffix_lengths: list[int]
    """By folder."""
    labels: NDArray[np.int8]
    weights: NDArray[np.float32]
    """[n] how much each row counts when a judge is fitted."""
    log_p: NDArray[np.float32]
    """[n, 2] log-probabilities of the target's most likely token and of the draft token."""
    prompts: NDArray[np.int64]
    """A number for each prompt, the same in all folders."""
    keys: list[str]
    """By that number: the prompt's key."""
    n_prompts: int
    sources: NDArray[np.str_]
    aligned: NDArray[np.bool_]
    part: NDArray[np.int8]
    """Index into PARTS, −1 for none."""
    lookahead: bool
    previous: bool
    shards: list[_Shard]
    kept: list[Arrays] | None
    """Features by shard, where all of them fit into memory."""
    on_gpu: dict[tuple[int, str], Tensor] = field(default_factory=dict)

    @classmethod
    def load(cls, folders: Sequence[Path], *, seed: int = 0, notify: Notify | None = None) -> Self:
        """Read finished label folders of one target and split their prompts."""
        if not folders:
            raise SelfJudgeError("name at least one folder of labels")
        manifests = [finished(folder) for folder in folders]
        _check_one_target(folders, manifests)
        reading = _Reading()
        n_shards = sum(len(manifest["shards"]) for manifest in manifests)
        for number, (folder, manifest) in enumerate(zip(folders, manifests, strict=True)):
            keys = {row["prompt_id"]: prompt_key(row["prompt_ids"]) for row in read_responses(folder)}
            for shard, (rows, arrays) in zip(manifest["shards"], read_shards(folder), strict=True):
                reading.add(number, folder / list(shard["files"])[1], rows, arrays, keys)
                if notify:
                    notify("reading labels", len(reading.shards) / n_shards)
        if not reading.length:
            raise SelfJudgeError(f"{folders[0]} holds no labels: the draft never differed from the target")
        small = {name: np.concatenate(parts) for name, parts in reading.columns.items()}
        aligned = small["aligned"].astype(bool)
        return cls(
            folders=list(folders),
            manifests=manifests,
            hidden_size=int(manifests[0]["hidden_size"]),
            taus=[manifest["tau"] for manifest in manifests],
            suffix_lengths=[manifest["suffix_length"] for manifest in manifests],
            labels=small["labels"],
            weights=np.ones(reading.length, np.float32),
            log_p=small["log_p"],
            prompts=small["prompts"].astype(np.int64),
            keys=list(reading.prompts),
            n_prompts=len(reading.prompts),
            sources=np.asarray(list(reading.sources))[small["sources"].astype(int)],
            aligned=aligned,
            part=np.where(aligned, -1, _split(list(reading.prompts), seed)[small["prompts"].astype(int)]),
            lookahead=reading.lookahead,
            previous=reading.previous,
            shards=reading.shards,
            kept=reading.kept,
        )

    def relabel(
        self,
        suffix_length: int | None = None,
        tau: float | None = None,
        *,
        mean: bool = False,
        gap: int = 0,
        acceptable: float | None = None,
        score: str = "likelihood",
    ) -> Self:
        """The same rows with labels from the stored scores: of `suffix_length` tokens without the first `gap`, summed
        or by their `mean`, above `tau` or the τ that calls the share `acceptable` of the mismatches acceptable.

        The score `confidence` is a mean. Labels by other methods stay as they are, where there are some by likelihood.
        """
        mean |= score == "confidence"
        scored = self._scored_folders()
        lengths = list(self.suffix_lengths)
        for i in scored:
            lengths[i] = _usable_length(self.folders[i], self.manifests[i], suffix_length, gap)
        scores = {
            number: total(
                self.log_p[s.start : s.stop], s.original, s.after(score), lengths[s.folder], mean=mean, gap=gap
            )
            for number, s in enumerate(self.shards)
            if s.folder in scored
        }
        if acceptable is not None:  # one τ for all folders; rows of which none is used are refused by `check`
            inside = [self.used[self.shards[number].start : self.shards[number].stop] for number in scores]
            used = np.concatenate([s[mask] for s, mask in zip(scores.values(), inside, strict=True)])
            tau = float(np.quantile(used, 1 - acceptable)) if len(used) else 0.0
        taus = {
            i: _tau(self.folders[i], self.manifests[i], lengths[i], mean, gap, score) if tau is None else tau
            for i in scored
        }
        labels = self.labels.copy()
        for number, shard_scores in scores.items():
            shard = self.shards[number]
            labels[shard.start : shard.stop] = shard_scores > taus[shard.folder]
        every_tau = [taus.get(i, before) for i, before in enumerate(self.taus)]
        return replace(self, labels=labels, suffix_lengths=lengths, taus=every_tau)

    def _scored_folders(self) -> list[int]:
        """The folders whose labels follow from scores; refused where there is none."""
        scored = [i for i, manifest in enumerate(self.manifests) if manifest["method"] == "selfjudge"]
        if not scored:
            method = self.manifests[0]["method"]
            raise SelfJudgeError(f"{self.folders[0]} holds {method} labels: those do not follow from scores")
        return scored

    def weighted(self, weights: Mapping[str, float]) -> Self:
        """The same rows, each with the weight of its label method.

        The method with the greatest weight, the first of equals, is what the judge is for: rows of the others belong
        to the part `fit` or to none.
        """
        methods = np.asarray([manifest["method"] for manifest in self.manifests])
        if differing := sorted(set(methods.tolist()) ^ set(weights)):
            known = ", ".join(sorted(set(methods.tolist())))
            raise SelfJudgeError(f"`weights` must name each label method once ({known}); {differing[0]} is amiss")
        of_row = np.empty(len(self), methods.dtype)
        for shard in self.shards:
            of_row[shard.start : shard.stop] = methods[shard.folder]
        main = max(weights, key=lambda method: weights[method])
        others = (of_row != main) & (self.part != PARTS.index("fit"))
        return replace(
            self,
            weights=np.asarray([weights[str(method)] for method in of_row], np.float32),
            part=np.where(others, -1, self.part).astype(np.int8),
        )

    def only(self, sources: Sequence[str]) -> Self:
        """The same rows, of which those of other sources belong to no part."""
        if unknown := sorted(set(sources) - set(self.sources)):
            known = ", ".join(sorted(set(self.sources)))
            raise SelfJudgeError(f"no labels come from {', '.join(unknown)}; the sources are: {known}")
        inside = np.isin(self.sources, list(sources))
        return replace(
            self,
            part=np.where(inside, self.part, -1),
            aligned=self.aligned & inside,
            n_prompts=len(np.unique(self.prompts[inside])),
        )

    def within(self, margin_limit: float) -> Self:
        """The same rows, of which those where the judge has no say belong to no part."""
        margins = self.log_p[:, 1] - self.log_p[:, 0]
        return replace(self, part=np.where(margins < -margin_limit, -1, self.part).astype(np.int8))

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def used(self) -> NDArray[np.bool_]:
        """Which rows belong to any part."""
        mask: NDArray[np.bool_] = self.part >= 0
        return mask

    def of(self, part: str) -> NDArray[np.bool_]:
        """Which rows belong to a part."""
        mask: NDArray[np.bool_] = self.part == PARTS.index(part)
        return mask

    def check(self, features: str, originals: bool = False) -> None:
        """Refuse rows that no judge can be trained on."""
        if "lookahead" in features and not self.lookahead:
            raise SelfJudgeError("these labels hold no look-ahead: label again with `lookahead`")
        if "previous" in features and not self.previous:
            raise SelfJudgeError("these labels hold no state of the token before: label again with `previous`")
        if "lookahead" in features and originals:
            raise SelfJudgeError("no look-ahead is stored for the target's own tokens: do not use `originals` with it")
        if self.n_prompts < 3:
            raise SelfJudgeError(f"{self.n_prompts} prompts cannot be split in three: label more prompts")
        used = self.labels[self.used]
        if len(used) == 0:
            raise SelfJudgeError(f"{self.folders[0]} holds no mismatch that alignment would refuse: label more prompts")
        if used.min() == used.max():
            which = "acceptable" if used[0] else "unacceptable"
            raise SelfJudgeError(f"all {len(used)} labels are {which}: there is nothing to learn; choose another τ")
        for name in PARTS:
            labels = self.labels[self.of(name)]
            if len(labels) == 0 or labels.min() == labels.max():
                kinds = "no rows" if len(labels) == 0 else "labels of one kind only"
                raise SelfJudgeError(f"the part {name!r} has {kinds}: {self.n_prompts} prompts are too few, label more")

    def chunks(
        self,
        chosen: NDArray[np.bool_],
        features: str,
        *,
        originals: bool = False,
        device: torch.device | None = None,
        generator: torch.Generator | None = None,
    ) -> Iterator[Piece]:
        """(x [m, D] float32, labels [m], weights [m]) of the chosen rows, a bounded piece at a time.

        With `originals` also the target's own tokens at the same places, which are acceptable. With a `generator`, in
        random order.
        """
        order = list(range(len(self.shards)))
        if generator is not None:
            order = torch.randperm(len(order), generator=generator).tolist()
        most = max(1, CHUNK_BYTES // (4 * feature_width(features, self.hidden_size)))
        waiting: list[Piece] = []
        n_waiting = 0
        for number in order:
            shard = self.shards[number]
            inside = np.flatnonzero(chosen[shard.start : shard.stop])
            if not len(inside):
                continue
            for piece in self._of_shard(number, inside, features, originals, device):
                waiting.append(piece)
                n_waiting += len(piece.labels)
            if n_waiting >= most:
                yield from _pieces(waiting, most, device, generator)
                waiting, n_waiting = [], 0
        if waiting:
            yield from _pieces(waiting, most, device, generator)

    def _of_shard(
        self, number: int, inside: NDArray[Any], features: str, originals: bool, device: torch.device | None
    ) -> Iterator[Piece]:
        """Columns and labels of the rows `inside` a shard; with `originals` those of the target's own tokens too."""
        shard = self.shards[number]
        needed = ["hidden_draft", *(["hidden_target"] * originals), *(["lookahead"] * ("lookahead" in features))]
        needed += ["hidden_before"] * ("previous" in features)
        arrays = self._arrays(number, needed, device)
        place = arrays["hidden_draft"].device
        rows = torch.from_numpy(inside).to(place)
        log_p = torch.from_numpy(self.log_p[shard.start : shard.stop][inside]).to(place)
        labels = torch.from_numpy(self.labels[shard.start : shard.stop][inside].astype(np.float32)).to(place)
        weights = torch.from_numpy(self.weights[shard.start : shard.stop][inside]).to(place)
        margins = (log_p[:, 1:] - log_p[:, :1]).clamp_max(0)
        before = arrays["hidden_before"][rows] if "previous" in features else None
        ahead = None
        if "lookahead" in features:
            ahead = torch.from_numpy(_ahead(arrays["lookahead"].cpu().numpy(), shard.start)).to(place)[rows]
        yield Piece(_columns(arrays["hidden_draft"][rows], margins, ahead, before, features), labels, weights)
        if originals:
            none = None if ahead is None else torch.zeros_like(ahead)
            x = _columns(arrays["hidden_target"][rows], torch.zeros_like(margins), none, before, features)
            yield Piece(x, torch.ones(len(x), device=place), weights)

    def _arrays(self, number: int, names: Sequence[str], device: torch.device | None) -> dict[str, Tensor]:
        """Features of a shard: from memory, from the GPU where there is room to keep them, or read."""
        file = self.shards[number].file
        if device is None or device.type != "cuda":
            stored = self.kept[number] if self.kept is not None else read_tensors(file, names)[0]
            return {name: torch.from_numpy(stored[name]) for name in names}
        arrays: dict[str, Tensor] = {}
        for name in names:
            if (tensor := self.on_gpu.get((number, name))) is None:
                stored = self.kept[number] if self.kept is not None else read_tensors(file, [name])[0]
                tensor = torch.from_numpy(stored[name]).to(device)
                if tensor.nbytes < torch.cuda.mem_get_info(device)[0] - GPU_SPARE:
                    self.on_gpu[number, name] = tensor
            arrays[name] = tensor
        return arrays


class _Reading:
    """Collects the small columns of shards, and their features as long as all of them fit into memory."""

    def __init__(self) -> None:
        self.columns: dict[str, list[NDArray[Any]]] = {
            name: [] for name in ("labels", "log_p", "prompts", "sources", "aligned")
        }
        self.shards: list[_Shard] = []
        self.prompts: dict[str, int] = {}
        self.sources: dict[str, int] = {}
        self.lookahead = self.previous = True
        self.length = 0
        self.kept: list[Arrays] | None = []
        self._bytes = 0

    def add(
        self, folder: int, file: Path, rows: Sequence[dict[str, Any]], arrays: Arrays, keys: dict[str, str]
    ) -> None:
        """A shard's rows; `keys` names the prompt behind each prompt id of its folder."""
        _check_finite(file, arrays)
        if unknown := [row["prompt_id"] for row in rows if row["prompt_id"] not in keys]:
            raise SelfJudgeError(f"{file.parent} has labels of prompt {unknown[0]!r:.40}, which has no response")
        small = {
            "labels": np.asarray([row["label"] for row in rows], np.int8),
            "log_p": arrays["log_p"],
            "prompts": np.asarray([self.prompts.setdefault(keys[row["prompt_id"]], len(self.prompts)) for row in rows]),
            "sources": np.asarray([self.sources.setdefault(row["source"], len(self.sources)) for row in rows]),
            "aligned": arrays["rank"] == 0 if "rank" in arrays else np.zeros(len(rows), bool),
        }
        for name, column in small.items():
            self.columns[name].append(column)
        end = self.length + len(rows)
        scored = arrays["original"], arrays["substituted"], arrays.get("highest")
        self.shards.append(_Shard(folder, file, self.length, end, *scored))
        self.length = end
        self.lookahead &= "lookahead" in arrays
        self.previous &= "hidden_before" in arrays
        features = {name: array for name, array in arrays.items() if name in FEATURE_ARRAYS}
        self._bytes += sum(array.nbytes for array in features.values())
        if self._bytes > KEPT_BYTES:
            self.kept = None
        if self.kept is not None:
            self.kept.append(features)


def _columns(hidden: Tensor, margins: Tensor, ahead: Tensor | None, before: Tensor | None, features: str) -> Tensor:
    parts = [hidden.float()]
    if "margin" in features:
        parts.append(margins.clamp_min(LOWEST).float())
    if ahead is not None:
        parts.append(ahead.clamp_min(LOWEST).float())
    if before is not None:
        parts.append(before.float())
    return torch.cat(parts, 1)


def _pieces(
    waiting: list[Piece], most: int, device: torch.device | None, generator: torch.Generator | None
) -> Iterator[Piece]:
    """What waits, joined, shuffled where there is a generator, and cut into pieces of at most `most` rows."""
    whole = Piece(*(torch.cat(parts) for parts in zip(*waiting, strict=True)))
    if generator is not None:
        order = torch.randperm(len(whole.x), generator=generator).to(whole.x.device)
        whole = Piece(*(column[order] for column in whole))
    for columns in zip(*(column.split(most) for column in whole), strict=True):
        yield Piece(*columns) if device is None else Piece(*(column.to(device) for column in columns))


def _check_finite(file: Path, arrays: Arrays) -> None:
    good = ~np.isnan(arrays["log_p"]).any(1)
    for name in HIDDEN_ARRAYS & arrays.keys():
        good &= np.isfinite(arrays[name]).all(1)
    if not good.all():
        raise SelfJudgeError(f"{file} has {int((~good).sum())} rows whose features are not finite: label again")


def _ahead(log_p: NDArray[Any], seed: int) -> NDArray[np.float32]:
    """[n, 2K] what a judge sees of the drafts that follow. A block ends somewhere: each row loses the last 0 to K."""
    there = ~np.isnan(log_p)
    seen = np.random.default_rng(seed).integers(0, LOOKAHEAD + 1, (len(log_p), 1))
    there &= np.arange(LOOKAHEAD) < seen
    return np.concatenate([np.where(there, log_p, 0), there], 1).astype(np.float32)


def _check_one_target(folders: Sequence[Path], manifests: Sequence[dict[str, Any]]) -> None:
    """One target for all: by checksum, by name where there is none."""
    first = manifests[0]
    for folder, manifest in zip(folders[1:], manifests[1:], strict=True):
        hashed = manifest.get("target_sha256") and first.get("target_sha256")
        same = ("target_sha256" if hashed else "target", "hidden_size")
        if differing := [key for key in same if manifest.get(key) != first.get(key)]:
            values = ", ".join(f"{key} {manifest.get(key)!r} and {first.get(key)!r}" for key in differing)
            raise SelfJudgeError(f"{folder} and {folders[0]} are of different targets ({values}): a judge has one")


def _usable_length(folder: Path, manifest: dict[str, Any], suffix_length: int | None, gap: int) -> int:
    """The suffix length to score with, if the stored scores reach that far and the gap leaves something of it."""
    stored = int(manifest["suffix_length"])
    length = stored if suffix_length is None else suffix_length
    if length > stored:
        raise SelfJudgeError(
            f"{folder} holds scores of {stored} tokens, not {length}: label again with a `suffix_length` of {length}"
        )
    if gap and gap >= length:
        raise SelfJudgeError(f"`suffix_gap` {gap} leaves nothing of a suffix of {length} tokens")
    return length


def _tau(folder: Path, manifest: dict[str, Any], length: int, mean: bool, gap: int, score: str) -> float:
    """τ for these scores: the stored one for stored scores, else from the folder's evidence, else the shipped one."""
    if length == manifest["suffix_length"] and not mean and not gap and manifest["tau"] is not None:
        return float(manifest["tau"])
    evidence = folder / "calibration.safetensors"
    if evidence.is_file():
        recall = (manifest.get("tau_evidence") or {}).get("reject_recall", 0.9)
        after = "substituted" if score == "likelihood" else "highest"
        return float(tau_of(evidence, length, recall, mean=mean, gap=gap, after=after)["tau"])
    shipped = None if mean or gap else shipped_tau(manifest["target"], manifest["draft_sha256"], length)
    if shipped is None:
        raise SelfJudgeError(f"{folder} holds no evidence to find τ for these scores: give `tau` or `acceptable`")
    return float(shipped["tau"])


def _split(keys: Sequence[str], seed: int) -> NDArray[np.int8]:
    """Which part each prompt belongs to: sorted by a hash of its tokens and the seed, cut by shares."""
    order = sorted(range(len(keys)), key=lambda i: hashlib.sha256(f"{seed}:{keys[i]}".encode()).digest())
    first = max(1, min(round(SHARES[0] * len(keys)), len(keys) - 2))
    second = max(first + 1, min(round((SHARES[0] + SHARES[1]) * len(keys)), len(keys) - 1))
    part = np.empty(len(keys), np.int8)
    for place, index in enumerate(order):
        part[index] = 0 if place < first else 1 if place < second else 2
    return part
