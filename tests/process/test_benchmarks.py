"""The scripts of benchmarks/ start."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(script.name for script in FOLDER.glob("*.py") if script.name != "common.py")
HELP_OF_ALL = """
import contextlib, io, json, runpy, sys
sys.path.insert(0, sys.argv[1])
texts = {}
for name in sys.argv[2:]:
    sys.argv[1:] = ["--help"]
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
        runpy.run_path(f"{sys.path[0]}/{name}", run_name="__main__")
    texts[name] = text.getvalue()
print(json.dumps(texts))
"""


def test_every_script_says_how_it_is_called() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HELP_OF_ALL, str(FOLDER), *SCRIPTS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for name, text in json.loads(done.stdout).items():
        assert text.startswith("usage: "), name
        assert "--out OUT" in text, name


def test_the_readme_names_every_script() -> None:
    assert re.findall(r"^\| `(\w+\.py)`", (FOLDER / "README.md").read_text(), re.M) == SCRIPTS


@pytest.mark.parametrize("transport", ["http", "in-process"])
@pytest.mark.slow
def test_load_is_measured_with_and_without_http(transport: str, checkpoints: dict[str, str], tmp_path: Path) -> None:
    """Without HTTP also under a Python that has no packages for it."""
    out = tmp_path / "load.json"
    models = [
        "--rule",
        "exact",
        "--target",
        checkpoints["target"],
        "--draft",
        checkpoints["draft"],
        "--device",
        "cpu",
        "--gamma",
        "2",
    ]
    levels = ["--minutes", "0.01", "--clients", "1", "6", "--prompts", "2", "--max-batch", "2", "--max-queue", "2"]
    call = ["load.py", "--out", str(out), *levels, *models, *(["--in-process"] if transport == "in-process" else [])]
    http = ["fastapi", "uvicorn", "starlette", "selfjudge.integrations.server.schema"]  # the last needs pydantic
    missing = http if transport == "in-process" else []
    code = "import runpy, sys; sys.modules.update(dict.fromkeys({}, None)); sys.argv = {}; sys.path.insert(0, {!r})"
    code += "; runpy.run_path({!r}, run_name='__main__')"
    program = code.format(missing, call, str(FOLDER), str(FOLDER / "load.py"))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert (report["transport"], report["dtype"], report["gamma"]) == (transport, "float32", 2)
    assert report["alone_after"]["equal"] == report["alone"]["requests"] == 6
    few, many = report["levels"]
    assert (few["clients"], many["clients"]) == (1, 6)
    for row in (few, many):
        assert row["failed"] == 0, row["failures"]
        assert row["equal"] == row["compared"] > 0
        assert row["tokens_per_second"] > 0
        assert all(row["memory"][at]["rss_mb"] > 0 for at in ("start", "middle", "end"))
    assert few["refused"] == 0 < many["refused"]  # two places, two in the queue, six clients
    assert many["requests"] == sum(many["by_kind"].values())
    assert len(out.with_suffix(".md").read_text().splitlines()) == 4
