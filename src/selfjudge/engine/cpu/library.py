"""The compiled kernel: its C structures, field by field as in `kernels.cpp`, and its compilation for this machine."""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from selfjudge.store import home, locked

SOURCES = tuple(Path(__file__).with_name(name) for name in ("kernels.cpp", "blocks.h"))


class Matrix(ctypes.Structure):
    _fields_ = (
        ("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p),
        ("rows", ctypes.c_int32), ("cols", ctypes.c_int32), ("type", ctypes.c_int32),
    )  # fmt: skip


class Layer(ctypes.Structure):
    _fields_ = (
        *((name, Matrix) for name in ("query", "key", "value", "out", "gate", "up", "down")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "attention_norm", "mlp_norm", "attention_after", "mlp_after", "query_norm", "key_norm",
            )
        ),
        ("window", ctypes.c_int32), ("table", ctypes.c_int32),
    )  # fmt: skip


class Model(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate")),
        *(
            (name, ctypes.c_float)
            for name in (
                "epsilon", "attention_scale", "attention_cap", "embedding_scale", "residual_scale", "logit_scale",
                "logit_cap",
            )
        ),
        ("gelu", ctypes.c_int32), ("whole_norms", ctypes.c_int32), ("embedding", ctypes.c_void_p),
        ("embedding_type", ctypes.c_int32), ("embedding_packed", ctypes.c_int32),
        ("layer", ctypes.POINTER(Layer)), ("norm", ctypes.c_void_p), ("head", Matrix),
        ("state_norm", ctypes.c_void_p), ("fuse", Matrix), ("norm_before_residual", ctypes.c_int32),
    )  # fmt: skip


class Pass(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("tokens", "slots", "outputs")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "ids", "row", "position", "output", "row_slots", "cosine", "sine", "cache", "logits", "states",
                "scratch",
            )
        ),
        ("threads", ctypes.c_int32), ("taps", ctypes.c_int32), ("tap", ctypes.c_void_p), ("features", ctypes.c_void_p),
        ("states_in", ctypes.c_void_p), ("states_width", ctypes.c_int32), ("residual", ctypes.c_void_p),
        ("table_slots", ctypes.c_int32),
    )  # fmt: skip


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
        ("forward", None, model, ctypes.POINTER(Pass)),
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
