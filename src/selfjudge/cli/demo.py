"""`selfjudge demo`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selfjudge.bench.config import DemoConfig
from selfjudge.cli.groups import PairOptions
from selfjudge.cli.options import AsJson, config_options
from selfjudge.cli.output import Progress, figure, print_json, warn
from selfjudge.store import check_page, write_text
from selfjudge.types import Notify

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
"""What the table shows after the rule: a row's figures, and their formats."""


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
        run = Demo(pair, config, progress, whole=full)
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
    return {
        "finding": describe_result(found),
        "claim": describe_claim(found),
        "n": found["n"],
        "epsilon": config.epsilon,
    }


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
