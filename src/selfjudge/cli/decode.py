"""`selfjudge generate` and `selfjudge serve`."""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, fields, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.text import Text

import selfjudge
from selfjudge.cli.options import AnsweringPair, AsJson, DecodeOptions, PairOptions, RecipeFolder, Setup
from selfjudge.cli.output import Progress, fill_text, print_json, waiting, warn
from selfjudge.decoding.costs import watch_measuring
from selfjudge.decoding.rule_parser import RuleRequest
from selfjudge.decoding.sampling import Sampling
from selfjudge.errors import EMPTY_PROMPT, SelfJudgeError, first_line
from selfjudge.integrations import asgi
from selfjudge.integrations.server import playground
from selfjudge.integrations.server.config import ServerConfig, listen
from selfjudge.integrations.vllm import serve as vllm_server
from selfjudge.judge.config import JudgeConfig, shipped_judge
from selfjudge.models.catalogue import draft_for
from selfjudge.models.pull import served_reference, weights_sha256
from selfjudge.ops import watch_compiling
from selfjudge.report.certificate import describe_by_load, describe_result
from selfjudge.store import read_json
from selfjudge.store.run_folder import LoadWatch
from selfjudge.tune import monitor
from selfjudge.tune.recipe import Recipe
from selfjudge.types import GLOSSARY, Generation, default_gamma

if TYPE_CHECKING:
    from selfjudge.decoding.text import Stream

FIGURES = (
    "origins", "finish", "cycles", "gamma_mean", "mean_accepted_length", "drafts_accepted", "judged_share",
    "guarded_tokens", "tokens_per_second", "speed_over_plain",
)  # fmt: skip
"""What `--json` prints of a generation as it is."""
STREAMED = ("max_new_tokens", "stop", "seed", "raw", "engine")  # fields of `DecodeOptions` that are options of `stream`
SHARED = ("default_rule", "name", "api_key", "allowed_host", "shadow")  # settings of our server that vLLM's takes, too
FLOATS = ("float32", "bfloat16", "float16")  # dtypes that vLLM has, too
TINTS = {"draft": "green", "judge": "black on yellow", "target": ""}
LEGEND = {
    "draft": "drafted, and the target's choice: saved a pass each",
    "judge": f"drafted, {GLOSSARY['judged']}",
    "target": "written by the target itself",
}


def generate(
    prompt: Annotated[str, typer.Argument(help="The user's message; - reads it from standard input.")],
    recipe: RecipeFolder = None,
    color: Annotated[bool, typer.Option("--color", help="Tint drafted tokens; a legend says how.")] = False,
    schema: Annotated[Path | None, typer.Option(help="File with a JSON schema: the answer is JSON that fits.")] = None,
    as_json: AsJson = False,
    *,
    models: AnsweringPair,
    request: RuleRequest,
    decode: DecodeOptions,
) -> None:
    """Answer one prompt, streaming.

    Example: selfjudge generate "Write a Python function that says whether a word is a palindrome." --color

    Example: selfjudge generate "Why does bread rise?" --rule judged --quality 0.9 --color

    Example: selfjudge generate "Who wrote Hamlet, and when?" --schema author.json"""
    if prompt == "-":
        try:
            prompt = sys.stdin.read()
        except (UnicodeDecodeError, AttributeError):  # None where it is closed
            raise SelfJudgeError("standard input holds no text in UTF-8") from None
    if not prompt.strip():
        raise SelfJudgeError(EMPTY_PROMPT)
    wanted = None if schema is None else read_json(schema)
    setup = Setup.of(recipe, models, request)
    setup.resolve(decode.sampling)
    request = setup.request.named(decode.sampling)
    pair = setup.load(needs_draft=request.gamma != 0)
    rule = request.resolve(pair, sampling=decode.sampling)
    load = LoadWatch()
    options = {name: getattr(decode, name) for name in STREAMED}
    answer = selfjudge.stream(pair, prompt, rule, gamma=request.gamma, schema=wanted, **options)
    _show(answer, color, quiet=as_json, longest=decode.max_new_tokens, on_cuda=pair.target.device.type == "cuda")
    result = answer.generation
    if as_json:
        dtypes = {"dtype": pair.dtype, "draft_dtype": selfjudge.PairEngines(pair, decode.engine).draft_dtype}
        named = {"pair": pair.name, "rule": request.text, "threshold": rule.theta, "price": rule.price}
        described = {
            "text": result.text,
            "token_ids": result.tokens,
            **{name: getattr(result, name) for name in FIGURES},
            "judged_tokens": [asdict(token) for token in result.judged_tokens],
            "seconds": dict(result.seconds),
            "gamma": "auto" if result.gamma is None else result.gamma,
        }
        print_json({**described, **named, **dtypes, "busy": load.describe()})
        return
    typer.echo()
    if color:
        _explain_colors(result)
    for line in describe_answer(result, load.describe()):
        typer.echo(line, err=True)


