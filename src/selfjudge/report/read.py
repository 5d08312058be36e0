"""Result folders → records. A damaged file is an error that names it; an unfinished run is named and left out.

Every run below a given folder counts, so `selfjudge report results` works as well as `selfjudge report eval`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from selfjudge.errors import SelfJudgeError
from selfjudge.report.records import VARIANT, Answered, EvalRun, Provenance, Results
from selfjudge.store import read_json, read_rows
from selfjudge.store.artefacts import AnswerExample, EvaluationSummary, Sample
from selfjudge.store.schema import conform

Content = dict[str, Any]
RUN_FOLDER = re.compile(r".+-g\d+")


def read_results(folders: Iterable[Path]) -> Results:
    """Every run below the folders. A folder without any is an error."""
    collected = _Collected()
    for folder in folders:
        collected.read(folder)
    runs = _tell_tasks_apart(_tell_judges_apart(list(collected.runs.values())))
    return Results(tuple(sorted(runs, key=lambda run: run.key)), tuple(collected.skipped.items()))


@dataclass
class _Collected:
    """What was read so far."""

    runs: dict[tuple[Any, ...], EvalRun] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    seen: set[Path] = field(default_factory=set)

    def read(self, folder: Path) -> None:
        if not folder.is_dir():
            raise SelfJudgeError(f"{folder} is not a folder: name folders that eval wrote")
        files = sorted(folder.rglob("summary.json"))
        known = [file for file in files if file.resolve() in self.seen or self._take(file)]
        self.seen |= {file.resolve() for file in known}
        for run_folder in sorted(folder.rglob("*-g*")):
            is_run = run_folder.is_dir() and RUN_FOLDER.fullmatch(run_folder.name)
            if is_run and not (run_folder / "summary.json").is_file():
                self.skipped[str(run_folder)] = "unfinished: it has no summary.json"
        if not known:
            reasons = [f"{place}: {why}" for place, why in self.skipped.items() if Path(place).is_relative_to(folder)]
            why = f" ({'; '.join(reasons)})" if reasons else ""
            raise SelfJudgeError(f"{folder} holds no results{why}: name folders that eval wrote")

    def _take(self, file: Path) -> bool:
        """Whether the file is the summary of a run."""
        content, folder = read_json(file), file.parent
        if not (RUN_FOLDER.fullmatch(folder.name) or {"task", "rule"} <= content.keys()):
            self.skipped[str(file)] = "not the summary of an evaluation"
            return False
        if content.get("measure", "") is None and content.get("agreement") is None and content.get("rule") != "exact":
            self.skipped[str(folder)] = "it has neither a score nor a run of exact to agree with"
            return False
        run = _read_run(file, content)
        if run.key in self.runs:
            self.skipped[str(folder)] = f"the same configuration as {self.runs[run.key].folder}"
        self.runs.setdefault(run.key, run)
        return True


def _tell_judges_apart(runs: Sequence[EvalRun]) -> list[EvalRun]:
    """Adds the first digits of its id to the name of a judge where several judges of a pair have that name."""
    ids: dict[tuple[str, str], set[str]] = defaultdict(set)
    for run in runs:
        ids[run.pair, run.judge].add(run.judge_id)

    def distinct(run: EvalRun) -> EvalRun:
        if not run.judge or len(ids[run.pair, run.judge]) == 1:
            return run
        judge = f"{run.judge}~{run.judge_id[:6]}"
        return replace(run, judge=judge, rule=f"{run.rule.partition('@')[0]}@{judge}")

    return [distinct(run) for run in runs]


def _tell_tasks_apart(runs: Sequence[EvalRun]) -> Iterator[EvalRun]:
    """Runs with fewer examples, or a shorter limit, than others of a task do not compare: a task of their own."""
    sizes: dict[tuple[str, str], set[tuple[int, int]]] = defaultdict(set)
    for run in runs:
        sizes[run.pair, run.task].add((run.n, run.max_new_tokens or 0))
    for run in runs:
        known, size = sizes[run.pair, run.task], (run.n, run.max_new_tokens or 0)
        if size == max(known):
            yield run
            continue
        words = [f"{size[0]:,} examples"] if len({n for n, _ in known}) > 1 else []
        words += [f"{size[1]:,} tokens"] if len({tokens for _, tokens in known}) > 1 else []
        yield replace(run, task=f"{run.task}{VARIANT}{', '.join(words)}")


def _read_run(file: Path, content: Content) -> EvalRun:
    """A summary and the files beside it."""
    content = _with_score(file, conform(content, EvaluationSummary, file))
    names = {f.name for f in fields(EvalRun)}
    known = {key: value for key, value in content.items() if key in names and value is not None}
    known |= {key: tuple(value) for key, value in known.items() if isinstance(value, list)}
    return EvalRun(
        **known | {"substitutions": tuple(map(tuple, content.get("substitutions") or ()))},
        folder=file.parent,
        provenance=_provenance(content),
        answers=_answers(file.parent / "samples.jsonl.gz"),
        examples=tuple(_rows(file.parent / "examples.jsonl", AnswerExample)),
    )


def _with_score(file: Path, content: Content) -> Content:
    """A task without reference answers has no score: the share of words in common with `exact` takes its place."""
    if content.get("measure", "score") is not None:
        if content["score"] is None:
            raise SelfJudgeError(f'{file} is not an evaluation summary: "score" must be a number, not null')
        return content
    agreement = content.get("agreement")
    return {
        **content,
        "measure": "matching words",
        "score": 1.0 if agreement is None else agreement,
        "delta_score": None if agreement is None else agreement - 1,
    }


def _provenance(content: Content) -> Provenance:
    machine, versions = content.get("machine") or {}, content.get("versions") or {}
    cores = f"{machine['cpus']} cores" if machine.get("cpus") else ""
    parts = (machine.get("gpu"), machine.get("cpu") or machine.get("arch"), cores)
    return Provenance(
        ", ".join(str(part) for part in parts if part),
        content.get("dtype") or "",
        ", ".join(f"{name} {version}" for name, version in versions.items()),
        content.get("date") or "",
        (content.get("commit") or "")[:12],
    )


def _rows(file: Path, schema: Any) -> Iterator[Any]:
    """The rows of a file; none where there is no file."""
    return read_rows(file, schema) if file.exists() else iter(())


def _answers(file: Path) -> dict[str, Answered]:
    return {
        row["id"]: Answered(row["tokens"], row["cycles"], row.get("score"), row.get("agrees"))
        for row in _rows(file, Sample)
    }
