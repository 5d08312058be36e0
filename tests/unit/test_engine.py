"""The ragged cache: whatever was accepted, refused or dropped, every logit equals a fresh full forward."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given, settings, strategies as st

import selfjudge.engine.select
from conftest import CONFIGS, VOCAB, tiny_model
from following import follow
from selfjudge.decoding import prefill
from selfjudge.decoding.admission import Request
from selfjudge.engine import reference
from selfjudge.engine.cpu import engine as cpu
from selfjudge.engine.cpu.engine import CpuEngine
from selfjudge.engine.cuda import engine as cuda
from selfjudge.engine.draft import BatchEngines
from selfjudge.engine.reference import ReferenceEngine
from selfjudge.engine.select import borrow_engine, make_engine
from selfjudge.errors import SelfJudgeError
from selfjudge.models.checkpoint import quantise
from selfjudge.models.load import Target
from selfjudge.ops import argmax_checked

MODELS = {kind: tiny_model(kind) for kind in CONFIGS}
ENGINES = [("reference", kind) for kind in sorted(CONFIGS)] + [
    (e, k) for e in ("cpu", "cuda") for k in ("llama", "qwen2", "gemma3", "mistral-window")
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
@pytest.mark.parametrize("examples", [2, pytest.param(15, marks=pytest.mark.slow)])
def test_every_logit_equals_a_fresh_forward(
    engine_kind: str, kind: str, examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "PREFILL_CHUNK", 4)
    monkeypatch.setattr(reference, "HOLE_SLACK", 2)
    monkeypatch.setattr(cpu, "CHUNK", 5)
    few_tokens_a_pass(monkeypatch)

    @settings(max_examples=examples)
    @given(batch=st.integers(1, 4), plan=st.lists(operation, min_size=4, max_size=14), seed=st.integers(0, 2**16))
    def every_logit(batch: int, plan: list[tuple[str, int, int]], seed: int) -> None:
        follow(make_engine(MODELS[kind], hidden=True, kind=engine_kind), MODELS[kind], batch, plan, seed)

    every_logit()


def few_tokens_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the static engine read prompts of this size as it reads long ones."""
    for name, tokens in (("PASS_TOKENS", 20), ("CAPTURED_TOKENS", 0)):
        monkeypatch.setattr(cuda, name, tokens)


def test_padding_of_prompts_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    few_tokens_a_pass(monkeypatch)
    computed: list[tuple[int, ...]] = []
    forward = cuda.CudaEngine._forward

    def counted(self: cuda.CudaEngine, x: torch.Tensor, *rest: Any) -> Any:
        computed.append(tuple(x.shape[:2]))
        return forward(self, x, *rest)

    monkeypatch.setattr(cuda.CudaEngine, "_forward", counted)
    monkeypatch.setattr(prefill, "PASS_TOKENS", 20)
    rows = [(row, Request([5] * length, 4)) for row, length in enumerate([3, 4, 5, 6, 30])]
    group = prefill.PrefillGroup(rows, torch.device("cpu"))
    group.begin(BatchEngines(cuda.CudaEngine(MODELS["llama"])), 1)
    group.read_all()
    assert computed == [(3, 5), (1, 6), (1, 20), (1, 10)]  # rows, columns


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


def test_the_cpu_engine_declines_what_it_cannot_run() -> None:
    model = MODELS["gpt2"]
    assert cpu.why_not(model)
    with pytest.raises(SelfJudgeError, match="cannot run this model"):
        make_engine(model, kind="cpu")
    selfjudge.engine.select._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="using the reference engine"):
        engine = make_engine(model)
    assert isinstance(engine, ReferenceEngine)


def test_without_a_compiler_the_reference_engine_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise OSError("no C++ compiler found")

    monkeypatch.setattr(cpu, "library", missing)
    monkeypatch.setattr(cpu, "_compiler_reason", cpu._compiler_reason.__wrapped__)  # not the answer from before
    assert "no C++ compiler" in cpu.why_not(MODELS["llama"])


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


def test_fused_matrices_replace_the_originals(tmp_path: Any) -> None:
    """The static engine keeps no second copy of a model, and the model stays what it was."""
    model, other = tiny_model("qwen2", seed=1), tiny_model("qwen2", seed=1)
    tokens = torch.tensor([[5, 9, 4, 17]])
    engines = [make_engine(model, kind="cuda", hidden=hidden) for hidden in (False, True)]
    torch.testing.assert_close(engines[0].extend(tokens).logits, other(tokens).logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model(tokens).logits, other(tokens).logits)
    for layer, one, two in zip(model.model.layers, *(e.weights.layers for e in engines), strict=True):
        joined = {
            "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        }
        for name, parts in joined.items():
            fused = getattr(one, name)
            assert fused.data_ptr() == getattr(two, name).data_ptr() == layer.get_submodule(parts[0]).weight.data_ptr()
            assert torch.equal(fused, torch.cat([layer.get_submodule(part).weight for part in parts]))
            storage = fused.untyped_storage().data_ptr()
            assert all(layer.get_submodule(part).weight.untyped_storage().data_ptr() == storage for part in parts)
    model.save_pretrained(tmp_path)
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), other.parameters(), strict=True))


def test_passes_in_two_threads_do_not_see_each_others_states() -> None:
    """Engines of one model share its module, and with it the hooks that take its states."""
    model = tiny_model("llama")
    one, other = (make_engine(model, hidden=True, features=(0, 1), kind="reference") for _ in range(2))
    alone = make_engine(model, hidden=True, features=(0, 1), kind="reference").extend(torch.tensor([[5, 6, 7]]))
    thread = threading.Thread(target=lambda: other.extend(torch.tensor([[8, 9, 10]])))

    def in_the_middle(*_: object) -> None:
        if thread.ident is None:
            thread.start()
            thread.join(0.3)  # it has to wait for this pass

    hook = model.model.layers[1].register_forward_hook(in_the_middle)
    output = one.extend(torch.tensor([[5, 6, 7]]))
    hook.remove()
    thread.join()
    assert torch.equal(output.logits, alone.logits)
    assert output.hidden is not None
    assert torch.equal(output.hidden, alone.hidden)
    assert torch.equal(output.features, alone.features)


def test_what_is_kept_is_made_once_for_all_threads() -> None:
    """Making it may free what it is made of."""
    model, made, both = Target(tiny_model("llama")), [], threading.Barrier(2)

    def make() -> object:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.3)  # for the other thread, which must not come
        made.append(object())
        return made[-1]

    kept: list[object] = []
    threads = [threading.Thread(target=lambda: kept.append(model.keep("weights", make))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kept == made * 2


def test_the_cpu_pass_knows_the_first_of_its_most_likely_tokens() -> None:
    """Of equal logits, behind the last whole vector, too; where one is not finite, nobody is told."""
    model, tokens = tiny_model("llama", seed=3), torch.randint(3, VOCAB, (3, 20))
    with torch.no_grad():
        weight = model.get_output_embeddings().weight
        weight[40:] = weight[:-40].clone()
    output = make_engine(model, kind="cpu").extend(tokens)
    assert output.argmax is not None
    choice, non_finite = output.argmax
    assert torch.equal(choice, argmax_checked(output.logits)[0])
    assert (output.logits == output.logits.amax(-1, keepdim=True)).sum(-1).max() == 2
    assert not non_finite.any()
    for odd in (torch.inf, torch.nan):
        with torch.no_grad():
            weight[VOCAB - 1] = odd
        assert make_engine(model, kind="cpu").extend(tokens).argmax is None
