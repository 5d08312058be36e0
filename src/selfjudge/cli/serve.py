"""`selfjudge serve`."""

from __future__ import annotations

import json
import os
import shlex
from contextlib import ExitStack
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from selfjudge.cli.groups import PairOptions, RecipeFolder, Setup
from selfjudge.cli.options import config_options
from selfjudge.cli.output import waiting, warn
from selfjudge.decoding.rule_parser import RuleRequest
from selfjudge.errors import SelfJudgeError
from selfjudge.integrations.server.config import ServerConfig
from selfjudge.judge.config import JudgeConfig
from selfjudge.tune.recipe import Recipe
from selfjudge.types import default_gamma

if TYPE_CHECKING:
    from selfjudge.judge.model import Judge
    from selfjudge.models.pair import Pair

SHARED = ("default_rule", "name", "api_key", "shadow", "shadow_keep")
"""Settings of our server that vLLM's takes, too."""


@config_options(ServerConfig)
@config_options(RuleRequest, "request")
@config_options(PairOptions, "models")
def serve(
    backend: Annotated[
        Literal["torch", "vllm"],
        typer.Option(help="torch: our own loop, on any machine; vllm: vLLM with our rules in it."),
    ] = "torch",
    recipe: RecipeFolder = None,
    vllm: Annotated[
        str,
        typer.Option(help="Flags of vLLM's own, with --backend vllm: '--tensor-parallel-size 2 --max-num-seqs 64'."),
    ] = "",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 is any that is free.", min=0, max=65535)] = 8000,
    *,
    models: PairOptions,
    request: RuleRequest,
    config: ServerConfig,
) -> None:
    """Serve a pair over HTTP as OpenAI's API does: chat completions, completions, models, health, metrics.
    At / is a playground.

    Example: selfjudge serve --pair smollm2-135m --rule margin --price 0.1 --port 8000

    Example: selfjudge serve --recipe tuned --shadow 0.02
    """
    key = os.environ.get("SELFJUDGE_API_KEY") if config.api_key is None else config.api_key
    setup = Setup.of(recipe, models, request)
    if setup.request.judge is not None:
        setup.models.check_judge(JudgeConfig.from_pretrained(setup.request.judge))
    own = replace(setup.request.named(), judge=None)
    config = replace(config, default_rule=own, api_key=key)
    config.check()
    if config.shadow:
        from selfjudge.tune.monitor import watch

        watch(setup.recipe, config.shadow_keep)  # refuses what cannot be watched
    if backend == "vllm":
        _refuse_torch_options(setup.models, config)
        _serve_vllm(setup, config, ["--host", host, "--port", str(port), *shlex.split(vllm)])
        return
    if vllm:
        raise SelfJudgeError("`vllm` goes with --backend vllm")

    replace(setup, request=setup.request if own.needs_judge else own).check()

    from selfjudge.integrations.server.config import listen

    listener = listen(host, port)
    pair, judge = load(setup)
    with ExitStack() as stack:
        stack.enter_context(waiting("trying out an answer …"))

        from selfjudge.integrations.server import serve as run

        def welcome(line: str) -> None:
            stack.close()
            typer.echo(line, err=True)

        run(pair, listener, config, judge=judge, recipe=setup.recipe, notify=welcome)


def load(setup: Setup) -> tuple[Pair, Judge | None]:
    """The models, and the judge that requests may ask for: the one named, else the one that ships."""
    pair = setup.load(needs_draft=setup.request.gamma != 0)

    from selfjudge.judge.model import Judge

    source = setup.request.judge
    return pair, pair.judge if source is None else Judge.from_pretrained(source)


def _refuse_torch_options(models: PairOptions, config: ServerConfig) -> None:
    """vLLM has flags of its own for what our loop takes here."""
    given = [f.name for f in fields(config) if f.name not in SHARED and getattr(config, f.name) != f.default]
    given += [name for name in ("device", "draft_dtype") if getattr(models, name) is not None]
    given += ["dtype"] if models.dtype in ("int8", "q4") else []
    if given:
        raise SelfJudgeError(f"`{given[0]}` goes with --backend torch")
    if len(config.keys) > 1:
        raise SelfJudgeError("`api_key` with several keys goes with --backend torch")


def _serve_vllm(setup: Setup, config: ServerConfig, more: list[str]) -> None:
    """Become vLLM's server with our worker in it; its key travels by the environment, where others do not see it."""
    from selfjudge.integrations.server.playground import FACTS, MIDDLEWARE, describe
    from selfjudge.integrations.vllm.config import WorkerConfig
    from selfjudge.integrations.vllm.serve import command, main
    from selfjudge.integrations.vllm.shadow import MIDDLEWARE as SHADOW, VARIABLE, ShadowSettings
    from selfjudge.judge.hub import shipped_judge

    models, own, recipe = setup.models, setup.request.named(), setup.recipe
    if recipe is not None:
        _check_recipe(recipe, models)
    if config.shadow:
        assert recipe is not None
        kept = None if config.shadow_keep is None else str(config.shadow_keep.absolute())
        os.environ[VARIABLE] = ShadowSettings(str(recipe.folder.absolute()), config.shadow, kept).dump()
        more = ["--middleware", SHADOW, *more]
    arguments = command(
        models.name,
        models.draft,
        WorkerConfig(own),
        gamma=None if own.gamma == "auto" else own.gamma,
        more=[
            *("--middleware", MIDDLEWARE),
            *(["--served-model-name", config.name] if config.name else []),
            *(["--dtype", models.dtype] if models.dtype else []),
            *more,
        ],
    )
    facts = {
        "backend": "vllm",
        "rule": own.text,
        "theta": own.theta,
        "price": own.price,
        "gamma": default_gamma("cuda") if own.gamma in (None, "auto") else own.gamma,
        "judge": bool(own.judge or shipped_judge(models.name)),
        "recipe": None if recipe is None else describe(recipe),
    }
    os.environ[FACTS] = json.dumps(facts)
    if config.api_key:
        os.environ["VLLM_API_KEY"] = config.api_key
    main(arguments)


def _check_recipe(recipe: Recipe, models: PairOptions) -> None:
    """Refuse other models than the recipe's; say so where vLLM was not what it was certified with."""
    from selfjudge.models.catalogue import draft_for
    from selfjudge.models.pull import weights_sha256

    draft = draft_for(models.name, models.draft)
    recipe.check_models(target=(models.name, weights_sha256(models.name)), draft=(draft, weights_sha256(draft)))
    if recipe.content["engine"] != "vllm":
        warn(
            f"{recipe.folder} was certified with the engine {recipe.content['engine']}, this is vllm: not covered by it"
        )
