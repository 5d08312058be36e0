"""Edits of logits: every engine, ragged batches, rows beside rows without edits, and rows that enter."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from scipy.stats import chisquare

from conftest import REFERENCE, VOCAB, tiny_head, tiny_model
from editing import Forbid, NoToken2x, greedy_under
from equality import greedy
from proposals import prompts_of, requests_of
from selfjudge.decoding import loop
from selfjudge.decoding.admission import AdmissionQueue, Request
from selfjudge.decoding.edits import VerifiedLogits
from selfjudge.decoding.loop import decode
from selfjudge.decoding.rules import AcceptanceRule, Exact, Margin, SpeculativeSampling
from selfjudge.decoding.sampling import Sampling
from selfjudge.engine.draft import BatchEngines
from selfjudge.engine.select import make_draft, make_engine
from selfjudge.models.load import as_draft

TARGET = tiny_model(seed=1)
SMALL = tiny_model(seed=2)
KINDS = ["auto", "cuda", REFERENCE]


def engines_of(kind: str, draft: str = "same") -> BatchEngines:
    model = {"same": TARGET, "small": SMALL, "head": tiny_head(TARGET)}[draft]
    target = make_engine(TARGET, features=as_draft(model).features, kind=kind)
    return BatchEngines(target, make_draft(model, TARGET, kind=kind))


def answers(engines: BatchEngines, requests: list[Request], rule: AcceptanceRule, **options: object) -> list[list[int]]:
    tokens: list[list[int]] = [[] for _ in requests]
    for step in decode(engines, requests, rule, **options):  # type: ignore[arg-type]
        for emission in step.emissions:
            tokens[emission.row] += emission.tokens
    return tokens


@pytest.mark.quick("4-auto", "0-cuda")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gamma", [0, 4])
def test_a_forbidden_token_never_comes_and_nothing_else_is_rejected(kind: str, gamma: int) -> None:
    """Draft = target: all drafts are accepted but those that are forbidden."""
    (prompt,) = prompts_of([7])
    plain = greedy(TARGET, prompt, 24)
    banned = Counter(plain).most_common(1)[0][0]
    edit = Forbid([banned])
    engines = engines_of(kind)
    steps = list(decode(engines, [Request(prompt, 24, edits=(edit,))], Exact(), gamma=gamma))
    tokens = [t for s in steps for e in s.emissions for t in e.tokens]
    assert tokens == greedy_under(TARGET, prompt, 24, Forbid([banned])) != plain
    assert edit.emitted == tokens
    assert edit.widths == [1] + [gamma + 1] * (len(steps) - 1)
    drafts = [e.origins.count("draft") for s in steps[1:] for e in s.emissions]
    assert not gamma or max(drafts) == gamma


@pytest.mark.quick("head-auto", "small-cuda")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draft", ["same", "small", "head"])
def test_rows_with_edits_beside_rows_without(kind: str, draft: str) -> None:
    """A ragged batch; every row of logits follows the drafts before it, and the other rows notice nothing."""
    prompts, limits = prompts_of([3, 17, 9, 1]), [20, 9, 25, 14]
    requests = requests_of(prompts, limits)
    for i in (0, 2):
        requests[i] = requests[i]._replace(edits=(NoToken2x(), Forbid([5, 6])))
    tokens = answers(engines_of(kind, draft), requests, Exact(), gamma=3)
    for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        if i in (1, 3):
            assert tokens[i] == greedy(TARGET, prompt, limit)
        else:
            both = Both()
            assert tokens[i] == greedy_under(TARGET, prompt, limit, both)
            assert len(set(tokens[i])) == limit
            assert not {5, 6} & set(tokens[i])


class Both(NoToken2x):
    """What the two edits do one after the other."""

    def edit(self, logits: torch.Tensor, drafts: list[int]) -> None:  # type: ignore[override]
        super().edit(logits, drafts)
        Forbid([5, 6]).edit(logits, drafts)


@pytest.mark.quick("auto")
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_with_edits_enters_a_running_batch_and_leaves_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A static engine runs one cycle ahead, but not while a live row has edits."""
    ahead: list[bool] = []
    run, finish = loop._LiveBatch.run, loop._LiveBatch.finish
    started: list[int] = []

    def watched_run(self: loop._LiveBatch, number: int) -> loop._StartedCycle:
        started.append(number)
        return run(self, number)

    def watched_finish(self: loop._LiveBatch, cycle: loop._StartedCycle, rows: object) -> object:
        if cycle.number:
            ahead.append(started[-1] > cycle.number)
            assert not (ahead[-1] and self.rows.live_edits)
        return finish(self, cycle, rows)  # type: ignore[arg-type]

    monkeypatch.setattr(loop._LiveBatch, "run", watched_run)
    monkeypatch.setattr(loop._LiveBatch, "finish", watched_finish)
    prompts, queue = prompts_of([4, 19, 7]), AdmissionQueue(3, 60)
    engines, edit = engines_of(kind, "small"), NoToken2x()
    later = [Request(prompts[1], 10, edits=(edit,)), Request(prompts[2], 12)]
    tokens: dict[int, list[int]] = {}
    for number, step in enumerate(decode(engines, [Request(prompts[0], 40)], Exact(), gamma=2, queue=queue)):
        for emission in step.emissions:
            tokens.setdefault(emission.row, []).extend(emission.tokens)
        for i in {3: [0], 6: [1]}.get(number, ()):
            queue.put(later[i])
    assert tokens[0] == greedy(TARGET, prompts[0], 40)
    assert tokens[1] == greedy_under(TARGET, prompts[1], 10, NoToken2x()) == edit.emitted
    assert tokens[2] == greedy(TARGET, prompts[2], 12)
    assert any(ahead) == engines.target.static


