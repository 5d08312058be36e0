"""Runs one untrusted program where it can do no harm. A script that `runner.py` starts; imports Python's own modules.
    outside (this process)  →  init (process 1 of a new process namespace)  →  the program

The program sees read-only Python and system libraries, and an empty `/tmp` in memory. It has no network, no capability
and no name for any process of the machine. When it ends, or `outside` is told to stop, init ends too, and the kernel
kills all that is left in the namespace. Without namespaces (`isolated` false), limits, the filter of system calls, a
folder and the search for left-over children remain. `outside` hears when its parent dies, and cleans up."""

from __future__ import annotations

import ctypes
import marshal
import os
import resource
import signal
import struct
import sys

TYPE_CHECKING = False  # the typing module costs 10 ms a start
if TYPE_CHECKING:
    from typing import Any, NoReturn

    Job = dict[str, Any]

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, READ_ONLY_NO_SUID = 442, -100, 0x8000, 1 | 2
NOBODY = 65534
FIRST_ID = 100_000_000
"""Started by root, a program runs as user FIRST_ID + process number: the kernel counts processes by user."""
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/nix/store")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
ROOT = "/proc"
"""Where the program's file tree is mounted: a folder that is always there, and that the program must not see."""

BPF_LOAD, BPF_EQUAL, BPF_AT_LEAST, BPF_RETURN = 0x20, 0x15, 0x35, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | 1  # EPERM
X32 = 0x40000000  # other names of the same calls

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> NoReturn:
    """Run the job of the file that is open as the first argument; say on the second how the program ended."""
    job_file, status, parent = (int(number) for number in sys.argv[1:4])
    os.set_inheritable(status, False)  # the program must not write there
    with open(job_file, "rb") as file:
        job: Job = marshal.load(file)  # noqa: S302 - written by runner.py
    child = 0

    def stop(*_: object) -> None:
        if child:
            kill(child)
            return
        remove(job["folder"])
        os._exit(1)

    signal.signal(signal.SIGTERM, stop)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL if job["isolated"] else signal.SIGTERM)
    if os.getppid() != parent:
        stop()
    try:
        if job["isolated"]:
            user = unshare()
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # forgotten when rights change
            child = os.fork()
            if child:
                os.waitpid(child, 0)  # ends after all that it started
                os._exit(0)
            build(job)
            os.chroot(ROOT)
            drop(user)
            child = start(job, "/tmp")  # noqa: S108 - in memory, its own
            how = wait_for(child)
        else:
            prctl(PR_SET_CHILD_SUBREAPER, 1)
            child = start(job, job["folder"])
            how = wait_for(child)
            sweep_up()
            remove(job["folder"])
        tell(status, f"exit {how}")
    except OSError as error:
        tell(status, f"error {error}")


def tell(status: int, text: str) -> NoReturn:
    """Say how it ended, and end; the parent may be dead."""
    try:
        os.write(status, text.encode())
    finally:
        os._exit(0)


def kill(process: int) -> None:
    try:  # noqa: SIM105 - contextlib costs a few ms
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        pass


def wait_for(child: int) -> str:
    """Its exit code, or minus the signal that ended it, and the CPU seconds it took; orphans that come are let go."""
    while True:
        ended, how, used = os.wait3(0)
        if ended == child:
            return f"{os.waitstatus_to_exitcode(how)} {used.ru_utime + used.ru_stime:.3f}"


def remove(folder: str | None) -> None:
    """Remove the program's folder, if it is on a disk; the parent does so too, unless it is dead."""
    if folder is not None:
        import shutil

        shutil.rmtree(folder, ignore_errors=True)


def unshare() -> int | None:
    """Enter new namespaces; the next child is process 1 of its own. The user to become, if this one is not mapped."""
    spaces, user = NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET, FIRST_ID + os.getpid()
    if os.geteuid() == 0 and mapped(user):
        check(_libc.unshare(spaces), "unshare")
        return user
    uid, gid = os.geteuid(), os.getegid()
    check(_libc.unshare(spaces | NEWUSER), "unshare")
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", f"{NOBODY} {uid} 1")  # not 0: then exec drops all capabilities
    write("/proc/self/gid_map", f"{NOBODY} {gid} 1")
    return None


def mapped(user: int) -> bool:
    """Whether this user exists in the namespace of this process."""
    with open("/proc/self/uid_map") as file:
        ranges = [[int(number) for number in line.split()] for line in file]
    return any(first <= user < first + count for first, _, count in ranges)


