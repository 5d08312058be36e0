"""γ chosen by the machine, on simulated machines and drafts whose best γ is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from replay import DEPTH, Replay, costs, recordings
from selfjudge.decoding.acceptance import Acceptance, Calibration, RowBlocks
from selfjudge.decoding.gamma import (
    MAX_AUTO_GAMMA,
    PROBE_BUDGET,
    STATIC_CHOICES,
    GammaController,
    LiveRows,
    PairStatistics,
    RequestGamma,
)
from selfjudge.decoding.rules import Exact, FLy, TopK
from selfjudge.engine.draft import BACKLOG

SURE, UNSURE = 0.95, 0.2  # how often a draft is accepted, which is what the draft model says of it


@dataclass
class Machine:
    """Seconds of a cycle, in units of a plain one, and how often the draft is sure."""

    step: float = 0.15
    token: float = 0.1
    """What each further token adds to a pass."""
    sure: Callable[[float], float] = lambda progress: 0.5
    """Share of places where the draft is sure, by how much of the answer there is."""
    capture_seconds: float = 0.0
    used: Counter[int] = field(default_factory=Counter)
    """Cycles by their drafts."""
    captured: set[int] = field(default_factory=set)
    """Numbers of drafts that a static engine has captured."""

    def cycle(self, drafts: int) -> float:
        return 1 + (self.token + self.step) * drafts

    def fixed(self, gamma: int) -> float:
        """Seconds of a token with this γ."""
        p = [UNSURE + (SURE - UNSURE) * self.sure(progress) for progress in np.arange(0.05, 1, 0.1)]
        return float(np.mean([self.cycle(gamma) / sum(share**i for i in range(gamma + 1)) for share in p]))

    def statistics(self, *all_rows: int) -> PairStatistics:
        """What a pair knows once this machine was measured."""
        statistics = PairStatistics()
        for rows in all_rows:
            for drafts in range(MAX_AUTO_GAMMA + 1):
                statistics.costs.add(rows, drafts, (self.step * drafts, 1 + self.token * drafts))
        return statistics

    def decode(self, statistics: PairStatistics, tokens: int, rows: int, static: bool, seed: int = 0) -> float:
        """Seconds of a token of a batch of answers with the γ that is chosen."""
        controller, random = GammaController(statistics, Exact(), static=static), np.random.default_rng(seed)
        captured = self.captured
        controller.is_captured = lambda rows, gamma: not static or gamma in captured
        spent, made, behind, blocks = 0.0, 0.0, 0, RowBlocks.new(rows)
        while made < tokens:
            gamma, drafts = controller.choose(rows, min(behind, BACKLOG), LiveRows(blocks, np.full(rows, tokens))), 0
            if static and gamma not in captured:
                captured.add(gamma)
                spent, statistics.capture_seconds = spent + self.capture_seconds, self.capture_seconds
            accepted, standing = np.zeros(rows, np.int64), np.ones(rows, bool)
            while drafts < gamma:
                q = np.where(random.random(rows) < self.sure(made / tokens), SURE, UNSURE)
                standing &= random.random(rows) < q
                accepted, drafts = accepted + standing, drafts + 1
                if not static and not controller.draft_on(lambda q=q: q):
                    break
            noise = np.exp(0.05 * random.standard_normal())
            reading = self.step * (1 + 0.1 * min(behind, 64)) if behind and drafts else 0.0
            seconds = {
                "draft": noise * (drafts * self.step + reading),
                "target": noise * (1 + self.token * drafts),
                "judge": 0.0,
                "rule": 0.0,
            }
            controller.observe(accepted, np.ones(rows, bool), drafts, seconds, blocks, behind=behind > 0)
            behind = 0 if drafts else behind + 1
            spent, made = spent + sum(seconds.values()), made + 1 + accepted.mean()
            self.used[drafts] += 1
        return spent / made


MACHINES = {
    "drafts are cheap": lambda: Machine(),
    "drafts are cheap and good": lambda: Machine(step=0.05, token=0.03, sure=lambda progress: 0.9),
    "drafting does not pay": lambda: Machine(step=0.3, token=0.3, sure=lambda progress: 0.2),
    "drafting pays a little": lambda: Machine(step=0.2, token=0.15, sure=lambda progress: 0.35),
    "tokens cost as much as passes": lambda: Machine(step=0.2, token=0.9, sure=lambda progress: 0.6),
    "drafts become good": lambda: Machine(step=0.1, sure=lambda progress: 0.1 if progress < 0.5 else 0.9),
    "drafts become bad": lambda: Machine(step=0.1, sure=lambda progress: 0.1 if progress > 0.5 else 0.9),
}


@pytest.mark.quick("False-1-drafts become*", "True-64-drafting*", "False-1-drafting*", "True-64-drafts are cheap")
@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize(
    ("static", "rows"),
    [(False, 1), (True, 64), *(pytest.param(*few, marks=pytest.mark.slow) for few in ((True, 1), (False, 8)))],
)
def test_auto_is_close_to_the_best_fixed_choice(name: str, static: bool, rows: int) -> None:
    machine = MACHINES[name]()
    statistics = machine.statistics(rows)
    machine.decode(statistics, 64, rows, static)  # what is learned once
    auto = np.mean([machine.decode(statistics, 250, rows, static, seed) for seed in range(2)])
    best = min(machine.fixed(gamma) for gamma in range(MAX_AUTO_GAMMA + 1))
    assert auto < 1.03 * machine.fixed(0)
    assert auto < 1.05 * best
    if not static and rows == 1 and name.startswith("drafts"):
        assert auto < 0.99 * best  # no fixed γ ends where the draft is unsure


def test_the_draft_is_asked_for_its_probability_only_where_it_matters() -> None:
    asked = 0

    def q() -> list[float]:
        nonlocal asked
        asked += 1
        return [0.99]

    dear, cheap = (Machine(step=step).statistics(1) for step in (0.9, 0.01))
    controller = GammaController(dear, Exact())
    assert controller.choose(1)
    assert not controller.draft_on(q)
    assert asked == 0  # even a sure draft would be the last
    controller.observe(np.array([1]), np.ones(1, bool), 1, {"draft": 0.9, "target": 1.1}, RowBlocks.new(1))
    controller = GammaController(cheap, Exact())
    assert controller.choose(1)
    assert controller.draft_on(q)
    assert asked == 1


def test_a_static_engine_captures_little_and_what_it_captures_pays() -> None:
    machine = Machine(step=0.05, token=0.03, sure=lambda progress: 0.9, capture_seconds=60.0)
    statistics = machine.statistics(1)
    first = machine.decode(statistics, 2000, 1, static=True)
    assert set(machine.used) <= {0, *STATIC_CHOICES}
    assert len(machine.used) <= 3
    assert first < 1.3 * min(machine.fixed(g) for g in STATIC_CHOICES) + 2 * 60.0 / 2000
    short = Machine(step=0.05, token=0.03, sure=lambda progress: 0.9, capture_seconds=60.0)
    short.decode(short.statistics(1), 40, 1, static=True)
    assert len(short.used) == 1  # another capture would not pay


def test_short_answers_one_after_the_other_pay_for_a_capture_together() -> None:
    machine = Machine(step=0.05, token=0.03, sure=lambda progress: 0.9, capture_seconds=60.0)
    statistics = machine.statistics(1)
    best = min(STATIC_CHOICES, key=machine.fixed)
    for seed in range(90):
        machine.decode(statistics, 40, 1, static=True, seed=seed)
    machine.used.clear()
    assert np.mean([machine.decode(statistics, 40, 1, static=True, seed=seed) for seed in range(20)]) < (
        1.1 * machine.fixed(best)
    )
    assert machine.fixed(machine.used.most_common(1)[0][0]) < 1.05 * machine.fixed(best)
    assert len(machine.captured) <= 3
    machine.captured.clear()  # the engine needed the memory
    machine.decode(statistics, 10, 1, static=True)
    assert 0 not in machine.captured  # one short answer does not pay for plain decoding, too


def test_acceptance_counts_rows_that_were_reached() -> None:
    acceptance, random = Acceptance(), np.random.default_rng(0)
    assert acceptance.shares(3) == pytest.approx([Acceptance.FIRST] * 3)
    wanted = [0.9, 0.5, 0.2]
    for _ in range(400):
        accepted = (random.random((64, 3)) < wanted).cumprod(1).sum(1)
        acceptance.observe(accepted, 3)
    assert acceptance.shares(3) == pytest.approx(wanted, abs=0.06)
    assert acceptance.shares(5)[3:] == pytest.approx([acceptance.shares(3)[2]] * 2)
    fresh = Acceptance()
    fresh.begin_with(acceptance, weight=4.0)
    assert fresh.reached[0] == pytest.approx(4.0)
    assert fresh.shares(1)[0] == pytest.approx((0.9 * 4 + 0.7 * 2) / 6, abs=0.02)


def test_confidence_is_calibrated_by_what_was_accepted() -> None:
    calibration, random = Calibration(), np.random.default_rng(0)
    for _ in range(300):
        q = random.random((4, 5))
        accepted = (random.random((4, 5)) < q**2).cumprod(1).sum(1)  # overconfident
        calibration.observe(q, accepted)
    for q in (0.15, 0.4, 0.6, 0.85):
        assert calibration(np.array([q]))[0] == pytest.approx(q**2, abs=0.12)


def test_a_rule_that_needs_long_blocks_gets_them() -> None:
    rule = FLy(window=6)
    eager, static = GammaController(PairStatistics(), rule), GammaController(PairStatistics(), rule, static=True)
    assert eager.choose(1) == MAX_AUTO_GAMMA
    assert [eager.draft_on(lambda: [1e-6]) for _ in range(7)] == [True] * 6 + [False]
    assert static.choose(1) == 8
    assert GammaController(PairStatistics(), FLy(window=14), static=True).choose(1) == 15


@pytest.mark.parametrize(
    ("machine", "pair", "rows", "static"),
    [
        pytest.param("h200-qwen", "qwen", 1, True, marks=pytest.mark.slow),
        pytest.param("h200-qwen", "qwen", 64, True, marks=pytest.mark.slow),
        pytest.param("h200-qwen", "qwen", 8, True, marks=pytest.mark.slow),
        pytest.param("h200-qwen", "qwen", 512, True, marks=pytest.mark.slow),
        pytest.param("x86-qwen", "qwen", 1, False, marks=pytest.mark.slow),
        pytest.param("x86-smollm2", "smollm2", 1, False, marks=pytest.mark.slow),
        pytest.param("arm-qwen", "qwen", 1, False, marks=pytest.mark.slow),
        pytest.param("arm-smollm2", "smollm2", 1, False, marks=pytest.mark.slow),
    ],
)
def test_regret_on_recorded_prompts(machine: str, pair: str, rows: int, static: bool) -> None:
    """Real prompts of six tasks on measured machines: `auto` loses at most 3 % to the best γ in hindsight."""
    for task, answers in recordings(pair).items():
        size = max(len(answers), (6 if rows < 512 else 3) * rows)
        many = (answers * (1 + size // len(answers)))[:size]
        replay, statistics = Replay(machine), PairStatistics()
        for known, cells in costs(machine).items():
            for drafts, seconds in cells.items():
                statistics.costs.add(known, drafts, seconds)
        replay.auto(
            GammaController(statistics, Exact(), static=static, steady=True), many[: 2 * rows], rows, static=static
        )
        made = spent = 0.0
        for answer in [many] if rows > 1 else [[each] for each in many]:  # one by one, as a user asks
            speed = replay.auto(
                GammaController(statistics, Exact(), static=static, steady=True), answer, rows, static=static
            )
            made += replay.made
            spent += replay.made / speed
        fixed = {gamma: replay.fixed(many, rows, gamma) for gamma in range(DEPTH + 1)}
        assert made / spent > 0.97 * max(fixed.values()), task
        assert made / spent > 0.97 * fixed[0], task


def test_first_answers_lose_little_where_drafts_do_not_pay() -> None:
    """Each is the first of a process: there are no earlier ones that say what drafts are worth."""
    replay = Replay("x86-smollm2", noise=0.0)
    plain = 1 / sum(replay.seconds(1, 0))
    for task, answers in recordings("smollm2").items():
        speeds = []
        for answer in [replace(answer, run=answer.run[:96], q=answer.q[:96]) for answer in answers]:
            statistics = PairStatistics()
            for drafts, seconds in costs("x86-smollm2")[1].items():
                statistics.costs.add(1, drafts, seconds)
            controller = GammaController(statistics, Exact(), steady=True)
            speeds.append(replay.auto(controller, [answer], 1, static=False) / plain)
        assert np.mean(speeds) > 0.95, task


@pytest.mark.parametrize(
    ("machine", "rows"),
    [
        pytest.param("h200-qwen", 8, marks=pytest.mark.slow),
        pytest.param("h200-8b", 64, marks=pytest.mark.slow),
        *(pytest.param("h200-qwen", rows, marks=pytest.mark.slow) for rows in (1, 16, 64)),
        *(pytest.param("h200-8b", rows, marks=pytest.mark.slow) for rows in (1, 8, 16)),
    ],
)
def test_regret_of_batches_that_shrink(machine: str, rows: int) -> None:
    """A batch ends with its slowest rows. From the second one on `auto` loses at most 3 % to the best γ in hindsight."""
    replay, statistics, over = Replay(machine), PairStatistics(), []
    for known, cells in costs(machine).items():
        for drafts, seconds in cells.items():
            statistics.costs.add(known, drafts, seconds)
    for task, answers in recordings("qwen").items():
        size = max(24, min(6 * rows, 192))
        many = (answers * (1 + size // len(answers)))[:size]
        batches = [many[i : i + rows] for i in range(0, size, rows)]
        replay.batch(batches[0], GammaController(statistics, Exact(), static=True))
        fixed = [1 / np.mean([1 / replay.batch(each, gamma) for each in batches]) for gamma in (0, 1, 2, 3, 5, 8)]
        own = [replay.batch(each, GammaController(statistics, Exact(), static=True)) for each in batches]
        over.append(1 / np.mean(1 / np.array(own)) / max(fixed))
        assert over[-1] > 0.97, (task, over[-1])
    assert np.mean(over) > 0.99


def test_a_static_engine_counts_only_what_it_chooses_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host counts every row of every cycle while the device waits for the next one."""
    estimated: list[tuple[int, ...]] = []
    counted: list[int] = []
    tokens, observe = RowBlocks.tokens, Acceptance.observe

    def spy(blocks: RowBlocks, all_rows: NDArray[np.float64]) -> NDArray[np.float64]:
        estimated.append((own := tokens(blocks, all_rows)).shape)
        return own

    monkeypatch.setattr(RowBlocks, "tokens", spy)
    monkeypatch.setattr(Acceptance, "observe", lambda *a, **k: counted.append(1) or observe(*a, **k))
    for static in (True, False):
        controller, blocks = GammaController(Machine().statistics(8), Exact(), static=static), RowBlocks.new(8)
        for _ in range(5):
            gamma = controller.choose(8, 0, LiveRows(blocks, np.full(8, 192)))
            controller.observe(np.ones(8, np.int64), np.ones(8, bool), gamma, {"target": 1.0}, blocks)
        assert len(counted) == (0 if static else 2 * 5)  # of this batch, and for the next ones
    assert estimated == 5 * [(8, 1 + max(STATIC_CHOICES))]