def _explain_colors(result: Generation) -> None:
    """A legend with the tokens of each colour, and what the target wanted where it was not followed."""
    console = Console(stderr=True, force_terminal=True, highlight=False, soft_wrap=True)
    for origin, meaning in LEGEND.items():
        if count := result.origins.count(origin):
            console.print(Text(f"{origin} {count:>4}", style=TINTS[origin]), Text(meaning))
    for token in result.judged_tokens:
        score = "" if token.score is None else f", the judge's score {token.score:.2f}"
        wanted = f"the target wanted {token.target_text!r} (p {token.target_probability:.2f})"
        typer.echo(f"token {token.index}: {token.text!r}, {wanted}{score}", err=True)


def describe_answer(result: Generation, busy: str = "") -> list[str]:
    """What an answer gained, in words: its speed, what a pass yielded, how much of it was drafted."""
    return fill_text("answer", result=result, glossary=GLOSSARY, busy=busy).splitlines()


def _show(answer: Stream, color: bool, quiet: bool, longest: int, on_cuda: bool) -> None:
    """Print the pieces as they come; when quiet, report only how many there are."""
    pieces = iter(answer)
    if quiet:
        with waiting("answering") as update, _watch(on_cuda, update):
            for count, _ in enumerate(pieces):
                update("answering", count / longest)
        return
    console = Console(force_terminal=True if color else None, highlight=False, soft_wrap=True)
    with waiting("reading the prompt …") as progress, _watch(on_cuda, progress):
        first = list(islice(pieces, 1 + on_cuda))  # the second comes from a cycle, whose kernels may be compiled first
    for piece in chain(first, pieces):
        if color:
            console.print(Text(piece.text, style=TINTS[piece.origin]), end="")
        else:
            sys.stdout.write(piece.text)
            sys.stdout.flush()


@contextmanager
def _watch(on_cuda: bool, progress: Progress) -> Iterator[None]:
    """Let the progress line say that a model is measured, or that kernels are compiled, where there are such."""
    with watch_measuring(progress), watch_compiling(progress) if on_cuda else nullcontext():
        yield


def serve(
    backend: Annotated[Literal["torch", "vllm"], typer.Option(help="Our own loop, or vLLM with our rules.")] = "torch",
    recipe: RecipeFolder = None,
    vllm: Annotated[str, typer.Option(help="Flags of vLLM's own: '--tensor-parallel-size 2'.")] = "",
    load: Annotated[int | None, typer.Option(help="Requests at a time: the row of a recipe.", min=1)] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 is any that is free.", min=0, max=65535)] = 8000,
    *,
    models: AnsweringPair,
    request: RuleRequest,
    config: ServerConfig,
) -> None:
    """Serve a pair over HTTP as OpenAI's API does: chat completions, completions, models, health, metrics.
    At / is a playground.

    Example: selfjudge serve --port 8000 --gpu-memory 0.9

    Example: selfjudge serve --pair smollm2-135m --rule margin --price 0.1

    Example: selfjudge serve --recipe tuned --load 8 --shadow 0.02

    Example: selfjudge serve --backend vllm --gamma 3"""
    key = os.environ.get("SELFJUDGE_API_KEY") if config.api_key is None else config.api_key
    setup = Setup.of(recipe, models, request, load)
    if setup.request.judge is not None:
        setup.models.check_judge(JudgeConfig.from_pretrained(setup.request.judge))
    own = replace(setup.request.named(), judge=None)
    config = replace(config, default_rule=own, api_key=key)
    config.check()
    config = replace(config, allowed_host=(*config.allowed_host, host))
    if config.shadow:
        monitor.watch(setup.recipe)  # refuses what cannot be watched
    if load is not None and setup.recipe is None:
        raise SelfJudgeError("`load` goes with --recipe")
    if backend == "vllm":
        _refuse_torch_options(setup.models, config)
        try:
            more = shlex.split(vllm)
        except ValueError as error:
            raise SelfJudgeError(f"`vllm` cannot be read: {first_line(error)}") from None
        _serve_vllm(setup, config, ["--host", host, "--port", str(port), *more])
        return
    if vllm:
        raise SelfJudgeError("`vllm` goes with --backend vllm")

    sampling = Sampling(config.temperature) if config.temperature and not own.kind.lossless else None
    replace(setup, request=setup.request if own.needs_judge else own).resolve(sampling)
    _serve_torch(setup, config, host, port)


