"""The run folder: settings, seals, what is refused, and what survives a crash."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from selfjudge.errors import SelfJudgeError
from selfjudge.store import (
    RunFolder,
    keep_settings,
    read_rows,
    read_tensors,
    refuse_foreign,
    versions,
    write_rows,
    write_tensors,
)
from selfjudge.store.files import parse_json

SETTINGS: dict[str, Any] = {"seed": 0, "prompts": ("a", "b"), "minutes": 3}


def work(out: Path, resume: bool = True, parts: int = 3, made_from: str = "", **changes: Any) -> list[int]:
    """A run of a few parts; the numbers of those that were made, not found."""
    run, made = RunFolder(out, done="manifest.json"), []
    run.claim(resume=resume)
    with run.working({**SETTINGS, **changes}, free=("minutes",)):
        if run.result() is not None:
            return []
        for number in range(parts):
            if run.sealed(f"part-{number}", made_from) is None:
                write_rows(out / f"part-{number}.jsonl", [{"number": number}])
                run.seal(f"part-{number}", [f"part-{number}.jsonl"], made_from, rows=1)
                made.append(number)
        run.finish({"parts": parts}, seed=0)
    return made


def test_a_run_is_done_once_and_provenance_says_who_did_it(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "run"
    assert work(out) == [0, 1, 2]
    assert work(out) == []
    assert json.loads((out / "manifest.json").read_text()) == {"parts": 3}
    assert {"argv", "commit", "time", "versions", "machine", "seed"} <= json.loads(
        (out / "run.json").read_text()
    ).keys()
    assert RunFolder(out).sealed("part-1") == {
        "files": {"part-1.jsonl": RunFolder(out).sealed("part-1")["files"]["part-1.jsonl"]},  # type: ignore[index]
        "made_from": "", "rows": 1,
    }  # fmt: skip


def test_a_package_that_says_no_version_has_none() -> None:
    known = versions("numpy", "a-package-that-is-only-files")
    assert known["numpy"] == np.__version__
    assert "a-package-that-is-only-files" not in known


def test_a_part_that_is_damaged_missing_unsealed_or_of_other_origin_is_made_again(tmp_path: Path) -> None:
    out = tmp_path / "run"
    work(out)
    for harm, again in (
        (lambda: (out / "part-1.jsonl").write_text("{}"), [1]),
        (lambda: (out / "part-2.jsonl").unlink(), [2]),
        (lambda: (out / "work" / "part-0.json").unlink(), [0]),
        (lambda: (out / "work" / "part-0.json").write_text('{"files": 3, "made_from": ""}'), [0]),
        (lambda: (out / "work" / "part-0.json").write_text("half of i"), [0]),
        (lambda: None, []),
    ):
        RunFolder(out, done="manifest.json").reopen()
        harm()
        assert work(out) == again
    RunFolder(out, done="manifest.json").reopen()
    assert work(out, made_from="another") == [0, 1, 2]


def test_other_settings_are_refused_by_name_and_free_ones_are_not(tmp_path: Path) -> None:
    out = tmp_path / "run"
    work(out)
    work(out, minutes=9)
    with pytest.raises(SelfJudgeError, match="begun with another seed, prompts: name another `out`"):
        work(out, seed=1, prompts=("a",))
    assert json.loads((out / "settings.json").read_text())["minutes"] == 3
    with pytest.raises(SelfJudgeError, match="another method"):
        keep_settings(out / "settings.json", {"method": "new"})


def test_resume_works_on_missing_crashed_and_finished_folders_and_is_asked_for(tmp_path: Path) -> None:
    assert work(tmp_path / "missing", resume=True) == [0, 1, 2]
    with pytest.raises(SelfJudgeError, match="go on with `resume`"):
        work(tmp_path / "missing", resume=False)
    (tmp_path / "crashed").mkdir()
    (tmp_path / "crashed" / ".lock").touch()  # killed before it wrote its settings
    assert work(tmp_path / "crashed", resume=False) == [0, 1, 2]


def test_files_of_somebody_else_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    for resume in (True, False):
        with pytest.raises(SelfJudgeError, match=r"holds other files \(thesis.tex …\)"):
            work(tmp_path, resume=resume)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    refuse_foreign(tmp_path, own=("thesis.tex",))
    with pytest.raises(SelfJudgeError, match="is a file"):
        work(tmp_path / "thesis.tex")
    with pytest.raises(SelfJudgeError, match="cannot use"):
        work(tmp_path / "thesis.tex" / "below")


def test_a_folder_that_cannot_be_made_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(SelfJudgeError, match=r"cannot write .*Permission denied") as caught:
        work(tmp_path / "run")
    assert "kept" not in str(caught.value)


def test_one_of_two_is_refused_while_the_other_works(tmp_path: Path) -> None:
    with (
        RunFolder(tmp_path).working(SETTINGS),
        pytest.raises(SelfJudgeError, match="another process works on") as caught,
    ):
        work(tmp_path)
    assert "\n" not in str(caught.value)
    assert work(tmp_path) == [0, 1, 2]


def test_a_disk_error_is_one_line_and_keeps_what_is_sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, count = os.replace, 0

    def full(source: Path, goal: Path) -> None:
        nonlocal count
        count += 1
        if count > 4:  # settings, a part and its seal, half of another part
            raise OSError(28, "No space left on device")
        real(source, goal)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(SelfJudgeError, match="No space left on device; what is done is kept") as caught:
            work(tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "run").rglob("*.partial"))
    assert work(tmp_path / "run") == [1, 2]


def test_what_a_kill_leaves_of_tensors_goes_with_the_next_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors begins a file under a random name beside the one it was given."""
    file, real, beside = tmp_path / "a.safetensors", safetensors.numpy.save_file, []

    def save(arrays: Any, path: Path, metadata: Any) -> None:
        beside.extend(path.parent.iterdir())
        path.with_name(".tmpq8Zk1x").touch()  # as of a process that was killed here
        real(arrays, path, metadata)

    monkeypatch.setattr(safetensors.numpy, "save_file", save)
    left = tmp_path / ".a.safetensors.making" / ".tmpA1b2C3"
    left.parent.mkdir()
    left.touch()
    for value in (1.0, 2.0):
        write_tensors(file, {"a": np.full(3, value)})
        assert list(tmp_path.rglob("*")) == [file]
        assert read_tensors(file)[0]["a"].tolist() == [value] * 3
    assert beside == []

    (tmp_path / "precious").mkdir()
    (tmp_path / ".a.safetensors.making").symlink_to(tmp_path / "precious")
    write_tensors(file, {"a": np.zeros(1)})
    assert sorted(tmp_path.rglob("*")) == [file, tmp_path / "precious"]


def test_rows_come_back_plain_and_gzipped_and_the_bytes_do_not_name_a_time(tmp_path: Path) -> None:
    rows = [{"a": 1}, {"b": "ü"}]
    for name in ("rows.jsonl", "rows.jsonl.gz"):
        write_rows(tmp_path / name, rows)
        assert list(read_rows(tmp_path / name)) == rows
        once = (tmp_path / name).read_bytes()
        write_rows(tmp_path / name, iter(rows))
        assert (tmp_path / name).read_bytes() == once
    with pytest.raises(TypeError):
        write_rows(tmp_path / "rows.jsonl", [{"a": object()}])
    assert list(read_rows(tmp_path / "rows.jsonl")) == rows
    (tmp_path / "rows.jsonl.gz").write_bytes(once[:-4])
    with pytest.raises(SelfJudgeError, match="cannot read"):
        list(read_rows(tmp_path / "rows.jsonl.gz"))


def test_a_key_that_stands_twice_among_many_is_named() -> None:
    text = "{" + ", ".join(f'"{n}": 0' for n in range(100_000)) + ', "7": 0}'
    with pytest.raises(ValueError, match="it holds the key '7' twice"):
        parse_json(text)
