"""Labelled rows for training: small columns in memory; hidden states are read by shard, and kept where they fit. The
three parts are split by prompt, whatever folders a prompt is in."""

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selfjudge.errors import SelfJudgeError
from selfjudge.judge.config import feature_width, prompt_key
from selfjudge.judge.model import join_features
from selfjudge.label.config import find_shipped_tau
from selfjudge.label.folder import EVIDENCE_FILE, Arrays, name_shard_files, read_manifest, read_responses, read_shards
from selfjudge.label.methods import compute_tau
from selfjudge.label.score import sum_scores
from selfjudge.store import read_tensors
from selfjudge.train.config import TrainConfig
from selfjudge.types import Notify

PARTS = ("fit", "select", "holdout")
SHARES = (0.7, 0.15, 0.15)
KEPT_BYTES = 2 << 30  # of features stay in memory
CHUNK_BYTES = 128 << 20  # of the float32 features of a chunk
GPU_SPARE = 8 << 30  # bytes of a GPU's memory that are left free when features are kept there
HIDDEN_ARRAYS = {"hidden_draft", "hidden_target", "hidden_before"}


class Chunk(NamedTuple):
    """Some rows to learn from."""

    x: Tensor  # [m, D] features that the judge reads
    labels: Tensor  # [m] 1 for acceptable


@dataclass(frozen=True)
class _Shard:
    """The rows of one shard, and the log-probabilities that labels are made again from."""

    folder: int  # index of the label folder
    file: Path  # file of the features
    rows: slice  # indices of the rows among all
    scores: Arrays  # the arrays of `label.score.sum_scores`
    has_previous: bool  # whether the states before the tokens are stored


