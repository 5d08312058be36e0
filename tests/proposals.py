"""What drafts propose, cycle by cycle, against what they would propose if they read the whole text at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import transformers as hf
from torch import Tensor

from conftest import VOCAB
from selfjudge.decoding.admission import AdmissionQueue, Request
from selfjudge.decoding.capture import capture_cycles, time_cycle
from selfjudge.decoding.cycle import CycleSize, find_cycle
from selfjudge.decoding.loop import decode
from selfjudge.decoding.rules import EXACT, AcceptanceRule
from selfjudge.decoding.sampling import RandomNumbers
from selfjudge.engine.draft import BatchEngines
from selfjudge.engine.select import make_draft, make_engine
from selfjudge.models.eagle import EagleHead
from selfjudge.models.load import as_draft
from selfjudge.types import Block


@dataclass(frozen=True, eq=False)
class Arbitrary(AcceptanceRule):
    """Accepts whatever is not divisible by three: blocks of all lengths, whatever the draft is worth."""

    name = "arbitrary"
    reads_logits = False

    def accepts(self, block: Block, logits: Tensor, aligned: Tensor) -> Tensor:
        return block.draft_tokens % 3 > 0


ARBITRARY = Arbitrary()

Cycle = tuple[list[int], list[int]]
"""Proposals and what was emitted."""


def prompts_of(lengths: Sequence[int]) -> list[list[int]]:
    random = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCAB, (n,), generator=random).tolist() for n in lengths]


def requests_of(
    prompts: Sequence[Sequence[int]], max_new_tokens: int | Sequence[int] = 256, seeds: Sequence[int] | None = None
) -> list[Request]:
    """Prompts with one limit or one for each; a row's seed is its index unless seeds are given."""
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
    return list(map(Request, prompts, limits, range(len(prompts)) if seeds is None else seeds))


def cycles(
    target: hf.PreTrainedModel,
    draft: hf.PreTrainedModel | EagleHead,
    prompts: list[list[int]],
    gammas: Sequence[int],
    rule: AcceptanceRule = EXACT,
    *,
    kind: str = "auto",
    chunk: int = 96,
    limits: Sequence[int] | Sequence[list[int]] | None = None,
    seeds: Sequence[int] | None = None,
) -> list[list[Cycle]]:
    """What each row got in each cycle, of γ as given; the first is the prefill, in chunks where the row is alone.

    `limits` are the drafts of each row that are verified, the same ones in all cycles or those of each cycle. A row's
    seed is its index unless seeds are given.
    """
    engine, small = (
        make_engine(target, hidden=rule.judge is not None, features=as_draft(draft).features, kind=kind),
        make_draft(draft, target, kind=kind),
    )
    random, given = RandomNumbers(target.device), range(len(prompts)) if seeds is None else seeds
    random.enter(given if rule.sampling is not None else [None] * len(prompts))
    counts = torch.tensor([len(prompt) for prompt in prompts], device=target.device)
    width = int(counts.max())
    padded = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=target.device)
    for cache in (engine, small):
        cache.reserve(len(prompts), 96)
    for start in range(0, width, chunk):
        part = slice(start, min(start + chunk, width))
        own = (counts - (width - part.stop)).clamp_max(part.stop - start)
        output = engine.prefill(padded[:, part], own)
        small.read(padded[:, part], own, output.features)
    last = output.logits[:, -1].argmax(-1)
    small.enter(last)
    state: Tensor | None = None
    made: list[list[Cycle]] = [[([], [token])] for token in last.tolist()]
    for number, gamma in enumerate(gammas):
        verified = None
        if limits is not None and gamma:
            chosen = limits[number] if isinstance(limits[0], list) else limits
            verified = [min(limit, gamma) for limit in chosen]  # type: ignore[union-attr, type-var]
        size = CycleSize(gamma, limited=verified is not None)
        cycle = find_cycle(BatchEngines(engine, small), rule, size, trace=False, first=last, row_state=state)
        packed, timer = cycle.run(random.next(gamma), verified)
        timer.seconds()
        last, state = cycle.last[:, 0].clone(), cycle.row_state.clone()
        outcome = packed.unpack()
        for row, drafts, k, token in zip(
            made, outcome.drafts.tolist(), outcome.accepted.tolist(), outcome.next_token.tolist(), strict=True
        ):
            row.append((drafts, [*drafts[:k], token]))
    return made


