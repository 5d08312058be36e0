"""A run against `exact` on the same examples: paired differences with 95 % intervals, and how many answers agree."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfjudge.errors import SelfJudgeError
from selfjudge.evaluate.config import TaskExamples
from selfjudge.store import read_json, read_rows, write_json, write_rows
from selfjudge.store.schema import FinishedSummary, ScoredSample
from selfjudge.tasks import Row

SAMPLES = "samples.jsonl.gz"
RESAMPLES = 2000
Interval = tuple[float, float]


def find_exact(folder: Path, gamma: int) -> Path | None:
    """The finished run of `exact` on a task, with its rows: at the same γ, else at any; None if there is none."""
    candidates = (folder / f"exact-g{gamma}", *sorted(folder.glob("exact-g*")))
    return next((f for f in candidates if (f / "summary.json").is_file() and (f / SAMPLES).is_file()), None)


def compare_with_exact(folder: Path, exact: Path, examples: TaskExamples) -> dict[str, Any]:
    """The summary of the run in `folder`, compared with that run of `exact`. It is returned as it is if the two were
    compared before, or if its rows are gone."""
    summary = read_json(folder / "summary.json", FinishedSummary)
    kept = "".join(f"{row['id']}:{row['answer']}:{row['tokens']}\n" for row in read_samples(exact))  # not their texts
    fingerprint = f"{exact.name}:{hashlib.sha256(kept.encode('utf-8', 'replace')).hexdigest()}"
    if summary["compared_with"] == fingerprint or not (folder / SAMPLES).is_file():
        return summary
    samples = list(read_samples(folder))
    by_id = {row["id"]: row for row in read_samples(exact)}
    if unknown := [sample["id"] for sample in samples if sample["id"] not in by_id]:
        raise SelfJudgeError(f"{exact} has no row {unknown[0]!r:.40}, {folder} has one: they cannot be compared")
    others = [by_id[sample["id"]] for sample in samples]
    summary |= {"compared_with": fingerprint, **_compare_answers(examples, samples, others)}
    if exact.name == f"exact-g{summary['gamma']}":
        summary |= compare_lengths(samples, others)
    summary |= _compare_scores(summary, samples, others)
    write_rows(folder / SAMPLES, samples)
    write_json(folder / "summary.json", summary)
    return summary


def read_samples(folder: Path) -> Iterator[Row]:
    return read_rows(folder / SAMPLES, ScoredSample)


def _compare_answers(examples: TaskExamples, samples: Sequence[Row], others: Sequence[Row]) -> dict[str, Any]:
    """Mean of `agrees`, which is written into the samples, and its interval. It is the share of scored examples with
    the answer of `exact`, where it gave one. Tasks without answers take the overlap of words."""
    for sample, other in zip(samples, others, strict=True):
        if not examples.task.checkable:
            if "text" in other and "text" in sample:
                sample["agrees"] = compute_overlap(other["text"], sample["text"])
        elif sample["scores"]:
            row = examples.rows[examples.places[sample["id"]]]
            same = examples.task.same(row, other["answer"], sample["answer"])
            sample["agrees"] = None if other["answer"] is None else float(same)
    agrees = [sample["agrees"] for sample in samples if sample.get("agrees") is not None]
    if not agrees:
        return {"agreement": None, "agreement_ci": None}
    return {"agreement": float(np.mean(agrees)), "agreement_ci": bootstrap_interval(np.asarray(agrees))}


def _compare_scores(summary: Mapping[str, Any], samples: Sequence[Row], others: Sequence[Row]) -> dict[str, Any]:
    """Mean paired differences of every measure, and their intervals; the task's own measure apart from the others."""
    pairs = [(s["scores"], o["scores"]) for s, o in zip(samples, others, strict=True) if s["scores"]]
    differences = {name: np.asarray([own[name] - other[name] for own, other in pairs]) for name in summary["scores"]}
    compared: dict[str, Any] = {}
    if (main := differences.pop(summary["measure"], None)) is not None:
        lost, gained = main < 0, main > 0
        compared = {
            "delta_score": float(main.mean()),
            "delta_ci": bootstrap_interval(main),
            "lost": int(lost.sum()),
            "gained": int(gained.sum()),
            "lost_ci": bootstrap_interval(lost.astype(float)),
            "gained_ci": bootstrap_interval(gained.astype(float)),
        }
    return {
        **compared,
        "delta_scores": {name: float(values.mean()) for name, values in differences.items()},
        "delta_scores_ci": {name: bootstrap_interval(values) for name, values in differences.items()},
    }


def compare_lengths(samples: Sequence[Row], others: Sequence[Row]) -> dict[str, Any]:
    """Difference and ratio of the pooled m of a run and of `exact`, with intervals paired by prompt."""
    pairs = zip(samples, others, strict=True)
    counts = np.asarray([[s["emitted"], s["cycles"], o["emitted"], o["cycles"]] for s, o in pairs], float)
    if not counts.sum(0).all():  # every answer ended with its prefill
        return {"delta_m": None, "delta_m_ci": None, "m_ratio": None, "m_ratio_ci": None}
    difference, difference_ci = _bootstrap_sums(counts, lambda sums: sums[0] / sums[1] - sums[2] / sums[3])
    ratio, ratio_ci = _bootstrap_sums(counts, lambda sums: sums[0] / sums[1] / (sums[2] / sums[3]))
    return {"delta_m": difference, "delta_m_ci": difference_ci, "m_ratio": ratio, "m_ratio_ci": ratio_ci}


def _bootstrap_sums(counts: NDArray[Any], compare: Callable[[NDArray[Any]], Any]) -> tuple[float, Interval]:
    """A comparison of the sums of `counts` over its rows, and its bootstrap interval."""
    resampled = np.concatenate([counts[i].sum(1) for i in _resample(len(counts))])
    return float(compare(counts.sum(0))), _middle(compare(resampled[resampled.all(1)].T))


def bootstrap_interval(values: NDArray[Any]) -> Interval:
    """The bootstrap interval of a mean; of paired differences it is the paired one."""
    return _middle(np.concatenate([values[i].mean(1) for i in _resample(len(values))]))


def _resample(n: int) -> Iterator[NDArray[Any]]:
    """Bootstrap samples of n examples as rows of indices, the same every time, some megabytes at once."""
    rng, at_once = np.random.default_rng(0), max(1, 2**18 // n)
    for done in range(0, RESAMPLES, at_once):
        yield rng.integers(0, n, (min(at_once, RESAMPLES - done), n))


def _middle(values: NDArray[Any]) -> Interval:
    """The middle 95 % of resampled values."""
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def compute_overlap(a: str, b: str) -> float:
    """The share of words that two texts have in common, in order."""
    return SequenceMatcher(None, a.split(), b.split(), autojunk=False).ratio()
