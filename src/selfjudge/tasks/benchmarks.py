"""Tasks whose answers are numbers, letters, formulas, texts or programs, and a user's file."""

import json
import math
import random
import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from hashlib import sha256
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

from selfjudge.errors import SelfJudgeError, first_line
from selfjudge.store import read_json, read_rows
from selfjudge.store.schema import TaskRow
from selfjudge.tasks import scoring
from selfjudge.tasks.base import FILE, Prompt, Row, Task, find_prompt, load_hub_rows, normalise_words
from selfjudge.tasks.sandbox.runner import ProgramTest, map_on_cores, passes_test


class Gsm8k(Task, name="gsm8k", columns={"question": str, "answer": str}):
    """Grade-school word problems (Cobb et al. 2021)."""

    checkable = True

    def prompt(self, row: Row) -> str:
        return f'{row["question"]}\nReason step by step, then end with "The final answer is [answer]".'

    def gold(self, row: Row) -> str | None:
        return next(iter(scoring.find_numbers(row["answer"].rpartition("####")[2])), None)

    def extract(self, row: Row, text: str) -> str | None:
        return scoring.find_final_number(text)

    def same(self, row: Row, a: str | None, b: str | None) -> bool:
        return scoring.same_number(a, b)


class Math500(Task, name="math500", columns={"unique_id": str, "problem": str, "answer": str}):
    """Competition problems (Hendrycks et al. 2021; Lightman et al. 2023). There is no training split."""

    checkable = True

    def prompt(self, row: Row) -> str:
        return f"{row['problem']}\nReason step by step, then give the final answer between [answer] and [/answer]."

    def gold(self, row: Row) -> str | None:
        return str(row["answer"])

    def extract(self, row: Row, text: str) -> str | None:
        between_tags = scoring.find_tagged(text)
        return scoring.find_boxed(text) if between_tags is None else scoring.find_boxed(between_tags) or between_tags

    def same(self, row: Row, a: str | None, b: str | None) -> bool:
        return a is not None and b is not None and scoring.same_maths(a, b)


_ANSWER = re.compile(r"(?i:answer is):?\s*\**\s*(?:\\boxed\{)?\s*(?:\(\s*([A-Da-d])\s*\)|([A-D])(?![\w']))")
_BOXED = re.compile(r"\\boxed\{\s*(?:\\text\{)?\s*\(?([A-D])\)?\s*\}")  # models that learnt from MATH
_COLUMNS = {"subject": str, "question": str, "choices": tuple[str, str, str, str], "answer": Literal[0, 1, 2, 3]}


class Mmlu(Task, name="mmlu", columns=_COLUMNS):
    """Multiple-choice questions of 57 subjects (Hendrycks et al. 2021), with chain of thought."""

    checkable = True

    def examples(self, split: str, limit: int | None = None) -> list[Row]:
        """With a limit: always the same sample, with a share of every subject; a smaller one is part of a larger."""
        rows = super().examples(split)
        if limit is None or limit >= len(rows):
            return rows
        sizes, seen = Counter(row["subject"] for row in rows), Counter[str]()
        depths = []
        for place, row in enumerate(rows):
            depths.append(((seen[row["subject"]] + 0.5) / sizes[row["subject"]], place))
            seen[row["subject"]] += 1
        return [rows[place] for _, place in sorted(depths)[:limit]]

    def rows(self, split: str) -> list[Row]:
        rows = super().rows(split)
        # five questions occur in both splits
        return rows if split == "test" else self.drop_test_questions(rows, self.rows("test"))

    def prompt(self, row: Row) -> str:
        choices = "\n".join(f"({letter}) {choice}" for letter, choice in zip("ABCD", row["choices"], strict=True))
        return (
            f"Here is a multiple-choice question about {row['subject'].replace('_', ' ')}.\n\n"
            f"{row['question']}\n{choices}\n\n"
            'Reason step by step, then end with "The answer is (X)", where X is the letter of the right choice.'
        )

    def question(self, row: Row) -> str:
        # the same question occurs in several subjects
        return normalise_words(f"{row['question']} {' '.join(row['choices'])}")

    def gold(self, row: Row) -> str | None:
        return "ABCD"[row["answer"]]

    def extract(self, row: Row, text: str) -> str | None:
        if answers := _ANSWER.findall(text):
            return str(answers[-1][0] or answers[-1][1]).upper()
        boxed: list[str] = _BOXED.findall(text)
        return boxed[-1] if boxed else None


