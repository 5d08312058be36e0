"""What a tuning run tests: the pair, the families of rules, the calibration prompts, and how loss is measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfjudge.engine.select import PairEngines
from selfjudge.evaluate.execute import Answerer
from selfjudge.evaluate.runs import RuleRun, plan_runs
from selfjudge.judge.model import Judge
from selfjudge.models.pair import Pair
from selfjudge.tune.calibration import (
    CalibrationPrompt,
    LossMeasure,
    choose_measure,
    hash_prompts,
    load_calibration,
    refuse_learnt,
)
from selfjudge.tune.certify import (
    Claim,
    check_prompt_count,
    count_aside,
    estimate_needed_prompts,
    find_fewest_prompts,
    simulate_power,
)
from selfjudge.tune.config import (
    CPU_BATCH,
    CUDA_BATCH,
    FAMILIES,
    FILE_TOKENS,
    Family,
    RefusedRule,
    TuneConfig,
    list_families,
    split_by_gamma,
)
from selfjudge.types import Warn

CPU_MINUTES = 12.0
"""Time limit on a CPU, if none is given."""
JUDGE_NAME = "judge"


@dataclass(frozen=True)
class TuneJob:
    """What a run tests, and with what."""

    pair: Pair
    answerer: Answerer
    config: TuneConfig
    judge: Judge | None
    families: list[Family]
    prompts: list[CalibrationPrompt]
    """Prompts to calibrate with, in their order."""
    aside: list[CalibrationPrompt]
    """Prompts to choose γ with; no certificate rests on them."""
    measure: LossMeasure
    batch: int

    @classmethod
    def prepare(
        cls, pair: Pair, answerer: Answerer, config: TuneConfig, judge: Judge | str | Path | None, warn: Warn
    ) -> TuneJob:
        """Load prompts and judge. Refuses prompts that the judge learnt from, and an ε that so few cannot certify."""
        source = judge if isinstance(judge, str | Path) else None
        if judge is None and pair.judge is not None:
            source = pair.target_id
        loaded = Judge.from_pretrained(source) if source is not None else judge
        assert loaded is None or isinstance(loaded, Judge)
        if loaded is None and config.families == FAMILIES:
            warn("no judge ships for this target: the family judged is left out")
        families = list_families(config.families, None if loaded is None else loaded.config)
        prompts = load_calibration(config, warn)
        if "judged" in config.families and loaded is not None:
            loaded.config.check_target(pair.target_id, pair.target_sha256, pair.hidden_size)
            refuse_learnt(pair, prompts, source, warn)
        batch = config.batch or (CUDA_BATCH if answerer.device == "cuda" else CPU_BATCH)
        aside = count_aside(len(prompts), batch) if config.times else 0
        measure = choose_measure(config.measure, prompts)
        job = cls(pair, answerer, config, loaded, families, prompts[aside:], prompts[:aside], measure, batch)
        count = len(job.possible_families)
        check_prompt_count(len(prompts), batch if config.times else None, config.epsilon, config.delta, count)
        return job

    @property
    def minutes(self) -> float:
        """The most that the run may take."""
        if self.config.minutes is not None:
            return self.config.minutes
        return CPU_MINUTES if self.answerer.device == "cpu" else math.inf

    @property
    def max_new_tokens(self) -> int:
        own = FILE_TOKENS if self.config.prompts is not None else max(p.examples.task.new_tokens for p in self.prompts)
        return self.config.max_new_tokens or own

    def plan(self, rule: str, gamma: int) -> RuleRun:
        """The run of a rule at a γ; refused if the two do not fit."""
        judges = {} if self.judge is None else {JUDGE_NAME: self.judge}
        return plan_runs([rule], [gamma], judges, self.pair.special_ids)[0]

    def split_by_gamma(self, gamma: int) -> tuple[list[Family], list[RefusedRule]]:
        """The families that are tested at this γ, and the rules that do not work with it."""
        return split_by_gamma(self.families, gamma, None if self.judge is None else self.judge.config)

    @property
    def possible_families(self) -> list[Family]:
        """The families that share δ, as far as that is known before γ is chosen."""
        return self.families if self.config.gamma is None else self.split_by_gamma(self.config.gamma)[0]

    def claim(self, families: Sequence[Family]) -> Claim:
        """The claim of every rule. Families have equal shares of δ, so all certificates together are wrong with
        probability δ at most. A family's rules need no shares: each is tested at the family's level until one fails.
        """
        return Claim(self.config.epsilon, self.config.delta / len(families), len(self.prompts))

    def describe_outlook(self) -> str:
        """What so many prompts can certify, before any is decoded."""
        families = self.possible_families
        claim, over = self.claim(families), "1 family" if len(families) == 1 else f"{len(families)} families"
        needed = estimate_needed_prompts(claim.epsilon, claim.delta)
        return (
            f"{claim.n} prompts, at most {100 * claim.epsilon:g} points lost, {1 - self.config.delta:.0%} confidence"
            f" over {over}: {find_fewest_prompts(claim.epsilon, claim.delta)} prompts certify a rule that changes no"
            f" score, about {needed} one that changes 5 % of them for no loss"
            f" (with {claim.n}: {simulate_power(claim):.0%} of such runs)"
        )

    def settings(self) -> dict[str, Any]:
        """The settings that a run must keep when it is resumed."""
        pair, config = self.pair, self.config
        return {
            "tasks": config.evaluation.tasks,
            "prompts_sha256": hash_prompts([*self.aside, *self.prompts]),
            **{name: getattr(config, name) for name in ("epsilon", "delta", "seed", "gamma", "times")},
            "minutes": None if math.isinf(self.minutes) else self.minutes,
            "families": {family.name: family.rules for family in self.families},
            "measure": self.measure.name,
            "max_new_tokens": self.max_new_tokens,
            "batch": self.batch,
            "target": pair.target_sha256 or pair.target_id,
            "draft": pair.draft_sha256 or pair.draft_id,
            "dtype": pair.dtype,
            "draft_dtype": "int8" if PairEngines(pair).draft_int8 else None,
            "engine": self.answerer.engine,
        }
