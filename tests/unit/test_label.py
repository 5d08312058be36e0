"""Labelling on tiny models: the whole run, its interruptions, damage, sharding, searches, τ, and what is refused."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import VOCAB, tiny_model
from runs import content, prompts_file
from selfjudge.errors import SelfJudgeError
from selfjudge.label.calibrate import tau_of, total
from selfjudge.label.config import LabelConfig
from selfjudge.label.folder import finished, info, merge, read_shards
from selfjudge.label.mismatch import draft_tokens, mismatches
from selfjudge.label.pipeline import label_pair
from selfjudge.label.preservation import Search, meaning_check, next_mismatch, score_events, search
from selfjudge.label.score import Scorer
from selfjudge.models.pair import Pair
from selfjudge.prompts.sources import Source, limited, read_prompts
from selfjudge.store import read_rows, write_tensors


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    return str(prompts_file(tmp_path / "asked.jsonl", 12))


def settings_of(asked: str, **options: object) -> LabelConfig:
    return replace(LabelConfig(prompts=(asked,), tau=-8.0, max_new_tokens=24, batch=5), **options)  # type: ignore[arg-type]


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
            scores = total(arrays["log_p"], arrays["original"], arrays["substituted"], 5)
            assert scores[k] == pytest.approx(row["score"], abs=1e-3)
        seen += len(rows)
    assert seen == manifest["rows"] > 20
    assert 0 < manifest["acceptable"] < manifest["rows"]
    once = manifest["response_tokens"]
    assert manifest["target_tokens"] - once <= 1.25 * 6 * manifest["rows"]
    assert finished(out) == manifest


def test_hidden_states_can_be_kept_as_float16(tiny_pair: Pair, prompts: str, tmp_path: Path) -> None:
    whole, half = (tmp_path / name for name in ("whole", "half"))
    label_pair(tiny_pair, whole, settings_of(prompts))
    label_pair(tiny_pair, half, settings_of(prompts, hidden_dtype="float16"))
    for (_, one), (_, other) in zip(read_shards(whole), read_shards(half), strict=True):
        assert one["hidden_draft"].dtype == np.float32
        assert other["hidden_draft"].dtype == np.float16
        assert np.allclose(one["hidden_draft"], other["hidden_draft"], rtol=2e-3, atol=1e-3)
        assert np.array_equal(one["log_p"], other["log_p"])


def test_look_ahead_reads_what_the_draft_goes_on_with(tiny_pair: Pair, prompts: str, tmp_path: Path) -> None:
    label_pair(tiny_pair, tmp_path / "labels", settings_of(prompts, lookahead=True))
    assert tiny_pair.draft is not None
    responses = {row["prompt_id"]: row for row in read_rows(tmp_path / "labels" / "responses.jsonl")}
    checked = 0
    for rows, arrays in read_shards(tmp_path / "labels"):
        for row, found in list(zip(rows, arrays["lookahead"], strict=True))[:20]:
            response = responses[row["prompt_id"]]
            read = [*response["prompt_ids"], *response["response_ids"]]
            tokens = [*read[: row["position"]], row["draft_token"]]
            for expected in found:
                with torch.no_grad():
                    said = int(tiny_pair.draft(torch.tensor([tokens])).logits[0, -1].argmax())
                    log_p = tiny_pair.target(torch.tensor([tokens])).logits[0, -1].float().log_softmax(-1)
                assert float(log_p[said]) == pytest.approx(float(expected), abs=1e-3)
                tokens.append(said)
                checked += 1
    assert checked > 20


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


def test_autojudge_rows_point_into_their_revision(
    tiny_pair: Pair, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With duplicates and kept substitutions: every row names a response in which its tokens stand."""
    monkeypatch.setattr(
        "selfjudge.label.methods.meaning_check",
        lambda *_, **__: lambda searches, texts: [len(t) % 2 == 0 for t in texts],
    )
    out = tmp_path / "labels"
    manifest = label_pair(
        tiny_pair, out, settings_of(prompts, method="autojudge+", tau=None, max_new_tokens=48, limit=6)
    )
    original = {row["prompt_id"]: row for row in read_rows(out / "responses.jsonl")}
    revised = {
        (r["prompt_id"], r["revision"]): r["response_ids"] for f in out.glob("revisions-*") for r in read_rows(f)
    }
    revisions = set()
    for rows, arrays in read_shards(out):
        assert {len(a) for a in arrays.values()} == {len(rows)}
        for row in rows:
            first = original[row["prompt_id"]]
            response = revised[row["prompt_id"], row["revision"]] if row["revision"] else first["response_ids"]
            assert [*first["prompt_ids"], *response][row["position"]] == row["target_token"]
            revisions.add(row["revision"])
    assert len(revisions) > 1
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
    pair = replace(tiny_pair, draft=tiny_model("gpt2", seed=5, n_positions=16))
    label_pair(pair, tmp_path / "labels", settings_of(prompts))
    rows = [row for rows, _ in read_shards(tmp_path / "labels") for row in rows]
    assert rows
    assert max(row["position"] for row in rows) < 17


