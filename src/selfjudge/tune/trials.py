"""A tuning run: calibration prompts decoded under a rule, each once, and tested against `exact` batch by batch."""

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from typing import Any

from selfjudge.decoding.text import row_seed
from selfjudge.evaluate.compare import Interval, compare_lengths
from selfjudge.evaluate.config import RuleRun
from selfjudge.evaluate.execute import make_sample
from selfjudge.report.certificate import SMALLEST_GAIN
from selfjudge.store import RunFolder, read_rows, write_rows
from selfjudge.store.schema import PartSample, PartSeal, SpeedSeal
from selfjudge.tasks import Row
from selfjudge.tune import certify
from selfjudge.tune.calibration import TuneJob, remark
from selfjudge.tune.certify import Claim, Decision, Floats
from selfjudge.tune.families import BASELINES, LEAST_GAIN, Pairs, find_best, plan_pairs
from selfjudge.tune.speeds import COUNTED_PROMPTS, TIMED_TOKENS, Clock, Comparison, PairSearch
from selfjudge.types import Generation, Notify, Warn, default_gamma

DIGITS = 4  # digits of D; a certificate holds it as it was bet on
COMPARED = 2  # certified pairs that are timed against `exact` at a load: those of the largest expected speeds
CALL_SECONDS = 120.0  # about the most that a call of the answerer takes: a killed run loses no more
RESERVED = 0.25  # share of the time that is kept for comparing speeds; the choice of γ takes as much at most
SLOW = f"it is not expected to be faster by {LEAST_GAIN:.0%} than exact, plain decoding and a stricter rule"
Speed = tuple[float, Interval]  # a ratio of speeds and its interval


@dataclass
class RuleTrial:
    """A rule at one γ and its claim, tested on the first batches of the calibration prompts."""

    family: str
    name: str  # prefix of the trial's parts in the folder
    rule: str
    gamma: int
    claim: Claim
    loads: Sequence[int] = ()  # loads at which γ is the rule's best one
    sizes: Sequence[int] = ()  # prompts of each group
    refused: str = ""  # why the rule is not tried
    samples: list[Row] = field(default_factory=list)
    exact: list[Row] = field(default_factory=list)
    differences: list[float] = field(default_factory=list)  # D of each prompt, in the prompts' order
    decision: Decision | None = None
    stopped: bool = False  # whether the time was up before the claim was decided

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
class LoadOutcome:
    """The choice for one load: a certified pair, or `exact` or plain decoding (`best` is None)."""

    load: int
    best: RuleTrial | None
    exact_gamma: int  # γ at which `exact` was expected to be the fastest
    speeds: Sequence[Row]  # what was expected at every γ and load; empty if γ was given
    decoded_gamma: int  # γ of the answers of `exact` that trials were compared with
    comparison: Comparison | None = None  # measured speeds of certified rules, `exact` and plain decoding

    @property
    def doubt(self) -> str:
        """Why speeds are not reliable; empty where they are, or where none were measured."""
        return "" if self.comparison is None else self.comparison.doubt

    @property
    def timed(self) -> Comparison | None:
        """The comparison, if its speeds are reliable. Else speeds are expected ones."""
        return None if self.doubt else self.comparison

    @property
    def speed_measure(self) -> str:
        if self.timed is not None:
            return "tokens_per_second"
        return "expected_tokens_per_second" if self.speeds else "mean_accepted_length"

    @property
    def baseline(self) -> tuple[float | None, float | None]:
        """Measured tokens/s of `exact` at its best γ and of plain decoding; None where they are not reliable."""
        if self.timed is None:
            return None, None
        rates = {rule: timing.tokens_per_second for rule, timing in self.timed.timings.items()}
        return rates.get("exact"), rates.get("plain")

    @property
    def exact_over_plain(self) -> float | None:
        """The speed of `exact` at its best γ over plain decoding, at least 1; None if that is not known."""
        exact, plain = self.baseline
        if exact is None and self.speeds:
            rows = [find_best(self.speeds, self.load, (name,)) or {} for name in BASELINES]
            exact, plain = (row.get("tokens_per_second") for row in rows)
        return max(exact / plain, 1.0) if plain and exact else None

    @property
    def plain_wins(self) -> bool:
        """Whether plain decoding was the fastest: then no drafts are made (γ = 0)."""
        return self.best is None and self.exact_over_plain == 1

    def compare(self, trial: RuleTrial) -> Speed | None:
        """A rule's speed over the faster of `exact` and plain decoding: timed, or by its m and expected speeds."""
        if self.timed is not None:
            return self.timed.compare(trial.rule)
        if (ratio := trial.length_ratio) is None:
            return None
        exact = {row["gamma"]: row for row in self.speeds if (row["load"], row["rule"]) == (self.load, "exact")}
        best, factor = find_best(self.speeds, self.load, BASELINES), 1.0
        if best is not None and {trial.gamma, self.decoded_gamma} <= exact.keys():
            cycles = exact[trial.gamma]["tokens_per_second"] / exact[trial.gamma]["mean_accepted_length"]
            factor = exact[self.decoded_gamma]["mean_accepted_length"] * cycles / best["tokens_per_second"]
        return factor * ratio[0], (factor * ratio[1][0], factor * ratio[1][1])

    def pays(self, trial: RuleTrial) -> bool:
        """Whether a rule is surely faster, and by enough to be worth an answer that it may lose."""
        speed = self.compare(trial)
        return speed is not None and speed[1][0] > 1 and speed[0] >= 1 + SMALLEST_GAIN[self.speed_measure]

    def find_lower_end(self, trial: RuleTrial) -> float:
        """The lower end of a rule's speed."""
        speed = self.compare(trial)
        return 0.0 if speed is None else speed[1][0]

    def describe_speed(self, trial: RuleTrial | None) -> dict[str, Any]:
        """`compare` as a certificate has it, and the ratio in each turn, so that the interval can be computed again."""
        speed = None if trial is None else self.compare(trial)
        turns = [] if trial is None or self.timed is None else self.timed.list_ratios(trial.rule)
        return {"speed_ratio": speed and speed[0], "speed_ci": speed and list(speed[1]), "speed_turns": turns}


