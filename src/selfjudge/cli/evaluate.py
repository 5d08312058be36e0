"""`selfjudge eval`, `selfjudge reproduce`, `selfjudge report` and `selfjudge tune`."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

import selfjudge
from selfjudge import evaluate as evaluation, tune as tuning
from selfjudge.cli import options
from selfjudge.cli.options import AnsweringPair, BackendOptions, Options, PairOptions, RecipeFolder, Result, Resume
from selfjudge.cli.output import Progress, as_options, print_text, waiting, warn
from selfjudge.decoding.rule_parser import OPEN_REQUEST
from selfjudge.errors import SelfJudgeError
from selfjudge.evaluate.config import PAPER_PAIRS, EvalConfig, ReproduceConfig, load_examples, needs_judge, plan_runs
from selfjudge.judge.config import JudgeConfig
from selfjudge.report import certificate as said, page
from selfjudge.report.records import FEWEST_SCORED
from selfjudge.store import RunFolder
from selfjudge.tune.calibration import check_calibration
from selfjudge.tune.config import TuneConfig
from selfjudge.tune.recipe import RECIPE, Recipe, find_key
from selfjudge.types import explain


def evaluate(
    out: Annotated[Path, typer.Option(help="Folder of the results; what is done in it stays done.")],
    judge: Annotated[list[str] | None, typer.Option(metavar="[NAME=]FOLDER", help="A judge, with its name.")] = None,
    recipe: RecipeFolder = None,
    resume: Resume = False,
    *,
    config: Annotated[EvalConfig, Options(commas=("tasks",))],
    where: BackendOptions,
    models: Annotated[PairOptions, Options(without=("draft_dtype",))],
) -> Result:
    """What rules gain and cost on tasks, compared with exact example by example.

    Example: selfjudge eval --pair qwen2.5-coder-1.5b --tasks arithmetic --limit 20 --rules "exact judged:q0.9"
    --gammas 4 --out eval

    Example: selfjudge eval --dtype float32 --tasks arithmetic --limit 20 --out eval"""
    RunFolder(out).claim(resume=resume)
    if recipe is not None and (config.rules is not None or config.gammas):
        raise SelfJudgeError(options.RECIPE_IS_COMPLETE)
    setup = options.Setup.of(recipe, models, OPEN_REQUEST)
    if setup.recipe is not None:
        models = setup.models
        if setup.request.judge:
            judge = [*(judge or []), f"recipe={setup.request.judge}"]
        config = replace(config, rules=tuple(dict.fromkeys(("exact", setup.recipe.rule))), gammas=(setup.recipe.gamma,))
    config.check()
    sources = _judges(judge, models, config)
    _check_rules(config, models, sources)
    has_stories = any(examples.has_stories for examples in load_examples(config))
    target_judges = has_stories and config.nli != "off"  # or may, which takes full precision

    if where.backend == "vllm":
        pair, answerer = where.answerer(models, next(iter(sources.values()), None))
        if setup.recipe is not None:
            setup.recipe.check_pair(pair, warn)
    else:
        pair, answerer = setup.load(full_precision=target_judges), None
    judges = {name: selfjudge.Judge.from_pretrained(source) for name, source in sources.items()}
    for loaded in judges.values():
        loaded.config.check_target(pair.target_id, pair.target_sha256, pair.hidden_size)
    with Progress(resume="go on with --resume") as update:
        rows = evaluation.evaluate_rules(pair, out, config, judges=judges, answerer=answerer, notify=update, warn=warn)
    yield rows
    print_text("eval", summaries=rows, fewest=FEWEST_SCORED)
    typer.echo(explain("m", "γ", "judged"), err=True)
    typer.echo(f"rows and summaries are in {out}; draw them with: selfjudge report {out}")


def reproduce(
    out: Annotated[Path, typer.Option(help="Folder of all stages; what is done in it stays done.")],
    pair: Annotated[str | None, typer.Option(help=f"Embedded pair, or the paper's {', '.join(PAPER_PAIRS)}.")] = None,
    *,
    config: Annotated[ReproduceConfig, Options(commas=("tasks",))],
    models: Annotated[PairOptions, Options(without=("pair", "draft_dtype"))],
) -> Result:
    """Label by three methods, train, evaluate every rule, report: the paper's tables and figures for a pair.

    Example: selfjudge reproduce --preset full --pair qwen2.5-coder-1.5b --data DIR --out reproduced

    Example: selfjudge reproduce --preset released --prompts arithmetic:60 --tasks arithmetic --limit 16 --out small"""
    models = replace(models, pair=pair)
    if models.target is None and pair in PAPER_PAIRS:
        target, draft = PAPER_PAIRS[pair]
        models = replace(models, target=target, draft=draft)
    models.check()
    load_examples(config.evaluation)

    loaded = models.load(full_precision=True)
    with Progress() as update:
        result = evaluation.reproduce_paper(loaded, out, config, notify=update, warn=warn)
    yield result
    typer.echo(f"everything is in {out}; open {out / 'report.html'}")


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders that eval or reproduce wrote.")],
    out: Annotated[Path, typer.Option(help="The page; tables.md is in a folder of its name.")] = Path("report.html"),
) -> Result:
    """One self-contained page: a verdict, tables, trade-offs, a token viewer; the tables as Markdown
    beside it.

    Example: selfjudge report eval --out report.html"""
    with waiting("reading results and drawing …"):
        result = page.report(folders, out)
    for folder in result["left_out"]:
        warn(f"left out {folder['folder']}: {folder['why']}")
    yield result["tables"]
    typer.echo(f"{out}: {result['runs']} runs, {len(result['tables'])} tables, in {out.with_suffix('')} as Markdown")


def _check_rules(config: EvalConfig, models: PairOptions, sources: dict[str, str]) -> None:
    """Refuse rules that cannot work, from their texts and the judges' configs alone."""
    judges: Any = {name: JudgeConfig.from_pretrained(source) for name, source in sources.items()}
    for judge in judges.values():
        models.check_judge(judge)
    for run in plan_runs(config.choose_rules(bool(judges)), (0,), judges, ()):
        for gamma in config.gammas or (None,):
            models.check_gamma(run.rule, gamma)


