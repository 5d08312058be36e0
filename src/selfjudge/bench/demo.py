"""What `selfjudge demo` measures: one question under a few rules by turns; then labels, a judge, rules side by side."""

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from selfjudge.bench.config import DemoConfig
from selfjudge.decoding.rules import EXACT, AcceptanceRule, Judged, TopK
from selfjudge.decoding.text import generate, stream
from selfjudge.engine.select import PairEngines
from selfjudge.errors import SelfJudgeError
from selfjudge.judge.model import Judge
from selfjudge.label.config import LabelConfig
from selfjudge.label.pipeline import label_pair
from selfjudge.models.pair import Pair
from selfjudge.prompts.sources import BUILT_IN
from selfjudge.store import measured_on, write_rows
from selfjudge.store.load import LoadWatch
from selfjudge.train.config import TrainConfig
from selfjudge.train.pipeline import train_judge
from selfjudge.types import Gamma, Generation, Notify, pooled_figures

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
LABELLED = 12  # built-in prompts that are labelled at least: those that no rule answers, where they are enough
ACCEPTABLE = 0.25  # share of the labels that its judge learns as acceptable: few prompts must have some of both kinds
QUALITY = 0.9  # share of the bad substitutions that the judges shown must reject
OWN, SHIPPED = "judged, made just now", "judged, shipped"


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


def same_start(tokens: Sequence[int], others: Sequence[int]) -> float:
    """The share of an answer before the first token that differs from another answer's; 1 where they are equal."""
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(tokens, others, strict=False)))
    return same / max(len(tokens), len(others), 1)


class Demo:
    """A demo. `result` is what it has found so far: it can be printed whenever the demo is stopped.

    `pair` decodes; `full`, the same models in floats, makes labels."""

    def __init__(self, pair: Pair, full: Pair, config: DemoConfig, notify: Notify) -> None:
        self.pair, self.full, self.config, self.notify = pair, full, config, notify
        self.prompts = [text for _, text in BUILT_IN[: config.limit]]
        self._plain: list[Generation] = []
        self.judges: dict[str, Judge] = {}
        self.result: dict[str, Any] = {
            "pair": pair.name,
            **measured_on(),
            "prompt": self.prompts[0],
            "prompts": len(self.prompts),
            "max_new_tokens": config.max_new_tokens,
            "quality": QUALITY,
            "own": {},
            "rows": [],
            "substitutions": [],
            "dtype": pair.dtype,
            "draft_dtype": PairEngines(pair).draft_dtype,
        }

    def make_judge(self, folder: Path) -> None:
        """A small labelling run and a judge from it. So few labels may not do: then `own` says why there is none."""
        own = self.result["own"]
        begun = time.perf_counter()
        try:
            others = BUILT_IN[min(self.config.limit, len(BUILT_IN) - LABELLED) :]
            write_rows(folder / "prompts.jsonl", ({"prompt": text} for _, text in others))
            config = LabelConfig(prompts=(str(folder / "prompts.jsonl"),), max_new_tokens=64, suffix_length=10)
            labels = label_pair(self.full, folder / "labels", config, notify=self.notify)
            own["labels"], own["tau"] = labels["rows"], labels["tau"]
            own["acceptable"], own["learnt_as_acceptable"] = labels["acceptable"] / labels["rows"], ACCEPTABLE
            own["label_seconds"] = time.perf_counter() - begun
            training = TrainConfig(acceptable=ACCEPTABLE)
            judge = train_judge([folder / "labels"], folder / "judge", training, notify=self.notify)
            own["auc"], own["auc_of"] = judge["metrics"]["auc_mismatch"], judge["metrics"]["n_holdout"]
            own["train_seconds"] = time.perf_counter() - begun - own["label_seconds"]
        except SelfJudgeError as error:
            own["why_not"] = str(error)
        else:
            self.judges[OWN] = Judge.from_pretrained(folder / "judge")

    def rows(self) -> Iterator[dict[str, Any]]:
        """Answer the prompts plainly, with `exact`, `topk` and every judge: a row of figures for each."""
        special = self.pair.special_ids
        judged = {name: Judged(j, j.quality(QUALITY), special=special) for name, j in self.judges.items()}
        rules: dict[str, AcceptanceRule] = {"plain": EXACT, "exact": EXACT, "topk:2": TopK(special=special), **judged}
        self.notify("warming up", 0.0)  # the first pass may compile a kernel
        generate(self.pair, self.prompts[:1], gamma="auto", max_new_tokens=2)
        for number, (name, rule) in enumerate(rules.items()):
            self.notify(f"{name}: answering {len(self.prompts)} prompts", number / len(rules))
            row = self._row(name, rule, 0 if name == "plain" else "auto")
            self.result["rows"].append(row)
            yield row

    def _row(self, name: str, rule: AcceptanceRule, gamma: Gamma) -> dict[str, Any]:
        start, load = time.perf_counter(), LoadWatch()
        answers = generate(
            self.pair, self.prompts, rule, gamma=gamma, max_new_tokens=self.config.max_new_tokens, batch=1
        )
        speed, busy = sum(len(a.tokens) for a in answers) / (time.perf_counter() - start), load.describe()
        self._plain = self._plain or answers
        if name == SHIPPED:
            pairs = Counter((judged.target_text, judged.text) for a in answers for judged in a.judged_tokens)
            self.result["substitutions"] = [(*texts, count) for texts, count in pairs.most_common()]
        same = sum(a.tokens == b.tokens for a, b in zip(answers, self._plain, strict=True))
        starts = [same_start(a.tokens, b.tokens) for a, b in zip(answers, self._plain, strict=True)]
        first = self.result["rows"][0]["tokens_per_second"] if self.result["rows"] else speed
        return {
            "rule": name,
            "uses_judge": rule.judge is not None,
            "gamma": gamma,
            **pooled_figures(answers),
            "tokens_per_second": speed,
            "speed_over_plain": speed / first,
            "busy": busy,
            "same_answer_as_plain": same / len(answers),
            "same_start_as_plain": sum(starts) / len(starts),
            "example": answers[0].text,
            "tokens": list_tokens(self.pair, answers[0]),
        }
