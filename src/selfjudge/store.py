"""Files: where the cache lives, atomic writes, locks, checksums, provenance, and the resumable folder of a run."""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import json
import logging
import os
import platform
import re
import stat
import subprocess
import sys
import time
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from importlib import metadata
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from selfjudge.artefacts import RunRecord, Seal, SettingsFile
from selfjudge.errors import SelfJudgeError
from selfjudge.schema import conform

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_DOCUMENT = 64 << 20
"""Bytes of a JSON file, or of a line of rows."""
MAX_UNPACKED = 1 << 30
"""Bytes that a gzipped file may hold: a few kilobytes can unpack to more than a memory has."""
MAX_DEPTH = 64
TOO_LARGE = "it is too large"


def home() -> Path:
    """The cache folder: `SELFJUDGE_HOME`, else `selfjudge` below the XDG cache folder."""
    if explicit := os.environ.get("SELFJUDGE_HOME"):
        return Path(explicit).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "selfjudge"


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(files: Iterable[Path]) -> str:
    """sha256 over size, first and last MiB of each file: tells checkpoints apart without reading all of them.

    Empty where there is no file: nothing is known then.
    """
    digest, paths = hashlib.sha256(), sorted(files)
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{size}:".encode())
        with path.open("rb") as file:
            digest.update(file.read(1 << 20))
            file.seek(max(0, size - (1 << 20)))
            digest.update(file.read(1 << 20))
    return digest.hexdigest() if paths else ""


def weight_files(reference: str | Path) -> list[Path]:
    """The weight files of a checkpoint folder, or of a hub model as far as they are in the local hub cache."""
    folder = Path(reference)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(str(reference), "config.json")
        if not isinstance(config, str):
            return []
        folder = Path(config).parent
    return [*folder.glob("*.safetensors")] or [*folder.glob("*.bin")]


def read_json(path: Path, schema: Any = dict[str, Any]) -> dict[str, Any]:
    """Read a JSON file that must be what `schema` says (see artefacts.py); anything else is a one-line error."""
    try:
        with _regular(path) as file:
            raw = file.read(MAX_DOCUMENT + 1)
        if len(raw) > MAX_DOCUMENT:
            raise ValueError(TOO_LARGE)
        value = parse_json(raw.decode("utf-8"))
    except FileNotFoundError:
        raise SelfJudgeError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise SelfJudgeError(f"cannot read {path}: {error}") from None
    record: dict[str, Any] = conform(value, schema, path)
    return record


def parse_json(text: str) -> Any:
    """A value of JSON as the standard has it: all else is a ValueError.

    So are numbers too large to compute with, halves of characters, and what is nested deeper than any file of ours.
    """
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error.msg}, character {error.pos + 1})") from None
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _nested(value):
        raise ValueError("it is nested too deep")
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError("it holds half a character") from None
    return value


