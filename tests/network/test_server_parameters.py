"""Parameters of requests over HTTP, by OpenAI's own client: log-probabilities, several answers and prompts, penalties, refusals."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from typing import Any

import openai
import pytest
import torch

from selfjudge.decoding.adjust import LeastTokens, LogProbabilities, Penalties, TokenBias
from selfjudge.decoding.edits import LogitsEdit
from selfjudge.decoding.rules import SpeculativeSampling
from selfjudge.decoding.sampling import Sampling
from selfjudge.decoding.text import Batch, generate
from selfjudge.models.pair import Pair
from selfjudge.types import Generation
from servers import Server

OFF = {"selfjudge": {"off": True}}


@pytest.fixture(scope="module")
def pair(endless: list[str]) -> Pair:
    return Pair.load(endless[1], endless[3], device="cpu")


@pytest.fixture(scope="module")
def server(start: Callable[..., Server], endless: list[str]) -> Server:
    return start(*endless, "--max-batch", "4", "--max-queue", "64", "--max-tokens", "2000")


def chat(server: Server, prompt: str = "w1 w2", **options: Any) -> Any:
    body = {"max_tokens": 30, "temperature": 0, "extra_body": OFF, **options}
    return server.client().chat.completions.create(model="tiny", messages=[{"role": "user", "content": prompt}], **body)


def complete(server: Server, prompt: Any = "w1 w2", **options: Any) -> Any:
    body = {"max_tokens": 30, "temperature": 0, "extra_body": OFF, **options}
    return server.client().completions.create(model="tiny", prompt=prompt, **body)


def decoded(pair: Pair, prompt: str, *edits: LogitsEdit, raw: bool = False, **options: Any) -> Generation:
    """What the loop gives without a server; greedy and lossless."""
    batch = Batch(pair, "exact", gamma=3)
    answer = batch.add(pair.encode(prompt, raw=raw), max_new_tokens=30, edits=edits, **options)
    while len(batch):
        batch.step()
    batch.close()
    return answer.generation()


def test_logprobs_of_chats_whole_and_streamed(server: Server, pair: Pair) -> None:
    """Raw ones of the target, below a penalty, also of drafts that a relaxed rule accepted."""
    log = LogProbabilities(3)
    made = decoded(pair, "w1 w2", log, Penalties(presence=1.0))
    answer = chat(server, logprobs=True, top_logprobs=3, presence_penalty=1.0)
    content = answer.choices[0].logprobs.content
    assert answer.choices[0].message.content == made.text
    assert [entry.token for entry in content] == pair.tokenizer.convert_ids_to_tokens(list(made.tokens))
    for entry, noted in zip(content, log.noted, strict=True):
        assert entry.logprob == pytest.approx(noted.logprob, abs=1e-4)
        assert bytes(entry.bytes).decode() == entry.token
        assert [best.logprob for best in entry.top_logprobs] == pytest.approx([p for _, p in noted.top], abs=1e-4)
    stream = chat(server, logprobs=True, top_logprobs=3, presence_penalty=1.0, stream=True)
    streamed = [entry for chunk in stream if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert streamed == content
    judged = chat(server, logprobs=True, extra_body={"selfjudge": {"rule": "judged", "theta": 0.0, "gamma": 3}})
    assert judged.selfjudge["judged_share"] > 0
    tokens = [entry.token for entry in judged.choices[0].logprobs.content]
    ids = [*pair.encode("w1 w2"), *pair.tokenizer.convert_tokens_to_ids(tokens)]
    with torch.inference_mode():
        own = pair.target(torch.tensor([ids])).logits[0, -len(tokens) - 1 : -1].log_softmax(-1)
    wanted = own.gather(-1, torch.tensor(ids[-len(tokens) :])[:, None])[:, 0].tolist()
    assert [entry.logprob for entry in judged.choices[0].logprobs.content] == pytest.approx(wanted, abs=1e-4)
    assert judged.choices[0].logprobs.content[0].top_logprobs == []
    assert chat(server).choices[0].logprobs is None


def test_logprobs_of_completions(server: Server, pair: Pair) -> None:
    log = LogProbabilities(2)
    made = decoded(pair, "w5 w6", log, raw=True)
    (choice,) = complete(server, "w5 w6", logprobs=2).choices
    tokens = pair.tokenizer.convert_ids_to_tokens(list(made.tokens))
    assert choice.text == made.text
    assert choice.logprobs.tokens == tokens
    assert choice.logprobs.token_logprobs == pytest.approx([entry.logprob for entry in log.noted], abs=1e-4)
    assert [len(best) for best in choice.logprobs.top_logprobs] == [2 + (e.token not in dict(e.top)) for e in log.noted]
    assert choice.logprobs.text_offset == [sum(map(len, tokens[:i])) for i in range(len(tokens))]
    chunks = [
        c.choices[0].logprobs for c in complete(server, "w5 w6", logprobs=2, stream=True) if c.choices[0].logprobs
    ]
    assert [t for chunk in chunks for t in chunk.tokens] == tokens
    assert [o for chunk in chunks for o in chunk.text_offset] == choice.logprobs.text_offset
    assert complete(server, "w5 w6", logprobs=0).choices[0].logprobs.top_logprobs[0].keys() == {tokens[0]}


def test_several_answers_have_seeds_of_their_own_and_greedy_ones_are_decoded_once(server: Server, pair: Pair) -> None:
    options = {"temperature": 0.9, "seed": 7, "n": 3}
    answer = chat(server, **options)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    rule = SpeculativeSampling(Sampling(0.9))
    assert texts[0] == generate(pair, ["w1 w2"], rule, gamma=3, max_new_tokens=30, seed=7)[0].text
    assert texts == [choice.message.content for choice in chat(server, **options).choices]
    assert answer.usage.completion_tokens == 90
    assert answer.usage.prompt_tokens == len(pair.encode("w1 w2"))
    assert all(choice.selfjudge["rule"] == "sampling" for choice in answer.choices)
    streamed = ["", "", ""]
    finishes = []
    for chunk in chat(server, **options, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        finishes += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
    assert streamed == texts
    assert finishes == ["length"] * 3

    server.wait_until_idle()
    before = server.metric("generations_total")
    greedy = chat(server, n=5)
    assert {choice.message.content for choice in greedy.choices} == {decoded(pair, "w1 w2").text}
    assert [choice.index for choice in greedy.choices] == list(range(5))
    assert greedy.usage.completion_tokens == 150
    server.wait_until_idle()
    assert server.metric("generations_total") == before + 1
    chunks = list(chat(server, n=2, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens == 60
    for index in (0, 1):
        pieces = [c.choices[0].delta.content or "" for c in chunks[:-1] if c.choices[0].index == index]
        assert "".join(pieces) == greedy.choices[0].message.content


def test_several_prompts_and_echo(server: Server, pair: Pair) -> None:
    prompts = ["w5 w6", "w9", "w5 w6"]
    made = [decoded(pair, prompt, raw=True).text for prompt in prompts]
    answer = complete(server, prompts)
    assert [choice.text for choice in answer.choices] == made
    assert answer.usage.prompt_tokens == 5
    ids = [pair.encode(prompt, raw=True) for prompt in prompts]
    assert [choice.text for choice in complete(server, ids).choices] == made
    for stream in (False, True):
        found = [""] * 6
        answer = complete(server, prompts, echo=True, n=2, stream=stream)
        for choice in (c.choices[0] for c in answer) if stream else answer.choices:
            found[choice.index] += choice.text
        assert found == [prompt + text for prompt, text in zip(prompts, made, strict=True) for _ in range(2)]
    assert complete(server, ids[0], echo=True).choices[0].text == prompts[0] + made[0]
    sampled = complete(server, ["w5", "w6"], n=2, temperature=1, seed=3)
    assert len({choice.text for choice in sampled.choices}) == 4


def test_logprobs_of_prompts_are_the_targets_own(server: Server, pair: Pair) -> None:
    """Also of a prompt that is read in several passes, and whose beginning is in the prefix cache."""
    ids = [5 + 7 * i % 40 for i in range(600)]
    (choice,) = complete(server, ids, echo=True, logprobs=2, max_tokens=3).choices
    (again,) = complete(server, ids, echo=True, logprobs=2, max_tokens=3).choices
    answer = pair.tokenizer.convert_tokens_to_ids(choice.logprobs.tokens[600:])
    assert choice.logprobs.tokens == pair.tokenizer.convert_ids_to_tokens([*ids, *answer])
    with torch.inference_mode():
        own = pair.target(torch.tensor([[*ids, *answer]])).logits[0].log_softmax(-1)
    wanted = own[:-1].gather(-1, torch.tensor([*ids, *answer])[1:, None])[:, 0].tolist()
    for logprobs in (choice.logprobs, again.logprobs):
        assert logprobs.token_logprobs[0] is None
        assert logprobs.top_logprobs[0] is None
        assert logprobs.token_logprobs[1:] == pytest.approx(wanted, abs=1e-3)
        assert [max(top.values()) for top in logprobs.top_logprobs[1:]] == pytest.approx(
            own[:-1].amax(-1).tolist(), abs=1e-3
        )
    (single,) = complete(server, [5], echo=True, logprobs=0, max_tokens=1).choices
    assert len(single.logprobs.tokens) == 2
    assert single.logprobs.text_offset == [0, len(single.logprobs.tokens[0])]


def test_the_evaluation_harness_asks_this_server(server: Server, pair: Pair, endless: list[str]) -> None:
    """lm-evaluation-harness by its own client: likelihoods, whether they are greedy, and generated text."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    harness = LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions", model="tiny", tokenizer=endless[1], tokenizer_backend="huggingface",
        tokenized_requests=True, batch_size=2, max_retries=1,
    )  # fmt: skip
    context, greedy = "w5 w6 w7", decoded(pair, "w5 w6 w7", raw=True).tokens[:4]
    endings = [" w7 w8", f" {pair.tokenizer.decode(greedy)}"]
    asked = [Instance("loglikelihood", {}, (context, ending), i) for i, ending in enumerate(endings)]
    found = harness.loglikelihood(asked, disable_tqdm=True)
    for ending, (value, _) in zip(endings, found, strict=True):
        ids = pair.encode(context + ending, raw=True)
        with torch.inference_mode():
            own = pair.target(torch.tensor([ids])).logits[0].log_softmax(-1)
        begin = len(pair.encode(context, raw=True))
        assert value == pytest.approx(sum(float(own[i - 1, ids[i]]) for i in range(begin, len(ids))), abs=1e-3)
    assert [is_greedy for _, is_greedy in found] == [False, True]
    asked = [Instance("generate_until", {}, (context, {"until": ["w9"], "max_gen_toks": 12, "do_sample": False}), 0)]
    (text,) = harness.generate_until(asked, disable_tqdm=True)
    end = ["w9", pair.tokenizer.eos_token]
    assert text == complete(server, context, max_tokens=12, stop=end, extra_body=None).choices[0].text != ""


