"""Every family on every engine against transformers: ragged batches, rewinds, windows, long positions, `exact`."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers as hf

from conftest import VOCAB, tiny_head, tiny_model
from equality import greedy
from fake_gguf import write_model
from families import FAMILIES, family_model
from following import follow
from proposals import prompts_of, requests_of
from selfjudge.decoding.loop import decode
from selfjudge.decoding.rules import EXACT
from selfjudge.engine.cpu import engine as cpu
from selfjudge.engine.cpu.engine import CpuEngine
from selfjudge.engine.cuda import engine as cuda, weights as cuda_weights
from selfjudge.engine.draft import BatchEngines
from selfjudge.engine.select import make_draft, make_engine
from selfjudge.errors import SelfJudgeError
from selfjudge.models import shape
from selfjudge.models.convert import dequantise, gguf_tokenizer
from selfjudge.models.gguf import ARCHITECTURES, open_model
from selfjudge.models.pair import Pair
from selfjudge.models.shape import UnknownShapeError, describe, describe_model

FAST = ("cpu", "cuda")
PLAN = [
    ("extend", 7, 1), ("rewind", 5, 2), ("enter", 2, 23), ("extend", 4, 4), ("select", 3, 5), ("extend", 6, 6),
    ("rewind", 3, 7), ("extend", 1, 8),
]  # fmt: skip
every_family = pytest.mark.parametrize("family", FAMILIES)
every_engine = pytest.mark.parametrize("kind", FAST)


@pytest.mark.quick(
    "cpu-*",
    "cuda-Gemma 3 (text)",
    "cuda-Qwen2, *",
    "cuda-Phi-3, *",
    "cuda-OLMo 2",
    "cuda-SmolLM3",
    "cuda-Granite 3",
    "cuda-Llama with*",
)
@every_family
@every_engine
def test_every_logit_equals_a_fresh_forward(family: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "CHUNK", 5)
    for name, tokens in (("PASS_TOKENS", 20), ("CAPTURED_TOKENS", 0)):
        monkeypatch.setattr(cuda, name, tokens)
    model = family_model(family)
    follow(make_engine(model, hidden=True, kind=kind), model, 3, PLAN, seed=0)


@pytest.mark.quick("cpu-*", "cuda-Gemma 3 (text)", "cuda-*windows in some layers")
@every_family
@every_engine
def test_long_positions_equal_transformers(family: str, kind: str) -> None:
    """Windows of several blocks of keys, and tokens that come one, two and three at a time behind a long prompt."""
    model = family_model(family, seed=1, max_position_embeddings=1024, **_wider(family, 37))
    engine, tokens = make_engine(model, kind=kind), torch.randint(0, VOCAB, (1, 320))
    engine.reserve(1, 400)
    with torch.inference_mode():
        wanted = model(tokens).logits[0]
    at = 0
    for width in (100, 1, 2, 3, 187, 1, 6, 20):
        logits = engine.extend(tokens[:, at : at + width]).logits[0]
        torch.testing.assert_close(logits, wanted[at : at + width], atol=1e-4, rtol=1e-4)
        at += width
    assert at == 320


def _wider(family: str, window: int) -> dict[str, object]:
    return {"sliding_window": window} if "sliding_window" in FAMILIES[family][1] else {}


# every step of each family has the tests above: of whole answers, those of one engine are enough
@pytest.mark.quick("Gemma 3 (text)-cpu", "Phi-3, sliding window-cpu", "Qwen3-cpu")
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param(family, kind, marks=() if kind == "cpu" or family == "Gemma 3 (text)" else pytest.mark.slow)
        for family in FAMILIES
        for kind in FAST
    ],
)
def test_exact_equals_transformers_token_by_token(family: str, kind: str) -> None:
    target, draft = family_model(family, seed=1), family_model(family, seed=1, num_hidden_layers=3)
    with torch.no_grad():
        draft.get_output_embeddings().weight.add_(0.1 * torch.randn_like(draft.get_output_embeddings().weight))
    engines = BatchEngines(make_engine(target, kind=kind), make_draft(draft, target, kind=kind))
    prompts = prompts_of([3, 11, 40])
    tokens: list[list[int]] = [[] for _ in prompts]
    for step in decode(engines, requests_of(prompts, 16), EXACT, gamma=3):
        for emission in step.emissions:
            tokens[emission.row] += emission.tokens
    assert tokens == [greedy(target, prompt, 16) for prompt in prompts]


def test_a_prompt_in_pieces_has_the_bits_of_one_at_once_beyond_a_window() -> None:
    model, tokens = family_model("Mistral, sliding window"), torch.randint(0, VOCAB, (1, 90))
    whole, engine = CpuEngine(model).extend(tokens).logits, CpuEngine(model)
    pieces = [engine.extend(tokens[:, start : start + 7]).logits for start in range(0, 90, 7)]
    assert torch.equal(torch.cat(pieces, 1), whole)


@pytest.mark.quick("Phi-3 and 4", "Gemma 2")
@pytest.mark.parametrize("family", ["Phi-3 and 4", "Qwen3", "OLMo 2", "Llama with biases, `linear` rope", "Gemma 2"])
def test_heads_padded_to_the_width_of_a_kernel_change_nothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_weights, "kernel_width", lambda dim, device: 2 * dim)
    model = family_model(family)
    engine = cuda.CudaEngine(model, hidden=True)
    assert engine.weights.dim == 2 * describe_model(model).head_dim
    follow(engine, model, 2, PLAN, seed=3)


@pytest.mark.quick("cpu-Gemma 3 (text)", "cuda-OLMo 2")
@pytest.mark.parametrize("family", ["Gemma 3 (text)", "Granite 3", "OLMo 2"])
@every_engine
def test_a_head_reads_the_states_of_any_family(family: str, kind: str) -> None:
    """A head's proposals are verified: with it, answers are still those of the target."""
    target = family_model(family, seed=2, num_hidden_layers=5, layer_types=None)
    head = tiny_head(target)
    engines = BatchEngines(
        make_engine(target, features=head.config.aux_layers, kind=kind), make_draft(head, target, kind=kind)
    )
    tokens = torch.randint(0, VOCAB, (2, 30))
    fast, slow = (
        make_engine(target, features=head.config.aux_layers, kind=k).extend(tokens).features
        for k in (kind, "reference")
    )
    torch.testing.assert_close(fast, slow, atol=2e-4, rtol=1e-4)
    prompts = prompts_of([5, 12])
    found: list[list[int]] = [[] for _ in prompts]
    for step in decode(engines, requests_of(prompts, 12), EXACT, gamma=2):
        for emission in step.emissions:
            found[emission.row] += emission.tokens
    assert found == [greedy(target, prompt, 12) for prompt in prompts]


