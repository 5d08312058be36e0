"""GGUF files: the metadata of a model, where its tensors lie, and their rows as floats.
A model opened from a file has the shapes of its weights and no values: engines read those from the file. What is read
is copied, never mapped, so that a file that is cut or overwritten later changes nothing."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from selfjudge.errors import SelfJudgeError, first_line
from selfjudge.models.checkpoint import GROUP, check_heads, quantise
from selfjudge.models.shape import FAMILIES, Shape, describe, head_width

BLOCKS = {  # block types by their number in a file: name, weights per block, bytes per block
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 20: ("IQ4_NL", 32, 18), 23: ("IQ4_XS", 256, 136),
}  # fmt: skip

RECODED = frozenset({10, 11, 20, 23})  # block types that the CPU kernel does not multiply: they are read as int8

ARCHITECTURES = {family.gguf: name for name, family in FAMILIES.items() if family.gguf}
"""Model types of transformers by the general architecture of a file."""

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_COUNT = 1 << 24  # layers, heads, columns, positions
_MOST_ALIGNMENT = 1 << 20
_MOST_TEXT = 64 << 20
_FLOATS: dict[int, type[np.floating[Any]]] = {0: np.float32, 1: np.float16}
_SCALES = {  # bytes of a block that hold its float16 scales
    "Q4_0": (0, 2), "Q4_1": (0, 4), "Q5_0": (0, 2), "Q5_1": (0, 4), "Q8_0": (0, 2), "Q4_K": (0, 4), "Q5_K": (0, 4),
    "Q6_K": (208, 210), "Q2_K": (80, 84), "Q3_K": (108, 110), "IQ4_NL": (0, 2), "IQ4_XS": (0, 2),
}  # fmt: skip
_MODEL = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"}


def checkpoint_name(name: str, shape: Shape) -> str:
    """The name in a checkpoint of a tensor of a GGUF file: `blk.3.attn_q.weight` is layer 3's `q_proj.weight`."""
    *layer, part, kind = name.split(".")
    parts = {part.gguf: part.module for part in (*shape.matrices, *shape.norms)}
    return f"model.layers.{layer[1]}.{parts[part]}.{kind}" if layer else f"{_MODEL[part]}.{kind}"


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: `rows` rows of `cols` weights, in blocks of type `kind`, from byte `offset` on."""

    name: str
    rows: int
    cols: int
    kind: int
    offset: int
    size: int

    @property
    def block_kind(self) -> int:
        """The type of its blocks in memory."""
        return 8 if self.kind in RECODED else self.kind


class _Reader:
    """Reads numbers and strings from the head of a file; what runs over its end is refused."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self.file, self.size = file, size

    def take(self, count: int) -> bytes:
        """The next bytes."""
        if count > _MOST_TEXT:
            raise ValueError(f"it has a text of {count} bytes")
        if len(data := self.file.read(count)) < count:
            raise ValueError("it is cut short")
        return data

    def number(self, form: str) -> Any:
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        """A value; None for an array."""
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            if kind not in _NUMBERS:
                raise ValueError(f"it has a value of unknown type {kind}")
            return self.number(_NUMBERS[kind])
        item, count = self.number("I"), self.number("Q")
        if item in _NUMBERS:
            if (end := self.file.tell() + struct.calcsize("<" + _NUMBERS[item]) * count) > self.size:
                raise ValueError("it is cut short")
            self.file.seek(end)
        elif item == _STRING:
            for _ in range(count):
                self.take(self.number("Q"))
        else:
            raise ValueError(f"it has an array of type {item}")
        return None


