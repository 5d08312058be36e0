"""Result folders → frozen records of runs in display order: tasks as in the paper, rules from lossless to boldest. A
damaged file is an error; an unfinished run is named and left out. A task is shown at the γ of most runs."""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from selfjudge.errors import SelfJudgeError
from selfjudge.store import read_json, read_rows
from selfjudge.store.schema import AnswerExample, EvaluationSummary, conform

Interval = tuple[float, float]
VARIANT = " · "  # between a task and what distinguishes some of its runs: the number of examples, or the length limit
ORIGINS = ("draft", "judge", "target")
PROVENANCE = ("machine", "dtype", "versions", "date", "commit")
MATCHING_WORDS = "matching words"  # measure of a task without answers: share of words in common with `exact`
ABSENT = {"pair": "–", "measure": "score", "scores": {}, "delta_scores": {}, "delta_scores_ci": {}, "substitutions": ()}
ABSENT |= dict.fromkeys(("judge", "judge_id", "busy", *PROVENANCE), "")
"""What stands for keys that a summary does not have, where that is not None."""


@dataclass(frozen=True)
class EvalRun:
    """One task decoded by one rule at one γ, with answers. Keys of its summary (`EvaluationSummary` in
    store/formats.json) are attributes. Scores are shares; `PROVENANCE` is text."""

    folder: Path
    summary: Mapping[str, Any] = field(repr=False)
    examples: tuple[AnswerExample, ...] = field(default=(), repr=False)  # answers for the token viewer

    def __getattr__(self, name: str) -> Any:
        if name not in EvaluationSummary.__annotations__:
            raise AttributeError(name)
        return self.summary.get(name, ABSENT.get(name))

    def change(self, **values: Any) -> "EvalRun":
        return replace(self, summary={**self.summary, **values})

    @property
    def m(self) -> Any:
        return self.mean_accepted_length

    @property
    def scored(self) -> int:
        """Examples that are scored, or compared with `exact` where no answer is known."""
        return int(self.n_scored or self.n)

    @property
    def kind(self) -> str:
        """The rule without options: `judged`."""
        return str(re.split("[:@]", self.rule, maxsplit=1)[0])

    @property
    def option(self) -> str:
        """The rule's options as given: `F`, `0.35`, `2`; empty where there are none."""
        return str(self.rule).partition("@")[0].partition(":")[2]

    @property
    def method(self) -> str:
        """Name of the curve it is a point of: rule, whether it has a price, its other options, and judge."""
        _, has_price, others = _split_options(self.option)
        words = [self.kind, *(["price"] if has_price else []), *others]
        return ", ".join(words) + (f"@{self.judge}" if self.judge else "")

    @property
    def number(self) -> float | None:
        """The option that differs along its curve, where it is a number: threshold, quality or price."""
        try:
            return float(_split_options(self.option)[0].removeprefix("q"))
        except ValueError:
            return None

    @property
    def is_named(self) -> bool:
        """Whether its option is F, R or nothing. A judged rule with a number is a point of a sweep."""
        return self.number is None or not self.judge

    @property
    def key(self) -> tuple[Any, ...]:
        """Identity of a run among all that were read."""
        return (self.pair, self.task, self.gamma, self.rule, self.judge_id, self.n, self.max_new_tokens or 0)

    def row(self) -> dict[str, Any]:
        row = {name: getattr(self, name) for name in EvaluationSummary.__annotations__ if name not in PROVENANCE}
        return row | {"method": self.method, "few": self.scored < FEWEST_SCORED}


FEWEST_SCORED = 30  # from fewer scored examples no interval of a score is shown: that of a handful says nothing
SWEPT = ("threshold", "theta", "k", "entropy")  # options that differ along a curve, as a rule's text names them


