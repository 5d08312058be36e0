"""One run on one task: decode and score part by part, then write samples, examples and the summary."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfjudge.decoding.text import row_seed
from selfjudge.errors import SelfJudgeError
from selfjudge.evaluate.answerer import Answerer
from selfjudge.evaluate.config import EvalConfig
from selfjudge.evaluate.consistency import Entails, consistency
from selfjudge.evaluate.examples import example_rows, frequent_substitutions
from selfjudge.evaluate.runs import RuleRun
from selfjudge.evaluate.summary import main_measure, summarise
from selfjudge.evaluate.task_examples import TaskExamples, score_texts
from selfjudge.models.pair import Pair
from selfjudge.store import RunFolder, read_json, read_rows, write_json, write_rows
from selfjudge.store.artefacts import FinishedSummary, PartSample, PartSeal, ScoredSample
from selfjudge.tasks.base import Row
from selfjudge.types import PHASES, Generation

_ORIGINS = {"d": "draft", "j": "judge", "t": "target"}


@dataclass(frozen=True)
class Part:
    """At most `batch` examples that are decoded together."""

    name: str
    rows: list[Row]


class Execution:
    """One run on one task, in a folder of its own. Parts that are done stay done."""

    def __init__(
        self,
        pair: Pair,
        answerer: Answerer,
        examples: TaskExamples,
        run: RuleRun,
        out: Path,
        config: EvalConfig,
        entails: Entails | None,
    ) -> None:
        self.pair, self.answerer, self.examples, self.run = pair, answerer, examples, run
        self.config, self.entails = config, entails
        self.task = examples.task
        self.folder = out / examples.label / run.folder
        self.parts_folder = RunFolder(self.folder, done="summary.json", schema=FinishedSummary)
        self.batch = run.batch(config.batch or 1)
        self.max_new_tokens = config.max_new_tokens or self.task.new_tokens

    @property
    def done(self) -> bool:
        """Whether the summary is there, made with this very rule."""
        if (summary := self.parts_folder.result()) is None:
            return False
        if summary["run_sha256"] != self.run.identity:
            raise SelfJudgeError(
                f"{self.folder} was made with another judge or threshold, or by another version:"
                " name another `out` or remove it"
            )
        self._drop_parts()
        return True

    def answer_rows(self, notify: Callable[[float], None]) -> None:
        """Answer and score all prompts, a part at a time, then write samples, examples and, last, the summary."""
        parts = self.parts()
        for number, part in enumerate(parts):
            notify(number / len(parts))
            if self.parts_folder.sealed(part.name, self.run.identity, PartSeal) is None:
                file = self.folder / "work" / f"{part.name}.jsonl"
                answers, seconds = self._answer(part)
                write_rows(file, self._score(part.rows, answers))
                self.parts_folder.seal(part.name, [f"work/{file.name}"], self.run.identity, seconds=seconds)
        self._finish([part.name for part in parts])

    def parts(self) -> list[Part]:
        rows, size = self.examples.rows, self.batch
        starts = range(0, len(rows), size)
        return [Part(f"part-{number:05d}", rows[start : start + size]) for number, start in enumerate(starts)]

    def _answer(self, part: Part) -> tuple[list[Generation], dict[str, float]]:
        """The answers of a part and its seconds by phase. A row's seed does not depend on the part it is in."""
        return self.answerer.answer(
            [self.task.prompt(row) for row in part.rows],
            self.run.rule,
            gamma=self.run.gamma,
            max_new_tokens=self.max_new_tokens,
            seeds=[row_seed(self.config.seed, self.examples.places[row["id"]]) for row in part.rows],
        )

    def _score(self, rows: Sequence[Row], answers: Sequence[Generation]) -> list[Row]:
        """A sample for every example."""
        texts = [answer.text for answer in answers]
        extracted, scores = score_texts(self.examples, rows, texts)
        if self.entails is not None and self.examples.has_stories:
            name = "fc_proxy" if self.config.nli == "proxy" else "fc"
            stories = [self.task.story(row) or "" for row in rows]
            for score, value in zip(scores, consistency(self.entails, stories, texts), strict=True):
                score[name] = value or 0.0
        return [
            sample_row(row["id"], answer, found, score)
            for row, answer, found, score in zip(rows, answers, extracted, scores, strict=True)
        ]

    def _finish(self, parts: Sequence[str]) -> None:
        """From the parts: samples, examples and the summary. Then the parts go."""
        by_part = [list(read_rows(self.folder / "work" / f"{name}.jsonl", PartSample)) for name in parts]
        samples = sorted(
            (sample for part in by_part for sample in part), key=lambda sample: self.examples.places[sample["id"]]
        )
        answers = [generation_of(sample) for sample in samples]
        prompts = [self.task.prompt(row) for row in self.examples.rows]
        write_rows(self.folder / "examples.jsonl", self._shown(samples, answers))
        kept = [{k: v for k, v in s.items() if k not in ("token_ids", "origins")} for s in samples]
        write_rows(self.folder / "samples.jsonl.gz", kept)
        summary = {
            "task": self.examples.label,
            **summarise(self.pair, self.task, self.run, kept, checkable=self.examples.checkable),
            "batch": self.batch,
            "max_new_tokens": self.max_new_tokens,
            **self._times(parts, [sum(sample["tokens"] for sample in part) for part in by_part]),
            "substitutions": frequent_substitutions(self.pair, prompts, answers),
        }
        write_json(self.folder / "summary.json", summary)
        self._drop_parts()

    def _times(self, parts: Sequence[str], tokens: Sequence[int]) -> dict[str, Any]:
        """Seconds by phase and tokens/s.

        In the first part engines record graphs and pack weights: where there are others, it does not count.
        """
        if not self.config.times:
            return {"tokens_per_second": None, "seconds": {}}
        counted = list(zip(parts, tokens, strict=True))[1 if len(parts) > 1 else 0 :]
        by_part = [read_json(self.folder / "work" / f"{name}.json", PartSeal)["seconds"] for name, _ in counted]
        seconds = {phase: sum(part[phase] for part in by_part) for phase in (*PHASES, "total")}
        speed = sum(n for _, n in counted) / max(1e-9, seconds["total"])
        return {"tokens_per_second": speed, "seconds": seconds}

    def _shown(self, samples: Sequence[Row], answers: Sequence[Generation]) -> list[Row]:
        """The first answers with a judged token, else the first ones, token by token."""
        chosen = sorted(range(len(answers)), key=lambda i: "judge" not in answers[i].origins)[: self.config.examples]
        rows = [self.examples.rows[i] for i in chosen]
        shown = example_rows(
            self.pair, [self.task.prompt(row) for row in rows], [answers[i] for i in chosen], self.run.rule.judge
        )
        return [
            {"id": samples[i]["id"], "score": samples[i]["score"], **example}
            for i, example in zip(chosen, shown, strict=True)
        ]

    def copy_from(self, folder: Path) -> None:
        """Take the answers of the same rule under another name: F and R may be one threshold."""
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / "samples.jsonl.gz", self.folder)
        if (folder / "examples.jsonl").is_file():  # kept results may lack it
            shutil.copy(folder / "examples.jsonl", self.folder)
        own: dict[str, Any] = {"rule": self.run.name, "run_sha256": self.run.identity}
        if not self.config.times:
            own |= {"tokens_per_second": None, "seconds": {}}
        write_json(self.folder / "summary.json", {**read_json(folder / "summary.json", FinishedSummary), **own})
        self._drop_parts()

    def compact(self) -> None:
        """Leave the texts out of the rows and round to five decimals. Kept results may lack rows."""
        file = self.folder / "samples.jsonl.gz"
        if self.run.name == "exact" and not self.examples.checkable:
            return  # its words are what others are compared with
        rows = list(read_rows(file, ScoredSample)) if file.is_file() else []
        if any("text" in row for row in rows):
            write_rows(file, ({key: _rounded(value) for key, value in row.items() if key != "text"} for row in rows))

    def _drop_parts(self) -> None:
        shutil.rmtree(self.folder / "work", ignore_errors=True)


def sample_row(name: str, answer: Generation, extracted: str | None, scores: dict[str, float]) -> Row:
    """What is kept of an answer: a row of a part (`PartSample`)."""
    measure = main_measure(scores)
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


def generation_of(sample: Row) -> Generation:
    """The answer that a row of a part was made from."""
    origins: Any = tuple(_ORIGINS[letter] for letter in sample["origins"])
    return Generation(tuple(sample["token_ids"]), origins, sample["text"], sample["cycles"], sample["finish"], 0)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return round(value, 5) if isinstance(value, float) else value
