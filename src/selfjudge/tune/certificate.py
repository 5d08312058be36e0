"""What a certificate says: every rule that was tried, the one that was chosen, and the evidence."""

from __future__ import annotations

from typing import Any

import numpy as np

from selfjudge.evaluate.compare import bootstrap_interval, compute_word_loss
from selfjudge.evaluate.execute import restore_answer
from selfjudge.evaluate.likelihood import make_example_rows
from selfjudge.store import measured_on
from selfjudge.tune.calibration import WORDS
from selfjudge.tune.certify import find_binomial_bound, find_upper_bound
from selfjudge.tune.job import TuneJob
from selfjudge.tune.trials import RuleTrial, TuneResult

FORMAT = 1
POINTS = 200  # points of the capital's course that are kept


def make_certificate(job: TuneJob, result: TuneResult) -> dict[str, Any]:
    """The content of certificate.json."""
    pair, config, settings, best = job.pair, job.config, job.settings(), result.best
    differences = np.asarray([] if best is None else best.differences, float)
    used = [len(trial.differences) for trial in result.trials]
    return {
        "format_version": FORMAT,
        "pair": pair.name,
        "task": ", ".join(settings["tasks"]),
        "measure": job.measure.name,
        "measure_words": WORDS[job.measure.name],
        "rule": "exact" if best is None else best.rule,
        "gamma": result.exact_gamma if best is None else result.gamma,
        "n": max(used, default=0) if best is None else len(differences),
        "epsilon": config.epsilon,
        "delta": config.delta,
        "certified": best is not None,
        "mean_difference": float(-differences.mean()) if len(differences) else None,
        "mean_difference_ci": bootstrap_interval(-differences) if len(differences) else None,
        "lost": int((differences > 0).sum()),
        "gained": int((differences < 0).sum()),
        "exact": _describe_exact(job, result),
        "evidence": {} if best is None else _describe_evidence(best, config.delta),
        **({} if best is None else {"overlap": _measure_overlap(best, config.delta)}),
        "speed_measure": "tokens_per_second" if config.times else "mean_accepted_length",
        **result.compare_speed(best),
        "exact_gamma": result.exact_gamma,
        "exact_over_plain": _compare_exact_with_plain(result),
        "families": list(result.families),
        "candidates": [_describe_trial(trial, result) for trial in result.trials],
        "speeds": list(result.speeds),
        "target_sha256": pair.target_sha256,
        "draft_sha256": pair.draft_sha256,
        **{
            name: settings[name]
            for name in ("prompts_sha256", "max_new_tokens", "batch", "seed", "engine", "dtype", "draft_dtype")
        },
        **measured_on(),
        "stopped": any(trial.stopped for trial in result.trials)
        or (best is not None and len(differences) < best.claim.n),
    }


def _describe_exact(job: TuneJob, result: TuneResult) -> dict[str, Any]:
    """How `exact` itself does: its mean score, and in how many of its answers none was found where one is right."""
    rows = max((trial.exact for trial in result.trials), key=len, default=[])
    scores = [row["score"] for row in rows if job.measure.name == "score"]
    missed = [row["answer"] is None for prompt, row in zip(job.prompts, rows, strict=False) if prompt.gold is not None]
    return {
        "n": len(rows),
        "score": float(np.mean(scores)) if scores else None,
        "without_answer": sum(missed) if missed and job.measure.name != "overlap" else None,
    }


def _describe_evidence(best: RuleTrial, delta: float) -> dict[str, Any]:
    """The course of the bet until it was won, and the exact binomial bound of what was lost."""
    assert best.decision is not None
    capital = best.decision.log_capital
    kept = np.unique(np.linspace(0, len(capital) - 1, min(POINTS, len(capital))).round().astype(int))
    return {
        "delta": best.claim.delta,
        "refuted_at": best.decision.refuted_at,
        "p_value": best.decision.p_value,
        "goal": best.claim.goal,
        "log_capital": [[int(i) + 1, round(float(capital[i]), 4)] for i in kept],
        "lost_bound": find_binomial_bound(sum(d > 0 for d in best.differences), len(best.differences), delta),
    }


def _measure_overlap(best: RuleTrial, delta: float) -> dict[str, float]:
    """How much of the words of `exact` is lost, whatever is certified: a server can watch it (`tune.monitor`)."""
    rows = zip(best.exact, best.samples, strict=True)
    lost = [compute_word_loss(exact["text"], row["text"]) if row["judged"] else 0.0 for exact, row in rows]
    return {"mean": float(np.mean(lost)), "bound": find_upper_bound(lost, delta)}


def _compare_exact_with_plain(result: TuneResult) -> float | None:
    """The speed of `exact` at its best γ over plain decoding, at least 1; None if not both were measured."""
    rates = {(row["rule"], row["gamma"]): row["tokens_per_second"] for row in result.speeds}
    plain = rates.get(("plain", 0))
    exact = max((rate for (rule, _), rate in rates.items() if rule == "exact"), default=None)
    return max(exact / plain, 1.0) if plain and exact else None


def _describe_trial(trial: RuleTrial, result: TuneResult) -> dict[str, Any]:
    differences = trial.differences
    return {
        "rule": trial.rule,
        "family": trial.family,
        "gamma": trial.gamma,
        "n_used": len(differences),
        "refuted": trial.certified,
        "why": trial.why,
        "mean_difference": float(-np.mean(differences)) if differences else None,
        "lost": sum(d > 0 for d in differences),
        "gained": sum(d < 0 for d in differences),
        "mean_accepted_length": trial.mean_accepted_length,
        "tokens_per_second": trial.tokens_per_second if trial.times else None,
        **result.compare_speed(trial),
        "needed_prompts": trial.needed,
    }


def choose_examples(job: TuneJob, best: RuleTrial | None) -> list[dict[str, Any]]:
    """Answers that were lost and gained, those of `exact` beside those of the rule, token by token."""
    if best is None:
        return []
    order = sorted(range(len(best.differences)), key=lambda i: -abs(best.differences[i]))
    lost = [i for i in order if best.differences[i] > 0][: job.config.examples]
    gained = [i for i in order if best.differences[i] < 0][: job.config.examples]
    judge = job.plan(best.rule, best.gamma).rule.judge
    chosen = []
    for i in (*lost, *gained):
        prompt, difference, answers = job.prompts[i], -best.differences[i], []
        for rule, sample, own_judge in (("exact", best.exact[i], None), (best.rule, best.samples[i], judge)):
            (row,) = make_example_rows(job.pair, [prompt.prompt], [restore_answer(sample)], own_judge)
            scored = {"rule": rule, "score": sample["score"], "answer": sample["answer"]}
            answers.append({**scored, "prompt": row["prompt"], "tokens": row["tokens"]})
        kind = "lost" if difference < 0 else "gained"
        chosen.append({"kind": kind, "id": prompt.id, "difference": difference, "answers": answers})
    return chosen
