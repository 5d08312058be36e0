"""`selfjudge serve --backend vllm`: which γ and which dtype vLLM is started with; without vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fake_certificate import recipe_folder
from selfjudge.cli.main import app
from selfjudge.integrations.asgi import HOSTS_VARIABLE
from selfjudge.integrations.server.playground import FACTS
from selfjudge.models.pair import Pair


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command of the server that would be started."""
    words: list[str] = []
    monkeypatch.setattr("selfjudge.integrations.vllm.serve.main", words.extend)
    for variable in (HOSTS_VARIABLE, FACTS):
        monkeypatch.setenv(variable, "")
    return words


@pytest.mark.parametrize(
    ("asked", "gamma"),
    [
        ([], 5),
        (["--gamma", "auto"], 5),  # which nothing in vLLM could tell
        (["--gamma", "3"], 3),
        (["--rule", "margin"], 5),
        (["--rule", "fly"], 7),  # its window is 6
        (["--rule", "fly", "--gamma", "9"], 9),
    ],
)
def test_gamma_is_the_named_one_or_the_default(
    called: list[str], checkpoints: dict[str, str], asked: list[str], gamma: int
) -> None:
    models = ["--target", checkpoints["target"], "--draft", checkpoints["draft"]]
    done = CliRunner().invoke(app, ["serve", "--backend", "vllm", *models, *asked])
    assert done.exit_code == 0, done.output
    speculation = json.loads(called[called.index("--speculative-config") + 1])
    assert speculation == {"model": checkpoints["draft"], "num_speculative_tokens": gamma}


@pytest.mark.parametrize("backend", ["torch", "vllm"])
def test_a_load_is_of_a_recipe(called: list[str], backend: str) -> None:
    done = CliRunner().invoke(app, ["serve", "--backend", backend, "--load", "4"])
    assert str(done.exception) == "`load` goes with --recipe"


@pytest.mark.parametrize(
    ("certified", "asked", "taken", "said"),
    [
        ("float32", [], ["--dtype", "float32"], ""),
        ("float16", ["--dtype", "bfloat16"], ["--dtype", "bfloat16"], "with float16, this is bfloat16: not covered"),
        ("q4", [], [], "with q4, this is the checkpoint's: not covered by it"),
    ],
)
def test_vllm_takes_the_dtype_of_a_recipe(
    called: list[str], checkpoints: dict[str, str], tmp_path: Path, certified: str, asked: list[str],
    taken: list[str], said: str,
) -> None:  # fmt: skip
    pair = Pair.load(checkpoints["target"], checkpoints["draft"], device="cpu", dtype="float32")
    folder = recipe_folder(tmp_path / "tuned", pair, engine="vllm", dtype=certified)
    done = CliRunner().invoke(app, ["serve", "--backend", "vllm", "--recipe", str(folder), *asked])
    assert done.exit_code == 0, done.output
    given = called[called.index("--dtype") :][:2] if "--dtype" in called else []
    assert given == taken
    assert said in done.output
    assert said or "not covered" not in done.output


def test_a_recipe_of_plain_decoding_is_not_for_the_worker(tiny_pair: Pair, tmp_path: Path) -> None:
    folder = recipe_folder(tmp_path / "plain", tiny_pair, rule="exact", certified=False, gamma=0)
    done = CliRunner().invoke(app, ["serve", "--backend", "vllm", "--recipe", str(folder)])
    assert str(done.exception) == f"{folder} decodes plainly (γ 0): serve it without --backend vllm"