class CnnDailymail(Task, name="cnn_dailymail", columns={"id": str, "article": str, "highlights": str}):
    """News stories to summarise (Nallapati et al. 2016). There is no training split at hand."""

    def prompt(self, row: Row) -> str:
        return ask_for_summary(row["article"])

    def story(self, row: Row) -> str:
        return str(row["article"])

    def score(self, row: Row, text: str) -> dict[str, float]:
        """F measures of words, pairs of words and the longest common subsequence, stemmed."""
        measured = _load_rouge().score(row["highlights"], text)
        return {name: float(measure.fmeasure) for name, measure in measured.items()}


@cache
def _load_rouge() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(("rouge1", "rouge2", "rougeL"), use_stemmer=True)


def ask_for_summary(text: str) -> str:
    return f"Summarize the following article in a few sentences.\n\n{text}"


class Dolly(Task, name="dolly", columns={"instruction": str, "context": str}):
    """15,011 instructions written by people (Databricks 2023), sorted by hash; the last 1,000 are the test split."""

    def rows(self, split: str) -> list[Row]:
        rows = super().rows(split)
        train, test = rows[:-1000], rows[-1000:]
        return test if split == "test" else self.drop_test_questions(train, test)  # a few instructions occur twice

    def load_from_hub(self, split: str) -> list[Row]:
        """The hub's only split, sorted as the file is."""
        columns = ("instruction", "context", "response", "category")
        rows = [{name: row[name] for name in columns} for row in super().load_from_hub("train")]
        return sorted(rows, key=lambda row: sha256(json.dumps(row).encode()).digest())

    def prompt(self, row: Row) -> str:
        return f"{row['instruction']}\n\n{row['context']}" if row["context"].strip() else str(row["instruction"])


_SEED = 0
_ARITHMETIC = read_json(Path(__file__).with_name("arithmetic.json"))
"""Words and kinds of problems: text, ranges of the numbers, and the answer as a sum of products."""


def _evaluate(terms: Sequence[Sequence[Any]], numbers: Mapping[str, int]) -> int:
    """The sum of products of numbers, which may be given by name."""
    total: int = sum(math.prod(numbers.get(factor, factor) for factor in term) for term in terms)
    return total


def _draw_problem(problem: Row, r: random.Random) -> tuple[str, int]:
    """A problem and its answer. The order of the draws decides which problems a seed gives."""
    text, words = problem["text"], dict[str, Any]()
    if "{shop}" in text:
        words["shop"] = r.choice(_ARITHMETIC["shops"])
    elif "{friend}" in text:
        words["name"], words["friend"] = r.sample(_ARITHMETIC["names"], 2)
    else:
        words["name"] = r.choice(_ARITHMETIC["names"])
    if "{things}" in text:
        words["things"] = r.choice(_ARITHMETIC["things"])
    numbers = {name: r.randint(*limits) for name, limits in problem["ranges"].items()}
    words |= {name: _evaluate(terms, numbers) for name, terms in problem.get("derived", {}).items()}
    words["unit"] = "hour" if numbers.get("more") == 1 else "hours"
    return text.format(**words, **numbers), _evaluate(problem["answer"], numbers)


class Arithmetic(Gsm8k, name="arithmetic"):
    """GSM8K's prompt and check on problems made up from a seed; the hash of a problem decides its split."""

    def rows(self, split: str) -> list[Row]:
        random_numbers, size = random.Random(_SEED), 2000 if split == "train" else 500  # noqa: S311
        answers: dict[str, int] = {}
        for problem in cycle(_ARITHMETIC["problems"]):
            question, answer = _draw_problem(problem, random_numbers)
            if (sha256(question.encode()).digest()[0] % 5 == 0) == (split == "test"):  # one problem of five
                answers[question] = answer
            if len(answers) == size:
                break
        return [
            {"id": f"arithmetic-{split}-{_SEED}-{number}", "question": question, "answer": f"#### {answer}"}
            for number, (question, answer) in enumerate(answers.items())
        ]


