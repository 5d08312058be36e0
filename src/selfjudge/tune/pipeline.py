"""Tuning: rules from strict to loose, each tested against `exact` until decided → a recipe and its certificate.
<out>/
    settings.json             what the run was begun with
    work/RULE-00000.jsonl     `batch` answers each, of `exact` and of every rule tried; they go when all is decided
    judge/                    the judge, if the chosen rule has one
    certificate.json .html
    recipe.json               written last: its existence means done
    signature.json            with `sign`"""

import math
import secrets
import shutil
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from selfjudge.decoding.rule_parser import rule_text
from selfjudge.decoding.text import row_seed
from selfjudge.evaluate.compare import bootstrap_interval
from selfjudge.evaluate.execute import Answerer, TorchAnswerer, make_example_row, restore_answer, trace_again
from selfjudge.judge.model import Judge
from selfjudge.models.pair import Pair
from selfjudge.models.tokens import hash_tokenizer
from selfjudge.report.certificate import certificate_page
from selfjudge.store import RunFolder, measured_on, read_json, write_json, write_text
from selfjudge.store.schema import AttemptSeal, Certificate, RecipeFile
from selfjudge.tasks.base import join_messages
from selfjudge.tune.calibration import WORDS, LossMeasure, TuneJob, remark
from selfjudge.tune.config import FREE, TuneConfig
from selfjudge.tune.families import LEAST_GAIN, PUT_OFF
from selfjudge.tune.independence import find_earlier, note_attempt
from selfjudge.tune.monitor import describe_scope, measure_answer
from selfjudge.tune.recipe import FORMAT, JUDGE, RECIPE, SIGNATURE, Recipe, make_recipe, seal_recipe, sign
from selfjudge.tune.trials import DIGITS, LoadOutcome, RuleTrial, TuneResult, Tuning
from selfjudge.tune.verify import CERTIFICATE, count_changes, describe_bet, describe_certified, pack
from selfjudge.types import Notify, Warn, check_config, ignore

ATTEMPT = "attempt"  # the part of a folder that says which attempt of the ledger it is
SAME = ("prompts_sha256", "similar", "max_new_tokens", "batch", "engine", "dtype", "draft_dtype")
"""What a certificate says as the settings of its run do."""


def tune_pair(
    pair: Pair,
    out: Path | str,
    config: TuneConfig,
    *,
    judge: Judge | str | Path | None = None,
    answerer: Answerer | None = None,
    notify: Notify = ignore,
    warn: Warn = ignore,
) -> Recipe:
    """Find the fastest rule whose loss is certified, in the folder `out`. Resumes an earlier call. `judge` is the one
    of the judged rules; the one that ships for the pair if not given. The models run in this process, unless an
    `answerer` is handed in. `warn` is also told before the run what so many prompts can certify. A finished run returns
    at once, unless its time was up and there is more now, or its speeds were not reliable."""
    check_config(config, TuneConfig)
    folder = RunFolder(Path(out), done=RECIPE, schema=RecipeFile)
    folder.claim()
    remarks: list[str] = []  # not to be made about what is refused
    sealed = folder.sealed(ATTEMPT, schema=AttemptSeal) or {}
    attempt, known = sealed.get("id"), sealed.get("earlier", [])
    job = TuneJob.prepare(pair, answerer or TorchAnswerer(pair), config, judge, remarks.append)
    earlier = max(known, find_earlier(attempt, job.target, job.keys), key=len)  # the ledger may have been removed since
    job = replace(job, earlier=earlier)
    if not (folder.path / RECIPE).is_file():
        job.check_count()
    with folder.working(job.settings(), free=FREE) as then:
        if folder.result() is not None:
            recipe = Recipe.read(folder.path)
            more = job.minutes > (math.inf if then.get("minutes") is None else then["minutes"])
            if not ((recipe.certificate["stopped"] and more) or _wants_times(recipe.certificate)):
                recipe.verified()
                _drop_answers(folder, recipe.certificate)  # a run killed at its very end had no time to
                if config.sign is not None:
                    sign(folder.path, recipe.content["digest"], config.sign)
                return recipe
            folder.reopen(job.settings())
        if attempt is None:
            attempt = secrets.token_hex(16)
            folder.seal(ATTEMPT, [], id=attempt)
        job = replace(job, earlier=max(known, note_attempt(attempt, job.target, job.keys), key=len))
        folder.seal(ATTEMPT, [], id=attempt, earlier=job.earlier)
        remarks += filter(None, [remark("attempt", job)])
        for line in (*remarks, job.describe_outlook()):
            warn(line)
        result = Tuning(job, folder, notify, warn).run()
        notify("writing", 1.0)
        return _write(job, folder, result)


