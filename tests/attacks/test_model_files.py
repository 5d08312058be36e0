"""Files of models that change while they are served, and files that a stranger made to crash their reader."""

from __future__ import annotations

import os
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import PreTrainedModel

from conftest import tiny_model
from fake_gguf import write_model
from selfjudge.engine.select import make_engine
from selfjudge.errors import SelfJudgeError
from selfjudge.judge.config import JudgeConfig
from selfjudge.judge.model import Judge
from selfjudge.models.gguf import GgufFile, open_model
from selfjudge.models.load import Loader, Target
from servers import Server, servers

TEMPLATE = {"tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}"}
KINDS = {"_norm": "F32", "rope": "F32", "weight": "Q8_0"}
NUMBER, FLOAT = gguf.GGUFValueType.UINT32, gguf.GGUFValueType.FLOAT32


def small(kind: str = "llama", **options: Any) -> PreTrainedModel:
    return tiny_model(
        kind, seed=4, hidden_size=64, intermediate_size=96, initializer_range=0.15, vocab_size=258, **options
    )


# ------------------------------------------------------------------------------------------ changed while it is served


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    with servers() as start:
        yield start


def cut(file: Path) -> None:
    os.truncate(file, 100)


def overwrite(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.write(bytes(file.stat().st_size))


def ask(server: Server, prompt: str) -> str:
    body = {"prompt": prompt, "max_tokens": 12}
    status, _, answer = server.send("POST", "/v1/completions", body)
    assert status == 200, (answer, server.process.poll(), server.log)
    return str(answer["choices"][0]["text"])


def check_goes_on(server: Server, files: list[Path], change: Callable[[Path], None]) -> None:
    """Answers stay as they were, also to prompts whose tokens were never read before, and the end is in order."""
    known, expected = "ab", ask(server, "ab")
    for file in files:
        change(file)
    assert ask(server, known) == expected
    answers = [ask(server, text) for text in ("xyz", "QRS 0123", "(){}[]", "~#")]
    assert all(answers)
    assert server.process.poll() is None
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(300) >= 0, server.log


@pytest.mark.slow
@pytest.mark.parametrize("change", [cut, pytest.param(overwrite, marks=pytest.mark.slow)])
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_gguf_file_that_changes_while_it_is_served(
    change: Callable[[Path], None], tied: bool, serve: Callable[..., Server], tmp_path: Path
) -> None:
    target, draft = tmp_path / "m.gguf", tmp_path / "d.gguf"
    write_model(small("qwen2", tie_word_embeddings=tied), target, KINDS, **TEMPLATE)
    write_model(small(num_hidden_layers=1), draft, KINDS, **TEMPLATE)
    server = serve("--target", str(target), "--draft", str(draft), "--gamma", "2")
    check_goes_on(server, [target, draft], change)


@pytest.mark.parametrize("change", [cut, pytest.param(overwrite, marks=pytest.mark.slow)])
def test_a_checkpoint_and_a_judge_that_change_while_they_are_served(
    change: Callable[[Path], None], serve: Callable[..., Server], checkpoints: dict[str, str], tmp_path: Path
) -> None:
    folders = {name: Path(shutil.copytree(checkpoints[name], tmp_path / name)) for name in ("target", "draft")}
    config = JudgeConfig(hidden_size=32, target=str(folders["target"]), thresholds={"R": 0.5})
    Judge(config, torch.ones(32)).save_pretrained(tmp_path / "judge")
    options = [f"--{name}={folder}" for name, folder in folders.items()]
    server = serve(*options, "--judge", str(tmp_path / "judge"), "--gamma", "2")
    files = [folder / "model.safetensors" for folder in (*folders.values(), tmp_path / "judge")]
    check_goes_on(server, files, change)


@pytest.mark.parametrize("change", [cut, overwrite, Path.unlink])
def test_a_file_that_changes_before_its_weights_are_read(change: Callable[[Path], None], tmp_path: Path) -> None:
    write_model(small(), tmp_path / "m.gguf", KINDS)
    model = open_model(tmp_path / "m.gguf")
    change(tmp_path / "m.gguf")
    with pytest.raises(SelfJudgeError, match=r"m\.gguf was changed or removed while it was read: load the model again"):
        make_engine(model)


# -------------------------------------------------------------------------------------------------- made by a stranger


def run(path: Path) -> torch.Tensor:
    """Logits of a file, as every command would get them."""
    return make_engine(Target(open_model(path), reference=str(path)), kind="cpu").extend(torch.tensor([[1, 2]])).logits


def number(key: str, value: float) -> dict[str, Any]:
    return {key: (value, NUMBER if isinstance(value, int) else FLOAT)}


METADATA: list[tuple[dict[str, Any], str]] = [
    (number("llama.attention.key_length", 15), "rotates|not 60 × 64"),
    (number("tokenizer.ggml.eos_token_id", 258), "eos_token_id cannot be 258"),
    (number("tokenizer.ggml.bos_token_id", 1.5), r"bos_token_id cannot be 1\.5"),
    ({"tokenizer.ggml.padding_token_id": "x"}, "padding_token_id cannot be 'x'"),
    ({"llama.attention.key_length": (True, gguf.GGUFValueType.BOOL)}, "key_length cannot be True"),
    (
        {"llama.rope.scaling.type": "linear"} | number("llama.rope.scaling.factor", 1e-38),
        "rotary embeddings that are not",
    ),
    (number("general.alignment", 0), "aligned to 0 bytes"),
]


@pytest.mark.parametrize(("metadata", "message"), METADATA, ids=[message for _, message in METADATA])
def test_metadata_that_a_library_would_stumble_over(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_model(small(), tmp_path / "m.gguf", KINDS, **metadata)
    with pytest.raises(SelfJudgeError, match=message):
        run(tmp_path / "m.gguf")


@pytest.mark.parametrize("kv_heads", [3, 8])
def test_key_heads_that_heads_cannot_share(kv_heads: int, tmp_path: Path) -> None:
    """Shapes fit the config, so nothing else refuses them: the engine would read memory that nobody wrote."""
    model = small(num_attention_heads=4, num_key_value_heads=4)
    layer = model.model.layers[0].self_attn
    for block in model.model.layers:
        for name in ("k_proj", "v_proj"):
            setattr(block.self_attn, name, torch.nn.Linear(64, kv_heads * layer.head_dim, bias=False))
    model.config.num_key_value_heads = kv_heads
    write_model(model, tmp_path / "m.gguf", KINDS)
    with pytest.raises(SelfJudgeError, match=f"has 4 heads, which cannot share {kv_heads} key heads evenly"):
        run(tmp_path / "m.gguf")


def test_a_checkpoint_with_such_heads(checkpoints: dict[str, str], tmp_path: Path) -> None:
    model = tiny_model(num_attention_heads=4, num_key_value_heads=4)
    for block in model.model.layers:
        for name in ("k_proj", "v_proj"):
            setattr(block.self_attn, name, torch.nn.Linear(32, 3 * block.self_attn.head_dim, bias=False))
    model.config.num_key_value_heads = 3
    shutil.copytree(checkpoints["target"], tmp_path / "target")
    model.save_pretrained(tmp_path / "target")
    loader = Loader.choose(str(tmp_path / "target"), "cpu", None, None, False)
    with pytest.raises(SelfJudgeError, match="cannot share 3 key heads evenly"):
        loader.load_target(str(tmp_path / "target"))


@pytest.mark.parametrize("factor", [0.0, float("nan"), float("inf"), 1e-38])
def test_rotary_factors_that_give_no_angle(factor: float, tmp_path: Path) -> None:
    model = small()
    model.model.register_parameter("rope_freqs", torch.nn.Parameter(torch.full((8,), factor)))
    write_model(model, tmp_path / "m.gguf", KINDS)
    with pytest.raises(SelfJudgeError, match="not finite"):
        run(tmp_path / "m.gguf")


def changed_tensor(path: Path, name: str, **changes: int) -> None:
    """Change the number of dimensions, the type or the offset of a tensor in the head of a file."""
    content = bytearray(path.read_bytes())
    at = content.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
    (dimensions,) = struct.unpack_from("<I", content, at)
    places = {"dimensions": (at, "<I"), "width": (at + 4, "<Q"), "offset": (at + 8 + 8 * dimensions, "<Q")}
    for what, value in changes.items():
        struct.pack_into(places[what][1], content, places[what][0], value)
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("blk.0.attn_norm.weight", {"offset": 0}, "overlap"),
        ("output_norm.weight", {"offset": 32}, "overlap"),
        ("output_norm.weight", {"width": 0}, "output_norm.weight has the dimensions 0"),
        ("output_norm.weight", {"dimensions": 0}, "cannot read"),
        ("output_norm.weight", {"offset": 1 << 63}, "cut short"),
        ("output_norm.weight", {"width": 1 << 62}, "cannot read"),
    ],
)
def test_tensors_where_they_must_not_be(name: str, changes: dict[str, int], message: str, tmp_path: Path) -> None:
    write_model(small(), tmp_path / "m.gguf", KINDS)
    changed_tensor(tmp_path / "m.gguf", name, **changes)
    with pytest.raises(SelfJudgeError, match=message):
        run(tmp_path / "m.gguf")


