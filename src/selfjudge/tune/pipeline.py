"""Tuning: rules from strict to loose, each tested against `exact` until decided → a recipe and its certificate.

<out>/
    settings.json             what the run was begun with
    work/RULE-00000.jsonl     `batch` answers each, of `exact` and of every rule tried; they go when all is decided
    judge/                    the judge, if the chosen rule has one
    certificate.json .md .html
    recipe.json               written last: its existence means done
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from selfjudge.evaluate.answerer import Answerer, TorchAnswerer
from selfjudge.judge.model import Judge
from selfjudge.models.pair import Pair
from selfjudge.report.certificate import certificate_markdown, certificate_page
from selfjudge.store import RunFolder, write_json, write_text
from selfjudge.store.artefacts import RecipeFile
from selfjudge.tasks.base import Row
from selfjudge.tune.candidates import Family, RefusedRule
from selfjudge.tune.certificate import TuneResult, choose_examples, make_certificate
from selfjudge.tune.certify import Claim, find_fewest_prompts
from selfjudge.tune.config import FREE, TuneConfig
from selfjudge.tune.job import TuneJob
from selfjudge.tune.recipe import CERTIFICATE, JUDGE, RECIPE, Recipe, make_recipe
from selfjudge.tune.speeds import choose_gamma, count_affordable_prompts
from selfjudge.tune.trials import RuleTrial, Trials
from selfjudge.types import Notify, Warn, default_gamma

Say = Callable[[str], None]
Flags = Callable[[Mapping[str, Any], Path], str | None]
"""A recipe and its folder → the options of `vllm serve`."""


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
    """Find the fastest rule whose loss is certified, in the folder `out`. Resumes an earlier call.

    `judge` is the one of the judged rules; the one that ships for the pair if not given. The models run in this
    process, unless an `answerer` is handed in. `say` is told before the run what so many prompts can certify.
    A finished run returns at once, unless its time was up and there is more now.
    """
    config.check()
    folder = RunFolder(Path(out), done=RECIPE, schema=RecipeFile)
    folder.claim()
    remarks: list[str] = []  # not to be made about what is refused
    job = TuneJob.prepare(pair, answerer or TorchAnswerer(pair), config, judge, remarks.append)
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
        say(job.describe_outlook())
        result = _Tuning(job, folder, notify, say).run()
        notify("writing", 1.0)
        return _write(job, folder, result, vllm_flags)


class _Tuning:
    """A run in its folder: γ is chosen, families are tested, the fastest certified rule is taken."""

    def __init__(self, job: TuneJob, folder: RunFolder, notify: Notify, say: Say) -> None:
        self.job, self.notify, self.say = job, notify, say
        self.trials = Trials(job, folder, time.monotonic() + 60 * job.minutes)

    def run(self) -> TuneResult:
        job, config = self.job, self.job.config
        speeds: list[Row] = []
        if config.times:
            self.notify("measuring speeds", 0.0)
            speeds = self.trials.measure_speeds(job.possible_families)
        gamma, advantage = choose_gamma(speeds, config.gamma or default_gamma(job.answerer.device))
        families, refused = job.split_by_gamma(gamma)
        claim = job.claim(families)
        self._say_which_fall_away(families, gamma, refused)
        self._say_if_late(speeds, gamma, claim)
        trials = self._test_families(families, gamma, claim)
        best = self._choose_fastest(trials, advantage)
        trials += [
            RuleTrial(rule.family, "", rule.rule, gamma, claim, config.times, refused=rule.why) for rule in refused
        ]
        return TuneResult(trials, best, gamma, advantage, speeds, [family.name for family in families])

    def _say_which_fall_away(self, families: Sequence[Family], gamma: int, refused: Sequence[RefusedRule]) -> None:
        """Say which families have no share of δ: γ was chosen on prompts set aside, so that the others may take it."""
        left = {family.name for family in families}
        why = {rule.family: rule.why for rule in refused if rule.family not in left}
        for name, reason in why.items():
            self.say(f"γ = {gamma}: the family {name} falls away before anything is tested ({reason})")

    def _say_if_late(self, speeds: Sequence[Row], gamma: int, claim: Claim) -> None:
        """Say so if the time may not suffice to certify anything."""
        tokens, left = self.job.max_new_tokens, self.trials.deadline - time.monotonic()
        fewest = find_fewest_prompts(claim.epsilon, claim.delta)
        affordable = count_affordable_prompts(speeds, gamma, left, tokens)
        if affordable < fewest:
            self.say(
                f"{self.job.minutes:g} minutes may be too few: if answers have {tokens} tokens, about"
                f" {max(0, int(affordable))} prompts fit, under exact and one rule, and {fewest} are the fewest that"
                " certify one: resume with --resume and more --minutes"
            )

    def _test_families(self, families: Sequence[Family], gamma: int, claim: Claim) -> list[RuleTrial]:
        """All families by turns, a rule of each: when the time is up, all have got about as far.

        In a family none is tried after one that is not certified.
        """
        times = self.job.config.times
        by_family = {
            family.name: [
                RuleTrial(family.name, f"{family.name}-{number}", rule, gamma, claim, times)
                for number, rule in enumerate(family.rules)
            ]
            for family in families
        }
        done, total = 0, sum(map(len, by_family.values()))
        for turn in range(max(map(len, by_family.values()))):
            for trials in by_family.values():
                if turn < len(trials) and all(trial.certified for trial in trials[:turn]):
                    self.notify(f"{trials[turn].rule}, γ = {gamma}", done / total)
                    self.trials.test(trials[turn])
                done += turn < len(trials)
        return [trial for trials in by_family.values() for trial in trials]

    def _choose_fastest(self, trials: Sequence[RuleTrial], advantage: float) -> RuleTrial | None:
        """The certified rule whose speed is most surely above that of `exact`, measured on all prompts; None if none.

        It is chosen by the lower end of its interval, which must lie above `exact` at its own best γ.
        """
        certified = [trial for trial in trials if trial.certified]
        while certified:
            best = max(certified, key=lambda trial: trial.slowest)
            if best.slowest <= advantage:
                return None
            if len(best.differences) == len(self.job.prompts) or self.trials.late:
                return best
            self.notify(f"{best.rule} on all prompts", 0.0)
            self.trials.complete(best)
        return None


def _write(job: TuneJob, folder: RunFolder, result: TuneResult, vllm_flags: Flags) -> Recipe:
    """Write judge, certificate and, last, the recipe."""
    out, best = folder.path, result.best
    certificate = make_certificate(job, result)
    examples = choose_examples(job, best)
    judge = None if best is None or job.plan(best.rule, best.gamma).judge is None else job.judge
    if judge is not None:
        judge.cpu().save_pretrained(out / JUDGE)
    recipe = make_recipe(job.pair, certificate, out / JUDGE if judge is not None else None)
    recipe["flags"]["vllm"] = vllm_flags(recipe, out)
    certificate["flags"] = recipe["flags"]
    write_text(out / "certificate.md", certificate_markdown(certificate))
    write_text(out / "certificate.html", certificate_page(certificate, examples))
    write_json(out / CERTIFICATE, certificate)
    folder.finish(recipe, settings=job.settings())
    _drop_answers(folder, certificate)
    return Recipe.load(out)


def _drop_answers(folder: RunFolder, certificate: Mapping[str, Any]) -> None:
    """Remove the answers of a run in which all is decided. One whose time was up keeps them, to be resumed."""
    if not certificate["stopped"]:
        shutil.rmtree(folder.work, ignore_errors=True)
