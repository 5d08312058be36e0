"""A tuning run: calibration prompts decoded under a rule, batch by batch, each once, and tested against `exact`."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from selfjudge.decoding.text import row_seed
from selfjudge.evaluate.compare import Interval, compare_lengths
from selfjudge.evaluate.config import RuleRun
from selfjudge.evaluate.execute import make_sample
from selfjudge.report.certificate import SMALLEST_GAIN
from selfjudge.store import RunFolder, read_rows, write_rows
from selfjudge.store.artefacts import PartSample, PartSeal, SpeedSeal
from selfjudge.tasks import Row
from selfjudge.tune import certify
from selfjudge.tune.calibration import CalibrationPrompt, TuneJob, remark
from selfjudge.tune.certify import Claim, Decision, Floats
from selfjudge.tune.config import GAMMAS, Families, RefusedRule
from selfjudge.tune.speeds import FEWEST_TURNS, TIMED_TOKENS, Clock, Comparison, choose_gamma
from selfjudge.types import Generation, Notify, Warn, default_gamma

DIGITS = 4  # digits of D; a certificate holds it as it was bet on
COMPARED = 2
"""Certified rules that are timed against `exact`: those with most tokens per target pass."""
RESERVED = 0.25  # share of the time that is kept for it
Speed = tuple[float, Interval]  # a ratio of speeds and its interval


@dataclass
class RuleTrial:
    """A rule and its claim, tested on the first batches of the calibration prompts."""

    family: str
    name: str
    """Prefix of the trial's parts in the folder."""
    rule: str
    gamma: int
    claim: Claim
    sizes: Sequence[int] = ()
    """Prompts of each group."""
    refused: str = ""
    """Why the rule cannot be tried at this γ."""
    samples: list[Row] = field(default_factory=list)
    exact: list[Row] = field(default_factory=list)
    differences: list[float] = field(default_factory=list)
    """D of each prompt, in the prompts' order."""
    decision: Decision | None = None
    stopped: bool = False
    """Whether the time was up before the claim was decided."""

    @property
    def observations(self) -> Floats:
        """D of each group whose prompts are all answered."""
        return certify.average_groups(self.differences, self.sizes)

    @property
    def tried(self) -> bool:
        return self.stopped or bool(self.differences)

    @property
    def certified(self) -> bool:
        return self.decision is not None and self.decision.certified

    @property
    def length_ratio(self) -> Speed | None:
        """Ratio of m to that of `exact`, with its interval."""
        if not self.samples:
            return None
        compared = compare_lengths(self.samples, self.exact)
        return None if compared["m_ratio"] is None else (compared["m_ratio"], compared["m_ratio_ci"])

    @property
    def mean_accepted_length(self) -> float | None:
        cycles = sum(sample["cycles"] for sample in self.samples)
        return sum(sample["emitted"] for sample in self.samples) / cycles if cycles else None

    @property
    def needed(self) -> int | None:
        """About how many groups would certify it, by what was seen; None if it is certified, or if none would."""
        observed = self.observations
        if self.certified or not len(observed):
            return None
        variance, mean = max(float(observed.var()), 1 / len(observed)), float(observed.mean())
        return certify.estimate_needed_prompts(self.claim.epsilon, self.claim.delta, mean=mean, variance=variance)

    @property
    def why(self) -> str:
        """The outcome in words."""
        unit = "prompt" if max(self.sizes, default=1) == 1 else "group"
        return remark("why", self, len(self.observations), unit)


