"""`selfjudge bench`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from selfjudge.bench.config import DecodeBenchConfig, DraftBenchConfig, LabelBenchConfig, PassesConfig
from selfjudge.cli.groups import Chosen, DeviceOptions, JudgeOptions, PairOptions, RecipeFolder, check_rule
from selfjudge.cli.options import AsJson, Data, PromptLimit, config_options
from selfjudge.cli.output import Progress, figure as number, print_json, print_rows, waiting
from selfjudge.errors import SelfJudgeError
from selfjudge.store import describe_machine


@config_options(DecodeBenchConfig)
@config_options(JudgeOptions, "judge_options")
@config_options(PairOptions, "models")
def decode(
    judged: Annotated[bool, typer.Option(help="Time the judge as well, where one ships for the pair.")] = True,
    prompts: Annotated[Path | None, typer.Option(help="Prompts file (jsonl); built-in ones if not given.")] = None,
    limit: PromptLimit = 8,
    recipe: RecipeFolder = None,
    as_json: AsJson = False,
    *,
    models: PairOptions,
    judge_options: JudgeOptions,
    config: DecodeBenchConfig,
) -> None:
    """Time transformers (plain, assisted) and our loop (γ = 0, exact, judged) on the same prompts, in one run.

    Example: selfjudge bench decode --gammas 2,4 --limit 4 --json
    """
    from selfjudge.prompts.builtin import BUILT_IN
    from selfjudge.prompts.sources import read_prompts

    questions = read_prompts(prompts) if prompts else [text for _, text in BUILT_IN]
    chosen = Chosen.of(recipe, models, judge_options, None, None)
    models, judge_options, rule = chosen.models, chosen.judge, chosen.rule or "judged"
    wanted = chosen.recipe is not None or judge_options.means_judged or (judged and models.shipped_judge)
    if wanted:
        check_rule(rule, models, judge_options, gamma=chosen.gamma)
    if chosen.gamma is not None:
        config = replace(config, gammas=(chosen.gamma,))
    pair = chosen.load()
    whole = models.load(full_precision=True) if config.peers and pair.dtype == "q4" and models.dtype is None else None

    from selfjudge.bench.decode import bench_decode
    from selfjudge.decoding.rule_parser import resolve_rule

    name = "judged" if chosen.recipe is None else "recipe"
    rules = [(name, resolve_rule(pair, rule, **judge_options.as_arguments()))] if wanted else []

    with Progress() as notify:
        result = bench_decode(pair, questions[:limit], rules, config, whole=whole, notify=notify)
    print_json(result) if as_json else _show_decode(result)


def _show_decode(result: dict[str, Any]) -> None:
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
                "drafts a cycle": number(r["gamma_mean"], ".1f"),
                "m": number(r["mean_accepted_length"], ".2f"),
                "same tokens": f"{r['identical_to_plain']:.0%}",
                "× floor": number(r["over_floor"], ".1f"),
                "draft / target / judge / rule, s": _phases(r["seconds"]),
                "judge's share": number(r["judge_time_share"], ".2%"),
            }
            for r in result["runs"]
        ]
    )
    gamma = result["best"]["gamma"]
    for peer, ratio in result["best"]["exact_over"].items():
        typer.echo(f"exact (γ={gamma['selfjudge-exact']}) is {ratio:.2f} × {peer} (γ={gamma[peer]})")


def _phases(seconds: dict[str, float]) -> str:
    return " / ".join(f"{seconds[p]:.1f}" for p in ("draft", "target", "judge", "rule") if p in seconds)


@config_options(PassesConfig)
@config_options(DeviceOptions, "place")
def passes(
    model: Annotated[
        str, typer.Option(help="Embedded pair, model reference, or shape:NAME with random weights.")
    ] = "smollm2-135m",
    figure: Annotated[Path | None, typer.Option(help="Draw the costs into this PNG file.")] = None,
    as_json: AsJson = False,
    *,
    place: DeviceOptions,
    config: PassesConfig,
) -> None:
    """Time forward passes against batch, tokens per pass and context, beside their memory-bandwidth floor.

    Example: selfjudge bench passes --tokens 1,2,4,8 --contexts 100,400 --figure passes.png
    """
    loaded = _model(model, place)

    from selfjudge.bench.passes import bench_passes, draw_passes

    with Progress() as notify:
        result = bench_passes(loaded, model, config, int8=place.dtype == "int8", notify=notify)
    if figure:
        draw_passes(result, figure)
    if as_json:
        print_json(result)
        return
    typer.echo(
        f"{model}, {result['dtype']}, {result['engine']}, {describe_machine(result)},"
        f" {result['gigabytes_per_second']:.0f} GB/s"
    )
    print_rows(
        [
            {
                "batch": r["batch"],
                "context": r["context"],
                "tokens": r["tokens"],
                "ms": f"{r['milliseconds']:.2f}",
                "memory floor, ms": f"{r['floor_milliseconds']:.2f}",
                "× floor": f"{r['over_floor']:.2f}",
            }
            for r in result["runs"]
        ]
    )


def _model(name: str, place: DeviceOptions) -> Any:
    """A target by reference, or a known shape with random weights."""
    shape = name.removeprefix("shape:")
    if shape == name:
        models = PairOptions(pair=name, device=place.device, dtype=place.dtype)
        models.check()
        return models.load(needs_draft=False, full_precision=True).target

    from selfjudge.bench.shapes import check_shape

    check_shape(shape)

    with waiting("making random weights …"):
        from selfjudge.bench.passes import random_model
        from selfjudge.models.device import chosen_device
        from selfjudge.models.pair import chosen_dtype

        device = chosen_device(place.device)
        return random_model(shape, device, chosen_dtype(place.dtype, device))


@config_options(DraftBenchConfig)
@config_options(PairOptions, "models", without=("draft_dtype",))
def draft(
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PROMPT",
            help="Task (its test split) or prompts file; several times for several; built-in if not given.",
        ),
    ] = None,
    limit: PromptLimit = 32,
    data: Data = None,
    as_json: AsJson = False,
    *,
    models: PairOptions,
    config: DraftBenchConfig,
) -> None:
    """How good a draft is, model or head: top-1 agreement, m, predicted and measured speed for every kind of prompt.

    Example: selfjudge bench draft --prompts gsm8k --prompts dolly --limit 16 --data DIR
    """
    texts = _texts(prompts or [], limit, data)
    pair = models.load(full_precision=True)

    from selfjudge.bench.draft import bench_draft

    encoded = {name: pair.encode_many(questions) for name, questions in texts.items()}
    with Progress() as notify:
        result = bench_draft(pair, encoded, config, notify=notify)
    if as_json:
        print_json(result)
        return
    _show_draft(result, config.gammas)


def _show_draft(result: dict[str, Any], gammas: tuple[int, ...]) -> None:
    kind = "head" if result["draft_kind"] == "eagle3" else "model"
    typer.echo(
        f"{result['pair']}, {result['device']}, {result['dtype']}, {describe_machine(result)}; a step of the draft (a"
        f" {kind}) takes {result['draft_pass_milliseconds']:.3g} ms, {result['draft_over_target']:.3f} of a target"
        " pass; tokens/s: predicted → measured, at batch 1"
    )

    def speed(row: dict[str, Any], key: str) -> str:
        return f"{row[f'predicted_tokens_per_second_{key}']:.0f} → {number(row[f'tokens_per_second_{key}'], '.0f')}"

    print_rows(
        [
            {
                "prompts": r["prompts"],
                "n": r["n"],
                "top-1": f"{r['top1']:.1%}",
                **{f"m, γ={g}": f"{r[f'm_gamma_{g}']:.2f}" for g in gammas},
                "plain": speed(r, "plain"),
                **{f"tokens/s, γ={g}": speed(r, f"gamma_{g}") for g in gammas},
            }
            for r in result["runs"]
        ]
    )


def _texts(sources: list[str], limit: int, data: Path | None) -> dict[str, list[Any]]:
    """Prompts by source: those of tasks and files, or the built-in ones."""
    from selfjudge.prompts.builtin import BUILT_IN
    from selfjudge.prompts.sources import read_prompts
    from selfjudge.tasks.base import known, split_of, task

    texts: dict[str, list[Any]] = {}
    for name in sources:
        if known(name):
            source = task(name, data)
            texts[name] = [source.prompt(row) for row in source.examples(split_of(name) or "test", limit)]
        else:
            texts[name] = list(read_prompts(Path(name).expanduser())[:limit])
    return texts or {"built-in": [text for _, text in BUILT_IN[:limit]]}


@config_options(LabelBenchConfig)
@config_options(PairOptions, "models", without=("draft_dtype",))
def label(
    prompts: Annotated[str, typer.Option(help="Task with checkable answers; arithmetic needs no data.")] = "arithmetic",
    limit: PromptLimit = 8,
    data: Data = None,
    as_json: AsJson = False,
    *,
    models: PairOptions,
    config: LabelBenchConfig,
) -> None:
    """What a label costs: ours, the public call pattern and answer preservation on the same responses.

    Example: selfjudge bench label --limit 4
    """
    from selfjudge.prompts.sources import Source, load_prompts
    from selfjudge.tasks.base import task

    source = task(prompts, data)
    if not source.checkable:
        raise SelfJudgeError(f"{prompts} has no checkable answers, which answer preservation needs")
    asked = load_prompts(Source(prompts, limit), data)
    pair = models.load(full_precision=True)

    from selfjudge.bench.label import bench_label

    with Progress() as notify:
        result = bench_label(pair, source, asked, config, notify=notify)
    if as_json:
        print_json(result)
        return
    typer.echo(
        f"{result['pair']}, {result['device']}, {result['dtype']}, {describe_machine(result)};"
        f" N = {result['suffix_length']}"
    )
    print_rows(
        [
            {
                "way": r["name"],
                "labels": r["labels"],
                "labels/s": f"{r['labels_per_second']:.3g}",
                "× public pattern": f"{r['ratio_to_public_pattern']:.1f}",
                "CPU s/label": f"{r['cpu_seconds_per_label']:.3g}",
                "target tokens/label": f"{r['target_tokens_per_label']:.0f}",
            }
            for r in result["runs"]
        ]
    )