def _judges(given: list[str] | None, models: PairOptions, config: EvalConfig) -> dict[str, str]:
    """Judges by name, as folders or hub ids: the given ones, else the pair's own where a rule needs one."""
    judged = any(needs_judge(rule) for rule in config.choose_rules(True))
    if not given and judged and models.shipped_judge:
        given = [f"shipped={models.shipped_judge}"]
    if given and not judged:
        raise SelfJudgeError("no rule in `rules` uses a judge: leave out `judge`, or add judged")
    judges: dict[str, str] = {}
    for text in given or []:
        name, named, source = text.partition("=")
        if not named:
            name, source = Path(text).name, text
        if not name or name in judges or "/" in name or "@" in name:
            raise SelfJudgeError(f"--judge {text}: give every judge a name of its own, such as mine={source or text}")
        judges[name] = source
    return judges


def tune(
    out: Annotated[Path, typer.Option(help="Folder of the recipe and its certificate.")],
    judge: Annotated[str | None, typer.Option(help="Judge folder, hub id or embedded name; else the shipped.")] = None,
    resume: Resume = False,
    *,
    config: Annotated[TuneConfig, Options(commas=("tasks", "families"))],
    where: BackendOptions,
    models: AnsweringPair,
) -> Result:
    """Find the fastest rule whose loss is certified on your own prompts; or say that exact is it.

    Example: selfjudge tune --tasks arithmetic --limit 200 --epsilon 0.1 --out tuned

    Example: selfjudge tune --prompts mine.jsonl --load 1,8,64 --rules "margin:price=0.2 margin:price=0.4" --out tuned
    """
    if judge is not None and not config.uses_judge:
        raise SelfJudgeError("nothing in `families` or `rules` uses a judge: leave out `judge`, or add judged")
    RunFolder(out, done=RECIPE).claim(resume=resume)
    source = judge or models.shipped_judge
    known = None if source is None else JudgeConfig.from_pretrained(source)
    if known is not None:
        models.check_judge(known)
    check_calibration(config, known)
    pair, answerer = (models.load(), None) if where.backend == "torch" else where.answerer(models, judge)
    with Progress(resume="go on with --resume") as update:
        recipe = tuning.tune_pair(pair, out, config, judge=judge, answerer=answerer, notify=update, warn=warn)
    yield {"recipe": recipe.content, "certificate": recipe.certificate}
    certificate = recipe.certificate
    if doubtful := said.describe_doubt(certificate):
        warn(doubtful)
    lines = [said.describe_result(certificate), said.describe_verdict(certificate)]
    if len(recipe.loads) > 1:
        lines = list(map(said.describe_by_load, said.list_loads(certificate)))
    for line in dict.fromkeys([said.describe_baseline(certificate), *lines]):
        typer.echo(line)
    for row in certificate["candidates"]:
        if row["n_used"] and not row["refuted"]:
            typer.echo(f"{row['rule']}, γ = {row['gamma']}: {row['why']}", err=True)
    typer.echo(f"type this next: selfjudge serve --recipe {out}")
    typer.echo(f"the certificate: {out / 'certificate.html'}")


def verify(
    folder: Annotated[Path, typer.Argument(help="Folder that `selfjudge tune` made.")],
    key: Annotated[Path | None, typer.Option(help="Public Ed25519 key that must have signed it: key.pub.")] = None,
) -> None:
    """Check a certificate: its files, its rule, its bets computed once more, its signature. Exit code 1 if it fails.

    Example: selfjudge certificate verify tuned --key key.pub"""
    try:
        recipe = Recipe.read(folder)
        for line in recipe.verify(key or find_key()):
            typer.echo(f"ok: {line}")
    except SelfJudgeError as error:
        typer.echo(f"selfjudge: does not hold: {as_options(str(error))}", err=True)
        raise typer.Exit(1) from None
    typer.echo(said.describe_claim(recipe.certificate))