class BeginWith(Forbid):
    """The first token is given; later ones are even."""

    def edit(self, logits: torch.Tensor, drafts: list[int]) -> None:  # type: ignore[override]
        banned = range(1, VOCAB, 2) if self.emitted else [t for t in range(VOCAB) if t != self.tokens[0]]
        logits[:, list(banned)] = -math.inf


@pytest.mark.quick("auto")
@pytest.mark.parametrize("kind", KINDS)
def test_sampling_under_an_edit_has_the_edited_distribution(kind: str) -> None:
    """The token after a given one, drafted by another model."""
    (prompt,), rows, first = prompts_of([5]), 250, 7
    rule = SpeculativeSampling(Sampling(0.7))
    found: Counter[int] = Counter()
    accepted = 0
    for start in range(0, 3 * rows, rows):
        requests = [Request(prompt, 2, start + i, edits=(BeginWith([first]),)) for i in range(rows)]
        for step in decode(engines_of(kind, "small"), requests, rule, gamma=2):
            for emission in step.emissions if step.cycle else ():
                found[emission.tokens[0]] += 1
                accepted += emission.origins[0] == "draft"
    with torch.inference_mode():
        logits = TARGET(torch.tensor([[*prompt, first]])).logits[0, -1]
        p = (logits[::2].double() / 0.7).softmax(-1)
    likely = (p > 0.01).nonzero().flatten().tolist()
    observed = [*(found[2 * token] for token in likely), 0]
    observed[-1] = 3 * rows - sum(observed)
    expected = [*(3 * rows * float(p[token]) for token in likely), 0.0]
    expected[-1] = 3 * rows - sum(expected)
    assert not any(token % 2 for token in found)
    assert 0 < accepted < 3 * rows
    assert chisquare(observed, expected).pvalue > 1e-4


@pytest.mark.parametrize("kind", ["auto", "cuda"])
def test_a_relaxed_rule_never_accepts_a_forbidden_draft(kind: str) -> None:
    prompts = prompts_of([6, 11])
    requests = [Request(p, 20, edits=(Forbid(range(10, 30)),)) for p in prompts]
    tokens = answers(engines_of(kind, "small"), requests, Margin(50.0), gamma=4)
    assert not set(range(10, 30)) & {t for row in tokens for t in row}


def test_the_argmax_of_edited_logits_is_taken_again_in_place() -> None:
    logits = torch.tensor([[[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]], [[0.0, 3.0, 2.0], [5.0, 1.0, 0.0]]])
    argmax = logits.argmax(-1), torch.zeros(2, 2, dtype=torch.bool)
    verified = VerifiedLogits(logits, argmax, torch.tensor([[1], [2]]), torch.tensor([0, 1]))
    narrow, wide = Forbid([2]), Forbid([0])
    verified.unowned().edit([(narrow,), (wide,)])
    assert argmax[0].tolist() == [[1, 0], [1, 1]]
    assert (narrow.widths, wide.widths) == ([1], [2])  # of the first row no draft is verified
