"""`selfjudge train` and `selfjudge distill`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from selfjudge.cli.groups import DeviceOptions, PairOptions
from selfjudge.cli.options import AsJson, Data, config_options
from selfjudge.cli.output import Progress, print_json, print_rows, waiting, warn
from selfjudge.distill.config import DistillConfig
from selfjudge.errors import SelfJudgeError
from selfjudge.label.folder import read_manifest
from selfjudge.prompts.sources import check_readable
from selfjudge.store import RunFolder, refuse_foreign
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


@config_options(DeviceOptions, "hardware")
@config_options(DistillConfig, without=("max_prompt_tokens",))
def distill(
    target: Annotated[str, typer.Option(help="Target model: embedded name, hub id, checkpoint folder or GGUF file.")],
    out: Annotated[Path, typer.Option(help="Folder of the draft; an interrupted run in it is continued.")],
    data: Data = None,
    as_json: AsJson = False,
    *,
    config: DistillConfig,
    hardware: DeviceOptions,
) -> None:
    """Make a small draft for a target that has none, from the target's own answers.

    Example: selfjudge distill --target smollm2-135m --out my-draft --prompts self:20000x3 --minutes 8

    Example: selfjudge distill --target smollm2-135m --out my-head --kind eagle3 --data-minutes 8 --minutes 9
    """
    if hardware.dtype == "q4":
        raise SelfJudgeError("this needs full precision: `dtype` q4 cannot be used")
    models = PairOptions(pair=target, device=hardware.device, dtype=hardware.dtype)
    models.check()
    folder = RunFolder(out)  # what is wrong is said before the models are loaded
    folder.claim(own=("work",))
    if not folder.begun:
        check_readable(config.sources, data)

    pair = models.load(needs_draft=False, full_precision=True)

    from selfjudge.distill.pipeline import distill_draft

    if pair.target.device.type == "cpu" and not config.prompts:
        warn("on a CPU so many answers take hours; docs/distill.md has a small first try")
    with Progress(resume="the same command goes on from here") as update:
        result = distill_draft(pair, out, config, data=data, notify=update)
    if as_json:
        print_json(result)
        return
    typer.echo(f"{out}: {_describe_draft(result)}")
    if config.kind == "layers":
        typer.echo(f'try it: selfjudge generate "Why is the sky blue?" --target {target} --draft {out}')


def _describe_draft(result: dict[str, Any]) -> str:
    compact, parameters = result["compact"], f"{result['parameters'] / 1e6:.1f} M trained parameters"
    made = f"{parameters}, {compact['bytes'] / 1e6:.1f} MB ({compact['format']}), {result['training']['steps']} steps"
    if result.get("kind") == "eagle3":
        return f"{made}; held-out m {result['held_out']['int8']['m']['all']:.2f} at γ = {result['settings']['unroll']}"
    agreement = result["top1_held_out"]["int8" if compact["format"].startswith("int8") else "as_trained"]["all"]
    return f"{made}; held-out top-1 agreement {agreement:.1%}"
