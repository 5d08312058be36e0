"""What `selfjudge demo` measures on the embedded pair: labels, a judge, rules side by side."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from selfjudge.bench.config import DemoConfig
from selfjudge.bench.gain import list_tokens
from selfjudge.decoding.rules import EXACT, AcceptanceRule, Judged, TopK
from selfjudge.decoding.text import generate
from selfjudge.engine.select import PairEngines
from selfjudge.errors import SelfJudgeError
from selfjudge.judge.model import Judge
from selfjudge.label.config import LabelConfig
from selfjudge.label.pipeline import label_pair
from selfjudge.models.pair import Pair
from selfjudge.prompts.sources import BUILT_IN
from selfjudge.store import measured_on
from selfjudge.store.load import LoadWatch
from selfjudge.train.config import TrainConfig
from selfjudge.train.pipeline import train_judge
from selfjudge.types import Gamma, Generation, Notify, pooled_figures

WRITTEN = 12  # prompts that the target writes for the demo's own labels
ACCEPTABLE = 0.25  # share of the labels that its judge learns as acceptable: few prompts must have some of both kinds
QUALITY = 0.9  # share of the bad substitutions that the judges shown must reject
OWN, SHIPPED = "judged, made just now", "judged, shipped"


def same_start(tokens: Sequence[int], others: Sequence[int]) -> float:
    """The share of an answer before the first token that differs from another answer's; 1 where they are equal."""
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(tokens, others, strict=False)))
    return same / max(len(tokens), len(others), 1)


class Demo:
    """A demo. `result` is what it has found so far: it can be printed whenever the demo is stopped.

    `pair` decodes; `full`, the same models in floats, makes labels.
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
