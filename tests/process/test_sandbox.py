"""The sandbox against hostile programs. Every test fails if its limit is taken away."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from selfjudge.errors import SelfJudgeError
from selfjudge.tasks.sandbox import runner as sandbox
from selfjudge.tasks.sandbox.runner import (
    Limits,
    ProgramResult,
    ProgramTest,
    map_on_cores,
    passes_test,
    run,
    same_output,
)

WHY_NOT = sandbox.find_isolation_problem()
isolated = pytest.mark.skipif(bool(WHY_NOT), reason=f"cannot isolate: {WHY_NOT}")
LIMITS = Limits(
    seconds=60, cpu_seconds=2, memory=256 << 20, file=1 << 20, disk=4 << 20, processes=6, open_files=20, output=10_000
)


@pytest.fixture(params=[pytest.param("isolated", marks=isolated), "unsafe"])
def anywhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With namespaces, and without."""
    if request.param == "unsafe":
        monkeypatch.setattr(sandbox, "find_isolation_problem", lambda: "not tried")
    return str(request.param)


def hostile(code: str, **limits: float) -> ProgramResult:
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
    """A killed process needs a moment to vanish from the list, on a busy machine some seconds."""
    deadline = time.monotonic() + 300
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


one_is_enough = pytest.mark.parametrize(
    "anywhere",
    [pytest.param("isolated", marks=isolated), pytest.param("unsafe", marks=pytest.mark.slow)],
    indirect=True,
)  # of tests that take a second or two each


@one_is_enough
def test_an_infinite_loop(anywhere: str) -> None:
    ended = hostile("while True: pass", cpu_seconds=1)
    assert (ended.killed, ended.code) == ("time", -signal.SIGXCPU)


@one_is_enough
def test_a_loop_that_ignores_the_signal(anywhere: str) -> None:
    code = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    ended = hostile(code, cpu_seconds=1)
    assert (ended.killed, ended.code) == ("time", -signal.SIGKILL)


def test_a_long_sleep(anywhere: str) -> None:
    ended = hostile("import time\ntime.sleep(60)", seconds=0.3)
    assert ended.killed == "time"


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


HELD = """
import ctypes, fcntl, json, os
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
MOST = 400 << 20

def system_v_memory():
    held, size = 0, 16 << 20
    while held < MOST and (segment := libc.shmget(0, size, 0o1600)) >= 0:
        place = libc.shmat(segment, None, 0)
        ctypes.memset(place, 1, size)
        libc.shmdt(ctypes.c_void_p(place))
        held += size
    return held

def messages():
    held, text = 0, ctypes.create_string_buffer(bytes(8) + bytes(8192))
    text[0] = 1
    while held < MOST and (queue := libc.msgget(0, 0o1600)) >= 0:
        while libc.msgsnd(queue, text, ctypes.c_size_t(8192), 0o4000) == 0:
            held += 8192
    return held

def semaphores():
    held = 0
    while held < MOST and libc.semget(0, 32000, 0o1600) >= 0:
        held += 32000 * 64
    return held

def posix_messages():
    return 0 if libc.mq_open(b"/held", 0o102, 0o600, None) < 0 else 1

def filled(makers):
    files, held = [], 0
    try:
        for make in makers:
            files.append(make())
            while held < MOST and (wrote := os.write(files[-1], bytes(1 << 20))):
                held += wrote
    except OSError:
        pass
    for file in files:
        os.close(file)
    return held

def memory_files():
    return sum(filled([lambda: os.memfd_create("held")]) and 8 << 20 for _ in range(50))

def shared_memory():
    try:
        return filled([lambda n=n: os.open(f"/dev/shm/held-{n}", os.O_CREAT | os.O_RDWR) for n in range(50)])
    except OSError:
        return 0

def files():
    return filled([lambda n=n: os.open(f"/tmp/held-{n}", os.O_CREAT | os.O_RDWR) for n in range(50)])

def pipes():
    ends, held = [], 0
    try:
        while held < MOST:
            ends.append(os.pipe())
            os.set_blocking(ends[-1][1], False)
            try:
                fcntl.fcntl(ends[-1][1], 1031, 1 << 20)
            except OSError:
                pass
            try:
                while True:
                    held += os.write(ends[-1][1], bytes(1 << 16))
            except BlockingIOError:
                pass
    except OSError:
        pass
    return held

print(json.dumps({call.__name__: call() for call in CALLS}))
"""
NOT_COUNTED = ("system_v_memory", "messages", "semaphores", "posix_messages", "memory_files")


def held(*calls: str) -> str:
    return HELD.replace("CALLS", f"({', '.join(calls)},)")


