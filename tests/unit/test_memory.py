"""What models need of memory, and what happens where it is not there: rows wait, and one request ends, not a server."""

from __future__ import annotations

import json
import queue as queues
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import VOCAB, tiny_head, tiny_model
from fake_gguf import write_model
from families import family_model
from selfjudge.decoding import loop, prefill as prefill_module
from selfjudge.decoding.admission import AdmissionQueue, Request
from selfjudge.decoding.loop import decode
from selfjudge.decoding.prefill import passes
from selfjudge.decoding.rule_parser import RuleRequest
from selfjudge.decoding.rules import AcceptanceRule, Exact, SpeculativeSampling
from selfjudge.decoding.sampling import Sampling
from selfjudge.decoding.text import Batch, generate, stream
from selfjudge.engine import draft as draft_module
from selfjudge.engine.cpu.library import library
from selfjudge.engine.cpu.weights import PackedWeights
from selfjudge.engine.cuda import engine as cuda
from selfjudge.engine.cuda.engine import CudaEngine
from selfjudge.engine.cuda.kernels_torch import Kernels
from selfjudge.engine.draft import BatchEngines
from selfjudge.engine.select import PairEngines, make_draft, make_engine
from selfjudge.errors import SelfJudgeError
from selfjudge.integrations.server.config import ServerConfig
from selfjudge.integrations.server.jobs import CompletionJob, Update
from selfjudge.integrations.server.operation import Metrics
from selfjudge.integrations.server.rules import Rules
from selfjudge.integrations.server.scheduler import Scheduler
from selfjudge.models import device, memory
from selfjudge.models.gguf import open_model
from selfjudge.models.load import as_draft
from selfjudge.models.memory import measure_draft, measure_need, outline_model
from selfjudge.models.pair import Pair
from selfjudge.types import Step

MODELS = tiny_model(seed=1, max_position_embeddings=600), tiny_model(seed=2, max_position_embeddings=600)
ROW = sum(256 * 2 * model.config.num_hidden_layers * 2 * 8 * 4 for model in MODELS)
"""Bytes of the smallest row of both models: 256 slots, keys and values, 2 heads of 8 columns, float32."""
LOGITS = 3 * memory.LOGIT_BYTES * VOCAB  # of a row with two drafts


# ------------------------------------------------------------------------------------------------------ the estimate


def test_packed_weights_are_counted_as_the_kernel_packs_them() -> None:
    kernel = library("native")
    for kind, size in memory.PACKED.items():
        assert kernel.packed_bytes(kind, 4096, 512) == 512 * size, kind


@pytest.mark.parametrize("tied", [True, False])
def test_floats_are_counted_once(tied: bool) -> None:
    model = tiny_model(hidden_size=64, head_dim=16, tie_word_embeddings=tied)
    assert measure_need(model, "float32", "cpu").weights == 4 * model.num_parameters()
    assert measure_need(model, "bfloat16", "cuda").weights == 2 * model.num_parameters()


def test_heads_that_are_arranged_for_the_kernels_are_counted_again() -> None:
    """Heads that are padded, or of which some columns are not rotated."""
    model = family_model("Phi-3 and 4")
    config = model.config
    width = max(16, 1 << (memory.head_width(config) - 1).bit_length())
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    heads += config.num_attention_heads if width > memory.head_width(config) else 0
    extra = config.num_hidden_layers * config.hidden_size * heads * width
    assert measure_need(model, "bfloat16", "cuda").weights == 2 * (model.num_parameters() + extra)


def test_blocks_and_int8_are_counted_as_they_are_packed(tmp_path: Path) -> None:
    model = tiny_model(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2)
    packed = PackedWeights(model, int8=True)
    floats = sum(p.numel() for p in model.parameters()) * 4
    assert measure_need(model, "int8", "cpu").weights == pytest.approx(floats + packed.bytes_per_pass, rel=0.02)
    write_model(
        model,
        tmp_path / "m.gguf",
        dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_gate", "ffn_down"), "Q4_0"),
    )
    outline = open_model(tmp_path / "m.gguf")
    packed = PackedWeights(outline, int8=False)
    kept = sum(part.nbytes for part in packed.kept) - (packed._end - packed._free)
    assert measure_need(outline, "q4", "cpu").weights == pytest.approx(kept, rel=0.02)


