"""Who answers prompts under a rule; one run on one task: its parts, samples and summary; answers token by token."""

import shutil
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from selfjudge.decoding.loop import find_statistics
from selfjudge.decoding.text import generate, row_seed
from selfjudge.engine.select import PairEngines, choose_kind
from selfjudge.errors import SelfJudgeError
from selfjudge.evaluate.compare import SAMPLES, bootstrap_interval
from selfjudge.evaluate.config import EvalConfig, RuleRun, TaskExamples
from selfjudge.evaluate.consistency import Entails, measure_consistency
from selfjudge.models.pair import Pair, Prompt
from selfjudge.store import RunFolder, measured_on, read_json, read_rows, write_json, write_rows
from selfjudge.store.run_folder import LoadWatch, describe_load
from selfjudge.store.schema import FinishedSummary, PartSample, PartSeal
from selfjudge.tasks import Row, Task
from selfjudge.tasks.base import join_messages
from selfjudge.types import PHASES, Generation

NOT_COMPARED: Mapping[str, Any] = {
    "delta_score": None, "delta_ci": None, "delta_scores": {}, "delta_scores_ci": {}, "agreement": None,
    "agreement_ci": None, "lost": None, "gained": None, "lost_ci": None, "gained_ci": None,
    "delta_m": None, "delta_m_ci": None, "m_ratio": None, "m_ratio_ci": None, "compared_with": None,
}  # fmt: skip
"""The fields that a comparison with `exact` fills in."""
PART_ONLY = ("token_ids", "origins")  # keys that rows lose when the parts are joined
TRACED = 32  # answers of a run that are decoded once more to be traced: what is timed is not traced
KEPT_SUBSTITUTIONS = 50
_ORIGINS = {"d": "draft", "j": "judge", "t": "target"}
Answers = tuple[list[Generation], dict[str, float]]  # in the order of prompts; seconds by phase, and their `total`


class Answerer(ABC):
    """Answers prompts that one rule decodes together."""

    engine: str  # name of what runs the models
    one_gamma = False  # whether another γ takes another start of the engine: then γ is not measured

    @property
    @abstractmethod
    def device(self) -> str:
        """cuda, mps or cpu."""

    @abstractmethod
    def answer(
        self, prompts: Sequence[Prompt], run: RuleRun, max_new_tokens: int, seeds: Sequence[int],
        *, batch: int | None = None, trace: bool = False,
    ) -> Answers:  # fmt: skip
        """The answers of all prompts, by our loop `batch` at a time, if given; each has a seed, for rules that draw at
        random. With `trace` they say what the target wanted at judged tokens, if the engine can, which takes time."""

    def costs(self, prompts: Sequence[Prompt], most: int) -> list[float]:
        """Seconds of a cycle of 0 … `most` drafts in which so many rows take part; none if that is not known."""
        return []


