"""Triton kernels against the torch operations they replace, on whatever device there is.

On a GPU `tests/gpu` calls these; without one, `python kernel_checks.py` runs them under Triton's interpreter (`make test-vllm`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import Tensor

from sampling_checks import check_all_sampling
from selfjudge.decoding.rule_parser import RuleRequest
from selfjudge.decoding.rules import AcceptanceRule
from selfjudge.decoding.rules_by_row import encode
from selfjudge.engine.cuda.kernels_torch import HeadNorms, Kernels, Scoring
from selfjudge.integrations.vllm.approval import Approval, Counts, choose_mark, count_step
from selfjudge.integrations.vllm.plan import DraftRows, Plan, RequestGuards
from selfjudge.judge.config import FEATURES, JudgeConfig
from selfjudge.judge.model import Judge
from selfjudge.ops import has_non_finite, replace_non_finite, worth_taking
from selfjudge.types import Block

VOCAB, HIDDEN = 9000, 1100  # more than one block of a row, and no multiple of it
SPECIAL = (5, 17, 8999)


STEP_RULES = (
    ("margin:2", 0),
    ("margin:price=0.5", 3),
    ("topk:3", 0),
    ("fly:0.5,2", 5),
    ("margin:1", 2),
    ("margin:3", 0),
    ("judged:0.5", 0),
    ("judged:price=1", 1),
)
"""Rules of requests, and where each stops to be strict."""


def random_judge(features: str, limit: float | None = None) -> Judge:
    """One whose scores lie on both sides of a half."""
    config = JudgeConfig(HIDDEN, features=features, margin_limit=limit)
    return Judge(config, torch.randn(config.width) / 30, 0.3)


def odd_rows(logits: Tensor) -> None:
    """Put into the first rows what a row may hold besides logits; in the last two, ties across blocks."""
    logits[0, 7], logits[1, VOCAB - 2], logits[2], logits[3] = torch.nan, torch.inf, -torch.inf, torch.nan
    logits[0, 3], logits[4, [8500, 60, 8300]], logits[5, [8998, 8997]] = 90.0, 90.0, 90.0


def check_top(device: torch.device, dtype: torch.dtype) -> None:
    from selfjudge.ops.kernels_triton import split_argmax

    logits = torch.randn(3, 2, VOCAB, device=device).to(dtype)
    odd_rows(logits.view(6, VOCAB))
    choice, odd = split_argmax(logits)
    assert torch.equal(choice, replace_non_finite(logits.float()).argmax(-1))
    assert choice[2].tolist() == [60, 8997]
    assert torch.equal(odd, has_non_finite(logits))


def check_scores(device: torch.device, dtype: torch.dtype, features: str, limit: float | None) -> None:
    """Blocks: what `Judge.score` says, for every row that it can be asked about."""
    from selfjudge.ops.kernels_triton import draft_scores, split_argmax

    judge = random_judge(features, limit).to(device)
    hidden, logits = torch.randn(3, 5, HIDDEN, device=device), torch.randn(3, 5, VOCAB, device=device) * 4
    hidden, logits = hidden.to(dtype), logits.to(dtype)
    drafts = torch.randint(VOCAB, (3, 4), device=device)
    drafts[0] = logits[0, :-1].argmax(-1)
    logits[1, 0, drafts[1, 0]] = -torch.inf  # far below: the margin has an end
    hidden[2, 1, 5], hidden[2, 2, 6] = torch.nan, torch.inf
    fused = judge.kernel_weights()
    assert fused is not None
    found = draft_scores(fused, hidden, logits, split_argmax(logits)[0], drafts)
    wanted = judge(Block(drafts, logits, hidden))
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4, equal_nan=True)
    assert wanted[2].isnan().tolist() == [True, True, "previous" in features, False]
    assert (limit is not None) == bool((wanted[1:] == 0).any())


RULES = (
    "judged:0.5", "judged:0", "judged:1", "judged:price=0.5", "judged:0.4,confirm=1", "margin:14", "margin:price=6", "topk:4000",
    "fly:0.3,1",
)  # fmt: skip


def guarded(rule: AcceptanceRule) -> AcceptanceRule:
    return replace(rule, guard=True)  # type: ignore[call-arg]


def check_price(device: torch.device) -> None:
    """The scan of blocks, and of flat rows with a price and a window each, against one block at a time."""
    from selfjudge.ops.kernels_triton import block_scan, flat_scan

    harm, aligned = torch.rand(40, 7, device=device) * 3, torch.rand(40, 7, device=device) < 0.5
    harm[0, 3], harm[1, 2] = torch.inf, torch.nan
    for price in (0.0, 0.3, 1.0):
        assert torch.equal(block_scan(harm, aligned, price), _plain_scan(harm, aligned, price))
    counts = torch.randint(0, 8, (40,), device=device)
    rows = DraftRows.of(counts, int(counts.sum()))
    flat = rows.owner, rows.place
    price, window = torch.rand(40, device=device), torch.randint(0, 3, (40,), device=device, dtype=torch.int32)
    price[::4] = torch.inf
    found = flat_scan(harm[flat], aligned[flat], rows.first, rows.counts, price, window)
    for block in range(40):
        inside = slice(0, int(counts[block]))
        taken = _plain_scan(harm[block : block + 1, inside], aligned[block : block + 1, inside], float(price[block]))[0]
        after = [walked(aligned[block, inside].tolist()[i + 1 :]) >= int(window[block]) for i in range(len(taken))]
        if int(window[block]) == 0 or price[block] == torch.inf:  # what the rules ask for
            here = taken & torch.tensor(after, dtype=torch.bool, device=device)
            assert torch.equal(found[rows.owner == block], here)


def walked(matches: list[bool]) -> int:
    return next((i for i, match in enumerate(matches) if not match), len(matches))


def _plain_scan(harm: Tensor, aligned: Tensor, price: float) -> Tensor:
    return worth_taking(harm.cpu(), aligned.cpu(), price).to(harm.device)


def check_approval(
    device: torch.device, dtype: torch.dtype, features: str, limit: float | None, special: tuple[int, ...]
) -> None:
    """Flat rows of requests: approval and mark. The rows of logits are part of wider ones, as where a vocabulary was padded."""
    counts = torch.tensor([3, 0, 5, 1, 4, *[2] * 6], device=device)
    n = int(counts.sum())
    rows = DraftRows.of(counts, n)
    at = torch.arange(n, device=device) + rows.owner
    m = n + len(counts)
    hidden, logits = torch.randn(m, HIDDEN), torch.randn(m, VOCAB + 24) * 4  # the same numbers on every device
    hidden, logits = hidden.to(device, dtype), logits.to(device, dtype)[:, :VOCAB]
    drafts = torch.randint(VOCAB, (n,), dtype=torch.int32).to(device)
    drafts[::3] = logits[at[::3]].argmax(-1).int()
    drafts[1], drafts[4] = -1, SPECIAL[1]
    hidden[at[5] + 1, 3], hidden[at[6] + 1, 2], logits[at[7], 9] = torch.nan, torch.inf, torch.nan
    logits[at[8], SPECIAL[2]] = 50.0
    first = n - 6  # the last drafts are predicted by odd rows, and are their most likely tokens, or one of them
    odd = logits[at[first:]]
    odd_rows(odd)
    logits[at[first:]] = odd
    drafts[first:] = torch.tensor([3, VOCAB - 2, 0, 0, 60, 8998])
    plain = Approval(random_judge(features, limit), special, device)
    ours = Approval(plain.judge, special, device)
    assert plain.judge is not None
    plain.fused, ours.fused, ours.weights = False, True, plain.judge.kernel_weights()
    assert ours.weights is not None
    known = {text: guarded(RuleRequest(text).resolve(special, plain.judge)) for text in RULES}
    texts = list(known)
    mixed = [[known[texts[(i + shift) % len(texts)]] for i in range(len(counts))] for shift in (0, 3)]
    # with and without a judge, with and without a look ahead
    alone = [[known[text]] * len(counts) for text in ("judged:0.5", "margin:price=6", "topk:4000")]
    for rules in (*alone, *mixed, [None, known["margin:14"]] * 5 + [None]):
        plan = Plan(rules, rows, counts.tolist())
        found = ours(hidden, logits, at, drafts, plan)
        wanted = plain(hidden, logits, at, drafts, plan)
        choice = replace_non_finite(logits[at].float()).argmax(-1)
        decided = choice != drafts  # the mask may say either where alignment accepts anyway
        assert torch.equal(found & decided, wanted & decided), rules
        assert not found[first : first + 2].any()  # broken
    plan = Plan([known["judged:0.5"]] * len(counts), rows, counts.tolist())
    approved = plain(hidden, logits, at, drafts, plan)
    assert torch.equal(
        approved, ours(hidden, logits, at, drafts, plan)
    )  # aligned or not: a sampled request wants to know
    most = plain(hidden, logits, at, drafts, Plan([known["judged:0"]] * len(counts), rows, plan.sizes))
    assert 0 < int(approved.sum()) < int(most.sum())
    approved[first:] = True
    processed = [logits[at].float() for _ in range(2)]
    for copy in processed:
        copy[:, 3] += 1
        copy[10, drafts[10]] = -torch.inf
    marks = [one.mark(copy, drafts, approved) for one, copy in zip((plain, ours), processed, strict=True)]
    torch.testing.assert_close(*processed, atol=0, rtol=0, equal_nan=True)
    assert torch.equal(*marks)
    assert marks[0][0, first:].tolist() == [True, True, False, False, True, True]  # not −inf, not NaN
    assert marks[0][1, first:].tolist() == [True, True, True, True, True, False]


def check_step(device: torch.device) -> None:
    """Steps of requests in vLLM's second model runner: what `RequestGuards` and `count_step` say of the same."""
    from selfjudge.integrations.vllm.approval_triton import RequestTable

    class Words:
        """A tokenizer of single characters."""

        all_special_ids: tuple[int, ...] = ()
        pieces = "`\n{|-ab c"

        def __len__(self) -> int:
            return len(self.pieces)

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return [self.pieces[i] for i in ids]

        def decode(self, ids: list[int]) -> str:
            return "".join(self.convert_ids_to_tokens(ids))

    slots, gamma, random, special = len(STEP_RULES), 4, torch.Generator().manual_seed(0), (6,)
    config = JudgeConfig(16, features=FEATURES[2])
    judge = Judge(config, torch.randn(config.width, generator=random))
    plain, known = Approval(judge, special, device), RequestGuards(Words(), slots, device)
    plain.fused = False
    counts_of = Counts(device, "model", "0")
    table = RequestTable(slots, gamma + 1, known.structure, plain.special, counts_of.total)
    rules = [guarded(RuleRequest(text, strict_start=start).resolve(special, judge)) for text, start in STEP_RULES]
    codes = [encode(rule) for rule in rules]
    for slot, rule in enumerate(rules):
        prompt = None if slot == 5 else [5] * (slot + 1)
        known.enter(slot, rule, prompt)
        table.new[slot] = [*known.begin(rule, prompt), *codes[slot]]
    place, counted = [0 if slot == 5 else slot + 1 for slot in range(slots)], torch.zeros_like(counts_of.total)
    seen = approved = 0
    for step in range(12):
        order = [slot for slot in torch.randperm(slots, generator=random).tolist() if step % 3 or slot != 2]
        counts = [int(torch.randint(gamma + 1, (1,), generator=random)) for _ in order]
        ends = torch.tensor([0, *[count + 1 for count in counts]]).cumsum(0)
        m = int(ends[-1])
        ids = torch.randint(len(Words()), (m + 7,), generator=random).int()
        index = torch.randperm(m + 7, generator=random)[:m]  # the rows of tokens that are sampled from
        positions = torch.zeros(m + 7, dtype=torch.long)
        for slot, end, count in zip(order, ends[1:].tolist(), counts, strict=True):
            skipped = step == 7 and slot == 1  # a token that no step has shown
            positions[index[end - count - 1 : end]] = torch.arange(count + 1) + place[slot] + skipped
            place[slot] += int(skipped)
        batch = SimpleNamespace(
            num_reqs=len(order), idx_mapping=torch.tensor(order, dtype=torch.int32, device=device),
            cu_num_logits=ends.int().to(device), logits_indices=index.to(device), input_ids=ids.to(device),
            positions=positions.to(device),
        )  # fmt: skip
        rows = DraftRows.of(torch.tensor(counts, device=device), sum(counts))
        newest = batch.logits_indices[batch.cu_num_logits[:-1].long()]
        drafted = torch.ones(m, dtype=torch.bool)
        drafted[ends[:-1]] = False
        drafts = ids[index[drafted]].to(device)
        requests = batch.idx_mapping.long()
        exact = known.find_exact(
            requests, batch.input_ids[newest], batch.positions[newest], drafts, rows, max(counts, default=0)
        )
        hidden, logits = torch.randn(m + 7, 16, generator=random), torch.randn(m, 40, generator=random)
        logits[:, : len(Words())] += 2
        hidden, logits = hidden.to(device), logits.to(device)
        assert plain.weights is not None
        table.decide(batch, hidden, logits, None, fused=False)
        assert not table.flags[2, :m].any()
        predicting = torch.ones(m, dtype=torch.bool)
        predicting[ends[1:] - 1] = False
        predicting = predicting.to(device)
        assert torch.equal(table.drafts[:m][predicting], drafts)
        assert (table.drafts[:m][~predicting] == -1).all()
        limit = table.said[0, :m]
        assert (limit[~predicting] == -math.inf).all()
        assert torch.equal(limit[predicting] == -math.inf, exact)
        limits = torch.tensor([codes[order[owner]].limit for owner in rows.owner.tolist()], device=device)
        torch.testing.assert_close(limit[predicting][~exact], limits[~exact], equal_nan=True)
        table.decide(batch, hidden, logits, plain.weights, fused=True)
        at, plan = predicting.nonzero().squeeze(1), Plan([rules[slot] for slot in order], rows, counts)
        wanted = plain(hidden[batch.logits_indices], logits, at, drafts, plan, exact)
        decided = logits[at].argmax(1) != drafts  # the mask may say either where alignment accepts anyway
        processed = logits + torch.randn(logits.shape, generator=random).to(device) / 9
        marked_alone = processed[at]
        flags = plain.mark(marked_alone, drafts, wanted)
        middle = len(order) // 2
        for part in (range(middle), range(middle, len(order))) if step % 2 else (range(len(order)),):
            own = processed[ends[part.start] : ends[part.stop]]
            table.mark(batch, table.said, own, choose_mark(logits), part, ahead=True)
        assert torch.equal(table.flags[:, :m][:, at][:, decided], flags[:, decided])
        assert torch.equal(table.flags[1:, :m][:, at], flags[1:])
        torch.testing.assert_close(processed[at][decided], marked_alone[decided], atol=0, rtol=0)
        approved += int((wanted & decided).sum()) * int((~wanted & decided).sum())
        seen += int(exact.sum()) * int((~exact).sum())
        emitted = torch.tensor([int(torch.randint(count + 1, (1,), generator=random)) + 1 for count in counts])
        flags = torch.rand(3, m, generator=random) < 0.6
        table.flags[:, :m] = flags.to(device)
        marked = step % 4 != 3
        if marked:
            known.advance(emitted.to(device))
            for slot, n in zip(order, emitted.tolist(), strict=True):
                place[slot] += n
        counted += count_step(rows, emitted.to(device), flags.to(device)[:, predicting] if marked else None)
        if marked:
            table.finish(batch, emitted.int().to(device))
        else:
            counts_of.note(emitted.int().to(device), ends.numpy())
        state = torch.stack([known.state, known.position], 1)
        assert torch.equal(table.lines[:, :2].long(), state), step
    assert seen
    assert approved
    assert torch.equal(counts_of.settle(), counted)


