"""Whole distillations of tiny models: what a run writes, its interruptions and its refusals."""

from __future__ import annotations

import copy
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers as hf
from safetensors.torch import load_file

import selfjudge.distill.data as data_module
from fake_gguf import write_model
from remember import remember_responses
from runs import content, drafted_by, full_disk
from selfjudge.decoding.text import generate
from selfjudge.distill.config import DistillConfig
from selfjudge.distill.pipeline import distill_draft
from selfjudge.errors import SelfJudgeError
from selfjudge.models.convert import read_compact_draft
from selfjudge.models.gguf import GgufFile
from selfjudge.models.load import Target
from selfjudge.models.pair import Pair
from selfjudge.prompts.sources import find_learnt
from selfjudge.store import read_tensors

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from pack_draft import pack_student

CHAT = "{% for m in messages %}<s> {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w0{% endif %}"


@pytest.fixture(scope="module", autouse=True)
def answered_once() -> Iterator[None]:
    """Most runs here begin with the same answers of the same target."""
    with pytest.MonkeyPatch.context() as patch:
        remember_responses(patch, data_module)
        yield


@pytest.fixture(scope="module")
def target(checkpoints: dict[str, str]) -> Pair:
    return Pair.load(checkpoints["target"], device="cpu", needs_draft=False)


@pytest.fixture
def pair(target: Pair) -> Pair:
    """A tiny target whose chat template has a user header."""
    tokenizer = copy.deepcopy(target.tokenizer)
    tokenizer.chat_template = CHAT
    return replace(target, tokenizer=tokenizer)


@pytest.fixture
def settings(tmp_path: Path) -> DistillConfig:
    """A run of a second or two on a file of prompts."""
    file = tmp_path / "prompts.jsonl"
    random = np.random.default_rng(0)
    prompts = [" ".join(f"w{i}" for i in random.integers(1, 50, size)) for size in random.integers(2, 12, 20)]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    return DistillConfig(
        layers=1, width=64, minutes=0.004, prompts=(f"{file}:20x3",), max_new_tokens=24, held_out=4, top_k=8,
        batch_tokens=1024, rate=5e-3,
    )  # fmt: skip


# the whole run


def loaded(folder: Path) -> hf.PreTrainedModel:
    return hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_a_whole_run(pair: Pair, checkpoints: dict[str, str], settings: DistillConfig, tmp_path: Path) -> None:
    out = tmp_path / "out"
    told: list[tuple[str, float]] = []
    result = distill_draft(pair, out, replace(settings, steps=80), notify=lambda *what: told.append(what))
    assert all(0 <= share <= 1 for _, share in told)
    assert told[0] == ("the target answers", 0.0)
    assert told[-1][0] == "writing"

    written = json.loads((out / "run.json").read_text())
    assert {"commit", "versions", "machine", "time"} <= written.keys()
    assert written["training"] == result["training"]
    assert written["sources"][0]["prompts"] == 20
    assert written["training"]["answers"] == 16 * 3
    history = written["training"]["history"]
    assert history[-1]["loss"] < history[0]["loss"]
    assert written["top1_held_out"]["all"] > 0
    assert "20 | 3 | given by the user" in (out / "README.md").read_text()
    assert written["bytes"] == (out / "model.safetensors").stat().st_size
    asked = [json.loads(line)["prompt"] for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    learnt = ((name, places) for name, places in find_learnt(drafted_by(pair, out), {}, [*asked, "w49 w48"], (), None))
    assert list(learnt) == [("the draft", list(range(20)))]  # held-out ones chose when to end

    model = loaded(out)
    assert (model.config.num_hidden_layers, model.config.hidden_size) == (1, 64)
    draft = Pair.load(str(out), device="cpu", needs_draft=False)
    for text in ("w1 w2 w3", "w9", "w5 w4 w44 w13"):
        ids = torch.tensor([draft.encode(text)])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20, pad_token_id=0
        )
        assert (
            list(generate(draft, [text], gamma=0, max_new_tokens=20)[0].tokens) == expected[0, ids.shape[1] :].tolist()
        )

    both = Pair.load(checkpoints["target"], str(out), device="cpu")
    plain = generate(both, ["w1 w2 w3"], gamma=0, max_new_tokens=20)
    assert generate(both, ["w1 w2 w3"], gamma=3, max_new_tokens=20)[0].tokens == plain[0].tokens

    weights = load_file(out / "work" / "train.safetensors")
    best = {name.removeprefix("best."): tensor for name, tensor in weights.items() if name.startswith("best.")}
    pack_student(best, json.loads((out / "config.json").read_text()), tmp_path / "compact")
    write_model(pair.target, tmp_path / "target.gguf", {})
    packed = read_compact_draft(tmp_path / "compact", GgufFile(tmp_path / "target.gguf")).state_dict()
    assert packed.keys() == model.state_dict().keys()
    for name, whole in model.state_dict().items():
        assert (packed[name] - whole).norm() <= 0.02 * whole.norm(), name
    assert hf.AutoTokenizer.from_pretrained(out).get_vocab() == pair.tokenizer.get_vocab()


