"""Result folders → records. Reads files only; what is damaged is refused by name, what is unfinished is named and left out.

Everything below a given folder counts, so `selfjudge report results` and `selfjudge report eval judge` both work.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
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


def read_results(folders: Iterable[Path]) -> Results:
    """Everything that lies below the folders. A folder with nothing in it that a report could show is an error."""
    runs: dict[Key, Run] = {}
    judges: list[JudgeCard] = []
    labels: list[LabelRun] = []
    studies: list[Study] = []
    skipped: dict[str, str] = {}
    seen: set[Path] = set()
    for folder in folders:
        if not folder.is_dir():
            raise SelfJudgeError(f"{folder} is no folder: name folders that eval, train, label or study wrote")
        empty = True
        for file in _files(folder):
            if file.resolve() in seen:
                empty = False
                continue
            if file.name == "manifest.json":
                if (made := _labelled(_Fields.of(file))) is None:
                    continue  # the manifest of something else
                labels.append(made)
            elif file.name.startswith("summary"):
                found = _Fields.of(file)
                if (
                    found.data.get("measure", "") is None
                    and found.data.get("agreement") is None
                    and found.data.get("rule") != "exact"
                ):
                    skipped[str(file.parent)] = "it has neither a score nor a run of exact to agree with"
                    continue
                if RUN_FOLDER.fullmatch(file.parent.name) or {"task", "rule"} <= found.data.keys():
                    run = _run(found)
                    if run.key in runs:
                        skipped[str(file.parent)] = f"the same configuration as {runs[run.key].folder}"
                    else:
                        runs[run.key] = run
                elif isinstance(found.data.get("runs"), list) and found.data["runs"]:
                    labels += _label_runs(found)
                else:
                    skipped[str(file)] = "not a summary that a report knows"
                    continue
            elif file.name == "study.json":
                found = _Fields.of(file)
                if not isinstance(found.data.get("learning_curve"), list):
                    skipped[str(file)] = "not a study of a judge"
                    continue
                studies.append(_study(found))
            else:
                found = _Fields.of(file)
                if not (isinstance(found.data.get("thresholds"), dict) and found.data["thresholds"]):
                    continue  # the configuration of something else
                judges.append(_judge(found))
            seen.add(file.resolve())
            empty = False
        for place in sorted(folder.rglob("*-g*")):
            if place.is_dir() and RUN_FOLDER.fullmatch(place.name) and not (place / "summary.json").is_file():
                skipped[str(place)] = "unfinished: it has no summary.json"
        if empty:
            why = "; ".join(f"{place}: {reason}" for place, reason in skipped.items() if Path(place).is_relative_to(folder))  # fmt: skip
            raise SelfJudgeError(
                f"{folder} holds no results" + (f" ({why})" if why else "")
                + ": name folders that eval, train, label or study wrote"
            )  # fmt: skip
    ordered = sorted(_apart(runs.values()), key=lambda run: run.key)
    return Results(tuple(ordered), tuple(judges), tuple(labels), tuple(studies), tuple(skipped.items()))


def _apart(runs: Iterable[Run]) -> Iterator[Run]:
    """Runs over other examples, or with other limits, than most of a task's are a task of their own: they do not compare."""
    found = list(runs)
    sizes: dict[tuple[str, str], set[tuple[int, int]]] = defaultdict(set)
    for run in found:
        sizes[run.pair, run.task].add((run.n, run.max_new_tokens or 0))
    for run in found:
        known, mine = sizes[run.pair, run.task], (run.n, run.max_new_tokens or 0)
        if mine == max(known):
            yield run
            continue
        words = [f"{mine[0]:,} examples"] if len({n for n, _ in known}) > 1 else []
        words += [f"{mine[1]:,} tokens"] if len({tokens for _, tokens in known}) > 1 else []
        yield replace(run, task=f"{run.task}{APART}{', '.join(words)}")


def _files(folder: Path) -> Iterator[Path]:
    for name in ("summary*.json", "manifest.json", "study.json", "config.json", "judge.json"):
        yield from sorted(folder.rglob(name))


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


def _open(found: _Fields) -> _Fields:
    """A run on an open task has no score of its own: how far its words are those of `exact` stands for one."""
    if found.data.get("measure", "score") is not None:
        return found
    agreement = found.number("agreement")
    standing: dict[str, Any] = {"measure": "matching words", "score": 1.0 if agreement is None else agreement}
    standing["delta_score"] = None if agreement is None else agreement - 1
    return _Fields(found.file, {**found.data, **standing}, found.where)


