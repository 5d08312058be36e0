"""Penalties, biases, a least length and log-probabilities: equal to decoding that reads the whole text for every token."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from conftest import REFERENCE, VOCAB, tiny_head, tiny_model
from equality import greedy
from proposals import prompts_of
from selfjudge.decoding.adjust import LEAST_LOGPROB, LeastTokens, LogProbabilities, Penalties, TokenBias
from selfjudge.decoding.admission import Request
from selfjudge.decoding.edits import LogitsEdit
from selfjudge.decoding.loop import decode
from selfjudge.decoding.rules import AcceptanceRule, Exact, Margin, SpeculativeSampling, TopK
from selfjudge.decoding.sampling import Sampling
from selfjudge.engine.draft import BatchEngines
from selfjudge.engine.select import make_draft, make_engine
from selfjudge.models.load import as_draft

TARGET = tiny_model(seed=1)
SMALL = tiny_model(seed=2)
KINDS = ["auto", "cuda", REFERENCE]
Change = Callable[[Tensor, list[int], list[int]], Tensor]
"""What parameters do to the logits [V] that follow a prompt and an answer, written out."""


def engines_of(kind: str, draft: str) -> BatchEngines:
    model = {"same": TARGET, "small": SMALL, "head": tiny_head(TARGET)}[draft]
    return BatchEngines(
        make_engine(TARGET, features=as_draft(model).features, kind=kind), make_draft(model, TARGET, kind=kind)
    )


def answers(
    engines: BatchEngines, requests: list[Request], rule: AcceptanceRule, gamma: int = 3, eos: Sequence[int] = ()
) -> list[list[int]]:
    tokens: list[list[int]] = [[] for _ in requests]
    for step in decode(engines, requests, rule, gamma=gamma, eos_ids=eos):
        for emission in step.emissions:
            tokens[emission.row] += emission.tokens
    return tokens


@torch.no_grad()
def logits_after(tokens: list[int]) -> Tensor:
    return TARGET(torch.tensor([tokens])).logits[0, -1].clone()


def greedy_with(prompt: list[int], count: int, change: Change, eos: Sequence[int] = ()) -> list[int]:
    answer: list[int] = []
    while len(answer) < count and not set(answer[-1:]) & set(eos):
        answer.append(int(change(logits_after([*prompt, *answer]), prompt, answer).argmax()))
    return answer


def penalise(
    logits: Tensor, prompt: list[int], answer: list[int], presence: float, frequency: float, repetition: float
) -> Tensor:
    """Token by token, as vLLM and transformers describe it."""
    for token in {*prompt, *answer}:
        logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
    for token, count in Counter(answer).items():
        logits[token] -= frequency * count + presence
    return logits


WEIGHTS = [(1.5, 0.0, 1.0), (0.0, 0.8, 1.0), (0.0, 0.0, 1.3), (-0.5, 0.4, 1.1), (0.0, -2.0, 1.0)]


@pytest.mark.quick("auto-head", "cuda-same")
@pytest.mark.parametrize(
    ("kind", "draft"),
    [
        ("auto", "small"), ("auto", "head"), ("cuda", "same"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("auto", "same"), ("cuda", "small"), ("cuda", "head"), ("reference", "small"))),
    ],
)  # fmt: skip
def test_greedy_answers_under_penalties(kind: str, draft: str) -> None:
    """One row for each choice of penalties beside one without, in one batch."""
    prompts = prompts_of([3, 17, 9, 5, 12, 8])
    requests = [Request(p, 16, edits=(Penalties(*w, p),)) for p, w in zip(prompts, WEIGHTS, strict=False)]
    found = answers(engines_of(kind, draft), [*requests, Request(prompts[5], 16)], Exact())
    wanted = [
        greedy_with(p, 16, lambda x, q, a, w=w: penalise(x, q, a, *w)) for p, w in zip(prompts, WEIGHTS, strict=False)
    ]
    assert found == [*wanted, greedy(TARGET, prompts[5], 16)]
    assert sum(answer != greedy(TARGET, p, 16) for answer, p in zip(wanted, prompts, strict=False)) >= 3


@pytest.mark.quick("auto")
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_answers_under_a_bias_and_a_least_length(kind: str) -> None:
    (prompt,) = prompts_of([7])
    plain = greedy(TARGET, prompt, 20)
    eos = plain[6]
    likely = Counter(plain).most_common(1)[0][0]
    bias = {likely: -100, 5: 3.5}

    def biased(logits: Tensor, prompt: list[int], answer: list[int]) -> Tensor:
        logits[likely] = -math.inf
        logits[5] += 3.5
        return logits

    def late(logits: Tensor, prompt: list[int], answer: list[int]) -> Tensor:
        if len(answer) < 11:
            logits[eos] = -math.inf
        return logits

    requests = [
        Request(prompt, 20, edits=(TokenBias(bias),)),
        Request(prompt, 20, edits=(LeastTokens(11, [eos]),)),
        Request(prompt, 20),
    ]
    found = answers(engines_of(kind, "small"), requests, Exact(), eos=[eos])
    wanted = [greedy_with(prompt, 20, biased, [eos]), greedy_with(prompt, 20, late, [eos])]
    assert found == [*wanted, plain[: plain.index(eos) + 1]]
    assert likely not in found[0]
    assert len(found[1]) > 11 > len(found[2])


@pytest.mark.quick("auto")
@pytest.mark.parametrize("kind", KINDS)
def test_sampling_under_penalties_has_the_changed_distribution(kind: str) -> None:
    """The second token of an answer, drafted by another model, under everything at once."""
    (prompt,), rows, rounds, w = prompts_of([5]), 250, 3, (1.0, 0.7, 1.2)
    first = greedy(TARGET, prompt, 1)[0]
    found: Counter[int] = Counter()
    accepted = 0
    for start in range(0, rounds * rows, rows):
        requests = [
            Request(prompt, 2, start + i, edits=(Only(first), TokenBias({first: 2.0, 9: -100}), Penalties(*w, prompt)))
            for i in range(rows)
        ]
        for step in decode(engines_of(kind, "small"), requests, SpeculativeSampling(Sampling(0.8)), gamma=2):
            for emission in step.emissions if step.cycle else ():
                found[emission.tokens[0]] += 1
                accepted += emission.origins[0] == "draft"
    logits = logits_after([*prompt, first])
    logits[first] += 2.0
    logits[9] = -math.inf
    p = (penalise(logits, prompt, [first], *w).double() / 0.8).softmax(-1)
    likely = (p > 0.01).nonzero().flatten().tolist()
    observed, expected = [found[t] for t in likely], [rows * rounds * float(p[t]) for t in likely]
    observed.append(rows * rounds - sum(observed))
    expected.append(rows * rounds - sum(expected))
    assert not found[9]
    assert 0 < accepted < rows * rounds
    assert chisquare(observed, expected).pvalue > 1e-4


class Only(LogitsEdit):
    """The first token is given."""

    def __init__(self, token: int) -> None:
        self.token: int | None = token

    def edit(self, logits: Tensor, drafts: Sequence[int]) -> None:
        if self.token is not None:
            logits[:, [t for t in range(VOCAB) if t != self.token]] = -math.inf

    def advance(self, tokens: Sequence[int]) -> None:
        self.token = None


@pytest.mark.quick("rule0-auto", "rule1-cuda")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "rule",
    [
        Exact(),
        SpeculativeSampling(Sampling(0.9)),
        *(pytest.param(r, marks=pytest.mark.slow) for r in (Margin(2.0), TopK(3))),
    ],
)
def test_logprobs_are_the_targets_own(kind: str, rule: AcceptanceRule) -> None:
    """Raw ones, also of accepted drafts, below other edits, in rows of different lengths."""
    prompts = prompts_of([3, 11])
    noted = [LogProbabilities(4), LogProbabilities(0)]
    edits: list[tuple[LogitsEdit, ...]] = [(noted[0], TokenBias({5: 4.0}), Penalties(0.5, 0.5)), (noted[1],)]
    requests = [Request(p, 18, i, edits=e) for i, (p, e) in enumerate(zip(prompts, edits, strict=True))]
    found = answers(engines_of(kind, "small"), requests, rule)
    for prompt, answer, log in zip(prompts, found, noted, strict=True):
        assert [entry.token for entry in log.noted] == answer
        for i, entry in enumerate(log.noted):
            own = logits_after([*prompt, *answer[:i]]).log_softmax(-1)
            assert entry.logprob == pytest.approx(float(own[entry.token]), abs=1e-4)
            assert len(entry.top) == log.top
            values = own.topk(log.top).values.tolist()
            assert [p for _, p in entry.top] == pytest.approx(values, abs=1e-4)
            assert all(own[t] == pytest.approx(p, abs=1e-4) for t, p in entry.top)


def test_logprobs_stay_numbers_that_json_has() -> None:
    log = LogProbabilities(3)
    log.edit(torch.tensor([[0.0, -math.inf, -math.inf], [math.nan, 1.0, 2.0]]), [0])
    log.advance([1, 0])
    assert [entry.logprob for entry in log.noted] == [LEAST_LOGPROB, LEAST_LOGPROB]
    assert all(math.isfinite(p) for entry in log.noted for _, p in entry.top)


def test_penalties_of_logits_in_half_precision_follow_the_same_steps() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = logits.float()
    for x in (logits, whole):
        penalties = Penalties(0.5, 0.25, 1.5, [1, 2])
        penalties.advance([4, 4])
        penalties.edit(x, [4, 7])
    assert torch.equal(logits, whole.bfloat16())
