"""How often a rule that loses just ε is certified, if prompts depend on one another or somebody tries again and again.

Simulated. Each case is first counted as if all prompts were independent, to show that the case would matter.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from power import simulate_power
from selfjudge.errors import SelfJudgeError
from selfjudge.tune import independence as ledger
from selfjudge.tune.certify import Claim, average_groups, compute_log_capital, share_delta
from selfjudge.tune.independence import SHINGLE, SIMILAR, Groups, key_prompt, normalise

EPSILON, DELTA = 0.1, 0.1
Random = np.random.Generator
Draw = Callable[[Random, int, int], np.ndarray]


def draw_losses(rng: Random, runs: int, n: int) -> np.ndarray:
    return (rng.random((runs, n)) < EPSILON).astype(float)


def draw_both_ways(rng: Random, runs: int, n: int) -> np.ndarray:
    u = rng.random((runs, n))
    return np.where(u < 0.2, 1.0, np.where(u < 0.3, -1.0, 0.0))


def draw_graded(rng: Random, runs: int, n: int) -> np.ndarray:
    return 2 * EPSILON * rng.random((runs, n))


def draw_topics(correlation: float) -> Draw:
    """Topics of ten prompts: with probability √ρ a prompt is lost if its topic is, else by its own chance."""

    def draw(rng: Random, runs: int, n: int) -> np.ndarray:
        topic = np.repeat(draw_losses(rng, runs, n // 10), 10, axis=1)
        return np.where(rng.random((runs, n)) < math.sqrt(correlation), topic, draw_losses(rng, runs, n))

    return draw


def draw_copies(times: int, draw: Draw = draw_losses) -> Draw:
    """Each prompt as so many paraphrases, won or lost together."""
    return lambda rng, runs, n: np.repeat(draw(rng, runs, n // times), times, axis=1)


def certifies(differences: np.ndarray, delta: float = DELTA) -> np.ndarray:
    """[runs, n] D → [runs] whether the bet is won."""
    claim = Claim(EPSILON, delta, differences.shape[1])
    return compute_log_capital(claim, differences).max(-1) >= claim.goal


def by_group(differences: np.ndarray, size: int) -> np.ndarray:
    return differences.reshape(len(differences), -1, size).mean(-1)


CASES: dict[str, tuple[Draw, int, float]] = {
    "independent losses": (draw_losses, 1, 0.0),
    "independent, both ways": (draw_both_ways, 1, 0.0),
    "independent, graded": (draw_graded, 1, 0.0),
    "2 paraphrases": (draw_copies(2), 2, 0.11),
    "4 paraphrases": (draw_copies(4), 4, 0.15),
    "10 paraphrases": (draw_copies(10), 10, 0.25),
    "10 paraphrases, both ways": (draw_copies(10, draw_both_ways), 10, 0.25),
    "topics of 10, correlation 0.3": (draw_topics(0.3), 10, 0.12),
    "topics of 10, correlation 0.9": (draw_topics(0.9), 10, 0.2),
}
"""How D is drawn, the size of a group, and how often the rule would be certified at least without groups."""


def check_groups(case: str, runs: int, n: int) -> None:
    draw, size, without = CASES[case]
    rng = np.random.default_rng(n)
    parts = [draw(rng, min(1000, runs - start), n) for start in range(0, runs, 1000)]
    wrong = np.mean(np.concatenate([certifies(by_group(part, size)) for part in parts]))
    assert wrong <= DELTA + 2 * math.sqrt(DELTA * (1 - DELTA) / runs)
    assert np.mean(np.concatenate([certifies(rng.permuted(part, axis=1)) for part in parts])) >= without


@pytest.mark.quick(
    "10 paraphrases",
    "independent losses",
    "independent, graded",
    "independent, both ways",
    "topics of 10, correlation 0.9",
)
@pytest.mark.parametrize("case", CASES)
def test_a_rule_at_the_limit_is_certified_with_probability_delta_at_most(case: str) -> None:
    check_groups(case, runs=4000, n=400)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_same_in_twenty_thousand_runs(case: str) -> None:
    check_groups(case, runs=20_000, n=1000)


def check_shopping(kind: str, runs: int, n: int, attempts: int = 10) -> None:
    """Somebody tries again until something is certified."""
    rng = np.random.default_rng(n)
    lucky, wrong = np.zeros(runs, bool), np.zeros(runs, bool)
    first = draw_losses(rng, runs, n)
    for attempt in range(1, attempts + 1):
        if kind == "orders":
            differences = rng.permuted(first, axis=1)
        elif kind == "settings":  # half of the prompts answer another rule, γ or length alike
            differences = np.where(rng.random((runs, n)) < 0.5, first, draw_losses(rng, runs, n))
        else:  # each time half of the prompts are new
            first = differences = np.concatenate([first[:, n // 2 :], draw_losses(rng, runs, n // 2)], 1)
        lucky |= certifies(differences)
        wrong |= certifies(differences, share_delta(DELTA, attempt))
    assert wrong.mean() <= DELTA + 2 * math.sqrt(DELTA * (1 - DELTA) / runs)
    assert lucky.mean() > 0.15


@pytest.mark.quick("overlapping prompts", "settings")
@pytest.mark.parametrize("kind", ["orders", "settings", "overlapping prompts"])
def test_ten_attempts_together_are_wrong_with_probability_delta_at_most(kind: str) -> None:
    check_shopping(kind, runs=2000, n=200)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["orders", "settings", "overlapping prompts"])
def test_the_same_with_more_attempts_and_prompts(kind: str) -> None:
    check_shopping(kind, runs=5000, n=500, attempts=20)


def test_all_attempts_spend_delta_at_most() -> None:
    shares = [share_delta(0.05, attempt) for attempt in range(1, 10_000)]
    assert 0.0499 < sum(shares) <= 0.05
    assert shares[0] == pytest.approx(0.83 * 0.05, rel=0.01)


@pytest.mark.parametrize(("epsilon", "n"), [(0.02, 2000), (0.03, 1000), (0.05, 300), (0.1, 100)])
def test_independent_prompts_lose_a_tenth_of_the_power_at_most(epsilon: float, n: int) -> None:
    whole, share = (simulate_power(Claim(epsilon, delta, n), runs=1000) for delta in (0.05, share_delta(0.05, 1)))
    assert share >= 0.9 * whole > 0.75


@given(st.lists(st.tuples(st.integers(1, 5), st.floats(-1, 1)), min_size=1, max_size=20), st.integers(0, 60))
@settings(max_examples=60)
def test_a_group_counts_once_by_its_mean(groups: list[tuple[int, float]], answered: int) -> None:
    sizes = [size for size, _ in groups]
    differences = [d / (1 + i) for size, d in groups for i in range(size)][:answered]
    expected, start = [], 0
    for size in sizes:
        if start + size <= len(differences):
            expected.append(sum(differences[start : start + size]) / size)
        start += size
    assert np.allclose(average_groups(differences, sizes), expected[: len(expected)])


STORIES = [
    f"{name} has {n} {thing} and gives {n // 2} of them to a friend who lives in {town}. How many {thing} are left?"
    for n, (name, thing, town) in enumerate(
        [
            ("Ann", "apples", "Rome"),
            ("Bob", "red books", "Oslo"),
            ("Chen", "cats", "Lima"),
            ("Dora", "stamps", "Cairo"),
        ],
        7,
    )
]


def grouped(*texts: str, similar: float = SIMILAR, names: list[str | None] | None = None) -> list[list[int]]:
    groups = Groups(len(texts))
    groups.join_named([(i, name) for i, name in enumerate(names or []) if name is not None])
    groups.join_similar(dict(enumerate(map(normalise, texts))), similar)
    return sorted(sorted(group) for group in groups.order(texts, ""))


def test_near_duplicates_are_found_by_their_words() -> None:
    copies = [text.replace("How many", "Say how many") for text in STORIES] + [f"{text} Think." for text in STORIES]
    assert grouped(*STORIES, *copies) == [[i, i + 4, i + 8] for i in range(4)]
    assert grouped(*STORIES, *copies, similar=1.0) == [[i] for i in range(12)]
    assert grouped("東京の天気はどうですか今日は", "東京の天気はどうですか昨日は", "猫が好きです", similar=0.5)[0] == [
        0,
        1,
    ]


def test_what_all_prompts_share_is_not_compared() -> None:
    system = "You are a careful assistant who answers in one short sentence and never makes anything up. "
    asked = ["Who wrote Faust?", "Where is Lima?", "What is 4 + 2?", "What is 4 - 2?", "What is 9 + 5?"]
    assert grouped(*(system + text for text in asked)) == [[0], [1], [2], [3], [4]]
    assert grouped(*(f"{text} {system}" for text in asked)) == [[0], [1], [2], [3], [4]]


def test_marks_that_change_a_question_are_kept() -> None:
    for one, other in (("What is 5!?", "What is 5?"), ("a != b", "a = b"), ("What is n!", "What is n")):
        assert normalise(one) != normalise(other)
    assert normalise("Hello there!! Who wrote 'Faust!'?") == normalise("hello there, who wrote Faust?")


def test_named_groups_and_chains() -> None:
    assert grouped("a", "b", "c", "d", names=["x", None, "x", "y"]) == [[0, 2], [1], [3]]
    words = [f"w{i}" for i in range(40)]
    chain = [" ".join(words[i : i + 20]) for i in (0, 2, 4, 6)]  # each is like the next alone
    assert grouped(*chain, "something else") == [[0, 1, 2, 3], [4]]


WORDS = st.lists(st.sampled_from("abcdefgh"), min_size=0, max_size=14).map(" ".join)


@given(st.lists(WORDS, min_size=2, max_size=12, unique=True), st.floats(0.2, 1.0))
@settings(max_examples=80)
def test_every_pair_above_the_threshold_is_found(texts: list[str], similar: float) -> None:
    texts = ["begin " + texts[0], "other " + texts[1], *texts[2:], "x y z end"]  # nothing is common to all
    sets = [
        {tuple(words[i : i + SHINGLE]) for i in range(max(1, len(words) - SHINGLE + 1))}
        for words in map(str.split, texts)
    ]
    expected = Groups(len(texts))
    for i, one in enumerate(sets):
        for j, other in enumerate(sets[:i]):
            if len(one & other) >= similar * len(one | other):
                expected.join(i, j)
    found = Groups(len(texts))
    found.join_similar(dict(enumerate(texts)), similar)
    assert found.order(texts, "s") == expected.order(texts, "s")


def test_the_order_follows_from_prompts_and_pair_alone() -> None:
    texts = [f"prompt {i}" for i in range(50)]
    order = [texts[i] for (i,) in Groups(50).order(texts, "pair")]
    turned = [texts[::-1][i] for (i,) in Groups(50).order(texts[::-1], "pair")]
    assert order == turned != texts
    assert order != [texts[i] for (i,) in Groups(50).order(texts, "another pair")]
    assert [texts[:49][i] for (i,) in Groups(49).order(texts[:49], "pair")] == [t for t in order if t != texts[49]]


def test_the_ledger_counts_attempts_that_share_a_prompt_and_a_target() -> None:
    keys = [key_prompt(f"prompt {i}") for i in range(6)]
    assert ledger.note_attempt("a", "target", keys[:3]) == []
    assert ledger.note_attempt("a", "target", keys[:3]) == []  # resumed
    assert len(ledger.note_attempt("b", "target", keys[2:4])) == 1
    assert len(ledger.note_attempt("c", "target", keys[:3])) == 2
    assert ledger.note_attempt("d", "another", keys) == []
    assert ledger.note_attempt("e", "target", keys[4:]) == []
    assert len(ledger.note_attempt("b", "target", keys[2:4])) == 1
    assert len(ledger.find_earlier(None, "target", keys)) == 4


def test_a_ledger_that_cannot_be_used_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SELFJUDGE_LEDGER", str(tmp_path / "file" / "ledger.jsonl"))
    with pytest.raises(SelfJudgeError, match=r"cannot note this attempt in .* let SELFJUDGE_LEDGER name another file"):
        ledger.note_attempt("a", "target", [])

    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_file", refuse)
        with pytest.raises(SelfJudgeError, match=r"cannot read .* Permission denied; let SELFJUDGE_LEDGER name"):
            ledger.find_earlier(None, "target", [])
    monkeypatch.setenv("SELFJUDGE_LEDGER", str(tmp_path / "ledger.jsonl"))
    (tmp_path / "ledger.jsonl").write_text(json.dumps({"id": 5}) + "\n")
    with pytest.raises(SelfJudgeError, match=r"ledger\.jsonl, line 1"):
        ledger.find_earlier(None, "target", [])
