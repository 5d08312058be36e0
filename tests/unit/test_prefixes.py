"""Prefixes that were read before: whatever is found, logits and answers are those of a cold read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from conftest import VOCAB, tiny_head, tiny_model
from equality import greedy
from families import family_model
from selfjudge.decoding.answer import Answer
from selfjudge.decoding.prefill import Prefill
from selfjudge.decoding.text import Batch
from selfjudge.engine import prefixes
from selfjudge.engine.base import Engine
from selfjudge.engine.draft import BatchEngines
from selfjudge.engine.prefixes import PrefixStore, count_positions, open_store
from selfjudge.engine.select import make_draft, make_engine
from selfjudge.errors import SelfJudgeError
from selfjudge.models.load import Draft, Target
from selfjudge.models.pair import Pair

KINDS = ["cpu", "cuda"]
FAMILIES = ["Llama", "Mistral, sliding window", "Gemma 3 (text)", "Qwen2, `yarn` rope, windows in some layers"]
SIZE = 4  # tokens of a block here: windows of 6 are crossed


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "BLOCK", SIZE)


def tokens_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def as_row(tokens: Sequence[int]) -> Tensor:
    return torch.tensor([list(tokens)])


class Reads:
    """Counts the tokens that prefills of a model read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: type[Engine]) -> None:
        self.tokens: list[int] = []
        prefill = engine.prefill

        def counted(this: Engine, tokens: Tensor, counts: Tensor) -> object:
            self.tokens.append(int(counts.sum()))
            return prefill(this, tokens, counts)

        monkeypatch.setattr(engine, "prefill", counted)

    def take(self) -> int:
        """The tokens since the last call."""
        total, self.tokens = sum(self.tokens), []
        return total


# the store


