"""The kernels of speculative sampling against its formulas, on whatever device there is; see `kernel_checks.py`."""

from __future__ import annotations

from unittest import mock

import torch
from torch import Tensor

from conftest import tiny_head, tiny_model
from proposals import prompts_of
from selfjudge.decoding import rules_by_row, sampling
from selfjudge.decoding.admission import Request
from selfjudge.decoding.cycle import _over_vocabulary
from selfjudge.decoding.loop import decode
from selfjudge.decoding.rules import EXACT, AcceptanceRule, Margin, SpeculativeSampling, gather_tokens
from selfjudge.decoding.rules_by_row import RowRules, list_settings
from selfjudge.decoding.sampling import RowSampling, Sampling
from selfjudge.engine.draft import BatchEngines
from selfjudge.engine.select import make_draft, make_engine
from selfjudge.models.load import as_draft
from selfjudge.ops import replace_non_finite
from selfjudge.types import Block

VOCAB, GAMMA, ROWS = 9000, 3, 12  # more than one block of a row, and no multiple of it
CLOSE, NEAR = 1e-5, 2e-4
"""Of probabilities; of their sums, which the interpreter adds one by one."""


def is_inversion(p: Tensor, uniform: Tensor, token: Tensor) -> bool:
    """Whether `sample` draws this token by this number, up to rounding; p [V] need not be normalised."""
    p = p.double() / p.double().sum()
    end = float(p.cumsum(0)[token])
    start = end - float(p[token])
    return float(p[token]) > 0 and start <= float(uniform) + NEAR and end >= float(uniform) - NEAR


def fused_rows(settings: Tensor, filtered: bool) -> RowSampling:
    """As on a GPU."""
    own = RowSampling(settings[:, -RowSampling.COLUMNS :], filtered=filtered)
    own.fused, own.rows = True, slice(None)
    own._sampled, own._columns = own.temperature > 0, settings[:, -RowSampling.COLUMNS :]
    return own


def check_sampling(device: torch.device, dtype: torch.dtype, *, mapped: bool, filtered: bool, limited: bool) -> None:
    """Drafts, acceptance and the token after them: in every third row greedily. Logits are non-finite, far apart, alike
    and rows of wider ones; the draft may know only some tokens; judged drafts stand against alignment."""
    samplings = [
        None if row % 3 == 2 else Sampling((0.7, 1.0, 1.3, 0.01)[row % 4], min_p=0.01 if filtered and row % 2 else 0.0)
        for row in range(ROWS)
    ]
    rules: list[AcceptanceRule] = [EXACT if one is None else SpeculativeSampling(one) for one in samplings]
    own = fused_rows(list_settings(rules).to(device), filtered)
    size = VOCAB - 700 if mapped else VOCAB
    ids = torch.randperm(VOCAB)[:size].sort().values.to(device)
    known = (torch.randn(GAMMA, ROWS, size + 24) * 4).to(device, dtype)[..., :size]
    known[0, 1], known[1, 0, 5], known[1, 0, 9], known[2, 3] = -torch.inf, torch.inf, torch.nan, 3e4
    known[0, 4, 7], known[1, 6, :9] = 3e4, torch.inf
    logits = (torch.randn(ROWS, GAMMA + 1, VOCAB + 24) * 4).to(device, dtype)[..., :VOCAB]
    logits[..., ids] += known.new_tensor(0.7) * torch.cat([known, known[:1]]).nan_to_num(0, 0, 0).transpose(0, 1)
    logits[1, 0], logits[0, 1, 7], logits[4, 0, 3], logits[3, 1] = -torch.inf, torch.inf, torch.nan, 1e4
    logits[9, 0, ids] = known[0, 9]
    u = torch.rand(ROWS, 2 * GAMMA + 1).to(device)
    u[7, -1], u[10, -1] = 0.0, 1 - 2**-24
    drawn = [own.draw(step, u[:, i]) for i, step in enumerate(known)]
    drafts = ids[torch.stack([tokens for _, tokens in drawn], 1)]
    limits = torch.arange(ROWS, device=device) % (GAMMA + 1) if limited else None
    places = ids.new_full((VOCAB,), -1).index_copy_(0, ids, torch.arange(size, device=device)) if mapped else None
    q_logits, numbers = torch.stack([step for step, _ in drawn], 1), u[:, GAMMA:].contiguous()
    block = Block(drafts, logits, None, q_logits, numbers, limits=limits, draft_places=places)
    unset = torch.zeros_like(drafts, dtype=torch.bool)
    unset[2::3] = True
    accepted = unset.clone()
    own.verify(block, logits, accepted)
    n = accepted.long().cumprod(1).sum(1)
    n[6] = 1  # a judge says otherwise
    n = n if limits is None else torch.minimum(n, limits)
    tokens = torch.full_like(n, -7)
    own.verify(block, logits, accepted, n, tokens)
    for row, one in enumerate(samplings):
        if one is None:
            assert drafts[row].tolist() == ids[replace_non_finite(known[:, row].float()).argmax(-1)].tolist()
            assert bool(accepted[row].all())
            assert tokens[row] == -7
            continue
        p = one.warp(replace_non_finite(logits[row])).softmax(-1)
        whole = _over_vocabulary(replace_non_finite(known[:, row]), VOCAB, ids)
        q = one.warp(whole).softmax(-1)
        for i in range(GAMMA):
            assert is_inversion(q[i], u[row, i], drafts[row, i]), (row, i)
        p_d, q_d = gather_tokens(p[:-1], drafts[row]), gather_tokens(q, drafts[row])
        unclear = (numbers[row, :-1] * q_d - p_d).abs() < CLOSE
        assert bool((unclear | (accepted[row] == (numbers[row, :-1] * q_d < p_d))).all()), row
        k = int(n[row])
        rejected = k < (GAMMA if limits is None else int(limits[row])) and not accepted[row, k]
        residual = (p[k] - q[k]).clamp_min(0) if rejected else p[k]
        assert is_inversion(residual if residual.sum() > 0 else p[k], numbers[row, -1], tokens[row]), row
    sampled = own.temperature > 0
    assert accepted[sampled].any()
    assert not accepted[sampled].all()


