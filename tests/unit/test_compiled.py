"""That the compilation of kernels is said. Triton itself is not needed."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr
from types import SimpleNamespace
from typing import Any

import pytest

from selfjudge import ops as compiled
from selfjudge.cli import decode, output
from selfjudge.types import Piece


class FakeTriton(SimpleNamespace):
    """Triton's hook, and what calls it."""

    def __init__(self, listener: Any = None) -> None:
        super().__init__(knobs=SimpleNamespace(compilation=SimpleNamespace(listener=listener)))

    def compile(self, cache_hit: bool) -> None:
        if (listener := self.knobs.compilation.listener) is not None:
            listener(src="kernel", metadata={}, metadata_group={}, times=None, cache_hit=cache_hit)


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> FakeTriton:
    monkeypatch.setattr(compiled, "has_triton", lambda: True)
    monkeypatch.setitem(sys.modules, "triton", FakeTriton())
    return sys.modules["triton"]  # type: ignore[return-value]


def test_only_kernels_that_were_not_kept_are_said(triton: FakeTriton) -> None:
    said: list[str] = []
    others: list[bool] = []
    triton.knobs.compilation.listener = before = lambda **details: others.append(details["cache_hit"])
    with compiled.watch_compiling(said.append):
        triton.compile(cache_hit=True)
        assert said == []
        triton.compile(cache_hit=False)
        assert said == ["compiling kernels, once on this machine …"]
    assert triton.knobs.compilation.listener is before
    triton.compile(cache_hit=False)
    assert (len(said), others) == (1, [True, False, False])  # another's hook is called as well


@pytest.mark.parametrize("there", [False, True])
def test_without_triton_or_its_hook_nothing_is_said(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "has_triton", lambda: there)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace())  # an old one
    with compiled.watch_compiling(lambda text: pytest.fail(text)):
        pass


@pytest.mark.parametrize("quiet", [False, True])
@pytest.mark.parametrize("on_cuda", [False, True])
def test_generate_says_that_kernels_are_compiled(
    triton: FakeTriton, on_cuda: bool, quiet: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both for the prompt and for the first cycle, whose tokens come after the first piece of the text."""
    stages: list[str] = []
    call = output.Progress.__call__
    monkeypatch.setattr(output.Progress, "__call__", lambda self, *a: stages.append(a[0]) or call(self, *a))

    def pieces() -> Iterator[Piece]:
        yield Piece("one", 1, "target")
        triton.compile(cache_hit=False)
        yield Piece(" two", 2, "draft")

    with redirect_stderr(io.StringIO()):
        decode._show(pieces(), color=False, quiet=quiet, longest=2, on_cuda=on_cuda)  # type: ignore[arg-type]
    assert (compiled.COMPILING in stages) == on_cuda
    assert capsys.readouterr().out == ("" if quiet else "one two")