GGUF = {
    "Llama": {}, "Qwen2 and 2.5": {}, "Qwen3": {}, "SmolLM3": {"no_rope_layer_interval": 4, "num_hidden_layers": 4},
    "OLMo 2": {}, "Granite 3": {}, "Phi-3 and 4": {}, "Phi-3, sliding window": {"hidden_size": 64},
    "Gemma 2": {"query_pre_attn_scalar": 16}, "Gemma 3 (text)": {"query_pre_attn_scalar": 16, "layer_types": None, "num_hidden_layers": 6},
}  # fmt: skip
"""Families with files, and the properties that llama.cpp knows of their models without a file's saying so."""


@pytest.mark.parametrize("family", GGUF)
def test_a_file_of_a_family_gives_the_logits_of_its_model(family: str, tmp_path: Path) -> None:
    options = {"hidden_size": 64, "intermediate_size": 96, "initializer_range": 0.15, "head_dim": 16, **GGUF[family]}
    model, path = family_model(family, seed=4, **options), tmp_path / "m.gguf"
    tokens = torch.randint(0, VOCAB, (2, 30), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        wanted = model(tokens).logits
    write_model(model, path, {})
    opened = open_model(path)
    torch.testing.assert_close(CpuEngine(opened).extend(tokens).logits, wanted, atol=1e-4, rtol=1e-4)
    whole = dequantise(opened, torch.float32)
    with torch.inference_mode():
        torch.testing.assert_close(whole(tokens).logits, wanted, atol=1e-4, rtol=1e-4)
    write_model(model, path, {"_norm": "F32", "weight": "Q8_0"})
    rough = CpuEngine(open_model(path)).extend(tokens).logits
    assert 1e-5 < (rough - wanted).norm() / wanted.norm() < 0.08


def test_a_tokenizer_that_cannot_be_read_from_a_file_may_lie_beside_it(
    tmp_path: Path, checkpoints: dict[str, str]
) -> None:
    write_model(family_model("Granite 3"), tmp_path / "m.gguf", {})
    with pytest.raises(SelfJudgeError, match=r"put its tokenizer\.json and tokenizer_config\.json beside it"):
        gguf_tokenizer(tmp_path / "m.gguf")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(checkpoints["target"]) / name, tmp_path)
    assert len(gguf_tokenizer(tmp_path / "m.gguf")) == VOCAB
    (tmp_path / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(SelfJudgeError, match=r"cannot read the tokenizer beside .*m\.gguf: ") as caught:
        gguf_tokenizer(tmp_path / "m.gguf")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", ["Llama", "OLMo 2", "Granite 3"])
def test_a_window_that_is_not_read_is_refused(family: str, tmp_path: Path) -> None:
    model, path = family_model(family), tmp_path / "m.gguf"
    name = f"{model.config.model_type}.attention.sliding_window"
    write_model(model, path, {}, **{name: (0, gguf.GGUFValueType.UINT32)})
    open_model(path)
    write_model(model, path, {}, **{name: (8, gguf.GGUFValueType.UINT32)})
    with pytest.raises(SelfJudgeError, match=rf"{name} is 8, and such windows are not supported"):
        open_model(path)


@pytest.mark.parametrize("family", ["Phi-3 and 4", "Qwen3", "Gemma 3 (text)"])
def test_int8_of_any_family_is_close_to_float32(family: str) -> None:
    model = family_model(family, hidden_size=128, intermediate_size=192, initializer_range=0.1, head_dim=32)
    tokens = torch.randint(0, VOCAB, (2, 30))
    exact, rough = (CpuEngine(model, int8=int8).extend(tokens).logits for int8 in (False, True))
    assert 1e-5 < (exact - rough).norm() / exact.norm() < 0.08


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: tiny_model("gpt2"), "models of type 'gpt2'"),
        (lambda: family_model("Llama", hidden_act="relu"), "its activation is 'relu'"),
        (lambda: family_model("Llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}), "of type 'dynamic'"),
        (lambda: family_model("Gemma 3 (text)", use_bidirectional_attention=True), "its attention is bidirectional"),
        (lambda: family_model("Qwen3", head_dim=6), "its heads are 6 wide"),
    ],
)  # fmt: skip
def test_what_cannot_be_described_is_refused_by_name(make: Any, reason: str) -> None:
    assert reason in (cpu.why_not(make()) or "")


