"""Weights are read one by one from safetensors files; quantised ones become what their formula says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from conftest import tiny_model
from families import family_model
from selfjudge.errors import SelfJudgeError
from selfjudge.models import checkpoint
from selfjudge.models.checkpoint import StoredTensor, open_checkpoint, read_headers
from selfjudge.models.pair import Pair

CPU = torch.device("cpu")
Tensors = dict[str, Tensor]


def written(folder: Path, checkpoints: dict[str, str], model: PreTrainedModel, shard: str = "20KB") -> Path:
    """The model in shards, with a tokenizer."""
    model.save_pretrained(folder, max_shard_size=shard)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(checkpoints["target"]) / name, folder)
    return folder


def load(folder: Path, dtype: str = "float32") -> PreTrainedModel:
    return Pair.load(str(folder), device="cpu", dtype=dtype, needs_draft=False).target


@pytest.mark.parametrize("shard", ["20KB", "1GB"])
def test_every_weight_of_every_shard_arrives(
    tmp_path: Path, checkpoints: dict[str, str], shard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "PIECE", 1000)  # tensors are read in several pieces
    model = tiny_model(tie_word_embeddings=shard == "1GB")
    folder = written(tmp_path / "model", checkpoints, model, shard)
    assert len([*folder.glob("*.safetensors")]) == (1 if shard == "1GB" else 5)
    loaded = load(folder)
    expected = dict(model.named_parameters())
    assert [name for name, _ in loaded.named_parameters()] == [*expected]
    assert all(torch.equal(parameter, expected[name]) for name, parameter in loaded.named_parameters())
    assert loaded.generation_config.eos_token_id == model.generation_config.eos_token_id
    assert load(folder, "bfloat16").lm_head.weight.equal(model.lm_head.weight.bfloat16())


def test_a_loaded_model_does_not_depend_on_its_files(tmp_path: Path, checkpoints: dict[str, str]) -> None:
    """Files may be cut or overwritten while their weights are in use."""
    model = tiny_model()
    folder = written(tmp_path / "model", checkpoints, model)
    loaded = load(folder)
    for file in folder.glob("*.safetensors"):
        file.write_bytes(bytes(file.stat().st_size))
    assert all(map(torch.equal, loaded.parameters(), model.parameters()))


def test_a_file_that_ends_early_is_refused(tmp_path: Path, checkpoints: dict[str, str]) -> None:
    folder = written(tmp_path / "model", checkpoints, tiny_model())
    file = sorted(folder.glob("*.safetensors"))[0]
    tensor = max(read_headers([file], CPU).values(), key=lambda stored: stored.offset)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"{file.name} ends early"):
        tensor.read()
    with pytest.raises(SelfJudgeError, match="not a readable checkpoint") as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_a_window_larger_than_the_context_is_said(tmp_path: Path, checkpoints: dict[str, str]) -> None:
    folder = written(tmp_path / "model", checkpoints, family_model("Mistral, sliding window", sliding_window=97))
    with pytest.warns(UserWarning, match="its sliding window of 97 exceeds its context of 96"):
        load(folder)


def test_a_tensor_goes_to_its_own_device_whatever_transformers_asks_for(tmp_path: Path) -> None:
    save_file({"x": torch.arange(6.0).view(2, 3)}, tmp_path / "x.safetensors")
    stored = read_headers([tmp_path / "x.safetensors"], torch.device("meta"))["x"]
    assert isinstance(stored, StoredTensor)
    moved = StoredTensor(stored.file, stored.dtype, stored.shape, stored.offset, CPU)[...].to(
        device="meta", dtype=torch.float64
    )
    assert moved.device == CPU
    assert moved.equal(torch.arange(6.0, dtype=torch.float64).view(2, 3))


def pack(values: Tensor, bits: int) -> Tensor:
    """[N, K] whole numbers, 32 bits of them in each word, written with Python's own numbers."""
    each = 32 // bits
    rows = []
    for row in values.tolist():
        words = [sum(v << bits * i for i, v in enumerate(row[k : k + each])) for k in range(0, len(row), each)]
        rows.append([word - (1 << 32) if word >> 31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32)


class Quantised:
    """The parts of a quantised matrix as each format stores them, and the floats that they stand for, number by number."""

    def __init__(self, rows: int, cols: int, group: int = 32, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows, self.cols, self.group = rows, cols, group
        self.q = torch.randint(0, 16, (rows, cols), generator=generator)
        self.zero = torch.randint(1, 16, (rows, cols // group), generator=generator)
        self.scale = (torch.rand(rows, cols // group, generator=generator) * 0.02 + 0.01).half()
        q, zero, scale = self.q.tolist(), self.zero.tolist(), self.scale.tolist()
        self.values = torch.tensor(
            [[(q[n][k] - zero[n][k // group]) * scale[n][k // group] for k in range(cols)] for n in range(rows)]
        )

    def gptq(self, shift: int = 1) -> Tensors:
        return {
            "qweight": pack(self.q, 4).t().contiguous(),
            "qzeros": pack((self.zero - shift).t(), 4),
            "scales": self.scale.t().contiguous(),
            "g_idx": torch.tensor([k // self.group for k in range(self.cols)], dtype=torch.int32),
        }

    def awq(self) -> Tensors:
        order = [0, 2, 4, 6, 1, 3, 5, 7]  # which column each four bits hold

        def packed(values: Tensor) -> Tensor:
            return pack(values.view(len(values), -1, 8)[..., order].flatten(1), 4)

        return {"qweight": packed(self.q.t()), "qzeros": packed(self.zero.t()), "scales": self.scale.t().contiguous()}

    def compressed(self) -> Tensors:
        return {
            "weight_packed": pack(self.q, 4),
            "weight_scale": self.scale,
            "weight_zero_point": pack(self.zero.t(), 4).t().contiguous(),
            "weight_shape": torch.tensor([self.rows, self.cols]),
        }


COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
INT4 = {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group", "symmetric": False}


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, Quantised.gptq),
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
            lambda made: {name: part for name, part in made.gptq(0).items() if name != "g_idx"},
        ),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, Quantised.awq),
        (COMPRESSED | {"config_groups": {"group_0": {"weights": INT4}}}, Quantised.compressed),
    ],
)
def test_four_bits_become_the_floats_that_they_stand_for(
    config: dict[str, Any], parts: Callable[[Quantised], Tensors], tmp_path: Path, checkpoints: dict[str, str]
) -> None:
    """All matrices of a whole model; what is not quantised stays."""
    model = tiny_model(hidden_size=64, intermediate_size=96, num_hidden_layers=1)

    def quantise(name: str, weight: Tensor, tensors: Tensors) -> Tensor:
        made = Quantised(*weight.shape, seed=len(name))
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts(made).items()}
        return made.values

    assert_dequantised(model, quantise, config, written(tmp_path / "model", checkpoints, model, "1GB"))


def assert_dequantised(
    model: PreTrainedModel, quantise: Callable[[str, Tensor, Tensors], Tensor], config: dict[str, Any], folder: Path
) -> None:
    """Quantise the matrices of the layers in a folder: they load as the floats that `quantise` gives."""
    file = folder / "model.safetensors"
    tensors, expected = load_file(file), {}
    for name in [name for name in tensors if "_proj." in name]:
        expected[name] = quantise(name.removesuffix(".weight"), tensors.pop(name), tensors)
    assert len(expected) == 7 * model.config.num_hidden_layers
    save_file(tensors, file, {"format": "pt"})
    described = json.loads((folder / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(described))
    loaded = load(folder)
    weights = dict(loaded.named_parameters())
    assert not hasattr(loaded.config, "quantization_config")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(weights[name], expected.get(name, parameter), rtol=1e-6, atol=1e-6)


def _per_tensor(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.tensor(0.5)
    return scale, scale.expand_as(weight)


def _per_row(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.rand(len(weight), 1) + 0.1
    return scale, scale.expand_as(weight)


def _by_block(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks of 24 rows and 40 columns, cut at the edges."""
    rows, cols = weight.shape
    scale = torch.rand(-(-rows // 24), -(-cols // 40)) + 0.1
    return scale, torch.tensor([[float(scale[n // 24, k // 40]) for k in range(cols)] for n in range(rows)])


@pytest.mark.quick("config0-*-dtype0", "config1-*-dtype1", "config2-*-dtype2", "config3-*-dtype0")
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
@pytest.mark.parametrize(
    ("config", "name", "scales"),
    [
        ({"quant_method": "fp8", "weight_block_size": [24, 40]}, "weight_scale_inv", _by_block),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "weight_scale", _per_tensor),
        ({"quant_method": "fbgemm_fp8"}, "weight_scale", _per_row),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "weight_scale", _per_row),
    ],
)
def test_weights_of_one_byte_are_multiplied_with_their_scales(
    dtype: torch.dtype, config: dict[str, Any], name: str, scales: Callable[[Tensor], tuple[Tensor, Tensor]],
    tmp_path: Path, checkpoints: dict[str, str],
) -> None:  # fmt: skip
    model = tiny_model(hidden_size=64, intermediate_size=96, num_hidden_layers=1)

    def quantise(module: str, weight: Tensor, tensors: Tensors) -> Tensor:
        scale, factors = scales(weight)
        stored = (weight / factors).to(dtype) if dtype.is_floating_point else (100 * weight).round().to(dtype)
        tensors |= {f"{module}.weight": stored, f"{module}.{name}": scale, f"{module}.input_scale": torch.ones(1)}
        return stored.float() * factors

    assert_dequantised(model, quantise, config, written(tmp_path / "model", checkpoints, model, "1GB"))


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ["weight", "weight.absmax"]),
        ({"quant_method": "gptq", "bits": 3}, ["qweight"]),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, ["B"]),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, ["qweight"]),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": INT4 | {"type": "float"}}}},
            ["weight_packed"],
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": INT4}, "b": {"weights": {}}}},
            ["weight_packed"],
        ),
        ({"quant_method": "compressed-tensors"}, ["weight", "weight_scale", "weight_zero_point"]),
        ({"quant_method": "modelopt"}, ["weight", "weight_scale_2"]),
        ({"quant_method": "quark"}, ["weight"]),
    ],
)
def test_what_is_quantised_otherwise_names_the_engine_that_takes_it(
    config: dict[str, Any], parts: list[str], tmp_path: Path, checkpoints: dict[str, str]
) -> None:
    folder = written(tmp_path / "model", checkpoints, tiny_model(), "1GB")
    tensors = load_file(folder / "model.safetensors")
    module = "model.layers.0.mlp.up_proj"
    tensors |= {f"{module}.{part}": torch.ones(32, 4, dtype=torch.int8) for part in parts}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    described = json.loads((folder / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(described))
    with pytest.raises(
        SelfJudgeError, match=f"quantised by {config['quant_method']} .*need.* --backend vllm"
    ) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_without_quantisation_is_as_it_is(tmp_path: Path, checkpoints: dict[str, str]) -> None:
    folder = written(tmp_path / "model", checkpoints, tiny_model(), "1GB")
    weights = open_checkpoint([folder / "model.safetensors"], tiny_model().config, CPU)
    assert all(isinstance(weight, StoredTensor) for weight in weights.values())
    assert len(weights) == len(tiny_model().state_dict())
