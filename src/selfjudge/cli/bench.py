"""`selfjudge bench`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from selfjudge.bench.config import DecodeBenchConfig
from selfjudge.cli.groups import PairOptions, RecipeFolder, Setup
from selfjudge.cli.options import AsJson, config_options
from selfjudge.cli.output import Progress, figure, print_json, print_text
from selfjudge.decoding.rule_parser import OPEN_REQUEST, RuleRequest
from selfjudge.store import describe_machine
from selfjudge.types import GLOSSARY, PHASES


@config_options(DecodeBenchConfig)
@config_options(RuleRequest, "request", without=("rule", "gamma"))
@config_options(PairOptions, "models")
def bench(
    what: Annotated[Literal["decode"], typer.Argument(help="What is measured.")] = "decode",
    judged: Annotated[bool, typer.Option(help="Time the judge as well, where one ships for the pair.")] = True,
    prompts: Annotated[Path | None, typer.Option(help="Prompts file (jsonl); built-in ones if not given.")] = None,
    limit: Annotated[int, typer.Option(help="Maximum number of prompts.", min=1)] = 8,
    recipe: RecipeFolder = None,
    as_json: AsJson = False,
    *,
    models: PairOptions,
    request: RuleRequest,
    config: DecodeBenchConfig,
) -> None:
    """Time transformers (plain, assisted) and our loop (γ = 0, exact, judged) on the same prompts, in one run.

    Example: selfjudge bench decode --gammas 2,4 --limit 4 --json
    """
    from selfjudge.prompts.sources import BUILT_IN, read_prompts

    questions = read_prompts(prompts) if prompts else [text for _, text in BUILT_IN]
    setup = Setup.of(recipe, models, request)
    models = setup.models
    wanted = setup.request != OPEN_REQUEST or (judged and models.shipped_judge)
    if wanted and setup.recipe is None:
        setup = replace(setup, request=replace(request, rule="judged"))
    if wanted:
        setup.resolve()
    if setup.request.gamma is not None:
        config = replace(config, gammas=(setup.request.gamma,))
    pair = setup.load()
    full = models.load(full_precision=True) if config.peers and pair.dtype == "q4" and models.dtype is None else None

    from selfjudge.bench.decode import bench_decode

    name = "judged" if setup.recipe is None else "recipe"
    rules = {name: setup.request.resolve(pair)} if wanted else {}
    with Progress() as progress:
        result = bench_decode(pair, questions[:limit], config, rules, full=full, notify=progress)
    if as_json:
        print_json(result)
        return
    words = {"where": describe_machine(result), "glossary": GLOSSARY, "phases": PHASES, "figure": figure}
    print_text("bench", **result, **words)
