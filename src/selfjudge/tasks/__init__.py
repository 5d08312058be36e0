"""Benchmarks: examples, prompts, and how answers are found, compared and scored. One file each."""

from selfjudge.tasks.base import (
    FILE as FILE,
    NAMES as NAMES,
    Prompt as Prompt,
    Row as Row,
    Task as Task,
    known as known,
    split_of as split_of,
    task as task,
)

__all__ = ["FILE", "NAMES", "Prompt", "Row", "Task", "known", "split_of", "task"]
