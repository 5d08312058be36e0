"""Benchmarks: examples, prompts, and how answers are found, compared and scored."""

from selfjudge.tasks.base import FILE as FILE, Prompt as Prompt, Row as Row, Task as Task
from selfjudge.tasks.registry import NAMES as NAMES, is_task as is_task, load_task as load_task, split_of as split_of
