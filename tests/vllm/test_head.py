"""An EAGLE-3 head in vLLM, float32: what it proposes, and the rules beside it, against the torch loop."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from engines import GAMMA, WORKER, greedy, run
from heads import memorised

from selfjudge.decoding.admission import Request
from selfjudge.decoding.loop import decode
from selfjudge.decoding.plain import respond
from selfjudge.decoding.rules import AcceptanceRule, Exact, Judged, Margin
from selfjudge.decoding.text import generate
from selfjudge.engine.draft import BatchEngines
from selfjudge.engine.select import make_draft, make_engine
from selfjudge.judge.config import shipped_judge
from selfjudge.judge.model import Judge
from selfjudge.models.eagle import write_head
from selfjudge.models.load import as_draft
from selfjudge.models.pair import Pair
from selfjudge.models.pull import checkpoint_folder
from selfjudge.prompts.sources import BUILT_IN
from selfjudge.types import Block, Verdict

PROMPTS = [text for _, text in BUILT_IN][:6]
TOKENS = 32
QUALITY = 0.5


class Models(NamedTuple):
    """Folders of a target and of its judge."""

    target: str
    judge: str


@pytest.fixture(scope="module", params=["small", pytest.param("smollm2-135m", marks=pytest.mark.slow)])
def models(request: pytest.FixtureRequest, small: Path) -> Models:
    if request.param == "small":
        return Models(str(small / "target"), str(small / "judge"))
    return Models(str(checkpoint_folder(request.param)), str(shipped_judge(request.param)))


@pytest.fixture(scope="module")
def target(models: Models) -> Pair:
    """The target alone."""
    return Pair.load(models.target, device="cpu", dtype="float32", needs_draft=False)


@pytest.fixture(scope="module")
def prompts(target: Pair) -> list[list[int]]:
    return [target.encode(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def plain(target: Pair, prompts: list[list[int]]) -> list[list[int]]:
    """What the target says."""
    answers = respond(target.target, prompts, eos_ids=target.eos_ids, max_new_tokens=TOKENS)
    return [list(tokens) for _, tokens, _ in sorted(answers)]


@pytest.fixture(scope="module")
def head(
    models: Models,
    target: Pair,
    prompts: list[list[int]],
    plain: list[list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A head in the format of speculators."""
    path = tmp_path_factory.mktemp("head")
    write_head(memorised(target, prompts, plain), path, steps=GAMMA, verifier=models.target)
    return path


@pytest.fixture(scope="module")
def head_pair(models: Models, head: Path) -> Pair:
    return Pair.load(models.target, str(head), device="cpu", dtype="float32")


@dataclass(frozen=True)
class Recorded(Exact):
    """The rule `exact`, which keeps the blocks that it is asked about."""

    blocks: list[list[int]] = field(default_factory=list)

    def __call__(self, block: Block) -> Verdict:
        if block.draft_tokens.shape[1]:
            self.blocks.append(block.draft_tokens[0].tolist())
        return super().__call__(block)


def proposed(pair: Pair, prompt: list[int]) -> list[list[int]]:
    """The blocks of drafts of an answer in our loop."""
    assert pair.draft is not None
    rule = Recorded()
    target = make_engine(pair.target, features=as_draft(pair.draft).features, kind="reference")
    draft = make_draft(pair.draft, pair.target, kind="reference")
    for _ in decode(BatchEngines(target, draft), [Request(prompt, TOKENS)], rule, gamma=GAMMA, eos_ids=pair.eos_ids):
        pass
    return rule.blocks


def test_vllm_serves_the_folder_of_a_head_and_proposes_what_our_loop_proposes(
    head: Path, head_pair: Pair, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    """Layers that are read, norms, maps, positions: each block of every answer, token for token."""
    runs = [{"prompts": [prompt], "params": greedy(TOKENS)} for prompt in prompts[:3]]
    answers = run({"model": str(head), "max_model_len": 256}, runs)
    assert [answer["tokens"][0] for answer in answers] == plain[:3]
    varied = 0
    for prompt, answer in zip(prompts, answers, strict=False):
        ours, theirs = proposed(head_pair, prompt), [block for (block,) in answer["drafts"]]
        assert ours == theirs[: len(ours)]
        assert len(theirs) <= len(ours) + 1  # vLLM proposes once more when all is said
        assert (TOKENS - 1) / len(ours) > 1.4  # tokens a pass: right where it has seen the states
        varied += sum(len(set(block)) > 1 for block in ours)
    assert varied > 10  # the steps that the head feeds itself matter


def test_rules_and_judge_beside_a_head(
    models: Models, head: Path, head_pair: Pair, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    judge = Judge.from_pretrained(models.judge)
    # our loop knows a pulled checkpoint by its files, the judge knows the model that they were made from
    judge.config = replace(judge.config, target_sha256=head_pair.target_sha256)
    wishes: list[dict[str, Any]] = [
        {}, {"rule": "margin:2"}, {"rule": "margin", "price": 0.5}, {"theta": 0.2}, {"rule": "margin:6"}, {"off": True},
    ]  # fmt: skip
    settings = {"judge": models.judge, "quality": QUALITY, "strict_start": 0, "strict_code": False}
    drafts = {"method": "eagle3", "model": str(head), "num_speculative_tokens": GAMMA}
    mixed, lossless, judged = run(
        {
            "model": models.target, "max_model_len": 256, "worker_cls": WORKER,
            "additional_config": {"selfjudge": settings}, "speculative_config": drafts,
        },
        [
            {"prompts": prompts, "params": [greedy(TOKENS, **wish) for wish in wishes]},
            {"prompts": prompts, "params": greedy(TOKENS, off=True)},
            {"prompts": prompts, "params": greedy(TOKENS)},
        ],
    )  # fmt: skip
    assert lossless["tokens"] == plain
    rules: list[AcceptanceRule] = [
        Judged(judge, judge.quality(QUALITY)), Margin(2.0, guard=True), Margin(price=0.5), Judged(judge, 0.2),
        Margin(6.0, guard=True), Exact(),
    ]  # fmt: skip
    ours = [
        generate(head_pair, text, rule, gamma=GAMMA, max_new_tokens=TOKENS)
        for text, rule in zip(PROMPTS, rules, strict=True)
    ]
    same = [list(answer.tokens) == theirs for answer, theirs in zip(ours, mixed["tokens"], strict=True)]
    assert same[-1]
    assert sum(same) >= len(same) - 1  # one may part where arithmetic decides
    exact = generate(head_pair, PROMPTS, Exact(), gamma=GAMMA, max_new_tokens=TOKENS)
    (counts,) = lossless["counts"]
    cycles = sum(answer.cycles for answer in exact)
    assert abs(counts["tokens"] / counts["cycles"] - sum(len(a.tokens) - 1 for a in exact) / cycles) < 0.1
    (counts,) = judged["counts"]
    assert counts["tokens"] > counts["aligned_tokens"]