def test_a_token_is_what_the_caches_reserve() -> None:
    engine = CudaEngine(MODELS[0])
    engine.reserve(3, 500)
    need = measure_need(MODELS[0], "float32", "cpu")
    assert engine.cache_bytes == 3 * engine.row_bytes(500) == 3 * 512 * need.token
    assert need.rows_that_fit(254, 10 * need.row(254)) == 10
    assert need.rows_that_fit(254, need.row(254) - 1) == 0


def test_a_pass_holds_as_many_tokens_as_the_estimate_counts() -> None:
    rows = [memory.PASS_TOKENS // 3] * 7 + [8] * 100
    parts = [part for part, _ in passes(rows, max(rows))]
    assert [row for part in parts for row in range(len(rows))[part]] == list(range(len(rows)))
    assert all(max(rows[part]) * len(rows[part]) <= memory.PASS_TOKENS for part in parts)


def test_a_cache_without_memory_for_its_tables_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, token, failures = CudaEngine(MODELS[0]), torch.tensor([[5], [6]]), iter([True])
    tables = type(engine.weights.shape).rotary_tables

    def run_out(*arguments: Any) -> Any:
        if next(failures, False):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return tables(*arguments)

    monkeypatch.setattr(type(engine.weights.shape), "rotary_tables", run_out)
    with pytest.raises(torch.OutOfMemoryError):
        engine.reserve(2, 40)
    assert engine.rows_held(40) == 0
    engine.reserve(2, 40)
    assert torch.equal(engine.extend(token).logits, CudaEngine(MODELS[0]).extend(token).logits)


def test_a_draft_is_a_head_or_a_model(head_folder: Path, checkpoints: dict[str, str]) -> None:
    target, head = outline_model(checkpoints["target"]), tiny_head(tiny_model())
    need = measure_draft(str(head_folder), target, "float32", "cpu")
    assert need.token == measure_need(target, "float32", "cpu").token // target.config.num_hidden_layers
    assert need.weights == 4 * (sum(p.numel() for p in head.parameters()) + len(head.draft_ids) * 32)
    small = measure_draft(checkpoints["draft"], target, "float32", "cpu")
    assert small.weights == 4 * outline_model(checkpoints["draft"]).num_parameters()


@pytest.mark.parametrize(
    ("text", "size"), [("0.9", 0.9), ("1", 1), ("8GB", 8e9), ("1.5 GB", 1.5e9), ("2GiB", 2 * 1024**3), ("500MB", 5e8)]
)
def test_a_share_or_a_size(text: str, size: float) -> None:
    assert device.parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "much", "8", "8 apples", "GB", "nan"])
def test_what_is_neither_is_refused(text: str) -> None:
    with pytest.raises(SelfJudgeError, match=r"a share such as '0\.9' or a size such as '8GB'"):
        device.parse_memory(text)


def test_the_limit_of_a_device(monkeypatch: pytest.MonkeyPatch, checkpoints: dict[str, str]) -> None:
    with pytest.raises(SelfJudgeError, match="`gpu_memory` needs a CUDA device, not cpu"):
        Pair.load(checkpoints["target"], device="cpu", needs_draft=False, gpu_memory="0.5")
    cuda, given = torch.device("cuda"), []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("P", (), {"total_memory": 10 * 10**9}))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, _: given.append(share))
    for text in ("0.5", "8GB"):
        device.limit_memory(cuda, text)
    assert given == [0.5, 0.8]
    with pytest.raises(SelfJudgeError, match="11GB is more than the 10 GB"):
        device.limit_memory(cuda, "11GB")


@pytest.mark.parametrize(("free", "left"), [(6e9, 4e9), (1e9, 2e9)])
def test_what_is_left_is_within_the_limit_and_what_others_leave(
    monkeypatch: pytest.MonkeyPatch, free: float, left: float
) -> None:
    known = {"mem_get_info": (int(free), int(10e9)), "memory_reserved": int(5e9), "memory_allocated": int(4e9)}
    for name, value in {**known, "get_per_process_memory_fraction": 0.8}.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert device.free_memory(torch.device("cuda")) == int(left)