def _number(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError(f"it holds a number that is too large ({text[:20]})")
    return number


def _whole_number(text: str) -> int:
    if len(text) > 20:
        raise ValueError(f"it holds a number that is too large ({text[:20]}…)")
    return int(text)


def _no_number(text: str) -> None:
    raise ValueError(f"it holds {text}, which is not a number")


_DECODER = json.JSONDecoder(parse_float=_number, parse_int=_whole_number, parse_constant=_no_number)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _nested(value: Any) -> bool:
    """Whether lists and objects lie in one another more than MAX_DEPTH times."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inner = (i for outer in level for i in (outer.values() if isinstance(outer, dict) else outer))
        if not (level := [item for item in inner if isinstance(item, dict | list)]):
            return False
    return True


def _regular(path: Path) -> BinaryIO:
    """A file, open to be read; pipes and devices, which may never end, are refused."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("it is not a file")
    return path.open("rb")


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file whole or not at all."""
    write_text(path, _dumped(value, indent=2) + "\n")


def _dumped(value: Any, **options: Any) -> str:
    """JSON text; null for numbers that JSON does not have."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, **options)
    except ValueError:
        return json.dumps(_finite(value), ensure_ascii=False, **options)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    with whole(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A hidden file that takes the place of `path` when the block ends; after an error nothing of it is left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)  # what is there may be a link to somewhere else
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def quiet_hub() -> Iterator[None]:
    """Silence the hub's own words on every retry: what went wrong is said once, by whoever asked it."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """A jsonl file, gzipped if its name says so, whole or not at all."""
    with whole(path) as partial, partial.open("wb") as raw:
        packed = gzip.GzipFile("", "wb", fileobj=raw, mtime=0) if path.suffix == ".gz" else contextlib.nullcontext(raw)
        with packed as file:
            for row in rows:
                file.write((_dumped(row) + "\n").encode())


def read_rows(path: Path, schema: Any = dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of a jsonl file, plain or gzipped, one at a time; each must be what `schema` says."""
    number = 0
    try:
        with _regular(path) as raw:
            file: Any = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
            while line := file.readline(MAX_DOCUMENT + 1):
                number += 1
                if len(line) > MAX_DOCUMENT or (path.suffix == ".gz" and file.tell() > MAX_UNPACKED):
                    raise ValueError(TOO_LARGE)
                if text := line.decode("utf-8-sig" if number == 1 else "utf-8").strip():
                    yield conform(parse_json(text), schema, f"{path}, line {number}")
    except FileNotFoundError:
        raise SelfJudgeError(f"{path} does not exist") from None
    except (OSError, EOFError, ValueError, zlib.error) as error:
        place = f"{path}, line {number}" if number else path
        raise SelfJudgeError(f"cannot read {place}: {error}") from None


def write_tensors(path: Path, arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, Any] | None = None) -> None:
    """Write a safetensors file whole or not at all; `metadata` comes back from `read_tensors` as it was."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        with whole(path) as partial:
            save_file(dict(arrays), partial, {"json": _dumped(metadata or {})})
            mask = os.umask(0)  # the usual rights of a new file: safetensors gives the owner's alone
            os.umask(mask)
            partial.chmod(0o666 & ~mask)
    except (OSError, SafetensorError) as error:
        raise SelfJudgeError(f"cannot write {path}: {error}") from None


def read_tensors(path: Path, names: Iterable[str] | None = None) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """What `write_tensors` wrote, or the arrays of these names; a missing or damaged file is a one-line error."""
    from safetensors import SafetensorError, safe_open

    try:
        with _regular(path), safe_open(path, "numpy") as file:
            metadata = parse_json((file.metadata() or {}).get("json", "{}"))
            arrays = {name: file.get_tensor(name) for name in names or file.keys()}
    except (OSError, ValueError, TypeError, AttributeError, SafetensorError) as error:  # numpy has not all dtypes
        raise SelfJudgeError(f"cannot read {path}: {error}") from None
    return arrays, conform(metadata, dict[str, Any], path)


@contextlib.contextmanager
def locked(path: Path, waiting: str | None = None, refuse: str | None = None) -> Iterator[None]:
    """Hold an exclusive lock on `path`. The kernel frees it when the process ends, kill -9 included: no stale locks.

    Where another process holds it, this one waits and says `waiting`, or gives up with the error `refuse`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if refuse:
                raise SelfJudgeError(refuse) from None
            if waiting:
                print(waiting, file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def versions() -> dict[str, str]:
    """Versions of what decides a result."""
    known = {"python": platform.python_version()}
    for name in ("selfjudge", "torch", "transformers", "safetensors"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            known[name] = metadata.version(name)
    return known


def machine() -> dict[str, Any]:
    """What a figure was measured on."""
    described: dict[str, Any] = {"system": platform.system(), "arch": platform.machine(), "cpus": os.cpu_count()}
    model = [
        line.split(":", 1)[1].strip() for line in _output("lscpu").splitlines() if line.lower().startswith("model name")
    ]
    if model:
        described["cpu"] = model[0]
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        described["threads"] = torch.get_num_threads()
        if torch.cuda.is_available():
            described["gpu"] = torch.cuda.get_device_name()
    return described


def provenance(**extra: Any) -> dict[str, Any]:
    """Who made a folder: argv, commit, versions, machine, time."""
    return {
        "argv": sys.argv,
        "commit": _output("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD") or None,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": versions(),
        "machine": machine(),
        **extra,
    }


@cache
def _output(*command: str) -> str:
    """What another program says, asked once; nothing where it cannot be asked."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def refuse_other(folder: Path, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on in a folder that was begun with other settings; the error names those that differ."""
    if differing := [key for key in now if then.get(key) != now[key]]:
        raise SelfJudgeError(
            f"{folder} was begun with another {', '.join(differing)}: name another `out` or remove the folder"
        )


def keep_settings(
    file: Path, now: Mapping[str, Any], *, free: Collection[str] = (), defaults: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Write down what a folder is begun with, or refuse something else than `file` says; what `file` says.

    `free` settings may differ. `defaults` stand for settings that the version that wrote the file did not know.
    """
    now = json.loads(json.dumps(now))  # as JSON has them: lists for tuples
    if not file.is_file():
        write_json(file, now)
        return dict(now)
    then = {**json.loads(json.dumps(defaults or {})), **read_json(file, SettingsFile)}
    refuse_other(file.parent, then, {key: value for key, value in now.items() if key not in free})
    return then


def refuse_foreign(folder: Path, own: Collection[str] = ()) -> None:
    """Refuse a folder that holds anything but files of the names in `own`; hidden files do not count."""
    try:
        if folder.exists() and not folder.is_dir():
            raise SelfJudgeError(f"{folder} is a file: name a folder with `out`")
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
        .lock             held while a process works here; the kernel frees it when the process ends

    How a run uses it (a missing, a crashed and a finished folder take the same path):

        run = RunFolder(out, done="manifest.json")
        run.claim(resume=resume)                       # refuses what is not ours; nothing is written yet
        with run.working(settings):                    # lock and settings
            if (result := run.result()) is not None:
                return result
            for number, rows in enumerate(batches):
                name = f"answers-{number:05d}"
                if run.sealed(name, origin) is None:   # missing, damaged, or made from something else
                    write_rows(out / f"{name}.jsonl", make(rows))
                    run.seal(name, [f"{name}.jsonl"], origin, rows=len(rows))
            run.finish(result, settings=settings)
    """

    def __init__(self, path: Path, *, done: str = "run.json", schema: Any = RunRecord) -> None:
        """`schema`: of the file `done`."""
        self.path, self.work, self.done, self.schema = path, path / "work", done, schema

    @property
    def begun(self) -> bool:
        return (self.path / "settings.json").is_file()

    def claim(self, *, resume: bool = True, own: Collection[str] = ()) -> None:
        """Refuse a folder that somebody else's files are in, and, without `resume`, one that a run was begun in.

        Writes nothing. `own` names files that may stand in a folder where no run was begun.
        """
        if not self.begun:
            refuse_foreign(self.path, own)
        elif not resume:
            raise SelfJudgeError(f"{self.path} was begun already: go on with `resume`, or name another `out`")

    @contextlib.contextmanager
    def working(
        self, settings: Mapping[str, Any], *, free: Collection[str] = (), defaults: Mapping[str, Any] | None = None
    ) -> Iterator[dict[str, Any]]:
        """Hold the folder's lock; the settings that the run was begun with (see `keep_settings`).

        A second process is refused. A file that cannot be written is a one-line error; what is sealed stays.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with locked(self.path / ".lock", refuse=f"another process works on {self.path}"):
                yield keep_settings(self.path / "settings.json", settings, free=free, defaults=defaults)
        except OSError as error:
            raise SelfJudgeError(
                f"cannot write {self.path}: {error}; what is done is kept and the run can be resumed"
            ) from None

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
        """Is every file there, with its checksum? Seals of earlier versions name files relative to `work`."""
        for name, digest in files.items():
            file = next((file for file in (self.path / name, self.work / name) if file.is_file()), None)
            if file is None or sha256(file) != digest:
                return False
        return True

    def result(self) -> dict[str, Any] | None:
        """What the file says that is written last; None while the run is not finished."""
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
