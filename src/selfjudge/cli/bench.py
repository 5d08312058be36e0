"""`selfjudge bench` and `selfjudge demo`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from selfjudge.bench.config import DecodeBenchConfig, DemoConfig
from selfjudge.cli.groups import PairOptions, RecipeFolder, Setup
from selfjudge.cli.options import AsJson, config_options
from selfjudge.cli.output import Progress, figure, print_json, print_rows, warn
from selfjudge.decoding.rule_parser import OPEN_REQUEST, RuleRequest
from selfjudge.store import check_page, describe_machine, write_text
from selfjudge.types import PHASES, Notify

if TYPE_CHECKING:
    from selfjudge.models.pair import Pair

Say = Callable[[str], None]
NOTES = """m = tokens per target pass; judged = share of tokens accepted against the target's choice.
same start = how much of an answer comes before its first token that differs from plain decoding's.
log-likelihood = how likely the target finds the answer, per token.
The judges' thresholds reject {quality:.0%} of bad substitutions (--quality {quality})."""
COLUMNS = {
    "γ": ("gamma", ""),
    "m": ("mean_accepted_length", ".2f"),
    "judged": ("judged_share", ".1%"),
    "tokens/s": ("tokens_per_second", ".1f"),
    "× plain": ("speed_over_plain", ".2f"),
    "same start": ("same_start_as_plain", ".0%"),
    "log-likelihood": ("log_likelihood", ".3f"),
}
"""What the demo's table shows after the rule: a row's figures, and their formats."""


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
    from selfjudge.prompts.builtin import BUILT_IN
    from selfjudge.prompts.sources import read_prompts

    questions = read_prompts(prompts) if prompts else [text for _, text in BUILT_IN]
    setup = Setup.of(recipe, models, request)
    models = setup.models
    wanted = setup.request != OPEN_REQUEST or (judged and models.shipped_judge)
    if wanted and setup.recipe is None:
        setup = replace(setup, request=replace(request, rule="judged"))
    if wanted:
        setup.check()
    if setup.request.gamma is not None:
        config = replace(config, gammas=(setup.request.gamma,))
    pair = setup.load()
    full = models.load(full_precision=True) if config.peers and pair.dtype == "q4" and models.dtype is None else None

    from selfjudge.bench.decode import bench_decode

    name = "judged" if setup.recipe is None else "recipe"
    rules = {name: setup.request.resolve(pair)} if wanted else {}
    with Progress() as progress:
        result = bench_decode(pair, questions[:limit], config, rules, full=full, notify=progress)
    print_json(result) if as_json else _show(result)


def _show(result: dict[str, Any]) -> None:
    typer.echo(
        f"{result['pair']}, {result['device']}, {result['dtype']} (our draft {result['draft_dtype']}),"
        f" batch 1, {result['prompts']} prompts of"
        f" {result['max_new_tokens']} new tokens, {result['repeats']} repeats; {describe_machine(result)}"
    )
    print_rows(
        [
            {
                "name": r["name"],
                "γ": r["gamma"],
                "dtype": r["dtype"],
                "tokens/s": f"{r['tokens_per_second']:.1f}",
                f"× {result['baseline']}": f"{r['ratio_to_plain']:.2f} ({r['spread'][0]:.2f}–{r['spread'][1]:.2f})",
                "drafts a cycle": figure(r["gamma_mean"], ".1f"),
                "m": figure(r["mean_accepted_length"], ".2f"),
                "same tokens": f"{r['identical_to_plain']:.0%}",
                "draft / target / judge / rule, s": " / ".join(
                    f"{r['seconds'][p]:.1f}" for p in PHASES if p in r["seconds"]
                ),
                "judge's share": figure(r["judge_time_share"], ".2%"),
            }
            for r in result["runs"]
        ]
    )
    gamma = result["best"]["gamma"]
    for peer, ratio in result["best"]["exact_over"].items():
        typer.echo(f"exact (γ={gamma['selfjudge-exact']}) is {ratio:.2f} × {peer} (γ={gamma[peer]})")


