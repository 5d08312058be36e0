"""The resumable folder of a run: settings, seals, parts, lock; the machine of a run, and whether it is quiet."""

import contextlib
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from importlib import metadata
from multiprocessing import active_children
from pathlib import Path
from statistics import median
from typing import Any

from selfjudge.errors import SelfJudgeError
from selfjudge.store.files import locked, read_json, sha256, write_json
from selfjudge.store.schema import RunRecord, Seal

SPREAD = 0.35  # times of the same work that differ by a larger share of their median are not reliable
OTHERS = 0.12  # share of the processors that other programs may use beside work that takes all the rest
FULL = 0.85  # share of the processors in use from which programs wait for each other
SHORTEST = 0.5  # seconds below which neither the system's counts nor differing times say anything
Usage = tuple[float, float, float]  # seconds: clock, work on our processors, this process and its children


@cache
def versions(*more: str) -> Mapping[str, str]:
    """Versions of the packages that decide a result, and of `more`, where they are installed; read once."""
    known = {"python": platform.python_version()}
    for name in ("selfjudge", "torch", "transformers", "safetensors", *more):
        with contextlib.suppress(metadata.PackageNotFoundError):
            known[name] = metadata.version(name)
    return known


def machine() -> dict[str, Any]:
    """The machine that figures are measured on."""
    described: dict[str, Any] = {"system": platform.system(), "arch": platform.machine(), "cpus": os.cpu_count()}
    if model := re.search(r"^model name:(.*)", _output("lscpu"), re.IGNORECASE | re.MULTILINE):
        described["cpu"] = model[1].strip()
    if (torch := sys.modules.get("torch")) is not None:
        described["threads"] = torch.get_num_threads()
        if torch.cuda.is_available():
            described["gpu"] = torch.cuda.get_device_name()
    return described


def measured_on(*packages: str) -> dict[str, Any]:
    """The head of every file of figures: machine, versions (of these packages as well), date and commit."""
    commit = _output("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD") or None
    date = time.strftime("%Y-%m-%d", time.gmtime())
    return {"machine": machine(), "versions": {**versions(*packages)}, "date": date, "commit": commit}


def describe_machine(header: Mapping[str, Any]) -> str:
    """Processor and versions of such a head, in a few words."""
    machine, versions = header["machine"], header["versions"]
    processor = machine.get("gpu") or machine.get("cpu", machine["arch"])
    return f"{processor}, {machine['cpus']} cores, torch {versions['torch']}, transformers {versions['transformers']}"


def provenance(**extra: Any) -> dict[str, Any]:
    """The content of `run.json`: who made a folder, when, and on what."""
    return {"argv": sys.argv, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **measured_on(), **extra}


@cache
def _output(*command: str) -> str:
    """The output of another program, run once; empty where it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def keep_settings(file: Path, now: Mapping[str, Any], *, free: Collection[str] = ()) -> dict[str, Any]:
    """Write or return a folder's first settings; other settings, except `free` ones, are an error that names them."""
    now = json.loads(json.dumps(now))  # as JSON has them: lists for tuples
    if not file.is_file():
        write_json(file, now)
        return dict(now)
    then = read_json(file)
    if keys := [key for key in now if key not in free and then.get(key) != now[key]]:
        raise SelfJudgeError(f"{file.parent} was begun with another {', '.join(keys)}: name another `out` or remove it")
    return then


def refuse_foreign(folder: Path, own: Collection[str] = ()) -> None:
    """Refuse a folder that holds anything but files of the names in `own`; hidden files do not count."""
    try:
        if folder.exists() and not folder.is_dir():
            raise SelfJudgeError(f"{folder} is a file: name a folder with `out`")
        if above := [parent for parent in folder.parents if parent.is_file()]:
            raise SelfJudgeError(f"cannot use {folder} as a folder: {above[0]} is a file")
        names = sorted(file.name for file in folder.iterdir()) if folder.is_dir() else []
    except OSError as error:
        raise SelfJudgeError(f"cannot use {folder} as a folder: {error}") from None
    if foreign := [name for name in names if name not in own and not name.startswith(".")]:
        raise SelfJudgeError(f"{folder} holds other files ({foreign[0]} …): name a new or empty folder with `out`")


