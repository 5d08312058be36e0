"""Result folders → records. What is damaged is refused by name, what is unfinished is named and left out.

Everything below a given folder counts, so `selfjudge report results` and `selfjudge report eval judge` both work.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from selfjudge.errors import SelfJudgeError
from selfjudge.report.records import (
    APART,
    Example,
    Interval,
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
from selfjudge.store import read_json

RUN_FOLDER = re.compile(r".+-g\d+")
ORIGINS = ("draft", "judge", "target")
FILES = ("summary*.json", "manifest.json", "study.json", "config.json", "judge.json")


def read_results(folders: Iterable[Path]) -> Results:
    """Everything that lies below the folders. A folder with nothing in it that a report could show is an error."""
    collected = _Collected()
    for folder in folders:
        collected.read(folder)
    runs = sorted(_tasks_apart(list(collected.runs.values())), key=lambda run: run.key)
    return Results(
        tuple(runs),
        tuple(collected.judges),
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
        content = _Fields.of(file)
        if file.name == "manifest.json":
            labels = _labelled(content)
            self.labels += [labels] if labels else []
            return labels is not None
        if file.name.startswith("summary"):
            return self._take_summary(content)
        if file.name == "study.json":
            if not isinstance(content.data.get("learning_curve"), list):
                self.skipped[str(file)] = "not a study of a judge"
                return False
            self.studies.append(_study(content))
            return True
        if not (isinstance(content.data.get("thresholds"), dict) and content.data["thresholds"]):
            return False  # the configuration of something else
        self.judges.append(_judge(content))
        return True

    def _take_summary(self, content: _Fields) -> bool:
        data, folder = content.data, content.file.parent
        if data.get("measure", "") is None and data.get("agreement") is None and data.get("rule") != "exact":
            self.skipped[str(folder)] = "it has neither a score nor a run of exact to agree with"
            return False
        if RUN_FOLDER.fullmatch(folder.name) or {"task", "rule"} <= data.keys():
            run = _run(content)
            if run.key in self.runs:
                self.skipped[str(folder)] = f"the same configuration as {self.runs[run.key].folder}"
            self.runs.setdefault(run.key, run)
        elif isinstance(data.get("runs"), list) and data["runs"]:
            self.labels += _label_runs(content)
        else:
            self.skipped[str(content.file)] = "not a summary that a report knows"
            return False
        return True


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


@dataclass(frozen=True)
class _Fields:
    """A JSON object whose fields are checked as they are read."""

    file: Path
    data: Mapping[str, Any]
    where: str = ""

    @classmethod
    def of(cls, file: Path) -> _Fields:
        return cls.checked(file, read_json(file))

    @classmethod
    def checked(cls, file: Path, data: Any, where: str = "") -> _Fields:
        if not isinstance(data, dict):
            raise SelfJudgeError(f"{file}{where} is damaged: it holds no JSON object")
        return cls(file, writable(data), where)

    def wrong(self, key: str, should: str) -> SelfJudgeError:
        found = "missing" if self.data.get(key) is None else f"{self.data[key]!r:.40}"
        return SelfJudgeError(f"{self.file}{self.where} is damaged: {key!r} is {found}, not {should}")

    def number(self, key: str) -> float | None:
        """A finite number; None where there is none."""
        value = self.data.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, "a number")
        return value if math.isfinite(value) else None

    def needed(self, key: str) -> float:
        value = self.number(key)
        if value is None:
            raise self.wrong(key, "a number")
        return value

    def whole(self, key: str) -> int | None:
        value = self.number(key)
        return None if value is None else int(value)

    def text(self, key: str, default: str | None = None) -> str:
        value = self.data.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str | int | float) or value == "":
            raise self.wrong(key, "a text")
        return str(value)

    def interval(self, key: str) -> Interval | None:
        value = self.data.get(key)
        if value is None:
            return None
        if not (isinstance(value, list) and len(value) == 2 and all(_is_number(v) for v in value)):
            raise self.wrong(key, "two numbers")
        return float(value[0]), float(value[1])

    def numbers(self, key: str) -> tuple[float, ...]:
        value = self.data.get(key)
        if not (isinstance(value, list) and value and all(_is_number(v) for v in value)):
            raise self.wrong(key, "a list of numbers")
        return tuple(float(v) for v in value)

    def table(self, key: str) -> dict[str, float]:
        """An object's finite numbers."""
        value = self.data.get(key) or {}
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return {str(k): float(v) for k, v in value.items() if _is_number(v)}

    def intervals(self, key: str) -> dict[str, Interval]:
        """An object's pairs of numbers."""
        value = self.data.get(key) or {}
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        inner = _Fields(self.file, value, f"{self.where}, {key}")
        return {str(name): found for name in value if (found := inner.interval(name)) is not None}

    def objects(self, key: str) -> list[_Fields]:
        value = self.data.get(key) or []
        if not isinstance(value, list):
            raise self.wrong(key, "a list")
        return [self.checked(self.file, row, f", {key} {number}") for number, row in enumerate(value, 1)]


