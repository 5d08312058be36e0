"""Trials: calibration prompts decoded under a rule, batch by batch, each once, and tested against `exact`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from selfjudge.decoding.text import row_seed
from selfjudge.evaluate.answerer import Answerer, AnswerOptions
from selfjudge.evaluate.compare import compare_lengths, compare_rates
from selfjudge.evaluate.execute import make_sample
from selfjudge.evaluate.runs import Judges, RuleRun, plan_runs
from selfjudge.models.pair import Pair
from selfjudge.store import RunFolder, read_rows, write_rows
from selfjudge.store.artefacts import PartSample, PartSeal, SpeedSeal
from selfjudge.tasks.base import Row
from selfjudge.tune.calibration import CalibrationPrompt, Measure
from selfjudge.tune.candidates import GAMMAS, Family
from selfjudge.tune.certify import Claim, Decision, decide
from selfjudge.tune.speeds import Clock
from selfjudge.types import Generation, default_gamma

Speed = tuple[float, tuple[float, float]]
"""A ratio and its interval."""


@dataclass
class Trial:
    """A rule on the first batches of the calibration prompts. `differences` are D, in the prompts' order."""

    family: str
    run: RuleRun
    samples: list[Row] = field(default_factory=list)
    exact: list[Row] = field(default_factory=list)
    differences: list[float] = field(default_factory=list)
    seconds: list[tuple[int, float, int, float]] = field(default_factory=list)
    """Of each batch: tokens and seconds, then those of `exact`."""
    decision: Decision | None = None
    stopped: bool = False
    """The time was up before it was decided."""
    speeds: dict[int, Speed | None] = field(default_factory=dict)
    """By the number of batches: to resample takes longer than a batch of a tiny model."""

    @property
    def certified(self) -> bool:
        return self.decision is not None and self.decision.certified

    def speed(self, times: bool) -> Speed | None:
        """Ratio of tokens/s, or else of m, to `exact`, with its interval. The first of several batches warms up."""
        if not self.samples:
            return None
        if len(self.seconds) not in self.speeds:
            self.speeds[len(self.seconds)] = self._speed(times)
        return self.speeds[len(self.seconds)]

    def _speed(self, times: bool) -> Speed | None:
        if times:
            return compare_rates(np.asarray(self.seconds[len(self.seconds) > 1 :], float))
        compared = compare_lengths(self.samples, self.exact)
        return None if compared["m_ratio"] is None else (compared["m_ratio"], compared["m_ratio_ci"])

    @property
    def tokens_per_second(self) -> float | None:
        counted = self.seconds[len(self.seconds) > 1 :]
        return sum(row[0] for row in counted) / sum(row[1] for row in counted) if counted else None

    @property
    def mean_accepted_length(self) -> float | None:
        cycles = sum(sample["cycles"] for sample in self.samples)
        return sum(sample["emitted"] for sample in self.samples) / cycles if cycles else None