class GgufFile:
    """A checked GGUF file: known blocks only, and every tensor lies within the file, where no other does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._seen = self._identity()
                self.metadata: dict[str, Any] = {}
                self.tensors = {tensor.name: tensor for tensor in self._read(file, self._seen[0])}
        except (ValueError, OSError, MemoryError) as error:
            raise SelfJudgeError(f"cannot read {path} as a GGUF model: {str(error) or 'out of memory'}") from None

    def _identity(self) -> tuple[int, ...]:
        """Size and time of the last change; its place may differ each time on a network's disk."""
        now = self.path.stat()
        return now.st_size, now.st_mtime_ns

    def _read(self, file: IO[bytes], size: int) -> list[TensorInfo]:
        """Read the metadata; the tensors, in the order of their places."""
        head = _Reader(file, size)
        if head.take(4) != b"GGUF":
            raise ValueError("it is not a GGUF file")
        if (version := head.number("I")) not in (2, 3):
            raise ValueError(f"it is of version {version}, not 2 or 3")
        count, entries = head.number("Q"), head.number("Q")
        for _ in range(entries):
            key = head.text()
            self.metadata[key] = head.value(head.number("I"))
        described = []
        for _ in range(count):
            name, dimensions = head.text(), head.number("I")
            if not 0 < dimensions <= 4:
                raise ValueError(f"{name[:60]} has {dimensions} dimensions")
            shape = struct.unpack(f"<{dimensions}Q", head.take(8 * dimensions))
            described.append((name, shape, head.number("I"), head.number("Q")))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= _MOST_ALIGNMENT:
            raise ValueError(f"it is aligned to {alignment} bytes")
        start = -(-file.tell() // alignment) * alignment
        tensors = sorted((_tensor(*entry, start) for entry in described), key=lambda tensor: tensor.offset)
        if len({tensor.name for tensor in tensors}) < count:
            raise ValueError("it has two tensors of one name")
        for one, following in pairwise(tensors):
            if one.offset + one.size > following.offset:
                raise ValueError(f"{one.name} and {following.name} overlap")
        if tensors and tensors[-1].offset + tensors[-1].size > size:
            raise ValueError("it is cut short")
        return tensors

    def __deepcopy__(self, memo: object) -> GgufFile:
        """Copies of a model share the file: nothing changes it."""
        return self

    def raw(self, tensor: TensorInfo, rows: slice = slice(None)) -> NDArray[np.uint8]:
        """[rows, bytes] of a tensor, as a copy; a file that has changed and weights that are not finite are refused."""
        first, stop, _ = rows.indices(tensor.rows)
        width = tensor.size // tensor.rows
        try:
            data = np.fromfile(self.path, np.uint8, (stop - first) * width, offset=tensor.offset + first * width)
            unchanged = self._identity() == self._seen and len(data) == (stop - first) * width
        except OSError:
            unchanged = False
        if not unchanged:
            raise SelfJudgeError(f"{self.path} was changed or removed while it was read: load the model again")
        if tensor.kind in _FLOATS:
            floats = data.view(_FLOATS[tensor.kind])
        else:
            name, _, size = BLOCKS[tensor.kind]
            begin, end = _SCALES[name]
            floats = np.ascontiguousarray(data.reshape(-1, size)[:, begin:end]).view(np.float16)
        if not np.isfinite(floats).all():
            raise SelfJudgeError(f"{self.path}: {tensor.name} has weights that are not finite")
        return data.reshape(-1, width)

    def blocks(self, tensor: TensorInfo) -> NDArray[np.uint8]:
        """[rows, bytes] of a tensor in blocks of its `block_kind`."""
        if tensor.kind not in RECODED:
            return self.raw(tensor)
        some = (torch.from_numpy(self.floats(tensor, slice(n, n + 4096))) for n in range(0, tensor.rows, 4096))
        return np.concatenate([int8_blocks(rows).reshape(len(rows), -1) for rows in some])

    def floats(self, tensor: TensorInfo, rows: slice | NDArray[np.integer[Any]] = slice(None)) -> NDArray[np.float32]:
        """[rows, cols] of a tensor as floats: all rows, or some."""
        raw = self.raw(tensor, rows) if isinstance(rows, slice) else self.raw(tensor)[rows]
        if tensor.kind in _FLOATS:
            return raw.view(_FLOATS[tensor.kind]).astype(np.float32)
        from gguf import quants  # our kernel has a reader of its own: this one is for files that are written anew

        values: NDArray[np.float32] = getattr(quants, BLOCKS[tensor.kind][0]).dequantize_rows(raw)
        return values

    @property
    def dtype(self) -> str:
        """The weight format as tables print it: int8 where no block has fewer bits, else q4."""
        return "int8" if all(BLOCKS[t.kind][0] in ("F32", "F16", "Q8_0") for t in self.tensors.values()) else "q4"


def _tensor(name: str, shape: tuple[int, ...], kind: int, offset: int, start: int) -> TensorInfo:
    """What a file says of a tensor, if it can be read: its blocks are known, and it is a matrix or a row."""
    if kind not in BLOCKS:
        known = ", ".join(block[0] for block in BLOCKS.values())
        raise ValueError(f"{name} has blocks of unknown type {kind}; there are: {known}")
    if len(shape) not in (1, 2) or not all(shape):
        raise ValueError(f"{name} has the dimensions {' × '.join(map(str, shape[:9])) or 'of nothing'}")
    cols, rows = shape[0], shape[1] if len(shape) == 2 else 1
    block, weights, size = BLOCKS[kind]
    if cols % weights:
        raise ValueError(f"{name} is {cols} wide, which blocks of {block} do not divide")
    return TensorInfo(name, rows, cols, kind, start + offset, rows * cols // weights * size)


def tensor_order(config: PretrainedConfig, name: str, rows: int) -> NDArray[np.int32] | None:
    """Where the rows of a matrix, or the entries of its bias, lie in a file; None where they lie in order."""
    if not FAMILIES[config.model_type].interleaved or name.split(".")[-2] not in ("attn_q", "attn_k"):
        return None
    pairs = np.arange(rows, dtype=np.int32).reshape(-1, head_width(config) // 2, 2)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(-1)


def int8_blocks(weight: torch.Tensor) -> NDArray[np.uint8]:
    """A matrix in int8, as blocks of type Q8_0: a scale, then 32 values."""
    values, scale = quantise(weight)
    joined = torch.cat([scale.view(torch.uint8).view(-1, 2), values.view(torch.uint8).view(-1, GROUP)], 1)
    return joined.numpy()


class _Metadata:
    """Reads the numbers that describe a model from a file, and refuses what no model can have."""

    def __init__(self, file: GgufFile) -> None:
        self.file, name = file, file.metadata.get("general.architecture")
        if not isinstance(name, str) or name not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise SelfJudgeError(f"{file.path} has a model of architecture {name!r}; there are: {known}")
        self.architecture = name

    def positive(self, name: str, default: float | None = None, kind: Any = int | float, most: float = math.inf) -> Any:
        """A number above 0 and at most `most`; `default` where the file does not say it."""
        value = self.file.metadata.get(f"{self.architecture}.{name}", default)
        if value is None:
            raise SelfJudgeError(f"{self.file.path} does not say {self.architecture}.{name}")
        if not isinstance(value, kind) or isinstance(value, bool) or not 0 < value <= most or value == math.inf:
            raise SelfJudgeError(f"{self.file.path}: {self.architecture}.{name} cannot be {value!r}")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        return int(self.positive(name, default, int, _MOST_COUNT))

    def rope(self) -> dict[str, Any]:
        """The rotary embedding, as a config of transformers has it."""
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self.positive("rope.freq_base", 10000.0)}
        scaling = self.file.metadata.get(f"{self.architecture}.rope.scaling.type", "none")
        if "rope_factors_long.weight" in self.file.tensors:
            scaling = "longrope"
        if scaling == "linear":
            rope |= {"rope_type": "linear", "factor": self.positive("rope.scaling.factor")}
        elif scaling != "none":
            raise SelfJudgeError(f"{self.file.path} has rotary embeddings of type {scaling!r}")
        return rope

    def check_window(self) -> None:
        """Refuse a sliding window in files of an architecture for which `own` does not read it."""
        name = f"{self.architecture}.attention.sliding_window"
        if self.architecture not in ("phi3", "gemma2", "gemma3") and (window := self.file.metadata.get(name)):
            raise SelfJudgeError(f"{self.file.path}: {name} is {window!r}, and such windows are not supported")

    def own(self, config: dict[str, Any]) -> dict[str, Any]:
        """What only files of this architecture say, and what llama.cpp knows of their models beside it."""
        heads, width, dim = (config[name] for name in ("num_attention_heads", "hidden_size", "head_dim"))
        if self.architecture == "granite":
            return {
                "attention_multiplier": self.positive("attention.scale", dim**-0.5),
                "embedding_multiplier": self.positive("embedding_scale", 1.0),
                "residual_multiplier": self.positive("residual_scale", 1.0),
                "logits_scaling": self.positive("logit_scale", 1.0),
            }
        if self.architecture == "phi3":
            window = self.file.metadata.get("phi3.attention.sliding_window", 0)
            share = self.count("rope.dimension_count", dim) / dim
            return {
                "sliding_window": self.count("attention.sliding_window") if window else None,
                "rope_parameters": {**config["rope_parameters"], "partial_rotary_factor": share},
            }
        if self.architecture in ("gemma2", "gemma3"):
            largest = config["num_hidden_layers"] == {"gemma2": 46, "gemma3": 62}[self.architecture]
            own = {
                "sliding_window": self.count("attention.sliding_window"),
                "query_pre_attn_scalar": width // heads if largest else dim,
                "hidden_activation": "gelu_pytorch_tanh",
            }
            if self.architecture == "gemma2":
                own["attn_logit_softcapping"] = float(self.positive("attn_logit_softcapping", 50.0))
                own["final_logit_softcapping"] = float(self.positive("final_logit_softcapping", 30.0))
                return own
            near = {"rope_type": "default", "rope_theta": self.positive("rope.freq_base_swa", 10000.0)}
            return own | {"rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": near}}
        return {}


def read_config(file: GgufFile) -> PretrainedConfig:
    """The config of transformers for the model in a file."""
    said = _Metadata(file)
    heads, width = said.count("attention.head_count"), said.count("embedding_length")
    kv_heads = said.count("attention.head_count_kv", heads)
    head_dim = said.count("attention.key_length", max(1, width // heads))
    check_heads(heads, kv_heads, file.path)
    said.check_window()
    rotated = said.count("rope.dimension_count", head_dim)
    if head_dim % 2 or (rotated != head_dim if said.architecture != "phi3" else rotated % 2 or rotated > head_dim):
        raise SelfJudgeError(f"{file.path} rotates {rotated} of the {head_dim} columns of a head, not all, in pairs")
    vocabulary = _expected(file, "token_embd.weight").rows
    if (layers := said.count("block_count")) > len(file.tensors):
        raise SelfJudgeError(f"{file.path} has {len(file.tensors)} tensors and says that it has {layers} layers")
    config = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": said.count("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": said.positive("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": said.count("context_length"),
        "rope_parameters": said.rope(),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": said.architecture != "qwen2" and "blk.0.attn_q.bias" in file.tensors,
        "bos_token_id": _special_token(file, "bos", vocabulary),
        "eos_token_id": _special_token(file, "eos", vocabulary),
        "pad_token_id": _special_token(file, "padding", vocabulary),
    }
    try:
        made = AutoConfig.for_model(ARCHITECTURES[said.architecture], **config | said.own(config))
        describe(made)
    except ValueError as error:
        raise SelfJudgeError(f"{file.path} cannot be read: {first_line(error)}") from None
    return made


def _special_token(file: GgufFile, name: str, vocabulary: int) -> int | None:
    """The id of a token such as `eos`; None where the file names none."""
    token = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    outside = type(token) is int and not 0 <= token < vocabulary
    if outside and name == "padding":  # as files say that have none: nothing here is padded with it
        return None
    if token is not None and (outside or type(token) is not int):
        raise SelfJudgeError(f"{file.path}: tokenizer.ggml.{name}_token_id cannot be {token!r}")
    return token


def _expected(file: GgufFile, name: str, shape: tuple[int, int] | None = None) -> TensorInfo:
    """A tensor that must be there, of this shape if one is given."""
    tensor = file.tensors.get(name)
    if tensor is None:
        raise SelfJudgeError(f"{file.path} lacks the tensor {name}")
    if shape is not None and (tensor.rows, tensor.cols) != shape:
        raise SelfJudgeError(f"{file.path}: {name} is {tensor.rows} × {tensor.cols}, not {shape[0]} × {shape[1]}")
    if tensor.rows == 1 and tensor.kind not in (0, 1):
        raise SelfJudgeError(f"{file.path}: {name} has blocks of type {BLOCKS[tensor.kind][0]}, not floats")
    return tensor


def expected_tensors(config: PretrainedConfig) -> dict[str, tuple[int, int]]:
    """Names and shapes of the tensors that a model of this config has in a file; biases and the head may be missing."""
    shape, layer = describe(config), {}
    for part in (*shape.matrices, *shape.norms):
        layer[part.gguf] = part.first + part.rows, part.cols
    shapes = {f"blk.{i}.{n}.weight": size for i in range(shape.layers) for n, size in layer.items()}
    return shapes | {"token_embd.weight": (config.vocab_size, shape.hidden), "output_norm.weight": (1, shape.hidden)}


FULL_PRECISION = "this needs full precision: `dtype` q4 cannot be used"


def gguf_file(model: nn.Module) -> GgufFile | None:
    """The file that holds the weights of a module; None for a module that holds them itself."""
    return getattr(model, "gguf_file", None)


def open_model(path: Path) -> PreTrainedModel:
    """A model whose weights stay in a GGUF file: its parameters have their shapes, take no memory and are all NaN."""
    file = GgufFile(path)
    config = read_config(file)
    shapes = expected_tensors(config)
    for name, shape in shapes.items():
        _expected(file, name, shape)
    matrices = {name: shape for name, shape in shapes.items() if name.startswith("blk.") and shape[0] > 1}
    optional = {name.removesuffix("weight") + "bias": (1, shape[0]) for name, shape in matrices.items()}
    optional["output.weight"] = config.vocab_size, config.hidden_size
    optional["rope_freqs.weight"] = 1, head_width(config) // 2
    for name in file.tensors.keys() - shapes.keys():
        if name not in optional:
            raise SelfJudgeError(f"{path} has a tensor that its architecture does not know ({name})")
        _expected(file, name, optional[name])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            empty = torch.full((), torch.nan).expand(parameter.shape)
            setattr(module, name, nn.Parameter(empty, requires_grad=False))
    rotary = type(model.model.rotary_emb)(config)
    if (factors := file.tensors.get("rope_freqs.weight")) is not None:
        for frequencies in rotary.buffers():
            frequencies /= torch.from_numpy(file.floats(factors)[0])
    if not all(bool((values * config.max_position_embeddings).isfinite().all()) for values in rotary.buffers()):
        raise SelfJudgeError(f"{path} has rotary embeddings that are not finite")
    model.model.rotary_emb = rotary
    model.base_model.register_forward_pre_hook(_refuse)
    model.gguf_file = file
    return model.eval()


def _refuse(*_: object) -> None:
    raise SelfJudgeError(FULL_PRECISION)
