"""Runs one untrusted program where it can do no harm. A script that `runner.py` starts; imports Python's own modules.

    outside (this process)  →  init (process 1 of a new process namespace)  →  the program

The program sees a file tree of its own: Python and the system's libraries, read-only, and an empty `/tmp` in memory.
It has no network, no capability, no name for any process of the machine. When it ends, or `outside` is told to stop,
init ends too, and the kernel kills with it all that is left in the namespace. Without namespaces (`isolated` false)
only the limits, the folder and the search for left-over children remain.
"""

from __future__ import annotations

import ctypes
import marshal
import os
import resource
import signal
import sys

TYPE_CHECKING = False  # the typing module costs 10 ms a start
if TYPE_CHECKING:
    from typing import Any, NoReturn

    Job = dict[str, Any]

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, READ_ONLY_NO_SUID = 442, -100, 0x8000, 1 | 2
NOBODY = 65534
FIRST_ID = 100_000_000
"""Started by root, a program runs as user FIRST_ID + process number: the kernel counts processes by user."""
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/nix/store")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> NoReturn:
    folder, status = sys.argv[1], int(sys.argv[2])
    os.set_inheritable(status, False)  # the program must not write there
    child = 0

    def stop(*_: object) -> None:
        if not child:
            os._exit(1)
        try:  # noqa: SIM105 - contextlib costs a few ms too
            os.kill(child, signal.SIGKILL)
        except ProcessLookupError:
            pass

    signal.signal(signal.SIGTERM, stop)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        with open(f"{folder}/job", "rb") as file:
            job: Job = marshal.load(file)  # noqa: S302 - written by runner.py
        if not job["isolated"]:
            prctl(PR_SET_CHILD_SUBREAPER, 1)
            child = start(job, f"{folder}/work")
            how = wait_for(child)
            sweep_up()
        else:
            user = unshare()
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # forgotten when rights change
            child = os.fork()
            if child:
                os.waitpid(child, 0)  # ends after all that it started
                os._exit(0)
            build(job, folder)
            os.chroot(folder)
            drop(user)
            child = start(job, "/tmp")  # noqa: S108 - in memory, its own
            how = wait_for(child)
        os.write(status, f"exit {how}".encode())
        os._exit(0)
    except OSError as error:
        os.write(status, f"error {error}".encode())
        os._exit(1)


def wait_for(child: int) -> int:
    """Its exit code, or minus the signal that ended it; orphans that come here are let go."""
    while True:
        ended, how = os.wait()
        if ended == child:
            return os.waitstatus_to_exitcode(how)


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


def build(job: Job, root: str) -> None:
    """The program's file tree, mounted at `root`: seen by this namespace alone."""
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
        os.chdir(folder)
        for name, content in job["files"].items():
            with open(name, "w", encoding="utf-8", errors="surrogatepass") as file:
                file.write(content)
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        for name, limit in job["limits"].items():
            resource.setrlimit(getattr(resource, name), tuple(limit))
        os.execve(job["command"][0], job["command"], job["environment"])  # noqa: S606
    except (OSError, ValueError) as error:
        os.write(2, f"sandbox: {error}\n".encode())
    finally:
        os._exit(127)


def sweep_up() -> None:
    """Kill every descendant that is left: orphans come to this process, sessions of their own or not."""
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            left = [int(number) for number in file.read().split()]
        if not left:
            return
        for process in left:
            os.kill(process, signal.SIGKILL)
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
