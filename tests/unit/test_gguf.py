"""GGUF files run as they are: blocks of every type, whole models, and files that are refused."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import selfjudge.engine.select
from conftest import VOCAB, tiny_model
from fake_gguf import KINDS, check_kind, write_model
from selfjudge.distill.pipeline import distill_draft
from selfjudge.engine import unpacked as engine_unpacked
from selfjudge.engine.cpu import engine as cpu
from selfjudge.engine.cpu.engine import CpuEngine
from selfjudge.engine.reference import ReferenceEngine
from selfjudge.engine.select import make_engine
from selfjudge.errors import SelfJudgeError
from selfjudge.evaluate.config import EvalConfig
from selfjudge.evaluate.pipeline import evaluate_rules
from selfjudge.models.gguf import BLOCKS, GgufFile, gguf_of, model_of
from selfjudge.models.pair import Pair

MIXED = {
    "bias": "F32", "_norm": "F32", "ffn_down": "Q5_1", "ffn_up": "F16", "attn_v": "Q8_0", "token_embd": "Q8_0",
    "weight": "Q4_1",
}  # fmt: skip


def small(kind: str, **options: object) -> PreTrainedModel:
    model = tiny_model(kind, seed=4, hidden_size=64, intermediate_size=96, initializer_range=0.15, **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return model


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: BLOCKS[kind][0])
def test_blocks_multiply_exactly_and_alike_in_every_pass(kind: int) -> None:
    check_kind(kind)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_file_gives_the_logits_of_its_model(kind: str, tied: bool, tmp_path: Path) -> None:
    model = small(kind, tie_word_embeddings=tied)
    tokens = torch.randint(0, VOCAB, (2, 20), generator=torch.Generator().manual_seed(0))
    exact = CpuEngine(model).extend(tokens).logits
    for kinds, least, most in (({}, 0, 1e-5), ({"_norm": "F32", "weight": "Q8_0"}, 1e-5, 0.06), (MIXED, 0.01, 0.3)):
        write_model(model, tmp_path / "m.gguf", kinds)
        logits = CpuEngine(model_of(tmp_path / "m.gguf")).extend(tokens).logits
        assert least <= (logits - exact).norm() / exact.norm() < most


def test_a_pass_of_many_tokens_has_the_bits_of_passes_of_one(tmp_path: Path) -> None:
    write_model(small("llama"), tmp_path / "m.gguf", MIXED)
    model = model_of(tmp_path / "m.gguf")
    tokens = torch.randint(0, VOCAB, (2, 13))
    at_once, alone = CpuEngine(model, hidden=True).extend(tokens), CpuEngine(model, hidden=True)
    outputs = [alone.extend(tokens[:, i : i + 1]) for i in range(13)]
    assert torch.equal(torch.cat([o.logits for o in outputs], 1), at_once.logits)
    assert at_once.hidden is not None
    assert torch.equal(torch.cat([o.hidden for o in outputs if o.hidden is not None], 1), at_once.hidden)


def test_a_model_in_a_file_takes_no_memory_and_runs_on_the_cpu_engine(tmp_path: Path) -> None:
    write_model(small("qwen2"), tmp_path / "m.gguf", MIXED)
    model = model_of(tmp_path / "m.gguf")
    assert all(p.untyped_storage().nbytes() == 4 for p in model.parameters())
    assert isinstance(make_engine(model), CpuEngine)
    with pytest.raises(SelfJudgeError, match="q4 weights need the cpu engine, not cuda"):
        make_engine(model, kind="cuda")
    with pytest.raises(SelfJudgeError, match="this needs whole weights"):
        model(torch.tensor([[1]]))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_the_reference_engine_unpacks_a_file_whole_or_in_pieces(
    kind: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_unpacked, "PIECE", 5 * 64)  # rows of a matrix do not divide evenly
    source = small(kind, tie_word_embeddings=tied)
    tokens = torch.randint(0, VOCAB, (2, 20), generator=torch.Generator().manual_seed(0))
    for kinds, most in (({}, 1e-5), (MIXED, 0.02)):  # floats; blocks, where the cpu engine rounds activations
        write_model(source, tmp_path / "m.gguf", kinds)
        expected = CpuEngine(model_of(tmp_path / "m.gguf")).extend(tokens).logits
        logits = []
        for room in (1 << 30, 60_000, 0):
            model = model_of(tmp_path / "m.gguf")
            file = gguf_of(model)
            assert file is not None
            whole = engine_unpacked.unpacked(model, file, room)
            kept = [m.kept is not None for m in whole.modules() if isinstance(m, engine_unpacked.FileLinear)]
            assert len(kept) == 15
            assert (all(kept), any(kept)) == (room == 1 << 30, room > 0)
            engine = make_engine(model, kind="reference", hidden=True)
            logits.append(engine.extend(tokens).logits)
            assert (logits[-1] - expected).norm() / expected.norm() < most
            with pytest.raises(SelfJudgeError, match="this needs whole weights"):
                model(torch.tensor([[1]]))
        torch.testing.assert_close(logits[0], logits[2], atol=1e-4, rtol=1e-4)


def test_q4_without_a_compiler_runs_on_the_reference_engine_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(small("llama"), tmp_path / "m.gguf", MIXED)
    monkeypatch.setattr(cpu, "_compiler_reason", lambda: "its kernel cannot be compiled here (no C++ compiler found)")
    selfjudge.engine.select._say_once.cache_clear()
    with pytest.warns(UserWarning, match=r"many times slower in q4: its kernel cannot be compiled here \(no C\+\+"):
        engine = make_engine(model_of(tmp_path / "m.gguf"))
    assert isinstance(engine, ReferenceEngine)
    assert engine.extend(torch.tensor([[1, 2, 3]])).logits.isfinite().all()
    with pytest.raises(SelfJudgeError, match="the cpu engine cannot run this model: its kernel cannot be compiled"):
        make_engine(model_of(tmp_path / "m.gguf"), kind="cpu")


def test_damaged_and_foreign_files_are_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(small("llama"), path, MIXED)
    whole = path.read_bytes()
    for size in (*range(0, 400, 7), len(whole) // 2, len(whole) - 33):
        path.write_bytes(whole[:size])
        with pytest.raises(SelfJudgeError, match=r"^cannot read .* as a GGUF model: .*$"):
            GgufFile(path)
    for old, new, message in (
        (b"GGUF", b"GGML", "it is not a GGUF file"),
        (b"GGUF\x03", b"GGUF\x09", "it is of version 9"),
        (b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", "of architecture 'mamba', not llama or qwen2"),
        (b"blk.1.ffn_down.weight", b"blk.1.ffn_dawn.weight", "lacks the tensor blk.1.ffn_down.weight"),
        (b"llama.block_count", b"llama.black_count", "does not say llama.block_count"),
    ):
        assert old in whole
        path.write_bytes(whole.replace(old, new, 1))
        with pytest.raises(SelfJudgeError, match=message):
            model_of(path)
    at = whole.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8  # dimensions, width
    path.write_bytes(whole[:at] + b"\x13\0\0\0" + whole[at + 4 :])
    with pytest.raises(SelfJudgeError, match=r"output_norm.weight has blocks of unknown type 19; there are: F32, "):
        model_of(path)


def test_hostile_metadata_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(small("llama"), path, MIXED)
    whole = path.read_bytes()

    def with_number(key: bytes, value: int) -> bytes:
        at = whole.index(key) + len(key) + 4  # after the type of the value
        return whole[:at] + struct.pack("<I", value) + whole[at + 4 :]

    def with_kind(key: bytes, kind: int) -> bytes:
        at = whole.index(key) + len(key)
        return whole[:at] + struct.pack("<I", kind) + whole[at + 4 :]

    for content, message in (
        (with_number(b"llama.block_count", 1 << 31), "block_count cannot be 2147483648"),
        (with_number(b"llama.block_count", 1 << 20), "says that it has 1048576 layers"),
        (with_number(b"llama.attention.head_count", 0), "head_count cannot be 0"),
        (with_number(b"llama.embedding_length", 0), "embedding_length cannot be 0"),
        (with_kind(b"llama.embedding_length", 9), "as a GGUF model: it has an array of type 64"),
    ):
        path.write_bytes(content)
        with pytest.raises(SelfJudgeError, match=message):
            model_of(path)


@pytest.mark.parametrize("name", ["output_norm", "token_embd", "blk.1.ffn_down", "blk.0.attn_q"])
def test_weights_that_are_not_finite_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(small("llama"), path, MIXED)
    file = GgufFile(path)
    tensor = file.tensors[f"{name}.weight"]
    content = bytearray(path.read_bytes())
    place = tensor.offset + (208 if BLOCKS[tensor.kind][0] == "Q6_K" else 2 if tensor.kind == 0 else 0)
    content[place : place + 2] = b"\x80\x7f" if tensor.kind == 0 else b"\x00\x7c"  # infinity as float32, as float16
    path.write_bytes(content)
    with pytest.raises(SelfJudgeError, match=rf"{name}\.weight has weights that are not finite"):
        make_engine(model_of(path))


def test_what_needs_whole_weights_says_so_before_any_work(tmp_path: Path, tiny_pair: Pair) -> None:
    write_model(small("qwen2"), tmp_path / "m.gguf", MIXED)
    pair = replace(tiny_pair, target=model_of(tmp_path / "m.gguf"))
    with pytest.raises(SelfJudgeError, match="this needs whole weights"):
        evaluate_rules(pair, tmp_path / "eval", EvalConfig(tasks=("gsm8k",)))
    with pytest.raises(SelfJudgeError, match="this needs whole weights"):
        distill_draft(pair, tmp_path / "draft")
    assert not (tmp_path / "eval").exists()
    assert not (tmp_path / "draft").exists()


def test_a_tensor_too_many_or_of_another_shape_is_refused(tmp_path: Path) -> None:
    model = small("llama")
    model.model.layers[0].input_layernorm.register_parameter("bias", torch.nn.Parameter(torch.zeros(64)))
    write_model(model, tmp_path / "m.gguf", MIXED)
    with pytest.raises(SelfJudgeError, match=r"does not know .blk\.0\.attn_norm\.bias."):
        model_of(tmp_path / "m.gguf")
    write_model(small("llama"), tmp_path / "m.gguf", {"output_norm": "Q8_0"})
    with pytest.raises(SelfJudgeError, match=r"output_norm\.weight has blocks of type Q8_0, not floats"):
        model_of(tmp_path / "m.gguf")
    model = small("llama")
    model.config.intermediate_size = 128
    write_model(model, tmp_path / "m.gguf", MIXED)
    with pytest.raises(SelfJudgeError, match=r"blk\.0\.ffn_gate\.weight is 96 × 64, not 128 × 64"):
        model_of(tmp_path / "m.gguf")


def test_q4_needs_a_file_and_a_cpu(checkpoints: dict[str, str]) -> None:
    with pytest.raises(SelfJudgeError, match="`dtype` q4 needs a GGUF file or an embedded model"):
        Pair.load(checkpoints["target"], checkpoints["draft"], device="cpu", dtype="q4")
    with pytest.raises(SelfJudgeError, match="`dtype` q4 needs a cpu, not meta"):
        Pair.load(checkpoints["target"], checkpoints["draft"], device="meta", dtype="q4")
