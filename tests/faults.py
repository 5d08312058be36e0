"""Faults that the suite must catch: one line of `src` each, in the code that matters. `make test-faults` tries them.

Each is made in a copy of `src`, and the tests named beside it must fail there. After a change of the code or of the
tests this says whether the suite still guards what it guarded: `python tests/faults.py [WORD ...]` tries the faults
whose description has one of the words.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
COLLECTION_ERROR = 2  # pytest's exit code where tests did not even run: not a catch


@dataclass(frozen=True)
class Fault:
    """One wrong line."""

    what: str
    """What goes wrong for a user."""
    file: str
    """The file, relative to `src/selfjudge`."""
    right: str
    """Text of the file that occurs once."""
    wrong: str
    """What takes its place."""
    tests: str
    """Arguments of pytest that name tests that fail."""


FAULTS = (
    Fault("memory: a prompt that found no memory is read again at once", "decoding/prefill.py",
          "self._held, self._one_by_one = alive, True", "self._held, self._one_by_one = 0, True", "tests/unit/test_memory.py"),
    Fault("memory: rows enter without regard to it", "engine/draft.py",
          "return min(rows, max(int(held)", "return max(rows, max(int(held)", "tests/unit/test_memory.py"),
    Fault("checkpoints: blocks of eight bits lose their scales", "models/checkpoint.py",
          "    return weight * scale\n", "    return weight\n", "tests/unit/test_checkpoint.py"),
    Fault("rules: drafts after a rejection are accepted", "decoding/rules.py",
          "n = accepted.long().cumprod(1).sum(1)", "n = accepted.long().sum(1)", "tests/unit/test_rules.py tests/unit/test_decode.py"),
    Fault("rules: a token past the k-th passes top-k", "decoding/rules.py",
          "block.draft_tokens) < self.k\n", "block.draft_tokens) <= self.k\n", "tests/unit/test_rules.py"),
    Fault("rules: θ = 1 accepts a score of 1", "decoding/rules.py",
          "return self.scores(block) > self.theta", "return self.scores(block) >= self.theta", "tests/unit/test_rules.py tests/unit/test_judge.py"),
    Fault("rules: a special token of the target is replaced", "decoding/rules.py",
          " | is_among(choice, ids)", "", "tests/unit/test_rules.py"),
    Fault("rules: a price forgets the token it pays for", "ops/__init__.py",
          "longer = price + worth", "longer = worth", "tests/unit/test_price.py"),
    Fault("rules: a draft beyond the limit of its row is accepted", "decoding/rules.py",
          "aligned & inside[:, 1:], bad_rows & inside", "aligned, bad_rows & inside", "tests/unit/test_limits.py"),
    Fault("sampling: the end of a limited row counts as a rejection", "decoding/rules.py",
          "rejected = (n < drafted)", "rejected = (n < block.gamma)", "tests/unit/test_limits.py"),
    Fault("sampling: drafts are accepted without regard to q", "decoding/rules.py",
          "block.uniforms[:, :-1] * q_d < p_d", "block.uniforms[:, :-1] < p_d", "tests/unit/test_decode.py tests/unit/test_rules.py"),
    Fault("sampling: the correction is drawn from p, not from the residual", "decoding/rules.py",
          "residual = (p_n - q_n).clamp_min(0)", "residual = p_n", "tests/unit/test_decode.py tests/unit/test_rules.py"),
    Fault("sampling: top-k keeps one token more", "decoding/sampling.py",
          "logits.topk(self.top_k, dim=-1)", "logits.topk(self.top_k + 1, dim=-1)", "tests/unit/test_rules.py tests/unit/test_decode.py"),
    Fault("sampling: a row that leaves shifts the random numbers of the others", "decoding/sampling.py",
          "self.drawn[send(rows, self.device)]", "self.drawn[: len(rows)]", "tests/unit/test_decode.py"),
    Fault("cache: a rewound row keeps one rejected token", "engine/reference.py",
          "(from_right > rejected[:, None])", "(from_right >= rejected[:, None])", "tests/unit/test_engine.py"),
    Fault("cache: a rewound row keeps its old length", "engine/reference.py",
          "self.lengths = self.lengths - rejected", "self.lengths = self.lengths", "tests/unit/test_engine.py"),
    Fault("cache: the draft forgets an accepted token", "engine/draft.py",
          "self.engine.rewind((drafted - 1 - k).clamp_min(0))", "self.engine.rewind(drafted - k)", "tests/unit/test_draft.py tests/unit/test_decode.py"),
    Fault("cache: the head keeps an entry of its own states", "engine/draft.py",
          "torch.full_like(k, drafted - 1)", "torch.full_like(k, max(0, drafted - 2))", "tests/unit/test_eagle.py tests/unit/test_draft.py"),
    Fault("loop: text goes on after the end token", "decoding/admission.py",
          "tokens = tokens[: j + 1]", "pass", "tests/unit/test_decode.py"),
    Fault("kernel (CPU): attention is scaled by the wrong width", "engine/cpu/kernels.cpp",
          "const float root = a.scale", "const float root = a.scale * 1.05f", "tests/unit/test_engine.py"),
    Fault("kernel (CPU): the norm is taken over one value less", "engine/cpu/kernels.cpp",
          "std::sqrt(sum / hidden + epsilon)", "std::sqrt(sum / (hidden - 1) + epsilon)", "tests/unit/test_engine.py"),
    Fault("labels: the prefix term has the wrong sign", "label/score.py",
          "return self.log_p[:, 1] - self.log_p[:, 0]", "return self.log_p[:, 0] - self.log_p[:, 1]", "tests/unit/test_score.py tests/unit/test_label.py"),
    Fault("judge: one of another target is used", "judge/config.py",
          "if self.target_sha256 != sha256 if hashed", "if False if hashed", "tests/unit/test_judge.py tests/unit/test_errors.py"),
    Fault("certificate: a stake knows the prompt it bets on", "tune/certify.py",
          "variance[..., :-1]], -1)[..., : x.shape[-1]]", "variance], -1)[..., 1:]", "tests/unit/test_certify.py"),
    Fault("certificate: half of the evidence suffices", "tune/certify.py",
          "return math.log(1 / self.delta)", "return math.log(1 / self.delta) / 2", "tests/unit/test_certify.py"),
    Fault("certificate: watching alarms more often each round", "tune/monitor.py",
          "self.delta / (self.round * (self.round + 1))", "self.delta", "tests/unit/test_monitor.py"),
    Fault("certificate: a recipe runs with other models", "tune/recipe.py",
          "if known != digest if known and digest", "if False if known and digest", "tests/unit/test_tune.py tests/process/test_tune_runs.py tests/unit/test_errors.py"),
    Fault("timing: a busy machine compares speeds", "tune/speeds.py",
          "if self.doubt or (timing", "if (timing", "tests/unit/test_tune_speeds.py"),
    Fault("kill: a damaged part counts as done", "store/run_folder.py",
          "if seal[\"made_from\"] == made_from and self.intact(seal[\"files\"])", "if seal[\"made_from\"] == made_from", "tests/unit/test_store.py"),
    Fault("kill: prompts that are written again are others", "prompts/self_written.py",
          "first_seed = self.seed * 1_000_003", "first_seed = __import__(\"time\").time_ns()", "tests/process/test_distill_runs.py -k kill_while_prompts"),
    Fault("kill: a file is replaced by what may be half of it", "store/files.py",
          "        os.replace(partial, path)\n    except", "        shutil.copyfile(partial, path)\n    except", "tests/unit/test_store.py tests/attacks/test_files.py tests/attacks/test_killed.py"),
    Fault("server: a body without a length may be of any size", "integrations/asgi.py",
          "if left(messages) or len(body) > limit:", "if left(messages):", "tests/network/test_server.py tests/attacks/test_server_flood.py"),
    Fault("server: the queue holds one more than it should", "integrations/server/scheduler.py",
          "for job in self._queue) + jobs > share:", "for job in self._queue) + jobs > share + 1:", "tests/network/test_server.py tests/unit/test_scheduler.py tests/attacks/test_server_flood.py"),
    Fault("server: the metrics need no key", "integrations/server/api.py",
          'OPEN = ("/", "/health", "/ready")', 'OPEN = ("/", "/health", "/ready", "/metrics")', "tests/network/test_server.py"),
    Fault("sandbox: a program reaches the network", "tasks/sandbox/jail.py",
          "| NEWPID | NEWNET,", "| NEWPID,", "tests/process/test_sandbox.py"),
)  # fmt: skip


def catches(fault: Fault) -> str:
    """`caught`, or why not."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(shutil.copytree(ROOT / "src", Path(folder) / "src"))
        file = source / "selfjudge" / fault.file
        text = file.read_text(encoding="utf-8")
        if text.count(fault.right) != 1:
            return f"the line occurs {text.count(fault.right)} times in {fault.file}"
        file.write_text(text.replace(fault.right, fault.wrong), encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow and not gpu", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, *fault.tests.split()], cwd=ROOT, env=environment, capture_output=True, text=True
        )
    if done.returncode == 1:
        return "caught"
    return "NOT CAUGHT" if not done.returncode else f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}"


def main() -> None:
    words = sys.argv[1:]
    chosen = [fault for fault in FAULTS if not words or any(word in fault.what for word in words)]
    failed = 0
    for fault in chosen:
        result = catches(fault)
        failed += result != "caught"
        print(f"{fault.what}: {result}", flush=True)
    print(f"{len(chosen) - failed} passed, {failed} failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