@dataclass(frozen=True)
class TuneResult:
    """All trials, and the one that is chosen; None is `exact`."""

    trials: list[RuleTrial]
    best: RuleTrial | None
    gamma: int
    speeds: Sequence[Row]
    """Speeds that chose γ."""
    families: Sequence[str]
    """Families that shared δ."""
    comparison: Comparison | None = None
    """Speeds of certified rules."""
    busy: str = ""
    """Why γ was not chosen by speeds."""

    @property
    def doubt(self) -> str:
        """Why speeds are not reliable; empty where they are, or where none were measured."""
        return self.busy if self.comparison is None else self.comparison.doubt

    @property
    def timed(self) -> Comparison | None:
        """The comparison, if its speeds are reliable. Else rules compare by tokens per target pass."""
        return None if self.doubt else self.comparison

    @property
    def plain_wins(self) -> bool:
        """Whether plain decoding was the fastest: then no drafts are made (γ = 0)."""
        return self.best is None and self.exact_over_plain == 1

    @property
    def exact_gamma(self) -> int:
        """γ at which `exact` was fastest; that of the others if nothing was measured."""
        return find_exact_gamma(self.speeds, self.gamma)

    @property
    def exact_over_plain(self) -> float | None:
        """The speed of `exact` at its best γ over plain decoding, at least 1; None if that is not known."""
        exact, plain = self.baseline
        return max(exact / plain, 1.0) if plain and exact else None

    @property
    def baseline(self) -> tuple[float | None, float | None]:
        """Tokens/s of `exact` at its best γ and of plain decoding; None where they are not known, or not reliable."""
        if self.comparison is not None:
            rates = {rule: timing.tokens_per_second for rule, timing in self.comparison.timings.items()}
        else:
            gammas = ("exact", self.exact_gamma), ("plain", 0)
            rows = (row for row in self.speeds if (row["rule"], row["gamma"]) in gammas)
            rates = {row["rule"]: row["tokens_per_second"] for row in rows}
        return (None, None) if self.doubt else (rates.get("exact"), rates.get("plain"))

    def compare_speed(self, trial: RuleTrial | None) -> dict[str, Any]:
        """A rule's speed over that of `exact` at its own best γ, or else its m over that of `exact`; its interval."""
        speed: Speed | None = None
        if trial is not None:
            speed = trial.length_ratio if self.timed is None else self.timed.compare(trial.rule)
        return {"speed_ratio": speed and speed[0], "speed_ci": speed and list(speed[1])}


def find_exact_gamma(speeds: Sequence[Row], gamma: int) -> int:
    """γ at which `exact` was fastest; `gamma` if nothing was measured."""
    exact = [row for row in speeds if row["rule"] == "exact"]
    return int(max(exact, key=lambda row: row["tokens_per_second"])["gamma"]) if exact else gamma


def _find_lower_end(trial: RuleTrial, timed: Comparison | None = None) -> float:
    """The lower end of a rule's speed over that of `exact`, if it was timed, or else of its m."""
    speed = trial.length_ratio if timed is None else timed.compare(trial.rule)
    return 0.0 if speed is None else speed[1][0]


def _pays(trial: RuleTrial, timed: Comparison | None) -> bool:
    """Whether a certified rule is surely faster than `exact`, and by enough to be worth an answer that it may lose."""
    speed = trial.length_ratio if timed is None else timed.compare(trial.rule)
    smallest = SMALLEST_GAIN["mean_accepted_length" if timed is None else "tokens_per_second"]
    return trial.certified and speed is not None and speed[1][0] > 1 and speed[0] >= 1 + smallest


