"""Compiled Triton kernels: where they are kept, and who is told that some are being compiled."""

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from selfjudge.errors import first_line
from selfjudge.ops import has_triton
from selfjudge.store.files import home

VARIABLE = "TRITON_CACHE_DIR"
COMPILING = "compiling kernels, once on this machine …"


@cache
def keep_kernels() -> None:
    """Let Triton keep compiled kernels in our cache folder, so that the next process need not compile them.

    Called before the first kernel is compiled. A folder that the user has set stays."""
    if os.environ.get(VARIABLE):
        return
    folder = home().absolute() / "kernels" / "triton"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        text = f"compiled kernels cannot be kept in {folder}: {first_line(error)}; Triton's own cache is used"
        warnings.warn(text, stacklevel=3)
        return
    os.environ[VARIABLE] = str(folder)


@contextmanager
def watch_compiling(say: Callable[[str], None]) -> Iterator[None]:
    """Say `COMPILING` whenever Triton has compiled a kernel that was not kept: usually others follow."""
    knobs: Any = None
    if has_triton():
        import triton

        knobs = getattr(triton, "knobs", None)  # older ones have none, and nothing is said
    if knobs is None:
        yield
        return
    before = knobs.compilation.listener

    def listen(*, cache_hit: bool, **details: Any) -> None:
        if not cache_hit:
            say(COMPILING)
        if before is not None:
            before(cache_hit=cache_hit, **details)

    knobs.compilation.listener = listen
    try:
        yield
    finally:
        knobs.compilation.listener = before