class RunFolder:
    """The folder of one run, filled part by part; after a kill at any moment the run goes on where it was.

        settings.json     what the run was begun with: other settings are refused
        work/NAME.json    the seal of the part NAME: checksums of its files, what it was made from, what it yields
        run.json          provenance, written when the run ends
        `done`            the file that is written last, so that its existence means done; run.json if not named
        .lock             locked while a process works here; the kernel unlocks it when the process ends

    A run calls `claim`, then within `working`: `result`; for each part `sealed`, and if that is None makes its files
    and calls `seal`; `finish` at the end. A missing, a crashed and a finished folder take the same path."""

    def __init__(self, path: Path, *, done: str = "run.json", schema: Any = RunRecord) -> None:
        """`schema`: of the file `done`."""
        self.path, self.work, self.done, self.schema = path, path / "work", done, schema

    @property
    def begun(self) -> bool:
        return (self.path / "settings.json").is_file()

    def claim(self, *, resume: bool = True, own: Collection[str] = ()) -> bool:
        """Whether a run was begun in the folder, which is refused without `resume`, as is a folder with files of others
        than `own` where none was begun. Writes nothing."""
        if not self.begun:
            refuse_foreign(self.path, own)
        elif not resume:
            raise SelfJudgeError(f"{self.path} was begun already: go on with `resume`, or name another `out`")
        return self.begun

    @contextlib.contextmanager
    def working(self, settings: Mapping[str, Any], *, free: Collection[str] = ()) -> Iterator[dict[str, Any]]:
        """Hold the folder's lock; returns its first settings (`keep_settings`). A second process is refused. A file
        that cannot be written is a one-line error; what is sealed stays."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with locked(self.path / ".lock", refuse=f"another process works on {self.path}"):
                yield keep_settings(self.path / "settings.json", settings, free=free)
        except OSError as error:
            kept = "; what is done is kept, to be resumed" if self.begun else ""
            raise SelfJudgeError(f"cannot write {self.path}: {error}{kept}") from None

    def seal(self, name: str, files: Iterable[str], made_from: str = "", **yields: Any) -> dict[str, Any]:
        """Seal a part whose files, named relative to the folder, are whole; `yields` is for later parts to know."""
        seal = {"files": {file: sha256(self.path / file) for file in files}, "made_from": made_from, **yields}
        write_json(self.work / f"{name}.json", seal)
        return seal

    def sealed(self, name: str, made_from: str = "", schema: Any = Seal) -> dict[str, Any] | None:
        """The seal of a part, if it was made from just that and all its files are intact; else it must be made."""
        try:
            seal = read_json(self.work / f"{name}.json", schema)
        except SelfJudgeError:
            return None
        return seal if seal["made_from"] == made_from and self.intact(seal["files"]) else None

    def intact(self, files: Mapping[str, str]) -> bool:
        """Whether every file is there, with its checksum."""
        return all((self.path / name).is_file() and sha256(self.path / name) == files[name] for name in files)

    def result(self) -> dict[str, Any] | None:
        """The content of the file that is written last; None while the run is not finished."""
        file = self.path / self.done
        return read_json(file, self.schema) if file.is_file() else None

    def reopen(self, settings: Mapping[str, Any] | None = None) -> None:
        """Call a run unfinished again; free `settings` take their new values."""
        (self.path / self.done).unlink(missing_ok=True)
        if settings is not None:
            write_json(self.path / "settings.json", settings)

    def finish(self, result: Mapping[str, Any] | None = None, **about: Any) -> None:
        """Write `run.json` (provenance and `about`) and then, where it is another file, `done` with the result."""
        write_json(self.path / "run.json", provenance(**about))
        if self.done != "run.json":
            write_json(self.path / self.done, result)


class LoadWatch:
    """Watches the processors from its construction on: those that this process may use, by the system's own counts."""

    def __init__(self, *, often: bool = False) -> None:
        """Of those made `often`, as for every answer of a server, all together read the counts twice a second."""
        self._read = (lambda: _read_at(time.monotonic() // SHORTEST)) if often else _read_clocks
        self._begun = self._read()

    @property
    def usage(self) -> Usage:
        """What was used since the beginning."""
        wall, busy, own = (now - then for now, then in zip(self._read(), self._begun, strict=True))
        return wall, busy, own

    def describe(self, turns: Iterable[Sequence[float]] = ()) -> str:
        """`describe_load` of the time since the beginning."""
        return describe_load([self.usage], turns)


def describe_load(usages: Iterable[Usage], turns: Iterable[Sequence[float]] = ()) -> str:
    """Why times measured during these usages are unreliable, in one sentence; empty where they are reliable. Each
    sequence of `turns` has the seconds of the same work, repeated."""
    wall, busy, own = (sum(column) for column in zip((0.0, 0.0, 0.0), *usages, strict=True))
    seconds, cores = max(wall, SHORTEST), _count_cores()
    used, others = busy / seconds, max(0.0, busy - own) / seconds
    spread = max((0.0, *((max(each) - min(each)) / median(each) for each in turns if sum(each) >= SHORTEST)))
    reasons = []
    if wall >= SHORTEST and used > FULL * cores and others > OTHERS * cores:
        reasons.append(f"other programs took {others:.1f} of {cores} cores")
    if spread > SPREAD:
        reasons.append(f"times of the same answer differ by {spread:.0%}")
    return f"this machine is busy: speeds are not reliable ({', '.join(reasons)})" if reasons else ""


def _count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _read_clocks() -> Usage:
    """The clocks now; without Linux's counts of all work it is our own."""
    own = busy = sum(os.times()[:4])
    with contextlib.suppress(OSError):
        second = os.sysconf("SC_CLK_TCK")
        for child in active_children():  # an engine in a process of its own; those that ended are in our own times
            stat = Path(f"/proc/{child.pid}/stat").read_text("utf-8").rpartition(")")[2].split()
            own += sum(map(int, stat[11:15])) / second
        ours = {f"cpu{number}" for number in os.sched_getaffinity(0)} if hasattr(os, "sched_getaffinity") else set()
        lines = [line.split() for line in Path("/proc/stat").read_text("utf-8").splitlines()]
        # user, nice, system, irq, softirq, steal: neither idle nor waiting for a disk
        busy = sum(int(line[i]) for line in lines if line[0] in ours for i in (1, 2, 3, 6, 7, 8)) / second
    return time.monotonic(), busy, own


_read_at = lru_cache(1)(lambda turn: _read_clocks())  # the clocks, as they were first read in a turn
