"""`selfjudge label` and `selfjudge labels`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from selfjudge.cli.groups import PairOptions
from selfjudge.cli.options import AllowUnsafe, AsJson, Data, config_options, part_of
from selfjudge.cli.output import going_on, print_json, print_rows, progress, warn
from selfjudge.errors import SelfJudgeError

if TYPE_CHECKING:
    from selfjudge.label.backend import Backend
    from selfjudge.models.pair import Pair


@config_options(PairOptions, "models", without=("draft_dtype",))
def label(
    out: Annotated[Path, typer.Option(help="Folder of the labels.")],
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
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens an answer may have.")] = 256,
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
    allow_unsafe: AllowUnsafe = False,
    backend: Annotated[str, typer.Option(help="What runs the target: torch, or vllm (docs/vllm.md).")] = "torch",
    engine_options: Annotated[
        str, typer.Option(help='JSON for vllm.LLM, such as {"tensor_parallel_size": 2}; with --backend vllm.')
    ] = "",
    seed: Annotated[int, typer.Option(help="Seed of the random numbers.")] = 0,
    data: Data = None,
    as_json: AsJson = False,
    *,
    models: PairOptions,
) -> None:
    """Label draft tokens as acceptable or not by the target's own likelihoods; no annotation.

    Example: selfjudge label --prompts self:200 --calibrate arithmetic --out labels
    """
    from selfjudge.label.pipeline import LabelConfig, label as run

    config = LabelConfig(
        prompts=tuple(prompts or ("self" if limit else "self:500",)), limit=limit, method=method, suffix_length=suffix_length,
        max_new_tokens=max_new_tokens, tau=tau, calibrate=calibrate, calibrate_prompts=calibrate_prompts,
        reject_recall=reject_recall, hidden_dtype=hidden_dtype, lookahead=lookahead, shard=part_of(shard).value,
        skip_broken=skip_broken,
        substitutions=substitutions, allow_unsafe=allow_unsafe, seed=seed, backend=backend,
        batch=(1024 if models.device_type == "cuda" else 64) if batch is None else batch,
    )  # fmt: skip
    config.check()
    pair, engine = _backend(backend, engine_options, models)
    with going_on("go on with --resume"), progress() as update:
        manifest = run(pair, out, config, backend=engine, data=data, resume=resume, notify=update, warn=warn)
    if as_json:
        print_json({k: v for k, v in manifest.items() if k != "shards"})
        return
    threshold = "" if manifest["tau"] is None else f", τ = {manifest['tau']:.3f}"
    typer.echo(
        f"{out}: {manifest['rows']} labels from {manifest['prompts']} prompts,"
        f" {manifest['acceptable'] / manifest['rows']:.1%} acceptable"
        f" ({manifest['method']}, N = {manifest['suffix_length']}{threshold})"
    )


def _backend(name: str, engine_options: str, models: PairOptions) -> tuple[Pair, Backend | None]:
    """The pair, and what runs its target if it is not this process."""
    if name != "vllm":
        if engine_options:
            raise SelfJudgeError("`engine_options` are vLLM's: they go with --backend vllm")
        return models.load(), None
    from importlib.util import find_spec

    from selfjudge.integrations.vllm.label import VllmBackend, outline_pair, parse_engine_options

    if find_spec("vllm") is None:
        raise SelfJudgeError("vLLM is not installed here: pip install vllm (or selfjudge[vllm])")
    options = parse_engine_options(engine_options)
    pair, model = outline_pair(models.name, models.draft, device=models.device, dtype=models.dtype)
    return pair, VllmBackend(pair, model, options)


def merge(
    folders: Annotated[list[Path], typer.Argument(help="Finished label folders.")],
    out: Annotated[Path, typer.Option(help="New folder.")],
    as_json: AsJson = False,
) -> None:
    """Join finished label folders of one pair, method and τ.

    Example: selfjudge labels merge part0 part1 --out labels
    """
    from selfjudge.label.folder import merge as run

    manifest = run(folders, out)
    if as_json:
        print_json({k: v for k, v in manifest.items() if k != "shards"})
        return
    typer.echo(f"{out}: {manifest['rows']} labels from {manifest['prompts']} prompts, {len(manifest['shards'])} shards")


def info(
    folders: Annotated[list[Path], typer.Argument(help="Finished label folders.")], as_json: AsJson = False
) -> None:
    """What label folders hold: rows and acceptable share by source, the spread of scores, τ.

    Example: selfjudge labels info labels
    """
    from selfjudge.label.folder import info as read

    about = {str(folder): read(folder) for folder in folders}
    if as_json:
        print_json(about)
        return
    for folder, labels in about.items():
        threshold = "no τ" if labels["tau"] is None else f"τ = {labels['tau']:.3f}"
        typer.echo(
            f"{folder}: {labels['target']} with {labels['draft']}, {labels['method']}, N = {labels['suffix_length']},"
            f" {threshold}"
        )
        print_rows([
            {"source": name, "labels": row["rows"], "acceptable": f"{row['acceptable']:.1%}"}
            for name, row in labels["sources"].items()
        ])  # fmt: skip
        quantiles = labels["score_quantiles"].items()
        typer.echo("scores: " + ", ".join(f"{share} below {value:.2f}" for share, value in quantiles))
