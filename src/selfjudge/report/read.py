"""Result folders → records. What is damaged is refused by name, what is unfinished is named and left out.

Everything below a given folder counts, so `selfjudge report results` and `selfjudge report eval judge` both work.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

from selfjudge.errors import SelfJudgeError
from selfjudge.report.records import (
    APART,
    Answered,
    Example,
    JudgeCard,
    Key,
    LabelRun,
    Provenance,
    Results,
    Roc,
    Run,
    Study,
    Token,
)
from selfjudge.store import read_json, read_rows
from selfjudge.store.artefacts import (
    AnswerExample,
    EvaluationSummary,
    JudgeFile,
    JudgeStudy,
    LabelBench,
    LabelManifest,
    RocCurve,
    RunRecord,
    Sample,
)
from selfjudge.store.schema import conform

Content = dict[str, Any]
RUN_FOLDER = re.compile(r".+-g\d+")
ORIGINS = ("draft", "judge", "target")
FILES = ("summary*.json", "manifest.json", "study.json", "config.json", "judge.json")


def read_results(folders: Iterable[Path]) -> Results:
    """Everything that lies below the folders. A folder with nothing in it that a report could show is an error."""
    collected = _Collected()
    for folder in folders:
        collected.read(folder)
    runs = sorted(_tasks_apart(_one_row(_with_shipped(list(collected.runs.values())))), key=lambda run: run.key)
    return Results(
        tuple(runs),
        tuple(_named_by_runs(collected.judges, runs)),
        tuple(collected.labels),
        tuple(collected.studies),
        tuple(collected.skipped.items()),
    )


@dataclass
class _Collected:
    """What was read so far."""

    runs: dict[Key, Run] = field(default_factory=dict)
    judges: list[JudgeCard] = field(default_factory=list)
    labels: list[LabelRun] = field(default_factory=list)
    studies: list[Study] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    seen: set[Path] = field(default_factory=set)

    def read(self, folder: Path) -> None:
        if not folder.is_dir():
            raise SelfJudgeError(f"{folder} is not a folder: name folders that eval, train, label or study wrote")
        empty = True
        for file in (file for name in FILES for file in sorted(folder.rglob(name))):
            if file.resolve() in self.seen:
                empty = False
            elif self._take(file):
                self.seen.add(file.resolve())
                empty = False
        for place in sorted(folder.rglob("*-g*")):
            if place.is_dir() and RUN_FOLDER.fullmatch(place.name) and not (place / "summary.json").is_file():
                self.skipped[str(place)] = "unfinished: it has no summary.json"
        if empty:
            reasons = (f"{place}: {why}" for place, why in self.skipped.items() if Path(place).is_relative_to(folder))
            why = "; ".join(reasons)
            why = f" ({why})" if why else ""
            raise SelfJudgeError(f"{folder} holds no results{why}: name folders that eval, train, label or study wrote")

    def _take(self, file: Path) -> bool:
        """Whether the file was one of a report's."""
        content = read_json(file)
        if file.name == "manifest.json":
            labels = _labelled(file, content)
            self.labels += [labels] if labels else []
            return labels is not None
        if file.name.startswith("summary"):
            return self._take_summary(file, content)
        if file.name == "study.json":
            if not isinstance(content.get("learning_curve"), list):
                self.skipped[str(file)] = "not a study of a judge"
                return False
            self.studies.append(_study(file, content))
            return True
        if not (isinstance(content.get("thresholds"), dict) and content["thresholds"]):
            return False  # the configuration of something else
        self.judges.append(_judge(file, content))
        return True

    def _take_summary(self, file: Path, content: Content) -> bool:
        folder = file.parent
        if content.get("measure", "") is None and content.get("agreement") is None and content.get("rule") != "exact":
            self.skipped[str(folder)] = "it has neither a score nor a run of exact to agree with"
            return False
        if RUN_FOLDER.fullmatch(folder.name) or {"task", "rule"} <= content.keys():
            run = _run(file, content)
            if run.key in self.runs:
                self.skipped[str(folder)] = f"the same configuration as {self.runs[run.key].folder}"
            self.runs.setdefault(run.key, run)
        elif isinstance(content.get("runs"), list) and content["runs"]:
            self.labels += _label_runs(file, content)
        else:
            self.skipped[str(file)] = "not a summary that a report knows"
            return False
        return True


