"""The package as others get it: built, installed without the repository, and used from elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
LIMIT = 60_000_000  # bytes of the wheel


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `python -m build` makes."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


class Environment:
    """An empty environment whose packages are those of this one, but for ours."""

    def __init__(self, folder: Path, package: Path) -> None:
        self.bin = folder / "env" / "bin"
        self.elsewhere = folder / "elsewhere"
        self.elsewhere.mkdir()
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], check=True)
        (site,) = (folder / "env").glob("lib/python*/site-packages")
        # a path in a .pth file comes last, and .pth files below it (our checkout's) are not read
        (site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(self.bin / "python")]
        install = ["install", "--quiet", "--no-deps", "--no-build-isolation", "--force-reinstall", str(package)]
        self.variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        subprocess.run([*pip, *install], env=self.variables, check=True, capture_output=True)

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [self.bin / "selfjudge", *arguments],
            capture_output=True, text=True, check=False, cwd=self.elsewhere, env={**self.variables, **variables},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    (wheel,) = dist.glob("*.whl")
    return Environment(tmp_path_factory.mktemp("wheel"), wheel)


def test_the_wheel_is_small_and_whole(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    assert wheel.stat().st_size < LIMIT
    source = ROOT / "src"
    files = {
        str(f.relative_to(source)) for f in (source / "selfjudge").rglob("*") if f.is_file() and f.suffix != ".pyc"
    }
    assert files <= set(zipfile.ZipFile(wheel).namelist())


def test_doctor_and_an_answer_from_outside_the_repository(installed: Environment) -> None:
    place = subprocess.run(
        [installed.bin / "python", "-c", "import selfjudge; print(selfjudge.__file__)"],
        capture_output=True, text=True, check=True, cwd=installed.elsewhere, env=installed.variables,
    ).stdout  # fmt: skip
    assert place.startswith(str(installed.bin.parent))
    assert installed.run("--version").stdout.startswith("selfjudge 0.")
    found = {check["name"]: check for check in json.loads(installed.run("doctor", "--json").stdout)["checks"]}
    assert found["packages"]["ok"]
    answer = installed.run("generate", "Why is the sky blue?", "--rule", "judged", "--max-new-tokens", "8", "--json")
    assert len(json.loads(answer.stdout)["token_ids"]) == 8


def test_the_quick_demo_with_a_compiler_and_without(installed: Environment) -> None:
    def rows(done: subprocess.CompletedProcess[str]) -> list[str]:
        return [row["rule"] for row in json.loads(done.stdout)["rows"]]

    with_compiler = installed.run("demo", "--quick", "--limit", "1", "--max-new-tokens", "12", "--json")
    assert rows(with_compiler) == ["plain", "exact", "topk:2", "judged, shipped"]
    assert (installed.elsewhere / "demo.html").is_file()
    without = installed.run(
        "demo", "--quick", "--limit", "1", "--max-new-tokens", "12", "--json", PATH=str(installed.bin), CXX=""
    )
    assert rows(without) == rows(with_compiler)
    assert "no C++ compiler found" in without.stderr
    assert "slower" in without.stderr


def test_the_sdist_installs(dist: Path, tmp_path: Path) -> None:
    (source,) = dist.glob("*.tar.gz")
    installed = Environment(tmp_path, source)
    assert installed.run("--version").stdout.startswith("selfjudge 0.")
    assert len(installed.run("ls", "pairs", "--json").stdout) > 2
