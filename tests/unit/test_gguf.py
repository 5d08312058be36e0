"""GGUF files run as they are: blocks of every type, whole models, and files that are refused."""

from __future__ import annotations

import shutil
import struct
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import selfjudge.engine.select
from conftest import VOCAB, tiny_head, tiny_model
from fake_gguf import KINDS, check_kind, dequantised, file_tensors, random_blocks, write_model
from proposals import requests_of
from selfjudge.decoding.loop import decode
from selfjudge.decoding.rules import EXACT
from selfjudge.decoding.text import generate
from selfjudge.distill.pipeline import distill_draft
from selfjudge.engine.cpu import engine as cpu
from selfjudge.engine.cpu.engine import CpuEngine, CpuHead
from selfjudge.engine.draft import BatchEngines
from selfjudge.engine.reference import ReferenceEngine
from selfjudge.engine.select import PairEngines, make_draft, make_engine
from selfjudge.errors import SelfJudgeError
from selfjudge.evaluate.consistency import make_proxy
from selfjudge.models import convert, device as memory, load as loading
from selfjudge.models.eagle import EagleHead, load_head, write_head
from selfjudge.models.gguf import BLOCKS, RECODED, GgufFile, TensorInfo, open_model
from selfjudge.models.load import Target
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


@pytest.mark.quick("llama-False", "qwen2-True")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_file_gives_the_logits_of_its_model(kind: str, tied: bool, tmp_path: Path) -> None:
    model = small(kind, tie_word_embeddings=tied)
    tokens = torch.randint(0, VOCAB, (2, 20), generator=torch.Generator().manual_seed(0))
    exact = CpuEngine(model).extend(tokens).logits
    for kinds, least, most in (({}, 0, 1e-5), ({"_norm": "F32", "weight": "Q8_0"}, 1e-5, 0.06), (MIXED, 0.01, 0.3)):
        write_model(model, tmp_path / "m.gguf", kinds)
        logits = CpuEngine(open_model(tmp_path / "m.gguf")).extend(tokens).logits
        assert least <= (logits - exact).norm() / exact.norm() < most


@pytest.mark.quick("Q4_0", "Q4_K", "Q6_K", "Q8_0", "IQ4_NL", "Q3_K")
@pytest.mark.parametrize("kind", [*KINDS, *sorted(RECODED)], ids=lambda kind: BLOCKS[kind][0])
def test_the_embedding_is_the_same_out_of_packed_rows(kind: int, tmp_path: Path) -> None:
    """A tied file reads it from the packed output matrix, one with two equal matrices from a copy."""
    tokens = torch.arange(VOCAB)[None]
    logits = []
    for tied in (True, False):
        path, names = (
            tmp_path / f"{tied}.gguf",
            ["token_embd.weight"] if tied else ["token_embd.weight", "output.weight"],
        )
        wide = tiny_model(seed=4, hidden_size=512, intermediate_size=96, num_hidden_layers=1, tie_word_embeddings=tied)
        blocks = {name: (random_blocks(kind, VOCAB, 512), kind) for name in names}
        write_model(wide, path, {}, blocks)
        logits.append(CpuEngine(open_model(path)).extend(tokens).logits)
    assert logits[0].isfinite().all()
    assert torch.equal(*logits)


@pytest.mark.quick("True-False", "False-True")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("int8", [True, False])
def test_a_head_takes_its_vocabulary_from_the_file(tied: bool, int8: bool, tmp_path: Path) -> None:
    """Rows of floats give the proposals of the whole model; rows of blocks, nearly its logits."""
    model = small("llama", tie_word_embeddings=tied, num_hidden_layers=4)
    head = tiny_head(model)
    random = torch.Generator().manual_seed(0)
    tokens, features = torch.randint(0, VOCAB, (2, 9), generator=random), torch.randn(2, 9, 192, generator=random)
    whole = CpuHead(head, model, int8=int8).append(tokens, features).logits
    for kinds, most in (({}, 0.02 if int8 else 1e-5), (MIXED, 0.3)):
        write_model(model, tmp_path / "m.gguf", kinds)
        target = open_model(tmp_path / "m.gguf")
        same = tiny_head(target)
        assert same.embedding is None
        logits = CpuHead(same, target, int8=int8).append(tokens, features).logits
        assert (logits - whole).norm() / whole.norm() < most