def _run(found: _Fields) -> Run:
    found = _open(found)
    folder = found.file.parent
    rule = found.text("rule")
    judge = rule.partition("@")[2] or Path(found.text("judge", "")).name
    substitutions = found.data.get("substitutions") or []
    if not (
        isinstance(substitutions, list)
        and all(isinstance(s, list) and len(s) == 3 and _is_number(s[2]) for s in substitutions)
    ):
        raise found.wrong("substitutions", "a list of [choice, taken, count]")
    return Run(
        folder=folder, pair=found.text("pair", "–"), task=found.text("task"), judge=judge,
        rule=f"{rule}@{judge}" if judge and "@" not in rule else rule,
        gamma=int(found.needed("gamma")), n=int(found.needed("n")), measure=found.text("measure", "score"),
        score=found.needed("score"), score_ci=found.interval("score_ci"), scores=found.table("scores"),
        delta_score=found.number("delta_score"), delta_ci=found.interval("delta_ci"),
        delta_scores=found.table("delta_scores"), delta_scores_ci=found.intervals("delta_scores_ci"), agreement=found.number("agreement"),
        m=found.number("mean_accepted_length"), delta_m=found.number("delta_m"), m_ratio=found.number("m_ratio"),
        drafts_accepted=found.number("drafts_accepted"), judged_share=found.number("judged_share"),
        tokens_per_second=found.number("tokens_per_second"), extraction_failures=found.number("extraction_failures"), cut_off=found.number("cut_off"),
        threshold=found.number("threshold"), label_method=found.text("label_method", ""), features=found.text("features", ""),
        suffix_length=found.whole("suffix_length"), label_prompts=found.whole("label_prompts"), fold=found.text("fold", ""), batch=found.whole("batch"),
        max_new_tokens=found.whole("max_new_tokens"), seconds=found.table("seconds"),
        substitutions=tuple((str(a), str(b), int(n)) for a, b, n in substitutions),
        provenance=_provenance(found), lengths=_lengths(folder / "samples.jsonl.gz"), examples=_examples(folder / "examples.jsonl"),
    )  # fmt: skip


def _provenance(found: _Fields) -> Provenance:
    """From the file itself; what it lacks from the nearest run.json at or above it, up to the folder of the evaluation."""
    places = (found.file.parent, *found.file.parent.parents[:2])
    beside = next((place / "run.json" for place in places if (place / "run.json").is_file()), None)
    made = _Fields.of(beside).data if beside else {}
    machine = found.data.get("machine") or made.get("machine")
    versions = found.data.get("versions") or made.get("versions")
    if isinstance(machine, dict):
        parts = (machine.get("gpu"), machine.get("cpu") or machine.get("arch"), _counted(machine.get("cpus"), "cores"))
        machine = ", ".join(str(part) for part in parts if part)
    if isinstance(versions, dict):
        versions = ", ".join(f"{name} {version}" for name, version in versions.items())
    return Provenance(
        str(machine or ""), found.text("dtype", ""), str(versions or ""),
        str(found.data.get("date") or made.get("time") or ""), str(found.data.get("commit") or made.get("commit") or "")[:12],
    )  # fmt: skip


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
        Example(row.text("id"), str(row.data.get("prompt") or ""), row.number("score"), tuple(map(_token, row.objects("tokens"))))
        for row in _lines(file)
    )  # fmt: skip


def _token(found: _Fields) -> Token:
    origin = found.data.get("origin")
    if origin not in ORIGINS:
        raise found.wrong("origin", "draft, judge or target")
    return Token(
        str(found.data.get("text") or ""), origin, str(found.data.get("choice") or ""), found.number("p"),
        found.number("p_choice"), found.number("judge"), found.whole("cycle"),
    )  # fmt: skip


def _judge(found: _Fields) -> JudgeCard:
    folder = found.file.parent
    roc = None
    if (folder / "roc.json").is_file():
        curve = _Fields.of(folder / "roc.json")
        fpr, tpr = curve.numbers("fpr"), curve.numbers("tpr")
        if len(fpr) != len(tpr):
            raise curve.wrong("tpr", f"{len(fpr)} numbers, one for each of 'fpr'")
        marks = {name: mark for name in ("F", "R") if (mark := curve.interval(name))}
        roc = Roc(fpr, tpr, marks, curve.number("auc"))
    return JudgeCard(folder, folder.resolve().name, found.data, roc)


def _label_runs(found: _Fields) -> list[LabelRun]:
    made = _provenance(found)
    return [
        LabelRun(
            found.text("pair", "–"), row.text("method"), row.whole("prompts"), int(row.needed("rows")), row.number("acceptable"),
            row.needed("rows_per_hour"), row.table("seconds").get("tau"), row.number("target_tokens_per_label"), made,
        )
        for row in found.objects("runs")
    ]  # fmt: skip


def _labelled(found: _Fields) -> LabelRun | None:
    """A folder that `selfjudge label` wrote; its seconds stand in run.json."""
    if not ({"method", "rows", "shards"} <= found.data.keys() and (found.file.parent / "run.json").is_file()):
        return None
    seconds = _Fields.of(found.file.parent / "run.json").table("seconds")
    spent = sum(seconds.values()) - seconds.get("tau", 0.0)
    rows = int(found.needed("rows"))
    if not (rows and spent > 0):
        return None
    return LabelRun(
        found.text("target", "–"), found.text("method"), found.whole("prompts"), rows, found.needed("acceptable") / rows,
        rows / spent * 3600, seconds.get("tau"), (found.number("target_tokens") or 0) / rows, _provenance(found),
    )  # fmt: skip


def _study(found: _Fields) -> Study:
    curve = tuple(
        {"labels": row.needed("labels"), "linear": row.number("linear"), "mlp": row.number("mlp")}
        for row in found.objects("learning_curve")
    )
    features = tuple(
        {"features": row.text("features"), "linear": row.number("linear"), "mlp": row.number("mlp")}
        for row in found.objects("features")
    )
    folder = found.file.parent.resolve().name
    return Study(folder, found.text("target", "–"), curve, features, _provenance(found))