def _shipped() -> dict[str, dict[str, float]]:
    """Pair → the named thresholds of the judge that ships for it."""
    files = Path(str(resources.files("selfjudge"))).glob("models/judges/*/config.json")
    return {file.parent.name: read_json(file, JudgeFile)["thresholds"] for file in files}


def _named_by_runs(cards: Sequence[JudgeCard], runs: Sequence[Run]) -> list[JudgeCard]:
    """The judges by the names that runs have for them: where one alone has the same named threshold, digit by digit."""
    called: dict[tuple[str, float | None], set[str]] = defaultdict(set)
    for run in runs:
        if run.judge and not run.fold:
            called[run.option, run.threshold].add(run.judge)
    known, shipped = {run.judge for run in runs}, list(_shipped().values())

    def name(card: JudgeCard) -> str:
        found = {judge for key in card.config["thresholds"].items() for judge in called.get(key, ())}
        return card.name if card.name in known or len(found) != 1 else found.pop()

    return [replace(card, name=name(card), ships=card.config["thresholds"] in shipped) for card in cards]


def _with_shipped(runs: Sequence[Run]) -> list[Run]:
    """The runs, marked where their judge is the one that ships: its named thresholds are the same, digit by digit."""
    shipping = set()
    for pair, thresholds in _shipped().items():
        shipping |= {
            (pair, r.judge)
            for r in runs
            if r.pair == pair and r.judge and r.option in thresholds and thresholds[r.option] == r.threshold
        }
    return [replace(run, ships=(run.pair, run.judge) in shipping) for run in runs]


def _one_row(runs: Sequence[Run]) -> list[Run]:
    """The runs without those at R that are their F again: the same threshold, and the same outcome."""

    def outcome(run: Run) -> tuple[Any, ...]:
        return run.pair, run.task, run.method, *run.key[3:], run.threshold, run.m, run.score

    at = {option: {outcome(run) for run in runs if run.judge and run.option == option} for option in ("F", "R")}
    same = at["F"] & at["R"]
    marked = [replace(run, both=run.option == "F" and outcome(run) in same) for run in runs]
    return [run for run in marked if run.option != "R" or outcome(run) not in same]


def _tasks_apart(runs: Sequence[Run]) -> Iterator[Run]:
    """Runs over other examples, or with other limits, than most of a task's do not compare: a task of their own."""
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
        yield replace(run, task=f"{run.task}{APART}{', '.join(words)}")


ABSENT: dict[Any, Any] = {"str": "", "Mapping[str, float]": {}, "Mapping[str, Interval]": {}}
"""What stands for a field of `Run` that a summary lacks, by its type; None for all others."""


def _run(file: Path, content: Content) -> Run:
    """A summary and what lies beside it."""
    content = _scored(file, conform(content, EvaluationSummary, file))
    folder, rule = file.parent, content["rule"]
    judge = rule.partition("@")[2] or Path(content.get("judge") or "").name
    own: dict[str, Any] = {
        "folder": folder,
        "pair": content.get("pair") or "–",
        "rule": f"{rule}@{judge}" if judge and "@" not in rule else rule,
        "judge": judge,
        "measure": content.get("measure") or "score",
        "substitutions": tuple(map(tuple, content.get("substitutions") or ())),
        "provenance": _provenance(file, content),
        "answers": _answers(folder / "samples.jsonl.gz"),
        "examples": _examples(folder / "examples.jsonl"),
    }
    for f in fields(Run):
        if f.name not in own and f.name not in ("ships", "both"):
            value = content.get(f.name)
            own[f.name] = ABSENT.get(f.type) if value is None else tuple(value) if isinstance(value, list) else value
    return Run(**own)


def _scored(file: Path, content: Content) -> Content:
    """A run on a task without answers has no score: how far its words are those of `exact` stands for one."""
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