def test_a_packed_head_lets_its_matrices_go_and_reads_them_again(tmp_path: Path) -> None:
    write_model(small("llama", num_hidden_layers=4), tmp_path / "m.gguf", MIXED)
    target = open_model(tmp_path / "m.gguf")
    write_head(tiny_head(target), tmp_path / "head")
    random = torch.Generator().manual_seed(0)
    tokens, features = torch.randint(0, VOCAB, (2, 9), generator=random), torch.randn(2, 9, 192, generator=random)

    def logits(head: EagleHead, int8: bool) -> torch.Tensor:
        return CpuHead(head, target, int8=int8).append(tokens, features).logits

    head = load_head(tmp_path / "head", target)
    packed = logits(head, True)
    assert head.fc.weight.numel() == head.layer.mlp.up_proj.weight.numel() == 0
    for int8 in (False, True):
        assert torch.equal(logits(head, int8), logits(load_head(tmp_path / "head", target), int8))
    assert torch.equal(packed, logits(head, True))
    unsaved = tiny_head(target)
    logits(unsaved, True)
    assert unsaved.fc.weight.numel()


def test_exact_with_a_head_beside_blocks_is_plain_decoding(tmp_path: Path) -> None:
    write_model(small("llama", num_hidden_layers=4), tmp_path / "m.gguf", MIXED)
    target = open_model(tmp_path / "m.gguf")
    head, prompts = tiny_head(target), [[5, 9, 3], [7], [4, 4, 8, 30, 12]]
    answers = []
    for gamma, draft in ((0, None), (4, head)):
        tokens: list[list[int]] = [[] for _ in prompts]
        engine = make_engine(target, features=() if draft is None else draft.config.aux_layers)
        small_engine = draft and make_draft(draft, target, int8=True)
        for step in decode(BatchEngines(engine, small_engine), requests_of(prompts, 30), EXACT, gamma=gamma):
            for emission in step.emissions:
                tokens[emission.row] += emission.tokens
        answers.append(tokens)
    assert answers[0] == answers[1]


def test_a_pass_of_many_tokens_has_the_bits_of_passes_of_one(tmp_path: Path) -> None:
    write_model(small("llama"), tmp_path / "m.gguf", MIXED)
    model = open_model(tmp_path / "m.gguf")
    tokens = torch.randint(0, VOCAB, (2, 13))
    at_once, alone = CpuEngine(model, hidden=True).extend(tokens), CpuEngine(model, hidden=True)
    outputs = [alone.extend(tokens[:, i : i + 1]) for i in range(13)]
    assert torch.equal(torch.cat([o.logits for o in outputs], 1), at_once.logits)
    assert at_once.hidden is not None
    assert torch.equal(torch.cat([o.hidden for o in outputs if o.hidden is not None], 1), at_once.hidden)


def test_a_model_in_a_file_takes_no_memory_and_runs_on_the_cpu_engine(tmp_path: Path) -> None:
    write_model(small("qwen2"), tmp_path / "m.gguf", MIXED)
    model = open_model(tmp_path / "m.gguf")
    assert all(p.untyped_storage().nbytes() == 4 for p in model.parameters())
    assert isinstance(make_engine(model), CpuEngine)
    with pytest.raises(SelfJudgeError, match="q4 weights need the cpu engine, not cuda"):
        make_engine(model, kind="cuda")
    with pytest.raises(SelfJudgeError, match="this needs full precision"):
        model(torch.tensor([[1]]))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.slow
def test_the_reference_engine_dequantises_a_file(kind: str, tied: bool, tmp_path: Path) -> None:
    source = small(kind, tie_word_embeddings=tied)
    tokens = torch.randint(0, VOCAB, (2, 20), generator=torch.Generator().manual_seed(0))
    for kinds, most in (({}, 1e-5), (MIXED, 0.02)):  # floats; blocks, where the cpu engine rounds activations
        write_model(source, tmp_path / "m.gguf", kinds)
        target = Target(open_model(tmp_path / "m.gguf"))
        expected = CpuEngine(target).extend(tokens).logits
        logits = make_engine(target, kind="reference", hidden=True).extend(tokens).logits
        assert (logits - expected).norm() / expected.norm() < most
        with pytest.raises(SelfJudgeError, match="this needs full precision"):
            target.module(torch.tensor([[1]]))