def writable(value: Any) -> Any:
    """The value with halves of characters, which JSON can hold and no file, replaced."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {writable(k): writable(v) for k, v in value.items()}
    return [writable(v) for v in value] if isinstance(value, list) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


READERS: dict[Any, Callable[[_Fields, str], Any]] = {
    "str": lambda content, key: content.text(key, ""),
    "float": _Fields.needed,
    "int": lambda content, key: int(content.needed(key)),
    "float | None": _Fields.number,
    "int | None": _Fields.whole,
    "Interval | None": _Fields.interval,
    "Mapping[str, float]": _Fields.table,
    "Mapping[str, Interval]": _Fields.intervals,
}
"""How a field of `Run` is read, by its type."""


def _run(content: _Fields) -> Run:
    """A summary and what lies beside it."""
    content = _scored(content)
    folder, rule = content.file.parent, content.text("rule")
    judge = rule.partition("@")[2] or Path(content.text("judge", "")).name
    own: dict[str, Any] = {
        "folder": folder,
        "pair": content.text("pair", "–"),
        "task": content.text("task"),
        "rule": f"{rule}@{judge}" if judge and "@" not in rule else rule,
        "judge": judge,
        "measure": content.text("measure", "score"),
        "substitutions": _substitutions(content),
        "provenance": _provenance(content),
        "lengths": _lengths(folder / "samples.jsonl.gz"),
        "examples": _examples(folder / "examples.jsonl"),
    }
    return Run(**own, **{f.name: READERS[f.type](content, f.name) for f in fields(Run) if f.name not in own})


def _scored(content: _Fields) -> _Fields:
    """A run on a task without answers has no score: how far its words are those of `exact` stands for one."""
    if content.data.get("measure", "score") is not None:
        return content
    agreement = content.number("agreement")
    score = {
        "measure": "matching words",
        "score": 1.0 if agreement is None else agreement,
        "delta_score": None if agreement is None else agreement - 1,
    }
    return _Fields(content.file, {**content.data, **score}, content.where)


def _substitutions(content: _Fields) -> tuple[tuple[str, str, int], ...]:
    rows = content.data.get("substitutions") or []
    if not (isinstance(rows, list) and all(isinstance(r, list) and len(r) == 3 and _is_number(r[2]) for r in rows)):
        raise content.wrong("substitutions", "a list of [choice, taken, count]")
    return tuple((str(choice), str(taken), int(count)) for choice, taken, count in rows)


def _provenance(content: _Fields) -> Provenance:
    """From the file itself; what it lacks from the nearest run.json, up to the folder of the evaluation."""
    places = (content.file.parent, *content.file.parent.parents[:2])
    beside = next((place / "run.json" for place in places if (place / "run.json").is_file()), None)
    run = _Fields.of(beside).data if beside else {}
    machine = content.data.get("machine") or run.get("machine")
    versions = content.data.get("versions") or run.get("versions")
    if isinstance(machine, dict):
        parts = (machine.get("gpu"), machine.get("cpu") or machine.get("arch"), _counted(machine.get("cpus"), "cores"))
        machine = ", ".join(str(part) for part in parts if part)
    if isinstance(versions, dict):
        versions = ", ".join(f"{name} {version}" for name, version in versions.items())
    return Provenance(
        str(machine or ""),
        content.text("dtype", ""),
        str(versions or ""),
        str(content.data.get("date") or run.get("time") or ""),
        str(content.data.get("commit") or run.get("commit") or "")[:12],
    )


def _counted(number: Any, what: str) -> str:
    return f"{number} {what}" if number else ""


def _lines(file: Path) -> Iterator[_Fields]:
    """The objects of a jsonl file, gzipped or not; nothing where there is no file."""
    if not file.is_file():
        return
    try:
        with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _Fields.checked(file, json.loads(line), f", line {number}")
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise SelfJudgeError(f"cannot read {file}: {error}") from None


def _lengths(file: Path) -> dict[str, tuple[int, int]]:
    return {row.text("id"): (int(row.needed("tokens")), int(row.needed("cycles"))) for row in _lines(file)}


def _examples(file: Path) -> tuple[Example, ...]:
    return tuple(
        Example(
            row.text("id"),
            str(row.data.get("prompt") or ""),
            row.number("score"),
            tuple(map(_token, row.objects("tokens"))),
        )
        for row in _lines(file)
    )


def _token(content: _Fields) -> Token:
    origin = content.data.get("origin")
    if origin not in ORIGINS:
        raise content.wrong("origin", "draft, judge or target")
    return Token(
        str(content.data.get("text") or ""),
        origin,
        str(content.data.get("choice") or ""),
        content.number("p"),
        content.number("p_choice"),
        content.number("judge"),
        content.whole("cycle"),
    )


def _judge(content: _Fields) -> JudgeCard:
    folder = content.file.parent
    roc = None
    if (folder / "roc.json").is_file():
        curve = _Fields.of(folder / "roc.json")
        fpr, tpr = curve.numbers("fpr"), curve.numbers("tpr")
        if len(fpr) != len(tpr):
            raise curve.wrong("tpr", f"{len(fpr)} numbers, one for each of 'fpr'")
        marks = {name: mark for name in ("F", "R") if (mark := curve.interval(name))}
        roc = Roc(fpr, tpr, marks, curve.number("auc"))
    return JudgeCard(folder, folder.resolve().name, content.data, roc)


def _label_runs(content: _Fields) -> list[LabelRun]:
    provenance = _provenance(content)
    return [
        LabelRun(
            content.text("pair", "–"),
            row.text("method"),
            row.whole("prompts"),
            int(row.needed("rows")),
            row.number("acceptable"),
            row.needed("rows_per_hour"),
            row.table("seconds").get("tau"),
            row.number("target_tokens_per_label"),
            provenance,
        )
        for row in content.objects("runs")
    ]


def _labelled(content: _Fields) -> LabelRun | None:
    """A folder that `selfjudge label` wrote; its seconds stand in run.json."""
    if not ({"method", "rows", "shards"} <= content.data.keys() and (content.file.parent / "run.json").is_file()):
        return None
    seconds = _Fields.of(content.file.parent / "run.json").table("seconds")
    spent = sum(seconds.values()) - seconds.get("tau", 0.0)
    rows = int(content.needed("rows"))
    if not (rows and spent > 0):
        return None
    return LabelRun(
        content.text("target", "–"),
        content.text("method"),
        content.whole("prompts"),
        rows,
        content.needed("acceptable") / rows,
        rows / spent * 3600,
        seconds.get("tau"),
        (content.number("target_tokens") or 0) / rows,
        _provenance(content),
    )


def _study(content: _Fields) -> Study:
    curve = tuple(
        {"labels": row.needed("labels"), "linear": row.number("linear"), "mlp": row.number("mlp")}
        for row in content.objects("learning_curve")
    )
    features = tuple(
        {"features": row.text("features"), "linear": row.number("linear"), "mlp": row.number("mlp")}
        for row in content.objects("features")
    )
    folder = content.file.parent.resolve().name
    return Study(folder, content.text("target", "–"), curve, features, _provenance(content))
