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

if TYPE_CHECKING:
    from selfjudge.models.pair import Pair

Say = Callable[[str], None]
COLUMNS = ("rule", "γ", "m", "judged", "tokens/s", "× plain", "same start", "log-likelihood")


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
    whole = models.load(full_precision=True) if pair.dtype == "q4" and not config.quick else pair

    from selfjudge.bench.demo import SHIPPED, Demo, in_floats
    from selfjudge.judge.model import Judge

    with Progress(patient=True) as line, tempfile.TemporaryDirectory() as folder:
        if whole.dtype == "q4":
            line("reading the weights as floats, for log-likelihoods …")
            whole = in_floats(pair)
        run = Demo(pair, config, line, whole=whole)
        say = (lambda text: None) if as_json else line.print
        try:
            if config.labels:
                line("labels and a small judge …")
                run.make_judge(Path(folder))
                _show_own(run.result["own"], say)
            if models.shipped_judge:
                run.judges[SHIPPED] = Judge.from_pretrained(models.shipped_judge)
            for row in run.rows():
                _show_row(row, say, heading=len(run.result["rows"]) == 1)
            if config.tune:
                run.result["tune"] = _tune(pair, Path(folder), line)
                tuned = run.result["tune"]
                may = f"at most {100 * tuned['epsilon']:.0f} points of agreement with exact may be lost"
                say(f"a small tune, {tuned['n']} prompts, {may}: {tuned['finding']}")
        except KeyboardInterrupt:
            line.hide()
            warn("interrupted; this is what was done until then")
            _finish(run.result, out, as_json)
            raise
        line.hide()
        _finish(run.result, out, as_json)


def _tune(pair: Pair, folder: Path, line: Say) -> dict[str, Any]:
    """A tune so small that it ends within half a minute: what it found, and what it claims."""
    from selfjudge.report.certificate import claim, finding
    from selfjudge.tune.config import TuneConfig
    from selfjudge.tune.pipeline import tune_pair

    config = TuneConfig(
        tasks=("arithmetic",), limit=24, epsilon=0.3, families=("margin",), measure="overlap", max_new_tokens=24,
        times=False, minutes=0.5, examples=0,
    )  # fmt: skip
    certificate = tune_pair(
        pair, folder / "tuned", config, notify=lambda stage, share: line(f"tune: {stage} …")
    ).certificate
    return {
        "finding": finding(certificate),
        "claim": claim(certificate),
        "n": certificate["n"],
        "epsilon": config.epsilon,
    }


def _show_own(own: dict[str, Any], say: Say) -> None:
    """What labelling and training gave, as soon as it is there."""
    if own.get("labels"):
        say(
            f"{own['labels']} labels from the target's own likelihoods in {own['label_seconds']:.0f} s,"
            f" {own['acceptable']:.0%} acceptable (τ = {own['tau']:.2f})"
        )
    if "why_not" in own:
        say(f"no judge from so few: {own['why_not']}")
    elif "auc" in own:
        say(
            f"a judge from them in {own['train_seconds']:.1f} s, ROC-AUC {own['auc']:.2f}"
            f" on {own['auc_of']} mismatches of other prompts"
        )


def _show_row(row: dict[str, Any], say: Say, heading: bool) -> None:
    """A line of the table, as soon as it is there."""
    cells = (
        row["rule"],
        str(row["gamma"]),
        figure(row["mean_accepted_length"], ".2f", "–"),
        f"{row['judged_share']:.1%}",
        f"{row['tokens_per_second']:.1f}",
        f"{row['speed_over_plain']:.2f}",
        f"{row['same_start_as_plain']:.0%}",
        f"{row['log_likelihood']:.3f}",
    )
    for line in (COLUMNS, cells) if heading else (cells,):
        say(
            f"{line[0]:<22}"
            + "".join(f"{cell:>{max(len(name), 4) + 3}}" for name, cell in zip(COLUMNS[1:], line[1:], strict=True))
        )


def _finish(result: dict[str, Any], out: Path, as_json: bool) -> None:
    """The page, and what stands below the table: of what there is, also after Ctrl-C."""
    if result["rows"]:
        from selfjudge.report.demo import demo_page

        write_text(out, demo_page(result))
    if as_json:
        print_json(result)
    elif result["rows"]:
        _show_notes(result)
        typer.echo(f"the same as a page: {out}")


def _show_notes(result: dict[str, Any]) -> None:
    """An answer, and what the columns mean."""
    rows = result["rows"]
    typer.echo(f"\n> {result['prompt']}\n\n({rows[-1]['rule']})\n{rows[-1]['example']}\n")
    typer.echo("m = tokens per target pass; judged = tokens taken against the target's choice.")
    typer.echo(
        "same start = how much of an answer comes before its first token that differs from plain decoding's."
        " From there it goes its own way; log-likelihood says how the target rates it."
    )
    typer.echo(
        f"The judges' thresholds reject {result['quality']:.0%} of bad substitutions (--quality {result['quality']})."
    )
    if result["draft_log_likelihood"] is not None:
        typer.echo(
            "log-likelihood = the target's own view of the answer, per token:"
            f" {rows[0]['log_likelihood']:.3f} for its greedy answer,"
            f" {result['draft_log_likelihood']:.3f} for what the draft says alone."
        )
    typer.echo(
        f"Weights: {result['dtype']}, the draft's {result['draft_dtype']};"
        " labels and log-likelihoods in full precision."
    )
    if result["substitutions"]:
        pairs = [f"{b!r} for {a!r}" + (f" ({n} ×)" if n > 1 else "") for a, b, n in result["substitutions"][:8]]
        typer.echo(f"taken by the judge: {', '.join(pairs)}")
