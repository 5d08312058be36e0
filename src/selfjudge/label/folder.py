"""Label folders: numbered shards, each written whole and sealed with checksums; the manifest comes last.
labels-00000.jsonl          one row a label
hidden-00000.safetensors    row-aligned: hidden_draft, hidden_target, log_p, entropy, rank, original, substituted,
                            highest [, hidden_before]
work/labels-00000.json      the seal: checksums, what the shard was made from, and counts
responses.jsonl             all responses
calibration.safetensors     the scores that τ was found from, where it was
manifest.json               written last: its existence means done"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfjudge.errors import SelfJudgeError
from selfjudge.store import RunFolder, read_json, read_rows, read_tensors, write_rows, write_tensors
from selfjudge.store.schema import LabelManifest, LabelRow, Response

Row = dict[str, Any]
Arrays = dict[str, NDArray[Any]]
FORMAT = 1
EVIDENCE_FILE = "calibration.safetensors"  # what τ was found from
SUMMED = ("rows", "acceptable", "target_tokens", "response_tokens", "controls", "controls_kept")
"""Counts of shards that a manifest adds up."""


@dataclass(frozen=True)
class Labels:
    """The labels of some responses; `arrays` are row-aligned."""

    rows: list[Row]
    arrays: Arrays
    counts: dict[str, int]


def name_shard_files(number: int) -> list[str]:
    """The names of the files of a shard: its labels, and their features."""
    return [f"labels-{number:05d}.jsonl", f"hidden-{number:05d}.safetensors"]


def write_shard(run: RunFolder, number: int, labels: Labels, made_from: str) -> Row:
    """Write a shard of labels; returns its seal, with the counts of the labels."""
    rows, arrays, out = labels.rows, labels.arrays, run.path
    assert all(len(array) == len(rows) for array in arrays.values())
    names = name_shard_files(number)
    write_rows(out / names[0], rows)
    write_tensors(out / names[1], arrays)
    return run.seal(f"labels-{number:05d}", names, made_from, rows=len(rows), **labels.counts)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a finished label folder."""
    if not (folder / "manifest.json").is_file():
        unfinished = (folder / "settings.json").is_file()
        hint = "its labelling is not finished: run it again with `resume`" if unfinished else "it is not a label folder"
        raise SelfJudgeError(f"{folder} has no manifest.json: {hint}")
    return read_json(folder / "manifest.json", LabelManifest)


def read_shards(folder: Path) -> Iterator[tuple[list[Row], Arrays]]:
    """Rows and arrays of every shard in turn; a damaged file is an error."""
    manifest = read_manifest(folder)
    for name in manifest["files"]:
        _find_intact(folder, name, manifest["files"])
    for number, shard in enumerate(manifest["shards"]):
        rows = read_shard_rows(folder, number, shard)
        hidden = _find_intact(folder, name_shard_files(number)[1], shard["files"])
        arrays, _ = read_tensors(hidden)
        _check_arrays(hidden, arrays, len(rows), manifest)
        yield rows, arrays


def read_shard_rows(folder: Path, number: int, shard: Row) -> list[Row]:
    """The label rows of a shard; a damaged file is an error."""
    return list(read_rows(_find_intact(folder, name_shard_files(number)[0], shard["files"]), LabelRow))


def read_responses(folder: Path) -> Iterator[Row]:
    """The responses of a label folder."""
    return read_rows(folder / "responses.jsonl", Response)


def _check_arrays(file: Path, arrays: Arrays, rows: int, manifest: Row) -> None:
    """Refuse features that are not row-aligned, or of another width or dtype than the manifest says."""
    states, suffix = [rows, manifest["hidden_size"]], [rows, manifest["suffix_length"]]
    shapes = {"log_p": [rows, 2], "rank": [rows], "hidden_draft": states, "hidden_target": states}
    shapes |= dict.fromkeys(("original", "substituted", "highest"), suffix)
    if "hidden_before" in arrays:
        shapes["hidden_before"] = states
    for name, shape in shapes.items():
        array = arrays.get(name)
        if array is None or list(array.shape) != shape or array.dtype.kind != ("i" if name == "rank" else "f"):
            found = "nothing" if array is None else f"{array.dtype} {list(array.shape)}"
            raise SelfJudgeError(f"{file} has {found} as {name}, not numbers {shape}")


def _find_intact(folder: Path, name: str, files: Mapping[str, str]) -> Path:
    """A file of a label folder, if its checksum is the one among `files`; else an error."""
    if not RunFolder(folder).intact({name: files.get(name, "")}):
        raise SelfJudgeError(f"{folder / name} is missing or damaged: label again with `resume`")
    return folder / name


def summarise_labels(folder: Path) -> dict[str, Any]:
    """A summary of a label folder: counts by source, quantiles of the scores, τ."""
    manifest = read_manifest(folder)
    by_source: dict[str, list[int]] = {}
    scores: list[float] = []
    for number, shard in enumerate(manifest["shards"]):
        for row in read_shard_rows(folder, number, shard):
            counts = by_source.setdefault(row["source"], [0, 0])
            counts[0] += 1
            counts[1] += row["label"]
            scores.append(row["score"])
    quantiles = np.quantile(scores, [0.05, 0.25, 0.5, 0.75, 0.95]).tolist() if scores else []
    return {
        **{key: value for key, value in manifest.items() if key != "shards"},
        "n_shards": len(manifest["shards"]),
        "sources": {name: {"rows": n, "acceptable": a / n} for name, (n, a) in sorted(by_source.items())},
        "score_quantiles": dict(zip(("5%", "25%", "50%", "75%", "95%"), quantiles, strict=False)),
    }