class TorchAnswerer(Answerer):
    """Answers with our own decoding loop."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.engine = choose_kind(pair.target_model, int8=pair.target_model.int8)

    @property
    def device(self) -> str:
        return str(self.pair.target.device.type)

    def answer(
        self, prompts: Sequence[Prompt], run: RuleRun, max_new_tokens: int, seeds: Sequence[int],
        *, batch: int | None = None, trace: bool = False,
    ) -> Answers:  # fmt: skip
        start, size = time.perf_counter(), batch or len(prompts)
        how: dict[str, Any] = {"gamma": run.gamma, "max_new_tokens": max_new_tokens, "batch": size, "seeds": seeds}
        answers = generate(self.pair, prompts, run.rule, **how, trace=trace)
        total = time.perf_counter() - start
        # the last to end took part in all passes
        phases = {phase: max(answer.seconds[phase] for answer in answers) for phase in PHASES}
        return answers, {**phases, "total": total}

    def costs(self, prompts: Sequence[Prompt], most: int) -> list[float]:
        """By the table of costs, which γ = auto measures unless it is known."""
        generate(self.pair, prompts, gamma="auto", max_new_tokens=8, batch=len(prompts), trace=False)
        with PairEngines(self.pair).borrow() as engines:
            table = find_statistics(engines).costs
            return table.seconds(len(prompts), most) if table.cycles else []


@dataclass(frozen=True)
class Evaluation:
    """What all runs of an evaluation share."""

    pair: Pair
    answerer: Answerer
    out: Path
    config: EvalConfig
    entails: Entails | None = None  # the model that measures factual consistency, if anything does


class Execution:
    """One run on one task, in a folder of its own. Parts that are done stay done."""

    def __init__(self, evaluation: Evaluation, examples: TaskExamples, run: RuleRun) -> None:
        self.pair, self.config, self.examples, self.run = evaluation.pair, evaluation.config, examples, run
        self.answerer, self.entails, self.task = evaluation.answerer, evaluation.entails, examples.task
        self.folder = evaluation.out / examples.label / run.folder
        self.parts_folder = RunFolder(self.folder, done="summary.json", schema=FinishedSummary)
        self.batch = run.batch(self.config.batch or 1)
        self.max_new_tokens = self.config.max_new_tokens or self.task.new_tokens

    @property
    def done(self) -> bool:
        """Whether the summary is there, made with this very rule."""
        if (summary := self.parts_folder.result()) is None:
            return False
        if summary["run_sha256"] != self.run.identity:
            raise SelfJudgeError(f"{self.folder} is of another judge or threshold: name another `out` or remove it")
        shutil.rmtree(self.folder / "work", ignore_errors=True)
        return True

    def answer_rows(self) -> Iterator[float]:
        """Answer and score in parts, yielding the share done before each; then write rows and, last, the summary."""
        parts = self.parts()
        for number, (name, rows) in enumerate(parts.items()):
            yield number / len(parts)
            if self.parts_folder.sealed(name, self.run.identity, PartSeal) is None:
                load = LoadWatch()
                answers, seconds = self.answerer.answer(*self._ask(rows))
                times = {"seconds": seconds, "load": load.usage}
                write_rows(self.folder / "work" / f"{name}.jsonl", self._score(rows, answers))
                self.parts_folder.seal(name, [f"work/{name}.jsonl"], self.run.identity, **times)
        self._finish(list(parts))

    def parts(self) -> dict[str, list[Row]]:
        """The examples by part: at most `batch` of them are decoded together."""
        rows = self.examples.rows
        starts = range(0, len(rows), self.batch)
        return {f"part-{number:05d}": rows[start : start + self.batch] for number, start in enumerate(starts)}

    def _ask(self, rows: Sequence[Row]) -> tuple[list[Prompt], RuleRun, int, list[int]]:
        """What is asked of the answerer for these rows. A row's seed does not depend on the part it is in."""
        seeds = [row_seed(self.config.seed, self.examples.places[row["id"]]) for row in rows]
        prompts = [self.task.prompt(row) for row in rows]
        return prompts, self.run, self.max_new_tokens, seeds

    def _score(self, rows: Sequence[Row], answers: Sequence[Generation]) -> list[Row]:
        texts = [answer.text for answer in answers]
        scored = self.examples.score(rows, texts)
        if self.entails is not None and self.examples.has_stories:
            name = "fc_proxy" if self.config.nli == "proxy" else "fc"
            stories = [self.task.story(row) or "" for row in rows]
            for (_, scores), value in zip(scored, measure_consistency(self.entails, stories, texts), strict=True):
                scores[name] = value or 0.0
        return [make_sample(row["id"], answer, found) for row, answer, found in zip(rows, answers, scored, strict=True)]

    def _finish(self, parts: Sequence[str]) -> None:
        """From the parts: samples, examples and the summary. Then the parts go."""
        by_part = [list(read_rows(self.folder / "work" / f"{name}.jsonl", PartSample)) for name in parts]
        samples = [sample for part in by_part for sample in part]
        answers = [restore_answer(sample) for sample in samples]
        judged = [i for i, answer in enumerate(answers) if "judge" in answer.origins]
        traced = judged[: max(TRACED, self.config.examples)]
        asked = self._ask([self.examples.rows[i] for i in traced])
        again = trace_again(self.answerer, [answers[i] for i in traced], self.batch, *asked)
        for i, answer in zip(traced, again, strict=True):
            answers[i] = answer
        write_rows(self.folder / "examples.jsonl", self._choose_examples(samples, answers))
        kept = [{k: v for k, v in s.items() if k not in PART_ONLY} for s in samples]
        write_rows(self.folder / SAMPLES, kept)
        summary = {
            "task": self.examples.label,
            **summarise(self.pair, self.task, self.run, kept),
            "batch": self.batch,
            "max_new_tokens": self.max_new_tokens,
            **self._times(parts, [sum(sample["tokens"] for sample in part) for part in by_part]),
            "substitutions": count_substitutions(answers),
        }
        write_json(self.folder / "summary.json", summary)
        shutil.rmtree(self.folder / "work", ignore_errors=True)

    def _times(self, parts: Sequence[str], tokens: Sequence[int]) -> dict[str, Any]:
        """Seconds by phase, tokens/s, and why they are unreliable, if so. The first of several parts does not count,
        because engines capture graphs and pack weights in it."""
        if not self.config.times:
            return {"tokens_per_second": None, "busy": "", "seconds": {}}
        first = 1 if len(parts) > 1 else 0
        seals = [read_json(self.folder / "work" / f"{name}.json", PartSeal) for name in parts[first:]]
        seconds = {phase: sum(seal["seconds"][phase] for seal in seals) for phase in (*PHASES, "total")}
        return {
            "tokens_per_second": sum(tokens[first:]) / max(1e-9, seconds["total"]),
            "busy": describe_load(seal["load"] for seal in seals if "load" in seal),
            "seconds": seconds,
        }

    def _choose_examples(self, samples: Sequence[Row], answers: Sequence[Generation]) -> list[Row]:
        """The first answers with a judged token, else the first ones, token by token."""
        chosen = sorted(range(len(answers)), key=lambda i: "judge" not in answers[i].origins)[: self.config.examples]
        prompts = [self.task.prompt(self.examples.rows[i]) for i in chosen]
        return [
            {name: samples[i][name] for name in ("id", "score")} | make_example_row(self.pair, prompt, answers[i])
            for i, prompt in zip(chosen, prompts, strict=True)
        ]


