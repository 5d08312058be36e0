"""The content of a run's summary.json: figures over its samples, what ran, and where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from selfjudge.engine.select import PairEngines
from selfjudge.evaluate.compare import bootstrap_interval
from selfjudge.evaluate.runs import RuleRun
from selfjudge.models.pair import Pair
from selfjudge.store import measured_on
from selfjudge.tasks.base import Row, Task

NOT_COMPARED: Mapping[str, Any] = {
    "delta_score": None, "delta_ci": None, "delta_scores": {}, "delta_scores_ci": {}, "agreement": None,
    "agreement_ci": None, "lost": None, "gained": None, "lost_ci": None, "gained_ci": None,
    "delta_m": None, "delta_m_ci": None, "m_ratio": None, "m_ratio_ci": None, "compared_with": None,
}  # fmt: skip
"""The fields that a comparison with `exact` fills in."""


def choose_measure(scores: Mapping[str, float]) -> str | None:
    """The measure that stands for a task: factual consistency by a classifier, else ROUGE-L, else the first."""
    return next((name for name in ("fc", "rougeL") if name in scores), next(iter(scores), None))


def summarise(pair: Pair, task: Task, run: RuleRun, samples: Sequence[Row], *, checkable: bool) -> dict[str, Any]:
    """A summary but for the names, settings and times that the caller adds.

    Scores are means over the `n_scored` examples that have one: rows of a user's file may lack an answer.
    """
    return {
        "pair": pair.name,
        "rule": run.name,
        "gamma": run.gamma,
        **_describe_judge(run),
        **_average_scores(samples, checkable),
        **_pool_lengths(samples),
        **NOT_COMPARED,
        "agreement_measure": "same_answer" if checkable else "word_overlap",
        "dtype": pair.dtype,
        "draft_dtype": PairEngines(pair).draft_dtype,
        **measured_on(*task.requires),
        "run_sha256": run.identity,
    }


def _describe_judge(run: RuleRun) -> dict[str, Any]:
    """The judge's name, the threshold, and what the judge's config says of its labels; None without a judge."""
    judge = run.rule.judge
    config = None if judge is None else judge.config
    return {
        "judge": run.judge,
        "judge_id": None if judge is None else judge.digest(),
        "threshold": getattr(run.rule, "theta", None),
        **{name: getattr(config, name, None) for name in ("label_method", "features", "suffix_length")},
        "label_prompts": None if config is None else config.metrics.get("n_prompts"),
    }


def _average_scores(samples: Sequence[Row], checkable: bool) -> dict[str, Any]:
    scored = [sample for sample in samples if sample["scores"]]
    names = scored[0]["scores"] if scored else {}
    scores = {name: float(np.mean([sample["scores"][name] for sample in scored])) for name in names}
    measure = choose_measure(scores)
    values = np.asarray([sample["score"] for sample in scored], float)
    return {
        "n": len(samples),
        "n_scored": len(scored),
        "measure": measure,
        "score": scores[measure] if measure else None,
        "score_ci": bootstrap_interval(values) if measure else None,
        "scores": scores,
        "extraction_failures": _share(sample["answer"] is None for sample in scored) if checkable else None,
        "cut_off": _share(sample["finish"] == "length" for sample in samples),
    }


def _pool_lengths(samples: Sequence[Row]) -> dict[str, Any]:
    """Pooled over all answers: m is tokens per target pass, Σ emitted / Σ cycles."""
    names = ("tokens", "emitted", "cycles", "drafts_accepted", "judged")
    tokens, emitted, cycles, drafts, judged = (sum(sample[name] for sample in samples) for name in names)
    return {
        "mean_accepted_length": emitted / cycles if cycles else None,
        "drafts_accepted": drafts / max(1, cycles),
        "judged_share": judged / max(1, tokens),
        "tokens": tokens,
    }


def _share(flags: Any) -> float:
    return float(np.mean(list(flags)))
