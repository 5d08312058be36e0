"""A busy machine is recognised by the system's own counts and by times that differ; a quiet one is not accused."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from selfjudge.store import load

BURNT = 0.7
"""Seconds of a processor that the busy loops below take."""
LOOP = f"import time\nwhile time.process_time() < {BURNT}: pass\nprint('burnt', flush=True); time.sleep(600)"


def watch(monkeypatch: pytest.MonkeyPatch, *, used: float, own: float) -> load.LoadWatch:
    """A watch that sees ten seconds of two cores of which so many were used, by all programs and by this one."""
    clocks = iter([(100.0, 40.0, 5.0), (110.0, 40.0 + 10 * used, 5.0 + 10 * own)])
    monkeypatch.setattr(load, "_read_clocks", lambda: next(clocks))
    monkeypatch.setattr(load, "_count_cores", lambda: 2)
    return load.LoadWatch()


def test_other_programs_on_full_cores_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said = watch(monkeypatch, used=2.0, own=1.2).describe()
    assert said == "this machine is busy: speeds are not reliable (other programs took 0.8 of 2 cores)"


@pytest.mark.parametrize(("used", "own"), [(1.95, 1.9), (1.2, 0.9), (0.3, 0.1)])
def test_a_quiet_machine_is_not_accused(monkeypatch: pytest.MonkeyPatch, used: float, own: float) -> None:
    """Small things beside our work, and others beside work that leaves cores free."""
    assert watch(monkeypatch, used=used, own=own).describe([[4.0, 4.2, 4.1], [9.0]]) == ""


def test_times_of_the_same_work_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    said = watch(monkeypatch, used=1.0, own=1.0).describe([[4.0, 4.2], [4.0, 9.0, 5.0], []])
    assert said == "this machine is busy: speeds are not reliable (times of the same answer differ by 100%)"


def test_what_is_too_short_says_nothing() -> None:
    """Counts have a hundredth of a second, and small times differ by themselves."""
    cores = load._count_cores()
    full = (load.SHORTEST, load.SHORTEST * cores, 0.0)
    assert f"other programs took {cores:.1f} of {cores} cores" in load.describe_load([full])
    assert load.describe_load([(full[0] - 0.01, *full[1:])], [[0.1, 0.3]]) == load.describe_load([]) == ""


def test_usages_of_several_pieces_of_work_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """One disturbed piece among quiet ones does not spoil them all, and many short ones are long enough."""
    monkeypatch.setattr(load, "_count_cores", lambda: 2)
    quiet, disturbed = (1.0, 1.9, 1.9), (1.0, 2.0, 0.5)
    assert load.describe_load([disturbed]) != ""
    assert load.describe_load([quiet] * 20 + [disturbed]) == ""
    assert load.describe_load([(0.1, 0.2, 0.0)] * 6) != ""


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


def test_the_clocks_go_forwards() -> None:
    first, second = load._read_clocks(), load._read_clocks()
    assert all(later >= earlier for earlier, later in zip(first, second, strict=True))
    assert load._count_cores() >= 1


def test_without_the_counts_of_the_system_our_own_work_is_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(load.Path, "read_text", missing)
    _, busy, own = load._read_clocks()
    assert busy == own
