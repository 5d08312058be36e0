"""Relaxed rules in the paper's regime: a capable draft that is a model of its own, and long blocks.

    python benchmarks/paper_regime.py --data DATA --judge selfjudge=FOLDER --judge autojudge=FOLDER --minutes 5 --out FOLDER

The draft is the target rounded to a few bits (`rounded_draft.py`): it stands for a capable small model of the same family.
`--draft own` takes the pair's own draft instead. Two parts, each a list of cells, the most important first:

quality   every rule at every γ on every task: m, score, answers lost and gained against `exact` at the same γ, same answers.
          `null` is `exact` once more in batches of half the size: what it loses is rounding.
speed     tokens/s with a target that costs what a larger one costs (`grown_target.py`): plain, `exact` and rules at several γ,
          at several loads. Each figure is compared with `exact` at the same γ, as the paper does, and at its best γ, as a
          user would.

FOLDER/cells.json and rows.jsonl.gz (answers by prompt) are written after every cell. A second call with the same FOLDER does what is missing. A cell begins only if
it is likely to end within --minutes.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from common import say
from grown_target import grow
from rounded_draft import round_weights
from torch import nn

from selfjudge.decoding.text import generate
from selfjudge.evaluate.compare import bootstrap_interval, compare_lengths, compute_overlap
from selfjudge.evaluate.config import NULL, EvalConfig, RuleRun, TaskExamples, plan_runs
from selfjudge.evaluate.execute import make_sample
from selfjudge.judge.model import Judge
from selfjudge.models.load import Draft
from selfjudge.models.pair import Pair
from selfjudge.store import measured_on, read_json, read_rows, write_json, write_rows
from selfjudge.tasks import Row
from selfjudge.types import pooled_figures

TASKS = "gsm8k,mmlu,math500,cnn_dailymail,livecodebench/all"
MARGINS = "margin:price=0.1 margin:price=0.2 margin:price=0.05 margin:price=0.4"
JUDGED = "judged:R judged:F judged:price=0.01 judged:price=0.02"
FIRST = 2  # tasks that are done before the others
ROWS = "rows.jsonl.gz"
KEPT = ("id", "answer", "score", "tokens", "emitted", "cycles", "judged")


@dataclass(frozen=True)
class Cell:
    """What one line of the table is about."""

    part: str
    task: str
    rule: str
    gamma: int
    load: int
    """Rows at a time."""

    @property
    def key(self) -> str:
        return "/".join(str(value) for value in asdict(self).values())


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default="qwen2.5-coder-1.5b")
    parser.add_argument("--draft", choices=("rounded", "own"), default="rounded")
    parser.add_argument("--bits", type=int, default=3)
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--device")
    parser.add_argument("--dtype", help="a dtype of floats; the device's own if not given")
    parser.add_argument(
        "--judge", action="append", default=[], metavar="NAME=FOLDER", help="besides the one that ships"
    )
    parser.add_argument("--tasks", default=TASKS, help="with a number of prompts, if not all: gsm8k:660")
    parser.add_argument("--rules", default=f"{MARGINS} {JUDGED}", help="besides exact and null")
    parser.add_argument("--gammas", default="20,15")
    parser.add_argument("--batch", type=int, default=256, help="rows at a time, for quality")
    parser.add_argument("--max-new-tokens", type=int, help="of an answer; the task's if not given")
    parser.add_argument("--parts", default="quality,speed", help="one of them, or both in this order")
    parser.add_argument("--grown", default="40", help="layers of the target for speeds; 28,28 is four times as wide")
    parser.add_argument("--loads", default="1,8,64")
    parser.add_argument("--speed-rules", default="margin:price=0.2 margin:price=0.1")
    parser.add_argument("--speed-gammas", default="20,15,10,5,3,8", help="of exact; rules have those from 10 on")
    parser.add_argument("--speed-tokens", type=int, default=256)
    parser.add_argument("--prompts-alone", type=int, default=6, help="prompts that are timed at load 1")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--allow-unsafe", action="store_true", help="run generated code even if it cannot be isolated")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


@torch.no_grad()
def round_draft(pair: Pair, bits: int, group: int) -> Pair:
    """The pair with its own target, rounded, as the draft."""
    draft = copy.deepcopy(pair.target)
    head = draft.get_output_embeddings()
    for module in draft.modules():
        if isinstance(module, nn.Linear) and module is not head:
            module.weight.copy_(round_weights(module.weight, bits, group))
    name = f"{pair.target_id}, {bits} bits"
    return replace(pair, name=f"{pair.target_id}+{bits} bits", draft_model=Draft(draft, name))


def grow_judge(judge: Judge) -> Judge | None:
    """The judge for states that are twice as wide and half as large; None if it is not linear."""
    if type(judge) is not Judge:
        return None
    hidden, features = judge.config.hidden_size, judge.config.features
    sizes = [hidden, *([1] if "margin" in features else []), *([hidden] if "previous" in features else [])]
    doubled = [torch.cat([part, part]) if len(part) == hidden else part for part in judge.weight.split(sizes)]
    config = replace(judge.config, hidden_size=2 * hidden, target="", target_sha256="")  # no checkpoint has its target
    return Judge(config, torch.cat(doubled), judge.bias)


def load_judges(pair: Pair, given: Sequence[str]) -> dict[str, Judge]:
    """The judge that ships, as `ships`, and those that are given."""
    judges = {} if pair.judge is None else {"ships": pair.judge}
    for text in given:
        name, _, folder = text.partition("=")
        judges[name] = Judge.from_pretrained(folder)
    return judges


class Study:
    """The cells that are done, in their folder."""

    def __init__(self, o: argparse.Namespace) -> None:
        self.o, self.begun, self.longest = o, time.monotonic(), {"quality": 0.0, "speed": 0.0}
        self.file: Path = o.out / "cells.json"
        self.cells: dict[str, Any] = read_json(self.file)["cells"] if self.file.is_file() else {}
        o.out.mkdir(parents=True, exist_ok=True)
        kept = read_rows(o.out / ROWS, dict[str, Any]) if (o.out / ROWS).is_file() else ()
        self.rows: dict[str, list[Row]] = {row["cell"]: row["rows"] for row in kept}
        pair = Pair.load(o.pair, device=o.device, dtype=o.dtype, full_precision=True, needs_draft=o.draft == "own")
        self.pair = round_draft(pair, o.bits, o.group) if o.draft == "rounded" else pair
        self.judges = load_judges(pair, o.judge)
        self.examples = dict(self._load_tasks())
        say(f"{self.pair.name} on {self.pair.target.device}, {self.pair.dtype}; judges: {', '.join(self.judges)}")

    def _load_tasks(self) -> Iterator[tuple[str, TaskExamples]]:
        for text in self.o.tasks.split(","):
            name, _, limit = text.partition(":")
            config = EvalConfig(
                tasks=(name,), limit=int(limit) if limit else None, data=self.o.data, allow_unsafe=self.o.allow_unsafe
            )
            config.check()
            yield name, TaskExamples.load(name, config)

    def run(self) -> None:
        o = self.o
        for part in o.parts.split(","):
            if part == "speed":
                self._grow()
            cells = self.plan_quality() if part == "quality" else self.plan_speed()
            measure = self.measure_quality if part == "quality" else self.measure_speed
            for cell, run in cells:
                if cell.key in self.cells:
                    continue
                if (time.monotonic() - self.begun) / 60 + self.longest[part] / 60 > o.minutes:
                    say("the time is up")
                    return
                start = time.monotonic()
                figures = measure(cell, run)
                self.longest[part] = max(self.longest[part], time.monotonic() - start)
                self.cells[cell.key] = {**asdict(cell), **figures, "seconds": round(time.monotonic() - start, 1)}
                self.write()
                say(cell.key, {k: round(v, 3) for k, v in figures.items() if isinstance(v, float)})

    def write(self) -> None:
        kept = ("bits", "group", "batch", "grown", "speed_tokens", "prompts_alone", "repeats", "max_new_tokens")
        about = {"pair": self.o.pair, "draft": self.pair.draft_id, "dtype": self.pair.dtype, "judges": self.o.judge}
        settings = {name: getattr(self.o, name) for name in kept}
        write_json(self.file, {**measured_on(), **about, "settings": settings, "cells": self.cells})

    def plan_rules(self, rules: Sequence[str], gamma: int) -> list[RuleRun]:
        wanted = [rule for rule in rules if self.judges or not rule.startswith("judge")]
        return plan_runs(wanted, [gamma], self.judges, self.pair.special_ids)

    def plan_quality(self) -> list[tuple[Cell, RuleRun]]:
        """The first tasks before the others; there, margins at every γ before the judges."""
        tasks, gammas = list(self.examples), [int(gamma) for gamma in self.o.gammas.split(",")]
        cells = []
        for gamma in gammas:
            for run in self.plan_rules(("exact", *self.o.rules.split(), NULL), gamma):
                for task in tasks:
                    cell = Cell("quality", task, run.name, gamma, run.batch(self.o.batch))
                    order = tasks.index(task) >= FIRST, run.judge is not None, gammas.index(gamma)
                    cells.append((order, cell, run))
        return [(cell, run) for _, cell, run in sorted(cells, key=lambda entry: entry[0])]

    def plan_speed(self) -> list[tuple[Cell, RuleRun]]:
        """For each load and task: plain, `exact` and rules at the longest block first, then at others."""
        gammas = [int(gamma) for gamma in self.o.speed_gammas.split(",")]
        cells = []
        for load in map(int, self.o.loads.split(",")):
            for task in list(self.examples)[:FIRST]:
                for gamma in (0, *gammas):
                    rules = self.o.speed_rules.split() if gamma >= 10 else []
                    runs = self.plan_rules(("exact", *rules), gamma)
                    cells += [(Cell("speed", task, run.name, gamma, load), run) for run in runs]
        return cells

    def measure_quality(self, cell: Cell, run: RuleRun) -> dict[str, Any]:
        examples = self.examples[cell.task]
        task, prompts = examples.task, [examples.task.prompt(row) for row in examples.rows]
        start = time.perf_counter()
        answers = generate(
            self.pair,
            prompts,
            run.rule,
            gamma=cell.gamma,
            max_new_tokens=self.o.max_new_tokens or task.new_tokens,
            batch=cell.load,
            trace=False,
        )
        seconds = time.perf_counter() - start
        scored = examples.score(examples.rows, [answer.text for answer in answers])
        samples = [make_sample(row["id"], *both) for row, *both in zip(examples.rows, answers, scored, strict=True)]
        exact = self.keep_rows(cell, samples)
        return {
            **pooled_figures(answers),
            **(self.compare(examples, samples, exact) if cell.rule != "exact" else {}),
            "n": len(samples),
            "score": float(np.mean([sample["score"] for sample in samples])),
            "score_ci": bootstrap_interval(np.asarray([sample["score"] for sample in samples])),
            "cut_off": sum(sample["finish"] == "length" for sample in samples) / len(samples),
            "tokens_per_second_quality": sum(sample["tokens"] for sample in samples) / seconds,
        }

    def keep_rows(self, cell: Cell, samples: Sequence[Row]) -> list[Row]:
        """Write a cell's rows, in one file with those of all; returns those of `exact` at the same γ."""
        kept = (*KEPT, "text") if cell.rule == "exact" else KEPT
        self.rows[cell.key] = [{key: sample[key] for key in kept} for sample in samples]
        write_rows(self.o.out / ROWS, [{"cell": key, "rows": rows} for key, rows in self.rows.items()])
        return self.rows[replace(cell, rule="exact", load=self.o.batch).key]

    def compare(self, examples: TaskExamples, samples: Sequence[Row], exact: Sequence[Row]) -> dict[str, Any]:
        """Change of score and m, answers lost and gained, and how many are the same (else words in common)."""
        change = np.asarray([s["score"] - e["score"] for s, e in zip(samples, exact, strict=True)])
        if examples.task.checkable:
            rows = zip(examples.rows, samples, exact, strict=True)
            same = [examples.task.same(row, e["answer"], s["answer"]) for row, s, e in rows if e["answer"] is not None]
        else:
            same = [compute_overlap(e["text"], s["text"]) for s, e in zip(samples, exact, strict=True)]
        return {
            **compare_lengths(samples, exact),
            "change": float(change.mean()),
            "change_ci": bootstrap_interval(change),
            "lost": int((change < 0).sum()),
            "gained": int((change > 0).sum()),
            "same": float(np.mean(same)) if same else None,
        }

    def _grow(self) -> None:
        """Replace the target by one that costs more, and the judges by those that read its states."""
        for layers in map(int, filter(None, self.o.grown.split(","))):
            self.pair = grow(self.pair, layers)
            self.judges = {name: grown for name, judge in self.judges.items() if (grown := grow_judge(judge))}
        say(f"speeds: {sum(p.numel() for p in self.pair.target.parameters()) / 1e9:.2f} B parameters")

    def measure_speed(self, cell: Cell, run: RuleRun) -> dict[str, Any]:
        """Median tokens/s over repeats after one that is not timed, in which everything is compiled and captured."""
        examples = self.examples[cell.task]
        count = self.o.prompts_alone if cell.load == 1 else cell.load
        texts = [examples.task.prompt(row) for row in examples.rows[:count]]
        prompts = (texts * math.ceil(count / len(texts)))[:count]
        rates = []
        for repeat in range(self.o.repeats + 1):
            asked = prompts[: cell.load] if not repeat else prompts
            tokens = min(32, self.o.speed_tokens) if not repeat else self.o.speed_tokens
            start = time.perf_counter()
            answers = generate(
                self.pair, asked, run.rule, gamma=cell.gamma, max_new_tokens=tokens, batch=cell.load, trace=False
            )
            rates.append(sum(len(answer.tokens) for answer in answers) / (time.perf_counter() - start))
        speed = median(rates[1:])
        return {
            **pooled_figures(answers),
            "tokens_per_second": speed,
            "rates": rates[1:],
            **self.compare_speed(cell, speed),
        }

    def compare_speed(self, cell: Cell, speed: float) -> dict[str, Any]:
        """The speed over that of `exact` at the same γ and at its best so far, and of plain decoding."""
        known = {
            row["gamma"]: row["tokens_per_second"]
            for row in self.cells.values()
            if (row["part"], row["task"], row["rule"], row["load"]) == ("speed", cell.task, "exact", cell.load)
        }
        same, plain = known.get(cell.gamma), known.get(0)
        return {"over_same_gamma": same and speed / same, "over_plain": plain and speed / plain}

    def summarise(self) -> None:
        """Print a table of each part; speeds over `exact` at its best γ are known at the end alone."""
        for row in self.cells.values():
            if row["part"] == "speed":
                own = {key: row[key] for key in ("part", "task", "load")}
                exact = {**own, "rule": "exact"}.items()
                rates = [r["tokens_per_second"] for r in self.cells.values() if exact <= r.items() and r["gamma"]]
                row["over_best_exact"] = row["tokens_per_second"] / max(rates) if rates else None
        self.write()
        print("| task | rule | γ | m | gain in m | score | change | lost / gained | same |\n|" + " --- |" * 9)
        for row in self.cells.values():
            if row["part"] == "quality":
                print(show_quality(row))
        print("\n| task | load | rule | γ | tokens/s | over exact, same γ | over exact, best γ | over plain |")
        print("|" + " --- |" * 8)
        for row in self.cells.values():
            if row["part"] == "speed":
                print(show_speed(row))


