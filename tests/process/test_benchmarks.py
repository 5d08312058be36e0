"""The scripts of benchmarks/ start."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

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
