"""Training an EAGLE-3 head on tiny models: what it sees, its loss, its measure, and whole runs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor
from transformers.cache_utils import DynamicCache

import selfjudge.distill.data as data_module
import selfjudge.distill.learners as eagle_module
from conftest import VOCAB, tiny_model
from remember import remember_responses
from selfjudge.distill.config import DistillConfig
from selfjudge.distill.data import Corpus, CorpusEntry, Dataset, choose_held_out
from selfjudge.distill.learners import (
    STEP_WEIGHT,
    HeadLearner,
    chain_attention,
    choose_vocabulary,
    count_cycles,
    measure_sizes,
    new_head,
    read_batch,
)
from selfjudge.distill.pipeline import distill_draft
from selfjudge.errors import SelfJudgeError
from selfjudge.models.eagle import EagleConfig, load_head
from selfjudge.models.load import Target
from selfjudge.models.pair import Pair
from selfjudge.prompts.self_written import OPENINGS, Writer
from selfjudge.prompts.sources import SELF
from selfjudge.store import read_tensors

CHAT = "{% for m in messages %}<s> {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w0{% endif %}"
UNROLL = 3


def corpus_of(sizes: list[tuple[int, int]], sources: str = "", most: int = VOCAB) -> Corpus:
    """A corpus of random sequences (prompt, answer)."""
    rng = np.random.default_rng(1)
    tokens = [rng.integers(1, VOCAB, p + a).astype(np.int32) % most for p, a in sizes]
    named = sources.split() or ["made up"] * len(sizes)
    return Corpus([CorpusEntry(source, p, t) for source, (p, _), t in zip(named, sizes, tokens, strict=True)])


def learner_of(
    target: hf.PreTrainedModel, corpus: Corpus, draft_ids: Tensor | None = None, seed: int = 0
) -> HeadLearner:
    ids = torch.arange(0, VOCAB, 2) if draft_ids is None else draft_ids
    config = EagleConfig.for_target(target, len(ids))
    features, states = measure_sizes(target, config.aux_layers, corpus)
    head = new_head(target, config, ids, states, seed)
    for p in head.layers.parameters():
        torch.nn.init.normal_(p, 1.0 if p.dim() == 1 else 0.0, 0.3)
    return HeadLearner(target, head, features, Dataset(corpus, corpus, {}), UNROLL)


def drafted(learner: HeadLearner, ids: list[int], start: int, tokens: list[int]) -> list[Tensor]:
    """a of every step of the draft that begins at `start`, one entry at a time, with these tokens instead of its own."""
    head = learner.head
    whole = torch.tensor([ids])
    with torch.no_grad():
        states = learner.target(whole, output_hidden_states=True).hidden_states
        features = torch.cat([states[i] for i in head.config.aux_layers], -1) / learner.sizes
        cache, g = DynamicCache(), head.fc(features)[:, : start + 1]
        a = head(whole[:, 1 : start + 2], g, cache=cache)[:, -1:]
        steps = [a]
        for n, token in enumerate(tokens, 1):
            a = head(torch.tensor([[token]]), a, torch.tensor([[start + n]]), cache=cache)
            steps.append(a)
    return [step[0, 0] for step in steps]


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_training_sees_what_drafting_will_see(kind: str) -> None:
    """Every step of every draft of a batch, against a head that drafts with a cache."""
    target = tiny_model(kind, num_hidden_layers=4)
    corpus = corpus_of([(3, 6), (2, 9), (5, 3)])
    learner = learner_of(target, corpus)
    rows = [0, 1, 2]
    with torch.no_grad():
        steps = list(learner.unrolled(read_batch(target, learner.head.config.aux_layers, corpus, rows)))
    for row in range(3):
        ids = corpus.answers[row].tokens.tolist()
        length = len(ids)
        for start in range(length - 1):
            tokens = ids[start + 2 : start + 1 + UNROLL]
            for step, a in enumerate(drafted(learner, ids, start, tokens)):
                assert torch.allclose(steps[step][row, start], a, atol=1e-3), (row, start, step)


@pytest.mark.parametrize("groups", [1, 2])
def test_attention_over_true_entries_and_the_chain(groups: int) -> None:
    random = torch.Generator().manual_seed(0)
    q = torch.randn(2, 2 * groups, 5, 4, generator=random)
    keys, values, *chain = (torch.randn(2, 2, 5, 4, generator=random) for _ in range(6))
    found = chain_attention(q, keys, values, [(chain[0], chain[1]), (chain[2], chain[3])])
    for b, h, t in np.ndindex(2, 2 * groups, 5):
        own = h // groups
        k = torch.cat([keys[b, own, : t + 1], chain[0][b, own, t : t + 1], chain[2][b, own, t : t + 1]])
        v = torch.cat([values[b, own, : t + 1], chain[1][b, own, t : t + 1], chain[3][b, own, t : t + 1]])
        assert torch.allclose(found[b, h, t], (k @ q[b, h, t] / 2).softmax(0) @ v, atol=1e-5)


def test_the_loss_and_its_gradients_are_those_of_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eagle_module, "HEAD_ROWS", 4)
    target = tiny_model(num_hidden_layers=4)
    corpus = corpus_of([(3, 6), (2, 9), (5, 1), (4, 2)])
    learner, rows = learner_of(target, corpus), range(4)
    loss, count = learner.loss(rows)
    assert count == 5 + 8 + 0 + 1
    loss.backward()
    found = {name: p.grad.clone() for name, p in learner.named_parameters()}
    learner.head.zero_grad()
    batch = read_batch(target, learner.head.config.aux_layers, corpus, rows)
    p = target.get_output_embeddings()(batch.states)[..., learner.head.draft_ids].softmax(-1)
    expected: Any = 0.0
    for step, a in enumerate(learner.unrolled(batch)):
        terms = [
            -(p[row, u] * learner.head.logits(a[row, u - 1 - step]).log_softmax(-1)).sum()
            for row in range(4)
            for u in range(int(batch.prompts[row]) + step, int(batch.lengths[row]) - 1)
        ]
        expected = expected + STEP_WEIGHT**step * torch.stack(terms).mean()
    assert torch.allclose(loss, expected, rtol=1e-5)
    expected.backward()
    for name, parameter in learner.named_parameters():
        assert torch.allclose(found[name], parameter.grad, rtol=1e-3, atol=1e-5), name


def test_what_is_measured_is_what_decoding_would_give() -> None:
    """m, against a loop that drafts with its own tokens and takes what the answer says."""
    target = tiny_model(num_hidden_layers=4, initializer_range=0.05)
    corpus = corpus_of(
        [(3, 12), (2, 9), (5, 1), (4, 2)], "one two one two", most=3
    )  # so that a random head is right now and then
    learner = learner_of(target, corpus, torch.arange(3))
    tokens = cycles = 0
    for row in range(4):
        ids, place = corpus.answers[row].tokens.tolist(), corpus.answers[row].prompt_length
        length = len(ids)
        while place < length - 1:  # the last token that is known stands at `place`
            own: list[int] = []
            for _ in range(UNROLL):
                a = drafted(learner, ids, place - 1, own)[-1]
                own.append(int(learner.head.draft_ids[learner.head.logits(a).argmax()]))
            right = 0
            while right < UNROLL and place + 1 + right < length and own[right] == ids[place + 1 + right]:
                right += 1
            emitted = min(right + 1, length - 1 - place)
            tokens, cycles, place = tokens + emitted, cycles + 1, place + emitted
    measure = learner.measure()
    assert measure.score == measure.figures["m"]["all"] == pytest.approx(tokens / cycles, abs=1e-4)
    assert measure.score > 1.05  # else this test shows too little
    assert set(measure.figures["m"]) == {"all", "one", "two"}


def test_a_simulated_answer() -> None:
    assert count_cycles([]) == (0, 0)
    assert count_cycles([0, 0, 0]) == (3, 3)
    assert count_cycles([2, 9, 9, 0, 1, 0]) == (6, 3)


def test_the_draft_vocabulary_is_what_answers_are_made_of() -> None:
    texts = (2, [9, 9, 5, 5, 7, 30]), (1, [9, 7, 5, 40])
    corpus = Corpus([CorpusEntry("made up", prompt, np.asarray(text, np.int32)) for prompt, text in texts])
    counts = corpus.count_tokens(VOCAB)
    assert {i: int(n) for i, n in enumerate(counts) if n} == {5: 3, 7: 2, 30: 1, 40: 1}
    assert choose_vocabulary(corpus, VOCAB, 4, [2]).tolist() == [2, 5, 7, 30]
    assert choose_vocabulary(corpus, VOCAB, 7, [2]).tolist() == [0, 1, 2, 5, 7, 30, 40]
    assert choose_vocabulary(corpus, VOCAB, VOCAB, [2, 9999]).tolist() == list(range(VOCAB))


def test_some_prompts_of_every_source_are_held_out() -> None:
    sources = "aaaaaaaabbbc"
    assert choose_held_out(sources, 4) == {0, 1, 2, 8}
    assert choose_held_out(sources, 99) == {0, 1, 2, 3, 8}
    assert choose_held_out(sources[-1:], 4) == {0}


def test_a_folded_head_reads_the_states_as_they_are(tmp_path: Path) -> None:
    target = tiny_model(num_hidden_layers=4)
    corpus = corpus_of([(3, 6), (2, 9)])
    learner = learner_of(target, corpus)
    learner.head.target, learner.head.target_sha256 = "tiny", "a" * 64
    learner.save(tmp_path, {"m": {"all": 2.0}})
    head = load_head(tmp_path, target, "a" * 64)
    assert head.target == "tiny"
    batch = read_batch(target, head.config.aux_layers, corpus, [0, 1])
    with torch.no_grad():
        expected = learner.head.fc(batch.features / learner.sizes)
        assert F.cosine_similarity(head.fc(batch.features), expected, dim=-1).min() > 0.999


# whole runs


@pytest.fixture(scope="module", autouse=True)
def answered_once() -> Iterator[None]:
    """Most runs here begin with the same answers of the same target."""
    with pytest.MonkeyPatch.context() as patch:
        remember_responses(patch, data_module)
        yield


@pytest.fixture(scope="module")
def pair(checkpoints: dict[str, str]) -> Pair:
    made = Pair.load(checkpoints["target"], device="cpu", needs_draft=False)
    made.tokenizer.chat_template = CHAT
    return made


@pytest.fixture
def settings(tmp_path: Path) -> DistillConfig:
    """A run of a few seconds on a file of prompts."""
    file = tmp_path / "prompts.jsonl"
    random = np.random.default_rng(0)
    prompts = [" ".join(f"w{i}" for i in random.integers(1, 50, size)) for size in random.integers(2, 12, 40)]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    return DistillConfig(
        kind="eagle3", steps=60, prompts=(f"{file}:40x3",), max_new_tokens=24, held_out=6, batch_tokens=512,
        draft_vocab=48, unroll=3, rate=5e-3,
    )  # fmt: skip


def test_a_whole_run(pair: Pair, settings: DistillConfig, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = distill_draft(pair, out, settings)
    written = json.loads((out / "run.json").read_text())
    assert written["held_out"] == result["held_out"]
    history = written["training"]["history"]
    assert len(history) == 16
    assert history[-1]["loss"] < history[0]["loss"]
    assert history[-1]["tokens"] > history[0]["tokens"]
    assert result["held_out"]["m"]["all"] > 1
    assert result["draft_vocabulary"]["tokens"] == 48
    assert result["bytes"] == (out / "model.safetensors").stat().st_size
    assert "γ = 3" in (out / "README.md").read_text()
    head = load_head(out, pair.target, pair.target_sha256)
    assert {2, *pair.eos_ids} <= set(head.draft_ids.tolist())
    arrays, _ = read_tensors(out / "work" / "answers-00000.safetensors")
    assert "log_p" not in arrays
    assert distill_draft(pair, out, settings) == written  # finished: returns at once


class Killed(Exception):  # noqa: N818
    """Stands for the end of the process."""


@pytest.mark.slow
def test_an_interrupted_run_has_a_head_and_ends_in_the_same_one(
    pair: Pair, settings: DistillConfig, tmp_path: Path
) -> None:
    seen, settings = 0, replace(settings, steps=24)

    def notify(stage: str, share: float) -> None:
        nonlocal seen
        seen += stage.startswith("training:")
        if seen == 5:
            raise Killed

    with pytest.raises(Killed):
        distill_draft(pair, tmp_path / "parts", settings, notify=notify)
    assert load_head(tmp_path / "parts", pair.target, pair.target_sha256).target == pair.target_id
    assert not (tmp_path / "parts" / "run.json").exists()
    distill_draft(pair, tmp_path / "parts", settings)
    distill_draft(pair, tmp_path / "whole", settings)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_time_for_data_ends_it_and_more_is_not_made_later(
    pair: Pair, settings: DistillConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_module, "CHUNK", 10)
    clock = itertools.count(0.0, 20.0)
    monkeypatch.setattr(data_module.time, "monotonic", lambda: next(clock))
    result = distill_draft(pair, tmp_path / "out", replace(settings, data_minutes=1.0, steps=2))
    made = sorted(file.name for file in (tmp_path / "out" / "work").glob("answers-*.safetensors"))
    assert 2 <= len(made) <= 5
    answers = sum(len(read_tensors(tmp_path / "out" / "work" / name)[0]["lengths"]) for name in made)
    assert result["training"]["answers"] == answers - 6
    distill_draft(pair, tmp_path / "out", replace(settings, data_minutes=1.0, steps=4))
    assert sorted(file.name for file in (tmp_path / "out" / "work").glob("answers-*.safetensors")) == made


def test_a_target_whose_states_cannot_be_read(pair: Pair, settings: DistillConfig, tmp_path: Path) -> None:
    other = replace(pair, target_model=Target(tiny_model("gpt2")))
    with pytest.raises(SelfJudgeError, match="states of a model of type 'gpt2' cannot be read") as caught:
        distill_draft(other, tmp_path / "out", settings)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_target_in_bfloat16(checkpoints: dict[str, str], settings: DistillConfig, tmp_path: Path) -> None:
    pair = Pair.load(checkpoints["target"], device="cpu", dtype="bfloat16", needs_draft=False)
    pair.tokenizer.chat_template = CHAT
    few = (settings.prompts[0].replace(":40x3", ":12x1"),)  # bfloat16 is slow on some CPUs
    result = distill_draft(pair, tmp_path / "out", replace(settings, prompts=few, max_new_tokens=8, steps=2))
    assert result["training"]["steps"] == 2


# prompts in several styles


def test_every_style_is_a_source() -> None:
    assert {*OPENINGS, "self", "self-chats"} == set(SELF)


@pytest.mark.quick("self-math", "self-writing")
@pytest.mark.parametrize("style", sorted(OPENINGS.keys() - {"self-summaries"}))
def test_prompts_of_a_style_begin_as_it_does(pair: Pair, style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPENINGS, style, ["w5 w6", "w7"])
    monkeypatch.setattr(pair.target.generation_config, "eos_token_id", [2, 20, 21, 22])
    texts, report = Writer(pair).write_prompts(40, style)
    assert 3 < len(texts) == report["kept"] < report["written"] == 40
    assert all(text.startswith(("w5 w6 ", "w7 ")) for text in texts)
    assert len({text.removeprefix("w5 w6").removeprefix("w7") for text in texts}) == len(texts)


def test_chats_go_on_from_the_targets_answer(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair.target.generation_config, "eos_token_id", [2, *range(20, 32)])
    writer = Writer(pair)
    chats, report = writer.write_chats(240)
    assert 3 < len(chats) == report["kept"] < report["written"] == 240
    for chat in chats:
        assert [message["role"] for message in chat] == ["user", "assistant", "user"]
        assert all(message["content"].strip() for message in chat)
    assert writer.write_chats(240)[0] == chats


def test_chats_are_learnt_from(
    pair: Pair, settings: DistillConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair.target.generation_config, "eos_token_id", [2, *range(20, 32)])
    wanted = replace(settings, prompts=("self-chats:240", "self-code:30"), steps=2)
    result = distill_draft(pair, tmp_path / "out", wanted)
    assert {source["name"]: source["prompts"] > 2 for source in result["sources"]} == {
        "self-chats": True, "self-code": True,
    }  # fmt: skip


def test_sizes_are_root_mean_squares_over_answers() -> None:
    target = tiny_model(num_hidden_layers=4)
    corpus = corpus_of([(3, 6), (2, 9)])
    feature_sizes, state_sizes = measure_sizes(target, (1, 2, 3), corpus)
    parts, finals = [], []
    for row in range(2):
        ids, first = torch.from_numpy(corpus.answers[row].tokens)[None].long(), corpus.answers[row].prompt_length - 1
        with torch.no_grad():
            states = target(ids, output_hidden_states=True).hidden_states
        parts.append(torch.cat([states[i][0, first:] for i in (1, 2, 3)], -1))
        finals.append(states[-1][0, first:])
    for found, expected in ((feature_sizes, torch.cat(parts)), (state_sizes, torch.cat(finals))):
        assert torch.allclose(found, expected.square().mean(0).sqrt(), rtol=1e-3)