def show_quality(row: Row) -> str:
    gain = f"{100 * (row['m_ratio'] - 1):+.1f} %" if row.get("m_ratio") else "–"
    change = "–"
    if "change" in row:
        half = 50 * (row["change_ci"][1] - row["change_ci"][0])
        change = f"{100 * row['change']:+.1f} ± {half:.1f}"
    same = f"{100 * row['same']:.0f} %" if row.get("same") is not None else "–"
    answers = f"{row['lost']} / {row['gained']}" if "lost" in row else "–"
    m = row["mean_accepted_length"] or 0
    return (
        f"| {row['task']} ({row['n']}) | {row['rule']} | {row['gamma']} | {m:.2f} | {gain} |"
        f" {100 * row['score']:.1f} | {change} | {answers} | {same} |"
    )


def show_speed(row: Row) -> str:
    names = ("over_same_gamma", "over_best_exact", "over_plain")
    ratios = " | ".join(f"{row[name]:.2f}" if row.get(name) else "–" for name in names)
    rule = "plain" if not row["gamma"] else row["rule"]
    return f"| {row['task']} | {row['load']} | {rule} | {row['gamma']} | {row['tokens_per_second']:,.0f} | {ratios} |"


def main() -> None:
    study = Study(options())
    study.run()
    study.summarise()


if __name__ == "__main__":
    main()