@dataclass(eq=False)
class LabelledRows:
    """Rows of one or several label folders; labels are the stored ones until `relabel`. Rows whose draft token is the
    target's most likely one belong to no part: in bfloat16 two passes may tie, and alignment accepts them."""

    folders: list[Path]
    manifests: list[dict[str, Any]]
    hidden_size: int
    taus: list[float | None]  # τ of each folder
    suffix_lengths: list[int]  # suffix length of each folder
    labels: NDArray[np.int8]
    log_p: NDArray[np.float32]  # [n, 2] log-probabilities of the target's most likely token and of the draft token
    prompts: NDArray[np.int64]  # [n] number of each row's prompt, the same in all folders
    keys: list[str]  # keys of the prompts, by that number
    n_prompts: int
    sources: NDArray[np.str_]
    aligned: NDArray[np.bool_]
    part: NDArray[np.int8]  # [n] index into PARTS, −1 for none
    shards: list[_Shard]
    kept: dict[tuple[int, str, str], Tensor] = field(default_factory=dict)
    """Features by number of the shard, name and device, as many as fit into memory."""

    @classmethod
    def load(cls, folders: Sequence[Path], *, seed: int = 0, notify: Notify | None = None) -> Self:
        """Read finished label folders of one target and split their prompts."""
        if not folders:
            raise SelfJudgeError("name at least one folder of labels")
        manifests = [read_manifest(folder) for folder in folders]
        _check_one_target(folders, manifests)
        n_shards = sum(len(manifest["shards"]) for manifest in manifests)
        columns: dict[str, list[NDArray[Any]]] = defaultdict(list)
        shards: list[_Shard] = []
        numbers: dict[str, int] = {}  # of prompts, by key
        for index, folder in enumerate(folders):
            keys = {row["prompt_id"]: prompt_key(row["prompt_ids"]) for row in read_responses(folder)}
            for number, (rows, arrays) in enumerate(read_shards(folder)):
                file = folder / name_shard_files(number)[1]
                _check_rows(file, rows, arrays, keys)
                columns["labels"].append(np.asarray([row["label"] for row in rows], np.int8))
                columns["log_p"].append(arrays["log_p"])
                prompts = [numbers.setdefault(keys[row["prompt_id"]], len(numbers)) for row in rows]
                columns["prompts"].append(np.asarray(prompts, np.int64))
                columns["sources"].append(np.asarray([row["source"] for row in rows], np.str_))
                columns["aligned"].append(arrays["rank"] == 0)
                start = sum(map(len, columns["labels"][:-1]))
                scores = {name: arrays[name] for name in ("log_p", "original", "substituted", "highest")}
                has_previous = "hidden_before" in arrays
                shards.append(_Shard(index, file, slice(start, start + len(rows)), scores, has_previous))
                if notify:
                    notify("reading labels", len(shards) / n_shards)
        if not numbers:
            raise SelfJudgeError(f"{folders[0]} holds no labels: the draft never differed from the target")
        joined: dict[str, Any] = {name: np.concatenate(parts) for name, parts in columns.items()}
        return cls(
            folders=list(folders),
            manifests=manifests,
            hidden_size=int(manifests[0]["hidden_size"]),
            taus=[manifest["tau"] for manifest in manifests],
            suffix_lengths=[manifest["suffix_length"] for manifest in manifests],
            keys=list(numbers),
            n_prompts=len(numbers),
            part=np.where(joined["aligned"], -1, _split(list(numbers), seed)[joined["prompts"]]),
            shards=shards,
            **joined,
        )

    def relabel(self, config: TrainConfig) -> Self:
        """The same rows with labels from the stored scores of `suffix_length` tokens without the first `suffix_gap`,
        above `tau` or the τ that accepts the share `acceptable`. Labels by other methods stay."""
        tau, gap, score = config.tau, config.suffix_gap, config.score
        scored = [i for i, manifest in enumerate(self.manifests) if manifest["method"] == "selfjudge"]
        if not scored:
            method = self.manifests[0]["method"]
            raise SelfJudgeError(f"{self.folders[0]} holds {method} labels: those do not follow from scores")
        lengths = list(self.suffix_lengths)
        for i in scored:
            lengths[i] = _usable_length(self.folders[i], self.manifests[i], config.suffix_length, gap)
        shards = [shard for shard in self.shards if shard.folder in scored]
        scores = [sum_scores(s.scores, lengths[s.folder], gap=gap, score=score) for s in shards]
        if config.acceptable is not None:  # one τ for all folders; `check` raises where no row is used
            used = np.concatenate([values[self.used[s.rows]] for s, values in zip(shards, scores, strict=True)])
            tau = float(np.quantile(used, 1 - config.acceptable)) if len(used) else 0.0
        taus = {
            i: _find_tau(self.folders[i], self.manifests[i], lengths[i], gap, score) if tau is None else tau
            for i in scored
        }
        labels = self.labels.copy()
        for s, values in zip(shards, scores, strict=True):
            labels[s.rows] = values > taus[s.folder]
        every_tau = [taus.get(i, before) for i, before in enumerate(self.taus)]
        return replace(self, labels=labels, suffix_lengths=lengths, taus=every_tau)

    def select_sources(self, sources: Sequence[str]) -> Self:
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

    def limit_margin(self, margin_limit: float) -> Self:
        """The same rows, of which those beyond the margin limit, where the judge has no say, belong to no part."""
        margins = self.log_p[:, 1] - self.log_p[:, 0]
        return replace(self, part=np.where(margins < -margin_limit, -1, self.part).astype(np.int8))

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def used(self) -> NDArray[np.bool_]:
        """[n] whether each row belongs to a part."""
        mask: NDArray[np.bool_] = self.part >= 0
        return mask

    def of(self, part: str) -> NDArray[np.bool_]:
        """[n] whether each row belongs to this part."""
        mask: NDArray[np.bool_] = self.part == PARTS.index(part)
        return mask

    def check(self, features: str) -> None:
        """Refuse rows that no judge can be trained on."""
        if "previous" in features and not self.has_previous:
            raise SelfJudgeError("these labels hold no state of the token before: label again with `previous`")
        if self.n_prompts < 3:
            raise SelfJudgeError(f"{self.n_prompts} prompts cannot be split in three: label more prompts")
        used = self.labels[self.used]
        if len(used) == 0:
            raise SelfJudgeError(f"{self.folders[0]} holds no mismatch that alignment would reject: label more prompts")
        if used.min() == used.max():
            which = "acceptable" if used[0] else "unacceptable"
            raise SelfJudgeError(f"all {len(used)} labels are {which}: there is nothing to learn; choose another τ")
        for name in PARTS:
            labels = self.labels[self.of(name)]
            if len(labels) == 0 or labels.min() == labels.max():
                kinds = "no rows" if len(labels) == 0 else "labels of one kind only"
                raise SelfJudgeError(f"the part {name!r} has {kinds}: {self.n_prompts} prompts are too few, label more")

    @property
    def has_previous(self) -> bool:
        """Whether the state before each token is stored."""
        return all(shard.has_previous for shard in self.shards)

    def chunks(
        self, chosen: NDArray[np.bool_], features: str, *, originals: bool = False, device: torch.device | None = None
    ) -> Iterator[Chunk]:
        """The chosen rows in bounded chunks; `originals` adds the target's own tokens there, as acceptable rows."""
        most = max(1, CHUNK_BYTES // (4 * feature_width(features, self.hidden_size)))
        waiting: list[Chunk] = []
        for number, shard in enumerate(self.shards):
            inside = np.flatnonzero(chosen[shard.rows])
            if len(inside):
                waiting += self._read_shard(number, inside, features, originals, device)
            if sum(len(chunk.labels) for chunk in waiting) >= most:
                yield from _split_chunks(waiting, most, device)
                waiting = []
        if waiting:
            yield from _split_chunks(waiting, most, device)

    def _read_shard(
        self, number: int, inside: NDArray[Any], features: str, originals: bool, device: torch.device | None
    ) -> Iterator[Chunk]:
        """The rows `inside` a shard; with `originals` those of the target's own tokens, too."""
        shard = self.shards[number]
        hidden = self._feature(number, "hidden_draft", device)
        rows = torch.from_numpy(inside).to(hidden.device)
        log_p, labels = (
            torch.from_numpy(column[shard.rows][inside]).to(hidden.device) for column in (self.log_p, self.labels)
        )
        before = self._feature(number, "hidden_before", device)[rows] if "previous" in features else None
        margin = (log_p[:, 1] - log_p[:, 0]).clamp_max(0)
        yield Chunk(join_features(features, hidden[rows], margin, before), labels.float())
        if originals:
            hidden = self._feature(number, "hidden_target", device)
            x = join_features(features, hidden[rows], torch.zeros_like(margin), before)
            yield Chunk(x, torch.ones(len(x), device=x.device))

    def _feature(self, number: int, name: str, device: torch.device | None) -> Tensor:
        """An array of a shard: from memory, on the GPU or here, or read, and kept where there is room."""
        key = number, name, str(device)
        if (kept := self.kept.get(key)) is not None:
            return kept
        tensor = torch.from_numpy(read_tensors(self.shards[number].file, [name])[0][name])
        if device is not None and device.type == "cuda":
            tensor = tensor.to(device)
            room = torch.cuda.mem_get_info(device)[0] - GPU_SPARE
        else:
            room = KEPT_BYTES - sum(other.nbytes for other in self.kept.values())
        if tensor.nbytes < room:
            self.kept[key] = tensor
        return tensor


def _check_rows(file: Path, rows: Sequence[Mapping[str, Any]], arrays: Arrays, keys: Mapping[str, str]) -> None:
    """Refuse features that are not finite, and labels of prompts that are not among the `keys` of their folder."""
    finite = ~np.isnan(arrays["log_p"]).any(1)
    for name in HIDDEN_ARRAYS & arrays.keys():
        finite &= np.isfinite(arrays[name]).all(1)
    if not finite.all():
        raise SelfJudgeError(f"{file} has {int((~finite).sum())} rows whose features are not finite: label again")
    if unknown := [row["prompt_id"] for row in rows if row["prompt_id"] not in keys]:
        raise SelfJudgeError(f"{file.parent} has labels of prompt {unknown[0]!r:.40}, which has no response")


def _split_chunks(waiting: Sequence[Chunk], most: int, device: torch.device | None) -> Iterator[Chunk]:
    """The waiting rows, joined, and cut into chunks of at most `most` rows."""
    joined = (torch.cat(parts) for parts in zip(*waiting, strict=True))
    for columns in zip(*(column.split(most) for column in joined), strict=True):
        yield Chunk(*(column.to(device) for column in columns))


def _check_one_target(folders: Sequence[Path], manifests: Sequence[dict[str, Any]]) -> None:
    """Refuse folders of different targets: by checksum, by name where there is none."""
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
        raise SelfJudgeError(f"{folder} holds scores of {stored} tokens: label again with `suffix_length` {length}")
    if gap and gap >= length:
        raise SelfJudgeError(f"`suffix_gap` {gap} leaves nothing of a suffix of {length} tokens")
    return length


def _find_tau(folder: Path, manifest: dict[str, Any], length: int, gap: int, score: str) -> float:
    """τ for these scores: the stored one for stored scores, else from the folder's evidence, else the shipped one."""
    printed = score == "likelihood" and not gap
    if printed and length == manifest["suffix_length"] and manifest["tau"] is not None:
        return float(manifest["tau"])
    evidence = folder / EVIDENCE_FILE
    if evidence.is_file():
        recall = (manifest.get("tau_evidence") or {}).get("reject_recall", 0.9)
        return float(compute_tau(evidence, length, recall, gap=gap, score=score)["tau"])
    shipped = find_shipped_tau(manifest["target"], manifest["draft_sha256"], length) if printed else None
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