def trace_again(answerer: Answerer, answers: Sequence[Generation], batch: int, *asked: Any) -> Sequence[Generation]:
    """The answers, decoded again in batches with a trace; those that rounding changes stay as they are."""
    if not (answers and isinstance(answerer, TorchAnswerer)):
        return answers
    again, _ = answerer.answer(*asked, batch=batch, trace=True)
    return [new if new.tokens == old.tokens else old for old, new in zip(answers, again, strict=True)]


def make_sample(name: str, answer: Generation, scored: tuple[str | None, dict[str, float]]) -> Row:
    """The row that is kept of an answer (`PartSample`), from the answer found in its text and the text's scores."""
    extracted, scores = scored
    measure = choose_measure(scores)
    return {
        "id": name,
        "answer": extracted,
        "score": scores[measure] if measure else None,
        "scores": scores,
        "finish": answer.finish,
        "tokens": len(answer.tokens),
        "emitted": len(answer.tokens) - 1 if answer.cycles else 0,
        "cycles": answer.cycles,
        "drafts_accepted": sum(origin != "target" for origin in answer.origins),
        "judged": sum(origin == "judge" for origin in answer.origins),
        "text": answer.text,
        "token_ids": answer.tokens,
        "origins": "".join(origin[0] for origin in answer.origins),
    }


def restore_answer(sample: Row) -> Generation:
    """The answer that a row of a part was made from, without what a trace adds."""
    origins: Any = tuple(_ORIGINS[letter] for letter in sample["origins"])
    return Generation(tuple(sample["token_ids"]), origins, sample["text"], sample["cycles"], sample["finish"], 0)