def _write(job: TuneJob, folder: RunFolder, result: TuneResult) -> Recipe:
    """Write judge, certificate and, last, the recipe."""
    out, chosen = folder.path, [outcome.best for outcome in result.outcomes if outcome.best is not None]
    certificate = make_certificate(job, result)
    examples = choose_examples(job, result.outcomes[0].best)
    judged = any(job.plan(trial.rule, trial.gamma).judge is not None for trial in chosen)
    if judged and job.judge is not None:
        job.judge.save_pretrained(out / JUDGE)
    recipe = make_recipe(certificate, job.pair, JUDGE if judged else None)
    write_text(out / "certificate.html", certificate_page(certificate, examples))
    write_json(out / CERTIFICATE, certificate)
    recipe = seal_recipe(recipe, out)
    Recipe(out, recipe, read_json(out / CERTIFICATE, Certificate)).verified()
    (out / SIGNATURE).unlink(missing_ok=True)  # of an earlier end of this run
    if job.config.sign is not None:
        sign(out, recipe["digest"], job.config.sign)
    folder.finish(recipe, settings=job.settings())
    _drop_answers(folder, certificate)
    return Recipe.read(out)


def _drop_answers(folder: RunFolder, certificate: Mapping[str, Any]) -> None:
    """Remove the answers of a run in which all is decided; others keep them, to be resumed."""
    if not (certificate["stopped"] or _wants_times(certificate)):
        shutil.rmtree(folder.work, ignore_errors=True)


def _wants_times(certificate: Mapping[str, Any]) -> bool:
    """Whether certified rules were not compared by their speed, which was not reliable."""
    doubtful = any(row.get("unreliable") for row in (certificate, *certificate["more_loads"]))
    return doubtful and any(row["refuted"] for row in certificate["candidates"])


def make_certificate(job: TuneJob, result: TuneResult) -> dict[str, Any]:
    """The content of certificate.json: what is chosen for the first load, and a row for each other one."""
    pair, config, settings = job.pair, job.config, job.settings()
    rows = [_describe_outcome(job, result, outcome) for outcome in result.outcomes]
    return {
        "format_version": FORMAT,
        "pair": pair.name,
        "task": ", ".join(settings["tasks"]),
        "measure": job.measure.name,
        "measure_words": WORDS[job.measure.name],
        "epsilon": config.epsilon,
        "delta": config.delta,
        **rows[0],
        "more_loads": rows[1:],
        "groups": pack(job.sizes),
        "attempt": 1 + len(job.earlier),
        "earlier_attempts": job.earlier,
        "families": list(result.families),
        "candidates": [_describe_trial(trial, result) for trial in result.trials],
        "speeds": list(result.speeds),
        "least_gain": LEAST_GAIN,
        "put_off": PUT_OFF,
        "target_sha256": pair.target_sha256,
        "draft_sha256": pair.draft_sha256,
        "tokenizer_sha256": hash_tokenizer(pair.tokenizer),
        **{name: settings[name] for name in SAME},
        **measured_on(),
        "stopped": any(trial.stopped for trial in result.trials)
        or any(o.best is not None and len(o.best.observations) < o.best.claim.n for o in result.outcomes),
    }


def _describe_outcome(job: TuneJob, result: TuneResult, outcome: LoadOutcome) -> dict[str, Any]:
    """What a certificate says of one load."""
    best, (rate, plain) = outcome.best, outcome.baseline
    exact = {
        **dict.fromkeys(("rule", "resolved"), "exact"),
        "gamma": 0 if outcome.plain_wins else outcome.exact_gamma,
        "certified": False,
        "n": max((len(trial.observations) for trial in result.trials), default=0),
        **count_changes([], []),
        **dict.fromkeys(("mean_difference_ci", "evidence", "overlap", "scope")),
    }
    return {
        "load": outcome.load,
        **(exact if best is None else _describe_choice(job, best)),
        "exact": {**_describe_exact(job, result), "tokens_per_second": rate, "plain_tokens_per_second": plain},
        "speed_measure": outcome.speed_measure,
        **outcome.describe_speed(best),
        "exact_gamma": outcome.exact_gamma,
        "exact_over_plain": outcome.exact_over_plain,
        "unreliable": outcome.doubt,
    }


