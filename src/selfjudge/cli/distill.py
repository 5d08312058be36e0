"""`selfjudge distill`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from selfjudge.cli.groups import DeviceOptions, PairOptions
from selfjudge.cli.options import AsJson, Data, config_options
from selfjudge.cli.output import going_on, print_json, progress


@config_options(DeviceOptions, "place")
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
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens an answer may have.")] = 256,
    held_out: Annotated[int, typer.Option(help="Prompts kept for measuring agreement; at most half of them.")] = 256,
    top_k: Annotated[int, typer.Option(help="Of the target's probabilities, kept per token.")] = 16,
    free_embeddings: Annotated[
        bool, typer.Option("--free-embeddings", help="Learn embeddings instead of projections of the target's.")
    ] = False,
    batch: Annotated[int, typer.Option(help="Answers at a time, where memory allows.", min=1)] = 1024,
    batch_tokens: Annotated[int, typer.Option(help="Tokens of a training step.")] = 65536,
    rate: Annotated[float, typer.Option(help="Highest learning rate.")] = 4e-3,
    seed: Annotated[int, typer.Option(help="Seed of the random numbers.")] = 0,
    data: Data = None,
    as_json: AsJson = False,
    *,
    place: DeviceOptions,
) -> None:
    """Make a small draft for a target that has none, from the target's own answers.

    Example: selfjudge distill --target smollm2-135m --out my-draft --prompts self:20000x3 --minutes 8
    """
    models = PairOptions(pair=target, device=place.device, dtype=place.dtype)
    models.check()

    from selfjudge.distill.pipeline import DistillConfig, distill as run

    config = DistillConfig(
        layers=layers, width=width, inner=inner, free_embeddings=free_embeddings, minutes=minutes, steps=steps,
        prompts=tuple(prompts or ("self:20000x3",)), max_new_tokens=max_new_tokens, held_out=held_out, top_k=top_k,
        rate=rate, batch_tokens=batch_tokens, seed=seed,
    )  # fmt: skip
    config.check()
    pair = models.load(needs_draft=False)
    slow = pair.target.device.type == "cpu" and not prompts
    with going_on("the same command goes on from here"), progress() as update:

        def notify(stage: str, share: float) -> None:
            nonlocal slow
            if slow:  # said when work begins, not before a refusal
                slow = False
                typer.echo("on a CPU so many answers take hours; docs/distill.md has a small first try", err=True)
            update(stage, share)

        result = run(pair, out, config, data=data, batch=batch, notify=notify)
    if as_json:
        print_json(result)
        return
    compact = result["compact"]
    agreement = result["top1_held_out"]["int8" if compact["format"].startswith("int8") else "as_trained"]["all"]
    typer.echo(
        f"{out}: {result['parameters'] / 1e6:.1f} M trained parameters, compact form {compact['bytes'] / 1e6:.1f} MB"
        f" ({compact['format']}), {result['training']['steps']} steps; held-out top-1 agreement {agreement:.1%}"
    )
    typer.echo(f'try it: selfjudge generate "Why is the sky blue?" --target {target} --draft {out}')
