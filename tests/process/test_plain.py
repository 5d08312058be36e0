"""Answers of the target alone, the prompts it writes itself, and the accepted length of a draft."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

import selfjudge.decoding.plain
from conftest import VOCAB, tiny_model
from equality import greedy
from selfjudge.decoding import prefill
from selfjudge.decoding.plain import respond
from selfjudge.decoding.sampling import Sampling
from selfjudge.engine.select import borrow_engine
from selfjudge.errors import SelfJudgeError
from selfjudge.models.pair import Pair
from selfjudge.prompts.self_written import OPENINGS, Writer, encode_chat_start, find_fault
from selfjudge.types import Emission, TokenColumn

CHAT = "{% for m in messages %}<s> w7 {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w0{% endif %}"


@pytest.fixture
def pair(checkpoints: dict[str, str]) -> Pair:
    """A tiny target whose chat template has a user header."""
    made = Pair.load(checkpoints["target"], device="cpu", needs_draft=False)
    made.tokenizer.chat_template = CHAT
    return made


@pytest.fixture(params=["reference", "auto", "cuda"])
def engine_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference engine, the fastest of this machine, and the static engine (torch operations without a GPU)."""
    monkeypatch.setattr(selfjudge.decoding.plain, "borrow_engine", partial(borrow_engine, kind=request.param))


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=random).tolist() for n in lengths]


RAGGED = [3, 11, 1, 7, 20, 2, 5, 5, 9, 30, 4]


@pytest.mark.quick("auto", "cuda")
@pytest.mark.usefixtures("engine_kind")
def test_greedy_answers_equal_transformers() -> None:
    model, prompts = tiny_model(seed=1), prompts_of(RAGGED)
    common = max(range(VOCAB), key=[t for p in prompts for t in greedy(model, p, 24)].count)
    expected = [greedy(model, p, 24, [common]) for p in prompts]
    told: list[int] = []
    found = list(respond(model, prompts, eos_ids={common}, max_new_tokens=24, batch=4, notify=told.append))
    assert sorted(i for i, _, _ in found) == list(range(len(prompts)))
    assert {i: tokens for i, tokens, _ in found} == dict(enumerate(expected))
    finishes = {finish for _, _, finish in found}
    assert finishes == {"eos", "length"}  # else this test shows too little
    assert all((tokens[-1] == common) == (finish == "eos") for _, tokens, finish in found)
    assert sum(told) == sum(map(len, expected))


@pytest.mark.quick("auto")
@pytest.mark.usefixtures("engine_kind")
def test_sampled_answers_depend_on_their_seed_alone() -> None:
    model, prompts = tiny_model(seed=1), prompts_of(RAGGED)
    seeds = [100 + i for i in range(len(prompts))]

    def run(which: list[int], batch: int, **other: int) -> dict[int, list[int]]:
        chosen = [seeds[i] + other.get("shift", 0) for i in which]
        answers = respond(
            model, [prompts[i] for i in which], eos_ids={2}, max_new_tokens=20, sampling=Sampling(1.5), seeds=chosen,
            batch=batch,
        )  # fmt: skip
        return {which[i]: tokens for i, tokens, _ in answers}

    whole = run(list(range(len(prompts))), 64)
    assert run(list(range(len(prompts))), 3) == whole
    assert run([8, 1, 4], 2) == {i: whole[i] for i in (8, 1, 4)}
    assert run(list(range(len(prompts))), 64, shift=1000) != whole


def substituted(lengths: list[int], seed: int) -> list[list[int]]:
    """Prompts that begin alike and end in a token of their own, as substitutions in one answer do."""
    whole = prompts_of([max(lengths)], seed)[0]
    return [[*whole[: n - 1], 3 + (seed + n) % (VOCAB - 3)] for n in lengths]