class Tuning:
    """A run in its folder: γ is chosen, families are tested, the fastest certified rule is taken.

    Every batch of every rule is a sealed part of the folder.
    """

    def __init__(self, job: TuneJob, folder: RunFolder, notify: Notify, warn: Warn) -> None:
        self.job, self.folder, self.notify, self.warn = job, folder, notify, warn
        self.clock = Clock(job.answerer, job.plan, job.max_new_tokens, notify)
        self.begun = time.monotonic()
        self.deadline = self.begun + 60 * job.minutes  # after it no batch is begun
        self.tested_until = self.begun + 60 * job.minutes * (1 - RESERVED if job.config.times else 1)

    def run(self) -> TuneResult:
        job, config = self.job, self.job.config
        speeds: list[Row] = []
        busy = ""
        if config.times:
            self.notify("measuring speeds", 0.0)
            speeds, busy = self._measure_speeds(job.possible_families)
        gamma = choose_gamma(speeds, config.gamma or default_gamma(job.answerer.device))
        if busy:
            self.warn(f"{busy}; γ = {gamma}{'' if config.gamma else ', by default'}")
        families, refused = job.split_by_gamma(gamma)
        claim = job.claim(families)
        self._warn_of_families(families, gamma, refused)
        self._warn_if_late(speeds, gamma, claim)
        trials = self._test_families(families, gamma, claim)
        comparison = self._compare_speeds(trials, speeds) if config.times else None
        best = self._choose_fastest(trials, None if comparison is None or comparison.doubt else comparison)
        trials += [RuleTrial(family, "", rule, gamma, claim, refused=why) for family, rule, why in refused]
        return TuneResult(trials, best, gamma, speeds, list(families), comparison, busy)

    def _warn_of_families(self, families: Families, gamma: int, refused: Sequence[RefusedRule]) -> None:
        """Say which families have no share of δ: γ was chosen on prompts set aside, so that the others may take it."""
        for name, reason in {family: why for family, _, why in refused if family not in families}.items():
            self.warn(f"γ = {gamma}: rules of the family {name} are not tested ({reason})")

    def _warn_if_late(self, speeds: Sequence[Row], gamma: int, claim: Claim) -> None:
        """Say so if the time may not suffice to certify anything, at the speed of `exact`."""
        left, fewest = self.tested_until - time.monotonic(), certify.find_fewest_prompts(claim.epsilon, claim.delta)
        rates = [row["tokens_per_second"] for row in speeds if (row["rule"], row["gamma"]) == ("exact", gamma)]
        if rates and (affordable := left * rates[0] / (2 * self.job.max_new_tokens)) < fewest:
            self.warn(remark("late", self.job, affordable, fewest))

    def _test_families(self, families: Families, gamma: int, claim: Claim) -> list[RuleTrial]:
        """All families by turns, a rule of each: when the time is up, all have got about as far.

        In a family none is tried after one that is not certified.
        """
        by_family = {
            name: [
                RuleTrial(name, f"{name}-{number}", rule, gamma, claim, self.job.sizes)
                for number, rule in enumerate(rules)
            ]
            for name, rules in families.items()
        }
        done, total = 0, sum(map(len, by_family.values()))
        for turn in range(max(map(len, by_family.values()))):
            for trials in by_family.values():
                if turn < len(trials) and all(trial.certified for trial in trials[:turn]):
                    self._test(trials[turn], done, total)
                done += turn < len(trials)
        return [trial for trials in by_family.values() for trial in trials]

    def _compare_speeds(self, trials: Sequence[RuleTrial], speeds: Sequence[Row]) -> Comparison | None:
        """Certified rules against `exact` and plain decoding, by turns; None if no rule is certified.

        Answers are as long as the time allows.
        """
        job = self.job
        chosen = sorted((t for t in trials if t.certified), key=_find_lower_end, reverse=True)[:COMPARED]
        if not chosen:
            return None
        self.notify("comparing speeds", 0.0)
        prompts = [prompt.prompt for prompt in job.prompts]
        size = min(job.batch, len(prompts))
        batches = [prompts[start : start + size] for start in range(0, len(prompts) - size + 1, size)]
        exact_gamma = find_exact_gamma(speeds, chosen[0].gamma)
        rules = [("exact", exact_gamma), *((trial.rule, trial.gamma) for trial in chosen)]
        rates = [row["tokens_per_second"] for row in speeds if (row["rule"], row["gamma"]) == rules[0]]
        tokens = TIMED_TOKENS.get(job.answerer.device, TIMED_TOKENS["cpu"])
        if rates:
            affordable = rates[0] * (self.deadline - time.monotonic()) / (FEWEST_TURNS * (len(rules) + 2) * size)
            tokens = int(max(TIMED_TOKENS["cpu"], min(affordable, TIMED_TOKENS["cuda"])))
        return self.clock.compare(batches, rules, tokens, self.deadline)

    def _choose_fastest(self, trials: Sequence[RuleTrial], timed: Comparison | None) -> RuleTrial | None:
        """The certified rule that is most surely faster than `exact`, on all prompts; None if none pays.

        It is chosen by the lower end of its interval: that of its speed over `exact` at its own best γ, or of its m
        where no reliable speed was `timed`.
        """
        while paying := [trial for trial in trials if _pays(trial, timed)]:
            best = max(paying, key=lambda trial: _find_lower_end(trial, timed))
            if len(best.differences) == len(self.job.prompts) or time.monotonic() >= self.deadline:
                return best
            self.notify(f"{best.rule} on all prompts", 0.0)
            while self._decode_next(best, self.deadline):
                pass
        return None

    def _report(self, stage: str, tested: float) -> None:
        """The share of the rules or of the time, whichever is larger: the run ends with either."""
        passed = (time.monotonic() - self.begun) / max(60 * self.job.minutes, 1.0)
        self.notify(stage, max(tested, min(passed, 1.0)))

    def _test(self, trial: RuleTrial, done: int, total: int) -> None:
        """Decode until the claim is certified, cannot be any more, or the time is up; `done` of `total` rules were."""
        stage = f"{trial.rule}, γ = {trial.gamma}"
        self._report(stage, done / total)
        while self._decode_next(trial, self.tested_until):
            self._report(stage, (done + len(trial.differences) / len(self.job.prompts)) / total)
            trial.decision = certify.decide(trial.claim, trial.observations)
            if trial.decision.certified or trial.decision.futile:
                return
        trial.stopped = len(trial.differences) < len(self.job.prompts)

    def _decode_next(self, trial: RuleTrial, deadline: float) -> bool:
        """Decode the trial's next batch, and `exact` on it; False if there is none, or if the time is up."""
        job, number = self.job, math.ceil(len(trial.samples) / self.job.batch)
        prompts = job.prompts[number * job.batch : (number + 1) * job.batch]
        if not prompts or time.monotonic() >= deadline:
            return False
        exact = self._decode("exact", job.plan("exact", trial.gamma), number, prompts)
        samples = self._decode(trial.name, job.plan(trial.rule, trial.gamma), number, prompts, exact)
        for prompt, other, sample in zip(prompts, exact, samples, strict=True):
            trial.differences.append(round(job.measure.compare(prompt, other, sample), DIGITS))
        trial.samples += samples
        trial.exact += exact
        return True

    def _decode(
        self,
        name: str,
        run: RuleRun,
        number: int,
        prompts: Sequence[CalibrationPrompt],
        exact: Sequence[Row] | None = None,
    ) -> list[Row]:
        """Samples of a batch under a rule; from the folder if it has been decoded already."""
        job, name = self.job, f"{name}-{number:05d}"
        file = self.folder.work / f"{name}.jsonl"
        if self.folder.sealed(name, run.identity, PartSeal) is None:
            start = number * job.batch
            seeds = [row_seed(0, start + i) for i in range(len(prompts))]
            texts = [prompt.prompt for prompt in prompts]
            answers, seconds = job.answerer.answer(texts, run.rule, run.gamma, job.max_new_tokens, seeds)
            write_rows(file, self._score(prompts, answers, exact))
            self.folder.seal(name, [f"work/{file.name}"], run.identity, seconds=seconds)
        return list(read_rows(file, PartSample))

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

    def _measure_speeds(self, families: Families) -> tuple[list[Row], str]:
        """Tokens/s on the prompts set aside (`speeds.Clock`), of the middle rule of each family among others.

        None, and why, if they are not reliable. If another γ takes another engine there is one γ.
        """
        answerer = self.job.answerer
        gamma = self.job.config.gamma or (default_gamma(answerer.device) if answerer.one_gamma else None)
        if (seal := self.folder.sealed("speed", str(gamma), SpeedSeal)) is not None:
            return list(seal["speeds"]), seal.get("busy", "")
        gammas = (gamma,) if gamma else GAMMAS.get(answerer.device, GAMMAS["cuda"])
        prompts = [group[0].prompt for group in self.job.aside]
        middle = [rules[len(rules) // 2] for rules in families.values()]
        rows, busy = self.clock.measure(prompts, middle, gammas)
        seal = self.folder.seal("speed", [], str(gamma), speeds=[] if busy else rows, busy=busy)
        return seal["speeds"], busy
