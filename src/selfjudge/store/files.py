"""Files: the cache folder, atomic writes, strict reading, locks, checksums; the hub, asked only where it answers."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import gzip
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from selfjudge.errors import SelfJudgeError, first_line
from selfjudge.store.schema import conform

if TYPE_CHECKING:
    from jinja2 import Environment
    from numpy.typing import NDArray

MAX_DOCUMENT = 64 << 20  # largest size of a JSON file, or of a line of rows, in bytes
MAX_UNPACKED = 1 << 30
"""Largest size of a gzipped file once unpacked, in bytes: a few kilobytes can unpack to more than the memory holds."""
MAX_DEPTH = 64  # most levels of lists and objects inside one another
TOO_LARGE = "it is too large"
HUB_PATIENCE = 4.0  # seconds in which the hub must answer; its own client tries for half a minute
HUB_VALID = 30.0  # seconds for which the hub's answer, or its silence, is believed
_last: tuple[float, str | None] = (-HUB_VALID, None)  # when the hub was asked, and why it did not answer


def home() -> Path:
    """The cache folder: `SELFJUDGE_HOME`, else `selfjudge` below the XDG cache folder."""
    if explicit := os.environ.get("SELFJUDGE_HOME"):
        return Path(explicit).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "selfjudge"


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(files: Iterable[Path]) -> str:
    """sha256 of size, first and last MiB of each file, which tells checkpoints apart quickly; empty without files."""
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
    """Read a JSON file that must be what `schema` says (see schema.py); anything else is a one-line error."""
    try:
        with _open_regular(path) as file:
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
    """A JSON value. What the standard does not allow is a ValueError; so are keys that an object has twice, numbers too
    large to compute with, unpaired surrogates, and values nested deeper than MAX_DEPTH."""
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error.msg}, character {error.pos + 1})") from None
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_too_deep(value):
        raise ValueError("it is nested too deep")
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError("it holds half a character") from None
    return value


def _float(text: str) -> float:
    """A number, which must be finite."""
    number = float(text)
    if not isfinite(number):
        raise ValueError(f"it holds {text[:20]}, which is not a finite number")
    return number


def _int(text: str) -> int:
    """A whole number of at most 20 digits."""
    if len(text) > 20:
        raise ValueError(f"it holds a number that is too large ({text[:20]}…)")
    return int(text)


def _dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, whose keys must differ."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = Counter(name for name, _ in pairs)
        raise ValueError(f"it holds the key {max(names, key=names.__getitem__)[:60]!r} twice")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_dict, parse_float=_float, parse_int=_int, parse_constant=_float)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _is_too_deep(value: Any) -> bool:
    """Whether lists and objects are nested more than MAX_DEPTH times."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inner = (i for outer in level for i in (outer.values() if isinstance(outer, dict) else outer))
        if not (level := [item for item in inner if isinstance(item, dict | list)]):
            return False
    return True


def _open_regular(path: Path) -> BinaryIO:
    """Open a file for reading; pipes and devices, which may never end, are refused."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("it is not a file")
    return path.open("rb")


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file whole or not at all."""
    write_text(path, dump(value, indent=2) + "\n")


def dump(value: Any, **options: Any) -> str:
    """JSON text; non-finite numbers become null."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, **options)
    except ValueError:
        return json.dumps(_without_non_finite(value), ensure_ascii=False, **options)


def _without_non_finite(value: Any) -> Any:
    """The value with None in place of numbers that are not finite."""
    if isinstance(value, Mapping):
        return {key: _without_non_finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_non_finite(inner) for inner in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    with whole(path) as partial:
        partial.write_text(text, encoding="utf-8")


def markdown_table(head: Sequence[str], rows: Iterable[Iterable[object]], align: str = "") -> str:
    """A GitHub table of escaped cells, without a final line end. `align` has a letter for each column: `l` for text,
    `r` for numbers. By default only the first column is text."""
    align = align or "l" + "r" * (len(head) - 1)
    ruler = ["---:" if side == "r" else "---" for side in align]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in (head, ruler, *rows))


def make_templates(**options: Any) -> Environment:
    """Templates of jinja's, whose own lines leave no blanks; a name in them that is not given is an error."""
    from jinja2 import Environment, StrictUndefined  # most commands need no template

    return Environment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined, **options)  # noqa: S701