# --------------------------------------------------------------------------------------------------------- admission


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Leave so many bytes free, whatever is reserved."""

    def limit(size: float) -> None:
        monkeypatch.setattr(draft_module, "free_memory", lambda _: int(size))

    return limit


def engines(kind: str = "cuda") -> BatchEngines:
    target = make_engine(MODELS[0], kind=kind)
    target.chunk = 512
    return BatchEngines(target, make_draft(MODELS[1], MODELS[0], kind=kind))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def tokens_of(steps: list[Step], row: int) -> list[int]:
    return [token for step in steps for e in step.emissions if e.row == row for token in e.tokens]


def run(requests: list[Request], rows: int = 4, length: int = 200) -> tuple[list[Step], BatchEngines]:
    used, waiting = engines(), AdmissionQueue(rows, length)
    for request in requests[1:]:
        waiting.put(request)
    return list(decode(used, requests[:1], Exact(), gamma=2, queue=waiting)), used


@cache
def answer_alone(prompt: tuple[int, ...], max_new_tokens: int) -> list[int]:
    """By the reference engine, which no test here leaves without memory."""
    return tokens_of(list(decode(engines("reference"), [Request([*prompt], max_new_tokens)], Exact(), gamma=2)), 0)


def assert_answered(steps: list[Step], requests: list[Request], without: tuple[int, ...] = ()) -> None:
    for row, request in enumerate(requests):
        wanted = [] if row in without else answer_alone(tuple(request.prompt), request.max_new_tokens)
        assert tokens_of(steps, row) == wanted, row


@pytest.mark.quick("2")
@pytest.mark.parametrize("fitting", [1, 2])
def test_rows_wait_until_there_is_memory_for_them(limited: Callable[[float], None], fitting: int) -> None:
    limited((fitting + 1.5) * (ROW + LOGITS) / draft_module.CACHE_SHARE)  # one more is read aside
    requests = [Request(prompt_of(7, seed), 12) for seed in range(4)]
    steps, used = run(requests)
    assert_answered(steps, requests)
    assert max(len({e.row for e in step.emissions}) for step in steps) == fitting
    assert used.target.cache_bytes == fitting * ROW // 2


@pytest.mark.quick("1")
@pytest.mark.parametrize("fitting", [1, 2])
def test_a_batch_that_does_not_fit_has_fewer_rows(limited: Callable[[float], None], fitting: int) -> None:
    """Nobody has asked for a queue: all requests are there from the start."""
    limited((fitting + 1.5) * (ROW + LOGITS) / draft_module.CACHE_SHARE)
    requests, used = [Request(prompt_of(120, seed), 12) for seed in range(4)], engines()
    steps = list(decode(used, requests, Exact(), gamma=2))
    assert_answered(steps, requests)
    assert max(len({e.row for e in step.emissions}) for step in steps) == fitting
    assert used.target.cache_bytes == fitting * ROW // 2


@pytest.mark.parametrize("kind", ["plain", "layers", "eagle3"])
def test_what_reading_needs_does_not_grow_with_the_longest_prompt(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One long prompt among short ones: outputs are there for as many tokens as a pass has, not for all padded ones."""
    monkeypatch.setattr(prefill_module, "PASS_TOKENS", 64)
    shapes: list[tuple[int, ...]] = []
    begin = Kernels.begin

    def counted(self: Kernels, tokens: Tensor, *rest: Any) -> Any:
        shapes.append(tuple(tokens.shape))
        return begin(self, tokens, *rest)

    monkeypatch.setattr(Kernels, "begin", counted)
    draft = {"plain": None, "layers": MODELS[1], "eagle3": tiny_head(MODELS[0])}[kind]
    features = () if draft is None else as_draft(draft).features
    used = BatchEngines(
        make_engine(MODELS[0], kind="cuda", features=features),
        None if draft is None else make_draft(draft, MODELS[0], kind="cuda"),
    )
    requests = [Request(prompt_of(length, length), 6) for length in (5, 7, 7, 8, 9, 9, 11, 12, 60)]
    steps = decode(used, requests, Exact(), gamma=0 if draft is None else 2)
    first = next(steps)
    read, real = [rows * columns for rows, columns in shapes], sum(len(request.prompt) for request in requests)
    assert max(read) <= 64
    assert sum(read) < 1.3 * real * len(used.engines)  # a single pass would have 540 each
    assert_answered([first, *steps], requests)


def test_prompts_that_find_no_memory_at_a_time_are_read_apart(full: Callable[..., None]) -> None:
    tried: list[int] = []
    full(lambda tokens: tried.append(tokens) or tokens > 45)  # type: ignore[func-returns-value]
    requests = [Request(prompt_of(20, seed), 12) for seed in range(4)]
    steps = list(decode(engines(), requests, Exact(), gamma=2))
    assert_answered(steps, requests)
    assert max(len({e.row for e in step.emissions}) for step in steps) == 4
    assert tried == [80, 80, 40, 40, 40, 40]  # all at once, then by halves, by target and draft


