"""`selfjudge label`, `selfjudge labels`, `selfjudge train` and `selfjudge distill`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

import selfjudge
from selfjudge import distill as distilling, label as labelling, train as training
from selfjudge.cli.options import BackendOptions, Data, DeviceOptions, Options, PairOptions, Result, Resume
from selfjudge.cli.output import Progress, print_text, waiting, warn
from selfjudge.distill.config import DistillConfig
from selfjudge.errors import SelfJudgeError
from selfjudge.label.config import LabelConfig, refuse_quantised
from selfjudge.label.folder import read_manifest, summarise_labels
from selfjudge.models.catalogue import EMBEDDED, find_embedded
from selfjudge.prompts.sources import check_readable
from selfjudge.store import RunFolder, read_json, refuse_foreign
from selfjudge.store.schema import RunRecord
from selfjudge.train.config import LEFT_BY_A_KILL, TrainConfig


def label(
    out: Annotated[Path, typer.Option(help="Folder of the labels.")],
    resume: Resume = False,
    data: Data = None,
    *,
    config: Annotated[LabelConfig, Options(without=("max_prompt_tokens", "backend"))],
    where: BackendOptions,
    models: Annotated[PairOptions, Options(without=("draft_dtype",))],
) -> Result:
    """Label draft tokens as acceptable or not by the target's own likelihoods; no annotation.

    Example: selfjudge label --prompts self:200 --calibrate arithmetic --out labels"""
    config = replace(config, backend=where.backend)
    refuse_quantised(models.dtype)
    if where.backend == "vllm" and models.draft is None and models.name in EMBEDDED:  # a head would be in vLLM alone
        models = replace(models, draft=f"{models.name}/draft")
    embedded, part = find_embedded(models.draft or "") or (None, "")
    draft_sha256 = embedded.draft_sha256 if embedded is not None and part == "draft" else None
    config.claim(out, data, resume, models.name, draft_sha256)

    pair = _load_pair(where, models)
    with Progress(resume="go on with --resume") as update:
        manifest = labelling.label_pair(pair, out, config, data=data, resume=resume, notify=update, warn=warn)
    yield {k: v for k, v in manifest.items() if k != "shards"}
    print_text("label", out=out, **manifest)
    if hourly := read_json(out / "run.json", RunRecord).get("rows_per_hour"):
        typer.echo(f"{hourly:,} labels an hour", err=True)


def _load_pair(where: BackendOptions, models: PairOptions) -> selfjudge.Pair:
    """The pair; its target runs in this process or in vLLM."""
    if where.backend != "vllm":
        return models.load(full_precision=True)
    pair, model, options = where.outline(models)

    from selfjudge.integrations.vllm.backend import VllmBackend

    VllmBackend(pair, model, options)  # it is the remote engine of the pair's target from now on
    return pair


def info(folders: Annotated[list[Path], typer.Argument(help="Finished label folders.")]) -> Result:
    """What label folders hold: rows and acceptable share by source, the spread of scores, τ.

    Example: selfjudge labels info labels"""
    with waiting("reading labels …"):
        about = {str(folder): summarise_labels(folder) for folder in folders}
    yield about
    for folder, labels in about.items():
        print_text("info", folder=folder, **labels)


def train(
    labels: Annotated[list[Path], typer.Argument(help="Finished label folders of one target.")],
    out: Annotated[Path, typer.Option(help="Folder of the judge.")],
    *,
    config: Annotated[TrainConfig, Options(commas=("sources",))],
    hardware: Annotated[DeviceOptions, Options(without=("dtype", "gpu_memory"))],
) -> Result:
    """Train a judge on labels.

    Example: selfjudge train labels --out judge --features hidden+margin"""
    refuse_foreign(out, LEFT_BY_A_KILL)
    for folder in labels:
        if not folder.is_dir():
            raise SelfJudgeError(f"{folder} does not exist: name folders that selfjudge label has written")
        read_manifest(folder)

    device = hardware.choose()
    where = "cpu" if device.type == "mps" else str(device)
    with Progress() as update:
        judge = training.train_judge(labels, out, config, device=where, notify=update)
    yield judge
    print_text("judge", out=out, **judge)
    if judge["thresholds"]["F"] >= 1:
        typer.echo("F accepts nothing: choose a threshold with --quality", err=True)


def distill(
    target: Annotated[str, typer.Option(help="Target model: embedded name, hub id, checkpoint folder or GGUF file.")],
    out: Annotated[Path, typer.Option(help="Folder of the draft; an interrupted run in it is continued.")],
    data: Data = None,
    *,
    config: Annotated[DistillConfig, Options(without=("max_prompt_tokens",))],
    hardware: DeviceOptions,
) -> Result:
    """Make a small draft for a target that has none, from the target's own answers.

    Example: selfjudge distill --target smollm2-135m --out my-draft --prompts self:20000x3 --minutes 8

    Example: selfjudge distill --target smollm2-135m --out my-head --kind eagle3 --data-minutes 8 --minutes 9"""
    if hardware.dtype == "q4":
        raise SelfJudgeError("this needs full precision: `dtype` q4 cannot be used")
    models = PairOptions(**vars(hardware), pair=target)
    models.check()
    if not RunFolder(out).claim(own=("work",)):  # what is wrong is said before the models are loaded
        check_readable(config.sources, data)

    pair = models.load(needs_draft=False, full_precision=True)
    with Progress(resume="the same command goes on from here") as update:
        result = distilling.distill_draft(pair, out, config, data=data, notify=update)
    yield result
    print_text("draft", out=out, **{**result, "target": target})
