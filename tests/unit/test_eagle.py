"""The EAGLE-3 head on tiny targets: its equations, its cache, its folder and what it refuses."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.cache_utils import DynamicCache

from conftest import VOCAB, tiny_model
from selfjudge.errors import SelfJudgeError
from selfjudge.models.catalogue import is_head
from selfjudge.models.checkpoint import dequantise, quantise, unpack_six
from selfjudge.models.eagle import (
    COMPACT,
    EagleConfig,
    EagleHead,
    auxiliary_layers,
    captured_states,
    load_head,
    read_head,
    write_head,
)
from selfjudge.models.pull import weights_sha256
from selfjudge.store import read_tensors, write_tensors

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from pack_draft import pack_head

DRAFT_IDS = torch.tensor([0, 2, 5, 6, 7, 11, 30, 31, 32, 40, 59, 60])


def random_head(target: hf.PreTrainedModel, seed: int = 0, **options: Any) -> EagleHead:
    torch.manual_seed(seed)
    inner = options.pop("intermediate_size", None)
    config = replace(EagleConfig.for_target(target, len(DRAFT_IDS), inner), **options)
    head = EagleHead(config, DRAFT_IDS)
    for p in head.parameters():
        torch.nn.init.normal_(p, 1.0 if p.dim() == 1 else 0.0, 0.2)
    return head.bind(target, "a" * 64, "tiny").requires_grad_(False)


@pytest.mark.parametrize("layers", range(1, 40))
def test_three_layers_are_read_and_differ_where_they_can(layers: int) -> None:
    low, middle, high = auxiliary_layers(layers)
    assert 0 <= low <= middle <= high < layers
    assert len({low, middle, high}) == min(3, layers)
    if layers >= 7:
        assert (low, middle, high) == (2, layers // 2, layers - 3)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral-window", "gemma2", "gemma3"])
def test_the_states_are_those_that_enter_the_layers(kind: str) -> None:
    model = tiny_model(kind, num_hidden_layers=4)
    ids = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(ids, output_hidden_states=True).hidden_states
        with captured_states(model, (1, 2, 3)) as states:
            model.base_model(ids)
            assert all(torch.equal(states[n], expected[i]) for n, i in enumerate((1, 2, 3)))
            seen = list(states)
        model.base_model(ids + 0)
    assert all(one is other for one, other in zip(seen, states, strict=True)), "hooks are gone afterwards"


def by_hand(head: EagleHead, tokens: list[int], g: Tensor) -> Tensor:
    """a [T, H] entry by entry, as the equations say."""
    c, layer = head.config.layer, head.layers[0]
    attention = layer.self_attn

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.pow(2).mean() + c.rms_norm_eps).sqrt() * weight

    def rotated(x: Tensor, position: int) -> Tensor:
        frequencies = c.rope_parameters["rope_theta"] ** (-torch.arange(0, c.head_dim, 2) / c.head_dim)
        first, second = x.view(-1, 2, c.head_dim // 2).unbind(1)
        cosine, sine = (position * frequencies).cos(), (position * frequencies).sin()
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)

    keys, values, outputs = [], [], []
    for t, token in enumerate(tokens):
        embedded = norm(head.embedding[token], layer.input_layernorm.weight)
        x = torch.cat([embedded, norm(g[t], layer.hidden_norm.weight)])
        query = rotated(attention.q_proj.weight @ x, t)
        keys.append(rotated(attention.k_proj.weight @ x, t))
        values.append((attention.v_proj.weight @ x).view(-1, c.head_dim))
        attended = []
        for h in range(c.num_attention_heads):
            own = h // (c.num_attention_heads // c.num_key_value_heads)
            scores = torch.stack([query[h] @ key[own] for key in keys]) / c.head_dim**0.5
            attended.append(sum(p * value[own] for p, value in zip(scores.softmax(0), values, strict=True)))
        added_to = norm(g[t], layer.hidden_norm.weight) if head.config.norm_before_residual else g[t]
        r = added_to + attention.o_proj.weight @ torch.cat(attended)
        inner = norm(r, layer.post_attention_layernorm.weight)
        gate, up = layer.mlp.gate_proj.weight @ inner, layer.mlp.up_proj.weight @ inner
        outputs.append(r + layer.mlp.down_proj.weight @ (gate * gate.sigmoid() * up))
    return torch.stack(outputs)


@pytest.mark.parametrize(("kind", "normed"), [("llama", False), ("qwen2", False), ("llama", True)])
def test_the_head_is_what_its_equations_say(kind: str, normed: bool) -> None:
    target = tiny_model(kind, num_hidden_layers=4)
    head = random_head(target, norm_before_residual=normed)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (3, 7), generator=generator)
    g = head.fc(torch.randn(3, 7, 96, generator=generator))
    a = head(tokens, g)
    for row in range(3):
        assert torch.allclose(a[row], by_hand(head, tokens[row].tolist(), g[row]), atol=1e-4)
    logits = head.logits(a)
    normed = a / (a.pow(2).mean(-1, keepdim=True) + head.config.layer.rms_norm_eps).sqrt() * head.norm.weight
    whole = normed @ target.get_output_embeddings().weight.T
    assert torch.allclose(logits, whole[..., DRAFT_IDS], atol=1e-4)


def test_entries_one_at_a_time_are_those_of_one_pass() -> None:
    head = random_head(tiny_model(num_hidden_layers=4))
    generator = torch.Generator().manual_seed(1)
    tokens, g = torch.randint(VOCAB, (2, 6), generator=generator), torch.randn(2, 6, 32, generator=generator)
    expected, cache = head(tokens, g), DynamicCache()
    steps = [head(tokens[:, :3], g[:, :3], cache=cache)]
    for t in range(3, 6):
        steps.append(head(tokens[:, t : t + 1], g[:, t : t + 1], torch.full((2, 1), t), cache=cache))
    assert torch.allclose(torch.cat(steps, 1), expected, atol=1e-5)


def test_a_mask_hides_what_a_row_has_refused() -> None:
    """Entries 2 and 3 of the cache are holes: the next entry comes out as if they had never been there."""
    head = random_head(tiny_model(num_hidden_layers=4))
    generator = torch.Generator().manual_seed(1)
    tokens, g = torch.randint(VOCAB, (1, 5), generator=generator), torch.randn(1, 5, 32, generator=generator)
    cache = DynamicCache()
    head(tokens[:, :4], g[:, :4], cache=cache)
    mask = torch.tensor([True, True, False, False, True])[None, None, None]
    found = head(tokens[:, 4:], g[:, 4:], torch.tensor([[2]]), mask=mask, cache=cache)
    kept = [0, 1, 4]
    assert torch.allclose(found, head(tokens[:, kept], g[:, kept])[:, 2:], atol=1e-5)


# the folder


def test_a_compact_folder_comes_back_rounded_once(tmp_path: Path) -> None:
    target = tiny_model(num_hidden_layers=4, intermediate_size=64)
    head = random_head(target, intermediate_size=80)
    write_head(head, tmp_path / "whole", metrics={"m": 2.5})
    size = pack_head(tmp_path / "whole", tmp_path / "one")
    assert is_head(tmp_path / "one")
    parameters = sum(p.numel() for p in head.parameters())
    assert parameters < size < 1.08 * parameters + 4096
    loaded = load_head(tmp_path / "one", target, "a" * 64, "tiny")
    assert (loaded.config, loaded.own) == (head.config, frozenset())
    assert torch.equal(loaded.draft_ids, DRAFT_IDS)
    for (name, one), other in zip(head.named_parameters(), loaded.parameters(), strict=True):
        step = one.abs().max() / 127 if one.dim() == 2 else 1e-3
        assert (one - other).abs().max() <= 0.51 * step, name
    write_head(loaded, tmp_path / "again", metrics={"m": 2.5})
    pack_head(tmp_path / "again", tmp_path / "two")
    for name in ("config.json", COMPACT):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert load_head(tmp_path / "one", target.to(torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("cols", [1, 31, 32, 33, 80])
def test_int8_is_off_by_half_a_step_and_rounds_to_itself(cols: int) -> None:
    matrix = torch.randn(7, cols, generator=torch.Generator().manual_seed(0))
    matrix[3] = 0
    values, scale = quantise(matrix)
    assert (values.shape, scale.shape) == ((7, cols), (7, -(-cols // 32)))
    found = dequantise(values, scale)
    assert ((found - matrix).abs() <= 0.51 * scale.float().repeat_interleave(32, 1)[:, :cols] + 1e-3).all()
    again = quantise(found)
    assert torch.equal(again[0], values)
    assert torch.equal(again[1], scale)


def test_another_target_is_refused(tmp_path: Path) -> None:
    write_head(random_head(tiny_model(num_hidden_layers=4)), tmp_path)
    for target, sha256, message in (
        (tiny_model(num_hidden_layers=4), "b" * 64, "trained for tiny, not for other"),
        (tiny_model(num_hidden_layers=4, hidden_size=64), "", "width 32 over 61 tokens, and other has 64 and 61"),
        (tiny_model(num_hidden_layers=4, vocab_size=70), "", "width 32 over 61 tokens, and other has 32 and 70"),
        (tiny_model(num_hidden_layers=2), "", "enters layer 3, and other has 2 layers"),
        (tiny_model("gpt2"), "", "states of a model of type 'gpt2' cannot be read"),
    ):
        with pytest.raises(SelfJudgeError, match=message) as caught:
            load_head(tmp_path, target, sha256, "other")
        assert "\n" not in str(caught.value)
    assert load_head(tmp_path, tiny_model(num_hidden_layers=4), "a" * 64, "renamed").target == "renamed"


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("norm.weight", None, "Missing key"),
        ("norm.weight", np.full(32, np.nan, np.float16), "not finite"),
        ("fc.weight.scale", np.full((32, 3), np.inf, np.float16), "not finite"),
        ("fc.weight.scale", np.ones((32, 2), np.float16), "cannot read the weights"),
        ("extra", np.ones(3, np.float32), "Unexpected key"),
        ("fc.weight.scale", None, "cannot read the weights"), ("fc.weight", np.zeros((5, 5), np.int8), "cannot read the weights"),
        ("draft_ids", np.zeros(12, np.int32), "different token ids"),
        ("draft_ids", np.arange(50, 62, dtype=np.int32), "below 61"),
        ("draft_ids", np.arange(-1, 11, dtype=np.int32), "different token ids"),
        ("draft_ids", np.ones(12, np.float32), "different token ids"),
    ],
)  # fmt: skip
def test_damaged_tensors_are_refused(tmp_path: Path, name: str, array: np.ndarray | None, message: str) -> None:
    target = tiny_model(num_hidden_layers=4)
    write_head(random_head(target), tmp_path / "whole")
    pack_head(tmp_path / "whole", tmp_path)
    arrays, _ = read_tensors(tmp_path / COMPACT)
    arrays.pop(name, None)
    if array is not None:
        arrays[name] = array
    write_tensors(tmp_path / COMPACT, arrays)
    with pytest.raises(SelfJudgeError, match=message) as caught:
        read_head(tmp_path, target)
    assert "\n" not in str(caught.value)


def test_the_format_of_speculators_holds_the_same_head(tmp_path: Path) -> None:
    """Names and meanings as vLLM reads them: offsets in d2t, rows of the output matrix, layers to capture."""
    target = tiny_model("qwen2", num_hidden_layers=4)
    head = random_head(target)
    write_head(head, tmp_path, steps=4, verifier="tiny")
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    ids = tensors["d2t"] + torch.arange(len(DRAFT_IDS))
    assert torch.equal(ids, DRAFT_IDS)
    assert torch.equal(tensors["t2d"].nonzero().flatten(), DRAFT_IDS)
    assert torch.equal(tensors["lm_head.weight"], target.get_output_embeddings().weight[DRAFT_IDS].half())
    own = {name: p for name, p in tensors.items() if name not in ("d2t", "t2d", "lm_head.weight")}
    assert own.keys() == dict(head.named_parameters()).keys()
    assert all(torch.equal(own[name], p.half()) for name, p in head.named_parameters())
    assert config["eagle_aux_hidden_state_layer_ids"] == list(head.config.aux_layers)
    assert config["norm_before_residual"] is False
    assert config["speculators_config"]["verifier"] == {"name_or_path": "tiny", "architectures": ["Qwen2ForCausalLM"]}
    layer = hf.AutoConfig.for_model(**config["transformer_layer_config"])
    assert layer.num_attention_heads * layer.head_dim == own["layers.0.self_attn.q_proj.weight"].shape[0]
    assert layer.rope_parameters["rope_theta"] == head.config.layer.rope_parameters["rope_theta"]


# heads of others

Change = Callable[[dict[str, Any], dict[str, Tensor]], None]


def rewritten(folder: Path, change: Change) -> None:
    """Change the config and the tensors of an exported head."""
    file, weights = folder / "config.json", folder / "model.safetensors"
    config, tensors = json.loads(file.read_text()), load_file(weights)
    change(config, tensors)
    file.write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, weights)


def as_in_the_paper(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """The layout of EAGLE's own code: one flat config, another name of the layer."""
    layer = config["transformer_layer_config"]
    rope, size, aux = (
        layer.pop("rope_parameters"),
        config["draft_vocab_size"],
        config["eagle_aux_hidden_state_layer_ids"],
    )
    config.clear()
    config |= {**layer, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": size}
    config |= {"rope_theta": rope["rope_theta"], "eagle_config": {"eagle_aux_hidden_state_layer_ids": aux}}
    for name in [name for name in tensors if name.startswith("layers.0.")]:
        tensors[name.replace("layers.0.", "midlayer.")] = tensors.pop(name)


def in_another_order(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    order = torch.randperm(len(DRAFT_IDS), generator=torch.Generator().manual_seed(0))
    tensors["d2t"] = DRAFT_IDS[order] - torch.arange(len(DRAFT_IDS))
    tensors["lm_head.weight"] = tensors["lm_head.weight"][order]


def with_the_layers_unnamed(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    del config["eagle_aux_hidden_state_layer_ids"]


def with_an_embedding(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["embed_tokens.weight"] = tiny_model("qwen2", num_hidden_layers=7).get_input_embeddings().weight.half()


@pytest.mark.parametrize(
    "change", [as_in_the_paper, in_another_order, with_the_layers_unnamed, with_an_embedding, lambda *_: None]
)
@pytest.mark.parametrize("normed", [False, True])
def test_an_exported_head_comes_back(tmp_path: Path, change: Change, normed: bool) -> None:
    target = tiny_model("qwen2", num_hidden_layers=7)
    for p in target.parameters():
        p.data = p.half().float()
    head = random_head(target, norm_before_residual=normed)
    for p in head.parameters():
        p.data = p.half().float()
    write_head(head, tmp_path, steps=4, verifier="tiny")
    rewritten(tmp_path, change)
    if change is as_in_the_paper and normed:
        rewritten(tmp_path, lambda config, _: config.update(norm_before_residual=True))
    assert is_head(tmp_path)
    loaded, sha256 = load_head(tmp_path, target, "a" * 64, "tiny"), weights_sha256(str(tmp_path))
    assert (loaded.config, loaded.target, len(sha256)) == (head.config, "tiny", 64)
    assert torch.equal(loaded.draft_ids, DRAFT_IDS)
    tokens, states = torch.randint(VOCAB, (2, 7)), torch.randn(2, 7, 96)
    expected = head.logits(head(tokens, head.fc(states)))
    assert torch.equal(loaded.logits(loaded(tokens, loaded.fc(states))), expected)
    assert loaded.own == {"output"}


def test_a_head_may_have_its_own_vocabulary_and_all_tokens(tmp_path: Path) -> None:
    target = tiny_model(num_hidden_layers=4)
    head = EagleHead(EagleConfig.for_target(target, VOCAB), torch.arange(VOCAB)).bind(target).requires_grad_(False)
    head.own = frozenset({"embedding", "output"})
    head.embedding, head.output = torch.randn(VOCAB, 32).half().float(), torch.randn(VOCAB, 32).half().float()
    write_head(head, tmp_path)
    assert not {"d2t", "t2d"} & set(load_file(tmp_path / "model.safetensors")), "vLLM takes no map of all tokens"
    loaded = load_head(tmp_path, target)
    assert loaded.own == {"embedding", "output"}
    assert torch.equal(loaded.embedding, head.embedding)
    assert torch.equal(loaded.output, head.output)
    assert load_head(tmp_path, target.to(torch.bfloat16)).embedding.dtype == torch.bfloat16


def says(**entries: object) -> Change:
    return lambda config, tensors: config.update(entries)


def shaped(**entries: object) -> Change:
    return lambda config, tensors: config["transformer_layer_config"].update(entries)


def has(**entries: Tensor) -> Change:
    return lambda config, tensors: tensors.update({name.replace("__", "."): t for name, t in entries.items()})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (says(eagle_aux_hidden_state_layer_ids=[2, 3, 9]), "reads what enters layer 9, and other has 4 layers"),
        (says(eagle_aux_hidden_state_layer_ids=[1, 3]), r'"eagle_aux_hidden_state_layer_ids" must be a list of 3'),
        (says(speculators_model_type="dflash"), '"speculators_model_type" must be "eagle3", not "dflash"'),
        (says(norm_before_fc=True), '"norm_before_fc" must be false, not true'),
        (says(draft_vocab_size=99), "cannot have draft_vocab_size 99"),
        (says(draft_vocab_size=11), "11 different token ids below 61"),
        (says(target_hidden_size=64), "cannot have target_hidden_size 64"),
        (shaped(num_key_value_heads=3), "cannot have num_key_value_heads 3|shape of its layer cannot"), (shaped(head_dim=7), "requires an even rotary dimension"),
        (shaped(num_hidden_layers=2), '"num_hidden_layers" must be 1, not 2'),
        (shaped(attention_bias=True), '"attention_bias" must be false'), (shaped(model_type="qwen3"), '"model_type" must be "llama"'),
        (shaped(hidden_size=64), "cannot have target_hidden_size 32"), (shaped(hidden_size="wide"), '"hidden_size" must be a whole number'),
        (shaped(vocab_size=70), "12 different token ids below 70|over 70 tokens, and other has 32 and 61"),
        (shaped(intermediate_size=77), "size mismatch for layers.0.mlp"),
        (shaped(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "cannot have rope_param"),
        (has(d2t=torch.zeros(12)), "12 different token ids"), (has(d2t=torch.full((12,), 50)), "12 different token ids below 61"),
        (has(d2t=torch.arange(12, 0, -1)), "12 different token ids"), (has(d2t=torch.zeros(5).long()), "12 different token ids"),
        (has(t2d=torch.ones(61).bool()), "d2t and t2d must name the same"),
        (has(lm_head__weight=torch.zeros(12, 5)), "its output is .12, 5., not .12, 32."),
        (has(norm__weight=torch.full((32,), torch.nan)), "not finite"), (has(other=torch.zeros(2)), "Unexpected key"),
    ],
)  # fmt: skip
def test_a_head_that_ours_cannot_be_is_refused(tmp_path: Path, change: Change, message: str) -> None:
    target = tiny_model(num_hidden_layers=4)
    write_head(random_head(target), tmp_path)
    rewritten(tmp_path, change)
    with pytest.raises(SelfJudgeError, match=message) as caught:
        load_head(tmp_path, target, "", "other")
    assert "\n" not in str(caught.value)


def test_weights_that_are_not_there_or_cut_short(tmp_path: Path) -> None:
    target = tiny_model(num_hidden_layers=4)
    write_head(random_head(target), tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(SelfJudgeError, match="cannot read the weights in"):
        read_head(tmp_path, target)
    file.unlink()
    with pytest.raises(SelfJudgeError, match=r"has no model\.safetensors"):
        read_head(tmp_path, target)


def test_an_embedding_of_its_own_is_not_mapped_from_the_file(tmp_path: Path) -> None:
    target = tiny_model(num_hidden_layers=4)
    write_head(random_head(target), tmp_path)
    own = torch.randn(target.get_input_embeddings().weight.shape)
    rewritten(tmp_path, lambda _, tensors: tensors.update({"embed_tokens.weight": own}))
    head, file = read_head(tmp_path, target), tmp_path / "model.safetensors"
    with file.open("r+b") as weights:
        weights.write(bytes(file.stat().st_size))
    assert torch.equal(head.embedding, own)


def test_a_checkpoint_is_not_a_head(tmp_path: Path) -> None:
    assert not is_head(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    assert not is_head(tmp_path)


def test_six_bits_are_packed_without_loss(tmp_path: Path) -> None:
    values = torch.randint(-31, 32, (7, 64), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    assert torch.equal(unpack_six(pack_six(values)), values)
    target = tiny_model("llama", num_hidden_layers=4)
    head = random_head(target)
    write_head(head, tmp_path / "whole")
    pack_head(tmp_path / "whole", tmp_path)
    file = tmp_path / COMPACT
    arrays = load_file(file)
    for name in [name.removesuffix(".scale") for name in arrays if name.endswith(".scale")]:
        arrays[name] = pack_six((arrays[name].float() * 31 / 127).round())
        arrays[f"{name}.scale"] *= 127 / 31
    save_file(arrays, file)
    for p, q in zip(head.parameters(), read_head(tmp_path, target).parameters(), strict=True):
        assert (p - q).abs().max() < 0.03 * p.abs().max()


def pack_six(values: torch.Tensor) -> torch.Tensor:
    """Values of ±31 [N, K] in six bits each, as in the head that ships: bytes [N, 3K/4]. K is a multiple of four."""
    a, b, c, d = (values.short() + 32).view(len(values), -1, 4).unbind(-1)
    three = [a | (b & 3) << 6, b >> 2 | (c & 15) << 4, c >> 4 | d << 2]
    return torch.stack(three, -1).to(torch.uint8).flatten(1)