@config_options(DemoConfig)
def demo(
    out: Annotated[Path, typer.Option(help="HTML page that is written.")] = Path("demo.html"),
    as_json: AsJson = False,
    *,
    config: DemoConfig,
) -> None:
    """The whole line on the embedded pair: labels, a judge, plain, exact, topk and judged side by side, a small tune.

    Example: selfjudge demo --limit 4

    Example: selfjudge demo --quick
    """
    check_page(out)
    config = config.as_asked
    models = PairOptions()
    pair = models.load()
    full = models.load(full_precision=True) if pair.dtype == "q4" and not config.quick else pair

    from selfjudge.bench.demo import SHIPPED, Demo, in_floats
    from selfjudge.judge.model import Judge

    with Progress(patient=True) as progress, tempfile.TemporaryDirectory() as folder:
        if full.dtype == "q4":
            progress("reading the weights as floats, for log-likelihoods")
            full = in_floats(pair)
        run = Demo(pair, full, config, progress)
        say = (lambda text: None) if as_json else progress.print
        try:
            if config.labels:
                run.make_judge(Path(folder))
                _show_own(run.result["own"], say)
            if models.shipped_judge:
                run.judges[SHIPPED] = Judge.from_pretrained(models.shipped_judge)
            for row in run.rows():
                _show_row(row, say, heading=len(run.result["rows"]) == 1)
            if config.tune:
                tuned = run.result["tune"] = _tune(pair, Path(folder), progress)
                may = f"at most {100 * tuned['epsilon']:.0f} points of agreement with exact may be lost"
                say(f"a small tune, {tuned['n']} prompts, {may}: {tuned['finding']}")
        except KeyboardInterrupt:
            progress.hide()
            warn("interrupted; this is what was done until then")
            _finish(run.result, out, as_json)
            raise
        progress.hide()
        _finish(run.result, out, as_json)


def _tune(pair: Pair, folder: Path, notify: Notify) -> dict[str, Any]:
    """A tune so small that it ends within half a minute: what it found, and what it claims."""
    from selfjudge.report.certificate import describe_claim, describe_result
    from selfjudge.tune.config import TuneConfig
    from selfjudge.tune.pipeline import tune_pair

    config = TuneConfig(
        tasks=("arithmetic",), limit=24, epsilon=0.3, families=("margin",), measure="overlap", max_new_tokens=24,
        times=False, minutes=0.5, examples=0,
    )  # fmt: skip
    found = tune_pair(pair, folder / "tuned", config, notify=notify).certificate
    said = {"finding": describe_result(found), "claim": describe_claim(found)}
    return {**said, "n": found["n"], "epsilon": config.epsilon}


def _show_own(own: dict[str, Any], say: Say) -> None:
    """Print what labelling and training gave, as soon as it is known."""
    if own.get("labels"):
        say(
            f"{own['labels']} labels from the target's own likelihoods in {own['label_seconds']:.0f} s,"
            f" {own['acceptable']:.0%} acceptable (τ = {own['tau']:.2f})"
        )
    if "why_not" in own:
        say(f"no judge from so few labels: {own['why_not']}")
    elif "auc" in own:
        say(
            f"a judge from them in {own['train_seconds']:.1f} s, ROC-AUC {own['auc']:.2f}"
            f" on {own['auc_of']} mismatches of other prompts"
        )


def _show_row(row: dict[str, Any], say: Say, heading: bool) -> None:
    """Print a line of the table, as soon as it is known."""
    cells = [figure(row[name], form, "–") for name, form in COLUMNS.values()]
    for first, others in (("rule", COLUMNS), (row["rule"], cells)) if heading else ((row["rule"], cells),):
        widths = (max(len(title), 4) + 3 for title in COLUMNS)
        say(f"{first:<22}" + "".join(f"{cell:>{width}}" for cell, width in zip(others, widths, strict=True)))


def _finish(result: dict[str, Any], out: Path, as_json: bool) -> None:
    """Write the page, and print the notes below the table; also after Ctrl-C."""
    if rows := result["rows"]:
        from selfjudge.report.demo import demo_page

        write_text(out, demo_page(result))
    if as_json:
        print_json(result)
    elif rows:
        typer.echo(f"\n> {result['prompt']}\n\n({rows[-1]['rule']})\n{rows[-1]['example']}\n")
        typer.echo(NOTES.format(quality=result["quality"]))
        if result["substitutions"]:
            pairs = [f"{b!r} for {a!r}" + (f" ({n} ×)" if n > 1 else "") for a, b, n in result["substitutions"][:8]]
            typer.echo(f"accepted by the judge: {', '.join(pairs)}")
        typer.echo(f"the same as a page: {out}")
