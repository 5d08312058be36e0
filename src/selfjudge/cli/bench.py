"""`selfjudge bench`, and `selfjudge demo`: the gain on one question, then the whole line on the small pair."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from selfjudge.bench.config import DecodeBenchConfig, DemoConfig
from selfjudge.cli.groups import SMALL, AnsweringPair, PairOptions, RecipeFolder, Setup, describe_size
from selfjudge.cli.options import AsJson, config_options
from selfjudge.cli.output import Progress, figure, fill_text, print_json, print_rows, print_text, warn
from selfjudge.decoding.rule_parser import OPEN_REQUEST, RuleRequest
from selfjudge.models.catalogue import EMBEDDED
from selfjudge.store import check_page, describe_machine, write_text
from selfjudge.types import GLOSSARY, PHASES, Notify, explain

if TYPE_CHECKING:
    from selfjudge.models.pair import Pair

Say = Callable[[str], None]
SLOW = 300  # seconds that the question may still take before a shorter way is suggested
HEADS = ("rule", "γ", "m", "judged", "tokens/s", "× plain", "same start")
"""Short heads of the page's columns (`report.demo.COLUMNS`): lines of a terminal are short."""


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


@config_options(DemoConfig)
def demo(
    out: Annotated[Path, typer.Option(help="HTML page that is written.")] = Path("demo.html"),
    as_json: AsJson = False,
    *,
    config: DemoConfig,
) -> None:
    """What speculation gains on one question, plain and exact by turns; then the whole line on the small pair: labels,
    a judge, plain, exact, topk and judged side by side, a small tune.

    Example: selfjudge demo

    Example: selfjudge demo --small --quick
    """
    check_page(out)
    config = config.as_asked
    large = AnsweringPair()
    large.check()
    result: dict[str, Any] = {"rows": [], "substitutions": []}
    say: Say = nothing if as_json else typer.echo
    try:
        alone = config.small or large.name == SMALL
        models = [describe_size(name) if name in EMBEDDED else name for name in dict.fromkeys((large.name, SMALL))]
        say(fill_text("demo-takes", models=models[-1:] if alone else models, alone=alone, quick=config.quick))
        if not alone:
            _show_gain(replace(large, pair=large.name), config, result, say)
        _show_line(config, result, say)
    except KeyboardInterrupt:
        warn("interrupted; this is what was done until then")
        _finish(result, out, as_json)
        raise
    _finish(result, out, as_json)


def nothing(text: str) -> None:
    """Print nothing: the result is wanted as JSON."""


def _show_gain(models: PairOptions, config: DemoConfig, result: dict[str, Any], say: Say) -> None:
    """Answer one question plainly, under `exact` and relaxed, by turns."""
    pair = models.load()

    from selfjudge.bench.demo import Gain

    with Progress(patient=True) as progress:
        gain = Gain(pair, config, progress)
        result["gain"] = gain.result
        say(f"\nWhat speculation gains: {pair.name}, {pair.dtype}, one question by turns\n")
        say(f"> {gain.result['prompt']}\n")
        for turn, name, spent in gain.measure():
            progress.hide()
            plain = 0.0 if name == "plain" else gain.seconds["plain"][-1]
            say(f"turn {turn}: {name} {spent:.1f} s" + (f", {plain / spent:.1f} × as fast as plain" if plain else ""))
            if turn == 1 and not plain and (left := spent * (config.turns * len(gain.rules) - 1)) > SLOW:
                quick = "" if config.quick else ", and --quick takes less than half as long"
                more = f"up to {left / 60:.0f} min more for this question"
                say(f"this is slow here: {more}. Ctrl-C keeps what is done{quick}")
    if say is not nothing:
        _print_gain(gain.result)


def _print_gain(gain: dict[str, Any]) -> None:
    from selfjudge.report.demo import gain_table, mark_substitutions

    table, rows = gain_table(gain), gain["rows"]
    typer.echo(f"\n{rows[0]['example'].strip()}\n")
    print_rows([{column.head: column.text(row) for column in table.columns} for row in table.rows])
    typer.echo(table.note)
    if gain["busy"]:
        typer.echo(gain["busy"])
    if rows[-1]["judged"]:
        typer.echo(f"\n{rows[-1]['rule']}, with [accepted|what the target wanted]:\n")
        typer.echo(mark_substitutions(rows[-1]["tokens"]).strip())


