"""The kernels for older processors, compiled here and tried on this one."""

from __future__ import annotations

import platform

import pytest

from fake_gguf import KINDS, check_kind
from selfjudge.engine.cpu.library import library

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the names of processors are those of x86"),
]


@pytest.mark.parametrize(("processor", "name"), [("x86-64", b"portable"), ("haswell", b"avx2")])
def test_kernels_of_older_processors_give_the_same_products(processor: str, name: bytes) -> None:
    assert library(processor).block_kernel() == name
    for kind in KINDS:
        check_kind(kind, processor)
