"""Arithmetic word problems made up from a seed: known answers without any data."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from hashlib import sha256
from itertools import cycle
from typing import NamedTuple

from selfjudge.tasks.base import Row
from selfjudge.tasks.benchmarks import Gsm8k

SEED = 0
SIZES = {"train": 2000, "test": 500}
_NAMES = (
    "Ada", "Ben", "Carla", "David", "Elena", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kavya", "Liam", "Mei", "Nora",
    "Omar", "Priya", "Quentin", "Rosa", "Sven", "Tara",
)  # fmt: skip
_THINGS = ("apples", "marbles", "stickers", "pencils", "cookies", "shells", "books", "buttons", "stamps", "tickets")
_SHOPS = ("bakery", "bookshop", "market stall", "toy shop", "flower shop", "café")


class _Template(NamedTuple):
    """A kind of problem: its text, the ranges of its numbers, its answer, and other fields of the text."""

    text: str
    ranges: Mapping[str, tuple[int, int]]
    solve: Callable[[Mapping[str, int]], int]
    derive: Callable[[Mapping[str, int]], Mapping[str, object]] = lambda n: {}

    def draw(self, r: random.Random) -> tuple[str, int]:
        """A problem and its answer. The order of the draws decides which problems a seed gives."""
        words: dict[str, str] = {}
        if "{shop}" in self.text:
            words["shop"] = r.choice(_SHOPS)
        elif "{friend}" in self.text:
            words["name"], words["friend"] = r.sample(_NAMES, 2)
        else:
            words["name"] = r.choice(_NAMES)
        if "{things}" in self.text:
            words["things"] = r.choice(_THINGS)
        numbers = {name: r.randint(*limits) for name, limits in self.ranges.items()}
        return self.text.format(**words, **numbers, **self.derive(numbers)), self.solve(numbers)


_TEMPLATES = (
    _Template(
        "{name} has {boxes} boxes with {each} {things} in each. {name} gives {given} {things} to {friend}."
        " How many {things} does {name} have left?",
        {"boxes": (3, 12), "each": (4, 25), "given": (2, 11)},
        lambda n: n["boxes"] * n["each"] - n["given"],
    ),
    _Template(
        "A {shop} sells {things} for ${price} each."
        " It sells {morning} of them in the morning and {more} more in the afternoon than in the morning."
        " How many dollars does the {shop} take in that day?",
        {"price": (2, 15), "morning": (6, 40), "more": (2, 30)},
        lambda n: n["price"] * (2 * n["morning"] + n["more"]),
    ),
    _Template(
        "{name} saves ${week} every week for {weeks} weeks and then spends ${spent} on a present."
        " How many dollars are left?",
        {"week": (5, 30), "weeks": (4, 15), "spent": (3, 19)},
        lambda n: n["week"] * n["weeks"] - n["spent"],
    ),
    _Template(
        "{name} finds {found} {things} but loses {lost} of them."
        " {name} shares the rest equally among {friends} friends. How many {things} does each friend get?",
        {"friends": (3, 9), "each": (3, 20), "lost": (2, 15)},
        lambda n: n["each"],
        derive=lambda n: {"found": n["friends"] * n["each"] + n["lost"]},
    ),
    _Template(
        "{name} travels at {first} miles an hour for {hours} hours and then at {second} miles an hour for {more}"
        " {unit}. How many miles does {name} travel in all?",
        {"first": (8, 60), "hours": (2, 6), "second": (5, 50), "more": (1, 5)},
        lambda n: n["first"] * n["hours"] + n["second"] * n["more"],
        derive=lambda n: {"unit": "hour" if n["more"] == 1 else "hours"},
    ),
    _Template(
        "{name} is {age} years old. {friend} is {times} times as old as {name}."
        " How old will {friend} be in {years} years?",
        {"age": (4, 15), "times": (2, 4), "years": (2, 12)},
        lambda n: n["age"] * n["times"] + n["years"],
    ),
    _Template(
        "{name} reads {pages} pages a day. After {days} days there are still {left} pages to read."
        " How many pages does the book have?",
        {"days": (3, 14), "pages": (8, 40), "left": (10, 90)},
        lambda n: n["pages"] * n["days"] + n["left"],
    ),
    _Template(
        "{name} collects {double} {things} on Monday and half as many on Tuesday."
        " {friend} collects twice as many as {name} does on both days together."
        " How many {things} does {friend} collect?",
        {"half": (4, 60)},
        lambda n: 6 * n["half"],
        derive=lambda n: {"double": 2 * n["half"]},
    ),
)


class Arithmetic(Gsm8k):
    """GSM8K's prompt and check on made-up problems; the hash of a problem decides its split."""

    name = "arithmetic"
    summary = "made-up word problems; needs no data"
    licence = "Apache-2.0"

    def rows(self, split: str) -> list[Row]:
        random_numbers, size = random.Random(SEED), SIZES[split]  # noqa: S311
        answers: dict[str, int] = {}
        for template in cycle(_TEMPLATES):
            question, answer = template.draw(random_numbers)
            if (sha256(question.encode()).digest()[0] % 5 == 0) == (split == "test"):  # one problem of five
                answers[question] = answer
            if len(answers) == size:
                break
        return [
            {"id": f"arithmetic-{split}-{SEED}-{number}", "question": question, "answer": f"#### {answer}"}
            for number, (question, answer) in enumerate(answers.items())
        ]
