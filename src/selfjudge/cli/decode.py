"""`selfjudge generate`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from itertools import chain, islice
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from selfjudge.cli.groups import DecodeOptions, PairOptions, RecipeFolder, Setup
from selfjudge.cli.options import AsJson, config_options
from selfjudge.cli.output import Progress, figure, print_json, waiting
from selfjudge.decoding.rule_parser import RuleRequest
from selfjudge.errors import EMPTY_PROMPT, SelfJudgeError

if TYPE_CHECKING:
    from selfjudge.decoding.text import Stream

FIGURES = (
    "origins", "finish", "cycles", "gamma_mean", "mean_accepted_length", "drafts_accepted", "judged_share",
    "tokens_per_second",
)  # fmt: skip
"""What `--json` prints of a generation as it is."""
TINTS = {"draft": "", "judge": "black on green", "target": "blue"}


@config_options(DecodeOptions, "decode")
@config_options(RuleRequest, "request")
@config_options(PairOptions, "models")
def generate(
    prompt: Annotated[str, typer.Argument(help="The user's message; - reads it from standard input.")],
    recipe: RecipeFolder = None,
    color: Annotated[
        bool, typer.Option("--color", help="Tint tokens: plain = draft, green = judge, blue = target.")
    ] = False,
    as_json: AsJson = False,
    *,
    models: PairOptions,
    request: RuleRequest,
    decode: DecodeOptions,
) -> None:
    """Answer one prompt, streaming.

    Example: selfjudge generate "Why is the sky blue?" --rule margin --price 0.1 --gamma 4 --color
    """
    if prompt == "-":
        prompt = sys.stdin.read()
    if not prompt.strip():
        raise SelfJudgeError(EMPTY_PROMPT)
    setup = Setup.of(recipe, models, request)
    setup.check(decode.sampling)
    request = setup.request.named(decode.sampling)
    pair = setup.load(needs_draft=request.gamma != 0)

    from selfjudge.decoding.text import stream
    from selfjudge.engine.select import PairEngines

    rule = request.resolve(pair, sampling=decode.sampling)
    gamma = rule.default_gamma(pair.target.device.type) if request.gamma is None else request.gamma
    answer = stream(
        pair,
        prompt,
        rule,
        gamma=gamma,
        max_new_tokens=decode.max_new_tokens,
        stop=decode.stop,
        seed=decode.seed,
        raw=decode.raw,
        engine=decode.engine,
    )
    _show(answer, color, quiet=as_json, longest=decode.max_new_tokens)
    result = answer.generation
    if as_json:
        draft_dtype = PairEngines(pair, decode.engine).draft_dtype
        print_json(
            {
                "text": result.text,
                "token_ids": result.tokens,
                **{name: getattr(result, name) for name in FIGURES},
                "judged_tokens": [asdict(token) for token in result.judged_tokens],
                "seconds": dict(result.seconds),
                "threshold": rule.theta,
                "price": rule.price,
                "pair": pair.name,
                "dtype": pair.dtype,
                "draft_dtype": draft_dtype,
                "rule": request.text,
                "gamma": gamma,
            }
        )
        return
    typer.echo()
    for token in result.judged_tokens if color else ():
        score = "" if token.score is None else f", the judge's score {token.score:.2f}"
        wanted = f"the target wanted {token.target_text!r} (p {token.target_probability:.2f})"
        typer.echo(f"token {token.index}: {token.text!r}, {wanted}{score}", err=True)
    typer.echo(
        f"{len(result.tokens)} tokens, m = {figure(result.mean_accepted_length, '.2f', '–')},"
        f" γ = {figure(result.gamma_mean, '.1f', '–')},"
        f" {result.judged_share:.0%} accepted against the target's choice, {result.tokens_per_second:.1f} tokens/s"
        + ("; cut off at --max-new-tokens" if result.finish == "length" else ""),
        err=True,
    )


def _show(answer: Stream, color: bool, quiet: bool, longest: int) -> None:
    """Print the pieces as they come; when quiet, report only how many there are."""
    pieces = iter(answer)
    if quiet:
        with Progress(patient=True) as update:
            update("answering", 0.0)
            for count, _ in enumerate(pieces):
                update("answering", count / longest)
        return
    console = Console(force_terminal=True if color else None, highlight=False, soft_wrap=True)
    with waiting("reading the prompt …"):
        first = list(islice(pieces, 1))
    for piece in chain(first, pieces):
        if color:
            console.print(Text(piece.text, style=TINTS[piece.origin]), end="")
        else:
            sys.stdout.write(piece.text)
            sys.stdout.flush()