def test_weights_that_a_type_does_not_have_are_refused() -> None:
    model = family_model("Llama")
    model.model.layers[1].self_attn.q_norm = torch.nn.LayerNorm(8)
    for why_not in (cpu.why_not, cuda.why_not):
        assert why_not(model) == "its layers have other weights than their type (self_attn.q_norm.bias)"
    del model.model.layers[1].self_attn.q_norm
    model.config.num_hidden_layers = 2
    assert cpu.why_not(model) == "its config says 2 layers and it has 3"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"sliding_window": -3}, "its sliding window is -3"),
        ({"layer_types": ["full_attention"] * 2}, "types of 2 layers and has 3"),
        ({"layer_types": ["chunked_attention"] * 3}, "layers of type 'chunked_attention'"),
    ],
)
def test_contradictions_of_a_config_are_named(options: dict[str, object], reason: str) -> None:
    config = hf.Qwen2Config(num_hidden_layers=3)
    config.layer_types = ["sliding_attention"] * 3
    for name, value in options.items():
        setattr(config, name, value)
    with pytest.raises(UnknownShapeError, match=reason):
        describe(config)


@pytest.mark.parametrize(("kind", "name"), [("granite", "logits_scaling"), ("gemma2", "query_pre_attn_scalar")])
@pytest.mark.parametrize("value", [0, -4])
def test_divisors_that_are_not_positive_are_named(kind: str, name: str, value: int) -> None:
    with pytest.raises(UnknownShapeError, match=f"its {name} is {value}"):
        describe(hf.AutoConfig.for_model(kind, **{name: value}))


def test_a_window_that_holds_the_whole_context_is_none() -> None:
    """As Phi-3 with 128k positions has it."""
    assert describe(family_model("Mistral, sliding window", sliding_window=96).config).windows == (0, 0, 0)
    assert describe(family_model("Mistral, sliding window", sliding_window=95).config).windows == (95, 95, 95)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"hidden_size": 48}, r"has weights of other shapes than its config says \(\d+: lm_head\.weight …\)"),
        ({"num_hidden_layers": 5}, r"lacks weights of this model \(\d+: model\.layers\.3\."),
        (
            {"rope_parameters": {"rope_type": "spiral", "rope_theta": 100.0}},
            "rotary embedding is of unknown type 'spiral'",
        ),
        ({"hidden_act": "wish"}, "its activation 'wish' is unknown"),
        ({"sliding_window": -1}, "its sliding window is -1"),
        ({"shard": 1}, r"its shard model-00002-of-\d+\.safetensors is missing"),
    ],
)
def test_a_checkpoint_that_contradicts_itself_is_refused_in_one_line(
    change: dict[str, Any], line: str, checkpoints: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    family_model("Mistral, sliding window").save_pretrained(folder, max_shard_size="20KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(checkpoints["target"]) / name, folder)
    if "shard" in change:
        sorted(folder.glob("*.safetensors"))[change["shard"]].unlink()
    else:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(SelfJudgeError, match=line) as caught:
        Pair.load(str(folder), device="cpu", needs_draft=False)
    assert "\n" not in str(caught.value)


def test_the_table_of_the_docs_is_what_is_tested() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    rows = [line.split("|")[1:-1] for line in page.splitlines() if "| yes | yes |" in line]
    cells = [{name for row in rows if len(row) == 5 for name in re.findall("`(.+?)`", row[at])} for at in (1, 4)]
    types = {name: family_model(name).config.model_type for name in FAMILIES}
    assert cells == [set(shape.FAMILIES), set(ARCHITECTURES)]
    assert cells[0] == set(types.values())
    assert {ARCHITECTURES[name] for name in cells[1]} == {types[name] for name in GGUF}
