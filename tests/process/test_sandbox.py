"""The sandbox against hostile programs. Every test fails if its limit is taken away."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from selfjudge.errors import SelfJudgeError
from selfjudge.tasks.sandbox import runner as sandbox
from selfjudge.tasks.sandbox.runner import Limits, Run, Trial, each, run, run_tests, same_output

WHY_NOT = sandbox.unavailable()
isolated = pytest.mark.skipif(bool(WHY_NOT), reason=f"cannot isolate: {WHY_NOT}")
LIMITS = Limits(
    seconds=20, cpu_seconds=2, memory=256 << 20, file=1 << 20, disk=4 << 20, processes=6, open_files=20, output=10_000
)


@pytest.fixture(params=[pytest.param("isolated", marks=isolated), "unsafe"])
def anywhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With namespaces, and without."""
    if request.param == "unsafe":
        monkeypatch.setattr(sandbox, "unavailable", lambda: "not tried")
    return str(request.param)


def hostile(code: str, **limits: float) -> Run:
    return run(code, limits=replace(LIMITS, **limits), allow_unsafe=True)  # type: ignore[arg-type]


def alive(token: str) -> list[str]:
    """Processes of this machine with a word in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if token.encode() in words:
            found.append(path.parent.name)
    return found


def gone(token: str) -> bool:
    """Within two seconds: a killed process needs a moment to vanish from the list."""
    deadline = time.monotonic() + 2
    while alive(token):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_isolates_where_the_kernel_can() -> None:
    """Should the jail be broken, the tests below must not just be skipped."""
    able = subprocess.run(["unshare", "-U", "-m", "-p", "-n", "--fork", "true"], capture_output=True).returncode == 0
    assert not (able and WHY_NOT)


def test_a_program_runs(anywhere: str) -> None:
    ended = run("print(input()[::-1])\nimport sys\nsys.exit('bye')", "olleh\n", allow_unsafe=True)
    assert (ended.stdout, ended.stderr, ended.code, ended.killed) == ("hello\n", "bye\n", 1, "")


def test_an_infinite_loop(anywhere: str) -> None:
    ended = hostile("while True: pass", cpu_seconds=1)
    assert (ended.killed, ended.code) == ("time", -signal.SIGXCPU)


def test_a_loop_that_ignores_the_signal(anywhere: str) -> None:
    code = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    ended = hostile(code, cpu_seconds=1)
    assert (ended.killed, ended.code) == ("time", -signal.SIGKILL)


def test_a_long_sleep(anywhere: str) -> None:
    ended = hostile("import time\ntime.sleep(60)", seconds=1)
    assert ended.killed == "time"
    assert ended.seconds < 10


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_endless_output(anywhere: str, stream: str) -> None:
    ended = hostile(f"import sys\nwhile True: sys.{stream}.write('x' * 1000)")
    assert ended.killed == "output"
    assert getattr(ended, stream) == "x" * LIMITS.output


def test_output_over_the_limit_is_not_kept(anywhere: str) -> None:
    assert hostile(f"print('x' * {LIMITS.output - 1})").killed == ""
    assert hostile(f"print('x' * {LIMITS.output})").killed == "output"


def test_a_memory_hog(anywhere: str) -> None:
    code = "try: bytearray(300 << 20); print('got it')\nexcept MemoryError: print('refused')"
    assert hostile(code).stdout == "refused\n"
    assert hostile(code, memory=600 << 20).stdout == "got it\n"


def test_a_huge_file(anywhere: str) -> None:
    code = "with open('big', 'wb') as f:\n  try:\n    for _ in range(20): f.write(bytes(100_000)); f.flush()\n  except OSError as e: print(e.errno, f.tell())"
    number, size = map(int, hostile(code).stdout.split())
    assert (number, size) == (27, LIMITS.file)  # EFBIG


@isolated
def test_many_files_fill_no_disk() -> None:
    code = "n = 0\ntry:\n  for n in range(100): open(str(n), 'wb').write(bytes(100_000))\nexcept OSError as e: print(e.errno, n)"
    number, files = map(int, hostile(code).stdout.split())
    assert number == 28  # ENOSPC
    assert files <= LIMITS.disk // 100_000


def test_too_many_open_files(anywhere: str) -> None:
    code = "held = []\ntry:\n  while len(held) < 100: held.append(open('/dev/null'))\nexcept OSError: pass\nprint(len(held))"
    assert 5 < int(hostile(code).stdout) < LIMITS.open_files


FORKS = """
import os, time
children = 0
try:
    while children < 60:
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        children += 1
except OSError:
    pass