def test_penalties_biases_and_ends(server: Server, pair: Pair) -> None:
    plain = decoded(pair, "w1 w2")
    prompt = pair.encode("w1 w2")
    changed = chat(server, frequency_penalty=1.2, presence_penalty=0.3, extra_body={**OFF, "repetition_penalty": 1.3})
    assert (
        changed.choices[0].message.content
        == decoded(pair, "w1 w2", Penalties(0.3, 1.2, 1.3, prompt)).text
        != plain.text
    )
    token = plain.tokens[3]
    biased = chat(server, logit_bias={str(token): -100})
    assert biased.choices[0].message.content == decoded(pair, "w1 w2", TokenBias({token: -100.0})).text
    assert pair.tokenizer.decode([token]) not in biased.choices[0].message.content.split()
    alone = chat(server, logit_bias={str(token): 100}, max_tokens=5)
    assert alone.choices[0].message.content == " ".join([str(pair.tokenizer.decode([token]))] * 5)
    stopped = chat(server, extra_body={**OFF, "stop_token_ids": [token]})
    first = plain.tokens.index(token)
    assert stopped.choices[0].message.content == pair.tokenizer.decode(plain.tokens[:first])
    assert (stopped.choices[0].finish_reason, stopped.usage.completion_tokens) == ("stop", first + 1)
    late = chat(server, extra_body={**OFF, "stop_token_ids": [token], "min_tokens": 10})
    expected = decoded(pair, "w1 w2", LeastTokens(10, [0, token]), stop_ids=[token])
    assert late.choices[0].message.content == expected.text
    assert late.usage.completion_tokens == len(expected.tokens) > 10
    ended = plain.tokens[first]
    eos = pair.tokenizer.eos_token_id
    bias = {str(eos): 100}
    assert chat(server, logit_bias=bias).usage.completion_tokens == 1
    assert chat(server, logit_bias=bias, extra_body={**OFF, "ignore_eos": True}).usage.completion_tokens == 30
    assert ended == token