def _provenance(file: Path, content: Content) -> Provenance:
    """From the file itself; what it lacks from the nearest run.json, up to the folder of the evaluation."""
    places = (file.parent, *file.parent.parents[:2])
    beside = next((place / "run.json" for place in places if (place / "run.json").is_file()), None)
    run = read_json(beside, RunRecord) if beside else {}
    machine = content.get("machine") or run.get("machine")
    versions = content.get("versions") or run.get("versions")
    if isinstance(machine, dict):
        parts = (machine.get("gpu"), machine.get("cpu") or machine.get("arch"), _counted(machine.get("cpus"), "cores"))
        machine = ", ".join(str(part) for part in parts if part)
    if isinstance(versions, dict):
        versions = ", ".join(f"{name} {version}" for name, version in versions.items())
    return Provenance(
        str(machine or ""),
        str(content.get("dtype") or ""),
        str(versions or ""),
        str(content.get("date") or run.get("time") or ""),
        str(content.get("commit") or run.get("commit") or "")[:12],
    )


def _counted(number: Any, what: str) -> str:
    return f"{number} {what}" if number else ""


def _lines(file: Path, schema: Any) -> Iterator[Content]:
    """The rows of a file; nothing where there is none."""
    return read_rows(file, schema) if file.exists() else iter(())


def _answers(file: Path) -> dict[str, Answered]:
    return {
        row["id"]: Answered(row["tokens"], row["cycles"], row.get("score"), row.get("agrees"))
        for row in _lines(file, Sample)
    }


def _examples(file: Path) -> tuple[Example, ...]:
    return tuple(
        Example(row["id"], str(row.get("prompt") or ""), row.get("score"), tuple(map(_token, row["tokens"])))
        for row in _lines(file, AnswerExample)
    )


def _token(content: Content) -> Token:
    return Token(
        content.get("text") or "",
        content["origin"],
        content.get("choice") or "",
        content.get("p"),
        content.get("p_choice"),
        content.get("judge"),
        content.get("cycle"),
    )


def _judge(file: Path, content: Content) -> JudgeCard:
    folder = file.parent
    roc = None
    if (folder / "roc.json").is_file():
        curve = read_json(folder / "roc.json", RocCurve)
        fpr, tpr = curve["fpr"], curve["tpr"]
        if not fpr or len(fpr) != len(tpr):
            raise SelfJudgeError(f"{folder / 'roc.json'} has {len(fpr)} numbers of fpr and {len(tpr)} of tpr")
        marks = {name: (mark[0], mark[1]) for name in ("F", "R") if (mark := curve.get(name))}
        roc = Roc(tuple(fpr), tuple(tpr), marks, curve.get("auc"))
    return JudgeCard(folder, folder.resolve().name, conform(content, JudgeFile, file), roc)


def _label_runs(file: Path, content: Content) -> list[LabelRun]:
    conform(content, LabelBench, file)
    provenance = _provenance(file, content)
    return [
        LabelRun(
            content.get("pair", "–"),
            row["method"],
            row.get("prompts"),
            row["rows"],
            row.get("acceptable"),
            row["rows_per_hour"],
            row.get("seconds", {}).get("tau"),
            row.get("target_tokens_per_label"),
            provenance,
        )
        for row in content["runs"]
    ]


def _labelled(file: Path, content: Content) -> LabelRun | None:
    """A folder that `selfjudge label` wrote; its seconds stand in run.json."""
    if not ({"method", "rows", "shards"} <= content.keys() and (file.parent / "run.json").is_file()):
        return None
    conform(content, LabelManifest, file)
    seconds = read_json(file.parent / "run.json", RunRecord).get("seconds")
    seconds = seconds if isinstance(seconds, dict) else {}
    spent, rows = sum(seconds.values()) - seconds.get("tau", 0.0), content["rows"]
    if not (rows and spent > 0):
        return None
    return LabelRun(
        content["target"],
        content["method"],
        content["prompts"],
        rows,
        content["acceptable"] / rows,
        rows / spent * 3600,
        seconds.get("tau"),
        content.get("target_tokens", 0) / rows,
        _provenance(file, content),
    )


def _study(file: Path, content: Content) -> Study:
    conform(content, JudgeStudy, file)
    curve = tuple({key: row.get(key) for key in ("labels", "linear", "mlp")} for row in content["learning_curve"])
    features = tuple(
        {key: row.get(key) for key in ("features", "linear", "mlp")} for row in content.get("features", ())
    )
    folder = file.parent.resolve().name
    return Study(folder, content.get("target") or "–", curve, features, _provenance(file, content))
