"""Checkpoints from strangers: no code of theirs runs, nobody is asked, and no weight is missing or infinite."""

from __future__ import annotations

import ast
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from conftest import tiny_model
from fake_judge import constant_judge
from selfjudge.distill.config import Schedule
from selfjudge.distill.train import Trainer
from selfjudge.errors import SelfJudgeError
from selfjudge.evaluate.consistency import load_classifier
from selfjudge.integrations.vllm.backend import _outline
from selfjudge.judge.config import JudgeConfig
from selfjudge.judge.model import Judge
from selfjudge.models.convert import gguf_tokenizer, read_compact_draft

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from pack_draft import pack_student

ROOT = Path(__file__).parents[2]
OWN = {"Judge", "JudgeConfig", "GenerationConfig"}  # these read numbers and words alone
Tensors = dict[str, torch.Tensor]


def loads(file: Path) -> Iterator[ast.Call]:
    """Every call in a file that makes a model, a tokenizer or a config out of somebody's files."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = ast.unparse(node.func.value).rpartition(".")[2]
            if node.func.attr in ("from_pretrained", "from_config") and owner not in OWN:
                yield node


def test_every_load_refuses_code() -> None:
    files = [file for folder in ("src", "benchmarks", "examples") for file in (ROOT / folder).rglob("*.py")]
    calls = [(file.relative_to(ROOT), call) for file in files for call in loads(file)]
    careless = [
        f"{file}:{call.lineno}"
        for file, call in calls
        if not any(k.arg == "trust_remote_code" and ast.unparse(k.value) == "False" for k in call.keywords)
    ]
    assert len(calls) > 10
    assert not careless, f"give trust_remote_code=False: {', '.join(careless)}"


def with_code(folder: Path, *classes: str) -> Path:
    """A checkpoint that brings code for these classes; the code must not run."""
    file = folder / "config.json"
    code = {"model_type": "unheard-of", "auto_map": dict.fromkeys(("AutoConfig", *classes), "evil.Evil")}
    file.write_text(json.dumps(json.loads(file.read_text()) | code))
    (folder / "evil.py").write_text("raise SystemExit('the code ran')")
    return folder


@pytest.fixture
def nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on standard input"))


@pytest.fixture
def nli(tmp_path: Path, checkpoints: dict[str, str]) -> Path:
    """A tiny NLI classifier."""
    folder = tmp_path / "nli"
    config = hf.LlamaConfig(**tiny_model().config.to_dict() | {"id2label": {0: "contradiction", 1: "entailment"}})
    hf.AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    hf.AutoTokenizer.from_pretrained(checkpoints["target"]).save_pretrained(folder)
    return folder


@pytest.mark.usefixtures("nobody_answers")
def test_a_classifier_brings_no_code(nli: Path) -> None:
    load_classifier(str(nli))
    with pytest.raises(SelfJudgeError, match="cannot load the NLI model"):
        load_classifier(str(with_code(nli, "AutoModelForSequenceClassification")))


@pytest.mark.usefixtures("nobody_answers")
def test_the_folder_of_a_gguf_file_brings_no_code(tmp_path: Path, checkpoints: dict[str, str]) -> None:
    shutil.copytree(checkpoints["target"], tmp_path / "gguf")
    (tmp_path / "gguf" / "model.gguf").write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(SelfJudgeError, match="as a GGUF model"):
        gguf_tokenizer(with_code(tmp_path / "gguf", "AutoTokenizer") / "model.gguf")


def changed(folder: Path, change: Callable[[Tensors], object], name: str = "model.safetensors") -> Path:
    tensors = load_file(folder / name)
    change(tensors)
    save_file(tensors, folder / name, {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("score.weight"), "lacks weights"),
        (lambda tensors: tensors["score.weight"].fill_(torch.nan), "not finite"),
    ],
)
def test_a_classifier_without_its_head_is_refused(nli: Path, change: Callable[[Tensors], object], message: str) -> None:
    with pytest.raises(SelfJudgeError, match=message):
        load_classifier(str(changed(nli, change)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.update(bias=torch.zeros(3)), "bias has 3 entries"),
        (lambda tensors: tensors.update(bias=torch.tensor(torch.nan)), r"not finite numbers \(bias\)"),
        (lambda tensors: tensors["weight"][:1].fill_(torch.inf), r"not finite numbers \(weight\)"),
        (lambda tensors: tensors["weight"][:1].fill_(-torch.inf), r"not finite numbers \(weight\)"),
        (lambda tensors: tensors.update(weight=torch.zeros(8, dtype=torch.int64)), r"not finite numbers \(weight\)"),
        (lambda tensors: tensors.update(weight=torch.zeros(9)), "weight has 9 entries"),
        (lambda tensors: tensors.update(weight=torch.zeros(2, 4)), r"weight has 8 entries \(\[2, 4\]\)"),
        (lambda tensors: tensors.pop("bias"), "holds weight, a judge"),
    ],
)
def test_a_judge_with_wrong_weights_is_refused(
    tmp_path: Path, change: Callable[[Tensors], object], message: str
) -> None:
    Judge(JudgeConfig(hidden_size=8, target="t")).save_pretrained(tmp_path / "judge")
    with pytest.raises(SelfJudgeError, match=message):
        Judge.from_pretrained(changed(tmp_path / "judge", change))


def test_a_judge_with_a_hidden_layer_is_refused(tmp_path: Path) -> None:
    Judge(JudgeConfig(hidden_size=8, target="t")).save_pretrained(tmp_path)
    network = {"weight": torch.zeros(2), "inner_weight": torch.zeros(2, 8), "inner_bias": torch.zeros(2)}
    with pytest.raises(SelfJudgeError, match="holds bias, inner_bias, inner_weight, weight, a judge has bias, weight"):
        Judge.from_pretrained(changed(tmp_path, lambda tensors: tensors.update(network)))


@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_a_constant_judge_comes_back(tmp_path: Path, probability: float) -> None:
    constant_judge(probability, 8, "t").save_pretrained(tmp_path / "judge")
    assert float(Judge.from_pretrained(tmp_path / "judge").score(torch.ones(8))) == probability


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("proj_in.scale"), "cannot read the weights"),
        (lambda tensors: tensors["proj_in.scale"].fill_(torch.nan), "not finite"),
        (lambda tensors: tensors.pop("model.norm.weight"), "is damaged"),
        (lambda tensors: tensors.update(stranger=torch.ones(2)), "is damaged"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}), "is damaged"),
    ],
)
def test_a_compact_draft_with_wrong_weights_is_refused(
    tmp_path: Path, change: Callable[[Tensors], object], message: str
) -> None:
    target, draft = tiny_model(seed=1), tiny_model(seed=2, num_hidden_layers=1)
    tensors = {
        name: tensor
        for name, tensor in draft.state_dict().items()
        if name not in ("model.embed_tokens.weight", "lm_head.weight")
    } | {"proj_in": torch.eye(32), "proj_out": torch.eye(32)}
    pack_student(tensors, {**draft.config.to_dict(), "model_type": "llama"}, tmp_path)
    read_compact_draft(tmp_path, target)
    with pytest.raises(SelfJudgeError, match=message):
        read_compact_draft(changed(tmp_path, change, "draft.safetensors"), target)


def test_a_training_with_infinite_weights_does_not_go_on(tmp_path: Path) -> None:
    class Model(torch.nn.Linear):
        layers = ("none",)

    def trainer() -> Trainer:
        model: Any = Model(2, 3)
        return Trainer(model, tmp_path / "train.safetensors", Schedule(1), lambda stage, share: None)

    first = trainer()
    first.state.step = 3
    first._save()
    assert trainer().state.step == 3
    with torch.no_grad():
        first.parameters["bias"].fill_(torch.inf)
    first._save()
    with pytest.raises(SelfJudgeError, match="not finite"):
        trainer()


def test_the_output_matrix_that_labelling_in_vllm_reads(tmp_path: Path, checkpoints: dict[str, str]) -> None:
    shutil.copytree(checkpoints["target"], tmp_path / "target")
    _outline(str(tmp_path / "target"), torch.float32, torch.device("cpu"))
    changed(tmp_path / "target", lambda tensors: tensors["lm_head.weight"][3].fill_(torch.nan))
    with pytest.raises(SelfJudgeError, match="not finite"):
        _outline(str(tmp_path / "target"), torch.float32, torch.device("cpu"))