def fill_template(file: Path, **values: Any) -> str:
    """A text from a template."""
    return make_templates(keep_trailing_newline=True).from_string(file.read_text("utf-8")).render(**values)


def read_asset(package: str, name: str) -> str:
    """A text file of the folder `assets` of a package."""
    return resources.files(package).joinpath("assets", name).read_text(encoding="utf-8")


def hash_source(text: str) -> str:
    """The hash by which a content policy allows a script or a style sheet."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A hidden file that replaces `path` when the block ends; after an error nothing of it is left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)  # it may be a link to another file
    try:
        yield partial
        mask = os.umask(0)  # the usual permissions of a new file: safetensors gives them to the owner alone
        os.umask(mask)
        partial.chmod(0o666 & ~mask)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """A new folder that is removed when the block ends. What a kill left of it is removed first."""
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def whole_tensors(path: Path) -> Iterator[Path]:
    """As `whole`, for safetensors: it begins files under random names, which a kill would leave behind."""
    with whole(path) as partial, scratch(path.with_name(f".{path.name}.making")) as making:
        yield making / path.name
        os.replace(making / path.name, partial)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """A jsonl file, gzipped if its name says so, whole or not at all."""
    with whole(path) as partial, partial.open("wb") as raw:
        packed = gzip.GzipFile("", "wb", fileobj=raw, mtime=0) if path.suffix == ".gz" else contextlib.nullcontext(raw)
        with packed as file:
            for row in rows:
                file.write((dump(row) + "\n").encode())


def read_rows(path: Path, schema: Any = dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of a jsonl file, plain or gzipped, one at a time; each must be what `schema` says."""
    number = 0
    try:
        with _open_regular(path) as raw:
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
        raise SelfJudgeError(f"cannot read {path}{f', line {number}' if number else ''}: {error}") from None


def write_tensors(path: Path, arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, Any] | None = None) -> None:
    """Write a safetensors file whole or not at all; `metadata` comes back from `read_tensors` as it was."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        with whole_tensors(path) as file:
            save_file(dict(arrays), file, {"json": dump(metadata or {})})
    except (OSError, SafetensorError) as error:
        raise SelfJudgeError(f"cannot write {path}: {error}") from None


def read_tensors(path: Path, names: Iterable[str] | None = None) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """What `write_tensors` wrote, or the arrays of these names; a missing or damaged file is a one-line error."""
    from safetensors import SafetensorError, safe_open

    try:
        with _open_regular(path), safe_open(path, "numpy") as file:
            metadata = parse_json((file.metadata() or {}).get("json", "{}"))
            arrays = {name: file.get_tensor(name) for name in names or file.keys()}
    except (OSError, ValueError, TypeError, AttributeError, SafetensorError) as error:  # numpy lacks some dtypes
        raise SelfJudgeError(f"cannot read {path}: {error}") from None
    return arrays, conform(metadata, dict[str, Any], path)


@contextlib.contextmanager
def locked(path: Path, waiting: str | None = None, refuse: str | None = None) -> Iterator[None]:
    """Hold an exclusive lock on `path`. The kernel frees it when the process ends, even by kill -9. Where another
    process holds it, wait and say `waiting`, or fail with the error `refuse`."""
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


def check_page(out: Path) -> None:
    """Refuse what cannot be the file of an HTML page."""
    if out.suffix.casefold() not in (".html", ".htm"):
        raise SelfJudgeError(f"`out` names the page, such as report.html, not {out}")
    if out.is_dir():
        raise SelfJudgeError(f"{out} is a folder: `out` names the page, such as report.html")


def unreachable() -> str | None:
    """Why the hub does not answer; None if it does, or must not be asked (HF_HUB_OFFLINE)."""
    global _last
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return None
    if time.monotonic() - _last[0] >= HUB_VALID:
        reason = None
        try:
            get_session().head(constants.ENDPOINT, timeout=HUB_PATIENCE)
        except Exception as error:  # whatever a proxy, a resolver or a certificate does
            reason = f"{constants.ENDPOINT} cannot be reached: {first_line(error)}"
        _last = time.monotonic(), reason
    return _last[1]


def hub_options() -> dict[str, Any]:
    """Options of a look-up: where the hub does not answer, only local copies are looked at."""
    return {} if unreachable() is None else {"local_files_only": True}


@contextlib.contextmanager
def quiet_hub() -> Iterator[None]:
    """Silence the messages of the hub's client: what went wrong is said once, by whoever asked it."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
