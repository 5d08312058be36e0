"""kill -9 at any moment, two processes on one folder, a full disk, a read-only folder, a lock left behind.

Each of `label`, `train`, `eval`, `tune`, `distill` and `pull` runs once undisturbed. After each mishap the same command ends in
the same bytes. The quick part tries one moment of each, the slow one ten; the number of a moment is its seed.
"""

from __future__ import annotations

import base64
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load

import fake_model
from fake_labels import label_folder
from killing import Warm
from runs import prompts_file

COMMANDS = ("label", "train", "eval", "tune", "distill", "pull")
MOMENTS = [pytest.param(n, marks=pytest.mark.slow) if n >= 1 else n for n in range(10)]
QUICK = [name if name in ("label", "pull") else pytest.param(name, marks=pytest.mark.slow) for name in COMMANDS]
MOST = [pytest.param(name, marks=pytest.mark.slow) if name in ("tune", "distill") else name for name in COMMANDS]
"""The others have quick tests of their own that end a run in its midst: `test_tune_runs.py`, `test_distill_runs.py`."""
PAGE = 4096
ROOM = 64 << 20


@dataclass
class Case:
    """One command, and what its undisturbed run left."""

    name: str
    warm: Warm
    argv: list[str]
    env: dict[str, str]
    resume: list[str] = field(default_factory=list)
    writes: int = 0
    seconds: float = 0.0
    reference: dict[str, bytes] = field(default_factory=dict)
    size: int = 0
    """Of the files on a disk."""

    def command(self, folder: Path, **more: Any) -> dict[str, Any]:
        """The command as an action. With `resume`, as it is said again."""
        again = self.resume if more.pop("resume", False) else []
        argv = [word.replace("FOLDER", str(folder)) for word in (*self.argv, *again)]
        env = {name: value.replace("FOLDER", str(folder)) for name, value in self.env.items()}
        return {"argv": argv, "root": str(folder), "env": env, **more}

    def run(self, folder: Path, **more: Any) -> dict[str, Any]:
        return {"do": "run", **self.command(folder, **more)}

    def check(self, ended: dict[str, Any], files: dict[str, str]) -> None:
        """The run ended well, in the bytes of the undisturbed one."""
        found = kept(files)
        finished_before = self.name == "train" and "holds other files" in ended["stderr"]
        assert ended["code"] == 0 or finished_before, ended["stderr"]
        assert found.keys() == self.reference.keys()
        assert [name for name, value in found.items() if value != self.reference[name]] == []


def kept(files: dict[str, str]) -> dict[str, bytes]:
    """What must be equal: all but locks, run.json (time, argv, seconds), and what is timed in other files."""
    return {
        name: without_times(name, base64.b64decode(value))
        for name, value in files.items()
        if Path(name).name
        not in ("run.json", ".lock", ".fake.lock", "conversions", "attempts.jsonl", ".attempts.jsonl.lock")
    }


def without_times(name: str, value: bytes) -> bytes:
    """The seconds of a draft's training, in its card and in its checkpoint."""
    if name.endswith("README.md"):
        return re.sub(rb"[\d.]+ s\.", b"", value)
    if name.endswith("train.safetensors"):
        return b"".join(key.encode() + array.tobytes() for key, array in sorted(load(value).items()))
    return value


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    process = Warm()
    yield process
    process.close()


