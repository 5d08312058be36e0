"""Cost tables: what is between measured points, what is kept, and files that must not be believed."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch

from conftest import tiny_model
from selfjudge.decoding import loop
from selfjudge.decoding.admission import Request
from selfjudge.decoding.costs import CONTRADICTION, MEASURING, RECENT, CostTable, kept_tables, watch_measuring
from selfjudge.decoding.loop import decode
from selfjudge.decoding.rules import EXACT
from selfjudge.engine.draft import BatchEngines
from selfjudge.engine.select import make_draft, make_engine
from selfjudge.errors import SelfJudgeError

SHAPE = json.dumps({"target": {"parameters": 5, "dtype": "q4"}, "draft": "d", "device": "cpu"})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SELFJUDGE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "costs"


def measured(shape: str = SHAPE) -> CostTable:
    table = CostTable(shape)
    for rows, factor in ((1, 1.0), (8, 2.0)):
        for drafts in (0, 1, 4):
            table.add(rows, drafts, (0.1 * factor * drafts, factor * (1 + 0.2 * drafts)))
    return table


def keep(table: CostTable) -> None:
    for rows in table.cycles:
        table.save(rows)


def test_what_lies_between_measured_points_is_interpolated() -> None:
    table = measured()
    assert table.seconds(1, 5) == pytest.approx([1 + 0.3 * drafts for drafts in range(6)])
    assert table.seconds(8, 2) == pytest.approx([2.0, 2.6, 3.2])
    between = table.seconds(4, 2)
    assert between == pytest.approx([1 + 3 / 7 + 0.3 * (1 + 3 / 7) * drafts for drafts in range(3)])
    assert table.seconds(64, 2)[0] > table.seconds(8, 2)[0]
    assert table.seconds(64, 4) == sorted(table.seconds(64, 4))
    assert CostTable().seconds(3, 2) == sorted(CostTable().seconds(3, 2))  # nothing is known yet


def test_from_one_number_of_rows_others_cost_what_as_many_tokens_cost() -> None:
    table = CostTable()
    for drafts in (0, 1, 3, 7):
        table.add(1, drafts, (0.1 * drafts, 1 + 0.5 * drafts))
    assert table.seconds(4, 1)[0] == pytest.approx(2.5)  # a pass of four tokens
    assert table.seconds(4, 1)[1] == pytest.approx(4.5 + 0.1 * 2.5)  # of eight, and a draft step of four rows
    assert table.covers(1)
    assert not table.covers(4)


def test_a_time_that_is_longer_than_one_with_more_drafts_does_not_count() -> None:
    table = measured()
    table.add(1, 1, (0.1, 9.0))
    assert table.seconds(1, 4)[1] == pytest.approx(table.seconds(1, 4)[4])


def test_times_of_a_busy_machine_are_smoothed() -> None:
    table = CostTable()
    for drafts, slow in ((0, 1.0), (1, 1.0), (2, 5.0), (3, 1.0), (4, 1.0), (6, 3.0), (10, 1.0)):
        table.add(1, drafts, (0.1 * drafts, slow * (1 + 0.2 * drafts)))
    table.smooth(1)
    assert table.rough
    assert table.cycles[1][0] == (0.0, 1.0)  # plain cycles stay
    assert table.seconds(1, 10) == pytest.approx([1 + 0.3 * drafts for drafts in range(11)], rel=0.1)


def test_a_table_is_kept_and_belongs_to_one_shape(folder: Path) -> None:
    keep(measured())
    again, other = CostTable(SHAPE), CostTable(SHAPE.replace("cpu", "cuda"))
    assert again.cycles == measured().cycles
    assert not other.cycles
    assert [entry["shape"]["device"] for entry in kept_tables()] == ["cpu"]
    keep(measured(""))  # of unknown models
    assert len([*folder.iterdir()]) == 1
    keep(
        measured(json.dumps({"target": {"name": "org/big", "dtype": "auto"}, "device": "cuda"}))
    )  # of earlier versions
    assert len(kept_tables()) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: "no JSON",
        lambda record: json.dumps({**record, "shape": "of another machine"}),
        lambda record: json.dumps({**record, "cycles": [1, 2]}),
        lambda record: json.dumps({**record, "cycles": {"1": {"0": [0.0, -1.0]}}}),
        lambda record: json.dumps({**record, "cycles": {"1": {"0": [0.0]}}}),
        lambda record: json.dumps({**record, "cycles": {"-1": {"0": [0.0, 1.0]}}}),
        lambda record: json.dumps({**record, "cycles": {"1": {"3": [0.0, 1.0]}}}),  # plain decoding is missing
        lambda record: json.dumps({**record, "cycles": {"1": {"0": [0.0, 1e300]}}}),
        lambda record: json.dumps({"shape": record["shape"]}),
    ],
)
def test_a_damaged_file_counts_as_none(damage, folder: Path) -> None:  # type: ignore[no-untyped-def]
    keep(measured())
    (path,) = folder.iterdir()
    path.write_text(damage(json.loads(path.read_text("utf-8"))), "utf-8")
    assert not CostTable(SHAPE).cycles
    assert not kept_tables()
    keep(measured())
    assert CostTable(SHAPE).cycles


@pytest.mark.skipif(os.name != "posix", reason="a file where the folder should be")
def test_a_folder_that_cannot_be_written_is_one_line(folder: Path) -> None:
    folder.parent.mkdir()
    folder.write_text("a file", "utf-8")
    with pytest.warns(UserWarning, match=r"speeds are measured again next time: .* cannot be written"):
        measured().save(1)


def test_a_busy_machine_does_not_contradict_the_table_and_another_machine_does() -> None:
    busy, wrong = measured(), measured()
    for _ in range(RECENT):
        for drafts in (0, 4):
            seconds = busy.seconds(1, 4)[drafts]
            busy.watch(1, drafts, 3.0 * seconds)
            wrong.watch(1, drafts, seconds * (1.0 if drafts else 1.1 * CONTRADICTION))
    assert not busy.stale
    assert wrong.stale
    assert not wrong.covers(1)
    wrong.begin(1)
    assert not wrong.cycles
    assert not wrong.stale


def engines() -> BatchEngines:
    target, draft = tiny_model(seed=1), tiny_model(seed=2)
    return BatchEngines(make_engine(target, kind="reference"), make_draft(draft, target, kind="reference"), {}, SHAPE)


@pytest.mark.quick("True")
@pytest.mark.parametrize("busy", [True, False])
def test_a_model_is_measured_once_and_not_kept_where_the_machine_is_busy(
    busy: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop.LoadWatch, "describe", lambda self: "this machine is busy" if busy else "")
    monkeypatch.setattr(loop, "MEASURE_SECONDS", math.inf)
    lent, request = engines(), [Request([5, 6, 7], 12)]
    torch.manual_seed(0)
    plain = [t for step in decode(engines(), request, EXACT, gamma=0) for e in step.emissions for t in e.tokens]
    said: list[str] = []
    for _ in range(2):
        with watch_measuring(said.append):
            steps = [*decode(lent, request, EXACT, gamma="auto")]
        assert [t for step in steps for e in step.emissions for t in e.tokens] == plain
        for step in steps[1:]:  # what an answer's gain is told by, where it is reliable
            assert not step.cost if busy else step.cost >= step.plain_cost > 0
    assert said == [MEASURING]  # once, and by words
    table = lent.kept["gamma"].costs
    assert {0, 1, 2, 3, 4, 6, 10} <= table.cycles[1].keys()
    assert folder.is_dir() is not busy
    if not busy:
        monkeypatch.setattr(loop, "_measure", None)  # not called: the next process reads the file
        assert [*decode(engines(), request, EXACT, gamma="auto")]


def test_rows_of_a_busy_machine_are_not_kept_with_others(folder: Path) -> None:
    table = measured()
    table.save(8)  # one row was measured beside other programs
    assert CostTable(SHAPE).cycles.keys() == {8}
    other = CostTable(SHAPE)  # another process
    for drafts in (0, 1, 2):
        other.add(64, drafts, (0.1 * drafts, 3.0))
    other.save(64)
    assert CostTable(SHAPE).cycles.keys() == {8, 64}


def test_a_measurement_that_is_broken_off_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    lent, run = engines(), loop.Cycle.run

    def fail(self: loop.Cycle, uniforms: None) -> object:
        if len(lent.kept["gamma"].costs.cycles.get(1, ())) == 2:
            raise KeyboardInterrupt
        return run(self, uniforms)

    monkeypatch.setattr(loop.Cycle, "run", fail)
    with pytest.raises(KeyboardInterrupt):
        loop.measure_costs(lent, 1)
    assert not lent.kept["gamma"].costs.covers(1)


def test_a_window_too_short_to_measure_decodes_all_the_same() -> None:
    target, draft = (tiny_model(seed=seed, max_position_embeddings=8) for seed in (1, 2))
    lent = BatchEngines(make_engine(target, kind="reference"), make_draft(draft, target, kind="reference"))
    for _ in range(2):
        assert [*decode(lent, [Request([5, 6], 4)], EXACT, gamma="auto")]
    assert not lent.kept["gamma"].costs.cycles


def test_nothing_is_measured_for_requests_that_are_refused() -> None:
    lent = engines()
    with pytest.raises(SelfJudgeError, match="no prompt"):
        next(decode(lent, [], EXACT, gamma="auto"))
    assert not lent.kept["gamma"].costs.cycles


def test_a_table_that_is_contradicted_twice_stays() -> None:
    """Long contexts cost plain cycles a larger share than others: measuring again would not help."""
    table = measured()
    for _ in range(2):
        for _ in range(RECENT):
            for drafts in (0, 4):
                table.watch(1, drafts, table.seconds(1, 4)[drafts] * (1.0 if drafts else 2 * CONTRADICTION))
        if table.stale:
            fresh = measured().cycles
            table.begin(1)
            table.cycles |= fresh
    assert not table.stale
    assert table.covers(1)
