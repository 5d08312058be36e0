"""Who is told that Triton compiles kernels. It keeps them itself, for the next process."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from selfjudge.ops import has_triton

COMPILING = "compiling kernels, once on this machine …"


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
