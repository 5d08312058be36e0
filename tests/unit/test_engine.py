"""The ragged cache: whatever was accepted, refused or dropped, every logit equals a fresh full forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given, settings, strategies as st

import selfjudge.engine.select
from conftest import CONFIGS, VOCAB, tiny_model
from selfjudge.engine import reference
from selfjudge.engine.base import Engine
from selfjudge.engine.cpu import engine as cpu
from selfjudge.engine.cpu.engine import CpuEngine
from selfjudge.engine.cuda import engine as cuda
from selfjudge.engine.reference import ReferenceEngine
from selfjudge.engine.select import borrow_engine, make_engine
from selfjudge.errors import SelfJudgeError
from selfjudge.models.loaded import Target
from selfjudge.models.weights import quantise

MODELS = {kind: tiny_model(kind) for kind in CONFIGS}
ENGINES = [("reference", kind) for kind in sorted(CONFIGS)] + [
    (e, k) for e in ("cpu", "cuda") for k in ("llama", "qwen2")
]

operation = st.one_of(
    st.tuples(st.just("extend"), st.integers(1, 7), st.integers(0, 2**16)),
    st.tuples(st.just("rewind"), st.integers(0, 5), st.integers(0, 2**16)),
    st.tuples(st.just("select"), st.integers(1, 4), st.integers(0, 2**16)),
    st.tuples(st.just("enter"), st.integers(1, 3), st.integers(0, 2**16)),
)


@pytest.mark.parametrize(
    ("engine_kind", "kind"),
    [
        pytest.param(*e, marks=pytest.mark.slow if e[1] in ("gemma2", "gemma3", "mistral-window") else ())
        for e in ENGINES
    ],
)
@pytest.mark.parametrize("examples", [2, pytest.param(40, marks=pytest.mark.slow)])
def test_every_logit_equals_a_fresh_forward(
    engine_kind: str, kind: str, examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "PREFILL_CHUNK", 4)
    monkeypatch.setattr(reference, "HOLE_SLACK", 2)
    monkeypatch.setattr(cpu, "CHUNK", 5)
    few_tokens_a_pass(monkeypatch)

    @settings(max_examples=examples, deadline=None)
    @given(batch=st.integers(1, 4), plan=st.lists(operation, min_size=4, max_size=14), seed=st.integers(0, 2**16))
    def every_logit(batch: int, plan: list[tuple[str, int, int]], seed: int) -> None:
        follow(make_engine(MODELS[kind], hidden=True, kind=engine_kind), MODELS[kind], batch, plan, seed)

    every_logit()


def few_tokens_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the static engine read prompts of this size as it reads long ones."""
    for name, tokens in (("PREFILL_TOKENS", 20), ("CAPTURED_TOKENS", 0), ("STEP_TOKENS", 4)):
        monkeypatch.setattr(cuda, name, tokens)


def test_padding_of_prompts_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    few_tokens_a_pass(monkeypatch)
    computed: list[tuple[int, ...]] = []
    forward = cuda.CudaEngine._forward

    def counted(self: cuda.CudaEngine, x: torch.Tensor, *rest: Any) -> Any:
        computed.append(tuple(x.shape[:2]))
        return forward(self, x, *rest)

    monkeypatch.setattr(cuda.CudaEngine, "_forward", counted)
    engine, counts = cuda.CudaEngine(MODELS["llama"]), [3, 4, 5, 6, 30]
    engine.reserve(5, 100)
    engine.prefill(torch.ones(5, 30, dtype=torch.long), torch.tensor(counts))
    assert computed == [(3, 5), (1, 6), (1, 20), (1, 10)]  # rows, columns


def follow(engine: Engine, model: hf.PreTrainedModel, batch: int, plan: list[tuple[str, int, int]], seed: int) -> None:
    """Do what the plan says, and compare every logit and state with those of a fresh forward."""
    random = torch.Generator().manual_seed(seed)
    rows: list[list[int]] = [[] for _ in range(batch)]

    def extend(width: int, generator: torch.Generator, new: int = 0) -> None:
        """Append to all rows, or to as many new ones."""
        if new:
            rows.extend([] for _ in range(new))
        chosen = rows[-new:]
        tokens = torch.randint(0, VOCAB, (len(chosen), width), generator=generator)
        counts = torch.randint(1, width + 1, (len(chosen),), generator=generator)
        keep = 1 if new else int(counts.min())
        if new:
            other = engine.aside()
            other.reserve(new, 100)
            if counts.min() > 2:  # in two chunks
                other.prefill(tokens[:, : width - 2], counts - 2)
                output = other.prefill(tokens[:, width - 2 :], torch.full_like(counts, 2))
            else:
                output = other.prefill(tokens, counts)
            engine.join(other)
        else:
            output = engine.extend(tokens, counts, keep=keep)
        for b, row in enumerate(chosen):
            row += tokens[b, width - int(counts[b]) :].tolist()
            with torch.inference_mode():
                fresh = model(torch.tensor([row]), use_cache=False, output_hidden_states=True)
            torch.testing.assert_close(output.logits[b], fresh.logits[0, -keep:], atol=2e-4, rtol=1e-4)
            torch.testing.assert_close(output.hidden[b], fresh.hidden_states[-1][0, -keep:], atol=2e-4, rtol=1e-4)

    engine.reserve(10, 100)
    engine.reserve(batch, 100)
    extend(6, random)
    for name, size, salt in plan:
        generator = torch.Generator().manual_seed(salt)
        if name == "extend" and max(map(len, rows)) + size < 90:
            extend(size, generator)
        elif name == "rewind":
            most = min(size, *(len(row) - 1 for row in rows))
            refused = torch.randint(0, most + 1, (len(rows),), generator=generator)
            engine.rewind(refused)
            rows = [row[: len(row) - int(n)] for row, n in zip(rows, refused, strict=True)]
        elif name == "select":
            chosen = torch.randperm(len(rows), generator=generator)[:size].tolist()
            engine.select(chosen)
            rows = [rows[i] for i in chosen]
        elif name == "enter" and len(rows) + size <= 10:
            extend(5 + salt % 40, generator, new=size)
    extend(3, random)


