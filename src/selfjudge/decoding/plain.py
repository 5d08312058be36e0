"""Answers of the target alone, at the highest throughput: the loop with γ = 0 over large batches."""

from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from selfjudge.decoding.admission import Request
from selfjudge.decoding.loop import decode
from selfjudge.decoding.prefill import shared_prefixes
from selfjudge.decoding.rule_parser import RuleRequest
from selfjudge.decoding.sampling import Sampling
from selfjudge.engine.draft import BatchEngines
from selfjudge.engine.select import borrow_engine
from selfjudge.models.load import LoadedModel, Target, as_loaded
from selfjudge.types import FINISHES, Finish, Step, TokenColumn

Response = tuple[int, list[int], Finish]  # index of the prompt, the tokens with the end token, why the answer ended


def respond(
    model: PreTrainedModel | LoadedModel,
    prompts: Sequence[Sequence[int]],
    *,
    eos_ids: Collection[int],
    max_new_tokens: int | Sequence[int],
    sampling: Sampling | None = None,
    seeds: Sequence[int] | None = None,
    batch: int = 1024,
    notify: Callable[[int], None] | None = None,
) -> Iterator[Response]:
    """Answer every prompt, greedily or by sampling; answers come as they are finished, in no particular order.
    `max_new_tokens` is one limit, or one for each prompt. A sampled answer depends on its own seed alone."""
    loaded = as_loaded(model)
    if isinstance(loaded, Target) and loaded.remote is not None:
        yield from loaded.remote.respond(
            prompts, eos_ids=eos_ids, max_new_tokens=max_new_tokens, sampling=sampling, seeds=seeds, notify=notify
        )
        return
    rule = RuleRequest().resolve(sampling=sampling)  # the same object every time: captured graphs are found by it
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
    owners = shared_prefixes(prompts)  # prompts of one owner are decoded together: their shared prefix is read once
    sizes = [len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True)]
    largest = dict.fromkeys(owners, 0)
    for owner, size in zip(owners, sizes, strict=True):
        largest[owner] = max(largest[owner], size)
    order = sorted(range(len(prompts)), key=lambda i: (-largest[owners[i]], owners[i]))  # the first cache fits all
    with borrow_engine(loaded) as engine:
        engines = BatchEngines(engine)
        most = batch if engine.static else min(batch, 64)
        while order:
            longest = max(sizes[i] for i in order[:most])
            rows = engines.limit_rows(2 * most, longest + 1, share=0.5)  # the other half is for reading long prompts
            size = min(most, 1 << max(0, rows.bit_length() - 1))  # graphs are captured for powers of two
            part, order = sorted(order[:size], key=lambda i: (-len(prompts[owners[i]]), owners[i])), order[size:]
            row_seeds = range(len(part)) if seeds is None else [seeds[i] for i in part]
            requests = [Request(prompts[i], limits[i], seed) for i, seed in zip(part, row_seeds, strict=True)]
            tokens = np.zeros((len(part), max(limits[i] for i in part)), np.int32)
            lengths = np.zeros(len(part), np.int64)
            for column in _list_columns(decode(engines, requests, rule, gamma=0, eos_ids=eos_ids)):
                tokens[column.rows, lengths[column.rows]] = column.tokens
                lengths[column.rows] += 1
                for i in np.flatnonzero(column.ended).tolist():
                    row, finish = column.rows[i], FINISHES[column.ended[i]]
                    assert finish is not None
                    yield part[row], tokens[row, : lengths[row]].tolist(), finish
                if notify:
                    notify(len(column))


def _list_columns(steps: Iterator[Step]) -> Iterator[TokenColumn]:
    """The tokens of each step that has any: some only read a prompt."""
    for step in steps:
        if step.out_of_memory:
            raise torch.OutOfMemoryError("the device has no memory for these prompts")
        if isinstance(step.emissions, TokenColumn):
            yield step.emissions