def _split_options(options: str) -> tuple[str, bool, list[str]]:
    """(the value that differs along a curve, whether it is a price, the other options without a default guard)"""
    parts = options.split(",") if options else []
    price = next((part for part in parts if part.startswith("price=")), None)
    by_name = bool(parts) and parts[0].partition("=")[0] in SWEPT
    swept = price or (parts[0] if parts and ("=" not in parts[0] or by_name) else None)
    default = f"guard={price is not None}"  # rule objects write it out; it is on only with a price
    others = [part for part in parts if part not in (swept, default)]
    return (swept or "").rpartition("=")[2], price is not None, others


PAPER = ("gsm8k", "math500", "mmlu", "cnn_dailymail")  # the tasks whose average the paper reports
TITLES = {
    "gsm8k": "GSM8K", "math500": "MATH-500", "mmlu": "MMLU", "cnn_dailymail": "CNN/DailyMail",
    "livecodebench": "LiveCodeBench", "mbpp": "MBPP", "dolly": "Dolly",
}  # fmt: skip


def task_title(task: str) -> str:
    """`gsm8k-train` → GSM8K, train."""
    name, _, variant = task.partition(VARIANT)
    benchmark, _, split = name.partition("-")
    known = ", ".join(filter(None, (TITLES[benchmark], split))) if benchmark in TITLES else name
    return f"{known}, {variant}" if variant else known


def task_order(task: str) -> tuple[int, str]:
    known, name = (*PAPER, "livecodebench"), task.partition(VARIANT)[0].partition("-")[0]
    return (known.index(name) if name in known else len(known), task)


def rule_order(run: EvalRun) -> tuple[Any, ...]:
    """`exact`, other rules, judged, judge_only; F and R before numbers."""
    rank = {"exact": 0, "judged": 2, "judge_only": 3}.get(run.kind, 1)
    option = (0, 0.0, run.option) if run.number is None else (1, run.number, run.option)
    return rank, run.method, option, run.gamma


def group_by_task(runs: Iterable[EvalRun]) -> dict[tuple[str, str], list[EvalRun]]:
    """(pair, task) → runs in order."""
    grouped: dict[tuple[str, str], list[EvalRun]] = defaultdict(list)
    for run in runs:
        grouped[run.pair, run.task].append(run)
    keys = sorted(grouped, key=lambda key: (key[0], task_order(key[1])))
    return {key: sorted(grouped[key], key=rule_order) for key in keys}


def usual_gamma(runs: Iterable[EvalRun]) -> int:
    """The γ that most runs have; the larger of two."""
    counts = Counter(int(run.gamma) for run in runs)
    return max(counts, key=lambda gamma: (counts[gamma], gamma))


def slug(*parts: str) -> str:
    """A short name of letters, digits and dashes, for ids and files."""
    return "-".join(filter(None, (re.sub(r"[^a-z0-9]+", "-", part.casefold()).strip("-")[:60] for part in parts)))


def has_several_pairs(runs: Iterable[EvalRun]) -> bool:
    return len({run.pair for run in runs}) > 1


def name_task(pair: str, task: str, runs: Iterable[EvalRun]) -> tuple[str, str]:
    """(title, part of an id) of a pair's task; the pair is in them where the runs have several."""
    if has_several_pairs(runs):
        return f"{task_title(task)}, {pair}", slug(pair, task)
    return task_title(task), slug(task)


Content = dict[str, Any]
RUN_FOLDER = re.compile(r".+-g\d+")


def read_results(folders: Iterable[Path]) -> tuple[list[EvalRun], dict[str, str]]:
    """Every run below the folders, and why each other folder was left out. A folder without any run is an error."""
    runs: dict[tuple[Any, ...], EvalRun] = {}
    skipped: dict[str, str] = {}
    for folder in folders:
        if not folder.is_dir():
            raise SelfJudgeError(f"{folder} is not a folder: name folders that eval wrote")
        are_runs = [_add_run(file, runs, skipped) for file in sorted(folder.rglob("summary.json"))]
        for run_folder in sorted(folder.rglob("*-g*")):
            is_run = run_folder.is_dir() and RUN_FOLDER.fullmatch(run_folder.name)
            if is_run and not (run_folder / "summary.json").is_file():
                skipped[str(run_folder)] = "unfinished: it has no summary.json"
        if not any(are_runs):
            reasons = [f"{place}: {why}" for place, why in skipped.items() if Path(place).is_relative_to(folder)]
            why = f" ({'; '.join(reasons)})" if reasons else ""
            raise SelfJudgeError(f"{folder} holds no results{why}: name folders that eval wrote")
    return sorted(_tell_apart(runs.values()), key=lambda run: run.key), skipped