@pytest.mark.quick("8")
@pytest.mark.parametrize("batch", [4, 8])
def test_answers_that_were_given_up_are_made_once_more(
    tiny_pair: Pair, no_graphs: Callable[..., None], batch: int
) -> None:
    """Two rows find memory for a cycle, and six are asked for: the others are answered after them."""
    tiny_pair.target_model.release()
    asked = [f"w{i} w{i + 1}" for i in range(6)]
    alone = [generate(tiny_pair, text, raw=True, max_new_tokens=8, gamma=2).tokens for text in asked]
    no_graphs(lambda rows: rows > 2)
    answers = generate(tiny_pair, asked, raw=True, max_new_tokens=8, gamma=2, batch=batch, engine="cuda")
    assert [answer.tokens for answer in answers] == alone


def test_caches_that_leave_no_room_for_longer_steps_are_made_again(limited: Callable[[float], None]) -> None:
    """With γ = 20 after 5 the logits take four times as much, beside the same caches."""
    used = engines()
    used.reserve(8, 100)
    row = sum(engine.row_bytes(100) for engine in used.static_engines)
    used.target.vocab_size = row // 64  # as much as a quarter of a row's caches, in these few layers
    logits = memory.LOGIT_BYTES * used.target.vocab_size
    limited(8 * 6 * logits)
    assert used.limit_rows(8, 100, 1.0, step_tokens=6) == 8
    assert used.target.rows_held(100) == 8
    limited(3.5 * (row + 21 * logits))
    assert used.limit_rows(8, 100, 1.0, step_tokens=21) == 3
    assert used.target.rows_held(100) == 0


def test_caches_grow_with_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_module, "START_TOKENS", 100)
    short, long = Request(prompt_of(7), 12), Request(prompt_of(300, 1), 20)
    steps, used = run([short, short], length=590)
    assert used.target.rows_held(100) >= 4
    assert used.target.rows_held(400) < 4
    steps, used = run([short, long, short], length=590)
    assert_answered(steps, [short, long, short])
    assert used.target.rows_held(320) >= 4
    assert used.target.rows_held(590) < 4


def test_a_request_without_memory_is_given_up_and_others_are_answered(
    limited: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_module, "START_TOKENS", 100)
    limited(1.1 * (ROW + LOGITS) / draft_module.CACHE_SHARE)
    requests = [Request(prompt_of(7), 12), Request(prompt_of(300, 1), 20), Request(prompt_of(9, 2), 12)]
    steps, _ = run(requests, length=500)
    assert [step.out_of_memory for step in steps if step.out_of_memory] == [(1,)]
    assert_answered(steps, requests, without=(1,))


def test_kept_caches_take_what_they_have_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that begins anew does not wait for its caches to grow where they are large from an earlier one."""
    monkeypatch.setattr(prefill_module, "START_TOKENS", 100)
    used = engines()
    used.reserve(4, 400)
    room = prefill_module.Prefill(used, step_tokens=3)
    version = used.target.version
    assert room.make_room(AdmissionQueue(4, 590), 20)
    assert (room.rows, room.length) == (4, 512 - 2 - 3)
    assert used.target.version == version


def test_short_requests_get_their_rows_back_when_a_long_one_has_left(
    limited: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Caches for the long one have two rows; once it has left, and the short one beside it, they have four."""
    monkeypatch.setattr(prefill_module, "START_TOKENS", 100)
    limited(3.5 * (2 * ROW + LOGITS) / draft_module.CACHE_SHARE)
    long = Request(prompt_of(300, 1), 20)
    requests = [long, *(Request(prompt_of(7, seed), 12) for seed in range(9))]
    steps, used = run(requests, length=590)
    assert_answered(steps, requests)
    together = [len({e.row for e in step.emissions}) for step in steps]
    last = max(n for n, step in enumerate(steps) if any(e.row == 0 for e in step.emissions))
    assert max(together[: last + 1]) == 2
    assert max(together[last:]) == 4
    assert used.target.rows_held(253) == 4
    assert used.target.rows_held(320) == 0