def answers_between_captures(
    target: hf.PreTrainedModel, draft: hf.PreTrainedModel | EagleHead, rule: AcceptanceRule, *, captures: bool
) -> list[list[int]]:
    """Answers of rows that enter and leave a batch of up to four on the static engine. With `captures`, cycles of other γ
    and of 1, 2 or 4 rows in turn are captured and timed before every second step; they must not notice it."""
    engines = BatchEngines(
        make_engine(target, features=as_draft(draft).features, kind="cuda"), make_draft(draft, target, kind="cuda")
    )
    requests = requests_of(prompts_of([4, 30, 7, 1, 12, 5]), [25, 8, 20, 3, 12, 17])
    queue, tokens = AdmissionQueue(rows=4, length=60), [list[int]() for _ in requests]
    for number, step in enumerate(decode(engines, requests[:1], rule, gamma=3, queue=queue)):
        for emission in step.emissions:
            tokens[emission.row] += emission.tokens
        for request in {0: requests[1:3], 3: requests[3:5], 6: requests[5:]}.get(number, ()):
            queue.put(request)
        if captures and number % 2 == 0:
            for cycle in capture_cycles(engines, rule, (4, 1, 2)[number % 3], map(CycleSize, (0, 1, 3, 5))):
                draft_seconds, rest = time_cycle(cycle, 1 + number % 2)
                assert min(draft_seconds, rest) >= 0
    return tokens


Logits = Callable[[list[int], list[int]], Tensor]
"""A text and proposals after it [γ] → logits [γ, V] of each, given those before it."""


@torch.inference_mode()
def model_logits(draft: hf.PreTrainedModel, text: list[int], proposed: list[int]) -> Tensor:
    ids = torch.tensor([[*text, *proposed[:-1]]], device=draft.device)
    logits: Tensor = draft(ids).logits[0, -len(proposed) :]
    return logits


@torch.inference_mode()
def head_logits(head: EagleHead, target: hf.PreTrainedModel, text: list[int], proposed: list[int]) -> Tensor:
    """By the module, from scratch and without a cache; the target has not read the last token of the text."""
    ids = torch.tensor([text], device=target.device)
    states = target(ids[:, :-1], output_hidden_states=True).hidden_states
    g, found = head.fc(torch.cat([states[i] for i in head.config.aux_layers], -1)), []
    for i in range(len(proposed)):
        tokens = torch.cat([ids[:, 1:], ids.new_tensor([proposed[:i]])], 1)
        a = head(tokens, g)
        full = a.new_full((head.config.vocab_size,), -torch.inf)
        found.append(full.index_copy_(0, head.draft_ids, head.logits(a[0, -1])))
        g = torch.cat([g, a[:, -1:]], 1)
    return torch.stack(found)


def check_proposals(made: list[list[Cycle]], prompts: list[list[int]], logits_of: Logits, tie: float = 1e-4) -> None:
    """Every proposal is the most likely one, or as good as that; blocks of several lengths were accepted."""
    accepted = set()
    for prompt, row in zip(prompts, made, strict=True):
        text = [*prompt, *row[0][1]]
        for proposed, emitted in row[1:]:
            if proposed:
                logits = logits_of(text, proposed).cpu()
                chosen = logits.gather(1, torch.tensor(proposed)[:, None])[:, 0]
                assert bool((chosen >= logits.amax(-1) - tie).all())
            assert emitted[:-1] == proposed[: len(emitted) - 1]
            accepted.add(len(emitted) - 1)
            text += emitted
    assert accepted >= {0, 1, 2}