def test_filters_without_a_temperature_sample_at_one(server: Server) -> None:
    options = {"temperature": openai.NOT_GIVEN, "seed": 5}
    for filters in ({"top_p": 0.9}, {"extra_body": {**OFF, "top_k": 5}}, {"extra_body": {**OFF, "min_p": 0.1}}):
        answer = chat(server, **{**options, **filters})
        assert answer.selfjudge["rule"] == "sampling"
        assert (
            answer.choices[0].message.content
            == chat(server, **{**options, **filters, "temperature": 1}).choices[0].message.content
        )
    assert chat(server, **options, top_p=1).selfjudge["rule"] == "exact"  # filters nothing
    cold = chat(server, temperature=1, seed=5, extra_body={**OFF, "min_p": 1.0})
    assert cold.choices[0].message.content == chat(server).choices[0].message.content  # the best token alone is left


def test_a_rule_that_cannot_honour_a_penalty_says_so(server: Server) -> None:
    named = {"selfjudge": {"rule": "judged"}}
    with pytest.raises(openai.BadRequestError, match="judged passes over logits") as refused:
        chat(server, presence_penalty=1, extra_body=named)
    assert refused.value.param == "selfjudge"
    assert chat(server, extra_body={}).selfjudge["rule"] == "judged"  # the server's own
    exactly = chat(server, presence_penalty=1, extra_body={})
    assert exactly.selfjudge["rule"] == "exact"
    assert exactly.choices[0].message.content == chat(server, presence_penalty=1).choices[0].message.content
    relaxed = chat(server, logit_bias={"9": -100}, extra_body={"selfjudge": {"rule": "topk:3"}})
    assert relaxed.selfjudge["rule"] == "topk:3"