def _describe_choice(job: TuneJob, best: RuleTrial) -> dict[str, Any]:
    """What a certificate says of the rule that is taken: itself with all its numbers, its figures and its bet. The
    overlap with the words of `exact` is noted whatever is certified, as are figures that the answers to the calibration
    prompts share: a server can watch both (`tune.monitor`)."""
    overlap, lost = LossMeasure("overlap"), None
    if job.measure != overlap:
        answers = zip(job.prompts, best.exact, best.samples, strict=False)
        lost = [round(overlap.compare(prompt, exact, row), DIGITS) for prompt, exact, row in answers]
    return {
        "rule": best.rule,
        "resolved": rule_text(job.plan(best.rule, best.gamma).rule),
        "gamma": best.gamma,
        "certified": True,
        **describe_certified(best.claim, best.differences, best.sizes, job.config.delta, lost),
        "mean_difference_ci": bootstrap_interval(-best.observations),
        "scope": describe_scope(_average_figures(job, best), job.config.delta, len(job.sizes)),
    }


def _average_figures(job: TuneJob, best: RuleTrial) -> dict[str, list[float]]:
    """The figures of the answers under a rule: of each group of prompts their means."""
    figures: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    groups = np.repeat(np.arange(len(job.sizes)), job.sizes).tolist()
    for group, prompt, row in zip(groups, job.prompts, best.samples, strict=False):
        asked = join_messages(prompt.prompt)
        for name, value in measure_answer(asked, row["emitted"], row["cycles"], row["judged"]).items():
            figures[name][group].append(value)
    return {name: list(map(fmean, own.values())) for name, own in figures.items()}


def _describe_exact(job: TuneJob, result: TuneResult) -> dict[str, Any]:
    """How `exact` itself does: its mean score, and in how many of its answers none was found where one is right."""
    rows = max((trial.exact for trial in result.trials), key=len, default=[])
    scores = [row["score"] for row in rows if job.measure.name == "score"]
    asked = [row for prompt, row in zip(job.prompts, rows, strict=False) if prompt.gold is not None]
    missed = [row for row in asked if row["answer"] is None]
    counts = bool(asked) and job.measure.name != "overlap"
    return {
        "n": len(rows),
        "score": float(np.mean(scores)) if scores else None,
        "without_answer": len(missed) if counts else None,
        "cut_off": sum(row["finish"] == "length" for row in missed) if counts else None,
    }


def _describe_trial(trial: RuleTrial, result: TuneResult) -> dict[str, Any]:
    own = [outcome for outcome in result.outcomes if outcome.load in trial.loads]
    fastest = max(own, key=lambda outcome: outcome.find_lower_end(trial), default=result.outcomes[0])
    timing = None if fastest.timed is None else fastest.timed.timings.get(trial.rule)
    return {
        "rule": trial.rule,
        "family": trial.family,
        "gamma": trial.gamma,
        "loads": list(trial.loads),
        "why": trial.why,
        "differences": pack(trial.differences),
        **describe_bet(trial.claim, trial.differences, trial.sizes),
        "mean_accepted_length": trial.mean_accepted_length,
        "speed_load": fastest.load if own else None,
        "tokens_per_second": None if timing is None else timing.tokens_per_second,
        **fastest.describe_speed(trial),
        "needed_prompts": trial.needed,
    }


def choose_examples(job: TuneJob, best: RuleTrial | None) -> list[dict[str, Any]]:
    """Answers that were lost and gained, those of `exact` beside those of the rule, token by token."""
    if best is None:
        return []
    order = sorted(range(len(best.differences)), key=lambda i: -abs(best.differences[i]))
    lost = [i for i in order if best.differences[i] > 0][: job.config.examples]
    gained = [i for i in order if best.differences[i] < 0][: job.config.examples]
    chosen, run = (*lost, *gained), job.plan(best.rule, best.gamma)
    known, asked = [restore_answer(best.samples[i]) for i in chosen], [job.prompts[i].prompt for i in chosen]
    seeds = [row_seed(0, i) for i in chosen]
    answers = trace_again(job.answerer, known, job.batch, asked, run, job.max_new_tokens, seeds)
    shown = []
    for i, answer in zip(chosen, answers, strict=True):
        prompt, difference, sides = job.prompts[i], -best.differences[i], []
        exact = "exact", best.exact[i], restore_answer(best.exact[i])
        for rule, sample, made in (exact, (best.rule, best.samples[i], answer)):
            scored = {"rule": rule, "score": sample["score"], "answer": sample["answer"]}
            sides.append(scored | make_example_row(job.pair, prompt.prompt, made))
        kind = "lost" if difference < 0 else "gained"
        shown.append({"kind": kind, "id": prompt.id, "difference": difference, "answers": sides})
    return shown
