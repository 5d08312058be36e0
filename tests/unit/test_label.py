"""Labelling on tiny models: prompts, mismatches, searches, τ, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from conftest import VOCAB, tiny_head, tiny_model
from proposals import head_logits
from runs import label_settings as settings_of, prompts_file
from selfjudge.cli.main import app
from selfjudge.cli.output import fill_text
from selfjudge.errors import SelfJudgeError
from selfjudge.label.checks import MeaningCheck, Original, OutcomeCheck, Substitution, decode_many
from selfjudge.label.methods import (
    compute_tau,
    predict_draft_tokens,
    score_events,
    search_critical_tokens,
    select_places,
)
from selfjudge.label.pipeline import label_pair
from selfjudge.label.score import Scorer
from selfjudge.models.load import Draft, Target
from selfjudge.models.pair import Pair
from selfjudge.prompts.sources import Source, apply_limit, read_prompts
from selfjudge.store import write_tensors


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    return str(prompts_file(tmp_path / "asked.jsonl", 12))


def test_prompts_without_labels_are_accounted_for() -> None:
    manifest = {"rows": 106, "prompts": 18, "acceptable": 53, "method": "selfjudge", "suffix_length": 20, "tau": 0.5}
    fates = {"self": {"written": 24, "kept": 20, "unfinished": 4, "too long": 0, "repeated": 2, "prompts": 18}}
    first, *more = fill_text("label", out="labels", **manifest, yields=fates).splitlines()
    assert first.startswith("labels: 106 labels from 18 prompts, 50.0% acceptable")
    assert more == ["self: 24 prompts written, 18 taken; left out: 4 unfinished, 2 repeated"]
    whole = {"file:mine.jsonl": {"given": 18, "too long": 0, "repeated": 0, "prompts": 18}}
    for yields in ({}, {"yields": whole}):  # folders of earlier versions do not say
        assert fill_text("label", out="labels", **manifest, **yields).splitlines() == [first]


# prompts


def test_sources_without_a_count_share_the_limit() -> None:
    def counts(texts: list[str], limit: int | None) -> list[int | None]:
        return [s.count for s in apply_limit([Source.parse(t) for t in texts], limit)]

    assert counts(["gsm8k", "dolly:7"], None) == [None, 7]
    assert counts(["gsm8k", "dolly", "mbpp", "self"], 400) == [100] * 4
    assert counts(["gsm8k", "dolly", "mbpp"], 100) == [33, 33, 34]
    assert counts(["gsm8k:30", "dolly"], 100) == [30, 70]
    for texts, limit in ((["gsm8k", "gsm8k:5"], None), (["gsm8k:100", "dolly"], 100)):
        with pytest.raises(SelfJudgeError):
            counts(texts, limit)
    with pytest.raises(SelfJudgeError, match="`limit`"):
        counts(["self:500"], 50)


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
    same = replace(tiny_pair, draft_model=Draft(tiny_pair.target))
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
        ({"calibrate": "nothing", "tau": None}, "checkable"),
        ({"calibrate": "gsm8k"}, "not both"),
        ({"tau": float("nan")}, "finite number"),
        ({"method": "autojudge", "tau": None}, r"autojudge\+"),
        ({"method": "consequences"}, "`method` consequences has no τ"),
        ({"method": "autojudge+", "tau": None, "calibrate": "arithmetic"}, r"`method` autojudge\+ has no τ"),
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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no τ is known"),  # for the head
        (["--draft", "qwen2.5-coder-1.5b/draft"], "loading"),
        (["--backend", "vllm"], "loading"),  # takes the small draft by itself
    ],
)
def test_the_shipped_tau_of_a_draft_is_known_before_it_is_loaded(
    words: list[str], said: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object) -> Pair:
        raise SelfJudgeError("loading")

    monkeypatch.setattr("selfjudge.cli.train._load_pair", load)
    asked = ["--pair", "qwen2.5-coder-1.5b", *words, "--prompts", prompts, "--out", str(tmp_path / "labels")]
    assert said in str(CliRunner().invoke(app, ["label", *asked]).exception)


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
    assert select_places(response, drafts, special, suffix_length=2, cut=False) == [1, 3, 5]
    assert select_places(response, drafts, special, suffix_length=2, cut=True) == [1, 3]
    assert select_places(response, drafts, special, suffix_length=0, cut=True) == [1, 3, 5]
    assert select_places([5], [6], special, suffix_length=0, cut=False) == []


# searches


def original_of(prompt: list[int], response: list[int], check: OutcomeCheck) -> Original:
    return Original({"prompt_ids": prompt, "response_ids": response}, None, check)


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


@pytest.mark.slow
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

    class ByText(OutcomeCheck):
        def __call__(self, substitutions, responses):
            return [same_text(text) for text in decode_many(tiny_pair, responses)]

    check = ByText()
    originals = [original_of(p, r, check) for p, r in zip(prompts, responses, strict=True)]
    events = search_critical_tokens(tiny_pair, settings_of("", max_new_tokens=14, batch=2), originals)
    kept = []
    for one, prompt, response in zip(originals, prompts, responses, strict=True):
        expected = naive_search(
            tiny_pair, prompt, response,
            lambda other: same_text(tiny_pair.tokenizer.decode(other, skip_special_tokens=True)), 14,
        )  # fmt: skip
        mine = [(e.substitution, e.kept) for e in events if e.substitution.original is one]
        assert [(s.response, s.place, s.token, is_kept) for s, is_kept in mine] == expected
        kept += [is_kept for _, is_kept in mine]
    assert True in kept
    assert False in kept
    scorer = Scorer(tiny_pair.target, suffix_length=5)
    scored = score_events(scorer, events)
    rows = [(case, scores, k) for _, case, scores in scored for k in range(len(case.places))]
    assert len(rows) == len(kept)
    for event, (case, scores, k) in list(zip(events, rows, strict=True))[:6]:
        tried = event.substitution
        assert (tuple(case.response), case.places[k]) == (tried.response, tried.place)
        tokens = [*tried.original.prompt, *tried.response[: tried.place]]
        with torch.no_grad():
            log_p = tiny_pair.target(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
        assert scores.log_p[k, 1] == pytest.approx(float(log_p[tried.token]), abs=1e-3)


def test_a_search_can_be_limited(tiny_pair: Pair) -> None:
    class Never(OutcomeCheck):
        def __call__(self, substitutions, responses):
            return [False] * len(responses)

    one = original_of([5, 6, 7], list(range(8, 28)), Never())
    events = search_critical_tokens(tiny_pair, settings_of("", max_new_tokens=24, batch=4), [one], most=3)
    assert len(events) == 3
    assert {e.substitution.response for e in events} == {tuple(range(8, 28))}


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

    texts = {(5,): said, (6, 8): "second", (6,): "first"}
    monkeypatch.setattr("selfjudge.label.checks.respond", fake)
    monkeypatch.setattr(type(tiny_pair.tokenizer), "decode", lambda self, tokens, **o: texts[tuple(tokens)])
    check = MeaningCheck(tiny_pair, batch=4)
    row = {"prompt_ids": [5], "response_ids": [6], "request": "what is it"}
    tried = Substitution(Original(row, "first", check), (6,), 0, 8)
    assert check([tried, tried], [(6, 8), (6,)]) == [verdict, True]  # the same text is the same
    assert len(asked) == 2
    assert check.unclear == (2 if said.startswith("I") else 0)


# τ


def evidence(path: Path, scores: list[float], critical: list[int]) -> Path:
    count = len(scores)
    after = np.stack([np.asarray(scores) / 2, *[np.full(count, np.nan)] * 3], 1).astype(np.float32)
    write_tensors(path, {
        "critical": np.asarray(critical, np.uint8),
        "log_p": np.stack([np.zeros(count), np.asarray(scores) / 2], 1).astype(np.float32),
        "original": np.stack([np.zeros(count), *[np.full(count, np.nan)] * 3], 1).astype(np.float32),
        "substituted": after, "highest": after,
    })  # fmt: skip
    return path


def test_tau_refuses_the_wanted_share_of_critical_tokens(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    scores = rng.normal(-5, 3, 400)
    critical = rng.random(400) < 0.4
    file = evidence(tmp_path / "e", scores.tolist(), critical.tolist())
    for recall in (0.5, 0.9, 0.97, 1.0):
        found = compute_tau(file, 20, recall)
        refused = scores[critical] <= found["tau"] + 1e-4
        assert refused.mean() >= recall
        assert (scores[critical] < found["tau"] - 1e-4).mean() < recall  # and no more than needed
        assert found["acceptable_rate"] == pytest.approx((scores > found["tau"] + 1e-4).mean(), abs=0.01)
        assert found["fallback"] is None
        assert found["critical_share"] == critical.mean()
    prefix_only = compute_tau(file, 0, 0.9)["tau"]
    assert prefix_only == pytest.approx(np.quantile(scores[critical] / 2, 0.9, method="inverted_cdf"), abs=1e-3)
    mean = compute_tau(file, 20, 0.9, score="confidence")["tau"]
    assert mean == pytest.approx(np.quantile(scores[critical] / 2, 0.9, method="inverted_cdf"), abs=1e-3)


@pytest.mark.parametrize("critical", [1, 0])
def test_where_nearly_all_or_none_are_critical_a_rate_is_used_and_said(critical: int, tmp_path: Path) -> None:
    scores = np.linspace(-20, 0, 200)
    found = compute_tau(evidence(tmp_path / "e", scores.tolist(), [critical] * 200), 20, 0.9)
    assert "acceptable rate" in found["fallback"]
    assert found["acceptable_rate"] == pytest.approx(0.15, abs=0.01)


def test_draft_tokens_of_a_head_are_its_first_proposals() -> None:
    """Before the second token of a text it has no say: the answer's own token stands."""
    target = tiny_model(seed=1, num_hidden_layers=4)
    head = tiny_head(target)
    pair = Pair("p", Target(target, "t"), Draft(head, "d"), None)  # type: ignore[arg-type]
    sequences = [([5, 6], [7, 8, 9]), ([5], [9, 4]), ([4] * 30, [6, 7])]
    for (prompt, response), said in zip(sequences, predict_draft_tokens(pair, sequences), strict=True):
        wanted = [
            int(head_logits(head, target, prompt + response[:i], [0]).argmax()) if len(prompt) + i > 1 else token
            for i, token in enumerate(response)
        ]
        assert said == wanted


def test_draft_tokens_are_the_drafts_own_choice() -> None:
    target, draft = tiny_model(seed=1), tiny_model("gpt2", seed=2)
    pair = Pair("p", Target(target, "t"), Draft(draft, "d"), None)  # type: ignore[arg-type]
    sequences = [([5, 6], [7, 8, 9]), ([5], [9]), ([4] * 30, [6, 7])]
    for (prompt, response), said in zip(sequences, predict_draft_tokens(pair, sequences), strict=True):
        with torch.no_grad():
            logits = draft(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        assert said == logits.argmax(-1).tolist()