class Killed(Exception):  # noqa: N818
    """Stands for the end of the process."""


def killer(stage: str, occurrence: int) -> Callable[[str, float], None]:
    count = 0

    def notify(told: str, share: float) -> None:
        nonlocal count
        count += told.split(":")[0] == stage
        if told.split(":")[0] == stage and count == occurrence:
            raise Killed

    return notify


@pytest.mark.quick("the target answers-1", "training-1")
@pytest.mark.parametrize(
    ("stage", "occurrence"),
    [("the target answers", 1), ("the target answers", 3), ("the target answers, top-k", 2), ("training", 1), ("writing", 1)],
)  # fmt: skip
def test_a_killed_run_goes_on(
    stage: str, occurrence: int, pair: Pair, settings: DistillConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_module, "CHUNK", 16)
    out = tmp_path / "out"
    with pytest.raises(Killed):
        distill_draft(pair, out, settings, notify=killer(stage, occurrence))
    assert not (out / "run.json").exists()
    there = {p: p.stat().st_mtime_ns for p in (out / "work").glob("[ap]*") if p.suffix != ".json"}
    assert len(there) == {"the target answers": occurrence, "the target answers, top-k": 2}.get(stage, 1 + 2 + 2)
    trained = stage == "writing" and read_tensors(out / "work" / "train.safetensors")[1]["step"]
    result = distill_draft(pair, out, settings)
    assert (out / "run.json").is_file()
    assert {p: p.stat().st_mtime_ns for p in there} == there
    if trained:
        assert result["training"]["steps"] >= trained
    # what was made in two goes is what is made in one
    whole = tmp_path / "whole"
    with pytest.raises(Killed):
        distill_draft(pair, whole, settings, notify=killer("training", 1))
    assert (whole / "work" / "prompts.jsonl").read_bytes() == (out / "work" / "prompts.jsonl").read_bytes()
    for file in (whole / "work").glob("a*.safetensors"):
        one, other = read_tensors(file)[0], read_tensors(out / "work" / file.name)[0]
        assert all(np.array_equal(one[name], other[name]) for name in one)


@pytest.fixture
def writing(checkpoints: dict[str, str], tmp_path: Path) -> str:
    """A target that writes prompts: its template has a user header, and many tokens end a text."""
    folder = tmp_path / "writing"
    shutil.copytree(checkpoints["target"], folder)
    (folder / "chat_template.jinja").write_text(CHAT)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, *range(20, 26)]}))
    return str(folder)


