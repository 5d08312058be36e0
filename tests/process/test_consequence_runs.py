"""Whole labellings by consequences with tiny models: every row again by hand, interruptions."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from runs import SimilarReplies, content, label_settings, prompts_file, similar
from selfjudge.cli.main import app
from selfjudge.label.checks import OutcomeCheck, decode_many
from selfjudge.label.config import LabelConfig
from selfjudge.label.folder import read_manifest, read_shards
from selfjudge.label.methods import CONTROL_EVERY
from selfjudge.label.pipeline import label_pair
from selfjudge.models.pair import Pair
from selfjudge.store import read_json, read_rows


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    return str(prompts_file(tmp_path / "asked.jsonl", 10))


@pytest.fixture(scope="module")
def pair(checkpoints: dict[str, str]) -> Pair:
    """A tiny pair whose answers end: random models seldom say the one end token."""
    made = Pair.load(checkpoints["target"], checkpoints["draft"], device="cpu")
    made.target.generation_config.eos_token_id = [2, 9, 17, 28, 41]
    return made


@pytest.fixture(autouse=True)
def similar_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a tiny model says of two replies is noise."""
    monkeypatch.setattr("selfjudge.label.checks.MeaningCheck", lambda *_, **__: SimilarReplies())


def settings_of(asked: str, **options: Any) -> LabelConfig:
    given = {"method": "consequences", "tau": None, "max_new_tokens": 40, "substitutions": 4}
    return label_settings(asked, **given | options)


def finished_by_hand(pair: Pair, prompt: list[int], so_far: list[int], most: int) -> list[int]:
    tokens = [*prompt, *so_far]
    while len(tokens) - len(prompt) < most:
        with torch.no_grad():
            tokens.append(int(pair.target(torch.tensor([tokens])).logits[0, -1].argmax()))
        if tokens[-1] in pair.eos_ids:
            break
    return tokens[len(prompt) :]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [row for rows, _ in read_shards(folder) for row in rows]


def test_every_row_is_what_its_substitution_leads_to(pair: Pair, prompts: str, tmp_path: Path) -> None:
    out = tmp_path / "labels"
    manifest = label_pair(pair, out, settings_of(prompts))
    responses = {row["prompt_id"]: row for row in read_rows(out / "responses.jsonl")}
    assert manifest["rows"] > 20
    assert 0 < manifest["acceptable"] < manifest["rows"]
    controls = []
    for rows, arrays in read_shards(out):
        assert {len(array) for array in arrays.values()} == {len(rows)}
        for k, row in enumerate(rows):
            response = responses[row["prompt_id"]]
            prompt, own = response["prompt_ids"], response["response_ids"]
            place = row["position"] - len(prompt)
            assert response["finish"] == "eos"
            assert own[place] == row["target_token"] != row["draft_token"]
            other = finished_by_hand(pair, prompt, [*own[:place], row["draft_token"]], 40)
            assert row["label"] == int(similar(own, other, place))
            assert row["method"] == "consequences"
            with torch.no_grad():
                read = torch.tensor([[*prompt, *own[:place], row["draft_token"]]])
                output = pair.target(read, output_hidden_states=True)
            log_p = output.logits[0, -2].log_softmax(-1)
            assert row["margin"] == pytest.approx(float(log_p[own[place]] - log_p[row["draft_token"]]), abs=1e-3)
            assert row["margin"] == pytest.approx(-row["prefix_score"], abs=1e-5)
            state = output.hidden_states[-1][0, -1].numpy()
            assert np.allclose(arrays["hidden_draft"][k], state, atol=1e-4)
        assert [k for k, row in enumerate(rows) if row["control"] is not None] == list(
            range(0, len(rows), CONTROL_EVERY)
        )
        controls += [row["control"] for row in rows if row["control"] is not None]
    assert manifest["controls"] == len(controls) == manifest["controls_kept"] == sum(controls)  # float32: no noise
    assert read_json(out / "run.json")["rows_per_hour"] > 0
    assert read_manifest(out) == manifest


@pytest.mark.slow
def test_no_more_places_than_allowed_and_the_same_ones_in_any_shard(pair: Pair, prompts: str, tmp_path: Path) -> None:
    every, some, parted = (tmp_path / name for name in ("all", "some", "parted"))
    label_pair(pair, every, settings_of(prompts, substitutions=None))
    label_pair(pair, some, settings_of(prompts))
    label_pair(pair, parted, settings_of(prompts, batch=2))
    counted, drawn = ([row["prompt_id"] for row in rows_of(folder)] for folder in (every, some))
    assert {p: drawn.count(p) for p in drawn} == {p: min(4, counted.count(p)) for p in counted}
    keys = ("prompt_id", "position", "draft_token", "label")
    assert [[row[k] for k in keys] for row in rows_of(some)] == [[row[k] for k in keys] for row in rows_of(parted)]


def test_a_verdict_or_an_answer_decides_where_it_is_asked_for(
    pair: Pair, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts_seen: list[str] = []

    class EvenLength(OutcomeCheck):
        def __call__(self, substitutions: Any, responses: Any) -> list[bool]:
            texts_seen.extend(decode_many(pair, responses))
            return [len(text) % 2 == 0 for text in decode_many(pair, responses)]

    monkeypatch.setattr("selfjudge.label.checks.MeaningCheck", lambda *_, **__: EvenLength())
    manifest = label_pair(pair, tmp_path / "labels", settings_of(prompts))
    rows = rows_of(tmp_path / "labels")
    assert {row["label"] for row in rows} == {0, 1}
    assert len(texts_seen) == manifest["rows"] + manifest["controls"]


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_that_fails_anywhere_goes_on_to_the_same_bytes(
    pair: Pair, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    monkeypatch.setattr("selfjudge.label.pipeline._shard_size", lambda run: 5)
    config = settings_of(prompts, substitutions=2)
    real, count, last = os.replace, 0, 10**9

    class Killed(BaseException):
        pass

    def counted(source: object, goal: object) -> None:
        nonlocal count
        count += 1
        if count > last:
            raise Killed
        real(source, goal)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "replace", counted)
    label_pair(pair, tmp_path / "undisturbed", config)
    expected, total = content(tmp_path / "undisturbed"), count
    for at in range(8, total, every):  # before that, it is as with every method
        out, count, last = tmp_path / f"killed-{at}", 0, at
        with pytest.raises(Killed):
            label_pair(pair, out, config)
        last = 10**9
        label_pair(pair, out, config, resume=True)
        assert content(out) == expected


def test_the_command_says_the_control_and_the_rate(checkpoints: dict[str, str], tmp_path: Path) -> None:
    prompts = str(prompts_file(tmp_path / "asked.jsonl", 60))
    command = [
        "label", "--target", checkpoints["target"], "--draft", checkpoints["draft"], "--device", "cpu", "--prompts",
        prompts, "--method", "consequences", "--substitutions", "3", "--max-new-tokens", "60",
        "--out", str(tmp_path / "labels"),
    ]  # fmt: skip
    found = CliRunner().invoke(app, command)
    assert found.exit_code == 0, found.output
    assert "control: the target's own token keeps 100.0% of" in found.output
    assert "labels an hour" in found.output
    again = CliRunner().invoke(app, [*command, "--resume", "--json"])
    assert json.loads(again.stdout)["controls"] > 0
