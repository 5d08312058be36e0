"""A run against `exact` on the same examples: paired differences with 95 % intervals, and how many answers agree."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfjudge.errors import SelfJudgeError
from selfjudge.evaluate.runs import RuleRun
from selfjudge.store import read_json, read_rows, write_json, write_rows
from selfjudge.store.artefacts import FinishedSummary, ScoredSample
from selfjudge.tasks.base import Row, Task
from selfjudge.types import Warn

RESAMPLES = 2000
Interval = tuple[float, float]


def find_exact(folder: Path, run: RuleRun, warn: Warn) -> Path | None:
    """The run of `exact` to compare with: at the same γ, else at any. None for `exact` itself, or without any."""
    if run.name == "exact":
        return None
    same_gamma = folder / f"exact-g{run.gamma}"
    finished = [f for f in (same_gamma, *sorted(folder.glob("exact-g*"))) if (f / "summary.json").is_file()]
    with_rows = [f for f in finished if (f / "samples.jsonl.gz").is_file()]  # kept results may lack rows
    if not finished:
        warn(f"{folder.name}: no run of exact to compare {run.name} with; add it to `rules`")
    elif not with_rows:
        warn(f"{folder.name}: no run of exact has kept its rows: {run.name} is not compared anew")
    return with_rows[0] if with_rows else None


def compare_with_exact(folder: Path, exact: Path, task: Task, rows: Sequence[Row], checkable: bool) -> dict[str, Any]:
    """The summary of the run in `folder`, compared with that run of `exact`.

    A comparison with the same run stays as it is. So does one that was made with rows that are no longer there.
    """
    summary = read_json(folder / "summary.json", FinishedSummary)
    fingerprint, before = _fingerprint(exact), summary["compared_with"]
    needed = () if before is None else (folder, folder.parent / before.partition(":")[0])
    complete = before == fingerprint and {"lost", "delta_m_ci"} <= summary.keys()  # older versions did not write them
    if complete or not all((place / "samples.jsonl.gz").is_file() for place in needed):
        return summary
    samples = list(read_samples(folder))
    by_id = {row["id"]: row for row in read_samples(exact)}
    if unknown := [sample["id"] for sample in samples if sample["id"] not in by_id]:
        raise SelfJudgeError(f"{exact} has no row {unknown[0]!r:.40}, {folder} has one: they do not compare")
    others = [by_id[sample["id"]] for sample in samples]
    agreement = _agreement(task if checkable else None, {row["id"]: row for row in rows}, samples, others)
    summary |= {"compared_with": fingerprint, **agreement}
    if exact.name == f"exact-g{summary['gamma']}":
        summary |= delta_m(samples, others)
    summary |= _delta_scores(summary, samples, others)
    write_rows(folder / "samples.jsonl.gz", samples)
    write_json(folder / "summary.json", summary)
    return summary


def read_samples(folder: Path) -> Iterator[Row]:
    """The rows of a run."""
    return read_rows(folder / "samples.jsonl.gz", ScoredSample)


def _fingerprint(exact: Path) -> str:
    """Which run of `exact` that is; leaving texts out of its rows does not change it."""
    rows = read_samples(exact)
    kept = "".join(f"{row['id']}:{row['answer']}:{row['tokens']}\n" for row in rows)
    return f"{exact.name}:{hashlib.sha256(kept.encode('utf-8', 'replace')).hexdigest()}"


def _agreement(
    task: Task | None, rows: Mapping[str, Row], samples: Sequence[Row], others: Sequence[Row]
) -> dict[str, Any]:
    """Mean of `agrees`, which is written into the samples, and its interval.

    With a task: the share of the scored examples that have the answer of `exact`, where it gave one. Without: the
    overlap of words.
    """
    for sample, other in zip(samples, others, strict=True):
        if task is None:
            if "text" in other and "text" in sample:
                sample["agrees"] = word_overlap(other["text"], sample["text"])
        elif sample["scores"]:
            same = other["answer"] is not None and task.same(rows[sample["id"]], other["answer"], sample["answer"])
            sample["agrees"] = None if other["answer"] is None else float(same)
    agrees = [sample["agrees"] for sample in samples if sample.get("agrees") is not None]
    if not agrees:
        return {"agreement": None, "agreement_ci": None}
    return {"agreement": float(np.mean(agrees)), "agreement_ci": interval(np.asarray(agrees))}


def _delta_scores(summary: Mapping[str, Any], samples: Sequence[Row], others: Sequence[Row]) -> dict[str, Any]:
    """Mean paired differences of every measure, and their intervals; the task's own measure apart from the others."""
    pairs = [(s["scores"], o["scores"]) for s, o in zip(samples, others, strict=True) if s["scores"]]
    differences = {
        name: np.asarray([score[name] - other[name] for score, other in pairs]) for name in summary["scores"]
    }
    main = differences.pop(summary["measure"], None)
    return {
        **({} if main is None else {"delta_score": float(main.mean()), "delta_ci": interval(main), **_changes(main)}),
        "delta_scores": {name: float(values.mean()) for name, values in differences.items()},
        "delta_scores_ci": {name: interval(values) for name, values in differences.items()},
    }