print(children, flush=True)
os._exit(0)
"""


def test_a_fork_bomb(anywhere: str) -> None:
    if anywhere == "unsafe" and os.getuid() == 0:
        pytest.skip("the kernel does not count root's processes")
    children = int(hostile(FORKS).stdout)
    assert 1 <= children <= LIMITS.processes  # so that the real one is let loose only if it is held
    ended = hostile("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass", seconds=3)
    assert ended.killed == "time"


def test_processes_are_counted_for_each_program(anywhere: str) -> None:
    """Programs that run at the same time do not use up each other's."""
    if anywhere == "unsafe":
        pytest.skip("there they do")
    children = each(lambda code: int(hostile(code).stdout), [FORKS] * 4, workers=4)
    assert min(children) >= LIMITS.processes - 2


def test_a_child_that_outlives_its_parent(anywhere: str) -> None:
    token = f"outlives-{os.getpid()}-{time.monotonic_ns()}"
    code = f"""
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in range(3): os.close(number)
        os.execv(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(60)", "{token}"])
    os._exit(0)
import time
time.sleep(0.5)
print("done")
"""
    ended = hostile(code)
    assert ended.stdout == "done\n"
    assert ended.seconds < 10
    assert gone(token)


@pytest.mark.parametrize("end", ["wall clock", "parent killed"])
def test_all_die_at_once(anywhere: str, end: str, tmp_path: Path) -> None:
    token = f"sleeps-{os.getpid()}-{time.monotonic_ns()}"
    code = f"""
import os, sys
os.setsid() if os.fork() == 0 else None
os.execv(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(60)", "{token}"])
"""
    if end == "wall clock":
        assert hostile(code, seconds=2).killed == "time"
        assert gone(token)
        return
    if anywhere == "unsafe":
        pytest.skip("not held without namespaces")
    caller = subprocess.Popen(
        [sys.executable, "-c", f"from selfjudge.tasks.sandbox.runner import run\nrun({code!r})"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    try:
        deadline = time.monotonic() + 20
        while not alive(token):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        caller.kill()
        caller.wait()
    assert gone(token)


@isolated
def test_deleting_files(tmp_path: Path) -> None:
    mine = tmp_path / "precious.txt"
    mine.write_text("mine")
    tmp_path.chmod(0o777)
    mine.chmod(0o666)
    code = f"""
import os, shutil, sys
for path in ({str(mine)!r}, {str(Path(__file__))!r}, {str(Path.home())!r} + "/.bashrc"):
    print(os.path.exists(path))
shutil.rmtree({str(tmp_path)!r}, ignore_errors=True)
shutil.rmtree("/usr/bin", ignore_errors=True)
for path in ({str(mine)!r}, "/usr/x", sys.prefix + "/x", "/x", "/etc/x", "/dev/x"):
    try: open(path, "w").write("yours"); print("written", path)
    except OSError: pass
for path in ("/", "/usr", sys.prefix, "/etc", "/dev"):
    print(bool(os.statvfs(path).f_flag & os.ST_RDONLY), path)
"""
    ended = hostile(code)
    assert ended.stdout.split()[:3] == ["False"] * 3
    assert "written" not in ended.stdout
    assert ended.stdout.count("True") == 5
    assert mine.read_text() == "mine"
    assert Path("/usr/bin").is_dir()


@isolated
def test_the_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as hidden:
        hidden.bind("\0selfjudge-" + str(os.getpid()))
        hidden.listen()
        code = f"""
import socket
for family, address in ((socket.AF_INET, ("127.0.0.1", {server.getsockname()[1]})), (socket.AF_INET, ("1.1.1.1", 80)),
                        (socket.AF_UNIX, {hidden.getsockname()!r})):
    try: socket.socket(family).connect(address); print("connected", address)
    except OSError as error: print("no")
"""
        assert hostile(code).stdout == "no\n" * 3


def test_the_environment(anywhere: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "open sesame")
    ended = hostile("import os\nprint(sorted(os.environ))\nprint(os.listdir('.'))")
    assert ended.stdout == "['HOME', 'LANG', 'PATH', 'PYTHONHASHSEED']\n['main.py']\n"


@isolated
def test_other_processes() -> None:
    code = f"""
import os, signal
for process in ({os.getpid()}, {os.getppid()}):
    try: os.kill(process, 0); print("seen")
    except ProcessLookupError: print("unknown")
print(os.path.exists("/proc/1"), os.getpid() < 5, flush=True)
os.kill(1, signal.SIGKILL)
print("still here", flush=True)
os.kill(-1, signal.SIGKILL)
"""
    ended = hostile(code)
    assert ended.stdout.split("\n")[:4] == ["unknown", "unknown", "False True", "still here"]


@isolated
def test_no_way_back_to_power() -> None:
    code = """
import ctypes, os
libc = ctypes.CDLL(None)
print(libc.unshare(0x10000000), libc.unshare(0x20000), libc.mount(b"x", b"/tmp", b"tmpfs", 0, None))
for call in (lambda: os.setuid(0), lambda: os.chroot("/tmp"), lambda: os.setgroups([0])):
    try: call(); print("done")
    except OSError: print("refused")
print(libc.prctl(39, 0, 0, 0, 0))
for number in range(3, 20):
    try: os.fstat(number); print("inherited", number)
    except OSError: pass
"""
    assert hostile(code).stdout == "-1 -1 -1\nrefused\nrefused\nrefused\n1\n"


def test_nothing_is_left_in_the_temporary_folder(
    anywhere: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert hostile("open('a', 'w').write('b')\nprint(1)").stdout == "1\n"
    assert list(tmp_path.iterdir()) == []


def test_refused_where_nothing_isolates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "unavailable", lambda: "unshare: Operation not permitted")
    with pytest.raises(SelfJudgeError, match=r"cannot be isolated here \(unshare: .*`allow_unsafe`") as caught:
        run("print(1)")
    assert "\n" not in str(caught.value)
    assert run("print(1)", allow_unsafe=True).stdout == "1\n"


def test_a_jail_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "jail.py").write_text("import os, sys\nos.write(int(sys.argv[2]), b'error mount: no')")
    monkeypatch.setattr(sandbox.jail, "__file__", str(tmp_path / "jail.py"))
    with pytest.raises(SelfJudgeError, match=r"^mount: no$"):
        run("print(1)", allow_unsafe=True)
    sandbox.unavailable.cache_clear()
    assert sandbox.unavailable() == "mount: no"
    sandbox.unavailable.cache_clear()


def passes(code: str, *tests: Trial, prelude: str = "") -> list[bool]:
    return run_tests(code, tests, prelude=prelude, limits=LIMITS, allow_unsafe=True)


def test_asserts() -> None:
    code = "def double(x):\n    return 2 * x\nif __name__ == '__main__':\n    print(input())"
    tests = [Trial("assert", "assert double(2) == 4"), Trial("assert", "assert double(2) == 5"), Trial("assert", "(")]
    assert passes(code, *tests) == [True, False, False]
    for broken in ("def double(x:", "import sys\nsys.exit(0)", "exit()", "import os\nos._exit(0)", "\0", "\ud800"):
        assert passes(broken, *tests[:1]) == [False], broken


def test_calls() -> None:
    code = "class Solution:\n    def pair(self, a: List[int], b: str):\n        print('noise')\n        return (a[0], {b: None})"
    tests = [
        Trial("call", '[3, 4]\n"x"', '[3, {"x": null}]', "pair"),
        Trial("call", '[3, 4]\n"x"', "[4]", "pair"),
        Trial("call", '[3, 4]\n"x"', '[3, {"x": null}]', "other"),
    ]
    assert passes(code, *tests, prelude="from typing import *") == [True, False, False]
    assert passes(code, *tests) == [False] * 3  # List is unknown
    assert passes("from __future__ import annotations\ndef f(x: Nothing): return x", Trial("call", "1", "1", "f")) == [
        True
    ]


def test_standard_input() -> None:
    code = "import sys\nif __name__ == '__main__':\n    print(sum(map(int, sys.stdin.read().split())))\n    sys.exit()"
    assert passes(code, Trial("stdin", "1 2\n3\n", "6\n"), Trial("stdin", "1", "2")) == [True, False]
    assert passes(code + "\n1 / 0", Trial("stdin", "1 2\n3\n", "6\n")) == [True]
    assert passes("print(6)\n1 / 0", Trial("stdin", "", "6\n")) == [False]


def test_the_same_program_prints_the_same_every_time() -> None:
    assert len({run("print({str(n) for n in range(30)})", allow_unsafe=True).stdout for _ in range(3)}) == 1


def test_outputs() -> None:
    assert same_output("1 2 \n\n 3", "1 2\n\n3\n\n")
    assert same_output("0.50 1e1", "0.5 10")
    assert not same_output("YES", "yes")
    assert not same_output("1\n2", "1 2")
    assert not same_output("1", "")
    assert not same_output("sNaN 1", "sNaN  1")


def test_many_at_once_in_order() -> None:
    began = time.monotonic()
    found = each(
        lambda n: run(f"import time\ntime.sleep(1)\nprint({n})", allow_unsafe=True).stdout, range(4), workers=4
    )
    assert found == [f"{n}\n" for n in range(4)]
    assert time.monotonic() - began < 3.5
