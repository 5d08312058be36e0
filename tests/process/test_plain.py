"""Answers of the target alone, the prompts it writes itself, and the accepted length of a draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import transformers as hf

import selfjudge.decoding.plain
from conftest import VOCAB, tiny_head, tiny_model
from equality import greedy
from selfjudge.bench.config import DraftBenchConfig
from selfjudge.bench.draft import accepted, agreement, bench_draft, timed
from selfjudge.decoding import prefill
from selfjudge.decoding.plain import respond
from selfjudge.decoding.sampling import Sampling
from selfjudge.engine.select import borrowed
from selfjudge.errors import SelfJudgeError
from selfjudge.models.pair import Pair
from selfjudge.prompts.self_written import Writer, _fault, user_header
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
    monkeypatch.setattr(selfjudge.decoding.plain, "borrowed", partial(borrowed, kind=request.param))


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=random).tolist() for n in lengths]


RAGGED = [3, 11, 1, 7, 20, 2, 5, 5, 9, 30, 4]


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


@pytest.mark.usefixtures("engine_kind")
@pytest.mark.parametrize("batch", [4, 64])
def test_what_prompts_share_is_read_once_and_changes_nothing(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(seed=1)
    families = [substituted([30, 24, 19, 12, 1], seed) for seed in range(4)]
    prompts = [prompt for group in zip(*families, strict=True) for prompt in group]
    prompts += [prompts[0]] * 3
    expected = [greedy(model, p, 24) for p in prompts]
    read: list[int] = []
    left_padded = prefill._left_padded

    def counting(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        read.append(sum(map(len, rows)))
        return left_padded(rows, device)

    monkeypatch.setattr(prefill, "_left_padded", counting)
    found = {i: tokens for i, tokens, _ in respond(model, prompts, eos_ids=(), max_new_tokens=24, batch=batch)}
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
    singles = TokenColumn(np.array([4, 0, 2]), np.array([9, 8, 7]), np.array([0, 1, 2]))
    made = [
        Emission(4, (9,), ("target",)),
        Emission(0, (8,), ("target",), "eos"),
        Emission(2, (7,), ("target",), "length"),
    ]
    assert list(singles) == made
    assert (len(singles), singles[-1], singles[1:]) == (3, made[-1], made[1:])
    assert type(singles[0].tokens[0]) is int


def test_the_user_header_is_what_stands_before_the_message(pair: Pair) -> None:
    assert user_header(pair.tokenizer) == [1, 11]
    assert pair.encode("w1 w2")[:2] == [1, 11]


@pytest.mark.parametrize("template", [None, "", "{% for m in messages %}{{ m['content'] }}{% endfor %}", "fixed text"])
def test_a_template_without_user_header_is_refused(pair: Pair, template: str | None) -> None:
    pair.tokenizer.chat_template = template
    with pytest.raises(SelfJudgeError, match="chat template") as caught:
        user_header(pair.tokenizer)
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
        found, text = _fault(tokens, finish, pair.tokenizer, pair.special_ids, seen)
        assert found == reason
        if reason is None:
            assert text == pair.tokenizer.decode(tokens[:-1])


def test_written_prompts_pass_the_filter_and_follow_from_the_seed(pair: Pair) -> None:
    def write(**options: int) -> tuple[list[str], dict[str, int]]:
        return Writer(pair.target, pair.tokenizer, {2, 20, 21, 22}, **options).prompts(40, pair.special_ids)

    kept, report = write()
    assert len(kept) == report["kept"] > 3
    assert report["written"] == 40 == sum(report.values()) - 40
    assert len(set(kept)) == len(kept)
    assert not any("<" in text for text in kept)
    assert write(batch=7) == (kept, report)
    assert write(seed=1)[0] != kept


def test_written_passages_end_with_a_sentence(pair: Pair) -> None:
    pair.tokenizer.backend_tokenizer.model = _with_full_stop()
    write = partial(Writer(pair.target, pair.tokenizer, {2}).passages, 8, openings=("w1 w2", "w3"), longest=60)
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


def test_the_target_as_its_own_draft_is_always_right(checkpoints: dict[str, str]) -> None:
    pair = Pair.load(checkpoints["target"], checkpoints["draft"], device="cpu")
    same = replace(pair, draft=pair.target)
    prompts = prompts_of([3, 9, 5, 12, 7])
    hits, seen = agreement(same, prompts, max_new_tokens=41, batch=2)
    assert hits == seen > 0
    answers = [tokens for _, tokens, _ in respond(pair.target, prompts, eos_ids={2}, max_new_tokens=41)]
    assert seen == sum(map(len, answers))
    for gamma in (1, 4):
        tokens, cycles = accepted(same, prompts, gamma=gamma, max_new_tokens=41, batch=2)
        assert tokens == sum(len(a) - 1 for a in answers)
        assert cycles == sum(-(-(len(a) - 1) // (gamma + 1)) for a in answers)


def test_bench_draft_pools_over_all_prompts() -> None:
    target, other = (tiny_model(seed=s, max_position_embeddings=512) for s in (1, 2))
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=_tokenizer(), eos_token="</s>")
    sets = {"short": prompts_of([3, 4, 5]), "long": prompts_of([20, 30])}
    config = DraftBenchConfig(gammas=(3,), max_new_tokens=41, batch=2, timed=2, repeats=1)
    same = bench_draft(Pair("p", target, target, tokenizer, "t", "t"), sets, config)
    assert [row["prompts"] for row in same["runs"]] == ["short", "long", "all"]
    assert [row["n"] for row in same["runs"]] == [3, 2, 5]
    for row in same["runs"]:
        assert row["top1"] == 1.0
        assert 3.5 < row["m_gamma_3"] <= 4  # the end of an answer cuts its last cycle
        assert row["predicted_speedup_gamma_3"] > 0
        predicted = row["predicted_tokens_per_second_gamma_3"] / row["predicted_tokens_per_second_plain"]
        assert predicted == pytest.approx(row["predicted_speedup_gamma_3"])
        assert row["tokens_per_second_gamma_3"] > 0 < row["tokens_per_second_plain"]
    assert same["runs"][-1]["answer_tokens"] == sum(row["answer_tokens"] for row in same["runs"][:-1])
    unlike = bench_draft(Pair("p", target, other, tokenizer, "t", "d"), sets, replace(config, timed=0))
    assert unlike["runs"][-1]["tokens_per_second_gamma_3"] is unlike["runs"][-1]["tokens_per_second_plain"] is None
    assert unlike["runs"][-1]["top1"] < 0.5
    assert 1 <= unlike["runs"][-1]["m_gamma_3"] < 2
    head = bench_draft(Pair("p", target, tiny_head(target), tokenizer, "t", "h"), sets, config)
    assert head["draft_kind"] == "eagle3"
    assert head["draft_pass_milliseconds"] > 0
    assert 1 <= head["runs"][-1]["m_gamma_3"] < 2
    assert head["runs"][-1]["tokens_per_second_gamma_3"] > 0
    for gamma in (0, 3):  # what is timed is all but the first token of every answer
        answers = respond(target, sets["short"], eos_ids={2}, max_new_tokens=41)
        pair = Pair("p", target, tiny_head(target), tokenizer, "t", "h")
        tokens, nanoseconds = timed(pair, sets["short"], gamma=gamma, max_new_tokens=41)
        assert tokens == sum(len(answer) - 1 for _, answer, _ in answers)
        assert nanoseconds > 0
    with pytest.raises(SelfJudgeError, match="`draft`"):
        bench_draft(Pair("p", target, None, tokenizer, "t", ""), sets)


def _tokenizer() -> object:
    from tokenizers import Tokenizer, models

    return Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(["<pad>", "<s>", "</s>", "<unk>"])}, unk_token="<unk>")
    )
