"""What `selfjudge demo` measures: one question under a few rules by turns; then labels, a judge, rules side by side."""

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from selfjudge.bench.config import DemoConfig
from selfjudge.bench.turns import Turns
from selfjudge.decoding.rules import EXACT, AcceptanceRule, Judged, TopK
from selfjudge.decoding.text import generate, stream
from selfjudge.engine.select import PairEngines
from selfjudge.errors import SelfJudgeError
from selfjudge.evaluate.execute import make_token_rows
from selfjudge.judge.model import Judge
from selfjudge.label.config import LabelConfig
from selfjudge.label.pipeline import label_pair
from selfjudge.models.pair import Pair, Prompt
from selfjudge.prompts.sources import BUILT_IN
from selfjudge.store import measured_on, write_rows
from selfjudge.train.config import TrainConfig
from selfjudge.train.pipeline import train_judge
from selfjudge.types import Gamma, Generation, Notify, pooled_figures

QUESTION = (
    "Sara reads 20 pages a day. Her book has 300 pages. After how many days has she finished it? Reason step by step."
)
"""Of the kind on which the draft is best: word problems. Open questions gain less."""
RELAXED = "judged:q0.95"
Rules = Mapping[str, tuple[str | AcceptanceRule, Gamma | None]]
RULES: Rules = {"plain": ("exact", 0), "exact": ("exact", "auto"), RELAXED: (RELAXED, None)}
"""Name as shown, rule and γ of each turn; None drafts as much as `exact` did, so that the two compare."""
MOST_TOKENS = 192
LABELLED = 12  # built-in prompts that are labelled at least: those that no rule answers, where they are enough
ACCEPTABLE = 0.25  # share of the labels that its judge learns as acceptable: few prompts must have some of both kinds
QUALITY = 0.9  # share of the bad substitutions that the judges shown must reject
OWN, SHIPPED = "judged, made just now", "judged, shipped"


class SideBySide:
    """Prompts answered under each rule by turns, `plain` first; `result["rows"]` has the rules answered so far."""

    def __init__(
        self, pair: Pair, prompts: Sequence[Prompt], rules: Rules, notify: Notify, *, turns: int, max_new_tokens: int
    ) -> None:
        self.pair, self.prompts, self.rules, self.max_new_tokens = pair, prompts, rules, max_new_tokens
        self.turns = Turns(list(rules), turns, notify)
        self.answers: dict[str, list[Generation]] = {}  # of the first turn
        self.result: dict[str, Any] = {
            "pair": pair.name,
            **measured_on(),
            "dtype": pair.dtype,
            "draft_dtype": PairEngines(pair).draft_dtype,
            "prompt": prompts[0],
            "prompts": len(prompts),
            "max_new_tokens": max_new_tokens,
            "rows": [],
            "busy": "",
        }

    def measure(self) -> Iterator[tuple[int, str, float]]:
        """Answer by turns; after each rule its turn, its name and its seconds."""
        seconds = self.turns.seconds
        for turn, name in self.turns.run(self._answer, self._warm_up, list(self.rules)):
            self.result["busy"] = self.turns.load.describe(seconds.values())
            turns = min(len(seconds[known]) for known in self.answers)  # of a turn half done, nothing
            self.result["rows"] = [self._row(known, seconds[known][:turns]) for known in self.answers]
            yield turn + 1, name, seconds[name][-1]

    def _warm_up(self, name: str) -> None:
        """The first passes read the file, or compile."""
        rule, gamma = self.rules[name]
        generate(self.pair, self.prompts[0], rule, gamma="auto" if gamma is None else gamma, max_new_tokens=8)

    def _answer(self, _: int, name: str) -> None:
        """Answer under a rule, the tokens counted as they come; the length of the answers of `plain` is not known."""
        rule, gamma = self.rules[name]
        plain, answers, counter = self.answers.get("plain"), [], itertools.count(1)
        length = sum(len(a.tokens) for a in plain) if plain else self.max_new_tokens * len(self.prompts)
        of = "of" if plain else "of at most"
        for prompt in self.prompts:
            drafts = self._like_exact() if gamma is None else gamma
            answer = stream(self.pair, prompt, rule, gamma=drafts, max_new_tokens=self.max_new_tokens)
            for _piece, count in zip(answer, counter, strict=False):
                self.turns.report(f", {count} {of} {length} tokens", min(count / length, 1))
            answers.append(answer.generation)
        self.answers.setdefault(name, answers)

    def _like_exact(self) -> int:
        """γ of a relaxed rule: as many drafts per step as `exact` had in the first turn."""
        return max(1, round(pooled_figures(self.answers["exact"])["gamma_mean"] or 0))

    def _row(self, name: str, seconds: Sequence[float]) -> dict[str, Any]:
        """The figures of a rule: medians of these turns, the answers of the first."""
        answers, (rule, gamma), plain = self.answers[name], self.rules[name], self.answers["plain"]
        times = {"plain": self.turns.seconds["plain"][: len(seconds)], name: seconds}
        speed = {n: sum(len(a.tokens) for a in self.answers[n]) / median(each) for n, each in times.items()}
        return {
            "rule": name,
            "uses_judge": rule == RELAXED or isinstance(rule, Judged),
            "gamma": gamma,
            **pooled_figures(answers),
            "passes": sum(a.cycles + 1 for a in answers),
            "seconds": seconds,
            "tokens_per_second": speed[name],
            "speed_over_plain": speed[name] / speed["plain"],
            "busy": self.result["busy"],
            "judged": sum(len(a.judged_tokens) for a in answers),
            "same_answer_as_plain": mean(a.tokens == b.tokens for a, b in zip(answers, plain, strict=True)),
            "same_start_as_plain": mean(same_start(a.tokens, b.tokens) for a, b in zip(answers, plain, strict=True)),
            "example": answers[0].text,
            "tokens": make_token_rows(self.pair, answers[0]),
        }