def test_two_tensors_of_one_name(tmp_path: Path) -> None:
    write_model(small(), tmp_path / "m.gguf", KINDS)
    content = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(content.replace(b"blk.0.attn_norm.weight", b"blk.1.attn_norm.weight"))
    with pytest.raises(SelfJudgeError, match="two tensors of one name"):
        GgufFile(tmp_path / "m.gguf")


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight"])
def test_finite_weights_whose_logits_are_not(name: str, checkpoints: dict[str, str], tmp_path: Path) -> None:
    """One pass when an engine is made: of a file, and of a checkpoint."""
    file, checkpoint = small(), tiny_model()
    with torch.no_grad():
        for model in (file, checkpoint):
            dict(model.named_parameters())[name].fill_(3e38)
    write_model(file, tmp_path / "m.gguf", {})
    shutil.copytree(checkpoints["target"], tmp_path / "target")
    checkpoint.save_pretrained(tmp_path / "target")
    with pytest.raises(SelfJudgeError, match=r"m\.gguf gives logits that are not finite"):
        run(tmp_path / "m.gguf")
    loader = Loader.choose(str(tmp_path / "target"), "cpu", None, None, False)
    target, _ = loader.load_target(str(tmp_path / "target"))
    for kind in ("cpu", "reference"):
        with pytest.raises(SelfJudgeError, match=r"target gives logits that are not finite"):
            make_engine(target, kind=kind)