class File(Task):
    """A user's own prompts: jsonl with `prompt` or `messages`, and `answer` or `check` where an answer can be scored. A
    `check` is Python that must run through, in the sandbox, with the text as `answer`: `assert "42" in answer`. Rows
    without a `split` are split by the hash of their prompt's words."""

    summary = "your own prompts, with answers or without"
    licence = "given by the user"
    splits = ("train", "test", "all")

    def __init__(self, path: Path, *, allow_unsafe: bool = False) -> None:
        super().__init__(allow_unsafe=allow_unsafe)
        self.name = f"{FILE}{path}"
        self.path = path

    @cached_property
    def checkable(self) -> bool:  # type: ignore[override]
        """Whether any row has an answer or a check."""
        return any(_scorable(row) for row in self.rows("all"))

    def prepare(self) -> None:
        self.rows("all")

    def rows(self, split: str) -> list[Row]:
        rows = [self._row(number, row) for number, row in enumerate(read_rows(self.path, TaskRow), 1)]
        return rows if split == "all" else [row for row in rows if row["split"] == split]

    def _row(self, number: int, row: Row) -> Row:
        row = {key: value for key, value in row.items() if value is not None}
        prompt = find_prompt(row, self.path, number)
        try:
            with warnings.catch_warnings(action="ignore"):
                compile(row.get("check", ""), "check", "exec")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # each answer would fail it
            raise SelfJudgeError(f"{self.path}, row {number}: check is not Python: {first_line(error)}") from None
        by_hash = "train" if sha256(normalise_words(prompt).encode()).digest()[0] % 5 else "test"  # one prompt of five
        return {**row, "id": str(row.get("id", f"{self.path.stem}-{number}")), "split": row.get("split") or by_hash}

    def prompt(self, row: Row) -> Prompt:
        prompt: Prompt = row["messages"] if "messages" in row else row["prompt"]
        return prompt

    def gold(self, row: Row) -> str | None:
        if "check" in row:
            return "passed"
        return str(row["answer"]) if "answer" in row else None

    def extract(self, row: Row, text: str) -> str | None:
        """[answer] tags, \\boxed{}, "the answer is …"; else, if the right answer is a number, the last number."""
        if "check" in row:
            test = ProgramTest("assert", row["check"])
            return "passed" if passes_test(f"answer = {text!r}", test, allow_unsafe=self.allow_unsafe) else "failed"
        number = scoring.same_number(self.gold(row), self.gold(row))
        found = scoring.find_tagged(text) or scoring.find_boxed(text)
        return found or (scoring.find_final_number(text) if number else scoring.find_final_words(text))

    def extract_many(self, rows: Sequence[Row], texts: Sequence[str]) -> list[str | None]:
        return map_on_cores(lambda pair: self.extract(*pair), zip(rows, texts, strict=True))

    def same(self, row: Row, a: str | None, b: str | None) -> bool:
        return scoring.same_words(a, b)

    def is_scorable(self, row: Row, answer: str | None) -> bool:
        return super().is_scorable(row, answer) and _scorable(row)

    def rate(self, row: Row, answer: str | None) -> dict[str, float]:
        return super().rate(row, answer) if _scorable(row) else {}


def _scorable(row: Row) -> bool:
    return "answer" in row or "check" in row


class CodeTask(Task):
    """The answer found in a text is a string such as `0,2`: the numbers of the passed tests; empty if none passes."""

    checkable = True
    prelude = ""

    def tests(self, row: Row) -> list[ProgramTest]:
        raise NotImplementedError

    def needs(self, row: Row) -> str:
        """Words of the block that is the program: one that defines what the tests call, not an example of its use."""
        return "def "

    def gold(self, row: Row) -> str | None:
        return ",".join(map(str, range(len(self.tests(row)))))

    def extract(self, row: Row, text: str) -> str | None:
        return self.extract_many([row], [text])[0]

    def extract_many(self, rows: Sequence[Row], texts: Sequence[str]) -> list[str | None]:
        codes = [scoring.find_code(text, self.needs(row)) for row, text in zip(rows, texts, strict=True)]
        jobs = [
            (i, code, number, test)
            for i, (row, code) in enumerate(zip(rows, codes, strict=True))
            if code is not None
            for number, test in enumerate(self.tests(row))
        ]
        # a text that occurs twice runs once, and all tests of all texts share the cores
        wanted = list(dict.fromkeys((code, test) for _, code, _, test in jobs))
        passes = dict(zip(wanted, map_on_cores(self._passes, wanted), strict=True))
        passed: list[list[int]] = [[] for _ in rows]
        for i, code, number, test in jobs:
            if passes[code, test]:
                passed[i].append(number)
        return [None if code is None else ",".join(map(str, p)) for code, p in zip(codes, passed, strict=True)]

    def _passes(self, job: tuple[str, ProgramTest]) -> bool:
        return passes_test(*job, prelude=self.prelude, allow_unsafe=self.allow_unsafe)

    def rate(self, row: Row, answer: str | None) -> dict[str, float]:
        passed = len(answer.split(",")) if answer else 0
        tests = len(self.tests(row))
        return {"pass_rate": float(passed == tests), "tests_passed": passed / tests}


