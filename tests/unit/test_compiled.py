"""Where compiled kernels are kept, and that their compilation is said. Triton itself is not needed."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from selfjudge.cli import decode, output
from selfjudge.ops import compiled
from selfjudge.types import Piece


@pytest.fixture
def keep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[], str | None]]:
    """`keep_kernels` in a process of its own, so to speak: what it leaves in the environment."""
    monkeypatch.setenv("SELFJUDGE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv(compiled.VARIABLE, "")  # so that it is as before after the test

    def call() -> str | None:
        compiled.keep_kernels.cache_clear()
        compiled.keep_kernels()
        return os.environ.get(compiled.VARIABLE)

    yield call
    compiled.keep_kernels.cache_clear()


def test_kernels_are_kept_in_the_cache_folder(
    keep: Callable[[], str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert keep() == str(tmp_path / "home" / "kernels" / "triton")
    assert not list((tmp_path / "home" / "kernels" / "triton").iterdir())
    monkeypatch.setenv(compiled.VARIABLE, "")
    monkeypatch.setenv("SELFJUDGE_HOME", "here")
    monkeypatch.chdir(tmp_path)
    assert keep() == str(tmp_path / "here" / "kernels" / "triton")  # wherever the program goes


def test_a_folder_that_the_user_has_set_stays(keep: Callable[[], str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiled.VARIABLE, "/elsewhere")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert keep() == "/elsewhere"


def test_a_folder_that_cannot_be_written_is_said_in_one_line(keep: Callable[[], str | None], tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    with pytest.warns(UserWarning, match="compiled kernels cannot be kept in .*; Triton's own cache is used") as said:
        assert keep() == ""
    assert len(said) == 1
    assert "\n" not in str(said[0].message)


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
