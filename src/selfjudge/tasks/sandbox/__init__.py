"""Programs that a model wrote, run with limits: `run` one, `passes_test` of one, `map_on_cores` for many."""

from selfjudge.tasks.sandbox.runner import (
    Limits as Limits,
    ProgramResult as ProgramResult,
    ProgramTest as ProgramTest,
    check_isolation as check_isolation,
    find_isolation_problem as find_isolation_problem,
    map_on_cores as map_on_cores,
    passes_test as passes_test,
    run as run,
    same_output as same_output,
)
