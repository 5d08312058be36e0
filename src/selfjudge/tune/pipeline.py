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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from selfjudge.evaluate.answerer import Answerer, TorchAnswerer
from selfjudge.judge.model import Judge
from selfjudge.models.pair import Pair
from selfjudge.report.certificate import certificate_markdown, certificate_page
from selfjudge.store import RunFolder, write_json, write_text
from selfjudge.store.artefacts import RecipeFile
from selfjudge.tune.certificate import choose_examples, make_certificate
from selfjudge.tune.config import FREE, TuneConfig
from selfjudge.tune.job import TuneJob
from selfjudge.tune.recipe import CERTIFICATE, JUDGE, RECIPE, Recipe, make_recipe
from selfjudge.tune.trials import Say, TuneResult, Tuning
from selfjudge.types import Notify, Warn

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
        result = Tuning(job, folder, notify, say).run()
        notify("writing", 1.0)
        return _write(job, folder, result, vllm_flags)


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
