"""Guards of relaxed rules: where alignment alone decides, whatever the rule, the engine and the company of a row."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import pytest
import torch
from hypothesis import given, strategies as st

from conftest import REFERENCE, VOCAB, tiny_model
from fake_judge import constant_judge
from proposals import prompts_of, requests_of
from selfjudge import Pair, generate
from selfjudge.decoding import guards as g
from selfjudge.decoding.admission import AdmissionQueue, Request
from selfjudge.decoding.guards import ALWAYS, EXACT_STATES, LINE, GuardedBlock, Guards, StructureTable
from selfjudge.decoding.loop import decode
from selfjudge.decoding.rule_parser import RuleRequest, resolve_rule, rule_text
from selfjudge.decoding.rules import EXACT, AcceptanceRule, Judged, JudgeOnly, Margin, TopK
from selfjudge.decoding.rules_baselines import RegretBudget
from selfjudge.engine.draft import BatchEngines
from selfjudge.engine.select import make_draft, make_engine
from selfjudge.errors import SelfJudgeError
from selfjudge.integrations.vllm.plan import DraftRows, RequestGuards
from selfjudge.types import Block

PIECES = ["a", " b", "\n", "```", "`", "``", "```py\n", "\n\n", "{", '"k": 1', "}", "|", " | ", "<t>", "[", "]", "{\n",
          "- ", "``x", "\n```\n", "[1, 2]", "[x]", "\n{", " ", "7", "~~~\n", "\n~~", "~", '{"a"', "---|"]  # fmt: skip
TEXTS = ["w" if i % 8 else PIECES[i // 8 % len(PIECES)] for i in range(VOCAB)]
"""Texts of the tiny models' tokens: some have to do with structure."""
TABLE = StructureTable(TEXTS)


def state_of(written: str, state: int = LINE) -> int:
    """The state after a text, one character at a time."""
    kinds = {character: kind for kind, members in enumerate(g._CLASSES) for character in members}
    return reduce(lambda before, character: g._step(before, kinds.get(character, len(g._CLASSES))), written, state)


def exact_part(written: str) -> str:
    """The characters before which a text is in an exact state."""
    return "".join(c for i, c in enumerate(written) if state_of(written[:i]) in EXACT_STATES)


@pytest.mark.parametrize(
    ("answer", "exact"),
    [
        ("Use `x`, then ``y``.\nDone", ""),
        ("So:\n```python\nx = 1\n```\nThen `y`", "python\nx = 1\n```\n"),
        ("- ```\n  a ``` b\n  ```\nb", "\n  a ``` b\n  ```\n"),  # a fence closes at the start of a line
        ("Run ```ls```.\n```py\nx\n```\nb", "ls```.\n```py\nx\n```\n"),  # within a fence no other one opens
        ("| a | b |\n|---|\nend", " a | b |\n---|\n"),
        ('{"a": 1}\nSo', '"a": 1}\nS'),  # what follows JSON is known to be prose after its first character
        ('{\n  "a": [\n    -1\n  ]\n}\n\nSo', '\n  "a": [\n    -1\n  ]\n}\n\n'),
        ("[answer] 3 [/answer]\n[see](x)", ""),
        ("[1, 2]\nSo", ", 2]\nS"),
        ("<tool_call>\n{}\n</tool_call>\nSo", "tool_call>\n}\n</tool_call>\n"),
        ("1 < 2 and {3}", ""),
        ("So:\n~~~py\n```\nx\n~~~\nThen ~~y~~", "py\n```\nx\n~~~\n"),  # its own marks alone close a fence
        ("~~old~~ and sooo~~~ nice\n`~~~`", ""),
        ('It is {"a": [1]} or so\nDone', 'a": [1]} or so\nD'),
        ('Take:{\n  "a": 1,\n  "b": 2\n}\nDone', 'a": 1,\n  "b": 2\n}\nD'),
        ("Tags: [ 'x', 'y' ]", "x', 'y' ]"),
        ("[ 1, 2 ]\nSo", ", 2 ]\nS"),
        ("So \\[\n5 = x\n\\] and {x | 1 < x} of [3]", ""),
        ("a | b\n:--|---\n1 | 2\n3 | 4\n\nSo | it", "---\n1 | 2\n3 | 4\n\n"),
        ("- one\n---\n-1 | 2", ""),
    ],
)
def test_structure_is_found_in_the_text(answer: str, exact: str) -> None:
    assert exact_part(answer) == exact


