"""What speculation gains on one question: plain decoding, `exact` and a relaxed rule by turns."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median
from typing import Any

from selfjudge.bench.config import DemoConfig
from selfjudge.decoding.text import generate, stream
from selfjudge.engine.select import PairEngines
from selfjudge.models.pair import Pair
from selfjudge.store import measured_on
from selfjudge.store.load import LoadWatch
from selfjudge.types import Gamma, Generation, Notify

QUESTION = (
    "Sara reads 20 pages a day. Her book has 300 pages. After how many days has she finished it? Reason step by step."
)
"""Of the kind on which the draft is best: word problems. Open questions gain less."""
RELAXED = "judged:q0.95"
RULES: dict[str, tuple[str, Gamma | None]] = {
    "plain": ("exact", 0),
    "exact": ("exact", "auto"),
    RELAXED: (RELAXED, None),
}
"""What answers in each turn: names as they are shown, rules and γ; None drafts as much as `exact` did, so that the two
compare."""
MOST_TOKENS = 192


class Gain:
    """One question under all `RULES`. `result` is what is known so far, `rows` of it in their order."""

    def __init__(self, pair: Pair, config: DemoConfig, notify: Notify) -> None:
        self.pair, self.turns, self.notify = pair, config.turns, notify
        self.rules = {name: how for name, how in RULES.items() if pair.judge is not None or name != RELAXED}
        self.seconds: dict[str, list[float]] = {name: [] for name in self.rules}
        self.answers: dict[str, Generation] = {}
        engines = PairEngines(pair)
        self.result: dict[str, Any] = {
            "pair": pair.name,
            **measured_on(),
            "dtype": pair.dtype,
            "draft_dtype": engines.draft_dtype,
            "prompt": QUESTION,
            "rows": [],
            "busy": "",
        }

    def measure(self) -> Iterator[tuple[int, str, float]]:
        """Answer by turns; after each answer its turn, its rule and its seconds."""
        for number, (rule, gamma) in enumerate(self.rules.values()):  # the first passes read the file, or compile
            self.notify("warming up", number / len(self.rules))
            generate(self.pair, QUESTION, rule, gamma="auto" if gamma is None else gamma, max_new_tokens=8)
        load = LoadWatch()
        for turn in range(self.turns):
            for number, (name, (rule, gamma)) in enumerate(self.rules.items()):
                begun = time.perf_counter()
                answer = self._answer(turn, number, name, rule, self._like_exact() if gamma is None else gamma)
                self.seconds[name].append(time.perf_counter() - begun)
                self.answers.setdefault(name, answer)
                if len(self.answers) > 1:  # plain alone shows no gain
                    turns = min(len(self.seconds[known]) for known in self.answers)  # of a turn half done, nothing
                    self.result["rows"] = [self._row(known, turns) for known in self.answers]
                    self.result["busy"] = load.describe(self.seconds.values())
                yield turn + 1, name, self.seconds[name][-1]

    def _answer(self, turn: int, number: int, name: str, rule: str, gamma: Gamma) -> Generation:
        """One answer, its tokens counted as they come; the first one's length is not known before it ends."""
        words, answers = f"turn {turn + 1} of {self.turns}: {name}", len(self.rules) * self.turns
        length = len(self.answers["plain"].tokens) if self.answers else MOST_TOKENS
        of = f"of {length}" if self.answers else f"of at most {length}"
        answer = stream(self.pair, QUESTION, rule, gamma=gamma, max_new_tokens=MOST_TOKENS)
        begun = turn * len(self.rules) + number
        self.notify(words, begun / answers)
        for count, _ in enumerate(answer, 1):
            self.notify(f"{words}, {count} {of} tokens", (begun + min(count / length, 1)) / answers)
        return answer.generation

    def _like_exact(self) -> int:
        """γ of a relaxed rule: as many drafts per step as `exact` had in the first turn."""
        return max(1, round(self.answers["exact"].gamma_mean or 0))

    def _row(self, name: str, turns: int) -> dict[str, Any]:
        """The figures of a rule: medians of so many turns, the answer of the first."""
        answer, plain = self.answers[name], self.answers["plain"]
        speed = {n: len(a.tokens) / median(self.seconds[n][:turns]) for n, a in self.answers.items()}
        return {
            "rule": name,
            "gamma_mean": answer.gamma_mean,
            "mean_accepted_length": answer.mean_accepted_length,
            "passes": answer.cycles + 1,
            "seconds": self.seconds[name][:turns],
            "tokens_per_second": speed[name],
            "speed_over_plain": speed[name] / speed["plain"],
            "judged": len(answer.judged_tokens),
            "same_as_plain": answer.tokens == plain.tokens,
            "example": answer.text,
            "tokens": list_tokens(self.pair, answer),
        }


def list_tokens(pair: Pair, answer: Generation) -> list[list[Any]]:
    """Each token as text and origin; of a judged one the target's choice, its probability and the judge's score."""
    judged = {j.index: [j.target_text, j.target_probability, j.score] for j in answer.judged_tokens}
    return [
        [str(pair.tokenizer.decode([token], skip_special_tokens=True)), origin, *judged.get(i, [None, None, None])]
        for i, (token, origin) in enumerate(zip(answer.tokens, answer.origins, strict=True))
    ]