def build(job: Job) -> None:
    """The program's file tree, mounted at ROOT: seen by this namespace alone."""
    root = ROOT
    os.umask(0o022)
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID, "size=1m,mode=755")
    shown: list[str] = []
    for path in (*SYSTEM, *DEVICES, *job["python_folders"]):
        if not os.path.lexists(path) or any(path.startswith(f"{other}/") for other in shown):
            continue
        place = root + path
        os.makedirs(os.path.dirname(place), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), place)
            continue
        if os.path.isdir(path):
            os.makedirs(place, exist_ok=True)
            shown.append(path)
        else:
            os.close(os.open(place, os.O_CREAT | os.O_WRONLY))
        mount(path, place, None, MS_BIND | MS_REC)
    os.makedirs(f"{root}/tmp", exist_ok=True)  # noqa: S108
    read_only(root)
    options = f"size={job['disk']},nr_inodes=4096,mode=777"
    mount("tmpfs", f"{root}/tmp", "tmpfs", MS_NOSUID | MS_NODEV, options)  # noqa: S108


def drop(user: int | None) -> None:
    """Give up the rights of root; those inside a user namespace end with exec."""
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(PR_SET_DUMPABLE, 0)  # the program may not look into init


def start(job: Job, folder: str) -> int:
    """Start the program in a folder; returns its process number."""
    if child := os.fork():
        return child
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()  # a signal to its process group must not reach this file's processes
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.chdir(folder)
        for name, content in job["files"].items():
            with open(name, "w", encoding="utf-8", errors="surrogatepass") as file:
                file.write(content)
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        for name, limit in job["limits"].items():
            resource.setrlimit(getattr(resource, name), tuple(limit))
        if job["refused"]:
            filter_calls(job["refused"]["arch"], sorted(job["refused"]["calls"].values()))
        elif job["isolated"]:  # without isolation the user has taken the risk
            raise OSError(f"no list of system calls is known for {os.uname().machine}")
        os.execve(job["command"][0], job["command"], job["environment"])  # noqa: S606
    except (OSError, ValueError) as error:
        os.write(2, f"sandbox: {error}\n".encode())
    finally:
        os._exit(127)


def filter_calls(arch: int, numbers: list[int]) -> None:
    """Refuse the system calls of these numbers from now on, in this process and all that it starts."""
    rules = [(BPF_LOAD, 0, 0, 4), (BPF_EQUAL, 0, len(numbers) + 3, arch), (BPF_LOAD, 0, 0, 0)]
    rules.append((BPF_AT_LEAST, len(numbers) + 1, 0, X32))
    rules += [(BPF_EQUAL, len(numbers) - place, 0, number) for place, number in enumerate(numbers)]
    rules += [(BPF_RETURN, 0, 0, ALLOW), (BPF_RETURN, 0, 0, REFUSE)]
    code = b"".join(struct.pack("HBBI", *rule) for rule in rules)
    program = struct.pack("HP", len(rules), ctypes.addressof(buffer := ctypes.create_string_buffer(code, len(code))))
    check(_libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(2), program, ctypes.c_ulong(0), ctypes.c_ulong(0)), "seccomp")
    del buffer  # the kernel has its copy


def sweep_up() -> None:
    """Kill every descendant that is left: orphans come to this process, sessions of their own or not."""
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            left = [int(number) for number in file.read().split()]
        if not left:
            return
        for process in left:
            kill(process)
        for process in left:
            os.waitpid(process, 0)


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    raw = [None if text is None else text.encode() for text in (source, target, kind, data)]
    check(_libc.mount(raw[0], raw[1], raw[2], ctypes.c_ulong(flags), raw[3]), f"mount {target}")


def read_only(path: str) -> None:
    """All that is mounted at and below a path; Linux 5.12 or later."""
    attributes = (ctypes.c_uint64 * 4)(READ_ONLY_NO_SUID, 0, 0, 0)
    numbers = [ctypes.c_long(number) for number in (SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, 32)]
    check(_libc.syscall(numbers[0], numbers[1], path.encode(), numbers[2], attributes, numbers[3]), "mount_setattr")


def prctl(option: int, value: int) -> None:
    zero = ctypes.c_ulong(0)
    check(_libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero), f"prctl {option}")


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