@given(st.lists(st.integers(0, len(PIECES) - 1), max_size=20), st.integers(0, g.STATES - 1))
def test_tokens_do_what_their_characters_do(tokens: list[int], state: int) -> None:
    table = StructureTable(PIECES)
    states = table.follow(torch.tensor([state]), torch.tensor([tokens], dtype=torch.long).reshape(1, -1))
    assert states[0].tolist() == [
        state_of("".join(PIECES[t] for t in tokens[:n]), state) for n in range(len(tokens) + 1)
    ]


def test_pieces_of_real_vocabularies() -> None:
    class Tokenizer:
        all_special_ids = (5,)

        def __len__(self) -> int:
            return 6

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]:
            return ["Ċ```", "ĠĠ", "<0x0A>", "▁|", None, "<|end|>"]

    table = g.structure_of(Tokenizer())
    after = [int(row[g.TEXT]) for row in table.after]
    assert after == [g.CODE, g.TEXT, g.LINE, g.TEXT, g.TEXT, g.TEXT]
    assert table.after[5].tolist() == list(range(g.STATES))
    assert int(table.after[3][LINE]) == g.REST


@pytest.mark.parametrize(
    "prompt",
    ["Write a function to find the shared elements of two lists.", "Answer in JSON.", "Return a table of the results",
     "What is wrong here?\n```\nx\n```", "def f(x):\n", "Fix this: SELECT a FROM b", "how do I read a CSV in Python?",
     "Give me a bash script that counts files", "Can you code a snake game?", "code me a parser", "Please script it.", '<tools>[{"name": "weather"}]</tools>'],
)  # fmt: skip
def test_prompts_that_ask_for_structure(prompt: str) -> None:
    assert g.asks_for_structure(prompt)


@pytest.mark.parametrize(
    "prompt",
    ["Why is the sky blue?", "What is the function of the heart?", "Which class of animals lays eggs?",
     "Tom has 3 apples. How many are left?", "Summarise: the program began in 1990.", "Please select one from the list",
     "What does this code mean to the spies?", "Which area code is it?", "Tell me the dress code", "Can a program end?"],
)  # fmt: skip
def test_prompts_that_ask_for_prose(prompt: str) -> None:
    assert not g.asks_for_structure(prompt)


RULES = [Margin(1e6), Margin(price=900.0), TopK(10**6), Judged(constant_judge(0.9, 2), 0.5), RegretBudget(1e9, 1e9, 99)]


@pytest.mark.parametrize("rule", [*RULES, JudgeOnly(constant_judge(0.9, 2), 0.5)], ids=lambda rule: rule.name)
def test_alignment_alone_decides_where_a_block_says_so(rule: AcceptanceRule) -> None:
    logits = torch.tensor([[[2.0, 1.0, 0.0]] * 5])
    block = Block(torch.tensor([[1, 0, 1, 1]]), logits, torch.zeros(1, 5, 2))
    assert rule(block).n_accepted.tolist() == [4]
    for exact, accepted in (([0, 1, 0, 0], 4), ([0, 0, 1, 0], 2), ([1, 0, 0, 0], 0)):
        guarded = replace(block, exact_only=torch.tensor([exact]).bool())
        assert rule(guarded).n_accepted.tolist() == [accepted]
        assert not (rule(guarded).judged & guarded.exact_only).any()


def test_a_fence_of_the_block_counts_from_its_own_token_on() -> None:
    fence, word, guards = PIECES.index("```py\n"), 0, Guards(0, StructureTable(PIECES))
    begun = guards.begin([False], torch.device("cpu"))
    block = GuardedBlock(guards, begun, torch.tensor([[word, fence, word, word]]))
    assert block.exact.tolist() == [[False, True, True, True, True]]
    assert int(block.bits) == 0b11110
    after = [block.advance(torch.tensor([n]), torch.tensor([word]))[0, 0].item() for n in (1, 2, 4)]
    assert after == [g.TEXT, g.CODE, g.CODE]  # the fence was rejected, or accepted


def test_the_strict_start_counts_the_first_token() -> None:
    begun = Guards(5).begin([False, False], torch.device("cpu"))
    first = GuardedBlock(Guards(5), begun, torch.zeros(2, 0, dtype=torch.long))
    state = first.advance(torch.zeros(2, dtype=torch.long), torch.tensor([1, 1]))
    block = GuardedBlock(Guards(5), state, torch.zeros(2, 3, dtype=torch.long))
    assert block.exact.all()
    state = block.advance(torch.tensor([1, 3]), torch.tensor([1, 1]))
    assert state[:, 1].tolist() == [2, 0]