def _add_run(file: Path, runs: dict[tuple[Any, ...], EvalRun], skipped: dict[str, str]) -> bool:
    """Whether the file is the summary of a run, which is then read with the answers beside it."""
    content, folder = read_json(file), file.parent
    if not (RUN_FOLDER.fullmatch(folder.name) or {"task", "rule"} <= content.keys()):
        skipped[str(file)] = "not the summary of an evaluation"
        return False
    if content.get("measure", "") is None and content.get("agreement") is None and content.get("rule") != "exact":
        skipped[str(folder)] = "it has neither a score nor a run of exact to agree with"
        return False
    kept = file.with_name("examples.jsonl")
    examples: Any = read_rows(kept, AnswerExample) if kept.exists() else ()
    content = _with_score(file, conform(content, EvaluationSummary, file))
    known = {key: value for key, value in content.items() if value is not None}
    known |= {key: tuple(value) for key, value in known.items() if isinstance(value, list)}
    known["substitutions"] = tuple(map(tuple, content.get("substitutions") or ()))
    run = EvalRun(folder, known | _provenance(content), tuple(examples))
    first = runs.setdefault(run.key, run).folder
    if first.resolve() != folder.resolve():
        skipped[str(folder)] = f"the same configuration as {first}"
    return True


def _tell_apart(runs: Collection[EvalRun]) -> Iterator[EvalRun]:
    """Several judges of a pair with one name get the first digits of their ids. Runs with fewer examples, or a shorter
    limit, than others of a task do not compare: they get a task of their own."""
    judges: dict[tuple[str, str], set[str]] = defaultdict(set)
    sizes: dict[tuple[str, str], set[tuple[int, int]]] = defaultdict(set)
    for run in runs:
        judges[run.pair, run.judge].add(run.judge_id)
        sizes[run.pair, run.task].add((run.n, run.max_new_tokens or 0))
    for run in runs:
        changes: dict[str, Any] = {}
        if run.judge and len(judges[run.pair, run.judge]) > 1:
            judge = f"{run.judge}~{run.judge_id[:6]}"
            changes = {"judge": judge, "rule": f"{run.rule.partition('@')[0]}@{judge}"}
        known, size = sizes[run.pair, run.task], (run.n, run.max_new_tokens or 0)
        if size != max(known):
            words = [f"{size[0]:,} examples"] if len({n for n, _ in known}) > 1 else []
            words += [f"{size[1]:,} tokens"] if len({tokens for _, tokens in known}) > 1 else []
            changes["task"] = f"{run.task}{VARIANT}{', '.join(words)}"
        yield run.change(**changes)


def _with_score(file: Path, content: Content) -> Content:
    """A task without reference answers has no score: the share of words in common with `exact` takes its place."""
    if content.get("measure", "score") is not None:
        if content["score"] is None:
            raise SelfJudgeError(f'{file} is not an evaluation summary: "score" must be a number, not null')
        return content
    agreement = content.get("agreement")
    return {
        **content,
        "measure": MATCHING_WORDS,
        "score": 1.0 if agreement is None else agreement,
        "delta_score": None if agreement is None else agreement - 1,
    }


def _provenance(content: Content) -> Content:
    """The machine and the software of a measurement, as text."""
    machine, versions = content.get("machine") or {}, content.get("versions") or {}
    cores = f"{machine['cpus']} cores" if machine.get("cpus") else ""
    parts = (machine.get("gpu"), machine.get("cpu") or machine.get("arch"), cores)
    return {
        "machine": ", ".join(str(part) for part in parts if part),
        "dtype": content.get("dtype") or "",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "date": content.get("date") or "",
        "commit": (content.get("commit") or "")[:12],
    }
