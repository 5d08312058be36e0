"""Tasks: files, splits, prompts, answers and scores; on made-up data always, on the published data where it is at hand."""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fake_tasks import MADE_UP, at_hand, write
from selfjudge.errors import SelfJudgeError
from selfjudge.evaluate import EvalConfig
from selfjudge.evaluate.config import TaskExamples
from selfjudge.prompts.sources import Source, load_prompts
from selfjudge.tasks import NAMES, is_task, load_task
from selfjudge.tasks.base import normalise_words
from selfjudge.tasks.benchmarks import Arithmetic
from selfjudge.tasks.scoring import (
    find_boxed,
    find_code,
    find_final_number,
    find_final_words,
    find_numbers,
    find_tagged,
    same_maths,
    same_number,
)


@pytest.fixture
def made_up(tmp_path: Path) -> Path:
    return write(tmp_path / "data", zipped=False)


@pytest.mark.parametrize("name", NAMES)
def test_plain_and_gzipped_files_are_the_same(tmp_path: Path, name: str) -> None:
    plain = load_task(name, write(tmp_path / "plain", zipped=False))
    zipped = load_task(name, write(tmp_path / "zipped", zipped=True))
    for split in plain.splits:
        rows = plain.examples(split)
        assert rows
        assert rows == zipped.examples(split)
        assert len({row["id"] for row in rows}) == len(rows)
        assert plain.examples(split, 2) == rows[:2]


def test_prompts(made_up: Path) -> None:
    first = {name: load_task(name, made_up).examples("test")[0] for name in NAMES}
    asked = {name: load_task(name, made_up).prompt(row) for name, row in first.items()}
    for name in ("livecodebench", "arithmetic"):
        del asked[name]
    assert asked == {
        "gsm8k": 'What is 0 − 1?\nReason step by step, then end with "The final answer is [answer]".',
        "mbpp": "Write f11.\nYour code should pass this test:\nassert f11() == 11",
        "dolly": "Say 30.\n\nContext 30.",
        "cnn_dailymail": "Summarize the following article in a few sentences.\n\nStory 0.",
        "math500": "What is 0/2?\nReason step by step, then give the final answer between [answer] and [/answer].",
        "mmlu": "Here is a multiple-choice question about bird watching.\n\ntest 0?\n(A) a\n(B) b\n(C) c\n(D) d\n\n"
        'Reason step by step, then end with "The answer is (X)", where X is the letter of the right choice.',
    }
    assert load_task("dolly").prompt({"instruction": "Sing.", "context": " "}) == "Sing."


def test_a_part_of_a_split(made_up: Path) -> None:
    rows = load_task("gsm8k", made_up).examples("train")
    assert len(rows) > 2
    for part, expected in (("[1:]", rows[1:]), ("[:-1]", rows[:-1]), ("[1:2]", rows[1:2]), ("[:]", rows)):
        assert load_task("gsm8k", made_up).examples(f"train{part}") == expected
        name = f"gsm8k/train{part}"
        assert [p.id for p in load_prompts(Source.parse(name), made_up)] == [row["id"] for row in expected]
        assert Source.parse(f"{name}:1") == Source(name, 1)
    for name in ("mbpp/train[:100]+validation", "mbpp/train[3:100]+validation[2:]"):
        assert Source.parse(name) == Source(name)
        assert Source.parse(f"{name}:7x2") == Source(name, 7, 2)
    assert load_task("gsm8k", made_up).examples("train[1:]", 1) == rows[1:2]


def test_several_splits_are_one_task(made_up: Path) -> None:
    gsm8k = load_task("gsm8k", made_up)
    both = gsm8k.examples("test") + gsm8k.examples("train")[1:]
    assert gsm8k.examples("test+train[1:]") == both
    assert len({row["id"] for row in both}) == len(both) > 3
    assert gsm8k.examples("test+train[1:]", 2) == both[:2]
    examples = TaskExamples.load("gsm8k/test+train[1:]", EvalConfig(tasks=("gsm8k",), data=made_up))
    assert (examples.label, examples.rows) == ("gsm8k-test+train-1-", both)


def test_the_authors_splits_of_mbpp(made_up: Path) -> None:
    found = {
        split: [row["task_id"] for row in load_task("mbpp", made_up).examples(split)]
        for split in load_task("mbpp").splits
    }
    assert found == {"test": [11, 510], "validation": [511, 600], "train": [601, 974]}