@dataclass(frozen=True)
class TuneResult:
    """All trials, and the choice for each load."""

    trials: list[RuleTrial]
    outcomes: list[LoadOutcome]
    speeds: Sequence[Row]  # expected speeds, which chose γ
    families: Sequence[str]  # families that shared δ


class Tuning:
    """A run in its folder: pairs are chosen and tested, the fastest certified one is taken. Each batch is sealed."""

    def __init__(self, job: TuneJob, folder: RunFolder, notify: Notify, warn: Warn) -> None:
        self.job, self.folder, self.notify, self.warn = job, folder, notify, warn
        self.begun = time.monotonic()
        seconds = 60 * job.minutes
        self.deadline = self.begun + seconds  # after it no batch is begun
        self.tested_until = self.begun + seconds * (1 - RESERVED if job.config.times else 1)
        self.gamma = job.config.gamma or default_gamma(job.answerer.device)
        """γ of all rules where none is chosen; of `exact`, which trials are compared with, after the choice its own."""
        self.pace = math.inf  # seconds of a batch under one rule, as last measured

    def run(self) -> TuneResult:
        """Choose pairs, test them, and choose for each load. Families that γ excludes leave their share of δ to the
        others, since γ does not rest on prompts that test."""
        job, loads = self.job, self.job.loads
        speeds = self._find_speeds()
        families, refused = (job.families, []) if speeds else job.split_by_gamma(self.gamma)
        for name, reason in {family: why for family, _, why in refused if family not in families}.items():
            self.warn(f"γ = {self.gamma}: rules of the family {name} are not tested ({reason})")
        pairs = plan_pairs(families, speeds, loads, self.gamma)
        if speeds and (best := find_best(speeds, loads[0], ("exact",))) is not None:
            self.gamma = int(best["gamma"])
        claim = job.claim(pairs)
        left, fewest = self.tested_until - time.monotonic(), certify.find_fewest_prompts(claim.epsilon, claim.delta)
        if best := find_best(speeds, max(loads), ("exact",)):  # what its speed leaves time for
            affordable = left * best["tokens_per_second"] / (2 * job.max_new_tokens)
            if affordable < fewest:
                self.warn(remark("late", job, affordable, fewest))
        trials = self._test_families(pairs, claim)
        outcomes = [self._choose(load, trials, speeds, len(loads) - done) for done, load in enumerate(loads)]
        planned = {pair.rule for own in pairs.values() for pair in own}
        slow = [(name, rule, SLOW) for name, rules in families.items() for rule in rules if rule not in planned]
        trials += [RuleTrial(name, "", rule, self.gamma, claim, refused=why) for name, rule, why in (*refused, *slow)]
        return TuneResult(trials, outcomes, speeds, list(pairs))

    def _test_families(self, pairs: Pairs, claim: Claim) -> list[RuleTrial]:
        """Test a pair of each family in turn, so all get about as far; a family ends with its first failure."""
        sizes, by_family = self.job.sizes, defaultdict[str, list[RuleTrial]](list)
        for name, own in pairs.items():
            for number, pair in enumerate(own):
                trial = RuleTrial(name, f"{name}-{number}", pair.rule, pair.gamma, claim, pair.loads, sizes)
                by_family[name].append(trial)
        done, total = 0, sum(map(len, by_family.values()))
        for turn in range(max(map(len, by_family.values()), default=0)):
            for trials in by_family.values():
                if turn < len(trials) and all(trial.certified for trial in trials[:turn]):
                    self._test(trials[turn], done, total)
                done += turn < len(trials)
        return [trial for trials in by_family.values() for trial in trials]

    def _choose(self, load: int, trials: Sequence[RuleTrial], speeds: Sequence[Row], left: int) -> LoadOutcome:
        """The certified pair that pays at this load with the largest lower end of its speed, on all prompts. The
        remaining time is for `left` loads, this one among them."""
        job, exact = self.job, find_best(speeds, load, ("exact",))
        gamma = self.gamma if exact is None else int(exact["gamma"])
        rate = None if exact is None else float(exact["tokens_per_second"])
        outcome = LoadOutcome(load, None, gamma, speeds, self.gamma)
        fitting = [trial for trial in trials if trial.certified and load in trial.loads]
        if job.config.times:
            self.notify("comparing speeds", 0.0)
            chosen = sorted(fitting, key=outcome.find_lower_end, reverse=True)[:COMPARED]
            rules = [("exact", gamma), *((trial.rule, trial.gamma) for trial in chosen)]
            begun = time.monotonic()
            seconds = (self.deadline - begun) / left  # answers are as long as these allow
            clock = Clock(job.answerer, job.plan, load, job.max_new_tokens, self.notify)
            tokens = clock.choose_length(len(rules), rate, seconds)
            compared = clock.compare([prompt.prompt for prompt in job.prompts], rules, tokens, begun + seconds)
            outcome = replace(outcome, comparison=compared)
        while paying := [trial for trial in fitting if outcome.pays(trial)]:
            best = max(paying, key=outcome.find_lower_end)
            if len(best.differences) == len(job.prompts) or time.monotonic() >= self.deadline:
                return replace(outcome, best=best)
            self.notify(f"{best.rule} on all prompts", 0.0)
            while self._decode_next(best, self.deadline):
                pass
        return outcome

    def _test(self, trial: RuleTrial, done: int, total: int) -> None:
        """Decode until the claim is decided or the time is up; `done` of `total` rules were tested. Progress is the
        share of the rules or of the time, whichever is larger."""
        prompts, seconds = len(self.job.prompts), max(self.deadline - self.begun, 1.0)
        while True:
            passed = min((time.monotonic() - self.begun) / seconds, 1.0)
            tested = (done + len(trial.differences) / prompts) / total
            self.notify(f"{trial.rule}, γ = {trial.gamma}", max(tested, passed))
            if not self._decode_next(trial, self.tested_until):
                break
            trial.decision = certify.decide(trial.claim, trial.observations)
            if trial.decision.certified or trial.decision.futile:
                return
        trial.stopped = len(trial.differences) < prompts

    def _decode_next(self, trial: RuleTrial, deadline: float) -> bool:
        """Test the trial on its next batch; False if there is none, or if the time is up and it is not decoded yet.
        A call decodes several, which are tested one by one: those that turn out not to be needed do not count."""
        job, number = self.job, math.ceil(len(trial.samples) / self.job.batch)
        prompts = job.prompts[number * job.batch : (number + 1) * job.batch]
        arms = ("exact", job.plan("exact", self.gamma)), (trial.name, job.plan(trial.rule, trial.gamma))
        known = [self._read(*arm, number) for arm in arms]
        if prompts and not all(known) and time.monotonic() < deadline:
            parts = range(number, number + self._count_parts(trial, number, deadline))
            for arm in arms:
                self._decode(*arm, parts)
            known = [self._read(*arm, number) for arm in arms]
        if not (prompts and all(known)):
            return False
        for prompt, other, sample in zip(prompts, *known, strict=True):
            trial.differences.append(round(job.measure.compare(prompt, other, sample), DIGITS))
        trial.exact, trial.samples = trial.exact + known[0], trial.samples + known[1]
        return True

    def _count_parts(self, trial: RuleTrial, number: int, deadline: float) -> int:
        """How many batches a call decodes after the first `number`: one more than these, at most what certifies the
        rule if no more scores change, and what half of the time left suffices for."""
        soonest = None if trial.certified else certify.decide(trial.claim, trial.observations).soonest
        wanted = math.ceil(sum(self.job.sizes[:soonest]) / self.job.batch) - number
        affordable = min(CALL_SECONDS, (deadline - time.monotonic()) / 2) / (2 * self.pace)
        return max(1, min(number + 1, wanted, int(affordable)))

    def _read(self, name: str, run: RuleRun, number: int) -> list[Row]:
        """The samples of a batch under a rule; none if the folder does not have them."""
        sealed = self.folder.sealed(f"{name}-{number:05d}", run.identity, PartSeal) is not None
        return list(read_rows(self.folder.work / f"{name}-{number:05d}.jsonl", PartSample)) if sealed else []

    def _decode(self, name: str, run: RuleRun, parts: Sequence[int]) -> None:
        """Decode those of these batches that the folder lacks in one call, so that rows are refilled as answers end.
        Where nothing was substituted, the score is that of `exact`, which has them already."""
        job, begun = self.job, time.monotonic()
        if not (parts := [number for number in parts if not self._read(name, run, number)]):
            return
        places = [i for n in parts for i in range(len(job.prompts))[n * job.batch : (n + 1) * job.batch]]
        texts, seeds = [job.prompts[i].prompt for i in places], [row_seed(0, i) for i in places]
        answers, seconds = job.answerer.answer(texts, run, job.max_new_tokens, seeds, batch=job.batch)
        exact = [row for number in parts for row in self._read("exact", job.plan("exact", self.gamma), number)]
        rows = self._score(places, answers, exact)
        for place, part in enumerate(f"{name}-{number:05d}" for number in parts):
            write_rows(self.folder.work / f"{part}.jsonl", rows[place * job.batch : (place + 1) * job.batch])
            self.folder.seal(part, [f"work/{part}.jsonl"], run.identity, seconds=seconds)
        self.pace = (time.monotonic() - begun) / len(parts)

    def _score(self, places: Sequence[int], answers: Sequence[Generation], exact: Sequence[Row]) -> list[Row]:
        prompts = [self.job.prompts[i] for i in places]
        scores = {i: (row["answer"], row["scores"]) for i, row in enumerate(exact) if "judge" not in answers[i].origins}
        others = [i for i in range(len(prompts)) if i not in scores]
        scored = self.job.measure.score([prompts[i] for i in others], [answers[i].text for i in others])
        scores |= dict(zip(others, scored, strict=True))
        return [make_sample(prompt.id, answers[i], scores[i]) for i, prompt in enumerate(prompts)]

    def _find_speeds(self) -> list[Row]:
        """Expected speeds of all rules (`speeds.PairSearch`) on the prompts set aside; none if there is one γ."""
        job, answerer, loads, gammas = self.job, self.job.answerer, self.job.loads, self.job.gammas
        if len(gammas) == 1:
            return []
        if (seal := self.folder.sealed("speed", str(loads), SpeedSeal)) is not None:
            return list(seal["speeds"])
        self.notify("measuring what a cycle costs", 0.0)
        prompts = [group[0].prompt for group in job.aside][:COUNTED_PROMPTS]
        costs = {load: answerer.costs(list(islice(cycle(prompts), load)), max(gammas)) for load in loads}
        tokens = min(TIMED_TOKENS.get(answerer.device, TIMED_TOKENS["cpu"]), job.max_new_tokens)
        until = self.begun + RESERVED * (self.deadline - self.begun)
        search = PairSearch(answerer, job.plan, prompts, gammas, costs, tokens, self.notify, until)
        speeds = search.search(job.families) if all(costs.values()) else []
        self.folder.seal("speed", [], str(loads), speeds=speeds)
        return speeds
