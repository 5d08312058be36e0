"""What a label costs: `python benchmarks/label_cost.py --limit 4 --out FILE`.

Labels the same responses in three ways: our branches, the public call pattern, and answer preservation.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import say

from selfjudge.decoding.plain import respond
from selfjudge.errors import SelfJudgeError
from selfjudge.label.checks import AnswerCheck
from selfjudge.label.config import LabelConfig
from selfjudge.label.methods import NOTHING, find_mismatches, search_critical_tokens
from selfjudge.label.score import Case, Scorer
from selfjudge.models.pair import Pair
from selfjudge.prompts.sources import PromptRecord, Source, load_prompts
from selfjudge.store import measured_on, write_json
from selfjudge.tasks import Task, load_task


@dataclass(frozen=True)
class LabelBenchConfig:
    """How much is labelled in each way."""

    suffix_length: int = 20
    max_new_tokens: int = 128
    batch: int = 64
    public_labels: int = 24
    """Labels made by the public call pattern."""
    tries: int = 4
    """Places of a response that answer preservation tries."""
    seed: int = 0


class _Clock:
    seconds = 0.0
    cpu_seconds = 0.0


@contextmanager
def _timed(device: torch.device) -> Iterator[_Clock]:
    clock = _Clock()
    start, cpu = time.perf_counter(), time.process_time()
    yield clock
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    clock.seconds, clock.cpu_seconds = time.perf_counter() - start, time.process_time() - cpu


def bench_label(
    pair: Pair,
    task: Task,
    asked: Sequence[PromptRecord],
    config: LabelBenchConfig | None = None,
    *,
    notify: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Label the responses to the prompts of a task with a checkable answer in three ways."""
    config = config or LabelBenchConfig()
    bench = _Bench(pair, task, asked, config)
    notify("the target answers")
    bench.respond()
    notify("our labels")
    cases, ours = bench.ours()
    notify("the public call pattern")
    runs = [ours, bench.public_pattern(cases)]
    notify("answer preservation")
    runs += bench.answer_preservation()
    for row in runs:
        row["ratio_to_public_pattern"] = row["labels_per_second"] / runs[1]["labels_per_second"]
    return {
        "pair": pair.name,
        **measured_on(),
        "device": str(pair.target.device),
        "dtype": pair.dtype,
        "task": task.name,
        "prompts": len(asked),
        "suffix_length": config.suffix_length,
        "max_new_tokens": config.max_new_tokens,
        "batch": config.batch,
        "runs": runs,
    }