def check_draws(device: torch.device) -> None:
    """Without drafts: what follows a prompt; and the tokens of many draws come as often as they should."""
    logits, draws = (
        torch.tensor([1.0, -1.0, 0.5, -torch.inf, 2.0], device=device),
        4000 if device.type == "cuda" else 40,
    )
    settings = list_settings([SpeculativeSampling(Sampling(0.8))] * draws).to(device)
    own, u = fused_rows(settings, False), (torch.arange(draws, device=device)[:, None] + 0.5) / draws
    tokens = torch.zeros(draws, dtype=torch.long, device=device)
    whole = logits.expand(draws, 1, 5)
    block = Block(tokens[:, None][:, :0], whole, uniforms=u)
    own.verify(block, whole, tokens[:, None][:, :0] > 0, tokens.clone(), tokens)
    share = tokens.bincount(minlength=5) / draws
    torch.testing.assert_close(share, (logits / 0.8).softmax(0), atol=1.5 / draws, rtol=0)


def check_mixed_batch(device: torch.device) -> None:
    """Whole answers of sampled rows among others, under γ of their own, by kernels and without."""
    rules = [SpeculativeSampling(Sampling(0.9)), Margin(2.0), SpeculativeSampling(Sampling(1.3)), EXACT]
    filtered = [*rules[:3], SpeculativeSampling(Sampling(0.9, 0.8, 9, 0.01))]
    target = tiny_model(seed=1, num_hidden_layers=5).to(device)
    for draft, chosen in ((tiny_head(target), rules), (tiny_model(seed=2).to(device), filtered)):
        requests = [
            Request(prompt, 5 + i, i, rule=rule, gamma=1 + i % 2)
            for i, (prompt, rule) in enumerate(zip(prompts_of([4, 9, 7, 5]), chosen, strict=True))
        ]
        answers = []
        for fused in (False, True):
            features = as_draft(draft).features
            engines = BatchEngines(
                make_engine(target, features=features, kind="cuda"), make_draft(draft, target, kind="cuda")
            )
            tokens: list[list[int]] = [[] for _ in requests]
            asked = mock.Mock(return_value=fused)
            with (
                mock.patch.object(sampling, "runs_kernels", asked),
                mock.patch.object(rules_by_row, "runs_kernels", asked),
            ):
                for step in decode(engines, requests, RowRules(), gamma=3):
                    for emission in step.emissions:
                        tokens[emission.row] += emission.tokens
            assert asked.called
            answers.append(tokens)
        assert answers[0] == answers[1]
        assert [len(row) for row in answers[0]] == [5, 6, 7, 8]


def check_all_sampling(device: torch.device) -> None:
    check_draws(device)
    check_mixed_batch(device)
    cases = [
        (dtype, m, f, m != f) for m in (True, False) for f in (False, True) for dtype in (torch.float32, torch.bfloat16)
    ]
    for dtype, mapped, filtered, limited in (
        cases if device.type == "cuda" else (cases[1], cases[2], cases[4])
    ):  # the interpreter is slow
        check_sampling(device, dtype, mapped=mapped, filtered=filtered, limited=limited)