def _changes(differences: NDArray[Any]) -> dict[str, Any]:
    """How many examples score less than with `exact`, how many more, and intervals of their shares."""
    lost, gained = differences < 0, differences > 0
    return {
        "lost": int(lost.sum()),
        "gained": int(gained.sum()),
        "lost_ci": interval(lost.astype(float)),
        "gained_ci": interval(gained.astype(float)),
    }


def delta_m(samples: Sequence[Row], others: Sequence[Row]) -> dict[str, Any]:
    """Difference and ratio of the pooled m of a run and of `exact`, with intervals paired by prompt."""
    pairs = zip(samples, others, strict=True)
    counts = np.asarray([[s["emitted"], s["cycles"], o["emitted"], o["cycles"]] for s, o in pairs], float)

    if not counts.sum(0).all():  # every answer ended with its prefill
        return {"delta_m": None, "delta_m_ci": None, "m_ratio": None, "m_ratio_ci": None}
    difference, difference_ci = _paired(counts, _difference)
    ratio, ratio_ci = rate_ratio(counts)
    return {"delta_m": difference, "delta_m_ci": difference_ci, "m_ratio": ratio, "m_ratio_ci": ratio_ci}


def rate_ratio(counts: NDArray[Any]) -> tuple[float, Interval]:
    """[n, 4] an amount and what it took, then the same of `exact` → ratio of the pooled rates, and its interval."""
    return _paired(counts, _ratio)


def _paired(counts: NDArray[Any], compare: Callable[[NDArray[Any]], float]) -> tuple[float, Interval]:
    """A comparison of the sums of `counts` over its rows, and its bootstrap interval."""
    resampled = [sums for sums in (counts[i].sum(0) for i in _resamples(len(counts))) if sums.all()]
    return compare(counts.sum(0)), _middle([compare(sums) for sums in resampled])


def _difference(sums: NDArray[Any]) -> float:
    return float(sums[0] / sums[1] - sums[2] / sums[3])


def _ratio(sums: NDArray[Any]) -> float:
    return float(sums[0] / sums[1] / (sums[2] / sums[3]))


def interval(values: NDArray[Any]) -> Interval:
    """The bootstrap interval of a mean; of paired differences it is the paired one."""
    return _middle([float(values[i].mean()) for i in _resamples(len(values))])


def _resamples(n: int) -> Iterator[NDArray[Any]]:
    """Bootstrap samples of n examples as indices, the same every time."""
    rng = np.random.default_rng(0)
    for _ in range(RESAMPLES):
        yield rng.integers(0, n, n)


def _middle(values: Sequence[float]) -> Interval:
    """The middle 95 % of resampled values."""
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def word_overlap(a: str, b: str) -> float:
    """The share of words that two texts have in common, in order."""
    return SequenceMatcher(None, a.split(), b.split(), autojunk=False).ratio()


def lost_words(exact: str, text: str) -> float:
    """The share of words that a text does not have in common with that of `exact`: D where overlap is the measure."""
    return 1.0 - word_overlap(exact, text)
