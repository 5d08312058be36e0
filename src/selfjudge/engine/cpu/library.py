"""The compiled kernel: its C structures, read from `kernels.cpp`, and its compilation for this machine."""

import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from selfjudge.store import home, locked

SOURCES = tuple(Path(__file__).with_name(name) for name in ("kernels.cpp", "blocks.h"))


def _read_fields(structure: str) -> list[tuple[str, Any]]:
    """The fields of a C structure, as the kernel's source declares it: every pointer is an address."""
    found = re.search(rf"^struct {structure} {{$(.*?)^}};$", SOURCES[0].read_text(), re.DOTALL | re.MULTILINE)
    assert found is not None
    kinds: dict[str, Any] = {"int32_t": ctypes.c_int32, "float": ctypes.c_float, "Matrix": globals().get("Matrix")}
    fields = []
    for kind, names in re.findall(r"(?:const )?(\w+)([^;]*);", re.sub(r"//.*", "", found[1])):
        for name in names.split(","):
            fields.append((name.split("*")[-1].strip(), ctypes.c_void_p if "*" in name else kinds[kind]))
    return fields


class Matrix(ctypes.Structure):
    _fields_ = _read_fields("Matrix")


class Layer(ctypes.Structure):
    _fields_ = _read_fields("Layer")


class Model(ctypes.Structure):
    _fields_ = _read_fields("Model")


class Pass(ctypes.Structure):
    _fields_ = _read_fields("Pass")


def compiler() -> list[str]:
    """The command of the C++ compiler: `CXX`, or the first of the usual ones; an OSError where there is none."""
    command = (
        shlex.split(os.environ.get("CXX", "")) or [c for c in map(shutil.which, ("c++", "g++", "clang++")) if c][:1]
    )
    if not command:
        raise OSError("no C++ compiler found")
    return command


@cache
def compiler_version(*command: str) -> str:
    """What a compiler prints for `--version`, asked once."""
    return subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout


@cache
def library(processor: str) -> ctypes.CDLL:
    """Load the kernel for `processor` (`native` or a named one), compiled once per source, compiler and machine."""
    command = compiler()
    arm = platform.machine() in ("aarch64", "arm64")
    flags = ["-O3", f"-mcpu={processor}" if arm else f"-march={processor}", "-std=c++17", "-shared", "-fPIC"]
    flags += ["-fno-math-errno", "-fno-trapping-math"]  # sums keep their order: reassociation spills the registers
    cpu = Path("/proc/cpuinfo")
    machine = cpu.read_text().split("\n\n")[0] if cpu.exists() else platform.processor()
    machine = "".join(line for line in machine.splitlines() if "MHz" not in line)
    parts = [*(source.read_text() for source in SOURCES), compiler_version(*command), *flags, machine]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    built = home() / "kernels" / f"{key}.so"
    if not built.exists():
        with locked(built.with_suffix(".lock")):
            if not built.exists():
                _compile([*command, *flags, str(SOURCES[0])], built)
    kernel = ctypes.CDLL(str(built))
    i32, i64, pointer, model = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p, ctypes.POINTER(Model)
    for name, result, *arguments in (
        ("scratch_size", i64, model, i32, i32, i32),
        ("forward", ctypes.c_bool, model, ctypes.POINTER(Pass)),
        ("pack", None, i32, i32, i32, pointer, pointer, pointer, i32),
        ("apply", None, ctypes.POINTER(Matrix), pointer, i32, pointer, pointer),
        ("packed_bytes", i64, i32, i64, i32),
        ("quantised_bytes", i64, i32),
        ("use_large_pages", None, pointer, i64),
        ("block_kernel", ctypes.c_char_p),
    ):
        function = getattr(kernel, name)
        function.restype, function.argtypes = result, arguments
    return kernel


def _compile(command: list[str], built: Path) -> None:
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        fresh = Path(folder) / built.name
        command = [*command, "-o", str(fresh)]
        # OpenMP is the threading of torch itself: both then share one pool of threads
        if subprocess.run([*command, "-fopenmp"], capture_output=True, check=False).returncode:
            plain = subprocess.run(command, capture_output=True, text=True, check=False)
            if plain.returncode:
                raise OSError(next((x for x in plain.stderr.splitlines() if "error" in x), "it failed"))
        os.replace(fresh, built)
