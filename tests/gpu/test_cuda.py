"""The CUDA engine on a real device: kernels, equality with transformers, graphs, distributions. Skipped without a GPU."""

from __future__ import annotations

from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from scipy.stats import chi2

from conftest import VOCAB, tiny_head, tiny_model
from editing import NoToken2x, greedy_under
from equality import greedy
from fake_judge import constant_judge
from families import FAMILIES, family_model
from kernel_checks import check_all, check_described, check_pass
from proposals import ARBITRARY, answers_between_captures, check_proposals, cycles, head_logits, prompts_of, requests_of
from selfjudge.decoding.admission import AdmissionQueue, Request
from selfjudge.decoding.capture import capture_cycles, capture_prompts
from selfjudge.decoding.cycle import CycleSize
from selfjudge.decoding.loop import decode
from selfjudge.decoding.rules import (
    AcceptanceRule,
    Exact,
    FLy,
    Judged,
    Margin,
    Relaxed,
    SpeculativeSampling,
    TopK,
    Typical,
)
from selfjudge.decoding.rules_by_row import RowRules
from selfjudge.decoding.sampling import Sampling
from selfjudge.engine.cuda.engine import CudaEngine
from selfjudge.engine.cuda.kernels_torch import Kernels
from selfjudge.engine.draft import BatchEngines
from selfjudge.engine.prefixes import PrefixStore
from selfjudge.engine.select import PairEngines, make_draft, make_engine
from selfjudge.errors import SelfJudgeError
from selfjudge.judge.config import FEATURES, JudgeConfig, feature_width
from selfjudge.judge.model import Judge
from selfjudge.models.load import Draft, Target, as_draft
from selfjudge.models.pair import Pair
from selfjudge.ops import argmax_checked, has_non_finite, replace_non_finite

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("error:using the reference engine"),  # a model it cannot run would test another engine
]
CUDA = torch.device("cuda")
WIDER = {"hidden_size": 64}  # heads are 16 wide, or 8 and padded


def run(
    target, draft, prompts, rule: AcceptanceRule, kind: str = "auto", *, max_new_tokens=256, seeds=None, **options
) -> list[list[int]]:
    engines = BatchEngines(
        make_engine(target, hidden=rule.judge is not None, features=as_draft(draft).features, kind=kind),
        draft and make_draft(draft, target, kind=kind),
    )
    tokens: list[list[int]] = [[] for _ in prompts]
    for step in decode(engines, requests_of(prompts, max_new_tokens, seeds), rule, **options):
        for e in step.emissions:
            tokens[e.row] += e.tokens
    return tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("batch", "width", "heads", "kv", "dim"),
    [(3, 5, 6, 2, 64), (80, 1, 9, 3, 64), (2, 70, 4, 4, 128), (1, 1, 12, 2, 128), (33, 4, 12, 2, 64), (1, 9, 4, 1, 64)],
)
def test_triton_kernels_agree_with_torch(dtype, batch: int, width: int, heads: int, kv: int, dim: int) -> None:
    torch.manual_seed(0)
    check_pass(CUDA, dtype, batch, width, heads, kv, dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "dim"), [(1, 64), (4, 256), (70, 128)])
def test_steps_that_llama_does_not_have_agree_with_torch(dtype, width: int, dim: int) -> None:
    torch.manual_seed(0)
    check_described(CUDA, dtype, width, dim)