MIXED: list[dict[str, Any]] = [
    {}, {"frequency_penalty": 1.0}, {"logit_bias": {"9": 5.0, "11": -100}}, {"logprobs": True, "top_logprobs": 2},
    {"temperature": 0.8, "seed": 3}, {"temperature": 0.8, "seed": 3, "presence_penalty": 1.5, "logprobs": True},
    {"temperature": 1.2, "seed": 4, "n": 2}, {"n": 2}, {"extra_body": {"selfjudge": {"rule": "topk:3"}}, "logprobs": True},
    {"extra_body": {"selfjudge": {"rule": "judged"}}}, {"extra_body": {**OFF, "min_tokens": 8, "stop_token_ids": [9, 10, 11]}},
]  # fmt: skip


@pytest.mark.slow
def test_requests_with_and_without_parameters_side_by_side(server: Server) -> None:
    """Each says what it says alone, whatever is in its batch."""
    alone = [said(chat(server, f"w{i} w2", **options)) for i, options in enumerate(MIXED)]
    found: dict[int, Any] = {}

    def ask(i: int) -> None:
        found[i] = said(chat(server, f"w{i} w2", **MIXED[i]))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(MIXED))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, (texts, logprobs) in enumerate(alone):
        assert found[i][0] == texts
        assert found[i][1] == pytest.approx(logprobs, abs=1e-4)