def _show_line(config: DemoConfig, result: dict[str, Any], say: Say) -> None:
    """Labels, a judge, rules side by side and a small tune on the small pair."""
    models = PairOptions(pair=SMALL)
    pair = models.load()
    full = models.load(full_precision=True) if pair.dtype == "q4" and config.labels else pair

    from selfjudge.bench.demo import SHIPPED, Demo
    from selfjudge.judge.model import Judge

    with Progress(patient=True) as progress, tempfile.TemporaryDirectory() as folder:
        run = Demo(pair, full, config, progress)
        result |= run.result
        run.result = result
        say = say if say is nothing else progress.print
        say(f"\nHow a judge is made and compared. {pair.name} is so small that there is little to gain with it.")
        if config.labels:
            say(f"\nA judge of your own: {pair.name} labels its own drafts\n")
            run.make_judge(Path(folder))
            say(fill_text("demo-own", own=result["own"]))
        if models.shipped_judge:
            run.judges[SHIPPED] = Judge.from_pretrained(models.shipped_judge)
        say(f"\nRules side by side: {pair.name}, {len(run.prompts)} prompts\n")
        for row in run.rows():
            _show_row(row, say, heading=len(result["rows"]) == 1)
        say(fill_text("demo-notes", explained=explain("m", "γ", "judged"), quality=result["quality"]))
        if busy := next((row["busy"] for row in result["rows"] if row["busy"]), ""):
            say(busy)
        if config.tune:
            tuned = result["tune"] = _tune(pair, Path(folder), progress)
            may = f"at most {100 * tuned['epsilon']:.0f} points of agreement with exact may be lost"
            say(f"\nA small tune, {tuned['n']} prompts, {may}: {tuned['finding']}")


def _tune(pair: Pair, folder: Path, notify: Notify) -> dict[str, Any]:
    """A tune so small that it ends within half a minute: what it found, and what it claims."""
    from selfjudge.report.certificate import describe_claim, describe_result
    from selfjudge.tune.config import TuneConfig
    from selfjudge.tune.pipeline import tune_pair

    config = TuneConfig(
        tasks=("arithmetic",), limit=24, epsilon=0.3, families=("margin",), measure="overlap", max_new_tokens=24,
        times=False, minutes=0.5, examples=0,
    )  # fmt: skip
    with _ledger_in(folder):
        found = tune_pair(pair, folder / "tuned", config, notify=notify).certificate
    said = {"finding": describe_result(found), "claim": describe_claim(found)}
    return {**said, "n": found["n"], "epsilon": config.epsilon}


@contextmanager
def _ledger_in(folder: Path) -> Iterator[None]:
    """Attempts are noted in this folder: the demo's must not count as one of the user's."""
    name = "SELFJUDGE_LEDGER"
    before, os.environ[name] = os.environ.get(name, ""), str(folder / "attempts.jsonl")
    try:
        yield
    finally:
        os.environ[name] = before  # empty is as if it were not set


def _show_row(row: dict[str, Any], say: Say, heading: bool) -> None:
    """Print a line of the table, as soon as it is known; speeds of a busy machine are left out."""
    from selfjudge.report.demo import COLUMNS

    cells = [column.show(row) for column in COLUMNS]
    for rule, *others in (HEADS, cells) if heading else (cells,):
        widths = (max(len(head), 4) + 3 for head in HEADS[1:])
        say(f"{rule:<22}" + "".join(f"{cell:>{width}}" for cell, width in zip(others, widths, strict=True)))


def _finish(result: dict[str, Any], out: Path, as_json: bool) -> None:
    """Write the page, and print what was gained, what it cost and what comes next; also after Ctrl-C."""
    from selfjudge.report.demo import demo_page, describe_next, describe_result

    if any_rows := result["rows"] or result.get("gain", {}).get("rows"):
        write_text(out, demo_page(result))
    if as_json:
        print_json(result)
    elif any_rows:
        if result["substitutions"]:
            pairs = [f"{b!r} for {a!r}" + (f" ({n} ×)" if n > 1 else "") for a, b, n in result["substitutions"][:8]]
            typer.echo(f"accepted by the shipped judge of {SMALL}: {', '.join(pairs)}")
        typer.echo(f"the same as a page: {out}\n")
        for sentence in (*describe_result(result), describe_next(result)):
            typer.echo(sentence)