_IDS = {"test": range(11, 511), "validation": range(511, 601), "train": range(601, 975)}


class Mbpp(CodeTask, name="mbpp", columns={"task_id": int, "text": str, "test_list": list[str]}):
    """Short Python functions from a sentence and a test (Austin et al. 2021), with the authors' splits."""

    def rows(self, split: str) -> list[Row]:
        rows = [row for row in super().rows(split) if row["task_id"] in _IDS[split]]
        if (untested := next((row["task_id"] for row in rows if not row["test_list"]), None)) is not None:
            raise SelfJudgeError(f"{self.name}: problem {untested} has no tests")
        return rows

    def prompt(self, row: Row) -> str:
        return f"{row['text']}\nYour code should pass this test:\n{row['test_list'][0]}"

    def tests(self, row: Row) -> list[ProgramTest]:
        setup = row.get("test_setup_code") or ""
        return [ProgramTest("assert", f"{setup}\n{test}") for test in row["test_list"]]


class LiveCodeBench(
    CodeTask, name="livecodebench", columns={"question_id": str, "question_content": str, "starter_code": str}
):
    """Programming contests (Jain et al. 2025). 679 of 880 problems, public tests only: figures are not comparable with
    published ones, because these tests are easier to pass."""

    ask: str
    stdin: str
    call: str

    def rows(self, split: str) -> list[Row]:
        """The hash of a problem's name decides its split: the same whatever other problems are at hand."""
        files = ("release_v1_public_tests.jsonl", "derived_v5_window_279_sample_tests.jsonl")
        read = self.load_from_hub("test") if self.folder is None else [r for file in files for r in self.load(file, "")]
        rows = [self._row(row) for row in read]
        in_test = [sha256(row["question_id"].encode()).digest()[0] % 4 == 0 for row in rows]
        return [row for row, test in zip(rows, in_test, strict=True) if split == "all" or test == (split == "test")]

    def load_from_hub(self, split: str) -> list[Row]:
        """All 880 problems of release 5; read as plain files, for `datasets` runs no loading scripts any more."""
        files = [f"hf://datasets/livecodebench/code_generation_lite/test{number}.jsonl" for number in ("", 2, 3, 4, 5)]
        return load_hub_rows(self.name, "json", data_files=files, split="train")

    def _row(self, row: Row) -> Row:
        """Both files' columns, made the same."""
        try:
            if "sample_tests_parsed" in row:
                tests, function = row["sample_tests_parsed"], row["func_name"]
            else:
                tests, function = json.loads(row["public_test_cases"]), json.loads(row["metadata"]).get("func_name")
            tests = [{"input": test["input"], "output": test["output"]} for test in tests]
        except (KeyError, TypeError, ValueError, AttributeError):
            tests = []
        if not (tests and all(isinstance(text, str) for test in tests for text in test.values())):
            raise SelfJudgeError(f"{self.name}: problem {row['question_id']} has no tests that can be read")
        return {
            "id": f"livecodebench-{row['question_id']}",
            "question_id": row["question_id"],
            "question": row["question_content"],
            "starter_code": row["starter_code"],
            "function": function,
            "tests": tests,
        }

    def prompt(self, row: Row) -> str:
        how = self.call.format(row["starter_code"]) if row["starter_code"] else self.stdin
        return f"{self.ask}\n\nQuestion: {row['question']}\n\n{how}"

    def needs(self, row: Row) -> str:
        return f"def {row['function']}" if row["function"] else ""

    def tests(self, row: Row) -> list[ProgramTest]:
        function = row["function"] or ""
        kind: Literal["call", "stdin"] = "call" if function else "stdin"
        return [ProgramTest(kind, test["input"], test["output"], function) for test in row["tests"]]
