"""Arithmetic word problems made up from a seed: known answers without any data."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

from selfjudge.tasks.base import Row
from selfjudge.tasks.gsm8k import Gsm8k

SIZES = {"train": 2000, "test": 500}
_TEST_SHARE = 5  # one problem of five
_NAMES = (
    "Ada", "Ben", "Carla", "David", "Elena", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kavya", "Liam", "Mei", "Nora",
    "Omar", "Priya", "Quentin", "Rosa", "Sven", "Tara",
)  # fmt: skip
_THINGS = ("apples", "marbles", "stickers", "pencils", "cookies", "shells", "books", "buttons", "stamps", "tickets")
_SHOPS = ("bakery", "bookshop", "market stall", "toy shop", "flower shop", "café")


def _gives(r: random.Random) -> tuple[str, int]:
    name, friend, things = *r.sample(_NAMES, 2), r.choice(_THINGS)
    boxes, each, given = r.randint(3, 12), r.randint(4, 25), r.randint(2, 11)
    return (
        f"{name} has {boxes} boxes with {each} {things} in each. {name} gives {given} {things} to {friend}."
        f" How many {things} does {name} have left?",
        boxes * each - given,
    )


def _shop(r: random.Random) -> tuple[str, int]:
    shop, things = r.choice(_SHOPS), r.choice(_THINGS)
    price, morning, more = r.randint(2, 15), r.randint(6, 40), r.randint(2, 30)
    return (
        f"A {shop} sells {things} for ${price} each."
        f" It sells {morning} of them in the morning and {more} more in the afternoon than in the morning."
        f" How many dollars does the {shop} take in that day?",
        price * (2 * morning + more),
    )


def _saves(r: random.Random) -> tuple[str, int]:
    name, week, weeks, spent = r.choice(_NAMES), r.randint(5, 30), r.randint(4, 15), r.randint(3, 19)
    return (
        f"{name} saves ${week} every week for {weeks} weeks and then spends ${spent} on a present."
        f" How many dollars are left?",
        week * weeks - spent,
    )


def _shares(r: random.Random) -> tuple[str, int]:
    name, things = r.choice(_NAMES), r.choice(_THINGS)
    friends, each, lost = r.randint(3, 9), r.randint(3, 20), r.randint(2, 15)
    return (
        f"{name} finds {friends * each + lost} {things} but loses {lost} of them."
        f" {name} shares the rest equally among {friends} friends. How many {things} does each friend get?",
        each,
    )


def _travels(r: random.Random) -> tuple[str, int]:
    name, first, hours = r.choice(_NAMES), r.randint(8, 60), r.randint(2, 6)
    second, more = r.randint(5, 50), r.randint(1, 5)
    return (
        f"{name} travels at {first} miles an hour for {hours} hours and then at {second} miles an hour for {more}"
        f" {'hour' if more == 1 else 'hours'}."
        f" How many miles does {name} travel in all?",
        first * hours + second * more,
    )


def _ages(r: random.Random) -> tuple[str, int]:
    name, friend, age, times, years = *r.sample(_NAMES, 2), r.randint(4, 15), r.randint(2, 4), r.randint(2, 12)
    return (
        f"{name} is {age} years old. {friend} is {times} times as old as {name}."
        f" How old will {friend} be in {years} years?",
        age * times + years,
    )


def _reads(r: random.Random) -> tuple[str, int]:
    name, days, pages, left = r.choice(_NAMES), r.randint(3, 14), r.randint(8, 40), r.randint(10, 90)
    return (
        f"{name} reads {pages} pages a day. After {days} days there are still {left} pages to read."
        f" How many pages does the book have?",
        pages * days + left,
    )


def _half(r: random.Random) -> tuple[str, int]:
    name, friend, things, half = *r.sample(_NAMES, 2), r.choice(_THINGS), r.randint(4, 60)
    return (
        f"{name} collects {2 * half} {things} on Monday and half as many on Tuesday."
        f" {friend} collects twice as many as {name} does on both days together."
        f" How many {things} does {friend} collect?",
        6 * half,
    )


_TEMPLATES: tuple[Callable[[random.Random], tuple[str, int]], ...] = (
    _gives, _shop, _saves, _shares, _travels, _ages, _reads, _half,
)  # fmt: skip


class Arithmetic(Gsm8k):
    """GSM8K's prompt and check on made-up problems; the hash of a problem decides its split, whatever the seed."""

    name = "arithmetic"
    summary = "made-up word problems; needs no data"
    licence = "Apache-2.0"

    def __init__(self, data: Path | None = None, *, allow_unsafe: bool = False, seed: int = 0) -> None:
        super().__init__(data, allow_unsafe=allow_unsafe)
        self.seed = seed

    def rows(self, split: str) -> list[Row]:
        by_question: dict[str, Row] = {}
        for question, answer in problems(self.seed):
            if ("test" if sha256(question.encode()).digest()[0] % _TEST_SHARE == 0 else "train") == split:
                row = {"id": f"arithmetic-{split}-{self.seed}-{len(by_question)}", "question": question}
                by_question.setdefault(question, {**row, "answer": f"#### {answer}"})
            if len(by_question) == SIZES[split]:
                break
        return list(by_question.values())


def problems(seed: int) -> Iterator[tuple[str, int]]:
    """Endless problems and their answers, every kind in turn."""
    random_numbers = random.Random(seed)  # noqa: S311
    while True:
        for template in _TEMPLATES:
            yield template(random_numbers)


TASK = Arithmetic
