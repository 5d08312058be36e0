"""Labels made with the target inside vLLM are those that torch makes, in float32."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from engines import call

from selfjudge.label.folder import read_rows
from selfjudge.store import read_json, read_tensors

QUESTIONS = ["What is 15% of 240?", "Name three colours.", "Why is the sky blue?"]
COMMAND = ["label", "--dtype", "float32", "--device", "cpu"]
OPTIONS = {"enforce_eager": True, "max_model_len": 512, "max_num_seqs": 16, "block_size": 32}


@pytest.fixture(scope="module", params=["small", pytest.param("embedded", marks=pytest.mark.slow)])
def folders(request: pytest.FixtureRequest, small: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("labels")
    pair = ["--target", str(small / "target"), "--draft", str(small / "draft"), "--tau", "-5"]
    prompts = root / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in QUESTIONS))
    for name, more in (("torch", []), ("vllm", ["--backend", "vllm", "--engine-options", json.dumps(OPTIONS)])):
        given = ["--prompts", str(prompts), "--max-new-tokens", "48", "--previous"]
        call([*COMMAND, *(pair if request.param == "small" else []), *given, "--out", str(root / name), *more])
    return root / "torch", root / "vllm"


def test_the_responses_are_the_same(folders: tuple[Path, Path]) -> None:
    ours, theirs = (list(read_rows(folder / "responses.jsonl")) for folder in folders)
    assert ours == theirs


def test_the_rows_and_their_scores_are_the_same(folders: tuple[Path, Path]) -> None:
    ours, theirs = (list(read_rows(folder / "labels-00000.jsonl")) for folder in folders)
    assert len(ours) > 20
    for one, other in zip(ours, theirs, strict=True):
        for name in ("prefix_score", "suffix_score", "score"):
            assert one.pop(name) == pytest.approx(other.pop(name), abs=1e-3)
        assert one == other
    a, b = (read_json(folder / "manifest.json") for folder in folders)
    assert {k: a[k] for k in ("target", "target_sha256", "draft_sha256", "tau", "dtype", "hidden_size")} == {
        k: b[k] for k in ("target", "target_sha256", "draft_sha256", "tau", "dtype", "hidden_size")
    }


def test_states_and_likelihoods_are_the_same(folders: tuple[Path, Path]) -> None:
    ours, theirs = (read_tensors(folder / "hidden-00000.safetensors")[0] for folder in folders)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        if name.startswith("hidden"):
            assert np.abs(array - theirs[name]).max() < 1e-3 * np.abs(array).max()
        else:
            np.testing.assert_allclose(array, theirs[name], atol=1e-3, err_msg=name)


@pytest.mark.slow
def test_tau_and_consequences_are_found_inside_vllm(tmp_path: Path) -> None:
    """Searches, scores, substitutions and continuations, on prompts with an answer: three kinds of runs in two backends."""
    for name, more in (("torch", []), ("vllm", ["--backend", "vllm", "--engine-options", json.dumps(OPTIONS)])):
        for kind, asked in (
            ("tau", ["--calibrate", "arithmetic", "--calibrate-prompts", "3"]),
            ("kept", ["--method", "consequences", "--substitutions", "3"]),
        ):
            given = ["--prompts", "arithmetic:3", "--max-new-tokens", "160", *asked]
            call([*COMMAND, *given, "--out", str(tmp_path / kind / name), *more])
    ours, theirs = (read_json(tmp_path / "tau" / name / "manifest.json") for name in ("torch", "vllm"))
    assert ours["tau"] == pytest.approx(theirs["tau"], abs=1e-2)
    for key in ("mismatches", "critical", "prompts"):
        assert ours["tau_evidence"][key] == theirs["tau_evidence"][key]
    one, other = (list(read_rows(tmp_path / "kept" / name / "labels-00000.jsonl")) for name in ("torch", "vllm"))
    places = [[(row["prompt_id"], row["position"], row["draft_token"]) for row in rows] for rows in (one, other)]
    assert places[0] == places[1]
    assert sum(a["label"] != b["label"] for a, b in zip(one, other, strict=True)) <= 1  # near-ties of a continuation


@pytest.mark.slow
def test_the_target_writes_its_prompts_inside_vllm(tmp_path: Path) -> None:
    given = ["--prompts", "self:12", "--max-new-tokens", "32", "--tau", "-5", "--out", str(tmp_path / "labels")]
    call([*COMMAND, *given, "--backend", "vllm", "--engine-options", json.dumps(OPTIONS)])
    manifest = read_json(tmp_path / "labels" / "manifest.json")
    assert manifest["yields"]["self"]["written"] == 12
    assert manifest["prompts"] >= 3