def test_a_kill_while_prompts_are_written_leaves_no_other_prompts(
    writing: str, settings: DistillConfig, tmp_path: Path
) -> None:
    pair = Pair.load(writing, device="cpu", needs_draft=False)
    config = replace(settings, prompts=("self:80x1", "self-chats:8x1"), batch=4, max_new_tokens=8, steps=2)
    with pytest.raises(Killed):
        distill_draft(pair, tmp_path / "out", config, notify=killer("the target writes prompts", 5))
    assert not (tmp_path / "out" / "work" / "prompts.jsonl").exists()
    for name in ("out", "whole"):
        distill_draft(pair, tmp_path / name, config)
    one, other = (content(tmp_path / name) for name in ("out", "whole"))
    for name in one.keys() - {"work/train.safetensors"}:  # that one says how long it took
        assert one[name] == other[name], name


def test_a_longer_run_that_is_killed_is_not_taken_for_finished(
    pair: Pair, settings: DistillConfig, tmp_path: Path
) -> None:
    out, longer = tmp_path / "out", replace(settings, minutes=settings.minutes * 2)
    distill_draft(pair, out, settings)
    with pytest.raises(Killed):
        distill_draft(pair, out, longer, notify=killer("writing", 1))
    assert not (out / "run.json").exists()
    assert distill_draft(pair, out, longer)["settings"]["minutes"] == longer.minutes


