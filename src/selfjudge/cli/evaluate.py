"""`selfjudge eval` and `selfjudge reproduce`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from selfjudge.cli.groups import PairOptions
from selfjudge.cli.options import AllowUnsafe, AsJson, Data, Numbers, Parsed, Resume, config_options
from selfjudge.cli.output import figure, going_on, print_json, print_rows, progress, warn, with_spread
from selfjudge.errors import SelfJudgeError
from selfjudge.store import read_json
from selfjudge.types import MAX_GAMMA

if TYPE_CHECKING:
    from selfjudge.judge.model import Judge
    from selfjudge.models.pair import Pair

Batch = Annotated[int | None, typer.Option(help="Prompts at a time: 8, on CUDA 256.", min=1)]
Nli = Annotated[
    str, typer.Option(help="Factual consistency of summaries: an NLI model, proxy (the target itself), off, or auto.")
]


@config_options(PairOptions, "models", without=("draft_dtype",))
def evaluate(
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
    gammas: Annotated[
        Parsed,
        typer.Option(
            help="Draft tokens per cycle, separated by commas.", parser=Numbers(1, MAX_GAMMA), metavar="INT,INT,…"
        ),
    ] = "10",  # type: ignore[assignment]
    limit: Annotated[int | None, typer.Option(help="Examples of each task; all if not given.", min=1)] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Most tokens an answer may have; the task's own if not given.", min=1)
    ] = None,
    batch: Batch = None,
    nli: Nli = "auto",
    examples: Annotated[int, typer.Option(help="Answers of each run that are kept token by token.", min=0)] = 3,
    compact: Annotated[
        bool, typer.Option("--compact", help="Leave texts out of the rows at the end, and round to five decimals.")
    ] = False,
    no_times: Annotated[
        bool, typer.Option("--no-times", help="Leave out tokens/s: for a machine that does other work meanwhile.")
    ] = False,
    resume: Resume = False,
    allow_unsafe: AllowUnsafe = False,
    data: Data = None,
    seed: Annotated[int, typer.Option(help="Seed of the random numbers.")] = 0,
    as_json: AsJson = False,
    *,
    models: PairOptions,
) -> None:
    """What rules gain and cost on tasks, compared with exact example by example.

    Example: selfjudge eval --tasks arithmetic --limit 20 --rules "exact judged:q0.9 margin:0.5" --gammas 4 --out eval
    """
    if (out / "settings.json").is_file() and not resume:
        raise SelfJudgeError(f"{out} holds an evaluation: go on with --resume, or name another --out")
    task_names = [name for name in tasks.split(",") if name]
    if not task_names:
        raise SelfJudgeError("`tasks` names no task; see selfjudge ls tasks")
    specs = rules.replace(";", " ").split()
    judges = _judges(judge, models, specs)

    from selfjudge.evaluate.pipeline import EvalConfig, evaluate as run, runs_of

    config = EvalConfig(limit, max_new_tokens, _batch(batch, models), seed)
    config.check()
    pair = models.load()
    for loaded in (j for several in judges.values() for j in several):
        loaded.check_target(pair.target_id, pair.target_sha256, pair.hidden_size)
    runs = runs_of(specs, gammas.value, judges, pair.special_ids)
    begun = out / "cnn_dailymail" / "task.json"
    if nli == "auto" and begun.is_file():  # what it began with
        nli = read_json(begun).get("nli", nli)
    entails, nli = _entails(nli, task_names, pair)
    with going_on("go on with --resume"), progress() as update:
        summaries = run(
            pair, out, task_names, runs, replace(config, nli=nli), data=data, allow_unsafe=allow_unsafe,
            entails=entails, examples=examples, compact=compact, times=not no_times, notify=update, warn=warn,
        )  # fmt: skip
    if as_json:
        print_json(summaries)
        return
    print_rows([_row(summary) for summary in summaries])
    typer.echo(f"rows and summaries are in {out}; draw them with: selfjudge report {out}")


def _row(summary: dict[str, Any]) -> dict[str, Any]:
    """A line of the table on the terminal; the task's measure is named."""
    change = summary["m_ratio"] and summary["m_ratio"] - 1
    return {
        "task": summary["task"],
        "rule": summary["rule"],
        "γ": summary["gamma"],
        "n": summary["n"],
        "m": figure(summary["mean_accepted_length"], ".2f"),
        "Δm, %": with_spread(change, summary.get("m_ratio_ci")),
        summary["measure"] or "score": figure(summary["score"], ".1%"),
        f"Δ {summary['measure'] or 'score'}, points": with_spread(summary["delta_score"], summary["delta_ci"]),
        "agreement": figure(summary["agreement"], ".2f"),
        "judged": figure(summary["judged_share"], ".1%"),
        "tokens/s": figure(summary["tokens_per_second"], ".0f"),
        "no answer": figure(summary["extraction_failures"], ".1%"),
        "cut off": figure(summary["cut_off"], ".1%"),
    }