def test_q4_without_a_compiler_runs_on_the_reference_engine_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(small("llama"), tmp_path / "m.gguf", MIXED)
    monkeypatch.setattr(cpu, "_compiler_reason", lambda: "its kernel cannot be compiled here (no C++ compiler found)")
    selfjudge.engine.select._warn_once.cache_clear()
    with pytest.warns(UserWarning, match=r"many times slower in q4: its kernel cannot be compiled here \(no C\+\+"):
        engine = make_engine(open_model(tmp_path / "m.gguf"))
    assert isinstance(engine, ReferenceEngine)
    assert engine.extend(torch.tensor([[1, 2, 3]])).logits.isfinite().all()
    with pytest.raises(SelfJudgeError, match="the cpu engine cannot run this model: its kernel cannot be compiled"):
        make_engine(open_model(tmp_path / "m.gguf"), kind="cpu")


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
        (b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", "of architecture 'mamba'; there are: llama, qwen2"),
        (b"blk.1.ffn_down.weight", b"blk.1.ffn_dawn.weight", "lacks the tensor blk.1.ffn_down.weight"),
        (b"llama.block_count", b"llama.black_count", "does not say llama.block_count"),
    ):
        assert old in whole
        path.write_bytes(whole.replace(old, new, 1))
        with pytest.raises(SelfJudgeError, match=message):
            open_model(path)
    at = whole.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8  # dimensions, width
    path.write_bytes(whole[:at] + b"\x13\0\0\0" + whole[at + 4 :])
    with pytest.raises(SelfJudgeError, match=r"output_norm.weight has blocks of unknown type 19; there are: F32, "):
        open_model(path)


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
            open_model(path)


def test_arrays_and_texts_of_a_sparse_file_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first has 2⁴⁰ bytes that no disk holds; reading them would take all memory."""
    path, size = tmp_path / "m.gguf", 1 << 40
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a"
    array = struct.pack("<IIQ", 9, 0, size - 64)
    path.write_bytes(head + array)
    with path.open("r+b") as file:
        file.truncate(size)
    assert GgufFile(path).metadata == {"a": None}
    one = struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", 1) + b"a"
    for content, message in (
        (head + struct.pack("<IIQ", 9, 0, size), "it is cut short"),
        (head + struct.pack("<IQ", 8, (64 << 20) + 1), "it has a text of 67108865 bytes"),
        (b"GGUF" + one + struct.pack("<I", 5), "a has 5 dimensions"),
    ):
        with path.open("r+b") as file:
            file.write(content)
        with pytest.raises(SelfJudgeError, match=f"as a GGUF model: {message}$"):
            GgufFile(path)

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(GgufFile, "_read", fail)
    with pytest.raises(SelfJudgeError, match=r"as a GGUF model: out of memory$"):
        GgufFile(path)


def test_a_padding_token_outside_the_vocabulary_is_none(tmp_path: Path) -> None:
    number = gguf.GGUFValueType.INT32
    for token in (VOCAB, -1):
        write_model(small("llama"), tmp_path / "m.gguf", {}, **{"tokenizer.ggml.padding_token_id": (token, number)})
        assert open_model(tmp_path / "m.gguf").config.pad_token_id is None


def test_a_file_that_lies_elsewhere_with_the_same_content_is_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(small("llama"), path, {})
    file = GgufFile(path)
    shutil.copy2(path, tmp_path / "copy")
    (tmp_path / "copy").replace(path)
    assert len(file.raw(file.tensors["output_norm.weight"])) == 1


def test_a_bias_that_floats_have_no_place_for_is_refused(tmp_path: Path) -> None:
    model = small("llama")
    model.model.layers[1].mlp.up_proj.bias = torch.nn.Parameter(torch.ones(96))
    write_model(model, tmp_path / "m.gguf", {})
    with pytest.raises(SelfJudgeError, match=r"m\.gguf: blk\.1\.ffn_up\.bias has no place in a model of floats"):
        convert.dequantise(open_model(tmp_path / "m.gguf"), torch.float32)


def test_a_matrix_with_another_order_of_rows_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(small("llama"), tmp_path / "m.gguf", {})
    monkeypatch.setattr(convert, "PIECE_WEIGHTS", 7 * 64)
    read: list[str] = []
    raw = GgufFile.raw

    def count(self: GgufFile, tensor: TensorInfo, rows: slice = slice(None)) -> object:
        read.append(tensor.name)
        return raw(self, tensor, rows)

    monkeypatch.setattr(GgufFile, "raw", count)
    convert.dequantise(open_model(tmp_path / "m.gguf"), torch.float32)
    assert read.count("blk.0.attn_q.weight") == read.count("blk.0.attn_k.weight") == 1
    assert read.count("blk.0.attn_output.weight") == 10  # 64 rows, 7 at a time


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
        make_engine(open_model(path))


def test_what_needs_whole_weights_says_so_before_any_work(tmp_path: Path, tiny_pair: Pair) -> None:
    write_model(small("qwen2"), tmp_path / "m.gguf", MIXED)
    pair = replace(tiny_pair, target_model=Target(open_model(tmp_path / "m.gguf")))
    with pytest.raises(SelfJudgeError, match="this needs full precision"):
        make_proxy(pair)
    with pytest.raises(SelfJudgeError, match="this needs full precision"):
        distill_draft(pair, tmp_path / "draft")
    assert not (tmp_path / "draft").exists()


def test_a_tensor_too_many_or_of_another_shape_is_refused(tmp_path: Path) -> None:
    model = small("llama")
    model.model.layers[0].input_layernorm.register_parameter("bias", torch.nn.Parameter(torch.zeros(64)))
    write_model(model, tmp_path / "m.gguf", MIXED)
    with pytest.raises(SelfJudgeError, match=r"does not know .blk\.0\.attn_norm\.bias."):
        open_model(tmp_path / "m.gguf")
    write_model(small("llama"), tmp_path / "m.gguf", {"output_norm": "Q8_0"})
    with pytest.raises(SelfJudgeError, match=r"output_norm\.weight has blocks of type Q8_0, not floats"):
        open_model(tmp_path / "m.gguf")
    model = small("llama")
    model.config.intermediate_size = 128
    write_model(model, tmp_path / "m.gguf", MIXED)
    with pytest.raises(SelfJudgeError, match=r"blk\.0\.ffn_gate\.weight is 96 × 64, not 128 × 64"):
        open_model(tmp_path / "m.gguf")


def test_q4_needs_a_file_and_a_cpu(checkpoints: dict[str, str]) -> None:
    with pytest.raises(SelfJudgeError, match="`dtype` q4 needs a GGUF file or an embedded model"):
        Pair.load(checkpoints["target"], checkpoints["draft"], device="cpu", dtype="q4")
    with pytest.raises(SelfJudgeError, match="`dtype` q4 needs a cpu, not meta"):
        Pair.load(checkpoints["target"], checkpoints["draft"], device="meta", dtype="q4")


@pytest.mark.quick("llama-True", "qwen2-False")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_file_becomes_a_checkpoint(kind: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece has a few rows here, so that matrices have many."""
    model = small(kind, tie_word_embeddings=tied)
    write_model(model, tmp_path / "m.gguf", {})
    monkeypatch.setattr(convert, "PIECE_WEIGHTS", 7 * 64)
    told: list[float] = []
    convert.convert(tmp_path / "m.gguf", tmp_path / "checkpoint", told.append)
    assert told == sorted(told)
    assert told[-1] == 1
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", dtype=torch.float32)
    assert type(made) is type(model)
    assert made.get_output_embeddings().weight.data_ptr() == made.get_input_embeddings().weight.data_ptr() or not tied
    for name, weight in model.state_dict().items():
        assert torch.equal(made.state_dict()[name], weight.half().float()), name


