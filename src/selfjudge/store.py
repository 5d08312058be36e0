"""Files: where the cache lives, atomic writes, locks that die with their process, checksums, provenance."""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfjudge.errors import SelfJudgeError

if TYPE_CHECKING:
    from numpy.typing import NDArray


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
    digest, found = hashlib.sha256(), sorted(files)
    for path in found:
        size = path.stat().st_size
        digest.update(f"{size}:".encode())
        with path.open("rb") as file:
            digest.update(file.read(1 << 20))
            file.seek(max(0, size - (1 << 20)))
            digest.update(file.read(1 << 20))
    return digest.hexdigest() if found else ""


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


def read_json(path: Path) -> Any:
    """Read a JSON file; unreadable or malformed content is a one-line error."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SelfJudgeError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise SelfJudgeError(f"cannot read {path}: {error}") from None


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file whole or not at all."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        _readable(Path(name))
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
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


def refuse_other(folder: Path, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on in a folder that was begun with other settings."""
    if differing := [key for key in now if then.get(key) != now[key]]:
        raise SelfJudgeError(f"{folder} was begun with another {', '.join(differing)}: name another --out or remove it")


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """A jsonl file, gzipped if its name says so, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as raw:
            packed = gzip.GzipFile("", "wb", fileobj=raw, mtime=0) if path.suffix == ".gz" else raw
            for row in rows:
                packed.write((json.dumps(row, ensure_ascii=False) + "\n").encode())
            if packed is not raw:
                packed.close()
            raw.flush()
            os.fsync(raw.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a jsonl file, plain or gzipped, one at a time."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise SelfJudgeError(f"cannot read {path}: {error}") from None


def _readable(path: Path) -> None:
    """The usual rights of a new file: temporary files come with the owner's alone."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def write_tensors(path: Path, arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, Any] | None = None) -> None:
    """Write a safetensors file whole or not at all; `metadata` comes back from `read_tensors` as it was."""
    from safetensors.numpy import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        save_file(dict(arrays), partial, {"json": json.dumps(metadata or {})})
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        _readable(partial)
        os.replace(partial, path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) or type(error).__name__ == "SafetensorError":
            raise SelfJudgeError(f"cannot write {path}: {error}") from None
        raise


def read_tensors(path: Path, names: Iterable[str] | None = None) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """What `write_tensors` wrote, or the arrays of these names; a file that is missing or damaged is a one-line error."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            metadata: dict[str, Any] = json.loads((file.metadata() or {}).get("json", "{}"))
            return {name: file.get_tensor(name) for name in names or file.keys()}, metadata
    except (OSError, ValueError, SafetensorError) as error:
        raise SelfJudgeError(f"cannot read {path}: {error}") from None


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
    found = {"python": platform.python_version()}
    for name in ("selfjudge", "torch", "transformers", "safetensors", "scikit-learn"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


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
