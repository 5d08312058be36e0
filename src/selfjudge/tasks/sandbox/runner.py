"""Runs programs that a model wrote: with limits, without network or the user's files (docs/tasks.md). Linux only. Where
the kernel gives no namespaces, programs are refused unless `allow_unsafe` is set."""

import fcntl
import json
import marshal
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import cache
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

from selfjudge.errors import SelfJudgeError
from selfjudge.store import read_json
from selfjudge.tasks.sandbox import jail

A = TypeVar("A")
B = TypeVar("B")
Killed = Literal["", "time", "output"]
SYSTEM_CALLS = read_json(Path(__file__).with_name("refused.json"))
"""Refused system calls by machine: they hold memory that no process limit counts, or open much of the kernel."""


@dataclass(frozen=True)
class Limits:
    """The resources of one program. Files, CPU time and memory count for each of its processes."""

    seconds: float = 30.0  # wall-clock limit: far more than CPU time, so that a busy machine does not decide a result
    cpu_seconds: int = 10
    memory: int = 1 << 30
    file: int = 16 << 20  # bytes of the largest file
    disk: int = 64 << 20  # bytes of all files together (only if isolated)
    processes: int = 8  # threads count as processes
    open_files: int = 64
    output: int = 1 << 20  # bytes of standard output, and of standard error; a program that prints more is killed


@dataclass(frozen=True)
class ProgramResult:
    """What a program printed, and how it ended."""

    stdout: str
    stderr: str
    code: int | None  # exit code, or minus the signal that ended it; None if it was killed from outside
    killed: Killed


@cache
def find_isolation_problem() -> str:
    """Why programs cannot be isolated on this machine; empty if they can."""
    if not sys.platform.startswith("linux"):
        return f"{sys.platform} has no namespaces"
    try:
        tried = _run({"main.py": "print(7)"}, "", Limits(), isolated=True)
    except SelfJudgeError as error:
        return str(error)
    return "" if tried.stdout == "7\n" else f"Python does not start in it: {' '.join(tried.stderr.split())}"


def check_isolation() -> None:
    """Raise if programs cannot be isolated."""
    if why := find_isolation_problem():
        way_out = "allow user namespaces, or take the risk with `allow_unsafe`"
        raise SelfJudgeError(f"generated code cannot be isolated here ({why}): {way_out}")


def run(
    code: str,
    stdin: str = "",
    *,
    files: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    allow_unsafe: bool = False,
) -> ProgramResult:
    """Run a Python program with the standard library, in a folder of its own that holds `files`."""
    isolated = not find_isolation_problem()
    if not allow_unsafe:
        check_isolation()
    return _run({**(files or {}), "main.py": code}, stdin, limits or Limits(), isolated=isolated)


def _run(files: Mapping[str, str], stdin: str, limits: Limits, *, isolated: bool) -> ProgramResult:
    """Run `main.py` of the files, with what it prints; the jail reads how from a job."""
    python = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    prefixes = dict.fromkeys(os.path.realpath(p) for p in (sys.base_prefix, sys.base_exec_prefix, Path(python).parent))
    processes = limits.processes + (2 if isolated else _count_processes())  # with the jail's own
    job = {
        "isolated": isolated,
        "folder": None,
        "python_folders": list(prefixes),
        "files": dict(files),
        "disk": limits.disk,
        "refused": SYSTEM_CALLS.get(os.uname().machine),
        # -s -P and no variables but these are what -I means. -I itself would ignore the seed of hashes: a program that
        # prints a set would be right one day and wrong the next. -S: no package but the standard library's.
        "command": [python, "-s", "-S", "-P", "main.py"],
        "environment": {
            "PATH": "/usr/bin:/bin",
            "HOME": "/tmp",  # noqa: S108
            "LANG": "C.UTF-8",
            "PYTHONHASHSEED": "0",
        },
        "limits": {
            "RLIMIT_CPU": (limits.cpu_seconds, limits.cpu_seconds + 1),
            "RLIMIT_AS": (limits.memory, limits.memory),
            "RLIMIT_FSIZE": (limits.file, limits.file),
            "RLIMIT_NPROC": (processes, processes),
            "RLIMIT_NOFILE": (limits.open_files, limits.open_files),
            "RLIMIT_MSGQUEUE": (0, 0),
            "RLIMIT_CORE": (0, 0),
        },
    }
    with ExitStack() as stack:
        if not isolated:  # else its folder is in memory
            on_disk = tempfile.TemporaryDirectory(prefix="selfjudge-", ignore_cleanup_errors=True)
            job["folder"] = stack.enter_context(on_disk)
        return _watch(job, stdin.encode("utf-8", "replace"), limits)


def _watch(job: Mapping[str, Any], stdin: bytes, limits: Limits) -> ProgramResult:
    """Start the jail and read what comes until it ends, prints too much or takes too long."""
    deadline = time.monotonic() + limits.seconds
    process, status = _start_jail(job, stdin)
    assert process.stdout
    assert process.stderr
    with process, os.fdopen(status, "rb") as told:
        try:
            output, killed = _read([process.stdout, process.stderr, told], deadline, limits.output)
        finally:
            _end(process)
    out, err, ending = (data[: limits.output].decode("utf-8", "replace") for data in output)
    word, _, rest = ending.partition(" ")
    code: int | None = None
    if word == "exit":
        ended, used = rest.split()
        code = int(ended)
        if code in (-signal.SIGXCPU, -signal.SIGKILL) and not killed and float(used) > 0.5 * limits.cpu_seconds:
            killed = "time"  # by the kernel; a program may also kill itself
    elif not killed and process.returncode == -signal.SIGKILL and not job["isolated"]:
        code = process.returncode  # the program killed the jail: only possible without namespaces
    elif not killed:
        raise SelfJudgeError(" ".join((rest or err or "the jail ended early").split()))
    return ProgramResult(out, err, code, killed)