@pytest.mark.quick("IQ4_NL", "Q3_K")
@pytest.mark.parametrize("kind", sorted(RECODED), ids=lambda kind: BLOCKS[kind][0])
def test_blocks_without_a_kernel_are_read_as_int8(kind: int, tmp_path: Path) -> None:
    """Every weight lies within half a step of its group, and the file has the logits of its floats in int8."""
    model, path = tiny_model(seed=4, hidden_size=256, intermediate_size=256, head_dim=64), tmp_path / "m.gguf"
    shapes = {name: p for name, p in file_tensors(model).items() if p.ndim == 2 and not name.startswith("token_embd")}
    write_model(
        model, path, {}, {n: (random_blocks(kind, *p.shape, seed=i), kind) for i, (n, p) in enumerate(shapes.items())}
    )
    opened, tokens = open_model(path), torch.randint(0, VOCAB, (1, 12))
    file = GgufFile(path)
    tensor = file.tensors["blk.0.ffn_down.weight"]
    wanted, found = file.floats(tensor), dequantised(file.blocks(tensor), tensor.block_kind)
    step = np.abs(wanted).reshape(-1, 32).max(1, keepdims=True) / 127
    assert (np.abs(found - wanted).reshape(-1, 32) <= 0.6 * step).all()
    exact = CpuEngine(convert.dequantise(opened, torch.float32), int8=True)
    assert torch.equal(CpuEngine(opened).extend(tokens).logits, exact.extend(tokens).logits)


@pytest.mark.parametrize("kind", [0, 1, *KINDS, *sorted(RECODED)], ids=lambda kind: BLOCKS[kind][0])
def test_rows_of_a_tensor_are_the_floats_its_blocks_stand_for(kind: int, tmp_path: Path) -> None:
    rows, cols = 5, 512
    data = random_blocks(kind, rows, cols) if kind > 1 else np.ones((rows, cols), {0: np.float32, 1: np.float16}[kind])
    (tmp_path / "m.gguf").write_bytes(_one_tensor(kind, rows, cols) + data.tobytes())
    file = GgufFile(tmp_path / "m.gguf")
    expected = dequantised(data, kind)
    for some in (slice(None), slice(2, 4), np.array([4, 0, 4], np.int32)):
        assert np.array_equal(file.floats(file.tensors["x"], some), expected[some])