@pytest.mark.quick("auto-4", "cuda-64")
@pytest.mark.usefixtures("engine_kind")
@pytest.mark.parametrize("batch", [4, 64])
def test_what_prompts_share_is_read_once_and_changes_nothing(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(seed=1)
    families = [substituted([30, 24, 19, 12, 1], seed) for seed in range(4)]
    prompts = [prompt for group in zip(*families, strict=True) for prompt in group]
    prompts += [prompts[0]] * 3
    expected = [greedy(model, p, 14) for p in prompts]
    read: list[int] = []
    whole = prefill.PrefillGroup.read

    def counting(self: prefill.PrefillGroup, columns: int) -> None:
        read.append(sum(len(request.prompt) for request in self.requests))
        whole(self, columns)

    monkeypatch.setattr(prefill.PrefillGroup, "read", counting)
    found = {i: tokens for i, tokens, _ in respond(model, prompts, eos_ids=(), max_new_tokens=14, batch=batch)}
    assert found == dict(enumerate(expected))
    assert sum(read) < 0.75 * sum(map(len, prompts))  # else nothing was shared
    if batch == 64:
        assert read == [4 * 29]


def test_each_prompt_is_owned_by_one_that_has_all_of_it_but_the_last_token() -> None:
    random = np.random.default_rng(0)
    shared = 0
    for _ in range(300):
        prompts = [random.integers(0, 2, random.integers(1, 6)).tolist() for _ in range(random.integers(1, 60))]
        owners = prefill.shared_prefixes(prompts)
        for prompt, owner in zip(prompts, owners, strict=True):
            body = prompts[owner][:-1]
            assert body[: len(prompt) - 1] == prompt[:-1]
        if owners != list(range(len(prompts))):
            shared += 1
            heads = set(owners)
            assert all(owners[h] == h for h in heads)
            bodies = [prompts[h][:-1] for h in heads]
            assert not any(a[: len(b)] == b for a in bodies for b in bodies if a is not b)  # else it is read twice
            assert 2 * sum(len(prompts[h]) - 1 for h in heads) < sum(len(p) - 1 for p in prompts)
    assert 30 < shared < 270
    assert prefill.shared_prefixes([[5], [5], [6]]) == [0, 1, 2]  # there is nothing to read


def test_a_row_that_fills_the_window_ends_there() -> None:
    model = tiny_model(seed=1)
    ((_, tokens, finish),) = respond(model, prompts_of([90]), eos_ids=(), max_new_tokens=50)
    assert (len(tokens), finish) == (6, "length")


def test_no_prompts_and_no_answers() -> None:
    assert list(respond(tiny_model(), [], eos_ids=(), max_new_tokens=5)) == []


def test_singles_are_emissions() -> None:
    singles = TokenColumn(np.array([4, 0, 2]), np.array([9, 8, 7]), np.array([0, 1, 2]), np.full(3, -1))
    made = [
        Emission(4, (9,), ("target",)),
        Emission(0, (8,), ("target",), "eos"),
        Emission(2, (7,), ("target",), "length"),
    ]
    assert list(singles) == made
    assert (len(singles), singles[-1], singles[1:]) == (3, made[-1], made[1:])
    assert type(singles[0].tokens[0]) is int


def test_the_user_header_is_what_stands_before_the_message(pair: Pair) -> None:
    assert encode_chat_start(pair.tokenizer, [], "user") == [1, 11]
    assert pair.encode("w1 w2")[:2] == [1, 11]


@pytest.mark.parametrize("template", [None, "", "{% for m in messages %}{{ m['content'] }}{% endfor %}", "fixed text"])
def test_a_template_without_user_header_is_refused(pair: Pair, template: str | None) -> None:
    pair.tokenizer.chat_template = template
    with pytest.raises(SelfJudgeError, match="chat template") as caught:
        encode_chat_start(pair.tokenizer, [], "user")
    assert "\n" not in str(caught.value)


def test_the_filter_names_its_reasons(pair: Pair) -> None:
    def words(*numbers: int) -> list[int]:
        return [4 + n for n in numbers]

    seen: set[object] = set()
    long = tuple(range(20, 32))
    for tokens, finish, reason in [
        (words(1, 2, 3), "length", "unfinished"),
        ([*words(1, 2, 3), 1, *words(4), 2], "eos", "control tokens"),
        ([*words(1, 2), 2], "eos", "too short"),
        ([2], "eos", "too short"),
        ([*words(1, 2, 3), 2], "eos", None),
        ([*words(1, 2, 3), 2], "eos", "duplicate"),
        ([*words(3, 1, 2), 2], "eos", "near-duplicate"),  # the same words in another order
        ([*words(*long), 2], "eos", None),
        ([*words(*long[:10], 1, 2, 3), 2], "eos", "near-duplicate"),  # the same beginning
        ([*words(*long[:9], 1, 2, 3), 2], "eos", None),
    ]:
        found, text = find_fault(pair, tokens, finish, seen)
        assert found == reason
        if reason is None:
            assert text == pair.tokenizer.decode(tokens[:-1])


def test_written_prompts_pass_the_filter_and_follow_from_the_seed(pair: Pair) -> None:
    pair.target.generation_config.eos_token_id = [2, 20, 21, 22]

    def write(**options: int) -> tuple[list[str], dict[str, int]]:
        return Writer(pair, **options).write_prompts(40)

    kept, report = write()
    assert len(kept) == report["kept"] > 3
    assert report["written"] == 40 == sum(report.values()) - 40
    assert len(set(kept)) == len(kept)
    assert not any("<" in text for text in kept)
    assert write(batch=7) == (kept, report)
    assert write(seed=1)[0] != kept


def test_written_passages_end_with_a_sentence(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPENINGS, "self-summaries", ["w1 w2", "w3"])
    pair.tokenizer.backend_tokenizer.model = _with_full_stop()
    write = partial(Writer(pair).write_passages, 8, longest=60)
    passages = write(shortest=5)
    assert passages
    assert all(text.endswith(".") and text.startswith(("w1 w2", "w3")) for text in passages)
    assert write(shortest=61) == []


def _with_full_stop() -> object:
    from tokenizers import models

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" if i % 4 else "." for i in range(VOCAB - 4))]
    words = [w if w != "." else f"{'.' * (i + 1)}" for i, w in enumerate(words)]
    return models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>")


def test_many_prompts_are_encoded_as_each_alone(pair: Pair) -> None:
    prompts = ["w1", "w2 w3 w4", [{"role": "user", "content": "w5"}, {"role": "user", "content": "w6"}]]
    assert pair.encode_many(prompts) == [pair.encode(p) for p in prompts]
    assert pair.encode_many([]) == []