def count_substitutions(answers: Sequence[Generation]) -> list[tuple[str, str, int]]:
    """(the target's choice, what was accepted, how often) in traced answers, the most frequent first."""
    pairs = Counter((token.target_text, token.text) for answer in answers for token in answer.judged_tokens)
    return [(choice, taken, n) for (choice, taken), n in pairs.most_common(KEPT_SUBSTITUTIONS)]


def make_example_row(pair: Pair, prompt: Prompt, answer: Generation) -> Row:
    """Prompt, text and tokens of an answer."""
    return {"prompt": join_messages(prompt), "text": answer.text, "tokens": make_token_rows(pair, answer)}


def make_token_rows(pair: Pair, answer: Generation) -> list[Row]:
    """Each token's text, origin and cycle; traced judged tokens add the choice, both probabilities and the score."""
    traced = {token.index: token for token in answer.judged_tokens}
    rows: list[Row] = []
    cycle = 0
    for k, (token, origin) in enumerate(zip(answer.tokens, answer.origins, strict=True)):
        row: Row = {"text": str(pair.tokenizer.decode([token], skip_special_tokens=True)), "origin": origin}
        if (seen := traced.get(k)) is not None:
            row |= {
                "choice": seen.target_text,
                "p": round(seen.probability, 4),
                "p_choice": round(seen.target_probability, 4),
                "judge": None if seen.score is None else round(seen.score, 4),
            }
        rows.append({**row, "cycle": cycle})
        cycle += origin == "target"
    return rows


def choose_measure(scores: Mapping[str, float]) -> str | None:
    """The measure that stands for a task: factual consistency by a classifier, else ROUGE-L, else the first."""
    return next((name for name in ("fc", "rougeL") if name in scores), next(iter(scores), None))


def summarise(pair: Pair, task: Task, run: RuleRun, samples: Sequence[Row]) -> dict[str, Any]:
    """A summary without names, settings and times: what the judge's config says of its labels, None without a judge.
    Scores are means over the `n_scored` examples that have one."""
    judge = run.rule.judge
    config = None if judge is None else judge.config
    return {
        "pair": pair.name,
        "rule": run.name,
        "gamma": run.gamma,
        "judge": run.judge,
        "judge_id": None if judge is None else judge.digest(),
        "threshold": getattr(run.rule, "theta", None),
        **{name: getattr(config, name, None) for name in ("label_method", "features", "suffix_length")},
        "label_prompts": None if config is None else config.metrics.get("n_prompts"),
        **_average(samples, task.checkable),
        **NOT_COMPARED,
        "agreement_measure": "same_answer" if task.checkable else "word_overlap",
        "dtype": pair.dtype,
        "draft_dtype": PairEngines(pair).draft_dtype,
        **measured_on(*task.requires),
        "run_sha256": run.identity,
    }


def _average(samples: Sequence[Row], checkable: bool) -> dict[str, Any]:
    """Means of scores, and lengths pooled over all answers: m is tokens per target pass, Σ emitted / Σ cycles."""
    scored = [sample for sample in samples if sample["scores"]]
    names = scored[0]["scores"] if scored else {}
    scores = {name: float(np.mean([sample["scores"][name] for sample in scored])) for name in names}
    measure = choose_measure(scores)
    values = np.asarray([sample["score"] for sample in scored], float)
    lengths = ("tokens", "emitted", "cycles", "drafts_accepted", "judged")
    tokens, emitted, cycles, drafts, judged = (sum(sample[name] for sample in samples) for name in lengths)
    return {
        "n": len(samples),
        "n_scored": len(scored),
        "measure": measure,
        "score": scores[measure] if measure else None,
        "score_ci": bootstrap_interval(values) if measure else None,
        "scores": scores,
        "extraction_failures": fmean(sample["answer"] is None for sample in scored) if checkable and scored else None,
        "cut_off": fmean(sample["finish"] == "length" for sample in samples),
        "mean_accepted_length": emitted / cycles if cycles else None,
        "drafts_accepted": drafts / max(1, cycles),
        "judged_share": judged / max(1, tokens),
        "tokens": tokens,
    }
