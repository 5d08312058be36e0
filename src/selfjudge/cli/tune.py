"""`selfjudge tune`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from selfjudge.cli.groups import BackendOptions, PairOptions
from selfjudge.cli.options import AsJson, Resume, config_options
from selfjudge.cli.output import Progress, as_options, print_json, warn
from selfjudge.errors import SelfJudgeError
from selfjudge.judge.config import JudgeConfig
from selfjudge.store import RunFolder
from selfjudge.tune.calibration import check_calibration
from selfjudge.tune.config import TuneConfig
from selfjudge.tune.recipe import RECIPE


@config_options(PairOptions, "models")
@config_options(BackendOptions, "where")
@config_options(TuneConfig, commas=("tasks", "families"))
def tune(
    out: Annotated[Path, typer.Option(help="Folder of the recipe and its certificate.")],
    judge: Annotated[
        str | None,
        typer.Option(help="Judge folder, hub id or embedded name; the judge that ships for the target if not given."),
    ] = None,
    resume: Resume = False,
    as_json: AsJson = False,
    *,
    config: TuneConfig,
    models: PairOptions,
    where: BackendOptions,
) -> None:
    """Find the fastest rule whose loss is certified on your own prompts; or say that exact is it.

    Example: selfjudge tune --tasks arithmetic --limit 200 --epsilon 0.1 --out tuned
    """
    RunFolder(out, done=RECIPE).claim(resume=resume)
    source = judge or models.shipped_judge
    known = None if source is None else JudgeConfig.from_pretrained(source)
    if known is not None:
        models.check_judge(known)
    check_calibration(config, known)
    pair, answerer = (models.load(), None) if where.backend == "torch" else where.answerer(models, judge)

    from selfjudge.report.certificate import describe_doubt, describe_result, list_commands, plain_wins
    from selfjudge.tune.pipeline import tune_pair

    with Progress(resume="go on with --resume") as update:
        recipe = tune_pair(
            pair,
            out,
            config,
            judge=judge,
            answerer=answerer,
            vllm_flags=_vllm_flags,
            notify=update,
            say=_say,
            warn=warn,
        )
    if as_json:
        print_json({"recipe": recipe.content, "certificate": recipe.certificate})
        return
    typer.echo(describe_result(recipe.certificate))
    if doubtful := describe_doubt(recipe.certificate):
        warn(doubtful)
    for row in recipe.certificate["candidates"]:
        if row["n_used"] and not row["refuted"]:
            typer.echo(f"{row['rule']}: {row['why']}", err=True)
    run = list_commands(recipe.certificate)[0] if plain_wins(recipe.certificate) else f"selfjudge serve --recipe {out}"
    typer.echo(f"run this: {run}")
    typer.echo(f"the certificate: {out / 'certificate.html'}")


def _say(text: str) -> None:
    typer.echo(as_options(text), err=True)


def _vllm_flags(recipe: Any, folder: Path) -> str | None:
    """The command that starts vLLM with the recipe's rule; None for `exact`, and where vLLM cannot run the rule."""
    from selfjudge.decoding.rule_parser import RuleRequest
    from selfjudge.integrations.vllm.config import WorkerConfig
    from selfjudge.integrations.vllm.serve import command

    if recipe["rule"] == "exact":
        return None
    judge = str(folder / recipe["judge"]) if recipe["judge"] else None
    draft = None if recipe["pair"] == recipe["target"] else recipe["draft"]
    try:
        words = command(
            recipe["target"], draft, WorkerConfig(RuleRequest(recipe["rule"], judge)), gamma=recipe["gamma"]
        )
    except SelfJudgeError:
        return None
    flags = shlex.join(["python", *words[1:]])
    return flags.replace(judge, recipe["judge"]) if judge else flags
