"""Whole labellings by tiny models: the rows, interruptions, damage, parts."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import tiny_model
from runs import content, label_settings as settings_of, prompts_file
from selfjudge.errors import SelfJudgeError
from selfjudge.label.checks import OutcomeCheck, decode_many
from selfjudge.label.folder import read_manifest, read_responses, read_shards, summarise_labels
from selfjudge.label.pipeline import label_pair
from selfjudge.label.score import sum_scores
from selfjudge.models.load import Draft
from selfjudge.models.pair import Pair
from selfjudge.prompts.sources import read_prompts
from selfjudge.store import read_rows
from selfjudge.train.dataset import LabelledRows


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    return str(prompts_file(tmp_path / "asked.jsonl", 12))


# the whole run


def test_rows_say_what_the_formula_says(tiny_pair: Pair, prompts: str, tmp_path: Path) -> None:
    out = tmp_path / "labels"
    manifest = label_pair(tiny_pair, out, settings_of(prompts, suffix_length=5))
    responses = {row["prompt_id"]: row for row in read_rows(out / "responses.jsonl")}
    assert len(responses) == manifest["prompts"] == 12
    seen = 0
    special = set(tiny_pair.special_ids)
    with torch.no_grad():
        whole_of, choices_of = {}, {}
        for name, response in responses.items():
            ids = torch.tensor([response["prompt_ids"] + response["response_ids"]])
            whole_of[name] = tiny_pair.target(ids).logits[0].log_softmax(-1)
            choices_of[name] = tiny_pair.draft(ids).logits[0].argmax(-1)
    for rows, arrays in read_shards(out):
        assert {len(array) for array in arrays.values()} == {len(rows)}
        for k, row in enumerate(rows):
            response = responses[row["prompt_id"]]
            tokens = response["prompt_ids"] + response["response_ids"]
            at = row["position"]
            assert tokens[at] == row["target_token"] != row["draft_token"]
            assert not {row["target_token"], row["draft_token"]} & special
            after = tokens[at + 1 : at + 6]
            assert at < len(tokens) - 1
            if response["finish"] == "length":
                assert len(after) == 5
            said, whole = choices_of[row["prompt_id"]][at - 1], whole_of[row["prompt_id"]]
            with torch.no_grad():
                logits = tiny_pair.target(torch.tensor([[*tokens[:at], row["draft_token"], *after]])).logits[0]
            other = logits.log_softmax(-1)
            assert said == row["draft_token"]
            prefix = float(whole[at - 1, row["draft_token"]] - whole[at - 1, row["target_token"]])
            suffix = float(sum(other[at + i, t] - whole[at + i, t] for i, t in enumerate(after)))
            assert row["prefix_score"] == pytest.approx(prefix, abs=1e-3)
            assert row["suffix_score"] == pytest.approx(suffix, abs=1e-3)
            assert row["score"] == pytest.approx(prefix + suffix, abs=1e-3)
            assert row["label"] == int(row["score"] > -8.0)
            assert row["method"] == "selfjudge"
            scores = sum_scores(arrays, 5)
            assert scores[k] == pytest.approx(row["score"], abs=1e-3)
        seen += len(rows)
    assert seen == manifest["rows"] > 20
    assert 0 < manifest["acceptable"] < manifest["rows"]
    once = manifest["response_tokens"]
    assert manifest["target_tokens"] - once <= 1.25 * 6 * manifest["rows"]
    assert read_manifest(out) == manifest


def test_hidden_states_can_be_kept_as_float16(tiny_pair: Pair, prompts: str, tmp_path: Path) -> None:
    whole, half = (tmp_path / name for name in ("whole", "half"))
    label_pair(tiny_pair, whole, settings_of(prompts))
    label_pair(tiny_pair, half, settings_of(prompts, hidden_dtype="float16"))
    for (_, one), (_, other) in zip(read_shards(whole), read_shards(half), strict=True):
        assert one["hidden_draft"].dtype == np.float32
        assert other["hidden_draft"].dtype == np.float16
        assert np.allclose(one["hidden_draft"], other["hidden_draft"], rtol=2e-3, atol=1e-3)
        assert np.array_equal(one["log_p"], other["log_p"])


def test_a_finished_folder_is_returned_and_another_run_refused(tiny_pair: Pair, prompts: str, tmp_path: Path) -> None:
    out = tmp_path / "labels"
    first = label_pair(tiny_pair, out, settings_of(prompts))
    before = content(out)
    assert label_pair(tiny_pair, out, settings_of(prompts), resume=True) == first
    assert content(out) == before
    with pytest.raises(SelfJudgeError, match="`resume`"):
        label_pair(tiny_pair, out, settings_of(prompts))
    with pytest.raises(SelfJudgeError, match="another tau"):
        label_pair(tiny_pair, out, settings_of(prompts, tau=-3.0), resume=True)
    assert content(out) == before


def test_resume_works_on_a_missing_folder(tiny_pair: Pair, prompts: str, tmp_path: Path) -> None:
    assert label_pair(tiny_pair, tmp_path / "new", settings_of(prompts), resume=True)["rows"]


def test_autojudge_rows_point_into_the_response_that_the_search_had_reached(
    tiny_pair: Pair, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is the original one until a substitution is kept."""

    class EvenLength(OutcomeCheck):
        def __call__(self, substitutions, responses):
            return [len(text) % 2 == 0 for text in decode_many(tiny_pair, responses)]

    monkeypatch.setattr("selfjudge.label.checks.MeaningCheck", lambda *_, **__: EvenLength())
    out = tmp_path / "labels"
    manifest = label_pair(
        tiny_pair, out, settings_of(prompts, method="autojudge+", tau=None, max_new_tokens=48, limit=6)
    )
    original = {row["prompt_id"]: row for row in read_rows(out / "responses.jsonl")}
    changed = set()
    for rows, arrays in read_shards(out):
        assert {len(a) for a in arrays.values()} == {len(rows)}
        for row in rows:
            first = original[row["prompt_id"]]
            if row["prompt_id"] not in changed:
                assert [*first["prompt_ids"], *first["response_ids"]][row["position"]] == row["target_token"]
            if row["label"]:
                changed.add(row["prompt_id"])
    assert changed
    assert 0 < manifest["acceptable"] < manifest["rows"]
    assert manifest["target_tokens"] > 20 * manifest["rows"]  # every continuation is counted
    assert manifest["tau"] is None