def _one_tensor(kind: int, rows: int, cols: int) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", 1) + b"x"
    head += struct.pack("<IQQIQ", 2, cols, rows, kind, 0)
    return head + bytes(-len(head) % 32)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_draft_in_blocks_is_the_draft_in_int8(kind: str, tmp_path: Path) -> None:
    """Its embedding is kept in float16: here it has no more bits."""
    model = small(kind)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight.half())
    convert.write_blocks(model, tmp_path / "draft.gguf")
    blocks = open_model(tmp_path / "draft.gguf")
    assert GgufFile(tmp_path / "draft.gguf").dtype == "int8"
    tokens = torch.randint(0, VOCAB, (2, 20), generator=torch.Generator().manual_seed(0))
    assert torch.equal(CpuEngine(blocks).extend(tokens).logits, CpuEngine(model, int8=True).extend(tokens).logits)


def test_a_drafts_embeddings_come_from_the_targets_file(tmp_path: Path) -> None:
    target, draft = small("llama", tie_word_embeddings=False), small("llama", num_hidden_layers=1)
    write_model(target, tmp_path / "m.gguf", {})
    tensors = {n: t for n, t in draft.state_dict().items() if "embed" not in n and "lm_head" not in n}
    tensors |= {name: torch.randn(64, 64) for name in ("proj_in", "proj_out")}
    raw = {**draft.config.to_dict(), "tie_word_embeddings": False}
    one, other = (convert.build_draft(tensors, raw, t) for t in (target, GgufFile(tmp_path / "m.gguf")))
    for name, weight in one.state_dict().items():
        assert torch.equal(weight, other.state_dict()[name])
    assert torch.equal(one.lm_head.weight, target.lm_head.weight.detach() @ tensors["proj_out"])


def test_a_local_file_runs_in_its_blocks_with_and_without_a_draft(
    checkpoints: dict[str, str], tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(small("qwen2"), tmp_path / "m.gguf", MIXED)
    write_model(small("llama", num_hidden_layers=1), tmp_path / "d.gguf", {"_norm": "F32", "weight": "Q8_0"})
    monkeypatch.setattr(loading, "gguf_tokenizer", lambda _: tiny_pair.tokenizer)
    target = str(tmp_path / "m.gguf")
    alone = Pair.load(target, device="cpu", needs_draft=False)
    assert (alone.dtype, alone.draft, PairEngines(alone).draft_dtype) == ("q4", None, "")
    plain = generate(alone, "w1 w2 w3", gamma=0, max_new_tokens=12)
    for draft, name in ((checkpoints["draft"], "float32"), (str(tmp_path / "d.gguf"), "int8")):
        pair = Pair.load(target, draft, device="cpu")
        assert (pair.dtype, PairEngines(pair).draft_dtype) == ("q4", name)
        assert generate(pair, "w1 w2 w3", gamma=3, max_new_tokens=12).tokens == plain.tokens
    with pytest.raises(SelfJudgeError, match="no draft ships for"):
        Pair.load(target, device="cpu", dtype="q4")


def test_too_little_memory_is_said_before_weights_are_read(
    checkpoints: dict[str, str], tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(small("llama"), tmp_path / "m.gguf", MIXED)
    monkeypatch.setattr(loading, "gguf_tokenizer", lambda _: tiny_pair.tokenizer)
    monkeypatch.setattr(memory, "available_memory", lambda: 1000)
    file = str(tmp_path / "m.gguf")
    for target, dtype in ((file, "q4"), (file, "float32"), (checkpoints["target"], "float32")):
        with pytest.raises(SelfJudgeError, match=r"needs 0\.0 GB of memory for its weights and 0\.0 GB are"):
            Pair.load(target, needs_draft=False, device="cpu", dtype=dtype)


def test_memory_is_what_the_system_and_the_group_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    assert memory.available_memory() is None
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    5 kB\n")
    assert memory.available_memory() == 5 * 1024
    (tmp_path / "memory.max").write_text("4000\n")
    (tmp_path / "memory.current").write_text("3000\n")
    assert memory.available_memory() == 1000
    (tmp_path / "memory.stat").write_text("anon 10\nfile 500\nfile_mapped 3\n")
    assert memory.available_memory() == 1500
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_memory() == 5 * 1024
