"""Tiers: the folder of a test is its marker, and the unit tier starts no process, opens no connection and loads no real model."""

from __future__ import annotations

import gc
import sys
from collections.abc import Generator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest

from selfjudge.store import provenance

TIERS = ("unit", "process", "network", "attacks", "gpu")
FORBIDDEN = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec", "socket.connect"}
_running: list[str] = []  # the unit test that runs now
_caught: list[str] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _mark_slow(items)
    for item in items:
        tier = item.path.relative_to(Path(__file__).parent).parts[0]
        if tier in TIERS:
            item.add_marker(tier)
        if tier == "unit" and {"embedded", "shipped"} & {*getattr(item, "fixturenames", ())}:
            raise pytest.UsageError(f"{item.nodeid} uses a real model: move it to tests/network")


def _mark_slow(items: list[pytest.Item]) -> None:
    """All parameters of a test that its marker `quick` does not name."""
    unused: dict[str, set[str]] = {}
    for item in items:
        if (quick := item.get_closest_marker("quick")) is not None:
            found = {pattern for pattern in quick.args if fnmatchcase(item.callspec.id, pattern)}  # type: ignore[attr-defined]
            unused.setdefault(item.nodeid.partition("[")[0], {*quick.args}).difference_update(found)
            if not found:
                item.add_marker("slow")
    missing = {name: patterns for name, patterns in unused.items() if patterns}
    if missing and not any("::" in argument for argument in items[0].config.args):
        raise pytest.UsageError(f"the marker `quick` names parameters that there are not: {missing}")


def _refuse(event: str, args: tuple[object, ...]) -> None:
    if event in FORBIDDEN and _running:
        what = args[1] if event in ("subprocess.Popen", "socket.connect") else args
        _caught.append(f"{event} {what} in a unit test: move {_running[-1]} to tests/process or tests/network")
        pytest.fail(_caught[-1], pytrace=False)


sys.addaudithook(_refuse)  # sees every thread and every way to start a process; silent outside the unit tier


@cache
def _ask_other_programs() -> None:
    """What the package asks once in a process, so that no test does: a compiler for the kernels, git, lscpu, fonts."""
    import matplotlib.font_manager  # noqa: F401

    from conftest import tiny_model
    from selfjudge.engine.cpu import engine as cpu

    cpu.why_not(tiny_model())
    provenance()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Before the first test: the process that tests of whole runs fork is a fork of this one, as it is now."""
    gc.freeze()
    gc.enable()  # conftest.py has disabled it
    if not session.config.option.collectonly and any(map(_may_start_processes, session.items)):
        from warm import forks

        forks()
    gc.freeze()  # no collection need look at all that was imported


def _may_start_processes(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(tier) for tier in ("process", "network", "attacks"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if item.get_closest_marker("unit") is None:
        return (yield)
    _ask_other_programs()
    _running.append(item.nodeid)
    try:
        return (yield)
    finally:
        _running.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    _caught.clear()
    result = yield
    if _caught:  # raised in a thread, where nobody saw it
        pytest.fail(_caught[0], pytrace=False)
    return result