def test_a_folder_of_somebody_else_is_left_alone(pair: Pair, settings: DistillConfig, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(SelfJudgeError, match="holds other files"):
        distill_draft(pair, tmp_path, settings)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_other_settings_are_refused_and_more_minutes_are_not(
    pair: Pair, settings: DistillConfig, tmp_path: Path, checkpoints: dict[str, str]
) -> None:
    out = tmp_path / "out"
    first = distill_draft(pair, out, settings)
    for wrong in (replace(settings, layers=2), replace(settings, seed=1, top_k=4)):
        with pytest.raises(SelfJudgeError, match=r"another .*: name another `out`") as caught:
            distill_draft(pair, out, wrong)
        assert "\n" not in str(caught.value)
    stranger = replace(pair, target_model=Target(pair.target, pair.target_id, "0" * 64))
    with pytest.raises(SelfJudgeError, match="another target"):
        distill_draft(stranger, out, settings)
    again = distill_draft(pair, out, replace(settings, minutes=0.02))
    assert again["training"]["seconds"] >= first["training"]["seconds"]
    assert again["training"]["steps"] >= first["training"]["steps"]


@pytest.mark.parametrize("name", ["answers-00000.safetensors", "prompts.jsonl"])
def test_damaged_data_is_made_again(pair: Pair, settings: DistillConfig, tmp_path: Path, name: str) -> None:
    """The same bytes come again, and the training goes on with them."""
    out = tmp_path / "out"
    with pytest.raises(Killed):
        distill_draft(pair, out, settings, notify=killer("writing", 1))
    file = out / "work" / name
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert distill_draft(pair, out, settings)["training"]["steps"] > 0
    assert file.read_bytes() == whole


@pytest.mark.parametrize("name", ["train.safetensors", "settings.json"])
def test_a_damaged_file_is_named(pair: Pair, settings: DistillConfig, tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    with pytest.raises(Killed):
        distill_draft(pair, out, settings, notify=killer("writing", 1))
    file = out / name if name == "settings.json" else out / "work" / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(SelfJudgeError, match=f"cannot read .*{name}") as caught:
        distill_draft(pair, out, settings)
    assert "\n" not in str(caught.value)


def test_a_full_disk_leaves_nothing_half_written(
    pair: Pair, settings: DistillConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(safetensors.numpy, "save_file", full_disk)
        with pytest.raises(SelfJudgeError, match="No space left on device") as caught:
            distill_draft(pair, out, settings)
    assert "\n" not in str(caught.value)
    assert sorted(file.name for file in (out / "work").iterdir()) == ["prompts.json", "prompts.jsonl"]
    distill_draft(pair, out, settings)  # there is space again


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "size"), [("training", 30_000), ("writing", 30_000), ("writing", 100_000)])
def test_a_disk_that_fills_up_while_models_are_written(
    pair: Pair, settings: DistillConfig, tmp_path: Path, stage: str, size: int
) -> None:
    """The kernel refuses to let files grow: safetensors' own writer fails, not a stand-in for it."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def notify(told: str, share: float) -> None:
        if told.startswith(stage):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))

    out = tmp_path / "out"
    try:
        with pytest.raises(SelfJudgeError, match="cannot write") as caught:
            distill_draft(pair, out, settings, notify=notify)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(caught.value)
    assert not list(out.rglob("*partial"))
    assert not (out / "run.json").exists()
    distill_draft(pair, out, settings)


@pytest.mark.parametrize("prompts", ["self:4", "file"])
def test_a_target_without_chat_template(pair: Pair, settings: DistillConfig, tmp_path: Path, prompts: str) -> None:
    pair.tokenizer.chat_template = None
    wanted = replace(settings, prompts=(prompts,)) if prompts != "file" else settings
    with pytest.raises(SelfJudgeError, match="chat template") as caught:
        distill_draft(pair, tmp_path / "out", wanted)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"minutes": 0}, "`minutes`"), ({"top_k": 0}, "`top_k`"), ({"held_out": 0}, "`held_out`"), ({"width": 70}, "width"),
        ({"prompts": ("no-such-file",)}, "no-such-file"), ({"prompts": ("self-portraits:3",)}, "self-portraits"),
        ({"prompts": ("cnn_dailymail:3",)}, "no split 'train'"), ({"max_prompt_tokens": 1}, "two prompts"),
        ({"prompts": ("self:1",)}, "two prompts"),
    ],
)  # fmt: skip
def test_useless_settings_are_refused(
    pair: Pair, settings: DistillConfig, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(SelfJudgeError, match=message) as caught:
        distill_draft(pair, tmp_path / "out", replace(settings, **change))
    assert "\n" not in str(caught.value)


@pytest.mark.quick("change2")
@pytest.mark.parametrize("change", [{"top_k": 200}, {"seed": 2**31}, {"seed": -1}])
def test_unusual_settings_work(pair: Pair, settings: DistillConfig, tmp_path: Path, change: dict[str, Any]) -> None:
    result = distill_draft(pair, tmp_path / "out", replace(settings, **change))
    assert result["training"]["steps"] > 0


@pytest.mark.slow
def test_a_target_in_bfloat16(checkpoints: dict[str, str], settings: DistillConfig, tmp_path: Path) -> None:
    pair = Pair.load(checkpoints["target"], device="cpu", dtype="bfloat16", needs_draft=False)
    assert distill_draft(pair, tmp_path / "out", settings)["training"]["steps"] > 0
    assert loaded(tmp_path / "out")(torch.tensor([[5, 6]])).logits.isfinite().all()


def test_a_target_that_writes_its_own_prompts(
    pair: Pair, settings: DistillConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a random model ends rarely
    monkeypatch.setattr(pair.target.generation_config, "eos_token_id", [2, 20, 21, 22])
    result = distill_draft(pair, tmp_path / "out", replace(settings, prompts=("self:40x2",)))
    (source,) = result["sources"]
    assert source["licence"] == "written by the target"
    assert source["written"] == 40
    assert source["prompts"] == source["kept"] > 3


def test_a_file_whose_name_begins_with_self_is_a_file(
    pair: Pair, settings: DistillConfig, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(tmp_path / "prompts.jsonl", tmp_path / "selfmade.jsonl")
    result = distill_draft(pair, tmp_path / "out", replace(settings, prompts=("selfmade.jsonl",)))
    assert result["sources"][0]["licence"] == "given by the user"


def test_a_folder_that_cannot_be_written(pair: Pair, settings: DistillConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SelfJudgeError, match="cannot use") as caught:
        distill_draft(pair, tmp_path / "file" / "out", settings)
    assert "\n" not in str(caught.value)