def _answers(choice: RequestGamma, share: float, rows: int, cycles: int = 60) -> None:
    """Count cycles of the γ that is chosen, in which every draft is accepted with probability `share`."""
    random, blocks = np.random.default_rng(0), RowBlocks.new(rows)
    for _ in range(cycles):
        gammas = np.full(rows, choice.choose(rows))
        stands = random.random((rows, max(1, gammas[0]))) < share
        accepted = np.minimum(stands.cumprod(1).sum(1), gammas)
        choice.observe(accepted, gammas, blocks)


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_a_request_gets_the_gamma_that_pays_under_its_rule(share: float, rows: int) -> None:
    machine = Machine(step=0.05, token=0.1)
    choice = RequestGamma(machine.statistics(rows), TopK(2))
    _answers(choice, share, rows, cycles=300)
    speeds = {g: sum(share**i for i in range(g + 1)) / machine.cycle(g) for g in (0, *STATIC_CHOICES)}
    assert speeds[choice.choose(rows)] > 0.95 * max(speeds.values())


def test_requests_are_plain_where_drafts_lose_and_drafts_are_tried_now_and_then() -> None:
    machine = Machine(step=0.2, token=0.3)
    choice = RequestGamma(machine.statistics(1), TopK(2))
    _answers(choice, 0.05, 1, cycles=1000)
    later = [choice.choose(1) for _ in range(400)]
    loss = 1 - 1.05 / machine.cycle(1)
    assert 0 < sum(gamma > 0 for gamma in later) / 400 <= 1.1 * PROBE_BUDGET / loss + 1 / 400


