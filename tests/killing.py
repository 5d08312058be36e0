"""A warm process that runs commands in forks of itself: a start takes milliseconds, and kill -9 is a real one.

It gets lists of actions and answers each with a list of results. The actions of one list happen in a room of their own:
what they mount is seen there alone.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import gc
import mmap
import os
import signal
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from warm import forks

Result = dict[str, Any]
WRITES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}


class Warm:
    """The process, as tests see it."""

    def __init__(self) -> None:
        context = forks()
        self.connection, other = context.Pipe()
        self.process = context.Process(target=answer, args=(other,))
        self.process.start()
        other.close()

    def __call__(self, *actions: dict[str, Any]) -> list[Result]:
        self.connection.send(actions)
        results: list[Result] = self.connection.recv()
        assert results, "see what the warm process printed"
        return results

    def close(self) -> None:
        self.connection.close()
        self.process.join()


def _prepare() -> None:
    """Import what commands import, make their parts small, and register the model that `pull` gets."""
    import matplotlib.pyplot  # noqa: F401
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401
    from markupsafe import Markup

    import fake_model
    from conftest import tiny_model
    from selfjudge.cli import main as cli
    from selfjudge.distill import data, pipeline as _distill, train  # noqa: F401
    from selfjudge.engine.cpu import engine as cpu
    from selfjudge.evaluate import compare, pipeline as _evaluate  # noqa: F401
    from selfjudge.label import pipeline as label
    from selfjudge.models import pull
    from selfjudge.report import certificate
    from selfjudge.store import provenance
    from selfjudge.train import holdout, pipeline as _train  # noqa: F401
    from selfjudge.tune import pipeline as _tune  # noqa: F401

    torch.set_num_threads(1)
    cpu.why_not(tiny_model())
    sys.argv = ["selfjudge", "ls", "rules"]
    with contextlib.suppress(SystemExit):  # the first command imports what all need
        cli.main()
    provenance()
    time.strftime = _on_one_day
    label.SHARD, data.CHUNK, train.CHECKPOINT_SECONDS, compare.RESAMPLES = 8, 8, 0.0, 20
    holdout.draw = lambda file, *_: file.write_bytes(b"figure")
    certificate.draw = lambda chart: Markup("<svg></svg>")
    fake_model.install()
    pull._download_wheel = _copied
    gc.freeze()  # collections in forks need not touch what all share


_strftime = time.strftime


def _on_one_day(form: str, when: Any = (), /) -> str:
    """Files hold the date of their run, and a run may cross midnight."""
    return _strftime(form, time.struct_time((2026, 1, 1, *tuple(when or time.gmtime())[3:])))


def _copied(requirement: str, folder: Path, watch: Any) -> Path:
    """In place of pip: tests/process/test_pull.py has the real one."""
    name = requirement.replace("-", "_").replace("==", "-")
    wheel = folder / f"{name}-py3-none-any.whl"
    with wheel.open("wb") as file:
        for byte in (Path(os.environ["WHEELS"]) / wheel.name).read_bytes().partition(b"PK\1\2"):
            file.write(byte)
            file.flush()
    watch()
    return wheel


class Child:
    """One command: killed in its write number `kill_at` below `root`, or stopped before the one of `stop_at`."""

    def __init__(
        self, argv: list[str], root: str, env: dict[str, str], kill_at: int | None = None, stop_at: int | None = None
    ) -> None:
        self.count = mmap.mmap(-1, 8)
        self.out, self.err = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115
        self.begun = time.monotonic()
        self.process = os.fork()
        if not self.process:
            self._work(argv, root, env, {kill_at: signal.SIGKILL, stop_at: signal.SIGSTOP})
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(self.process, self.process)  # whoever comes first

    def _work(self, argv: list[str], root: str, env: dict[str, str], moments: dict[int | None, int]) -> None:
        from selfjudge.cli import main as cli

        code = 1
        try:
            os.setpgid(0, 0)
            os.dup2(self.out.fileno(), 1)
            os.dup2(self.err.fileno(), 2)
            os.environ.update(env)
            sys.argv = ["selfjudge", *argv]
            sys.addaudithook(lambda event, args: self._saw(event, args, root, moments))
            cli.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _saw(self, event: str, args: tuple[Any, ...], root: str, moments: dict[int | None, int]) -> None:
        writes = event in WRITES or (event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if not writes or not str(args[0]).startswith(root):
            return
        number = int.from_bytes(self.count[:], "little")
        self.count[:] = (number + 1).to_bytes(8, "little")
        if moments.get(number) == signal.SIGKILL and event == "open":
            os.open(args[0], args[2], 0o666)  # the moment after: the file is there, and empty
        if number in moments:
            os.killpg(0, moments[number])

    def stopped(self) -> bool:
        """Wait until it has stopped; False if it ended before."""
        return os.WIFSTOPPED(os.waitpid(self.process, os.WUNTRACED)[1])

    def said(self) -> str:
        return os.pread(self.err.fileno(), 1 << 20, 0).decode()

    def go_on(self) -> None:
        os.killpg(self.process, signal.SIGCONT)

    def end(self, kill_after: float | None = None) -> Result:
        if kill_after is not None:
            time.sleep(kill_after)
            os.kill(self.process, 0)  # not reaped yet, so the number is still its own
            os.killpg(self.process, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        seconds = time.monotonic() - self.begun
        return {
            "code": code,
            "stderr": self.said(),
            "stdout": os.pread(self.out.fileno(), 1 << 20, 0).decode(),
            "writes": int.from_bytes(self.count[:], "little"),
            "seconds": seconds,
        }


def run(kill_after: float | None = None, **command: Any) -> Result:
    return Child(**command).end(kill_after)


def both(first: dict[str, Any], second: dict[str, Any], waits: str) -> Result:
    """Stop the first in the midst of its work, run the second to its end or until it says `waits`, go on."""
    one = Child(**first)
    if not one.stopped():
        return {"first": one.end(), "second": None}
    two = Child(**second)
    while waits and waits not in two.said() and not os.waitpid(two.process, os.WNOHANG)[0]:
        time.sleep(0.01)
    later = None if waits else two.end()
    one.go_on()
    return {"first": one.end(), "second": later or two.end()}


def mount(path: str, size: int) -> Result:
    """A file system in memory, of this room."""
    from selfjudge.tasks.sandbox import jail

    uid, gid = os.geteuid(), os.getegid()
    user = 0 if uid == 0 else jail.NEWUSER
    try:
        jail.check(ctypes.CDLL(None, use_errno=True).unshare(jail.NEWNS | user), "unshare")
        if user:
            jail.write("/proc/self/setgroups", "deny")
            jail.write("/proc/self/uid_map", f"0 {uid} 1")
            jail.write("/proc/self/gid_map", f"0 {gid} 1")
        jail.mount(None, "/", None, jail.MS_REC | jail.MS_PRIVATE)
        jail.mount("tmpfs", path, "tmpfs", 0, f"size={size}")
    except OSError as error:
        return {"error": str(error)}
    return {"error": ""}


def remount(path: str, size: int, read_only: bool = False) -> Result:
    from selfjudge.tasks.sandbox import jail

    jail.mount(None, path, None, 32 | int(read_only), f"size={size}")
    return {}


def write(path: str, text: str) -> Result:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)
    return {}


def content(path: str) -> Result:
    """Every file below a path."""
    files = sorted(file for file in Path(path).rglob("*") if file.is_file())
    return {str(file.relative_to(path)): base64.b64encode(file.read_bytes()).decode() for file in files}


ACTIONS = {call.__name__: call for call in (run, both, mount, remount, write, content)}


def answer(connection: Connection) -> None:
    """Get lists of actions and answer each with a list of results, or with None where an action failed."""
    _prepare()
    with contextlib.suppress(EOFError):
        while True:
            actions = connection.recv()
            if room := os.fork():
                os.waitpid(room, 0)
                continue
            results = None
            try:
                results = [ACTIONS[do](**action) for action in map(dict, actions) for do in [action.pop("do")]]
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                connection.send(results)
                os._exit(0)
