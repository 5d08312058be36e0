"""`selfjudge label` and `selfjudge labels`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selfjudge.cli.groups import BackendOptions, PairOptions
from selfjudge.cli.options import AsJson, Data, Resume, config_options
from selfjudge.cli.output import Progress, print_json, print_rows, waiting, warn
from selfjudge.label.config import LabelConfig, refuse_quantised
from selfjudge.label.tau import require_tau
from selfjudge.models.catalogue import EMBEDDED
from selfjudge.store import RunFolder, read_json
from selfjudge.store.artefacts import RunRecord

if TYPE_CHECKING:
    from selfjudge.models.pair import Pair


@config_options(PairOptions, "models", without=("draft_dtype",))
@config_options(BackendOptions, "where")
@config_options(LabelConfig, without=("max_prompt_tokens", "backend"))
def label(
    out: Annotated[Path, typer.Option(help="Folder of the labels.")],
    resume: Resume = False,
    data: Data = None,
    as_json: AsJson = False,
    *,
    config: LabelConfig,
    models: PairOptions,
    where: BackendOptions,
) -> None:
    """Label draft tokens as acceptable or not by the target's own likelihoods; no annotation.

    Example: selfjudge label --prompts self:200 --calibrate arithmetic --out labels
    """
    config = replace(config, backend=where.backend)
    refuse_quantised(models.dtype)
    folder = RunFolder(out, done="manifest.json")
    folder.claim(resume=resume)
    if config.takes_shipped_tau and not resume:
        require_tau(models.name, None, config.suffix_length)
    if not folder.begun:
        config.check_prompts(data)

    pair = _load_pair(where, models)

    from selfjudge.label.pipeline import label_pair

    with Progress(resume="go on with --resume") as update:
        manifest = label_pair(pair, out, config, data=data, resume=resume, notify=update, warn=warn)
    if as_json:
        print_json({k: v for k, v in manifest.items() if k != "shards"})
        return
    threshold = "" if manifest["tau"] is None else f", τ = {manifest['tau']:.3f}"
    typer.echo(
        f"{out}: {manifest['rows']} labels from {manifest['prompts']} prompts,"
        f" {manifest['acceptable'] / manifest['rows']:.1%} acceptable"
        f" ({manifest['method']}, N = {manifest['suffix_length']}{threshold})"
    )
    _show_control(manifest)
    if hourly := read_json(out / "run.json", RunRecord).get("rows_per_hour"):
        typer.echo(f"{hourly:,} labels an hour", err=True)


def _show_control(manifest: dict[str, Any]) -> None:
    """Print how often answers change although the target's own token was kept: the noise of labels by consequences."""
    if manifest.get("controls"):
        share = manifest["controls_kept"] / manifest["controls"]
        typer.echo(f"control: the target's own token keeps {share:.1%} of {manifest['controls']} answers")


def _load_pair(where: BackendOptions, models: PairOptions) -> Pair:
    """The pair; its target runs in this process or in vLLM."""
    if where.backend != "vllm":
        return models.load(full_precision=True)
    if models.draft is None and models.name in EMBEDDED:  # a head would be in vLLM alone
        models = replace(models, draft=f"{models.name}/draft")
    pair, model, options = where.outline(models)

    from selfjudge.integrations.vllm.label import VllmBackend

    VllmBackend(pair, model, options)  # it is the remote engine of the pair's target from now on
    return pair


def merge(
    folders: Annotated[list[Path], typer.Argument(help="Finished label folders.")],
    out: Annotated[Path, typer.Option(help="New folder.")],
    as_json: AsJson = False,
) -> None:
    """Join finished label folders of one pair, method and τ.

    Example: selfjudge labels merge part0 part1 --out labels
    """
    with waiting("joining labels …"):
        from selfjudge.label.folder import merge_labels

        manifest = merge_labels(folders, out)
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
    with waiting("reading labels …"):
        from selfjudge.label.folder import summarise_labels

        about = {str(folder): summarise_labels(folder) for folder in folders}
    if as_json:
        print_json(about)
        return
    for folder, labels in about.items():
        threshold = "no τ" if labels["tau"] is None else f"τ = {labels['tau']:.3f}"
        typer.echo(
            f"{folder}: {labels['target']} with {labels['draft']}, {labels['method']}, N = {labels['suffix_length']},"
            f" {threshold}"
        )
        print_rows(
            [
                {"source": name, "labels": row["rows"], "acceptable": f"{row['acceptable']:.1%}"}
                for name, row in labels["sources"].items()
            ]
        )
        _show_control(labels)
        quantiles = labels["score_quantiles"].items()
        typer.echo("scores: " + ", ".join(f"{share} below {value:.2f}" for share, value in quantiles))