def answer_question(pair: Pair, config: DemoConfig, notify: Notify) -> SideBySide:
    """One question under all `RULES`, without the judge where the pair has none."""
    rules = {name: how for name, how in RULES.items() if pair.judge is not None or name != RELAXED}
    return SideBySide(pair, [QUESTION], rules, notify, turns=config.turns, max_new_tokens=MOST_TOKENS)


def compare_judges(pair: Pair, judges: Mapping[str, Judge], config: DemoConfig, notify: Notify) -> SideBySide:
    """Built-in prompts answered plainly, with `exact`, `topk` and every judge."""
    rules: dict[str, AcceptanceRule] = {"exact": EXACT, "topk:2": TopK(special=pair.special_ids)}
    rules |= {name: Judged(j, j.quality(QUALITY), special=pair.special_ids) for name, j in judges.items()}
    prompts = [text for _, text in BUILT_IN[: config.limit]]
    every: Rules = {"plain": (EXACT, 0), **{name: (rule, "auto") for name, rule in rules.items()}}
    return SideBySide(pair, prompts, every, notify, turns=1, max_new_tokens=config.max_new_tokens)


def make_judge(pair: Pair, folder: Path, limit: int, notify: Notify) -> tuple[Judge | None, dict[str, Any]]:
    """A judge from a few labels on prompts after the first `limit`, and figures, which say why if there is none."""
    own: dict[str, Any] = {}
    begun = time.perf_counter()
    try:
        others = BUILT_IN[min(limit, len(BUILT_IN) - LABELLED) :]
        write_rows(folder / "prompts.jsonl", ({"prompt": text} for _, text in others))
        config = LabelConfig(prompts=(str(folder / "prompts.jsonl"),), max_new_tokens=64, suffix_length=10)
        labels = label_pair(pair, folder / "labels", config, notify=notify)
        own["labels"], own["tau"] = labels["rows"], labels["tau"]
        own["acceptable"], own["learnt_as_acceptable"] = labels["acceptable"] / labels["rows"], ACCEPTABLE
        own["label_seconds"] = time.perf_counter() - begun
        training = TrainConfig(acceptable=ACCEPTABLE)
        judge = train_judge([folder / "labels"], folder / "judge", training, notify=notify)
    except SelfJudgeError as error:
        return None, {**own, "why_not": str(error)}
    own["auc"], own["auc_of"] = judge["metrics"]["auc_mismatch"], judge["metrics"]["n_holdout"]
    own["train_seconds"] = time.perf_counter() - begun - own["label_seconds"]
    return Judge.from_pretrained(folder / "judge"), own


def same_start(tokens: Sequence[int], others: Sequence[int]) -> float:
    """The share of an answer before the first token that differs from another answer's; 1 where they are equal."""
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(tokens, others, strict=False)))
    return same / max(len(tokens), len(others), 1)