@pytest.mark.parametrize("rows", [1, 11, 17, 32])
@pytest.mark.parametrize("inputs", [64, 576, 1536, 3000, 8960])
def test_products_of_few_rows(rows: int, inputs: int) -> None:
    """Every way to cut a product: one part, several, tails that are no multiple of a tile."""
    from selfjudge.engine.cuda.kernels_triton import TritonKernels

    torch.manual_seed(0)
    ours, theirs = TritonKernels(CUDA), Kernels()
    for outputs in (1000, 1536):
        x, w = (torch.randn(n, inputs, device=CUDA, dtype=torch.bfloat16) / 8 for n in (rows, outputs))
        bias = torch.randn(outputs, device=CUDA, dtype=torch.bfloat16)
        exact = theirs.product(x.float(), w.float(), bias.float())[0]
        torch.testing.assert_close(ours.product(x, w, bias).sum(0), exact, atol=2e-2, rtol=2e-2)
        exact = theirs.gated(x.float(), w.float())
        torch.testing.assert_close(ours.gated(x, w).float(), exact, atol=5e-2, rtol=3e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_bfloat16_passes_are_as_exact_as_torch_operations(family: str) -> None:
    """Logits of whole passes through the split products and dependent launches, recorded and replayed, one engine for all:
    not further from float32 than the same passes by torch's own operations, up to luck."""
    model = family_model(family, seed=1, **WIDER).to(CUDA, torch.bfloat16)
    whole = family_model(family, seed=1, **WIDER)
    whole.load_state_dict(model.state_dict())
    fast, plain, exact = CudaEngine(model), CudaEngine(model), CudaEngine(whole.to(CUDA, torch.float32))
    for engine in (plain, exact):
        engine.__dict__["_kernels"] = Kernels()
    for batch, lengths in ((1, [40]), (1, [50]), (1, [37]), (3, [5, 33, 20]), (3, [9, 34, 21]), (1, [60])):
        prompts = prompts_of(lengths)
        tokens = torch.tensor([[0] * (max(lengths) - len(p)) + p for p in prompts], device=CUDA)
        counts = torch.tensor(lengths, device=CUDA)
        step = torch.randint(3, VOCAB, (batch, 4), device=CUDA)
        found = []
        for engine in (fast, plain, exact):
            engine.reserve(batch, 80)
            first = engine.prefill(tokens, counts).logits.clone()
            found.append((first.float(), engine.extend(step).logits.clone().float()))
        for ours, theirs, true in zip(*found, strict=True):
            assert (ours - true).abs().mean() < 2 * (theirs - true).abs().mean() + 0.01
            assert (ours - true).abs().max() < 3 * (theirs - true).abs().max() + 0.05


def test_one_engine_serves_batches_of_many_sizes() -> None:
    """The same engines, batch after batch: recordings and recorded prefills are used again, answers stay those of reference."""
    target, draft = (tiny_model(seed=s, hidden_size=64, head_dim=16).to(CUDA) for s in (1, 2))
    engines, rule = BatchEngines(CudaEngine(target), make_draft(draft, target)), Exact()
    for lengths in ([40], [50], [3, 20, 33, 9, 7], [45], [5, 21, 30, 8, 6], [2, 70, 66], [41]):
        prompts = prompts_of(lengths)
        tokens: list[list[int]] = [[] for _ in prompts]
        for step in decode(engines, requests_of(prompts, 20), rule, gamma=3):
            for e in step.emissions:
                tokens[e.row] += e.tokens
        assert tokens == run(target, draft, prompts, Exact(), "reference", gamma=3, max_new_tokens=20)


def test_judge_and_mark_as_kernels() -> None:
    check_all(CUDA)


@pytest.mark.parametrize("size", [1000, 49152, 151936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_most_likely_token_in_two_kernels(dtype, size: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 2, size, device=CUDA, dtype=dtype)
    logits[0, 0, 7], logits[0, 1, size - 1], logits[1, 0], logits[1, 1] = torch.nan, torch.inf, -torch.inf, torch.nan
    choice, odd = argmax_checked(logits)
    assert torch.equal(choice.cpu(), replace_non_finite(logits.float()).argmax(-1).cpu())
    assert torch.equal(odd.cpu(), has_non_finite(logits).cpu())
    assert odd.tolist() == [[True, True], [False, True], [False, False]]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("gamma", [0, 1, 5])
def test_exact_equals_transformers(family: str, gamma: int) -> None:
    target, draft = (family_model(family, seed=seed, **WIDER).to(CUDA) for seed in (1, 2))
    prompts = prompts_of([3, 11, 1, 7, 40])
    tokens = run(target, draft if gamma else None, prompts, Exact(), gamma=gamma, max_new_tokens=30)
    for prompt, found in zip(prompts, tokens, strict=True):
        ids = torch.tensor([prompt], device=CUDA)
        out = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=30,
            eos_token_id=[-1],
            pad_token_id=0,
        )
        assert found == out[0, len(prompt) :].tolist()


def test_rules_agree_with_the_reference_engine() -> None:
    target, draft = (tiny_model(seed=s, hidden_size=64, head_dim=16).to(CUDA) for s in (1, 2))
    prompts = prompts_of([5, 9, 30])
    torch.manual_seed(0)
    judge = Judge(constant_judge(0.5, 64).config, weight=torch.randn(64)).to(CUDA)
    wide = [Judge(JudgeConfig(64, features=f), torch.randn(feature_width(f, 64))) for f in FEATURES]
    for rule in (
        Judged(judge, 0.4, special=(2,)), Judged(judge, 0.4, special=(2, *range(20, 60))),
        TopK(2), TopK(3, guard=True, special=(2, *range(20, 60))), Relaxed(), Typical(), Margin(), FLy(0.1, 2), Margin(price=0.4),
        Judged(judge, price=0.5, special=(2, *range(20, 60))), SpeculativeSampling(Sampling(0.8, top_p=0.9)),
        Judged(judge, 0.6, SpeculativeSampling(Sampling(0.8))), *(Judged(one.to(CUDA), 0.5) for one in wide),
    ):  # fmt: skip
        options = {"gamma": 4, "max_new_tokens": 40, "eos_ids": (2,), "seeds": [1, 2, 3]}
        assert run(target, draft, prompts, rule, **options) == run(target, draft, prompts, rule, "reference", **options)


def test_a_mixed_batch_gives_what_it_gives_on_the_reference_engine() -> None:
    """Twice, so that captured cycles serve another mix of rows; unlike rules, γ and temperatures, sampled by seed."""
    judge = constant_judge(0.7, 64)
    rules = [Exact(), Margin(2.0), Margin(price=1.5), Judged(judge, 0.5, special=(7,), strict_start=4),
             Judged(judge, price=0.5), SpeculativeSampling(Sampling(0.9)), SpeculativeSampling(Sampling(1.3, 0.8, 9))]  # fmt: skip
    prompts, made = prompts_of([4, 40, 7, 1, 12, 5, 9]), {}
    for device, kind in (("cpu", "reference"), ("cuda", "cuda")):
        target, draft = (tiny_model(seed=s, hidden_size=64, head_dim=16).to(device) for s in (1, 2))
        own = judge.to(device)
        engines = BatchEngines(make_engine(target, hidden=True, kind=kind), make_draft(draft, target, kind=kind))
        shared = RowRules(own, (7,))
        for turn in range(2):
            order = rules[turn:] + rules[:turn]
            requests = [
                Request(p, 14 + 3 * i, i, rule=rule, gamma=1 + (i + turn) % 4)
                for i, (p, rule) in enumerate(zip(prompts, order, strict=True))
            ]
            queue, tokens = AdmissionQueue(4, 90), {}
            for number, step in enumerate(decode(engines, requests[:2], shared, gamma=5, queue=queue)):
                for emission in step.emissions:
                    tokens.setdefault(emission.row, []).extend(emission.tokens)
                if number in (1, 4):
                    for request in requests[2:5] if number == 1 else requests[5:]:
                        queue.put(request)
            made[kind, turn] = tokens
    for turn in range(2):
        assert made["cuda", turn] == made["reference", turn]
        assert len(made["cuda", turn]) == len(rules)


def test_many_rows_answer_as_the_reference_engine() -> None:
    target = tiny_model(seed=1, hidden_size=64, head_dim=16).to(CUDA)
    draft = tiny_model(seed=1, hidden_size=64, head_dim=16).to(CUDA)
    with torch.no_grad():
        for p in draft.parameters():
            p.add_(torch.randn_like(p) * 0.05 * p.std().nan_to_num(0.0))
    prompts = prompts_of([3 + i % 20 for i in range(40)])
    engines = BatchEngines(CudaEngine(target), make_draft(draft, target))
    for _ in range(2):
        tokens: list[list[int]] = [[] for _ in prompts]
        for step in decode(engines, requests_of(prompts, 40), Exact()):
            for e in step.emissions:
                tokens[e.row] += e.tokens
        assert tokens == run(target, None, prompts, Exact(), "reference", gamma=0, max_new_tokens=40)


@pytest.mark.parametrize(("dtype", "tie"), [(torch.float32, 1e-3), (torch.bfloat16, 0.5)])
def test_a_head_proposes_what_the_module_would_in_recorded_cycles_of_changing_length(dtype, tie: float) -> None:
    target = tiny_model(seed=1, hidden_size=64, head_dim=16, num_hidden_layers=5).to(CUDA, dtype)
    head, prompts = tiny_head(target), prompts_of([3, 11, 1, 7])
    made = cycles(target, head, prompts, [3, 3, 0, 0, 5, 3, 1, 0, 2, 2, 5], ARBITRARY, kind="cuda")
    check_proposals(made, prompts, partial(head_logits, head, target), tie)


@pytest.mark.parametrize("rule", [Exact(), SpeculativeSampling(Sampling(0.9)), TopK(4)], ids=lambda r: r.name)
def test_a_head_on_the_engine_gives_the_tokens_of_the_reference_engine(rule: AcceptanceRule) -> None:
    """And under a lossless rule those of plain decoding."""
    target = tiny_model(seed=1, hidden_size=64, head_dim=16, num_hidden_layers=5).to(CUDA)
    head, prompts, options = (
        tiny_head(target),
        prompts_of([3, 11, 1, 40]),
        {"max_new_tokens": 30, "seeds": [1, 2, 3, 4]},
    )
    fast = run(target, head, prompts, rule, gamma=4, **options)
    assert fast == run(target, head, prompts, rule, "reference", gamma=4, **options)
    if isinstance(rule, Exact):
        assert fast == run(target, None, prompts, rule, gamma=0, **options)


@pytest.mark.parametrize(
    "rule", [Exact(), SpeculativeSampling(Sampling(0.9)), TopK(4), Margin(price=1.5), FLy(0.1, 1)], ids=lambda r: r.name
)
@pytest.mark.parametrize("draft_kind", ["layers", "eagle3"])
def test_limited_rows_give_the_tokens_of_the_reference_engine(rule: AcceptanceRule, draft_kind: str) -> None:
    """Every row verifies another number of drafts in each cycle; few and many rows, captured cycles replayed."""
    target = tiny_model(seed=1, hidden_size=64, head_dim=16, num_hidden_layers=5).to(CUDA)
    draft = tiny_head(target) if draft_kind == "eagle3" else tiny_model(seed=2, hidden_size=64, head_dim=16).to(CUDA)
    for rows in (4, 40):
        prompts, random = prompts_of([3, 11, 1, 7] * (rows // 4)), torch.Generator().manual_seed(rows)
        limits = [torch.randint(0, 5, (rows,), generator=random).tolist() for _ in range(5)] * 3
        found, wanted = (
            cycles(target, draft, prompts, [4] * 15, rule, kind=kind, limits=limits) for kind in ("cuda", "reference")
        )
        others = sum(mine != theirs for mine, theirs in zip(found, wanted, strict=True))
        assert others <= (rule.sampling is not None and rows == 40)  # of 600 draws one may lie on an edge


def test_sampled_rows_of_captured_mixed_batches_have_the_targets_distribution() -> None:
    """By kernels, with a head that knows some tokens; a third of the rows is greedy."""
    target = tiny_model(seed=11, vocab_size=5, initializer_range=0.15, num_hidden_layers=5, **WIDER).to(CUDA)
    rules = [SpeculativeSampling(Sampling(0.7)), SpeculativeSampling(Sampling(1.3)), Exact()]
    head = tiny_head(target, draft_vocab_size=3)
    requests = [Request([0, 0, 0], 3, i, rule=rules[i % 3], gamma=2) for i in range(6000)]
    engines = BatchEngines(make_engine(target, features=as_draft(head).features), make_draft(head, target))
    tokens = defaultdict(list)
    for step in decode(engines, requests, RowRules(), gamma=2):
        for emission in step.emissions:
            tokens[emission.row] += emission.tokens
    every = torch.cartesian_prod(*[torch.arange(5, device=CUDA)] * 3)
    logits = target(torch.nn.functional.pad(every, (3, 0))).logits[:, 2:-1].detach()
    for which, t in enumerate((0.7, 1.3)):
        p = (logits.double() / t).softmax(-1).gather(-1, every[..., None]).squeeze(-1).prod(1).tolist()
        made = Counter(tuple(tokens[i]) for i in range(which, 6000, 3))
        cells = [(made[tuple(s)], 2000 * q) for s, q in zip(every.tolist(), p, strict=True) if 2000 * q >= 5]
        cells.append((2000 - sum(n for n, _ in cells), 2001 - sum(q for _, q in cells)))  # never 0 of 0
        assert chi2.sf(sum((n - q) ** 2 / q for n, q in cells), len(cells) - 1) > 1e-3


def test_rows_that_finish_at_different_times() -> None:
    """Sixteen rows with different limits: the batch is halved again and again, answers stay the same."""
    target = tiny_model(seed=3, hidden_size=64, head_dim=16).to(CUDA)
    prompts = prompts_of([90 - 4 * i for i in range(16)])  # the context window ends them at 6, 10, 14 … tokens
    fast = run(target, target, prompts, Exact(), gamma=3, max_new_tokens=60)
    assert [len(t) for t in fast] == [min(60, 6 + 4 * i) for i in range(16)]
    assert fast == run(target, target, prompts, Exact(), "reference", gamma=3, max_new_tokens=60)


def test_a_draft_that_the_engine_cannot_run_takes_the_target_along() -> None:
    """An activation without a kernel: both models then run on the reference engine."""
    target = tiny_model(seed=1, hidden_size=64, head_dim=16).to(CUDA)
    draft = tiny_model(seed=2, hidden_size=64, hidden_act="relu").to(CUDA)
    with pytest.warns(UserWarning, match="using the reference engine: its activation is 'relu'"):  # said once a process
        assert PairEngines(Pair("p", Target(target), Draft(draft), None)).kind == "reference"  # type: ignore[arg-type]
    with pytest.raises(SelfJudgeError, match="use reference for both"):
        BatchEngines(make_engine(target), make_draft(draft, target, kind="reference"))


def test_the_engine_is_chosen_by_itself() -> None:
    assert isinstance(make_engine(tiny_model(hidden_size=64, head_dim=16).to(CUDA)), CudaEngine)


@pytest.mark.parametrize("head_dim", [12, 24, 96])
def test_heads_of_any_width_are_padded(head_dim: int) -> None:
    """Phi-3's heads are 96 wide."""
    target = tiny_model(seed=1, hidden_size=64, head_dim=head_dim).to(CUDA)
    engine = CudaEngine(target)
    assert engine.weights.dim == 1 << (head_dim - 1).bit_length()
    tokens = torch.randint(3, VOCAB, (2, 40), device=CUDA)
    with torch.inference_mode():
        torch.testing.assert_close(engine.extend(tokens).logits, target(tokens).logits, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("rule", [Exact(), SpeculativeSampling(Sampling(0.9))], ids=lambda r: r.name)
def test_rows_that_enter_recorded_batches_get_what_they_would_get_alone(rule: AcceptanceRule) -> None:
    target, draft = (tiny_model(seed=s, hidden_size=64, head_dim=16).to(CUDA) for s in (1, 2))
    prompts, limits = prompts_of([4, 40, 7, 1, 12, 5, 9]), [30, 8, 25, 1, 12, 20, 17]
    alone = [
        run(target, draft, [p], rule, gamma=3, max_new_tokens=n, seeds=[s])[0]
        for s, (p, n) in enumerate(zip(prompts, limits, strict=True))
    ]
    waiting = [Request(p, n, s) for s, (p, n) in enumerate(zip(prompts, limits, strict=True))]
    queue, tokens = AdmissionQueue(rows=4, length=80), {}
    engines = BatchEngines(make_engine(target), make_draft(draft, target))
    steps = decode(engines, waiting[:1], rule, gamma=3, queue=queue)
    for number, step in enumerate(steps):
        for emission in step.emissions:
            tokens.setdefault(emission.row, []).extend(emission.tokens)
        for i in {0: [1, 2], 3: [3, 4], 5: [5, 6]}.get(number, ()):
            queue.put(waiting[i])
    assert [tokens[i] for i in range(len(prompts))] == alone


def test_edits_act_on_the_buffers_of_captured_cycles() -> None:
    """Twice, and with other cycles captured in between: they use the same memory between two cycles."""
    target, draft = (tiny_model(seed=s, hidden_size=64, head_dim=16) for s in (1, 2))
    prompts, limits = prompts_of([4, 40, 7]), [30, 12, 25]
    expected = [greedy_under(target, p, n, NoToken2x()) for p, n in zip(prompts, limits, strict=True)]
    plain = greedy(target, prompts[1], limits[1])
    engines = BatchEngines(make_engine(target.to(CUDA)), make_draft(draft.to(CUDA), target))
    for _ in range(2):
        requests = [Request(p, n, edits=(NoToken2x(),)) for p, n in zip(prompts, limits, strict=True)]
        requests[1] = requests[1]._replace(edits=())
        tokens: list[list[int]] = [[], [], []]
        for step in decode(engines, requests, Exact(), gamma=3):
            for emission in step.emissions:
                tokens[emission.row] += emission.tokens
            capture_cycles(engines, Exact(), 2, map(CycleSize, [1, 2, 4]))
        assert tokens == [expected[0], plain, expected[2]]


@pytest.mark.parametrize("rule", [Exact(), SpeculativeSampling(Sampling(0.9))], ids=lambda r: r.name)
def test_a_long_prompt_is_read_in_chunks_between_recorded_cycles(rule: AcceptanceRule) -> None:
    """Twice on the same engines: the second time chunks and cycles are replayed, and nothing was recorded anew."""
    target, draft = (tiny_model(seed=s, hidden_size=64, head_dim=16).to(CUDA) for s in (1, 2))
    requests = [Request(p, 6, seed) for seed, p in enumerate(prompts_of([70, 4, 66, 3]))]
    alone = [
        run(target, draft, [r.prompt], rule, gamma=3, max_new_tokens=r.max_new_tokens, seeds=[r.seed])[0]
        for r in requests
    ]
    engines = BatchEngines(make_engine(target), make_draft(draft, target))
    engines.target.chunk = 4  # times four while nobody else is there
    recorded = []
    for _ in range(2):
        queue, tokens, order = AdmissionQueue(rows=4, length=90), {}, []
        for number, step in enumerate(decode(engines, requests[:1], rule, gamma=3, queue=queue)):
            for emission in step.emissions:
                order.append(emission.row)
                tokens.setdefault(emission.row, []).extend(emission.tokens)
            for request in requests[1:] if number == 0 else ():
                queue.put(request)
        assert [tokens[i] for i in range(len(requests))] == alone
        assert list(dict.fromkeys(order))[-1] in (0, 2)
        assert order.index(1) < order.index(0)
        recorded.append((engines.target.version, set(engines.target.captured_cycles)))
    assert recorded[0] == recorded[1]


@pytest.mark.parametrize("rule", [ARBITRARY, SpeculativeSampling(Sampling(0.9))], ids=lambda r: r.name)
def test_captures_and_timings_between_steps_do_not_change_answers(rule: AcceptanceRule) -> None:
    target = tiny_model(seed=1, hidden_size=64, head_dim=16).to(CUDA)
    for draft in (tiny_model(seed=2, hidden_size=64, head_dim=16).to(CUDA), tiny_head(target)):
        plain, among = (answers_between_captures(target, draft, rule, captures=c) for c in (False, True))
        assert among == plain


@pytest.mark.parametrize("head", [False, True])
def test_prompts_are_read_by_passes_that_were_captured_before_the_first(head: bool) -> None:
    target = tiny_model(seed=1, hidden_size=64, head_dim=16).to(CUDA)
    draft = tiny_head(target) if head else tiny_model(seed=2, hidden_size=64, head_dim=16).to(CUDA)
    prompts = prompts_of([70, 5, 40, 30])
    alone = [run(target, draft, [prompt], Exact(), gamma=2, max_new_tokens=9)[0] for prompt in prompts]
    engines = BatchEngines(
        make_engine(target, features=as_draft(draft).features, kind="cuda"), make_draft(draft, target, kind="cuda")
    )
    engines.reserve(4, 130)
    capture_prompts(engines, 4, 130)
    kept = [other for engine in engines.engines for other in engine.asides]
    known = [(other.version, set(other._prefills)) for other in kept]
    queue, tokens = AdmissionQueue(rows=4, length=120), {}
    for prompt in prompts[1:]:
        queue.put(Request(prompt, 9))
    for step in decode(engines, [Request(prompts[0], 9)], Exact(), gamma=2, queue=queue):
        for emission in step.emissions:
            tokens.setdefault(emission.row, []).extend(emission.tokens)
    assert [tokens[row] for row in range(4)] == alone
    assert [(other.version, set(other._prefills)) for other in kept] == known  # none was captured or lost since


def test_who_leaves_between_chunks_leaves_the_engine_whole() -> None:
    target = tiny_model(seed=1, hidden_size=64, head_dim=16).to(CUDA)
    prompts = prompts_of([70, 5])
    alone = run(target, None, prompts[1:], Exact(), gamma=0, max_new_tokens=9)[0]
    engine = make_engine(target)
    engine.chunk = 4  # times four while nobody else is there
    queue, cancelled, tokens = AdmissionQueue(rows=1, length=90), set(), {}
    for number, step in enumerate(
        decode(BatchEngines(engine), [Request(prompts[0], 9)], Exact(), gamma=0, queue=queue, cancelled=cancelled)
    ):
        for emission in step.emissions:
            tokens.setdefault(emission.row, []).extend(emission.tokens)
        if number == 1:
            queue.put(Request(prompts[1], 9))
            cancelled.add(0)
    assert tokens == {1: alone}


def test_threads_on_one_device_answer_as_one_would() -> None:
    """Each captures its own cycles while the other decodes, takes memory and frees some."""
    target, draft = (tiny_model(seed=s, hidden_size=64, head_dim=16).to(CUDA) for s in (1, 2))
    prompts, gammas = prompts_of([4, 40, 7]), (1, 2, 3, 5)

    def answers(_: int) -> list[list[list[int]]]:
        return [run(target, draft, prompts, Exact(), gamma=gamma, max_new_tokens=30) for gamma in gammas]

    expected = answers(0)
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(answers, range(6))) == [expected] * 6


def test_a_capture_that_found_no_memory_hinders_no_other() -> None:
    """Its memory pool has no graph any more, and torch takes none back."""
    engine, tokens = CudaEngine(tiny_model(seed=1, **WIDER).to(CUDA)), torch.full((1, 3), 7, device=CUDA)
    engine.reserve(1, 40)

    def run_out() -> None:
        if torch.cuda.is_current_stream_capturing():
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        engine.capture([lambda: engine.extend(tokens) and None, run_out], engine.state())
    logits: list[torch.Tensor] = []
    (replay,) = engine.capture([lambda: logits.append(engine.extend(tokens).logits)], engine.state())
    replay()
    assert torch.equal(logits[-1], logits[0])
    assert engine.lengths.tolist() == [3]


def test_prefixes_that_were_read_are_found_on_the_device() -> None:
    """Three times the same prompts, the last two behind blocks, by then through captured prefills."""
    target, draft = tiny_model(seed=1, **WIDER), tiny_model(seed=2, **WIDER)
    prompts = prompts_of([70, 40, 9])
    expected = [greedy(target, prompt, 20) for prompt in prompts]
    target, draft = target.to(CUDA), draft.to(CUDA)
    store = PrefixStore(1 << 28)
    engines = BatchEngines(
        make_engine(target, kind="cuda"), make_draft(draft, target, kind="cuda"), prefixes=store, spaces=("1", "2")
    )
    for cached in ((0, 0, 0), (63, 31, 0), (63, 31, 0)):
        tokens: list[list[int]] = [[] for _ in prompts]
        found: dict[int, int] = {}
        for step in decode(engines, requests_of(prompts, 20), Exact(), gamma=3, queue=AdmissionQueue(4, 96)):
            found |= step.cached
            for e in step.emissions:
                tokens[e.row] += e.tokens
        assert tokens == expected
        assert found == dict(enumerate(cached))