@pytest.fixture(scope="module")
def cases(warm: Warm, checkpoints: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    root = tmp_path_factory.mktemp("given")
    asked = prompts_file(root / "asked.jsonl", 20)
    rows = [{**json.loads(line), "answer": "7"} for line in asked.read_text().splitlines()[:8]]
    scored = root / "scored.jsonl"
    scored.write_text("".join(json.dumps(row) + "\n" for row in rows))
    calibration = root / "calibration.jsonl"
    rows = [{**json.loads(line), "answer": "7"} for line in asked.read_text().splitlines()[:12]]
    calibration.write_text("".join(json.dumps(row) + "\n" for row in rows))
    labels = label_folder(root / "labels", prompts=20, each=5)
    wheels = root / "wheels"
    wheels.mkdir()
    fake_model.build_wheels(wheels)
    pair = ["--target", checkpoints["target"], "--draft", checkpoints["draft"], "--device", "cpu"]
    argv = {
        "label": ["label", *pair, "--prompts", str(asked), "--tau", "-8", "--max-new-tokens", "16", "--suffix-length", "4", "--batch", "8"],
        "train": ["train", str(labels), "--features", "hidden"],
        "eval": ["eval", *pair, "--tasks", f"file:{scored}", "--rules", "exact topk:3", "--gammas", "3", "--batch", "4",
                 "--max-new-tokens", "8", "--no-times"],
        "tune": ["tune", *pair, "--prompts", str(calibration), "--epsilon", "0.4", "--families", "margin", "--gamma", "3",
                 "--batch", "4", "--max-new-tokens", "5", "--no-times"],
        "distill": ["distill", "--target", checkpoints["target"], "--device", "cpu", "--prompts", f"{asked}:20x2",
                    "--layers", "1", "--width", "64", "--steps", "6", "--held-out", "4", "--max-new-tokens", "8",
                    "--batch-tokens", "256", "--top-k", "4"],
    }  # fmt: skip
    made = {
        name: Case(
            name,
            warm,
            [*words, "--out", "FOLDER/out"],
            {"SELFJUDGE_LEDGER": "FOLDER/attempts.jsonl"} if name == "tune" else {},
            ["--resume"] if name in ("label", "eval", "tune") else [],
        )
        for name, words in argv.items()
    }
    env = {"SELFJUDGE_HOME": "FOLDER/home", "WHEELS": str(wheels), "CONVERSIONS": "FOLDER/conversions"}
    return {**made, "pull": Case("pull", warm, ["pull", "fake", "--checkpoint"], env)}


@pytest.fixture(params=COMMANDS)
def case(request: pytest.FixtureRequest, cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A command; its undisturbed run happens once."""
    case = cases[request.param]
    if not case.reference:
        folder = tmp_path_factory.mktemp("reference")
        ended, files = case.warm(case.run(folder), {"do": "content", "path": str(folder)})
        assert ended["code"] == 0, ended["stderr"]
        case.writes, case.seconds, case.reference = ended["writes"], ended["seconds"], kept(files)
        case.size = sum(-(-len(base64.b64decode(value)) // PAGE) * PAGE for value in files.values())
    return case


def one_line(ended: dict[str, Any]) -> str:
    """The line that says what is wrong; progress and remarks stand above it."""
    assert ended["code"] == 2, ended
    lines = ended["stderr"].splitlines()
    assert lines[-1].startswith("selfjudge: ")
    assert "Traceback" not in ended["stderr"]
    return str(lines[-1])


@pytest.mark.parametrize("case", MOST, indirect=True)
@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_at_any_moment_the_same_command_ends_in_the_same_bytes(case: Case, moment: int, tmp_path: Path) -> None:
    dice = random.Random(f"{case.name}-{moment}")
    when = {"kill_at": dice.randrange(case.writes)} if moment % 2 else {"kill_after": dice.uniform(0, case.seconds)}
    print(f"seed {case.name}-{moment}: {when}")
    killed, ended, files = case.warm(
        case.run(tmp_path, **when), case.run(tmp_path, resume=True), {"do": "content", "path": str(tmp_path)}
    )
    assert killed["code"] == -9 or "kill_after" in when
    case.check(ended, files)


@pytest.mark.parametrize("case", QUICK, indirect=True)
def test_two_processes_on_one_folder(case: Case, tmp_path: Path) -> None:
    """The second is refused; of a pull, which all commands share, it waits and finds the work done."""
    first = case.command(tmp_path, stop_at=case.writes // 2)
    second = case.command(tmp_path, resume=True)
    waits = "waiting for another process" if case.name == "pull" else ""
    together, files = case.warm(
        {"do": "both", "first": first, "second": second, "waits": waits}, {"do": "content", "path": str(tmp_path)}
    )
    case.check(together["first"], files)
    if case.name == "pull":
        assert together["second"]["code"] == 0
    else:
        assert f"another process works on {tmp_path / 'out'}" in one_line(together["second"])


@pytest.mark.parametrize("case", QUICK, indirect=True)
@pytest.mark.parametrize(
    "share", [pytest.param(0.1, marks=pytest.mark.slow), 0.4, pytest.param(0.8, marks=pytest.mark.slow)]
)
def test_a_full_disk(case: Case, share: float, tmp_path: Path) -> None:
    place = str(tmp_path)
    size = max(2, int(share * case.size / PAGE)) * PAGE
    mounted, *results = case.warm(
        {"do": "mount", "path": place, "size": size},
        case.run(tmp_path),
        {"do": "remount", "path": place, "size": ROOM},
        case.run(tmp_path, resume=True),
        {"do": "content", "path": place},
    )
    if mounted["error"]:
        pytest.skip(f"no file system can be mounted here: {mounted['error']}")
    full, _, ended, files = results
    one_line(full)
    case.check(ended, files)


@pytest.mark.parametrize("case", QUICK, indirect=True)
def test_a_folder_that_became_read_only(case: Case, tmp_path: Path) -> None:
    place = str(tmp_path)
    content = {"do": "content", "path": place}
    mounted, killed, before, _, refused, after, _, ended, files = case.warm(
        {"do": "mount", "path": place, "size": ROOM},
        case.run(tmp_path, kill_at=case.writes // 2),
        content,
        {"do": "remount", "path": place, "size": ROOM, "read_only": True},
        case.run(tmp_path, resume=True),
        content,
        {"do": "remount", "path": place, "size": ROOM},
        case.run(tmp_path, resume=True),
        content,
    )
    if mounted["error"]:
        pytest.skip(f"no file system can be mounted here: {mounted['error']}")
    assert killed["code"] == -9
    assert "Read-only file system" in one_line(refused)
    assert before == after
    case.check(ended, files)


@pytest.mark.parametrize("case", QUICK, indirect=True)
@pytest.mark.parametrize("owner", [pytest.param("999999999", marks=pytest.mark.slow), "1"])
def test_a_lock_left_behind(case: Case, owner: str, tmp_path: Path) -> None:
    """A file is no lock: neither with the number of a dead process, nor with one that another program has now."""
    lock = "home/models/.fake.lock" if case.name == "pull" else "out/.lock"
    _, ended, files = case.warm(
        {"do": "write", "path": str(tmp_path / lock), "text": f"{owner}\n"},
        case.run(tmp_path, resume=True),
        {"do": "content", "path": str(tmp_path)},
    )
    case.check(ended, files)
