"""`selfjudge bench`, and `selfjudge demo`: the gain on one question, then the whole line on the small pair."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import selfjudge
from selfjudge.bench.config import DecodeBenchConfig, DemoConfig
from selfjudge.cli import options
from selfjudge.cli.options import SMALL, AnsweringPair, AsJson, Options, PairOptions, RecipeFolder, Result, Setup
from selfjudge.cli.output import Progress, fill_text, print_json, print_rows, print_text, warn
from selfjudge.decoding.rule_parser import OPEN_REQUEST, RuleRequest
from selfjudge.errors import SelfJudgeError
from selfjudge.models.catalogue import EMBEDDED
from selfjudge.prompts.sources import BUILT_IN, read_prompts
from selfjudge.report.demo import COLUMNS, demo_page, describe_gain, describe_next, gain_table, mark_substitutions
from selfjudge.store import check_page, describe_machine, write_text
from selfjudge.types import GLOSSARY, PHASES, explain

SLOW = 300  # seconds that the question may still take before a shorter way is suggested
HEADS = ("rule", "γ", "m", "judged", "tokens/s", "× plain", "same start")
"""Short heads of the page's columns (`report.demo.COLUMNS`): lines of a terminal are short."""


def bench(
    what: Annotated[Literal["decode"], typer.Argument(help="What is measured.")] = "decode",
    judged: Annotated[bool, typer.Option(help="Time the judge as well, where one ships for the pair.")] = True,
    prompts: Annotated[Path | None, typer.Option(help="Prompts file (jsonl); built-in ones if not given.")] = None,
    limit: Annotated[int, typer.Option(help="Maximum number of prompts.", min=1)] = 8,
    recipe: RecipeFolder = None,
    *,
    models: PairOptions,
    request: Annotated[RuleRequest, Options(without=("rule", "gamma"))],
    config: DecodeBenchConfig,
) -> Result:
    """Time transformers (plain, assisted) and our loop (γ = 0, exact, judged) on the same prompts, in one run.

    Example: selfjudge bench decode --gammas 2,4 --limit 4 --json"""
    questions = read_prompts(prompts) if prompts else [text for _, text in BUILT_IN]
    if recipe is not None and config.gammas != DecodeBenchConfig.gammas:
        raise SelfJudgeError(options.RECIPE_IS_COMPLETE)
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
    yield result
    words = {"where": describe_machine(result), "glossary": GLOSSARY, "phases": PHASES}
    print_text("bench", **result, **words)


def demo(
    out: Annotated[Path, typer.Option(help="HTML page that is written.")] = Path("demo.html"),
    as_json: AsJson = False,
    *,
    config: DemoConfig,
) -> None:
    """What speculation gains on one question, plain and exact by turns; then the whole line on the small pair: labels,
    a judge, plain, exact, topk and judged side by side.

    Example: selfjudge demo

    Example: selfjudge demo --small --quick"""
    check_page(out)
    config = config.as_asked
    large = AnsweringPair()
    large.check()
    result: dict[str, Any] = {"rows": []}
    alone = config.small or large.name == SMALL
    names = [SMALL] if alone else [large.name, SMALL]
    models = [options.describe_size(name) if name in EMBEDDED else name for name in names]
    try:
        with redirect_stdout(io.StringIO()) if as_json else nullcontext():
            print_text("demo-takes", models=models, alone=alone, quick=config.quick)
            if not alone:
                _show_gain(replace(large, pair=large.name), config, result)
            _show_line(config, result)
    except KeyboardInterrupt:
        warn("interrupted; this is what was done until then")
        _finish(result, out, as_json)
        raise
    _finish(result, out, as_json)


def _show_gain(models: PairOptions, config: DemoConfig, result: dict[str, Any]) -> None:
    """Answer one question plainly, under `exact` and relaxed, by turns."""
    pair = models.load()

    from selfjudge.bench.demo import answer_question

    with Progress(patient=True) as progress:
        gain = answer_question(pair, config, progress)
        result["gain"] = gain.result
        progress.print(f"\nWhat speculation gains: {pair.name}, {pair.dtype}, one question by turns\n")
        progress.print(f"> {gain.result['prompt']}\n")
        for turn, name, spent in gain.measure():
            plain = 0.0 if name == "plain" else gain.turns.seconds["plain"][-1]
            faster = f", {plain / spent:.1f} × as fast as plain" if plain else ""
            progress.print(f"turn {turn}: {name} {spent:.1f} s{faster}")
            if turn == 1 and not plain and (left := spent * (config.turns * len(gain.rules) - 1)) > SLOW:
                quick = "" if config.quick else ", and --quick takes less than half as long"
                more = f"up to {left / 60:.0f} min more for this question"
                progress.print(f"this is slow here: {more}. Ctrl-C keeps what is done{quick}")
    table, rows = gain_table(gain.result), gain.result["rows"]
    typer.echo(f"\n{rows[0]['example'].strip()}\n")
    print_rows([{column.head: column.text(row) for column in table.columns} for row in table.rows])
    typer.echo(table.note)
    if gain.result["busy"]:
        typer.echo(gain.result["busy"])
    if rows[-1]["judged"]:
        typer.echo(f"\n{rows[-1]['rule']}, with [accepted|what the target wanted]:\n")
        typer.echo(mark_substitutions(rows[-1]["tokens"]).strip())


def _show_line(config: DemoConfig, result: dict[str, Any]) -> None:
    """Labels, a judge and rules side by side on the small pair."""
    models = PairOptions(pair=SMALL)
    pair = models.load()
    full = models.load(full_precision=True) if pair.dtype == "q4" and config.labels else pair

    from selfjudge.bench.demo import OWN, QUALITY, SHIPPED, compare_judges, make_judge

    judges: dict[str, selfjudge.Judge] = {}
    with Progress(patient=True) as progress, tempfile.TemporaryDirectory() as folder:
        say = progress.print
        say(f"\nHow a judge is made and compared. {pair.name} is so small that there is little to gain with it.")
        if config.labels:
            say(f"\nA judge of your own: {pair.name} labels its own drafts\n")
            judge, result["own"] = make_judge(full, Path(folder), config.limit, progress)
            judges |= {OWN: judge} if judge is not None else {}
            say(fill_text("demo-own", own=result["own"]))
        if models.shipped_judge:
            judges[SHIPPED] = selfjudge.Judge.from_pretrained(models.shipped_judge)
        rules = compare_judges(pair, judges, config, progress)
        result |= rules.result | {"quality": QUALITY}
        rules.result = result
        say(f"\nRules side by side: {pair.name}, {len(rules.prompts)} prompts\n{_line(HEADS)}")
        for _ in rules.measure():
            say(_line([column.show(result["rows"][-1]) for column in COLUMNS]))
        say(fill_text("demo-notes", explained=explain("m", "γ", "judged"), quality=QUALITY))
        if result["busy"]:
            say(result["busy"])


def _line(cells: Sequence[str]) -> str:
    """A line of the table, whose rows are printed as soon as they are known."""
    widths = (max(len(head), 4) + 3 for head in HEADS[1:])
    return f"{cells[0]:<22}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells[1:], widths, strict=True))


def _finish(result: dict[str, Any], out: Path, as_json: bool) -> None:
    """Write the page, and print what was gained, what it cost and what comes next; also after Ctrl-C."""
    if any_rows := result["rows"] or result.get("gain", {}).get("rows"):
        write_text(out, demo_page(result))
    if as_json:
        print_json(result)
    elif any_rows:
        typer.echo(f"the same as a page: {out}\n")
        for sentence in (*describe_gain(result), describe_next(result)):
            typer.echo(sentence)
