"""Trials: calibration prompts decoded under a rule, batch by batch, each once, and tested against `exact`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from selfjudge.decoding.text import row_seed
from selfjudge.evaluate.answerer import BatchOptions
from selfjudge.evaluate.compare import Interval, compare_lengths, compare_rates
from selfjudge.evaluate.execute import make_sample
from selfjudge.evaluate.runs import RuleRun
from selfjudge.store import RunFolder, read_rows, write_rows
from selfjudge.store.artefacts import PartSample, PartSeal, SpeedSeal
from selfjudge.tasks.base import Row
from selfjudge.tune.calibration import CalibrationPrompt
from selfjudge.tune.candidates import GAMMAS, Family
from selfjudge.tune.certify import Claim, Decision, decide, estimate_needed_prompts
from selfjudge.tune.job import TuneJob
from selfjudge.tune.speeds import Clock
from selfjudge.types import Generation, default_gamma

Speed = tuple[float, Interval]
"""A ratio of speeds and its interval."""


@dataclass
class RuleTrial:
    """A rule and its claim, tested on the first batches of the calibration prompts."""

    family: str
    name: str
    """Prefix of the trial's parts in the folder."""
    rule: str
    gamma: int
    claim: Claim
    times: bool
    """Whether speeds are measured in tokens/s, not in m."""
    refused: str = ""
    """Why the rule cannot be tried at this γ."""
    samples: list[Row] = field(default_factory=list)
    exact: list[Row] = field(default_factory=list)
    differences: list[float] = field(default_factory=list)
    """D of each prompt, in the prompts' order."""
    batches: list[tuple[int, float, int, float]] = field(default_factory=list)
    """Tokens and seconds of each batch, then those of `exact`."""
    decision: Decision | None = None
    stopped: bool = False
    """Whether the time was up before the claim was decided."""
    _speeds: dict[int, Speed | None] = field(default_factory=dict)
    """Speeds by the number of batches: to resample takes longer than a batch of a tiny model."""

    @property
    def tried(self) -> bool:
        return self.stopped or bool(self.differences)

    @property
    def certified(self) -> bool:
        return self.decision is not None and self.decision.certified

    @property
    def speed(self) -> Speed | None:
        """Ratio of tokens/s, or else of m, to `exact`, with its interval. The first of several batches warms up."""
        if not self.samples:
            return None
        if (count := len(self.batches)) not in self._speeds:
            self._speeds[count] = self._compare_speeds()
        return self._speeds[count]

    def _compare_speeds(self) -> Speed | None:
        if self.times:
            return compare_rates(np.asarray(self._timed_batches, float))
        compared = compare_lengths(self.samples, self.exact)
        return None if compared["m_ratio"] is None else (compared["m_ratio"], compared["m_ratio_ci"])

    @property
    def slowest(self) -> float:
        """The lower end of its speed over that of `exact`."""
        return 0.0 if self.speed is None else self.speed[1][0]

    @property
    def _timed_batches(self) -> list[tuple[int, float, int, float]]:
        return self.batches[len(self.batches) > 1 :]

    @property
    def tokens_per_second(self) -> float | None:
        timed = self._timed_batches
        return sum(row[0] for row in timed) / sum(row[1] for row in timed) if timed else None

    @property
    def mean_accepted_length(self) -> float | None:
        cycles = sum(sample["cycles"] for sample in self.samples)
        return sum(sample["emitted"] for sample in self.samples) / cycles if cycles else None

    @property
    def needed(self) -> int | None:
        """About how many prompts would certify it, by what was seen; None if it is certified, or if none would."""
        if self.certified or not self.differences:
            return None
        differences = np.asarray(self.differences)
        variance = max(float(differences.var()), 1 / len(differences))
        mean = float(differences.mean())
        return estimate_needed_prompts(self.claim.epsilon, self.claim.delta, mean=mean, variance=variance)

    @property
    def why(self) -> str:
        """The outcome in words."""
        used = len(self.differences)
        if not self.tried:
            return f"not tried: {self.refused or 'a stricter rule of its family is not certified'}"
        if self.decision is not None and self.decision.certified:
            return f"certified after {self.decision.refuted_at} prompts"
        enough = "" if self.needed is None else f"about {max(self.needed, used + 1)} would be enough"
        if self.stopped:
            return f"undecided: the time was up after {used} prompts{enough and f', {enough}'}"
        if enough:
            return f"not certified: {used} prompts are too few for the loss they show, {enough}"
        return (
            f"not certified: the loss shown by {used} prompts is above ε; more prompts of the same kind will not"
            " certify it"
        )