def test_rows_that_entered_a_small_batch_do_not_hand_their_gamma_on() -> None:
    """Alone drafts are cheap, beside many rows dear. Who enters beside a large γ takes what all of its kind should."""
    statistics = PairStatistics()
    for rows, token in ((1, 0.01), (64, 0.4)):
        for drafts in range(MAX_AUTO_GAMMA + 1):
            statistics.costs.add(rows, drafts, (0.02 * drafts, 1 + token * drafts))
    choice = RequestGamma(statistics, TopK(2))
    _answers(choice, 0.7, 1)
    early = choice.choose(1, for_good=True)
    entered = choice.choose(64, early, for_good=True)
    assert 0 < entered < early == choice.choose(64, early), "for a cycle that drafts as many they cost nothing"
    assert choice.choose(64, entered, for_good=True) == entered
    dear = PairStatistics(records=statistics.records)
    for drafts in range(MAX_AUTO_GAMMA + 1):
        dear.costs.add(64, drafts, (0.02 * drafts, 1 + 0.9 * drafts))
    later = [RequestGamma(dear, TopK(2)).choose(64, entered, for_good=True) for _ in range(100)]
    assert later.count(0) > 70, "where drafts lose, who enters beside them does not go on with them either"


def test_a_rule_begins_with_what_exact_accepts() -> None:
    machine = Machine(step=0.05, token=0.1)
    statistics = machine.statistics(1)
    _answers(RequestGamma(statistics, Exact()), 0.95, 1)
    assert RequestGamma(statistics, TopK(2)).choose(1) == RequestGamma(statistics, Exact()).choose(1) > 4


def test_a_static_engine_keeps_a_gamma_that_is_about_as_fast() -> None:
    """Every change to a smaller γ lets the draft read what the new cycle has no room for."""
    statistics = Machine(step=0.05, token=0.02).statistics(8)
    controller, random = GammaController(statistics, Exact(), static=True), np.random.default_rng(0)
    used, blocks = [], RowBlocks.new(8)
    for _ in range(300):
        used.append(controller.choose(8, 0, LiveRows(blocks, np.full(8, 192))))
        stands = random.random((8, used[-1])) < 0.75
        controller.observe(stands.cumprod(1).sum(1), np.ones(8, bool), used[-1], {"target": 1.0}, blocks)
    changes = sum(one != two for one, two in pairwise(used))
    assert changes <= 12
    speeds = {g: sum(0.75**i for i in range(g + 1)) / (1 + 0.07 * g) for g in STATIC_CHOICES}
    assert np.mean([speeds[g] for g in used]) > 0.97 * max(speeds.values())