def test_memory_that_no_limit_of_a_process_counts_is_refused(anywhere: str) -> None:
    ended = hostile(held(*NOT_COUNTED), memory=128 << 20, file=8 << 20)
    assert json.loads(ended.stdout or ended.stderr) == dict.fromkeys(NOT_COUNTED, 0)


@isolated
def test_files_and_pipes_hold_little() -> None:
    """What is counted for the whole program: its disk, and the open files."""
    ended = hostile(held("shared_memory", "files", "pipes"), open_files=64)
    sizes = json.loads(ended.stdout or ended.stderr)
    assert sizes["shared_memory"] == 0
    assert 0 < sizes["files"] <= LIMITS.disk
    assert 0 < sizes["pipes"] <= 64 << 20


def test_calls_by_another_name_are_refused(anywhere: str) -> None:
    """The x32 numbers of x86-64 reach the same calls."""
    code = "import ctypes, os\nprint(ctypes.CDLL(None).syscall(ctypes.c_long(0x40000000 + 39)) == os.getpid())"
    if os.uname().machine == "x86_64":
        assert hostile(code).stdout == "False\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGXCPU, signal.SIGSEGV])
def test_a_program_that_kills_itself_did_not_run_out_of_time(anywhere: str, number: int) -> None:
    ended = hostile(f"import os\nprint(1, flush=True)\nos.kill(os.getpid(), {int(number)})")
    assert (ended.killed, ended.code, ended.stdout) == ("", -number, "1\n")


def test_a_program_that_kills_its_group_or_its_parent(anywhere: str) -> None:
    for victim in ("0", "os.getppid()"):
        ended = hostile(f"import os, time\nos.kill({victim}, 9)\ntime.sleep(0.2)")
        assert (ended.killed, ended.code) in ((("", 0), ("", -9)) if victim != "0" else (("", -9),))


def test_without_rights_the_same_holds() -> None:
    """In a user namespace, as for an ordinary user: with all ids of the machine, root takes another way."""
    script = f"""
import json, sys
from selfjudge.tasks.sandbox.runner import Limits, find_isolation_problem, run
if find_isolation_problem():
    sys.exit(find_isolation_problem())
limits = Limits(seconds=20, cpu_seconds=2, memory=128 << 20, file=8 << 20)
codes = [{held(*NOT_COUNTED)!r}, "import os\\nos.kill(0, 9)", "import os\\nos.kill(os.getpid(), 24)"]
print(json.dumps([[r.stdout, r.code, r.killed] for r in (run(code, limits=limits) for code in codes)]))
"""
    one_id = ["unshare", "--user", "--map-root-user"] if os.getuid() == 0 else []
    if one_id and subprocess.run([*one_id, "true"], capture_output=True).returncode:
        pytest.skip("no user namespaces here")
    done = subprocess.run([*one_id, sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (sizes, *first), second, third = json.loads(done.stdout)
    assert json.loads(sizes) == dict.fromkeys(NOT_COUNTED, 0)
    assert (first, second, third) == ([0, ""], ["", -9, ""], ["", -24, ""])


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
    ended = hostile("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass", seconds=0.5)
    assert ended.killed == "time"


@isolated
def test_processes_are_counted_for_each_program() -> None:
    """Programs that run at the same time do not use up each other's; without isolation they do."""
    children = map_on_cores(lambda code: int(hostile(code).stdout), [FORKS] * 4, workers=4)
    assert min(children) >= LIMITS.processes - 2


def test_a_child_that_outlives_its_parent(anywhere: str) -> None:
    token = f"outlives-{os.getpid()}-{time.monotonic_ns()}"
    code = f"""
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in range(3): os.close(number)
        os.execv(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(600)", "{token}"])
    os._exit(0)
import time
time.sleep(0.2)
print("done")
"""
    ended = hostile(code)
    assert ended.stdout == "done\n"
    assert not ended.killed  # for waiting for the child
    assert gone(token)


@one_is_enough
@pytest.mark.parametrize("end", ["wall clock", "parent killed"])
def test_all_die_at_once(anywhere: str, end: str, tmp_path: Path) -> None:
    token = f"sleeps-{os.getpid()}-{time.monotonic_ns()}"
    code = f"""
import os, sys
os.setsid() if os.fork() == 0 else None
os.execv(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(600)", "{token}"])
"""
    if end == "wall clock":
        assert hostile(code, seconds=1).killed == "time"
        assert gone(token)
        return
    unsafe = "runner.find_isolation_problem = lambda: 'not tried'" if anywhere == "unsafe" else ""
    script = f"from selfjudge.tasks.sandbox import runner\n{unsafe}\nrunner.run({code!r}, allow_unsafe=True)"
    caller = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "TMPDIR": str(tmp_path)})
    try:
        deadline = time.monotonic() + 300
        while not alive(token):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        caller.kill()
        caller.wait()
    assert gone(token)
    deadline = time.monotonic() + 300
    while list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert list(tmp_path.iterdir()) == []


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
    monkeypatch.setattr(sandbox, "find_isolation_problem", lambda: "unshare: Operation not permitted")
    with pytest.raises(SelfJudgeError, match=r"cannot be isolated here \(unshare: .*`allow_unsafe`") as caught:
        run("print(1)")
    assert "\n" not in str(caught.value)
    assert run("print(1)", allow_unsafe=True).stdout == "1\n"


