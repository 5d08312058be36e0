"""`selfjudge train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from selfjudge.cli.groups import DeviceOptions
from selfjudge.cli.options import AsJson, config_options
from selfjudge.cli.output import Progress, print_json, print_rows, waiting
from selfjudge.errors import SelfJudgeError
from selfjudge.label.folder import read_manifest
from selfjudge.store import refuse_foreign
from selfjudge.train.config import LEFT_BY_A_KILL, TrainConfig


@config_options(DeviceOptions, "hardware", without=("dtype",))
@config_options(TrainConfig, commas=("sources", "weights"))
def train(
    labels: Annotated[list[Path], typer.Argument(help="Finished label folders of one target.")],
    out: Annotated[Path, typer.Option(help="Folder of the judge.")],
    push: Annotated[str | None, typer.Option(help="Upload to this hub repository, such as me/my-judge.")] = None,
    as_json: AsJson = False,
    *,
    hardware: DeviceOptions,
    config: TrainConfig,
) -> None:
    """Train a judge on labels.

    Example: selfjudge train labels --out judge --features hidden+margin --model linear

    Example: selfjudge train consequences labels --weights consequences=1,selfjudge=0.3 --out judge
    """
    refuse_foreign(out, LEFT_BY_A_KILL)
    for folder in labels:
        if not folder.is_dir():
            raise SelfJudgeError(f"{folder} does not exist: name folders that selfjudge label has written")
        read_manifest(folder)

    device = hardware.fitting_device
    with Progress() as update:
        from selfjudge.train.pipeline import train_judge

        judge = train_judge(labels, out, config, device=device, notify=update)
    if push:
        from huggingface_hub import HfApi

        from selfjudge.judge.hub import push_folder

        with waiting(f"uploading to {push} …"):
            address = push_folder(out, push, HfApi())
        typer.echo(address, err=True)
    print_json(judge) if as_json else _show_judge(out, judge)


def _show_judge(out: Path, judge: dict[str, Any]) -> None:
    metrics, thresholds = judge["metrics"], judge["thresholds"]
    typer.echo(
        f"{out}: {judge['model']} on {judge['features']}, {metrics['n_labels']} labels"
        f" of {metrics['n_prompts']} prompts, ROC-AUC {metrics['auc_mismatch']:.3f}"
        f" on {metrics['n_holdout']} mismatches it has not seen"
    )
    print_rows(
        [
            {
                "threshold": name,
                "θ": f"{thresholds[name]:.3f}",
                "acceptable tokens accepted": f"{metrics[f'{name}_accepts_acceptable']:.1%}",
                "unacceptable tokens accepted": f"{metrics[f'{name}_accepts_unacceptable']:.1%}",
            }
            for name in ("F", "R")
        ]
    )
    if thresholds["F"] >= 1:
        typer.echo("F accepts nothing: choose a threshold with --quality", err=True)
    typer.echo(
        f'try it: selfjudge generate "Why is the sky blue?" --target {judge["target"]} --judge {out} --quality 0.9'
        " (rejects 90 % of bad substitutions)"
    )
