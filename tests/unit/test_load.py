"""A busy machine is recognised by the system's own counts and by times that differ; a quiet one is not accused."""

from __future__ import annotations

import pytest

from selfjudge.store import run_folder as load


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


def test_the_clocks_go_forwards() -> None:
    first, second = load._read_clocks(), load._read_clocks()
    assert all(later >= earlier for earlier, later in zip(first, second, strict=True))
    assert load._count_cores() >= 1


def test_watches_of_many_answers_read_the_clocks_twice_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now, reads = [1000.0], []
    monkeypatch.setattr(load, "_read_clocks", lambda: (reads.append(1), (now[0], now[0], 0.0))[1])
    with monkeypatch.context() as patched:
        patched.setattr(load.time, "monotonic", lambda: now[0])
        load._read_at.cache_clear()
        watches = [load.LoadWatch(often=True) for _ in range(20)]
        assert len(reads) == 1
        assert [watch.usage for watch in watches] == [(0.0, 0.0, 0.0)] * 20
        now[0] += load.SHORTEST
        assert [watch.usage for watch in watches] == [(0.5, 0.5, 0.0)] * 20
        assert len(reads) == 2
        assert load.LoadWatch().usage == (0.0, 0.0, 0.0)
        assert len(reads) == 4, "whoever measures reads them at once"
        load._read_at.cache_clear()


def test_without_the_counts_of_the_system_our_own_work_is_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(load.Path, "read_text", missing)
    _, busy, own = load._read_clocks()
    assert busy == own
