"""Programs that a model wrote, run with limits: `run` one, `run_tests` against one, `each` of many on all cores."""

from selfjudge.tasks.sandbox.runner import (
    Limits as Limits,
    Run as Run,
    Trial as Trial,
    each as each,
    refuse_unisolated as refuse_unisolated,
    run as run,
    run_tests as run_tests,
    same_output as same_output,
    unavailable as unavailable,
)

__all__ = [
    "Limits", "Run", "Trial", "each", "refuse_unisolated", "run", "run_tests", "same_output", "unavailable",
]  # fmt: skip
