"""What `selfjudge doctor` says of this machine, and of machines that lack something."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from selfjudge.cli import doctor, main as cli
from selfjudge.integrations.vllm.config import INSTALL

ROOT = Path(__file__).parents[2]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Call the program; returns (exit code, stdout, stderr)."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["selfjudge", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        streams = capsys.readouterr()
        return int(stop.value.code or 0), streams.out, streams.err

    return call


def checks(run: Run) -> dict[str, dict[str, Any]]:
    code, out, _ = run("doctor", "--json")
    assert code == 0
    return {check["name"]: check for check in json.loads(out)["checks"]}


def test_this_machine_in_one_screen(run: Run) -> None:
    code, out, err = run("doctor")
    assert code == 0
    assert len(out.splitlines()) <= 40  # long names of processors and folders take a second line
    assert out.splitlines()[-1] == "ready: selfjudge demo --quick"
    assert "importing torch" in err
    found = checks(run)
    assert {"packages", "torch", "cuda engine", "reference engine", "cpu engine", "vLLM", "cache", "disk"} <= set(found)
    for check in found.values():
        assert check["found"]
        assert check["ok"] or check["mend"], check


def test_without_a_compiler(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    check = checks(run)["cpu engine"]
    assert not check["ok"]
    assert check["found"].startswith("no C++ compiler found: the reference engine runs instead")
    assert "g++" in check["mend"] or "xcode" in check["mend"]


def test_what_is_missing_or_too_old_is_named_with_the_command(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [Requirement("torch>=99"), Requirement("no-such-package>=1"), Requirement("transformers>=5")]
    monkeypatch.setattr(doctor, "requirements", lambda extra="": [] if extra else wanted)
    check = checks(run)["packages"]
    assert "no-such-package is missing" in check["found"]
    assert "is not >=99" in check["found"]
    assert check["mend"] == "pip install 'torch>=99' no-such-package"
    _, out, _ = run("doctor")
    assert out.splitlines()[-1].startswith("not ready")


def test_extras_are_named_by_what_they_lack(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is not published: a line that names it installs nothing."""
    lacking = [Requirement("no-such-package>=1"), Requirement("torch>=2")]
    monkeypatch.setattr(doctor, "requirements", lambda extra="": lacking if extra else [])
    found = checks(run)
    assert found["selfjudge serve"]["mend"] == "pip install no-such-package"
    assert found["vLLM"]["mend"] == INSTALL
    command, page = INSTALL.partition(": ")[2].removesuffix(" (docs/vllm.md)"), Path("docs/vllm.md")
    assert command.replace("'", "") in (ROOT / page).read_text().replace("'", "")


def test_torch_that_cannot_be_imported(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    check = checks(run)["torch"]
    assert not check["ok"]
    assert "cannot be imported" in check["found"]


def test_a_cache_that_cannot_be_used(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SELFJUDGE_HOME", str(tmp_path / "file"))
    found = checks(run)
    assert not found["cache"]["ok"]
    assert found["smollm2-135m"]["mend"] == "selfjudge pull smollm2-135m"


def test_extras_are_those_of_the_package() -> None:
    assert {r.name for r in doctor.requirements("serve")} >= {"fastapi", "uvicorn"}
    assert "torch" in {r.name for r in doctor.requirements()}
    assert "fastapi" not in {r.name for r in doctor.requirements()}