def test_a_prefix_is_found_as_far_as_its_tokens_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    store, tokens = PrefixStore(1 << 20), tokens_of(19)
    made = []

    def copy(start: int, stop: int) -> Tensor:
        made.append((start, stop))
        return torch.arange(float(start), stop).expand(2, 1, 1, -1)[..., None].clone()

    store.put("a", tokens, copy)
    assert made == [(0, 15)], "all but the last token of the last block"
    blocks = store.find("a", tokens)
    assert [block[0, 0, 0, :, 0].tolist() for block in blocks] == [
        [0, 1, 2],
        [3, 4, 5, 6],
        [7, 8, 9, 10],
        [11, 12, 13, 14],
    ]
    assert all(block.untyped_storage().nbytes() == block.nbytes for block in blocks), "each can be freed by itself"
    assert store.used == sum(block.nbytes for block in blocks)
    assert [len(store.find("a", tokens[:n])) for n in range(20)] == [n // SIZE for n in range(20)]
    other = [*tokens[:9], tokens[9] ^ 1, *tokens[10:]]
    assert len(store.find("a", other)) == 2
    assert not store.find("b", tokens)
    assert not store.find("a", tokens[SIZE:]), "a block is known by all tokens before it"
    store.put("a", [*tokens, 5], copy)
    assert made[1:] == [(15, 19)], "only what is new is copied"
    monkeypatch.setattr(prefixes, "RUN", 3)
    store.put("b", tokens, copy)
    assert made[2:] == [(0, 11), (11, 15)], "of a long row some at a time"
    assert len(store.find("b", tokens)) == 4


def test_the_limit_holds_and_the_oldest_go_first() -> None:
    one_position = torch.zeros(2, 1, 1, 1, 8).nbytes
    store = PrefixStore(5 * SIZE * one_position)
    one, two, three = (tokens_of(2 * SIZE, seed) for seed in range(3))

    def copy(start: int, stop: int) -> Tensor:
        return torch.zeros(2, 1, 1, stop - start, 8)

    store.put("a", one, copy)
    store.put("a", two, copy)
    assert store.used == 2 * (2 * SIZE - 1) * one_position
    store.find("a", one)  # now `two` is the oldest
    store.put("a", three, copy)
    assert store.used == (2 * (2 * SIZE - 1) + SIZE - 1) * one_position
    assert [len(store.find("a", tokens)) for tokens in (one, two, three)] == [2, 1, 2], "the end of a prefix goes first"
    store.put("a", tokens_of(9 * SIZE, 4), copy)
    assert store.used == (5 * SIZE - 1) * one_position
    assert len(store.find("a", tokens_of(9 * SIZE, 4))) == 5, "of a prefix that is too long, its beginning"
    store.resize(2 * SIZE * one_position)
    assert store.used <= store.limit
    assert len(store.find("a", tokens_of(9 * SIZE, 4))) == 2
    store.resize(0)
    assert store.used == 0


def test_sizes_are_shares_or_bytes_and_0_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Target(tiny_model())
    monkeypatch.setattr(prefixes, "free_memory", lambda device: 1000)
    for text, limit in ((None, 100), ("0.5", 500), (None, 500), ("2MB", 2_000_000)):
        store = open_store(model, text)
        assert store is not None
        assert store.limit == limit
        assert store is model.keep("prefixes", dict)
    assert open_store(model, "0") is None
    for text in ("much", "-1", "17", "1.5TB"):
        with pytest.raises(SelfJudgeError, match="`prefix_cache` is a share such as"):
            open_store(model, text)


# the caches


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_after_a_prefix_are_those_of_a_cold_read(kind: str, family: str) -> None:
    """Rows of unlike prefixes, one of them none; copied from a row that was rewound and is not the first."""
    model = family_model(family)
    engine, rows = make_engine(model, hidden=True, kind=kind), [tokens_of(30, seed) for seed in range(3)]
    engine.reserve(3, 60)
    engine.prefill(torch.tensor(rows), torch.tensor([30, 30, 30]))
    engine.extend(torch.ones(3, 5, dtype=torch.long))
    engine.rewind(torch.tensor([5, 9, 5]))
    blocks = [engine.view_block(1, 0, 3).clone(), engine.view_block(1, 3, 17).clone()]
    fresh = engine.aside()
    fresh.reserve(3, 60)
    fresh.restore([blocks, [], blocks[:1]])
    counts, starts = torch.tensor([13, 30, 27]), (17, 0, 3)
    texts = [rows[1], rows[0], rows[1]]
    padded = torch.tensor([[0] * start + text[start:] for start, text in zip(starts, texts, strict=True)])
    got = [fresh.prefill(padded, counts).logits[:, -1], fresh.extend(torch.tensor([[7, 9], [8, 9], [6, 9]])).logits]
    with torch.inference_mode():
        for b, (text, next_token) in enumerate(zip(texts, (7, 8, 6), strict=True)):
            wanted = model(torch.tensor([[*text, next_token, 9]])).logits[0, -3:]
            torch.testing.assert_close(torch.stack([got[0][b], *got[1][b]]), wanted, atol=1e-4, rtol=1e-4)


@pytest.fixture(params=["model", "head"])
def draft_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make_engines(kind: str, draft_kind: str, store: PrefixStore) -> BatchEngines:
    target = tiny_model(num_hidden_layers=5)
    draft = tiny_head(target) if draft_kind == "head" else tiny_model(seed=2)
    features = draft.config.aux_layers if draft_kind == "head" else ()
    engine = make_engine(target, features=features, kind=kind)
    engines = BatchEngines(engine, make_draft(draft, target, kind=kind), prefixes=store, spaces=("target", "draft"))
    engines.reserve(1, 80)
    return engines


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_proposes_after_a_prefix_what_it_proposes_cold(kind: str, draft_kind: str) -> None:
    """The text goes on otherwise than where the blocks come from: an entry of a head is made of the token after it."""
    text, store = tokens_of(30), PrefixStore(1 << 20)
    engines = make_engines(kind, draft_kind, store)
    assert engines.draft is not None

    def read(tokens: Sequence[int]) -> list[Tensor]:
        assert engines.draft is not None
        output = engines.target.prefill(as_row(tokens), torch.tensor([len(tokens)]))
        engines.draft.read(as_row(tokens), torch.tensor([len(tokens)]), output.features)
        engines.draft.enter(torch.tensor([9]))
        first = engines.draft.propose(2)
        return [each.logits[:, -1] for each in (output, first, engines.draft.extend(first.logits[:, -1].argmax(-1)))]

    read(text)
    engines.store_blocks(0, [*text, 9], "", (30, 10))
    found = [count_positions(len(blocks)) for blocks in engines.find_blocks(text, "")]
    assert found == ([7, 7] if draft_kind == "head" else [27, 7]), "a head needs the states of what it has not read"
    engines.store_blocks(0, [*text, 9], "", (30, 29))
    other = [*text[:20], text[20] ^ 1, *text[21:]]
    engines.reserve(1, 80)
    cold = read(other)
    engines.reserve(1, 80)
    both = engines.find_blocks(other, "")
    assert [count_positions(len(blocks)) for blocks in both] == [19, 19]
    for engine, blocks in zip(engines.engines, both, strict=True):
        engine.restore([blocks])
    for warm, wanted in zip(read(other[19:]), cold, strict=True):
        torch.testing.assert_close(warm, wanted, atol=1e-4, rtol=1e-4)


# whole answers


@pytest.fixture(params=["tiny_pair", "head_pair"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A pair that has read nothing yet."""
    found: Pair = request.getfixturevalue(request.param)
    found.target_model.kept.pop("prefixes", None)
    yield found
    found.target_model.kept.pop("prefixes", None)


def batch_of(pair: Pair, **options: object) -> Batch:
    return Batch(pair, length=96, **options)  # type: ignore[arg-type]


def run(batch: Batch, *prompts: Sequence[int], tokens: int = 4, **options: object) -> list[Answer]:
    answers = [batch.add(prompt, max_new_tokens=tokens, ignore_eos=True, **options) for prompt in prompts]  # type: ignore[arg-type]
    while len(batch):
        batch.step()
    return answers


def cold(pair: Pair, prompt: Sequence[int], tokens: int = 4, **options: object) -> list[int]:
    """The answer of an engine that has read nothing; the pair forgets what it has read."""
    return run(batch_of(pair, prefix_cache="0", **options), prompt, tokens=tokens)[0].tokens


def in_blocks(tokens: int) -> int:
    """Positions of the full blocks of so many tokens."""
    return max(0, tokens // SIZE * SIZE - 1)


@pytest.mark.quick("tiny_pair-auto-auto", "head_pair-auto-2", "tiny_pair-cuda-2")
@pytest.mark.parametrize("gamma", [0, 2, "auto"])
@pytest.mark.parametrize("engine", ["auto", "cuda"])
def test_a_chat_of_ten_turns_reads_only_what_is_new(
    pair: Pair, engine: str, gamma: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of(pair, engine=engine, gamma=gamma)
    run(batch, [5])  # γ = auto first reads a prompt of its own, to measure what cycles cost
    with batch._decoding.engines.borrow() as lent:
        reads, draft = Reads(monkeypatch, type(lent.target)), lent.draft
    said: list[int] = []
    turns: list[tuple[list[int], list[int]]] = []
    for turn in range(10):
        prompt = [*said, *tokens_of(5, turn)]
        (answer,) = run(batch, prompt)
        target_reads = len(prompt) - answer.cached
        if draft is not None and draft.features:  # the target reads what the head has not read
            assert in_blocks(len(said) - 4) <= answer.cached <= in_blocks(len(said))
        else:
            assert answer.cached == in_blocks(len(said))
        assert target_reads <= 5 + SIZE + 4
        most = target_reads if draft is None or draft.features else 2 * target_reads + 4 + SIZE
        assert target_reads <= reads.take() <= most
        turns.append((prompt, answer.tokens))
        said = [*prompt, *answer.tokens]
    for prompt, tokens in turns:
        assert tokens == cold(pair, prompt, engine=engine, gamma=0)


@pytest.mark.quick("head_pair-auto", "tiny_pair-cuda")
@pytest.mark.parametrize("engine", ["auto", "cuda"])
def test_neighbours_with_and_without_a_prefix_get_the_answers_of_a_cold_read(pair: Pair, engine: str) -> None:
    """Prompts that begin like each other, also where a block ends; long answers in one batch, some cut by a limit."""
    base = tokens_of(41, 5)
    prompts = [base[:n] + tokens_of(m, n) for n, m in ((41, 0), (0, 3), (20, 9), (19, 1), (12, 0), (33, 2))]
    warm = batch_of(pair, engine=engine, gamma=3, rows=4)
    first = [answer.tokens for answer in run(warm, *prompts, tokens=12)]
    again = run(warm, *prompts, tokens=12)
    assert [answer.tokens for answer in again] == first
    assert [answer.cached > 0 for answer in again] == [len(prompt) >= SIZE for prompt in prompts]
    assert first == [cold(pair, prompt, 12, engine=engine, gamma=3) for prompt in prompts]


@pytest.mark.parametrize("postponed", [False, True])
def test_after_many_plain_cycles_the_draft_reads_what_it_left_out(
    tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch, postponed: bool
) -> None:
    """The blocks of the target go on, those of the draft end where plain cycles have begun; it has none where it has
    never drafted."""
    tiny_pair.target_model.kept.pop("prefixes", None)
    batch, prompt = batch_of(tiny_pair, gamma="auto"), tokens_of(12, 8)
    monkeypatch.setattr("selfjudge.decoding.loop.GammaController.choose", lambda *_: 0)
    if not postponed:
        monkeypatch.setattr("selfjudge.decoding.prefill.Prefill.postpones", lambda *_: False)
    (answer,) = run(batch, prompt, tokens=80)
    batch.step()
    with batch._decoding.engines.borrow() as engines:
        target, draft = engines.find_blocks([*prompt, *answer.tokens], "")
    assert (count_positions(len(target)), count_positions(len(draft))) == (
        in_blocks(92),
        in_blocks(0 if postponed else 12),
    )
    longer = [*prompt, *answer.tokens, 5]
    (after,) = run(batch, longer, tokens=3)
    assert after.cached == in_blocks(92)
    assert after.tokens == cold(tiny_pair, longer, 3, gamma=0)


@pytest.mark.parametrize("swapped", [False, True])
def test_beside_an_engine_that_copies_no_blocks_none_are_kept(tiny_pair: Pair, swapped: bool) -> None:
    """Heads that are 6 wide, which only the reference engine runs, of the draft or of the target."""
    narrow = tiny_model(hidden_size=24, num_attention_heads=4, num_key_value_heads=4)
    models = [tiny_pair.target, narrow][:: -1 if swapped else 1]
    pair = Pair("narrow", Target(models[0], "t"), Draft(models[1], "d"), tiny_pair.tokenizer)
    prompt = tokens_of(20, 6)
    batch = batch_of(pair, gamma=2)
    first, again = (run(batch, prompt)[0] for _ in range(2))
    assert first.tokens == again.tokens == greedy(models[0], prompt, 4)
    assert (first.cached, again.cached) == (0, 0)


def test_another_salt_finds_nothing(pair: Pair) -> None:
    batch, prompt = batch_of(pair, gamma=2), tokens_of(30)
    run(batch, prompt, salt=1)
    (other,), (own,) = run(batch, prompt, salt=2), run(batch, prompt, salt=1)
    assert (other.cached, own.cached) == (0, in_blocks(30))
    assert other.tokens == own.tokens


@pytest.mark.quick("tiny_pair-auto", "head_pair-cuda")
@pytest.mark.parametrize("engine", ["auto", "cuda"])
def test_who_leaves_in_the_middle_stores_what_is_right(pair: Pair, engine: str) -> None:
    batch, prompt = batch_of(pair, gamma=3, engine=engine), tokens_of(18, 3)
    dropped = batch.add(prompt, max_new_tokens=40, ignore_eos=True)
    other = batch.add(tokens_of(9, 4), max_new_tokens=20, ignore_eos=True)
    while len(dropped.tokens) < 12:
        batch.step()
    batch.drop(dropped)
    while other.finish is None:
        batch.step()
    said = [*prompt, *dropped.tokens, 7]
    (answer,) = run(batch, said)
    assert answer.cached > len(prompt)
    assert answer.tokens == cold(pair, said, engine=engine, gamma=0)


def test_a_batch_that_fails_stores_nothing_of_its_answers(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_pair.target_model.kept.pop("prefixes", None)
    batch, prompt = batch_of(tiny_pair, gamma=0), tokens_of(20, 6)
    answer = batch.add(prompt, max_new_tokens=30, ignore_eos=True)
    while len(answer.tokens) < 12:
        batch.step()
    monkeypatch.setattr("selfjudge.decoding.loop._LiveBatch.run", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(batch)
    monkeypatch.undo()
    monkeypatch.setattr(prefixes, "BLOCK", SIZE)
    said = [*prompt, *answer.tokens]
    (after,) = run(batch_of(tiny_pair, gamma=0), said)
    assert after.cached == in_blocks(20), "its prompt alone"
    assert after.tokens == cold(tiny_pair, said, gamma=0)


def test_without_memory_for_copies_answers_go_on(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    tiny_pair.target_model.kept.pop("prefixes", None)
    batch, prompt = batch_of(tiny_pair, gamma=2), tokens_of(20, 6)
    run(batch, prompt[:10])
    batch.step()  # it ends, and its rows are stored
    with batch._decoding.engines.borrow() as engines:
        monkeypatch.setattr(type(engines.target), "view_block", full)
    (answer,) = run(batch, prompt)
    assert answer.cached == in_blocks(10)
    assert tiny_pair.target_model.keep("prefixes", PrefixStore).used == 0, "what was there makes room"
    assert answer.tokens == cold(tiny_pair, prompt, gamma=0)


def test_a_group_whose_prefixes_are_gone_is_read_whole(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are put together by what is found when they are admitted, and found again when they are read."""
    tiny_pair.target_model.kept.pop("prefixes", None)
    batch, prompts = batch_of(tiny_pair, gamma=2), [tokens_of(30, 6), tokens_of(30, 7)]
    run(batch, *prompts)
    together: list[int] = []

    def forget(self: Prefill, alive: int, crowded: bool) -> None:
        together.append(len(self.groups[0]))
        tiny_pair.target_model.keep("prefixes", PrefixStore).clear()
        read(self, alive, crowded)

    read = Prefill.read
    monkeypatch.setattr(Prefill, "read", forget)
    batch.step()
    answers = [batch.add(prompt, max_new_tokens=4, ignore_eos=True) for prompt in prompts]
    while len(batch):
        batch.step()
    assert together == [2]
    assert [answer.cached for answer in answers] == [0, 0]
    assert [answer.tokens for answer in answers] == [cold(tiny_pair, prompt, gamma=0) for prompt in prompts]