def said(answer: Any) -> tuple[list[str], list[float]]:
    """The texts of the choices, and the log-probabilities of their tokens."""
    told = [choice.logprobs.content for choice in answer.choices if choice.logprobs]
    return [choice.message.content for choice in answer.choices], [
        entry.logprob for content in told for entry in content
    ]


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("n", {"n": 0}), ("n", {"n": 1000}), ("n", {"n": "2"}), ("n", {"n": 100, "temperature": 1}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}), ("top_logprobs", {"top_logprobs": 2}), ("logprobs", {"logprobs": 5}),
    ("presence_penalty", {"presence_penalty": -2.1}), ("frequency_penalty", {"frequency_penalty": "1"}),
    ("repetition_penalty", {"repetition_penalty": 0}), ("min_p", {"min_p": 1.5}), ("min_p", {"min_p": -0.1}),
    ("logit_bias", {"logit_bias": {"w1": 1}}), ("logit_bias", {"logit_bias": {"61": 1}}), ("logit_bias", {"logit_bias": {"-1": 1}}),
    ("logit_bias", {"logit_bias": {"5": 101}}), ("logit_bias", {"logit_bias": {"5": "1"}}), ("logit_bias", {"logit_bias": [1]}),
    ("logit_bias", {"logit_bias": {str(i): 1 for i in range(1025)}}), ("logit_bias", {"logit_bias": {"²": 1}}),
    ("stop_token_ids", {"stop_token_ids": [61]}), ("stop_token_ids.0", {"stop_token_ids": ["5"]}),
    ("stop_token_ids", {"stop_token_ids": [5] * 1025}), ("ignore_eos", {"ignore_eos": 1}),
    ("min_tokens", {"min_tokens": -1}), ("min_tokens", {"min_tokens": 4}), ("min_tokens", {"min_tokens": 2, "stop": "w1"}),
    ("min_tokens", {"max_tokens": None, "min_tokens": 2001}), ("min_tokens", {"prompt": "w1", "max_tokens": None, "min_tokens": 17}),
    ("best_of", {"best_of": 2}), ("suffix", {"suffix": "x"}), ("max_tokens", {"max_completion_tokens": 4}), ("max_tokens", {"max_tokens": 2001}),
    ("stream_options", {"stream_options": {"include_usage": True}}), ("selfjudge", {"selfjudge": {"rule": "magic"}}),
    ("selfjudge", {"selfjudge": {"rule": "topk:2"}, "temperature": 1}), ("temperature", {"temperature": 1e-9}),
    ("selfjudge.tokens", {"selfjudge": {"tokens": True}}), ("audio", {"audio": {}}), ("modalities", {"modalities": ["audio"]}),
    ("no_such_field", {"no_such_field": 1}), ("model", {"model": "gpt-9"}),
    ("messages.0.content.0", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
    ("messages", {"messages": [{"role": "user", "content": " "}]}),
    ("prompt", {"prompt": ["w1", ""]}), ("prompt", {"prompt": [[61]]}), ("prompt", {"prompt": " "}), ("prompt", {"prompt": ["w1"] * 129}),
    ("n", {"prompt": ["w1"] * 65, "n": 2}), ("echo", {"prompt": "w1", "echo": True, "logprobs": 1, "stream": True}), ("logprobs", {"prompt": "w1", "logprobs": 21}),
    ("prompt.1.0", {"prompt": [[5], ["w1"]]}),
]  # fmt: skip


def test_every_refusal_names_its_parameter(server: Server) -> None:
    for param, body in REFUSED:
        path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        message = {} if "prompt" in body else {"messages": [{"role": "user", "content": "w1"}]}
        status, _, answer = server.send("POST", path, {**message, "max_tokens": 3, **body})
        assert status == (404 if param == "model" else 400), (body, answer)
        assert answer["error"]["param"] == param, (body, answer)
        assert param.split(".")[0] in answer["error"]["message"] or param in ("selfjudge", "messages", "prompt", "n")
    server.wait_until_idle()


def test_parameters_that_leave_nothing_to_choose_harm_nobody(server: Server) -> None:
    """Every token forbidden: an answer of some kind, and the server goes on."""
    for temperature in (0, 1):
        banned = chat(server, logit_bias={str(i): -100 for i in range(61)}, temperature=temperature, logprobs=True)
        assert all(math.isfinite(entry.logprob) for entry in banned.choices[0].logprobs.content)
    json.dumps(banned.model_dump(), allow_nan=False)
    assert chat(server).choices[0].message.content
    assert server.metric("generations_total", finish="error") == 0
