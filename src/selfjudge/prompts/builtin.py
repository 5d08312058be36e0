"""A few built-in prompts of different kinds, so that demo and bench need no data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from selfjudge.errors import SelfJudgeError

BUILT_IN: tuple[tuple[str, str], ...] = (
    ("math", "A baker makes 24 muffins every morning and sells 17 of them. She gives the rest to her neighbours, who"
             " are 7 families. How many muffins does each family get in 5 days? Reason step by step."),
    ("open", "Why is the sky blue?"),
    ("code", "Write a Python function that checks whether a word is a palindrome."),
    ("summary", "Summarise in two sentences: The city council voted on Tuesday to close the old bridge for repairs. The"
                " work will take eight months and cost four million dollars. Drivers will have to use the northern"
                " tunnel, which already carries most of the morning traffic. Shop owners near the bridge fear for their"
                " income and asked the mayor for help."),
    ("math", "Tom has 3 boxes with 12 pencils each. He loses 5 pencils and buys 2 more boxes. How many pencils does he"
             " have now? Reason step by step."),
    ("open", "Give me three tips for learning to play the piano as an adult."),
    ("code", "Write a Python function that returns the n largest numbers of a list."),
    ("chat", "I am nervous about my first day at a new job. What should I do?"),
    ("math", "A train travels 60 miles in one hour. How far does it travel in 3 and a half hours? Reason step by"
             " step."),
    ("open", "What is photosynthesis and why does it matter?"),
    ("code", "Explain what this code does: `[x * x for x in range(10) if x % 2 == 0]`"),
    ("list", "List five healthy breakfasts that take less than ten minutes."),
    ("math", "What is 15% of 240? Reason step by step."),
    ("rewrite", "Rewrite this sentence politely: Send me the report now."),
    ("open", "Describe the water cycle for a child."),
    ("code", "How do I read a text file line by line in Python?"),
    ("math", "If 4 painters paint a house in 6 days, how many days do 3 painters need? Reason step by step."),
    ("story", "Write a short story about a lighthouse keeper who finds a message in a bottle."),
    ("open", "What are the main differences between a virus and a bacterium?"),
    ("list", "Give me a packing list for a weekend in the mountains."),
    ("code", "Write a SQL query that counts the customers of each country."),
    ("summary", "Summarise in one sentence: Honey bees visit flowers to collect nectar. While doing so they carry"
                " pollen from one flower to the next, which lets many plants bear fruit. Farmers therefore often keep"
                " hives near their orchards."),
    ("math", "Sara reads 20 pages a day. Her book has 310 pages. After how many days has she finished it? Reason step"
             " by step."),
    ("open", "Who was Ada Lovelace?"),
)  # fmt: skip


def read_prompts(path: Path, *, skip_broken: Callable[[str], None] | None = None) -> list[str | list[dict[str, str]]]:
    """A prompts file: one JSON object a line with `prompt` or `messages` (a conversation); `.txt`: a prompt a line.

    A line that is neither is refused; with `skip_broken` it is left out, and that is told which lines they were.
    """
    prompts: list[str | list[dict[str, str]]] = []
    broken: list[int] = []
    try:
        with path.open(encoding="utf-8-sig") as file:
            lines = list(file)  # lines end where files end them, not at every separator of Unicode
    except (OSError, UnicodeDecodeError) as error:
        raise SelfJudgeError(f"cannot read {path}: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if path.suffix == ".txt":
            prompts.append(line.strip())
            continue
        try:
            prompts.append(_prompt(json.loads(line)))
        except (ValueError, KeyError, TypeError):
            broken.append(number)
    if broken:
        numbers = ", ".join(map(str, broken[:5])) + (" …" if len(broken) > 5 else "")
        which = f"line{'s' if len(broken) > 1 else ''} {numbers}"
        if skip_broken is None:
            raise SelfJudgeError(f'{path}, {which}: expected a JSON object with "prompt" or "messages"')
        skip_broken(f"{path}: left out {which} ({len(broken)} of {len(prompts) + len(broken)})")
    if not prompts:
        raise SelfJudgeError(f"{path} holds no prompt")
    return prompts


def _prompt(row: dict[str, Any]) -> str | list[dict[str, str]]:
    prompt = row["messages"] if "messages" in row else row["prompt"]
    json.dumps(prompt, ensure_ascii=False).encode()  # half a surrogate pair is no text
    if isinstance(prompt, str) and prompt.strip():
        return prompt
    if isinstance(prompt, list) and prompt and all(isinstance(m, dict) for m in prompt):
        return prompt
    raise TypeError(prompt)