def test_dolly_trains_on_nothing_that_its_test_asks(made_up: Path) -> None:
    one = load_task("dolly", made_up)
    train, test = one.examples("train"), one.examples("test")
    assert len(test) == 1000
    assert [row["instruction"] for row in train] == [
        f"Say {n}." for n in range(20, 30)
    ]  # 0 … 19 occur again at the end


def test_the_folder_comes_from_the_environment(made_up: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SELFJUDGE_DATA", str(made_up))
    assert len(load_task("gsm8k").examples("train")) == 5
    assert load_task("gsm8k", made_up / "elsewhere").data == made_up / "elsewhere"


def _corrupt(folder: Path) -> None:
    content = bytearray((folder / "gsm8k" / "test.jsonl.gz").read_bytes())
    content[20:40] = b"\xff" * 20
    (folder / "gsm8k" / "test.jsonl.gz").write_bytes(content)


def _truncated(folder: Path) -> None:
    path = folder / "gsm8k" / "test.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-20])


def _contest(folder: Path, **tests: Any) -> None:
    row = {"question_id": "q0", "question_content": "Add.", "starter_code": "", "metadata": "{}", **tests}
    (folder / "livecodebench" / "release_v1_public_tests.jsonl").write_text(json.dumps(row))


def _untested(folder: Path) -> None:
    rows = [{"task_id": n, "text": "Write f.", "test_list": ["assert f()"] * (n != 12)} for n in (5, 11, 12)]
    (folder / "mbpp" / "mbpp.jsonl").write_text("\n".join(map(json.dumps, rows)))


def _checked(folder: Path, check: str) -> None:
    (folder / "f.jsonl").write_text(json.dumps({"prompt": "x", "check": check}))


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        *(
            (lambda data, tests=tests: [_contest(data, **tests), load_task("livecodebench", data).examples("all")], "livecodebench: problem q0 has no tests")
            for tests in ({}, {"public_test_cases": "[]"}, {"public_test_cases": "[1"}, {"sample_tests_parsed": [{"input": ""}], "func_name": None},
                          {"public_test_cases": '[{"input": 3, "output": 4}]'}, {"public_test_cases": '[{"input": "3", "output": null}]'})
        ),
        (lambda data: [_untested(data), load_task("mbpp", data).examples("test")], "mbpp: problem 12 has no tests"),
        *(
            (lambda data, check=check: [_checked(data, check), load_task(f"file:{data}/f.jsonl").prepare()], "f.jsonl, row 1: check is not Python")
            for check in ("assert 'x", "x = = 1", "\0", "(" * 500)
        ),
        (lambda data: load_task(f"file:{data}").examples("all"), "cannot read .*: it is not a file"),
        (lambda data: load_task("no-such-task", data), "unknown task 'no-such-task'; tasks are: gsm8k"),
        (lambda data: load_task("arithmetics", data), "unknown task 'arithmetics': do you mean arithmetic?"),
        (lambda data: load_task("gsm8k", data).examples("validation"), "no split 'validation'; it has: train, test"),
        (lambda data: load_task("cnn_dailymail", data).examples("train"), "no split 'train'"),
        (lambda data: load_task("gsm8k", data).examples("train[a:]"), r"no split 'train\[a:\]'; it has: train, test"),
        (lambda data: load_task("gsm8k", data).examples("train[-:]"), r"no split 'train\[-:\]'; it has"),
        (lambda data: load_task("gsm8k", data).examples("test+exam"), r"no split 'exam'; it has: train, test"),
        (lambda data: load_prompts(Source.parse("gsm8k/test[1:2]"), data), "nothing is learnt from this split"),
        (lambda data: load_task("gsm8k", data / "nowhere").examples("test"), "nowhere/gsm8k/test.jsonl or"),
        (lambda data: load_task("math500", data).examples("train"), "math500 has no split 'train'; it has: test"),
        (lambda data: load_task("mmlu", data).examples("train"), "mmlu has no split 'train'; it has: dev, test"),
        (lambda data: load_task("gsm8k").examples("test"), "give `data` or set SELFJUDGE_DATA, or install datasets"),
        (lambda data: load_task("cnn_dailymail").prepare(), "cnn_dailymail needs rouge-score: pip install rouge-score"),
        (lambda data: load_task("math500").prepare(), "math500 needs math-verify: pip install math-verify"),
        (lambda data: EvalConfig(tasks=("arithmetic", "math500"), data=data).check(), "math500 needs math-verify: pip install"),
        (lambda data: load_task(f"file:{data}/nothing.jsonl").prepare(), "nothing.jsonl does not exist"),
        (lambda data: load_task(f"file:{data}/nothing.jsonl").examples("all"), "nothing.jsonl does not exist"),
        (lambda data: [(data / "f.jsonl").write_text('{"prompt": "x"}\n{"prompt": 5}'), load_task(f"file:{data}/f.jsonl").examples("all")], "f.jsonl, line 2 is not a task row"),
        (lambda data: [_truncated(data), load_task("gsm8k", data).examples("test")], "cannot read"),
        (lambda data: [_corrupt(data), load_task("gsm8k", data).examples("test")], "cannot read"),
        (
            lambda data: [(data / "gsm8k" / "test.jsonl").write_text('{"a": 1}\n{"b"'), load_task("gsm8k", data).examples("test")],
            "line 1 is not a gsm8k row",
        ),
        (lambda data: [(data / "gsm8k" / "test.jsonl").write_bytes(b"\xff\xfe"), load_task("gsm8k", data).examples("test")], "cannot read"),
    ],
)  # fmt: skip
def test_refusals(ask: Callable[[Path], object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SELFJUDGE_DATA", raising=False)
    for name in ("datasets", "math_verify", "rouge_score"):
        monkeypatch.setitem(sys.modules, name, None)  # not installed
    folder = write(tmp_path / "data", zipped=True)
    with pytest.raises(SelfJudgeError, match=message) as caught:
        ask(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_published_rows(name: str) -> None:
    published = at_hand(name)
    prompts: dict[str, set[str]] = {}
    questions: dict[str, set[str]] = {}
    for split in published.splits:
        rows = published.examples(split)
        assert len(rows) >= 90
        assert len({row["id"] for row in rows}) == len(rows)
        prompts[split] = {normalise_words(published.prompt(row)) for row in rows}
        questions[split] = {published.question(row) for row in rows}
        assert all(prompts[split])
    for split in set(published.splits) - {"test", "all"}:
        assert not prompts[split] & prompts["test"], split
        assert not questions[split] & questions["test"], split


SOLUTIONS: dict[str, Callable[[dict[str, Any]], str]] = {
    "gsm8k": lambda row: row["answer"],
    "math500": lambda row: row["solution"],
    "mmlu": lambda row: f"It follows.\n\n**The answer is ({'ABCD'[row['answer']]}).**",
    "arithmetic": lambda row: f"So 2 + 3 = 5.\nThe final answer is {row['answer'].split()[-1]}.",
}


@pytest.mark.parametrize("name", SOLUTIONS)
def test_published_solutions_are_right(name: str) -> None:
    published = at_hand(name)
    rows = published.examples("test")
    scores = [published.score(row, SOLUTIONS[published.name](row)) for row in rows]
    assert [row["id"] for row, score in zip(rows, scores, strict=True) if score != {"accuracy": 1.0}] == []
    assert all(published.extract(row, "") is None for row in rows[:5])


def test_livecodebench_asks_as_its_authors_do() -> None:
    published = at_hand("livecodebench")
    assert published.folder
    rows = {row["question_id"]: row for row in published.examples("all")}
    assert (len(rows), sum(len(row["tests"]) for row in rows.values())) == (679, 1043 + 736)
    with gzip.open(published.folder / "livecodebench" / "qwq_livecodebench_v5_prompts.jsonl.gz", "rt") as file:
        given = [json.loads(line) for line in file]
    assert len(given) == 279
    assert all(published.prompt(rows[row["question_id"]]) == row["prompt"] for row in given)
    assert (len(published.examples("train")), len(published.examples("test"))) == (679 - 153, 153)


def test_the_hash_of_a_problem_decides_its_split(made_up: Path) -> None:
    one = load_task("livecodebench", made_up)
    train, test, everything = ({row["id"] for row in one.examples(split)} for split in ("train", "test", "all"))
    assert train | test == everything
    assert train
    assert test
    assert not train & test


def test_prompts_come_from_splits_that_may_be_learnt_from(
    made_up: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ids(name: str) -> list[str]:
        return [asked.id for asked in load_prompts(Source.parse(name), made_up)]

    one = load_task("livecodebench", made_up)
    assert ids("livecodebench") == ids("livecodebench/train") == [row["id"] for row in one.examples("train")]
    assert load_prompts(Source.parse("livecodebench/train:1"), made_up)[0].source == "livecodebench/train"
    assert is_task("gsm8k/nonsense")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "mine.jsonl").write_text('{"prompt": "Sing."}')
    assert ids("gsm8k/mine.jsonl") == ["mine-0"]  # a file that happens to lie in a folder of that name
    assert ids("mbpp/validation") == [row["id"] for row in load_task("mbpp", made_up).examples("validation")]
    for name, message in (
        ("livecodebench/test", "take one of: train"),
        ("livecodebench/all", "nothing is learnt"),
        ("math500/test", "it is for tests alone"),
        ("gsm8k/train+test", "nothing is learnt from this split; take one of: train"),
        ("gsm8k/nonsense", "has no split 'nonsense'"),
    ):
        with pytest.raises(SelfJudgeError, match=message):
            ids(name)


def test_a_sample_of_mmlu_has_all_subjects(tmp_path: Path) -> None:
    (tmp_path / "mmlu").mkdir()
    sizes = {"a": 100, "b": 20, "c": 200}
    rows = [
        {"subject": s, "question": f"{s}{n}", "choices": ["1", "2", "3", "4"], "answer": 0}
        for s, size in sizes.items()
        for n in range(size)
    ]
    (tmp_path / "mmlu" / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    one = load_task("mmlu", tmp_path)
    assert Counter(row["subject"] for row in one.examples("test", 32)) == {"a": 10, "b": 2, "c": 20}
    ids = [[row["id"] for row in one.examples("test", limit)] for limit in (10, 32)]
    assert set(ids[0]) < set(ids[1])
    assert len(one.examples("test", 1000)) == 320


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The final answer is 18.", "18"),
        ("The final answer is $1,234.50 in total, not 7.", "1234.50"),
        ("The final answer is: \\boxed{-5}. I am 100% sure.", "-5"),
        ("The final answer is 3 + 4 = 7.", "7"),
        ("The final answer is 1. No: the final answer is\n\n**2**", "2"),
        ("6 - 2 = 4, so 10-4=6 apples", "6"),
        ("Costs −$3", "-3"),
        ("The final answer is unknown, but 12 is near", "12"),
        ("x1 and y2", None),
        ("", None),
        ("The final answer is [answer]", None),
    ],
)
def test_numbers_in_texts(text: str, found: str | None) -> None:
    assert find_final_number(text) == found


def test_other_answers_in_texts() -> None:
    assert find_numbers("1,000 or 1,00 or .5 or 2.") == ["1000", "1", "00", ".5", "2"]
    assert find_tagged("[answer]1[/answer] no, [ANSWER] 2 [\\answer]") == "2"
    assert find_tagged("[answer]") is find_tagged("[answer][/answer]") is None
    assert find_boxed("\\boxed{1} and \\boxed{\\frac{1}{\\sqrt{2}}} {}") == "\\frac{1}{\\sqrt{2}}"
    assert find_boxed("\\boxed{\\frac{1}{2}") is find_boxed("none") is None
    assert find_final_words("The answer is: **Paris**. It is a city.") == "Paris"
    assert find_final_words("Paris") is None
    assert find_code("```\na\n```\n```python\nb\n```\n```text\nc\n```") == "b\n"
    assert find_code("```python\ndef f(): 1\n```\nUse:\n```python\nf()\n```", "def f") == "def f(): 1\n"
    assert find_code("```py\ncut off") == "cut off"
    assert find_code("no code") is find_code("```python\n```") is None
    mmlu = load_task("mmlu")
    found = [mmlu.extract({}, text) for text in (
        "The answer is (B).", "the answer is **(c)**", "The answer is: D", "Is the answer is (A)? The answer is (B)", "answer is \\boxed{A}",
        "The answer is a bird.", "The answer is Dover.", "(A)", "The right choice is \\(\\boxed{B}\\).", "\\boxed{A} or \\boxed{\\text{(C)}}",
        "\\boxed{24}", "\\boxed{A}, so the answer is (D)",
    )]  # fmt: skip
    assert found == ["B", "C", "D", "B", "A", None, None, None, "B", "C", None, "D"]


def test_equal_numbers() -> None:
    one = load_task("gsm8k")
    assert one.same({}, "1,000", "1000.0")
    assert one.same({}, "-3", "−3.00")
    assert not one.same({}, "10", "100")
    assert not one.same({}, None, None)
    assert not one.same({}, "ten", "ten")
    assert one.gold({"answer": "6 * 2 = <<6*2=12>>12\n#### 1,012"}) == "1012"
    assert not same_number("1,00", "100")


EQUAL = [
    ("\\frac{1}{2}", "1/2"), ("\\dfrac12", "0.5"), ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3,\\frac{\\pi}{2})"), ("x = 5", "5"),
    ("10\\%", "10"), ("$1,000$", "1000"), ("5\\text{ cm}", "5"), ("\\text{Evelyn}", "evelyn"), ("90^\\circ", "90"), (".5", "\\frac{2}{4}"),
    ("\\sqrt2", "\\sqrt{2}"), ("-\\frac{3}{4}", "-0.75"), ("\\$18.90", "18.90."), ("6\\text{ cm}^2", "6"), ("x \\in [2,5]", "[2,5]"),
]  # fmt: skip
DIFFERENT = [
    ("1", "2"),
    ("x+1", "x+2"),
    ("", ""),
    ("\\frac{1}{0}", "1"),
    ("(1,2)", "(2,1)"),
    ("1,2", "12"),
    ("[1,2)", "[1,2]"),
]


def test_formulas_written_the_same_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfjudge.tasks.scoring.verify_equal", lambda a, b: False)
    assert same_maths(" \\frac{1}{2}", "\\frac{1}{2}")
    assert not same_maths("", " ")
    assert not same_maths("x+y", "y+x")  # that is for math-verify to say


def test_math_verify_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("math_verify")
    fake.parse = lambda text, parsing_timeout: sorted(text)  # type: ignore[attr-defined]
    fake.verify = lambda gold, other, timeout_seconds: gold == other  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "math_verify", fake)
    one = load_task("math500")
    assert one.same({}, "x+y", "y+x")
    assert not one.same({}, "x+y", "x-y")
    assert not one.same({}, None, "x")

    def fails(*_: object, **__: object) -> None:
        raise RecursionError

    fake.parse = fails  # type: ignore[attr-defined]
    assert not one.same({}, "x+y", "y+x")


