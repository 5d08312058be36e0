"""Text shells: detokenisation, stop strings, streaming, batches; on tiny models and a byte-level tokenizer."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from conftest import tiny_model
from equality import greedy
from selfjudge.decoding import loop, prefill
from selfjudge.decoding.answer import Detokenizer
from selfjudge.decoding.cycle import Cycle
from selfjudge.decoding.rules import EXACT, AcceptanceRule, SpeculativeSampling, TopK
from selfjudge.decoding.sampling import Sampling
from selfjudge.decoding.text import Batch, generate, prepare, stream
from selfjudge.engine import select
from selfjudge.engine.select import PairEngines, borrow_engine
from selfjudge.errors import SelfJudgeError
from selfjudge.models import load as loading
from selfjudge.models.load import Draft, Target
from selfjudge.models.pair import Pair
from selfjudge.types import Generation, Piece

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture(scope="module")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.BPE({"<eos>": 0, **{c: i + 1 for i, c in enumerate(ALPHABET)}}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")


@pytest.fixture(scope="module")
def byte_pair(byte_tokenizer: PreTrainedTokenizerFast) -> Pair:
    """Random models over bytes: their answers are full of incomplete characters."""
    size = len(ALPHABET) + 1
    target, draft = tiny_model(seed=4, vocab_size=size), tiny_model(seed=5, vocab_size=size)
    return Pair("bytes", Target(target, "t"), Draft(draft, "d"), byte_tokenizer)


@pytest.mark.quick("3")
@pytest.mark.parametrize("gamma", [0, 3])
def test_answers_of_a_batch_end_at_token_ids_of_their_own_or_ignore_the_end_token(
    byte_pair: Pair, gamma: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(prompt: list[int], **options: Any) -> Generation:
        batch = Batch(byte_pair, gamma=gamma, length=80)
        others = [batch.add([3, 4], max_new_tokens=9), batch.add(prompt, max_new_tokens=40, **options)]
        while len(batch):
            batch.step()
        return others[1].generation()

    whole = answer([5, 6])
    assert len(whole.tokens) == 40
    last = next(i for i in range(12, 40) if whole.tokens[i] not in whole.tokens[:i])
    stopped = answer([5, 6], stop_ids=[whole.tokens[last], 0], streamed=False)
    assert stopped.tokens == whole.tokens[: last + 1]
    assert stopped.text == byte_pair.tokenizer.decode(whole.tokens[:last])  # the token that ends it is not shown
    assert stopped.finish == "stop"
    monkeypatch.setattr(Pair, "eos_ids", frozenset({whole.tokens[last]}))
    assert answer([5, 6]).finish == "eos"
    assert answer([5, 6]).tokens == stopped.tokens
    assert answer([5, 6], ignore_eos=True).tokens == whole.tokens
    assert answer([5, 6], ignore_eos=True, stop_ids=[whole.tokens[last]]).tokens == stopped.tokens


@pytest.mark.quick("prompt-*")
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        *((each, "is a list of token ids") for each in ("text", ["5"], [None], [[5, 6]], 5, None, {"input_ids": [5]})),
        *((torch.tensor([5.0]), "is a list of token ids"), ([5, 1.5], "is a list of token ids")),
        *((each, "between 0 and 256") for each in ([-1, 5], [257], [1 << 70])),
    ],
)
@pytest.mark.parametrize("name", ["prompt", "stop_ids"])
def test_what_are_no_token_ids_is_refused_and_others_go_on(
    byte_pair: Pair, wrong: Any, message: str, name: str
) -> None:
    batch = Batch(byte_pair, gamma=2, length=80)
    answer = batch.add([5, 6, 7], max_new_tokens=8, ignore_eos=True)
    with pytest.raises(SelfJudgeError, match=f"`{name}`.* {message}"):
        batch.add(**{"prompt": [8], name: wrong})
    given = [9, 4]
    other = batch.add(given, max_new_tokens=8, ignore_eos=True)
    given.append(1 << 70)  # the batch has a copy
    third = batch.add(torch.tensor([9, 4]), max_new_tokens=8, ignore_eos=True)  # type: ignore[arg-type]
    while len(batch):
        batch.step()
    assert answer.tokens == greedy(byte_pair.target, [5, 6, 7], 8)
    assert other.tokens == third.tokens == greedy(byte_pair.target, [9, 4], 8)


@pytest.mark.parametrize("limits", [{"rows": 0}, {"rows": "8"}, {"rows": 2.5}, {"length": 0}, {"length": "80"}])
def test_a_batch_has_whole_numbers_of_rows_and_tokens(byte_pair: Pair, limits: dict[str, Any]) -> None:
    with pytest.raises(SelfJudgeError, match=r"`(rows|length)` must be a whole number, at least 1"):
        Batch(byte_pair, **limits)


def test_a_batch_goes_on_after_a_pass_that_failed(byte_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answers are lost, those that waited as well; the next ones are what they should be, also without `close`."""
    batch = Batch(byte_pair, gamma=2, rows=2, length=80)
    lost = [batch.add([5, 6, 7 + i], max_new_tokens=30) for i in range(3)]
    while not lost[0].tokens:
        batch.step()
    batch.drop(lost[1])
    with monkeypatch.context() as patch:
        patch.setattr("selfjudge.decoding.loop._LiveBatch.run", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            batch.step()
    assert len(batch) == 0
    assert batch.step() == []
    answers = [batch.add([9, 4 + i], max_new_tokens=20, ignore_eos=True) for i in range(3)]
    for _ in range(200):
        batch.step()
    assert [answer.tokens for answer in answers] == [greedy(byte_pair.target, [9, 4 + i], 20) for i in range(3)]
    assert len(batch) == 0


def test_an_engine_that_another_thread_has_just_taken_is_made_anew(tiny_pair: Pair) -> None:
    class Emptied(list[Any]):
        def pop(self, *_: Any) -> Any:
            raise IndexError("pop from empty list")

    for engines in [
        model.keep("idle engines", dict) for model in (tiny_pair.target_model, tiny_pair.draft_model) if model
    ]:
        for key in list(engines):
            engines[key] = Emptied(engines[key])
    assert generate(tiny_pair, "w1 w2", engine="cuda", gamma=2, max_new_tokens=5).tokens
    for engines in [
        model.keep("idle engines", dict) for model in (tiny_pair.target_model, tiny_pair.draft_model) if model
    ]:
        engines.clear()


@pytest.mark.parametrize("how", ["closed", "broken"])
def test_static_engines_are_kept_where_a_stream_is_not_read_to_its_end(tiny_pair: Pair, how: str) -> None:
    """With their cache and their captured cycles; not after an exception, which may have damaged them."""
    idle = [model.keep("idle engines", dict) for model in (tiny_pair.target_model, tiny_pair.draft_model) if model]
    for engines in idle:
        engines.clear()  # those of other tests
    whole = generate(tiny_pair, "w1 w2", engine="cuda", gamma=2, max_new_tokens=20)
    kept = [engine for engines in idle for own in engines.values() for engine in own]
    assert len(kept) == 2
    answer = stream(tiny_pair, "w1 w2", engine="cuda", gamma=2, max_new_tokens=20)
    for piece in answer:
        assert piece.token == whole.tokens[0]
        break
    if how == "broken":
        with pytest.raises(RuntimeError, match="broken"):
            answer._steps.throw(RuntimeError("broken"))  # type: ignore[attr-defined]
    else:
        answer._steps.close()  # type: ignore[attr-defined]
    after = [engine for engines in idle for own in engines.values() for engine in own]
    assert after == (kept if how == "closed" else [])
    assert generate(tiny_pair, "w1 w2", engine="cuda", gamma=2, max_new_tokens=20).tokens == whole.tokens


def test_detokenizer_waits_for_whole_characters(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    text = "naïve 東京 🙂 done"
    detokenizer = Detokenizer(byte_tokenizer)
    pieces = [detokenizer.add(t) for t in byte_tokenizer(text)["input_ids"]]
    assert "".join(pieces) == text
    assert "" in pieces
    assert not any("\ufffd" in p for p in pieces)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 50])
