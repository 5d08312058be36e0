"""What `selfjudge demo` measures on the embedded pair: labels, a judge, rules side by side."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from selfjudge.bench.config import DemoConfig
from selfjudge.decoding.rules import EXACT, AcceptanceRule, Judged, TopK
from selfjudge.decoding.text import generate
from selfjudge.engine.select import PairEngines
from selfjudge.errors import SelfJudgeError
from selfjudge.evaluate.likelihood import Likelihood, average_log_likelihood, compute_likelihoods, count_substitutions
from selfjudge.judge.model import Judge
from selfjudge.label.config import LabelConfig
from selfjudge.label.pipeline import label_pair
from selfjudge.models.convert import dequantise
from selfjudge.models.loaded import Target
from selfjudge.models.pair import Pair
from selfjudge.prompts.sources import BUILT_IN
from selfjudge.store import measured_on
from selfjudge.store.load import LoadWatch
from selfjudge.train.pipeline import train_judge
from selfjudge.types import Gamma, Generation, Notify, pooled_figures

WRITTEN = 12  # prompts that the target writes for the demo's own labels
QUALITY = 0.9  # share of the bad substitutions that the judges shown must reject
OWN, SHIPPED = "judged, made just now", "judged, shipped"


def in_floats(pair: Pair) -> Pair:
    """The pair with a target that computes in floats, read from the blocks of its file; the draft stays as it is."""
    target = pair.target_model
    if target.file is None:
        return pair
    return replace(pair, target_model=Target(dequantise(target.module, torch.float32), target.reference, target.sha256))


def same_start(tokens: Sequence[int], others: Sequence[int]) -> float:
    """The share of an answer before the first token that differs from another answer's; 1 where they are equal."""
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(tokens, others, strict=False)))
    return same / max(len(tokens), len(others), 1)


class Demo:
    """A demo. `result` is what it has found so far: it can be printed whenever the demo is stopped.

    `pair` decodes; `full`, the same models in floats, makes labels and says how likely answers are.
    """

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
            config = LabelConfig(prompts=(f"self:{WRITTEN}",), max_new_tokens=64, suffix_length=10)
            labels = label_pair(self.full, folder / "labels", config, notify=self.notify)
            own["labels"], own["tau"] = labels["rows"], labels["tau"]
            own["acceptable"] = labels["acceptable"] / labels["rows"]
            own["label_seconds"] = time.perf_counter() - begun
            judge = train_judge([folder / "labels"], folder / "judge", notify=self.notify)
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
        views = compute_likelihoods(
            self.full, [(self.pair.encode(p), a.tokens) for p, a in zip(self.prompts, answers, strict=True)]
        )
        if name == SHIPPED:
            self.result["substitutions"] = count_substitutions(self.pair, answers, views)
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
            "log_likelihood": average_log_likelihood(views),
            "example": answers[0].text,
            "tokens": self._tokens(answers[0], views[0]),
        }

    def _tokens(self, answer: Generation, view: Likelihood) -> list[list[Any]]:
        """Each token as text, origin, the target's choice, the probability of that choice, the judge's score."""
        decode = self.pair.tokenizer.decode
        scores = {judged.index: judged.score for judged in answer.judged_tokens}
        each = zip(answer.tokens, answer.origins, view.choices, view.choice_log_p, strict=True)
        return [
            [str(decode([token])), origin, str(decode([choice])), math.exp(log_p), scores.get(index)]
            for index, (token, origin, choice, log_p) in enumerate(each)
        ]
