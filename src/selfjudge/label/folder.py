"""Label folders: numbered shards, each written whole and sealed with checksums; the manifest comes last.

labels-00000.jsonl          one row a label
hidden-00000.safetensors    row-aligned: hidden_draft, hidden_target, log_p, entropy, rank, original, substituted[, lookahead]
revisions-00000.jsonl       answer preservation: the responses that a search went through
work/labels-00000.json      the seal: checksums, what the shard was made from, and counts
responses.jsonl             all responses
manifest.json               written last: its existence means done
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfjudge.errors import SelfJudgeError
from selfjudge.store import (
    provenance,
    read_json,
    read_rows,
    read_tensors,
    sha256,
    write_json,
    write_rows,
    write_tensors,
)

Row = dict[str, Any]
Arrays = dict[str, NDArray[Any]]
FORMAT = 1


def sealed(seal: Path, folder: Path, made_from: str = "") -> dict[str, Any] | None:
    """What a seal says, if it was made from just that and every file that it names is there and unharmed."""
    if not seal.is_file():
        return None
    try:
        found: dict[str, Any] = read_json(seal)
        whole = found["made_from"] == made_from and unharmed(folder, found["files"])
    except (SelfJudgeError, KeyError, TypeError, AttributeError):
        return None
    return found if whole else None


def unharmed(folder: Path, files: Mapping[str, str]) -> bool:
    """Is every file there, with its checksum?"""
    return all((folder / name).is_file() and sha256(folder / name) == digest for name, digest in files.items())


def seal(path: Path, folder: Path, names: Sequence[str], made_from: str = "", **counts: Any) -> dict[str, Any]:
    """Vouch for files of a folder."""
    made = {"files": {name: sha256(folder / name) for name in names}, "made_from": made_from, **counts}
    write_json(path, made)
    return made


def write_shard(
    out: Path, number: int, rows: Sequence[Row], arrays: Arrays, revisions: Sequence[Row], made_from: str, **counts: Any
) -> dict[str, Any]:  # fmt: skip
    """A shard of labels and its seal."""
    names = [f"labels-{number:05d}.jsonl", f"hidden-{number:05d}.safetensors"]
    assert all(len(array) == len(rows) for array in arrays.values())
    write_rows(out / names[0], rows)
    write_tensors(out / names[1], arrays)
    if revisions:
        names.append(f"revisions-{number:05d}.jsonl")
        write_rows(out / names[2], revisions)
    return seal(out / "work" / f"labels-{number:05d}.json", out, names, made_from, rows=len(rows), **counts)


def finished(folder: Path) -> dict[str, Any]:
    """The manifest of a finished label folder."""
    if not (folder / "manifest.json").is_file():
        unfinished = (folder / "settings.json").is_file()
        hint = "its labelling is not finished: run it again with --resume" if unfinished else "it is no label folder"
        raise SelfJudgeError(f"{folder} has no manifest.json: {hint}")
    manifest: dict[str, Any] = read_json(folder / "manifest.json")
    if manifest.get("format_version") != FORMAT:
        raise SelfJudgeError(
            f"{folder} has labels of format {manifest.get('format_version')}, this version reads {FORMAT}"
        )
    return manifest


def read_shards(folder: Path) -> Iterator[tuple[list[Row], Arrays]]:
    """Rows and arrays of every shard in turn; a damaged one, or what belongs to all of them, is refused."""
    manifest = finished(folder)
    _whole(folder, manifest["files"])
    for shard in manifest["shards"]:
        _whole(folder, shard["files"])
        labels, hidden, *_ = shard["files"]
        arrays, _ = read_tensors(folder / hidden)
        yield list(read_rows(folder / labels)), arrays


def _whole(folder: Path, files: Mapping[str, str]) -> None:
    for name, digest in files.items():
        if not unharmed(folder, {name: digest}):
            raise SelfJudgeError(f"{folder / name} is missing or damaged: label again with --resume")


def merge(folders: Sequence[Path], out: Path) -> dict[str, Any]:
    """Join finished label folders of one pair, method and τ into a new one."""
    manifests = [finished(folder) for folder in folders]
    same = (
        "target", "draft", "target_sha256", "draft_sha256", "dtype", "method", "suffix_length", "tau", "hidden_size",
        "hidden_dtype",
    )  # fmt: skip
    for folder, manifest in zip(folders[1:], manifests[1:], strict=True):
        if differing := [key for key in same if manifest.get(key) != manifests[0].get(key)]:
            raise SelfJudgeError(f"{folder} and {folders[0]} differ in {', '.join(differing)}: they cannot be merged")
    for folder, manifest in zip(folders, manifests, strict=True):  # before anything is written
        for files in (manifest["files"], *(shard["files"] for shard in manifest["shards"])):
            _whole(folder, files)
    seen: dict[str, Path] = {}
    for folder in folders:
        for row in read_rows(folder / "responses.jsonl"):
            if row["prompt_id"] in seen:
                raise SelfJudgeError(f"{folder} and {seen[row['prompt_id']]} both hold prompt {row['prompt_id']}")
            seen[row["prompt_id"]] = folder
    if out.exists() and any(out.iterdir()):
        raise SelfJudgeError(f"{out} is not empty: name a new or empty folder with --out")
    out.mkdir(parents=True, exist_ok=True)
    shards, number = [], 0
    for folder, manifest in zip(folders, manifests, strict=True):
        for shard in manifest["shards"]:
            files = {}
            for old, digest in shard["files"].items():
                new = re.sub(r"\d{5}", f"{number:05d}", old)
                shutil.copyfile(folder / old, out / new)
                files[new] = digest
            shards.append({**shard, "files": files})
            number += 1
    write_rows(out / "responses.jsonl", (row for folder in folders for row in read_rows(folder / "responses.jsonl")))
    kept = ["responses.jsonl"]
    if "calibration.safetensors" in manifests[0]["files"]:  # τ is the same in all, and so is what speaks for it
        shutil.copyfile(folders[0] / "calibration.safetensors", out / "calibration.safetensors")
        kept.append("calibration.safetensors")
    sums = ("rows", "acceptable", "prompts", "target_tokens", "response_tokens")
    joined = {
        **manifests[0], **{key: sum(m[key] for m in manifests) for key in sums}, "shards": shards,
        "yields": {str(folder): m["yields"] for folder, m in zip(folders, manifests, strict=True)},
        "files": {name: sha256(out / name) for name in kept}, "merged_from": [str(folder) for folder in folders],
    }  # fmt: skip
    write_json(out / "run.json", provenance())
    write_json(out / "manifest.json", joined)
    return joined


def info(folder: Path) -> dict[str, Any]:
    """What a label folder holds: counts by source, the spread of scores, τ."""
    manifest = finished(folder)
    by_source: dict[str, list[int]] = {}
    scores: list[float] = []
    for shard in manifest["shards"]:
        for row in read_rows(folder / next(iter(shard["files"]))):
            counts = by_source.setdefault(row["source"], [0, 0])
            counts[0] += 1
            counts[1] += row["label"]
            scores.append(row["score"])
    quantiles = np.quantile(scores, [0.05, 0.25, 0.5, 0.75, 0.95]).tolist() if scores else []
    return {
        **{k: v for k, v in manifest.items() if k != "shards"}, "n_shards": len(manifest["shards"]),
        "sources": {name: {"rows": n, "acceptable": a / n} for name, (n, a) in sorted(by_source.items())},
        "score_quantiles": dict(zip(("5%", "25%", "50%", "75%", "95%"), quantiles, strict=False)),
    }  # fmt: skip