def _start_jail(job: Mapping[str, Any], stdin: bytes) -> tuple[subprocess.Popen[bytes], int]:
    """The jail's process, and the pipe on which it says how the program ended."""
    status, status_in_jail = os.pipe()
    try:
        with _in_memory(marshal.dumps(dict(job))) as told, _in_memory(stdin) as given:
            numbers = [told.fileno(), status_in_jail]
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", jail.__file__, *map(str, numbers), str(os.getpid())],
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=numbers,
                cwd="/",
                env={},
                start_new_session=True,
            )
    except OSError as error:
        os.close(status)
        raise SelfJudgeError(f"cannot start a process: {error}") from None
    finally:
        os.close(status_in_jail)
    return process, status


def _in_memory(content: bytes) -> IO[bytes]:
    """A file without a name, to be read and not to be changed: it goes with the last process that has it."""
    file = os.fdopen(os.memfd_create("selfjudge", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "w+b")
    file.write(content)
    file.seek(0)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return file


def _read(streams: Sequence[IO[bytes]], deadline: float, most: int) -> tuple[list[bytes], Killed]:
    """All that comes on the streams until they end, one has more than `most` bytes, or the deadline passes."""
    buffers = [bytearray() for _ in streams]
    killed: Killed = ""
    with selectors.DefaultSelector() as waiting:
        for stream, buffer in zip(streams, buffers, strict=True):
            waiting.register(stream, selectors.EVENT_READ, buffer)
        while waiting.get_map() and not killed:
            left = deadline - time.monotonic()
            if left <= 0:
                killed = "time"
            for key, _ in waiting.select(max(0.0, left)):
                chunk = os.read(key.fd, 1 << 16)
                key.data.extend(chunk)
                if not chunk:
                    waiting.unregister(key.fileobj)
                elif len(key.data) > most:
                    killed = "output"
    return [bytes(buffer) for buffer in buffers], killed


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let the jail kill all that it started, or, should it not, kill the jail."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _count_processes() -> int:
    """The number of threads this user has already: without a namespace the kernel counts them all."""
    user, count = os.getuid(), 0
    for path in Path("/proc").glob("[0-9]*/task/*"):
        with suppress(OSError):
            count += path.stat().st_uid == user
    return count


def map_on_cores(function: Callable[[A], B], items: Iterable[A], workers: int | None = None) -> list[B]:
    """`function` of every item, as many at once as there are CPU cores, in order."""
    with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(function, items))


@dataclass(frozen=True)
class ProgramTest:
    """`assert`: statements that must run through after the code. `stdin`: what the code prints when it reads `given`.
    `call`: what `function` (a method of `Solution`, or a function) returns for `given`, one JSON value a line."""

    kind: Literal["assert", "stdin", "call"]
    given: str
    expected: str = ""
    function: str = ""


_HARNESS = """\
import builtins, json, os, sys, types
builtins.exit = builtins.quit = sys.exit
with open("test.json", encoding="utf-8") as file:
    test = json.load(file)
os.remove("test.json")
kind, space = test["kind"], types.ModuleType("__main__" if test["kind"] == "stdin" else "solution")
sys.modules[space.__name__], sys.argv = space, ["solution.py"]
sys.setrecursionlimit(50000)
def do(text, name):
    exec(compile(text, name, "exec", dont_inherit=True), space.__dict__)
do(test["prelude"], "prelude")
do(test["code"], "solution.py")
if kind == "assert":
    do(test["given"], "test")
    value = True
elif kind == "call":
    owner = space.Solution() if hasattr(space, "Solution") else space
    value = getattr(owner, test["function"])(*[json.loads(line) for line in test["given"].split("\\n") if line.strip()])
if kind != "stdin":
    sys.stdout.flush()
    os.write(1, ("\\n" + test["mark"] + json.dumps(value, default=list)).encode())
"""


def passes_test(
    code: str, test: ProgramTest, *, prelude: str = "", limits: Limits | None = None, allow_unsafe: bool = False
) -> bool:
    """Whether a program passes a test, in a process of its own; `prelude` runs first. One that exits early fails: the
    harness ends with a mark that the code does not know. Expected values enter the sandbox only in asserts."""
    mark = secrets.token_hex(16)
    stdin, given = (test.given, "") if test.kind == "stdin" else ("", test.given)
    job = {"kind": test.kind, "code": code, "prelude": prelude, "function": test.function, "mark": mark}
    files = {"test.json": json.dumps({**job, "given": given})}
    ended = run(_HARNESS, stdin, files=files, limits=limits, allow_unsafe=allow_unsafe)
    if ended.killed or ended.code != 0:
        return False
    if test.kind == "stdin":
        return same_output(ended.stdout, test.expected)
    _, marked, value = ended.stdout.rpartition(f"\n{mark}")
    return bool(marked) and (test.kind == "assert" or _same_value(value, test.expected))


def _same_value(got: str, expected: str) -> bool:
    try:
        return bool(json.loads(got) == json.loads(expected))
    except (ValueError, RecursionError):  # a program may print anything
        return False


def same_output(got: str, expected: str) -> bool:
    """Equal lines, blanks at their ends aside; a line of numbers may write them in another way."""
    lines, wanted = ([line.strip() for line in text.strip().splitlines()] for text in (got, expected))
    return len(lines) == len(wanted) and all(a == b or _same_numbers(a, b) for a, b in zip(lines, wanted, strict=True))


def _same_numbers(a: str, b: str) -> bool:
    try:
        return [Decimal(word) for word in a.split()] == [Decimal(word) for word in b.split()]
    except InvalidOperation:
        return False