# interruptions and damage


def test_a_run_that_fails_anywhere_goes_on_to_the_same_bytes(
    tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    for at in range(total):
        out, count, last = tmp_path / f"killed-{at}", 0, at
        with pytest.raises(Killed):
            label_pair(tiny_pair, out, config)
        assert not (out / "manifest.json").is_file()
        last = 10**9
        label_pair(tiny_pair, out, config, resume=True)
        assert content(out) == expected


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
        merge([out], tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    label_pair(tiny_pair, out, settings_of(prompts), resume=True)
    assert content(out) == expected


def test_another_prompts_file_or_tau_makes_everything_after_it_anew(
    tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = prompts_file(tmp_path / "asked.jsonl", 12)
    settings = settings_of(f"file:{file}", tau=None)
    monkeypatch.setattr("selfjudge.label.tau.shipped_tau", lambda target, draft, n: {"tau": -8.0})
    out = tmp_path / "labels"
    label_pair(tiny_pair, out, settings)
    (out / "manifest.json").unlink()
    monkeypatch.setattr("selfjudge.label.tau.shipped_tau", lambda target, draft, n: {"tau": -2.0})
    assert label_pair(tiny_pair, out, settings, resume=True)["tau"] == -2.0
    for rows, _ in read_shards(out):
        assert all(row["label"] == int(row["score"] > -2.0) for row in rows)
    prompts_file(file, 9)
    with pytest.raises(SelfJudgeError, match="another prompt files"):
        label_pair(tiny_pair, out, settings, resume=True)


# sharding


def test_shards_of_the_work_merge_into_the_whole(tiny_pair: Pair, prompts: str, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    label_pair(tiny_pair, whole, settings_of(prompts))
    parts = [tmp_path / f"part{i}" for i in range(3)]
    for i, part in enumerate(parts):
        label_pair(tiny_pair, part, settings_of(prompts, shard=(i, 3)))
    merge(parts, tmp_path / "merged")

    def rows_of(folder: Path) -> dict[tuple[str, int], tuple[dict, np.ndarray]]:
        return {
            (row["prompt_id"], row["position"]): (row, arrays["hidden_draft"][k])
            for rows, arrays in read_shards(folder)
            for k, row in enumerate(rows)
        }

    one, other = rows_of(whole), rows_of(tmp_path / "merged")
    assert one.keys() == other.keys()
    for key, (row, hidden) in one.items():
        assert other[key][0]["score"] == pytest.approx(row["score"], abs=1e-3)
        assert np.allclose(other[key][1], hidden, atol=1e-4)
    assert finished(tmp_path / "merged")["rows"] == finished(whole)["rows"]
    told = info(tmp_path / "merged")
    assert sum(s["rows"] for s in told["sources"].values()) == told["rows"]
    with pytest.raises(SelfJudgeError, match="both hold prompt"):
        merge([parts[0], parts[0]], tmp_path / "again")
    with pytest.raises(SelfJudgeError, match="holds other files"):
        merge(parts, tmp_path / "merged")
    label_pair(tiny_pair, tmp_path / "other", settings_of(prompts, tau=-1.0))
    with pytest.raises(SelfJudgeError, match="differ in tau"):
        merge([parts[0], tmp_path / "other"], tmp_path / "again")
    with pytest.raises(SelfJudgeError, match="is not a label folder"):
        merge([tmp_path], tmp_path / "again")


# prompts


def test_counts_and_weights_share_the_limit() -> None:
    def counts(texts: list[str], limit: int | None) -> list[int | None]:
        return [s.count for s in limited([Source.parse(t) for t in texts], limit)]

    assert counts(["gsm8k", "dolly:7"], None) == [None, 7]
    assert counts(["gsm8k@2", "dolly@1", "self"], 400) == [200, 100, 100]
    assert counts(["gsm8k@1", "dolly@1", "mbpp@1"], 100) == [33, 34, 33]
    assert counts(["gsm8k:30", "dolly"], 100) == [30, 70]
    for texts, limit in ((["gsm8k@2"], None), (["gsm8k", "gsm8k:5"], None), (["gsm8k:100", "dolly"], 100)):
        with pytest.raises(SelfJudgeError):
            counts(texts, limit)
    for texts, limit in ((["self:500"], 50), (["gsm8k@1", "dolly@100"], 5)):
        with pytest.raises(SelfJudgeError, match="`limit`"):
            counts(texts, limit)
    for wrong in ("gsm8k@0", "gsm8k@inf", "gsm8k@-1", "gsm8k@nan"):
        with pytest.raises(SelfJudgeError, match="asks for nothing"):
            Source.parse(wrong)


def test_broken_lines_are_named_and_refused_or_left_out(tiny_pair: Pair, tmp_path: Path) -> None:
    file = tmp_path / "asked.jsonl"
    good = [json.dumps({"prompt": f"w{i} w{i + 1} w7"}) for i in range(5, 11)]
    messages = json.dumps({"messages": [{"role": "user", "content": "w9 w8"}]})
    file.write_text(
        "\n".join([good[0], "{", *good[1:], '{"prompt": 3}', messages, '{"text": "w1"}', '{"messages": []}'])
    )
    with pytest.raises(SelfJudgeError, match=r"lines 2, 8, 10, 11"):
        read_prompts(file)
    with pytest.raises(SelfJudgeError, match=r"lines 2, 8, 10, 11"):
        label_pair(tiny_pair, tmp_path / "labels", settings_of(str(file)))
    assert not (tmp_path / "labels").exists()
    told: list[str] = []
    manifest = label_pair(tiny_pair, tmp_path / "labels", settings_of(str(file), skip_broken=True), warn=told.append)
    assert manifest["prompts"] == 7
    assert any("left out lines 2, 8, 10, 11 (4 of 11)" in text for text in told)


def test_lines_end_where_the_file_ends_them(tmp_path: Path) -> None:
    file = tmp_path / "asked.jsonl"
    text = "\ufeff" + json.dumps({"prompt": "one\u2028two\x85three"}, ensure_ascii=False) + "\n"
    file.write_text(text, encoding="utf-8")
    assert read_prompts(file) == ["one\u2028two\x85three"]
    file.write_text('{"prompt": "half \\ud800 a pair"}\n{"prompt": "whole"}\n')
    with pytest.raises(SelfJudgeError, match="line 1:"):
        read_prompts(file)


def test_a_text_file_has_a_prompt_a_line(tmp_path: Path) -> None:
    file = tmp_path / "asked.txt"
    file.write_text("w1 w2\n\n  w3\n")
    assert read_prompts(file) == ["w1 w2", "w3"]


# bad input


def test_a_draft_that_is_the_target_has_nothing_to_label(tiny_pair: Pair, prompts: str, tmp_path: Path) -> None:
    same = replace(tiny_pair, draft=tiny_pair.target)
    with pytest.raises(SelfJudgeError, match="no mismatch"):
        label_pair(same, tmp_path / "labels", settings_of(prompts))
    assert not (tmp_path / "labels" / "manifest.json").exists()


def test_responses_of_one_token_have_no_place_to_label(tiny_pair: Pair, prompts: str, tmp_path: Path) -> None:
    with pytest.raises(SelfJudgeError, match="no mismatch"):
        label_pair(tiny_pair, tmp_path / "labels", settings_of(prompts, max_new_tokens=1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "magic"}, "unknown `method`"),
        ({"hidden_dtype": "int8"}, "float32, float16"),
        ({"suffix_length": -1}, "`suffix_length`"),
        ({"batch": 0}, "`batch`"),
        ({"limit": 0}, "`limit`"),
        ({"reject_recall": 0.0}, "`reject_recall`"),
        ({"shard": (3, 3)}, "`shard`"),
        ({"calibrate": "nothing", "tau": None}, "checkable"),
        ({"calibrate": "gsm8k"}, "not both"),
        ({"tau": float("nan")}, "finite number"),
        ({"method": "autojudge"}, r"autojudge\+"),
        ({"prompts": ("gsm8k:5x3",)}, "one answer a prompt"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_written(
    options: dict, message: str, tiny_pair: Pair, prompts: str, tmp_path: Path
) -> None:
    with pytest.raises(SelfJudgeError, match=message) as caught:
        label_pair(tiny_pair, tmp_path / "labels", settings_of(prompts, **options))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "labels").exists()


def test_without_a_tau_the_way_to_one_is_told(tiny_pair: Pair, prompts: str, tmp_path: Path) -> None:
    with pytest.raises(SelfJudgeError, match="`calibrate`"):
        label_pair(tiny_pair, tmp_path / "labels", settings_of(prompts, tau=None))
    with pytest.raises(SelfJudgeError, match="no split 'train'"):
        label_pair(tiny_pair, tmp_path / "labels", settings_of(prompts, tau=None, calibrate="math500"))
    assert not (tmp_path / "labels").exists()


def test_a_file_is_no_folder(tiny_pair: Pair, prompts: str, tmp_path: Path) -> None:
    (tmp_path / "labels").write_text("mine")
    with pytest.raises(SelfJudgeError, match="is a file"):
        label_pair(tiny_pair, tmp_path / "labels", settings_of(prompts))


def test_a_strangers_folder_is_left_alone(tiny_pair: Pair, prompts: str, tmp_path: Path) -> None:
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "thesis.tex").write_text("mine")
    for resume in (False, True):
        with pytest.raises(SelfJudgeError, match="other files"):
            label_pair(tiny_pair, tmp_path / "labels", settings_of(prompts), resume=resume)


# mismatches


def test_which_places_can_be_labelled() -> None:
    response, drafts = [5, 6, 7, 8, 2, 9, 4], [5, 9, 2, 9, 8, 8, 5]
    special = frozenset({2})
    assert mismatches(response, drafts, special, suffix_length=2, cut=False) == [1, 3, 5]
    assert mismatches(response, drafts, special, suffix_length=2, cut=True) == [1, 3]
    assert mismatches(response, drafts, special, suffix_length=0, cut=True) == [1, 3, 5]
    assert mismatches([5], [6], special, suffix_length=0, cut=False) == []
    assert next_mismatch(response, drafts, 2, special) == 3
    assert next_mismatch(response, response, 0, special) == 7


# searches


def naive_search(pair: Pair, prompt: list[int], response: list[int], same, max_new_tokens: int):
    """The search as it is told: one prompt, one place after the other, by transformers."""
    special = set(pair.special_ids)
    current, place, events = list(response), 0, []
    while place < len(current) - 1:
        with torch.no_grad():
            said = int(pair.draft(torch.tensor([prompt + current[:place]])).logits[0, -1].argmax())
        if said == current[place] or {said, current[place]} & special:
            place += 1
            continue
        prefix = prompt + current[:place] + [said]
        left = max_new_tokens - place - 1
        out = pair.target.generate(
            torch.tensor([prefix]), attention_mask=torch.ones(1, len(prefix)), do_sample=False, max_new_tokens=left,
            eos_token_id=sorted(pair.eos_ids), pad_token_id=0,
        )[0].tolist() if left > 0 else prefix  # fmt: skip
        other = out[len(prompt) :]
        kept = same(other)
        events.append((tuple(current), place, said, kept))
        if kept:
            current = other
        place += 1
    return events


def test_searches_together_find_what_each_finds_alone(tiny_pair: Pair) -> None:
    rng = np.random.default_rng(3)
    prompts = [rng.integers(5, VOCAB, n).tolist() for n in (3, 8, 5)]
    responses = []
    for prompt in prompts:
        out = tiny_pair.target.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False, max_new_tokens=14,
            eos_token_id=sorted(tiny_pair.eos_ids), pad_token_id=0,
        )  # fmt: skip
        responses.append(out[0, len(prompt) :].tolist())

    def same_text(text: str) -> bool:
        return sum(map(ord, text)) % 3 > 0  # some are kept, some are not

    def check(searches, texts):
        return [same_text(text) for text in texts]

    searches = [Search(p, tuple(r), "") for p, r in zip(prompts, responses, strict=True)]
    search(tiny_pair, searches, check, max_new_tokens=14, batch=2)
    kept = []
    for one, prompt, response in zip(searches, prompts, responses, strict=True):
        expected = naive_search(
            tiny_pair, prompt, response,
            lambda other: same_text(tiny_pair.tokenizer.decode(other, skip_special_tokens=True)), 14,
        )  # fmt: skip
        assert [(e.response, e.place, e.draft, e.kept) for e in one.events] == expected
        kept += [e.kept for e in one.events]
    assert True in kept
    assert False in kept
    scorer = Scorer(tiny_pair.target, suffix_length=5)
    rows = score_events(scorer, searches)
    assert len(rows) == len(kept)
    for one, event, scores, k in rows[:6]:
        tokens = [*one.prompt, *event.response[: event.place]]
        with torch.no_grad():
            log_p = tiny_pair.target(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
        assert scores.log_p[k, 1] == pytest.approx(float(log_p[event.draft]), abs=1e-3)


def test_a_search_can_be_limited(tiny_pair: Pair) -> None:
    one = Search([5, 6, 7], tuple(range(8, 28)), "")
    search(tiny_pair, [one], lambda searches, texts: [False] * len(searches), max_new_tokens=24, batch=4, most=3)
    assert len(one.events) == 3
    assert {e.response for e in one.events} == {tuple(range(8, 28))}


@pytest.mark.parametrize(
    ("said", "verdict"),
    [
        ("[SAME]", True),
        ("[DIFFERENT]", False),
        ("same.", True),
        ("I cannot say", False),
        ("not [DIFFERENT] but [SAME]", False),
    ],
)
def test_the_target_is_asked_whether_replies_mean_the_same(
    said: str, verdict: bool, tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[int]] = []

    def fake(model, prompts, **options):
        asked.extend(prompts)
        return [(i, [5], "eos") for i in range(len(prompts))]

    monkeypatch.setattr("selfjudge.label.preservation.respond", fake)
    monkeypatch.setattr(type(tiny_pair.tokenizer), "decode", lambda self, tokens, **o: said)
    unclear: list[int] = []
    check = meaning_check(tiny_pair, batch=4, unparsed=unclear.append)
    one = Search([5], (6,), "what is it", answer="first")
    assert check([one, one], ["second", "first"]) == [verdict, True]  # the same text is the same
    assert len(asked) == 2
    assert unclear == [2 if said.startswith("I") else 0]


# τ


def evidence(path: Path, scores: list[float], critical: list[int]) -> Path:
    count = len(scores)
    write_tensors(path, {
        "critical": np.asarray(critical, np.uint8),
        "log_p": np.stack([np.zeros(count), np.asarray(scores) / 2], 1).astype(np.float32),
        "original": np.stack([np.zeros(count), *[np.full(count, np.nan)] * 3], 1).astype(np.float32),
        "substituted": np.stack([np.asarray(scores) / 2, *[np.full(count, np.nan)] * 3], 1).astype(np.float32),
    })  # fmt: skip
    return path


def test_tau_refuses_the_wanted_share_of_critical_tokens(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    scores = rng.normal(-5, 3, 400)
    critical = rng.random(400) < 0.4
    file = evidence(tmp_path / "e", scores.tolist(), critical.tolist())
    for recall in (0.5, 0.9, 0.97, 1.0):
        found = tau_of(file, 20, recall)
        refused = scores[critical] <= found["tau"] + 1e-4
        assert refused.mean() >= recall
        assert (scores[critical] < found["tau"] - 1e-4).mean() < recall  # and no more than needed
        assert found["acceptable_rate"] == pytest.approx((scores > found["tau"] + 1e-4).mean(), abs=0.01)
        assert found["fallback"] is None
        assert found["critical_share"] == critical.mean()
    prefix_only = tau_of(file, 0, 0.9)["tau"]
    assert prefix_only == pytest.approx(np.quantile(scores[critical] / 2, 0.9, method="inverted_cdf"), abs=1e-3)
    mean = tau_of(file, 20, 0.9, mean=True)["tau"]
    assert mean == pytest.approx(np.quantile(scores[critical] / 2, 0.9, method="inverted_cdf"), abs=1e-3)


@pytest.mark.parametrize("critical", [1, 0])
def test_where_nearly_all_or_none_are_critical_a_rate_is_used_and_said(critical: int, tmp_path: Path) -> None:
    scores = np.linspace(-20, 0, 200)
    found = tau_of(evidence(tmp_path / "e", scores.tolist(), [critical] * 200), 20, 0.9)
    assert "acceptable rate" in found["fallback"]
    assert found["acceptable_rate"] == pytest.approx(0.15, abs=0.01)


def test_draft_tokens_are_the_drafts_own_choice() -> None:
    target, draft = tiny_model(seed=1), tiny_model("gpt2", seed=2)
    pair = Pair("p", target, draft, None, "t", "d")  # type: ignore[arg-type]
    sequences = [([5, 6], [7, 8, 9]), ([5], [9]), ([4] * 30, [6, 7])]
    for (prompt, response), said in zip(sequences, draft_tokens(pair, sequences), strict=True):
        with torch.no_grad():
            logits = draft(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        assert said == logits.argmax(-1).tolist()