def test_a_jail_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "jail.py").write_text("import os, sys\nos.write(int(sys.argv[2]), b'error mount: no')")
    monkeypatch.setattr(sandbox.jail, "__file__", str(tmp_path / "jail.py"))
    with pytest.raises(SelfJudgeError, match=r"^mount: no$"):
        run("print(1)", allow_unsafe=True)
    sandbox.find_isolation_problem.cache_clear()
    assert sandbox.find_isolation_problem() == "mount: no"
    sandbox.find_isolation_problem.cache_clear()


def passes(code: str, *tests: ProgramTest, prelude: str = "") -> list[bool]:
    return [passes_test(code, test, prelude=prelude, limits=LIMITS, allow_unsafe=True) for test in tests]


def test_asserts() -> None:
    code = "def double(x):\n    return 2 * x\nif __name__ == '__main__':\n    print(input())"
    tests = [
        ProgramTest("assert", "assert double(2) == 4"),
        ProgramTest("assert", "assert double(2) == 5"),
        ProgramTest("assert", "("),
    ]
    assert passes(code, *tests) == [True, False, False]
    for broken in ("def double(x:", "import sys\nsys.exit(0)", "exit()", "import os\nos._exit(0)", "\0", "\ud800"):
        assert passes(broken, *tests[:1]) == [False], broken


def test_calls() -> None:
    code = "class Solution:\n    def pair(self, a: List[int], b: str):\n        print('noise')\n        return (a[0], {b: None})"
    tests = [
        ProgramTest("call", '[3, 4]\n"x"', '[3, {"x": null}]', "pair"),
        ProgramTest("call", '[3, 4]\n"x"', "[4]", "pair"),
        ProgramTest("call", '[3, 4]\n"x"', '[3, {"x": null}]', "other"),
    ]
    assert passes(code, *tests, prelude="from typing import *") == [True, False, False]
    assert passes(code, *tests) == [False] * 3  # List is unknown
    assert passes(
        "from __future__ import annotations\ndef f(x: Nothing): return x", ProgramTest("call", "1", "1", "f")
    ) == [True]


FORGER = """
import gc, json, os, sys
frame, test = sys._getframe(), None
while test is None:
    test, frame = frame.f_globals.get("test"), frame.f_back
known = [text for found in gc.get_objects() if isinstance(found, dict) for text in found.values() if text == WANTED]
os.write(1, ("\\n" + test["mark"] + json.dumps(known[0] if known else True)).encode())
os._exit(0)
"""


def test_a_program_that_reads_the_harness_finds_no_expected_value() -> None:
    """It finds the mark through the stack, but not what it would have to return or print; docs/tasks.md: asserts."""
    forger = FORGER.replace("WANTED", "'se' + 'same'")
    assert passes(forger, ProgramTest("call", "1", '"sesame"', "f"), ProgramTest("stdin", "1", "sesame")) == [
        False,
        False,
    ]
    assert passes(forger, ProgramTest("call", "1", "true", "f")) == [
        True
    ]  # the mark is found: any program may return True


def test_standard_input() -> None:
    code = "import sys\nif __name__ == '__main__':\n    print(sum(map(int, sys.stdin.read().split())))\n    sys.exit()"
    assert passes(code, ProgramTest("stdin", "1 2\n3\n", "6\n"), ProgramTest("stdin", "1", "2")) == [True, False]
    assert passes(code + "\n1 / 0", ProgramTest("stdin", "1 2\n3\n", "6\n")) == [True]
    assert passes("print(6)\n1 / 0", ProgramTest("stdin", "", "6\n")) == [False]


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
    together = threading.Barrier(4, timeout=600)  # breaks unless four are under way at the same time

    def start(n: int) -> str:
        together.wait()
        return run(f"print({n})", allow_unsafe=True).stdout

    assert map_on_cores(start, range(4), workers=4) == [f"{n}\n" for n in range(4)]
