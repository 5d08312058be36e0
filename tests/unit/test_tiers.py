"""The guard of the unit tier."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Callable

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