@dataclass(frozen=True)
class Trials:
    """Where trials are made, and kept: every batch of every rule is a sealed part of the run's folder."""

    pair: Pair
    answerer: Answerer
    folder: RunFolder
    prompts: Sequence[CalibrationPrompt]
    """To calibrate with, in their order."""
    aside: Sequence[CalibrationPrompt]
    """To choose γ with; no certificate rests on them."""
    measure: Measure
    judges: Judges
    batch: int
    max_new_tokens: int
    seed: int
    deadline: float
    """Of `time.monotonic`; no batch is begun after it."""

    @property
    def batches(self) -> int:
        return -(-len(self.prompts) // self.batch)

    @property
    def late(self) -> bool:
        return time.monotonic() >= self.deadline

    def plan(self, rule: str, gamma: int) -> RuleRun:
        return plan_runs([rule], [gamma], self.judges, self.pair.special_ids)[0]

    def part(self, name: str, run: RuleRun, number: int, exact: Sequence[Row] | None = None) -> tuple[list[Row], float]:
        """Samples of a batch under a rule, and its seconds; from the folder where it has been decoded already.

        With the samples of `exact`, an answer in which nothing was substituted takes their score.
        """
        name = f"{name}-{number:05d}"
        file = self.folder.work / f"{name}.jsonl"
        seal = self.folder.sealed(name, run.identity, PartSeal)
        if seal is None:
            start = number * self.batch
            prompts = self.prompts[start : start + self.batch]
            answers, seconds = self.answerer.answer(
                [prompt.prompt for prompt in prompts],
                run.rule,
                AnswerOptions(
                    run.gamma, self.max_new_tokens, [row_seed(self.seed, start + i) for i in range(len(prompts))]
                ),
            )
            write_rows(file, self._samples(prompts, answers, exact))
            seal = self.folder.seal(name, [f"work/{file.name}"], run.identity, seconds=seconds)
        return list(read_rows(file, PartSample)), seal["seconds"]["total"]

    def _samples(
        self, prompts: Sequence[CalibrationPrompt], answers: Sequence[Generation], exact: Sequence[Row] | None
    ) -> list[Row]:
        known = {} if exact is None else {i: row for i, row in enumerate(exact) if "judge" not in answers[i].origins}
        found = {i: (row["answer"], row["scores"]) for i, row in known.items()}
        others = [i for i in range(len(prompts)) if i not in found]
        scored = self.measure.scores([prompts[i] for i in others], [answers[i].text for i in others])
        found |= dict(zip(others, scored, strict=True))
        return [make_sample(prompt.id, answers[i], found[i]) for i, prompt in enumerate(prompts)]

    def go_on(self, trial: Trial, name: str) -> None:
        """Decode the trial's next batch, and `exact` where it has not been."""
        number = len(trial.seconds)
        exact, exact_seconds = self.part("exact", self.plan("exact", trial.run.gamma), number)
        samples, seconds = self.part(name, trial.run, number, exact)
        prompts = self.prompts[number * self.batch :]
        for prompt, other, sample in zip(prompts, exact, samples, strict=False):
            trial.differences.append(self.measure.difference(prompt, other, sample))
        trial.samples += samples
        trial.exact += exact
        tokens, exact_tokens = (sum(row["tokens"] for row in rows) for rows in (samples, exact))
        trial.seconds.append((tokens, seconds, exact_tokens, exact_seconds))

    def test(self, trial: Trial, name: str, claim: Claim) -> None:
        """Decode until the claim is certified, cannot be any more, or the time is up."""
        while len(trial.seconds) < self.batches and not self.late:
            self.go_on(trial, name)
            trial.decision = decide(claim, trial.differences)
            if trial.decision.certified or trial.decision.futile:
                return
        trial.stopped = len(trial.seconds) < self.batches

    def complete(self, trial: Trial, name: str) -> None:
        """Decode what is left, so that the figures of a certified rule are those of all prompts."""
        while len(trial.seconds) < self.batches and not self.late:
            self.go_on(trial, name)

    def speeds(self, families: Sequence[Family], gamma: int | None) -> list[dict[str, Any]]:
        """Tokens/s on the prompts set aside (`speeds.Clock`), of the middle rule of each family among others.

        Where another γ takes another engine there is one γ.
        """
        device = self.answerer.device
        gamma = gamma or (default_gamma(device) if self.answerer.one_gamma else None)
        if (seal := self.folder.sealed("speed", str(gamma), SpeedSeal)) is not None:
            return list(seal["speeds"])
        prompts = [prompt.prompt for prompt in self.aside]
        clock = Clock(self.answerer, prompts, self.judges, self.pair.special_ids, self.max_new_tokens)
        gammas = (gamma,) if gamma else GAMMAS.get(device, GAMMAS["cuda"])
        rows = clock.speeds([family.middle for family in families], gammas)
        self.folder.seal("speed", [], str(gamma), speeds=rows)
        return rows