def test_prompts_are_read_aside_in_caches_of_their_length() -> None:
    used, sizes = engines(), []
    used.reserve(2, 590)
    group = prefill_module.PrefillGroup([(0, Request(prompt_of(20), 500))], torch.device("cpu"))
    for aside in (True, False):
        group.begin(used if aside else used.aside(), 3, aside=aside)
        sizes.append(group.engines.target.rows_held(500))
    assert sizes == [0, 1]


def test_idle_engines_of_other_rules_make_room(limited: Callable[[float], None], tiny_pair: Pair) -> None:
    tiny_pair.target_model.release()
    pool = PairEngines(tiny_pair, "cuda")
    with pool.borrow(hidden=True) as other:
        other.reserve(4, 300)
    idle = other.target
    assert idle.cache_bytes > 0
    with pool.borrow() as used:
        limited(1e12)
        assert used.limit_rows(4, 300) == 4
        assert idle.cache_bytes > 0  # nothing was lacking
        version = idle.version
        limited(0)
        assert used.limit_rows(4, 300) < 4
    assert idle.cache_bytes == 0
    assert idle.version > version


def test_logits_count_as_memory(limited: Callable[[float], None]) -> None:
    used = engines()
    row = sum(engine.row_bytes(100) for engine in used.static_engines)
    for tokens in (1, 9):
        limited(10 * row)
        logits = tokens * memory.LOGIT_BYTES * VOCAB
        assert used.limit_rows(50, 100, 1.0, step_tokens=tokens) == int(10 * row / (row + logits))


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], bool]], None]:
    """Run out of memory in every prefill of so many tokens for which the given function is true."""

    def limit(too_long: Callable[[int], bool]) -> None:
        read = CudaEngine.prefill

        def prefill(self: CudaEngine, tokens: Tensor, counts: Tensor) -> Any:
            if too_long(tokens.numel()):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 …")
            return read(self, tokens, counts)

        monkeypatch.setattr(CudaEngine, "prefill", prefill)
        monkeypatch.setattr(CudaEngine, "chunk", 512)

    return limit


def test_a_prompt_that_finds_no_memory_waits_for_a_row_to_leave(full: Callable[..., None]) -> None:
    """The passes of all prompts, of half of them, and of the long one beside a live row fail. Then that row leaves."""
    failures = iter([True] * 3)
    full(lambda tokens: tokens > 25 and next(failures, False))
    requests = [Request(prompt_of(5), 10), Request(prompt_of(30, 1), 12), Request(prompt_of(6, 2), 20)]
    steps, _ = run(requests)
    assert_answered(steps, requests)
    assert next(failures, None) is None
    first, second = ([n for n, step in enumerate(steps) if any(e.row == row for e in step.emissions)] for row in (0, 1))
    assert len(first) > 2
    assert second[0] > first[-1]


def test_prompts_that_find_no_memory_together_are_read_one_by_one(full: Callable[..., None]) -> None:
    full(lambda tokens: tokens > 25)
    requests = [Request(prompt_of(20, seed), 12) for seed in range(4)]
    steps, _ = run(requests)
    assert_answered(steps, requests)


def test_only_the_prompt_that_is_too_long_is_given_up(full: Callable[..., None]) -> None:
    full(lambda tokens: tokens > 25)
    requests = [Request(prompt_of(n, n), 12) for n in (9, 40, 8, 30)]
    steps, _ = run(requests)
    assert sorted(row for step in steps for row in step.out_of_memory) == [1, 3]
    assert_answered(steps, requests, without=(1, 3))


def test_a_batch_says_which_answer_was_given_up(tiny_pair: Pair, full: Callable[..., None]) -> None:
    tiny_pair.target_model.release()  # engines of other tests, and prefixes that they have read
    full(lambda tokens: tokens > 25)
    batch = Batch(tiny_pair, "exact", rows=2, length=90, gamma=2, engine="cuda")
    short, long = batch.add(prompt_of(5), max_new_tokens=8), batch.add(prompt_of(40), max_new_tokens=8)
    while len(batch):
        batch.step()
    assert (short.out_of_memory, long.out_of_memory) == (False, True)
    assert short.finish is not None
    assert long.finish is None


