"""`eval` and `tune` with the target inside vLLM: what the torch backend says, up to near-ties."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engines import call

from selfjudge.store import read_rows

OPTIONS = {"enforce_eager": True, "max_model_len": 512, "max_num_seqs": 8}
VLLM = ["--backend", "vllm", "--engine-options", json.dumps(OPTIONS)]
RULES = ("exact", "margin:2,guard=on", "margin:price=0.3,guard=on", "judged:q0.5")
PROMPTS = 6  # one batch


def run(*words: str) -> Any:
    return json.loads(call([*words, "--json"]))


@pytest.fixture(scope="module", params=["small", pytest.param("embedded", marks=pytest.mark.slow)])
def evaluated(request: pytest.FixtureRequest, small: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("eval")
    models = {"--target": "target", "--draft": "draft", "--judge": "judge"} if request.param == "small" else {}
    pair = [word for option, name in models.items() for word in (option, str(small / name))]
    for name, more in (("torch", []), ("vllm", VLLM)):
        run(
            "eval", "--tasks", "arithmetic", "--limit", str(PROMPTS), "--max-new-tokens", "18", "--gammas", "3", "--dtype",
            "float32", "--device", "cpu", "--batch", str(PROMPTS), "--examples", "0", "--rules", " ".join(RULES),
            "--out", str(root / name), *pair, *more,
        )  # fmt: skip
    return {name: root / name / "arithmetic" for name in ("torch", "vllm")}


def samples(folder: Path, rule: str) -> list[dict[str, Any]]:
    (found,) = (
        path for path in folder.iterdir() if path.name.startswith(f"{rule}-g") or path.name.startswith(f"{rule}@")
    )
    return list(read_rows(found / "samples.jsonl.gz"))


@pytest.mark.parametrize("rule", RULES)
def test_answers_and_cycles_are_those_of_our_loop(
    evaluated: dict[str, Path], rule: str, capsys: pytest.CaptureFixture
) -> None:
    ours, theirs = (samples(evaluated[name], rule) for name in ("torch", "vllm"))
    assert [row["id"] for row in ours] == [row["id"] for row in theirs]
    equal = [(one, other) for one, other in zip(ours, theirs, strict=True) if one["text"] == other["text"]]
    with capsys.disabled():
        print(f"\n[{rule}: {len(equal)} of {PROMPTS} answers are equal]")
    assert len(equal) >= PROMPTS - 1  # near-ties of the target, of the draft or of the rule
    for one, other in equal:
        assert [one[key] for key in ("tokens", "answer", "score")] == [
            other[key] for key in ("tokens", "answer", "score")
        ]
        assert [one[key] for key in ("cycles", "judged")] == [other[key] for key in ("cycles", "judged")]
    assert any(row["judged"] for row in theirs) == (rule != "exact")


@pytest.mark.slow
def test_a_recipe_from_vllm(tmp_path: Path) -> None:
    out = tmp_path / "tuned"
    made = run(
        "tune", "--tasks", "arithmetic", "--limit", "16", "--epsilon", "0.9", "--families", "margin", "--gamma", "3",
        "--max-new-tokens", "16", "--dtype", "float32", "--device", "cpu", "--measure", "overlap", "--out", str(out), *VLLM,
    )  # fmt: skip
    recipe, certificate = made["recipe"], made["certificate"]
    assert (recipe["engine"], recipe["gamma"], recipe["dtype"]) == ("vllm", 3, "float32")
    tried = [row for row in certificate["candidates"] if row["n_used"]]
    assert tried[0]["refuted"]
    assert tried[0]["mean_accepted_length"] > 1
    assert "plain" not in {row["rule"] for row in certificate["speeds"]}
    assert (out / "certificate.html").is_file()