@dataclass(frozen=True)
class Trials:
    """Makes trials, and keeps them: every batch of every rule is a sealed part of the run's folder."""

    job: TuneJob
    folder: RunFolder
    deadline: float
    """Time of `time.monotonic` after which no batch is begun."""

    @property
    def late(self) -> bool:
        return time.monotonic() >= self.deadline

    def test(self, trial: RuleTrial) -> None:
        """Decode until the claim is certified, cannot be any more, or the time is up."""
        while self._decode_next(trial):
            trial.decision = decide(trial.claim, trial.differences)
            if trial.decision.certified or trial.decision.futile:
                return
        trial.stopped = len(trial.differences) < len(self.job.prompts)

    def complete(self, trial: RuleTrial) -> None:
        """Decode what is left, so that the figures of a certified rule are those of all prompts."""
        while self._decode_next(trial):
            pass

    def _decode_next(self, trial: RuleTrial) -> bool:
        """Decode the trial's next batch, and `exact` on it; False if there is none, or if the time is up."""
        job, number = self.job, len(trial.batches)
        prompts = job.prompts[number * job.batch : (number + 1) * job.batch]
        if not prompts or self.late:
            return False
        exact, exact_seconds = self._decode("exact", job.plan("exact", trial.gamma), number, prompts)
        run = job.plan(trial.rule, trial.gamma)
        samples, seconds = self._decode(trial.name, run, number, prompts, exact)
        for prompt, other, sample in zip(prompts, exact, samples, strict=True):
            trial.differences.append(job.measure.compare(prompt, other, sample))
        trial.samples += samples
        trial.exact += exact
        tokens, exact_tokens = (sum(row["tokens"] for row in rows) for rows in (samples, exact))
        trial.batches.append((tokens, seconds, exact_tokens, exact_seconds))
        return True

    def _decode(
        self,
        name: str,
        run: RuleRun,
        number: int,
        prompts: Sequence[CalibrationPrompt],
        exact: Sequence[Row] | None = None,
    ) -> tuple[list[Row], float]:
        """Samples of a batch under a rule, and its seconds; from the folder if it has been decoded already."""
        job, name = self.job, f"{name}-{number:05d}"
        file = self.folder.work / f"{name}.jsonl"
        seal = self.folder.sealed(name, run.identity, PartSeal)
        if seal is None:
            start = number * job.batch
            seeds = [row_seed(job.config.seed, start + i) for i in range(len(prompts))]
            options = BatchOptions(run.gamma, job.max_new_tokens, seeds)
            answers, seconds = job.answerer.answer([prompt.prompt for prompt in prompts], run.rule, options)
            write_rows(file, self._score(prompts, answers, exact))
            seal = self.folder.seal(name, [f"work/{file.name}"], run.identity, seconds=seconds)
        return list(read_rows(file, PartSample)), seal["seconds"]["total"]

    def _score(
        self, prompts: Sequence[CalibrationPrompt], answers: Sequence[Generation], exact: Sequence[Row] | None
    ) -> list[Row]:
        """A sample for every prompt. An answer in which nothing was substituted takes the score of `exact`."""
        scores = {
            i: (row["answer"], row["scores"]) for i, row in enumerate(exact or ()) if "judge" not in answers[i].origins
        }
        others = [i for i in range(len(prompts)) if i not in scores]
        scored = self.job.measure.score([prompts[i] for i in others], [answers[i].text for i in others])
        scores |= dict(zip(others, scored, strict=True))
        return [make_sample(prompt.id, answers[i], scores[i]) for i, prompt in enumerate(prompts)]

    def measure_speeds(self, families: Sequence[Family]) -> list[Row]:
        """Tokens/s on the prompts set aside (`speeds.Clock`), of the middle rule of each family among others.

        If another γ takes another engine there is one γ.
        """
        answerer = self.job.answerer
        gamma = self.job.config.gamma or (default_gamma(answerer.device) if answerer.one_gamma else None)
        if (seal := self.folder.sealed("speed", str(gamma), SpeedSeal)) is not None:
            return list(seal["speeds"])
        gammas = (gamma,) if gamma else GAMMAS.get(answerer.device, GAMMAS["cuda"])
        clock = Clock(answerer, [prompt.prompt for prompt in self.job.aside], self.job.plan, self.job.max_new_tokens)
        rows = clock.measure([family.middle for family in families], gammas)
        self.folder.seal("speed", [], str(gamma), speeds=rows)
        return rows
