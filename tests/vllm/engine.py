"""One engine in a process of its own: `python engine.py JOB ANSWERS`, both JSON files; or `work`, in a fork.

A job is {"engine": options of vllm.LLM, "v2": bool, "runs": [{"prompts": [token ids], "params": sampling parameters, of all or
of each}]}; an answer to a run is {"tokens": [[…]], "logprobs": [[…]], "counts": what the judge did meanwhile on every rank,
"drafts": [[[…]]] what a head proposed for all rows, step by step}.
"""

from __future__ import annotations

import gc
import json
import multiprocessing.context
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def interpret_triton() -> None:
    """Let vLLM take Triton's interpreter for a CPU backend, so that its second model runner works here."""
    sys.path.insert(0, str(Path(sys.prefix) / "triton"))
    os.environ.update(TRITON_INTERPRET="1", VLLM_USE_V2_MODEL_RUNNER="1")
    import triton.backends

    driver = SimpleNamespace(is_active=lambda: True)
    triton.backends.backends = {"cpu": SimpleNamespace(driver=driver, compiler=None)}


def record_drafts(proposed: list[Any]) -> None:
    """Let every head say what it proposes."""
    from vllm.v1.spec_decode.eagle import EagleProposer

    propose = EagleProposer.propose

    def recorded(self: Any, *args: Any, **options: Any) -> Any:
        drafts = propose(self, *args, **options)
        proposed.append(drafts.tolist())
        return drafts

    EagleProposer.propose = recorded


def answer(llm: Any, judged: bool, proposed: list[Any], prompts: list[list[int]], params: Any) -> dict[str, Any]:
    from vllm import SamplingParams

    proposed.clear()
    made = [SamplingParams(detokenize=False, **one) for one in (params if isinstance(params, list) else [params])]
    before = llm.collective_rpc("selfjudge_counts") if judged else []
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in prompts], made if len(made) > 1 else made[0], use_tqdm=False
    )
    after = llm.collective_rpc("selfjudge_counts") if judged else []
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "logprobs": [
            [place[token].logprob for token, place in zip(one.token_ids, one.logprobs, strict=True)]
            for one in (output.outputs[0] for output in outputs)
            if one.logprobs
        ],
        "counts": [{k: now[k] - then[k] for k in now} for now, then in zip(after, before, strict=True)],
        "drafts": list(proposed),
    }


def work(job_file: Path, answers_file: Path, log: Path, variables: dict[str, str]) -> None:
    """Do the job in this process, which has imported vLLM; all that is said goes to the log."""
    _begin(variables, log, log)
    main(job_file, answers_file)


def command(
    words: list[str], folder: Path, out: Path, log: Path, variables: dict[str, str], fresh: bool = False
) -> None:
    """Be `selfjudge WORDS` in this process, which has imported vLLM, or the server that a command of vLLM starts.

    A server that `selfjudge` becomes is this process, too, unless it is to be a `fresh` one.
    """
    _begin(variables, out, log)
    os.chdir(folder)
    if not fresh:
        os.execv = become  # type: ignore[assignment]
    if words[0] == sys.executable:
        become(words[0], words)
    sys.argv = ["selfjudge", *words]
    from selfjudge.cli.main import main as run

    run()


def become(program: str, arguments: Sequence[str]) -> None:
    """`python -m MODULE …` in this process."""
    from prometheus_client import values

    values.ValueClass = values.get_value_class()  # chosen by a variable when it was imported
    sys.argv = list(arguments[2:])
    runpy.run_module(arguments[2], run_name="__main__", alter_sys=True)
    sys.exit(0)


def _begin(variables: dict[str, str], out: Path, log: Path) -> None:
    # processes of this engine are forks, too: on a CPU vLLM starts three, and each imports for as long as this one did
    contexts: dict[str, Any] = multiprocessing.context._concrete_contexts  # type: ignore[attr-defined]
    contexts["spawn"] = contexts["fork"]
    gc.freeze()  # an engine collects seven times while it starts: what was imported needs no look
    os.environ.update(variables)
    for number, file in enumerate((out, log), 1):
        with file.open("a") as said:
            os.dup2(said.fileno(), number)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115


def main(job_file: Path, answers_file: Path) -> None:
    job = json.loads(job_file.read_text())
    if job.get("v2"):
        interpret_triton()
    from vllm import LLM

    gc.freeze()
    options = {
        "dtype": "float32", "enforce_eager": True, "max_num_seqs": 32, "seed": 0, "generation_config": "vllm",
        "num_gpu_blocks_override": 128,
    }  # fmt: skip
    proposed: list[Any] = []
    record_drafts(proposed)
    llm = LLM(**(options | job["engine"]))
    judged = "additional_config" in job["engine"]
    answers = [answer(llm, judged, proposed, **run) for run in job["runs"]]
    answers_file.write_text(json.dumps(answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