def test_steps_have_the_text_of_their_tokens(byte_tokenizer: PreTrainedTokenizerFast, size: int) -> None:
    text = "naïve 🎉 — 日本語, plain"
    ids = byte_tokenizer.encode(text, add_special_tokens=False)
    single, grouped, shown = Detokenizer(byte_tokenizer), Detokenizer(byte_tokenizer), ""
    for begin in range(0, len(ids), size):
        step = ids[begin : begin + size]
        new = grouped.add(*step)
        assert new == "".join(map(single.add, step))
        shown += new
    assert shown + grouped.rest() == text


def test_by_step_a_step_is_one_piece_with_the_same_text(byte_pair: Pair) -> None:
    pieces: dict[bool, list[list[Piece]]] = {True: [], False: []}
    answers = {}
    for by_step, steps in pieces.items():
        batch = Batch(byte_pair, "exact", gamma=3)
        answers[by_step] = batch.add([5, 6, 7], max_new_tokens=40, by_step=by_step)
        while len(batch):
            steps += [new for _, new in batch.step()]
        batch.close()
    texts = {by_step: ["".join(piece.text for piece in new) for new in steps] for by_step, steps in pieces.items()}
    assert texts[True] == texts[False]
    assert {len(new) for new in pieces[True]} == {1}
    assert answers[True].tokens == answers[False].tokens
    assert answers[True].origins == answers[False].origins


