"""Arguments of the Python API of a wrong type: one line that says what is expected, and nobody else is harmed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from selfjudge import AsyncBatch, Judge, Margin, Pair, RuleRequest, Sampling, SelfJudgeError, generate, stream
from selfjudge.decoding.rules import Exact
from selfjudge.decoding.text import Batch, share_rules
from selfjudge.distill.pipeline import distill_draft
from selfjudge.evaluate import EvalConfig, evaluate_rules
from selfjudge.evaluate.pipeline import reproduce_paper
from selfjudge.integrations.server.rules import Rules
from selfjudge.label import LabelConfig, label_pair
from selfjudge.train import train_judge
from selfjudge.tune import tune_pair

DECODING = {
    "rule": [5, ["exact"], Exact], "sampling": [0.7, "0.7", {"temperature": 1}], "judge": [5, True], "theta": [[1], True], "quality": ["0.9"],
    "strict_start": [1.5, "16"], "strict_code": ["yes", 1], "gamma": ["3", True, 2.0], "temperature": [0.7],
}  # fmt: skip
REQUEST = {
    "max_new_tokens": ["4", True, 4.0, None],
    "seed": ["x", True],
    "schema": ["{}", True, []],
    "grammar": [5, ["a"]],
}
PROMPT = {"prompt": [5, [5, 6], b"w1", Path("x"), [{"role": "user"}], [{"content": "w1"}], [{"role": "user", "content": None}], [["w1"]]]}  # fmt: skip


def cases(*kinds: dict[str, list[Any]]) -> Any:
    every = [(name, value) for kind in kinds for name, values in kind.items() for value in values]
    return pytest.mark.parametrize(("name", "value"), every, ids=lambda value: str(value)[:20])


def says(name: str) -> Any:
    return pytest.raises(SelfJudgeError, match=rf"\A[^\n]*(`{name}s?`|option '{name}')[^\n]*\Z")


@cases(
    DECODING,
    REQUEST,
    PROMPT,
    {"prompt": [None, {"role": "user", "content": "x"}], "batch": ["8", None, True], "seeds": [5, [], ["x"], [1, 2]]},
)
def test_generate(tiny_pair: Pair, name: str, value: Any) -> None:
    with says(name):
        generate(
            tiny_pair, **{"prompts": "w1 w2", "max_new_tokens": 3, ("prompts" if name == "prompt" else name): value}
        )


@cases(DECODING, REQUEST, PROMPT)
def test_stream(tiny_pair: Pair, name: str, value: Any) -> None:
    with says(name):
        list(stream(tiny_pair, **{"prompt": "w1 w2", "max_new_tokens": 3, name: value}))


@cases(
    DECODING,
    {
        "rows": ["8", 0, True, 2.0],
        "length": [None],
        "prefix_cache": [1.5, 0, 0.1, True, ""],
        "shared": [5],
        "engine": ["gpu", 5],
    },
)
def test_batches(tiny_pair: Pair, name: str, value: Any) -> None:
    with says(name):
        Batch(tiny_pair, **{name: value})
    if name != "shared":
        with says(name):
            AsyncBatch(tiny_pair, **{name: value})


@cases(
    {"rule": [5, Exact], "gamma": ["3", True], "trace": ["x"], "edits": [None, 5, ("x",)], "max_new_tokens": ["4"], "seed": [None]},
    {"prompt": ["w1", [1.5], ["5"], None, 5, torch.tensor([[5, 6]])], "stop_ids": [None, ["a"]], "stop": ["w1", None]},
)  # fmt: skip
def test_answers_of_a_batch(tiny_pair: Pair, name: str, value: Any) -> None:
    """Others go on: nothing of the refused one has entered."""
    batch = Batch(tiny_pair, rows=2, length=90, shared=share_rules(tiny_pair))
    other = batch.add([5, 6], max_new_tokens=3)
    with says(name):
        batch.add(**{"prompt": [5, 6], name: value})
    while len(batch):
        batch.step()
    assert (
        tuple(other.tokens)
        == generate(tiny_pair, tiny_pair.tokenizer.decode([5, 6]), max_new_tokens=3, raw=True).tokens
    )


def test_an_answer_of_a_batch_may_name_its_rule(tiny_pair: Pair) -> None:
    batch = Batch(tiny_pair, rows=2, length=90, shared=share_rules(tiny_pair))
    answers = [batch.add([5, 6], max_new_tokens=20, rule="margin:9,strict_start=0", gamma=3), batch.add([5, 6], max_new_tokens=20, rule="exact")]  # fmt: skip
    while len(batch):
        batch.step()
    assert "judge" in answers[0].origins
    assert "judge" not in answers[1].origins


def test_a_relaxed_rule_without_drafts_is_said_to_be_plain_decoding(tiny_pair: Pair) -> None:
    """Not refused: γ = auto may choose 0, and the answer is asked for again with the γ that it names."""
    plain = generate(tiny_pair, "w1", gamma=0, max_new_tokens=9)
    for rule in ("margin:9", Margin(9.0)):
        with pytest.warns(UserWarning, match="plain decoding: there are no drafts for rule 'margin'"):
            assert generate(tiny_pair, "w1", rule, gamma=0, max_new_tokens=9).tokens == plain.tokens
    batch = Batch(tiny_pair, gamma=2, shared=share_rules(tiny_pair))
    with pytest.warns(UserWarning, match="no drafts for rule 'margin'"):
        batch.add([5, 6], rule="margin:9", gamma=0)
    batch.close()


@pytest.mark.parametrize("own", ["exact", "margin:9"])
def test_a_request_may_ask_for_plain_decoding_and_a_server_not_beside_a_rule(tiny_pair: Pair, own: str) -> None:
    """An answer of a relaxed rule may name γ = 0, and be asked for again."""
    rules = Rules(tiny_pair, None, RuleRequest(own))
    for sampling in (None, Sampling(0.7)) if own == "exact" else (None,):
        choice = rules.choose(RuleRequest(gamma=0), sampling)
        assert (choice.rule.lossless, choice.gamma, choice.rule.sampling) == (True, 0, sampling)
    for asked in (RuleRequest("margin:1", gamma=0), RuleRequest("topk", gamma=0)):
        choice = rules.choose(asked)
        assert (choice.rule.lossless, choice.gamma) == (True, 0)
    with pytest.raises(SelfJudgeError, match="unknown rule"):
        rules.choose(RuleRequest("magic", gamma=0))
    with pytest.raises(SelfJudgeError, match="needs drafts"):
        Rules(tiny_pair, None, RuleRequest("margin:9", gamma=0)).choose()


@pytest.fixture(scope="module")
def alone(tiny_pair: Pair) -> tuple[int, ...]:
    return generate(tiny_pair, "w1 w2", gamma=2, max_new_tokens=20).tokens


@cases(DECODING, PROMPT)
def test_a_task_that_asks_for_what_is_none_harms_no_other(
    tiny_pair: Pair, alone: tuple[int, ...], name: str, value: Any
) -> None:
    async def test() -> None:
        async with AsyncBatch(tiny_pair, gamma=2, length=80) as batch:
            other = asyncio.create_task(batch.generate("w1 w2", max_new_tokens=20))
            with says(name):
                await batch.generate(**{"prompt": "w1 w2", "max_new_tokens": 3, name: value})
            assert (await other).tokens == alone

    asyncio.run(test())


def test_a_config_that_is_a_dict(tiny_pair: Pair, tmp_path: Path) -> None:
    calls: list[Callable[[Any], object]] = [
        lambda config: label_pair(tiny_pair, tmp_path / "out", config),
        lambda config: train_judge([tmp_path], tmp_path / "out", config),
        lambda config: evaluate_rules(tiny_pair, tmp_path / "out", config),
        lambda config: reproduce_paper(tiny_pair, tmp_path / "out", config),
        lambda config: tune_pair(tiny_pair, tmp_path / "out", config),
        lambda config: distill_draft(tiny_pair, tmp_path / "out", config),
    ]
    for call in calls:
        with pytest.raises(SelfJudgeError, match=r"`config` must be a \w+Config, not {'seed': 1}"):
            call({"seed": 1})


@pytest.mark.parametrize("raw", [False, True])
def test_half_a_character(tiny_pair: Pair, raw: bool) -> None:
    with pytest.raises(SelfJudgeError, match="the prompt holds half a character"):
        generate(tiny_pair, "w1 \udcff", raw=raw)


def test_lists_and_paths_as_text_are_taken_where_tuples_and_paths_are(tiny_pair: Pair, tmp_path: Path) -> None:
    asked = tmp_path / "asked.jsonl"
    asked.write_text('{"prompt": "w5 w6"}\n')
    config = EvalConfig(tasks=[f"file:{asked}"], rules=["exact"], gammas=[2], max_new_tokens=4)  # type: ignore[arg-type]
    (summary,) = evaluate_rules(tiny_pair, str(tmp_path / "eval"), config)
    assert summary["n"] == 1
    out = str(tmp_path / "labels")
    label_pair(tiny_pair, out, LabelConfig(prompts=[str(asked)], tau=-50.0, max_new_tokens=24))  # type: ignore[arg-type]
    for folders in (str(tmp_path / "none"), [str(tmp_path / "none")]):
        with pytest.raises(SelfJudgeError, match="none has no manifest"):
            train_judge(folders, str(tmp_path / "judge"))
    for option in ({"gammas": 2}, {"gammas": ("2",)}, {"tasks": "gsm8k"}, {"limit": 1.5}, {"allow_unsafe": "yes"}):
        with says(next(iter(option))):
            EvalConfig(**{"tasks": ("arithmetic",), **option}).check()  # type: ignore[arg-type]


def test_pairs_judges_and_samplings(checkpoints: dict[str, str]) -> None:
    target = checkpoints["target"]
    for wrong in (None, 5, "smollm2-135m"):
        for make in (Batch, AsyncBatch, lambda pair: generate(pair, "w1")):
            with says("pair"):
                make(wrong)
    for options, name in (
        ({"target": None}, "target"), ({"target": Path(target)}, "target"), ({"target": target, "draft": 5}, "draft"), ({"target": target, "gpu_memory": 0.5}, "gpu_memory"),
    ):  # fmt: skip
        with says(name):
            Pair.load(**options)  # type: ignore[arg-type]
    with says("judge"):
        Judge.from_pretrained(None)  # type: ignore[arg-type]
    for option in ({"temperature": None}, {"top_k": 1.5}, {"top_p": "a"}):
        with says(next(iter(option))):
            Sampling(**option)  # type: ignore[arg-type]
