"""Evaluation: tasks × rules × γ → what is gained and what is paid, example by example, against `exact`.

<out>/settings.json                     what all runs in the folder share
<out>/run.json                          who made it
<out>/<task>/<rule>-g<γ>/
    samples.jsonl.gz                    one row an example
    examples.jsonl                      a few answers token by token, for the report's viewer
    summary.json                        written last: its existence means done
    work/part-00000.jsonl               `batch` answers each; they go once the summary stands
"""

from __future__ import annotations

import hashlib
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from difflib import SequenceMatcher
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from selfjudge.decoding.rule_parser import parse_rule
from selfjudge.decoding.rules import EXACT, AcceptanceRule
from selfjudge.decoding.text import generate, row_seed
from selfjudge.engine.teacher_forced import teacher_forced
from selfjudge.errors import SelfJudgeError
from selfjudge.evaluate.consistency import Entails, consistency
from selfjudge.evaluate.likelihood import likelihoods, substitutions
from selfjudge.judge.config import LOWEST
from selfjudge.judge.model import Judge
from selfjudge.models.pair import Pair
from selfjudge.store import locked, provenance, read_json, read_rows, refuse_other, write_json, write_rows
from selfjudge.tasks.base import FILE, Row, Task, split_of, task
from selfjudge.tasks.livecodebench import fold, learnt_folds
from selfjudge.types import PHASES, Generation

Notify = Callable[[str, float], None]
Judges = Mapping[str, Sequence[Judge]]
"""By name: one judge, or one for each fold of LiveCodeBench."""
RESAMPLES = 2000
SUBSTITUTION_ANSWERS = 200  # of a run are looked through for what was said instead of what
KEPT_SUBSTITUTIONS = 50
TOTALS = ("tokens", "emitted", "cycles", "drafts_accepted", "judged")