@pytest.fixture
def no_graphs(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], bool]], None]:
    """Run out of memory in every capture for so many rows for which the given function is true, half done."""

    def limit(too_many: Callable[[int], bool]) -> None:
        original = CudaEngine.capture

        def capture(self: CudaEngine, functions: Any, state: list[Tensor]) -> Any:
            if too_many(len(state[0])):
                raise torch.OutOfMemoryError("CUDA out of memory")
            return original(self, functions, state)

        monkeypatch.setattr(CudaEngine, "capture", capture)

    return limit


@pytest.mark.quick("sampling")
@pytest.mark.parametrize("rule", [Exact(), SpeculativeSampling(Sampling(0.9))], ids=["exact", "sampling"])
def test_a_cycle_without_memory_runs_once_some_was_freed(no_graphs: Callable[..., None], rule: AcceptanceRule) -> None:
    requests = [Request(prompt_of(7, seed), 12, seed) for seed in range(3)]
    expected = list(decode(engines(), requests, rule, gamma=2))
    for queued in (False, True):
        failures = iter([True])
        no_graphs(lambda rows: rows > 1 and next(failures, False))  # noqa: B023
        waiting = AdmissionQueue(4, 200)
        waiting.waiting.extend(requests[1:] if queued else ())
        started = requests[:1] if queued else requests
        steps = list(decode(engines(), started, rule, gamma=2, queue=waiting if queued else None))
        assert next(failures, None) is None
        assert [tokens_of(steps, row) for row in range(3)] == [tokens_of(expected, row) for row in range(3)]


def test_a_batch_without_memory_gives_its_newest_rows_up(no_graphs: Callable[..., None]) -> None:
    no_graphs(lambda rows: rows > 2)
    requests = [Request(prompt_of(7, seed), 12) for seed in range(4)]
    steps, _ = run(requests)
    assert [row for step in steps for row in step.out_of_memory] == [3, 2]
    assert_answered(steps, requests[:2])
    assert [len(tokens_of(steps, row)) for row in (2, 3)] == [1, 1]  # those of their prompts
    together = list(decode(engines(), requests, Exact(), gamma=2))  # nobody has asked for a queue
    assert [row for step in together for row in step.out_of_memory] == [3, 2]
    assert_answered(together, requests[:2])


def test_a_stream_without_memory_does_not_end_as_if_it_were_whole(
    tiny_pair: Pair, no_graphs: Callable[..., None]
) -> None:
    for model in filter(None, (tiny_pair.target_model, tiny_pair.draft_model)):
        model.keep("idle engines", dict).clear()  # those of other tests have captured graphs
    no_graphs(lambda _: True)
    shown = []
    with pytest.raises(SelfJudgeError, match="no memory for this request"):
        shown.extend(stream(tiny_pair, "w1 w2", "exact", gamma=2, engine="cuda", max_new_tokens=12))
    assert len(shown) == 1


