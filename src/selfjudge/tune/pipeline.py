"""Tuning: rules from strict to loose, each tested against `exact` until decided → a recipe and its certificate.

<out>/
    settings.json             what the run was begun with
    work/RULE-00000.jsonl     `batch` answers each, of `exact` and of every rule tried; they go when all is decided
    judge/                    the judge, where the chosen rule has one
    certificate.json .md .html
    recipe.json               written last: its existence means done
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfjudge.engine.select import PairEngines
from selfjudge.evaluate.answerer import Answerer, TorchAnswerer
from selfjudge.judge.model import Judge
from selfjudge.models.pair import Pair
from selfjudge.report.certificate import certificate_markdown, certificate_page
from selfjudge.store import RunFolder, sha256, write_json, write_text
from selfjudge.store.artefacts import RecipeFile
from selfjudge.tune.calibration import (
    CalibrationPrompt,
    Measure,
    answer_tokens,
    digest,
    load_calibration,
    refuse_learnt,
)
from selfjudge.tune.candidates import FAMILIES, Family, Refused, candidates, fitting, levels
from selfjudge.tune.certificate import Choice, Outcome, certificate, shown_examples
from selfjudge.tune.certify import Claim, fewest_prompts, needed_prompts, power, refuse_hopeless, set_aside
from selfjudge.tune.config import CPU_BATCH, CUDA_BATCH, FREE, TuneConfig
from selfjudge.tune.recipe import CERTIFICATE, FORMAT, JUDGE, RECIPE, Recipe
from selfjudge.tune.speeds import chosen_gamma, fitting_prompts
from selfjudge.tune.trials import Trial, Trials
from selfjudge.types import Notify, Warn, default_gamma

JUDGE_NAME = "judge"
CPU_MINUTES = 12.0
"""Where no number is given."""

Say = Callable[[str], None]
Flags = Callable[[Mapping[str, Any], Path], str | None]
"""A recipe and its folder → what `vllm serve` is to be told."""


def tune_pair(
    pair: Pair,
    out: Path | str,
    config: TuneConfig,
    *,
    judge: Judge | str | Path | None = None,
    answerer: Answerer | None = None,
    vllm_flags: Flags = lambda recipe, folder: None,
    notify: Notify = lambda stage, share: None,
    say: Say = lambda text: None,
    warn: Warn = lambda text: None,
) -> Recipe:
    """Find the fastest rule whose loss is certified, in the folder `out`. Goes on where an earlier call ended.

    `judge` is the one of the judged rules; the one that ships for the pair if not given. The models run in this
    process, unless an `answerer` is handed in. `say` is told before the run what so many prompts can certify.
    A finished run returns at once, unless its time was up and there is more now.
    """
    config.check()
    folder = RunFolder(Path(out), done=RECIPE, schema=RecipeFile)
    folder.claim()
    remarks: list[str] = []  # not to be made about what is refused
    job = _Job.prepare(pair, answerer or TorchAnswerer(pair), config, judge, remarks.append)
    job.refuse_hopeless()
    with folder.working(job.settings(), free=FREE) as then:
        if folder.result() is not None:
            recipe = Recipe.load(folder.path)
            more = job.minutes > (math.inf if then.get("minutes") is None else then["minutes"])
            if not (recipe.certificate["stopped"] and more):
                _drop_answers(folder, recipe.certificate)  # a run killed at its very end had no time to
                return recipe
            folder.reopen(job.settings())
        for remark in remarks:
            warn(remark)
        say(job.outlook())
        return _Tuning(job, folder, notify, say).run(vllm_flags)


@dataclass(frozen=True)
class _Job:
    """What a run tests, with what."""

    pair: Pair
    answerer: Answerer
    config: TuneConfig
    judge: Judge | None
    families: list[Family]
    prompts: list[CalibrationPrompt]
    aside: list[CalibrationPrompt]
    measure: Measure
    batch: int

    @classmethod
    def prepare(
        cls, pair: Pair, answerer: Answerer, config: TuneConfig, judge: Judge | str | Path | None, warn: Warn
    ) -> _Job:
        source = judge if isinstance(judge, str | Path) else None
        if judge is None and pair.judge is not None:
            source = pair.target_id
        loaded = Judge.from_pretrained(source) if source is not None else judge
        assert loaded is None or isinstance(loaded, Judge)
        if loaded is None and config.families == FAMILIES:
            warn("no judge ships for this target: the family judged is left out")
        families = candidates(config.families, None if loaded is None else loaded.config)
        prompts = load_calibration(config, warn)
        if "judged" in config.families and loaded is not None:
            loaded.check_target(pair.target_id, pair.target_sha256, pair.hidden_size)
            refuse_learnt(pair, prompts, source, warn)
        batch = config.batch or (CUDA_BATCH if answerer.device == "cuda" else CPU_BATCH)
        aside = set_aside(len(prompts), batch) if config.times else 0
        measure = Measure.choose(config.measure, prompts)
        return cls(pair, answerer, config, loaded, families, prompts[aside:], prompts[:aside], measure, batch)

    @property
    def minutes(self) -> float:
        """The most that the run may take."""
        if self.config.minutes is not None:
            return self.config.minutes
        return CPU_MINUTES if self.answerer.device == "cpu" else math.inf

    def fitting(self, gamma: int) -> tuple[list[Family], list[Refused]]:
        """The families that are tested at this γ, and the rules that do not work with it."""
        return fitting(self.families, gamma, None if self.judge is None else self.judge.config)

    @property
    def possible(self) -> list[Family]:
        """The families that share δ, as far as that is known before γ is chosen."""
        return self.families if self.config.gamma is None else self.fitting(self.config.gamma)[0]

    def claim(self, families: Sequence[Family]) -> Claim:
        """Of any of these families: their shares of δ are equal."""
        return Claim(self.config.epsilon, next(iter(levels(families, self.config.delta).values())), len(self.prompts))

    def refuse_hopeless(self) -> None:
        """Refuse an ε that so few prompts cannot certify."""
        config, given = self.config, len(self.aside) + len(self.prompts)
        batch = self.batch if config.times else None
        refuse_hopeless(given, batch, config.epsilon, config.delta, len(self.possible))

    def outlook(self) -> str:
        """What so many prompts can certify, before any is decoded."""
        families = self.possible
        claim, over = self.claim(families), "1 family" if len(families) == 1 else f"{len(families)} families"
        needed = needed_prompts(claim.epsilon, claim.delta)
        return (
            f"{claim.n} prompts, at most {100 * claim.epsilon:g} points lost, {1 - self.config.delta:.0%} confidence"
            f" over {over}: {fewest_prompts(claim.epsilon, claim.delta)} prompts certify a rule that changes no score,"
            f" about {needed} one that changes 5 % of them for no loss"
            f" (with {claim.n}: {power(claim):.0%} of such runs)"
        )

    def settings(self) -> dict[str, Any]:
        pair, config = self.pair, self.config
        return {
            "tasks": config.evaluation.tasks,
            "prompts_sha256": digest([*self.aside, *self.prompts]),
            **{name: getattr(config, name) for name in ("epsilon", "delta", "seed", "gamma", "times")},
            "minutes": None if math.isinf(self.minutes) else self.minutes,
            "families": {family.name: family.rules for family in self.families},
            "measure": self.measure.name,
            "max_new_tokens": answer_tokens(config, self.prompts),
            "batch": self.batch,
            "target": pair.target_sha256 or pair.target_id,
            "draft": pair.draft_sha256 or pair.draft_id,
            "dtype": pair.dtype,
            "draft_dtype": "int8" if PairEngines(pair).draft_int8 else None,
            "engine": self.answerer.engine,
        }


class _Tuning:
    """A run in its folder."""

    def __init__(self, job: _Job, folder: RunFolder, notify: Notify, say: Say) -> None:
        self.job, self.folder, self.notify, self.say = job, folder, notify, say
        config = job.config
        self.trials = Trials(
            job.pair,
            job.answerer,
            folder,
            job.prompts,
            job.aside,
            job.measure,
            {} if job.judge is None else {JUDGE_NAME: job.judge},
            job.batch,
            answer_tokens(config, job.prompts),
            config.seed,
            time.monotonic() + 60 * job.minutes,
        )
        self.names: dict[int, str] = {}
        """Of each trial's parts, by its identity."""

    def run(self, vllm_flags: Flags) -> Recipe:
        job, config = self.job, self.job.config
        speeds: list[dict[str, Any]] = []
        if config.times:
            self.notify("measuring speeds", 0.0)
            speeds = self.trials.speeds(job.possible, config.gamma)
        gamma, advantage = chosen_gamma(speeds, config.gamma or default_gamma(job.answerer.device))
        families, refused = job.fitting(gamma)
        self._say_what_falls_away(families, gamma, refused)
        claim = job.claim(families)
        self._say_if_late(speeds, gamma, claim)
        outcomes = self._test_all(families, gamma, claim)
        outcomes += [Outcome(rule.family, rule.rule, gamma, claim, refused=rule.why) for rule in refused]
        best = self._fastest(outcomes, advantage)
        names = [family.name for family in families]
        return self._write(Choice(outcomes, best, gamma, advantage, speeds, names), vllm_flags)

    def _say_what_falls_away(self, families: Sequence[Family], gamma: int, refused: Sequence[Refused]) -> None:
        """Say which families have no share of δ: γ was chosen on prompts set aside, so that the others may take it."""
        left = {family.name for family in families}
        why = {rule.family: rule.why for rule in refused if rule.family not in left}
        for name, reason in why.items():
            self.say(f"γ = {gamma}: the family {name} falls away before anything is tested ({reason})")

    def _say_if_late(self, speeds: list[dict[str, Any]], gamma: int, claim: Claim) -> None:
        """Say so where the time may not suffice to certify anything."""
        job, left = self.job, self.trials.deadline - time.monotonic()
        fewest = fewest_prompts(claim.epsilon, claim.delta)
        fitting = fitting_prompts(speeds, gamma, left, self.trials.max_new_tokens)
        if fitting < fewest:
            self.say(
                f"{job.minutes:g} minutes may be too few: if answers have {self.trials.max_new_tokens} tokens, about"
                f" {max(0, int(fitting))} prompts fit, under exact and one rule, and {fewest} are the fewest that"
                " certify one: --resume with more --minutes goes on"
            )

    def _test_all(self, families: Sequence[Family], gamma: int, claim: Claim) -> list[Outcome]:
        """All families by turns, a rule of each: when the time is up, all have got about as far.

        In a family none is tried after one that is not certified.
        """
        outcomes: dict[str, list[Outcome]] = {family.name: [] for family in families}
        total = sum(len(family.rules) for family in families)
        for turn in range(max(len(family.rules) for family in families)):
            for family in families:
                if turn < len(family.rules):
                    before = outcomes[family.name]
                    done = sum(map(len, outcomes.values())) / total
                    standing = all(outcome.certified for outcome in before)
                    before.append(self._test(family, turn, gamma, claim, standing, done))
        return [outcome for family in families for outcome in outcomes[family.name]]

    def _test(self, family: Family, number: int, gamma: int, claim: Claim, standing: bool, done: float) -> Outcome:
        """A rule of a family, if all before it are certified."""
        rule = family.rules[number]
        if not standing:
            return Outcome(family.name, rule, gamma, claim)
        trial = Trial(family.name, self.trials.plan(rule, gamma))
        self.names[id(trial)] = f"{family.name}-{number}"
        self.notify(f"{rule}, γ = {gamma}", done)
        self.trials.test(trial, self.names[id(trial)], claim)
        return Outcome(family.name, rule, gamma, claim, trial)

    def _fastest(self, outcomes: list[Outcome], advantage: float) -> Outcome | None:
        """The certified rule whose speed is most surely above that of `exact`, measured on all prompts; None if none.

        It is chosen by the lower end of its interval, which must lie above `exact` at its own best γ.
        """
        certified = [outcome for outcome in outcomes if outcome.certified]
        while certified:
            best = max(certified, key=lambda outcome: outcome.slowest(self.job.config.times))
            assert best.trial is not None
            if best.slowest(self.job.config.times) <= advantage:
                return None
            if len(best.trial.differences) == len(self.job.prompts) or self.trials.late:
                return best
            self.notify(f"{best.rule} on all prompts", 0.0)
            self.trials.complete(best.trial, self.names[id(best.trial)])
        return None

    def _write(self, choice: Choice, vllm_flags: Flags) -> Recipe:
        """Judge, certificate and, last, the recipe."""
        self.notify("writing", 1.0)
        job, out = self.job, self.folder.path
        result = certificate(job.pair, job.config, job.measure, job.prompts, job.settings(), choice)
        examples = shown_examples(job.pair, job.config, job.prompts, choice)
        judged = choice.best is not None and choice.best.trial is not None and choice.best.trial.run.judge is not None
        if judged:
            assert job.judge is not None
            job.judge.cpu().save_pretrained(out / JUDGE)
        pair = job.pair
        recipe: dict[str, Any] = {
            "format_version": FORMAT,
            "pair": pair.name,
            "target": pair.target_id,
            "draft": pair.draft_id,
            "target_sha256": pair.target_sha256,
            "draft_sha256": pair.draft_sha256,
            "judge_sha256": sha256(out / JUDGE / "model.safetensors") if judged else None,
            "prompts_sha256": result["prompts_sha256"],
            "rule": result["rule"],
            "gamma": result["gamma"],
            "judge": JUDGE if judged else None,
            "certificate": CERTIFICATE,
            "engine": result["engine"],
            "dtype": result["dtype"],
            "draft_dtype": result["draft_dtype"],
        }
        recipe["flags"] = {"selfjudge": _flags(recipe), "vllm": vllm_flags(recipe, out)}
        result["flags"] = recipe["flags"]
        write_text(out / "certificate.md", certificate_markdown(result))
        write_text(out / "certificate.html", certificate_page(result, examples))
        write_json(out / CERTIFICATE, result)
        self.folder.finish(recipe, settings=job.settings())
        _drop_answers(self.folder, result)
        return Recipe.load(out)


def _drop_answers(folder: RunFolder, certificate: Mapping[str, Any]) -> None:
    """Remove the answers of a run in which all is decided. One whose time was up keeps them, to go on with."""
    if not certificate["stopped"]:
        shutil.rmtree(folder.work, ignore_errors=True)


def _flags(recipe: Mapping[str, Any]) -> str:
    """What any command of ours is to be told in place of --recipe, in the recipe's folder."""
    own = recipe["pair"] == recipe["target"]
    models = f"--pair {recipe['pair']}" if own else f"--target {recipe['target']} --draft {recipe['draft']}"
    judge = f" --judge {recipe['judge']}" if recipe["judge"] else ""
    draft_dtype = f" --draft-dtype {recipe['draft_dtype']}" if recipe["draft_dtype"] else ""
    return f"{models} --rule {recipe['rule']} --gamma {recipe['gamma']}{judge}{draft_dtype}"
