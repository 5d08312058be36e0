"""`selfjudge distill`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from selfjudge.cli.groups import DeviceOptions, PairOptions
from selfjudge.cli.options import AsJson, Data, config_options
from selfjudge.cli.output import Progress, print_json
from selfjudge.distill.config import DistillConfig
from selfjudge.errors import SelfJudgeError
from selfjudge.prompts.sources import check_readable
from selfjudge.store import RunFolder


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

    slow = pair.target.device.type == "cpu" and not config.prompts
    with Progress(resume="the same command goes on from here") as update:

        def notify(stage: str, share: float) -> None:
            nonlocal slow
            if slow:  # said when work begins, not before a refusal
                slow = False
                typer.echo("on a CPU so many answers take hours; docs/distill.md has a small first try", err=True)
            update(stage, share)

        result = distill_draft(pair, out, config, data=data, notify=notify)
    if as_json:
        print_json(result)
        return
    typer.echo(f"{out}: {_summary(result)}")
    if config.kind == "layers":
        typer.echo(f'try it: selfjudge generate "Why is the sky blue?" --target {target} --draft {out}')


def _summary(result: dict[str, Any]) -> str:
    compact, parameters = result["compact"], f"{result['parameters'] / 1e6:.1f} M trained parameters"
    made = f"{parameters}, {compact['bytes'] / 1e6:.1f} MB ({compact['format']}), {result['training']['steps']} steps"
    if result.get("kind") == "eagle3":
        return f"{made}; held-out m {result['held_out']['int8']['m']['all']:.2f} at γ = {result['settings']['unroll']}"
    agreement = result["top1_held_out"]["int8" if compact["format"].startswith("int8") else "as_trained"]["all"]
    return f"{made}; held-out top-1 agreement {agreement:.1%}"