def test_detokenizer_gives_up_incomplete_characters_at_the_end(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    ids = byte_tokenizer("a🙂")["input_ids"][:-1]
    detokenizer = Detokenizer(byte_tokenizer)
    text = "".join(detokenizer.add(t) for t in ids) + detokenizer.rest()
    assert text == byte_tokenizer.decode(ids)


def test_special_tokens_inside_an_answer_leave_the_text_alone(tiny_pair: Pair) -> None:
    """Words of this tokenizer are joined by spaces, which a word has only after another one."""
    ids = [7, 1, 8, 9, 1, 2, 10]
    detokenizer = Detokenizer(tiny_pair.tokenizer)
    assert (
        "".join(map(detokenizer.add, ids)) == tiny_pair.tokenizer.decode(ids, skip_special_tokens=True) == "w3 w4 w5 w6"
    )


def test_streamed_pieces_are_the_whole_text(byte_pair: Pair) -> None:
    (whole,) = generate(byte_pair, ["hello there"], raw=True, max_new_tokens=60)
    answer = stream(byte_pair, "hello there", raw=True, max_new_tokens=60)
    pieces = list(answer)
    assert (
        "".join(p.text for p in pieces)
        == whole.text
        == byte_pair.tokenizer.decode(whole.tokens, skip_special_tokens=True)
    )
    assert tuple(p.token for p in pieces) == whole.tokens == answer.generation.tokens
    assert tuple(p.origin for p in pieces) == whole.origins


def test_a_stream_has_no_result_before_its_end(byte_pair: Pair) -> None:
    answer = stream(byte_pair, "x", raw=True)
    with pytest.raises(SelfJudgeError, match="not finished"):
        _ = answer.generation


@pytest.mark.quick("cpu")
@pytest.mark.parametrize("engine", ["cpu", "cuda"])
def test_rows_are_refilled_while_prompts_wait(tiny_pair: Pair, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of many lengths, four at a time: what each says is as before, and cycles have more rows."""
    limits = [2, 22, 3, 5, 16, 3, 4, 14, 4, 2, 5, 18, 3, 3, 12, 4]
    asked = [f"w{i % 9} w{i % 7 + 1}" for i in range(len(limits))]
    decoding, requests = prepare(tiny_pair, asked, "exact", {"raw": True, "gamma": 2, "engine": engine})
    requests = [request._replace(max_new_tokens=limit) for request, limit in zip(requests, limits, strict=True)]
    alone = [decoding.answer([request], 1, ())[0].tokens for request in requests]
    cycles: list[int] = []
    original = Cycle.run

    def run(self: Cycle, *arguments: Any) -> Any:
        cycles.append(len(self.last))
        return original(self, *arguments)

    monkeypatch.setattr(Cycle, "run", run)
    apart = [answer for i in range(0, 16, 4) for answer in decoding.answer(requests[i : i + 4], 4, ())]
    before = cycles.copy()
    cycles.clear()
    together = decoding.answer(requests, 4, ())
    assert [answer.tokens for answer in together] == alone == [answer.tokens for answer in apart]
    assert max(cycles) == max(before) == 4
    assert len(cycles) < 0.75 * len(before)
    cycles.clear()
    monkeypatch.setattr(prefill, "PASS_TOKENS", 1)  # every prompt is read by itself
    assert [answer.tokens for answer in decoding.answer(requests, 4, ())] == alone
    assert cycles[0] == 4  # not before all that have room are there


def test_stop_strings_end_one_row_and_never_show(tiny_pair: Pair) -> None:
    prompts = ["w1 w2", "w3 w4 w5", "w6"]
    free = generate(tiny_pair, prompts, gamma=3, max_new_tokens=30, raw=True)
    words = free[1].text.split()
    stop = " ".join(words[6:8])  # two words: found across tokens
    results = generate(tiny_pair, prompts, gamma=3, max_new_tokens=30, raw=True, stop=[stop])
    cut = results[1]
    assert cut.finish == "stop"
    assert stop not in cut.text
    assert cut.text == free[1].text[: free[1].text.find(stop)]
    assert len(cut.tokens) <= len(free[1].tokens)
    assert free[1].tokens[: len(cut.tokens)] == cut.tokens
    assert (cut.mean_accepted_length or 1) <= 4
    for i in (0, 2):
        expected = free[i].text.split(stop)[0]
        assert results[i].text == expected

    answer = stream(tiny_pair, prompts[1], gamma=3, max_new_tokens=30, raw=True, stop=[stop])
    shown = "".join(p.text for p in answer)
    assert shown == cut.text  # nothing of the stop string was ever shown
    with pytest.raises(SelfJudgeError, match="`stop` is a list"):
        generate(tiny_pair, prompts, stop=[""])


def test_batches_keep_the_order_and_the_answers(tiny_pair: Pair) -> None:
    prompts = [" ".join(f"w{(7 * i + j) % 50}" for j in range(1 + i % 5)) for i in range(9)]
    together = generate(tiny_pair, prompts, gamma=3, max_new_tokens=20, raw=True, batch=4)
    alone = [generate(tiny_pair, [p], gamma=3, max_new_tokens=20, raw=True)[0] for p in prompts]
    assert [g.tokens for g in together] == [g.tokens for g in alone]
    assert [g.cycles for g in together] == [g.cycles for g in alone]


def test_figures_of_an_answer(tiny_pair: Pair) -> None:
    (g,) = generate(tiny_pair, ["w1 w2"], gamma=3, max_new_tokens=20, raw=True)
    assert 1 <= g.mean_accepted_length <= 4
    assert g.mean_accepted_length == (len(g.tokens) - 1) / g.cycles
    assert g.drafts_accepted == sum(o == "draft" for o in g.origins) / g.cycles
    assert g.judged_share == 0
    assert sum(g.seconds[p] for p in ("draft", "target", "rule", "judge")) <= g.seconds["total"] * 1.01


@pytest.mark.quick("topk")
@pytest.mark.parametrize("rule", [TopK(3), SpeculativeSampling(Sampling(1.0))], ids=lambda rule: rule.name)
def test_an_answer_names_its_gamma_and_can_be_had_again_with_it(tiny_pair: Pair, rule: AcceptanceRule) -> None:
    options = {"max_new_tokens": 20, "raw": True}
    chosen = generate(tiny_pair, "w1 w2 w3", rule, **options)
    assert isinstance(chosen.gamma, int)
    assert chosen.gamma_mean == chosen.gamma
    assert generate(tiny_pair, "w1 w2 w3", rule, gamma=chosen.gamma, **options).tokens == chosen.tokens
    assert generate(tiny_pair, "w1 w2 w3", **options).gamma is None  # chosen for every cycle
    assert generate(tiny_pair, "w1 w2 w3", gamma=2, **options).gamma == 2
    assert generate(tiny_pair, "w1 w2 w3", gamma=2, **options | {"max_new_tokens": 1}).gamma == 2
    if rule.sampling is not None:  # with a seed γ is fixed, so that the answer is the same every time
        seeded = [generate(tiny_pair, "w1 w2 w3", rule, seed=5, **options) for _ in range(3)]
        assert {(answer.tokens, answer.gamma) for answer in seeded} == {(seeded[0].tokens, 3)}


def test_an_answer_that_prefill_ends_has_no_cycle(tiny_pair: Pair) -> None:
    (g,) = generate(tiny_pair, ["w1 w2"], gamma=3, max_new_tokens=1, raw=True)
    assert (g.cycles, g.mean_accepted_length, len(g.tokens)) == (0, None, 1)


@pytest.mark.parametrize("draft_kind", ["layers", "eagle3"])
@pytest.mark.parametrize(
    "engine", [*(pytest.param(kind, marks=pytest.mark.slow) for kind in ("reference", "cuda")), "auto"]
)
def test_answers_come_and_go_in_a_batch(tiny_pair: Pair, head_pair: Pair, engine: str, draft_kind: str) -> None:
    """Six answers over two places, one given up, one ended by a stop string; each is what `generate` makes of it alone."""
    tiny_pair = tiny_pair if draft_kind == "layers" else head_pair
    prompts = ["w1 w2", "w3 w4 w5", "w6", "w7 w8", "w9 w1 w2 w3", "w5"]
    alone = [generate(tiny_pair, [p], gamma=3, max_new_tokens=14, raw=True, engine=engine)[0] for p in prompts]
    stop = " ".join(alone[1].text.split()[6:8])
    batch = Batch(tiny_pair, gamma=3, rows=2, length=64, engine=engine)
    for _ in range(2):  # the second time all over again
        answers = [
            batch.add(tiny_pair.encode(p, raw=True), max_new_tokens=14, stop=[stop] if i == 1 else (), streamed=i < 4)
            for i, p in enumerate(prompts)
        ]
        texts = dict.fromkeys(map(id, answers), "")
        steps = 0
        while taken := batch.step():
            assert len(taken) <= 2
            for answer, pieces in taken:
                texts[id(answer)] += "".join(p.text for p in pieces)
            steps += 1
            if steps == 4:
                batch.drop(answers[0])
        assert len(batch) == 0
        assert answers[0].finish is None
        assert 0 < len(answers[0].tokens) < 14
        for i in (2, 3, 4, 5):
            made = answers[i].generation()
            assert (made.tokens, made.text, made.cycles) == (alone[i].tokens, alone[i].text, alone[i].cycles)
            assert texts[id(answers[i])] == (made.text if i < 4 else "")
        cut = answers[1].generation()
        assert cut.finish == "stop"
        assert cut.text == texts[id(answers[1])] == alone[1].text.split(stop)[0]


def test_all_rules_draft_with_the_same_weights(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    lent = []

    def noting(name: str, lend):
        @contextmanager
        def lend_and_note(*models, int8: bool = False, **options):
            lent.append((name, int8))
            with lend(*models, **options) as thing:  # these are too narrow for int8
                yield thing

        return lend_and_note

    def drafting(int8: bool | None) -> Pair:
        return replace(tiny_pair, draft_model=Draft(tiny_pair.draft, int8=int8))

    for name in ("engine", "draft"):
        monkeypatch.setattr(select, f"borrow_{name}", noting(name, getattr(select, f"borrow_{name}")))
    for can in (False, True):
        monkeypatch.setattr(select, "_why_not", lambda *_, can=can, **__: None if can else "too narrow")
        for asked, rough in ((False, False), (True, True), (None, can)):
            for rule in (EXACT, TopK()):
                lent.clear()
                generate(drafting(asked), ["w5"], rule, gamma=2, max_new_tokens=2)
                assert lent == [("engine", False), ("draft", rough)]
    itself = replace(tiny_pair, draft_model=Draft(tiny_pair.target, int8=None))
    assert not PairEngines(itself).draft_int8


@pytest.mark.quick("float16-*")
@pytest.mark.parametrize(
    ("dtype", "message"), [("float16", "can only be int8, on a cpu, not 'float16'"), ("", "not ''")]
)
def test_a_draft_is_int8_or_as_its_target(checkpoints: dict[str, str], dtype: str, message: str) -> None:
    with pytest.raises(SelfJudgeError, match=message):
        Pair.load(checkpoints["target"], checkpoints["draft"], device="cpu", draft_dtype=dtype)
    load = partial(Pair.load, checkpoints["target"], checkpoints["draft"], device="cpu")
    assert load(draft_dtype="int8").draft_model.int8 is load(dtype="int8").draft_model.int8 is True
    assert load().draft_model.int8 is None  # where the engine can
    assert load(dtype="float32").draft_model.int8 is load(full_precision=True).draft_model.int8 is False


def test_int8_drafts_are_for_the_cpu(checkpoints: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "choose_device", lambda name: torch.device("cuda"))
    with pytest.raises(SelfJudgeError, match="`draft_dtype` int8 needs a cpu, not cuda"):
        Pair.load(checkpoints["target"], checkpoints["draft"], draft_dtype="int8")


def test_who_decodes_launches_kernels_on_the_device_of_the_model(
    tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whatever thread: the current device is each thread's own."""

    class Elsewhere(Target):
        device = torch.device("cuda:1")  # type: ignore[assignment]

    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    with borrow_engine(Elsewhere(tiny_pair.target), kind="reference"):
        assert chosen == [torch.device("cuda:1")]


def test_batches_that_take_turns_launch_kernels_on_their_own_devices(
    tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another batch of the thread may have made its device the current one since the last step."""
    chosen: list[torch.device] = []
    batch = Batch(tiny_pair, "exact", gamma=2)
    batch.add([5, 6, 7], max_new_tokens=20, ignore_eos=True)
    batch.step()
    monkeypatch.setattr(loop, "make_current", chosen.append)
    for turn in range(1, 4):
        batch.step()
        assert chosen == [tiny_pair.target.device] * turn
    batch.close()


def test_what_batches_learn_belongs_to_the_models_and_their_engines(tiny_pair: Pair) -> None:
    def kept(kind: str, pair: Pair = tiny_pair) -> object:
        with PairEngines(pair, kind).borrow() as engines:
            return engines.kept

    assert kept("reference") is kept("reference")
    assert kept("reference") is not kept("cpu")
    assert kept("reference") is not kept("reference", replace(tiny_pair, target_model=Target(tiny_pair.target)))