@config_options(PairOptions, "models", without=("pair", "draft_dtype"))
def reproduce(
    out: Annotated[Path, typer.Option(help="Folder of all stages; what is done in it stays done.")],
    preset: Annotated[
        Literal["quick", "full", "paper"], typer.Option(help="How much; paper has the paper's settings.")
    ] = "quick",
    pair: Annotated[
        str, typer.Option(help="Embedded pair, or one of the paper's: llama-3.1-8b, qwen2.5-7b, llama-3.1-70b.")
    ] = "smollm2-135m",
    limit: Annotated[
        int | None, typer.Option(help="Examples of each task instead of the preset's number.", min=1)
    ] = None,
    batch: Batch = None,
    nli: Nli = "auto",
    allow_unsafe: AllowUnsafe = False,
    data: Data = None,
    as_json: AsJson = False,
    *,
    models: PairOptions,
) -> None:
    """Label by three methods, train, evaluate every rule, report: the paper's tables and figures for a pair.

    Example: selfjudge reproduce --preset full --pair qwen2.5-coder-1.5b --data DIR --out reproduced
    """
    from selfjudge.evaluate.reproduce import PAPER_PAIRS, PRESETS, reproduce as run

    models = replace(models, pair=pair)
    if models.target is None and pair in PAPER_PAIRS:
        target, draft = PAPER_PAIRS[pair]
        models = replace(models, target=target, draft=draft)
    models.check()
    loaded = models.load()
    entails, nli = _entails(nli, list(PRESETS[preset].tasks), loaded)
    with progress() as update:
        result = run(
            loaded, out, PRESETS[preset], data=data, batch=_batch(batch, models), limit=limit,
            device=models.fitting_device, entails=entails, nli=nli, allow_unsafe=allow_unsafe, notify=update, warn=warn,
        )  # fmt: skip
    if as_json:
        print_json(result)
        return
    typer.echo(f"everything is in {out}; open {out / 'report.html'}")


def _batch(given: int | None, models: PairOptions) -> int:
    return given or (256 if models.device_type == "cuda" else 8)


def _judges(given: list[str] | None, models: PairOptions, specs: list[str]) -> dict[str, list[Judge]]:
    """Judges by name: the given ones, else the pair's own where a rule needs one."""
    from selfjudge.judge.model import Judge
    from selfjudge.tasks.livecodebench import FOLDS

    if not given and any(spec.startswith("judge") for spec in specs) and models.shipped_judge:
        given = [f"shipped={models.shipped_judge}"]
    judges: dict[str, list[Judge]] = {}
    for text in given or []:
        name, named, place = text.partition("=")
        if not named:
            name, place = Path(text).name.replace("{fold}", "").strip("-_"), text
        if not name or name in judges or "/" in name or "@" in name:
            raise SelfJudgeError(f"--judge {text}: give every judge a name of its own, such as mine={place or text}")
        places = [place.replace("{fold}", str(k)) for k in range(FOLDS)] if "{fold}" in place else [place]
        judges[name] = [Judge.from_pretrained(folder) for folder in places]
    return judges


def _entails(nli: str, tasks: list[str], pair: Pair) -> tuple[Any, str]:
    """What measures factual consistency, and its name; nothing where no task needs it."""
    from selfjudge.evaluate.consistency import DEFAULT_NLI, classifier, proxy

    if nli == "off" or "cnn_dailymail" not in (name.partition("/")[0] for name in tasks):
        return None, "off"
    if nli == "proxy":
        return proxy(pair), "proxy"
    model = DEFAULT_NLI if nli == "auto" else nli
    try:
        return classifier(model, pair.target.device), model
    except SelfJudgeError as error:
        if nli != "auto":
            raise
        warn(f"{error}; factual consistency is the target's own word (fc_proxy)")
        return proxy(pair), "proxy"