def test_the_newest_row_is_given_up_wherever_it_lies(no_graphs: Callable[..., None]) -> None:
    """When rows 0 and 2 have left, row 3 lies in the place of row 0, before row 1."""
    no_graphs(lambda rows: rows == 2)
    requests = [Request(prompt_of(2, seed), 12 if seed % 2 else 3) for seed in range(4)]
    steps, _ = run(requests)
    assert [row for step in steps for row in step.out_of_memory] == [3]
    assert_answered(steps, requests[:3])


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_memory_is_freed_in_steps(
    no_graphs: Callable[..., None], failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture cannot take what torch keeps. That goes first, then captured cycles, at last the newest row."""
    freed: list[str] = []
    monkeypatch.setattr(loop, "empty_cache", lambda: freed.append("cache"))
    monkeypatch.setattr(BatchEngines, "release_spare", lambda self, *, cycles=False: freed.append(f"spare {cycles}"))
    failures = iter([True] * failing)
    no_graphs(lambda _: next(failures, False))
    requests = [Request(prompt_of(7, seed), 12) for seed in range(2)]
    steps = list(decode(engines(), requests, Exact(), gamma=2))
    assert [name for name in freed if name != "cache"] == ["spare True"] * (failing - 1)
    assert freed[0] == "cache"
    assert [row for step in steps for row in step.out_of_memory] == ([1] if failing == 3 else [])


@pytest.mark.parametrize("queued", [True, False])
@pytest.mark.parametrize("rule", [Exact(), SpeculativeSampling(Sampling(0.9))], ids=["exact", "sampling"])
def test_rows_that_find_no_memory_to_move_are_moved_again(
    rule: AcceptanceRule, queued: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of them had moved, in the first or the second of the two caches."""
    requests = [Request(prompt_of(5, seed), 4 if seed < 4 else 20, seed) for seed in range(8)]
    expected = [list(decode(engines(), [request], rule, gamma=2)) for request in requests]
    move, failed, calls = cuda.move_rows, [], Counter()

    def run_out(rows: list[int], tensors: list[Tensor]) -> None:
        calls[key := tuple(rows)] += sum(place != row for place, row in enumerate(rows)) > 1
        if key not in failed and calls[key] == 1 + len(failed) % 2:
            failed.append(key)
            move(rows, tensors[:1])
            raise torch.OutOfMemoryError("CUDA out of memory")
        move(rows, tensors)

    monkeypatch.setattr(cuda, "move_rows", run_out)
    waiting = AdmissionQueue(8, 200)
    waiting.waiting.extend([*requests[1:], Request(prompt_of(5, 9), 4, 9)])
    steps = list(decode(engines(), requests[: 1 if queued else 8], rule, gamma=2, queue=waiting if queued else None))
    assert failed
    assert [tokens_of(steps, row) for row in range(8)] == [tokens_of(alone, 0) for alone in expected]


@pytest.mark.parametrize("where", ["join", "rule"])
@pytest.mark.parametrize("rule", [Exact(), SpeculativeSampling(Sampling(0.9))], ids=["exact", "sampling"])
def test_a_batch_that_a_row_could_not_enter_keeps_a_size_that_is_captured(
    no_room: Callable[..., None], where: str, rule: AcceptanceRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five rows go on in a batch of eight, as before: with idle ones."""
    requests = [Request(prompt_of(5, seed), 8 if seed < 3 else 24, seed) for seed in range(9)]
    expected = [list(decode(engines(), [request], rule, gamma=2)) for request in requests]
    sizes, capture = set(), CudaEngine.capture

    def noted(self: CudaEngine, functions: Any, state: list[Tensor]) -> Any:
        sizes.add(len(state[0]))
        return capture(self, functions, state)

    monkeypatch.setattr(CudaEngine, "capture", noted)
    failures, entered = iter([True]), iter(range(9))
    no_room(where, lambda rows: rows >= 5 and next(entered, 9) > 0 and next(failures, False))
    waiting = AdmissionQueue(8, 200)
    waiting.waiting.extend(requests[1:])
    steps = list(decode(engines(), requests[:1], rule, gamma=2, queue=waiting))
    assert next(failures, None) is None
    assert sizes <= {1, 2, 4, 8}
    assert [tokens_of(steps, row) for row in range(9)] == [tokens_of(alone, 0) for alone in expected]


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[int], bool]], None]:
    """Run out of memory while rows enter, if the function is true of how many there then are: as caches join, at their
    first tokens, or as their cycle is made."""

    def limit(where: str, too_many: Callable[[int], bool]) -> None:
        owner, name = {
            "join": (draft_module.Backlog, "join"),
            "rule": (loop.RandomNumbers, "enter"),
            "cycle": (loop, "find_cycle"),
        }[where]
        original = getattr(owner, name)

        def run_out(*given: Any, **named: Any) -> Any:
            made = original(*given, **named)
            entered = {"join": "missing", "rule": "generators"}
            if too_many(len(named["first"] if where == "cycle" else getattr(given[0], entered[where]))):
                raise torch.OutOfMemoryError("CUDA out of memory")
            return made

        monkeypatch.setattr(owner, name, run_out)

    return limit


@cache
def answer_by(rule: AcceptanceRule, prompt: tuple[int, ...], max_new_tokens: int, seed: int) -> list[int]:
    return tokens_of(list(decode(engines(), [Request([*prompt], max_new_tokens, seed)], rule, gamma=2)), 0)


@pytest.mark.quick("exact-cycle", "sampling-rule", "exact-join")
@pytest.mark.parametrize("where", ["join", "rule", "cycle"])
@pytest.mark.parametrize("rule", [Exact(), SpeculativeSampling(Sampling(0.9))], ids=["exact", "sampling"])
def test_a_row_that_finds_no_memory_to_enter_waits_and_others_go_on(
    no_room: Callable[..., None], where: str, rule: AcceptanceRule
) -> None:
    requests = [Request(prompt_of(3 + 2 * seed, seed), 8 + 4 * seed, seed) for seed in range(4)]
    expected = [answer_by(rule, tuple(request.prompt), request.max_new_tokens, request.seed) for request in requests]
    for queued in (True, False) if where != "join" else (True,):
        failures = iter([True, True])
        no_room(where, lambda rows: rows > 1 and next(failures, False))  # noqa: B023
        waiting = AdmissionQueue(4, 200)
        waiting.waiting.extend(requests[1:])
        started = requests[:1] if queued else requests
        steps = list(decode(engines(), started, rule, gamma=2, queue=waiting if queued else None))
        assert next(failures, None) is None
        assert [tokens_of(steps, row) for row in range(4)] == expected
        assert not any(step.out_of_memory for step in steps)


def test_a_row_that_never_finds_memory_to_enter_is_given_up_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [Request(prompt_of(5, seed), 12) for seed in range(3)]
    enter = loop._LiveBatch._enter

    def run_out(self: Any, group: Any, alive: list[int], idle: int) -> Step:
        if 1 in group.numbers:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return enter(self, group, alive, idle)

    monkeypatch.setattr(loop._LiveBatch, "_enter", run_out)
    steps, _ = run(requests)
    assert [row for step in steps for row in step.out_of_memory] == [1]
    assert_answered(steps, requests, without=(1,))


@pytest.fixture
def scheduler(tiny_pair: Pair) -> Iterator[Scheduler]:
    rules = Rules(tiny_pair, None, RuleRequest("exact", gamma=2))
    made = Scheduler(tiny_pair, rules, ServerConfig(max_context=90, max_batch=8, engine="cuda"), Metrics())
    made.start()
    yield made
    made.stop()


def answer(scheduler: Scheduler, prompt: list[int]) -> Update:
    updates: queues.Queue[Update] = queues.Queue()
    scheduler.submit(CompletionJob(prompt, scheduler.rules.choose(), 8, updates.put))
    while True:
        update = updates.get(timeout=600)
        if update.result is not None or update.failure:
            return update


def test_out_of_memory_ends_one_request_and_not_the_server(
    scheduler: Scheduler, full: Callable[..., None], tiny_pair: Pair
) -> None:
    full(lambda tokens: tokens > 25)
    assert answer(scheduler, prompt_of(40)).failure == "memory"
    after = answer(scheduler, prompt_of(5)).result
    assert after is not None
    text = tiny_pair.tokenizer.decode(prompt_of(5))
    assert after.tokens == generate(tiny_pair, text, raw=True, max_new_tokens=8).tokens


def test_out_of_memory_in_a_cycle_is_named(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers of that batch are lost, the server goes on."""

    def run_out(self: CudaEngine, *_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(CudaEngine, "extend", run_out)
        patch.setattr(CudaEngine, "prefill", CudaEngine.prefill)
        assert answer(scheduler, prompt_of(5)).failure == "memory"
    assert answer(scheduler, prompt_of(5)).result is not None


def test_the_plan_of_a_folder(checkpoints: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    from selfjudge.cli.doctor import plan_memory
    from selfjudge.cli.options import DeviceOptions
    from selfjudge.cli.output import fill_text

    monkeypatch.setattr(device, "available_memory", lambda: 10**9 + 10**8)
    plan = plan_memory(checkpoints["target"], checkpoints["draft"], DeviceOptions(device="cpu"))
    target, small = (outline_model(checkpoints[role]) for role in ("target", "draft"))
    assert (plan["weights"], plan["draft"]) == (4 * target.num_parameters(), 4 * small.num_parameters())
    token = sum(measure_need(model, "float32", "cpu").token for model in (target, small))
    assert plan["cache_per_1000_tokens"] == 1000 * token
    assert json.loads(json.dumps(plan)) == plan
    text = fill_text("memory", **plan)
    assert "weights, float32 ¦ 0.00 ←" in text
    assert f"rows of 96 tokens that fit: {plan['rows_that_fit']:,}" in text
    assert plan["rows_that_fit"] > 0
    monkeypatch.setattr(device, "available_memory", lambda: 10**8)
    plan = plan_memory(checkpoints["target"], None, DeviceOptions(device="cpu"))
    assert fill_text("memory", **plan).endswith("rows of 96 tokens that fit: none")
    with pytest.raises(SelfJudgeError, match="q4 needs a GGUF file or an embedded model"):
        plan_memory(checkpoints["target"], None, DeviceOptions(device="cpu", dtype="q4"))