def check_pass(device: torch.device, dtype: torch.dtype, batch: int, width: int, heads: int, kv: int, dim: int) -> None:
    """The steps of a pass of the CUDA engine."""
    from selfjudge.engine.cuda.kernels_triton import TritonKernels

    ours, theirs, slots = TritonKernels(device), Kernels(), 192
    close = {"atol": 5e-2, "rtol": 2e-2} if dtype == torch.bfloat16 else {"atol": 2e-5, "rtol": 2e-5}

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    x, w, parts = random(batch * width, 576), random(576), torch.randn(3, batch * width, 576, device=device)
    one, two = x.clone(), x.clone()
    torch.testing.assert_close(ours.norm(one, parts, w, 1e-5), theirs.norm(two, parts.to(dtype), w, 1e-5), **close)
    torch.testing.assert_close(one, two, **close)
    matrix, bias, inputs = random(1000, 1700) / 40, random(1000), random(batch * width, 1700)
    wide = theirs.product(inputs.float(), matrix.float(), bias.float())[0].to(dtype)
    torch.testing.assert_close(ours.product(inputs, matrix, bias).sum(0).to(dtype), wide, **close)
    torch.testing.assert_close(ours.gated(inputs, matrix), theirs.gated(inputs, matrix), **close)
    tokens, lengths = torch.randint(90, (batch, width), device=device), torch.randint(60, (batch,), device=device)
    for counts in (None, torch.randint(1, width + 1, (batch,), device=device)):
        table = random(80, 576)  # some tokens lie outside
        for a, b in zip(*(k.begin(tokens, counts, lengths, slots, table) for k in (ours, theirs)), strict=True):
            assert torch.equal(a, b)
    angles = torch.rand(slots, dim // 2, device=device) * 6
    cosine, sine = (torch.cat([f(angles), f(angles)], -1) for f in (torch.cos, torch.sin))
    position = torch.randint(0, 90, (batch, 1), device=device) + torch.arange(width, device=device)
    qkv = torch.randn(3, batch * width, (heads + 2 * kv) * dim, device=device)
    cache = random(2, batch, kv, slots, dim)
    copy = cache.clone()
    q1 = ours.rotate(qkv, (cosine, sine), (position, position), (cache[0], cache[1]))
    q2 = theirs.rotate(qkv, (cosine, sine), (position, position), (copy[0], copy[1]))
    torch.testing.assert_close(q1, q2, **close)
    torch.testing.assert_close(cache, copy, **close)
    one, two = (kernels.attention(q1, cache[0], cache[1], position) for kernels in (ours, theirs))
    torch.testing.assert_close(one, two, **close)


PASSES = ((1, 1, 12, 2, 64), (2, 5, 6, 2, 32), (33, 2, 4, 2, 16), (1, 70, 2, 1, 32), (5, 8, 2, 2, 16))
"""Batch, width, heads, key-value heads and their width: one share of the keys and several, one block of queries and two,
a group of heads in one program and each alone, fewer rows than `FEW` and more."""


def check_described(device: torch.device, dtype: torch.dtype, width: int, dim: int) -> None:
    """The steps that Llama does not have: norms after a layer and of heads, scaled residuals, windows, caps, GELU."""
    from selfjudge.engine.cuda.kernels_triton import TritonKernels

    ours, theirs, slots, batch, heads, kv = TritonKernels(device), Kernels(), 256, 3, 4, 2
    close = {"atol": 5e-2, "rtol": 2e-2} if dtype == torch.bfloat16 else {"atol": 3e-5, "rtol": 3e-5}

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    x, parts = random(batch * width, 200), torch.randn(3, batch * width, 200, device=device)
    weight, after, wide = random(200), random(200), torch.randn(200, device=device)
    wide_heads = torch.randn(2, dim, device=device)
    for given in ((weight, after, 1.0), (wide, wide, 1.0), (None, after, 1.0), (weight, None, 0.3), (None, None, 2.0)):
        for some in (parts, None):
            results = []
            for kernels in (ours, theirs):
                stream = x.clone()
                own = some if kernels is ours or some is None else some.sum(0, keepdim=True).to(dtype)
                results += [kernels.norm(stream, own, given[0], 1e-5, *given[1:]), stream]
            torch.testing.assert_close(results[0], results[2], **close)
            torch.testing.assert_close(results[1], results[3], **close)
    matrix, bias, inputs = random(600, 300) / 40, random(600), random(batch * width, 300)
    for extra in (None, bias):
        for activation in ("silu", "gelu"):
            one, two = (kernels.gated(inputs, matrix, extra, activation) for kernels in (ours, theirs))
            torch.testing.assert_close(one, two, **close)
    position = torch.tensor([[0], [90], [130]], device=device)[:batch] + torch.arange(width, device=device)
    angles = torch.rand(slots, dim // 2, device=device) * 6
    rotary = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    qkv, cache = torch.randn(2, batch * width, (heads + 2 * kv) * dim, device=device), random(2, batch, kv, slots, dim)
    for own in (
        HeadNorms(random(dim), random(dim), 1e-5, dim),
        HeadNorms(wide_heads[0], wide_heads[1], 1e-5, dim - 4),
        HeadNorms(random(heads, dim), random(kv, dim), 1e-5, dim - 4),
    ):
        results = []
        for kernels in (ours, theirs):
            keys, values = cache.clone()
            q = kernels.rotate(qkv, rotary, (position, position), (keys, values), own)
            results.append((q, keys, values))
        for found, wanted in zip(*results, strict=True):
            torch.testing.assert_close(found, wanted, **close)
    q = random(batch, width, heads, dim)
    for scoring in (Scoring(0.2, 7), Scoring(0.2, 40), Scoring(0.3, 0, 2.0), Scoring(0.3, 33, 2.0), Scoring(0.2, 1)):
        one, two = (kernels.attention(q, cache[0], cache[1], position, scoring) for kernels in (ours, theirs))
        torch.testing.assert_close(one, two, **close)


DESCRIBED = ((1, 64), (11, 16), (5, 32))
"""Tokens of a row, and the width of heads: three rows are fewer than `FEW` and more; the last for GPUs alone."""


APPROVALS = (
    (torch.float32, FEATURES[0], None, SPECIAL), (torch.float32, FEATURES[1], None, ()), (torch.float32, FEATURES[2], None, SPECIAL),
    (torch.bfloat16, FEATURES[2], 14.0, SPECIAL),
)  # fmt: skip
"""Not all of them: Triton's interpreter is slow."""


def check_all(device: torch.device) -> None:
    torch.manual_seed(0)
    for shape in PASSES:
        check_pass(device, torch.float32, *shape)
    for shape in DESCRIBED[: None if device.type == "cuda" else -1]:
        check_described(device, torch.float32, *shape)
    check_price(device)
    for dtype in (torch.float32, torch.bfloat16):
        check_top(device, dtype)
        for features in FEATURES:
            for limit in (None, 14.0):
                check_scores(device, dtype, features, limit)
    check_step(device)
    check_all_sampling(device)
    for approval in APPROVALS:
        check_approval(device, *approval)


if __name__ == "__main__":
    check_all(torch.device("cpu"))
    print("the kernels agree")