def answers(rule: AcceptanceRule, kind: str, requests: list[Request], *, gamma: int = 4, later: int = 0) -> list:
    """Tokens, origins and guarded tokens of each request; the last `later` ones enter a running batch."""
    target, draft = tiny_model(seed=1, num_hidden_layers=2), tiny_model(seed=2)
    hidden = rule.judge is not None
    engines = BatchEngines(make_engine(target, hidden=hidden, kind=kind), make_draft(draft, target, kind=kind))
    found: list = [([], [], []) for _ in requests]
    queue = AdmissionQueue(3, 120) if later else None
    begin = requests[: len(requests) - later]
    for number, step in enumerate(decode(engines, begin, rule, gamma=gamma, queue=queue)):
        for emission in step.emissions:
            tokens, origins, guarded = found[emission.row]
            tokens += emission.tokens
            origins += emission.origins
            guarded.append(emission.guarded)
        if queue is not None and number == 3:
            for request in requests[len(begin) :]:
                queue.put(request)
    return [(tokens, origins, sum(guarded)) for tokens, origins, guarded in found]


@pytest.mark.quick("cpu")
@pytest.mark.parametrize("kind", ["cpu", "cuda", REFERENCE])
def test_no_token_is_substituted_where_the_text_so_far_is_structured(kind: str) -> None:
    rule = Margin(1e6, strict_start=6, strict_code=True, structure=TABLE)
    requests = requests_of(prompts_of([3, 9, 5, 2]), [28, 14, 20, 20])
    requests[2] = requests[2]._replace(structured=True)
    together = answers(rule, kind, requests, later=2)
    assert together == [answers(rule, kind, [request])[0] for request in requests]
    for request, (tokens, origins, guarded) in zip(requests, together, strict=True):
        exact = [
            at < 6 or request.structured or state_of("".join(TEXTS[t] for t in tokens[:at])) in EXACT_STATES
            for at in range(len(tokens))
        ]
        assert not any(inside and origin == "judge" for inside, origin in zip(exact, origins, strict=True))
        assert guarded >= sum(exact[1:])  # tokens that open structure come on top
    free = [origins.count("judge") for request, (_, origins, _) in zip(requests, together, strict=True)]
    assert free[2] == 0
    assert sum(free) > 10
    assert together[2][0] == answers(EXACT, kind, [requests[2]])[0][0]  # a structured prompt is answered by `exact`


def test_guards_hold_at_every_gamma_and_for_every_rule() -> None:
    requests = requests_of(prompts_of([4, 7]), [30, 30])
    for rule in (Margin(price=900.0), RegretBudget(1e9, 1e9, 99), Judged(constant_judge(0.9, 32), 0.5)):
        guarded = replace(rule, strict_start=9, strict_code=True, structure=TABLE)
        for gamma in (1, 3, 7):
            for tokens, origins, _ in answers(guarded, "cpu", requests, gamma=gamma):
                exact = [i < 9 or state_of("".join(TEXTS[t] for t in tokens[:i])) in EXACT_STATES for i in range(30)]
                assert not any(inside and origin == "judge" for inside, origin in zip(exact, origins, strict=True))
    unguarded = answers(Margin(1e6), "cpu", requests)
    assert unguarded == answers(Margin(1e6, strict_start=0, strict_code=False, structure=TABLE), "cpu", requests)


def test_a_pair_guards_relaxed_rules_and_objects_have_none(tiny_pair: Pair) -> None:
    rule = resolve_rule(tiny_pair, "topk:2")
    assert (rule.strict_start, rule.strict_code) == (16, True)
    assert rule.guards is not None
    assert rule.guards.structure is not None
    assert rule is resolve_rule(tiny_pair, "topk:2")
    assert resolve_rule(tiny_pair, "exact").guards is None
    assert TopK(2).guards is None
    for spec, options in (
        ("topk:2,strict_start=0,strict_code=off", {}),
        ("topk:2", {"strict_start": 0, "strict_code": False}),
    ):
        assert resolve_rule(tiny_pair, spec, **options).guards is None
    assert RuleRequest("topk:2").resolve(tiny_pair, bare=True).guards is None
    named = RuleRequest("topk:3,strict_start=4").resolve(tiny_pair, bare=True)
    assert (named.k, named.strict_start, named.strict_code) == (3, 4, None)
    assert rule_text(TopK(2)) == "topk:k=2,guard=False"
    assert rule_text(rule) == "topk:k=2,guard=False,strict_start=16,strict_code=True"
    assert rule_text(RuleRequest(rule_text(rule)).resolve(tiny_pair, bare=True)) == rule_text(rule)
    for spec, options in (
        ("topk:strict_start=1", {"strict_start": 2}),
        ("exact:strict_start=1", {}),
        ("topk:strict_start=-1", {}),
    ):
        with pytest.raises(SelfJudgeError):
            RuleRequest(spec, **options).resolve(tiny_pair)


