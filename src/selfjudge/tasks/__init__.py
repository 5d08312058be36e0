"""Tasks by name: a benchmark, one of its splits (`livecodebench/all`), or a user's file (`file:PATH`)."""

from pathlib import Path

from selfjudge.errors import SelfJudgeError, unknown
from selfjudge.tasks.base import FILE as FILE, Prompt as Prompt, Row as Row, Task as Task
from selfjudge.tasks.benchmarks import Arithmetic, CnnDailymail, Dolly, File, Gsm8k, LiveCodeBench, Math500, Mbpp, Mmlu

BENCHMARKS: dict[str, type[Task]] = {
    benchmark.name: benchmark
    for benchmark in (Gsm8k, Math500, Mmlu, CnnDailymail, LiveCodeBench, Mbpp, Dolly, Arithmetic)
}
NAMES = tuple(BENCHMARKS)


def load_task(name: str, data: Path | None = None, *, allow_unsafe: bool = False) -> Task:
    """A task by name, or `file:PATH`; a split that is named with it (`livecodebench/all`) makes no difference."""
    if name.startswith(FILE):
        return File(Path(name.removeprefix(FILE)).expanduser(), allow_unsafe=allow_unsafe)
    benchmark = BENCHMARKS.get(name.partition("/")[0])
    if benchmark is None and Path(name).is_file():
        raise SelfJudgeError(f"{name!r} is a file: name it as {FILE}{name}")
    if benchmark is None:
        raise unknown("task", name, (*NAMES, f"{FILE}PATH"))
    return benchmark(data, allow_unsafe=allow_unsafe)


def is_task(name: str) -> bool:
    """Whether this names a task, or a split of one."""
    return name in NAMES or name.startswith(FILE) or (name.partition("/")[0] in NAMES and not Path(name).is_file())


def split_of(name: str) -> str | None:
    """The split that is named with a task: `all` of `livecodebench/all`."""
    return None if name.startswith(FILE) else name.partition("/")[2] or None
