"""Recorded drafts of real prompts, replayed against the measured costs of several machines.

`data/acceptance-*.npz` has, for every position of a greedy answer, how many of ten drafts would stand there and what
probability the draft gave each of them; so any choice of γ can be replayed exactly. `data/costs.json` has the seconds of
cycles by machine, rows and drafts, as they were measured.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfjudge.decoding.acceptance import RowBlocks
from selfjudge.decoding.costs import CostTable
from selfjudge.decoding.gamma import LiveRows
from selfjudge.engine.draft import BACKLOG

DATA = Path(__file__).with_name("data")
DEPTH = 10


@dataclass(frozen=True, eq=False)
class Recording:
    """One answer."""

    run: NDArray[np.uint8]
    """[T] how many drafts stand at each position."""
    q: NDArray[np.float64]
    """[T, 10] probability of each draft by the draft model."""


@cache
def recordings(pair: str) -> dict[str, list[Recording]]:
    """The answers of a pair by task."""
    tasks: dict[str, list[Recording]] = {}
    with np.load(DATA / f"acceptance-{pair}.npz") as file:
        for key in file.files:
            name, kind = key.rsplit(".", 1)
            if kind == "run":
                answer = Recording(file[key], file[f"{name}.q"] / 255.0)
                tasks.setdefault(name.rsplit(".", 1)[0], []).append(answer)
    return tasks


@cache
def costs(machine: str) -> dict[int, dict[int, tuple[float, float]]]:
    """Rows → drafts → seconds of drafting and of the rest of a cycle."""
    table = json.loads((DATA / "costs.json").read_text("utf-8"))[machine]["cycles"]
    return {int(rows): {int(d): (s[0], s[1]) for d, s in cells.items()} for rows, cells in table.items()}


@dataclass
class Row:
    """An answer while it is replayed."""

    answer: Recording
    at: int = 0

    @property
    def ended(self) -> bool:
        return self.at >= len(self.answer.run)


@cache
def tokens_a_cycle(answers: tuple[Recording, ...], rows: int, gamma: int) -> float:
    """Tokens that a cycle of this γ makes, which is the same on every machine."""
    queue, made, cycles = list(answers), 0, 0
    live = [Row(queue.pop(0)) for _ in range(min(rows, len(queue)))]
    while len(live) == rows:
        for row in live:
            step = min(int(row.answer.run[row.at]), gamma) + 1
            step = min(step, len(row.answer.run) - row.at)
            row.at, made = row.at + step, made + step
        cycles += 1
        live = [Row(queue.pop(0)) if row.ended and queue else row for row in live]
        live = [row for row in live if not row.ended]  # ends once nothing waits: a full machine all the time
    return made / cycles


@dataclass
class Replay:
    """A machine that decodes recorded answers."""

    machine: str
    noise: float = 0.03
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    made: int = 0
    """Tokens of the latest replay."""

    def seconds(self, rows: int, drafts: int) -> tuple[float, float]:
        """Drafting and the rest, with noise; between measured numbers of drafts, interpolated."""
        table = costs(self.machine)[rows]
        known = sorted(table)
        draft, rest = (float(np.interp(drafts, known, [table[d][part] for d in known])) for part in (0, 1))
        factor = float(np.exp(self.noise * self.random.standard_normal())) if self.noise else 1.0
        return draft * factor, rest * factor

    def fixed(self, answers: Sequence[Recording], rows: int, gamma: int) -> float:
        """Tokens per second with this γ, without noise."""
        return tokens_a_cycle(tuple(answers), rows, gamma) / sum(Replay(self.machine, 0.0).seconds(rows, gamma))

    def auto(self, controller, answers: Sequence[Recording], rows: int, *, static: bool) -> float:  # type: ignore[no-untyped-def]
        """Tokens per second with what a controller chooses."""
        queue, made, spent, behind = list(answers), 0, 0.0, 0
        live = [Row(queue.pop(0)) for _ in range(min(rows, len(queue)))]
        blocks = RowBlocks.new(rows)
        while len(live) == rows:
            gamma, drafts = controller.choose(rows, min(behind, BACKLOG), LiveRows(blocks, np.full(rows, 192))), 0
            while drafts < gamma:
                drafts += 1
                q = [float(row.answer.q[row.at, drafts - 1]) for row in live] + [1.0] * (rows - len(live))
                if not static and not controller.draft_on(lambda q=q: q):
                    break
            accepted = np.zeros(rows, np.int64)
            alive = np.zeros(rows, bool)
            for i, row in enumerate(live):
                accepted[i], alive[i] = min(int(row.answer.run[row.at]), drafts), True
                step = min(int(accepted[i]) + 1, len(row.answer.run) - row.at)
                row.at, made = row.at + step, made + step
                accepted[i] = min(accepted[i], step)
            draft, rest = self.seconds(rows, drafts)
            spent += draft + rest
            seconds = {"draft": draft, "target": rest}
            controller.observe(accepted, alive, drafts, seconds, blocks, behind=behind > 0)
            behind = 0 if drafts else behind + 1
            for i, row in enumerate(live):
                if row.ended:
                    blocks.counts[i], blocks.run[i] = 0, 0
            live = [Row(queue.pop(0)) if row.ended and queue else row for row in live]
            live = [row for row in live if not row.ended]  # ends once nothing waits: a full machine all the time
        self.made = made
        return made / spent

    def batch(self, answers: Sequence[Recording], gamma: int | Any, limit: int = 192) -> float:
        """Tokens per second of one batch, which shrinks as its rows end: with this γ, or by what a controller chooses."""
        rows, made, spent = len(answers), 0, 0.0
        ends = np.array([min(limit, len(answer.run)) for answer in answers])
        blocks = RowBlocks.new(rows)
        size, at, table = rows, np.zeros(rows, np.int64), CostTable()
        for known, cells in costs(self.machine).items():
            for drafts, seconds in cells.items():
                table.add(known, drafts, seconds)
        while len(live := np.flatnonzero(at < ends)):
            if 2 * len(live) <= size:
                size = 1 << (len(live) - 1).bit_length()
            known = LiveRows(RowBlocks(blocks.counts[live], blocks.run[live]), limit - at[live])
            drafts = gamma if isinstance(gamma, int) else gamma.choose(size, 0, known)
            steps = np.array([min(int(answers[b].run[at[b]]), drafts) + 1 for b in live])
            steps = np.minimum(steps, ends[live] - at[live])
            used = np.zeros(rows, np.int64)
            used[live] = np.minimum([min(int(answers[b].run[at[b]]), drafts) for b in live], steps)
            at[live] += steps
            seconds = table.seconds(size, DEPTH)[drafts]
            made, spent = made + int(steps.sum()), spent + seconds
            if not isinstance(gamma, int):
                alive = np.isin(np.arange(rows), live)
                gamma.observe(used, alive, drafts, {"target": seconds}, blocks)
        return made / spent