@dataclass(frozen=True)
class EvalConfig:
    """What all runs in a folder share."""

    limit: int | None = None
    max_new_tokens: int | None = None
    """The task's own number if not given."""
    batch: int = 64
    seed: int = 0
    nli: str = "off"
    """What measures factual consistency: a model, `proxy` (the target itself) or `off`."""

    def check(self) -> None:
        for name in ("limit", "max_new_tokens", "batch"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise SelfJudgeError(f"--{name.replace('_', '-')} must be at least 1, not {value}")


@dataclass(frozen=True, eq=False)
class Run:
    """One rule with one γ; `rules` holds one rule, or one for each fold."""

    name: str
    gamma: int
    rules: tuple[AcceptanceRule, ...]
    judge: str | None = None

    @property
    def folder(self) -> str:
        return f"{self.name}-g{self.gamma}"

    @property
    def identity(self) -> str:
        """What its results are known by: its name, and what decides its answers."""
        return hashlib.sha256(f"{self.name}:{self.meaning}".encode()).hexdigest()

    @cached_property
    def meaning(self) -> str:
        """What decides its answers beside the prompts, whatever its name: γ, the rules' options, thresholds and judges."""
        digest = hashlib.sha256(str(self.gamma).encode())
        for rule in self.rules:
            options = {f.name: getattr(rule, f.name) for f in fields(rule) if f.name not in ("judge", "base")}
            digest.update(f"{rule.name}:{options}".encode())
            for tensor in rule.judge.buffers() if rule.judge is not None else ():
                digest.update(tensor.float().cpu().numpy().tobytes())  # the judge stays where recordings know it
        return digest.hexdigest()


def runs_of(specs: Sequence[str], gammas: Sequence[int], judges: Judges, special: tuple[int, ...]) -> list[Run]:
    """Runs from rules such as `exact`, `topk:2`, `judged:F@mine`; a judged rule that names no judge means each of them.

    `exact` comes first: the others are compared with it.
    """
    found: dict[str, tuple[tuple[AcceptanceRule, ...], str | None]] = {}
    for spec in sorted(specs, key=lambda spec: spec != "exact"):
        rule, _, wanted = spec.partition("@")
        if not rule.startswith("judge"):
            if wanted:
                raise SelfJudgeError(f"rule {rule!r} asks no judge: leave out @{wanted}")
            found[spec] = (EXACT if rule == "exact" else parse_rule(rule, special=special),), None
            continue
        if not judges:
            raise SelfJudgeError(f"rule {spec!r} needs a judge: give --judge NAME=FOLDER")
        if wanted and wanted not in judges:
            raise SelfJudgeError(f"rule {spec!r} names no known judge; judges are: {', '.join(judges)}")
        for name in [wanted] if wanted else judges:
            found[f"{rule}@{name}"] = tuple(parse_rule(rule, special=special, judge=j) for j in judges[name]), name
    for gamma in gammas:
        for rules, _ in found.values():
            rules[0].check(gamma)
    return [Run(name, gamma, rules, judge) for gamma in gammas for name, (rules, judge) in found.items()]


def evaluate(
    pair: Pair, out: Path, tasks: Sequence[str], runs: Sequence[Run], settings: EvalConfig | None = None, *,
    data: Path | None = None, allow_unsafe: bool = False, entails: Entails | None = None, examples: int = 3,
    compact: bool = False, times: bool = True, notify: Notify = lambda stage, share: None,
    warn: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Run everything that is not yet done in `out`; all summaries that were asked for, in order.

    `tasks` are names, with a split where it is not `test`: `livecodebench/all`. With `compact`, texts are left out of the
    rows once everything is done. Without `times`, those of decoding are: for a device that is shared.
    """
    settings = settings or EvalConfig()
    settings.check()
    # what is wrong with a task is refused before anything is written
    known = [examples_of(name, settings.limit, data, allow_unsafe) for name in tasks]
    if len({label_of(name) for name in tasks}) < len(tasks):
        raise SelfJudgeError("two of the tasks have one name: evaluate them into different folders")
    try:
        return _evaluate(
            pair, out, dict(zip(tasks, known, strict=True)), runs, settings, entails, examples, compact, times,
            notify, warn,
        )  # fmt: skip
    except OSError as error:
        raise SelfJudgeError(f"cannot write {out}: {error}; once that is mended, go on with --resume") from None


def _evaluate(
    pair: Pair, out: Path, tasks: Mapping[str, tuple[Task, list[Row]]], runs: Sequence[Run], settings: EvalConfig,
    entails: Entails | None, examples: int, compact: bool, times: bool, notify: Notify, warn: Callable[[str], None],
) -> list[dict[str, Any]]:  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    with locked(out / ".lock", refuse=f"another process writes {out}: name another --out"):
        _same_settings(out, pair, settings)
        write_json(out / "run.json", provenance(
            tasks=list(tasks), runs=[r.folder for r in runs], settings=asdict(settings), earlier=_earlier(out / "run.json"),
        ))  # fmt: skip
        summaries: list[dict[str, Any]] = []
        for number, (name, (one, rows)) in enumerate(tasks.items()):
            place = out / label_of(name)
            _same_rows(place, name, one, rows, settings.nli)
            _learnt(one, rows, runs, warn)
            for turn, run in enumerate(runs):
                done = (number + turn / len(runs)) / len(tasks)
                work = _Work(pair, one, rows, run, place / run.folder, settings, entails, examples, times)
                same = next((r for r in runs[:turn] if (r.judge, r.meaning) == (run.judge, run.meaning)), None)
                if not work.done and same is not None:
                    work.take_over(place / same.folder)
                elif not work.done:
                    work.decode(lambda share, said, done=done: notify(  # type: ignore[misc]
                        said, done + share / len(runs) / len(tasks)))  # fmt: skip
                    work.finish()
                summaries.append(work.compared(_own(place, run, warn)))
            if compact:
                for run in runs:
                    if one.checkable or run.name != "exact":  # what the wording of others is compared with stays
                        _compacted(place / run.folder / "samples.jsonl.gz")
        return summaries


def _earlier(file: Path) -> list[dict[str, Any]]:
    """What was asked of this folder before, oldest first."""
    if not file.is_file():
        return []
    last: dict[str, Any] = read_json(file)
    kept = {key: last.get(key) for key in ("argv", "commit", "time", "tasks", "runs")}
    return [*last.get("earlier", []), kept]


def _same_settings(out: Path, pair: Pair, settings: EvalConfig) -> None:
    shared = {key: value for key, value in asdict(settings).items() if key != "nli"}  # that is a matter of some tasks
    now = {
        **shared, "target": pair.target_sha256 or pair.target_id, "draft": pair.draft_sha256 or pair.draft_id,
        "dtype": pair.dtype,
    }  # fmt: skip
    _keep(out / "settings.json", now)


def _same_rows(folder: Path, name: str, one: Task, rows: Sequence[Row], nli: str) -> None:
    """Refuse other examples than those that this folder was begun with: runs are compared example by example."""
    if len({row["id"] for row in rows}) < len(rows):
        raise SelfJudgeError(f"{name} has two examples with one id: give each its own")
    digest = hashlib.sha256("".join(f"{row['id']}:{one.prompt(row)}\n" for row in rows).encode("utf-8", "replace"))
    now = {"task": name, "examples": len(rows), "rows_sha256": digest.hexdigest()}
    if one.story(rows[0]) is not None:
        now["nli"] = nli
    _keep(folder / "task.json", now)


def _learnt(one: Task, rows: Sequence[Row], runs: Sequence[Run], warn: Callable[[str], None]) -> None:
    """Say which judges have seen the problems that they decide about."""
    if one.name != "livecodebench":
        return
    there = {fold(row) for row in rows}
    for name in dict.fromkeys(run.judge for run in runs if run.judge):
        judges = next([rule.judge for rule in run.rules] for run in runs if run.judge == name)
        for k, judge in enumerate(judges):
            asked = there & {k} if len(judges) > 1 else there
            if judge is not None and asked & learnt_folds(judge.config.sources):
                warn(
                    f"the judge {name} was labelled with problems of {one.name} that it now decides about; docs/eval.md says how to give one for each fold"
                )
                break


def _keep(file: Path, now: dict[str, Any]) -> None:
    """Write down what a folder is begun with, or refuse something else than stands there."""
    if file.is_file():
        refuse_other(file.parent, read_json(file), now)
    write_json(file, now)


def label_of(name: str) -> str:
    """What a task is called in folders and tables: `livecodebench/all` is livecodebench-all, a file goes by its name."""
    return f"file:{Path(name.removeprefix(FILE)).stem}" if name.startswith(FILE) else name.replace("/", "-")


def examples_of(name: str, limit: int | None, data: Path | None, allow_unsafe: bool) -> tuple[Task, list[Row]]:
    """A task and its examples: the test split, another that is named, or all of a file."""
    one = task(name, data, allow_unsafe=allow_unsafe)
    one.prepare()
    rows = one.examples(split_of(name) or ("all" if name.startswith(FILE) else "test"), limit)
    if not rows:
        raise SelfJudgeError(f"{name} has no examples")
    return one, rows


def _own(folder: Path, run: Run, warn: Callable[[str], None]) -> Path | None:
    """The run of `exact` to compare with: with the same γ, else with any; None for `exact` itself and where there is none."""
    if run.name == "exact":
        return None
    same = folder / f"exact-g{run.gamma}"
    known = [f for f in (same, *sorted(folder.glob("exact-g*"))) if (f / "summary.json").is_file()]
    found = [f for f in known if (f / "samples.jsonl.gz").is_file()]  # who keeps results may have left rows out
    if not known:
        warn(f"{folder.name}: no run of `exact` to compare {run.name} with; add it to --rules")
    elif not found:
        warn(f"{folder.name}: no run of `exact` has kept its rows: {run.name} is not compared anew")
    return found[0] if found else None


def _fingerprint(exact: Path) -> str:
    """Which run of `exact` that is; `--compact` leaves it as it is."""
    rows = read_rows(exact / "samples.jsonl.gz")
    kept = "".join(f"{row['id']}:{row['answer']}:{row['tokens']}\n" for row in rows)
    return f"{exact.name}:{hashlib.sha256(kept.encode('utf-8', 'replace')).hexdigest()}"


def _compacted(file: Path) -> None:
    """Rows for keeping: without texts, their numbers to five decimals. Who keeps results may have left rows out."""
    rows = list(read_rows(file)) if file.is_file() else []
    if any("text" in row for row in rows):
        write_rows(file, ({key: _short(value) for key, value in row.items() if key != "text"} for row in rows))


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _short(one) for key, one in value.items()}
    return round(value, 5) if isinstance(value, float) else value


class _Work:
    """One task under one rule."""

    def __init__(
        self, pair: Pair, one: Task, rows: list[Row], run: Run, folder: Path, settings: EvalConfig, entails: Entails | None,
        examples: int, times: bool,
    ) -> None:  # fmt: skip
        self.pair, self.task, self.rows, self.run, self.folder = pair, one, rows, run, folder
        self.settings, self.entails, self.examples, self.times = settings, entails, examples, times
        self.max_new_tokens = settings.max_new_tokens or one.new_tokens
        self.seeds = {row["id"]: row_seed(settings.seed, place) for place, row in enumerate(rows)}  # whatever the batch
        self.checkable = one.checkable
        self.by_fold = len(run.rules) > 1 and one.name == "livecodebench"

    @property
    def done(self) -> bool:
        """Whether the summary stands, made with this very rule."""
        if not (self.folder / "summary.json").is_file():
            return False
        if read_json(self.folder / "summary.json")["run_sha256"] != self.run.identity:
            raise SelfJudgeError(
                f"{self.folder} was made with another judge or threshold, or by another version: name another --out or remove it"
            )
        shutil.rmtree(self.folder / "work", ignore_errors=True)
        return True

    def decode(self, notify: Callable[[float, str], None]) -> None:
        """Answer all prompts, a part at a time; parts that are there stay."""
        for number, rule, part in self._parts():
            done = number * self.settings.batch / len(self.rows)
            notify(min(1.0, done), f"{self.folder.parent.name}, {self.run.folder}")
            file = self._file(number)
            if not file.is_file() or next(read_rows(file))["run_sha256"] != self.run.identity:
                write_rows(file, self._answered(rule, part))

    def _file(self, number: int) -> Path:
        return self.folder / "work" / f"part-{number:05d}.jsonl"

    def _parts(self) -> Iterator[tuple[int, AcceptanceRule, list[Row]]]:
        """(number, rule, rows): `batch` rows each; where there is a judge a fold, rows of one fold."""
        groups: list[tuple[AcceptanceRule, list[Row]]] = [(self.run.rules[0], self.rows)]
        if self.by_fold:
            groups = [(rule, [r for r in self.rows if fold(r) == k]) for k, rule in enumerate(self.run.rules)]
        number = 0
        for rule, rows in groups:
            for start in range(0, len(rows), self.settings.batch):
                yield number, rule, rows[start : start + self.settings.batch]
                number += 1

    def _answered(self, rule: AcceptanceRule, rows: list[Row]) -> Iterator[Row]:
        """The part's seconds, then a row for every example."""
        begun = time.perf_counter()
        answers = generate(
            self.pair, [self.task.prompt(row) for row in rows], rule, gamma=self.run.gamma, max_new_tokens=self.max_new_tokens,
            batch=self.settings.batch, seeds=[self.seeds[row["id"]] for row in rows], same_draft_weights=True,
        )  # fmt: skip
        total = time.perf_counter() - begun
        phases = {p: max(a.seconds[p] for a in answers) for p in PHASES}  # the last to end took part in all passes
        yield {"run_sha256": self.run.identity, "seconds": {**phases, "total": total}}
        texts = [a.text for a in answers]
        found = self.task.extract_many(rows, texts) if self.checkable else [None] * len(rows)
        if self.checkable:
            scores = [self.task.rate(row, answer) for row, answer in zip(rows, found, strict=True)]
        else:
            scores = self.task.score_many(rows, texts)
        stories = [self.task.story(row) for row in rows]
        if self.entails is not None and None not in stories:
            name = "fc_proxy" if self.settings.nli == "proxy" else "fc"
            for score, value in zip(scores, consistency(self.entails, [s or "" for s in stories], texts), strict=True):
                score[name] = 0.0 if value is None else value
        for row, answer, extracted, score in zip(rows, answers, found, scores, strict=True):
            main = measure_of(score)
            yield {
                "id": row["id"], "answer": extracted, "score": score[main] if main else None, "scores": score,
                "finish": answer.finish, "tokens": len(answer.tokens), "emitted": len(answer.tokens) - 1 if answer.cycles else 0,
                "cycles": answer.cycles, "drafts_accepted": sum(o != "target" for o in answer.origins),
                "judged": sum(o == "judge" for o in answer.origins), "text": answer.text,
                "token_ids": answer.tokens, "origins": "".join(o[0] for o in answer.origins),
            }  # fmt: skip

    def finish(self) -> None:
        """From the parts: samples, examples, and the summary last.

        The first part records graphs and packs weights: where there are others, it does not count for speed.
        """
        parts = [list(read_rows(self._file(number))) for number, _, _ in self._parts()]
        timed = parts[1:] or parts
        seconds, speed = dict[str, float](), None
        if self.times:
            seconds = {phase: sum(part[0]["seconds"][phase] for part in timed) for phase in (*PHASES, "total")}
            speed = sum(row["tokens"] for part in timed for row in part[1:]) / max(1e-9, seconds["total"])
        order = {row["id"]: place for place, row in enumerate(self.rows)}
        samples = sorted((row for part in parts for row in part[1:]), key=lambda sample: order[sample["id"]])
        answers = [_generation(sample) for sample in samples]
        taken = self._substitutions(answers)
        write_rows(self.folder / "examples.jsonl", self._examples(samples, answers))
        kept = [{k: v for k, v in s.items() if k not in ("token_ids", "origins")} for s in samples]
        write_rows(self.folder / "samples.jsonl.gz", kept)
        write_json(self.folder / "summary.json", self._summary(kept, seconds, speed, taken))
        shutil.rmtree(self.folder / "work")

    def take_over(self, folder: Path) -> None:
        """The answers of the same rule under another name: F and R may be one threshold."""
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / "samples.jsonl.gz", self.folder)
        if (folder / "examples.jsonl").is_file():  # who keeps results may have left them out
            shutil.copy(folder / "examples.jsonl", self.folder)
        mine: dict[str, Any] = {"rule": self.run.name, "run_sha256": self.run.identity}
        mine |= {} if self.times else {"tokens_per_second": None, "seconds": {}}
        write_json(self.folder / "summary.json", {**read_json(folder / "summary.json"), **mine})
        shutil.rmtree(self.folder / "work", ignore_errors=True)

    def compared(self, exact: Path | None) -> dict[str, Any]:
        """The summary, compared with that run of `exact`; what was compared with the same one stays as it is, and so does
        what was compared once with rows that are no longer kept."""
        summary: dict[str, Any] = read_json(self.folder / "summary.json")
        if exact is None:
            return summary
        with_what, before = _fingerprint(exact), summary["compared_with"]
        needed = () if before is None else (self.folder, self.folder.parent / before.partition(":")[0])
        if before == with_what or not all((place / "samples.jsonl.gz").is_file() for place in needed):
            return summary
        samples = list(read_rows(self.folder / "samples.jsonl.gz"))
        own = {row["id"]: row for row in read_rows(exact / "samples.jsonl.gz")}
        rows = {row["id"]: row for row in self.rows}
        for sample in samples:
            other = own[sample["id"]]
            if self.checkable:
                known = other["answer"] is not None
                same = known and self.task.same(rows[sample["id"]], other["answer"], sample["answer"])
                sample["agrees"] = float(same) if known else None
            elif "text" in other and "text" in sample:
                sample["agrees"] = wording(other["text"], sample["text"])
        agrees = [sample["agrees"] for sample in samples if sample.get("agrees") is not None]
        summary |= {"compared_with": with_what, "agreement": float(np.mean(agrees)) if agrees else None}
        if exact.name == f"exact-g{self.run.gamma}" and summary["mean_accepted_length"]:
            base = read_json(exact / "summary.json")["mean_accepted_length"]
            m = summary["mean_accepted_length"]
            summary |= {"delta_m": m - base, "m_ratio": m / base} if base else {}
        if summary["measure"]:
            differences = np.asarray([sample["score"] - own[sample["id"]]["score"] for sample in samples])
            summary |= {"delta_score": float(differences.mean()), "delta_ci": interval(differences)}
        more = {
            name: np.asarray([sample["scores"][name] - own[sample["id"]]["scores"][name] for sample in samples])
            for name in summary["scores"] if name != summary["measure"]
        }  # fmt: skip
        summary["delta_scores"] = {name: float(values.mean()) for name, values in more.items()}
        summary["delta_scores_ci"] = {name: interval(values) for name, values in more.items()}
        write_rows(self.folder / "samples.jsonl.gz", samples)
        write_json(self.folder / "summary.json", summary)
        return summary

    def _substitutions(self, answers: Sequence[Generation]) -> list[tuple[str, str, int]]:
        """What was said instead of what, in the first answers where anything was."""
        some = [(i, a) for i, a in enumerate(answers) if "judge" in a.origins][:SUBSTITUTION_ANSWERS]
        if not some:
            return []
        prompts = self.pair.encode_many([self.task.prompt(self.rows[i]) for i, _ in some])
        seen = likelihoods(self.pair, [(ids, a.tokens) for ids, (_, a) in zip(prompts, some, strict=True)])
        return substitutions(self.pair, [a for _, a in some], seen)[:KEPT_SUBSTITUTIONS]

    def _examples(self, samples: list[Row], answers: Sequence[Generation]) -> list[Row]:
        """The first answers with a judged token, else the first ones, token by token as the target and the judge see them."""
        order = sorted(range(len(answers)), key=lambda i: "judge" not in answers[i].origins)[: self.examples]
        prompts = self.pair.encode_many([self.task.prompt(self.rows[i]) for i in order])
        sequences = [(ids, answers[i].tokens) for ids, i in zip(prompts, order, strict=True)]
        seen = likelihoods(self.pair, sequences)
        judged = self._judged([self._judge(self.rows[i]) for i in order], sequences, seen)
        made = []
        for n, i in enumerate(order):
            one, cycle, tokens = seen[n], 0, []
            for k, (token, origin) in enumerate(zip(answers[i].tokens, answers[i].origins, strict=True)):
                tokens.append({
                    "text": str(self.pair.tokenizer.decode([token])), "origin": origin, "choice": str(self.pair.tokenizer.decode([one.choices[k]])),
                    "p": round(math.exp(one.log_p[k]), 4), "p_choice": round(math.exp(one.choice_log_p[k]), 4),
                    "judge": judged[n][k], "cycle": cycle,
                })  # fmt: skip
                cycle += origin == "target"
            prompt = self.task.prompt(self.rows[i])
            said = prompt if isinstance(prompt, str) else "\n".join(m["content"] for m in prompt)
            made.append({
                "id": samples[i]["id"], "prompt": said, "text": answers[i].text, "score": samples[i]["score"], "tokens": tokens,
            })  # fmt: skip
        return made

    def _judge(self, row: Row) -> Judge | None:
        """Who decided about this example."""
        return self.run.rules[fold(row) if self.by_fold else 0].judge

    @torch.no_grad()
    def _judged(
        self,
        judges: Sequence[Judge | None],
        sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
        seen: Sequence[Any],
    ) -> list[list[float | None]]:
        """The judges' scores of every token but the last (whose state no pass holds); None where they read drafts ahead."""
        found: list[list[float | None]] = [[None] * len(answer) for _, answer in sequences]
        if all(judge is None or "lookahead" in judge.config.features for judge in judges):
            return found
        for part, hidden in teacher_forced(self.pair.target, sequences):
            at = 0
            for i in part:
                size, judge = len(sequences[i][1]), judges[i]
                states = hidden[at + 1 : at + size].float()  # the state that predicts the next token is the one at this
                margins = torch.tensor(seen[i].log_p[:-1]) - torch.tensor(seen[i].choice_log_p[:-1])
                margins = margins.clamp(LOWEST, 0)
                if size > 1 and judge is not None and "lookahead" not in judge.config.features:
                    marked = "margin" in judge.config.features
                    x = torch.cat([states, margins.to(states)[:, None]], 1) if marked else states
                    found[i][:-1] = [round(v, 4) for v in judge.to(states.device).score(x).tolist()]
                at += size
        return found

    def _summary(
        self, samples: list[Row], seconds: dict[str, float], speed: float | None, taken: list[tuple[str, str, int]]
    ) -> dict[str, Any]:
        sums = {key: sum(s[key] for s in samples) for key in TOTALS}
        m = sums["emitted"] / sums["cycles"] if sums["cycles"] else None
        scores = {key: float(np.mean([s["scores"][key] for s in samples])) for key in samples[0]["scores"]}
        measure = measure_of(scores)
        values = np.asarray([s["score"] for s in samples], float) if measure else None
        judge = self.run.rules[0].judge
        config = judge.config if judge is not None else None
        thetas = {getattr(rule, "theta", None) for rule in self.run.rules}
        made = provenance()
        return {
            "pair": self.pair.name, "task": self.folder.parent.name, "rule": self.run.name, "judge": self.run.judge,
            "label_method": config and config.label_method, "features": config and config.features,
            "suffix_length": config and config.suffix_length, "label_prompts": config and config.metrics.get("n_prompts"), "threshold": thetas.pop() if len(thetas) == 1 else None,
            "gamma": self.run.gamma, "batch": self.settings.batch, "n": len(samples), "measure": measure,
            "score": scores[measure] if measure else None, "score_ci": None if values is None else interval(values), "scores": scores,
            "delta_score": None, "delta_ci": None, "delta_scores": {}, "delta_scores_ci": {}, "agreement": None, "mean_accepted_length": m, "delta_m": None, "m_ratio": None,
            "drafts_accepted": sums["drafts_accepted"] / max(1, sums["cycles"]), "judged_share": sums["judged"] / max(1, sums["tokens"]),
            "tokens": sums["tokens"], "tokens_per_second": speed,
            "extraction_failures": float(np.mean([s["answer"] is None for s in samples])) if self.checkable else None,
            "cut_off": float(np.mean([s["finish"] == "length" for s in samples])), "seconds": seconds, "substitutions": taken,
            "max_new_tokens": self.max_new_tokens, "dtype": self.pair.dtype, "machine": made["machine"], "versions": made["versions"],
            "date": made["time"][:10], "commit": made["commit"], "run_sha256": self.run.identity, "compared_with": None,
        }  # fmt: skip


def measure_of(scores: Mapping[str, float]) -> str | None:
    """The measure that stands for a task: factual consistency where a classifier gave it, ROUGE-L, else the first."""
    return next((name for name in ("fc", "rougeL") if name in scores), next(iter(scores), None))


def wording(a: str, b: str) -> float:
    """How much of the wording of two texts is the same, by matching words."""
    return SequenceMatcher(None, a.split(), b.split(), autojunk=False).ratio()


def interval(values: NDArray[Any], *, level: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """The bootstrap interval of a mean; of paired differences it is the paired one."""
    rng = np.random.default_rng(seed)
    means = [float(values[rng.integers(0, len(values), len(values))].mean()) for _ in range(RESAMPLES)]
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


_ORIGINS = {"d": "draft", "j": "judge", "t": "target"}


def _generation(sample: Row) -> Generation:
    origins: Any = tuple(_ORIGINS[letter] for letter in sample["origins"])
    return Generation(tuple(sample["token_ids"]), origins, sample["text"], sample["cycles"], sample["finish"], 0)
