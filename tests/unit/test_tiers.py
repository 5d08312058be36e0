"""The guard of the unit tier."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import tiers


def connect() -> None:
    with socket.socket() as one:
        one.connect(("127.0.0.1", 9))


@pytest.mark.parametrize("forbidden", [lambda: subprocess.run(["true"]), os.fork, connect])
def test_processes_and_connections_are_refused_in_one_line(forbidden: Callable[[], object]) -> None:
    with pytest.raises(
        pytest.fail.Exception, match=r"in a unit test: move tests/unit/test_tiers\.py.* to tests/process"
    ):
        forbidden()
    tiers._caught.clear()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_threads_are_watched_too() -> None:
    thread = threading.Thread(target=lambda: subprocess.run(["true"]))
    thread.start()
    thread.join()
    assert len(tiers._caught) == 1
    tiers._caught.clear()


def test_the_folder_is_the_marker(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("unit") is not None
    assert request.node.get_closest_marker("process") is None


@pytest.mark.quick("2")
@pytest.mark.parametrize("number", [1, 2])
def test_parameters_that_are_not_named_are_slow(request: pytest.FixtureRequest, number: int) -> None:
    assert (request.node.get_closest_marker("slow") is None) == (number == 2)


def test_a_name_that_no_parameter_has_is_refused() -> None:
    marked: list[str] = []
    item: Any = SimpleNamespace(
        nodeid="tests/test_it.py::test_it[1]", callspec=SimpleNamespace(id="1"), add_marker=marked.append,
        get_closest_marker=lambda _: pytest.mark.quick("3").mark, config=SimpleNamespace(args=["tests"]),
    )  # fmt: skip
    with pytest.raises(pytest.UsageError, match=r"there are not: {'tests/test_it\.py::test_it': {'3'}}"):
        tiers._mark_slow([item])
    assert marked == ["slow"]