def test_a_search_tries_no_more_substitutions_than_allowed(tiny_pair: Pair, prompts: str, tmp_path: Path) -> None:
    tried = []
    for name, most in (("all", None), ("some", 3)):
        label_pair(tiny_pair, tmp_path / name, settings_of(prompts, method="autojudge+", tau=None, substitutions=most))
        rows = [row["prompt_id"] for rows, _ in read_shards(tmp_path / name) for row in rows]
        tried.append({prompt: rows.count(prompt) for prompt in rows})
    assert max(tried[0].values()) > 3
    assert tried[1] == {prompt: min(3, count) for prompt, count in tried[0].items()}
    with pytest.raises(SelfJudgeError, match="`substitutions` must be at least 1, not 0"):
        settings_of(prompts, substitutions=0).check()


def test_twins_are_labelled_once_and_ids_are_unique(tiny_pair: Pair, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        prompts_file(tmp_path / folder / "asked.jsonl", 5)
    with (tmp_path / "b" / "asked.jsonl").open("a") as file:
        file.write('{"prompt": "w5 w6 w7"}\n{"prompt": "w5 w6 w7"}\n' + json.dumps({"prompt": "w8 " * 500}) + "\n")
    both = settings_of("", prompts=tuple(str(tmp_path / folder / "asked.jsonl") for folder in "ab"))
    manifest = label_pair(tiny_pair, tmp_path / "labels", both)
    ids = [row["prompt_id"] for row in read_rows(tmp_path / "labels" / "responses.jsonl")]
    assert len(ids) == len(set(ids)) == manifest["prompts"] == 6
    assert manifest["yields"][both.prompts[1]] == {"given": 8, "too long": 1, "repeated": 6, "prompts": 1}


@pytest.mark.parametrize(("target", "draft"), [("padded-draft", "draft"), ("target", "padded-draft")])
def test_vocabularies_padded_to_different_sizes(
    target: str, draft: str, checkpoints: dict[str, str], prompts: str, tmp_path: Path
) -> None:
    pair = Pair.load(checkpoints[target], checkpoints[draft], device="cpu")
    assert label_pair(pair, tmp_path / "labels", settings_of(prompts))["rows"]


def test_past_the_drafts_window_there_is_nothing_to_label(tiny_pair: Pair, prompts: str, tmp_path: Path) -> None:
    pair = replace(tiny_pair, draft_model=Draft(tiny_model("gpt2", seed=5, n_positions=16)))
    label_pair(pair, tmp_path / "labels", settings_of(prompts))
    rows = [row for rows, _ in read_shards(tmp_path / "labels") for row in rows]
    assert rows
    assert max(row["position"] for row in rows) < 17


# interruptions and damage


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_that_fails_anywhere_goes_on_to_the_same_bytes(
    tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """The at-th file that is put into place is the last thing that happens; what follows it is done by the second run."""
    monkeypatch.setattr("selfjudge.label.pipeline.SHARD", 4)
    config = settings_of(str(prompts_file(tmp_path / "asked.jsonl", 6)), max_new_tokens=24, batch=3)
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
    label_pair(tiny_pair, tmp_path / "undisturbed", config)
    expected, total = content(tmp_path / "undisturbed"), count
    assert total > 12
    for at in range(0, total, every):
        out, count, last = tmp_path / f"killed-{at}", 0, at
        with pytest.raises(Killed):
            label_pair(tiny_pair, out, config)
        assert not (out / "manifest.json").is_file()
        last = 10**9
        label_pair(tiny_pair, out, config, resume=True)
        assert content(out) == expected


@pytest.mark.quick("True-labels-*", "False-work/responses-*", "True-hidden-*", "True-work/prompts*")
@pytest.mark.parametrize(
    "name", ["labels-00001.jsonl", "hidden-00000.safetensors", "work/responses-00001.jsonl", "work/prompts.jsonl"]
)
@pytest.mark.parametrize("finished_before", [True, False])
def test_damage_is_found_by_its_checksum_and_done_again(
    name: str, finished_before: bool, tiny_pair: Pair, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("selfjudge.label.pipeline.SHARD", 4)
    out = tmp_path / "labels"
    label_pair(tiny_pair, out, settings_of(prompts))
    expected = content(out)
    raw = bytearray((out / name).read_bytes())
    raw[len(raw) // 2] ^= 1
    (out / name).write_bytes(bytes(raw))
    if not finished_before:
        (out / "manifest.json").unlink()
    elif name.startswith(("labels", "hidden")):
        with pytest.raises(SelfJudgeError, match="damaged"):
            list(read_shards(out))
    if finished_before and name.startswith("work"):
        return  # the work of a finished run is not needed any more
    label_pair(tiny_pair, out, settings_of(prompts), resume=True)
    assert content(out) == expected


@pytest.mark.parametrize("name", ["responses.jsonl", "labels-00000.jsonl"])
def test_a_file_that_is_gone_from_a_finished_folder_is_made_again(
    name: str, tiny_pair: Pair, prompts: str, tmp_path: Path
) -> None:
    out = tmp_path / "labels"
    label_pair(tiny_pair, out, settings_of(prompts))
    expected = content(out)
    (out / name).unlink()
    with pytest.raises(SelfJudgeError, match="missing or damaged"):
        list(read_shards(out))
    label_pair(tiny_pair, out, settings_of(prompts), resume=True)
    assert content(out) == expected


def test_another_prompts_file_or_tau_makes_everything_after_it_anew(
    tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = prompts_file(tmp_path / "asked.jsonl", 12)
    settings = settings_of(f"file:{file}", tau=None)
    monkeypatch.setattr("selfjudge.label.config.find_shipped_tau", lambda target, draft, n: {"tau": -8.0})
    out = tmp_path / "labels"
    label_pair(tiny_pair, out, settings)
    (out / "manifest.json").unlink()
    monkeypatch.setattr("selfjudge.label.config.find_shipped_tau", lambda target, draft, n: {"tau": -2.0})
    assert label_pair(tiny_pair, out, settings, resume=True)["tau"] == -2.0
    for rows, _ in read_shards(out):
        assert all(row["label"] == int(row["score"] > -2.0) for row in rows)
    prompts_file(file, 9)
    with pytest.raises(SelfJudgeError, match="another prompt files"):
        label_pair(tiny_pair, out, settings, resume=True)


# parts of the work


def test_parts_of_the_work_hold_the_whole(tiny_pair: Pair, prompts: str, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    label_pair(tiny_pair, whole, settings_of(prompts))
    parts, lines = [tmp_path / f"part{i}" for i in range(3)], Path(prompts).read_text().splitlines(keepends=True)
    for i, part in enumerate(parts):
        part.with_suffix(".jsonl").write_text("".join(lines[i::3]))
        label_pair(tiny_pair, part, settings_of(str(part.with_suffix(".jsonl"))))

    def rows_of(*folders: Path) -> dict[tuple[str, int], tuple[dict, np.ndarray]]:
        return {
            (str(asked[row["prompt_id"]]), row["position"]): (row, arrays["hidden_draft"][k])
            for folder in folders
            for asked in [{row["prompt_id"]: row["prompt_ids"] for row in read_responses(folder)}]
            for rows, arrays in read_shards(folder)
            for k, row in enumerate(rows)
        }

    one, other = rows_of(whole), rows_of(*parts)
    assert one.keys() == other.keys()
    for key, (row, hidden) in one.items():
        assert other[key][0]["score"] == pytest.approx(row["score"], abs=1e-3)
        assert np.allclose(other[key][1], hidden, atol=1e-4)
    assert sum(read_manifest(part)["rows"] for part in parts) == read_manifest(whole)["rows"]
    joined, alone = LabelledRows.load(parts), LabelledRows.load([whole])  # as training reads them
    assert (len(joined), joined.n_prompts) == (len(alone), alone.n_prompts)
    told = summarise_labels(whole)
    assert sum(s["rows"] for s in told["sources"].values()) == told["rows"]


@pytest.mark.parametrize("line", ["{", '{"prompt": 3}', '{"text": "w1"}', '{"messages": []}', '{"prompt": " "}', "[]"])
def test_a_broken_line_is_named_and_refused(tiny_pair: Pair, tmp_path: Path, line: str) -> None:
    file = tmp_path / "asked.jsonl"
    good = [json.dumps({"prompt": "w5 w6 w7"}), json.dumps({"messages": [{"role": "user", "content": "w9 w8"}]})]
    file.write_text("\n".join([*good, line, *good]))
    with pytest.raises(SelfJudgeError, match=r"asked\.jsonl, (line|row) 3") as error:
        read_prompts(file)
    assert "\n" not in str(error.value)
    with pytest.raises(SelfJudgeError, match=r"asked\.jsonl, (line|row) 3"):
        label_pair(tiny_pair, tmp_path / "labels", settings_of(str(file)))
    assert not (tmp_path / "labels").exists()
