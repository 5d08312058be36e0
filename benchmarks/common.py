"""What the scripts share: lines with the time since the start, and prompts by name."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from selfjudge.models.pair import Prompt

START = time.monotonic()


def say(*parts: object) -> None:
    print(f"[{time.monotonic() - START:.0f} s]", *parts, flush=True)


def read_task_prompts(name: str, data: Path | None, count: int) -> list[Prompt]:
    """The first prompts of a task's test split, of a prompts file, or of the `built-in` ones."""
    # here, so that processes which only ask a server do not wait for torch
    from selfjudge.prompts.sources import BUILT_IN, read_prompts
    from selfjudge.tasks import is_task, load_task

    if name == "built-in":
        return [text for _, text in BUILT_IN[:count]]
    if not is_task(name):
        return list(read_prompts(Path(name).expanduser())[:count])
    benchmark = load_task(name, data)
    return [benchmark.prompt(row) for row in benchmark.examples("test", count)]
