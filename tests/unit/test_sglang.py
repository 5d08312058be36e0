"""`selfjudge export`: heads and commands for SGLang, compared with its source, not run; vLLM's command of a recipe."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from conftest import tiny_head, tiny_model
from fake_certificate import recipe_folder
from selfjudge.cli.main import app
from selfjudge.integrations.vllm.config import WORKER
from selfjudge.models.eagle import EagleHead, read_head, write_head
from selfjudge.models.pair import Pair


@pytest.fixture
def deep(checkpoints: dict[str, str], tmp_path: Path) -> tuple[str, str]:
    """A target of four layers and its head."""
    shutil.copytree(checkpoints["target"], tmp_path / "target")
    model = tiny_model(seed=1, num_hidden_layers=4)
    model.save_pretrained(tmp_path / "target")
    write_head(tiny_head(model), tmp_path / "head")
    return str(tmp_path / "target"), str(tmp_path / "head")


def test_a_head_is_exported_as_sglang_loads_it(deep: tuple[str, str], tmp_path: Path) -> None:
    """Names, fields and the count of layers are those of its `llama_eagle3.py` and `set_eagle3_layers_to_capture`."""
    out, models = tmp_path / "out", ["--target", deep[0], "--draft", deep[1]]
    done = CliRunner().invoke(
        app,
        ["export", "--engine", "sglang", *models, "--rule", "sglang:0.3,acc=0.5", "--gamma", "4", "--out", str(out)],
    )
    assert done.exit_code == 0, done.output
    words = shlex.split(done.stdout)
    assert words == [
        "python", "-m", "sglang.launch_server", "--model-path", deep[0], "--speculative-algorithm", "EAGLE3",
        "--speculative-draft-model-path", str(out), "--speculative-num-steps", "4", "--speculative-eagle-topk", "1",
        "--speculative-num-draft-tokens", "5", "--speculative-accept-threshold-single", "0.3",
        "--speculative-accept-threshold-acc", "0.5",
    ]  # fmt: skip
    assert "ignores both thresholds for greedy requests" in done.stderr
    model = tiny_model(seed=1, num_hidden_layers=4)
    ours, record = read_head(Path(deep[1]), model), json.loads((out / "config.json").read_text())
    assert record["architectures"] == ["LlamaForCausalLMEagle3"]
    layers = record["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert [layer + 1 for layer in layers] == list(ours.config.aux_layers)  # as it adds one
    assert {name for name in load_file(out / "model.safetensors") if "layers" in name} == set()
    again = read_head(out, model)
    assert replace(again.config, aux_layers=ours.config.aux_layers) == ours.config
    for name, tensor in ours.named_parameters():
        torch.testing.assert_close(again.get_parameter(name), tensor.half().float())


def test_sglang_is_told_what_it_has(checkpoints: dict[str, str], deep: tuple[str, str], tmp_path: Path) -> None:
    def export(*words: str, models: tuple[str, str] = (checkpoints["target"], checkpoints["draft"])) -> Any:
        words = ("--target", models[0], "--draft", models[1], "--out", str(tmp_path / "out"), *words)
        return CliRunner().invoke(app, ["export", *words])

    words = shlex.split(export("--engine", "sglang").stdout)
    assert words[words.index("--speculative-algorithm") + 1] == "STANDALONE"
    assert words[words.index("--speculative-draft-model-path") + 1] == checkpoints["draft"]
    assert not any("threshold" in word for word in words)
    assert not (tmp_path / "out").exists()  # a model is loaded as it is
    assert "no rule like 'margin': use rule sglang, or exact" in str(
        export("--engine", "sglang", "--rule", "margin:1").exception
    )
    head = read_head(Path(deep[1]), tiny_model(seed=1, num_hidden_layers=4))
    normed = EagleHead(replace(head.config, norm_before_residual=True), head.draft_ids)
    write_head(normed, tmp_path / "normed")
    refused = export("--engine", "sglang", models=(deep[0], str(tmp_path / "normed")))
    assert "no head with its norm before the residual" in str(refused.exception)


def test_a_recipe_for_sglang(checkpoints: dict[str, str], tmp_path: Path) -> None:
    pair = Pair.load(checkpoints["target"], checkpoints["draft"], device="cpu", dtype="float32")
    for name, options in {"plain": {"rule": "exact", "certified": False, "gamma": 0}, "relaxed": {}}.items():
        folder = recipe_folder(tmp_path / name, pair, **options)
        done = CliRunner().invoke(
            app, ["export", "--engine", "sglang", "--recipe", str(folder), "--out", str(tmp_path / "out")]
        )
        message = "decodes plainly" if name == "plain" else "SGLang has no rule like"
        assert message in str(done.exception)
    done = CliRunner().invoke(app, ["export", "--recipe", str(folder), "--out", str(tmp_path / "out")])
    words = shlex.split(done.stdout)  # in vLLM it is one
    assert words[words.index("--worker-cls") + 1] == WORKER
    assert json.loads(words[words.index("--additional-config") + 1])["selfjudge"]["rule"].startswith("margin:")
    assert json.loads(words[words.index("--speculative-config") + 1]) == {
        "model": checkpoints["draft"],
        "num_speculative_tokens": 3,
    }
    folder = recipe_folder(tmp_path / "exact", pair, rule="exact", certified=False, gamma=3)
    done = CliRunner().invoke(app, ["export", "--engine", "sglang", "--recipe", str(folder), "--out", "out"])
    assert "--speculative-num-steps 3 " in done.stdout
    assert "lossless here and there" in done.stderr
