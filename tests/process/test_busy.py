"""Real busy loops: the work of other programs is seen, and that of our children is our own."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from selfjudge.store import run_folder as load

BURNT = 0.7
"""Seconds of a processor that the busy loops below take."""
LOOP = f"import time\nwhile time.process_time() < {BURNT}: pass\nprint('burnt', flush=True); time.sleep(600)"


def test_a_real_busy_loop_of_another_program_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes its seconds of a processor on any machine; how long that takes by the clock is set by hand."""
    watched = load.LoadWatch()
    with subprocess.Popen([sys.executable, "-c", LOOP], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"burnt\n"
        _, used, own = watched.usage
        other.kill()
    if used < BURNT / 2:
        pytest.skip("this system does not count the work of all programs")
    assert used - own > BURNT / 2
    monkeypatch.setattr(load, "_count_cores", lambda: 1)
    assert load.describe_load([(used, used, own)]).startswith("this machine is busy: speeds are not reliable (other")


def _burn(done: Event) -> None:
    while time.process_time() < BURNT:
        pass
    done.set()
    time.sleep(600)


def test_the_work_of_a_child_that_still_runs_is_our_own() -> None:
    """vLLM has its engine in a process of its own."""
    if not Path("/proc/self/stat").exists():
        pytest.skip("this system does not count the work of a process")
    context, watched = multiprocessing.get_context("spawn"), load.LoadWatch()
    done = context.Event()
    child = context.Process(target=_burn, args=(done,))
    child.start()
    assert done.wait(300)
    assert watched.usage[2] > BURNT / 2
    child.kill()
    child.join()