@pytest.mark.slow
def test_math_verify_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfjudge.tasks.scoring._SECONDS", None)  # its clock runs on while a busy machine waits
    assert all(
        same_maths(*pair) for pair in [*EQUAL, ("x+y", "y+x"), ("2\\sqrt{2}", "\\sqrt{8}"), ("(x+1)^2", "x^2+2x+1")]
    )
    assert not any(same_maths(*pair) for pair in DIFFERENT)


def test_rouge(made_up: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from selfjudge.tasks.benchmarks import _load_rouge

    class Scorer:
        def __init__(self, measures: tuple[str, ...], use_stemmer: bool) -> None:
            self.measures = measures

        def score(self, right: str, text: str) -> dict[str, Any]:
            return {name: SimpleNamespace(fmeasure=float(right == text)) for name in self.measures}

    module = ModuleType("rouge_score.rouge_scorer")
    module.RougeScorer = Scorer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rouge_score", ModuleType("rouge_score"))
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", module)
    _load_rouge.cache_clear()
    one = load_task("cnn_dailymail", made_up)
    rows = one.examples("test", 2)
    good, bad = (one.score(row, "The story 0.") for row in rows)
    assert (good, bad) == ({"rouge1": 1, "rouge2": 1, "rougeL": 1}, {"rouge1": 0, "rouge2": 0, "rougeL": 0})
    _load_rouge.cache_clear()
    assert not one.checkable


@pytest.mark.slow
def test_rouge_itself(made_up: Path) -> None:
    one = load_task("cnn_dailymail", made_up)
    found = one.score(one.examples("test")[0], "The stories 0.")
    assert set(found) == {"rouge1", "rouge2", "rougeL"}
    assert found["rouge1"] == 1  # stemmed


def test_made_up_problems() -> None:
    one = Arithmetic()
    train, test = one.examples("train"), one.examples("test")
    assert (len(train), len(test)) == (2000, 500)
    assert one.examples("train") == train
    assert one.examples("test", 3) == test[:3]
    asked = [{one.question(row) for row in rows} for rows in (train, test)]
    assert not asked[0] & asked[1]
    assert len(asked[0]) == 2000
    assert all(int(one.gold(row) or "") > 0 for row in train)
    assert len({row["question"].split()[-3] for row in train}) > 5


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": f"What is {n} + {n}?", "answer": 2 * n} for n in range(50)]
    rows += [
        {"messages": [{"role": "user", "content": "Capital of France?"}], "answer": "Paris", "split": "test"},
        {"messages": [{"role": "user", "content": "Capital of Spain?"}], "answer": "Madrid", "split": "train"},
    ]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert is_task(f"file:{path}")
    assert not is_task(str(path))
    one = load_task(f"file:{path}")
    train, test = one.examples("train"), one.examples("test")
    assert len(train) + len(test) == len(one.examples("all")) == 52
    assert 3 < len(test) < 25
    assert test[-1]["answer"] == "Paris"
    assert one.checkable
    assert one.prompt(test[-1]) == [{"role": "user", "content": "Capital of France?"}]
    assert one.score(test[-1], "I think the answer is PARIS. Really.") == {"accuracy": 1.0}
    assert one.score(test[-1], "Rome or 3") == {"accuracy": 0.0}
    assert one.score(test[0], f"It is {test[0]['answer']}.0") == {"accuracy": 1.0}
    assert one.score(test[0], f"\\boxed{{{test[0]['answer']}}} or 9") == {"accuracy": 1.0}
    path.write_text('{"prompt": "Sing."}\n{"prompt": "Capital of Italy?", "answer": "Rome"}')
    assert one.checkable
    sing, capital = one.examples("all")
    assert (one.score(sing, "La"), one.score(capital, "The answer is Rome.")) == ({}, {"accuracy": 1.0})
    assert (one.is_scorable(sing, "La"), one.is_scorable(capital, "Rome")) == (False, True)
    path.write_text('{"prompt": "Sing."}\n')
    one = load_task(f"file:{path}")
    assert not one.checkable
    assert one.score(one.examples("all")[0], "La") == {}


def test_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a folder, rows come from `datasets`, in the same columns and the same splits."""
    monkeypatch.delenv("SELFJUDGE_DATA", raising=False)
    asked: list[tuple[str, str | None, str]] = []

    def load_dataset(name: str, config: str | None = None, *, split: str, **options: Any) -> list[dict[str, Any]]:
        asked.append((name, config, split))
        if name == "json":
            assert all(file.startswith("hf://datasets/livecodebench/") for file in options["data_files"])
            return MADE_UP["livecodebench"]["release_v1_public_tests.jsonl"]
        local = next(n for n in NAMES if n in name.lower().replace("-", ""))
        files = MADE_UP[local]
        return files.get(f"{split}.jsonl") or list(reversed(next(iter(files.values()))))

    fake = ModuleType("datasets")
    fake.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    for name in NAMES:
        one = load_task(name)
        for split in one.splits:
            rows = one.examples(split)
            assert len({row["id"] for row in rows}) == len(rows) > 0
            assert all(one.prompt(row) for row in rows)
    assert set(asked) == {
        ("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test"), ("HuggingFaceH4/MATH-500", None, "test"),
        ("cais/mmlu", "all", "dev"), ("cais/mmlu", "all", "test"), ("abisee/cnn_dailymail", "3.0.0", "test"),
        ("json", None, "train"), ("google-research-datasets/mbpp", "full", "train"), ("google-research-datasets/mbpp", "full", "test"),
        ("google-research-datasets/mbpp", "full", "validation"), ("databricks/databricks-dolly-15k", None, "train"),
    }  # fmt: skip

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no route\nto host")

    fake.load_dataset = unreachable  # type: ignore[attr-defined]
    with pytest.raises(SelfJudgeError, match=r"cannot load openai/gsm8k from the hub \(no route\): check"):
        load_task("gsm8k").examples("test")


@pytest.mark.slow
def test_the_hubs_dolly_is_sorted_as_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    published = at_hand("dolly")
    rows = [{k: v for k, v in row.items() if k != "id"} for row in published.rows("train") + published.rows("test")]
    monkeypatch.setattr("selfjudge.tasks.base.load_hub_rows", lambda *_, **__: rows[::-1])
    assert published.load_from_hub("test") == rows
