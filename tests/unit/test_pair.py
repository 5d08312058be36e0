"""Loading pairs: folders, compatibility, vocabulary padding, refusals."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from selfjudge.decoding.text import generate
from selfjudge.errors import SelfJudgeError
from selfjudge.label.config import find_shipped_tau
from selfjudge.models.catalogue import check_hub, draft_for, shipped_draft
from selfjudge.models.device import choose_device
from selfjudge.models.load import Target
from selfjudge.models.pair import Pair
from selfjudge.models.pull import weights_sha256


def test_folders(checkpoints: dict[str, str], tiny_pair: Pair) -> None:
    assert tiny_pair.target.dtype == torch.float32
    assert tiny_pair.hidden_size == 32
    assert tiny_pair.eos_ids == {2}
    assert {0, 1, 2, 3} <= set(tiny_pair.special_ids)
    assert tiny_pair.target_sha256 != tiny_pair.draft_sha256
    assert Pair.load(checkpoints["target"], checkpoints["draft"], dtype="bfloat16").draft.dtype == torch.bfloat16


def test_the_head_drafts_where_one_ships_and_has_no_tau() -> None:
    assert shipped_draft("smollm2-135m") == "smollm2-135m/draft"
    assert draft_for("qwen2.5-coder-1.5b", None) == "qwen2.5-coder-1.5b/eagle3"
    assert draft_for("qwen2.5-coder-1.5b", "qwen2.5-coder-1.5b/draft") == "qwen2.5-coder-1.5b/draft"
    hashes = [weights_sha256(f"qwen2.5-coder-1.5b{part}") for part in ("", "/draft", "/eagle3")]
    assert len({*hashes, ""}) == 4
    assert find_shipped_tau("smollm2-135m", None, 20) is not None
    assert (
        find_shipped_tau("qwen2.5-coder-1.5b", None, 20)
        is find_shipped_tau("qwen2.5-coder-1.5b", hashes[2], 20)
        is None
    )
    assert find_shipped_tau("qwen2.5-coder-1.5b", hashes[1], 20) is not None


def test_a_head_is_a_draft(checkpoints: dict[str, str], head_pair: Pair, tiny_pair: Pair) -> None:
    assert (head_pair.draft_kind, tiny_pair.draft_kind) == ("eagle3", "layers")
    assert head_pair.window == tiny_pair.window == 96
    assert head_pair.draft_sha256 not in ("", head_pair.target_sha256)
    plain = generate(head_pair, ["w5 w6", "w7"], gamma=0, max_new_tokens=12)
    assert [g.tokens for g in generate(head_pair, ["w5 w6", "w7"], gamma=3, max_new_tokens=12)] == [
        g.tokens for g in plain
    ]
    with pytest.raises(
        SelfJudgeError, match=r"^assisted generation needs a draft that is a model of its own; .* is a head$"
    ):
        head_pair.standalone_draft("assisted generation")


def test_a_head_of_another_target_is_refused(checkpoints: dict[str, str], head_folder: Path) -> None:
    with pytest.raises(SelfJudgeError, match=r"this head was trained for .*target, not for .*stranger"):
        Pair.load(checkpoints["stranger"], str(head_folder), device="cpu")


def test_a_padded_draft_vocabulary_is_handled(checkpoints: dict[str, str]) -> None:
    """As in Qwen2.5: the same tokenizer, embedding matrices padded to different sizes."""
    pair = Pair.load(checkpoints["target"], checkpoints["padded-draft"], device="cpu")
    assert pair.draft.config.vocab_size != pair.target.config.vocab_size
    plain = generate(pair, ["w1 w2 w3"], gamma=0, max_new_tokens=20)
    assert generate(pair, ["w1 w2 w3"], gamma=4, max_new_tokens=20)[0].tokens == plain[0].tokens


def test_different_tokenizers_are_refused_by_name(checkpoints: dict[str, str]) -> None:
    with pytest.raises(SelfJudgeError, match="59: 'w55' and 'w56'; 60: 'w56' and 'w55'"):
        Pair.load(checkpoints["target"], checkpoints["stranger"])


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("/no/such/folder", {}, "does not exist"), ("x.gguf", {}, "does not exist"),
        ("no-such-org/no-such-model", {}, "unknown model"), ("smollm2-135m", {"device": "tpu9"}, "device"),
        ("smollm2-135m", {"dtype": "int3"}, "unknown `dtype`"),
    ],
)  # fmt: skip
def test_unusable_references(target: str, options: dict, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SelfJudgeError, match=message) as caught:
        Pair.load(target, "whatever", **options)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(SelfJudgeError, match=r"no `device` 'cuda': .*; omit it or install a torch for it"):
        choose_device("cuda")


def test_a_name_that_was_not_looked_up_is_said_to_be_so(checkpoints: dict[str, str]) -> None:
    for target, said in (("nope/nope", True), (checkpoints["target"], False)):
        with pytest.raises(SelfJudgeError, match="no draft ships for") as caught:
            draft_for(target, None)
        assert ("was not looked up yet" in str(caught.value)) == said


def test_a_target_without_draft(checkpoints: dict[str, str]) -> None:
    with pytest.raises(SelfJudgeError, match=r"no draft ships for .*: name one with `draft`"):
        Pair.load(checkpoints["target"])
    pair = Pair.load(checkpoints["target"], needs_draft=False)
    assert len(generate(pair, ["w1"], gamma=0, max_new_tokens=5)[0].tokens) == 5
    with pytest.raises(SelfJudgeError, match="needs a draft"):
        generate(pair, ["w1"], gamma=2)


def test_a_folder_that_is_no_checkpoint(tmp_path) -> None:
    with pytest.raises(SelfJudgeError, match="not a readable checkpoint"):
        Pair.load(str(tmp_path), str(tmp_path))
    (tmp_path / "m.gguf").write_bytes(b"GGUF but not really")
    with pytest.raises(SelfJudgeError, match="GGUF"):
        Pair.load(str(tmp_path / "m.gguf"), str(tmp_path / "m.gguf"))


def test_prompts(tiny_pair: Pair) -> None:
    assert tiny_pair.encode("w1") == [5, 4]  # the template adds w0
    assert tiny_pair.encode([{"role": "user", "content": "w1"}, {"role": "user", "content": "w2"}]) == [5, 6, 4]
    assert tiny_pair.encode("w1", raw=True) == [5]
    for empty in ("", "  \n", []):
        with pytest.raises(SelfJudgeError, match="empty"):
            tiny_pair.encode(empty)


def test_a_pair_knows_the_judge_that_ships(tiny_pair: Pair) -> None:
    assert tiny_pair.judge is None
    embedded = dataclasses.replace(tiny_pair, target_model=Target(tiny_pair.target, "smollm2-135m"))
    assert embedded.judge is embedded.judge
    assert embedded.judge.config.target == "smollm2-135m"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda weights: weights.pop("model.layers.0.mlp.up_proj.weight"),
            r"lacks weights .*model\.layers\.0\.mlp\.up_proj",
        ),
        (lambda weights: weights.update({"model.layers.7.mlp.up_proj.weight": torch.ones(3)}), "has unknown weights"),
        (lambda weights: weights["model.norm.weight"].fill_(float("nan")), r"not finite \(model\.norm\.weight\)"),
        (lambda weights: weights["lm_head.weight"][3].fill_(float("inf")), "not finite"),
    ],
)
@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_checkpoint_with_wrong_weights_is_refused(
    checkpoints: dict[str, str],
    tmp_path: Path,
    change: Callable[[dict[str, torch.Tensor]], object],
    message: str,
    role: str,
) -> None:
    """transformers would make up missing weights at random, with a warning at most."""
    shutil.copytree(checkpoints[role], tmp_path / "changed")
    weights = load_file(tmp_path / "changed" / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "changed" / "model.safetensors", {"format": "pt"})
    places = {**checkpoints, role: str(tmp_path / "changed")}
    with pytest.raises(SelfJudgeError, match=message):
        Pair.load(places["target"], places["draft"], device="cpu")


def test_weights_that_the_model_computes_may_be_there(checkpoints: dict[str, str], tmp_path: Path) -> None:
    shutil.copytree(checkpoints["target"], tmp_path / "old")
    weights = load_file(tmp_path / "old" / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(weights, tmp_path / "old" / "model.safetensors", {"format": "pt"})
    assert Pair.load(str(tmp_path / "old"), checkpoints["draft"], device="cpu").target is not None


def test_code_of_a_checkpoint_is_never_asked_for(
    checkpoints: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(checkpoints["target"], tmp_path / "remote")
    file = tmp_path / "remote" / "config.json"
    config = json.loads(file.read_text()) | {
        "model_type": "unheard-of",
        "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
    }
    file.write_text(json.dumps(config))
    (tmp_path / "remote" / "evil.py").write_text("raise SystemExit('ran')")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on standard input"))
    with pytest.raises(SelfJudgeError, match="not a readable checkpoint"):
        Pair.load(str(tmp_path / "remote"), checkpoints["draft"], device="cpu")


@pytest.mark.parametrize("name", ["./missing model", "my model", "a/b/c", "org/x?y", "~nosuchuser/x", "x" * 300])
def test_names_that_neither_a_file_nor_a_model_of_the_hub_can_have_are_refused(name: str) -> None:
    with pytest.raises(SelfJudgeError, match=r"^unknown model"):
        check_hub(name)
    with pytest.raises(SelfJudgeError, match=r"^no draft ships for"):
        draft_for(name, None)