def _serve_torch(setup: Setup, config: ServerConfig, host: str, port: int) -> None:
    """Load the models and answer with our own loop; an address that is not free is refused first."""
    listener = listen(host, port)
    pair = setup.load(needs_draft=setup.request.gamma != 0)
    source = setup.request.judge
    judge = pair.judge if source is None else selfjudge.Judge.from_pretrained(source)
    _say_result(setup.recipe)
    with ExitStack() as stack:
        progress = stack.enter_context(waiting("trying out an answer …"))
        stack.enter_context(_watch(pair.target.device.type == "cuda", progress))

        from selfjudge.integrations.server.run import serve as run
        from selfjudge.integrations.server.scheduler import start_scheduler

        def welcome(line: str) -> None:
            stack.close()
            if config.log_format == "json":
                logging.getLogger("selfjudge").info(line)
            else:
                typer.echo(line, err=True)

        scheduler = start_scheduler(pair, judge, config, setup.recipe, progress)
        run(scheduler, setup.recipe, listener, welcome)


def _refuse_torch_options(models: PairOptions, config: ServerConfig) -> None:
    """vLLM has flags of its own for what our loop takes here."""
    given = [f.name for f in fields(config) if f.name not in SHARED and getattr(config, f.name) != f.default]
    given += [name for name in ("device", "draft_dtype", "gpu_memory") if getattr(models, name) is not None]
    given += ["dtype"] if models.dtype in ("int8", "q4") else []
    if given:
        raise SelfJudgeError(f"`{given[0]}` goes with --backend torch")
    if len(config.keys) > 1:
        raise SelfJudgeError("`api_key` with several keys goes with --backend torch")


def _serve_vllm(setup: Setup, config: ServerConfig, more: list[str]) -> None:
    """Become vLLM's server with our worker in it; its key travels by the environment, where others do not see it."""
    from selfjudge.integrations.vllm import shadow  # imports asyncio

    models, own, recipe, gamma = setup.models, setup.request.named(), setup.recipe, setup.request.gamma
    if gamma == 0 and recipe is not None:
        raise SelfJudgeError(f"{recipe.folder} decodes plainly (γ 0): serve it without --backend vllm")
    if not isinstance(gamma, int):  # the default, or as many drafts as the rule needs
        gamma = max(default_gamma("cuda"), setup.resolve().matches_needed + 1)
    models.announce()
    flags = ["--middleware", playground.MIDDLEWARE]
    if recipe is not None:
        models = _check_recipe(recipe, models)
        _say_result(recipe)
        if config.shadow:
            settings = {"recipe": str(recipe.folder.absolute()), "load": recipe.content["load"], "share": config.shadow}
            os.environ[shadow.VARIABLE] = json.dumps(settings)
            flags += ["--middleware", shadow.MIDDLEWARE]
    # the last one is asked first; vLLM lets pages of all origins ask it, unless told otherwise
    flags += ["--middleware", asgi.HOST_GUARD, "--allowed-origins", "[]"]
    flags += ["--served-model-name", config.name] if config.name else []
    flags += ["--dtype", models.dtype] if models.dtype else []
    os.environ[asgi.HOSTS_VARIABLE] = json.dumps(config.allowed_host)
    arguments = vllm_server.command(models.name, models.draft, own, gamma=gamma, more=[*flags, *more])
    facts = {
        "backend": "vllm",
        "rule": own.text,
        "theta": own.theta,
        "price": own.price,
        "gamma": gamma,
        "judge": bool(own.judge or shipped_judge(models.name)),
        "uses_judge": own.needs_judge,
        "recipe": None if recipe is None else playground.describe(recipe),
    }
    os.environ[playground.FACTS] = json.dumps(facts)
    if config.api_key:
        os.environ["VLLM_API_KEY"] = config.api_key
    vllm_server.main(arguments)


def _say_result(recipe: Recipe | None) -> None:
    """What its certificate says, once the models are known to be the recipe's."""
    if recipe is not None:
        one = len(recipe.loads) == 1
        typer.echo(f"{recipe.folder}: {(describe_result if one else describe_by_load)(recipe.certificate)}", err=True)
        if not one:
            typer.echo(f"it also has rows for --load {', '.join(map(str, recipe.loads[1:]))}", err=True)


def _check_recipe(recipe: Recipe, models: PairOptions) -> PairOptions:
    """The models in the recipe's dtype, if vLLM has it and no other is asked for. Other models or another tokenizer
    than the recipe's are refused; it is said where it was not certified with vLLM, or with another dtype."""
    draft = draft_for(models.name, models.draft)
    recipe.check_models(target=(models.name, weights_sha256(models.name)), draft=(draft, weights_sha256(draft)))

    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(served_reference(models.name), trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise SelfJudgeError(f"the tokenizer of {models.name} cannot be read: {first_line(error)}") from None
    recipe.check_tokenizer(tokenizer)
    if (engine := recipe.content["engine"]) != "vllm":
        warn(f"{recipe.folder} was certified with the engine {engine}, this is vllm: not covered by it")
    certified = str(recipe.content["dtype"])
    dtype = models.dtype or (certified if certified in FLOATS else None)
    recipe.check_dtype(dtype or "the checkpoint's", warn)
    return replace(models, dtype=dtype)
