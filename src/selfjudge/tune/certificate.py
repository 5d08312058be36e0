"""What a certificate says: every rule that was tried, the one that was chosen, and the evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from selfjudge.evaluate.compare import bootstrap_interval, compute_word_loss
from selfjudge.evaluate.examples import make_example_rows
from selfjudge.evaluate.execute import restore_answer
from selfjudge.models.pair import Pair
from selfjudge.store import measured_on
from selfjudge.tasks.base import Row
from selfjudge.tune.calibration import WORDS, CalibrationPrompt, Measure
from selfjudge.tune.certify import Claim, binomial_upper, needed_prompts, upper_bound
from selfjudge.tune.config import TuneConfig
from selfjudge.tune.trials import Trial

FORMAT = 1
POINTS = 200  # of the capital's course that are kept


@dataclass
class Outcome:
    """A rule and what came of it; without a trial it was not tried."""

    family: str
    rule: str
    gamma: int
    claim: Claim
    trial: Trial | None = None
    refused: str = ""
    """Why it cannot be tried at this γ."""

    @property
    def certified(self) -> bool:
        return self.trial is not None and self.trial.certified

    @property
    def stopped(self) -> bool:
        return self.trial is not None and self.trial.stopped

    def slowest(self, times: bool) -> float:
        """The lower end of its speed over that of `exact`."""
        speed = None if self.trial is None else self.trial.speed(times)
        return 0.0 if speed is None else speed[1][0]

    @property
    def needed(self) -> int | None:
        """About how many prompts would settle it, by what was seen; None where it is settled, or where none would."""
        if self.trial is None or self.certified or not self.trial.differences:
            return None
        differences = np.asarray(self.trial.differences)
        variance = max(float(differences.var()), 1 / len(differences))
        return needed_prompts(self.claim.epsilon, self.claim.delta, mean=float(differences.mean()), variance=variance)

    @property
    def why(self) -> str:
        """What came of it, in words."""
        if self.trial is None:
            return f"not tried: {self.refused or 'a stricter rule of its family is not certified'}"
        decision, used = self.trial.decision, len(self.trial.differences)
        if decision is not None and decision.certified:
            return f"certified after {decision.refuted_at} prompts"
        settle = "" if self.needed is None else f"; about {max(self.needed, used + 1)} prompts would settle it"
        if self.trial.stopped:
            return f"open, the time was up after {used} prompts{settle}"
        if settle:
            return f"not certified: {used} prompts are too few for what was lost{settle}"
        return f"not certified: {used} prompts showed too much loss"


@dataclass(frozen=True)
class Choice:
    """All outcomes, and the one that is taken; None is `exact`."""

    outcomes: list[Outcome]
    best: Outcome | None
    gamma: int
    advantage: float
    """How much faster than at `gamma` `exact` is at its own best γ, 0 included."""
    speeds: Sequence[Row]
    families: Sequence[str]
    """Those that shared δ."""

    @property
    def exact_gamma(self) -> int:
        """γ at which `exact` was fastest; that of the others where nothing was measured."""
        exact = [row for row in self.speeds if row["rule"] == "exact"]
        return int(max(exact, key=lambda row: row["tokens_per_second"])["gamma"]) if exact else self.gamma


def certificate(
    pair: Pair,
    config: TuneConfig,
    measure: Measure,
    prompts: Sequence[CalibrationPrompt],
    settings: Mapping[str, Any],
    choice: Choice,
) -> dict[str, Any]:
    """The content of certificate.json."""
    best = choice.best
    differences = np.asarray(best.trial.differences if best is not None and best.trial is not None else [], float)
    return {
        "format_version": FORMAT,
        "pair": pair.name,
        "task": ", ".join(settings["tasks"]),
        "measure": measure.name,
        "measure_words": WORDS[measure.name],
        "rule": "exact" if best is None else best.rule,
        "gamma": choice.exact_gamma if best is None else choice.gamma,
        "n": len(differences) if best is not None else max(_used(choice.outcomes), default=0),
        "epsilon": config.epsilon,
        "delta": config.delta,
        "certified": best is not None,
        "mean_difference": float(-differences.mean()) if len(differences) else None,
        "mean_difference_ci": bootstrap_interval(-differences) if len(differences) else None,
        "lost": int((differences > 0).sum()),
        "gained": int((differences < 0).sum()),
        "exact": _exact(choice.outcomes, measure, prompts),
        "evidence": {} if best is None else _evidence(best, config.delta),
        **({} if best is None else {"overlap": _overlap(best, config.delta)}),
        **_speed(choice, config.times),
        "families": list(choice.families),
        "candidates": [_candidate(outcome, choice.advantage, config.times) for outcome in choice.outcomes],
        "speeds": list(choice.speeds),
        "target_sha256": pair.target_sha256,
        "draft_sha256": pair.draft_sha256,
        "prompts_sha256": settings["prompts_sha256"],
        "max_new_tokens": settings["max_new_tokens"],
        "batch": settings["batch"],
        "seed": config.seed,
        "engine": settings["engine"],
        "dtype": pair.dtype,
        "draft_dtype": settings["draft_dtype"],
        **measured_on(),
        "stopped": any(outcome.stopped for outcome in choice.outcomes)
        or (best is not None and len(differences) < best.claim.n),
    }


def _exact(outcomes: Sequence[Outcome], measure: Measure, prompts: Sequence[CalibrationPrompt]) -> dict[str, Any]:
    """How `exact` itself does: its mean score, and in how many of its answers none was found where one is right."""
    rows = max((o.trial.exact for o in outcomes if o.trial is not None), key=len, default=[])
    scores = [row["score"] for row in rows if measure.name == "score"]
    missed = [row["answer"] is None for prompt, row in zip(prompts, rows, strict=False) if prompt.gold is not None]
    return {
        "n": len(rows),
        "score": float(np.mean(scores)) if scores else None,
        "without_answer": sum(missed) if missed and measure.name != "overlap" else None,
    }


def _used(outcomes: Sequence[Outcome]) -> list[int]:
    return [len(outcome.trial.differences) for outcome in outcomes if outcome.trial is not None]


def _evidence(best: Outcome, delta: float) -> dict[str, Any]:
    """The course of the bet until it was won, and the exact binomial bound of what was lost."""
    assert best.trial is not None
    assert best.trial.decision is not None
    decision, lost = best.trial.decision, sum(d > 0 for d in best.trial.differences)
    capital = decision.log_capital
    kept = np.unique(np.linspace(0, len(capital) - 1, min(POINTS, len(capital))).round().astype(int))
    return {
        "delta": best.claim.delta,
        "refuted_at": decision.refuted_at,
        "p_value": decision.p_value,
        "goal": best.claim.goal,
        "log_capital": [[int(i) + 1, round(float(capital[i]), 4)] for i in kept],
        "lost_bound": binomial_upper(lost, len(best.trial.differences), delta),
    }


def _overlap(best: Outcome, delta: float) -> dict[str, float]:
    """How much of the words of `exact` is lost, whatever is certified: what a server can watch (`tune.monitor`)."""
    assert best.trial is not None
    rows = zip(best.trial.exact, best.trial.samples, strict=True)
    lost = [compute_word_loss(exact["text"], row["text"]) if row["judged"] else 0.0 for exact, row in rows]
    return {"mean": float(np.mean(lost)), "bound": upper_bound(lost, delta)}


def _speed(choice: Choice, times: bool) -> dict[str, Any]:
    """Of the chosen rule: its speed over that of `exact`, and over plain decoding where that was measured."""
    rates = {(row["rule"], row["gamma"]): row["tokens_per_second"] for row in choice.speeds}
    plain = rates.get(("plain", 0))
    fastest_exact = max((rate for (rule, _), rate in rates.items() if rule == "exact"), default=None)
    over_plain = max(fastest_exact / plain, 1.0) if plain and fastest_exact else None
    ratio, ci = _ratio(choice.best, choice.advantage, times)
    return {
        "speed_measure": "tokens_per_second" if times else "mean_accepted_length",
        "speed_ratio": ratio,
        "speed_ci": ci,
        "exact_gamma": choice.exact_gamma,
        "exact_over_plain": over_plain,
    }


def _ratio(outcome: Outcome | None, advantage: float, times: bool) -> tuple[float | None, list[float] | None]:
    """Speed over that of `exact` at its own best γ, with its interval."""
    speed = None if outcome is None or outcome.trial is None else outcome.trial.speed(times)
    return (None, None) if speed is None else (speed[0] / advantage, [end / advantage for end in speed[1]])


def _candidate(outcome: Outcome, advantage: float, times: bool) -> dict[str, Any]:
    trial = outcome.trial
    differences = [] if trial is None else trial.differences
    ratio, ci = _ratio(outcome, advantage, times)
    return {
        "rule": outcome.rule,
        "family": outcome.family,
        "gamma": outcome.gamma,
        "n_used": len(differences),
        "refuted": outcome.certified,
        "why": outcome.why,
        "mean_difference": float(-np.mean(differences)) if differences else None,
        "lost": sum(d > 0 for d in differences),
        "gained": sum(d < 0 for d in differences),
        "mean_accepted_length": None if trial is None else trial.mean_accepted_length,
        "tokens_per_second": trial.tokens_per_second if trial is not None and times else None,
        "speed_ratio": ratio,
        "speed_ci": ci,
        "needed_prompts": outcome.needed,
    }


def shown_examples(
    pair: Pair, config: TuneConfig, prompts: Sequence[CalibrationPrompt], choice: Choice
) -> list[dict[str, Any]]:
    """Answers that were lost and gained, those of `exact` beside those of the rule, token by token."""
    if choice.best is None or choice.best.trial is None:
        return []
    trial = choice.best.trial
    order = sorted(range(len(trial.differences)), key=lambda i: -abs(trial.differences[i]))
    lost = [i for i in order if trial.differences[i] > 0][: config.examples]
    gained = [i for i in order if trial.differences[i] < 0][: config.examples]
    shown = []
    for kind, places in (("lost", lost), ("gained", gained)):
        for i in places:
            answers = [("exact", trial.exact[i], None), (choice.best.rule, trial.samples[i], trial.run.rule.judge)]
            shown.append(
                {
                    "kind": kind,
                    "id": prompts[i].id,
                    "difference": -trial.differences[i],
                    "answers": [
                        {
                            "rule": rule,
                            "score": row["score"],
                            "answer": row["answer"],
                            **_tokens(pair, prompts[i], row, judge),
                        }
                        for rule, row, judge in answers
                    ],
                }
            )
    return shown


def _tokens(pair: Pair, prompt: CalibrationPrompt, sample: Row, judge: Any) -> dict[str, Any]:
    """Prompt and tokens of an answer, and the target's view of them if it is here in full precision."""
    if pair.target_model.full_precision:
        (row,) = make_example_rows(pair, [prompt.prompt], [restore_answer(sample)], judge)
        return {"prompt": row["prompt"], "tokens": row["tokens"]}
    answer = restore_answer(sample)
    tokens = [
        {"text": str(pair.tokenizer.decode([token])), "origin": origin}
        for token, origin in zip(answer.tokens, answer.origins, strict=True)
    ]
    return {"prompt": str(prompt.prompt), "tokens": tokens}