@dataclass
class _Bench:
    """The responses that all ways label, and each way."""

    pair: Pair
    task: Task
    asked: Sequence[PromptRecord]
    config: LabelBenchConfig

    def respond(self) -> None:
        """The target's answers, which are not part of any time."""
        pair, config = self.pair, self.config
        self.prompts = pair.encode_many([one.prompt for one in self.asked])
        answers = respond(
            pair.target_model,
            self.prompts,
            eos_ids=pair.eos_ids,
            max_new_tokens=config.max_new_tokens,
            batch=config.batch,
        )
        by_prompt = {index: (tokens, finish) for index, tokens, finish in answers}
        self.responses = [by_prompt[i][0] for i in range(len(self.prompts))]
        self.finishes = [by_prompt[i][1] for i in range(len(self.prompts))]

    def ours(self) -> tuple[list[Case], dict[str, Any]]:
        pair, length = self.pair, self.config.suffix_length
        cut_off = [finish == "length" for finish in self.finishes]
        answers = list(zip(self.prompts, self.responses, cut_off, strict=True))
        Scorer(pair.target, suffix_length=length)(find_mismatches(pair, answers[:1], length))  # warm
        scorer = Scorer(pair.target, suffix_length=length)
        with _timed(pair.target.device) as clock:
            cases = find_mismatches(pair, answers, length)
            scorer(cases)
        labels = sum(len(case.places) for case in cases)
        if not labels:
            raise SelfJudgeError(NOTHING)
        once = sum(len(case.prompt) + len(case.response) for case in cases)
        row = _row("selfjudge", labels, clock, scorer.tokens)
        return cases, {**row, "branch_tokens_per_label": (scorer.tokens - once) / labels}

    def public_pattern(self, cases: Sequence[Case]) -> dict[str, Any]:
        pair, config = self.pair, self.config
        places = [(case, k) for case in cases for k in range(len(case.places))]
        chosen = random.Random(config.seed).sample(places, min(config.public_labels, len(places)))  # noqa: S311
        label_by_public_pattern(pair, *chosen[0], config.suffix_length)  # warm
        with _timed(pair.target.device) as clock:
            tokens = sum(label_by_public_pattern(pair, case, k, config.suffix_length) for case, k in chosen)
        return _row("public-pattern", len(chosen), clock, tokens)

    def answer_preservation(self) -> list[dict[str, Any]]:
        """No row where no answer ended, or none had a place to try."""
        rows = [
            {"prompt_ids": prompt, "response_ids": response, "finish": finish, "row": record.row}
            for record, prompt, response, finish in zip(
                self.asked, self.prompts, self.responses, self.finishes, strict=True
            )
        ]
        originals = AnswerCheck(self.pair, self.task).find_originals(rows)
        config = LabelConfig(max_new_tokens=self.config.max_new_tokens, batch=self.config.batch)
        with _timed(self.pair.target.device) as clock:
            events = search_critical_tokens(self.pair, config, originals, most=self.config.tries)
        return [_row("answer-preservation", len(events), clock, sum(e.tokens for e in events))] if events else []


def _row(name: str, labels: int, clock: _Clock, tokens: int) -> dict[str, Any]:
    return {
        "name": name,
        "labels": labels,
        "labels_per_second": labels / clock.seconds,
        "cpu_seconds_per_label": clock.cpu_seconds / labels,
        "target_tokens_per_label": tokens / labels,
        "seconds": clock.seconds,
    }


@torch.no_grad()
def label_by_public_pattern(pair: Pair, case: Case, k: int, suffix_length: int) -> int:
    """One label as public code makes it: a whole sequence for the score, two more for the states. Tokens read."""
    place, draft = case.places[k], case.drafts[k]
    prompt, response = list(case.prompt), list(case.response)
    before = prompt + response[:place]
    read = 0
    for tokens, states in (
        ([*before, draft, *response[place + 1 : place + 1 + suffix_length]], False),
        ([*before, draft], True),
        ([*before, response[place]], True),
    ):
        ids = torch.tensor([tokens], device=pair.target.device)
        output = pair.target(input_ids=ids, use_cache=False, output_hidden_states=states)
        (output.hidden_states[-1][0, -1] if states else output.logits.log_softmax(-1)[0, -1]).float().cpu()
        read += len(tokens)
    return read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", default="smollm2-135m", help="embedded name or target")
    parser.add_argument("--draft", default=None)
    parser.add_argument("--task", default="arithmetic", help="a task with checkable answers")
    parser.add_argument("--limit", type=int, default=8, help="prompts of the task")
    parser.add_argument("--suffix-length", type=int, default=LabelBenchConfig.suffix_length)
    parser.add_argument("--max-new-tokens", type=int, default=LabelBenchConfig.max_new_tokens)
    parser.add_argument("--batch", type=int, default=LabelBenchConfig.batch)
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--device", default=None)
    parser.add_argument("--out", type=Path, required=True)
    o = parser.parse_args()
    source = load_task(o.task, o.data)
    if not source.checkable:
        parser.error(f"{o.task} has no checkable answers, which answer preservation needs")
    asked = load_prompts(Source(o.task, o.limit), o.data)
    pair = Pair.load(o.pair, o.draft, device=o.device, full_precision=True)
    config = LabelBenchConfig(o.suffix_length, o.max_new_tokens, o.batch)
    write_json(o.out, bench_label(pair, source, asked, config, notify=say))


if __name__ == "__main__":
    main()