def test_a_batch_of_one_never_has_holes() -> None:
    engine = ReferenceEngine(MODELS["llama"])
    engine.extend(torch.randint(0, VOCAB, (1, 9)))
    for _ in range(20):
        engine.extend(torch.randint(0, VOCAB, (1, 4)))
        engine.rewind(torch.tensor([3]))
    assert engine.slots == int(engine.lengths[0]) == 29


def test_holes_are_compacted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows take turns in accepting everything: every slot is somebody's, and half of them are holes."""
    monkeypatch.setattr(reference, "HOLE_SLACK", 2)
    engine = ReferenceEngine(MODELS["llama"])
    engine.extend(torch.randint(0, VOCAB, (2, 4)))
    for i in range(20):
        engine.extend(torch.randint(0, VOCAB, (2, 6)))
        engine.rewind(torch.tensor([5, 0] if i % 2 else [0, 5]))
        longest = int(engine.lengths.max())
        assert engine.slots - longest <= reference.HOLE_SHARE * engine.slots + 2 + 6
    assert longest == 4 + 10 * 7
    assert engine.slots < 100  # 20 cycles of 6 slots would be 124


def test_models_that_cannot_be_rewound_are_refused() -> None:
    mamba = hf.AutoModelForCausalLM.from_config(
        hf.MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4)
    )
    with pytest.raises(SelfJudgeError, match="cannot be rewound"):
        ReferenceEngine(mamba)
    bloom = hf.AutoModelForCausalLM.from_config(hf.BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=1, n_head=2))
    with pytest.raises(SelfJudgeError, match="position ids"):
        ReferenceEngine(bloom)


@pytest.mark.parametrize("kind", sorted(set(CONFIGS) - {"llama", "qwen2"}))
def test_the_cpu_engine_declines_what_it_cannot_run(kind: str) -> None:
    assert cpu.why_not(MODELS[kind])
    with pytest.raises(SelfJudgeError, match="cannot run this model"):
        make_engine(MODELS[kind], kind="cpu")
    selfjudge.engine.select._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="using the reference engine"):
        engine = make_engine(MODELS[kind])
    assert isinstance(engine, ReferenceEngine)


def test_without_a_compiler_the_reference_engine_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise OSError("no C++ compiler found")

    monkeypatch.setattr(cpu, "library", missing)
    monkeypatch.setattr(cpu, "_compiler_reason", cpu._compiler_reason.__wrapped__)  # not the answer from before
    assert "no C++ compiler" in cpu.why_not(MODELS["llama"])


def test_rope_scaling_and_biases_are_the_models_own() -> None:
    """Qwen2 has biases; Llama 3 scales its rotary embedding."""
    rope = {
        "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }  # fmt: skip
    model = tiny_model("llama", seed=9, rope_parameters=rope, attention_bias=True, mlp_bias=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    tokens = torch.randint(0, VOCAB, (1, 40))
    with torch.inference_mode():
        torch.testing.assert_close(CpuEngine(model).extend(tokens).logits, model(tokens).logits, atol=2e-4, rtol=1e-4)


def test_int8_is_close_to_float32() -> None:
    model = tiny_model("llama", seed=9, hidden_size=128, intermediate_size=192, initializer_range=0.1)
    tokens = torch.randint(0, VOCAB, (2, 30))
    exact, rough = CpuEngine(model).extend(tokens).logits, CpuEngine(model, int8=True).extend(tokens).logits
    error = (exact - rough).norm() / exact.norm()
    assert 1e-5 < error < 0.06
    with pytest.raises(SelfJudgeError, match="divisible by 32"):
        make_engine(MODELS["llama"], int8=True)
    values, scale = quantise(model.lm_head.weight)
    restored = (values.view(VOCAB, -1, 32) * scale.float()[..., None]).view_as(model.lm_head.weight)
    assert (restored - model.lm_head.weight).abs().max() <= scale.max() * 0.6  # scales have 11 bits


def test_an_engine_that_ran_out_of_memory_is_usable_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = cuda.CudaEngine(tiny_model())
    engine.reserve(2, 50)

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", full)
        with pytest.raises(torch.OutOfMemoryError):
            engine.reserve(64, 1000)
    engine.reserve(2, 50)
    assert engine.extend(torch.tensor([[1, 2], [3, 4]])).logits.shape[:2] == (2, 2)


def test_a_released_models_engines_are_gone() -> None:
    model = Target(tiny_model())
    with borrow_engine(model, kind="cuda") as first:
        pass
    with borrow_engine(model, kind="cuda") as again:
        assert again is first
    model.release()
    with borrow_engine(model, kind="cuda") as other:
        assert other is not first


def test_an_engine_is_not_kept_after_an_error() -> None:
    model = Target(tiny_model())
    with pytest.raises(RuntimeError, match="broken"), borrow_engine(model, kind="cuda") as first:
        raise RuntimeError("broken")
    with borrow_engine(model, kind="cuda") as other:
        assert other is not first
