"""What a label costs: our branches, the public call pattern and answer preservation on the same responses, in one run."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from selfjudge.decoding.plain import respond
from selfjudge.errors import SelfJudgeError
from selfjudge.label.calibrate import begin, extracted
from selfjudge.label.mismatch import NOTHING, find_mismatches
from selfjudge.label.preservation import search
from selfjudge.label.score import Case, Scorer
from selfjudge.models.pair import Pair
from selfjudge.prompts.sources import Asked
from selfjudge.store import machine, versions
from selfjudge.tasks.base import Task


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
    pair: Pair, task: Task, asked: Sequence[Asked], *, suffix_length: int = 20, max_new_tokens: int = 128, batch: int = 64,
    public_labels: int = 24, tries: int = 4, seed: int = 0, notify: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:  # fmt: skip
    """Label the responses to the prompts of a task with a checkable answer in three ways; a search tries `tries` places."""
    device = pair.target.device
    notify("the target answers")
    prompts = pair.encode_many([one.prompt for one in asked])
    found = {
        i: (tokens, finish)
        for i, tokens, finish in respond(
            pair.target, prompts, eos_ids=pair.eos_ids, max_new_tokens=max_new_tokens, batch=batch
        )
    }
    responses = [found[i][0] for i in range(len(prompts))]
    read = [(prompt, found[i][0], found[i][1] == "length") for i, prompt in enumerate(prompts)]

    notify("our labels")
    Scorer(pair.target, suffix_length=suffix_length)(find_mismatches(pair, read[:1], suffix_length))  # warm
    scorer = Scorer(pair.target, suffix_length=suffix_length)
    with _timed(device) as ours:
        made = find_mismatches(pair, read, suffix_length)
        scorer(made)
    labels = sum(len(case.places) for case in made)
    if not labels:
        raise SelfJudgeError(NOTHING)
    once = sum(len(case.prompt) + len(case.response) for case in made)
    runs = [_row("selfjudge", labels, ours, scorer.tokens)]
    runs[0]["branch_tokens_per_label"] = (scorer.tokens - once) / labels

    notify("the public call pattern")
    every = [(case, k) for case in made for k in range(len(case.places))]
    chosen = random.Random(seed).sample(every, min(public_labels, len(every)))  # noqa: S311
    _public(pair, *chosen[0], suffix_length)  # warm
    with _timed(device) as theirs:
        tokens = sum(_public(pair, case, k, suffix_length) for case, k in chosen)
    runs.append(_row("public-pattern", len(chosen), theirs, tokens))

    notify("answer preservation")
    ended = [i for i in range(len(prompts)) if found[i][1] == "eos"]
    searches = begin(pair, task, [asked[i] for i in ended], [prompts[i] for i in ended], [responses[i] for i in ended])
    with _timed(device) as slow:
        search(pair, searches, extracted(task), max_new_tokens=max_new_tokens, batch=batch, most=tries)
    tried = sum(len(one.events) for one in searches)
    if tried:
        tokens = sum(event.tokens for one in searches for event in one.events)
        runs.append(_row("answer-preservation", tried, slow, tokens))
    for row in runs:
        row["ratio_to_public_pattern"] = row["labels_per_second"] / runs[1]["labels_per_second"]
    return {
        "pair": pair.name, "machine": machine(), "versions": versions(), "date": time.strftime("%Y-%m-%d"),
        "device": str(device), "dtype": pair.dtype, "task": task.name, "prompts": len(prompts),
        "suffix_length": suffix_length, "max_new_tokens": max_new_tokens, "batch": batch, "runs": runs,
    }  # fmt: skip


def _row(name: str, labels: int, clock: _Clock, tokens: int) -> dict[str, Any]:
    return {
        "name": name, "labels": labels, "labels_per_second": labels / clock.seconds,
        "cpu_seconds_per_label": clock.cpu_seconds / labels, "target_tokens_per_label": tokens / labels,
        "seconds": clock.seconds,
    }  # fmt: skip


@torch.no_grad()
def _public(pair: Pair, case: Case, k: int, suffix_length: int) -> int:
    """One label as public code makes it: a whole sequence for the score, two more for the states. Tokens that were read."""
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