def test_a_request_takes_the_guards_of_a_server_unless_it_names_its_own() -> None:
    own = RuleRequest("margin:1", strict_start=4)
    assert RuleRequest().inherit(own).strict_start == 4
    assert RuleRequest(strict_start=0).inherit(own).strict_start == 0
    assert RuleRequest("topk").inherit(own).strict_start == 4
    assert RuleRequest("topk:strict_start=1").inherit(own).strict_start is None
    assert str(RuleRequest("margin:1", strict_code=False)) == "margin:1,strict_code=False"
    assert str(RuleRequest("exact", strict_start=3)) == "exact"


def test_answers_say_how_many_tokens_a_guard_verified(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"gamma": 3, "max_new_tokens": 24}
    guarded = generate(tiny_pair, "Why is the sky blue?", "margin:9", strict_code=False, **options)
    assert guarded.guarded_tokens == 15  # the first comes from the prompt's own pass
    assert "judge" not in guarded.origins[:16]
    monkeypatch.setattr(
        "selfjudge.decoding.text.asks_for_structure", lambda prompt: True
    )  # this tokenizer knows no words
    structured = generate(tiny_pair, "Write a function that sorts a list.", "margin:9", **options)
    assert structured.guarded_tokens == len(structured.tokens) - 1
    assert structured.tokens == generate(tiny_pair, "Write a function that sorts a list.", **options).tokens
    bare = generate(tiny_pair, "Why is the sky blue?", Margin(9.0), **options)
    assert (bare.guarded_tokens, bare.origins.count("judge") > 3) == (0, True)
    assert ALWAYS in EXACT_STATES


def test_guards_inside_vllm_are_those_of_the_loop() -> None:
    """Blocks of three requests with unlike numbers of drafts, against the same texts followed from their beginning."""
    tokenizer = FakeTokenizer()
    rules = [TopK(9, strict_start=4, strict_code=True), TopK(9, strict_code=True), TopK(9)]
    inside = RequestGuards(tokenizer, 8, torch.device("cpu"))
    slots, prompts, random = torch.tensor([5, 0, 3]), [[0] * 4, [0] * 2, [0] * 3], torch.Generator().manual_seed(3)
    for slot, rule, prompt in zip(slots.tolist(), rules, prompts, strict=True):
        inside.enter(slot, rule, prompt)
    texts = [[int(torch.randint(len(PIECES), (1,), generator=random))] for _ in rules]
    found = 0
    for _ in range(30):
        sizes = torch.randint(0, 5, (3,), generator=random)
        drafts = torch.randint(len(PIECES), (int(sizes.sum()),), generator=random)
        newest = torch.tensor([text[-1] for text in texts])
        positions = torch.tensor([len(prompt) + len(text) - 1 for prompt, text in zip(prompts, texts, strict=True)])
        rows = DraftRows.of(sizes, int(sizes.sum()))
        exact = inside.find_exact(slots, newest, positions, drafts, rows, int(sizes.max())).split(sizes.tolist())
        emitted = []
        for rule, text, own, marked in zip(rules, texts, drafts.split(sizes.tolist()), exact, strict=True):
            begun = Guards(rule.strict_start or 0, g.structure_of(tokenizer) if rule.strict_code else None)
            state = begun.begin([False], torch.device("cpu"))
            follow = GuardedBlock(begun, state, torch.tensor([[*text, *own.tolist()]]))
            assert marked.tolist() == follow.exact[0, len(text) : -1].tolist()
            found += int(marked.sum())
            n = int(torch.randint(len(own) + 1, (1,), generator=random))
            text += [*own[:n].tolist(), int(torch.randint(len(PIECES), (1,), generator=random))]
            emitted.append(n + 1)
        inside.advance(torch.tensor(emitted))
    assert found > 20
    missed = positions + 9  # steps that nobody saw
    exact = inside.find_exact(
        slots, newest, missed, torch.zeros(3, dtype=torch.long), DraftRows.of(torch.ones(3).long(), 3), 1
    )
    assert exact.tolist() == [True, True, False]


class FakeTokenizer:
    all_special_ids = ()

    def __len__(self) -> int:
        return len(PIECES)

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [PIECES[i] for i in ids]

    def decode(self, ids: list[int]) -> str:
        return ""
